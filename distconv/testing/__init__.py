"""Tests for a program of one's own: they compare a model on several ranks with the same model on one.

pytest offers `assert_same_on_ranks` as a fixture wherever distconv is installed.
"""

from distconv.private_names import check
from mucudnn.lazily import attributes

__all__ = ["assert_same_on_ranks"]

__getattr__ = attributes(__name__, {"distconv.testing.comparison": set(__all__)}, check)
