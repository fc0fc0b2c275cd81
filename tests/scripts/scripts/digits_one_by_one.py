"""A network of 1989 on single samples: shared weights written out, own biases, evaluation over the whole set."""

import math

import torch
from torch import nn
from torch.nn import functional

torch.manual_seed(4)
torch.set_default_dtype(torch.float64)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        winit = lambda fan_in, *shape: (torch.rand(*shape) - 0.5) * 2 * 2.4 / math.sqrt(fan_in)  # noqa: E731
        self.H1w, self.H1b = nn.Parameter(winit(25, 12, 1, 5, 5)), nn.Parameter(torch.zeros(12, 8, 8))
        self.H2w, self.H2b = nn.Parameter(winit(200, 12, 8, 5, 5)), nn.Parameter(torch.zeros(12, 4, 4))
        self.H3w, self.H3b = nn.Parameter(winit(192, 192, 30)), nn.Parameter(torch.zeros(30))
        self.outw, self.outb = nn.Parameter(winit(30, 30, 10)), nn.Parameter(-torch.ones(10))

    def forward(self, x):
        x = functional.pad(x, (2, 2, 2, 2), "constant", -1.0)
        x = torch.tanh(functional.conv2d(x, self.H1w, stride=2) + self.H1b)
        x = functional.pad(x, (2, 2, 2, 2), "constant", -1.0)
        parts = [
            functional.conv2d(x[:, channels], self.H2w[4 * i : 4 * i + 4], stride=2)
            for i, channels in enumerate((slice(0, 8), slice(4, 12), [0, 1, 2, 3, 8, 9, 10, 11]))
        ]
        x = torch.tanh(torch.cat(parts, 1) + self.H2b)
        x = torch.tanh(x.flatten(start_dim=1) @ self.H3w + self.H3b)
        return torch.tanh(x @ self.outw + self.outb)


x = torch.rand(12, 1, 16, 16) * 2 - 1
y = torch.where(functional.one_hot(torch.randint(10, (12,)), 10) > 0, 1.0, -1.0)
model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.03)
for _ in range(2):
    model.train()
    for step in range(12):
        xs, ys = x[[step]], y[[step]]
        loss = torch.mean((ys - model(xs)) ** 2)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
    model.eval()
    yhat = model(x)
    loss, error = torch.mean((y - yhat) ** 2), torch.mean((y.argmax(dim=1) != yhat.argmax(dim=1)).float())
    print(f"eval: loss {loss.item():e}. error: {error.item() * 100:.2f}%. misses: {int(error.item() * y.size(0))}")
torch.save(model.state_dict(), "model.pt")
