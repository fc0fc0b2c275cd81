"""Finds the devices and libraries of this machine, and whether mucudnn works with them."""

from __future__ import annotations

import math
import platform
from typing import Any

import torch

import mucudnn
from mucudnn.convolution.problem import ConvProblem, Direction
from mucudnn.devices import Gpu, device_of
from mucudnn.planning.planner import Planner
from mucudnn.providers import providers_on
from mucudnn.providers.cudnn import state
from mucudnn.settings import MEMORY, SETTINGS, Settings
from mucudnn.timing.logbook import WRONG, Environment, settlements
from mucudnn.timing.store import Store


def examine(settings: Settings, store: Store) -> dict[str, Any]:
    """Everything that is found, as plain values in groups.

    The value of "shim" is "works", or else says in one line what is wrong.
    """
    environment = Environment.current(torch.device("cpu"))
    counts = store.counts()
    return {
        "versions": {
            "mucudnn": mucudnn.__version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "cuDNN": torch.backends.cudnn.version(),
        },
        "devices": [environment.device, *_accelerators()],
        "threads": environment.threads,
        "precision": environment.precision,
        "algorithms": list(Planner(settings, store).offers.providers(_SMALL)),
        "cudnn": state.found(_SMALL, providers_on),
        "outside": _outside(),
        "database": {
            "path": store.path,
            "kept": store.persistent,
            "convolutions": counts.problems,
            "launches": counts.launches,
        },
        "wrong": wrong_results(store),
        "settings": {
            name: {
                "value": "unlimited"
                if (value := getattr(settings, name)) == math.inf
                else value,  # JSON has no infinity
                "from": settings.sources[name],
                "variable": setting.variable,
            }
            for name, setting in SETTINGS.items()
        },
        "shim": check_shim(),
    }


def wrong_results(store: Store) -> list[str]:
    """The algorithms whose results were wrong, in words, as far as the database knows."""
    found = []
    for key, terms, faults in settlements(store):
        if terms == WRONG:
            problem = ConvProblem.from_launch_key(key, 1)
            of = f"{problem.direction} of {problem} on {key['device']} with {key['libraries']}"
            found += [f"{algorithm}: {of} computed {fault}" for algorithm, fault in faults.items()]
    return found


def check_shim() -> str:
    """Whether torch's convolutions pass through mucudnn with right results, and stay torch's own afterwards."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(_SMALL.input_shape, generator=generator)
    w = torch.randn(_SMALL.w_shape, generator=generator)
    expected = torch.nn.functional.conv2d(x, w, padding=_SMALL.padding)
    try:
        with mucudnn.patched(workspace_limit="64MiB", database=MEMORY, planning="ahead", progress="off") as session:
            result = torch.nn.functional.conv2d(x, w, padding=_SMALL.padding)
            records = session.records()
        torch.testing.assert_close(result, expected)
    except Exception as error:
        return f"fails: {type(error).__name__}: {' '.join(str(error).split())}"
    if not records:
        return "fails: torch's convolutions do not pass through mucudnn"
    if mucudnn.is_patched():
        return "fails: it stays installed"
    return "works"


_SMALL = ConvProblem.of_convolution(
    Direction.FORWARD, (2, 4, 12, 12), (4, 4, 3, 3), stride=(1, 1), padding=(1, 1), dilation=(1, 1)
)


def _outside() -> dict[str, int]:
    """Bytes of each GPU that are in use outside torch's allocator, once cuDNN is loaded."""
    try:
        return {
            f"{number}: {device_of(place).name}": device_of(place).outside() for number, place in enumerate(Gpu.all())
        }
    except RuntimeError:
        return {}


def _accelerators() -> list[str]:
    try:
        return [device_of(place).name for place in Gpu.all()]
    except RuntimeError:  # "cuDNN" says why
        return []
