"""Early stopping: the best weights kept as a deep copy, a checkpoint resumed, SWA, weights initialised late."""

import copy

import torch
from networks import classifier
from torch import nn

torch.manual_seed(23)
torch.set_default_dtype(torch.float64)
model = classifier()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
x, labels = torch.rand(8, 3, 16, 16), torch.randint(5, (8,))


def weights_init(module):
    if isinstance(module, nn.Conv2d):
        nn.init.normal_(module.weight.data, 0.0, 0.1)
    elif isinstance(module, nn.BatchNorm2d):
        nn.init.constant_(module.bias.data, 0.1)


def epoch():
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(x), labels)
    loss.backward()
    optimizer.step()
    return loss


print(f"first {epoch():.8f}")
model.apply(weights_init)  # after a call, and after the optimizer was made
schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
best, best_loss, best_model = None, float("inf"), None
for index in range(4):
    loss = epoch()
    schedule.step(loss)
    if loss < best_loss:
        best, best_loss, best_model = copy.deepcopy(model.state_dict()), loss, copy.deepcopy(model)
        torch.save({"epoch": index, "model": best, "optimizer": optimizer.state_dict(), "loss": loss}, "best.pth")
    with torch.no_grad():
        for p in model.parameters():
            p.data.clamp_(-0.5, 0.5)
    print(f"{index} {loss.item():.8f} {best_loss.item():.8f} {optimizer.param_groups[0]['lr']:.6f}")
total = sum(p.numel() for p in model.parameters())
norms = {name: p.detach().norm().item() for name, p in model.named_parameters()}
print(total, *(f"{norm:.8f}" for norm in norms.values()), *(tuple(p.shape) for p in model.parameters()))
state = torch.load("best.pth", weights_only=False)
model.load_state_dict(state["model"])
optimizer.load_state_dict(state["optimizer"])
print(f"resumed {epoch().item():.8f} {nn.functional.cross_entropy(best_model(x), labels).item():.8f}")
vector = nn.utils.parameters_to_vector(model.parameters())
nn.utils.vector_to_parameters(vector * 0.9, model.parameters())
print(f"shrunk {nn.functional.cross_entropy(model(x), labels).item():.8f} {vector.norm().item():.8f}")
