"""Autograd functions of a program that compute a part of a model again, and take gradients of its parameters there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from ranks import Ranks
from torch import Tensor, nn

import distconv
from distconv.model import fully_sharded
from distconv.model.parallelize import distributed_script
from distconv.tensors.refusal import UnsupportedOperation


class Again(torch.autograd.Function):
    """A checkpoint, as diffusion models write it: backward gives the gradients of the parameters."""

    @staticmethod
    def forward(ctx: Any, run: Callable[[Tensor], Tensor], x: Tensor, *parameters: Tensor) -> Tensor:
        ctx.run, ctx.x, ctx.parameters = run, x, parameters
        with torch.no_grad():
            return run(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        x = ctx.x.detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.run(x.view_as(x))
        return None, *torch.autograd.grad(y, (x, *ctx.parameters), grad, allow_unused=True)


class OfModules(Again):
    """The same, with the parameters that the modules have in backward, and a layer that is called twice."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        x = ctx.x.detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.run(x)
        return None, *torch.autograd.grad(y, (x, *ctx.run.__self__.parameters()), grad)


class Accumulating(Again):
    """Has autograd add the gradients to those of the parameters, except for the norm's."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        x = ctx.x.detach().requires_grad_()
        with torch.enable_grad():
            y = 0.5 * ctx.run(x)
        torch.autograd.backward(y, grad, inputs=[x, *ctx.parameters[2:]])
        return None, x.grad, *(None for _ in ctx.parameters)


class OfDetached(Again):
    """Puts tensors of its own in place of the parameters of a module for a call."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        x, own = ctx.x.detach().requires_grad_(), [each.detach().requires_grad_() for each in ctx.parameters]
        block = ctx.run.__self__
        with torch.enable_grad():
            y = torch.func.functional_call(block.layer, dict(zip(("weight", "bias"), own[2:], strict=True)), (x,))
        return None, *torch.autograd.grad(y, (x, *own), grad, allow_unused=True)


class OfOperands(Again):
    """Computes with what it was given, not with a module."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        x, (*_, weight, bias) = ctx.x.detach().requires_grad_(), ctx.parameters
        with torch.enable_grad():
            y = nn.functional.conv2d(x, weight, bias, padding=1)
        found = torch.autograd.grad(y, (x, weight, bias), grad)
        return None, found[0], *(None for _ in ctx.parameters[2:]), *found[1:]


class OfBoth(Again):
    """Computes with a parameter both as it was given and as the module has it."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        x = ctx.x.detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.run(x) + ctx.parameters[-1].view(-1, 1, 1)
        return None, *torch.autograd.grad(y, (x, *ctx.parameters), grad)


