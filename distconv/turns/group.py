"""A process group whose members are the parts, of this process and of other ranks: torch.distributed's collectives."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode

from distconv.rules.operands.once import thread
from distconv.turns import collectives
from distconv.turns.baton import Baton, UnlikeCollectives
from distconv.turns.collectives import CollectiveArguments
from distconv.turns.mail import Letter, Mail, MailState
from distconv.turns.rounds import Collective, CommonRound, FarMembers, Round, RowsRound

BACKEND = "in_turn"


Key = tuple[tuple[int, ...], int]
"""The key of a group: its members, and how many groups of the same members were made before."""


class PendingCollectives:
    """The collectives of all groups that some members have not joined yet.

    ``mail``: between the parts of this rank and of others. None: there are no others, or they are imagined.
    """

    def __init__(self, mail: Mail | None = None) -> None:
        self.baton: Baton | None = None
        self.mail = mail
        self.moved = 0  # Bytes that members here have received from others.
        self.sent = 0  # Bytes that they have sent to other ranks.
        self._rounds: dict[tuple[Key, int], Round] = {}
        self._early: dict[tuple[Key, int], list[Letter]] = {}  # Letters to members that have not joined.

    def join(self, group: Key, number: int, round: Round, at: int, given: CollectiveArguments) -> Round:
        """Member ``at`` joins the collective with a number in its group: ``round`` if it is the first one to join, else
        the round that the first one has begun, which is returned."""
        key = group, number
        found = self._rounds.setdefault(key, round)
        if found.name != round.name:
            raise UnlikeCollectives(
                f"the parts are in unlike collectives: {found.name}, and part {at} of the group {round.name}"
            )
        with torch.inference_mode():
            for letter in self._early.pop(key, ()):
                _receive(found, letter)
            self.moved += found.join(at, given)
        if found.is_complete():
            del self._rounds[key]
        return found

    def send(
        self, group: Key, number: int, name: str, to: int, members: tuple[int, int], given: Sequence[Tensor]
    ) -> None:
        """Sends tensors to a rank; ``members``: the one that sends, and the one that receives, -1 for all there."""
        self.sent += sum(x.nbytes for x in given)
        if self.mail is not None:
            self.mail.send(to, [group[0], group[1], number, name, *members], given)

    def exchange(self, waits: bool, failure: BaseException | None) -> tuple[bool, BaseException | None]:
        """Exchanges mail with other ranks, as no part here can go on. Collective over the ranks.

        Args:
            waits: whether some parts here have not ended.
            failure: the error that one of them has raised.

        Returns:
            Whether this was the last exchange, and the error with which all parts are to end.
        """
        assert self.mail is not None
        state = MailState.FAILED if failure is not None else MailState.WAITING if waits else MailState.ENDED
        delivery = self.mail.exchange(state, failure)
        if delivery.failure is not None or delivery.have_ended:
            return True, delivery.failure
        if delivery.is_silent:
            return True, UnlikeCollectives("the parts of all ranks wait for each other in unlike collectives")
        try:
            for letter in delivery.letters:
                self._deliver(letter)
        except (UnlikeCollectives, ValueError) as error:
            return False, error
        return False, None

    def _deliver(self, letter: Letter) -> None:
        ranks, made, number, *_ = letter.about
        key = (tuple(ranks), made), number
        if key not in self._rounds:
            self._early.setdefault(key, []).append(letter)
            return
        _receive(self._rounds[key], letter)
        if self._rounds[key].is_complete():
            del self._rounds[key]

    def forget(self) -> None:
        """After a failure: drops all collectives and letters."""
        self._rounds.clear()
        self._early.clear()
        if self.mail is not None:
            self.mail.clear()


def _receive(round: Round, letter: Letter) -> None:
    *_, name, at, to = letter.about
    if name != round.name:
        raise UnlikeCollectives(f"the parts are in unlike collectives: {round.name}, and on another rank {name}")
    round.receive(at, to, letter.tensors)


class TurnWork(dist.Work):
    """A part's handle of a collective, which other parts join while they run."""

    def __init__(self, group: TurnGroup, round: Round) -> None:
        super().__init__()
        self._group, self._round = group, round

    def wait(self, timeout: Any = None) -> bool:
        self._group.wait(self._round)
        return True

    def is_completed(self) -> bool:
        """Always true: a part that asks waits here, while the other parts run."""
        return self.wait()


