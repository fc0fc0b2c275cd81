"""Host time of a step of `host.py` without a compiler, in this version and in another one, step by step in turn.

    python benchmarks/distributed/host_versions.py ../other    # a clone of the repository, at another commit

Each version runs in a process of its own, with one thread. The last column is the median of the ratios of two steps
that follow each other, so that a busy moment of the machine meets both.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def serve(clone: str) -> None:
    """Answers each request with the milliseconds of the processor that a step under a partition takes in a version."""
    sys.path.insert(0, clone)
    import torch
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    import distconv
    from benchmarks.distributed import host
    from benchmarks.distributed.host_messages import let_messages_arrive_at_once

    if not Path(distconv.__file__).is_relative_to(clone):
        raise SystemExit(f"{clone}: distconv comes from {distconv.__file__}")
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=host.RANKS)
    let_messages_arrive_at_once()
    x, target = torch.randn(host.RANKS, 3, 64, 64), torch.arange(host.RANKS)
    steps: dict[str, host.Step] = {}
    for line in sys.stdin:
        partition = json.loads(line)["partition"]
        if partition not in steps:
            model = distconv.parallelize(host.resnet(4), distconv.init(partition, device_type="cpu"))
            steps[partition] = host.step_of(model, x, target)
            for _ in range(host.WARM):
                steps[partition]()
        begin = time.process_time()
        steps[partition]()
        print(1e3 * (time.process_time() - begin), flush=True)


def main() -> None:
    sys.path.insert(0, str(ROOT))
    from benchmarks.distributed.host import PARTITIONS
    from benchmarks.harness import parser
    from benchmarks.process import Process
    from benchmarks.table import Table, show

    made = parser(__doc__)
    made.add_argument("other", help="a clone of the repository, at another commit")
    made.add_argument("--rounds", type=int, default=40, help="steps of each version that count (default %(default)s)")
    arguments = made.parse_args()
    clones = [str(ROOT), str(Path(arguments.other).resolve())]
    versions = [Process(clone, [[sys.executable, __file__, "--serve", clone]]) for clone in clones]
    times: dict[str, list[list[float]]] = {partition: [] for partition in PARTITIONS}
    try:
        for count in range(arguments.rounds):
            for partition, found in times.items():
                pair = versions[:: 1 if count % 2 else -1]
                found.append([each.ask(partition=partition) for each in pair][:: 1 if count % 2 else -1])
    finally:
        for each in versions:
            each.kill()
    rows = []
    for partition, found in times.items():
        own, other = (statistics.median(values) for values in zip(*found, strict=True))
        ratio = statistics.median(here / there for here, there in found)
        rows.append((partition, f"{own:.1f}", f"{other:.1f}", f"{ratio:.2f}"))
    what = "A training step of ResNet-50, width 4, on 4 images of 64²: milliseconds of the host"
    show([Table(what, ("", "this version", "the other", "ratio"), rows)])


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        serve(sys.argv[2])
    else:
        main()
