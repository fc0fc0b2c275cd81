"""What was begun on one stream and is used on another: who waits, and where memory goes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from distconv.transfer.stream import Stream


class Card:
    """The current stream of a card, a text, and what was asked of streams and tensors."""

    def __init__(self) -> None:
        self.current: Any = self.stream("first")
        self.asked: list[str] = []

    def stream(self, name: str) -> Any:
        card = self

        class Named(str):
            device = torch.device("cuda", 0)

            def wait_stream(self, other: str) -> None:
                card.asked.append(f"{self} waits for {other}")

        return Named(name)

    @contextlib.contextmanager
    def on(self, stream: Any) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    is_cuda, device = True, torch.device("cuda", 0)

    def record_stream(self, stream: str) -> None:
        self.asked.append(f"used on {stream}")


def test_a_stream_waits_for_another_but_not_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    card: Any = Card()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: card.current)
    monkeypatch.setattr(torch.cuda, "stream", card.on)
    made = Stream(card)
    assert made.hand_over(card) is card and made.run(lambda: card.current) == "first" and not card.asked
    card.current = card.stream("second")
    assert made.run(lambda: card.current) == "first" and card.current == "second"
    made.hand_over(card)
    assert card.asked == ["second waits for first", "used on second"]


def test_nothing_waits_on_a_processor() -> None:
    x = torch.ones(2)
    made = Stream(x)
    assert made.hand_over(x) is x and made.run(lambda: x) is x
