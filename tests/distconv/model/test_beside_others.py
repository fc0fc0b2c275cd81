"""Meshes of a program's own, and FSDP2 and DistributedDataParallel along axes that distconv leaves to it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ranks import Ranks
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import distconv

pytestmark = pytest.mark.gloo

AXES = {
    "sp": {"sp": "height"},
    "tp": {"tp": "channel"},
    "cp": {"dp": "sample", "cp": "width"},
    "fp": {"dp": "sample", "fp": "channel"},
}
"""By name of the second axis of a mesh of 2 x 2, with dp before it: what distconv shards; "fp" without the features.

Where dp is left out, the program gives each half of the ranks its own samples.
"""

SHARES = {"after, tp": 0.25, "before, tp": 0.5, "before, fp": 0.5, "ddp, tp": 0.5, "ddp, fp": 0.5}
"""Of a convolution's weight on a rank, by order and axis; of others half under FSDP, all under DDP."""

FEATURES = ("", "checkpoint", "accumulation", "clipping", "float32")


class Block(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.convolution, self.norm = nn.Conv2d(channels, channels, 3, padding=1), nn.GroupNorm(2, channels)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.norm(self.convolution(x)).relu()


class Network(nn.Module):
    def __init__(self, checkpoints: bool) -> None:
        super().__init__()
        self.first, self.blocks = nn.Conv2d(3, 8, 3, padding=1), nn.ModuleList([Block(8), Block(8)])
        self.head = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
        self._checkpoints = checkpoints

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self._checkpoints else block(x)
        result: Tensor = self.head(x.mean((2, 3)))
        return result


def network(feature: str) -> Network:
    torch.manual_seed(0)
    return Network(feature == "checkpoint").double()


def trained(
    model: Any, feature: str, given: Callable[[Tensor], Any], mean: Callable[[Tensor], float] = Tensor.item
) -> list[float]:
    """The losses of two steps of Adam."""
    random = torch.Generator().manual_seed(1)
    x = torch.randn(4, 3, 12, 10, generator=random, dtype=torch.float64)
    y = torch.randn(4, 4, generator=random, dtype=torch.float64)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = []
    passes = 2 if feature == "accumulation" else 1
    for _ in range(2):
        optimizer.zero_grad()
        for number in range(passes):
            if hasattr(model, "set_requires_gradient_sync"):
                model.set_requires_gradient_sync(number == passes - 1)
            loss = nn.functional.mse_loss(model(given(x * (number + 1))), given(y))
            loss.backward()
        if feature == "clipping":
            nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
        losses.append(mean(loss.detach()))
    return losses


def beside(what: str, order: str, axes: Mapping[str, str], mesh: DeviceMesh, model: Network, policy: Any) -> nn.Module:
    """The model parallelized before or after the program's own wrapper along dp."""

    def others(model: nn.Module) -> nn.Module:
        if what == "ddp":
            return DistributedDataParallel(model, process_group=mesh["dp"].get_group())
        for block in model.blocks:  # type: ignore[union-attr]
            fully_shard(block, mesh=mesh["dp"], mp_policy=policy)
        fully_shard(model, mesh=mesh["dp"], mp_policy=policy)
        return model

    if order == "before":
        return distconv.parallelize(others(model), mesh, axes=axes)
    return others(distconv.parallelize(model, mesh, axes=axes))


def differences(what: str, orders: tuple[str, ...]) -> dict[str, float]:
    """How far losses and parameters are from those of one process, at most; by axes, order and feature."""
    meshes = {name: init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", name)) for name in AXES}
    found = {}

    for feature in FEATURES:
        policy = MixedPrecisionPolicy()
        if feature == "float32":  # computed in it; parameters and sums stay in float64
            policy = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float64)
        alone = network(feature)
        losses = trained(alone, feature, lambda x: x)
        for name, mesh in meshes.items() if what == "fsdp" or feature != "float32" else ():
            for order in orders if name != "fp" else () if feature else {*orders} - {"after"} or orders:

                def given(x: Tensor, mesh: DeviceMesh = mesh, is_half: bool = "dp" not in AXES[name]) -> DTensor:
                    return distconv.shard(x.chunk(2)[mesh.get_local_rank("dp")] if is_half else x, mesh)

                def mean(loss: Tensor, mesh: DeviceMesh = mesh) -> float:
                    whole = loss.full_tensor() if isinstance(loss, DTensor) else loss.clone()
                    dist.all_reduce(whole, group=mesh["dp"].get_group())
                    return whole.item() / 2

                model: Any = beside(what, order, AXES[name], mesh, network(feature), policy)
                errors = [abs(a - b) for a, b in zip(trained(model, feature, given, mean), losses, strict=True)]
                weight = next(model.parameters())
                share = getattr(weight, "_local_tensor", weight).numel() / alone.first.weight.numel()
                assert share == SHARES.get(f"{order if what == 'fsdp' else what}, {name}", 0.5 if what == "fsdp" else 1)
                for own, other in zip(model.parameters(), alone.parameters(), strict=True):
                    whole = own.full_tensor() if isinstance(own, DTensor) else own
                    errors.append(float((whole.detach() - other.detach()).abs().max()))
                found[f"{name}, {order}, {feature}"] = max(errors)
    return found


@pytest.mark.parametrize(("what", "orders"), [("fsdp", ("before", "after")), ("ddp", ("after",))])
def test_along_axes_of_the_program(ranks: Callable[[int], Ranks], what: str, orders: tuple[str, ...]) -> None:
    for found in ranks(4).run(differences, what, orders):
        assert all(error < (1e-5 if "float32" in name else 1e-12) for name, error in found.items()), found
        assert len(found) == (31 if what == "fsdp" else 13)


def kept_whole(before: bool) -> list[Tensor]:
    """Gradients of two passes in turn, between which FSDP keeps parameters whole."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "sp"))
    model: Any = beside("fsdp", "before" if before else "after", AXES["sp"], mesh, network(""), MixedPrecisionPolicy())
    x = torch.arange(4 * 3 * 12 * 10.0, dtype=torch.float64).view(4, 3, 12, 10).sin()
    for is_last in (False, True):
        model.set_requires_gradient_sync(is_last)
        model.set_reshard_after_backward(is_last)
        model(distconv.shard(x.chunk(2)[mesh.get_local_rank("dp")], mesh)).square().mean().backward()
    return [each.grad.full_tensor() for each in model.parameters()]


@pytest.mark.parametrize("before", [True, False])
def test_parameters_that_stay_whole_between_passes(ranks: Callable[[int], Ranks], before: bool) -> None:
    alone = network("")
    x = torch.arange(4 * 3 * 12 * 10.0, dtype=torch.float64).view(4, 3, 12, 10).sin()
    (2 * alone(x).square().mean()).backward()
    for found in ranks(2).run(kept_whole, before):
        torch.testing.assert_close(found, [each.grad for each in alone.parameters()], rtol=1e-10, atol=1e-12)


def kept(axes: dict[str, str], folder: str) -> list[float]:
    """Whether training goes on from a checkpoint of torch's: the loss of a step after it, before and after loading."""
    name = next(iter(axes))
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", name))
    losses: list[float] = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        model: Any = fully_shard(distconv.parallelize(Network(False).double(), mesh, axes=axes), mesh=mesh["dp"])
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        x = distconv.shard(torch.ones(4, 3, 12, 10, dtype=torch.float64), mesh)

        def step(model: Any = model, optimizer: Any = optimizer, x: DTensor = x) -> float:
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            return float(loss.detach())

        step()
        state: dict[str, Any] = {
            "model": get_model_state_dict(model),
            "optimizer": get_optimizer_state_dict(model, optimizer),
        }
        if seed:
            dcp.load(state, checkpoint_id=folder)
            set_model_state_dict(model, state["model"])
            set_optimizer_state_dict(model, optimizer, state["optimizer"])
            options = StateDictOptions(full_state_dict=True)
            whole = get_model_state_dict(model, options=options)
            assert all(torch.equal(value, state["model"][key].full_tensor()) for key, value in whole.items())
            for parameter in model.parameters():
                nn.init.zeros_(parameter)
            set_model_state_dict(model, whole, options=options)
        else:
            dcp.save(state, checkpoint_id=folder)
        losses.append(step())
    return losses


def test_checkpoints_of_torch(ranks: Callable[[int], Ranks], tmp_path: Path) -> None:
    for axes in ({"sp": "height"}, {"tp": "channel"}, {"cp": "width", "dp": "sample"}):
        for first, again in ranks(4).run(kept, axes, str(tmp_path / "".join(axes))):
            assert first == again


def refusals() -> list[str]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "sp"))
    plan = {"head.0": ColwiseParallel(), "head.2": RowwiseParallel()}
    model = distconv.parallelize(parallelize_module(network(""), mesh["dp"], plan), mesh, axes={"sp": "height"})
    x = distconv.shard(torch.ones(4, 3, 12, 10, dtype=torch.float64), mesh)
    both, channels = (init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", name)) for name in ("cp", "fp"))
    as_well = distconv.parallelize(parallelize_module(network(""), both["dp"], plan), both, axes=AXES["cp"])
    theirs = distribute_tensor(torch.ones(10, dtype=torch.float64), mesh["dp"], [Replicate()])
    attempts: list[Callable[[], Any]] = [
        lambda: model(x),
        lambda: fully_shard(distconv.parallelize(network(""), channels, axes=AXES["fp"]), mesh=channels["dp"]),
        lambda: as_well(distconv.shard(torch.ones(4, 3, 12, 10, dtype=torch.float64), both)),
        lambda: torch.addcmul(x, torch.ones_like(x.to_local()).mean(), theirs),
        lambda: distconv.parallelize(network(""), mesh, axes={"sp": "width"}),
        lambda: distconv.parallelize(network(""), mesh, axes={"pp": "width"}),
        lambda: distconv.parallelize(network(""), mesh, axes={"sp": "heigth"}),
        lambda: distconv.parallelize(network(""), mesh, axes={"sp": "height", "dp": "height"}),
        lambda: distconv.parallelize(network(""), mesh, axes={"sp": "height", "dp": "sample"}),
        lambda: distconv.parallelize(network(""), mesh["dp"]),
    ]
    found = []
    for attempt in attempts:
        with pytest.raises((RuntimeError, ValueError)) as error:
            attempt()
        found.append(str(error.value))
    return found


REFUSED = (
    "a mesh of the program's own, beside one of distconv's; accepted: DTensors of one of them",
    "Cannot concatenate overlapping meshes",  # as torch says it
    "a mesh of the program's own, beside one of distconv's; accepted: DTensors of one of them",
    "a mesh of the program's own, beside one of distconv's; accepted: DTensors of one of them",
    "the mesh is in use with axes={'sp': 'height'}",
    "the mesh has no axis 'pp'; accepted: dp, sp",
    "'heigth' (did you mean height?); accepted: sample, channel",
    "accepted: one or more axes of the mesh, each for another of the data",
    "the mesh is in use with axes={'sp': 'height'}; accepted: the same ones",
    "mesh axes ('dp',): accepted: mesh_dim_names out of sample, channel",
)


def test_what_is_refused(ranks: Callable[[int], Ranks]) -> None:
    for found in ranks(4).run(refusals):
        assert len(found) == len(REFUSED) and all(map(str.__contains__, found, REFUSED)), found
