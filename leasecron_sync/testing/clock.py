"""A clock that goes on only when a test says so."""

from __future__ import annotations

import threading


class ManualClock:
    """Both clocks of a host, moved by hand; a ``leasecron_sync.clock.Clock``.

    The two readings begin far apart, so that code that mixes them up does not work by accident.

    Args:
        now_ms: First reading of the wall clock; somewhere in 2023 when left out, so that code that
            reads the real clock beside this one is noticed.
        steady_ms: First reading of the steady clock.
    """

    def __init__(self, now_ms: int = 1_700_000_000_000, steady_ms: int = 5_000_000) -> None:
        self._lock = threading.Lock()
        self._now_ms = now_ms
        self._steady_ms = steady_ms

    def __repr__(self) -> str:
        """Show both readings."""
        return f"ManualClock(now_ms={self.now_ms()}, steady_ms={self.steady_ms()})"

    def now_ms(self) -> int:
        """Return the wall clock."""
        with self._lock:
            return self._now_ms

    def steady_ms(self) -> int:
        """Return the clock that never jumps."""
        with self._lock:
            return self._steady_ms

    def wait(self, event: threading.Event, timeout_ms: int) -> bool:
        """Let the whole time-out pass at once, unless the event is set already.

        Returns:
            Whether the event is set.
        """
        if not event.is_set():
            self.advance(max(0, timeout_ms))
        return event.is_set()

    def advance(self, ms: int) -> None:
        """Let time pass on both clocks.

        Args:
            ms: How much; never negative, since the steady clock does not go back.

        Raises:
            ValueError: It is negative.
        """
        if ms < 0:
            message = f"time does not go back by {-ms} ms: step() sets the wall clock alone"
            raise ValueError(message)
        with self._lock:
            self._now_ms += ms
            self._steady_ms += ms

    def step(self, ms: int) -> None:
        """Set the wall clock alone, ahead or (negative) back, as an administrator does."""
        with self._lock:
            self._now_ms += ms
