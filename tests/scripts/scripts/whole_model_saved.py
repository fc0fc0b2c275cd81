"""Super resolution: the whole model is saved after each epoch, and loaded to enlarge a picture."""

from math import log10

import numpy as np
import torch
from networks import SuperResolution
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(5)
large = torch.rand(10, 1, 16, 16)
data = TensorDataset(nn.functional.avg_pool2d(large, 2), large)
training, testing = DataLoader(data, batch_size=4, shuffle=True), DataLoader(data, batch_size=3)
model, criterion = SuperResolution(), nn.MSELoss()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for epoch in range(1, 3):
    for iteration, (inputs, target) in enumerate(training, 1):
        optimizer.zero_grad()
        loss = criterion(model(inputs), target)
        loss.backward()
        optimizer.step()
        print(f"===> Epoch[{epoch}]({iteration}/{len(training)}): Loss: {loss.item():.6f}")
    with torch.no_grad():
        psnr = [10 * log10(1 / criterion(model(inputs), target).item()) for inputs, target in testing]
    print(f"===> Avg. PSNR: {sum(psnr) / len(psnr):.5f} dB")
    torch.save(model, f"model_epoch_{epoch}.pth")
again = torch.load("model_epoch_2.pth", weights_only=False)
out = again(data.tensors[0][:1]).cpu()
picture = (out[0].detach().numpy() * 255.0).clip(0, 255)
Image.fromarray(np.uint8(picture[0]), mode="L").save("out.png")
print(f"pixel mean {picture.mean():.4f}")
