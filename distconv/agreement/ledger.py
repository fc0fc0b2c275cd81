"""Ledger: notes what the ranks must agree on, and compares it among them with one small message per step.

It notes the tensors that must be whole and equal on every rank: inputs of models, tensors that distconv.shard cuts,
plain tensors beside a distributed one (targets, constants), and a model's parameters and buffers at its first call and
after load_state_dict. Every comparison also covers the next few parameters and buffers, in turn.

A comparison starts when backward delivers its first gradients, or at the latest when an optimizer begins a step. In
programs that only go forward it starts at the next ``.item()`` or gather, or after ``CALLS`` calls. The verdict is read
before an optimizer steps. A step on tensors of the program's own, which one rank alone may take, starts no comparison:
it only reads the one under way. On a host, reading the verdict waits for a message that has arrived by then. On a GPU
nothing waits: the verdict is copied to pinned memory during the computation, and one that has not arrived when an
optimizer begins a step is read at the next, which waits only if the device is a whole step behind. The first call of a
model waits for its verdict before anything else is sent.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterator, Sequence, Set

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from distconv.agreement.comparison import Comparison
from distconv.agreement.disagreement import Note, Site
from distconv.agreement.samples import checksum
from distconv.private_names import TRANSFORMS, lacks
from distconv.tensors import hooks
from distconv.tensors.layouts import coordinate
from distconv.tensors.mesh import batch_norm_statistics, is_compared, is_ours, is_the_programs, ranks_of, sharded_dims
from distconv.tensors.user_lines import script_line
from distconv.transfer.tracing import is_traced

CALLS = 64  # Calls of models after which a comparison is started, where nothing else starts one.


class Ledger:
    """The notes for the ranks of one mesh, and the comparisons under way."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh
        self.models: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # The models that were called on the mesh.
        self.counted = 0  # How many models that were, those that are gone included.
        self._turns: weakref.WeakKeyDictionary[nn.Module, Turns] = weakref.WeakKeyDictionary()
        self._made = 0
        self._forget()

    def _forget(self) -> None:
        self._noted: list[Note[Tensor]] = []
        self._seen: dict[int, tuple[weakref.ref[Tensor], int]] = {}
        self._called: dict[nn.Module, None] = {}
        self._comparisons: list[tuple[Comparison, int]] = []
        self._steps = self._calls = 0
        self.due = False
        """Whether a model was called, or a tensor cut, since the last comparison: then all ranks expect another one."""
        self.urgent = False  # Whether its verdict must be there before the model runs.

    def note(self, what: str, x: Tensor, *, line: str | None = None) -> None:
        """Take the tensor, whole on this rank, to be the same on every rank."""
        if x.is_meta or is_traced(x) or (not lacks(TRANSFORMS) and torch._C._functorch.is_functorch_wrapped_tensor(x)):
            return
        site = Site(what, tuple(x.shape), str(x.dtype), script_line() if line is None else line)
        with torch.no_grad():
            self._noted.append(Note(site, checksum(x)))

    def note_together(self, what: str, sites: Sequence[Site], checksums: Tensor) -> None:
        """Notes many tensors at once, by their checksums."""
        self._noted.append(Note(Site(what, tuple(checksums.shape), "", ""), checksums, within=sites))

    def note_once(self, what: str, x: Tensor) -> None:
        """Notes a tensor that several functions read: at the first one, and again if it has changed since."""
        if not x.is_inference():
            seen = self._seen.get(id(x))
            if seen is not None and seen[0]() is x and seen[1] == x._version:
                return
            self._seen[id(x)] = weakref.ref(x), x._version
        self.note(what, x)

    def called(self, module: nn.Module) -> None:
        """An outermost call of a model begins."""
        self._called[module] = None
        self.counted += module not in self.models
        self.models.add(module)
        self._calls += 1
        self.due = True
        if self.urgent or self._calls >= CALLS:
            self.compare()
            self.settle(now=True)
            self.due = True

    def compare(self) -> None:
        """Start a comparison. Collective over the mesh."""
        noted, self._noted = self._noted, []
        self._seen.clear()
        turn = self._turn()
        self._called.clear()
        self.due = self.urgent = False
        self._calls = 0
        self._comparisons.append((Comparison(self.mesh, noted, turn, self._made), self._steps))
        self._made += 1

    def _turn(self) -> list[Note[Tensor]]:
        if not self._called:
            return []
        module = list(self._called)[self._made % len(self._called)]
        turns = self._turns.setdefault(module, Turns())
        with torch.no_grad():
            # Statistics of each rank's own share differ on purpose.
            return turns.take(module, buffers=batch_norm_statistics.get(self.mesh) != "local")

    def settle(self, now: bool = False) -> None:
        """Read the verdicts: those at hand, those of an earlier step, or ``now`` all. Disagreement where there is
        one; then nothing noted so far counts any more."""
        comparisons, self._comparisons = self._comparisons, []
        for index, (comparison, step) in enumerate(comparisons):
            if not (now or step < self._steps or comparison.arrived()):
                self._comparisons = comparisons[index:]
                break
            try:
                comparison.settle()
            except BaseException:
                self._forget()
                raise
        self._steps += 1


