"""mucudnn.convolve: arrays of other libraries, read in place, against torch in float64."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from forced import Forced, forced
from hypothesis import given, settings
from problems import problems
from references import TOLERANCE, operands, reference, relative_error

import mucudnn
from mucudnn.convolution.problem import ConvProblem, Direction
from mucudnn.runtime import arrays
from mucudnn.runtime.session import Session
from mucudnn.settings import Settings

RANDOM = np.random.default_rng(0)
X, W = RANDOM.standard_normal((4, 6, 9, 8)), RANDOM.standard_normal((4, 3, 3, 2))
GEOMETRY: dict[str, Any] = {"stride": (2, 1), "padding": 1, "dilation": (1, 2), "groups": 2}
EXPECTED = torch.nn.functional.conv2d(torch.tensor(X), torch.tensor(W), **GEOMETRY).numpy()


class Foreign:
    """An array of a library that has no more than DLPack."""

    def __init__(self, values: torch.Tensor) -> None:
        self.values = values

    def __dlpack__(self, **arguments: Any) -> object:
        return self.values.__dlpack__(**arguments)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.values.__dlpack_device__()

    def __array_namespace__(self) -> type[Foreign]:
        return Foreign

    @staticmethod
    def from_dlpack(array: Any) -> Foreign:
        return Foreign(torch.from_dlpack(array))


@pytest.fixture(autouse=True)
def private_database(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MUCUDNN_DATABASE", ":memory:")
    arrays.sessions.clear()


@settings(max_examples=60)
@given(drawn=problems(("float64",)).filter(lambda problem: not problem.transposed))
def test_numpy_equals_the_float64_reference(drawn: ConvProblem) -> None:
    problem = replace(drawn, direction=Direction.FORWARD)
    tensors = operands(problem)
    geometry = {name: getattr(problem, name) for name in ("stride", "padding", "dilation", "groups")}
    result = mucudnn.convolve(tensors.x.numpy(), tensors.w.numpy(), **geometry)
    assert type(result) is np.ndarray and str(result.dtype) == problem.dtype and result.flags.writeable
    assert relative_error(torch.tensor(result), reference(problem, tensors)) < TOLERANCE[problem.dtype]


def test_half_precision() -> None:
    result = mucudnn.convolve(X.astype("f2"), W.astype("f2"), **GEOMETRY)
    assert result.dtype == np.float16
    assert np.linalg.norm(result - EXPECTED) < 2e-3 * np.linalg.norm(EXPECTED)


@pytest.mark.parametrize(
    "make, kind",
    [(np.asarray, np.ndarray), (torch.tensor, torch.Tensor), (lambda a: Foreign(torch.tensor(a)), Foreign)],
    ids=["numpy", "torch", "another library"],
)
def test_the_result_is_of_the_same_kind(make: Callable[[Any], Any], kind: type) -> None:
    result = mucudnn.convolve(make(X), make(W), **GEOMETRY)
    assert type(result) is kind
    values = np.asarray(result.values if isinstance(result, Foreign) else result)
    np.testing.assert_allclose(values, EXPECTED, rtol=1e-12, atol=1e-12)


VIEWS: dict[str, Callable[[Any], Any]] = {
    "Fortran order": np.asfortranarray,
    "channels last": lambda a: np.ascontiguousarray(np.moveaxis(a, 1, -1)).transpose(0, 3, 1, 2),
    "every second": lambda a: np.repeat(a, 2, axis=2)[:, :, ::2],
    "repeated": lambda a: np.broadcast_to(a[:1], a.shape),
}


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("writeable", [True, False])
def test_views_and_read_only_arrays(view: str, writeable: bool) -> None:
    x, w = VIEWS[view](X), W.copy()
    if not writeable:
        x.flags.writeable = w.flags.writeable = False
    before = np.array(x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = mucudnn.convolve(x, w, **GEOMETRY)
    expected = torch.nn.functional.conv2d(torch.tensor(before), torch.tensor(W), **GEOMETRY)
    np.testing.assert_allclose(result, expected.numpy(), rtol=1e-12, atol=1e-12)
    np.testing.assert_array_equal(x, before)


def test_a_file_mapped_read_only(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", X)
    result = mucudnn.convolve(np.load(tmp_path / "x.npy", mmap_mode="r"), W, **GEOMETRY)
    np.testing.assert_allclose(result, EXPECTED, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("writeable", [True, False])
def test_nothing_is_copied(writeable: bool) -> None:
    x = X.copy()
    x.flags.writeable = writeable
    tensor = arrays._tensor("x", x)
    assert tensor.data_ptr() == x.ctypes.data
    result = torch.ones(2, 3)
    assert arrays._array_like(result, x).ctypes.data == result.data_ptr()


def test_the_result_outlives_everything() -> None:
    result = mucudnn.convolve(X.copy(), W.copy(), **GEOMETRY)
    arrays.sessions.clear()
    for _ in range(20):
        np.full(result.size, np.nan)
    np.testing.assert_allclose(result, EXPECTED, rtol=1e-12, atol=1e-12)


def test_it_is_divided_within_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = {None: 64 * 2**20, "3MiB": 3 * 2**20}
    sessions = {}
    for wanted in limits:
        chosen = Settings.from_environment(workspace_limit=wanted, database=":memory:")
        sessions[chosen] = Session(chosen, Forced("gemm"))
    monkeypatch.setenv("MUCUDNN_DATABASE", ":memory:")
    monkeypatch.setattr(arrays, "sessions", sessions)
    np.testing.assert_allclose(mucudnn.convolve(X, W, **GEOMETRY), EXPECTED, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(
        mucudnn.convolve(X, W, **GEOMETRY, workspace_limit="3MiB"), EXPECTED, rtol=1e-12, atol=1e-12
    )
    for wanted, limit in limits.items():
        (record,) = arrays.session_within(wanted).records()
        assert record.parts == ((2, "gemm"), (2, "gemm")) and record.limit == limit
    assert not mucudnn.is_patched()


def test_a_patch_gives_its_settings() -> None:
    with forced("gemm", workspace_limit="5MiB"):
        mucudnn.convolve(X, W, **GEOMETRY)
        assert len(mucudnn.report()) == 1
        mucudnn.convolve(X, W, **GEOMETRY, workspace_limit=0)
        assert len(mucudnn.report()) == 1


@pytest.mark.parametrize("address, expected", [(0, "default of cuda:3"), (4096, "4096 of cuda:3")])
def test_the_stream_of_cupy(address: int, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With stand-ins for CuPy and for torch's streams; tests/gpu has the real ones."""

    class Cupy(SimpleNamespace):
        class ndarray:
            device = SimpleNamespace(id=3)

    cupy = Cupy(cuda=SimpleNamespace(get_current_stream=lambda device: SimpleNamespace(ptr=address)))
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device: f"default of {device}")
    monkeypatch.setattr(torch.cuda, "ExternalStream", lambda ptr, device: f"{ptr} of {device}")
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: stream)
    assert arrays._stream_of(Cupy.ndarray()) == expected
    with arrays._stream_of(X):
        pass  # NumPy's arrays have none


