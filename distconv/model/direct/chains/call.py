"""Chains in one outermost call of a model: records its links, and fetches halos as was chosen from an earlier call.

The first call with inputs of a layout records its links, and every layer fetches its own halo. Later calls fetch the
halos that were chosen from these links. If a call has other links, its layers fetch their own halos from there on, and
a new choice is made at its end; after a few new ones, the last stays. The ranks that exchange halos compare their links
before a choice is used.
"""

from __future__ import annotations

import contextlib
import functools
import math
import weakref
import zlib
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_leaves

from distconv import settings
from distconv.model.direct.activation import Activation, activation
from distconv.model.direct.chains.choice import Coverage, Link, Prices, Span, choose_chain, covers, in_both, of_own
from distconv.model.direct.paths import running, temporarily
from distconv.model.direct.shaped_layout import ShapedLayout
from distconv.rules.operands.own_parts import carried
from distconv.tensors.layouts import box_at, coordinate, dim_axes, owners
from distconv.tensors.mesh import is_compared
from distconv.transfer.collectives import MAX, all_reduced
from distconv.transfer.exchange import exchange
from distconv.transfer.needs import Piece
from distconv.transfer.tracing import planned
from mucudnn.convolution.geometry import Window, length
from mucudnn.process import Recent

MOST_CHOICES = 4  # How often a choice is made for calls of one kind, if their links differ.


class Choice(NamedTuple):
    """The halos that were chosen for the calls of one kind."""

    links: list[Link]  # The links of the call from which they were chosen.
    wants: list[tuple[Coverage, ...] | None]  # The result of `distconv.model.direct.chains.choice.choose_chain`.
    times: int  # How often a choice has been made.


class Entered(NamedTuple):
    """The beginning of a link."""

    tensors: list[Tensor]  # The operands on this rank, all with the same positions.
    coverage: Coverage  # The positions of the operands on every rank.
    number: int  # The number of the link.


class Chain:
    """The chains of one call. ``most``: positions that a rank may have beyond its own, on a side."""

    def __init__(self, choice: Choice | None, prices: Prices, most: float) -> None:
        self.links: list[Link] = []
        self._alone: set[int] = set()
        self._meshes: dict[tuple[DeviceMesh, tuple[int, ...]], None] = {}
        """Meshes, each with the axes along which halos may be fetched."""
        self._choice = self._known = choice
        self._prices, self._most = prices, most

    def enter(
        self,
        operands: Sequence[Activation],
        result: ShapedLayout,
        windows: tuple[Window, ...] | None = None,
        fetches: bool = False,
        operations: float = 0.0,
    ) -> Entered | None:
        """Begins a link that makes an activation of layout ``result``; None if it cannot be one of a chain.

        ``windows``, ``fetches``, ``operations``: see `Link`. Collective where a halo is fetched.
        """
        spans = spans_of(result)
        if not spans or any(len(spans_of(x.place)) != len(spans) for x in operands):
            return None
        self._meshes.setdefault((result.mesh, tuple(axis for span in spans for axis in span.axes)))
        numbers = tuple(map(self._number, operands))
        at = len(self.links)
        self._note(Link(numbers, spans, windows, fetches, operations, _size(operands[0], result)))
        wants = None if self._choice is None else self._choice.wants[at]
        parts = [_widened(x, want) for x, want in zip(operands, wants or (None,) * len(operands), strict=True)]
        coverage = functools.reduce(in_both, (covered for _, covered in parts))
        tensors = [
            _narrowed(part, x.place, covered, coverage) for x, (part, covered) in zip(operands, parts, strict=True)
        ]
        return Entered(tensors, coverage, at)

    def leave(
        self, y: Tensor, place: ShapedLayout, coverage: Coverage, number: int, changed: Activation | None = None
    ) -> Activation:
        """The activation that a link has made, or ``changed`` in place: ``y`` has the positions of ``coverage``."""
        own = of_own(spans_of(place))
        root = _narrowed(y, place, coverage, own)
        if changed is None:
            made = activation(root, place)
        else:
            made, changed.root = changed, root
            made.forget_wide()
        made.cut_out = coverage != own
        if made.cut_out:
            made.keep_wide(y, coverage)
        made.link = self, number
        return made

    def settle(self) -> Choice | None:
        """The choice for the next call of this kind."""
        if self._choice is not None and len(self.links) == len(self._choice.links):
            return self._choice
        times = 0 if self._known is None else self._known.times
        if times >= MOST_CHOICES or not self.links:
            return self._known
        wants = choose_chain(self.links, self._prices, self._most, self._alone)
        compared = [each for each in self._meshes if is_compared(each[0])]
        if compared and not _are_equal_on_ranks(compared, self.links):
            wants = [None] * len(wants)
        return Choice(self.links, wants, times + 1)

    def watch(self, x: Activation) -> None:
        """Called when a program asks for an activation's gradient: later calls have only own positions of it."""
        if x.link is not None and x.link[0] is self:
            self._alone.add(x.link[1])

    def _number(self, x: Activation) -> int:
        """The number of the link that has made an activation. One made elsewhere becomes a link without operands."""
        if x.link is None or x.link[0] is not self:
            x.link = self, len(self.links)
            self._note(Link((), spans_of(x.place), None, False, 0.0, _size(x, x.place)))
        number: int = x.link[1]
        return number

    def _note(self, link: Link) -> None:
        at, choice = len(self.links), self._choice
        self.links.append(link)
        if choice is not None and not (at < len(choice.links) and choice.links[at] == link):
            self._choice = None


