"""What a part's thread takes over from the caller's."""

from __future__ import annotations

import pytest
import torch

from distconv.turns.surroundings import Surroundings


@pytest.mark.parametrize("inference", [False, True])
def test_a_backward_runs_in_the_thread_of_its_part(inference: bool) -> None:
    with torch.inference_mode(inference):
        surroundings = Surroundings.now("cpu")
    assert surroundings.run(torch.is_inference_mode_enabled) is inference
    assert surroundings.run(torch._C._is_multithreading_enabled) is False
