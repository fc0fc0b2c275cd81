"""Segmentation with a dashboard: histograms of weights and gradients, an image, a Dice score in an f-string."""

import logging
import sys

import numpy as np
import torch
from networks import UNet
from torch import nn

logging.basicConfig(stream=sys.stdout, format="%(levelname)s: %(message)s", level=logging.INFO)
torch.manual_seed(2)
torch.set_default_dtype(torch.float64)
model = UNet(channels=8)
optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-4, weight_decay=1e-8, momentum=0.9, foreach=True)
images, masks = torch.rand(8, 3, 16, 16), torch.randint(2, (8, 16, 16))


def dice(one, other):
    return ((2 * (one * other).sum((-1, -2)) + 1e-6) / (one.sum((-1, -2)) + other.sum((-1, -2)) + 1e-6)).mean()


for epoch in range(2):
    epoch_loss = 0
    for x, mask in zip(images.split(4), masks.split(4), strict=True):
        predicted = model(x)
        wanted = nn.functional.one_hot(mask, 2).permute(0, 3, 1, 2).double()
        loss = nn.functional.cross_entropy(predicted, mask)
        loss += 1 - dice(nn.functional.softmax(predicted, 1).flatten(0, 1), wanted.flatten(0, 1))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        epoch_loss += loss.item()
    for tag, value in model.named_parameters():
        if not (torch.isinf(value) | torch.isnan(value)).any():
            counts, _ = np.histogram(value.data.cpu(), 4)
            gradients, edges = np.histogram(value.grad.data.cpu().tolist(), 4)
            print(tag.replace(".", "/"), *counts, *gradients, *(f"{edge:.9f}" for edge in edges))
    model.eval()
    with torch.no_grad():
        pairs = zip(images.split(1), masks.split(1), strict=True)
        score = sum(dice(model(x).argmax(1).double(), mask.double()) for x, mask in pairs) / 8
    model.train()
    logging.info(f"Epoch {epoch} loss {epoch_loss:.9f}")
    logging.info(f"Validation Dice score: {score}")
    logging.info("Validation Dice score: %s", score)
    shown = predicted.argmax(dim=1)[0].float().cpu()
    np.save(f"mask{epoch}.npy", shown)
    torch.save(model.state_dict() | {"mask_values": [0, 1]}, f"checkpoint_epoch{epoch}.pth")
