"""Hints at layers that would stay in another memory format."""

from __future__ import annotations

from typing import Any

from test_report import STOCK, record

from mucudnn.convolution.problem import ConvProblem, Direction
from mucudnn.reporting.chains import chains, hints
from mucudnn.reporting.record import Record
from mucudnn.reporting.tables import summary

FORWARD, DATA, FILTER = Direction
LAST = ((4, "stock@channels_last"),)


def layer(kernel: int, direction: Direction = FILTER, parts: Any = LAST, rows: int = 8, **changes: Any) -> Record:
    """A depthwise layer of 4 samples with 16 channels, padded to keep the image's size."""
    shapes = (4, 16, rows, 8), (16, 1, kernel, kernel)
    padding = (kernel // 2,) * 2
    geometry: dict[str, Any] = {"stride": (1, 1), "padding": padding, "dilation": (1, 1), "groups": 16}
    problem = ConvProblem.of_convolution(direction, *shapes, **geometry | changes)
    return record(*parts, problem=problem, direction=str(direction))


def test_layers_of_one_shape_are_a_chain_and_others_are_not() -> None:
    found = chains([layer(3), STOCK, layer(5), layer(3, rows=16)])
    assert [[one.w_shape[2] for one in chain.layers] for chain in found] == [[3, 5], [3]]


def test_directions_are_of_one_layer_and_their_copies_add_up() -> None:
    (chain,) = chains([layer(3, FORWARD), layer(3, FILTER), layer(3, DATA, ((4, "stock"),))])
    assert len(chain.layers) == 1
    tensors, weight = 2 * 4 * 16 * 64, 16 * 9
    assert chain.copied == 2 * 4 * (tensors + weight)


def test_only_the_parts_that_are_copied_count() -> None:
    (whole,), (half,) = (chains([layer(3, parts=parts)]) for parts in (LAST, ((2, LAST[0][1]), (2, "stock"))))
    assert whole.copied - half.copied == 4 * 2 * 2 * 16 * 64


def test_a_layer_between_two_joins_their_chains() -> None:
    first, last = layer(3), layer(3, rows=4)
    between = layer(3, stride=(2, 1))
    assert len(chains([first, last])) == 2
    (chain,) = chains([first, last, between])
    assert len(chain.layers) == 3


def test_what_is_said() -> None:
    (said,) = hints([layer(3), layer(5)])
    assert said == (
        "2 layers in a row (4x16x8x8 k16x1x3x3 p1 g16, ...) would stay in channels_last: "
        "model.to(memory_format=torch.channels_last) saves 66.1 KiB of copies in one call of each."
    )
    assert said in summary([layer(3), layer(5)])
    assert "memory_format" not in summary([layer(3, parts=((4, "fft@height=2"),)), STOCK])


def test_formats_by_the_names_of_torch() -> None:
    (contiguous,) = hints([layer(3, parts=((4, "stock@contiguous"),))])
    assert "model.to(memory_format=torch.contiguous_format)" in contiguous
    volume = ConvProblem.of_convolution(
        FILTER, (2, 8, 4, 4, 4), (8, 1, 3, 3, 3), stride=(1,) * 3, padding=(1,) * 3, dilation=(1,) * 3, groups=8
    )
    (said,) = hints([record((2, "stock@channels_last"), problem=volume)])
    assert "model.to(memory_format=torch.channels_last_3d)" in said
