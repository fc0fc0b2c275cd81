"""The pure parts of the performance model: messages, lanes, candidates, the graph of layers, strategies."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import small_network
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_machine import TEXT
from torch import nn

from distconv.model.strategy import Strategy
from distconv.performance import calibration
from distconv.performance.candidates import allowed, fits, partitions, worthwhile
from distconv.performance.choice import PartitionPlanner
from distconv.performance.events import Event, Kernel, Operator, RecordedStep, Shape, Start, Wait
from distconv.performance.layers import Layer, NoGraph, trace
from distconv.performance.machine import Machine, parse, read_machine
from distconv.performance.patterns import patterns
from distconv.performance.recording import on_meta
from distconv.performance.recordings import Recordings
from distconv.performance.replay import Times, message_seconds, replay
from distconv.performance.without_data import imagined_job
from distconv.settings.partition import Partition
from mucudnn.optimizer import DoesNotFit


@pytest.fixture
def machine() -> Machine:
    return parse(TEXT)


def test_messages_take_latencies_and_bandwidths(machine: Machine) -> None:
    near = Start(0, "gradients", (0, 1), 10**7)
    far = Start(0, "gradients", (0, 1, 2, 3), 10**7)
    assert message_seconds(machine, near, 0) == pytest.approx(2 * (1e-6 + 5e6 / 1e10))
    assert message_seconds(machine, far, 0) == pytest.approx(6 * (1e-5 + 2.5e6 / 1e9))
    # One rank of each node: both such groups of a node share its adapter.
    assert message_seconds(machine, Start(0, "gradients", (0, 2), 10**7), 0) == pytest.approx(2 * (1e-5 + 5e6 / 5e8))
    # A small sum among many goes along trees, 2 log2 p steps, unless the machine has rings alone.
    small, many = (
        Start(0, "gradients", tuple(range(16)), 16),
        parse(TEXT + "trees = false\nscatters = 2\ngathers = 3\n"),
    )
    assert message_seconds(machine, small, 0) == pytest.approx(2 * (4 * 1e-5 + 16 / 1e9))
    assert message_seconds(many, small, 0) == pytest.approx(30 * (1e-5 + 1 / 1e9))
    gather, scatter = (Start(0, kind, (0, 1, 2, 3), 10**7) for kind in ("all_gather", "reduce_scatter"))
    assert message_seconds(many, gather, 0) == pytest.approx(3 * (1e-5 + 3 * 2.5e6 / 1e9))
    assert message_seconds(many, scatter, 0) == pytest.approx(3 * (1e-5 + 2 * 2.5e6 / 1e9))
    halo = Start(0, "all_to_all", (0, 1, 2), 3000, (0, 1000, 2000))
    assert message_seconds(machine, halo, 0) == pytest.approx(1e-6 + 1e-5 + 2000 * 2 / 1e9)


def test_kernels_take_what_is_scarce(machine: Machine) -> None:
    assert machine.kernel_seconds(Kernel("k", 10**9, 1000)) == pytest.approx(1e-6 + 2e-3)
    assert machine.kernel_seconds(Kernel("k", 10, 10**8)) == pytest.approx(1e-6 + 1e-3)


def test_messages_hide_behind_kernels(machine: Machine) -> None:
    kernel, start = Kernel("k", 10**9, 0), Start(0, "gradients", (0, 1), 10**7)
    taken = message_seconds(machine, start, 0)
    step = RecordedStep((start, kernel, Wait(0)), 0, 0, 0)
    launched = 2 * machine.host.operator  # before the kernel begins
    times = replay(step, machine)
    assert times.total == pytest.approx(launched + machine.kernel_seconds(kernel)) and times.exposed == 0
    assert times.hidden == pytest.approx(taken)
    waits = replay(RecordedStep((start, Wait(0), kernel), 0, 0, 0), machine)
    assert waits.total == pytest.approx(launched / 2 + taken + machine.kernel_seconds(kernel))
    assert waits.exposed == pytest.approx(taken)


@pytest.mark.parametrize("asynchronous", ["true", "false"])
def test_a_message_takes_the_host_longer_than_an_operator(asynchronous: str) -> None:
    text = TEXT.replace("asynchronous = true", f"asynchronous = {asynchronous}")
    step = RecordedStep((Operator(), Start(0, "gradients", (0, 1), 10**7), Wait(0)), 0, 0, 0)
    plain, dear = (replay(step, parse(text.replace("[node]", f"message = {seconds}\n[node]"))) for seconds in (0, 3e-4))
    assert dear.total == pytest.approx(plain.total + 3e-4)


def test_a_message_that_the_processor_carries_hides_at_a_price(machine: Machine) -> None:
    kernel, start = Kernel("k", 10**9, 0), Start(0, "gradients", (0, 1), 10**7)
    free = replay(RecordedStep((start, kernel, Wait(0)), 0, 0, 0), machine)
    carrying = parse(TEXT.replace("asynchronous = true", "asynchronous = true\ncarries = 0.5"))
    half = replay(RecordedStep((start, kernel, Wait(0)), 0, 0, 0), carrying)
    assert half.total == pytest.approx(free.total + 0.5 * message_seconds(machine, start, 0))
    waits = RecordedStep((start, Wait(0), kernel), 0, 0, 0)  # nothing hides
    assert replay(waits, carrying).total == pytest.approx(replay(waits, machine).total)


def test_a_processor_carries_messages_more_slowly_while_it_computes() -> None:
    """A sum of 10 ms: 30 ms while the rank computes, which loses half of that time; then the rest at its own speed."""
    text = TEXT.replace("operator = 1e-4", "operator = 0").replace("kernel = 1e-6", "kernel = 0")
    machine = parse(text.replace("asynchronous = true", "asynchronous = false\ncarries = 0.5\nslows = 3"))
    start = Start(0, "gradients", (0, 1), 10**8)
    taken = message_seconds(machine, start, 0)
    assert taken == pytest.approx(0.01, rel=1e-3)

    def after(kernel_seconds: float) -> Times:
        kernel = Kernel("k", round(kernel_seconds * 5e11), 0)
        return replay(RecordedStep((start, kernel, Wait(0), kernel), 0, 0, 0), machine)

    long, short = after(0.02), after(0.006)
    # Long enough: the message is done after 30 ms, in which 15 ms of the kernel's were.
    assert long.total == pytest.approx(3 * taken + (0.02 - 1.5 * taken) + 0.02) and long.exposed == 0
    # Too short: 12 ms for 6, in which a third of that went on; the rest is waited for.
    assert short.exposed == pytest.approx(taken - 0.012 / 3)
    assert short.total == pytest.approx(0.012 + short.exposed + 0.006)
    slower = parse(text.replace("bandwidth = 1e10", "bandwidth = 1e10\nsums = 2"))
    assert message_seconds(slower, start, 0) == pytest.approx(2 * taken, rel=1e-3)
    halo = Start(0, "all_to_all", (0, 1), 1000)
    assert message_seconds(slower, halo, 0) == message_seconds(machine, halo, 0)


def test_calibration_finds_what_steps_show(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a machine whose steps take as long as the model says, it finds each speed that only steps show."""
    machine = parse(TEXT.replace("asynchronous = true", "asynchronous = false\ncold = 0.5\nmessage = 3e-4"))
    machine = replace(machine, measured=lambda kernel: 1e-3)
    kernel, group = Kernel("k", 0, 10**7), (0, 1)
    starts = (Start(0, "all_gather", group, 10**7), Start(1, "reduce_scatter", group, 10**7))
    step = RecordedStep((Operator(), kernel, starts[0], Wait(0), kernel, starts[1], Wait(1)), 0, 0, 0)
    seconds = replay(step, machine).total
    monkeypatch.setattr(calibration, "_step", lambda *_: (seconds, step))
    for find, name in (
        (calibration._operator, "operator"),
        (calibration._message, "message"),
        (calibration._cold, "cold"),
    ):
        unknown = replace(machine, host=replace(machine.host, **{name: 0.0}))
        assert find(unknown) == pytest.approx(getattr(machine.host, name))


