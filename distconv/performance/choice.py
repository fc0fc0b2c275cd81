"""Chooses the partition of every layer so that a training step is fastest, with or without a limit of memory."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from distconv.model.strategy import layer_text
from distconv.performance.candidates import fits
from distconv.performance.costs import NEVER, Cost, Numbers, layer_cost, move_seconds, update_seconds
from distconv.performance.events import RecordedStep
from distconv.performance.kernels import Unmeasurable
from distconv.performance.layers import LayerGraph
from distconv.performance.machine import Machine
from distconv.performance.patterns import patterns
from distconv.performance.recordings import Recordings
from distconv.performance.replay import Times, replay
from distconv.performance.without_data import mesh_of
from distconv.settings.partition import Partition
from mucudnn.optimizer import DoesNotFit, assign
from mucudnn.timing import progress

EXPOSED = (0.0, 0.3, 1.0)
"""Shares of the gradients' allreduces that are taken not to hide; each gives a choice, and whole steps decide."""


@dataclass(frozen=True)
class LayerRow:
    """One layer in a plan.

    Attributes:
        name: of the layer.
        partition: chosen for it.
        cost: under it.
        moves: seconds to redistribute its inputs to that mesh, and gradients back.
        runner_up: the partition that would be the best instead of it, the other layers as they are.
        price: seconds that a step would then take longer.
    """

    name: str
    partition: Partition
    cost: Cost
    moves: float
    runner_up: Partition | None
    price: float


@dataclass(frozen=True)
class StepPlan:
    """A partition for every layer, with a step as the program takes it.

    Attributes:
        layers: the partition of each layer; the same one for all where ``uniform``.
        strategy: what `distconv run --strategy` reads: {pattern: partition}.
        step: of a whole step, recorded.
        times: of it on the machine, without the update of parameters.
        update: seconds of that; 0 where the step does not train.
        exposed: the share of the gradients' allreduces that its choice took not to hide.
        gap: by what fraction the sum over the layers could be less within the limit of memory, at most.
    """

    layers: Mapping[str, Partition]
    strategy: Mapping[str, str]
    step: RecordedStep
    times: Times
    exposed: float = EXPOSED[1]
    gap: float = 0.0
    update: float = 0.0

    @property
    def seconds(self) -> float:
        """The seconds of a whole step."""
        return self.times.total + self.update

    def memory(self, states: float) -> float:
        """Bytes of a rank: parameters, gradients, ``states`` numbers per parameter of the optimizer, activations."""
        return self.step.saved + (2 + states) * self.step.parameters


