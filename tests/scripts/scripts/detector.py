"""A detector that keeps activations in attributes: averaged, fused, halved, saved as a whole module."""

from copy import deepcopy

import torch
from networks import Detector
from torch import nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

torch.manual_seed(6)
model = Detector()
for name, parameter in model.named_parameters():
    parameter.requires_grad = "norm.bias" not in name
model.eval()
model(torch.zeros(1, 3, 16, 16))  # a first look, as for strides
model.train()
average = deepcopy(model).eval()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, nesterov=True)
x, target = torch.rand(4, 3, 32, 32), torch.rand(4, 6, 16, 16)
for step in range(3):
    outputs = model(x)
    items = torch.stack([nn.functional.mse_loss(y, target[..., : y.shape[2], : y.shape[3]]) for y in outputs])
    items.sum().backward()
    nn.utils.clip_grad_norm_(model.parameters(), max_norm=10.0)
    optimizer.step()
    optimizer.zero_grad()
    state = model.state_dict()
    for key, value in average.state_dict().items():
        if value.dtype.is_floating_point:
            value *= 0.9
            value += 0.1 * state[key].detach()
    with torch.inference_mode():  # an evaluation of each epoch
        y = average.float()(x[:2])
        state = {key: value.flatten()[0].item() for key, value in average.state_dict().items()}
        print(tuple(y.shape), len(state), sum(p.detach().abs().sum().item() for p in average.parameters()))
    print(("%11.4g" * 2) % tuple(items.detach()), items.detach().cpu().numpy())
    saved = {"epoch": step, "model": None, "ema": deepcopy(average).half(), "optimizer": optimizer.state_dict()}
    torch.save(saved, "last.pt")
    torch.save(saved, "best.pt")
found = torch.load("best.pt", weights_only=False)["ema"].float().eval()
with torch.no_grad():
    boxes = found(x[:1])
    kept = boxes[0].T[boxes[0, 4] > 0.5]
    print(tuple(boxes.shape), f"{boxes.double().mean():.3f} {kept.shape[1]} {int(boxes[0, 4].argmax())}")
    plain = average(x[:1])
    average.conv = fuse_conv_bn_eval(average.conv, average.norm)
    delattr(average, "norm")
    fused = average(x[:1])
    print(f"fused {(fused - plain).abs().max() < 1e-4} {fused.mean():.5f}")
    print(f"float16 {deepcopy(average).half().float()(x[:1]).mean():.3f}")


class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)

    def forward(self, batch):
        y = self.conv(batch["images"])
        return nn.functional.cross_entropy(y, batch["masks"]) + (y * (batch["masks"] > 1)[:, None]).mean()


loss = Masked()({"images": x, "masks": torch.randint(4, (4, 32, 32))})
print(f"masks {loss.item():.5f}")
