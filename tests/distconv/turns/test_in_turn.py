"""Parts in turn in one process: outputs, gradients, buffers and side effects are those of stock torch."""

from __future__ import annotations

import copy
import gc
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import distconv
from benchmarks.campaign.in_turn import case_of, tried
from benchmarks.campaign.trial import Rank
from benchmarks.networks import NETWORKS
from distconv.turns import pager
from tests.distconv.turns.test_following import Counted

TOLERANCE = 1e-10


class Attention(nn.Module):
    """Over all pixels."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Conv2d(channels, 3 * channels, 1), nn.Conv2d(channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).flatten(2).transpose(1, 2)[:, None].chunk(3, -1)
        return x + self.proj(F.scaled_dot_product_attention(q, k, v)[:, 0].transpose(1, 2).reshape(x.shape))


class Checkpointed(nn.Module):
    def __init__(self, body: nn.Module, reentrant: bool) -> None:
        super().__init__()
        self.body, self.reentrant = body, reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.body, x, use_reentrant=self.reentrant)


class Scaled(nn.Module):
    """Reads a number of its input in forward, and one of a gradient in backward."""

    def forward(self, x: Tensor) -> Tensor:
        if x.requires_grad:
            x.register_hook(lambda grad: grad * (1 + float(grad.abs().max())))
        return x / float(x.detach().abs().max())


def body(**options: Any) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(4, 4, 3, padding=1, **options), nn.BatchNorm2d(4), nn.ReLU(inplace=True))


def decoder() -> nn.Module:
    up = nn.Sequential(nn.Upsample(scale_factor=2), nn.Conv2d(8, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.SiLU())
    return nn.Sequential(nn.Conv2d(4, 8, 3, padding=1), Attention(8), up, nn.Conv2d(8, 3, 3, padding=1))


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], str]] = {
    "norms and strides": (lambda: nn.Sequential(body(), nn.Conv2d(4, 6, 3, 2, 1)), (3, 4, 19, 9), "height=4"),
    "two axes": (lambda: nn.Sequential(body(), nn.MaxPool2d(3, 2, 1)), (2, 4, 13, 11), "height=2,width=3"),
    "samples": (lambda: nn.Sequential(body(), nn.Flatten(), nn.Linear(4 * 36, 5)), (5, 4, 6, 6), "sample=3"),
    "samples and rows": (lambda: nn.Sequential(body(), nn.AdaptiveAvgPool2d(1)), (3, 4, 7, 6), "sample=2,height=2"),
    "fewer rows than parts": (body, (2, 4, 3, 5), "height=8"),
    "a decoder": (decoder, (1, 4, 8, 8), "height=4"),
    "dropout": (lambda: nn.Sequential(body(), nn.Dropout(0.4), nn.Conv2d(4, 2, 3)), (2, 4, 12, 8), "height=3"),
    "checkpoint": (lambda: Checkpointed(nn.Sequential(body(), nn.Dropout2d()), False), (2, 4, 8, 8), "height=2"),
    "reentrant checkpoint": (lambda: Checkpointed(body(), True), (2, 4, 8, 8), "height=2"),
    "dilated circles": (lambda: body(dilation=2, padding_mode="circular"), (2, 4, 12, 8), "width=4"),
    "numbers": (lambda: nn.Sequential(body(), Scaled(), nn.Conv2d(4, 2, 3)), (2, 4, 8, 8), "height=2"),
    "transposed": (lambda: nn.ConvTranspose2d(4, 3, 4, 2, 1), (1, 4, 9, 9), "height=4"),
    "a line": (lambda: nn.Sequential(nn.Conv1d(4, 4, 9, padding=4), nn.GELU()), (1, 4, 40), "width=5"),
    "a volume": (lambda: NETWORKS["unet3d"].small().build(), (1, 1, 16, 16, 16), "depth=4"),
    "a residual network": (lambda: NETWORKS["resnet18"].small().build(), (2, 3, 32, 32), "height=4"),
}


def numbers(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """What a training step leaves, and what evaluation gives."""
    x = x.clone().requires_grad_()
    torch.manual_seed(3)
    y = model(x * 1.0)
    drawn = torch.rand(2)
    (y.square().mean() + y.flatten()[0]).backward()
    found = {"output": y, "input": x.grad, "random": torch.cat([drawn, torch.rand(3)])}
    found |= {name: parameter.grad for name, parameter in model.named_parameters()}
    found |= {f"{name} then": buffer.clone() for name, buffer in model.named_buffers()}
    with torch.inference_mode():
        found["evaluation"] = model.eval()(x.detach())
    assert all(type(value) is Tensor for value in found.values())
    return {name: value.detach() for name, value in found.items()}


def largest(found: dict[str, Tensor], right: dict[str, Tensor]) -> float:
    assert found.keys() == right.keys()
    scale = max(float(value.abs().max()) for value in right.values())
    return max(float((found[name] - value).abs().max()) for name, value in right.items()) / scale


@pytest.fixture(autouse=True)
def _float64() -> Any:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("name", MODELS)
def test_a_step_in_turn_is_that_of_one_process(name: str) -> None:
    build, shape, parts = MODELS[name]
    torch.manual_seed(0)
    plain, x = build().double(), torch.randn(shape)
    turned = distconv.in_turn(copy.deepcopy(plain), parts)
    right = numbers(plain, x)
    assert largest(numbers(turned, x), right) < TOLERANCE


@pytest.mark.parametrize("name", MODELS)
def test_what_leaves_the_memory_comes_back_as_it_was(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pager, "least_within", lambda limit: 64)
    build, shape, parts = MODELS[name]
    torch.manual_seed(0)
    plain, x = build().double(), torch.randn(shape)
    turned = distconv.in_turn(copy.deepcopy(plain), parts, memory=2048)
    assert largest(numbers(turned, x), numbers(plain, x)) < TOLERANCE
    found = pager.pager_of("cpu")
    assert found.written and found.read
    del turned
    gc.collect()
    assert found.resident == 0, "what nobody holds is forgotten"


class Clamped(nn.Conv2d):
    """A layer that writes to its own weights in forward."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.mul_(0.9)
        self.weight.data.clamp_(-0.1, 0.1)
        return super().forward(x)


