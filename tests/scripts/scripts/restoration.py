"""Image restoration: a moving average under its own names, validation image by image, PSNR in numpy."""

import math
from copy import deepcopy

import numpy as np
import torch
from networks import SuperResolution
from PIL import Image
from torch import nn


def to_image(tensor):
    result = []
    for each in tensor if isinstance(tensor, list) else [tensor]:
        each = each.squeeze(0).float().detach().cpu().clamp_(0, 1)
        result.append((each.numpy().transpose(1, 2, 0) * 255.0).round().astype(np.uint8))
    return result[0] if len(result) == 1 else result


torch.manual_seed(1)
network = SuperResolution()
averaged = deepcopy(network).eval()
optimizer = torch.optim.Adam(network.parameters(), lr=1e-3)
large = torch.rand(6, 1, 16, 16)
small = nn.functional.avg_pool2d(large, 2)
for _ in range(4):
    optimizer.zero_grad()
    losses = {"pixel": nn.functional.l1_loss(network(small[:4]), large[:4])}
    sum(losses.values()).backward()
    optimizer.step()
    names, kept = dict(network.named_parameters()), dict(averaged.named_parameters())
    for name in kept:
        kept[name].data.mul_(0.9).add_(names[name].data, alpha=0.1)
    print({name: round(value.item(), 6) for name, value in losses.items()})
for index in range(2):
    averaged.eval()
    with torch.no_grad():
        output = averaged(small[index : index + 1])
    picture, truth = to_image([output]), to_image([large[index : index + 1]])
    error = np.mean((picture.astype(np.float64) - truth.astype(np.float64)) ** 2)
    print(f"image {index} psnr {10 * math.log10(255.0**2 / error):.3f}")
    Image.fromarray(picture[..., 0]).save(f"restored{index}.png")
states = {"params": network.state_dict(), "params_ema": averaged.state_dict()}
torch.save({name: {key: value.cpu() for key, value in state.items()} for name, state in states.items()}, "net.pth")
torch.save({"iter": 4, "optimizers": [optimizer.state_dict()]}, "4.state")
