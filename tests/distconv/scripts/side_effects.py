"""Writes files in every way that scripts do, in the folder where it runs, and reads back what it wrote."""

from __future__ import annotations

import csv
import json
import os
import shutil
import tempfile
from pathlib import Path

import matplotlib
import numpy as np
import torch
from torch import nn

matplotlib.use("Agg")
import matplotlib.pyplot as plt

torch.manual_seed(0)
assert not os.path.exists("done.txt") and os.path.exists("old.txt")

# The next free version, as experiment folders are named.
os.makedirs("out/plots")
version = next(n for n in range(100) if not os.path.exists(f"runs/version_{n}"))
run = Path("runs") / f"version_{version}"
run.mkdir(parents=True)

# Logs, opened once and opened again for each line.
for step in range(3):
    with open("log.csv", "a", newline="") as file:
        csv.writer(file).writerow([step, step * 0.5])
log = open("out/run.log", "w")  # noqa: SIM115 (as scripts do)
with open("old.txt", "a") as file:
    file.write("appended\n")
assert Path("old.txt").read_text() == "old\nappended\n"

# A checkpoint by way of a temporary name, the best one kept, old ones removed, the best read back.
torch.set_default_dtype(torch.float64)
x, y = torch.randn(4, 3, 8, 8), torch.randn(4, 2, 8, 8)
model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 2, 3, padding=1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
best = float("inf")
for step in range(3):
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    log.write(f"{step} {loss.item():.9f}\n")
    torch.save(model.state_dict(), "tmp.pt")
    os.replace("tmp.pt", f"epoch{step}.pt")
    if loss.item() < best:
        best = loss.item()
        shutil.copy(f"epoch{step}.pt", run / "best.pt")
    if step:
        Path(f"epoch{step - 1}.pt").unlink()
log.close()
state = torch.load(run / "best.pt", weights_only=True)
assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())
assert torch.load(run / "best.pt", weights_only=True, mmap=True).keys() == state.keys()
model.load_state_dict(state)
assert len(Path("out/run.log").read_text().splitlines()) == 3

# What was there before is changed, replaced, moved and removed.
settings = json.loads(Path("settings.json").read_text())
settings["runs"] += 1
Path("settings.json").write_text(json.dumps(settings))
assert json.loads(Path("settings.json").read_text()) == {"runs": 2}
os.rename("old_folder", "new_folder")
os.symlink("new_folder", "latest")
assert Path("latest/kept.txt").read_text() == "kept"
assert sorted(os.listdir("latest")) == ["inner", "kept.txt"]
shutil.rmtree("cache")
assert not os.path.isdir("cache")
os.remove("remove_me.txt")
assert sorted(path.name for path in Path().glob("*.pt")) == ["epoch2.pt"]

# Arrays, pictures, copies and temporary files.
np.save("out/array.npy", np.arange(4))
np.savez("out/arrays.npz", a=np.arange(3))
table = np.lib.format.open_memmap("out/memmap.npy", mode="w+", dtype="int64", shape=(4,))
table[:] = 7
table.flush()
assert np.load("out/memmap.npy").tolist() == [7] * 4
figure, axes = plt.subplots()
axes.plot([0, 1])
figure.savefig("out/plots/line.png", metadata={"Software": None})
shutil.copytree("out", "copy")
shutil.move("copy/arrays.npz", run)
with tempfile.TemporaryDirectory() as folder:
    Path(folder, "scratch").write_text("x")
with tempfile.NamedTemporaryFile("w", dir="out", delete=False) as file:
    file.write("kept")
os.replace(file.name, "out/named.txt")

os.chdir("out")
Path("relative.txt").write_text(os.path.basename(os.getcwd()))
os.chdir("..")
with open("done.txt", "x") as file:
    json.dump({"best": round(best, 9), "seen": sorted(os.listdir())}, file)
print(Path("done.txt").read_text())
