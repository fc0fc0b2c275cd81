"""A checksum is equal for equal bits, however they lie, and for no others."""

from __future__ import annotations

import os

import pytest
import torch
from jobs import ROOT
from torch import Tensor

from distconv.agreement.samples import BLOCK, checksum, folded
from tests.forked_python import run_python

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128)
WHOLE = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def made(dtype: torch.dtype, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(5)
    if dtype in WHOLE:
        return torch.randint(0, 2 if dtype == torch.bool else 100, shape, generator=generator).to(dtype)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES + WHOLE, ids=str)
@pytest.mark.parametrize("shape", [(7,), (3, 5, 11), (2, 3, 150, 111)], ids=str)
def test_one_changed_element_and_two_that_changed_places_are_found(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x = made(dtype, *shape)
    whole = checksum(x)
    assert whole.dtype == torch.int64 and whole.shape == ()
    assert whole == checksum(x.clone())
    flat = x.flatten()
    first = flat[0]
    others = (flat != first).nonzero().flatten()
    for other in others[:: max(1, others.numel() // 20)].tolist():
        swapped = flat.clone()
        swapped[0], swapped[other] = flat[other], flat[0]
        assert checksum(swapped) != whole, other
        changed = flat.clone()
        changed[other] = first
        assert checksum(changed) != whole, other


def test_labels_as_floats_have_few_bits_set_and_are_distinguished_all_the_same() -> None:
    # 0. and 1. differ in their highest bits only, where products modulo 2^64 lose most.
    x = (torch.rand(64, 96) > 0.5).double()
    found = {int(checksum(x))}
    for _ in range(1000):
        x = x.flatten()[torch.randperm(x.numel())].view(64, 96)
        found.add(int(checksum(x)))
    assert len(found) == 1001


def test_blocks_of_words_that_changed_places_are_found() -> None:
    x = torch.randn(4, BLOCK)
    assert checksum(x) != checksum(x[[1, 0, 2, 3]])
    assert checksum(x) != checksum(x[[0, 1, 3, 2]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.complex64], ids=str)
def test_strides_and_offsets_do_not_matter(dtype: torch.dtype) -> None:
    x = made(dtype, 2, 3, 5, 7)
    whole = checksum(x.contiguous())
    assert checksum(x.contiguous(memory_format=torch.channels_last)) == whole
    assert checksum(x.transpose(1, 3).contiguous().transpose(1, 3)) == whole
    room = torch.cat([x.flatten()[:1], x.flatten()])
    assert checksum(room[1:].view(x.shape)) == whole
    assert checksum(x.expand(4, 2, 3, 5, 7)) == checksum(x.repeat(4, 1, 1, 1, 1))


def test_views_of_complex_numbers() -> None:
    x = made(torch.complex64, 3, 4)
    assert checksum(x.conj()) == checksum(x.conj().resolve_conj()) != checksum(x)
    assert checksum(x.conj().imag) == checksum(x.conj().imag.clone())


@pytest.mark.parametrize("dtype", DTYPES + WHOLE, ids=str)
def test_empty_and_single(dtype: torch.dtype) -> None:
    assert checksum(made(dtype, 0, 3)) == 0
    assert checksum(torch.ones((), dtype=dtype)) != checksum(torch.zeros((), dtype=dtype))


def test_nans_are_equal_bit_for_bit() -> None:
    x = torch.tensor([1.0, float("nan")])
    other = x.clone()
    other.view(torch.int32)[1] += 1
    assert other.isnan()[1]
    assert checksum(x) == checksum(x.clone()) != checksum(other)


def test_zeros_of_both_signs_differ() -> None:
    assert checksum(torch.tensor([0.0])) != checksum(torch.tensor([-0.0]))


def test_a_list_of_checksums_has_an_order() -> None:
    sums = torch.tensor([3, 5, 7])
    assert folded(sums) != folded(sums.flip(0))
    assert folded(sums[:0]) == 0


def test_every_process_has_the_same_weights() -> None:
    code = "import torch; from distconv.agreement.samples import checksum; print(int(checksum(torch.arange(1000.0))))"
    other = run_python("-c", code, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert int(other.stdout) == checksum(torch.arange(1000.0))
