"""Checkpoints: saved on some ranks under one partition, loaded on others under another, or whole in one process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch as safetensors
import torch
import torch.distributed.checkpoint as dcp
from ranks import Ranks
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.tensor import DTensor

import distconv
from tests.distconv.model.test_parameters import MIXED, Net, adam, steps_with


def made(partition: str | None, strategy: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model: nn.Module = Net().double()
    if partition is not None:
        model = distconv.parallelize(model, distconv.init(partition, device_type="cpu"), strategy)
    return model, adam(model.parameters())


def save(path: str, partition: str, strategy: Any) -> tuple[list[float], list[str], bool]:
    """Trains, saves the state both ways, trains on: the losses after saving, the keys, whether shards were saved."""
    model, optimizer = made(partition, strategy)
    steps_with(model, optimizer)
    state = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.save(state, checkpoint_id=path)
    whole = distconv.whole_state({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    if torch.distributed.get_rank() == 0:
        torch.save(whole, f"{path}/whole.pt")
    sharded = any(isinstance(tensor, DTensor) for tensor in state["model"].values())
    return steps_with(model, optimizer), list(state["model"]), sharded


def load(path: str, partition: str, strategy: Any) -> tuple[list[float], list[float]]:
    """The losses after loading the saved shards, and after loading the whole tensors."""
    results = []
    for whole in (False, True):
        model, optimizer = made(partition, strategy)
        if whole:
            state = torch.load(f"{path}/whole.pt")
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
        else:
            state = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
            dcp.load(state, checkpoint_id=path)
            model.load_state_dict(state["model"])
            set_optimizer_state_dict(model, optimizer, state["optimizer"])
        results.append(steps_with(model, optimizer))
    return results[0], results[1]


@pytest.mark.parametrize("partition, strategy", [("sample=2,channel=2", None), ("sample=4", MIXED)])
def test_saved_on_some_ranks_and_loaded_on_others(
    ranks: Callable[[int], Ranks], tmp_path: Path, partition: str, strategy: Any
) -> None:
    path = str(tmp_path / "state")
    answers = ranks(4).run(save, path, partition, strategy)
    expected, keys, _ = answers[0]
    assert all(sharded for *_, sharded in answers) and keys == list(Net().state_dict())
    for size, other in ((4, "channel=2,filter=2"), (2, "channel=2"), (2, "height=2"), (1, "sample=1")):
        for results in ranks(size).run(load, path, other, None):
            for found in results:
                assert found == pytest.approx(expected, rel=1e-9), (size, other)


def test_whole_tensors_load_in_one_process(ranks: Callable[[int], Ranks], tmp_path: Path) -> None:
    path = str(tmp_path / "state")
    expected = ranks(4).run(save, path, "channel=4", None)[0][0]
    model, optimizer = made(None, None)
    state = torch.load(f"{path}/whole.pt")
    assert all(type(tensor) is Tensor for tensor in state["model"].values())
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    assert steps_with(model, optimizer) == pytest.approx(expected, rel=1e-9)


def save_in_a_script(path: str) -> list[Any]:
    found: list[Any] = []
    with distconv.distributed_script(distconv.init("channel=2", device_type="cpu")):
        torch.manual_seed(1)
        model = Net().double()
        optimizer = adam(model.parameters())
        steps_with(model, optimizer)
        rank = torch.distributed.get_rank()
        torch.save({"model": model.state_dict(), "step": [3, optimizer.state_dict()]}, f"{path}/{rank}.pt")
        torch.save(model, f"{path}/{rank}.model.pt")
    read = torch.load(f"{path}/{rank}.model.pt", weights_only=False).state_dict()
    found.append(all(type(value) is Tensor for value in read.values()))
    state = torch.load(f"{path}/{rank}.pt")
    whole = distconv.whole_state(model.state_dict())
    found.append(all(torch.equal(read[key], value) for key, value in whole.items()))
    found.append(all(torch.equal(state["model"][key], value) for key, value in whole.items()))
    found.append(all(type(t) is Tensor for one in state["step"][1]["state"].values() for t in one.values()))
    return found


def test_a_script_saves_whole_tensors(ranks: Callable[[int], Ranks], tmp_path: Path) -> None:
    for found in ranks(2).run(save_in_a_script, str(tmp_path)):
        assert found == [True] * 4


def by_safetensors(path: str) -> list[Any]:
    """In a script: whether its files hold the whole, are read back, and whether what is no script is refused."""
    rank, found = torch.distributed.get_rank(), []
    with distconv.distributed_script(distconv.init("channel=2", device_type="cpu")):
        torch.manual_seed(1)
        model = Net().double()
        steps_with(model, adam(model.parameters()))
        safetensors.save_file(model.state_dict(), f"{path}/{rank}.state")
        safetensors.save_model(model, f"{path}/{rank}.model")
        whole = distconv.whole_state(model.state_dict())
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        safetensors.load_model(model, f"{path}/{rank}.model")
        again = distconv.whole_state(model.state_dict())
        found.append(all(torch.equal(again[key], value) for key, value in whole.items()))
    for kind in ("state", "model"):
        state = safetensors.load_file(f"{path}/{rank}.{kind}")
        found.append(state.keys() == whole.keys() and all(torch.equal(state[key], whole[key]) for key in whole))
    try:
        safetensors.save_file(model.state_dict(), f"{path}/{rank}.refused")
    except SafetensorError as error:
        found.append(str(error))
    return found


def test_safetensors_writes_the_whole_in_a_script(ranks: Callable[[int], Ranks], tmp_path: Path) -> None:
    for read_back, state, model, refusal in ranks(2).run(by_safetensors, str(tmp_path)):
        assert (read_back, state, model) == (True, True, True)
        assert "invalid shape" in refusal  # outside a script a state is the program's to make whole
