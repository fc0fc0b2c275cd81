"""Style transfer: Gram matrices of a frozen network's features; the picture is what is optimised."""

import torch
from torch import nn

torch.manual_seed(24)
torch.set_default_dtype(torch.float64)
features = (
    nn.Sequential(*(nn.Conv2d(a, b, 3, padding=1) for a, b in ((3, 8), (8, 8), (8, 16)))).eval().requires_grad_(False)
)
content, style = torch.rand(1, 3, 16, 16), torch.rand(1, 3, 16, 16)


def extract(x):
    found = []
    for layer in features:
        x = nn.functional.relu(layer(x))
        found.append(x)
    return found


def gram(y):
    b, c, h, w = y.size()
    flat = y.view(b, c, h * w)
    return flat.bmm(flat.transpose(1, 2)) / (c * h * w)


targets, kept = [gram(y).detach() for y in extract(style)], extract(content)[1].detach()
picture = content.clone().requires_grad_(True)
optimizer = torch.optim.LBFGS([picture], max_iter=4)
count = [0]


def closure():
    with torch.no_grad():
        picture.clamp_(0, 1)
    optimizer.zero_grad()
    found = extract(picture)
    loss_style = sum(nn.functional.mse_loss(gram(y), g) for y, g in zip(found, targets, strict=True))
    loss = 1e4 * loss_style + nn.functional.mse_loss(found[1], kept)
    loss.backward()
    count[0] += 1
    print(f"run {count} style {loss_style.item():4f} total {loss.item():4f}")
    return loss


for _ in range(2):
    optimizer.step(closure)
print(f"picture {picture.detach().mean():.6f} {picture.grad.abs().max():.6f}")
