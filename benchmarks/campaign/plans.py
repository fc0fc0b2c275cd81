"""What 6 and 8 ranks plan for a network of the campaign, each alone: whether what one sends is what another expects.

The ranks run it for two steps on a group that moves nothing, torch's stand-in for one. What they compute means nothing.
Every message is noted, by kind, members, dtype and sizes.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from random import Random
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

import distconv.model.interface
from benchmarks.campaign.networks import AXES, Case
from benchmarks.campaign.training import train
from benchmarks.campaign.trial import Answer
from benchmarks.rank_pool import Failure, Hang, RankPool
from distconv import settings
from distconv.transfer import group_calls

RANKS = 8
SECONDS = 120.0

PLANS = {
    6: ((6,), (3, 2), (2, 3)),
    8: ((8,), (4, 2), (2, 4), (2, 2, 2)),
}
"""Ranks along each axis."""


class Message(NamedTuple):
    """A collective, as one rank calls it."""

    kind: str
    members: tuple[int, ...]
    dtype: str
    sent: tuple[int, ...]
    """Elements: to each member in an all-to-all, else of the tensor."""
    received: tuple[int, ...]


class _Done:
    def wait(self) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


@contextlib.contextmanager
def noted(messages: list[Message]) -> Iterator[None]:
    """Within it collectives are noted and end at once. What others would send is zero, or what this rank has."""

    def note(kind: str, x: Tensor, group: Any, sent: Sequence[int], received: Sequence[int]) -> _Done:
        members = tuple(dist.get_process_group_ranks(dist.group.WORLD if group is None else group))
        messages.append(Message(kind, members, str(x.dtype), tuple(sent), tuple(received)))
        return _Done()

    def all_to_all(
        output: Tensor, input: Tensor, received: Any = None, sent: Any = None, group: Any = None, async_op: bool = False
    ) -> _Done:
        output.zero_()
        ranks = dist.get_world_size(group)
        sizes = [
            [x.shape[0] // ranks] * ranks if given is None else given
            for x, given in ((input, sent), (output, received))
        ]
        return note("all-to-all", input, group, *sizes)

    def all_reduce(x: Tensor, op: Any = None, group: Any = None, async_op: bool = False) -> _Done:
        return note(f"all-reduce {op}", x, group, [x.numel()], [x.numel()])

    def all_gather(output: Tensor, own: Tensor, group: Any = None, async_op: bool = False) -> _Done:
        output.view(dist.get_world_size(group), -1).copy_(own.reshape(1, -1))
        return note("all-gather", own, group, [own.numel()], [output.numel()])

    def broadcast(x: Tensor, source: int = 0, group: Any = None, async_op: bool = False) -> _Done:
        return note(f"broadcast of {source}", x, group, [x.numel()], [x.numel()])

    stand_ins: dict[str, Callable[..., Any]] = {"all_to_all_single": all_to_all, "all_reduce": all_reduce}
    stand_ins |= {"all_gather_into_tensor": all_gather, "broadcast": broadcast}
    if hasattr(dist, "all_gather_single"):  # its newer name
        stand_ins["all_gather_single"] = all_gather
    own = {"all_to_all_single": all_to_all, "all_reduce": all_reduce, "all_gather_single": all_gather}
    with mock.patch.multiple(dist, **stand_ins), mock.patch.multiple(group_calls, **own):
        yield


def unlike(logs: Sequence[Sequence[Message]]) -> str:
    """What the ranks do not agree on, by their messages; empty if they do."""
    groups = {message.members for log in logs for message in log}
    for members in sorted(groups):
        own = {rank: [message for message in logs[rank] if message.members == members] for rank in members}
        counts = {rank: len(messages) for rank, messages in own.items()}
        if len(set(counts.values())) > 1:
            return f"messages among {members}: {counts}"
        for number, together in enumerate(zip(*own.values(), strict=True)):
            kinds = {(message.kind, message.dtype) for message in together}
            if len(kinds) > 1:
                return f"message {number} among {members}: {sorted(kinds)}"
            if together[0].kind == "all-to-all":
                for i, sender in enumerate(together):
                    for j, receiver in enumerate(together):
                        if sender.sent[j] != receiver.received[i]:
                            what = f"{members[i]} sends {sender.sent[j]}, {members[j]} expects {receiver.received[i]}"
                            return f"message {number} among {members}: {what}"
            elif len({(message.sent, message.received) for message in together}) > 1:
                return f"message {number} among {members}: {together[0].kind} of {[m.sent for m in together]}"
    return ""


def widened(case: Case) -> Case:
    """A case on 6 or 8 ranks, as its seed says; not compiled, and without mucudnn, which knows nothing of ranks."""
    random = Random(f"plans {case['seed']}")
    sizes = random.choice(PLANS[random.choice((6, 8))])
    axes = ["sample", "channel", *AXES[len(case["shape"])] * 2]
    names: list[str] = []
    for _ in sizes:
        names.append(random.choice([axis for axis in axes if axis not in names]))
    partition = ",".join(f"{name}={size}" for name, size in zip(names, sizes, strict=True))
    algorithm = "auto" if case["algorithm"] == "w" else case["algorithm"]
    more = {"partition": partition, "ranks": math.prod(sizes), "algorithm": algorithm}
    return case | more | {"compiled": "", "limit": None}


class Imagined:
    """A rank of a job that is not there."""

    def plan(self, case: Case) -> tuple[str, Any]:
        """("noted", its messages) or ("refused" or "crash", why)."""
        ranks = range(case["ranks"])
        if dist.get_rank() not in ranks:
            return "noted", []
        messages: list[Message] = []
        torch.backends.mkldnn.set_flags(case["dtype"] != "bfloat16")
        with settings.options({"check": "off"}), noted(messages):
            mesh = distconv.init(case["partition"], ranks=ranks, device_type="cpu", channel_algorithm=case["algorithm"])
            try:
                train(case, mesh)
            except distconv.UnsupportedOperation as error:
                return "refused", str(error)[:300]
            except Exception as error:
                return "crash", f"{type(error).__name__}: {error}"[:300]
        return "noted", messages


class Planner:
    """Ranks that plan one network at a time."""

    def __init__(self) -> None:
        self._pool = RankPool(RANKS, Imagined, "fake")

    def of_case(self, case: Case) -> Answer:
        """What becomes of a case on 6 or 8 ranks: right where the ranks agree, refused, or wrong."""
        wide = widened(case)
        answer = {"partition": wide["partition"]}
        try:
            found = self._pool.ask("plan", wide, within=SECONDS)[: wide["ranks"]]
        except Hang as hang:
            return answer | {"outcome": "crash", "said": str(hang)}
        found = [("crash", each.text) if isinstance(each, Failure) else each for each in found]
        kinds = sorted({kind for kind, _ in found})
        if kinds == ["noted"]:
            said = unlike([messages for _, messages in found])
            return answer | {"outcome": "wrong" if said else "right", "said": said}
        told = {text for kind, text in found if kind != "noted"}
        if len(kinds) > 1 or len(told) > 1:
            return answer | {"outcome": "wrong", "said": f"the ranks differ: {kinds}, {sorted(told)}"[:400]}
        return answer | {"outcome": kinds[0], "said": told.pop()}

    def close(self) -> None:
        """Ends the ranks; the next case starts new ones."""
        self._pool.close()
