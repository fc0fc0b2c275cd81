"""The mathematics of dividing convolutions: numbers in, decisions out, no torch."""

if __name__ != "mucudnn.optimizer":
    # With a checkout on the path this folder is found under its bare name, which belongs to the user's programs.
    raise ModuleNotFoundError(f"No module named {__name__!r}", name=__name__)

from mucudnn.optimizer.option import Division, Option
from mucudnn.optimizer.pareto import desirable_divisions, desirable_set
from mucudnn.optimizer.reuse import POLICIES, best_division, micro_batch_sizes
from mucudnn.optimizer.sharing import Sharing, divide_workspace, share
from mucudnn.optimizer.timeline import Timeline, common

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
