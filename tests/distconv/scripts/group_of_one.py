"""Trains as scripts do that also run without a launcher: in a process group of one process."""

import copy
import os

import torch
import torch.distributed as dist
import torch.distributed.nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

print(dist.is_initialized(), dist.group.WORLD)
os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="0", RANK="0", WORLD_SIZE="1")
dist.init_process_group("gloo", init_method="env://")
print(dist.is_initialized(), dist.get_rank(), dist.get_world_size(dist.group.WORLD), dist.get_backend())
torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
model = torch.nn.Sequential(torch.nn.Conv2d(2, 3, 3, padding=1), torch.nn.BatchNorm2d(3))
for parameter in model.parameters():
    dist.broadcast(parameter.data, 0)
model = DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = torch.randn(4, 2, 6, 6)
found = []
for x in DataLoader(data, batch_size=2, sampler=DistributedSampler(data)):  # type: ignore[arg-type]
    y = model(x)
    loss = (y.sigmoid() - x.mean()).square().mean()
    loss.backward()
    optimizer.step()
    dist.all_reduce(loss.detach(), async_op=True).wait()
    outputs = [torch.empty_like(y)]
    dist.all_gather(outputs, y.detach())
    objects = [None]
    dist.all_gather_object(objects, "done")
    (again,) = torch.distributed.nn.all_gather(y)
    found += [f"{number.item():.10f}" for number in (loss, outputs[0].norm(), again.norm())] + objects
print(*found, *model.state_dict())
mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("a", "b"))
dist.all_reduce(ones := torch.ones(1), group=mesh.get_group("b"))
print(mesh.size(), mesh["a"].get_local_rank(), ones.item())
wide, x = torch.nn.Conv2d(2, 3, 3), torch.ones(1, 2, 6, 6)
whole = wide(x).square().sum()
for alone in (fully_shard(copy.deepcopy(wide)), FullyShardedDataParallel(copy.deepcopy(wide), device_id="cpu")):
    loss = alone(x).square().sum()
    loss.backward()
    print(torch.equal(loss, whole), *(tuple(value.shape) for value in alone.state_dict().values()))
print(*(tuple(p.to_local().shape) for p in fully_shard(wide).parameters()))
dist.destroy_process_group()
print(dist.is_initialized())
