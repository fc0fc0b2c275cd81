"""Hooks: every place where a module calls functions of modules that import it, which its own imports do not show.

| hook | who adds to it | who calls it |
|---|---|---|
| `model_calls` | `turns.turning`, `model.whole_calls` | `model.calls`, before it calls a model on ranks |
| `scripts` | `model.parallelize` | `model.calls`, `model.gradient_inputs`, `model.interface`, `turns.turning`, `fitting.ranks` |
| `before_operators` | `model.outermost_calls`, `rules.whole.copies`, `turns.world` | `rules.registry`, each operator |
| `failed_operators` | `check.survey`, while a step is followed | `rules.registry`, for an operator that failed |
| `whole_operators` | `rules.whole` | `rules.stock`, for an operator that a rule refuses |
| `after_whole_reads` | `model.parallelize` | `rules.whole`, when a program has read a whole tensor |
| `after_copies` | `model.uses` | `rules.values.numbers`, when another library gets a copy |
| `plain_operands` | `model.calls` | `tensors.plain_tensors`, for each plain tensor beside a DTensor |
| `differentiated_operands` | `model.shard_gather` | `tensors.plain_tensors`, for those that get a gradient |
| `bucket_classes` | `turns.parts` | `model.gradients`, when it makes buckets, and `model.gradient_inputs` |
| `after_jobs` | `agreement.ledger`, `model.gradients`, `tensors.mesh`, `transfer.tracing` | `tensors.process_groups` |

A test compares this table with the code. What a module calls of modules that it imports needs no hook.
"""  # noqa: E501

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from distconv.tensors.refusal import UnsupportedOperation


class Script(Protocol):
    """A script whose modules run distributed."""

    def assignments(self, module: nn.Module) -> Mapping[nn.Module, Any]:
        """Where the module of an outermost call, and those within it, run: each one's `Assignment`."""


model_calls: list[Callable[[nn.Module, Any, Any], Any]] = []
"""Called with (module, args, kwargs); the first result that is not NotImplemented is that of the call."""

scripts: list[Script] = []  # The scripts being run; at most one, and none in a program.

before_operators: list[Callable[[Any, Sequence[Any], dict[str, Any]], Callable[[], None] | None]] = []
"""Called with (operator, args, kwargs). Raises where the operator is refused; what it returns is called afterwards."""

failed_operators: list[Callable[[Any, Sequence[Any], dict[str, Any], Exception], Any]] = []
"""The last one is called with (operator, args, kwargs, error) above autograd, where no mode of torch's sees
the operator, and gives a result in place of the error."""

whole_operators: list[Callable[[Any, Sequence[Any], dict[str, Any], UnsupportedOperation], Any]] = []
"""The only one is called with (operator, args, kwargs, refusal) and computes with whole tensors."""

after_whole_reads: list[Callable[[DeviceMesh], None]] = []
"""Called with the mesh of the tensor. Collective over the mesh."""

after_copies: list[Callable[[DTensor, Tensor], None]] = []
"""Called with a tensor and the whole copy of it that another library gets, which may write to it."""

plain_operands: list[Callable[[Any, int, Tensor, DeviceMesh], None]] = []
"""Called with (operator, number of the argument, plain tensor, mesh of the DTensor)."""

differentiated_operands: list[Callable[[Tensor], None]] = []
"""Called with the plain tensor."""

bucket_classes: dict[DeviceMesh, Any] = {}
"""By mesh: the subclass of `model.gradients.Bucket` whose ranks do not add gradients by messages."""

after_jobs: list[Callable[[Any], object]] = []
"""Called with the default group of the job: each forgets what was made with its groups, so that they can be freed."""
