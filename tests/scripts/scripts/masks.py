"""Tensors of more than 1 MiB chosen from by masks, sorted, counted and changed in place after a model's call."""

import torch
from networks import UNet
from torch import nn

torch.manual_seed(21)
torch.set_default_dtype(torch.float64)
model = UNet()
x = torch.rand(4, 3, 192, 192)
y = model(x)
mask = y > y.mean()
print(mask.sum().item(), y[mask].sum().item(), y[~mask].mean().item(), torch.masked_select(y, mask).numel())
hard = nn.functional.cross_entropy(y, (x[:, 0] > 0.5).long(), reduction="none")
worst, _ = torch.sort(hard.flatten(), descending=True)
loss = worst[: worst.numel() // 4].mean() + hard[hard > hard.median()].mean()  # hard examples alone
loss.backward()
print(f"loss {loss.item():.10f} {sum(p.grad.abs().sum().item() for p in model.parameters()):.7f}")
with torch.no_grad():
    y = model(x)
    print(torch.nonzero(y > 0.5).sum().item(), torch.histc(y, 8).tolist(), torch.unique((y * 4).round()).tolist())
    print(
        torch.bincount(y.argmax(1).flatten()).tolist(),
        torch.quantile(y[0], 0.9).item(),
        y.flatten().cumsum(0)[-1].item(),
    )
    y[y < 0] = 0
    y[:, 0][x[:, 0] > 0.9] = 1.5
    y.clamp_(max=2)
    print(y.sum().item(), y.flatten().topk(3).values.tolist(), y.view(-1)[::5000].tolist()[:4])
    order = y.mean((1, 2, 3)).argsort()
    print(order.tolist(), y[order].flatten()[7].item(), y[order[0], 1, 5, 7].item())
    print(torch.where(y > 1)[0].bincount(minlength=4).tolist(), y.roll(1, 0).flip(2)[0, 0, 0, :3].tolist())
