"""What a program's own DTensors do, one line per operation: alone, or beside a distconv that is imported, that has run
a model, or that runs the program as a script.

    python own_dtensors.py alone|imported|used|script
"""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.experimental import implicit_replication
from torch.utils._debug_mode import DebugMode

warnings.simplefilter("ignore")
how = sys.argv[1]
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
if how != "alone":
    import distconv
if how in ("used", "script"):
    mesh = distconv.init("height=1")
    model = distconv.parallelize(torch.nn.Conv2d(2, 2, 3), mesh)
    model(torch.randn(1, 2, 4, 4)).sum().backward()
own = init_device_mesh("cpu", (1,), mesh_dim_names=("own",))


def make(*shape: int, p: Placement = Shard(0)) -> DTensor:  # noqa: B008
    values = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape) / 10 - 1
    return distribute_tensor(values, own, [p])


def assigned(x: DTensor) -> DTensor:
    x[0] = 5
    return x


def mixed(function: Callable[[], Any]) -> Any:
    with implicit_replication():
        return function()


def inferred(function: Callable[[], Any]) -> Any:
    with torch.inference_mode():
        return function()


def own_module() -> Any:
    """A module whose parameters the program has distributed itself, and a gradient of it."""
    torch.manual_seed(1)
    linear = distribute_module(torch.nn.Linear(4, 3), own)
    linear(make(2, 4)).sum().backward()
    return [linear(make(2, 4)), linear.weight.grad]


def gradient() -> Any:
    x = make(4, 4, p=Shard(1)).requires_grad_()
    x.flatten().square().sum().backward()
    return x.grad


def steps_in_python() -> Any:
    """How often torch's dispatch of DTensors leaves C++ for operators that it has seen before, and what is logged."""
    dispatcher: Any = DTensor._op_dispatcher
    unwrap, calls = dispatcher.unwrap_to_op_info, []
    x = make(4, 4)
    (x + x).relu().sum(0)
    dispatcher.unwrap_to_op_info = lambda *args, **kwargs: (calls.append(args[0]), unwrap(*args, **kwargs))[1]
    try:
        with DebugMode() as mode:
            (x + x).relu().sum(0)
    finally:
        del dispatcher.unwrap_to_op_info
    return [*map(str, calls), mode.debug_string()]


CASES: dict[str, Callable[[], Any]] = {
    "setitem": lambda: assigned(make(4, 4)),
    "setitem inner": lambda: assigned(make(4, 4, p=Shard(1))),
    "numpy": lambda: make(4, 4).numpy(),
    "tolist": lambda: make(4, 4).tolist(),
    "numpy rep": lambda: make(2, p=Replicate()).numpy(),
    "tolist scalar": lambda: make(4, 4).sum().tolist(),
    "format": lambda: f"{make(4, 4).sum():.3f}",
    "format plain": lambda: f"{make(1, p=Replicate())}",
    "item": lambda: make(4, 4).sum().item(),
    "sum": lambda: make(4, 4).sum(),
    "mean": lambda: make(4, 4).mean(0),
    "mixed mul": lambda: make(4, 4) * torch.ones(4, 4),
    "mixed fmod": lambda: torch.fmod(make(4, 4), torch.ones(4, 4)),
    "mixed scalar": lambda: make(4, 4) * torch.ones(()),
    "mixed matmul": lambda: make(4, 4) @ torch.ones(4, 4),
    "mixed in place": lambda: make(4, 4).add_(torch.ones(4, 4)),
    "mixed equal": lambda: torch.equal(make(4, 4), torch.ones(4, 4)),
    "mixed linear": lambda: F.linear(make(4, 4), torch.ones(4, 4)),
    "mixed out": lambda: torch.add(torch.ones(4, 4), torch.ones(4, 4), out=make(4, 4)),
    "out": lambda: torch.add(make(4, 4), make(4, 4), out=make(4, 4)),
    "implicit": lambda: mixed(lambda: make(4, 4) * torch.ones(4, 4)),
    "after implicit": lambda: make(4, 4) * torch.ones(4, 4),
    "in place": lambda: make(4, 4).mul_(2),
    "squeeze_": lambda: make(1, 4, p=Shard(1)).squeeze_(0),
    "view": lambda: make(4, 4, 4).flatten(1),
    "view merges": lambda: make(4, 4, 4, p=Shard(1)).flatten(0, 1),
    "softmax": lambda: make(4, 4).softmax(0),
    "conv": lambda: F.conv2d(make(1, 2, 4, 4, p=Shard(3)), make(2, 2, 3, 3, p=Replicate())),
    "pool": lambda: F.adaptive_avg_pool2d(make(1, 2, 4, 4, p=Shard(3)), 1),
    "max pool": lambda: F.max_pool2d(make(1, 2, 4, 4, p=Shard(3)), 2),
    "pad": lambda: F.pad(make(1, 2, 4, 4, p=Shard(3)), (1, 1, 1, 1), "circular"),
    "instance": lambda: F.instance_norm(make(1, 2, 4, 4, p=Shard(3))),
    "batch": lambda: F.batch_norm(make(2, 2, 4, 4, p=Shard(0)), None, None, training=True),
    "nll": lambda: F.cross_entropy(
        make(2, 3, 4), distribute_tensor(torch.ones(2, 4, dtype=torch.long), own, [Shard(0)])
    ),
    "median": lambda: make(4, 4).median(),
    "nonzero": lambda: make(4, 4).nonzero(),
    "index": lambda: make(4, 4)[make(4, 4) > 0],
    "slice": lambda: make(4, 4)[1:],
    "cat": lambda: torch.cat([make(4, 4), make(4, 4)]),
    "foreach": lambda: torch._foreach_add([make(4, 4)], [make(4, 4)]),
    "foreach mixed": lambda: torch._foreach_add([make(4, 4)], [torch.ones(4, 4)]),
    "norm": lambda: torch.nn.utils.get_total_norm([make(4, 4)]),
    "dropout": lambda: F.dropout(make(4, 4), 0.0),
    "topk": lambda: make(4, 4).topk(2),
    "inference": lambda: inferred(lambda: F.relu(F.linear(make(4, 4), make(4, 4))).flatten()),
    "module": lambda: torch.nn.Linear(4, 4)(make(4, 4)),
    "interp": lambda: F.interpolate(make(1, 2, 4, 4, p=Shard(0)), scale_factor=2),
    "own module": own_module,
    "grad": gradient,
    "steps in Python": steps_in_python,
    "size": lambda: make(4, 4).new_zeros(3),
}


def shown(result: Any) -> str:
    if isinstance(result, DTensor):
        return f"DTensor {tuple(result.shape)} {result.placements} {result.to_local().flatten().tolist()}"
    if isinstance(result, tuple | list):
        return str([shown(each) for each in result])
    return f"{type(result).__name__} {result}"


with distconv.distributed_script(mesh) if how == "script" else contextlib.nullcontext():
    for name, case in CASES.items():
        try:
            print(f"{name}: {shown(case())}".replace("\n", " "))
        except Exception as error:
            # torch words one error in two ways, with and without a colon, by the path that the operator takes.
            print(f"{name}: {type(error).__name__} {str(error).replace(': got', ' got').splitlines()[0][:100]}")
dist.destroy_process_group()  # whose threads would otherwise race with the end of the process
