"""Tensors outside of modules: a segment that is computed again reads there what it read at first."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from distconv.fitting import outer_state
from distconv.fitting.outer_state import OuterState

TABLE = torch.zeros(3)


class Reader(nn.Module):
    """Reads a global tensor."""

    def forward(self, x: Tensor) -> Tensor:
        return x * TABLE


WRITES: dict[str, Callable[[], object]] = {
    "in place": lambda: TABLE.add_(1),
    "data": lambda: TABLE.data.add_(1),
    "other data": lambda: setattr(TABLE, "data", TABLE + 1),
    "NumPy": lambda: TABLE.numpy().__iadd__(1),
}


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("on_processor", [True, False])
def test_numbers_that_were_written_by_any_way_are_the_first_ones_again(
    write: str, on_processor: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not on_processor:  # as of a GPU, on which a comparison would wait
        monkeypatch.setattr(outer_state, "is_at_hand", lambda x: False)
        monkeypatch.setattr(torch, "equal", None)
    TABLE.data = torch.tensor([1.0, 2.0, 3.0])
    state = OuterState([Reader()])
    WRITES[write]()
    version = TABLE._version
    with state.in_place():
        assert TABLE.tolist() == [1, 2, 3]
    assert TABLE.tolist() == [2, 3, 4] and TABLE._version == version
