"""Describes the cuDNN that this process has found, in sentences."""

from __future__ import annotations

from typing import Any

import torch

from mucudnn.convolution.problem import ConvProblem
from mucudnn.providers.cudnn.engines import Engines
from mucudnn.providers.cudnn.legacy import Legacy
from mucudnn.providers.cudnn.library import Unavailable, library, spelled
from mucudnn.providers.provider import Provider


def found(problem: ConvProblem, providers: Any) -> dict[str, Any]:
    """The path and version of libcudnn, and for a small problem on every GPU the algorithms offered and refused.

    ``providers``: `providers_on`.

    Returns:
        Plain values: "state" is a sentence; then "library" and "version" where there is one, and "gpus".
    """
    try:
        cudnn = library()
    except Unavailable as error:
        return {"state": f"not used: {error}"}
    described: dict[str, Any] = {"library": cudnn.path, "version": spelled(cudnn.version)}
    try:
        count = torch.cuda.device_count()
    except RuntimeError as error:
        return {"state": f"not used: {_line(error)}", **described}
    if not count:
        return {"state": "not used: torch finds no GPU", **described}
    described["gpus"] = [_on(torch.device("cuda", index), problem, providers) for index in range(count)]
    return {"state": "used on GPUs", **described}


def _on(device: torch.device, problem: ConvProblem, providers: Any) -> dict[str, Any]:
    try:
        served: tuple[Provider, ...] = providers(device)
        refused = {
            name: reason
            for provider in served
            if isinstance(provider, Engines | Legacy)
            for name, reason in provider.refused(problem).items()
        }
        named = [name for provider in served for name in provider.algorithms(problem)]
        return {
            "gpu": torch.cuda.get_device_name(device),
            "algorithms": [name for name in named if name not in refused],
            "refused": refused,
        }
    except RuntimeError as error:  # a driver that is too old, say
        return {"gpu": str(device), "algorithms": [], "refused": {"everything": _line(error)}}


def _line(error: BaseException) -> str:
    return str(error).splitlines()[0] if str(error) else repr(error)
