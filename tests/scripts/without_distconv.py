"""Compares folders with one that plain python has left, in a process that cannot import distconv.

`python without_distconv.py ALONE FOLDER... NAME=TOLERANCE...`: each name is that of a folder within all. Prints a line
for each difference. Pickled files must load, hold plain tensors alone, and hold equal ones.
"""

import json
import os
import pickle
import re
import sys
import types
from pathlib import Path
from typing import Any

sys.modules.update(dict.fromkeys(("distconv", "mucudnn")))  # importing them is an error
sys.path.insert(0, str(Path(__file__).with_name("scripts")))

import joblib  # noqa: E402
import numpy  # noqa: E402
import torch  # noqa: E402
from PIL import Image  # noqa: E402

NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?")
PLAIN = (torch.Tensor, torch.nn.Parameter)


def unlike_lines(one: str, other: str, tolerance: float) -> list[str]:
    """The lines of two texts whose words differ, or whose numbers are not close. How a gradient came is left out."""
    lines = [re.sub(r"grad_fn=<\w+>", "grad_fn", text).splitlines() for text in (one, other)]
    found = [] if len(lines[0]) == len(lines[1]) else [f"{len(lines[0])} lines, not {len(lines[1])}"]
    for line, wanted in zip(*lines, strict=False):
        words = [NUMBER.sub(" # ", text).split() for text in (line, wanted)]
        numbers = [[float(number) for number in NUMBER.findall(text)] for text in (line, wanted)]
        if words[0] != words[1] or not numpy.allclose(*numbers, rtol=tolerance, atol=tolerance):
            found.append(f"{line!r}, not {wanted!r}")
    return found


def differences(where: str, one: Any, other: Any, tolerance: float, seen: set[int] | None = None) -> list[str]:
    """What differs between two objects, at any depth: a line for each place."""
    seen = set() if seen is None else seen
    if id(one) in seen:
        return []
    if isinstance(one, torch.Tensor | torch.nn.Module | dict | list):
        seen.add(id(one))
    if type(one) is not type(other) or (isinstance(one, torch.Tensor) and type(one) not in PLAIN):
        return [f"{where}: {type(one).__name__} where plain python leaves {type(other).__name__}"]
    if isinstance(one, torch.Tensor):
        facts = [(tuple(x.shape), x.stride(), x.dtype, x.requires_grad) for x in (one, other)]
        if facts[0] != facts[1]:
            return [f"{where}: {facts[0]} where plain python leaves {facts[1]}"]
        close = one.numel() == 0 or torch.allclose(one, other, rtol=tolerance, atol=tolerance, equal_nan=True)
        return [] if close else [f"{where}: other values"]
    if isinstance(one, numpy.ndarray | float | complex):
        return [] if numpy.allclose(one, other, rtol=tolerance, atol=tolerance, equal_nan=True) else [f"{where}: {one}"]
    if isinstance(one, types.FunctionType | types.MethodType | type | types.ModuleType):
        return [] if one.__name__ == other.__name__ else [f"{where}: {one.__name__}"]
    if isinstance(one, dict):
        pairs = [(key, one[key], other[key]) for key in one if key in other]
        keys = [str(key) for key in one if not isinstance(key, torch.Tensor)]
        others = [str(key) for key in other if not isinstance(key, torch.Tensor)]
        found = [] if keys == others else [f"{where}: keys {keys}, not {others}"]
    elif isinstance(one, list | tuple):
        pairs = [(index, *each) for index, each in enumerate(zip(one, other, strict=False))]
        found = [] if len(one) == len(other) else [f"{where}: {len(one)} elements, not {len(other)}"]
    elif hasattr(one, "__dict__"):
        return differences(where, vars(one), vars(other), tolerance, seen)
    else:
        return [] if isinstance(one, set) or one == other else [f"{where}: {one!r}, not {other!r}"]
    return found + [line for key, *both in pairs for line in differences(f"{where}[{key!r}]", *both, tolerance, seen)]


def read(path: Path) -> Any:
    """What a file holds."""
    if path.name == "traced.pt":
        return torch.jit.load(path).state_dict()
    if path.suffix in (".pt", ".pth", ".state"):
        return torch.load(path, weights_only=False)
    if path.suffix in (".pkl", ".cpkl"):
        return pickle.loads(path.read_bytes())
    if path.suffix == ".joblib":
        return joblib.load(path)
    if path.suffix in (".npy", ".npz"):
        held = numpy.load(path)
        return held if isinstance(held, numpy.ndarray) else dict(held)
    return None


def compared(path: Path, other: Path, tolerance: float) -> list[str]:
    """What differs between two files of one name."""
    name = str(path)
    if path.suffix == ".png":
        pictures = [numpy.asarray(Image.open(each)).astype(int) for each in (path, other)]
        same = pictures[0].shape == pictures[1].shape and abs(pictures[0] - pictures[1]).max() <= 1
        return [] if same else [f"{name}: another picture"]
    if path.suffix in (".csv", ".txt"):
        return [f"{name}: {line}" for line in unlike_lines(path.read_text(), other.read_text(), tolerance)]
    if path.name == "trace.json":
        return [] if json.loads(path.read_text())["traceEvents"] else [f"{name}: no events"]
    if path.name.startswith("events.out"):
        return differences(name, *(events(each) for each in (path, other)), tolerance)
    try:
        return differences(name, read(path), read(other), tolerance)
    except Exception as error:
        return [f"{name}: {type(error).__name__}: {error}"]


def events(path: Path) -> dict[str, Any]:
    """Scalars and histograms of a file for TensorBoard, by name, and how many graphs and pictures it has."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log = EventAccumulator(str(path), size_guidance={"histograms": 0})
    log.Reload()
    tags = log.Tags()
    scalars = {f"{tag}": [event.value for event in log.Scalars(tag)] for tag in tags["scalars"]}
    counts = {tag: [sum(event.histogram_value.bucket) for event in log.Histograms(tag)] for tag in tags["histograms"]}
    return {"scalars": scalars, "counts": counts, "images": len(tags["images"]), "graph": tags["graph"]}


def files(folder: Path) -> dict[str, Path]:
    """By name; TensorBoard puts the time, the machine and the process into it."""
    return {
        re.sub(r"(events\.out\.tfevents).*", r"\1", str(path.relative_to(folder))): path
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def main(alone: Path, *words: str) -> None:
    folders = [Path(word) for word in words if os.path.isdir(word)]
    for name, tolerance in (word.rsplit("=", 1) for word in words[len(folders) :]):
        there = files(alone / name)
        for one in folders:
            here = files(one / name)
            for file in sorted(set(here) ^ set(there)):
                what = "plain python leaves no such file" if file in here else "missing"
                print(f"{one.name}/{name}/{file}: {what}")
            for file in sorted(set(here) & set(there)):
                for line in compared(here[file], there[file], float(tolerance)):
                    print(line.replace(str(one.parent) + os.sep, ""))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
