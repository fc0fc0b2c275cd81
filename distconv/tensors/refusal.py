"""The error of an operator that cannot run on its shards: one line with operator, operands, place and remedy."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from distconv.tensors.arguments import each_of

Operand = tuple[tuple[int, ...], Sequence[Placement], DeviceMesh]
"""A distributed tensor in an error: the shape of the whole, its placements and its mesh."""


class UnsupportedOperation(NotImplementedError):
    """An operator that cannot run on its shards; raised on every rank, before the operator communicates.

    ``operator`` is its name, ``why`` the reason, ``operands`` the shapes of its whole distributed tensors with their
    layouts in words, ``line`` the line of the program that asked for it; empty where they are not known.
    ``whole_helps`` is whether the operator can run on whole tensors instead.
    """

    operator = ""
    why = ""
    operands: tuple[tuple[tuple[int, ...], str], ...] = ()
    line = ""
    whole_helps = True


def refuse(func: Any, why: str, *, whole_helps: bool = True) -> UnsupportedOperation:
    """The error to raise for an operator that cannot run on these shards, or on whole tensors either."""
    error = UnsupportedOperation(f"{func}: {why}")
    error.operator, error.why, error.whole_helps = str(func), why, whole_helps
    return error


ADVICE = "accepted: whole tensors, as distconv.gather gives, or another partition for this layer"
"""The remedies for a refusal that does not name any."""

_SAYS_WHAT_TO_DO = re.compile(r"accepted|\b[uU]se ")


def complete(
    error: UnsupportedOperation, func: Any, operands: Sequence[Operand], line: Callable[[], str]
) -> UnsupportedOperation:
    """The same error, its message with operator, shapes, layouts, line and advice; once, by the innermost operator."""
    if error.line:
        return error
    mesh = operands[0][2] if operands else None
    why = error.why or str(error).removeprefix(f"{func}: ")
    error.operator, error.why = str(func), why if mesh is None else placements_in_words(why, mesh)
    error.operands = tuple((shape, in_words(placements, own)) for shape, placements, own in operands)
    error.line = line()
    given = "; ".join(dict.fromkeys(f"{shape} {words}" for shape, words in error.operands))
    parts = [f"{error.operator}: {error.why}", f"operands: {given}" if given else "", error.line]
    if not _SAYS_WHAT_TO_DO.search(error.why):
        parts.append(ADVICE)
    error.args = ("; ".join(part for part in parts if part).replace("\n", " "),)
    return error


def operands_of(values: Sequence[Any]) -> list[Operand]:
    """The distributed tensors among arguments, and in lists of them."""
    return [(tuple(x.shape), x.placements, x.device_mesh) for x in each_of(DTensor, values)]


def in_words(placements: Sequence[Placement], mesh: DeviceMesh) -> str:
    """A layout as people say it, such as ``[dim 2 by height over 2 ranks]``; ``[whole]`` where every rank has all."""
    names = mesh.mesh_dim_names or tuple(f"axis {axis}" for axis in range(mesh.ndim))
    words = []
    for axis, (name, placement) in enumerate(zip(names, placements, strict=False)):
        if mesh.size(axis) > 1 and not placement.is_replicate():
            what = f"dim {placement.dim}" if hasattr(placement, "dim") else "a partial sum"
            words.append(f"{what} by {name} over {mesh.size(axis)} ranks")
    return f"[{', '.join(words) or 'whole'}]"


_ONE = r"_?(?:Strided)?(?:Shard|Replicate|Partial|MaskPartial)\([^()]*\)"
_LAYOUT = re.compile(rf"[(\[]{_ONE}(?:, {_ONE})*,?[)\]]")
_PLACEMENT = re.compile(_ONE)
_DIM = re.compile(r"dim=(-?\d+)")


def placements_in_words(text: str, mesh: DeviceMesh) -> str:
    """A reason with torch's names of placements replaced by words."""

    def said(match: re.Match[str]) -> str:
        return in_words([_placement(each) for each in _PLACEMENT.findall(match[0])], mesh)

    return _LAYOUT.sub(said, text)


def _placement(text: str) -> Placement:
    """The placement that torch prints as ``text``, as far as `in_words` needs it."""
    dim = _DIM.search(text)
    return Shard(int(dim[1])) if dim else Replicate() if text.startswith("Replicate") else Partial()
