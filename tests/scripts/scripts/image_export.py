"""A diffusion pipeline: a moving average of the weights makes images, which numpy and PIL write."""

import copy

import torch
from networks import UNet
from PIL import Image
from torch import nn

torch.manual_seed(0)
model = UNet(3, 3)
average = copy.deepcopy(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for step in range(3):
    clean, noise = torch.rand(4, 3, 16, 16) * 2 - 1, torch.randn(4, 3, 16, 16)
    loss = nn.functional.mse_loss(model(clean + 0.1 * step * noise), noise)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        for kept, new in zip(average.parameters(), model.parameters(), strict=True):
            kept.sub_(0.5 * (kept - new))
    print(f"step {step} loss {loss.detach().item():.6f}")
average.eval()
with torch.no_grad():
    image = torch.randn(4, 3, 16, 16)
    for _ in range(2):
        image = image - 0.5 * average(image)
image = (image / 2 + 0.5).clamp(0, 1)
images = image.cpu().permute(0, 2, 3, 1).numpy()
print(images.dtype, images.shape, f"{images.mean():.5f} {images.std():.5f}")
for index, each in enumerate((images * 255).round().astype("uint8")):
    Image.fromarray(each).save(f"image{index}.png")
torch.save({"unet": model.state_dict(), "average": average.state_dict()}, "weights.pt")