_ledgers: dict[frozenset[int], Ledger] = {}  # Ledgers by the ranks of their meshes.

_of_mesh: dict[DeviceMesh, Ledger] = {}


def ledger(mesh: DeviceMesh) -> Ledger | None:
    """The ledger of a mesh; None where nothing is to be checked: on one rank alone, and with DISTCONV_CHECK=off."""
    if not is_compared(mesh):
        return None
    if mesh not in _of_mesh:
        _of_mesh[mesh] = _ledgers.setdefault(_ranks(mesh), Ledger(mesh))
    return _of_mesh[mesh]


def forget_all(*_: object) -> None:
    """Drops all notes, in a process that cannot compare them."""
    _ledgers.clear()
    _of_mesh.clear()


hooks.after_jobs.append(forget_all)


def compare_if_due(mesh: DeviceMesh) -> None:
    """Start the comparisons that are due among ranks of the mesh. Collective over it; none where nothing is checked."""
    if is_compared(mesh):
        _compare_if_due(_ranks(mesh))


def _compare_if_due(ranks: Set[int]) -> None:
    for each in _among(ranks):
        if each.due:
            each.compare()


def settle(mesh: DeviceMesh) -> None:
    """Start what is due among ranks of the mesh and read the verdicts, as ``Ledger.settle``. Collective over it."""
    if is_compared(mesh):
        compare_if_due(mesh)
        for each in _among(_ranks(mesh)):
            each.settle()


def finish_comparisons(mesh: DeviceMesh) -> None:
    """Compare all that is left and read the verdicts, at the end of a script on the mesh. Collective over it."""
    for each in _among(_ranks(mesh)):
        each.compare()
        each.settle(now=True)


@functools.lru_cache(maxsize=64)
def _ranks(mesh: DeviceMesh) -> frozenset[int]:
    return frozenset(ranks_of(mesh))


def _among(ranks: Set[int]) -> list[Ledger]:
    """The ledgers whose ranks are all among these: other ranks of a ledger would not take part."""
    return [each for members, each in _ledgers.items() if members <= ranks]


_stepping: weakref.WeakKeyDictionary[Optimizer, tuple[list[int], set[int]]] = weakref.WeakKeyDictionary()
"""The ranks on which optimizers step, as found when so many models had been called."""


def before_step(optimizer: Optimizer, *_: object) -> None:
    """Runs before an optimizer steps, whose parameters are those that its models have now. Collective over the ranks
    that have parameters of its models."""
    ranks = _ranks_that_step(optimizer)
    _compare_if_due(ranks)
    for each in _among(ranks) if ranks else _ledgers.values():
        each.settle()


