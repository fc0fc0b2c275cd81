"""Asks a separate process for the partition of every layer, for a script or for a model that a program has made.

That process measures kernels and imagines jobs of many ranks, so it must not belong to a job itself.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from distconv import private_names, settings
from distconv.place import without_place

T = TypeVar("T")

CHOOSES = "distconv.performance.automatic"
"""The code that the process runs, after the check that torch has the private names that it needs."""


class NothingChosen(ValueError):
    """Why there is no choice: one line."""


def first_line(error: BaseException) -> str:
    """The first line of an error, with its type."""
    return ": ".join([type(error).__name__, *str(error).splitlines()[:1]])


@dataclass(frozen=True)
class Question:
    """The model or script for which a partition is to be chosen, and the ranks."""

    kind: str  # "script", "module" or "model".
    name: str  # The script's path, the module's name, or the file of a model.
    ranks: int  # The number of ranks of the job.
    local_ranks: int  # How many of them run on this machine.
    threads: int  # The number of threads of a rank.
    arguments: tuple[str, ...] = ()  # The script's command line.
    batch_norm: str = "global"  # The argument of `parallelize`.
    may_be_one: bool = False  # Whether the answer may be one process; not where there are ranks already.


@dataclass(frozen=True)
class Answer:
    """The chosen partition of every layer."""

    strategy: Mapping[str, str]  # {pattern of layer names: partition}; the last pattern is ``*``.
    sentence: str  # The choice in one line for people.
    shard_parameters: bool = False
    """Whether the job is to run with `--shard-parameters`: it was asked for, or nothing else fits a rank's memory."""


def ask(question: Question, **environment: str) -> Answer:
    """Starts a process that chooses, and waits for its answer.

    ``environment``: variables of that process in addition to those of this one.

    Raises:
        NothingChosen: with the reason.
    """
    surrounding = without_place(os.environ)
    surrounding.pop(settings.SETTINGS["partition"].variable, None)
    with tempfile.TemporaryDirectory(prefix="distconv-auto-") as folder:
        path = os.path.join(folder, "answer.json")
        done = subprocess.run(
            [sys.executable, "-m", "distconv.model.choosing", json.dumps(asdict(question)), path],
            env={**surrounding, "OMP_NUM_THREADS": str(question.threads), **environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            check=False,
        )
        if done.returncode:
            raise NothingChosen(f"the process that chooses a partition ended with exit code {done.returncode}")
        with open(path) as file:
            answer = json.load(file)
    if "refusal" in answer:
        raise NothingChosen(answer["refusal"])
    return Answer(**answer)


def environment_of_settings(channel_algorithm: str | None = None, fully: bool | None = None) -> dict[str, str]:
    """The environment variables that pass this job's settings to the process that chooses; arguments win over them."""
    given = {"channel_algorithm": channel_algorithm, "backend": None}
    values = {name: settings.value(name, argument) for name, argument in given.items()}
    values["shard_parameters"] = "on" if settings.value("shard_parameters", fully) else "off"
    return {settings.SETTINGS[name].variable: value for name, value in values.items() if value is not None}


def on_all_ranks(asking: Callable[[], T], group: Any = None) -> T:
    """The first rank's answer, on every rank of a group, by default of the job, each of which must call it. Raises
    NothingChosen on every rank."""
    import torch.distributed as dist

    box: list[Any] = [None]
    if dist.get_rank(group) == 0:
        try:
            box[0] = asking()
        except Exception as error:
            box[0] = error if isinstance(error, NothingChosen) else NothingChosen(first_line(error))
    if dist.get_world_size(group) > 1:
        dist.broadcast_object_list(box, group=group, group_src=0)
    answer = box[0]
    if isinstance(answer, NothingChosen):
        raise answer
    return answer


def ranks_here(group: Any = None) -> int:
    """How many ranks of a group, by default of the job, run on its first rank's machine; each of them must call it."""
    import platform

    import torch.distributed as dist

    nodes: list[str] = [""] * dist.get_world_size(group)
    if len(nodes) == 1:
        return 1
    dist.all_gather_object(nodes, platform.node(), group=group)
    return nodes.count(nodes[0])


def main(question: str, output: str) -> int:
    """The process that chooses: it writes an answer, or why there is none, to the file `output`."""
    try:
        private_names.require(private_names.FOLLOWED)
    except private_names.MissingName as error:
        Path(output).write_text(json.dumps({"refusal": str(error)}))
        return 0
    code: int = importlib.import_module(CHOOSES).main(question, output)
    return code


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
