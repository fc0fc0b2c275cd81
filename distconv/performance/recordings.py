"""The recorded steps of a model and of its layers under each partition; one recording serves every machine."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from distconv import settings
from distconv.model.parameters import layer_of
from distconv.model.strategy import Strategy, layer_text
from distconv.performance.events import RecordedStep
from distconv.performance.layers import LayerGraph, equal_in
from distconv.performance.recording import record_step
from distconv.performance.without_data import mesh_of
from distconv.settings.channels import weight_dims
from distconv.settings.partition import Partition, shards_channels
from distconv.tensors.refusal import UnsupportedOperation


class Recordings:
    """The recordings of a model within an imagined job."""

    def __init__(self, model: nn.Module, graph: LayerGraph, batch_norm: str = "global", trains: bool = True) -> None:
        """
        Args:
            model: on the meta device.
            trains: False for inference.
        """
        self.model, self.graph, self.batch_norm, self.trains = model, graph, batch_norm, trains
        self.faults: dict[Partition, str] = {}  # {partition: why it is left out, where that is no refusal but a fault}.
        self.kinds = {
            name: f"{name not in graph.first} {equal_in(model, layer)}" for name, layer in graph.layers.items()
        }
        """{layer: a text that is the same for layers that cost the same}."""
        self._layers: dict[tuple[str, Partition, str | None], RecordedStep | str | None] = {}
        self._whole: dict[tuple[tuple[str, str], ...], RecordedStep | str] = {}

    def algorithms(self, name: str, partition: Partition) -> list[str | None]:
        """Channel algorithms that split a layer's weight each in a way of its own.

        The first is None, the job's; where that is "auto", it is the one that moves least.
        """
        axes = {axis: size for axis, size in partition.axes if shards_channels(axis) and size > 1}
        modules = self.graph.layers[name].modules
        layer = layer_of(self.model.get_submodule(modules[0])) if modules else None
        if layer is None or not axes or settings.value("channel_algorithm") != "auto":
            return [None]
        ways = {weight_dims(layer, algorithm, axes): algorithm for algorithm in ("w", "y", "x")}
        ways.pop(weight_dims(layer, "auto", axes), None)
        return [None, *sorted(ways.values())]

    def layer(self, name: str, partition: Partition, algorithm: str | None = None) -> RecordedStep | str | None:
        """A layer alone; the reason where it cannot run so; None for a join that nothing follows."""
        key = self.kinds[name], partition, algorithm
        if key not in self._layers:
            self._layers[key] = self._alone(name, partition, algorithm)
        return self._layers[key]

    def _alone(self, name: str, partition: Partition, algorithm: str | None) -> RecordedStep | str | None:
        layer = self.graph.layers[name]
        if not layer.modules:
            return None
        modules = nn.Sequential(*(self.model.get_submodule(each) for each in layer.modules))
        shape = layer.output if layer.is_join else layer.input
        strategy = None if algorithm is None else Strategy.parse({"*": layer_text(partition, algorithm)})
        return self._recorded(modules, partition, (shape,), strategy, wants_gradient=name not in self.graph.first)

    def whole(self, strategy: Mapping[str, str]) -> RecordedStep | str:
        """The whole model; the reason where it cannot run so.

        ``strategy``: {pattern: partition, perhaps with an algorithm}, that of everything outside of the layers last,
        under ``*``.
        """
        key = tuple(strategy.items())
        if key not in self._whole:
            chosen = Strategy.parse(strategy)
            outer = chosen.layers[-1][1]
            layers = None if chosen.is_one_partition else chosen
            self._whole[key] = self._recorded(self.model, outer, self.graph.inputs, layers)
        return self._whole[key]

    def _recorded(
        self,
        model: nn.Module,
        partition: Partition,
        shapes: tuple[tuple[int, ...], ...],
        strategy: Strategy | None = None,
        wants_gradient: bool = False,
    ) -> RecordedStep | str:
        try:
            return record_step(
                model,
                mesh_of(partition),
                *shapes,
                strategy=strategy,
                batch_norm=self.batch_norm,
                wants_gradient=wants_gradient and self.trains,
                trains=self.trains,
            )
        except Exception as error:
            why = (str(error).splitlines() or [type(error).__name__])[0]
            if not isinstance(error, UnsupportedOperation | ValueError | RuntimeError):
                self.faults.setdefault(partition, why)
            return why
