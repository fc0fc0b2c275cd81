"""A classification recipe: warm-up before a cosine schedule, MixUp, label smoothing, an averaged model, checkpoints."""

import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset, default_collate

CLASSES = 5


class Block(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(channels)
        self.second = nn.Conv2d(channels, channels, 3, padding=1, bias=False)

    def forward(self, x):
        return (x + self.second(self.norm(self.first(x)).relu())).relu()


def mixed(samples):
    """A batch in which every sample is a mixture of two."""
    images, labels = default_collate(samples)
    targets = nn.functional.one_hot(labels, CLASSES).to(images.dtype)
    share = torch.distributions.Beta(0.2, 0.2).sample().to(images.dtype)
    return images.roll(1, 0) * (1 - share) + images * share, targets.roll(1, 0) * (1 - share) + targets * share


def accuracy(model, loader):
    model.eval()
    right = [(model(images).argmax(1) == labels).double().mean() for images, labels in loader]
    return torch.stack(right).mean().item()


torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
data = TensorDataset(torch.randn(16, 3, 12, 12), torch.randint(CLASSES, (16,)))
train = DataLoader(data, batch_size=4, shuffle=True, drop_last=True, collate_fn=mixed)
check = DataLoader(data, batch_size=8)
model = nn.Sequential(
    nn.Conv2d(3, 8, 3, padding=1),
    Block(8),
    nn.MaxPool2d(2),
    Block(8),
    nn.AdaptiveAvgPool2d(1),
    nn.Flatten(),
    nn.Dropout(0.0),
    nn.Linear(8, CLASSES),
)
criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
decayed = [p for p in model.parameters() if p.ndim > 1]
others = [p for p in model.parameters() if p.ndim <= 1]
optimizer = torch.optim.SGD(
    [{"params": decayed, "weight_decay": 1e-3}, {"params": others, "weight_decay": 0.0}],
    lr=0.1,
    momentum=0.9,
    nesterov=True,
)
schedule = SequentialLR(optimizer, [LinearLR(optimizer, 0.1, total_iters=1), CosineAnnealingLR(optimizer, 2)], [1])
average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
for epoch in range(3):
    model.train()
    for step, (images, targets) in enumerate(train):
        loss = criterion(model(images), targets)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 2 == 0:
            average.update_parameters(model)
            if epoch == 0:
                average.n_averaged.fill_(0)
        print(f"loss {loss.item():.8f}")
    schedule.step()
    with torch.inference_mode():
        print(f"accuracy {accuracy(model, check):.4f} {accuracy(average, check):.4f}")
    torch.save(
        {
            "model": model.state_dict(),
            "average": average.state_dict(),
            "optimizer": optimizer.state_dict(),
            "schedule": schedule.state_dict(),
            "epoch": epoch,
        },
        "checkpoint.pt",
    )
kept = torch.load("checkpoint.pt", weights_only=True)
print(f"weights {sum(v.double().abs().sum().item() for v in kept['average'].values()):.8f}")
average.load_state_dict(kept["average"])
model.load_state_dict(kept["model"])
optimizer.load_state_dict(kept["optimizer"])
loss = criterion(model(data.tensors[0]), data.tensors[1])
loss.backward()
optimizer.step()
print(f"loss {loss.item():.8f}")
