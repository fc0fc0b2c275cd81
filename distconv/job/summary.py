"""Prints how much a job kept, sent and waited, in two to four lines at its end.

The ranks exchange their figures through the job's key-value store. Nothing is collective: a rank that does not answer
is left out.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Store  # type: ignore[attr-defined]
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from distconv.job.attempt import prefix
from distconv.settings.partition import Partition
from distconv.tensors.untraced import untraced
from distconv.transfer.account import ACCOUNT, most_used_bytes
from mucudnn.process import print_line
from mucudnn.reporting.record import gained
from mucudnn.sizes import format_bytes

if TYPE_CHECKING:
    from mucudnn.runtime.session import Session

ANSWER_WITHIN = timedelta(seconds=5)  # Seconds in which the other ranks may send their figures.

MUCH = 0.25  # The share of a step from which on the lines say where the job waits.


@dataclass(frozen=True)
class RankFigures:
    """The figures of one rank."""

    peak: int  # The most bytes that it had.
    before: int  # Bytes that it had before the first call of a model.
    kept: int  # Bytes of gradients and of the optimizers' states, which it keeps from step to step.
    kept_whole: int  # These bytes for the whole model.
    sent: float  # Bytes per step.
    waited: float | None  # The share of a step, from 0 to 1, in which it waited; None on a GPU.
    steps: int  # Steps of the optimizer that stepped most; without optimizers, calls of models.
    is_training: bool  # Whether an optimizer stepped.


def sentences(partition: Partition, shares: Sequence[RankFigures], parts: Partition | None = None) -> list[str]:
    """The sentences about a job, by what its ranks report, the first rank first.

    ``parts``: those that each rank computes in turn, whose memory says nothing of what one process would need.
    """
    steps, ranks = shares[0].steps, f"{partition.ranks} ranks ({partition})"
    if parts is not None:
        ranks += f", each with parts {parts} in turn"
    if not steps:
        return [f"{ranks}: no model was called"]
    unit, units = ("step", "steps") if shares[0].is_training else ("call of the model", "calls of the model")
    memory = f"memory of a rank at most {format_bytes(max(share.peak for share in shares))}"
    alone = shares[0].before + shares[0].kept_whole
    alone += sum(max(0, share.peak - share.before - share.kept) for share in shares)
    lines = [f"{ranks}, {steps} {unit if steps == 1 else units}: {memory}"]
    if parts is None:
        lines[0] += f"; one process would need about {format_bytes(alone)}"
    sent = f"a rank sent at most {format_bytes(round(max(share.sent for share in shares)))} per {unit}"
    waits = [share.waited for share in shares if share.waited is not None]
    if not waits:
        return [*lines, sent]
    mean = sum(waits) / len(waits)
    lines.append(f"{sent}; ranks waited for others in {mean:.0%} of their time ({min(waits):.0%} to {max(waits):.0%})")
    if mean >= MUCH and parts is None:
        lines.append("next: distconv run --partition auto looks for a better partition")
    return lines


@contextlib.contextmanager
def summed_up(
    store: Store, partition: Partition, wanted: bool | None, parts: Partition | None = None
) -> Iterator[None]:
    """A context in which a script runs; at its end the first rank prints what the job kept, sent and waited for.

    Args:
        wanted: None prints it where the first rank's stderr is a terminal.
        parts: those that each rank computes in turn, if it does.
    """
    if wanted is False:
        yield
        return
    steps = StepCounts()
    hook = register_optimizer_step_post_hook(untraced(steps.stepped))
    try:
        with at_good_end(lambda: _report(store, partition, parts, wanted, _share(steps))):
            yield
    finally:
        hook.remove()


@contextlib.contextmanager
def summed_up_in_turn(how: str, wanted: bool | None) -> Iterator[None]:
    """A context in which a script computes as ``how`` says; at its end a line reports the memory that it took."""
    steps = StepCounts()
    hook = register_optimizer_step_post_hook(steps.stepped)

    def report() -> None:
        if is_shown(wanted):
            count = max(steps.counts.values(), default=0)
            trained = f", {count} step{'s' if count > 1 else ''}" if count else ""
            show_summary(
                "distconv", [f"{how}{trained}: memory of the process at most {format_bytes(most_used_bytes())}"]
            )

    try:
        with at_good_end(report):
            yield
    finally:
        hook.remove()


class StepCounts:
    """The steps of optimizers, and the bytes that these keep from step to step, on this rank and of whole tensors."""

    def __init__(self) -> None:
        self.counts: dict[int, int] = {}
        self.kept = self.kept_whole = 0

    def stepped(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """An optimizer has stepped."""
        self.counts[id(optimizer)] = self.counts.get(id(optimizer), 0) + 1
        if self.counts[id(optimizer)] > 1:
            return
        ACCOUNT.stepped()
        states = [x for state in optimizer.state.values() for x in state.values() if isinstance(x, Tensor)]
        for x in [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None] + states:
            self.kept += (x.to_local() if isinstance(x, DTensor) else x).numel() * x.element_size()
            self.kept_whole += x.numel() * x.element_size()


def _report(store: Store, partition: Partition, parts: Partition | None, wanted: bool | None, own: RankFigures) -> None:
    at = prefix("summary")
    if dist.get_rank():
        store.set(f"{at}/{dist.get_rank()}", json.dumps(asdict(own)))
        return
    if not is_shown(wanted):
        return
    names = [f"{at}/{rank}" for rank in range(1, dist.get_world_size())]
    try:
        store.wait(names, ANSWER_WITHIN)
    except RuntimeError:  # torch's store errors: a rank is late
        names = [name for name in names if store.check([name])]
    shares = [own, *(RankFigures(**json.loads(store.get(name))) for name in names)]
    show_summary("distconv", sentences(partition, shares, parts))


@contextlib.contextmanager
def local_gain(session: Session, wanted: bool | None) -> Iterator[None]:
    """A context in which a script runs; at its end the first rank prints what mucudnn has saved there."""

    def report() -> None:
        if dist.get_rank() == 0 and is_shown(wanted):
            show_summary("mucudnn on rank 0", gained(session.outcome())[:-1])

    with at_good_end(report):
        yield


def is_shown(wanted: bool | None) -> bool:
    """Whether the first rank prints a summary; None: where its stderr is a terminal."""
    return sys.stderr.isatty() if wanted is None else wanted


def show_summary(who: str, sentences: Sequence[str]) -> None:
    """Prints sentences of a summary."""
    for sentence in sentences:
        print_line(f"{who}: {sentence}")


@contextlib.contextmanager
def at_good_end(action: Callable[[], None]) -> Iterator[None]:
    """A context at whose end an action is taken, unless what runs within ends with an error."""
    try:
        yield
    except SystemExit as end:
        if not end.code:
            action()
        raise
    action()


def _share(of: StepCounts) -> RankFigures:
    is_training = bool(of.counts)
    first = ACCOUNT.first_step if is_training else ACCOUNT.first_call
    steps = max(of.counts.values(), default=ACCOUNT.calls)
    now, waited = ACCOUNT.mark(), None
    sent = now.sent / max(steps, 1)
    if first is not None and steps > 1:
        sent = (now.sent - first.sent) / (steps - 1)  # in the first step models are compared, and plans made
        if not torch.cuda.is_available():
            waited = (now.waited - first.waited) / max(now.at - first.at, 1e-9)
    return RankFigures(most_used_bytes(), ACCOUNT.before, of.kept, of.kept_whole, sent, waited, steps, is_training)
