"""A clock for the suites that are made for real stores."""

from __future__ import annotations

from leasecron_sync.testing.clock import ManualClock


class RunningClock(ManualClock):
    """A clock that nobody can hold: each reading is a millisecond later than the one before."""

    def now_ms(self) -> int:
        self.advance(1)
        return super().now_ms()
