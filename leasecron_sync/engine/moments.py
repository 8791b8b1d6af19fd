"""Instants at which candidates are to be looked at again. Pure."""

from __future__ import annotations

import heapq
from typing import Callable, Optional

from leasecron_sync.engine.decide import Candidate

SLACK = 64
"""Instants of candidates that are gone: so many may stay, and as many more as there are others."""


class Moments:
    """Instants with a candidate each, the earliest first.

    What was put in cannot be taken out: an instant that has become wrong is put right by another
    one, and who gets its candidate looks whether it is still so.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Candidate]] = []
        self._order = 0

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self._heap)

    def put(self, at_ms: int, item: Candidate) -> None:
        """Note an instant."""
        self._order += 1
        heapq.heappush(self._heap, (at_ms, self._order, item))

    def passed(self, until_ms: int) -> list[Candidate]:
        """Take out the candidates whose instants have come."""
        found: list[Candidate] = []
        while self._heap and self._heap[0][0] <= until_ms:
            found.append(heapq.heappop(self._heap)[2])
        return found

    def next_ms(self, valid: Callable[[Candidate, int], bool]) -> Optional[int]:
        """Return the earliest instant that is still right.

        Args:
            valid: Whether a candidate is to be looked at, at an instant.
        """
        while self._heap:
            at_ms, _order, item = self._heap[0]
            if valid(item, at_ms):
                return at_ms
            heapq.heappop(self._heap)
        return None

    def trim(self, live: int, valid: Callable[[Candidate, int], bool]) -> None:
        """Forget what is not right any more, once it is most of all.

        Args:
            live: How many candidates there are.
            valid: See ``next_ms``.
        """
        if len(self._heap) > 2 * live + SLACK:
            # Of an instant that was noted twice, one stays.
            kept = {id(entry[2]): entry for entry in self._heap if valid(entry[2], entry[0])}
            self._heap = [*kept.values()]
            heapq.heapify(self._heap)
