"""How a call of a model is computed, and once more within less memory where it fails for want of it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from distconv.model.direct.paths import is_open
from distconv.model.fully_sharded import is_fully_sharded
from distconv.model.whole_calls import why_whole
from distconv.settings.partition import Partition
from distconv.turns.mail import ends_all_ranks
from distconv.turns.undo import Undo
from mucudnn.devices.allocations import is_out_of_memory


class Computation(NamedTuple):
    """How a call is computed: in parts, of which tensors take so many bytes on the device, or whole.

    ``call``: what calls the module, in each part or whole, if it is not its own call. ``smaller``: what to do if there
    is not enough memory after all, from the error in one line; None: nothing. ``gather``: in a job of ranks,
    collective, what every rank gives it.
    """

    partition: Partition | None = None
    memory: int | None = None
    call: Callable[..., Any] | None = None
    smaller: Callable[[str], Computation] | None = None
    gather: Callable[[str], list[str]] | None = None


Choose = Callable[[nn.Module, Any, Any, Sequence[Tensor], str], Computation]
"""Chooses how a call is computed: of a module with its arguments, their tensors, and the kind of device."""


def attempted(
    compute: Callable[[Computation], Any], computation: Computation, module: nn.Module, args: Any, kwargs: Any
) -> Any:
    """The result of a call; where memory does not suffice, of a second one, before which all that the first one has
    changed is put back. The error stays, with a note, if that cannot be done.
    """
    smaller, gather = computation.smaller, computation.gather
    if smaller is None:
        return compute(computation)
    is_in_ranks = gather is not None and computation.partition is None
    undo = None if is_in_ranks else Undo(module, (args, kwargs))
    try:
        with contextlib.nullcontext() if undo is None else undo.watch():
            return compute(computation)
    except Exception as error:
        why = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        lacks, changed = is_out_of_memory(error), ""
        if undo is not None and (gather is None or ends_all_ranks(error)):
            changed = (undo.put_back() or "") if lacks else ""
            if gather is not None:  # All ranks have an error of this call, and come to this.
                lacks, changed = all(gather("lacks" * lacks)), max(gather(changed))
            changed = changed and f"it has changed {changed}"
        else:
            changed = "other ranks may be within it, and wait for this one"
        if changed and lacks:
            error.add_note(f"distconv: --memory: the call is not made again within less, as {changed}")
        if changed or not lacks:
            raise
    return compute(smaller(why))  # Here the error, and with it the tensors of the first call, are gone.


def why_not_in_turn(module: nn.Module, leaves: Sequence[Tensor], may_be_sharded: bool) -> str:
    """Why a call cannot run in turn, whatever its parts; empty if it can. ``may_be_sharded``: if inputs may."""
    if not is_open():
        return "it is called within torch.func or torch.compile"
    tensors = [*module.parameters(), *leaves]
    own = [x for x in module.parameters() if not is_fully_sharded(x)]
    if any(isinstance(x, DTensor) for x in (own if may_be_sharded else [*own, *leaves])):
        return "it has distributed tensors"
    if any(x.is_meta for x in tensors):
        return "its tensors have no numbers"
    if all(hasattr(type(module), name) for name in ("update", "compute")):
        return "it is a metric, which adds up over calls"
    return why_whole(module, leaves)
