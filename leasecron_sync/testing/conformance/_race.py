"""Threads that want the same thing at the same moment."""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from itertools import count
from typing import Callable, TypeVar

T = TypeVar("T")

RACE_LIMIT_S = 25.0
_races = count()


def race(contenders: Sequence[Callable[[], T]]) -> list[T]:
    """Call all of them at the same time, each on a thread of its own; return their results."""
    start = threading.Barrier(len(contenders))
    results: dict[int, T] = {}
    errors: list[BaseException] = []

    def contend(number: int, contender: Callable[[], T]) -> None:
        try:
            start.wait(RACE_LIMIT_S)
            results[number] = contender()
        except BaseException as error:  # noqa: BLE001 - raised again by the caller's thread
            errors.append(error)

    threads = [
        threading.Thread(target=contend, args=item, name=f"contender-{item[0]}", daemon=True)
        for item in enumerate(contenders)
    ]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)  # so that threads of one process get into each other's way
    try:
        # The one that is started last tends to come first, so the order changes each time.
        for thread in threads if next(_races) % 2 else threads[::-1]:
            thread.start()
        for thread in threads:
            thread.join(RACE_LIMIT_S)
    finally:
        sys.setswitchinterval(interval)
    assert not any(thread.is_alive() for thread in threads), "a contender did not come to its end"
    if errors:
        raise errors[0]
    return [results[number] for number in range(len(contenders))]
