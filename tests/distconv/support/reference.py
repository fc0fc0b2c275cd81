"""One comparison for all rules: a module on shards against the same module in one process, in float64."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

import distconv

Case = tuple[Callable[..., nn.Module], tuple[Any, ...], dict[str, Any], tuple[int, ...]]
"""(module, its arguments, its keywords, the shape of its input)."""


def wrong(
    runs: Iterable[tuple[str, dict[str, Case]]],
    tolerance: float,
    around: Callable[[nn.Module], nn.Module] | None = None,
    **init: Any,
) -> dict[str, dict[str, float]]:
    """{case: its errors} of those with an error that is not below the tolerance, of tables on partitions.

    `around` makes a module of each case's module.
    """
    result = {}
    for partition, cases in runs:
        for name, (kind, arguments, keywords, shape) in cases.items():

            def build(
                kind: Any = kind, arguments: tuple[Any, ...] = arguments, keywords: dict[str, Any] = keywords
            ) -> nn.Module:
                module = kind(*arguments, **keywords)
                return module if around is None else around(module)

            try:
                found = errors(build, [shape], partition, **init)
            except Exception as error:
                error.add_note(f"in case {name!r} on {partition}")
                raise
            if not max(found.values()) < tolerance:
                result[f"{partition}: {name}"] = found
    return result


def errors(
    build: Callable[[], nn.Module],
    shapes: Iterable[tuple[int, ...]],
    partition: str,
    device_type: str = "cpu",
    **init: Any,
) -> dict[str, float]:
    """{what: largest relative error} of output, input gradients and parameter gradients on this rank.

    `build` makes the module; its inputs are random tensors of the shapes. Everything is made from the same seeds on
    every rank.
    """
    mesh = distconv.init(partition, device_type=device_type, **init)
    torch.manual_seed(7)
    plain = build().double().to(device_type)
    model = distconv.parallelize(copy.deepcopy(plain), mesh)
    inputs = [torch.randn(shape, dtype=torch.float64).to(device_type) for shape in shapes]
    alone = [x.clone().requires_grad_() for x in inputs]
    here = [x.clone().requires_grad_() for x in inputs]
    expected = plain(*alone)
    result = model(*(distconv.shard(x, mesh) for x in here))
    assert result.shape == expected.shape
    whole = distconv.gather(result)
    cotangent = torch.randn_like(expected)
    (expected * cotangent).sum().backward()
    (whole * cotangent).sum().backward()
    found = {"output": _error(whole, expected)}
    found |= {f"input {i}": _error(a.grad, b.grad) for i, (a, b) in enumerate(zip(here, alone, strict=True))}
    for (name, a), b in zip(model.named_parameters(), plain.parameters(), strict=True):
        found[name] = _error(None if a.grad is None else distconv.gather(a.grad), b.grad)
    return found


def random(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def differing(table: Mapping[str, Callable[[Tensor], Any]], partition: str, shape: tuple[int, ...]) -> dict[str, Any]:
    """{name: what differs from one process} of functions of a tensor: results, one or several, and gradients."""
    mesh = distconv.init(partition, device_type="cpu")
    wrong: dict[str, Any] = {}
    for name, function in table.items():
        alone = random(*shape, seed=5).requires_grad_()
        here = alone.detach().clone().requires_grad_()
        expected, found = _several(function(alone)), _several(function(distconv.shard(here, mesh)))
        kinds = [[(tuple(y.shape), y.dtype) for y in results] for results in (expected, found)]
        if kinds[0] != kinds[1]:
            wrong[name] = f"{kinds[1]} instead of {kinds[0]}"
            continue
        whole = [distconv.gather(y) for y in found]
        errors = [_error(a, b) for a, b in zip(whole, expected, strict=True)]
        if any(y.requires_grad for y in expected):
            for results in (expected, whole):
                losses = [(y * random(*y.shape, seed=6)).sum() for y in results if y.requires_grad]
                torch.stack(losses).sum().backward()
            errors.append(_error(here.grad, alone.grad))
        single = any(y.dtype == torch.float32 for y in expected)
        if not max(errors, default=0.0) < (1e-5 if single else 1e-11):
            wrong[name] = errors
    return wrong


def _several(results: Any) -> list[Tensor]:
    return list(results) if isinstance(results, tuple | list) else [results]


def _error(found: Tensor | None, expected: Tensor | None) -> float:
    if found is None or expected is None:
        return 0.0 if found is expected else float("inf")
    if found.shape != expected.shape or type(found) not in (Tensor, nn.Parameter):
        return float("inf")
    if not expected.numel():
        return 0.0
    scale = expected.detach().double().abs().max().clamp(min=1e-3)
    return float((found.double() - expected.double()).detach().abs().max() / scale)
