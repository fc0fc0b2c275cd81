"""Results, models and optimizers written by pickle, joblib, cloudpickle and torch.save, deep within objects."""

import copy
import pickle
from types import SimpleNamespace

import cloudpickle
import joblib
import torch
from networks import Detector, classifier
from torch import nn

torch.manual_seed(19)
model = classifier()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
x, labels = torch.rand(4, 3, 16, 16), torch.randint(5, (4,))
history = []
for _ in range(2):
    output = model(x)
    loss = nn.functional.cross_entropy(output, labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    history.append({"loss": loss.detach(), "output": output.detach(), "item": loss.item()})
model.features = model[:4](x).detach()  # an activation in an attribute
gradients = {name: p.grad for name, p in model.named_parameters()}
results = SimpleNamespace(history=history, best=(output.detach(), [labels, {"nested": {"y": output.detach()}}]))
detector = Detector()
detector.eval()(x)
with open("results.pkl", "wb") as file:
    pickle.dump(results, file)
with open("results.cpkl", "wb") as file:
    cloudpickle.dump({"results": results, "model": model, "f": lambda: 1}, file)
joblib.dump({"results": results, "detector": detector}, "results.joblib")
torch.save({"results": results, "gradients": gradients}, "results.pt")
torch.save(model, "model.pt")
torch.save(detector, "detector.pt")
torch.save(output, "output.pt")
torch.save([model.state_dict(), optimizer.state_dict(), optimizer], "state.pt")
torch.save(list(model.parameters()), "parameters.pt")
last = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 6, 3)).to(memory_format=torch.channels_last)
last(x).sum().backward()
torch.save([last.state_dict(), [p.grad for p in last.parameters()]], "channels_last.pt")
again = pickle.loads(pickle.dumps(output.detach()))
twin = copy.deepcopy(results)
print(f"{(again - output).abs().max().item():.1f} {twin.history[0]['loss']:.6f} {type(twin.history[0]['item'])}")
print(f"{torch.load('model.pt', weights_only=False)(x).double().sum().item():.5f} {model(x).double().sum().item():.5f}")
