"""Decoders of diffusion models on 4 ranks, beside one process and beside decoding in tiles.

    python benchmarks/distributed/decoders.py                                    # every decoder, and writes the table
    python benchmarks/distributed/decoders.py --only AutoencoderKL --size 32 48  # one, for latents of these sizes

`decode.py`, beside this file, runs three ways, each in processes of its own: alone; in tiles (diffusers'
enable_tiling); and with `python -m distconv run --partition height=4`. Shown are the largest difference from the result
of one process, relative to its largest value; the peak memory of a rank, weights included, and its part of that of one
process; what a rank sends, as `python -m distconv check` counts it; and the seconds. Times are of ranks that share the
cores of one machine, and say little about ranks that do not. Results are kept after every decoder; a later call goes on
from there.

It needs the extra `models`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT.parents[1]))

from benchmarks.distributed.decode import DECODERS
from benchmarks.table import RESULTS, Table, save, show

RESULT = "decoders-cpu"
PARTITION = "height=4"
SCRIPT = str(ROOT / "decode.py")
RUN = ["-m", "distconv", "run", "--partition", PARTITION, "--print-all-ranks"]
CHECK = ["-m", "distconv", "check", "--inference", "--json", "--partition", PARTITION]

SIZES = {
    "AutoencoderKL": 64,
    "AutoencoderKLWan": 24,
    "AutoencoderKLHunyuanVideo": 16,
    "AutoencoderKLCogVideoX": 16,
    "AutoencoderKLLTXVideo": 16,
    "AutoencoderKLQwenImage": 64,
}
"""Height and width of the latents."""

ABOUT = f"""\
Decoders of diffusers, of full depth and small width, with random weights, in float64: `python
benchmarks/distributed/decoders.py`. The script `decode.py` knows of no ranks. It runs in one process, in tiles as
diffusers' enable_tiling makes them (of a quarter of the height and width where it accepts that), and by `distconv run
--partition {PARTITION}`.

* **error**: the largest difference from the result of one process, relative to its largest value.
* **peak**: bytes of the tensors alive at once, weights included; of the ranks, the one that has most. Counted by
  torch's memory profiler.
* **sent**: by one rank, counted by `python -m distconv check`.
* **seconds**: each way once. The 4 ranks and whatever else ran shared 2 cores: these say nothing about speed.
* **error, float64**: QwenImage and Wan of diffusers compute their upsampling in float32, also in a float64 model. Where
  a number differs in its last digit before that, it may differ by a digit of float32 behind it. This column has the
  error with these layers in float64 on both sides (`decode.py --keep-type`); the other decoders cast nothing.
"""

Record = dict[str, Any]


def run(before: list[str], decoder: str, size: int, *more: str) -> list[Record]:
    """What the script prints, on every rank. CalledProcessError where it fails."""
    own = [SCRIPT, decoder, "--size", str(size), *more]
    environment = {**os.environ, "PYTHONPATH": str(ROOT.parents[1]), "OMP_NUM_THREADS": "1", "KINETO_LOG_LEVEL": "99"}
    printed = subprocess.run(
        [sys.executable, *before, *own], env=environment, stdout=subprocess.PIPE, text=True, check=True
    )
    lines = (line[line.find("{") :] for line in printed.stdout.splitlines() if '"decoder"' in line)
    return [json.loads(line) for line in lines]


def sent(decoder: str, size: int) -> int:
    """The bytes that a rank sends."""
    own = [SCRIPT, decoder, "--size", str(size)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT.parents[1]), "OMP_NUM_THREADS": "1"}
    found = subprocess.run(
        [sys.executable, *CHECK, *own], env=environment, stdout=subprocess.PIPE, text=True, check=True
    )
    text = found.stdout
    report = json.loads(text[text.index("{\n") :])
    return sum(layer["forward"] for layer in report["layers"])


def measured(decoder: str, size: int) -> Record:
    """One decoder, the three ways."""
    import torch

    record: Record = {"decoder": decoder, "size": size}
    with tempfile.TemporaryDirectory() as folder:
        files = {way: str(Path(folder, way)) for way in ("alone", "tiled", "ranks")}
        found = {
            "alone": run([], decoder, size, "--save", files["alone"]),
            "tiled": run([], decoder, size, "--tiled", "--save", files["tiled"]),
            "ranks": run(RUN, decoder, size, "--save", files["ranks"]),
        }
        results = {way: torch.load(file, weights_only=True) for way, file in files.items()}
        for way, each in found.items():
            record[way] = {
                "peak": max(one["peak"] for one in each),
                "seconds": max(one["seconds"] for one in each),
                "error": error(results[way], results["alone"]),
            }
        record |= {key: found["alone"][0][key] for key in ("latent", "result", "weights")}
        if found["alone"][0]["casts"]:
            for way, before in (("alone", []), ("ranks", RUN)):
                run(before, decoder, size, "--keep-type", "--save", files[way])
            record["float64"] = error(*(torch.load(files[way], weights_only=True) for way in ("ranks", "alone")))
        record["ranks"]["processes"] = len(found["ranks"])
    record["sent"] = sent(decoder, size)
    return record


def error(found: Tensor, right: Tensor) -> float | None:
    """Relative to the largest value; None for a result of another shape, as tiles may give."""
    return float((found - right).abs().max() / right.abs().max()) if found.shape == right.shape else None


def table(records: list[Record]) -> Table:
    """A row per decoder."""

    def mib(count: float) -> str:
        return f"{count / 2**20:.1f}"

    def digit(error: float | None) -> str:
        return "another shape" if error is None else f"{error:.0e}"

    cells = []
    for record in records:
        alone, tiled, ranks = (record[way] for way in ("alone", "tiled", "ranks"))
        shape = "x".join(str(extent) for extent in record["result"])
        part = f"{ranks['peak'] / alone['peak']:.2f}"
        kept = digit(record["float64"]) if "float64" in record else "-"
        cells.append(
            (
                record["decoder"], shape, mib(alone["peak"]), mib(ranks["peak"]), part,
                f"{tiled['peak'] / alone['peak']:.2f}", digit(ranks["error"]), kept,
                digit(tiled["error"]), mib(record["sent"]), *(f"{way['seconds']:.1f}" for way in (alone, ranks, tiled)),
            )
        )  # fmt: skip
    headings = (
        "decoder", "result", "peak alone, MiB", "of a rank, MiB", "part", "part, tiled", "error", "error, float64",
        "error, tiled", "sent, MiB", "seconds alone", "4 ranks", "tiled",
    )  # fmt: skip
    return Table("Decoding alone, on 4 ranks, and in tiles", headings, cells)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=list(DECODERS), choices=DECODERS, metavar="DECODER")
    parser.add_argument("--size", type=int, nargs="+", help="heights and widths of latents")
    parser.add_argument("--again", action="store_true", help="measure again what has been measured")
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="DIR", help="where results are kept")
    options = parser.parse_args()
    file = options.results / f"{RESULT}.json"
    kept: list[Record] = json.loads(file.read_text()) if file.exists() else []
    for decoder in options.only:
        for size in options.size or [SIZES[decoder]]:
            if not options.again and any((r["decoder"], r["size"]) == (decoder, size) for r in kept):
                continue
            record = measured(decoder, size)
            kept = [r for r in kept if (r["decoder"], r["size"]) != (decoder, size)] + [record]
            kept.sort(key=lambda r: (list(DECODERS).index(r["decoder"]), r["size"]))
            file.parent.mkdir(exist_ok=True)
            file.write_text(json.dumps(kept, indent=1) + "\n")
            print(json.dumps(record), flush=True)
    shown = [table(kept)]
    show(shown)
    if options.results == RESULTS:
        save(RESULT, "Decoders", ABOUT, shown, kept)


if __name__ == "__main__":
    main()
