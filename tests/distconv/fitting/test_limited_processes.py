"""Processes that may map no more memory (`ulimit -v`), in which plain torch ends with an error."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.forked_python import run_python

STEPS = """
import resource, sys
import torch
from torch import nn
import distconv

torch.set_num_threads(1)
torch.manual_seed(0)
layers = [nn.Conv2d(1, 8, 3, padding=1)]
for _ in range(16):
    layers += [nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()]
model, x = nn.Sequential(*layers), torch.randn(1, 1, 512, 512)
if sys.argv[1] != "plain":
    distconv.fit(model, sys.argv[1])
if sys.argv[2] != "all":
    mapped = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + int(sys.argv[2]),) * 2)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(2):
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    print(f"{loss.item():.5f}")
"""


def steps(*words: str) -> subprocess.CompletedProcess[str]:
    return run_python("-c", STEPS, *words, timeout=300)


@pytest.mark.skipif(sys.platform != "linux", reason="the limit is Linux's")
def test_a_step_ends_within_what_a_process_may_map() -> None:
    rest = str(160 << 20)
    whole, stock, fitted = steps("plain", "all"), steps("plain", rest), steps("auto", rest)
    assert whole.returncode == 0
    assert "can't allocate memory" in stock.stderr
    assert fitted.returncode == 0, fitted.stderr
    assert fitted.stdout == whole.stdout
    assert " segment" in fitted.stderr
    assert "ran out of memory" not in fitted.stderr


FITTED = """
import resource
import torch
import torch._dynamo  # which optimizers import
import distconv

def mapped():
    return int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()

resource.setrlimit(resource.RLIMIT_AS, (1 << 42,) * 2)
before = mapped()
distconv.fit(torch.nn.Conv2d(1, 1, 3), "auto")
print(mapped() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the limit is Linux's")
def test_what_fits_models_maps_little_itself_where_that_is_limited() -> None:
    found = run_python("-c", FITTED, timeout=300)
    assert found.returncode == 0, found.stderr
    assert int(found.stdout) < 40 << 20