class Assigned(nn.Conv2d):
    """A layer that gives its weights other memory in forward, and keeps what they were."""

    def forward(self, x: Tensor) -> Tensor:
        self.before = self.weight.data * 1.0
        self.weight.data = self.before.clamp(-0.1, 0.1)
        return super().forward(x)


@pytest.mark.parametrize("kind", [Clamped, Assigned])
def test_values_that_parts_write_to_parameters_do_not_leave_the_memory(
    kind: type[nn.Conv2d], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parts read them when they take turns, outside of any operator that would bring them back."""
    monkeypatch.setattr(pager, "least_within", lambda limit: 64)
    torch.manual_seed(0)
    plain, x = nn.Sequential(kind(2, 6, 3, padding=1), kind(6, 4, 3, padding=1)).double(), torch.randn(2, 2, 8, 8)
    turned = distconv.in_turn(copy.deepcopy(plain), "height=4", memory=256)
    assert largest(numbers(turned, x), numbers(plain, x)) < TOLERANCE
    assert pager.pager_of("cpu").written


# Those with state make parameters anew, which leave the memory, and reduce by collectives of torch's own.
@pytest.mark.parametrize(("seed", "state"), [(7, False), (21, False), (45, False), (4956354, True), (4956410, True)])
def test_random_networks_in_turn(seed: int, state: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pager, "least_within", lambda limit: 64)
    case = case_of(seed, state)
    answer = tried(Rank(), case, lambda model: distconv.in_turn(model, case["partition"], memory=2048))
    assert answer["outcome"] in ("right", "rounding")


def test_the_memory_of_parts_stays_within_the_limit() -> None:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.GroupNorm(2, 8)) for _ in range(4)]
    plain, x = nn.Sequential(*layers), torch.randn(1, 8, 256, 256)
    whole = x.nbytes  # 4 MiB
    turned = distconv.in_turn(copy.deepcopy(plain), "height=16", memory=whole // 4)
    found = pager.pager_of("cpu")
    found.most = 0
    with torch.no_grad():
        torch.testing.assert_close(turned(x), plain(x))
    assert 0 < found.most <= whole * (1 / 4 + 2 / 16), "of the limit, and of what one operator makes"


def test_parts_copy_their_pieces_of_an_input_in_a_file_and_the_result_is_there_once(tmp_path: Path) -> None:
    """The result of a head with many classes is the largest tensor, its input is the next one."""
    classes, extent = 96, 192
    head = nn.Sequential(nn.Conv2d(32, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, classes, 1))
    (tmp_path / "x").write_bytes(b"\0" * (8 * 32 * extent**2))
    x = torch.from_file(str(tmp_path / "x"), shared=True, size=32 * extent**2).view(1, 32, extent, extent)
    x.uniform_()
    turned = distconv.in_turn(copy.deepcopy(head), "height=16", results="host")
    with torch.no_grad():
        right = head(x)
        with Counted(0, turned, x) as counted:
            found = turned(x)
    torch.testing.assert_close(found, right)
    assert counted.peak < x.nbytes * (1 + 3 / 16) + found.nbytes * (1 + 2 / 16)


class Shifted(nn.Module):
    """Changes an input that no part has a piece of."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(2, 2, 3, padding=1)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        return self.layer(x) * t.mul_(2)


def test_each_part_changes_its_own_of_an_input_that_is_not_cut() -> None:
    model, x, t = Shifted(), torch.randn(1, 2, 9, 5), torch.tensor(3.0)
    right = model(x, t.clone())
    torch.testing.assert_close(distconv.in_turn(model, "height=3")(x, t), right)
    assert t == 3


def test_gradients_accumulate_and_optimizers_step_as_ever() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(body(), nn.Conv2d(4, 1, 1))
    turned = distconv.in_turn(copy.deepcopy(plain), "height=3")
    for model in (plain, turned):
        optimizer = torch.optim.Adam(model.parameters())
        for step in range(4):
            x = torch.randn(2, 4, 9, 6, generator=torch.Generator().manual_seed(step))
            model(x).square().mean().backward()
            if step % 2:
                optimizer.step()
                optimizer.zero_grad()
    assert largest(turned.state_dict(), plain.state_dict()) < 1e-9  # Adam divides by small numbers


def test_hooks_of_parameters_see_whole_gradients_once() -> None:
    seen: list[Tensor] = []
    model = distconv.in_turn(body(), "height=2")
    model[0].weight.register_hook(lambda grad: seen.append(grad.clone()))
    model(torch.randn(2, 4, 8, 8)).square().sum().backward()
    assert len(seen) == 1 and torch.equal(seen[0], model[0].weight.grad)


def test_hooks_of_parameters_without_a_gradient_are_not_called() -> None:
    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.heads = nn.ModuleList(nn.Conv2d(2, 2, 3, padding=1) for _ in range(2))

        def forward(self, x: Tensor, head: int) -> Tensor:
            y: Tensor = self.heads[head](x)
            return y

    model, calls = distconv.in_turn(Heads(), "height=2"), list[str]()
    for name, parameter in model.named_parameters():
        parameter.register_hook(lambda grad, name=name: calls.append(name))
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: calls.append(name))
    for head in (0, 1):
        model(torch.randn(1, 2, 8, 8), head).sum().backward()
        assert sorted(calls) == sorted([f"heads.{head}.{name}" for name in ("bias", "weight")] * 2)
        calls.clear()


