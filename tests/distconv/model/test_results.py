"""What a script asks of its results is answered as in one process, whatever their size; files hold plain tensors."""

from __future__ import annotations

import copy
import io
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from jobs import SUPPORT
from keeping_network import Keeps
from ranks import Ranks
from reference import random
from torch import Tensor, nn
from torch.nn import functional

import distconv
from distconv.rules import whole
from distconv.tensors.gathering import record

pytestmark = pytest.mark.gloo

PARTITIONS = ("sample=2,height=2", "sample=2,channel=2")


def assigned(x: Tensor, key: Callable[[Tensor], Any], value: Any) -> Tensor:
    y = x.clone()
    y[key(y)] = value
    return y


def confusion(x: Tensor) -> Tensor:
    """As segmentation scripts count: of classes at the places of a mask."""
    found, target = x.argmax(1), torch.arange(x.shape[0] * x.shape[2] * x.shape[3]).view(x.shape[0], *x.shape[2:]) % 5
    known = (target >= 0) & (target < 4)
    return torch.bincount(4 * target[known].to(torch.int64) + found[known], minlength=16).reshape(4, 4)


ASKED: dict[str, Callable[[Tensor], Any]] = {
    "numpy": lambda x: x.numpy(),
    "an image": lambda x: (x.cpu().permute(0, 2, 3, 1) * 255).round().clamp(0, 255).to(torch.uint8).numpy(),
    "asarray": lambda x: np.asarray(x[0, 1]),
    "array of several": lambda x: np.array([x.mean(), x.sum()]),
    "dlpack": lambda x: np.from_dlpack(x),
    "tolist": lambda x: x.tolist(),
    "numbers": lambda x: [float(value) for value in x[0, 0, 0]],
    "repr": repr,
    "text of a number": lambda x: [float(f"{x.mean()}"), f"{x.sum():.4f} {x.std()!s}"],
    "print of rows": lambda x: str(x[1:, 0]),
    "mask": lambda x: x[x > 0],
    "mask of rows": lambda x: x[x.mean((1, 2, 3)) > -9],
    "mask of a plain tensor": lambda x: torch.arange(x.numel()).view(x.shape)[x > 0],
    "assigned by a mask": lambda x: assigned(x, lambda y: y > 0, 0),
    "nonzero": lambda x: (x > 0).nonzero(),
    "where": lambda x: torch.where(x > 0)[2],
    "unique": lambda x: (x * 4).round().unique(return_counts=True),
    "sorted": lambda x: x.flatten().sort().values,
    "largest": lambda x: x.flatten().topk(5),
    "median": lambda x: x.median(),
    "quantile": lambda x: x.quantile(torch.tensor([0.1, 0.5], dtype=x.dtype)),
    "histogram": lambda x: x.histc(7),
    "histogram with edges": lambda x: torch.histogram(x, 4),
    "confusion": confusion,
    "rank of a matrix": lambda x: torch.linalg.matrix_rank(x[0, 0]),
    "distances": lambda x: torch.cdist(x.flatten(1), x.flatten(1)),
    "sparse": lambda x: (x * (x > 0)).to_sparse().values(),
    "list of numbers": lambda x: torch.tensor([x.mean(), x.sum()]),
    "lists of rows": lambda x: torch.tensor([[x.mean(), 1.0], [x.sum(), 2.0]]),
    "pickle": lambda x: pickle.loads(pickle.dumps({"x": [x]}))["x"][0],
    "copy": lambda x: copy.deepcopy(x),
    "equal": lambda x: torch.equal(x, x.clone()),
    "a grid of images": lambda x: torch.cat([*x.unbind()], 2)[:, ::2],
    "an operator with out=": lambda x: torch.add(x, 1, out=torch.empty_like(x)),
    "bicubic": lambda x: functional.grid_sample(x, random(x.shape[0], 3, 3, 2), "bicubic", align_corners=False),
    "a view": lambda x: assigned(x.diagonal(dim1=2, dim2=3), lambda y: slice(None), 2.0),
    "poisson": lambda x: torch.poisson(x.abs(), generator=torch.Generator().manual_seed(1)),
}


def plain(value: Any) -> Any:
    """What came, with plain tensors; a text as it is."""
    if isinstance(value, Tensor):
        return distconv.gather(value).detach()
    if isinstance(value, tuple | list):
        return [plain(item) for item in value]
    return torch.from_numpy(value) if isinstance(value, np.ndarray) else value


def is_same(found: Any, expected: Any) -> bool:
    if isinstance(expected, Tensor):
        alike = found.shape == expected.shape and found.dtype == expected.dtype
        return alike and torch.allclose(found, expected, rtol=1e-12, atol=1e-12, equal_nan=True)
    if isinstance(expected, list):
        return len(found) == len(expected) and all(map(is_same, found, expected))
    if isinstance(expected, float):
        return bool(found == pytest.approx(expected, rel=1e-12))
    return bool(found == expected)


def asked(partition: str) -> list[str]:
    """What is answered otherwise than in one process, as if every tensor were too large for a model's call."""
    mesh = distconv.init(partition, device_type="cpu")
    usual, whole.MOST_BYTES = whole.MOST_BYTES, 0
    wrong = []
    try:
        for name, ask in ASKED.items():
            x = random(3, 4, 7, 7)
            here = distconv.shard(x, mesh)
            try:
                found, expected = plain(ask(here)), plain(ask(x.clone()))
            except Exception as error:
                wrong.append(f"{name}: {type(error).__name__}: {error}")
                continue
            if not is_same(found, expected):
                wrong.append(f"{name}: {found} for {expected}")
    finally:
        whole.MOST_BYTES = usual
    return wrong