def test_a_host_that_does_not_wait_hides_behind_kernels(machine: Machine) -> None:
    events: tuple[Event, ...] = (Operator(), Kernel("k", 10**9, 0)) * 10
    ahead = replay(RecordedStep(events, 0, 0, 0), machine)
    assert ahead.total == pytest.approx(2e-4 + 10 * machine.kernel_seconds(Kernel("k", 10**9, 0)))
    behind = replay(RecordedStep(events, 0, 0, 0), parse(TEXT.replace("asynchronous = true", "asynchronous = false")))
    assert behind.total == pytest.approx(behind.compute + 20e-4)


def test_more_bandwidth_never_makes_a_message_slower(machine: Machine) -> None:
    faster = parse(TEXT.replace("bandwidth = 1e9", "bandwidth = 2e9"))
    for kind in ("gradients", "all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all"):
        start = Start(0, kind, (0, 1, 2, 3), 10**6)
        assert message_seconds(faster, start, 1) < message_seconds(machine, start, 1)


@given(st.integers(1, 64), st.sampled_from([3, 4, 5]))
def test_partitions_are_all_ways_to_divide_the_ranks(ranks: int, ndim: int) -> None:
    found = partitions(ranks, ndim)
    assert len(set(found)) == len(found)
    assert {partition.ranks for partition in found} == {ranks}
    divisors = [size for size in range(1, ranks + 1) if ranks % size == 0]
    # Sizes of all axes but the last, which gets the rest: samples, channels, filters and all but one dim of space.
    every = itertools.product(divisors, repeat=ndim)
    sizes = [size for size in every if ranks % math.prod(size) == 0]
    assert len(found) == sum(filters == 1 or channels > 1 for _, channels, filters, *_ in sizes)


