"""What is replaced in torch while distconv runs a model, and what is left of that after `distconv.shutdown`.

Prints a line for each attribute of torch that is another one after the end, and for each fault in what runs then.
"""

from __future__ import annotations

import importlib
import json
import sys
import warnings
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.nn.modules.module import _global_parameter_registration_hooks
from torch.optim.optimizer import _global_optimizer_pre_hooks

for name in ("torch.distributed.tensor", "torch.utils.checkpoint", "torch._dynamo", "torch._inductor.compile_fx"):
    importlib.import_module(name)
KINDS = (type(len), type(lambda: 0), type, property, classmethod, staticmethod, type(Tensor.add), type(Tensor.__le__))


def owners() -> dict[str, Any]:
    """The modules of torch, their classes, and the object that dispatches operators on DTensors."""
    found: dict[str, Any] = {"dispatcher": DTensor._op_dispatcher}
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "torch" and isinstance(module, ModuleType):
            found[name] = module
            for value in list(vars(module).values()):
                if isinstance(value, type) and value.__module__.partition(".")[0] == "torch":
                    found[f"{value.__module__}.{value.__qualname__}"] = value
    return found


def attributes() -> dict[tuple[str, str], Any]:
    return {
        (of, name): value
        for of, owner in owners().items()
        for name, value in list(vars(owner).items())
        if isinstance(value, KINDS) or name in ("_world", "rand_ops")
    }


def hooks() -> int:
    return len(_global_parameter_registration_hooks) + len(_global_optimizer_pre_hooks)


def step(distconv: Any) -> list[Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(64, 2))
    optimizer = torch.optim.Adam(model.parameters())
    x = torch.arange(32.0).view(1, 2, 4, 4) / 32
    if distconv is not None:
        mesh = distconv.init("height=1")
        model = distconv.parallelize(model, mesh)
    y = model(x)
    assert isinstance(y, DTensor) == (distconv is not None)
    y.square().sum().backward()
    optimizer.step()
    if distconv is not None:
        turned = distconv.in_turn(nn.Conv2d(2, 2, 3, padding=1), "height=2")
        turned(x).sum().backward()
        if Tensor.data.__set__ not in importlib.import_module("distconv.turns.writes")._assigned():  # type: ignore[attr-defined]
            print("writes to .data are not seen")
    return [p.detach().clone() for p in model.parameters()]


plain = step(None)
warnings.simplefilter("ignore")
before, rules = attributes(), set(torch.library._impls)
warnings.simplefilter("error", UserWarning)
import distconv  # noqa: E402
from distconv.rules.registrations import registrations, singleton  # noqa: E402
from distconv.tensors.replacements import owner_name, replaced  # noqa: E402

for way in ("shutdown", "shutdown", "patched"):
    if way == "patched":
        with distconv.patched("height=1") as mesh:
            trained = step(distconv)
            seen = replaced()
            own = distribute_tensor(torch.ones(2), mesh, [Replicate()])
    else:
        trained = step(distconv)
        seen = replaced()
        distconv.shutdown()
    for ours, theirs in zip(trained, plain, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    after = attributes()
    for key, value in before.items():
        if key not in after or after[key] is not value:
            print("another", *key)
    for key in after.keys() - before.keys():
        if any((owner_name(owner), name) == key for owner, name in seen):
            print("new", *key)
    if replaced() or len(seen) < 20:
        print("not counted", len(seen), replaced())
    if hooks():
        print("hooks", hooks())
    for name in registrations.names:
        if DTensor in singleton.find(name).torch_dispatch_rules._data or "find" in vars(
            singleton.find(name).torch_dispatch_rules
        ):
            print("rule", name)
    left = {each for each in torch.library._impls - rules if "/Autograd" in each and each.startswith("aten")}
    if left:
        print("kernels", left)
    for ours, theirs in zip(step(None), plain, strict=True):
        assert torch.equal(ours, theirs)
assert torch.equal((own + own).to_local(), torch.full((2,), 2.0))  # by torch
try:
    own + torch.ones(2)
    print("plain tensors still mix")
except RuntimeError:
    pass
print(json.dumps(sorted({(owner_name(owner), name) for owner, name in seen})))
dist.destroy_process_group()
