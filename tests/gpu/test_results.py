"""Every algorithm of the device in every direction, type, memory format and geometry, against float64 on the host."""

from __future__ import annotations

import pytest
import torch
from algorithms import ARMS, GEOMETRIES, divisions, launch, on_device, precision, problem_of, providers
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import operands, problems, reference, relative_error

from mucudnn.convolution.problem import Direction, Role
from mucudnn.providers import STOCK
from mucudnn.providers.cudnn.legacy import Legacy, math_type


@pytest.mark.parametrize("arm", ARMS)
@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_every_algorithm(geometry: str, direction: Direction, arm: str, device: torch.device) -> None:
    problem = problem_of(geometry, direction, ARMS[arm])
    source = operands(problem, with_bias=direction is Direction.FORWARD)
    expected = reference(problem, source)
    found, refused = {}, []
    with precision(ARMS[arm]):
        for algorithm, provider in providers(problem, device).items():
            for dim, extents in divisions(problem):
                tensors = on_device(problem, source, device)
                if problem.target is Role.W and problem.is_half:  # parts add up in float32
                    tensors.w.data = tensors.w.float()
                try:
                    ran = launch(provider, problem, algorithm, tensors, extents, dim)
                except RuntimeError as error:
                    refused.append(f"{algorithm} {dim} {extents}: {error}")
                    continue
                if ran:
                    found[algorithm, dim, extents] = relative_error(tensors.target(problem).cpu(), expected)
    wrong = {key: error for key, error in found.items() if not error < ARMS[arm].tolerance}
    assert not wrong
    assert any(algorithm != STOCK for algorithm, *_ in found), f"nothing ran: {refused}"


@pytest.mark.parametrize("arm", ARMS)
@pytest.mark.parametrize("geometry", GEOMETRIES)
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
                if not error < ARMS[arm].tolerance:
                    wrong[algorithm, dim, extents] = error
    assert not wrong
    assert ran


@pytest.mark.parametrize("arm", ARMS)
@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_cudnns_own_search_agrees(geometry: str, direction: Direction, arm: str, cuda: torch.device) -> None:
    """Of its older algorithms: those that are offered run, and need what was said."""
    problem = problem_of(geometry, direction, ARMS[arm])
    with precision(ARMS[arm]):
        (legacy,) = {provider for provider in providers(problem, cuda).values() if isinstance(provider, Legacy)}
        found = legacy.search(problem)
        offered = legacy.algorithms(problem)
        assert {name for name, one in found.items() if not one.status} == set(offered)
        alike = [name for name in offered if found[name].math_type == math_type(problem)]
        own = {name: legacy.prepared(problem, name, False).workspace for name in alike}
        assert {name: found[name].workspace for name in alike} == own


@settings(max_examples=100)
@given(data=st.data())
def test_any_convolution(device: torch.device, data: st.DataObject) -> None:
    problem = data.draw(problems(dtypes=("float64", "float32")))
    source = operands(problem)
    expected = reference(problem, source)
    dim, extents = data.draw(st.sampled_from(divisions(problem)))
    for algorithm, provider in providers(problem, device).items():
        tensors = on_device(problem, source, device)
        try:
            if not launch(provider, problem, algorithm, tensors, extents, dim):
                continue
        except RuntimeError:
            continue
        error = relative_error(tensors.target(problem).cpu(), expected)
        assert error < ARMS[problem.dtype].tolerance, algorithm
