"""The inputs of a call in turn: the shard or the copy that each part has of them, and their gradients."""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Placement
from torch.utils._pytree import tree_leaves

from distconv.model.direct.shaped_layout import ShapedLayout, shaped_layout
from distconv.model.direct.shares import fitting
from distconv.tensors.autograd_nodes import nodes_of
from distconv.tensors.dtensors import wrap
from distconv.tensors.layouts import replicated
from distconv.tensors.mesh import placements
from distconv.transfer.local_part import local_as
from distconv.turns.gradients import GradientSource, anchor
from distconv.turns.parts import Parts
from distconv.turns.wholes import HOST, Wholes


def on_its_device(x: Tensor, device: torch.device) -> Tensor:
    """An input on the module's device. Tensors of fewer than two dims, such as lengths, stay on the host."""
    return x.to(device) if x.device == HOST and x.dim() > 1 else x


class Inputs:
    """The tensors that a call reads besides parameters, and those of their gradients that are asked for.

    Args:
        given: the arguments of the call.
        kept: tensors that the program has kept elsewhere, such as in an attribute, and that require gradients.
    """

    def __init__(self, parts: Parts, module: nn.Module, given: Any, kept: Sequence[Tensor]) -> None:
        first = next(itertools.chain(module.parameters(), module.buffers()), None)
        self._parts, self._device = parts, HOST if first is None else first.device
        leaves = [x for x in tree_leaves(given) if isinstance(x, Tensor)]
        self._most_dims = _most_dims(leaves)
        if torch.is_grad_enabled():
            leaves = [x for x in leaves if x.requires_grad]
        else:
            leaves, kept = [], []
        self.tensors = list({id(x): x for x in (*leaves, *kept)}.values())
        """The tensors that require gradients, arguments first. A tensor is known by its number in this list."""
        self._given = len({id(x) for x in leaves})
        self._used: Sequence[int] = ()
        """The numbers of the tensors from which results were computed; those of all arguments, used or not."""
        self._sources: dict[Any, int] = {}
        """The numbers of kept tensors, by the node of autograd with which the first part's graph of each begins."""
        self._numbers = {id(x): number for number, x in enumerate(self.tensors)}
        self._gradients: list[dict[int, list[tuple[Tensor, ShapedLayout]]]] = [{} for _ in range(parts.count)]
        """By part and number: local gradients with their layouts; two if a tensor is an argument and also kept."""

    @property
    def used(self) -> list[Tensor]:
        """The tensors that results were computed from."""
        return [self.tensors[number] for number in self._used]

    def shard(self, part: int, x: Tensor) -> Tensor:
        """A part's shard of an argument; its gradient is noted if it is asked for.

        It is a copy, which the part may change, and on the module's device where the argument is on the host.
        """
        mesh = self._parts.meshes[part]
        layout = placements(mesh, x.dim(), self._most_dims)

        def make() -> Tensor:
            local = local_as(x.detach(), mesh, layout)
            moved = on_its_device(local, self._device)
            return wrap(moved.clone() if moved is local else moved, mesh, layout, x.shape)

        return self._source(part, x, layout, make) if id(x) in self._numbers else make()

    def replica(self, part: int, x: Tensor) -> Tensor:
        """A part's replica of a kept tensor that requires gradients."""
        mesh = self._parts.meshes[part]
        layout = replicated(mesh)
        made = self._source(part, x, layout, lambda: wrap(x.detach(), mesh, layout, x.shape))
        if part == 0:
            self._sources[made.grad_fn] = self._numbers[id(x)]
        return made

    def _source(self, part: int, x: Tensor, layout: Sequence[Placement], make: Callable[[], Tensor]) -> Tensor:
        place, number = shaped_layout(self._parts.meshes[part], tuple(layout), x.shape), self._numbers[id(x)]

        def take(grads: Sequence[Tensor | None]) -> None:
            if grads[0] is not None:
                self._gradients[part].setdefault(number, []).append((grads[0], place))

        (made,) = GradientSource.apply(anchor(), lambda: (make(),), take)
        return made

    def find_used(self, results: Sequence[Tensor]) -> None:
        """After forward: finds the tensors from which the first part's results that require gradients were computed.
        All, where backward computes a checkpoint again, which may read any."""
        nodes = nodes_of(x.grad_fn for x in results) if self._sources else set()
        has_checkpoint = any(node is not None and "CheckpointFunction" in node.name() for node in nodes)
        kept = {number for node, number in self._sources.items() if has_checkpoint or node in nodes}
        self._used = [*range(self._given), *sorted(number for number in kept if number >= self._given)]
        self._sources.clear()

    def take_gradients(self, part: int, wholes: Wholes) -> None:
        """Puts the gradients of a part into whole ones, on the devices of the inputs."""
        # In the same order in all parts; autograd's order depends on when a part first read an input.
        for number, some in sorted(self._gradients[part].items()):
            grad = functools.reduce(operator.add, (fitting(*each) for each in some))
            wholes.of(part, grad, number, self.tensors[number].device)
        self._gradients[part].clear()

    def gradients(self, wholes: Wholes) -> list[Tensor | None]:
        """The whole gradients of `used`."""
        return [wholes.made.get(number) for number in self._used]


def is_cut(parts: Parts, inputs: Sequence[Tensor]) -> bool:
    """Whether one of the inputs of a call has a dim that is cut. ValueError where one should have, and lacks it."""
    most = _most_dims(inputs)
    layouts = [placements(parts.meshes[0], x.dim(), most) for x in inputs]
    return any(placement.is_shard() for layout in layouts for placement in layout)


def _most_dims(inputs: Sequence[Tensor]) -> int:
    """Inputs with fewer dims than this are beside a larger one: boxes beside a batch of pictures have no height."""
    return max((x.dim() for x in inputs), default=0)
