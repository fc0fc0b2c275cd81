"""A learner with an optimizer of its own over lists of parameters, made before the model is first called."""

import pickle

import torch
from networks import classifier
from torch import nn


class Optimizer:
    def __init__(self, groups, lr):
        self.groups, self.lr, self.state = [list(group) for group in groups], lr, {}

    def all(self):
        return [(p, self.state.setdefault(p, {})) for group in self.groups for p in group if p.grad is not None]

    def step(self):
        with torch.no_grad():
            for p, state in self.all():
                state["average"] = state.get("average", torch.zeros_like(p)).mul_(0.9).add_(p.grad.data)
                p.data.mul_(1 - self.lr * 1e-2)
                p.data.add_(state["average"], alpha=-self.lr)

    def zero_grad(self):
        for p, _ in self.all():
            p.grad.detach_()
            p.grad.zero_()


class Learner:
    def __init__(self, model):
        self.model, self.losses, self.predictions = model, [], []
        self.optimizer = Optimizer([model[:4].parameters(), model[4:].parameters()], 0.05)

    def fit(self, x, labels):
        self.loss = nn.functional.cross_entropy(self.model(x), labels)
        self.loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(self.loss.detach().clone())


torch.manual_seed(8)
torch.set_default_dtype(torch.float64)
learner = Learner(classifier())
x, labels = torch.rand(8, 3, 16, 16), torch.randint(5, (8,))
for _ in range(4):
    learner.fit(x, labels)
    print(f"{learner.loss.item():.10f} {torch.stack(learner.losses).mean():.10f}")
for group in learner.optimizer.groups:
    print(len(group), *(f"{p.square().sum().item():.10f}" for p in group))
learner.model.eval()
with torch.no_grad():
    learner.predictions = learner.model(x).softmax(1)
states = [state["average"] for _, state in learner.optimizer.all()]
with open("export.pkl", "wb") as file:
    pickle.dump({"model": learner.model, "predictions": learner.predictions, "losses": learner.losses}, file)
torch.save({"model": learner.model.state_dict(), "opt": states}, "model.pth")
