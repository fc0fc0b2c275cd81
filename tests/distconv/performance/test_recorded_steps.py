"""What is recorded in an imagined job is what a real one sends; and what is planned from it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import small_network
from jobs import ENVIRONMENT, ROOT, SCRIPTS, SUPPORT
from ranks import Ranks

from tests.forked_python import run_python

pytestmark = pytest.mark.gloo

SCRIPT = SCRIPTS / "imagined.py"

PARAMETERS = 10


@pytest.fixture(scope="module")
def recorded() -> dict[str, Any]:
    environment = {**ENVIRONMENT, "PYTHONPATH": f"{ROOT}:{SUPPORT}"}
    done = run_python(SCRIPT, env=environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def sent(steps: tuple[tuple[str, str], ...]) -> dict[str, Any]:
    """Of real steps on this rank: kind, bytes and ranks of every message, in the order in which they start, and the
    bytes of parameters.
    """
    import torch.distributed as dist

    import distconv
    from distconv import settings
    from distconv.model import fully_sharded
    from distconv.transfer import group_calls

    fully_sharded.LEAST_BYTES = 0

    messages: list[list[Any]] = []

    def noting(kind: str, real: Any) -> Any:
        def collective(*tensors: Any, **options: Any) -> Any:
            tensor = tensors[0] if kind in ("all_reduce", "all_gather") else tensors[1]
            group = options.get("group") or dist.group.WORLD
            is_gradient = kind == "all_reduce" and len(tensors) == 1 and "op" not in options  # as buckets call it
            ranks = sorted(dist.get_process_group_ranks(group))
            if len(ranks) > 1:
                size = tensor.numel() * tensor.element_size()
                messages.append(["gradients" if is_gradient else kind, size, ranks])
            return real(*tensors, **options)

        return collective

    real = {function.__name__: function for function in group_calls.FUNCTIONS}
    result: dict[str, Any] = {}
    for text, fully in steps:
        with settings.options({"check": "off", "shard_parameters": fully}):
            mesh = distconv.init(text)
            model = distconv.parallelize(small_network.Small(), mesh)
            x = distconv.shard(small_network.batch(), mesh)
            for _ in range(2):
                messages.clear()
                for name, function in real.items():
                    setattr(group_calls, name, noting(name.removesuffix("_single"), function))
                try:
                    y = model(x)
                    y.backward(y.detach())
                finally:
                    for name, function in real.items():
                        setattr(group_calls, name, function)
            result[f"{text}, {fully}"] = list(messages)
            own = [getattr(p, "_local_tensor", p).nbytes for p in model.parameters()]
            result[f"bytes under {text}, {fully}"] = sum(own)
    return result


def test_a_recorded_step_sends_what_a_real_one_sends(recorded: dict[str, Any], ranks: Callable[[int], Ranks]) -> None:
    real = ranks(4).run(sent, small_network.STEPS)[recorded["rank"]]
    assert len(real) == 2 * len(small_network.STEPS) and all(real.values())
    for name, found in real.items():
        assert recorded[name] == found, name


def test_a_sharded_parameter_takes_at_most_one_message_more_each_way(recorded: dict[str, Any]) -> None:
    """A gather in forward and one in backward, whose sum is scattered in place of the bucket's."""
    for text in ("sample=4", "sample=2,channel=2"):
        whole, sharded = (Counter(kind for kind, *_ in recorded[f"{text}, {fully}"]) for fully in ("off", "on"))
        sums = sharded["reduce_scatter"]
        # Nothing in backward reads a bias, which is gathered once.
        assert 0 < sums <= PARAMETERS and sums <= sharded["all_gather"] - whole["all_gather"] <= 2 * sums
        del sharded["reduce_scatter"], sharded["all_gather"]
        assert sharded <= whole, (text, sharded - whole)


def test_moves_between_layouts_have_the_bytes_of_their_plans(recorded: dict[str, Any]) -> None:
    assert len(recorded["moves"]) > 50
    for modelled, planned in recorded["moves"]:
        assert modelled == planned
    assert any(planned for _, planned in recorded["moves"])


def test_the_plan_is_as_fast_as_the_best_single_partition(recorded: dict[str, Any]) -> None:
    assert recorded["single"] == sorted(recorded["single"])
    assert recorded["best"][0] <= recorded["single"][0]
    assert [name for name, *_ in recorded["rows"]] == ["stem.0", "block.0", "model#1", "pool", "head"]


def test_less_memory_never_makes_a_step_faster(recorded: dict[str, Any]) -> None:
    seconds = [recorded["best"][0]]
    for time, memory, limit in recorded["limited"]:
        if time is None:
            assert memory > limit
        else:
            assert memory <= limit and time >= seconds[-1] - 1e-12
            seconds.append(time)
    assert len(seconds) > 1
