"""The null card: memory, streams, graphs and the arithmetic of torch's operators."""

from __future__ import annotations

import copy
import ctypes
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import mucudnn

Tensor = torch.Tensor

OPERATORS: dict[str, Callable[[Tensor], Tensor]] = {
    "number of another type": lambda x: x.int() * 1.5 + 2**0.5,
    "matrix product": lambda x: x @ x.mT,
    "into a part": lambda x: x.clone().index_fill_(1, torch.tensor([0, 2], device=x.device), 3.0)[::2],
    "softmax, half": lambda x: x.half().softmax(1),
    "batch norm": lambda x: nn.BatchNorm1d(x.shape[1]).to(x.device)(x),
    "dot-product attention": lambda x: functional.scaled_dot_product_attention(x[None], x[None], x[None]),
    "pooling": lambda x: functional.max_pool1d(x[None], 3, 2),
    "sort": lambda x: x.sort(dim=1).values,
    "depthwise convolution": lambda x: functional.conv1d(x[None], x[:, None, :3], groups=x.shape[0]),
    "arange": lambda x: torch.arange(7, device=x.device) / 3,
    "permuted copy": lambda x: x.t().contiguous().view(-1),
    "reduction to a given tensor": lambda x: torch.sum(x, 1, out=torch.empty(0, device=x.device)),
}


@pytest.mark.parametrize("name", OPERATORS)
def test_operators_are_those_of_the_host(name: str, card: Any) -> None:
    x = torch.randn(6, 10, generator=torch.Generator().manual_seed(0))
    before = card.counted("uncomputed")
    found, expected = OPERATORS[name](x.cuda()), OPERATORS[name](x)
    assert found.is_cuda and found.stride() == expected.stride()
    torch.testing.assert_close(found.cpu(), expected)
    assert card.counted("uncomputed") == before


def test_gradients_of_a_network_are_those_of_the_host(card: Any) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2),
        nn.GroupNorm(2, 8),
        nn.GELU(),
        nn.ConvTranspose2d(8, 4, 3),
        nn.Conv2d(4, 4, 3, groups=4),
    ).double()
    x = torch.randn(2, 3, 12, 12).double()
    there = copy.deepcopy(plain).cuda()
    executed = card.counted("executed")
    for module, given in ((plain, x), (there, x.cuda())):
        module(given).square().sum().backward()
    assert card.counted("executed") > executed, "cuDNN computes the convolutions"
    for mine, its in zip(there.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad.cpu(), its.grad)


def test_random_numbers_follow_the_seed(card: Any) -> None:
    torch.manual_seed(5)
    first, second = torch.rand(100, device="cuda"), torch.rand(100, device="cuda")
    torch.manual_seed(5)
    assert torch.equal(torch.rand(100, device="cuda"), first)
    assert not torch.equal(first, second)
    assert 0.3 < first.mean() < 0.7


def test_memory_is_that_of_the_card(card: Any) -> None:
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(200 * 2**30, dtype=torch.uint8, device="cuda")
    before = torch.cuda.memory_allocated()
    held = torch.empty(2**20, device="cuda")
    assert torch.cuda.memory_allocated() - before == held.nbytes


def test_memory_outside_torchs_allocator_is_reported(card: Any) -> None:
    layer, x, taken = nn.Conv2d(2, 3, 3).cuda(), torch.randn(2, 2, 8, 8, device="cuda"), ctypes.c_void_p()
    with mucudnn.patched(workspace_limit="4MiB", database=":memory:", progress="off", check="off") as session:
        layer(x)
        before = session.outcome().notices
        card.library().cudaMalloc(ctypes.byref(taken), ctypes.c_size_t(640 * 2**20))
        (told,) = session.outcome().notices
    card.library().cudaFree(taken)
    assert not before
    assert told.startswith("since the first plan 640") and "outside torch's allocator" in told


def test_a_graph_computes_when_it_is_replayed(card: Any) -> None:
    layer, x = nn.Conv2d(2, 3, 3).cuda(), torch.randn(2, 2, 8, 8, device="cuda")
    total = torch.zeros((), device="cuda")
    with torch.no_grad():
        layer(x)  # cuDNN's handle is made before the capture
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = layer(x * 2).relu()
            total += 1
        assert total == 0, "nothing is done while a graph is captured"
        for factor in (1.0, -3.0):
            x.fill_(factor)
            graph.replay()
            torch.testing.assert_close(y, layer(x * 2).relu())
    assert total == 2


def test_events_tell_what_is_pending(card: Any) -> None:
    ended, side = torch.cuda.Event(), torch.cuda.Stream()
    torch.cuda.synchronize()
    torch.cuda._sleep(600_000_000)  # about 0.3 s
    ended.record()
    assert not ended.query()
    side.wait_event(ended)
    assert not side.query()
    waits = card.counted("waits")
    side.synchronize()
    assert ended.query() and card.counted("waits") == waits + 1