@pytest.mark.parametrize("partition", PARTITIONS)
def test_a_script_may_ask_anything_of_its_results(ranks: Callable[[int], Ranks], partition: str) -> None:
    for wrong in ranks(4).run(asked, partition):
        assert not wrong


def trained(x: Tensor) -> tuple[Keeps, torch.optim.Optimizer, Tensor]:
    torch.manual_seed(1)
    model = Keeps().double()
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(2):
        y = model(x)
        optimizer.zero_grad()
        y.square().mean().backward()
        optimizer.step()
    return model, optimizer, y


READS = """
import sys, torch
loaded = {file: torch.load(file, weights_only=False) for file in sys.argv[1:]}
assert "distconv" not in sys.modules and "torch.distributed.tensor" not in sys.modules
for file, kept in loaded.items():
    model, optimizer = kept["model"], kept["optimizer"]
    torch.save([list(model.parameters()), model.kept, optimizer.state_dict(), kept["y"]], f"{file}.copied")
"""


def write(partition: str, path: str) -> None:
    with distconv.distributed_script(distconv.init(partition, device_type="cpu")):
        model, optimizer, y = trained(random(3, 3, 6, 5))
        saved = io.BytesIO()
        torch.save({"model": model, "optimizer": optimizer, "y": y}, saved)
        Path(path, f"{torch.distributed.get_rank()}.pt").write_bytes(saved.getvalue())


@pytest.mark.parametrize("partition", PARTITIONS)
def test_files_hold_plain_tensors_at_any_depth(
    ranks: Callable[[int], Ranks], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, partition: str
) -> None:
    ranks(4).run(write, partition, str(tmp_path))
    model, optimizer, y = trained(random(3, 3, 6, 5))
    expected = torch.utils._pytree.tree_leaves(
        [list(model.parameters()), model.kept, optimizer.state_dict(), y.detach()]
    )
    code = f"import sys; sys.path.insert(0, {SUPPORT!r})\n{READS}"
    files = [tmp_path / f"{rank}.pt" for rank in (0, 3)]
    subprocess.run([sys.executable, "-c", code, *files], check=True)
    for file in files:
        found = torch.utils._pytree.tree_leaves(torch.load(f"{file}.copied", weights_only=False))
        assert len(found) == len(expected)
        for each, wanted in zip(found, expected, strict=True):
            if isinstance(wanted, Tensor):
                assert type(each) in (Tensor, nn.Parameter)
                torch.testing.assert_close(each.detach(), wanted.detach(), rtol=1e-9, atol=1e-9)


def texts(partition: str) -> list[tuple[str, str]]:
    """(here, in one process): what is printed of what autograd records, and of parameters."""
    x = random(2, 3, 6, 5).float()
    both = []
    for here in (True, False):
        torch.manual_seed(1)
        model = Keeps()
        if here:
            distconv.parallelize(model, distconv.init(partition, device_type="cpu"))
        y = model(x)
        both.append([repr(y.mean()), repr(y), repr(y[0, 0, 0, :2]), repr(model.first.bias), f"{y.mean()}"])
    return list(zip(*both, strict=True))


def test_print_shows_the_whole_tensor(ranks: Callable[[int], Ranks]) -> None:
    for pairs in ranks(4).run(texts, "sample=2,height=2"):
        for found, expected in pairs:
            assert found == expected


def told(partition: str) -> tuple[str, list[tuple[str, int]], str]:
    """The refusal where memory is short, what is counted of a gather, and the layout in words."""
    x = distconv.shard(random(2, 4, 64, 64), distconv.init(partition, device_type="cpu"))
    before = dict(record.record.places)
    usual, record.CERTAIN = record.CERTAIN, 0
    least = record.free_everywhere
    record.free_everywhere = lambda mesh: 1000  # type: ignore[assignment]
    whole.MOST_BYTES, most = 0, whole.MOST_BYTES
    try:
        x.numpy()
        refusal = ""
    except distconv.UnsupportedOperation as error:
        refusal = str(error)
    finally:
        record.CERTAIN, record.free_everywhere, whole.MOST_BYTES = usual, least, most
    whole.MOST_BYTES = 1000
    try:
        x.numpy()
    finally:
        whole.MOST_BYTES = most
    counted = [(key[1], size) for key, size in record.record.places.items() if key not in before]
    return refusal, counted, distconv.layout(x)


def test_what_is_gathered_for_checkpoints_is_distinguished_from_steps() -> None:
    found = record.GatherRecord()
    found.places.update({("at a.py:3", ".numpy()"): 4 << 20, ("at a.py:9", record.PICKLED): 8 << 20})
    found.steps = 4
    assert found.summary().startswith(
        "outside models every rank gathered 1 MiB a step and 8 MiB for checkpoints; in all"
    )


def test_gathers_are_counted_and_refused_where_memory_is_short(ranks: Callable[[int], Ranks]) -> None:
    answers = ranks(2).run(told, "height=2")
    assert answers[0] == answers[1]
    refusal, counted, layout = answers[0]
    assert "memory" in refusal and "test_results.py" in refusal and "\n" not in refusal
    assert counted == [(".numpy()", 2 * 4 * 64 * 64 * 8)]
    assert layout == "(2, 4, 64, 64) torch.float64 [dim 2 by height over 2 ranks], on this rank (2, 4, 32, 64)"
