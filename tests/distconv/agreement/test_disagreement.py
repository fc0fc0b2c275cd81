"""The line that says where ranks hold different tensors."""

from __future__ import annotations

from distconv.agreement.disagreement import Note, Site, explain


def noted(what: str = "input 1 of Net.forward", checksum: int = 7, shard: int = 0, line: str = "a.py:3") -> Note[int]:
    return Note(Site(what, (4, 3), "torch.float32", line), checksum, shard)


def test_ranks_that_agree_have_nothing_to_explain() -> None:
    assert explain({rank: [noted(), noted("target")] for rank in range(3)}) is None
    assert explain({0: [], 1: []}) is None


def test_the_first_that_differs_is_named() -> None:
    line = explain(
        {0: [noted(), noted("b")], 1: [noted(checksum=8), noted("b")], 2: [noted(checksum=8), noted("b", 2)]}
    )
    assert line is not None and line.startswith(
        "input 1 of Net.forward, shape (4, 3), torch.float32, at a.py:3, is not"
    )
    assert "ranks 1 and 2 differ from rank 0." in line


def test_only_ranks_with_the_same_shard_are_compared() -> None:
    shards = {0: [noted(checksum=1, shard=0)], 1: [noted(checksum=2, shard=1)], 2: [noted(checksum=1, shard=0)]}
    assert explain({**shards, 3: [noted(checksum=2, shard=1)]}) is None
    line = explain({**shards, 3: [noted(checksum=3, shard=1)]})
    assert line is not None and "rank 3 differs from rank 1." in line


def test_ranks_that_went_different_ways() -> None:
    line = explain({0: [noted(), noted("target")], 1: [noted()], 2: [noted()]})
    assert (
        line is not None
        and "on rank 0: target, shape (4, 3), torch.float32, at a.py:3; ranks 1 and 2: nothing more" in line
    )
    line = explain({0: [noted(line="a.py:3")], 1: [noted(line="a.py:9")]})
    assert (
        line is not None and "at a.py:3; rank 1: input 1 of Net.forward, shape (4, 3), torch.float32, at a.py:9" in line
    )
