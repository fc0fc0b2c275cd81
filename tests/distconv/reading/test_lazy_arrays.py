"""Lazy arrays and tensors against NumPy and torch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from distconv.reading.array import LazyArray, is_lazy
from distconv.reading.expression import Stored, whole_region
from distconv.reading.interception import lazily
from distconv.reading.source import Source
from distconv.reading.tensor import LazyTensor
from distconv.reading.tensor import is_lazy_tensor as is_lazy_tensor
from distconv.tensors.refusal import UnsupportedOperation

SHAPE = (3, 4, 5, 6)
WHOLE = np.random.default_rng(0).normal(size=SHAPE).astype(np.float32)


class Held(Source):
    """An array that only seems to be in a file."""

    def _array(self, stamp: Any) -> Any:
        return WHOLE


def array() -> Any:
    return LazyArray(Stored(Held(__file__, "", SHAPE, WHOLE.dtype)))


def region(shape: tuple[int, ...], first: int) -> tuple[range, ...]:
    """Every second element of one dim, and a part of the others."""
    return tuple(
        range(at % extent, extent, 2) if at == first else range(extent // 3, extent) for at, extent in enumerate(shape)
    )


def read_part(lazy: Any, wanted: tuple[range, ...]) -> Any:
    return lazy.expression.read(wanted, Source.read)


ARRAYS: dict[str, Callable[[Any], Any]] = {
    "slices of slices": lambda x: x[1:][:, ::2][..., 4:0:-2],
    "a chosen channel": lambda x: x[1],
    "new dims": lambda x: x[None, :, 2][..., None],
    "a cast": lambda x: x.astype(np.float64).astype("f2"),
    "numbers": lambda x: 1 - (x - 0.5) / 2 ** np.abs(x),
    "statistics of channels": lambda x: (x - np.arange(3.0).reshape(3, 1, 1, 1)) / np.float64(3),
    "arrays among each other": lambda x: x * x[:, ::-1] + x[:1],
    "comparisons": lambda x: (x > 0) & ~(x < 1),
    "a transpose of a slice": lambda x: x[:, 1:3].T[2:],
    "axes": lambda x: np.moveaxis(np.swapaxes(x, 0, 1), -1, 1),
    "flips": lambda x: np.flip(x, (1, -1))[:, ::-1],
    "stacks": lambda x: np.stack([x[0], x[2] * 2], 1),
    "concatenation": lambda x: np.concatenate([x, x[:2].astype("f8")], axis=0)[1:5],
    "a squeeze": lambda x: np.squeeze(x[:, :1], 1).reshape(1, 3, 5, 6),
    "clips": lambda x: np.clip(x, -0.5, None).clip(-1, 0.5),
    "in place": lambda x: (x := x.astype("f4"), x.__imul__(2), x.__isub__(np.float32(1)))[-1],
    "a copy": lambda x: np.expand_dims(np.array(x[:, 1]), 0),
}


@pytest.mark.parametrize("name", ARRAYS)
def test_lazy_arrays_are_numpys(name: str) -> None:
    expected = ARRAYS[name](WHOLE.copy())
    with lazily():
        lazy = ARRAYS[name](array())
        assert is_lazy(lazy) and isinstance(lazy, np.ndarray)
        assert (lazy.shape, lazy.dtype, lazy.ndim, len(lazy)) == (
            expected.shape, expected.dtype, expected.ndim, len(expected)
        )  # fmt: skip
    for first in range(-1, expected.ndim):
        wanted = whole_region(expected.shape) if first < 0 else region(expected.shape, first)
        part = expected[np.ix_(*wanted)]
        np.testing.assert_array_equal(read_part(lazy, wanted), part)
        fetched = [at for _, at in lazy.expression.needs(wanted)]
        assert fetched and all(at[0] >= 0 and at[-1] < extent for at, extent in zip(fetched[0], SHAPE, strict=True))


TENSORS: dict[str, Callable[[Any], Any]] = {
    "slices of slices": lambda x: x[1:, ..., ::2][:, 1:3][..., None, :],
    "casts": lambda x: x.to(torch.float64).half().to(dtype=torch.float32, copy=True).type(torch.float64),
    "numbers": lambda x: 1 - (x - 0.5) / 2 + 3 * x**2 - (-x).abs().log1p(),
    "statistics of channels": lambda x: (x - torch.arange(3.0).view(3, 1, 1, 1)) / torch.tensor(3.0),
    "tensors among each other": lambda x: torch.mul(x, x.flip(1)) + x[:1],
    "comparisons": lambda x: (x > 0).logical_and(x < 1).long(),
    "dims": lambda x: x.permute(3, 0, 1, 2).transpose(0, -1).movedim(1, 2).unsqueeze(1)[:, 0].contiguous(),
    "a squeeze": lambda x: x.narrow(1, 2, 1).squeeze(1).reshape(3, 1, 5, 6).select(0, 1),
    "joined": lambda x: torch.cat([torch.stack([x, x * 2], 1), torch.stack([x, x], 1)], 2),
    "in place": lambda x: x.clone().sub_(0.5).div_(torch.tensor(2.0)).clamp_(-1, 1),
    "there and back": lambda x: torch.from_numpy(x.numpy()[::1] * 2).detach().cpu(),
}


@pytest.mark.parametrize("name", TENSORS)
def test_lazy_tensors_are_torchs(name: str) -> None:
    expected = TENSORS[name](torch.from_numpy(WHOLE.copy()))
    with lazily():
        lazy = TENSORS[name](torch.from_numpy(array()))
        assert is_lazy_tensor(lazy) and isinstance(lazy, torch.Tensor)
        assert (lazy.shape, lazy.dtype, lazy.dim()) == (expected.shape, expected.dtype, expected.dim())
    for first in range(-1, expected.dim()):
        wanted = whole_region(expected.shape) if first < 0 else region(tuple(expected.shape), first)
        part = torch.from_numpy(expected.numpy()[np.ix_(*wanted)])
        torch.testing.assert_close(read_part(lazy, wanted), part, rtol=1e-6, atol=1e-6)


WHOLES: dict[str, Callable[[Any], Any]] = {
    "numpy.mean": lambda x: (x - x.mean()) / np.std(x),
    "numpy.take": lambda x: np.take(x, [2, 0], 0),
    "a mask": lambda x: x[x > 0],
    "torch.mean": lambda x: torch.from_numpy(x).mean((1, 2, 3)),
    "torch pads": lambda x: torch.nn.functional.pad(torch.as_tensor(x), (1, 1)),
    "FloatTensor": lambda x: torch.FloatTensor(x[:1, :2]),
    "another view sees what is written": lambda x: (y := x[1], x.__setitem__(1, 0), y)[-1] + 0,
    "a view in place": lambda x: (x := x.copy(), x[0].__iadd__(1), x)[-1] + 0,
    "memory of tensors": lambda x: (x := x.copy(), torch.from_numpy(x)[1].mul_(0), x)[-1] + 0,
    "a sum into an array": lambda x: np.add(x, 1, out=np.empty(SHAPE, "f4")),
    "a function in C": lambda x: torch.special.erf(torch.tensor(x)).numpy(),
}


@pytest.mark.parametrize("name", WHOLES)
def test_what_needs_the_whole_is_exact_and_reported(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    from distconv.reading import memory

    memory._reported.clear()
    expected = WHOLES[name](WHOLE.copy())
    with lazily():
        found = WHOLES[name](array())
    np.testing.assert_array_equal(np.asarray(found), np.asarray(expected))
    (line,) = {line.split(": ", 2)[2] for line in capfd.readouterr().err.splitlines()[:1]}
    assert "needs the whole of" in line


def test_changing_the_shape_in_place_is_refused() -> None:
    with lazily(), pytest.raises(UnsupportedOperation, match=r"Tensor\.squeeze_ of data that is read in parts"):
        torch.from_numpy(array()).squeeze_()


@given(st.data())
def test_any_views_of_views(data: st.DataObject) -> None:
    expected, lazy = WHOLE, array()
    for _ in range(data.draw(st.integers(1, 4))):
        keys = tuple(
            data.draw(st.one_of(st.slices(extent), st.integers(-extent, extent - 1)) if extent else st.slices(0))
            for extent in expected.shape[:2]
        )
        if expected[keys].ndim < 1:
            break
        expected, lazy = expected[keys], lazy[keys]
        order = data.draw(st.permutations(range(expected.ndim)))
        expected, lazy = expected.transpose(order), lazy.transpose(order)
    np.testing.assert_array_equal(read_part(lazy, whole_region(lazy.shape)), expected)


def test_nothing_is_lazy_elsewhere() -> None:
    def replaced() -> list[Any]:
        return [np.asarray, torch.from_numpy, *vars(np.memmap).items()]

    before = replaced()
    with lazily():
        assert np.asarray is not before[0] and "astype" in vars(np.memmap)
    assert replaced() == before


WHOLE_MAPS: dict[str, Callable[[Any], Any]] = {
    "as it is": lambda x: torch.from_numpy(x),
    "as a tensor": lambda x: torch.as_tensor(x),
    "a tensor's copy": lambda x: torch.tensor(x),
    "a copy": lambda x: torch.from_numpy(np.array(x)),
    "an array": lambda x: np.asarray(x, dtype=np.float64),
    "a cast": lambda x: x.astype(np.float64),
    "arithmetic": lambda x: (x - 1) / 2,
    "on the right": lambda x: 1 - x,
    "both sides": lambda x: np.maximum(x, x),
    "a function": lambda x: np.flip(x, 1),
    "a function of many": lambda x: np.stack([x, x]),
    "a method": lambda x: x.transpose(1, 0, 2, 3),
    "a transpose": lambda x: x.T,
    "a new dim": lambda x: x[None],
    "a flip": lambda x: x[:, ::-1],
}


@pytest.mark.parametrize("name", WHOLE_MAPS)
@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
def test_a_memory_map_without_an_index_is_lazy(
    name: str, order: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    np.save(tmp_path / "v.npy", np.asarray(WHOLE, order=order))
    mapped = np.load(tmp_path / "v.npy", mmap_mode="r")
    expected = WHOLE_MAPS[name](mapped)
    with lazily():
        found = WHOLE_MAPS[name](mapped)
        assert is_lazy(found) or is_lazy_tensor(found)
    np.testing.assert_array_equal(read_part(found, whole_region(found.shape)), expected)
    assert not capsys.readouterr().err


def test_bytes_of_an_array_are_those_of_numpy() -> None:
    with lazily():
        np.testing.assert_array_equal(array().view(np.int32), WHOLE.view(np.int32))


def test_a_statistic_of_a_memory_map_is_that_of_numpy(tmp_path: Path) -> None:
    np.save(tmp_path / "v.npy", WHOLE)
    mapped = np.load(tmp_path / "v.npy", mmap_mode="r")
    with lazily():
        assert float(mapped.std()) == float(WHOLE.std()) and float(np.mean(mapped)) == float(WHOLE.mean())
        with pytest.raises(ValueError, match="read-only"):
            mapped += 1
        writable = np.load(tmp_path / "v.npy", mmap_mode="r+")
        kept = writable
        writable += 1
        assert writable is kept
        writable.flush()
    np.testing.assert_array_equal(np.load(tmp_path / "v.npy"), WHOLE + 1)


def test_errors_are_those_of_numpy_and_torch() -> None:
    wrong: list[Callable[[Any], Any]] = [
        lambda x: x[5],
        lambda x: x[0, 0, 0, 0, 0],
        lambda x: x + np.zeros((2, 2)),
        lambda x: np.stack([x, x[1:]]),
        lambda x: x.transpose(0, 1),
        lambda x: x.squeeze(0),
        lambda x: torch.from_numpy(x).permute(0, 1),
        lambda x: torch.from_numpy(x).narrow(0, 2, 5),
        lambda x: torch.stack([torch.from_numpy(x), torch.from_numpy(x[1:])]),
        lambda x: torch.from_numpy(x.astype(">f4")),
    ]
    for each in wrong:
        with pytest.raises(Exception) as plain:
            each(WHOLE.copy())
        with lazily(), pytest.raises(type(plain.value)):
            each(array())


def test_types_stay_what_programs_ask_for() -> None:
    with lazily():
        assert isinstance(array(), np.ndarray) and isinstance(torch.as_tensor(array()), torch.Tensor)
        assert type(torch.tensor(array(), dtype=torch.float64)) is LazyTensor


@pytest.mark.parametrize("kind", ["hdf5 r+", "hdf5 core", "hdf5 astype", "hdf5 indices", "memmap r+", "memmap c"])
def test_what_is_read_at_once_is_reported(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    how, mode = kind.split()
    if how == "hdf5":
        path = tmp_path / "v.h5"
        with h5py.File(path, "w") as file:
            file["volume"] = WHOLE
        opened = h5py.File(path, mode if mode == "r+" else "r", driver="core" if mode == "core" else None)
        array = opened["volume"].astype("f8") if mode == "astype" else opened["volume"]
    else:
        path = tmp_path / "v.raw"
        WHOLE.tofile(path)
        array = np.memmap(path, np.float32, mode, shape=SHAPE)
    with lazily():
        found = array[[0, 1, 2]] if mode == "indices" else array[:, 1:]
        small = array[0, 0, 0]
    np.testing.assert_array_equal(found, WHOLE if mode == "indices" else WHOLE[:, 1:])
    np.testing.assert_array_equal(small, WHOLE[0, 0, 0])
    (line,) = capsys.readouterr().err.splitlines()
    assert f"needs the whole of {path}" in line and "test_lazy_arrays.py" in line
    assert mode in line or mode == "indices"
