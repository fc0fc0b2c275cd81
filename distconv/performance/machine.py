"""A machine in numbers: the speeds of its devices, its nodes and its network."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable
from dataclasses import MISSING, dataclass, field, fields
from importlib import resources
from pathlib import Path
from typing import Any, get_type_hints

from distconv.performance.events import Kernel
from mucudnn.settings import cache_folder
from mucudnn.sizes import parse_bytes

HERE = "here"
"""The name of the machine that `distconv calibrate` has measured."""

MACHINES = resources.files("distconv.performance") / "machines"
"""The files of the machines that ship with the package."""


class MachineError(ValueError):
    """A machine file that cannot be used: one line."""


@dataclass(frozen=True)
class DeviceSpeeds:
    """The device of one rank.

    Attributes:
        flops: multiplications and additions per second at the best.
        efficiency: the share of it that convolutions and matrix products reach, above 0, at most 1.
        bandwidth: bytes per second of its memory.
        kernel: seconds that a kernel takes at the least.
        memory: bytes.
    """

    flops: float
    efficiency: float
    bandwidth: float
    kernel: float
    memory: float


@dataclass(frozen=True)
class HostSpeeds:
    """The host that runs the program.

    Attributes:
        operator: seconds that it takes to run an operator on distributed tensors, or to launch a kernel or a
            collective, what the kernel itself takes apart.
        asynchronous: whether kernels run while the host goes on, as on a GPU.
        message: seconds that it takes beyond those of an operator to begin a message and to end its wait.
        carries: the share of a message's time for which a rank's own processor is busy with it, less than 1. While a
            message hides behind kernels, these take so much longer. 0 where adapters carry messages.
        slows: how many times as long a message takes while the rank computes, at least 1, where kernels are not
            asynchronous: those who carry messages wait for a core then. 1 where adapters carry them.
        cold: how much longer a measured kernel takes within a step than when it is run over and over, as a share of the
            time in which its operands pass through memory: there caches have other contents, and ranks wait for the
            slowest one.
    """

    operator: float
    asynchronous: bool
    carries: float = 0.0
    slows: float = 1.0
    cold: float = 0.0
    message: float = 0.0


@dataclass(frozen=True)
class Node:
    """Ranks that reach each other without the network.

    Attributes:
        ranks: how many.
        latency: seconds until a message from one to another begins to arrive.
        bandwidth: bytes per second that one of them sends, and receives.
        sums: how many times as long the bytes of an allreduce take as those of other messages.
        scatters: the same for a reduce-scatter.
        gathers: the same for an allgather.
    """

    ranks: int
    latency: float
    bandwidth: float
    sums: float = 1.0
    scatters: float = 1.0
    gathers: float = 1.0


@dataclass(frozen=True)
class NodeNetwork:
    """Between nodes.

    Attributes:
        latency: seconds until a message begins to arrive.
        bandwidth: bytes per second that a whole node sends, and receives.
        trees: whether allreduces use trees where that is faster, as in NCCL from 2.4 on; else rings alone.
        sums, scatters, gathers: as of a node.
    """

    latency: float
    bandwidth: float
    trees: bool = True
    sums: float = 1.0
    scatters: float = 1.0
    gathers: float = 1.0


@dataclass(frozen=True)
class Machine:
    """A cluster of equal nodes.

    Attributes:
        name: for people.
        doubt: why the figures of `distconv calibrate` are not to be trusted, in a line; "" where nothing is known.
        measured: gives the seconds of a kernel, None for one that it does not know; where it is None itself, and for
            such kernels, the roofline of the device does.
        threads: that a rank has where kernels are measured on a processor, so that those are measured which it takes.
    """

    name: str
    device: DeviceSpeeds
    host: HostSpeeds
    node: Node
    network: NodeNetwork
    doubt: str = ""
    measured: Callable[[Kernel], float | None] | None = field(default=None, compare=False)
    threads: int | None = field(default=None, compare=False)

    def kernel_seconds(self, kernel: Kernel) -> float:
        """Within a step. As measured, with caches that have other contents; else by the roofline: as long as arithmetic
        or memory takes, whichever is more, and what any kernel takes (Williams, Waterman and Patterson 2009)."""
        device = self.device
        seconds, moving = None if self.measured is None else self.measured(kernel), kernel.bytes / device.bandwidth
        if seconds is None:
            return device.kernel + max(kernel.flops / (device.flops * device.efficiency), moving)
        return seconds + self.host.cold * moving


def here() -> Path:
    """The file in which `distconv calibrate` keeps what it has measured: the machine of the name "here"."""
    return cache_folder() / "machine.toml"


def built_in() -> list[str]:
    """The names of the machines that ship with the package."""
    return sorted(entry.name.removesuffix(".toml") for entry in MACHINES.iterdir() if entry.name.endswith(".toml"))


def read_machine(source: str) -> Machine:
    """The machine of a file, or the one of this name that ships with the package.

    Raises:
        MachineError: one line, for a file that is not there, that lacks a field, or has one of another kind.
    """
    if source in built_in():
        return parse((MACHINES / f"{source}.toml").read_text(), f"machine {source}")
    if source == HERE and not here().is_file():
        raise MachineError("machine here: it has not been measured; run python -m distconv calibrate")
    path = here() if source == HERE else Path(source)
    if not path.is_file():
        raise MachineError(
            f"machine {source!r}: no such file; accepted: a TOML file, {HERE}, or {', '.join(built_in())}"
        )
    try:
        return parse(path.read_text(), f"machine {source!r}")
    except (OSError, UnicodeDecodeError) as error:
        raise MachineError(f"machine {source!r}: {error}") from None


def parse(text: str, where: str = "machine") -> Machine:
    """A machine from the text of a file. MachineError as :func:`read` raises it."""
    try:
        content = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise MachineError(f"{where}: {error}") from None
    hints = get_type_hints(Machine)
    kinds: dict[str, Any] = {field.name: hints[field.name] for field in fields(Machine) if field.compare}
    tables = {name: kind for name, kind in kinds.items() if kind is not str}
    unknown = sorted(set(content) - set(kinds))
    if unknown:
        raise MachineError(f"{where}: unknown field {unknown[0]}; accepted: {', '.join(kinds)}")
    name = content.get("name")
    if not isinstance(name, str) or not name:
        raise MachineError(f'{where}: name is missing; accepted: name = "..."')
    doubt = content.get("doubt", "")
    if not isinstance(doubt, str):
        raise MachineError(f"{where}: doubt = {doubt!r}; accepted: a text")
    read = {table: _table(kind, content.get(table), table, where) for table, kind in tables.items()}
    return Machine(name=name, doubt=doubt, **read)


def _table(kind: Any, content: Any, table: str, where: str) -> Any:
    if not isinstance(content, dict):
        raise MachineError(f"{where}: table [{table}] is missing")
    types = get_type_hints(kind)
    unknown = sorted(set(content) - set(types))
    if unknown:
        raise MachineError(f"{where}: unknown field {table}.{unknown[0]}; accepted: {', '.join(types)}")
    given = [field for field in fields(kind) if field.name in content or field.default is MISSING]
    return kind(**{field.name: _value(types[field.name], content, table, field.name, where) for field in given})


def _value(kind: type, content: dict[str, Any], table: str, name: str, where: str) -> Any:
    if name not in content:
        raise MachineError(f"{where}: {table}.{name} is missing")
    value, accepted = content[name], "a number above 0"
    if name == "memory" and isinstance(value, str):
        try:
            return float(parse_bytes(value))
        except ValueError as error:
            raise MachineError(f"{where}: {table}.{name}: {error}") from None
    if kind is bool:
        if isinstance(value, bool):
            return value
        accepted = "true or false"
    elif not isinstance(value, bool) and isinstance(value, int if kind is int else int | float):
        fits = (name not in ("efficiency", "carries") or value <= 1) and (name != "slows" or value >= 1)
        may_be_none = name in ("latency", "operator", "kernel", "carries", "cold", "message")
        if fits and (value > 0 or (value == 0 and may_be_none)):
            return kind(value)
        bounds = {"efficiency": "a number above 0, at most 1", "carries": "a number from 0 to 1"}
        accepted = {**bounds, "slows": "a number from 1 on"}.get(name, accepted)
    elif kind is int:
        accepted = "a whole number above 0"
    raise MachineError(f"{where}: {table}.{name} = {value!r}; accepted: {accepted}")


def machine_toml(machine: Machine) -> str:
    """The text of a machine file, as `parse` reads it."""
    lines = [f"name = {json.dumps(machine.name)}", *[f"doubt = {json.dumps(machine.doubt)}"] * bool(machine.doubt)]
    for table in ("device", "host", "node", "network"):
        lines += ["", f"[{table}]"]
        lines += [f"{name} = {_text(each)}" for name, each in vars(getattr(machine, table)).items()]
    return "\n".join([*lines, ""])


def _text(value: float | bool) -> str:
    return str(value).lower() if isinstance(value, bool) else f"{value:.4g}" if isinstance(value, float) else str(value)
