"""What models got in computed calls when they asked for numbers of their tensors, for calls that are followed."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from torch import nn

from distconv.fitting.beside import Chosen
from distconv.turns.asked_numbers import Answers, AskedNumbers, Question
from distconv.turns.data_dependent import NumbersOfCall

MOST_LINES = 3  # Lines of the program that are shown.


class AnswersOfModels:
    """The answers of each model's computed calls."""

    def __init__(self) -> None:
        self._known: weakref.WeakKeyDictionary[nn.Module, dict[Question, list[float]]] = weakref.WeakKeyDictionary()

    def asked(self, module: nn.Module) -> AskedNumbers:
        """What answers the questions of the model when it is followed."""
        return AskedNumbers(self._known.get(module, {}))

    def noting(self, module: nn.Module, chosen: Chosen) -> Callable[[], AbstractContextManager[None]]:
        """Returns a function that makes a context for a call of the model, whose answers are noted, if those were
        guessed when it was followed."""

        @contextmanager
        def noted() -> Iterator[None]:
            with NumbersOfCall() as numbers:
                yield
            self._known.setdefault(module, {}).update(numbers.answers)
            chosen.answered = True

        return noted

    def differ(self, module: nn.Module, guessed: Answers) -> bool:
        """Whether a computed call's numbers differ from guesses."""
        known = self._known.get(module, {})
        return any(known.get(question, guesses) != guesses for question, guesses in guessed.items())


def guessed_text(guessed: Answers) -> str:
    """Where numbers were guessed, for a line on the choice; empty where none were."""
    lines = sorted({question.line for question in guessed if question.line})  # backward has none
    if not lines:
        return ""
    shown = ", ".join(lines[:MOST_LINES]) + f" and {len(lines) - MOST_LINES} other lines" * (len(lines) > MOST_LINES)
    return f"; guessed, until this call has computed them: the numbers asked for at {shown}"
