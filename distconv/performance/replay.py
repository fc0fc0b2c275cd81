"""Replays a recorded step on a machine: a lane for the host, one for kernels and one for messages."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

from distconv.performance.events import Kernel, RecordedStep, Start, Wait
from distconv.performance.machine import Machine, Node, NodeNetwork


@dataclass(frozen=True)
class Times:
    """Seconds of one step on one rank.

    Attributes:
        total: from the first kernel to the last.
        compute: in which kernels run.
        exposed: in which the rank waits for messages.
        messages: seconds of all messages by kind, hidden ones too.
    """

    total: float
    compute: float
    exposed: float
    messages: dict[str, float]

    @property
    def hidden(self) -> float:
        """Seconds of messages behind which the rank computes."""
        return max(0.0, math.fsum(self.messages.values()) - self.exposed)


def message_seconds(machine: Machine, start: Start, rank: int) -> float:
    """A collective's time within a step, all ranks of the job taking part in one like it at the same time.

    All-to-alls take a latency per message, and the bytes of the busier of the two ways; the ranks of a node share its
    adapter. Reductions take a ring, 2 (p - 1) steps of m / p bytes, or two trees, 2 log2 p steps, where the machine has
    trees and they take less (Thakur, Rabenseifner and Gropp 2005); gathers and scatters are half a ring.

    ``rank``: whose time it is.
    """
    node, network = machine.node, machine.network
    mine = rank // node.ranks
    if start.kind == "all_to_all":
        sent = start.sent or (start.bytes // len(start.ranks),) * len(start.ranks)
        others = [
            (peer // node.ranks == mine, size) for peer, size in zip(start.ranks, sent, strict=True) if peer != rank
        ]
        near, far = (
            [size for here, size in others if here and size],
            [size for here, size in others if not here and size],
        )
        latency = len(near) * node.latency + len(far) * network.latency
        busiest = max(sum(near) / node.bandwidth, sum(far) * node.ranks / network.bandwidth)
        return latency + busiest if near or far else node.latency
    ranks = len(start.ranks)
    together = sum(1 for peer in start.ranks if peer // node.ranks == mine)
    within: Node | NodeNetwork = node if together == ranks else network
    latency, bandwidth = within.latency, node.bandwidth
    if within is network:
        # Groups with fewer ranks on a node than run there share its adapter with other such groups.
        bandwidth = min(bandwidth, network.bandwidth * together / node.ranks)
    steps = {"all_reduce": 2, "gradients": 2, "all_gather": 1, "reduce_scatter": 1}.get(start.kind)
    depth = math.ceil(math.log2(ranks))
    if steps is None:
        return depth * latency + start.bytes / bandwidth
    bandwidth /= within.sums if steps == 2 else within.gathers if start.kind == "all_gather" else within.scatters
    ring = steps * (ranks - 1) * (latency + start.bytes / ranks / bandwidth)
    tree = steps * (depth * latency + start.bytes / bandwidth)
    return min(ring, tree) if steps == 2 and network.trees else ring


def replay(step: RecordedStep, machine: Machine) -> Times:
    """A step's times, one network lane taking one collective after the other."""
    return _ahead(step, machine) if machine.host.asynchronous else _in_turn(step, machine)


def _in_turn(step: RecordedStep, machine: Machine) -> Times:
    """Where the host runs the kernels itself: while it does, messages are slower, and kernels are slower for them."""
    host = machine.host
    lane = _Lane(host.carries, host.slows)
    compute = exposed = 0.0
    messages: dict[str, float] = {}
    for event in step.events:
        if isinstance(event, Wait):
            exposed += lane.wait(event.number)
            continue
        lane.work(host.operator + host.message * isinstance(event, Start))
        if isinstance(event, Kernel):
            seconds = machine.kernel_seconds(event)
            lane.work(seconds)
            compute += seconds
        elif isinstance(event, Start):
            seconds = message_seconds(machine, event, step.rank)
            lane.under_way.append((event.number, seconds))
            messages[event.kind] = messages.get(event.kind, 0.0) + seconds
    for number, _ in list(lane.under_way):
        exposed += lane.wait(number)
    return Times(lane.now, compute, exposed, messages)


class _Lane:
    """Messages under way, the first of which goes on while the rank computes or waits.

    Attributes:
        now: seconds since the step began.
        under_way: numbers of messages and the seconds that they still take where nobody computes, in their order.
    """

    def __init__(self, carries: float, slows: float) -> None:
        self.share, self.slows = 1 - carries, slows
        self.now = 0.0
        self.under_way: deque[tuple[int, float]] = deque()

    def work(self, seconds: float) -> None:
        """The rank computes for so long, and longer while messages are under way."""
        while self.under_way and seconds > 0:
            number, left = self.under_way.popleft()
            took = min(left * self.slows, seconds / self.share if self.share else math.inf)
            self.now += took
            seconds -= took * self.share
            if took < left * self.slows:
                self.under_way.appendleft((number, left - took / self.slows))
                seconds = 0.0
        self.now += seconds

    def wait(self, number: int) -> float:
        """Seconds until a message has arrived; those before it arrive first."""
        waited = 0.0
        while any(number == other for other, _ in self.under_way):
            waited += self.under_way.popleft()[1]
        self.now += waited
        return waited


def _ahead(step: RecordedStep, machine: Machine) -> Times:
    """Where kernels run while the host goes on."""
    host = kernels = network = 0.0
    compute = exposed = 0.0
    ends: dict[int, tuple[float, float]] = {}  # of a message: its end, and how long it takes
    messages: dict[str, float] = {}
    for event in step.events:
        if not isinstance(event, Wait):
            host += machine.host.operator + machine.host.message * isinstance(event, Start)
        if isinstance(event, Kernel):
            seconds = machine.kernel_seconds(event)
            kernels = max(host, kernels) + seconds
            compute += seconds
        elif isinstance(event, Start):
            seconds = message_seconds(machine, event, step.rank)
            network = max(network, kernels, host) + seconds
            ends[event.number] = network, seconds
            messages[event.kind] = messages.get(event.kind, 0.0) + seconds
        elif isinstance(event, Wait):
            now, (end, seconds) = max(kernels, host), ends[event.number]
            waited = max(0.0, end - now)
            exposed += waited
            kernels = now + waited + machine.host.carries * max(0.0, seconds - waited)
    return Times(max(host, kernels, network), compute, exposed, messages)
