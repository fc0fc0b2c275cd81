"""Decoding as the decoders of diffusion models do it: a method that calls layers, frame by frame, with a cache."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import Ranks
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import distconv
from distconv.tensors.memory import TensorMemory

pytestmark = pytest.mark.gloo


class Causal(nn.Conv3d):
    """A convolution that reads the two frames before, which the cache keeps from one call to the next."""

    def __init__(self, channels: int, filters: int) -> None:
        super().__init__(channels, filters, 3, padding=(0, 1, 1))

    def forward(self, x: Tensor, cache: list[Any], at: list[int]) -> Tensor:  # type: ignore[override]
        last = cache[at[0]]
        wide = F.pad(x, (0, 0, 0, 0, 2, 0)) if last is None else torch.cat([last, x], 2)
        cache[at[0]] = wide[:, :, -2:].clone()
        at[0] += 1
        return super().forward(wide)


class Frames(nn.Module):
    """Attention within a frame, norms, and twice the height and width."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = Causal(4, 8), Causal(8, 3)
        self.norm, self.qkv, self.proj = nn.GroupNorm(2, 8), nn.Conv2d(8, 24, 1), nn.Linear(8, 8)

    def forward(self, x: Tensor, cache: list[Any], at: list[int]) -> Tensor:
        x = self.enter(x, cache, at)
        n, c, t, h, w = x.shape
        frames = self.norm(x).permute(0, 2, 1, 3, 4).reshape(n * t, c, h, w)
        q, k, v = self.qkv(frames).flatten(2).transpose(1, 2)[:, None].chunk(3, -1)
        y = self.proj(F.scaled_dot_product_attention(q, k, v)[:, 0]).transpose(1, 2).view(n, t, c, h, w)
        x = F.silu(x + y.permute(0, 2, 1, 3, 4))
        return self.leave(F.interpolate(x, scale_factor=(1.0, 2.0, 2.0), mode="nearest-exact"), cache, at)


class Video(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.decoder = nn.Conv3d(4, 4, 1), Frames()

    def decode(self, z: Tensor) -> Tensor:
        cache: list[Any] = [None, None]
        x = self.first(z)
        frames = [self.decoder(x[:, :, i : i + 1], cache=cache, at=[0]) for i in range(z.shape[2])]
        return torch.cat(frames, 2).clamp(-1, 1)


def decoded(partition: str, inference: bool) -> tuple[float, bool, int]:
    """The error of the result, whether autograd recorded it, and how many rows this rank has."""
    mesh = distconv.init(partition, device_type="cpu")
    torch.manual_seed(4)
    plain, z = Video().double(), torch.randn(1, 4, 3, 9, 6, dtype=torch.float64)
    model = distconv.parallelize(copy.deepcopy(plain), mesh)
    with torch.inference_mode() if inference else torch.no_grad():
        y: Any = model.decode(z)
        error = float((distconv.gather(y) - plain.decode(z)).abs().max())
        return error, y.requires_grad, y._local_tensor.shape[3]


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("size, partition, rows", [(2, "height=2", [9, 9]), (4, "height=2,width=2", [9, 9, 9, 9])])
def test_a_video_decoder_equals_one_process(
    ranks: Callable[[int], Ranks], size: int, partition: str, rows: list[int], inference: bool
) -> None:
    found = ranks(size).run(decoded, partition, inference)
    assert max(error for error, _, _ in found) < 1e-12
    assert not any(recorded for _, recorded, _ in found)
    assert [own for _, _, own in found] == rows


class Counting(TorchDispatchMode):
    """Counts what every operator on plain tensors, such as a rank's shards, makes and leaves alive."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = TensorMemory()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        self.memory.count(result)
        return result


class Tokens(nn.Module):
    """Attention between all positions of a map."""

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(2).mT[:, None]
        return F.scaled_dot_product_attention(rows, rows, rows)[:, 0].mT.reshape(x.shape)


def kept(inference: bool) -> tuple[int, list[int], list[int]]:
    """Tensors saved for backward; bytes alive beside a layer's input when it begins, and the bytes of these inputs.

    The bytes are the least of five runs: a thread of Gloo may hold what it has sent for a moment longer.
    """
    mesh = distconv.init("height=4", device_type="cpu")
    layers = (nn.Conv2d(4, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.SiLU(), Tokens(), nn.Upsample(scale_factor=2))
    model = distconv.parallelize(
        nn.Sequential(*layers, nn.Conv2d(8, 8, 5, 2, 2), nn.BatchNorm2d(8), nn.MaxPool2d(3, 1, 1)).double().eval(), mesh
    )
    saved: list[Tensor] = []
    beside: list[int] = []
    runs: list[list[int]] = []
    inputs: list[int] = []
    counting = Counting()

    def begins(module: nn.Module, args: tuple[Tensor]) -> None:
        own = own_part(args[0])
        beside.append(counting.memory.now - own.untyped_storage().nbytes())
        inputs.append(own.untyped_storage().nbytes())

    for layer in model:
        layer.register_forward_pre_hook(begins)
    with (
        torch.inference_mode() if inference else torch.no_grad(),
        torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x),  # type: ignore[func-returns-value]
    ):
        for _ in range(6):
            beside.clear(), inputs.clear()
            counting.memory = TensorMemory()
            counting.memory.count([p.detach() for p in model.parameters()])
            x = torch.randn(1, 4, 32, 16, dtype=torch.float64)
            with counting:
                model(x)
            runs.append(list(beside))
    return len(saved), [min(each) for each in zip(*runs[1:], strict=True)], inputs  # what plans keep is there by then


def own_part(x: Tensor) -> Tensor:
    """This rank's part."""
    return x._local_tensor if isinstance(x, DTensor) else x


@pytest.mark.parametrize("inference", [False, True])
def test_inference_keeps_nothing_that_training_needs(ranks: Callable[[int], Ranks], inference: bool) -> None:
    for saved, beside, inputs in ranks(4).run(kept, inference):
        assert not saved
        assert len(inputs) == 8 and min(inputs[1:]) >= 8192
        # The model's own input stays alive; an output of a layer, of 8 KiB or more, does not.
        assert max(beside) - beside[0] < inputs[0] + 3000, (beside, inputs)
