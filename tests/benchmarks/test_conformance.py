"""The benchmark of conformance tells right numbers from wrong ones, and asks libraries on real ranks."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from benchmarks.conformance.cases import Case, Layer, cases, cut_dims, kind_of, layers
from benchmarks.conformance.dtensor_arm import refused
from benchmarks.conformance.judge import judge, write
from benchmarks.conformance.layers import build
from benchmarks.conformance.peers import Peer
from benchmarks.conformance.reference import Reference
from benchmarks.conformance.tables import counts, tables
from benchmarks.conformance.torch_peer import together
from benchmarks.rank_pool import Failure

EXPECTED = {"output": np.array([1.0, -2.0]), "input": np.array([[0.5]]), "weight": np.array([3.0])}


@pytest.mark.parametrize(
    ("changed", "outcome", "said"),
    [
        ({}, "right", ""),
        ({"output": np.array([1.0, -2.0 + 1e-12])}, "right", ""),
        ({"input": np.array([[0.5 + 1e-6]])}, "wrong", "input is off by 2.0e-06"),
        ({"weight": np.array([np.nan])}, "wrong", "weight is missing, not finite or of another shape"),
        ({"weight": np.array([3.0, 3.0])}, "wrong", "weight is missing, not finite or of another shape"),
    ],
)
def test_every_ranks_numbers_must_be_those_of_one_process(
    changed: dict[str, np.ndarray], outcome: str, said: str
) -> None:
    assert judge([EXPECTED, {**EXPECTED, **changed}], EXPECTED) == (outcome, said)


def test_a_gradient_that_is_missing_is_wrong() -> None:
    assert judge([{"output": EXPECTED["output"], "input": EXPECTED["input"]}], EXPECTED)[0] == "wrong"


def test_ranks_that_differ_are_a_crash() -> None:
    assert together([("done", ""), ("done", "")]) == ("done", "")
    assert together([("refused", "no"), ("refused", "no")]) == ("refused", "no")
    assert together([("done", ""), ("refused", "no")])[0] == "crash"
    assert together([Failure("traceback"), Failure("traceback")])[0] == "crash"


def test_what_dtensor_says_is_not_supported_is_refused() -> None:
    wrapped = RuntimeError("while dispatching")
    wrapped.__cause__ = NotImplementedError("Operator aten.x does not have a sharding strategy registered.")
    assert refused(wrapped)
    assert refused(RuntimeError("Dilation must be 1 for tensor parallel convolution."))
    assert not refused(RuntimeError("expected input to have 8 channels, but got 4 channels instead"))


def test_every_layer_can_be_built_and_cut() -> None:
    assert len({layer.name for _, layer in layers()}) == len(layers())
    for _, layer in layers():
        assert torch.isfinite(build(layer)(torch.randn(layer.shape, dtype=torch.float64))).all(), layer.name
    assert {case.ranks for _, case in cases()} == {2, 4}
    assert cut_dims("depth=2,width=2", 5) == {"depth": 2, "width": 4}
    assert (kind_of("height=2,width=2"), kind_of("sample=2,height=2")) == ("space", "mixed")


def test_tables_count_outcomes() -> None:
    names = {"family": "pool", "layer": "max", "said": "no"}
    records = [
        {"library": "distconv", "partition": "width=2", "outcome": "right", **names},
        {"library": "dtensor", "partition": "width=2", "outcome": "refused", **names},
    ]
    assert counts(records) == {"right": 1, "wrong": 0, "refused": 1, "crash": 0, "hang": 0}
    shown = {table.title: table.rows for table in tables(records)}
    assert shown["Right, by family of layers"] == [("pool", "1 of 1", "0 of 1")]
    assert shown["Every layer"] == [("max", "1 right", "1 refused")]


@pytest.mark.parametrize("library", ["distconv", "dtensor"])
def test_a_library_computes_a_case_on_two_ranks(library: str, tmp_path) -> None:
    sizes = {"kernel": 3, "stride": 1, "padding": 1, "dilation": 1}
    layer = Layer("max 3x3", "pool", (2, 4, 6, 6), {"of": "max", **sizes})
    reference = Reference(layer)
    write(tmp_path / "given.npz", reference.given)
    write(tmp_path / "expected.npz", reference.expected)
    peer = Peer(library)
    try:
        assert peer.outcome(Case(layer, "height=2"), tmp_path, reference.expected) == ("right", "")
        assert peer.versions["torch"] == torch.__version__
        spoilt = {**reference.expected, "output": reference.expected["output"] + 1}
        assert peer.outcome(Case(layer, "height=2"), tmp_path, spoilt)[0] == "wrong"
    finally:
        peer.close()
