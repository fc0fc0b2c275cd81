"""Edges: own products and those at the edges make up what one process computes; in one process, one dim."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional, grad

from distconv.rules.convolution import edges as module
from distconv.rules.convolution.edges import Edges, around, edges
from distconv.settings.partition import ownership
from mucudnn.convolution.geometry import Interval, Window, intersect, length


@st.composite
def layers(draw: st.DrawFn) -> tuple[Window, int, int]:
    """A window, the extent of its inputs and a number of ranks; mostly such that edges can be told from the rest."""
    kernel, stride, dilation = (draw(st.integers(1, most)) for most in (5, 3, 3))
    reach = dilation * (kernel - 1) + 1
    padding = draw(st.one_of(st.just((reach - 1) // 2), st.integers(0, reach + 3)))
    ranks = draw(st.integers(2, 4))
    extent = draw(st.one_of(st.integers(1, 12).map(lambda rows: ranks * stride * rows), st.integers(1, 40)))
    return Window(kernel, stride, padding, dilation), extent, ranks


def derived(kernel: Window, extent: int, ranks: int) -> tuple[tuple[Edges, ...] | None, list[list[Interval]]]:
    """The edges, and by rank: what it owns of x and y, what of x its outputs read, and what of y reads its inputs."""
    made = kernel.outputs(extent)
    inputs, outputs = ownership(extent, ranks), ownership(made, ranks)
    reads = [intersect(kernel.inputs(interval), (0, extent)) for interval in outputs]
    readers = [intersect(kernel.readers(interval), (0, made)) for interval in inputs]
    return edges(kernel, (inputs, outputs), (reads, readers)), [inputs, outputs, reads, readers]


def cut(tensor: torch.Tensor, interval: Interval) -> torch.Tensor:
    return tensor[..., interval[0] : interval[1]]


@settings(max_examples=300)
@given(layers())
def test_the_parts_make_up_the_whole(layer: tuple[Window, int, int]) -> None:
    kernel, extent, ranks = layer
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "MOST_EDGE", 1)
        found, (inputs, outputs, reads, readers) = derived(kernel, extent, ranks)
    if found is None:
        return
    generator = torch.Generator().manual_seed(extent)
    x, w, dy = (
        torch.randn(1, 1, n, dtype=torch.float64, generator=generator)
        for n in (extent, kernel.kernel, kernel.outputs(extent))
    )
    geometry = {"stride": kernel.stride, "dilation": kernel.dilation}
    y = functional.conv1d(x, w, padding=kernel.padding, **geometry)
    dx = grad.conv1d_input(x.shape, w, dy, padding=kernel.padding, **geometry)
    dw = torch.zeros_like(w)
    for one, own_in, own_out, read, reader in zip(found, inputs, outputs, reads, readers, strict=True):
        own_x, own_dy = cut(x, own_in), cut(dy, own_out)
        own_y = functional.conv1d(own_x, w, padding=one.padding, **geometry)
        halos = (read[0], own_in[0]), (own_in[1], read[1])
        for edge, halo, at_end in zip(one.forward, halos, (False, True), strict=True):
            if edge is not None:
                assert length(halo) == edge.before + edge.after
                pieces = [cut(x, halo), cut(own_x, edge.rows)]
                made = functional.conv1d(torch.cat(pieces[::-1] if at_end else pieces, 2), w, **geometry)
                cut(own_y, edge.outputs).copy_(made)
        torch.testing.assert_close(own_y, cut(y, own_out))

        own_dx = grad.conv1d_input(own_x.shape, w, own_dy, padding=one.padding, **geometry)
        dw += grad.conv1d_weight(own_x, w.shape, own_dy, padding=one.padding, **geometry)
        halos = (reader[0], own_out[0]), (own_out[1], reader[1])
        for edge, halo in zip(one.backward, halos, strict=True):
            if edge is not None:
                rows = functional.pad(cut(own_x, edge.rows), (edge.before, edge.after))
                more = grad.conv1d_input(rows.shape, w, cut(dy, halo), **geometry)
                cut(own_dx, edge.rows).add_(more[..., edge.before : rows.shape[-1] - edge.after])
                dw += grad.conv1d_weight(rows, w.shape, cut(dy, halo), **geometry)
        torch.testing.assert_close(own_dx, cut(dx, own_in))
    torch.testing.assert_close(dw, grad.conv1d_weight(x, w.shape, dy, padding=kernel.padding, **geometry))


@pytest.mark.parametrize(
    ("kernel", "extent", "ranks"),
    [
        (Window(3, 1, 1), 64, 2),
        (Window(3, 1, 1), 64, 4),
        (Window(3, 1, 1), 61, 3),
        (Window(5, 1, 2), 128, 4),
        (Window(3, 2, 1), 128, 4),
        (Window(7, 2, 3), 128, 2),
        (Window(3, 1, 2, 2), 128, 4),
    ],
)
def test_networks_layers_have_few_edges(kernel: Window, extent: int, ranks: int) -> None:
    found, _ = derived(kernel, extent, ranks)
    assert found is not None
    assert found[0].forward[0] is None and found[-1].forward[1] is None
    assert all(one.forward[1] is not None or one.backward[1] is not None for one in found[:-1])


@pytest.mark.parametrize(
    ("kernel", "extent", "ranks"),
    [
        (Window(3, 1, 1), 8, 4),  # half of the outputs would be made twice
        (Window(3, 1, 0), 64, 4),  # outputs lie elsewhere than their inputs
        (Window(9, 1, 4), 12, 4),  # halos from beyond the neighbour
        (Window(3, 1, 1), 5, 4),  # an empty shard
    ],
)
def test_what_is_not_worth_it_or_not_possible(kernel: Window, extent: int, ranks: int) -> None:
    assert derived(kernel, extent, ranks)[0] is None


@given(layers())
def test_the_same_moves_as_all_at_once(layer: tuple[Window, int, int]) -> None:
    _, (inputs, outputs, reads, readers) = derived(*layer)
    for owned, needs in ((inputs, reads), (outputs, readers)):
        for own, need in zip(owned, needs, strict=True):
            sources = [position for piece in around(own, need) for position in range(*piece.reads)]
            assert sources == sorted(set(sources))
            assert set(sources) - set(range(*own)) == set(range(*need)) - set(range(*own))