class OfGiven(OfOperands):
    """The same, where autograd is to add the gradients to those of the parameters."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        x, (*_, weight, bias) = ctx.x.detach().requires_grad_(), ctx.parameters
        with torch.enable_grad():
            y = nn.functional.conv2d(x, weight, bias, padding=1)
        torch.autograd.backward(y, grad, inputs=[x, weight, bias])
        return None, x.grad, *(None for _ in ctx.parameters)


class Inverse(Again):
    """Frees its input in forward, and computes it from the output in backward, as invertible networks do."""

    @staticmethod
    def forward(ctx: Any, run: Callable[[Tensor], Tensor], x: Tensor, *parameters: Tensor) -> Tensor:
        ctx.y = Again.forward(ctx, run, x, *parameters)
        x.untyped_storage().resize_(0)
        y: Tensor = ctx.y
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        with torch.no_grad():
            x = ctx.run(ctx.y, -1)
        ctx.x.untyped_storage().resize_(x.numel() * x.element_size())
        ctx.x.set_(x)
        return Again.backward(ctx, grad)


class Block(nn.Module):
    def __init__(self, kind: type[Again]) -> None:
        super().__init__()
        self.kind, self.norm, self.layer = kind, nn.GroupNorm(2, 4), nn.Conv2d(4, 4, 3, padding=1)
        self.unused = nn.Parameter(torch.ones(3)) if kind is Again else None

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.kind.apply(self.run, x, *self.parameters())
        return y

    def run(self, x: Tensor, sign: int = 1) -> Tensor:
        if self.kind is Inverse:
            half = x[:, :2].repeat(1, 2, 1, 1)
            return torch.cat([x[:, :2], x[:, 2:] + sign * self.layer(self.norm(half))[:, :2]], 1)
        if self.kind in (OfOperands, OfDetached, OfGiven):
            return self.layer(x)
        return x + self.layer(torch.tanh(self.layer(self.norm(x))))


def gradients(model: nn.Module, x: Tensor) -> list[Tensor]:
    model(x).square().mean().backward()
    found: list[Tensor] = distconv.whole_state([x.grad for x in model.parameters() if x.grad is not None])
    return found


def network() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(2)
    blocks: Sequence[nn.Module] = [
        Block(kind) for kind in (Inverse, Again, OfModules, Accumulating, OfDetached, OfOperands)
    ]
    return nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), *blocks).double(), torch.randn(4, 2, 8, 6).double()


def of_a_rank(partition: str, kind: str) -> list[Tensor]:
    mesh, (model, x) = distconv.init(partition, device_type="cpu"), network()
    if kind == "script":
        with distributed_script(mesh):
            return gradients(model, x)
    fully_sharded.LEAST_BYTES = 0
    return gradients(distconv.parallelize(model, mesh, shard_parameters=kind == "sharded"), distconv.shard(x, mesh))


@pytest.mark.gloo
@pytest.mark.parametrize("kind", ["program", "script", "sharded"])
@pytest.mark.parametrize("partition", ["sample=2", "height=2", "channel=2"])
def test_equal_one_process_on_ranks(ranks: Callable[[int], Ranks], partition: str, kind: str) -> None:
    for found in ranks(2).run(of_a_rank, partition, kind):
        torch.testing.assert_close(found, gradients(*network()), rtol=1e-10, atol=1e-12)


def refusal(partition: str, kind: type[Again]) -> str:
    model, x = nn.Sequential(nn.Conv2d(2, 4, 1), Block(kind)), torch.randn(2, 2, 4, 4)
    mesh = distconv.init(partition, device_type="cpu")
    with distributed_script(mesh), pytest.raises(UnsupportedOperation) as raised:
        gradients(model, x)
    return str(raised.value)


@pytest.mark.gloo
def test_refusals(ranks: Callable[[int], Ranks]) -> None:
    for message in ranks(2).run(refusal, "height=2", OfBoth):
        assert "both as a function was given it and as a module has it" in message
    for message in ranks(2).run(refusal, "height=2", OfGiven):
        assert "torch.autograd.grad, or backward without inputs" in message


@pytest.mark.parametrize("parts", ["sample=2", "height=4"])
def test_equal_one_process_in_parts(parts: str) -> None:
    model, x = network()
    torch.testing.assert_close(
        gradients(distconv.in_turn(model, parts), x), gradients(*network()), rtol=1e-10, atol=1e-12
    )


class Adding(Again):
    """Adds the gradients to those that the parameters have, by itself."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        found = OfModules.backward(ctx, grad)
        for x, own in zip(ctx.run.__self__.parameters(), found[2:], strict=True):
            x.grad = own if x.grad is None else x.grad + own
        return *found[:2], *(None for _ in found[2:])


@pytest.mark.parametrize("is_first", [True, False])
def test_gradients_that_a_function_adds_by_itself_are_refused_in_parts(is_first: bool) -> None:
    model = nn.Sequential(nn.Conv2d(2, 4, 1), Block(Adding))
    if not is_first:
        for x in model.parameters():
            x.grad = torch.zeros_like(x)
    with pytest.raises(UnsupportedOperation, match="writes to"):
        gradients(distconv.in_turn(model, "height=2"), torch.randn(1, 2, 4, 4))
