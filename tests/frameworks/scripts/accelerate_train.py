"""Accelerate: prepared model, optimizer, loaders and schedule; gradients accumulated and clipped; states saved."""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

set_seed(0)
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
accelerator.print(f"processes {accelerator.num_processes} {accelerator.is_main_process} {accelerator.distributed_type}")
data = TensorDataset(torch.randn(16, 3, 12, 12), torch.randint(5, (16,)))
model = nn.Sequential(
    nn.Conv2d(3, 8, 3, padding=1, bias=False),
    nn.BatchNorm2d(8),
    nn.ReLU(),
    nn.AdaptiveAvgPool2d(2),
    nn.Flatten(),
    nn.Linear(32, 5),
)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 8)
model, optimizer, train, check, schedule = accelerator.prepare(
    model, optimizer, DataLoader(data, batch_size=4, shuffle=True), DataLoader(data, batch_size=8), schedule
)
for epoch in range(2):
    model.train()
    for x, labels in train:
        with accelerator.accumulate(model):
            loss = nn.functional.cross_entropy(model(x), labels)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        accelerator.print(f"loss {loss.item():.8f}")
    if epoch == 0:
        accelerator.save_state("state")
    model.eval()
    right, total = 0, 0
    with torch.no_grad():
        for x, labels in check:
            answers, labels = accelerator.gather_for_metrics((model(x).argmax(1), labels))
            right, total = right + (answers == labels).sum().item(), total + len(labels)
    accelerator.print(f"right {right} of {total}")
accelerator.load_state("state")
model.eval()
with torch.no_grad():
    outputs = torch.cat([model(x) for x, _ in check])
accelerator.print(f"again {outputs.double().abs().sum().item():.6f}")
accelerator.save_model(accelerator.unwrap_model(model), "model")
