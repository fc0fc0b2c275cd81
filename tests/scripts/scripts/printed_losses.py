"""Losses and scores as scripts print them: in f-strings, by print, by %, in progress messages, in a csv."""

import csv

import torch
from networks import classifier
from torch import nn

torch.manual_seed(13)
torch.set_default_dtype(torch.float64)
model = classifier()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
rows = []
for _ in range(3):
    x, labels = torch.rand(4, 3, 16, 16), torch.randint(5, (4,))
    output = model(x)
    loss = nn.functional.cross_entropy(output, labels)
    each = nn.functional.cross_entropy(output, labels, reduction="none")
    accuracy = (output.argmax(1) == labels).double().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"f-string {loss} {loss.data} {loss:.4f} {loss.detach()} {accuracy}")
    print("print", loss, loss.detach(), accuracy, each.data)
    print("str " + str(loss) + " " + repr(loss.data) + " %s %.4f {} {:.3e}" % (loss.data, loss) + str([loss.item()]))  # noqa: UP031
    print("format {} {:>8.3f} {!r}".format(loss, loss, accuracy))  # noqa: UP032
    print("tuple", (loss.data, accuracy), {"loss": loss.data}, float(loss), round(float(loss), 4), [*each.tolist()])
    rows.append([float(loss), loss.item(), accuracy.numpy(), loss.data.numpy()])
print(min(loss.data, accuracy), max(each.data), sorted(each.tolist()), torch.tensor([loss, accuracy]))
with open("losses.csv", "w", newline="") as file:
    csv.writer(file).writerows(rows)
