"""The check in one process: every refusal, what layers send, and memory, against what ranks do and sizes say."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from jobs import ROOT, SUPPORT, TRAIN
from ranks import Ranks
from torch import Tensor, nn

import distconv
from distconv import settings
from distconv.agreement.ledger import finish_comparisons
from distconv.check.findings import Findings, LayerTraffic, Refusal, findings_summary
from distconv.model import fully_sharded
from distconv.transfer import group_calls
from mucudnn.process import substituted
from tests.forked_python import run_python


def net() -> nn.Module:
    first, last = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
    return nn.Sequential(first, nn.BatchNorm2d(4), nn.ReLU(), last, nn.Conv2d(4, 2048, 1))


class Refused(nn.Module):
    """Two calls of an operator that no rule computes, between layers that have one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        y = y * y.detach().roll(1).sum()
        y = self.second(y)
        return y + y.detach().roll(2).sum()


def refused() -> nn.Module:
    return Refused()


class Endless(Refused):
    """How many elements the result of the last operator has depends on numbers."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + torch.unique(x).sum()


def endless() -> nn.Module:
    return Endless()


class Dynamic(nn.Module):
    """A roll of all elements as of one row, which autograd records."""

    def forward(self, x: Tensor) -> Tensor:
        return x * x.roll(1).sum()


def dynamic() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1), Dynamic())


def huge() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 64, 3, padding=1), nn.ReLU())


def check(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{SUPPORT}"}
    return run_python("-m", "distconv", "check", *arguments, env=environment)


def found(maker: str, shape: str, partition: str, code: int, *options: str) -> Any:
    ended = check(f"{__file__}:{maker}", "--input", shape, "--partition", partition, "--json", *options)
    assert ended.returncode == code, ended.stderr
    return json.loads(ended.stdout)


def sent_by_ranks() -> int:
    """Bytes that this rank sends in the step of `net`, but for the gradients of parameters."""
    fully_sharded.LEAST_BYTES = 1 << 15  # which tests before may have changed in this process
    mesh = distconv.init("height=2", device_type="cpu")
    finish_comparisons(mesh)  # what tests before have left to be compared is not sent by this one
    model = distconv.parallelize(net(), mesh, shard_parameters=True)
    count, kept, reduce = 0, group_calls.all_to_all_single, group_calls.all_reduce

    def counted(output: Tensor, input: Tensor, received: Any, sent: list[int], *args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += input.element_size() * (sum(sent) - sent[dist.get_rank()])
        return kept(output, input, received, sent, *args, **kwargs)

    def reduced(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        nonlocal count
        if args:  # the operation, which buckets of gradients do not give
            count += x.numel() * x.element_size()  # 2 (p - 1) / p of it, on 2 ranks
        return reduce(x, *args, **kwargs)

    def gathered(output: Tensor, own: Tensor, **kwargs: Any) -> Any:
        nonlocal count
        count += own.numel() * own.element_size()  # p - 1 times
        return gather(output, own, **kwargs)

    def scattered(output: Tensor, own: Tensor, **kwargs: Any) -> Any:
        nonlocal count
        count += output.numel() * output.element_size()  # (p - 1) / p of the whole
        return scatter(output, own, **kwargs)

    gather, scatter = group_calls.all_gather_single, group_calls.reduce_scatter_single
    watched = {"all_to_all_single": counted, "all_gather_single": gathered, "reduce_scatter_single": scattered}
    watched["all_reduce"] = reduced
    with (
        substituted(group_calls, **watched),
        settings.options({"check": "off"}),  # its messages are not the layers'
    ):
        model(torch.randn(2, 3, 16, 16)).sum().backward()
    return count


def test_what_layers_send_is_what_a_rank_sends(ranks: Callable[[int], Ranks]) -> None:
    findings = found("net", "2,3,16,16", "height=2", 0, "--shard-parameters")
    assert findings["accepted"] and not findings["refusals"]
    layers = {layer["name"]: layer["forward"] + layer["backward"] for layer in findings["layers"]}
    assert {"0", "1", "3"} <= layers.keys()
    halo = 4 * 2 * 4 * 16  # one row of 4 channels of 2 samples, in float32
    assert layers["3"] == 2 * halo
    assert layers["4"] == 3 * 4 * 2048 * 4 / 2  # the weight is gathered twice, its gradient reduced and scattered once
    inside = sum(count for name, count in layers.items() if name != "gradients of parameters")
    assert inside == ranks(2).run(sent_by_ranks)[0]


def test_every_refusal_is_found_and_not_the_first_alone() -> None:
    findings = found("refused", "2,3,16,16", "height=4", 1)
    assert not findings["accepted"] and not findings["ended"]
    assert len(findings["refusals"]) == 2 and {each["layer"] for each in findings["refusals"]} == {"Refused"}
    assert all(
        refusal["kind"] == "refused" and "test_check.py:" in refusal["message"] for refusal in findings["refusals"]
    )
    assert any(layer["name"] == "second" for layer in findings["layers"]), "it goes on behind a refusal"


def test_backward_goes_on_behind_a_refusal_too() -> None:
    findings = found("dynamic", "2,3,16,16", "height=4", 1)
    assert not findings["ended"] and {each["layer"] for each in findings["refusals"]} == {"2"}
    assert all(each["backward"] > 0 for each in findings["layers"] if each["name"] == "1")
    assert any(each["name"] == "1" for each in findings["layers"])


def test_a_refusal_without_a_result_is_found_too() -> None:
    findings = found("endless", "2,3,16,16", "height=4", 1)
    assert findings["ended"] and len(findings["refusals"]) == 3
    assert "unique" in findings["refusals"][-1]["operator"]


def test_memory_is_followed_by_shapes_alone() -> None:
    findings = found("huge", "1,3,65536,8192", "height=8", 0)
    output = 64 * 65536 * 8192 * 4  # 128 GiB
    image = 3 * 65536 * 8192 * 4
    # The convolution and the ReLU keep their outputs; a rank has the whole image, as the script gave it, and its part.
    assert findings["peak_alone"] == pytest.approx(2 * output + image, rel=0.001)
    assert findings["peak"] == pytest.approx(2 * output / 8 + image + image / 8, rel=0.001)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["resnet18", "--input", "1,4,64,64", "--partition", "height=2"], "the model fails in one process"),
        (["resnet18", "--partition", "height=2"], "give --input C,H,W"),
        (["resnet18", "--input", "1,3,64,64"], "no partition"),
        (["--partition", "depth=2", "resnet18", "--input", "3,64,64"], "2-D data (N, C, 2 spatial dims) has no depth"),
        (["--partition", "depth=2", TRAIN, "--task", "pixels"], "train.py:"),
        (["resnet18", "--input", "3,64,64", "--parts", "depth=2"], "2-D data (N, C, 2 spatial dims) has no depth"),
        (["resnet18", "--input", "1,3,64,64", "--partition", "auto"], "--partition auto: accepted: axis=ranks"),
        (["torch.nn:Conv2d", "--input", "1,3,64,64", "--partition", "height=2"], "the model cannot be made"),
    ],
)
def test_bad_input_is_one_line(arguments: list[str], words: str) -> None:
    ended = check(*arguments)
    assert ended.returncode == 2
    assert words in ended.stderr and ended.stderr.count("\n") == 1


def test_a_script_is_followed_to_its_first_step(tmp_path: Path) -> None:
    strategy = tmp_path / "strategy.toml"
    strategy.write_text('[layers]\n"*" = "height=4"\n')  # what is there for * is the partition where none is given
    ended = check("--strategy", str(strategy), "--json", TRAIN, "--task", "pixels")
    assert ended.returncode == 0, ended.stderr
    findings = json.loads(ended.stdout)
    assert findings["accepted"] and findings["peak"] > 0
    assert {layer["kind"] for layer in findings["layers"]} >= {"Conv2d"}


def test_the_summary_says_what_was_found() -> None:
    layers = [LayerTraffic("conv", "Conv2d", 1024, 1024)]
    fine = Findings("height=4", 4, layers=layers, peak=2**20, peak_alone=2**22)
    assert findings_summary(fine).endswith("0.25 of the 4 MiB of one process. Every operator runs.")
    refusal = Refusal("refused", "aten.sort.default", "conv", False, "aten.sort.default: why")
    assert "One call of an operator is refused." in findings_summary(Findings("height=4", 4, refusals=[refusal]))
    ended = Findings("height=4", 4, refusals=[refusal], ended="UnsupportedOperation: aten.sort.default: why")
    assert findings_summary(ended).endswith(
        "Without the result of the last one the rest of the step cannot be followed."
    )
    assert not Findings("height=4", 4, ended="an error").accepted
