"""When to look for runs that somebody else left unsettled."""

from __future__ import annotations

from typing import Optional

from leasecron_sync.model import Pending, RunKey
from leasecron_sync.options import STILL_MS

EVERY_MS = 1_000
"""An instance that knows of an unsettled run it does not hold looks at least this often."""

FULL_MS = 100
"""After an answer that was cut off at its limit, it looks again this soon."""

MAX_LAPSES = 1_000
"""Leases that are remembered to lapse; the earliest ones count."""


class Standby:
    """Remembers whether there may be something to take over, and when to look.

    An instance that knows of no unsettled run asks nothing.
    """

    def __init__(self) -> None:
        self._ask_ms: Optional[int] = 0  # steady time; the first look is at the start
        self._lapses: list[int] = []
        self._not_before_ms = 0
        self._handed_over: dict[RunKey, int] = {}
        self._said_ms: Optional[int] = None

    def note(self, wait_ms: int, steady_ms: int) -> None:
        """Note an unsettled run that may become claimable after a wait."""
        ask_ms = steady_ms + min(max(wait_ms, 1), EVERY_MS)
        self._ask_ms = ask_ms if self._ask_ms is None else min(self._ask_ms, ask_ms)

    def expect_lapse(self, lapse_ms: int) -> None:
        """Note a lease that nobody may be holding: look when it has lapsed, at a steady time.

        It is one that this instance may have been granted without knowing it, so that the store
        would not call it somebody else's before.
        """
        self._lapses = sorted({*self._lapses, lapse_ms})[:MAX_LAPSES]

    def hold_off(self, until_ms: int) -> None:
        """Take nothing over before a steady time, so that holders can renew first."""
        self._not_before_ms = max(self._not_before_ms, until_ms)

    def handed_over(self, key: RunKey, until_ms: int) -> None:
        """Leave a run to other instances until a steady time."""
        self._handed_over[key] = until_ms

    def stands_back(self, key: RunKey, steady_ms: int) -> bool:
        """Tell whether a run was handed over here and is left to other instances."""
        return self._handed_over.get(key, steady_ms) > steady_ms

    def ask_ms(self) -> Optional[int]:
        """Return the steady time of the next look; None when nothing is known."""
        times = [*self._lapses[:1]] + ([] if self._ask_ms is None else [self._ask_ms])
        return max(min(times), self._not_before_ms) if times else None

    def asking(self, steady_ms: int) -> None:
        """Note that the look begins; what is noted from now on calls for another one."""
        self._ask_ms = None
        self._lapses = [lapse_ms for lapse_ms in self._lapses if lapse_ms > steady_ms]

    def answered(self, pending: Pending, limit: int, steady_ms: int) -> list[RunKey]:
        """Note an answer; return the runs to claim."""
        self._handed_over = {
            key: until_ms for key, until_ms in self._handed_over.items() if until_ms > steady_ms
        }
        if pending.unsettled:
            # One more, for a lease lapses at its end, not before.
            next_ms = EVERY_MS if pending.next_in_ms is None else pending.next_in_ms + 1
            if not pending.keys and pending.next_in_ms == self._said_ms:
                next_ms = max(next_ms, STILL_MS)
            self.note(next_ms if len(pending.keys) < limit else FULL_MS, steady_ms)
        self._said_ms = pending.next_in_ms
        return [key for key in pending.keys if key not in self._handed_over]
