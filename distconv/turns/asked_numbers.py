"""The numbers that a model asks of its tensors: `x.max().item()`, `if x.isnan().any():`, `x[x > 0]`.

While a call is followed, its tensors have no numbers. Then the answers are those of a computed call at the same line of
the program, and guesses at lines where there was none.
"""

from __future__ import annotations

import contextvars
import enum
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from distconv.tensors.user_lines import script_line

T = TypeVar("T")


class Kind(enum.Enum):
    """What is asked for: an element of one of three types, the share of elements that a function selects, or an array
    of NumPy, which is guessed to be of zeros."""

    BOOL, INTEGER, FLOAT, SHARE, ARRAY = range(5)

    @classmethod
    def of(cls, dtype: torch.dtype) -> Kind:
        """The kind of an element of a tensor of this type."""
        return cls.BOOL if dtype is torch.bool else cls.FLOAT if dtype.is_floating_point else cls.INTEGER


class Question(NamedTuple):
    """``line``: FILE:LINE of the program."""

    line: str
    kind: Kind


Answers = Mapping[Question, Sequence[float]]
"""The numbers that a call got, in the order in which it asked; more often asked, a question gets the last one."""

GUESSES = {Kind.INTEGER: 1, Kind.FLOAT: 1.0, Kind.SHARE: 1.0}
"""All elements are selected, so that memory suffices for any number of them. Bools are False at first, such as those of
a check for NaN."""

REPEATS = 8  # If a line gets one guess so many times, it gets another one: it may be a loop that waits for it.

MOST = 1000  # Questions at one line that are guessed; a loop that ends after none of these cannot be followed.

TRIES = 8  # How often a call is followed with other guesses, if it ends with an error.


class AskedNumbers:
    """Answers the questions of a call that is followed.

    ``known``: the answers of a computed call.

    Attributes:
        guessed: the guesses, by question, where there was no answer.
        values: how many elements and arrays were asked for, on which a program may decide what it does.
    """

    def __init__(self, known: Answers) -> None:
        self._known = known
        self.guessed: dict[Question, list[float]] = {}
        self.values = 0
        self._choices: list[bool] = []  # The guesses of bools, in the order in which they are asked.
        self._tries = 1
        self._bools = 0
        self._asked: dict[Question, int] = {}

    @contextmanager
    def answering(self) -> Iterator[None]:
        """A context in which the call is followed from its beginning."""
        self._bools, self._asked, self.guessed = 0, defaultdict(int), {}
        self.values, before = 0, _asked.set(self)
        own: Any = FakeTensor
        outer, own.numpy = vars(own).get("numpy"), _zeros
        try:
            yield
        finally:
            if outer is None:
                del own.numpy
            _asked.reset(before)

    def followed(self, follow: Callable[[], T]) -> T:
        """The result of ``follow``, which follows the call, or of another try with other guesses where that ends with
        an error. Raises the error of the last try."""
        while True:
            try:
                with self.answering():
                    return follow()
            except Exception:
                if not self._guess_differently():
                    raise

    def _guess_differently(self) -> bool:
        del self._choices[self._bools :]
        while self._choices and self._choices[-1]:
            self._choices.pop()
        if not self._choices or self._tries == TRIES:
            return False
        self._choices[-1] = True
        self._tries += 1
        return True

    def element(self, dtype: torch.dtype) -> float:
        """The only element of a tensor of this type."""
        self.values += 1
        return self._answer(Kind.of(dtype))

    def count(self, most: int) -> int:
        """How many of ``most`` elements a function selects."""
        return round(self._answer(Kind.SHARE) * most)

    def _answer(self, kind: Kind) -> float:
        question = Question(script_line(), kind)
        asked = self._asked[question]
        self._asked[question] += 1
        if known := self._known.get(question):
            return known[min(asked, len(known) - 1)]
        if asked == MOST:
            raise RuntimeError(f"{question.line} asks for a number more than {MOST} times")
        guess = self._guess(kind, asked // REPEATS % 2 == 1)
        self.guessed.setdefault(question, []).append(guess)
        return guess

    def _guess(self, kind: Kind, other: bool) -> float:
        if kind is not Kind.BOOL:
            return 0.0 if other and kind is Kind.FLOAT else GUESSES[kind]
        if self._bools == len(self._choices):
            self._choices.append(other)
        self._bools += 1
        return self._choices[self._bools - 1]


_asked: contextvars.ContextVar[AskedNumbers | None] = contextvars.ContextVar("distconv_asked", default=None)


def asked_here() -> AskedNumbers | None:
    """What answers the questions of the call that is followed; None where such a call ends with an error."""
    return _asked.get()


_NUMPY_TYPES = {
    dtype: torch.empty(0, dtype=dtype, device="cpu").numpy().dtype
    for dtype in (
        *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
        *(torch.float16, torch.float64, torch.complex64, torch.complex128),
    )
}


def _zeros(x: Tensor, *, force: bool = False) -> np.ndarray[Any, Any]:
    """Takes the place of `Tensor.numpy` of a tensor without numbers."""
    if (asked := asked_here()) is not None:
        asked.values += 1
        asked.guessed[Question(script_line(), Kind.ARRAY)] = []
    return np.zeros(x.shape, _NUMPY_TYPES.get(x.dtype, np.float32))
