"""The shim: installed and taken out, in threads, and for calls that it leaves to torch."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from forced import Forced, divided, forced
from layer_cases import results
from torch import nn
from torch.nn import functional

import mucudnn
from mucudnn.providers import stock_kernel
from mucudnn.runtime import shim
from tests.ticking import ticking


@pytest.mark.skipif(torch.version.cuda is None, reason="torch is built without CUDA")
@pytest.mark.filterwarnings("error")
def test_the_key_of_gpus_is_served_and_given_back() -> None:
    """Without a GPU: host tensors, sent to the kernels under CUDA's key."""
    key = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
    x, w, dy = torch.randn(4, 3, 9, 9), torch.randn(4, 3, 3, 3), torch.randn(4, 4, 9, 9)
    geometry = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    convolution, backward = torch.ops.aten.convolution.default, torch.ops.aten.convolution_backward.default

    def through_key() -> tuple[torch.Tensor, ...]:
        gradients = backward.redispatch(key, dy, x, w, [4], *geometry, [True, True, True])
        return convolution.redispatch(key, x, w, None, *geometry), *gradients

    names = "aten::convolution", "aten::convolution_backward"
    expected, before = through_key(), [torch._C._dispatch_dump(name) for name in names]
    with forced("fft"):
        for found, wanted in zip(through_key(), expected, strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
        assert divided() == 3
    assert [torch._C._dispatch_dump(name) for name in names] == before


CALLS: dict[str, Callable[[], Any]] = {
    "channels": lambda: functional.conv2d(torch.zeros(1, 3, 5, 5), torch.zeros(4, 2, 3, 3)),
    "dtypes": lambda: functional.conv2d(torch.zeros(1, 3, 5, 5), torch.zeros(4, 3, 3, 3).double()),
    "kernel larger than input": lambda: functional.conv2d(torch.zeros(1, 3, 5, 5), torch.zeros(4, 3, 7, 3)),
    "bias": lambda: functional.conv2d(torch.zeros(1, 3, 5, 5), torch.zeros(4, 3, 3, 3), torch.zeros(3)),
    "stride 0": lambda: functional.conv2d(torch.zeros(1, 3, 5, 5), torch.zeros(4, 3, 3, 3), stride=0),
    "negative padding": lambda: functional.conv2d(torch.zeros(1, 3, 5, 5), torch.zeros(4, 3, 3, 3), padding=-1),
    "groups": lambda: functional.conv2d(torch.zeros(1, 3, 5, 5), torch.zeros(4, 3, 3, 3), groups=2),
    "not a tensor": lambda: functional.conv2d([1.0], torch.zeros(4, 3, 3, 3)),  # type: ignore[arg-type]
    "no rows": lambda: functional.conv2d(torch.zeros(2, 3, 0, 5), torch.zeros(4, 3, 3, 3), padding=2),
}


@pytest.mark.parametrize("call", CALLS)
def test_wrong_calls_raise_torchs_own_errors(call: str) -> None:
    with pytest.raises(Exception) as expected:
        CALLS[call]()
    with mucudnn.patched(database=":memory:", board=Forced("fft")), pytest.raises(expected.type) as actual:
        CALLS[call]()
    assert str(actual.value) == str(expected.value)


@pytest.mark.parametrize("shape", [(0, 3, 5, 5), (2, 0, 5, 5)])
@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_empty_inputs(shape: tuple[int, ...]) -> None:
    module, x = nn.Conv2d(shape[1], 4, 3, padding=2), torch.zeros(shape)
    expected = results(module, x)
    with mucudnn.patched(database=":memory:", board=Forced("fft")):
        actual = results(module, x)
        assert divided() == 0
    for name, tensor in expected.items():
        assert torch.equal(actual[name], tensor), name


def test_complex_and_integer_convolutions_are_torchs() -> None:
    x, w = torch.randn(2, 3, 5, 5, dtype=torch.complex64), torch.randn(4, 3, 3, 3, dtype=torch.complex64)
    integers = torch.ones(1, 1, 4, 4, dtype=torch.int64), torch.ones(1, 1, 2, 2, dtype=torch.int64)
    expected = functional.conv2d(x, w), functional.conv2d(*integers)
    with mucudnn.patched(database=":memory:"):
        # Torch makes a complex convolution of real ones, which may be divided.
        torch.testing.assert_close(functional.conv2d(x, w), expected[0])
        assert torch.equal(functional.conv2d(*integers), expected[1])


def test_threads() -> None:
    torch.manual_seed(0)
    module, inputs = nn.Conv2d(3, 4, 3).double(), [torch.randn(2 + i % 3, 3, 9, 9).double() for i in range(12)]
    expected = [module(x) for x in inputs]
    actual: dict[int, torch.Tensor] = {}
    with forced("fft"):

        def work(i: int) -> None:
            actual[i] = module(inputs[i])

        threads = [threading.Thread(target=work, args=(i,)) for i in range(len(inputs))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(mucudnn.report()) == divided() == 3
    for i, tensor in enumerate(expected):
        torch.testing.assert_close(actual[i], tensor, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("by", ["torch", "shim"])
def test_other_threads_run_while_torchs_own_kernel_computes(direction: str, by: str) -> None:
    x, w, dy = (torch.randn(shape, dtype=torch.float64) for shape in ((4, 32, 96, 96), (32, 32, 5, 5), (4, 32, 92, 92)))
    geometry = [1, 1], [0, 0], [1, 1], False, [0, 0], 1
    forward, backward = torch.ops.aten.convolution.default, torch.ops.aten.convolution_backward.default
    if by == "torch":
        forward, backward = stock_kernel("convolution", "CPU"), stock_kernel("convolution_backward", "CPU")
    around = mucudnn.patched(database=":memory:", workspace_limit=0) if by == "shim" else nullcontext()
    with ticking() as ticks, around:
        before = ticks()
        if direction == "forward":
            forward(x, w, None, *geometry)
        else:
            backward(dy, x, w, [32], *geometry, [True, True, True])
        assert ticks() - before >= 5


def test_other_threads_run_while_a_patched_backward_is_planned_and_tried() -> None:
    module = nn.Conv2d(32, 32, 5, padding=2).double()
    x = torch.randn(4, 32, 64, 64, dtype=torch.float64, requires_grad=True)
    with ticking() as ticks, mucudnn.patched(database=":memory:", workspace_limit="1MiB"):
        y = module(x).sum()
        before = ticks()
        y.backward()
        assert ticks() - before >= 5


def test_limit_zero_leaves_everything_to_torch() -> None:
    module, x = nn.Conv2d(3, 4, 3), torch.randn(2, 3, 9, 9)
    expected = results(module, x)
    with mucudnn.patched(workspace_limit=0, database=":memory:", board=Forced("fft")):
        actual = results(module, x)
        assert mucudnn.report() == []
    assert all(torch.equal(actual[name], tensor) for name, tensor in expected.items())


def test_unpatch_leaves_torch_as_it_was() -> None:
    def registered() -> list[str]:
        dump = torch._C._dispatch_dump("aten::convolution") + torch._C._dispatch_dump("aten::convolution_backward")
        return [line for line in dump.splitlines() if "CPU" in line]

    x, w = torch.randn(2, 3, 9, 9), torch.randn(4, 3, 3, 3)
    before, expected = registered(), functional.conv2d(x, w)
    mucudnn.patch(database=":memory:")
    mucudnn.patch(database=":memory:", workspace_limit="1MiB")
    assert mucudnn.is_patched()
    assert registered() != before
    mucudnn.unpatch()
    mucudnn.unpatch()
    assert not mucudnn.is_patched()
    assert registered() == before
    assert mucudnn.report() == []
    assert torch.equal(functional.conv2d(x, w), expected)


def test_patched_restores_what_was_before() -> None:
    mucudnn.patch(database=":memory:", workspace_limit="1MiB")
    outer = shim.current_session()
    with mucudnn.patched(database=":memory:", workspace_limit="2MiB") as session:
        assert shim.current_session() is session
        assert session.settings.workspace_limit == 2 * 2**20
    assert shim.current_session() is outer


def test_a_wrong_setting_raises_and_patches_nothing() -> None:
    with pytest.raises(ValueError, match="workspace_limit='much'"):
        mucudnn.patch(workspace_limit="much")
    assert not mucudnn.is_patched()


def test_a_tensor_subclass_is_not_asked_to_convolve_by_the_shim() -> None:
    seen: list[str] = []

    class Watched(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            seen.append(func.__name__)
            return super().__torch_function__(func, types, args, kwargs or {})

    x, w = torch.randn(1, 1, 4, 4).as_subclass(Watched), torch.randn(1, 1, 1, 1, requires_grad=True)

    def calls() -> list[str]:
        """In a double backward pass, whose convolutions torch itself calls on the tensors that it has saved."""
        y = functional.conv2d(x, w)
        (gradient,) = torch.autograd.grad(y, w, torch.ones_like(y).requires_grad_(), create_graph=True)
        plain = gradient.as_subclass(torch.Tensor).sum()
        seen.clear()
        plain.backward()
        return list(seen)

    with mucudnn.patched(database=":memory:"):
        calls()  # makes the plans
        assert "_convolution" not in calls()
