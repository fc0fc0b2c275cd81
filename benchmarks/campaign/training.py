"""Training of one network of the campaign for two steps, in one process or on ranks, with all its numbers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import distconv.model.interface  # at once: ranks are forked from here
from benchmarks.campaign.layers import Shape
from benchmarks.campaign.networks import Case, loss_of, network
from benchmarks.campaign.rounding import Results

STEPS = 2

NOISE, HALF_NOISE = 1e-13, 2.0**-8
"""How much the input, what layers make and its gradients are changed, relatively, to see how far a network amplifies
rounding: a gradient by its largest element. In bfloat16 not the input, and no more than rounding to it does."""

RATE = 1e-2
"""Of learning."""

EPSILON = 1e-3
"""What optimizers add to what they divide gradients by: with torch's 1e-8, steps magnify the rounding of tiny ones."""


def data(case: Case, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * case["seed"] + step)
    return torch.randn(case["shape"], dtype=torch.float64, generator=generator)


def plainest(case: Case) -> Case:
    """What one process computes: contiguous tensors, for of others torch 2.13 alone has some gradients wrong; eager."""
    return case | {"channels_last": False, "compiled": ""}


def train(
    case: Case,
    mesh: Any = None,
    dtype: torch.dtype | None = None,
    change: int | None = None,
    backwards: bool = False,
    changes: Callable[[nn.Module], object] | None = None,
    around: contextlib.AbstractContextManager[object] | None = None,
) -> Results:
    """All numbers of two optimizer steps: losses, gradients of input and parameters, and in the end the whole state.

    Args:
        mesh: to compute on; in one process if not given.
        dtype: to compute in, that of the case if not given; inputs and initial parameters are rounded as the case says.
        change: the number of a random change, of what each layer makes; not of bfloat16, also of the input and zeros.
        backwards: whether the samples come in the opposite order, so that sums over them are rounded otherwise.
        changes: changes the model before the script begins, such as `distconv.in_turn`.
        around: a context within that of the script.
    """
    plain, shape = network(case)  # outside the script: layers are called to learn their shapes
    if changes is not None:
        changes(plain)
    as_script = mesh is not None and case["way"] == "script"
    none = contextlib.nullcontext()
    with distconv.distributed_script(mesh) if as_script else none, around or none:
        return _trained(plain, shape, case, mesh, dtype or getattr(torch, case["dtype"]), change, backwards)


def _trained(
    plain: nn.Module, shape: Shape, case: Case, mesh: Any, dtype: torch.dtype, change: int | None, backwards: bool
) -> Results:
    rounded = getattr(torch, case["dtype"])
    plain.to(rounded).to(dtype).train(not case["evaluation"])
    half = rounded is torch.bfloat16
    if change is not None:
        _change(plain, change, half)
    noise = 0.0 if change is None or half else NOISE
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    ndim = len(case["shape"])
    if case["channels_last"]:
        for parameter in plain.parameters():  # not Module.to, which fails where a norm's weight has a dim less
            if parameter.dim() == ndim:
                parameter.data = parameter.data.contiguous(memory_format=formats[ndim])
    if case["frozen"]:
        for parameter in list(plain.parameters())[::2]:
            parameter.requires_grad_(False)
    by_hand = mesh is not None and case["way"] == "program"
    model = distconv.parallelize(plain, mesh) if by_hand else plain
    if case["compiled"]:
        model = torch.compile(model, backend=case["compiled"], dynamic=False)
    trained = [p for p in plain.parameters() if p.requires_grad]
    kind = "SGD" if half else case["optimizer"]
    settings = {"lr": RATE} if kind == "SGD" else {"lr": RATE, "eps": EPSILON}
    optimizer = getattr(torch.optim, kind)(trained, **settings) if trained else None
    compute_loss, targets = loss_of(case, shape, dtype)
    targets = targets.flip(0) if backwards else targets
    results: Results = {}
    for step in range(STEPS):
        if optimizer is not None:
            optimizer.zero_grad()
        for part in range(1 + case["accumulates"]):
            x = data(case, 10 * step + part).to(rounded).to(dtype) * (1 + noise)
            if case["channels_last"]:
                x = x.contiguous(memory_format=formats[ndim])
            x = (x.flip(0) if backwards else x).requires_grad_()
            given = x * 1.0  # a network may begin with a function in place
            y = model(distconv.shard(given, mesh) if by_hand else given)
            assert tuple(y.shape) == shape, f"{tuple(y.shape)} instead of {shape}"
            loss = compute_loss(distconv.gather(y) if by_hand else y, targets)
            loss.backward()
            results[f"loss {step}.{part}"] = torch.tensor(loss.item(), dtype=torch.float64)
            gradient = torch.zeros(()) if x.grad is None else x.grad
            results[f"input's gradient {step}.{part}"] = gradient.flip(0) if backwards and gradient.dim() else gradient
        gradients = {f"gradient of {n} {step}": p.grad for n, p in plain.named_parameters() if p.grad is not None}
        results |= {name: value.clone() for name, value in distconv.whole_state(gradients).items()}
        if optimizer is not None:
            optimizer.step()
    groups = optimizer.param_groups if optimizer is not None else []
    own = {id(parameter) for parameter in plain.parameters()}
    kept = sum(id(parameter) in own for group in groups for parameter in group["params"])
    results["trained"] = torch.tensor(kept, dtype=torch.float64)
    return {name: x.detach() for name, x in (results | dict(distconv.whole_state(plain.state_dict()))).items()}


def _change(model: nn.Module, number: int, half: bool) -> None:
    """Lets a model's layers make other numbers, by about what rounding makes of them."""
    generator = torch.Generator().manual_seed(number)

    def near(x: Tensor, least: float = 0.0) -> Tensor:
        sizes = x.detach().abs()  # backward must not need x, which a function in place may change
        size = HALF_NOISE * sizes if half else NOISE * (least + sizes)
        return (x + size * (2 * torch.rand(x.shape, generator=generator, dtype=torch.float64) - 1)).to(x.dtype)

    def changed(layer: nn.Module, given: Any, y: Tensor) -> Tensor:
        y = near(y, 1.0)
        if y.requires_grad:
            y.register_hook(lambda gradient: near(gradient, float(gradient.abs().max()) if gradient.numel() else 0.0))
        return y

    for layer in model.modules():
        if next(layer.children(), None) is None:
            layer.register_forward_hook(changed)
