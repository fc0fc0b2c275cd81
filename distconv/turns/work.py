"""What the operators of a call compute."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Work:
    """The work of some operators.

    Attributes:
        operations: of convolutions and products of matrices, a multiplication and an addition being two.
        bytes: what the operators read and make, except for those that only make a view.
        operators: their number.
    """

    operations: int = 0
    bytes: int = 0
    operators: int = 0

    def plus(self, other: Work, times: int = 1) -> Work:
        """The work of both, of the other one so many times."""
        return Work(
            self.operations + times * other.operations,
            self.bytes + times * other.bytes,
            self.operators + times * other.operators,
        )
