"""How far chains run: numbers of positions against counting them, and the choice against all others."""

from __future__ import annotations

import itertools
import math

from hypothesis import given, settings
from hypothesis import strategies as st

from distconv.model.direct.chains.choice import (
    Coverage,
    Link,
    Prices,
    Span,
    as_one_segment,
    choose_chain,
    covers,
    inputs_read,
    of_own,
    reached,
)
from distconv.settings.partition import ownership
from mucudnn.convolution.geometry import Interval, Window


def span(extent: int, ranks: int) -> Span:
    return Span(2, (0,), extent, ownership(extent, ranks), 0)


windows = st.builds(Window, st.integers(1, 4), st.integers(1, 3), st.integers(0, 4), st.integers(1, 2))


def computed(window: Window, coverage: Interval, extent: int, outputs: int) -> list[int]:
    """The outputs that read nothing within the tensor that is not coverage."""
    return [
        output
        for output in range(outputs)
        if all(
            coverage[0] <= at < coverage[1] or not 0 <= at < extent
            for at in range(*window.inputs((output, output + 1)))
        )
    ]


@settings(deadline=None)
@given(windows, st.integers(1, 30), st.integers(1, 3), st.integers(0, 4), st.integers(0, 4))
def test_what_is_reached_can_be_computed(window: Window, extent: int, ranks: int, before: int, after: int) -> None:
    outputs = window.outputs(extent)
    if not outputs:
        return
    x, y = span(extent, ranks), Span(2, (0,), outputs, ownership(outputs, ranks), 0)
    coverage = tuple((max(0, a - before), min(extent, b + after)) for a, b in x.owned)
    ((*made,),) = reached((window,), (coverage,), (x,), (y,))
    for has, makes in zip(coverage, made, strict=True):
        assert set(range(*makes)) <= set(computed(window, has, extent, outputs))


@settings(deadline=None)
@given(windows, st.integers(1, 30), st.integers(1, 3), st.integers(0, 4), st.integers(0, 4))
def test_what_is_read_suffices(window: Window, extent: int, ranks: int, before: int, after: int) -> None:
    outputs = window.outputs(extent)
    if outputs < ranks or extent < ranks:
        return
    x, y = span(extent, ranks), span(outputs, ranks)
    wanted = tuple((max(0, a - before), min(outputs, b + after)) for a, b in y.owned)
    (coverage,) = inputs_read((window,), (wanted,), (x,))
    assert covers(coverage, x.owned)
    (made,) = reached((window,), (coverage,), (x,), (y,))
    assert covers(made, wanted)


def network(kernels: list[tuple[int, bool]], extent: int, ranks: int) -> list[Link]:
    """A convolution of each kernel and an activation function; True adds what the layer before has made."""
    spans = (span(extent, ranks),)
    links = [Link((), spans, None, False, 0.0, 8.0)]
    made = 0
    for kernel, adds in kernels:
        window = Window(kernel, 1, kernel // 2)
        links.append(Link((made,), spans, (window,), True, 100.0 * kernel, 8.0))
        links.append(Link((len(links) - 1,), spans, None, False, 0.0, 8.0))
        if adds:
            links.append(Link((len(links) - 1, made), spans, None, True, 0.0, 8.0))
        made = len(links) - 1
    return links


def seconds(links: list[Link], cuts: tuple[int, ...], prices: Prices, most: float) -> float:
    """What it costs to begin segments with these layers."""
    layers = [at for at, link in enumerate(links) if link.exchanges]
    total = 0.0
    for first, last in itertools.pairwise([0, *cuts, len(links)]):
        alone = not any(first < layer < last for layer in layers)
        segment = as_one_segment(links, first, last, None if alone else most)
        total += math.inf if segment is None else segment.seconds(prices)
    return total


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.tuples(st.sampled_from([1, 3, 5]), st.booleans()), min_size=1, max_size=5),
    st.integers(9, 40),
    st.integers(2, 3),
    st.sampled_from([0.0, 1.0, 30.0, 1000.0]),
    st.sampled_from([2.0, 5.0, math.inf]),
)
def test_the_choice_is_the_cheapest(
    kernels: list[tuple[int, bool]], extent: int, ranks: int, exchange: float, most: float
) -> None:
    links, prices = network(kernels, extent, ranks), Prices(exchange, 0.1, 0.01, 0.001)
    layers = [at for at, link in enumerate(links) if link.exchanges]
    every = [cuts for k in range(len(layers) + 1) for cuts in itertools.combinations(layers, k)]
    best = min(seconds(links, cuts, prices, most) for cuts in every)
    assert math.isclose(_of_choice(links, prices, most), best, rel_tol=1e-9, abs_tol=1e-9)


def _of_choice(links: list[Link], prices: Prices, most: float) -> float:
    """What a call takes that fetches as was chosen."""
    wants = choose_chain(links, prices, most)
    coverage: dict[int, Coverage] = {}
    total = 0.0
    for at, link in enumerate(links):
        has = [coverage.get(operand, of_own(links[operand].spans)) for operand in link.operands]
        for number, operand in enumerate(link.operands):
            x = links[operand]
            want = wants[at]
            needed = want[number] if want is not None else None
            if needed is None and link.windows is not None:
                needed = inputs_read(link.windows, of_own(link.spans), x.spans)
            if needed is not None and not covers(has[number][0], needed[0]):
                total += prices.exchange + prices.received * x.size * (longest(needed) - longest(of_own(x.spans)))
                has[number] = coverage[operand] = needed
        made = [
            each if link.windows is None else reached(link.windows, each, links[operand].spans, link.spans)
            for each, operand in zip(has, link.operands, strict=True)
        ]
        if made:
            first, *others = made
            for other in others:
                first = (tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(first[0], other[0], strict=True)),)
            coverage[at] = first
            beyond = longest(first) - longest(of_own(link.spans))
            total += beyond * (link.operations * prices.operation + link.size * prices.written)
    return total


def longest(coverage: Coverage) -> int:
    return max(b - a for a, b in coverage[0])


def test_of_what_is_watched_ranks_hold_their_own() -> None:
    links, prices = network([(3, False)] * 4, 64, 2), Prices(1e6, 1.0, 1.0, 1.0)
    layers = [at for at, link in enumerate(links) if link.exchanges]

    def halos(wants: list[tuple[Coverage, ...] | None]) -> list[Coverage | None]:
        return [None if wants[at] is None else wants[at][0] for at in layers]  # type: ignore[index]

    wide = [(((0, 32 + rows), (32 - rows, 64)),) for rows in (4, 3, 2)]
    assert halos(choose_chain(links, prices))[:3] == wide
    assert halos(choose_chain(links, prices, alone={layers[1]})) == [wide[2], None, wide[2], None]
    assert halos(choose_chain(links, prices, most=1)) == [None] * 4
