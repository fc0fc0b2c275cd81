"""Parameters that are sharded along all axes: one process's numbers, a share of its bytes, or one line that refuses."""

from __future__ import annotations

import contextlib
import io
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from ranks import Ranks
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint

import distconv
from distconv import settings
from distconv.model import fully_sharded
from distconv.model.strategy import Strategy
from distconv.settings.partition import read_parts
from distconv.turns import turning
from distconv.turns.call import call_in_turn
from distconv.turns.turning import script_in_turn

PARTITIONS = ("height=4", "sample=2,height=2", "sample=2,channel=2")


class Network(nn.Module):
    """Layers whose parameters the ranks do and do not divide evenly, used once and twice, by several functions."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8)
        self.twice = nn.Conv2d(8, 8, 3, padding=1)
        self.uneven = nn.ConvTranspose2d(8, 9, 2, stride=2)
        self.attention = nn.MultiheadAttention(9, 3, batch_first=True)
        self.each, self.head, self.unused = nn.LayerNorm(9), nn.Linear(9, 6), nn.Linear(4, 4)
        self.pointwise = nn.Conv2d(9, 9, 1)
        self.scale = nn.Parameter(torch.rand(9, 1, 1))
        self._way = way

    def _middle(self, x: Tensor) -> Tensor:
        return self.twice(self.twice(self.norm(x)).relu())

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        if self._way.startswith("checkpoint"):
            x = checkpoint(self._middle, x, use_reentrant=self._way == "checkpoint, reentrant")
        else:
            x = self._middle(x)
        if self._way == "masked":
            self.uneven.weight.data *= 0.9
            self.head.weight.data = self.head.weight.data.clamp(-0.2, 0.2)
            self.attention.out_proj.weight.data.mul_(0.9)
            with torch.no_grad():
                self.attention.in_proj_weight.mul_(0.99)
                if not self.training:
                    x = self.twice(self.twice(x))
                    self.twice.weight.data.mul_(0.9)
                    self.twice.weight.detach().mul_(0.9)
                    x = self.twice(x)
        elif self._way == "view":
            rows = self.head.weight.view(54)
            with torch.no_grad():
                rows.mul_(0.5)
        x = self.uneven(x) * self.scale
        tokens = x.flatten(2).transpose(1, 2)
        tokens = tokens + self.attention(tokens, tokens, tokens, need_weights=False)[0]
        weight = self.head.weight if self._way != "standardized" else self.head.weight - self.head.weight.mean()
        y = nn.functional.linear(self.each(tokens).mean(1), weight, self.head.bias)
        if self._way == "complex":
            numbers = torch.view_as_complex(self.head.weight.view(27, 2))
            y = y + (y[:, :1] * numbers).abs().square().mean()
        if (
            self._way == "assigned"
        ):  # backward has the old data of views, such as the linear layer's, a convolution's new
            x = nn.functional.conv2d(x, self.pointwise.weight.view_as(self.pointwise.weight))
            y = y + x.mean()
            self.pointwise.weight.data = self.pointwise.weight.data * 0.8
            self.head.weight.data, self.stem.weight.data = self.head.weight.data * 0.5, self.stem.weight.data * 0.9
        return y


WAYS = (
    *("", "checkpoint", "checkpoint, reentrant", "checkpoint around", "on the host", "masked", "one sample"),
    *("standardized", "channels_last", "accumulated", "frozen", "averaged", "saved", "hooked", "later", "compiled"),
    *("strategy", "parallelize", "assigned", "three rows", "complex"),
)


IN_TURN = {
    "some": ("", "masked", "later"),
    "more": ("checkpoint", "on the host", "frozen", "averaged", "saved", "assigned", "three rows"),
}


def losses(net: Any, way: str, model: Any) -> list[float]:
    """Those of three steps of Adam, with norms of gradients. The optimizer comes before the first call."""
    random = torch.Generator().manual_seed(1)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, eps=1e-3)
    averaged = AveragedModel(net) if way == "averaged" else None
    found: list[float] = []
    for step in range(3):
        optimizer.zero_grad(set_to_none=step == 1)
        if way == "frozen":
            net.twice.weight.requires_grad_(step != 1)
        for _ in range(2 if way == "accumulated" else 1):
            samples, rows = 1 if way == "one sample" else 4, 3 if way == "three rows" else 8
            x = torch.randn(samples, 3, rows, 6, generator=random, dtype=torch.float64)
            if way == "checkpoint around":
                y = checkpoint(model, x, use_reentrant=False)
            elif way == "on the host":
                with torch.autograd.graph.save_on_cpu():
                    y = model(x)
            else:
                y = model(x)
            loss = y.square().mean() + 1e-3 * sum(p.square().sum() for p in net.parameters())
            loss.backward(retain_graph=way == "later")
            if way == "later":
                loss.backward()
        found += [float(loss.detach()), float(nn.utils.clip_grad_norm_(net.parameters(), 0.5))]
        optimizer.step()
        if averaged is not None:
            averaged.update_parameters(net)
            with torch.no_grad():
                found.append(float(averaged(x).sum()))
        if way == "saved":
            (file := io.BytesIO()), torch.save({"model": net.state_dict(), "adam": optimizer.state_dict()}, file)
            state = torch.load(io.BytesIO(file.getvalue()))
            assert all(type(value) is Tensor for value in state["model"].values())
            with torch.no_grad():
                net.head.weight.zero_()
            net.load_state_dict(state["model"])
            optimizer.load_state_dict(state["adam"])
    net.eval()
    with torch.inference_mode():
        found.append(float(model(torch.ones(4, 3, 8, 6, dtype=torch.float64)).sum()))
    return found


def network(way: str) -> Network:
    torch.manual_seed(0)
    net = Network(way).double()
    if way == "channels_last":
        net = net.to(memory_format=torch.channels_last)
    elif way == "hooked":
        net.twice.weight.register_hook(lambda grad: grad.clamp(-1e-3, 1e-3))
    return net


def trained(partition: str, ways: tuple[str, ...], parts: str | None = None) -> dict[str, float]:
    """How far losses and parameters are from those of one process, at most."""
    in_turn = None if parts is None else (read_parts(parts), None)
    fully_sharded.LEAST_BYTES = 0
    mesh = distconv.init(partition, device_type="cpu")
    found = {}
    for way in ways:
        alone, net = network(way), network(way)
        expected = losses(alone, way, alone)
        if way == "parallelize":
            distconv.parallelize(net, mesh, shard_parameters=True)
            got = losses(net, way, lambda x, net=net: distconv.gather(net(distconv.shard(x, mesh))))
        else:
            strategy = Strategy.parse({"twice": "sample=2,width=2", "*": partition}) if way == "strategy" else None
            with contextlib.ExitStack() as around:
                patch = around.enter_context(pytest.MonkeyPatch.context())
                patch.setenv("DISTCONV_SHARD_PARAMETERS", "1")
                around.enter_context(distconv.distributed_script(mesh, strategy))
                if in_turn is not None:
                    around.enter_context(script_in_turn(in_turn, ranks=mesh))
                    calls = around.enter_context(mock.patch.object(turning, "call_in_turn", wraps=call_in_turn))
                if way == "compiled":
                    with warnings.catch_warnings():
                        warnings.simplefilter("error")  # such as that it runs without a compiler
                        got = losses(net, way, torch.compile(net, backend="aot_eager"))
                else:
                    got = losses(net, way, net)
        assert in_turn is None or calls.call_count >= 4
        whole = distconv.whole_state(net.state_dict())
        gaps = [float((whole[name] - value).abs().max()) for name, value in alone.state_dict().items()]
        found[way] = max(*gaps, *(abs(a - b) for a, b in zip(got, expected, strict=True)))
        assert sum(isinstance(p, DTensor) for p in net.parameters()) >= 8
    return found


@pytest.mark.gloo
@pytest.mark.parametrize("partition", PARTITIONS)
def test_training_equals_one_process(ranks: Callable[[int], Ranks], partition: str) -> None:
    ways = WAYS if partition == PARTITIONS[0] else WAYS[:7]  # one partition tries them all
    for found in ranks(4).run(trained, partition, ways):
        assert found.keys() == set(ways) and max(found.values()) < 1e-11, found


@pytest.mark.gloo
@pytest.mark.parametrize("ways", IN_TURN)
def test_training_in_turn_equals_one_process(ranks: Callable[[int], Ranks], ways: str) -> None:
    for found in ranks(4).run(trained, "sample=2,width=2", IN_TURN[ways], "height=2"):
        assert found.keys() == set(IN_TURN[ways]) and max(found.values()) < 1e-11, found


def test_training_over_any_messages(ranks: Callable[[int], Ranks]) -> None:
    for found in ranks(4).run(trained, PARTITIONS[2], WAYS[:1]):
        assert found[""] < 1e-11, found


def bytes_here(partition: str) -> float:
    """The bytes of parameters, gradients and Adam's states on this rank, as a share of one process's."""
    fully_sharded.LEAST_BYTES = 1 << 15
    mesh = distconv.init(partition, device_type="cpu")
    net = nn.Sequential(*(nn.Sequential(nn.Conv2d(64, 64, 3, padding=1), nn.GroupNorm(8, 64)) for _ in range(6)))
    whole = 4 * sum(p.nbytes for p in net.parameters())
    distconv.parallelize(net, mesh, shard_parameters=True)
    optimizer = torch.optim.Adam(net.parameters())
    net(distconv.shard(torch.randn(4, 64, 8, 8), mesh)).square().mean().backward()
    optimizer.step()
    states = [value for state in optimizer.state.values() for value in state.values() if value.dim()]
    tensors: list[Any] = [*net.parameters(), *(p.grad for p in net.parameters()), *states]
    local = [x._local_tensor if isinstance(x, DTensor) else x for x in tensors]
    storages = {x.untyped_storage()._cdata: x.untyped_storage().nbytes() for x in local}
    return sum(storages.values()) / whole


@pytest.mark.gloo
@pytest.mark.parametrize("partition", PARTITIONS)
def test_a_rank_has_a_quarter(ranks: Callable[[int], Ranks], partition: str) -> None:
    assert all(share < 0.27 for share in ranks(4).run(bytes_here, partition))


def gathered() -> dict[str, tuple[int, int]]:
    """How many parameters forward gathers, and backward, by what saves tensors for it."""
    fully_sharded.LEAST_BYTES = 0
    mesh = distconv.init("height=4", device_type="cpu")
    x = distconv.shard(torch.randn(4, 8, 8, 8), mesh)
    found = {}
    for way in ("autograd", "a checkpoint", "hooks"):
        net = nn.Sequential(*(nn.Conv2d(8, 8, 3, padding=1, bias=False) for _ in range(3)))
        model = distconv.parallelize(net, mesh, shard_parameters=True)
        hooks = torch.autograd.graph.save_on_cpu() if way == "hooks" else contextlib.nullcontext()
        stock = fully_sharded.ShardDivision.gather
        with (
            mock.patch.object(fully_sharded.ShardDivision, "gather", autospec=True, side_effect=stock) as gather,
            hooks,
        ):
            y = checkpoint(model, x, use_reentrant=False) if way == "a checkpoint" else model(x)
            forward = gather.call_count
            y.square().mean().backward()
            found[way] = forward, gather.call_count - forward
    return found


@pytest.mark.gloo
def test_parameters_are_kept_whole_where_others_save_tensors(ranks: Callable[[int], Ranks]) -> None:
    """What a checkpoint computes again gathers them again; backward then does not."""
    for found in ranks(4).run(gathered):
        assert found == {"autograd": (3, 3), "a checkpoint": (3, 3), "hooks": (3, 0)}


def refused() -> list[str]:
    fully_sharded.LEAST_BYTES = 0
    mesh = distconv.init("sample=2,height=2", device_type="cpu")
    x = distconv.shard(torch.randn(4, 3, 8, 6, dtype=torch.float64), mesh)

    def of_gradients(net: Any) -> None:
        torch.autograd.grad(net(x).square().mean(), net.head.weight, create_graph=True)

    def changed_since(net: Any) -> None:
        loss = net(x).square().mean()
        with torch.no_grad():
            net.twice.weight.mul_(2)
        loss.backward()

    found = []
    for way, attempt in (("view", lambda net: net(x)), ("", of_gradients), ("", changed_since)):
        with pytest.raises(RuntimeError) as error:
            attempt(distconv.parallelize(network(way), mesh, shard_parameters=True))
        found.append(str(error.value))
    return found


REFUSED = (
    "a view of a parameter (6, 9) that is sharded along all axes was changed in place; accepted: ",
    "gradients of gradients of a parameter (",
    "one of the variables needed for gradient computation has been modified by an inplace operation: ",
)


def kept() -> str:
    """The error of a model in turn that has what a program has computed of a sharded parameter."""
    fully_sharded.LEAST_BYTES = 0
    mesh = distconv.init("sample=2", device_type="cpu")
    net, x = network(""), torch.randn(4, 3, 8, 6, dtype=torch.float64)
    sharded, in_turn = settings.options({"shard_parameters": "on"}), (read_parts("height=2"), None)
    with sharded, distconv.distributed_script(mesh), script_in_turn(in_turn, ranks=mesh):
        net(x)
        net.before = net.stem.weight.detach() * 2
        with pytest.raises(distconv.UnsupportedOperation) as error:
            net(x)
    return str(error.value)


@pytest.mark.gloo
def test_what_is_computed_of_sharded_parameters_is_no_state_of_parts(ranks: Callable[[int], Ranks]) -> None:
    for found in ranks(2).run(kept):
        assert "the model keeps a distributed tensor (8, 3, 3, 3)" in found and found.count("\n") == 0


@pytest.mark.gloo
def test_what_is_refused(ranks: Callable[[int], Ranks]) -> None:
    for found in ranks(4).run(refused):
        assert len(found) == len(REFUSED) and all(map(str.startswith, found, REFUSED)), found
