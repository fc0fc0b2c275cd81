"""A framework's own Adam over lists of gradients, which no optimizer of torch reads."""

import torch
from networks import classifier
from torch import nn

torch.manual_seed(10)
torch.set_default_dtype(torch.float64)
model = classifier()
variables = [p for p in model.parameters() if p.requires_grad]
momenta, velocities = ([torch.zeros_like(v) for v in variables] for _ in range(2))
x, labels = torch.rand(8, 3, 16, 16), torch.randint(5, (8,))
for step in range(1, 5):
    model.zero_grad()
    loss = nn.functional.cross_entropy(model(x), labels)
    loss.backward()
    with torch.no_grad():
        gradients = [v.grad for v in variables]
        gradients = torch._foreach_mul(gradients, 0.5)
        norm = torch.stack([torch.sum(g * g) for g in gradients]).sum().sqrt()
        gradients = torch._foreach_mul(gradients, float(torch.clamp(1.0 / norm, max=1.0)))
        torch._foreach_mul_(momenta, 0.9)
        torch._foreach_add_(momenta, torch._foreach_mul(gradients, 0.1))
        torch._foreach_mul_(velocities, 0.999)
        torch._foreach_add_(velocities, torch._foreach_mul(torch._foreach_mul(gradients, gradients), 0.001))
        rate = 0.01 * (1 - 0.999**step) ** 0.5 / (1 - 0.9**step)
        changes = torch._foreach_div(
            torch._foreach_mul(momenta, rate), torch._foreach_add(torch._foreach_sqrt(velocities), 1e-7)
        )
        torch._foreach_add_(variables, torch._foreach_mul(changes, -1))
    print(f"loss {loss.item():.10f} norm {norm:.10f}")
print(f"weights {sum(v.abs().sum().item() for v in variables):.10f}")