def test_candidates_can_be_fixed_and_forbidden() -> None:
    found = partitions(8, 4, ["sample", "height"])
    assert [str(one) for one in found] == ["sample=8", "sample=4,height=2", "sample=2,height=4", "height=8"]
    assert [str(one) for one in allowed("*height=2*", None, found)] == ["sample=4,height=2"]
    assert [str(one) for one in allowed("*height=*", "*height=4", found)] == ["sample=4,height=2", "height=8"]
    with pytest.raises(ValueError, match="matches none"):
        allowed("depth=*", None, found)
    with pytest.raises(ValueError, match="matches all"):
        allowed(None, "*=*", found)
    with pytest.raises(ValueError, match="accepted for 2-D data: sample, channel, filter, height, width"):
        partitions(4, 4, ["depth"])
    assert not fits(Layer("a", ["a"], "", (2, 8, 4, 4), (2, 8, 4, 4)), Partition.parse("sample=4"))


def small() -> nn.Module:
    with torch.device("meta"):
        return small_network.Small()


def test_the_graph_of_a_residual_network() -> None:
    graph = trace(small(), small_network.SHAPE)
    assert {name: layer.modules for name, layer in graph.layers.items()} == {
        "stem.0": ["stem.0", "stem.1", "stem.2"],
        "block.0": ["block.0", "block.1"],
        "model#1": ["relu"],
        "pool": ["pool"],
        "head": ["head"],
    }
    assert graph.first == ["stem.0"] and graph.last == "head"
    assert graph.edges == {
        ("stem.0", "block.0"): (4, 8, 12, 12),
        ("stem.0", "model#1"): (4, 8, 12, 12),
        ("block.0", "model#1"): (4, 8, 12, 12),
        ("model#1", "pool"): (4, 8, 12, 12),
        ("pool", "head"): (4, 8),
    }
    assert len(worthwhile(graph, partitions(4, 4), 3)) == 3


