"""Every algorithm of the device in every direction, type, memory format and geometry, against float64 on the host.

Of the combinations a sample is run; GPU_TESTS_ALL=1 (`python tests/gpu/run.py --all`) runs all of them, each of which
makes a hundred plans or more.
"""

from __future__ import annotations

import os

import pytest
import torch
from algorithms import ARMS, cases, divisions, launch, on_device, precision, problem_of, providers, tolerance
from references import operands, reference, relative_error

from mucudnn.convolution.problem import Direction, Role
from mucudnn.providers import STOCK

CASES = cases(bool(os.environ.get("GPU_TESTS_ALL")))


@pytest.mark.parametrize("geometry, direction, arm", CASES)
def test_every_algorithm(geometry: str, direction: Direction, arm: str, device: torch.device) -> None:
    problem = problem_of(geometry, direction, ARMS[arm])
    source = operands(problem, with_bias=direction is Direction.FORWARD)
    expected = reference(problem, source)
    wrong, ran, refused = {}, set(), []
    with precision(ARMS[arm]):
        for algorithm, provider in providers(problem, device).items():
            bound = tolerance(provider, algorithm, problem, ARMS[arm], device)
            for dim, extents in divisions(problem):
                tensors = on_device(problem, source, device)
                if problem.target is Role.W and problem.is_half and len(extents) > 1:  # parts add up in float32
                    tensors.w.data = tensors.w.float()
                try:
                    if not launch(provider, problem, algorithm, tensors, extents, dim):
                        continue
                except RuntimeError as error:
                    refused.append(f"{algorithm} {dim} {extents}: {error}")
                    continue
                ran.add(algorithm)
                error = relative_error(tensors.target(problem).cpu(), expected)
                if not error < bound:
                    wrong[algorithm, dim, extents] = error
    assert not wrong
    assert ran - {STOCK}, f"nothing ran: {refused}"


@pytest.mark.parametrize(
    "geometry, arm", [(geometry, arm) for geometry, direction, arm in CASES if direction is Direction.BACKWARD_FILTER]
)
def test_weight_gradients_are_added_on_request(geometry: str, arm: str, device: torch.device) -> None:
    """beta 1: what the target holds is kept, and every part is added to it."""
    problem = problem_of(geometry, Direction.BACKWARD_FILTER, ARMS[arm])
    source = operands(problem)
    exact = reference(problem, source)
    held = torch.randn(exact.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) * exact.std()
    held = held.float().double()
    wrong, ran = {}, 0
    with precision(ARMS[arm]):
        for algorithm, provider in providers(problem, device).items():
            bound = tolerance(provider, algorithm, problem, ARMS[arm], device)
            for dim, extents in divisions(problem):
                tensors = on_device(problem, source, device)
                wide = torch.float32 if problem.is_half else tensors.w.dtype
                tensors.w.data = tensors.w.to(wide).copy_(held)
                try:
                    if not launch(provider, problem, algorithm, tensors, extents, dim, accumulate=True):
                        continue
                except RuntimeError:
                    continue
                ran += 1
                error = relative_error(tensors.w.cpu(), held + exact)
                if not error < bound:
                    wrong[algorithm, dim, extents] = error
    assert not wrong
    assert ran