_ProcessGroup: Any = dist.ProcessGroup  # its overloads are for callers


class TurnGroup(_ProcessGroup):  # type: ignore[misc]
    """The process group of some parts, as one of them has it.

    Args:
        key: the same for all members.
        part: the number of this part among those of its rank.
        far: the ranks of members that are parts of other ranks, by member.
    """

    def __init__(
        self, rank: int, size: int, name: str, pending: PendingCollectives, key: Key, part: int, far: Mapping[int, int]
    ) -> None:
        super().__init__(rank, size)
        self._rank, self._size, self._name = rank, size, name
        self._pending, self._key, self._part, self._far = pending, key, part, far
        self._number = 0

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return self._rank

    @property
    def group_name(self) -> str:
        return self._name

    def getBackendName(self) -> str:
        return BACKEND

    def _get_backend(self, device: torch.device) -> TurnGroup:
        return self

    def restart(self) -> None:
        """Counts collectives from 0 again: after a failure, members have joined different numbers of them."""
        self._number = 0

    def wait(self, round: Round) -> None:
        """Lets other parts run until this one may go on."""
        if not round.may_go_on(self._rank):
            assert self._pending.baton is not None
            self._pending.baton.wait(self._part, lambda: round.may_go_on(self._rank), round.name)
        with torch.inference_mode(), _paging_within_operators():
            self._pending.moved += round.leave(self._rank)

    def _join(self, collective: Collective, given: CollectiveArguments) -> TurnWork:
        name = collective.__name__
        return self._joined(CommonRound(collective, self._size, self._far_members(name)), given)

    def _far_members(self, name: str) -> FarMembers:
        number = self._number

        def send(rank: int, at: int, to: int, tensors: Sequence[Tensor]) -> None:
            self._pending.send(self._key, number, name, rank, (at, to), tensors)

        return FarMembers(self._far, send, self._pending.mail is None)

    def _joined(self, round: Round, given: CollectiveArguments) -> TurnWork:
        number, self._number = self._number, self._number + 1
        with _paging_within_operators():
            found = self._pending.join(self._key, number, round, self._rank, given)
        return TurnWork(self, found)

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> TurnWork:
        return self._join(
            collectives.all_reduce, CollectiveArguments(tensors, (), (opts or dist.AllreduceOptions()).reduceOp)
        )

    allreduce_coalesced = allreduce

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> TurnWork:
        root = (opts or dist.BroadcastOptions()).rootRank
        return self._join(
            collectives.broadcast, CollectiveArguments(tensors if root == self._rank else (), tensors, root)
        )

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> TurnWork:
        (parts,) = outputs
        return self._join(collectives.all_gather, CollectiveArguments(inputs, parts))

    def all_gather_single(self, output: Tensor, source: Tensor, opts: Any = None) -> TurnWork:
        return self.all_gather_single_coalesced([output], [source], opts)

    def all_gather_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> TurnWork:
        return self._join(collectives.all_gather_single, CollectiveArguments(inputs, outputs))

    def reduce_scatter_single(self, output: Tensor, source: Tensor, opts: Any = None) -> TurnWork:
        return self.reduce_scatter_single_coalesced([output], [source], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> TurnWork:
        op = (opts or dist.ReduceScatterOptions()).reduceOp
        return self._join(collectives.reduce_scatter_single, CollectiveArguments(inputs, outputs, op))

    def all_to_all_single(
        self,
        output: Tensor,
        source: Tensor,
        output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None,
        opts: Any = None,
    ) -> TurnWork:
        sent, received = (
            list(sizes) if sizes else [tensor.shape[0] // self._size] * self._size
            for tensor, sizes in ((source, input_split_sizes), (output, output_split_sizes))
        )
        return self._joined(
            RowsRound(self._size, self._far_members(RowsRound.name)),
            CollectiveArguments([source], [output], (sent, received)),
        )

    def barrier(self, opts: Any = None) -> TurnWork:
        return self._join(collectives.barrier, CollectiveArguments())

    # The names of these collectives before torch 2.13.
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    alltoall_base = all_to_all_single


def _paging_within_operators() -> Any:
    """A context in which a part's pager sees the operators of a collective, also within one of torch's own functional
    collectives: that is one operator, within which torch hides all others from the pager."""
    paging = getattr(thread.as_one, "__self__", None)
    hidden = paging is not None and _get_current_dispatch_mode() is None
    return paging if hidden else contextlib.nullcontext()
