"""Which files count as a program's own."""

from __future__ import annotations

import os

from torch._inductor.runtime.cache_dir_utils import cache_dir

from distconv.tensors import user_lines
from distconv.tensors.user_lines import is_programs


def test_what_inductor_writes_is_not_the_programs() -> None:
    """It runs compilers, which the program does not start itself."""
    assert not is_programs(os.path.join(cache_dir(), "ab", "cdef.py"))
    assert is_programs(os.path.join(os.path.dirname(cache_dir()), "train.py"))


def test_files_that_are_known_by_their_names_are_there() -> None:
    assert all(map(os.path.isfile, (*user_lines._CALLS, *user_lines._MAKERS)))