def test_frozen_parameters_and_inputs_have_no_gradients() -> None:
    model = body()
    model[0].requires_grad_(False)
    distconv.in_turn(model, "height=2")(torch.randn(2, 4, 8, 8)).sum().backward()
    assert model[0].weight.grad is None and model[1].weight.grad is not None


def test_autocast_of_the_caller_holds_in_the_parts() -> None:
    plain = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 3)).float()
    turned, x = distconv.in_turn(copy.deepcopy(plain), "height=2"), torch.randn(1, 4, 8, 8, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found, right = turned(x), plain(x)
    assert found.dtype == right.dtype == torch.bfloat16
    torch.testing.assert_close(found, right, rtol=2e-2, atol=2e-2)


class Failing(nn.Module):
    """Fails in the last part, behind an exchange."""

    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.conv, self.error = nn.Conv2d(2, 2, 3, padding=1), error

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        if threading.current_thread().name == "part 2":
            (_ for _ in ()).throw(self.error)  # not by a statement of the program: it would run whole
        return self.conv(y)


@pytest.mark.parametrize("error", [KeyError("a part"), KeyboardInterrupt()])
def test_an_exception_of_one_part_ends_the_call_and_no_more(error: BaseException) -> None:
    model, x = distconv.in_turn(Failing(error), "height=3"), torch.randn(1, 2, 6, 6)
    attributes = [dict(module.__dict__) for module in model.modules()]
    for _ in range(2):
        with pytest.raises(type(error)) as raised:
            model(x)
        assert raised.value is error
    assert attributes == [module.__dict__ for module in model.modules()]
    again = distconv.in_turn(nn.Conv2d(2, 2, 3, padding=1), "height=3")
    torch.testing.assert_close(again(x), F.conv2d(x, again.weight, again.bias, padding=1))


class Unequal(nn.Module):
    """Whose parts do not agree on what comes next."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 2, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return x if threading.current_thread().name == "part 1" else self.conv(x)


def test_parts_that_wait_for_each_other_are_an_error_and_no_hang() -> None:
    with pytest.raises(RuntimeError, match="wait"):
        distconv.in_turn(Unequal(), "height=2")(torch.randn(1, 2, 6, 6))


class Padded(nn.Module):
    """Changes what it has padded, of which the first of two parts is what it was before."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(2, 2, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.layer(x)
        return x, F.pad(x, (0, 0, 0, 1), "replicate").mul_(2)


def test_what_is_padded_in_inference_is_no_part_of_its_input() -> None:
    x = torch.ones(1, 2, 9, 3)
    model = Padded()
    with torch.inference_mode():
        expected, found = model(x), distconv.in_turn(model, "height=2")(x)
    assert all(torch.allclose(a, b) for a, b in zip(found, expected, strict=True))