WRONG: dict[str, tuple[Callable[[], Any], str]] = {
    "a list": (lambda: mucudnn.convolve([1.0], W), "x is a list: accepted are arrays"),
    "integers": (lambda: mucudnn.convolve(X.astype(int), W), "x is int64: accepted are float16"),
    "another byte order": (lambda: mucudnn.convolve(X.astype(">f8"), W), "x, a ndarray, cannot be read in place"),
    "backwards": (lambda: mucudnn.convolve(X[:, :, ::-1], W), "x runs backwards"),
    "masked": (lambda: mucudnn.convolve(np.ma.masked_array(X), W), "x is a masked"),
    "unaligned": (
        lambda: mucudnn.convolve(np.frombuffer(bytes(33), dtype="u1")[1:].view("f8").reshape(1, 1, 4), W),
        "x is a masked or an unaligned",
    ),
    "another device": (
        lambda: mucudnn.convolve(torch.empty(1, 1, 4, 4, device="meta"), torch.empty(1, 1, 2, 2, device="meta")),
        "x is on meta: accepted are arrays on cpu or cuda",
    ),
    "two types": (lambda: mucudnn.convolve(X, W.astype("f4")), "one type: x has torch.float64, w has torch.float32"),
    "no batch": (lambda: mucudnn.convolve(X[0, 0], W), "accepted is (N, C, *spatial)"),
    "channels": (lambda: mucudnn.convolve(X, W, groups=3), "does not have the channels"),
    "other dims": (lambda: mucudnn.convolve(X, W[0]), "are not of one convolution"),
    "kernel too large": (lambda: mucudnn.convolve(X[:, :3, :1], W), "give an output"),
    "padding": (lambda: mucudnn.convolve(X, W, groups=2, padding="same"), "padding='same': accepted is a number"),
    "negative": (lambda: mucudnn.convolve(X, W, groups=2, padding=-1), "padding=-1: accepted is a number from 0"),
    "stride": (lambda: mucudnn.convolve(X, W, groups=2, stride=(1, 1, 1)), "stride=(1, 1, 1): accepted is"),
    "dilation": (lambda: mucudnn.convolve(X, W, groups=2, dilation=1.5), "dilation=1.5: accepted is"),
    "groups": (lambda: mucudnn.convolve(X, W, groups=0), "groups=0: accepted is a number from 1"),
    "limit": (lambda: mucudnn.convolve(X, W, groups=2, workspace_limit="much"), "workspace_limit='much'"),
    "gradient": (
        lambda: mucudnn.convolve(torch.tensor(X, requires_grad=True), torch.tensor(W), groups=2),
        "requires a gradient",
    ),
    "sparse": (lambda: mucudnn.convolve(torch.tensor(X).to_sparse(), torch.tensor(W)), "accepted is a plain tensor"),
}


@pytest.mark.parametrize("what", WRONG)
def test_wrong_arguments_are_one_line(what: str) -> None:
    call, said = WRONG[what]
    with pytest.raises((TypeError, ValueError)) as raised:
        call()
    assert said in str(raised.value)
    assert "\n" not in str(raised.value)
