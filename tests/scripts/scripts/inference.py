"""Inference: a prediction is printed, read as an array, a list and a table, and sorted."""

import numpy as np
import torch
from networks import UNet, classifier

torch.manual_seed(14)
torch.set_default_dtype(torch.float64)
model, names = classifier(channels=16).eval(), ["ant", "bee", "cat", "dog", "emu"]
x = torch.rand(4, 3, 16, 16)
y = model(x)
print(y)
print(y.detach().numpy().round(6))
with torch.no_grad():
    y = model(x)
print(y, y.shape, y.dtype, y.device, y.requires_grad, isinstance(y, torch.Tensor))
print(repr(y[0]), y[0].tolist(), len(y), y[1, 2])
probabilities = y.softmax(1)
values, indices = torch.topk(probabilities, 2)
for value, index in zip(values, indices, strict=True):
    print(*(f"{names[i]}: {100 * v.item():.4f}%" for v, i in zip(value, index, strict=True)))
print([names[int(i)] for i in probabilities.argmax(1)], names[probabilities[0].argmax()])
print(np.asarray(y).sum(), np.array(y.numpy()).mean(), np.argmax(y, axis=1), np.max(probabilities.numpy(), 1))
print(y.sort(dim=1, descending=True).values[0], y.unique().numel(), y.median(), torch.quantile(y, 0.25), y.std())
for row in y:
    print(row.max().item(), end=" ")
print(torch.equal(y, y.clone()), torch.allclose(y, model(x)), (y > 0).any(), bool((y > 100).any()), y.numel() == 20)
segmented = UNet().double().eval()(x)
labels = segmented.argmax(1).byte().cpu().numpy()
print(labels.shape, np.unique(labels, return_counts=True), segmented.detach().mean((0, 2, 3)))
print(segmented)
np.save("labels.npy", labels)
np.savetxt("scores.csv", y, delimiter=",")
