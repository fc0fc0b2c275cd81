"""What a model costs, asked before it is trained: thop, fvcore, torch's own counter and torchinfo."""

from copy import deepcopy

import thop
import torch
import torchinfo
from fvcore.nn import FlopCountAnalysis
from networks import classifier
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

torch.manual_seed(12)
model = classifier()
counted, parameters = thop.profile(deepcopy(model), inputs=[torch.empty(1, 3, 16, 16)], verbose=False)
print(f"thop {counted:.0f} {parameters:.0f}")
print(f"fvcore {FlopCountAnalysis(model, torch.empty((1, 3, 16, 16))).unsupported_ops_warnings(False).total()}")
with FlopCounterMode(display=False) as counter, torch.no_grad():
    model(torch.empty(2, 3, 16, 16))
print(f"flop_counter {counter.get_total_flops()}")
print(torchinfo.summary(model, input_size=(4, 3, 16, 16), verbose=0, device="cpu"))
print(torchinfo.summary(model, input_data=torch.rand(4, 3, 16, 16), verbose=0))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(torch.rand(4, 3, 16, 16)), torch.randint(5, (4,)))
    loss.backward()
    optimizer.step()
    print(f"loss {loss.item():.5f}")
