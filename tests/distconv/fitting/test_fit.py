"""Models and scripts within a limit of all memory."""

from __future__ import annotations

import copy
import functools
import gc
import os
import re
import resource
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

import distconv
from distconv.fitting.beside import optimizer_bytes
from distconv.fitting.choice import Fit
from distconv.fitting.following import followed
from distconv.fitting.models import Fitting
from distconv.fitting.prices import measured_prices
from distconv.model.direct.chains.call import PRICES
from distconv.settings.partition import Partition
from distconv.tensors.gathering import memory
from distconv.tensors.memory import TensorMemory
from distconv.turns.one_part import parts_within

MIB = 1 << 20


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for channels in (2, 8, 8, 8, 8):
            kernel = 3 if channels == 2 else 1  # in float64 a larger one takes most of the memory for its columns
            conv = nn.Conv2d(channels, 8, kernel, padding=kernel // 2, bias=False)
            layers += [conv, nn.BatchNorm2d(8), nn.ReLU()]
        self.body, self.head = nn.Sequential(*layers), nn.Conv2d(8, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


def train(model: nn.Module, x: Tensor) -> list[Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), 1e-2, momentum=0.9)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [*losses, *model.buffers(), *(p.detach() for p in model.parameters())]


@pytest.mark.parametrize("share", [1.1, 0.6, 0.45])
def test_a_model_trains_as_plain_torch_within_each_limit(share: float, capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    model, x = Net().double(), torch.randn(1, 2, 96, 64, dtype=torch.float64)
    whole = max(followed(model, (x,), {}, True, PRICES["cpu"]).alive())
    expected = train(copy.deepcopy(model), x)
    found = train(distconv.fit(model, int(share * whole)), x)
    for each, other in zip(found, expected, strict=True):
        torch.testing.assert_close(each, other, rtol=1e-10, atol=1e-12)
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "--memory" in line]
    how = {1.1: "runs whole: at most", 0.6: "runs whole, ", 0.45: "runs whole, "}[share]
    assert f"Net {how}" in line
    assert "no way fits" not in line


class Moved(nn.Module):
    """Two scales, with running statistics and random numbers in segments that parts compute again."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = (
            nn.Sequential(
                nn.Conv2d(i, o, 3, padding=1),
                nn.BatchNorm2d(o),
                nn.GELU(),
                nn.Dropout(0.2),
                nn.Conv2d(o, o, 1),
                nn.SiLU(),
            )
            for i, o in ((2, 4), (4, 8), (8, 4))
        )
        self.down, self.up = nn.MaxPool2d(2), nn.Upsample(scale_factor=2, mode="bilinear")

    def forward(self, x: Tensor) -> Tensor:
        x = self.one(x)
        return x + self.up(self.three(self.two(self.down(x))))


def test_parts_compute_segments_again_where_to_move_takes_longer(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    slow = replace(PRICES["cpu"], received=1e-6)
    monkeypatch.setattr("distconv.fitting.called.measured_prices", lambda *_: slow)
    torch.manual_seed(0)
    model, x = Moved().double(), torch.randn(1, 2, 128, 64, dtype=torch.float64)
    torch.manual_seed(1)
    expected = train(copy.deepcopy(model), x)
    torch.manual_seed(1)
    found = train(distconv.fit(model, "2MiB"), x)
    for each, other in zip(found, expected, strict=True):
        torch.testing.assert_close(each, other, rtol=1e-10, atol=1e-12)
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "--memory" in line]
    assert re.search(r"Moved runs in parts height=\d+ in turn, with tensors offloaded, \d segments? recomp", line)
    assert "no way fits" not in line


def test_what_no_backward_keeps_is_computed_in_parts(capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    layers = nn.Conv2d(2, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 1, 3, padding=1)
    model, x = nn.Sequential(*layers), torch.randn(1, 2, 128, 64)
    expected = model(x).detach()
    for fitted in (distconv.fit(copy.deepcopy(model), "720KiB"), distconv.in_turn(model, "auto", memory="720KiB")):
        with torch.no_grad():
            found = fitted(x)
        torch.testing.assert_close(found, expected)
        line = capsys.readouterr().err
        assert "Sequential runs in parts height=4 in turn" in line
    assert "no way fits" not in line


class Decodes(Net):
    """Calls the decode of a model in it."""

    class Inner(Net):
        def decode(self, x: Tensor) -> Tensor:
            return self.forward(x)

    def __init__(self) -> None:
        super().__init__()
        self.inner = self.Inner()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner.decode(x).square()


def test_what_a_chosen_call_calls_is_not_chosen_for_once_more(capsys: pytest.CaptureFixture[str]) -> None:
    model, x = Decodes(), torch.randn(1, 2, 96, 64)
    whole = max(followed(model, (x,), {}, True, PRICES["cpu"]).alive())
    for share in (1.1, 0.7):
        distconv.fit(copy.deepcopy(model), int(share * whole))(x).sum().backward()
        (line,) = [line for line in capsys.readouterr().err.splitlines() if "--memory" in line]
        assert "Decodes runs whole" in line


class Exhausts(Net):
    """Finds no memory in its first call, after it has changed its state."""

    def __init__(self, iterates: bool = False) -> None:
        super().__init__()
        self.drop, self.calls, self.numbers = nn.Dropout(0.2), 0, iter(range(9)) if iterates else None

    def forward(self, x: Tensor) -> Tensor:
        y = self.drop(super().forward(x))
        self.calls += 1
        failing = Path(os.environ.get("FAILS", "none"))
        if not isinstance(x, FakeTensor) and failing.exists():
            failing.unlink()  # A file is not the model's state, which is put back.
            raise torch.OutOfMemoryError("CUDA out of memory")
        return y * self.calls


@pytest.mark.parametrize("share", [1.5, 0.75])
def test_a_call_without_enough_memory_is_made_again_within_less(
    share: float, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model, x = Exhausts(), torch.randn(1, 2, 96, 64)
    whole = max(followed(model, (x,), {}, True, PRICES["cpu"]).alive())
    torch.manual_seed(1)
    expected = [*train(copy.deepcopy(model), x), torch.rand(2)]
    (tmp_path / "fails").touch()
    monkeypatch.setenv("FAILS", str(tmp_path / "fails"))
    torch.manual_seed(1)
    found = [*train(distconv.fit(model, int(share * whole)), x), torch.rand(2)]
    for each, other in zip(found, expected, strict=True):
        torch.testing.assert_close(each, other, rtol=1e-5, atol=1e-6)
    first, failed, second = (line for line in capsys.readouterr().err.splitlines() if "--memory" in line)
    assert ("Exhausts runs whole: " in first) == (share > 1)
    assert failed.endswith("Exhausts ran out of memory, once more: OutOfMemoryError: CUDA out of memory")
    assert "Exhausts runs whole, " in second


def test_a_call_that_cannot_be_made_again_ends_with_its_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "fails").touch()
    monkeypatch.setenv("FAILS", str(tmp_path / "fails"))
    model = distconv.fit(Exhausts(iterates=True), "1GiB")
    with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory") as failure:
        model(torch.randn(1, 2, 8, 8))
    assert failure.value.__notes__ == [
        "distconv: --memory: the call is not made again within less, as it has changed Exhausts.numbers"
    ]


def test_gradients_of_earlier_calls_make_no_part_larger() -> None:
    model, x = nn.Sequential(nn.Conv2d(2, 64, 3), nn.Conv2d(64, 64, 3), nn.Conv2d(64, 1, 3)), torch.randn(1, 2, 64, 16)
    follow = functools.partial(parts_within, model, (x,), {}, Partition.parse("height=8"), True)
    taken = follow()(1 << 40)
    model(x).sum().backward()
    assert follow()(1 << 40).with_scratch == taken.with_scratch


def test_the_state_that_optimizers_will_keep_counts() -> None:
    model = nn.Linear(10, 10, bias=False)
    plain = torch.optim.SGD(model.parameters(), 0.1)
    assert optimizer_bytes([model]) == (0, 0)
    adam = torch.optim.AdamW(model.parameters(), amsgrad=True)
    assert optimizer_bytes([model]) == (0, 1200)
    model(torch.ones(1, 10)).sum().backward()
    adam.step()
    there, missing = optimizer_bytes([model])
    assert (there, missing) == (1204, 0)
    del plain, adam
    gc.collect()
    assert optimizer_bytes([model]) == (0, 0)
    own = type("Own", (torch.optim.SGD,), {})(model.parameters(), 0.1, momentum=0.5)
    assert optimizer_bytes([model]) == (0, 400)
    del own


@pytest.mark.parametrize("limit", ["much", "0", 0])
def test_a_limit_that_is_none(limit: str | float) -> None:
    with pytest.raises(ValueError, match=f"^memory {limit!r}: accepted: "):
        distconv.fit(nn.Linear(1, 1), limit)


def test_what_is_no_model_is_refused() -> None:
    with pytest.raises(TypeError, match=r"accepted: a torch\.nn\.Module"):
        distconv.fit(3, "1GiB")  # type: ignore[type-var]


def test_a_call_that_cannot_be_followed_runs_whole(capsys: pytest.CaptureFixture[str]) -> None:
    class Strict(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            assert type(x) is Tensor, "a subclass"
            return super().forward(x)

    model, x = Strict(4, 4), torch.ones(2, 4)
    expected = model(x)
    assert torch.equal(distconv.fit(model, "1KiB")(x), expected)
    assert "Strict runs whole, as it cannot be followed: AssertionError: a subclass" in capsys.readouterr().err


def test_what_parts_cannot_do_runs_whole(capsys: pytest.CaptureFixture[str]) -> None:
    class Retains(nn.Conv2d):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            y.retain_grad()
            self.loss, self.others = y.mean(), {"square": y * y}  # which torch does not let anyone copy
            return y * 2

    model, x = Retains(1, 1, 3), torch.ones(2, 1, 64, 64)
    expected = model(x)
    assert torch.equal(distconv.fit(model, "500KiB")(x), expected)
    said = capsys.readouterr().err
    assert "Retains does not run in parts sample=2 in turn, as it cannot be followed: UnsupportedOperation" in said


def test_what_a_process_and_its_control_groups_may_still_take(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    free = memory.free_here("cpu")
    (tmp_path / "memory.max").write_text("3000000")
    (tmp_path / "memory.current").write_text("2500000")
    (tmp_path / "memory.stat").write_text("anon 1\ninactive_file 200000\n")
    (tmp_path / "own").write_text("0::/\n")
    monkeypatch.setattr(memory, "_CONTAINER", tmp_path)
    monkeypatch.setattr(memory, "_OWN", tmp_path / "own")
    assert memory.free_here("cpu") == 700000
    (tmp_path / "memory.max").write_text("max")
    (tmp_path / "memory").mkdir()
    for name, text in {"limit_in_bytes": 900, "usage_in_bytes": 500, "stat": "total_inactive_file 100"}.items():
        (tmp_path / "memory" / f"memory.{name}").write_text(f"{text}000\n")
    (tmp_path / "own").write_text("5:memory:/docker/1\n4:cpu,cpuacct:/\n0::/\n")  # both versions
    assert memory.free_here("cpu") == 500000
    (tmp_path / "own").write_text("0::/\n")
    assert memory.free_here("cpu") > 0.5 * free
    pages = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    monkeypatch.setattr(memory.resource, "getrlimit", lambda which: (pages + 50 * MIB, -1))
    assert memory.free_here("cpu") <= 60 * MIB


def test_a_kind_of_call_is_chosen_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def ways(*args: Any) -> list[Fit]:
        asked.append(args)
        return [Fit(0, 1.0)]

    monkeypatch.setattr(Fitting, "_ways", ways)
    model = distconv.fit(nn.Conv2d(1, 1, 3), "1MiB")
    for extent in (8, 8, 9, 8):
        model(torch.ones(1, 1, extent, extent))
    with torch.no_grad():
        model(torch.ones(1, 1, 8, 8))
    assert len(asked) == 3


class Padded(nn.Module):
    """Computes its padding from integers that are buffers, as EnCodec does."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv1d(2, 4, 5)
        self.register_buffer("kernel", torch.tensor(5))

    def forward(self, x: Tensor) -> Tensor:
        both = self.kernel - 1
        return self.layer(nn.functional.pad(x, (both // 2, both - both // 2)))


def test_sizes_that_are_buffers_are_known_while_a_call_is_followed(capsys: pytest.CaptureFixture[str]) -> None:
    model, x = Padded(), torch.randn(1, 2, 4096)
    with torch.no_grad():
        torch.testing.assert_close(distconv.fit(copy.deepcopy(model), "200KiB")(x), model(x))
    assert "Padded runs in parts width=" in capsys.readouterr().err


def test_what_measures_speeds_takes_little_memory() -> None:
    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            counted.count(result := func(*args, **(kwargs or {})))
            return result

    counted = TensorMemory()
    measured_prices.cache_clear()
    with Count():
        measured_prices("cpu", torch.float32, 1 << 22)
    assert 0 < counted.peak < 20 << 20  # of three tensors of that size, and those of a convolution
