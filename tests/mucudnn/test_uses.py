"""Patched torch against stock torch: every way of calling a convolution."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from forced import divided, forced
from layer_cases import assert_same, results
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint


def no_grad(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return module(x)


def inference_mode(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return module(x).clone()


def double_backward(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    x = x.detach().requires_grad_()
    (gradient,) = torch.autograd.grad(module(x).pow(3).sum(), x, create_graph=True)
    gradient.pow(2).sum().backward()
    return torch.cat([x.grad.flatten(), *(p.grad.flatten() for p in module.parameters())])


def vmap_over_inputs(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return torch.func.vmap(module)(torch.stack([x, 2 * x]))


def vmap_over_weights(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    stacked = {name: torch.stack([p, -p]) for name, p in module.named_parameters()}
    return torch.func.vmap(lambda parameters: torch.func.functional_call(module, parameters, (x,)))(stacked)


def per_sample_gradients(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    def loss(parameters: dict[str, torch.Tensor], sample: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(module, parameters, (sample[None],)).pow(2).sum()

    parameters = {name: parameter.detach() for name, parameter in module.named_parameters()}
    gradients = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, x)
    return torch.cat([gradient.flatten() for gradient in gradients.values()])


def forward_derivative(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return torch.func.jvp(module, (x,), (x.cos(),))[1]


def checkpointed(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    x = x.detach().requires_grad_()
    checkpoint(module, x, use_reentrant=False).pow(2).sum().backward()
    return x.grad


@pytest.mark.parametrize(
    "use",
    [
        no_grad,
        inference_mode,
        double_backward,
        vmap_over_inputs,
        vmap_over_weights,
        per_sample_gradients,
        forward_derivative,
        checkpointed,
    ],
)
def test_every_use(use: Callable[[nn.Module, torch.Tensor], torch.Tensor]) -> None:
    torch.manual_seed(0)
    module, x = nn.Conv2d(3, 4, 3, padding=1).double(), torch.randn(4, 3, 7, 7, dtype=torch.float64)
    expected = use(module, x)
    module.zero_grad()
    with forced("fft"):
        torch.testing.assert_close(use(module, x), expected, rtol=1e-10, atol=1e-10)
        assert divided() >= 1


def test_compiled_module() -> None:
    torch.manual_seed(0)
    module, x = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU()).double(), torch.randn(4, 3, 7, 7).double()
    expected = results(module, x)
    with forced("fft"):
        compiled = torch.compile(module)
        actual = results(compiled, x)
        assert divided() == 3
    for name, tensor in expected.items():
        torch.testing.assert_close(actual.get(name, actual.get(f"_orig_mod.{name}")), tensor, rtol=1e-10, atol=1e-10)


def test_autocast_in_both_passes() -> None:
    """The backward pass too runs under autocast here, which must not reach into an algorithm's own products."""
    torch.manual_seed(0)
    module, x = nn.Conv2d(3, 4, 5), torch.randn(4, 3, 16, 16)

    def run() -> dict[str, torch.Tensor]:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return results(module, x)

    expected = run()
    assert expected["output"].dtype == torch.bfloat16
    with forced("fft"):
        assert_same(run(), expected, tolerance=1e-2)
        assert divided() == 3
    module = module.double()
    with torch.autocast("cpu", dtype=torch.bfloat16), forced("fft"):
        arguments = (x.double(), module.weight, None, (1, 1), (0, 0), (1, 1), False, (0, 0), 1)
        with torch.autocast("cpu", enabled=False):
            exact = torch.ops.aten.convolution(*arguments)
        actual = torch.ops.aten.convolution_backward(
            exact.detach(), x.double(), module.weight.detach(), None, *arguments[3:], [True, False, False]
        )[0]
    expected_gradient = functional.conv_transpose2d(exact, module.weight)
    torch.testing.assert_close(actual, expected_gradient.detach(), rtol=1e-10, atol=1e-10)
