"""Processes that want the same thing at the same moment, round after round."""

from __future__ import annotations

import multiprocessing
import time
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Callable

LIMIT_S = 30.0


@dataclass(frozen=True)
class Seat:
    """The place of one process.

    Attributes:
        url: Of the store.
        namespace: The same for all.
        rank: Its number.
        began_ms: When all of it began; the same for all.
    """

    url: str
    namespace: str
    rank: int
    began_ms: int


Claim = Callable[[], str]
Rounds = Callable[[int], Claim]
"""Prepares a round by its number; what it returns claims, and returns the verdict."""
Contender = Callable[[Seat], AbstractContextManager[Rounds]]
"""Gives the rounds of one process."""


def play(
    contender: Contender, places: dict[str, str], namespace: str, *, processes: int, rounds: int
) -> dict[str, list[tuple[str, ...]]]:
    """Let processes contend; return for each place the verdicts of each round.

    Args:
        contender: A function of a module, for other processes to find.
        places: URLs by their names; one after the other.
        namespace: For all of them.
        processes: How many.
        rounds: At each place.
    """
    context = multiprocessing.get_context("spawn")
    barrier, told = context.Barrier(processes), context.Queue()
    began_ms = time.time_ns() // 1_000_000
    seats = [
        [Seat(url, namespace, rank, began_ms) for url in places.values()]
        for rank in range(processes)
    ]
    contenders = [
        context.Process(target=_take_part, args=(contender, of_one, rounds, barrier, told))
        for of_one in seats
    ]
    for process in contenders:
        process.start()
    limit_s = 2 * LIMIT_S + len(places) * (LIMIT_S + rounds / 4)
    verdicts = [told.get(timeout=limit_s) for _ in contenders]
    for process in contenders:
        process.join(LIMIT_S)
    assert [process.exitcode for process in contenders] == [0] * processes
    return {
        name: list(zip(*(of_one[place] for of_one in verdicts)))
        for place, name in enumerate(places)
    }


def _take_part(
    contender: Contender,
    seats: list[Seat],
    rounds: int,
    barrier: Any,  # noqa: ANN401 - of a context
    told: Any,  # noqa: ANN401 - likewise
) -> None:
    verdicts: list[list[str]] = []
    try:
        for seat in seats:
            verdicts.append([])
            with contender(seat) as prepare:
                for number in range(rounds):
                    claim = prepare(number)
                    barrier.wait(LIMIT_S)
                    verdicts[-1].append(claim())
    finally:
        told.put(verdicts)