def _ranks_that_step(optimizer: Optimizer) -> set[int]:
    """The ranks of the meshes on which models with parameters of the optimizer were called."""
    models = [each.counted for each in _ledgers.values()]  # Garbage may live longer on one rank than on another.
    known, found = _stepping.get(optimizer, ([], set()))
    if known == models:
        return found
    parameters = {id(parameter): parameter for group in optimizer.param_groups for parameter in group["params"]}
    found = set()
    for each in parameters.values():
        if isinstance(each, DTensor) and is_ours(each.device_mesh):
            found |= _ranks(each.device_mesh)
    for members, theirs in _ledgers.items():
        if any(id(parameter) in parameters for module in theirs.models for parameter in module.parameters()):
            found.update(members)
    _stepping[optimizer] = models, found
    return found


def note_state(module: nn.Module, mesh: DeviceMesh) -> None:
    """Note a model's parameters and buffers, before it is called; what is sharded already is left to its turn."""
    found = ledger(mesh)
    if found is None:
        return
    found.urgent = True
    kinds: list[tuple[str, Iterator[tuple[str, Tensor]]]] = [("parameter", module.named_parameters())]
    if batch_norm_statistics.get(mesh) != "local":
        kinds.append(("buffer", module.named_buffers()))
    for kind, named in kinds:
        for name, tensor in named:
            if not isinstance(tensor, DTensor):
                found.note(f"{kind} {name} of {type(module).__name__}", tensor, line="")


BYTES = 1 << 18
"""The most bytes that a rank reads in one comparison, if not a single tensor: a fraction of a millisecond on a host."""

TENSORS = 8  # No more tensors than these in one comparison: each costs some ten microseconds.


class Turns:
    """Cycles through the tensors of a module, in the same order on every rank."""

    def __init__(self) -> None:
        self._places: list[tuple[weakref.ref[nn.Module], str, str]] = []
        self._next = 0

    def take(self, module: nn.Module, buffers: bool) -> list[Note[Tensor]]:
        """The next few tensors, all of one layout; none for a module that has none."""
        if self._next >= len(self._places):
            self._places, self._next = list(_around(module, buffers)), 0
        found: list[Note[Tensor]] = []
        size, layout = 0, None
        while self._next < len(self._places) and len(found) < TENSORS and size < BYTES:
            owner, kind, path = self._places[self._next]
            tensor: Tensor | None = getattr(owner(), f"_{kind}s", {}).get(path.rpartition(".")[2])
            if tensor is not None and not tensor.is_meta and not is_the_programs(tensor):
                # functional_call may have put a replaced parameter back, whose detach() is that of the sharded one. Of
                # a sharded one no operator is called, which might be refused.
                here, local, shard = None, tensor if isinstance(tensor, DTensor) else tensor.detach(), 0
                if isinstance(local, DTensor):
                    here = mesh, _ = local.device_mesh, local.placements
                    axes = [axis for axis, _ in sharded_dims(*here)]
                    local, shard = local._local_tensor, coordinate(mesh, axes)
                if found and here != layout:
                    break
                layout = here
                site = Site(f"{kind} {path} of {type(module).__name__}", tuple(tensor.shape), str(tensor.dtype), "")
                found.append(Note(site, checksum(local), shard))
                size += local.nbytes
            self._next += 1
        return found


def _around(module: nn.Module, buffers: bool) -> Iterator[tuple[weakref.ref[nn.Module], str, str]]:
    """("parameter" or "buffer", path) of all tensors of a module, each with the module in it that owns it."""
    for path, inner in module.named_modules():
        prefix = f"{path}." if path else ""
        for name in inner._parameters:
            yield weakref.ref(inner), "parameter", f"{prefix}{name}"
        for name in inner._buffers if buffers else ():
            yield weakref.ref(inner), "buffer", f"{prefix}{name}"
