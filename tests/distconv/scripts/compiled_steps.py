"""A script that compiles functions of its own, with all that a step does in them. It prints what each step gives."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def made() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8))
    net.double()
    return net, torch.optim.Adam(net.parameters(), 1e-2, eps=1e-3)


def loss_of(net: nn.Module, x: Tensor) -> Tensor:
    penalty = sum(parameter.square().sum() for parameter in net.parameters())
    return F.smooth_l1_loss(net(x), x.mean((1, 2, 3), keepdim=True).expand(-1, 8, 32, 32)) + 1e-3 * penalty


def whole_step(net: nn.Module, optimizer: torch.optim.Optimizer) -> object:
    @torch.compile(backend="eager")
    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(net, x)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        optimizer.step()
        return loss.detach() + norm

    return step


def one_graph(net: nn.Module, optimizer: torch.optim.Optimizer) -> object:
    forward = torch.compile(lambda x: loss_of(net, x), backend="eager", fullgraph=True)
    update = torch.compile(optimizer.step, backend="eager")

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = forward(x)
        loss.backward()
        update()
        return loss.detach()

    return step


def compiled_backward(net: nn.Module, optimizer: torch.optim.Optimizer) -> object:
    def loss_and_gradients(x: Tensor) -> Tensor:
        loss = loss_of(net, x)
        loss.backward()
        return loss.detach()

    with torch._dynamo.config.patch(compiled_autograd=True):
        compiled = torch.compile(loss_and_gradients, backend="eager")

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = compiled(x)
        optimizer.step()
        return loss

    return step


for make in (whole_step, one_graph, compiled_backward):
    net, optimizer = made()
    step = make(net, optimizer)
    for _ in range(3):
        print(f"{step(torch.randn(4, 3, 32, 32).double()).item():.12g}")
    print(f"{sum(parameter.abs().sum().item() for parameter in net.parameters()):.12g}")
