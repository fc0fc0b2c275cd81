"""The last batch is smaller, also of one sample; validation and prediction take one sample each."""

import torch
from networks import UNet, classifier
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(20)
torch.set_default_dtype(torch.float64)
data = TensorDataset(torch.rand(9, 3, 16, 16), torch.randint(5, (9,)), torch.randint(2, (9, 16, 16)))
for model, at in ((classifier(), 1), (UNet(), 2)):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for epoch in range(2):
        model.train()
        total = 0.0
        for batch in DataLoader(data, batch_size=4, shuffle=True):
            loss = nn.functional.cross_entropy(model(batch[0]), batch[at])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item() * len(batch[0])
        model.eval()
        losses, outputs = [], []
        with torch.no_grad():
            for batch in DataLoader(data, batch_size=1):
                output = model(batch[0])
                losses.append(nn.functional.cross_entropy(output, batch[at]))
                outputs.append(output)
        print(
            f"epoch {epoch} {total / 9:.10f} {torch.stack(losses).mean().item():.10f} {sum(losses) / len(losses):.10f}"
        )
        print(f"{torch.cat(outputs).square().mean().item():.10f}")
    model(data[0][0].unsqueeze(0)).sum().backward()
    print(f"gradient {sum(p.grad.abs().sum() for p in model.parameters()):.8f}")