@contextlib.contextmanager
def computed_again() -> Iterator[None]:
    """A context for what a checkpoint computes, in forward and again in backward: every layer fetches its own halo."""
    with temporarily(running, chain=None, again=True):
        yield


def _are_equal_on_ranks(meshes: Iterable[tuple[DeviceMesh, tuple[int, ...]]], links: Sequence[Link]) -> bool:
    """Whether the ranks that exchange halos have the same links. Collective."""
    everywhere = [link._replace(spans=tuple(span._replace(here=0) for span in link.spans)) for link in links]
    number = zlib.crc32(repr(everywhere).encode())
    found = []
    for mesh, axes in meshes:
        ends = torch.tensor([number, -number], device=mesh.device_type)
        for axis in axes:
            ends = all_reduced(ends, mesh.get_group(axis), MAX)
        found.append(ends[0] == -ends[1])
    return all(found)


@planned(8192)
def spans_of(place: ShapedLayout) -> tuple[Span, ...]:
    """The sharded dims of space; none if a rank owns no position of one, or if there are partial sums."""
    if not place.is_plain:
        return ()
    found = []
    for dim in range(2, len(place.shape)):
        axes = dim_axes(place.mesh, place.placements, dim)
        if axes:
            owned = owners(place.mesh, axes, place.shape[dim])
            if not all(map(length, owned)):
                return ()
            found.append(Span(dim, axes, place.shape[dim], owned, coordinate(place.mesh, axes)))
    return tuple(found)


@planned(8192)
def elements(place: ShapedLayout) -> int:
    """The number of elements for each position of the spans, on the rank that has most."""
    dims = {span.dim for span in spans_of(place)}
    box = box_at(place.mesh, place.placements, place.shape, [0] * place.mesh.ndim)
    return math.prod(length(interval) for dim, interval in enumerate(box) if dim not in dims)


def _size(x: Activation, place: ShapedLayout) -> float:
    root = x.root if x.dtensor is None else x.dtensor
    assert root is not None
    return elements(place) * root.element_size()


def _narrowed(x: Tensor, place: ShapedLayout, coverage: Coverage, wanted: Coverage) -> Tensor:
    """The wanted positions of this rank, cut out of those that it has."""
    if coverage != wanted:
        for span, has, wants in zip(spans_of(place), coverage, wanted, strict=True):
            start, stop = wants[span.here]
            x = x.narrow(span.dim, start - has[span.here][0], stop - start)
    return x


def _widened(x: Activation, wanted: Coverage | None) -> tuple[Tensor, Coverage]:
    """An activation on this rank, and its coverage, after fetching the wanted positions that ranks lack."""
    wide, place = x.widest(), x.place
    coverage = of_own(spans_of(place)) if x.coverage is None else x.coverage
    x.read_wide = x.read_wide or x.cut_out
    if wanted is None or all(map(covers, coverage, wanted)):
        return wide, coverage
    for at, span in enumerate(spans_of(place)):
        if covers(coverage[at], wanted[at]):
            continue
        owned = (*coverage[:at], span.owned, *coverage[at + 1 :])
        wide = _narrowed(wide, place, coverage, owned)
        needs = tuple((Piece(stop - start, start),) for start, stop in wanted[at])
        which = exchange(place.mesh, span.axes, span.dim, span.owned, needs)
        wide = carried(wide, which) if wide.requires_grad and torch.is_grad_enabled() else which.fetch(wide)
        coverage = (*owned[:at], wanted[at], *owned[at + 1 :])
    x.keep_wide(wide, coverage)
    return wide, coverage


PRICES = {"cpu": Prices(exchange=3e-4, received=1e-9, operation=5e-11, written=2e-10)}
"""Seconds by kind of device, in round numbers; on CPUs those of one core, and of two processes on one machine."""

GPU_PRICES = Prices(exchange=6e-5, received=1e-11, operation=5e-14, written=1e-12)
"""Those of other devices: GPUs that reach each other without a network."""

MOST_KINDS = 64  # The most kinds of calls of a model for which a choice is kept.

_choices: weakref.WeakKeyDictionary[nn.Module, Recent[Hashable, Choice]] = weakref.WeakKeyDictionary()


@contextlib.contextmanager
def halos(module: nn.Module, args: Any, kwargs: Any) -> Iterator[None]:
    """A context in which an outermost call with these inputs fetches halos as the setting `halo` says."""
    most = settings.value("halo")
    places = tuple(x.place for x in tree_leaves((args, kwargs)) if type(x) is Activation) if most else ()
    if not places:
        yield
        return
    choices, kind = _choices_of(module), (places, module.training, torch.is_grad_enabled())
    prices = PRICES.get(places[0].mesh.device_type, GPU_PRICES)
    chain = Chain(choices.get(kind), prices, most)
    with temporarily(running, chain=chain):
        yield
    choice = chain.settle()
    if choice is not None:
        choices[kind] = choice


def share_choices(module: nn.Module, copied: nn.Module) -> None:
    """Lets two modules share the choices that are made for calls of either."""
    _choices[copied] = _choices_of(module)


def _choices_of(module: nn.Module) -> Recent[Hashable, Choice]:
    return _choices.setdefault(module, Recent(MOST_KINDS))
