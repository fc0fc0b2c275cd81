"""Lazy torch tensors, whose elements are still in a file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from distconv.reading.array import LazyArray
from distconv.reading.expression import Computed, Converted, Expression, Viewed
from distconv.reading.memory import Lazy, Memory, Step
from distconv.reading.view import View
from distconv.tensors.refusal import UnsupportedOperation

from_numpy = torch.from_numpy  # The function itself where it has no substitute.


HANDLERS: dict[str, Callable[..., Any]] = {}
"""The functions of torch that leave tensors lazy, by their names; NotImplemented where they do not."""


class LazyTensor(Tensor, Lazy):
    """A tensor on the CPU whose elements are read when they are needed.

    Slices, permutations, flips, casts, functions of single elements, stacking and concatenation give lazy tensors. All
    else reads the whole and goes on with the tensor that it is.
    """

    @staticmethod
    def __new__(cls, expression: Expression, memory: Memory | None = None, steps: tuple[Step, ...] = ()) -> LazyTensor:
        made: LazyTensor = Tensor._make_wrapper_subclass(
            cls, expression.shape, dtype=expression.dtype, device=torch.device("cpu")
        )
        made.look(expression, memory, steps)
        return made

    def __init__(self, *_: Any) -> None:
        super().__init__()

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(function, "__name__", "")
        if function in ABOUT or name in ABOUT_NAMES:
            with torch._C.DisableTorchFunctionSubclass():
                return function(*args, **kwargs)
        if args and is_lazy_tensor(args[0] if not isinstance(args[0], list | tuple) else next(iter(args[0]), None)):
            handler = HANDLERS.get(name)
            made = NotImplemented if handler is None else handler(name, *args, **kwargs)
            if made is not NotImplemented:
                return made
        if name in RESHAPING:
            raise UnsupportedOperation(
                f"Tensor.{name} of data that is read in parts; accepted: its result, not in place"
            )
        why = f"Tensor.{name}" if getattr(Tensor, name, None) is function else f"torch.{name}"
        plain = tree_map(lambda x: x.read(why) if type(x) is LazyTensor else x, (args, kwargs))
        result = function(*plain[0], **plain[1])
        if args and type(args[0]) is LazyTensor and result is args[0].present:  # in place
            return args[0]
        return result

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        why = str(function)
        plain = tree_map(lambda x: x.read(why) if type(x) is LazyTensor else x, (args, kwargs or {}))
        return function(*plain[0], **plain[1])

    def view_as_lazy(self, step: Step) -> Any:
        """The view of this tensor that `step` makes of any tensor; NotImplemented for what is more than a view.

        Torch says what the step does, with a tensor without elements, and raises its own errors.
        """
        alike = torch.empty(self.expression.shape, dtype=self.expression.dtype, device="meta")
        made = step(alike)
        if made.dtype != alike.dtype or made.untyped_storage()._cdata != alike.untyped_storage()._cdata:
            return NotImplemented
        view = View.of_strides(alike.shape, made.shape, made.stride(), made.storage_offset())
        if view is None:
            return NotImplemented
        return LazyTensor(Viewed(self.expression, view), self.memory, (*self.steps, step))


def from_array(array: LazyArray) -> LazyTensor:
    """The result of torch.from_numpy: a tensor of the same memory. TypeError for a dtype that torch lacks."""
    return LazyTensor(Converted(array.expression), array.memory, (*array.steps, from_numpy))


def is_lazy_tensor(value: Any) -> bool:
    """Whether it is a lazy tensor that has not been read."""
    return type(value) is LazyTensor and value.present is None


ABOUT: set[Any] = {
    getattr(Tensor, name).__get__
    for name in (
        *("shape", "dtype", "device", "ndim", "layout", "itemsize", "nbytes", "names", "is_sparse", "is_cuda"),
        *("is_cpu", "is_meta", "is_mps", "is_nested", "is_quantized", "is_leaf", "requires_grad", "grad", "grad_fn"),
        *("is_mkldnn", "is_xla", "is_xpu", "is_sparse_csr", "is_vulkan", "is_ipu", "is_mtia", "output_nr"),
    )
    if hasattr(getattr(Tensor, name, None), "__get__")
}
"""Questions that need no element."""

ABOUT_NAMES = {
    *("size", "dim", "numel", "nelement", "ndimension", "element_size", "is_floating_point", "is_complex", "__len__"),
    *("is_signed", "is_tensor", "is_inference", "get_device", "result_type", "is_shared", "is_pinned", "is_same_size"),
}

RESHAPING = {
    *("resize_", "resize_as_", "set_", "squeeze_", "unsqueeze_", "transpose_", "t_", "swapaxes_", "swapdims_"),
    *("as_strided_", "detach_"),
}


class Function:
    """A method of torch's tensors by its name: it can be sent to another process."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, *operands: Any, **options: Any) -> Any:
        return getattr(Tensor, self.name)(*operands, **options)

    def __repr__(self) -> str:
        return f"Tensor.{self.name}"


def meta(value: Any) -> Any:
    if isinstance(value, Expression):
        return torch.empty(value.shape, dtype=value.dtype, device="meta")
    return value.to("meta") if isinstance(value, Tensor) else value


def _operand(value: Any) -> Any:
    """An operand that keeps its value, whatever the program does with it later."""
    if is_lazy_tensor(value):
        return value.expression
    if type(value) is LazyTensor:
        value = value.present
    if isinstance(value, Tensor):
        return value.detach().clone()
    return value


def computed_lazily(name: str, args: Sequence[Any], options: dict[str, Any]) -> Expression | None:
    operands = [_operand(arg) for arg in args]
    for value in (*operands, *options.values()):
        if isinstance(value, Tensor) and (type(value) is not Tensor or value.device.type != "cpu"):
            return None
        if not isinstance(value, Expression | Tensor | int | float | complex | bool | torch.dtype | str | None):
            return None
    if "out" in options or any(isinstance(value, Tensor) for value in options.values()):
        return None
    result = getattr(Tensor, name)(*map(meta, operands), **options)
    if not isinstance(result, Tensor):
        return None
    return Computed(Function(name), operands, result.shape, result.dtype, f"{name}{options}", options)


def cast_tensor(expression: Expression, dtype: torch.dtype) -> Expression:
    return Computed(Function("to"), [expression, dtype], expression.shape, dtype, f"cast to {dtype}")
