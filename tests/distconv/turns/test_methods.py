"""The decode of a model in turn: one call, whose caches stay with the parts; what parts cannot compute is told."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from small_tensors import gathered_up_to
from torch import Tensor, nn

import distconv
from distconv.turns import methods, turning

X = torch.randn(1, 2, 3, 9, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


class Video(nn.Module):
    """Decodes frame by frame, and keeps what its layer was given for the next frame."""

    def __init__(self, refused: bool = False, changing: str = "") -> None:
        super().__init__()
        self.layer = nn.Conv3d(2, 2, 3, padding=(0, 1, 1))
        self.drop = nn.Dropout(0.5)
        self.register_buffer("seen", torch.zeros(()))
        self.cache: list[Any] = [None]
        self.refused, self.changing = refused, changing

    def _frame(self, x: Tensor) -> Tensor:
        before = torch.zeros_like(x).expand(-1, -1, 2, -1, -1) if self.cache[0] is None else self.cache[0]
        whole = torch.cat([before, x], 2)
        self.cache[0] = whole[:, :, -2:]
        return self.layer(whole)

    def decode(self, z: Tensor, scale: float = 1.0) -> tuple[Tensor, str]:
        self.cache = [None]
        y = torch.cat([self._frame(z[:, :, frame : frame + 1] * scale) for frame in range(z.shape[2])], 2)
        if self.changing:
            with torch.no_grad():
                {"weight": self.layer.weight, "seen": self.seen}[self.changing].add_(0.5)
        if self.refused:
            self.drop(y).roll(1)  # no rule rolls all elements as of one row
        return self.drop(y), "decoded"


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The models whose calls were computed in turn."""
    found: list[str] = []
    own = turning.call_in_turn

    def counted(parts: Any, memory: Any, module: nn.Module, *given: Any) -> Any:
        found.append(type(module).__name__)
        return own(parts, memory, module, *given)

    monkeypatch.setattr(turning, "call_in_turn", counted)
    return found


def decoded(model: Video) -> list[Tensor]:
    """What decode gives and leaves, and the gradients of its layer."""
    model.layer.weight.grad = None
    torch.manual_seed(3)
    y, said = model.decode(X, scale=2.0)
    y.square().sum().backward()
    assert said == "decoded"
    return [y.detach(), model.cache[0], model.layer.weight.grad, torch.rand(3)]


def test_a_decode_is_one_call(made: list[str]) -> None:
    plain = Video().double()
    turned = distconv.in_turn(copy.deepcopy(plain), "height=4")
    for found, right in zip(decoded(turned), decoded(plain), strict=True):
        assert type(found) is Tensor
        torch.testing.assert_close(found, right)
    assert made == ["Video"]
    assert "forward" not in vars(turned)


def test_a_script_makes_its_models_while_it_runs(made: list[str]) -> None:
    plain = Video().double()
    with turning.script_in_turn(turning.read_plan("height=4", None)):
        turned = Video().double()
        turned.load_state_dict(plain.state_dict())
        found = decoded(turned)
    for one, right in zip(found, decoded(plain), strict=True):
        torch.testing.assert_close(one, right)
    assert made == ["Video"]


def test_what_parts_cannot_compute_is_reported_once(made: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    plain = Video(refused=True).double()
    turned = distconv.in_turn(copy.deepcopy(plain), "height=4")
    for _ in range(2):
        with gathered_up_to(0):
            found = decoded(turned)
        for one, other in zip(found, decoded(plain), strict=True):
            torch.testing.assert_close(one, other)
    told = capsys.readouterr().err
    assert told.startswith("distconv: in turn: the modules of Video.decode run one by one: ") and told.count("\n") == 1
    assert made[0] == "Video" and set(made[1:]) == {"Conv3d", "Dropout"}


@pytest.mark.parametrize("changing", ["weight", "seen"])
def test_what_a_refused_call_has_changed_is_changed_once(changing: str) -> None:
    plain = Video(refused=True, changing=changing).double()
    turned = distconv.in_turn(copy.deepcopy(plain), "height=4")
    outcomes = []
    for model in (plain, turned):
        torch.manual_seed(3)
        with gathered_up_to(0), torch.no_grad():
            outcomes.append((model.decode(X)[0], model.layer.weight, model.seen))
    torch.testing.assert_close(*outcomes)


def test_other_models_of_the_class_are_left_alone(made: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    distconv.in_turn(Video(), "height=4")
    assert hasattr(Video.decode, methods._MARK)
    monkeypatch.delattr(methods, "RandomNumbers")  # nothing is kept for them, either
    Video().double().decode(X)
    assert not made
