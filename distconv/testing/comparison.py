"""Compares a model on several ranks with the same model in this process."""

from __future__ import annotations

import copy
import os
import pickle
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import cloudpickle
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from distconv.settings.partition import Partition
from distconv.testing.step import LEFT, TASK, leaves_of

SECONDS = 300  # that a step may take on the ranks, with their start


def assert_same_on_ranks(
    model: nn.Module,
    *inputs: Any,
    partition: str,
    backward: bool = True,
    dtype: torch.dtype = torch.float64,
    rtol: float = 1e-9,
    atol: float = 1e-9,
) -> None:
    """Asserts that a step of `model` on several ranks leaves what the same step leaves in this process.

    Compared are the outputs, the gradients of parameters and of inputs that require one, and buffers, such as running
    statistics. The model and its inputs are copied and converted to `dtype`, in which rounding cannot hide a fault;
    random numbers begin with the same seed. Ranks are processes on this machine; their start takes some seconds.

        def test_my_network(assert_same_on_ranks):
            assert_same_on_ranks(MyNetwork(), torch.randn(2, 1, 32, 32), partition="sample=2,height=2")

    Args:
        model: as it is, in training or not.
        inputs: the arguments of the model's call: whole tensors (N, C, spatial...), or anything that contains some.
        partition: mesh axes and the ranks along each.
        backward: whether gradients are compared, too.
        dtype: of the floating-point tensors of the step.
        rtol, atol: as of `torch.testing.assert_close`.

    Raises:
        AssertionError: what differs first and by how much, or what the ranks said where they did not end well.
        ValueError: one line, for a partition that is not accepted.
    """
    ranks = Partition.parse(partition).ranks
    step = copy.deepcopy(model).to(dtype), tree_map(lambda x: _converted(x, dtype), inputs), backward
    with tempfile.TemporaryDirectory(prefix="distconv-testing-") as folder:
        _write(Path(folder, TASK), step, sys._getframe(1).f_globals["__name__"])
        command = [sys.executable, "-m", "distconv", "run", "--nproc", str(ranks), "--partition", partition]
        done = subprocess.run(
            [*command, "-m", "distconv.testing.step", folder],
            env={name: value for name, value in os.environ.items() if not name.startswith(("PMI", "OMPI"))},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=SECONDS,
        )
        if done.returncode:
            raise AssertionError(f"the model does not run under {partition}:\n{done.stderr}")
        found = torch.load(Path(folder, LEFT))
    with torch.random.fork_rng():
        expected = leaves_of(*step)
    assert found.keys() == expected.keys(), f"one process leaves {list(expected)}, ranks leave {list(found)}"
    for name, value in expected.items():
        message = (name + ": {}").format
        torch.testing.assert_close(found[name], value.detach(), rtol=rtol, atol=atol, msg=message)


def _converted(x: Any, dtype: torch.dtype) -> Any:
    if not isinstance(x, Tensor):
        return x
    return (x.detach().to(dtype) if x.is_floating_point() else x.detach()).clone().requires_grad_(x.requires_grad)


def _write(path: Path, step: tuple[Any, ...], module: str) -> None:
    """Writes the step for the ranks; of the module that asks, which they may not find, with its code."""
    asking = sys.modules[module]
    cloudpickle.register_pickle_by_value(asking)
    try:
        task = cloudpickle.dumps(step)
    finally:
        cloudpickle.unregister_pickle_by_value(asking)
    path.write_bytes(pickle.dumps((sys.path, task)))
