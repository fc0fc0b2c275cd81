"""What the detour through mucudnn costs a convolution that stays with torch's kernel.

python benchmarks/layers/overhead.py
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch.nn import functional

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.detour import detour
from benchmarks.harness import parser
from benchmarks.table import Table, show


def detours() -> Table:
    image, kernel = torch.randn(1, 1, 4, 4), torch.randn(1, 1, 1, 1)
    parameter = kernel.clone().requires_grad_()

    def forward() -> None:
        with torch.no_grad():
            functional.conv2d(image, kernel)

    def training() -> None:
        functional.conv2d(image, parameter).sum().backward()

    cells = []
    for name, work in (("forward, no grad", forward), ("forward + backward filter", training)):
        stock, shimmed = detour(work)
        cells.append((name, f"{stock:.1f}", f"{shimmed:.1f}", f"{shimmed - stock:.1f}"))
    return Table("detour of a 1x1 kernel on a 4x4 image", ("call", "stock µs", "shim µs", "detour µs"), cells)


def main() -> None:
    print(parser(__doc__).parse_args().before)
    torch.set_num_threads(1)
    show([detours()])


if __name__ == "__main__":
    main()
