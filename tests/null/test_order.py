"""The null card's watch over the order of uses: planted faults are found, and what waits as it should is not."""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch.nn import functional

COUNT = 1 << 14
"""Elements, so few that one thread of the host, that of the test, computes with them: a fault tells its lines."""

Collected = Callable[[], AbstractContextManager[list[str]]]


@pytest.fixture
def collected(watched: None) -> Collected:
    """What gathers the faults within; before, everything has ended and torch's allocator keeps no memory."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    found: Collected = importlib.import_module("null_card_order").collected
    return found


def side() -> torch.cuda.Stream:
    return torch.cuda.Stream()


def current() -> torch.cuda.Stream:
    return torch.cuda.current_stream()


def one(faults: list[str]) -> str:
    """The kind of the only fault, each of whose two uses is told with a line of this file."""
    assert len(faults) == 1, faults
    assert faults[0].count(__file__) >= 2, faults[0]
    return faults[0].splitlines()[0]


def test_a_read_before_the_write_has_ended_is_found(collected: Collected) -> None:
    with collected() as faults:
        x = torch.ones(COUNT, device="cuda")
        with torch.cuda.stream(side()):
            x + 1
    assert one(faults) == "a stream reads what another one may not have written yet"


@pytest.mark.parametrize("first", ["reads", "writes"])
def test_a_write_over_what_is_still_in_use_is_found(first: str, collected: Collected) -> None:
    x = torch.ones(COUNT, device="cuda")
    other = side()
    other.wait_stream(current())
    with collected() as faults:
        with torch.cuda.stream(other):
            x + 1 if first == "reads" else x.add_(1)
        x.fill_(2)
    assert one(faults) == f"a stream writes over what another one still {first}"


def after_a_free(record: bool) -> int:
    """Memory that a second stream reads is freed, and given out again; its address."""
    x = torch.ones(COUNT, device="cuda")
    other = side()
    other.wait_stream(current())
    with torch.cuda.stream(other):
        x + 1
    if record:
        x.record_stream(other)
    at = x.data_ptr()
    del x
    assert torch.zeros(COUNT, device="cuda").data_ptr() == at
    return at


def test_memory_that_is_freed_while_in_use_is_found(collected: Collected) -> None:
    with collected() as faults:
        after_a_free(record=False)
    assert one(faults) == "memory was freed while a stream still used it"
    assert "freed at\n" in faults[0]


def test_memory_whose_use_is_recorded_may_be_freed(collected: Collected) -> None:
    with collected() as faults:
        after_a_free(record=True)
    assert not faults


HOST: dict[str, Callable[[torch.Tensor], Any]] = {
    "torch": lambda x: x.sum(),
    "numpy": lambda x: x.numpy().copy(),
    "memory": lambda x: ctypes.string_at(x.data_ptr() + 40, 4),
    "write": lambda x: x.zero_(),
}


@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize("way", HOST)
def test_a_use_by_the_host_before_the_copy_has_ended_is_found(way: str, waits: bool, collected: Collected) -> None:
    x = torch.ones(COUNT, device="cuda")
    with collected() as faults:
        here = x.to("cpu", non_blocking=True)
        if waits:
            current().record_event().synchronize()
        HOST[way](here)
    assert not faults if waits else one(faults) == "the host uses what a stream has not ended with"


def test_a_use_by_a_thread_without_python_is_found(collected: Collected) -> None:
    x, libc, thread = torch.ones(COUNT, device="cuda"), ctypes.CDLL(None), ctypes.c_ulong()
    with collected() as faults:
        here = x.to("cpu", non_blocking=True)
        libc.pthread_create(ctypes.byref(thread), None, libc.strlen, ctypes.c_void_p(here.data_ptr()))
        libc.pthread_join(thread, None)
    (fault,) = faults
    assert fault.startswith("the host uses what a stream has not ended with")
    assert "(outside Python)" in fault


def test_waiting_for_another_stream_is_not_enough(collected: Collected) -> None:
    x = torch.ones(COUNT, device="cuda")
    with collected() as faults:
        here = x.to("cpu", non_blocking=True)
        side().synchronize()
        here.sum()
    assert one(faults) == "the host uses what a stream has not ended with"


def test_pinned_memory_may_be_read_but_not_written_while_it_is_copied(collected: Collected) -> None:
    here = torch.ones(COUNT).pin_memory()
    with collected() as faults:
        there = here.to("cuda", non_blocking=True)
        assert here.sum() == COUNT
        assert not faults
        here.zero_()
    assert one(faults) == "the host uses what a stream has not ended with"
    assert there.sum() == COUNT


def test_events_and_streams_that_are_waited_for_put_uses_in_order(collected: Collected) -> None:
    x, streams = torch.ones(COUNT, device="cuda"), [side() for _ in range(3)]
    with collected() as faults:
        before = current()
        for stream in [*streams, current()]:
            stream.wait_event(before.record_event())
            with torch.cuda.stream(stream):
                x.add_(1)
            before = stream
        assert x.tolist()[0] == 5
    assert not faults


def test_parts_of_a_tensor_are_apart(collected: Collected) -> None:
    x, stream = torch.ones(4, 100, device="cuda"), side()
    stream.wait_stream(current())
    with collected() as faults:
        x[:, 50:].fill_(2)
        with torch.cuda.stream(stream):
            x[:, :50].fill_(3)
        assert not faults
        with torch.cuda.stream(stream):
            x[:, 49:51].fill_(4)
    assert one(faults) == "a stream writes over what another one still writes"


@pytest.mark.parametrize("waits", [False, True])
def test_convolutions_are_watched(waits: bool, collected: Collected) -> None:
    x, w, stream = torch.ones(2, 4, 16, 16, device="cuda"), torch.ones(4, 4, 3, 3, device="cuda"), side()
    functional.conv2d(x, w)
    stream.wait_stream(current())
    with collected() as faults:
        x.mul_(2)
        if waits:
            stream.wait_stream(current())
        with torch.cuda.stream(stream):
            functional.conv2d(x, w)
    assert not faults if waits else "a stream reads what another one may not have written yet" in faults[0]


@pytest.mark.parametrize("waits", [False, True])
def test_a_graph_is_used_where_it_is_replayed(waits: bool, collected: Collected) -> None:
    x, stream = torch.ones(COUNT, device="cuda"), side()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = x + 1
    torch.cuda.synchronize()
    with collected() as faults:
        x.fill_(2)
        if waits:
            stream.wait_stream(current())
        with torch.cuda.stream(stream):
            graph.replay()
    assert bool(faults) is not waits
    torch.cuda.synchronize()
    assert y.sum() == 3 * COUNT


def test_the_default_stream_waits_for_streams_that_block(collected: Collected, card: Any) -> None:
    address = ctypes.c_void_p()
    card.library().cudaStreamCreate(ctypes.byref(address))
    blocking = torch.cuda.ExternalStream(address.value)
    with collected() as faults:
        x = torch.ones(COUNT, device="cuda")
        with torch.cuda.stream(blocking):
            x.add_(1)
        x.add_(1)
    assert not faults
