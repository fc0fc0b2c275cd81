from __future__ import annotations

import contextlib
import gc
import os
import re

import pytest

from tests.slow_tests import SLOW

LONGEST = (
    *("scripts/test_scripts.py", "job/test_going_on.py", "benchmarks/test_out_of_memory.py", "test_packaging.py"),
    *("compiled/test_merged_collectives.py", "compiled/test_compiler_files.py", "compiled/test_compiled_scripts.py"),
    *("compiled/test_compiled_networks.py", "benchmarks/test_distributed.py", "benchmarks/test_reading_pipelines.py"),
    *("performance/test_automatic.py", "fitting/test_limited_processes.py", "fitting/test_beside.py"),
    *("benchmarks/test_campaign.py", "model/test_beside_others.py", "distconv/test_gpu_calls.py"),
    "rules/test_own_dtensors.py",
)
"""Files with a test of more than ten seconds, which come first: at the end all other cores would wait for it."""

if "PYTEST_XDIST_WORKER" in os.environ:  # threads that wait busily for each other take each other's cores
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # or each process starts others, which import torch

with contextlib.suppress(ModuleNotFoundError):  # the tests of tests/gpu do without it
    from hypothesis import settings

    # How long an example takes says nothing of a machine that does something else too; CI is to be the same every time.
    settings.register_profile("tests", deadline=None, derandomize="CI" in os.environ)
    settings.load_profile("tests")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    unused = set(SLOW)
    for item in items:
        found = [each for each in SLOW if re.search(each, item.nodeid)]
        if found:
            item.add_marker("slow")
            unused.difference_update(found)
    if unused and config.args_source is pytest.Config.ArgsSource.TESTPATHS:
        raise pytest.UsageError(f"tests/slow_tests.py names what is no test: {', '.join(sorted(unused))}")
    items.sort(key=lambda item: not str(item.path).endswith(LONGEST))


def pytest_collection_finish() -> None:
    """What is imported stays: no collection of garbage that a test asks for looks through it again."""
    gc.collect()
    gc.freeze()
