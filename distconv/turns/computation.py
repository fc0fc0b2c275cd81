"""How a call of a model is computed, and once more within less memory where it fails for want of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from distconv.model.direct.paths import is_open
from distconv.model.fully_sharded import is_fully_sharded
from distconv.model.whole_calls import why_whole
from distconv.settings.partition import Partition
from distconv.turns.undo import Undo
from mucudnn.devices.allocations import is_out_of_memory


class Computation(NamedTuple):
    """How a call is computed: in parts, of which tensors take so many bytes on the device, or whole.

    ``call``: what calls a module that runs whole, if it is not its own call. ``smaller``: what to do if there is not
    enough memory after all, from the error in one line; None: nothing.
    """

    partition: Partition | None = None
    memory: int | None = None
    chained: bool = False
    call: Callable[..., Any] | None = None
    smaller: Callable[[str], Computation] | None = None


Choose = Callable[[nn.Module, Any, Any, Sequence[Tensor], str], Computation]
"""Chooses how a call is computed: of a module with its arguments, their tensors, and the kind of device."""


def attempted(
    compute: Callable[[Computation], Any], computation: Computation, module: nn.Module, args: Any, kwargs: Any
) -> Any:
    """The result of a call; where memory does not suffice, of a second one, before which all that the first one has
    changed is put back. The error stays, with a note, if that cannot be done.
    """
    if computation.smaller is None:
        return compute(computation)
    undo = Undo(module, (args, kwargs))
    try:
        with undo.watch():
            return compute(computation)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        changed = undo.put_back()
        if changed is not None:
            error.add_note(f"distconv: --memory: the call is not made again within less, as it has changed {changed}")
            raise
        why = " ".join(f"{type(error).__name__}: {error}".split())[:200]
    return compute(computation.smaller(why))  # Here the error, and with it the tensors of the first call, are gone.


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
