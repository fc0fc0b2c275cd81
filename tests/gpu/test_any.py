"""Any convolution, drawn by hypothesis, by every algorithm of the device, against float64 on the host."""

from __future__ import annotations

import os

import pytest
import torch
from algorithms import ARMS, divisions, launch, on_device, providers
from references import operands, reference, relative_error

pytest.importorskip("hypothesis", reason="hypothesis is not installed: test_results.py has a table of convolutions")

from hypothesis import given, settings
from hypothesis import strategies as st
from problems import problems

EXAMPLES = 100 if os.environ.get("GPU_TESTS_ALL") else 20


@settings(max_examples=EXAMPLES, deadline=None)
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
