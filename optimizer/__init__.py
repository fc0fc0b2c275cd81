"""The mathematics of dividing convolutions: numbers in, decisions out, no torch."""

from optimizer.option import Division, Option
from optimizer.pareto import desirable_divisions, desirable_set
from optimizer.reuse import POLICIES, best_division, micro_batch_sizes
from optimizer.sharing import Sharing, divide_workspace, share
from optimizer.timeline import Timeline, common

__all__ = [
    "POLICIES",
    "Division",
    "Option",
    "Sharing",
    "Timeline",
    "best_division",
    "common",
    "desirable_divisions",
    "desirable_set",
    "divide_workspace",
    "micro_batch_sizes",
    "share",
]