class Undecided(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(3, 3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if bool((self.layer(x) > 0).any()) else -x


class Searching(Undecided):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * {"a": 1}["b"]


class Meeting(Undecided):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.relu(self.layer(x)) + self.two(x, self.layer(x))

    def __init__(self) -> None:
        super().__init__()
        self.two = nn.Bilinear(8, 8, 8)


@pytest.mark.parametrize(
    ("model", "complaint"),
    [
        (Undecided, "Undecided does not run"),
        (Searching, "Searching does not run"),
        (Meeting, "layer two (Bilinear) takes"),
    ],
)
def test_a_model_that_needs_data_is_refused_in_one_line(model: type[nn.Module], complaint: str) -> None:
    with pytest.raises(NoGraph) as refused:
        trace(model().to("meta"), (2, 3, 8, 8))
    assert str(refused.value).startswith(complaint) and "\n" not in str(refused.value)


def test_a_layer_takes_the_channel_algorithm_that_is_the_fastest() -> None:
    """By y the second convolution moves less, but reads all channels, which here takes longer than anything else."""
    model = on_meta(lambda: nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 16, 3, padding=1)))
    graph, channel = trace(model, (2, 8, 12, 12)), Partition.parse("channel=4")

    def seconds(kernel: Kernel) -> float:
        """Reading all channels at once is what takes long."""
        if kernel.call is None or "convolution" not in kernel.name:
            return 1e-9
        shapes = [shape for shape in kernel.call.args if isinstance(shape, Shape) and len(shape.sizes) == 4]
        return max(shape.sizes[1] for shape in shapes[-1:])

    with imagined_job(4):
        recordings = Recordings(model, graph)
        planner = PartitionPlanner(
            model, graph, [channel], replace(read_machine("lassen"), measured=seconds), recordings=recordings
        )
        plan = planner.best()
    assert recordings.algorithms("2", channel) == [None, "x"]
    strategy = Strategy.parse(plan.strategy)
    decided = [strategy.partition(name) for name in "02"]
    assert [strategy.algorithm(pattern) for pattern, _ in decided if pattern] == [None, "x"]


@pytest.mark.parametrize("field", ["memory", "bandwidth", "network", "flops"])
def test_a_better_machine_never_makes_the_choice_slower(machine: Machine, field: str) -> None:
    graph = trace(small(), small_network.SHAPE)
    with imagined_job(4):
        recordings = Recordings(small(), graph)

        def seconds(factor: float) -> float:
            better = {
                "memory": machine,
                "bandwidth": replace(machine, device=replace(machine.device, bandwidth=1e7 * factor)),
                "network": replace(machine, network=replace(machine.network, bandwidth=1e5 * factor)),
                "flops": replace(machine, device=replace(machine.device, flops=1e7 * factor)),
            }[field]
            planner = PartitionPlanner(
                small(), graph, partitions(4, 4, ["sample", "height"]), better, recordings=recordings
            )
            limit = 20_000 * factor if field == "memory" else math.inf
            try:
                return planner.best(limit).seconds
            except DoesNotFit:
                return math.inf

        found = [seconds(factor) for factor in (1, 2, 4, 16)]
    assert found == sorted(found, reverse=True) and found[-1] < found[0]


@settings(max_examples=30, deadline=None)
@given(st.lists(st.sampled_from(["sample=4", "height=4", "channel=4"]), min_size=5, max_size=5))
def test_a_strategy_gives_every_layer_its_partition(chosen: list[str]) -> None:
    model = small()
    graph = trace(model, small_network.SHAPE)
    layers = {name: Partition.parse(text) for name, text in zip(graph.layers, chosen, strict=True)}
    texts = {name: str(partition) for name, partition in layers.items()}
    strategy = Strategy.parse(patterns(model, graph, texts))
    for name, layer in graph.layers.items():
        for module in layer.modules:
            decided = strategy.partition(module)
            assert decided is not None and decided[1] == layers[name], module
    strategy.check({pattern for pattern, _ in strategy.assign(model).values()}, [model])
