"""The only module that reads a clock."""

from __future__ import annotations

import threading
import time
from typing import Protocol


class Clock(Protocol):
    """Two readings in whole milliseconds, and a wait."""

    def now_ms(self) -> int:
        """Return the wall clock: milliseconds since the epoch, UTC. It may jump."""
        ...

    def steady_ms(self) -> int:
        """Return a clock that never jumps and also counts the time of a suspended machine."""
        ...

    def wait(self, event: threading.Event, timeout_ms: int) -> bool:
        """Wait until the event is set or the time has passed; tell whether it is set."""
        ...


# The monotonic clock of Linux stands still while the machine is suspended. Trust in a lease that
# was measured with it would survive the suspension, and the lease would not.
_STEADY = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


class SystemClock:
    """The clocks of this host."""

    def now_ms(self) -> int:
        """Return the host's wall clock."""
        return time.time_ns() // 1_000_000

    def steady_ms(self) -> int:
        """Return CLOCK_BOOTTIME where the platform has it, else the monotonic clock."""
        return time.clock_gettime_ns(_STEADY) // 1_000_000

    def wait(self, event: threading.Event, timeout_ms: int) -> bool:
        """Wait by the monotonic clock, which stands still while the machine is suspended."""
        return event.wait(timeout_ms / 1000)
