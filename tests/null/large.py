"""One large convolution on the null card, nothing of it computed: prints the backend, the bytes and the plans, as JSON.

    python tests/null/large.py forward '[1, 64, 362, 370, 251]' '[32, 64, 3, 3, 3]' --padding 1 --limit 1GiB

With a limit mucudnn plans it, and torch's own kernel counts as slow, so that whatever fits the limit serves; with
`--count-stock` what that kernel holds counts within the limit instead.
"""

from __future__ import annotations

import argparse
import json

import torch

import mucudnn
from mucudnn.convolution.call import Operands
from mucudnn.optimizer import Trial
from mucudnn.planning.trial_runner import TrialRunner
from mucudnn.providers.stock import Stock
from mucudnn.timing.measurement import Measurement


def slow_stock() -> None:
    """Makes torch's own kernel look slow."""
    laps = TrialRunner.laps

    def slow(runner: TrialRunner, trial: Trial, given: Operands) -> list[float]:
        return [1e3] if trial.division is None else laps(runner, trial, given)

    TrialRunner.laps = slow  # type: ignore[method-assign]
    Measurement.stock_seconds = lambda self: 1e3  # type: ignore[method-assign]
    Stock.algorithms = lambda self, problem: ()  # type: ignore[method-assign]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("direction", choices=("forward", "backward_data", "backward_filter"))
    parser.add_argument("x", type=json.loads)
    parser.add_argument("w", type=json.loads)
    parser.add_argument("--padding", type=int, default=0)
    parser.add_argument("--dtype", default="float16")
    parser.add_argument("--limit")
    parser.add_argument("--count-stock", action="store_true")
    options = parser.parse_args()
    dtype, dims = getattr(torch, options.dtype), len(options.x) - 2
    x, w = (torch.empty(shape, dtype=dtype, device="cuda") for shape in (options.x, options.w))
    spatial = [n + 2 * options.padding - k + 1 for n, k in zip(options.x[2:], options.w[2:], strict=True)]
    geometry = ([1] * dims, [options.padding] * dims, [1] * dims, False, [0] * dims, 1)
    y = torch.empty(
        0 if options.direction == "forward" else (options.x[0], options.w[0], *spatial), dtype=dtype, device="cuda"
    )
    mask = [options.direction == "backward_data", options.direction == "backward_filter", False]

    def call() -> torch.Tensor:
        if options.direction == "forward":
            return torch.ops.aten.convolution(x, w, None, *geometry)
        gradients = torch.ops.aten.convolution_backward(y, x, w, None, *geometry, mask)
        return next(gradient for gradient in gradients if gradient is not None)

    told = {"backend": torch._C._select_conv_backend(x, w, None, *geometry).name, "plans": []}
    if options.limit:
        if not options.count_stock:
            slow_stock()
        counts = {"count_stock": options.count_stock}
        mucudnn.patch(workspace_limit=options.limit, database=":memory:", progress="off", check="off", **counts)
    try:
        call()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        # What was asked for: of a block whose rest is at most 1 MiB the allocator counts the rest, too.
        before = torch.cuda.memory_stats()["requested_bytes.all.current"]
        result = call()
        told["beside"] = torch.cuda.memory_stats()["requested_bytes.all.peak"] - before - result.nbytes
    except torch.OutOfMemoryError as error:
        told["error"] = str(error)
    if options.limit:
        told["plans"] = [[record.dim, record.parts, record.workspace] for record in mucudnn.report()]
    print(json.dumps(told))


if __name__ == "__main__":
    main()
