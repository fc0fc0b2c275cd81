"""The order in which a call brings storages back, by the call before it."""

from __future__ import annotations

import torch

from distconv.turns.pages import Page, Paged


def call(kind: str, count: int = 100) -> tuple[Paged, list[Page], list[torch.UntypedStorage]]:
    """A call of a kind, and the storages that it makes."""
    found, storages = Paged(1, kind), [torch.UntypedStorage(1) for _ in range(count)]
    return found, [found.made(storage, None) for storage in storages], storages


def following(call: Paged, *pages: Page) -> int | None:
    found = call.next_of(pages)
    return None if found is None else found.number


def test_what_the_call_before_has_read_next_is_next() -> None:
    first, pages, _ = call("next")
    assert [following(first, pages[at]) for at in (3, 1, 4, 5)] == 4 * [None]
    second, pages, _ = call("next")
    assert following(second, pages[3]) == 1
    assert following(second, pages[9]) == 1  # has not left the last time
    assert following(second, pages[1], pages[4]) == 5
    third, pages, _ = call("next")
    assert following(third, pages[3]) == 1  # not what the second has read, which most often was expected
    assert following(third, pages[4]) == 5  # what was expected has not left
    other, pages, _ = call("other")
    assert following(other, pages[3]) is None


def test_what_is_no_longer_there_is_not_next() -> None:
    first, pages, _ = call("gone")
    for at in (0, 1, 2):
        following(first, pages[at])
    second, pages, _ = call("gone")
    del pages[1]
    assert following(second, pages[0]) is None
    third, pages, _ = call("gone", 2)
    assert following(third, pages[0], pages[1]) is None


def test_an_order_that_was_not_kept_is_replaced() -> None:
    for order, expected in (((0, 1, 2), None), ((5, 0, 6, 7), 1), ((5,), 0)):
        last, pages, _ = call("replaced")
        found = [following(last, pages[at]) for at in order]
        assert expected in found


def test_a_page_of_another_call_is_not_counted() -> None:
    first, pages, _ = call("others")
    _, others, _ = call("foreign")
    following(first, pages[0], others[1], pages[2])
    second, pages, _ = call("others")
    assert following(second, pages[0]) == 2
