"""A step under torch's profiler, with a schedule and a table, and under a counter of memory."""

import torch
from networks import classifier
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function, schedule

torch.manual_seed(16)
model = classifier()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
seen = []


def ready(profiler):
    table = profiler.key_averages().table(sort_by="cpu_time_total", row_limit=5)
    names = {event.key for event in profiler.key_averages()}
    seen.append((len(table) > 100, "forward" in names, "backward" in names))
    profiler.export_chrome_trace("trace.json")


plan = schedule(wait=1, warmup=1, active=2, repeat=1)
with profile(
    activities=[ProfilerActivity.CPU], schedule=plan, on_trace_ready=ready, record_shapes=True, profile_memory=True
) as profiler:
    for _ in range(4):
        x, labels = torch.rand(4, 3, 16, 16), torch.randint(5, (4,))
        with record_function("forward"):
            loss = nn.functional.cross_entropy(model(x), labels)
        with record_function("backward"):
            optimizer.zero_grad()
            loss.backward()
        optimizer.step()
        profiler.step()
        print(f"loss {loss.item():.5f}")
print(seen)
with torch.autograd.profiler.profile() as again, torch.no_grad():
    model(torch.rand(4, 3, 16, 16))
print(again.total_average().count > 0)