class PartitionPlanner:
    """The costs of a model's layers under some partitions, within an imagined job.

    Attributes:
        refusals: {partition: why a whole step cannot run under it}.
    """

    def __init__(
        self,
        model: nn.Module,
        graph: LayerGraph,
        found: Sequence[Partition],
        machine: Machine,
        *,
        states: float = 1.0,
        batch_norm: str = "global",
        shown: str = "off",
        recordings: Recordings | None = None,
    ) -> None:
        """
        Args:
            model: on the meta device.
            found: the partitions that a layer may have.
            states: numbers per parameter that the optimizer keeps, such as 1 for momentum and 2 for Adam.
            shown: when a progress bar is, as mucudnn's setting ``progress`` says it.
            recordings: of the same model and graph, to record nothing again; new ones, if not given.
        """
        self.model, self.graph, self.partitions, self.machine = model, graph, list(found), machine
        self.states = states
        self.recordings = recordings or Recordings(model, graph, batch_norm)
        self.meshes = [mesh_of(partition) for partition in self.partitions]
        self.refusals: dict[str, str] = {}
        self._plans: dict[tuple[Partition, ...], StepPlan | None] = {}
        self.costs = self._costs(shown)
        self.moves = self._moves()

    def _costs(self, shown: str) -> dict[str, list[Cost]]:
        known: dict[str, list[Cost]] = {}
        kinds = self.recordings.kinds
        with progress.bar(len(set(kinds.values())), "layers", shown) as advance:
            for name, layer in self.graph.layers.items():
                if kinds[name] in known:
                    continue
                pairs = list(zip(self.partitions, self.meshes, strict=True))
                # A layer with less data than ranks, whatever the partition, runs on some of the ranks.
                fitting = [fits(layer, partition) for partition, _ in pairs]
                known[kinds[name]] = [
                    self._cost(name, partition, mesh) if fit or not any(fitting) else NEVER
                    for fit, (partition, mesh) in zip(fitting, pairs, strict=True)
                ]
                advance()
        return {name: known[kinds[name]] for name in self.graph.layers}

    def _cost(self, name: str, partition: Partition, mesh: DeviceMesh) -> Cost:
        """The cost with the fastest channel algorithm, which dominates: no other layer and no bytes depend on it."""
        ways = [self._by(name, partition, mesh, each) for each in self.recordings.algorithms(name, partition)]
        return min(ways, key=lambda cost: cost.seconds(EXPOSED[1]))

    def _by(self, name: str, partition: Partition, mesh: DeviceMesh, algorithm: str | None) -> Cost:
        recorded = self.recordings.layer(name, partition, algorithm)
        try:
            cost = layer_cost(recorded, self.graph.layers[name], mesh, self.machine, self._states())
        except Unmeasurable as error:
            self.recordings.faults.setdefault(partition, f"layer {name}: {error}")
            cost = replace(NEVER, refusal=str(error))
        return replace(cost, algorithm=algorithm)

    def _moves(self) -> dict[tuple[str, str], Numbers]:
        shapes, trains = set(self.graph.edges.values()), self.recordings.trains
        known = {shape: move_seconds(shape, self.meshes, self.machine, trains) for shape in shapes}
        return {pair: known[shape] for pair, shape in self.graph.edges.items()}

    def best(self, limit: float = math.inf) -> StepPlan:
        """The plan whose whole step is the fastest, of the best sums over layers and of single partitions.

        Raises:
            DoesNotFit: where none fits the limit of bytes.
            ValueError: one line, where no layer, or no whole step, can run under any partition.
        """
        plans = [plan for exposed in EXPOSED if (plan := self._chosen(exposed, limit)) is not None]
        self.uniform()
        plans += [plan for plan in self._plans.values() if plan and plan.memory(self.states) <= limit]
        if not plans and limit == math.inf:
            raise ValueError(f"no whole step can run: {'; '.join(dict.fromkeys(self.refusals.values()))}")
        if not plans:
            self._smallest()
            every = [plan.memory(self.states) for plan in self._plans.values() if plan]
            raise DoesNotFit(limit, min(every, default=math.inf))
        return min(plans, key=lambda plan: plan.seconds)

    def fits_in_shares(self, limit: float) -> bool:
        """Whether a plan so far would fit a limit of bytes if each rank had only its share of the parameters."""
        share = (2 + self.states) * sum(p.nbytes for p in self.model.parameters()) / self.partitions[0].ranks
        return any(plan.step.saved + share <= limit for plan in self._plans.values() if plan)

    def _smallest(self) -> None:
        """Records the plan of every layer under the partition that takes the fewest bytes of it."""
        sizes = {
            name: [cost.bytes(self.states) if math.isfinite(cost.seconds()) else math.inf for cost in costs]
            for name, costs in self.costs.items()
        }
        self._plan({name: int(np.argmin(each)) for name, each in sizes.items()}, EXPOSED[1])

    def _chosen(self, exposed: float, limit: float) -> StepPlan | None:
        names = list(self.graph.layers)
        seconds = {name: [cost.seconds(exposed) for cost in self.costs[name]] for name in names}
        for name in names:
            if not any(map(math.isfinite, seconds[name])):
                why = next((cost.refusal for cost in self.costs[name] if cost.refusal), "its data is too small")
                raise ValueError(f"layer {name}: no partition of {self.partitions[0].ranks} ranks divides it: {why}")
        sizes = {name: [cost.bytes(self.states) for cost in self.costs[name]] for name in names}
        room = math.inf
        for _ in range(5):
            # Bytes of single layers leave out what they share; the whole step shows it, and the room follows from that.
            try:
                found = assign(seconds, self.moves, sizes, room)
            except DoesNotFit:
                return None
            plan = self._plan(found.chosen, exposed, found.gap)
            if plan is None:
                return None
            taken = plan.memory(self.states)
            if taken <= limit:
                return plan
            room = limit if room == math.inf else room * 0.98 * limit / taken
        return None

    def _plan(self, chosen: Mapping[str, int], exposed: float, gap: float = 0.0) -> StepPlan | None:
        return self.whole({name: self.partitions[index] for name, index in chosen.items()}, exposed, gap)

    def uniform(self) -> list[StepPlan]:
        """A plan for three of the most promising single partitions, and for samples alone, fastest first.

        Those under which no whole step runs are left out.
        """
        every = [self.whole(dict.fromkeys(self.graph.layers, partition)) for partition in self._promising()]
        return sorted((plan for plan in every if plan is not None), key=lambda plan: plan.seconds)

    def _promising(self) -> list[Partition]:
        """The single partitions with the least sums over layers, and the one of samples only."""

        def total(index: int) -> float:
            return sum(min(self.costs[name][index].seconds(EXPOSED[1]), 1e3) for name in self.graph.layers)

        order = sorted(range(len(self.partitions)), key=total)
        found = [self.partitions[index] for index in order[:3]]
        samples = [partition for partition in self.partitions if partition.names == ("sample",)]
        return [*found, *(partition for partition in samples if partition not in found)]

    def whole(self, layers: Mapping[str, Partition], exposed: float = EXPOSED[1], gap: float = 0.0) -> StepPlan | None:
        """The plan of given partitions; None where a step cannot run so, with the reason in ``refusals``."""
        key = tuple(layers.values())
        if key not in self._plans:
            self._plans[key] = self._recorded(layers, exposed, gap)
        return self._plans[key]

    def _recorded(self, layers: Mapping[str, Partition], exposed: float, gap: float) -> StepPlan | None:
        strategy = patterns(self.model, self.graph, {name: self.text(name, layers[name]) for name in layers})
        step = self.recordings.whole(strategy)
        if isinstance(step, str):
            self.refusals[", ".join(strategy.values())] = step
            return None
        try:
            times = replay(step, self.machine)
        except Unmeasurable as error:
            self.refusals[", ".join(strategy.values())] = str(error)
            self.recordings.faults = dict.fromkeys(layers.values(), str(error)) | self.recordings.faults
            return None
        states = self._states()
        update = 0.0 if states is None else update_seconds(step, self.machine, states)
        return StepPlan(layers, strategy, step, times, exposed, gap, update)

    def _states(self) -> float | None:
        return self.states if self.recordings.trains else None

    def text(self, name: str, partition: Partition) -> str:
        """A layer's partition with its channel algorithm, as a strategy says it."""
        return layer_text(partition, self.costs[name][self.partitions.index(partition)].algorithm)

    def rows(self, plan: StepPlan) -> list[LayerRow]:
        """The choice for each layer, and its advantage over the next best."""
        index = {partition: at for at, partition in enumerate(self.partitions)}
        chosen = {name: index[partition] for name, partition in plan.layers.items()}
        rows = []
        for name, at in chosen.items():
            costs = np.array([cost.seconds(plan.exposed) for cost in self.costs[name]])
            own = 0.0
            for (a, b), table in self.moves.items():
                if b == name:
                    costs = costs + table[chosen[a]]
                    own += float(table[chosen[a], at])
                elif a == name:
                    costs = costs + table[:, chosen[b]]
            others = [other for other in np.argsort(costs, kind="stable") if other != at and np.isfinite(costs[other])]
            second = int(others[0]) if others else None
            runner_up = None if second is None else self.partitions[second]
            price = 0.0 if second is None else float(costs[second] - costs[at])
            rows.append(LayerRow(name, plan.layers[name], self.costs[name][at], own, runner_up, price))
        return rows
