"""A graph for TensorBoard and a traced model before training, a traced and an exported one after it."""

import torch
from networks import classifier
from torch import nn
from torch.utils.tensorboard import SummaryWriter

torch.manual_seed(7)
network = classifier()
writer = SummaryWriter("runs")
writer.add_graph(network, torch.Tensor(1, 3, 16, 16).zero_())
first = torch.jit.trace(network.eval(), torch.rand(2, 3, 16, 16))
network.train()
optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
for step in range(3):
    x, labels = torch.rand(4, 3, 16, 16), torch.randint(5, (4,))
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(network(x), labels)
    loss.backward()
    optimizer.step()
    writer.add_scalar("loss", loss, step)
    for name, parameter in network.named_parameters():
        writer.add_histogram(name, parameter, step)
        writer.add_histogram(f"{name}/gradient", parameter.grad, step)
    last = list(network.children())[-1]
    writer.add_scalar("norm", last.weight.grad.norm(), step)
    print(f"loss {loss.item():.5f}")
writer.add_images("inputs", x, 0)
writer.close()
network.eval()
x = torch.rand(4, 3, 16, 16)
with torch.no_grad():
    y = network(x)
    traced = torch.jit.trace(network, x)
    traced.save("traced.pt")
    exported = torch.export.export(network, (x,))
    for each in (first, traced, exported.module()):
        print(f"{(each(x) - y).abs().max() < 1e-5} {each(x).double().square().mean().item():.5f}")
