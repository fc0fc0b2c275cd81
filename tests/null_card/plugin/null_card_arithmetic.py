"""The arithmetic of torch's own operators on the null card: each is computed by torch's kernel of the host.

The memory of the null card is the host's, so a tensor of the host over the same memory stands for each tensor of the
card. Torch calls `begin` at the end of `import torch`, as an entry point of the group torch.backends. Convolutions are
not among these operators: the C code executes cuDNN's plans of them.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import os
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import null_card_operators as operators
import null_card_order as order
import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

COST = 3e-6
"""Seconds that the card's clock counts for an operator."""


def begin() -> None:
    """Registers the kernels, unless NULL_CARD_ARITHMETIC is 0."""
    if os.environ.get("NULL_CARD_CUDNN") and os.environ.get("NULL_CARD_ARITHMETIC", "1") != "0":
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Warning only once for all operators", UserWarning)
            _KEPT.append(Arithmetic(ctypes.CDLL("libcuda.so.1")))


class Arithmetic:
    """The registered kernels; it lives as long as the process."""

    def __init__(self, card: ctypes.CDLL) -> None:
        self._card = card
        self._watch = order.begin(card)
        card.null_card_work.argtypes = ctypes.c_void_p, ctypes.c_double
        card.null_card_is_capturing.argtypes = (ctypes.c_void_p,)
        self._captured: dict[int, Callable[[int | None], None]] = {}
        self._numbers = itertools.count(1)
        self._replay = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)(
            lambda number, stream: self._captured[number](stream)
        )
        card.null_card_capture.argtypes = ctypes.c_void_p, type(self._replay), ctypes.c_void_p
        self._library = torch.library.Library("aten", "IMPL")
        copy = functools.partial(self._copy, torch.library.get_kernel("aten::copy_", "CUDA"))
        self._library.impl("copy_", copy, "CUDA", with_keyset=True, allow_override=True)
        backward = functools.partial(self._backward, torch.library.get_kernel("aten::convolution_backward", "CUDA"))
        self._library.impl("convolution_backward", backward, "CUDA", with_keyset=True, allow_override=True)
        for name in operators.names():
            base, _, overload = name.removeprefix("aten::").partition(".")
            operator = getattr(getattr(torch.ops.aten, base), overload or "default")
            work = operators.REPLACED.get(name, operator)
            random = torch.Tag.nondeterministic_seeded in operator.tags
            takes_generator = any(argument.name == "generator" for argument in operator._schema.arguments)
            kernel = functools.partial(
                self._run, operator, _Random(work, takes_generator) if random else _with_numbers(work, operator)
            )
            self._library.impl(name.removeprefix("aten::"), kernel, "CUDA", allow_override=True)

    def _copy(self, stock: Any, keyset: Any, to: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> Any:
        """Copies between host and card are torch's own: it asks for one on the card where formats or types differ."""
        if to.is_cuda and source.is_cuda:
            return self._run(*2 * [torch.ops.aten.copy_.default], to, source)
        return stock.call_boxed(keyset, to, source, non_blocking)

    def _backward(self, stock: Any, keyset: Any, *args: Any) -> Any:
        """Torch gives gradients of some convolutions to kernels that are no operators of their own."""
        _, x, weight, bias_sizes, stride, padding, dilation, transposed, output_padding, groups, _ = args
        geometry = stride, padding, dilation, transposed, output_padding, groups
        backend = torch._C._select_conv_backend(x, weight, None, *geometry, bias_sizes)
        if "Cudnn" in str(backend):
            return stock.call_boxed(keyset, *args)
        return self._run(*2 * [torch.ops.aten.convolution_backward.default], *args)

    def _run(self, operator: Any, work: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """An operator's result, which `work` computes; while a graph is captured, what will be its result."""
        given, shape = tree_flatten((args, kwargs))
        device = _device_of(given)
        stream = torch._C._cuda_getCurrentRawStream(device.index)
        is_captured = bool(self._card.null_card_is_capturing(stream))
        if is_captured and isinstance(work, _Random):
            raise RuntimeError("the null card draws no random numbers in a captured graph")
        # What is only captured must not change memory: it is tried on copies, for the shapes of its results.
        hosted = _Hosted(is_copied=is_captured)
        found, result_shape = tree_flatten(hosted.call(work, given, shape))
        made = [_on_card(value, hosted, device) for value in found]
        touch = self._watch.touching(operator, args, kwargs, made) if self._watch else _nothing
        if not is_captured:
            for value, one in zip(found, made, strict=True):
                _fill(one, value)
            self._card.null_card_work(stream, COST)
            touch(stream)
        else:
            self._captured[number := next(self._numbers)] = _again(work, given, shape, made, touch)
            self._card.null_card_capture(stream, self._replay, number)
        return tree_unflatten(made, result_shape)


_KEPT: list[Arithmetic] = []


def _nothing(stream: int | None) -> None:
    """Nobody watches what an operator uses."""


def _with_numbers(work: Callable[..., Any], operator: Any) -> Callable[..., Any]:
    """An operator that takes numbers for tensors, as torch hands on the tensors of no dim that it makes of them."""
    places = [n for n, a in enumerate(operator._schema.arguments) if str(a.type) in ("Tensor", "Optional[Tensor]")]

    @functools.wraps(work)
    def typed(*args: Any, **kwargs: Any) -> Any:
        if any(isinstance(args[place], bool | int | float | complex) for place in places if place < len(args)):
            others = [value for value in args if isinstance(value, torch.Tensor)]
            args = tuple(_number(v, others) if n in places and v is not None else v for n, v in enumerate(args))
        return work(*args, **kwargs)

    return typed


def _number(value: Any, others: Sequence[torch.Tensor]) -> torch.Tensor:
    """A tensor of no dim that does not change the type of a result any more than the number does."""
    if isinstance(value, torch.Tensor):
        return value
    made = torch.tensor(value)
    alike = [other for other in others if made.dtype.is_floating_point <= other.dtype.is_floating_point]
    if alike:
        return made.to(alike[0].dtype) if not alike[0].dim() else torch.tensor(value, dtype=_WIDE.get(made.dtype))
    return made


_WIDE = {torch.float32: torch.float64}
"""So that a number is rounded once, to the type that is computed in."""


class _Random:
    """An operator that draws numbers, from where the card's generator stands, which moves on."""

    def __init__(self, work: Callable[..., Any], takes_generator: bool) -> None:
        self._work, self._takes_generator = work, takes_generator

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        values = [*args, *kwargs.values()]
        card = next((value for value in values if isinstance(value, torch.Generator)), None)
        card = card or torch.cuda.default_generators[torch.cuda.current_device()]
        seed = hash((card.initial_seed(), card.get_offset())) % 2**63
        card.set_offset(card.get_offset() + 4)
        if self._takes_generator:
            args = tuple(value for value in args if not isinstance(value, torch.Generator))
            return self._work(*args, **{**kwargs, "generator": torch.Generator().manual_seed(seed)})
        with torch.random.fork_rng(devices=()):
            torch.default_generator.manual_seed(seed)
            return self._work(*args, **kwargs)


class _Hosted:
    """Tensors of the host for tensors of the card."""

    def __init__(self, is_copied: bool = False) -> None:
        self._is_copied = is_copied
        self._twins: dict[int, torch.Tensor] = {}
        self._originals: dict[int, torch.Tensor] = {}

    def call(self, work: Callable[..., Any], given: Sequence[Any], shape: Any) -> Any:
        args, kwargs = tree_unflatten([self.twin(value) for value in given], shape)
        return work(*args, **kwargs)

    def twin(self, value: Any) -> Any:
        if isinstance(value, torch.device):
            return torch.device("cpu") if value.type == "cuda" else value
        if not isinstance(value, torch.Tensor) or not value.is_cuda:
            return value
        if id(value) not in self._twins:
            twin = over(value)
            self._twins[id(value)] = twin = twin.clone() if self._is_copied else twin
            self._originals[id(twin)] = value
        return self._twins[id(value)]

    def original(self, twin: torch.Tensor) -> torch.Tensor | None:
        return self._originals.get(id(twin))


def over(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of the host over the memory of one of the card; an empty one may be given a size."""
    if not tensor.numel():
        return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype)
    storage = tensor.untyped_storage()
    hosted = torch._C._construct_storage_from_data_pointer(storage.data_ptr(), torch.device("cpu"), storage.nbytes())
    twin = torch.empty(0, dtype=tensor.dtype)
    return twin.set_(hosted, tensor.storage_offset(), tensor.size(), tensor.stride())


def _device_of(given: Sequence[Any]) -> torch.device:
    for value in given:
        if isinstance(value, torch.Tensor) and value.is_cuda:
            return value.device
    named = [value for value in given if isinstance(value, torch.device) and value.index is not None]
    return named[0] if named else torch.device("cuda", torch.cuda.current_device())


def _on_card(value: Any, hosted: _Hosted, device: torch.device) -> Any:
    """The tensor of the card that an operator returns: one that it was given, or a new one."""
    if not isinstance(value, torch.Tensor):
        return value
    original = hosted.original(value)
    if original is None:
        return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=device)
    return original if original.size() == value.size() else original.resize_(value.size())


def _fill(one: Any, value: Any) -> None:
    """Writes a result to the card where it is not there."""
    if isinstance(one, torch.Tensor) and one.is_cuda and one.data_ptr() != value.data_ptr():
        over(one).copy_(value)


def _again(
    work: Callable[..., Any], given: Sequence[Any], shape: Any, made: Sequence[Any], touch: Callable[[int | None], None]
) -> Callable[[int | None], None]:
    """The operator once more on the same memory, which a graph keeps; tensors it does not."""
    held = [_Hosted().twin(value) for value in given]
    ends = [over(one) if isinstance(one, torch.Tensor) and one.is_cuda else one for one in made]
    args, kwargs = tree_unflatten(held, shape)

    def again(stream: int | None) -> None:
        with torch.no_grad():
            for value, end in zip(tree_flatten(work(*args, **kwargs))[0], ends, strict=True):
                if isinstance(end, torch.Tensor) and end.data_ptr() != value.data_ptr():
                    end.copy_(value)
        touch(stream)

    return again
