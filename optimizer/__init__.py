"""The mathematics of dividing convolutions and of choosing partitions: numbers in, decisions out, no torch."""

if __name__ != "mucudnn.optimizer":
    # With a checkout on the path this folder is found under its bare name, which belongs to the user's programs.
    raise ModuleNotFoundError(f"No module named {__name__!r}", name=__name__)

from mucudnn.optimizer.assign import CandidateChoice, DoesNotFit, assign
from mucudnn.optimizer.costs import Costs, Forecast
from mucudnn.optimizer.exploration import Exploration, Settled, Trial
from mucudnn.optimizer.launches import Launches, Variant
from mucudnn.optimizer.option import Division, Key, Option
from mucudnn.optimizer.overhead_budget import OverheadBudget
from mucudnn.optimizer.part_sizes import PartSizes
from mucudnn.optimizer.reuse import POLICIES, best_division, desirable_divisions, desirable_set, micro_batch_sizes
from mucudnn.optimizer.sharing import share
from mucudnn.optimizer.timeline import StepTimeline, common

__all__ = [
    "POLICIES",
    "CandidateChoice",
    "Costs",
    "Division",
    "DoesNotFit",
    "Exploration",
    "Forecast",
    "Key",
    "Launches",
    "Option",
    "OverheadBudget",
    "PartSizes",
    "Settled",
    "StepTimeline",
    "Trial",
    "Variant",
    "assign",
    "best_division",
    "common",
    "desirable_divisions",
    "desirable_set",
    "micro_batch_sizes",
    "share",
]
