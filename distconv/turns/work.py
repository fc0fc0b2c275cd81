"""What the operators of a call compute, and the memory that the call takes."""

from __future__ import annotations

from dataclasses import dataclass, field


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


@dataclass(frozen=True)
class Followed:
    """The memory of one call, with the backward of the sum of its results where asked for, and its transfers, in bytes.

    Attributes:
        peak: the most of all tensors on the device, parameters, inputs and results included.
        with_scratch: as ``peak``, with the scratch memory of torch's kernels on a processor.
        alone: as ``with_scratch``, without calls between forward and backward.
        whole: parameters, buffers and inputs, which the limit of the parts' tensors does not count.
        results: the results of the call, which it does not count either.
        spilled, fetched: storages that leave the device, and that return.
        exchanged: what parts receive from each other.
        sent: what parts send to those of other ranks, besides gradients of parameters and results.
        work: of all operators.
        kept: what is on the device between forward and backward, besides ``whole`` and ``results``; where one part was
            followed for all.
    """

    peak: int
    whole: int
    results: int = 0
    spilled: int = 0
    fetched: int = 0
    exchanged: int = 0
    sent: int = 0
    work: Work = field(default_factory=Work)
    with_scratch: int = 0
    alone: int = 0
    kept: int = 0

    @property
    def limited(self) -> int:
        """The bytes that the limit of the parts' tensors counts."""
        return self.peak - self.whole - self.results

    @property
    def moved(self) -> int:
        """The bytes that leave the device and return, together."""
        return self.spilled + self.fetched
