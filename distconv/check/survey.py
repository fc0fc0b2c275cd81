"""Follows one step of a model or of a script on rank 0, in one process."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.nn.modules import module as modules
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from distconv import settings
from distconv.check.collectives import alone
from distconv.check.findings import Findings
from distconv.check.watch import StepWatch
from distconv.model.gradients import Bucket
from distconv.model.parallelize import distributed_script, parallelize
from distconv.model.strategy import Strategy
from distconv.settings.partition import Partition
from distconv.tensors import hooks
from distconv.tensors.memory import shapes_uncounted
from distconv.tensors.mesh import make_mesh
from distconv.tensors.user_lines import in_one_line
from distconv.turns.following import backward_of_sum
from mucudnn.process import substituted


class _Enough(BaseException):
    """The first step of an optimizer has ended."""


def _end(optimizer: Optimizer, *_: object) -> None:
    raise _Enough


@contextlib.contextmanager
def up_to_first_step() -> Iterator[None]:
    """A context that the program leaves after the first step of an optimizer, or at its own end."""
    hook = register_optimizer_step_post_hook(_end)
    try:
        with contextlib.suppress(_Enough, SystemExit):
            yield
    finally:
        hook.remove()


Inputs = Sequence[tuple[int, ...]]
MistakeOf = Callable[[BaseException], str | None]


def no_mistake(error: BaseException) -> str | None:
    """Every error ends the step, and is one of the findings."""
    return None


class FailsAlone(Exception):
    """There is no model, or it does not run on these inputs in one process either; the message is one line."""


def model(
    build: Callable[[], nn.Module],
    inputs: Inputs,
    partition: Partition,
    *,
    strategy: Strategy | Mapping[str, str] | None = None,
    dtype: torch.dtype = torch.float32,
    backward: bool = True,
    mistake_of: MistakeOf = no_mistake,
) -> Findings:
    """Follows a model's forward and backward by shapes alone; nothing is computed.

    Args:
        build: makes the model.
        inputs: the shapes of its whole inputs (N, C, spatial...).
        partition: that of all layers which the strategy does not name.
        strategy: {pattern of layer names: partition}.
        dtype: of floating-point numbers.
        backward: whether a loss, the sum of all outputs, goes backward; else it runs as for inference.
        mistake_of: one line for an error that distconv itself raised about what it was given; None for any other.

    Raises:
        FailsAlone: where the model cannot be made, or fails in one process.
        ValueError: as `follow_script`.

    A process follows steps of one number of ranks.
    """
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        whole = _made(build)
        peak_alone = _peak_alone(whole, inputs, backward)
        findings = Findings(str(partition), partition.ranks, peak_alone=peak_alone)
        watch = StepWatch()
        shapes_only = FakeTensorMode(allow_non_fake_inputs=True)
        with _watched(watch, findings, partition, mistake_of) as mesh, shapes_only, watch:
            watch.counting = False
            distributed = parallelize(_without_numbers(whole, shapes_only, watch), mesh, strategy)
            watch.counting = True
            watch.memory.peak = watch.memory.now
            _step(distributed, inputs, backward)
        return findings
    finally:
        torch.set_default_dtype(before)


def follow_script(
    run: Callable[[], None],
    partition: Partition,
    *,
    strategy: Strategy | None = None,
    mistake_of: MistakeOf = no_mistake,
) -> Findings:
    """Follows a script up to the end of its first optimizer step, or to its own end.

    It computes its part, with zeros for what other ranks would send: its numbers mean nothing.

    Raises:
        ValueError: what `mistake_of` says, as of a partition that the data cannot have.
    """
    findings = Findings(str(partition), partition.ranks)
    watch = StepWatch()
    watched = _watched(watch, findings, partition, mistake_of)
    with watched as mesh, distributed_script(mesh, strategy), watch, up_to_first_step():
        run()
    return findings


def _made(build: Callable[[], nn.Module]) -> nn.Module:
    """The model, for once with numbers: constructors may read them."""
    try:
        whole = build()
    except Exception as error:
        raise FailsAlone(f"the model cannot be made: {in_one_line(error)}") from error
    if not isinstance(whole, nn.Module):
        raise FailsAlone(f"a {type(whole).__name__} was made; accepted: a torch.nn.Module")
    return whole


def _without_numbers(whole: nn.Module, shapes_only: FakeTensorMode, watch: StepWatch) -> nn.Module:
    """A copy of a model whose parameters and buffers have shapes alone."""
    tensors = (*whole.parameters(), *whole.buffers())
    copies: dict[int, Any] = {id(x): shapes_only.from_tensor(x) for x in tensors}
    watch.memory.count(list(copies.values()))
    return copy.deepcopy(whole, copies)


def _peak_alone(whole: nn.Module, inputs: Inputs, backward: bool) -> int | None:
    """The most bytes of tensors in one process; None where what it does depends on numbers."""
    watch, shapes_only = StepWatch(), FakeTensorMode(allow_non_fake_inputs=True)
    try:
        with shapes_only, watch:
            alone_here = _without_numbers(whole, shapes_only, watch)
            watch.memory.peak = watch.memory.now
            _step(alone_here, inputs, backward)
    except (DataDependentOutputException, DynamicOutputShapeException):
        return None
    except Exception as error:
        raise FailsAlone(f"the model fails in one process: {in_one_line(error)}") from error
    return watch.memory.peak


def _step(whole: nn.Module, shapes: Inputs, backward: bool) -> None:
    inputs = [torch.randn(shape) for shape in shapes]
    if not backward:
        with torch.inference_mode():
            whole.eval()(*inputs)
        return
    backward_of_sum(whole(*inputs), as_of_loss=False)


@contextlib.contextmanager
def _watched(watch: StepWatch, findings: Findings, partition: Partition, mistake_of: MistakeOf) -> Iterator[Any]:
    """Modules notify the watch when they are called; its counts go to the findings, also where the step breaks off."""
    removable = (
        modules.register_module_forward_pre_hook(watch.entered),
        modules.register_module_forward_hook(watch.left, always_call=True),
    )
    start = Bucket.start

    def reducing(bucket: Bucket) -> None:
        with watch.reducing():
            start(bucket)

    hooks.failed_operators.append(watch.above_autograd)
    try:
        with (
            settings.options({"check": "off"}),
            substituted(Bucket, start=reducing),
            shapes_uncounted(watch),
            alone(partition.ranks, watch.sent),
        ):
            yield make_mesh(partition, device_type="cpu")
    except Exception as error:
        if isinstance(error, ValueError) and not watch.refusals and (mistake := mistake_of(error)):
            raise ValueError(mistake) from None
        findings.ended = in_one_line(error)
    finally:
        hooks.failed_operators.remove(watch.above_autograd)
        for hook in removable:
            hook.remove()
        findings.refusals = list(watch.refusals.values())
        findings.layers = list(watch.layers.values())
        findings.peak = watch.memory.peak
