"""One network of the campaign: trained in one process and on ranks, and all numbers compared."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

import distconv.model.interface  # at once: ranks are forked from here
import mucudnn.patching
from benchmarks.campaign.networks import Case, draw, draw_with_state
from benchmarks.campaign.rounding import Results, differences, error_of, fingerprints
from benchmarks.campaign.training import RATE, STEPS, plainest, train
from benchmarks.campaign.within import ranks_fitted, without_channels
from benchmarks.drawn_times import drawn_times
from distconv.job.board import StoreBoard
from distconv.model import fully_sharded

fully_sharded.LEAST_BYTES = 0  # with DISTCONV_SHARD_PARAMETERS=1 what small layers have is sharded, too

TOLERANCE = 1e-9
"""The largest difference from one process in float64, relative to the largest element."""

AMPLIFIED = 100.0
"""A difference below so many times that of a changed network counts as rounding."""

CHANGES = 16
"""So many changes are drawn, one after the other, until they explain a difference: of a number within rounding of where
a function has a kink, such as zero before a ReLU, each tells only one side."""

HALF_FACTOR, HALF_FLOOR = 4.0, 2.0**-6
"""In bfloat16, what is allowed: so many times the error of the worse of two plain orders, and so much of the norm."""

SMALLEST, OF_A_LOSS = 0.25, 2.0**-24
"""A gradient in bfloat16 counts as no less than this share of the largest, which is no less than this of a loss: a
Fourier transform leaves rounding where others leave zero."""

Answer = dict[str, Any]
"""{"outcome": right, rounding, wrong, refused, crash, unable or idle; "said": what there is to say of it; ...}."""


@contextlib.contextmanager
def surroundings(case: Case, run: int) -> Iterator[Any]:
    """mucudnn beneath, where the case says so. Ranks share the plans of a run, as those of a job do."""
    # In half types oneDNN has kernels (seen with torch 2.13) that write beyond their memory for some small layers.
    torch.backends.mkldnn.set_flags(case["dtype"] != "bfloat16")
    if case["limit"] is None:
        yield None
        return
    settings = {"workspace_limit": case["limit"], "policy": case["policy"], "database": ":memory:", "progress": "off"}
    settings["planning"] = "ahead"  # the first step is divided
    board = StoreBoard(dist.PrefixStore(f"run {run}", dist.distributed_c10d._get_default_store()))
    with drawn_times(case["seed"]), mucudnn.patched(board=board, **settings) as session:
        yield session


class How(NamedTuple):
    """How networks run beside what their seeds say.

    Attributes:
        compiled: the compiler of all; empty: as drawn.
        state: whether layers have state.
        memory: whether each rank computes in ways that `--memory` may choose, drawn.
    """

    compiled: str = ""
    state: bool = False
    memory: bool = False


class Rank:
    """What a rank answers."""

    def __init__(self) -> None:
        self._alone: tuple[Case | None, Results] = None, {}
        self._runs = 0

    def draw(self, seed: int, how: How) -> tuple[Case, str]:
        """The case of a seed, and what torch raises for it in one process; on the first rank alone."""
        case = draw_with_state(seed) if how.state else draw(seed)
        case["compiled"] = how.compiled or case["compiled"]
        if how.memory:
            case = without_channels(case) | {"memory": True}
        return case, self.alone(case)

    def alone(self, case: Case) -> str:
        """Trains in one process and keeps the numbers; what torch raises, empty if nothing."""
        try:
            self._alone = case, train(plainest(case))
        except Exception as error:
            self._alone = None, {}
            return f"{type(error).__name__}: {error}"[:400]
        return ""

    def compiled_alone(self, case: Case) -> str:
        """What torch raises where one process compiles the case, empty if nothing."""
        try:
            for channels_last in sorted({False, case["channels_last"]}):
                _compiled(case, channels_last)
        except Exception as error:
            return f"{type(error).__name__}: {error}"[:400]
        return ""

    def compiled_differs(self, case: Case) -> bool:
        """Whether one process that compiles the case finds other numbers than one that does not."""
        self.alone(case)
        return any(not error <= TOLERANCE for error in differences(_compiled(case), self._alone[1]).values())

    def compare(self, case: Case) -> Answer:
        """Trains on the ranks of the case; the first of them compares with one process."""
        self._runs += 1
        mesh = distconv.init(
            case["partition"], ranks=range(case["ranks"]), device_type="cpu", channel_algorithm=case["algorithm"]
        )
        if dist.get_rank() >= case["ranks"]:
            return {"outcome": "idle"}
        divided = 0
        try:
            with surroundings(case, self._runs) as session:
                found = train(case, mesh, around=ranks_fitted(case, mesh) if case.get("memory") else None)
            if session is not None:
                divided = sum(len(r.parts) > 1 or r.parts[0][1] != "stock" for r in session.records())
        except distconv.UnsupportedOperation as error:
            return {"outcome": "refused", "said": str(error)[:400], "operator": error.operator, "why": error.why[:200]}
        except Exception as error:
            return {"outcome": "crash", "said": f"{type(error).__name__}: {error}"[:400]}
        finally:
            if case["compiled"]:
                torch._dynamo.reset()
        answer = {"outcome": "idle", "fingerprints": fingerprints(found), "divided": divided}
        return answer | (self.judged(case, found) if dist.get_rank() == 0 else {})

    def judged(self, case: Case, found: Results) -> Answer:
        """What becomes of the numbers that ranks have found, beside those of one process, which must be known."""
        assert self._alone[0] == case, "one process has not computed this case"
        expected = self._alone[1]
        if case["dtype"] == "bfloat16":
            return _judged_half(case, found, expected)
        errors = differences(found, expected)
        above = {name: error for name, error in errors.items() if not error <= TOLERANCE}
        if above and case["compiled"] and not self.compiled_alone(case):
            # Compiled, a checkpointed norm counts a step once in its running statistics; otherwise twice.
            beside = differences(found, _compiled(case))
            above = {name: error for name, error in above.items() if not beside.get(name, math.inf) <= TOLERANCE}
        for number in range(CHANGES if above else 0):
            changed = differences(train(plainest(case), change=number), expected)
            above = {name: error for name, error in above.items() if not error <= AMPLIFIED * changed.get(name, 0.0)}
            if not above:
                return {"outcome": "rounding", "error": max(errors.values())}
        return _told(above, max(errors.values()))


def _compiled(case: Case, channels_last: bool = False) -> Results:
    """What one process finds that compiles the case."""
    torch._dynamo.reset()
    try:
        return train(plainest(case) | {"compiled": case["compiled"], "channels_last": channels_last})
    finally:
        torch._dynamo.reset()


def _judged_half(case: Case, found: Results, first: Results) -> Answer:
    """Against float64, beside two plain orders of summation: of the samples forwards, and backwards.

    Of one sample these are the same, and where a number is within rounding of a function's kink neither may tell it;
    then beside plain networks of which what layers make is changed by no more than rounding does.
    """
    plain = plainest(case)
    exact, second = train(plain, dtype=torch.float64), train(plain, backwards=True)
    if found.keys() != first.keys():
        return {"outcome": "wrong", "said": f"{sorted(found.keys() ^ first.keys())} on one side only"}
    norms = {name: float(value.double().norm()) for name, value in exact.items()}
    finite = {name: norm for name, norm in norms.items() if math.isfinite(norm)}
    shares = {name: 1.0 if "gradient" in name else OF_A_LOSS * name.startswith("loss") for name in finite}
    largest = max((shares[name] * norm for name, norm in finite.items()), default=0.0)
    # Some gradients are zero, such as a bias's before a norm: what rounding makes of them is as large as of others, and
    # steps carry it into the parameters.
    trained = {name.split()[2] for name in exact if name.startswith("gradient of ")}
    for name, norm in norms.items():
        if "gradient" in name:
            norms[name] = max(norm, SMALLEST * largest)
        elif name in trained:
            norms[name] = max(norm, STEPS * RATE * SMALLEST * largest)
    plain_errors = {name: max(error_of(each[name], exact[name]) for each in (first, second)) for name in exact}
    above, worst = {}, 0.0
    for name, value in exact.items():
        error = error_of(found[name], value)
        if found[name].shape == value.shape and not first[name].isfinite().all():
            # The half type overflows where float64 does not: no number is to be expected. Of what is no number in
            # float64 either, such as the mean of an empty batch, none may be found.
            if value.isfinite().all() or torch.equal(found[name].isfinite(), value.isfinite()):
                continue
            error = math.inf
        allowed = HALF_FACTOR * plain_errors[name] + HALF_FLOOR * norms[name]
        if not error <= allowed:
            above[name] = error
        worst = max(worst, error / (allowed or 1.0))
    for number, dtype in itertools.product(range(CHANGES if above else 0), (torch.float64, None)):
        # In both: kernels of the half type round what lies between, such as the deviation of a norm's few elements, but
        # where norms of two elements make the same of all that is near, only float64 tells how a gradient changes.
        changed = train(plain, dtype=dtype, change=number)
        above = {
            name: error
            for name, error in above.items()
            if not error <= HALF_FACTOR * error_of(changed[name], exact[name]) + HALF_FLOOR * norms[name]
        }
        if not above:
            return {"outcome": "rounding", "error": worst}
    return _told({name: error / (norms[name] or 1.0) for name, error in above.items()}, worst)


def _told(above: dict[str, float], worst: float) -> Answer:
    if not above:
        return {"outcome": "right", "error": worst}
    listed = ", ".join(f"{name}: {error:.3g}" for name, error in list(above.items())[:6])
    return {"outcome": "wrong", "said": f"{len(above)} differ, {listed}"[:400], "error": worst}
