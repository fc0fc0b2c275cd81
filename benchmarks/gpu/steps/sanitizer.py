"""Whether an engine writes beyond the workspace that it asks for: compute-sanitizer on ten, without torch's cache."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import torch

from benchmarks.gpu.cases import PRECISIONS, layer_problem
from benchmarks.gpu.fifteen import Run
from benchmarks.gpu.steps.engines import algorithms, layer
from mucudnn.convolution.problem import Direction
from mucudnn.optimizer import Division, Option
from mucudnn.timing.measurement import synthetic_operands
from mucudnn.timing.schedule import Schedule

MOST = 10


def measure(run: Run) -> bool:
    sanitizer = shutil.which("compute-sanitizer")
    if run.device.type != "cuda" or sanitizer is None:
        run.figures.add("compute-sanitizer", "not there" if sanitizer is None else "needs a GPU")
        return True
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    command = [sanitizer, "--tool", "memcheck", "--error-exitcode", "9", sys.executable, __file__, str(run.device)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    errors = [line.strip("= ") for line in done.stdout.splitlines() if line.startswith("=========")]
    ran = [line for line in done.stdout.splitlines() if line.startswith("ran ")]
    run.figures.add("engines under memcheck", len(ran), "", said=errors[:60], exit_code=done.returncode)
    run.figures.add("memcheck", errors[-1] if errors else f"exit code {done.returncode}: {done.stderr[-200:]}")
    return True


def run_engines(device: torch.device) -> None:
    """Runs the algorithms with the largest workspaces, a line for each."""
    PRECISIONS["tf32"].apply()
    problem = layer_problem(layer(small=False), "tf32", Direction.FORWARD).with_extent(8)
    operands = synthetic_operands(problem, device)
    providers = algorithms(device, problem)
    largest = sorted(providers, key=lambda name: providers[name].workspace(problem, name), reverse=True)[:MOST]
    for name in largest:
        Schedule(problem, Division((Option(problem.extent, name, 0.0, 0),)), {name: providers[name]}).run(operands)
        torch.cuda.synchronize(device)
        print(f"ran {name} {providers[name].workspace(problem, name)}", flush=True)


if __name__ == "__main__":
    run_engines(torch.device(sys.argv[1]))
