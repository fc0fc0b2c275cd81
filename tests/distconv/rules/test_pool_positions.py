"""Positions of maxima, from a rank's box to the whole input's and back, by themselves and through Inductor."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._inductor.compile_fx import compile_fx
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.exc import InvalidCxxCompiler
from torch.fx.experimental.proxy_tensor import make_fx

from distconv.rules.pooling.operator import moved_positions

aten = torch.ops.aten


@given(st.data())
def test_positions_are_those_of_the_same_elements(data: st.DataObject) -> None:
    """Compared with a tensor of numbers, of which a box is cut."""
    whole = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=3))
    starts = [data.draw(st.integers(0, extent - 1)) for extent in whole]
    box = [data.draw(st.integers(1, extent - start)) for extent, start in zip(whole, starts, strict=True)]
    numbers = torch.arange(torch.Size(whole).numel()).view(whole)
    cut = numbers[tuple(slice(start, start + extent) for start, extent in zip(starts, box, strict=True))]
    here = torch.arange(cut.numel())
    there = moved_positions(here, box, starts, whole)
    assert torch.equal(there, cut.flatten())
    assert torch.equal(moved_positions(there, whole, [-start for start in starts], box), here)


WINDOW = [3, 3], [2, 2], [0, 0], [1, 1]
"""Kernel, stride, padding and dilation."""


def _backward(x: Tensor, offsets: Tensor, grad: Tensor) -> Tensor:
    """The gradient of a max pool of a box of 9 by 9 a row above and a column before an input of 20 by 20."""
    box, whole, starts = (9, 9), (20, 20), (-1, -1)
    kernel, *rest = WINDOW
    index = torch.ops.prims._low_memory_max_pool_offsets_to_indices(offsets, kernel, box, *rest)
    index = moved_positions(index, box, starts, whole, clamp=True)
    index = moved_positions(index, whole, [-start for start in starts], box)
    return aten.max_pool2d_with_indices_backward(grad, x, *WINDOW, False, index)


def test_inductor_compiles_positions_in_a_box_of_two_divided_dims() -> None:
    """A graph keeps where in its window each maximum was, and computes positions anew in backward."""
    generator = torch.Generator().manual_seed(0)
    x, grad = (torch.randn(1, 2, extent, extent, generator=generator) for extent in (9, 4))
    x[..., 0, :] = x[..., 0] = -torch.inf  # beyond the edges of the input
    offsets = torch.ops.prims._low_memory_max_pool_with_offsets(x, *WINDOW, False)[1]
    given = x, offsets, grad
    graph = make_fx(_backward, decomposition_table=select_decomp_table(), tracing_mode="fake")(*given)
    try:
        found = compile_fx(graph, list(given))(*given)
    except InvalidCxxCompiler:
        pytest.skip("there is no C++ compiler")
    index = aten.max_pool2d_with_indices(x, *WINDOW)[1]
    torch.testing.assert_close(found, aten.max_pool2d_with_indices_backward(grad, x, *WINDOW, False, index))
