"""Measured times that decide on a partition: what is measured again, left out, or said to be in doubt."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from distconv.performance.automatic import ONE, decide
from distconv.performance.events import Kernel, KernelCall, Shape
from distconv.performance.first_call import ModelCall
from distconv.performance.kept import Kept
from distconv.performance.kernels import Measured, Unmeasurable
from distconv.performance.layers import trace
from distconv.performance.machine import read_machine
from distconv.performance.recording import on_meta
from distconv.settings.partition import Partition

MATRIX = Shape((8, 8), (8, 1), torch.float32)


def product(size: int) -> Kernel:
    matrix = Shape((size, size), (size, 1), torch.float32)
    return Kernel("product", 0, 0, KernelCall(torch.ops.aten.mm.default, (matrix, matrix), ()))


def test_a_kernel_is_measured_beside_others() -> None:
    """A kernel that fails is one line, as is one of the others that ends; the next kernel is measured as ever."""
    measured = Measured(1, Kept(), ranks=2)
    wrong = Kernel("product", 0, 0, KernelCall(torch.ops.aten.mm.default, (MATRIX, replace(MATRIX, sizes=(7, 8))), ()))
    try:
        assert (measured(product(8)) or 0) > 0
        (process,) = measured.co_runners._processes
        with pytest.raises(Unmeasurable, match=r"^aten.mm.default cannot be measured: mat1 and mat2 shapes"):
            measured(wrong)
        assert process.poll() is None
        process.kill()
        with pytest.raises(Unmeasurable, match="beside it has ended with exit code -9"):
            measured(product(9))
        assert (measured(product(9)) or 0) > 0
        (process,) = measured.co_runners._processes
    finally:
        measured.co_runners.close()
    assert process.returncode == 0


@pytest.mark.parametrize(("alone_is", "chosen"), [(1e-3, "one process"), (1.5, "sample=2")])
def test_one_process_is_chosen_where_ranks_are_slower(alone_is: float, chosen: str) -> None:
    """Kernels of one process take a thousandth of those of two ranks, or half as long again: little else matters."""
    model, shape = on_meta(lambda: nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU())), (2, 3, 16, 16)
    machine = replace(read_machine("lassen"), measured=lambda kernel: 1.0)
    of_one = replace(machine, measured=lambda kernel: alone_is)
    found = [Partition.parse("sample=2")]
    choice = decide(ModelCall(model, (shape,), True), trace(model, shape), found, machine, of_one)
    assert str(choice).startswith(chosen) and not choice.doubted
    assert choice.alone is not None and choice.seconds <= choice.alone
    assert (choice.strategy == ONE) == (chosen == "one process")


class Disturbed(Measured):
    """Says that kernels take a hundred seconds, and this many where it is doubted."""

    def __init__(self, really: float) -> None:
        super().__init__(2, Kept())
        self.really, self.says = really, 100.0

    def __call__(self, kernel: Kernel) -> float:
        return self.says

    def doubt(self) -> None:
        self.says = self.really


@pytest.mark.parametrize(("really", "doubted"), [(1.5, False), (50.0, True)])
def test_what_ranks_cannot_gain_is_measured_again(really: float, doubted: bool) -> None:
    model, shape = on_meta(lambda: nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU())), (2, 3, 16, 16)
    machine = replace(read_machine("lassen"), measured=lambda kernel: 1.0)
    found, of_one = [Partition.parse("sample=2")], replace(machine, measured=Disturbed(really))
    choice = decide(ModelCall(model, (shape,), True), trace(model, shape), found, machine, of_one)
    assert choice.alone is not None and choice.doubted is doubted
    assert choice.alone / choice.seconds == pytest.approx(really, rel=0.2)


def test_a_kernel_in_doubt_keeps_its_lesser_time() -> None:
    kept = Kept()
    measured, kernel = Measured(2, kept), product(8)
    key = f"kernel torch {torch.__version__}, 1 ranks, 2 threads: {kernel.call}"
    kept.put(key, "100.0")
    assert measured(kernel) == 100.0
    measured.doubt()
    less = measured(kernel)
    assert less < 1 and Measured(2, kept)(kernel) == less


def test_a_partition_that_fails_is_left_out_with_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    """Its kernels, of half the rows, cannot be measured; or what records it has a fault of its own."""
    model, shape = on_meta(lambda: nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU())), (2, 3, 16, 16)

    def seconds(kernel: Kernel) -> float:
        if kernel.call is not None and "sizes=(2, 8, 8, 16)" in str(kernel.call):
            raise Unmeasurable(f"{kernel.name} cannot be measured: it fails")
        return 1.0

    machine = replace(read_machine("lassen"), measured=seconds)
    found = [Partition.parse("height=2"), Partition.parse("sample=2")]
    choice = decide(ModelCall(model, (shape,), True), trace(model, shape), found, machine, machine, may_be_one=False)
    assert choice.strategy == {"*": "sample=2"}
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("distconv: --partition auto: height=2 is left out: layer 0: aten")
