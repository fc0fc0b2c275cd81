"""Which layer runs where: patterns, files, what moves between layers, and what is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import TRAIN, launch
from ranks import Ranks
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

import distconv
from distconv.model.strategy import Strategy, as_toml, read_strategy
from distconv.performance.without_data import imagined_job
from tests.forked_python import run_python


@pytest.mark.parametrize(
    "name, partition",
    [
        ("layer3.0.conv1", "channel=4"),
        ("layer3", None),
        ("layer4", "height=4"),
        ("layer4.1.relu", "height=4"),
        ("layer44.1", None),
        ("stem.conv", "sample=2,width=2"),
        ("stem", None),
        ("head.conv", "channel=4"),
        ("", None),
    ],
)
def test_the_first_pattern_decides(name: str, partition: str | None) -> None:
    layers = {"layer3.*": "channel=4", "layer4": "height=4", "stem.c?nv": "sample=2,width=2", "*.conv": "channel=4"}
    found = Strategy.parse(layers, 4).partition(name)
    assert (None if found is None else str(found[1])) == partition


@pytest.mark.parametrize(
    "layers, fault",
    [
        ({"*": "rows=4"}, "strategy: '*': partition 'rows=4': unknown axis 'rows'"),
        ({"a": "sample=4", "b": "channel=2"}, "strategy: 'b': 'channel=2' is for 2 ranks; accepted: 4"),
        ({"*": "sample=4", "b": "channel=4"}, "strategy: 'b' comes after '*'"),
        ({"a": 4}, "strategy: 'a': 4; accepted: a pattern of layer names and a partition"),
        ({"a": "channel=4,algorithm=z"}, "strategy: 'a': channel algorithm 'z': accepted: x, y, w, auto"),
        ({"a": "channel=4,algorithm=w"}, "strategy: 'a': channel algorithm 'w' on partition 'channel=4'"),
        ({"a": "height=4,algorithm=x"}, "strategy: 'a': 'height=4,algorithm=x': accepted: one algorithm="),
        ({"a": "channel=4,algorithm=x,algorithm=y"}, "strategy: 'a': 'channel=4,algorithm=x,algorithm=y': accepted"),
    ],
)
def test_bad_layers_are_refused_in_one_line(layers: dict[str, str], fault: str) -> None:
    with pytest.raises(ValueError) as raised:
        Strategy.parse(layers, 4)
    assert str(raised.value).startswith(fault) and "\n" not in str(raised.value)


def test_a_layer_has_a_channel_algorithm_of_its_own(tmp_path: Path) -> None:
    layers = {"a": "channel=4,algorithm=x", "b": "channel=4, algorithm = y", "*": "channel=4"}
    strategy = Strategy.parse(layers)
    assert [strategy.algorithm(name) for name in layers] == ["x", "y", None] and not strategy.is_one_partition
    (tmp_path / "strategy.toml").write_text(as_toml(layers))
    assert read_strategy(tmp_path / "strategy.toml", 4) == strategy
    with imagined_job(4):
        model = nn.ModuleDict({name: nn.Conv2d(8, 8, 1, bias=False) for name in "abc"})
        distconv.parallelize(model, distconv.init("channel=4", channel_algorithm="y"), layers)
        sharded = [name.weight.placements for name in model.values()]
    assert sharded == [(Shard(1),), (Shard(0),), (Shard(0),)]


def test_a_pattern_for_no_layer() -> None:
    model = nn.ModuleDict({"stem": nn.Conv2d(1, 1, 1), "head": nn.Conv2d(1, 1, 1)})
    strategy = Strategy.parse({"s*": "sample=4", "stem": "channel=4", "*": "sample=4"})
    used = {pattern for pattern, _ in strategy.assign(model).values()}
    assert used == {"s*", "*"}
    with pytest.raises(
        ValueError, match=r"^strategy: pattern 'stem' decides on no layer of ModuleDict; its layers: stem, head$"
    ):
        strategy.check(used, [model])


@pytest.mark.parametrize(
    "content, fault",
    [
        (None, "No such file or directory"),
        (b"[layers", "Expected"),
        (b"\xff", "invalid start byte"),
        (b'"*" = "sample=4"', "accepted: one table [layers]"),
        (b"[layers]", "accepted: one table [layers]"),
        (b'[layers]\n"*" = 4', "'*': 4; accepted: a pattern"),
        (b'[layers]\n"*" = "sample=4"\n[more]', "accepted: one table [layers]"),
    ],
)
def test_bad_files_are_refused_in_one_line(tmp_path: Path, content: bytes | None, fault: str) -> None:
    path = tmp_path / "strategy.toml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError) as raised:
        read_strategy(path)
    message = str(raised.value)
    assert message.startswith(f"strategy {str(path)!r}: ") and fault in message and "\n" not in message


class Glue(nn.Module):
    """Sums and products across layers, an input that a layer changes in place, functions between layers."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Conv2d(2, 4, 3, padding=1)
        self.b = nn.Conv2d(2, 4, 5, padding=2)
        self.relu = nn.ReLU(inplace=True)
        self.c = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.AvgPool2d(2))
        self.scale = nn.Parameter(torch.rand(4, 1, 1))
        self.d = self.a
        self.tied = nn.Conv2d(2, 4, 3, padding=1)
        self.tied.weight = self.a.weight

    def forward(self, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        first, second = self.a(x), self.b(x)
        y = first * second + self.d(x)
        self.relu(y)  # for its effect
        y = y + second
        y += self.d(x)
        third = second * 2
        third.add_(y).sigmoid_()
        z = torch.cat([self.c(y), nn.functional.avg_pool2d(third, 2) * self.scale], 1)
        return z, {"tied": self.tied(x) - torch.where(first > second, first, second)}


PLACES = {
    "a": "height=4",
    "b": "sample=2,width=2",
    "relu": "width=4",
    "c.0": "channel=4,algorithm=x",
    "c.1": "channel=4",
    "tied": "channel=2,sample=2",
}


def glue(outer: str, grad: bool) -> dict[str, float]:
    mesh = distconv.init(outer, device_type="cpu")
    torch.manual_seed(3)
    plain = Glue().double()
    model = distconv.parallelize(copy.deepcopy(plain), mesh, PLACES)
    x = torch.randn(4, 2, 8, 6, dtype=torch.float64)
    alone, here = x.clone().requires_grad_(grad), x.clone().requires_grad_(grad)
    with torch.set_grad_enabled(grad):
        (z, more), (y, others) = plain(alone), model(here)
        assert isinstance(y, DTensor) and y.device_mesh == mesh == others["tied"].device_mesh
        found = {"z": distconv.gather(y) - z, "tied": distconv.gather(others["tied"]) - more["tied"]}
    if grad:
        (z.square().sum() + more["tied"].exp().sum()).backward()
        (y.square().sum() + others["tied"].exp().sum()).backward()
        found["x"] = here.grad - alone.grad  # type: ignore[operator]
        for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
            found[name] = distconv.whole_state(p.grad) - q.grad  # type: ignore[operator]
    return {name: float(difference.abs().max()) for name, difference in found.items()}


@pytest.mark.parametrize("outer, grad", [("sample=4", True), ("channel=4", False)])
def test_layers_of_all_partitions_meet(ranks: Callable[[int], Ranks], outer: str, grad: bool) -> None:
    for found in ranks(4).run(glue, outer, grad):
        assert max(found.values()) < 1e-11, found


def refused() -> list[str]:
    mesh = distconv.init("sample=2", device_type="cpu")
    found = []
    for strategy in ({"nowhere*": "height=2"}, {"*": "height=4"}):
        try:
            distconv.parallelize(nn.Sequential(nn.Conv2d(1, 1, 1)), mesh, strategy)
        except ValueError as error:
            found.append(str(error))
    return found


def test_a_program_refuses_before_anything_moves(ranks: Callable[[int], Ranks]) -> None:
    for found in ranks(2).run(refused):
        assert found == [
            "strategy: pattern 'nowhere*' decides on no layer of Sequential; its layers: 0",
            "strategy: '*': 'height=4' is for 4 ranks; accepted: 2",
        ]


def strategy_file(directory: Path, **layers: str) -> str:
    path = directory / "strategy.toml"
    path.write_text("[layers]\n" + "".join(f'"{name}" = "{partition}"\n' for name, partition in layers.items()))
    return str(path)


def test_a_script_trains_as_alone_under_a_strategy(tmp_path: Path) -> None:
    path = strategy_file(tmp_path, **{"0": "channel=2", "2": "height=2", "*": "sample=2"})
    done = launch("alone", 2, "--strategy", path, TRAIN, "--task", "pixels", "--save", str(tmp_path / "here.pt"))
    assert done.returncode == 0, done.stderr
    alone = run_python(TRAIN, "--task", "pixels", "--save", tmp_path / "alone.pt")
    lines = (
        [line.rsplit(" ", 1) for line in done.stdout.splitlines()],
        [line.rsplit(" ", 1) for line in alone.stdout.splitlines()],
    )
    assert [text for text, _ in lines[0]] == [text for text, _ in lines[1]] and lines[0]
    assert [float(n) for _, n in lines[0]] == pytest.approx([float(n) for _, n in lines[1]], rel=1e-9)
    here, expected = torch.load(tmp_path / "here.pt"), torch.load(tmp_path / "alone.pt")
    assert list(here["model"]) == list(expected["model"])
    for found, right in ((here["model"], expected["model"]), *_momenta(here, expected)):
        for key, value in right.items():
            assert type(found[key]) is Tensor
            torch.testing.assert_close(found[key], value, rtol=1e-9, atol=1e-12)


def _momenta(here: Any, expected: Any) -> list[tuple[dict[str, Tensor], dict[str, Tensor]]]:
    found, right = here["optimizer"]["state"], expected["optimizer"]["state"]
    assert set(found) == set(right) and right
    return [(found[key], right[key]) for key in right]


@pytest.mark.parametrize(
    "layers, arguments, fault",
    [
        ({"0": "channel=2"}, [], "no partition: give --partition"),
        ({"*": "channel=2"}, ["--partition", "sample=4"], "'*': 'channel=2' is for 2 ranks; accepted: 4"),
        ({"conv9": "channel=2", "*": "sample=2"}, [], "'conv9' decides on no layer of Sequential; its layers: 0, 1, 2"),
    ],
)
def test_bad_strategies_end_a_job_with_2(
    tmp_path: Path, layers: dict[str, str], arguments: list[str], fault: str
) -> None:
    path = strategy_file(tmp_path, **layers)
    done = launch("alone", 2, *arguments, "--strategy", path, TRAIN, "--task", "pixels")
    assert done.returncode == 2 and not done.stdout, done.stderr
    assert fault in done.stderr and done.stderr.count("\n") == 1 and done.stderr.startswith("distconv: ")
