"""The convolutions of a network, its inputs, and the plan of each convolution."""

from __future__ import annotations

import copy
import importlib
import importlib.util
import itertools
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

from mucudnn.architectures import NAMED
from mucudnn.convolution.problem import ConvProblem, Direction
from mucudnn.planning.planner import Planner
from mucudnn.program import NotFound
from mucudnn.reporting.record import Record
from mucudnn.settings import Settings
from mucudnn.timing import progress
from mucudnn.timing.store import Store

ACCEPTED = f"module:attribute or file.py:attribute, such as torchvision.models:resnet18, or {', '.join(NAMED)}"
"""The forms of a network's name, for people."""


@dataclass(frozen=True)
class LayerCall:
    """A convolution in one direction, as a network calls it."""

    name: str  # Of the module that calls it first.
    problem: ConvProblem  # The convolution.
    count: int  # Calls in one training step.


def find(name: str) -> Callable[..., nn.Module]:
    """What makes the network of a name.

    ``name``: "package.module:attribute" or "path/file.py:attribute", the attribute a module or something callable that
    makes one; or a name of `NAMED`.

    Raises:
        NotFound: if there is none.
    """
    if name in NAMED:
        return NAMED[name].build
    place, _, attribute = name.rpartition(":")
    if not place:
        raise NotFound(f"no network {name}: accepted are {ACCEPTED}")
    module = _loaded(place) if place.endswith(".py") else _imported(place, name)
    if not hasattr(module, attribute):
        raise NotFound(f"no network {name}: {place} has no {attribute!r}")
    found: Any = getattr(module, attribute)
    if isinstance(found, nn.Module):
        return lambda: copy.deepcopy(found)
    if callable(found):
        return found
    raise NotFound(f"no network {name}: it is neither a torch.nn.Module nor something that makes one")


def usual_inputs(name: str, sample: Shape | None, batch: int | None) -> tuple[Shape, int | None]:
    """The shape of a network's first input and the number of samples, as given, else as the named network usually takes
    them. Raises NotFound where the shape is not known."""
    if sample is None and name not in NAMED:
        raise NotFound(f"the input of {name} is not known: give --input C,H,W")
    return sample or NAMED[name].sample, batch or (NAMED[name].batch if sample is None else None)


def without_data(build: Callable[[], nn.Module]) -> nn.Module:
    """The module on the meta device. Raises NotFound if `build` makes something else."""
    model = build()
    if not isinstance(model, nn.Module):
        raise NotFound(f"what was built is no torch.nn.Module but a {type(model).__name__}")
    return model.to("meta")


def convolutional(build: Callable[[], nn.Module], input_shape: tuple[int, ...]) -> list[LayerCall]:
    """The convolutions of one training step, in the order of the first call of each; nothing of it is computed.

    Args:
        build: makes the module.
        input_shape: (N, C, *spatial).

    Raises:
        NotFound: if `build` makes something else.
    """
    model = without_data(build)
    dtypes = [p.dtype for p in model.parameters() if p.is_floating_point()]
    sample = torch.empty(input_shape, dtype=dtypes[0] if dtypes else torch.float32, device="meta")
    with _named(model) as name, _Calls(name) as calls:
        model(sample)
    return [LayerCall(name, problem, count) for problem, (name, count) in calls.found.items()]


def measure(layers: list[LayerCall], settings: Settings, store: Store) -> list[Record]:
    """The records of all layers on this machine's processor, measured as far as the store does not have them."""
    planner, records = Planner(settings, store), []
    with progress.bar(len(layers), "convolutions", settings.progress) as advance:
        for layer in layers:
            records.append(planner.plan(planner.measurement(layer.problem)).record)
            advance()
    return records


class _Calls(TorchDispatchMode):
    """Notes every convolution beneath it, with the directions that training takes it in."""

    def __init__(self, name: Callable[[], str]) -> None:
        super().__init__()
        self.found: dict[ConvProblem, tuple[str, int]] = {}
        self._name = name

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.convolution.default:
            self._note(*args)
        return func(*args, **(kwargs or {}))

    def _note(self, input: torch.Tensor, weight: torch.Tensor, bias: object, *geometry: Any) -> None:
        stride, padding, dilation, transposed, output_padding, groups = geometry
        taken = (True, input.requires_grad, weight.requires_grad)
        for direction in itertools.compress(Direction, taken):
            problem = ConvProblem.of_convolution(
                direction,
                tuple(input.shape),
                tuple(weight.shape),
                stride=tuple(stride),
                padding=tuple(padding),
                dilation=tuple(dilation),
                groups=groups,
                transposed=transposed,
                output_padding=tuple(output_padding),
                dtype=str(input.dtype).removeprefix("torch."),
            )
            name, count = self.found.get(problem, (self._name(), 0))
            self.found[problem] = (name, count + 1)


@contextmanager
def _named(model: nn.Module) -> Iterator[Callable[[], str]]:
    """Gives the name of the module that runs at the moment."""
    names = {module: name for name, module in model.named_modules()}
    running: list[str] = []
    entering = register_module_forward_pre_hook(lambda module, _: running.append(names.get(module, "")))
    leaving = register_module_forward_hook(lambda *_: _forget(running), always_call=True)
    try:
        yield lambda: running[-1] if running else ""
    finally:
        entering.remove()
        leaving.remove()


def _forget(running: list[str]) -> None:
    # What a hook returns would replace the module's output.
    running.pop()


def _imported(place: str, name: str) -> ModuleType:
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        return importlib.import_module(place)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{place}.".startswith(f"{error.name}."):
            raise
        raise NotFound(f"no network {name}: there is no module {place}; accepted are {ACCEPTED}") from error


def _loaded(path: str) -> ModuleType:
    if not os.path.isfile(path):
        raise NotFound(f"no network in {path}: there is no such file")
    sys.path.insert(0, str(Path(path).resolve().parent))
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    assert spec is not None and spec.loader is not None, "a .py file has a loader"
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


Shape = tuple[int, ...]


def whole_inputs(model: nn.Module, given: Sequence[Shape], batch: int | None, usual: int) -> tuple[Shape, ...]:
    """The shapes of whole inputs, samples first: of so many samples as given, or as given, whichever the model takes.

    Args:
        model: on the meta device.
        given: the shape of each input, without samples or with them.
        batch: samples that were asked for, `None` for as many as `given` has, else `usual`.

    Raises:
        NotFound: one line, for a model that takes neither.
    """
    samples = tuple((batch or usual, *shape) for shape in given)
    refusals = [_refusal(model, samples)]
    if refusals[0] is None:
        return samples
    if all(batch in (None, shape[0]) for shape in given):
        refusals.append(_refusal(model, given))
        if refusals[-1] is None:
            return tuple(given)
    given_shapes = " and ".join(",".join(map(str, shape)) for shape in given)
    asked = "" if batch is None else f" with --batch {batch}"
    why = "; as the whole input: ".join(map(str, refusals))
    raise NotFound(f"{type(model).__name__} does not take --input {given_shapes}{asked}; as one sample: {why}")


def _refusal(model: nn.Module, shapes: Sequence[Shape]) -> str | None:
    """Why a model does not take inputs; `None` where it does."""
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    try:
        with torch.no_grad():
            model(*(torch.empty(shape, dtype=dtype, device="meta") for shape in shapes))
    except Exception as error:  # a model's own code may fail in any way
        return (str(error).splitlines() or [type(error).__name__])[0]
    return None
