"""Random choices that are the same in every process and on every Python."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


class Dice:
    """A stream of choices that its name decides.

    Of ``random`` only ``random()`` is used: what it yields for a seed is promised to stay, what
    ``choice`` and ``randint`` make of it is not.

    Args:
        name: What is thrown for; streams of other names are independent of it.
    """

    def __init__(self, name: str) -> None:
        self._random = random.Random(name).random  # noqa: S311 - repeatable on purpose

    def below(self, number: int) -> int:
        """Return a number from 0 to one less than ``number``."""
        return int(self._random() * number)

    def between(self, low: int, high: int) -> int:
        """Return a number from ``low`` to ``high``, both included."""
        return low + int(self._random() * (high - low + 1))

    def pick(self, choices: Sequence[T]) -> T:
        """Return one of them."""
        return choices[int(self._random() * len(choices))]

    def chance(self, permille: int) -> bool:
        """Return true so many times in a thousand."""
        return self._random() * 1_000 < permille

    def gap(self, permille: int, limit: int) -> int:
        """Return how many failures come before the next success of that probability."""
        count = 0
        while count < limit and self._random() * 1_000 >= permille:
            count += 1
        return count
