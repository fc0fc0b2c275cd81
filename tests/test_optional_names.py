"""Names of torch that features alone need: where torch lacks one, its features are off, and a program trains."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import distconv.private_names
import mucudnn.private_names
from mucudnn.private_names import MissingName, demand
from tests.forked_python import run_python

TABLES = {"mucudnn": mucudnn.private_names.NAMES, "distconv": distconv.private_names.NAMES}

MOST = 40
"""The most names without which nothing works."""


def test_few_names_stop_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each name is renamed, one by one: a package stops with one line, or features are off with one line each."""
    lacking = [""]
    monkeypatch.setattr(mucudnn.private_names, "_was_there", lambda path: path != lacking[0])
    monkeypatch.setattr(mucudnn.private_names, "_stand_in", lambda *_: None)
    stop = set()
    for package, table in TABLES.items():
        for name in table:
            lacking[0] = name.path
            try:
                demand(package, table)
            except MissingName as error:
                stop.add(name.path)
                assert str(error).startswith(f"{package} needs {name.path}, which torch")
            for feature in name.features if name.path not in stop else ():
                line = mucudnn.private_names.reason_off(feature, table)
                assert name.cuda or line.startswith(f"{feature} needs {name.path}, which torch")
    assert len(stop) <= MOST


TORCHS_OWN = (
    *("torch._decomp.", "torch._dynamo.", "torch._guards.", "torch._library.", "torch._subclasses."),
    *("torch._tensor_str.", "torch.distributed.", "torch.utils._python_dispatch."),
)
"""Where torch itself needs names that are no functions, in what the script does."""

WITHOUT_FEATURES = f"""
import sys
import torch._dynamo, torch.distributed.tensor, torch.utils.checkpoint, torch.utils.flop_counter
import mucudnn.private_names as known

paths, there, put = set(sys.argv[1:]), known.is_there, known._stand_in
known.is_there = lambda path: path not in paths and there(path)

def put_for_ours(path, line):
    place, _, name = path.rpartition(".")
    module = sys.modules.get(place)
    real = getattr(module, name, None)
    if callable(real) and not isinstance(real, type):
        def call(*args, **kwargs):
            if sys._getframe(1).f_globals["__name__"].startswith(("distconv", "mucudnn")):
                raise known.MissingName(line)
            return real(*args, **kwargs)
        vars(module)[name] = call  # a module of settings takes no others by setattr
    elif not path.startswith({TORCHS_OWN}):
        put(path, line)

known._stand_in = put_for_ours
for asked in known._was_there, known.check_names:
    asked.cache_clear()  # a package is asked for its names when it is imported
known.check_names()

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
import distconv, mucudnn
from distconv import private_names as names

def train(model, x):
    optimizer, losses = torch.optim.SGD(model.parameters(), 0.01), []
    for _ in range(2):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses

def made():
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(2048, 4)
    return nn.Sequential(*layers).double()

x = torch.randn(2, 3, 16, 16, dtype=torch.float64)
expected = train(made(), x)
mucudnn.patch(database=":memory:")
model = distconv.parallelize(made(), distconv.init("height=1"))
assert torch.allclose(torch.tensor(train(model, x)), torch.tensor(expected), rtol=1e-10), "differs"

def told(feature, ask):
    try:
        ask()
    except names.MissingName as error:
        assert str(error).startswith(f"{{feature}} needs torch."), error
    else:
        raise AssertionError(f"{{feature}} is not refused")

told(names.IN_TURN, lambda: distconv.in_turn(made(), "height=2"))
told(names.SHUTDOWN, distconv.shutdown)
told(known.UNPATCHED, mucudnn.unpatch)
told(names.TRANSFORMS, lambda: torch.func.vmap(model)(x[:, None]))
told(names.CHECKPOINTS, lambda: torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False))
mine = DTensor.from_local(torch.ones(2), init_device_mesh("cpu", (1,)), [Replicate()])
told(names.STRANGERS, lambda: mine + 1)
torch.testing.assert_close(torch.compile(model)(x), model(x))
"""


def test_a_program_trains_without_all_that_features_need(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(WITHOUT_FEATURES)
    every = [name for table in TABLES.values() for name in table]
    paths = {name.path for name in every} - {name.path for name in every if not name.features}
    done = run_python(tmp_path / "train.py", *sorted(paths), cwd=tmp_path, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    assert "torch.compile of a distributed model needs torch._compile._disable_dynamo, " in done.stderr
