"""Hooks that collect activations and gradients as arrays, and a class activation map made of them."""

import numpy as np
import torch
from networks import classifier
from torch import nn

torch.manual_seed(15)
torch.set_default_dtype(torch.float64)
model = classifier()
features, statistics, kept = {}, [], {}


def collect(name):
    def hook(module, inputs, output):
        features[name] = output.detach().cpu().numpy()
        statistics.append((name, tuple(output.shape), output.mean().item(), inputs[0].std().item()))

    return hook


handles = [layer.register_forward_hook(collect(str(i))) for i, layer in enumerate(model)]
handles.append(model[4].register_forward_hook(lambda module, inputs, output: kept.update(activation=output)))
handles.append(model[4].register_full_backward_hook(lambda module, given, got: kept.update(gradient=got[0])))
x = torch.rand(4, 3, 16, 16)
scores = model(x)
scores[range(4), scores.argmax(1)].sum().backward()
for name, shape, mean, deviation in statistics:
    print(name, *shape, f"{mean:.9f} {deviation:.9f}")
activation, gradient = kept["activation"].detach(), kept["gradient"]
weights = gradient.mean(dim=(2, 3), keepdim=True)
cam = nn.functional.relu((weights * activation).sum(1, keepdim=True))
cam = nn.functional.interpolate(cam, size=(16, 16), mode="bilinear", align_corners=False)
cam = cam.cpu().numpy()
cam = (cam - cam.min()) / (cam.max() - cam.min())
print(f"cam {cam.mean():.9f} {np.percentile(cam, 90):.9f}")
np.savez("features.npz", cam=cam, **{f"layer{name}": value for name, value in features.items()})
for handle in handles:
    handle.remove()
kept.clear()
features.clear()
statistics.clear()
model(x)
print("removed", len(features), len(statistics))
