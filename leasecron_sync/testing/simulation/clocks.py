"""Clocks of simulated hosts and of the store: readings of one time, each wrong in its own way."""

from __future__ import annotations

import threading
from typing import Callable

from leasecron_sync.testing.clock import ManualClock
from leasecron_sync.testing.simulation.plan import HostPlan

MILLION = 1_000_000


class Time:
    """How long the history has been going on.

    Attributes:
        now_ms: Milliseconds since its beginning.
    """

    def __init__(self) -> None:
        self.now_ms = 0


class HostClock(ManualClock):
    """Both clocks of a host; they go on with the time of the history.

    Args:
        time: The time of the history.
        plan: How wrong they are.
        begin_ms: The right time at the beginning.
        sleep: Lets a time pass in the thread that waits; returns early when the event is set.
    """

    def __init__(
        self,
        time: Time,
        plan: HostPlan,
        begin_ms: int,
        sleep: Callable[[threading.Event, int], None],
    ) -> None:
        super().__init__()
        self.time = time
        self._speed_ppm = plan.speed_ppm
        self._boot_ms = plan.boot_ms
        self._ahead_ms = begin_ms + plan.skew_ms - plan.boot_ms  # of the steady clock
        self._sleep = sleep

    def now_ms(self) -> int:
        """Return the wall clock."""
        return self.steady_ms() + self._ahead_ms

    def steady_ms(self) -> int:
        """Return the clock that never jumps."""
        now_ms = self.time.now_ms
        if self._speed_ppm:
            return self._boot_ms + now_ms + now_ms * self._speed_ppm // MILLION
        return self._boot_ms + now_ms

    def wait(self, event: threading.Event, timeout_ms: int) -> bool:
        """Let others work meanwhile."""
        if not event.is_set():
            self._sleep(event, timeout_ms)
        return event.is_set()

    def step(self, ms: int) -> None:
        """Set the wall clock alone."""
        self._ahead_ms += ms

    def when(self, steady_ms: int) -> int:
        """Return the time of the history at which the steady clock shows that."""
        left_ms = steady_ms - self._boot_ms
        if not self._speed_ppm:
            return left_ms
        at_ms = left_ms * MILLION // (MILLION + self._speed_ppm)
        while at_ms + at_ms * self._speed_ppm // MILLION < left_ms:  # what was cut off
            at_ms += 1
        return at_ms


class StoreClock(ManualClock):
    """The store's clock.

    Args:
        time: The time of the history.
        begin_ms: Its reading at the beginning.
    """

    def __init__(self, time: Time, begin_ms: int) -> None:
        super().__init__()
        self.time = time
        self._ahead_ms = begin_ms

    def now_ms(self) -> int:
        """Return its reading."""
        return self.time.now_ms + self._ahead_ms

    def steady_ms(self) -> int:
        """Return the time of the history: nobody asks a store for it."""
        return self.time.now_ms

    def step(self, ms: int) -> None:
        """Set it."""
        self._ahead_ms += ms
