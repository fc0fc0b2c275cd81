"""A whole training script as people write them, with a small network, which tells how long its parts took.

Plain python runs it, and `distconv run`; `whole_scripts.py` compares. The kinds: `classifier` asks each batch for its
loss and its hits and draws a progress bar, `segmenter` has tqdm, clipped gradients, masks and Dice scores, `volumes` a
DataLoader with workers, log files and printed losses.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from tqdm import tqdm

spent: dict[str, float] = defaultdict(float)
"""Processor seconds by part."""


@contextmanager
def part(name: str) -> Iterator[None]:
    begin = time.process_time()
    try:
        yield
    finally:
        spent[name] += time.process_time() - begin


def network(kind: str, width: int) -> nn.Module:
    conv, norm = (nn.Conv3d, nn.BatchNorm3d) if kind == "volumes" else (nn.Conv2d, nn.BatchNorm2d)
    layers: list[nn.Module] = []
    for inputs, outputs in ((3, width), (width, width), (width, width)):
        layers += [conv(inputs, outputs, 3, padding=1), norm(outputs), nn.ReLU(inplace=True)]
    if kind == "classifier":
        return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10))
    return nn.Sequential(*layers, conv(width, 2, 1))


def data(kind: str, samples: int) -> TensorDataset:
    size = {"classifier": (16, 16), "segmenter": (16, 16), "volumes": (8, 8, 8)}[kind]
    x = torch.randn(samples, 3, *size)
    return TensorDataset(x, torch.randint(10, (samples,)) if kind == "classifier" else (x[:, 0] > 0).long())


def dice(scores: Tensor, target: Tensor) -> Tensor:
    predicted = F.one_hot(scores.argmax(1), 2).movedim(-1, 1).float()
    wanted = F.one_hot(target, 2).movedim(-1, 1).float()
    dims = tuple(range(2, wanted.dim()))
    overlap = (predicted * wanted).sum(dims)
    return ((2 * overlap + 1) / (predicted.sum(dims) + wanted.sum(dims) + 1)).mean()


def report(kind: str, at: dict[str, Any], loss: Tensor, scores: Tensor, target: Tensor, bar: Any) -> None:
    """What such a script does with the results of a step."""
    if kind == "classifier":
        at["loss"] += loss.item()
        _, predicted = scores.max(1)
        at["seen"] += target.size(0)
        at["hits"] += predicted.eq(target).sum().item()
        bar.set_description(f"Loss: {at['loss'] / (at['steps'] + 1):.3f} | Acc: {100.0 * at['hits'] / at['seen']:.3f}%")
        bar.update()
    elif kind == "segmenter":
        at["loss"] += loss.item()
        bar.update(target.shape[0])
        bar.set_postfix(**{"loss (batch)": loss.item(), "dice": f"{dice(scores.detach(), target):.3f}"})
    else:
        at["loss"] += loss.item()
        print(f"{at['steps']}, train_loss: {loss.item():.4f}")
        with open(os.path.join(at["folder"], "log.csv"), "a") as log:
            log.write(f"{at['steps']},{loss.item()},{dice(scores.detach(), target).item()}\n")
    at["steps"] += 1


def train(kind: str, steps: int, width: int, folder: str) -> None:
    model, batch = network(kind, width), 8
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = DataLoader(data(kind, batch * 10), batch, shuffle=True, num_workers=2 if kind == "volumes" else 0)
    at: dict[str, Any] = {"loss": 0.0, "seen": 0, "hits": 0, "steps": 0, "folder": folder}
    for epoch in range(-(-steps // 10) + 1):
        if epoch == 1:  # what comes once is behind us
            spent.clear()
        model.train()
        with tqdm(total=len(loader), disable=kind == "volumes", ascii=True, file=sys.stderr) as bar:
            with part("data"):
                batches = iter(loader)
            while True:
                with part("data"):
                    x, target = next(batches, (None, None))
                if x is None:
                    break
                with part("model"):
                    scores = model(x)
                with part("loss"):
                    loss = F.cross_entropy(scores, target)
                with part("backward"):
                    optimizer.zero_grad(set_to_none=True)
                    loss.backward()
                with part("optimizer"):
                    if kind == "segmenter":
                        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
                with part("results"):
                    report(kind, at, loss, scores, target, bar)
        with part("checkpoint"):
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, os.path.join(folder, "a.pt"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=["classifier", "segmenter", "volumes"])
    parser.add_argument("--steps", type=int, default=40, help="after an epoch of 10 that do not count (%(default)s)")
    parser.add_argument("--width", type=int, default=64, help="channels of the network (%(default)s)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    began = time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        train(options.kind, options.steps, options.width, folder)
    steps = 10 * -(-options.steps // 10)
    found = {name: 1e3 * seconds / steps for name, seconds in spent.items()}
    print("PARTS " + json.dumps(found | {"before": 1e3 * began}))


if __name__ == "__main__":
    main()
