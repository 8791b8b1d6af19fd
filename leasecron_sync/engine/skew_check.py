"""Compares the store's clock with the host's from time to time."""

from __future__ import annotations

from leasecron_sync.engine.context import TIMER_LANE, Context

EVERY_MS = 60_000
"""After claims, the clocks are compared this often; an idle scheduler asks its store nothing."""


class SkewCheck:
    """Keeps the known skew from going stale: hosts drift, and somebody sets them right.

    Args:
        context: This start of the scheduler.
        soon: True when nothing else compares the clocks at the start.
    """

    def __init__(self, context: Context, *, soon: bool) -> None:
        self._context = context
        self._wanted = soon
        self._claimed = False
        self._next_ms = context.clock.steady_ms() + EVERY_MS

    def want(self) -> None:
        """Compare in the next step, after the wall clock was set."""
        self._wanted = True

    def note_claim(self) -> None:
        """Note that something was claimed."""
        self._claimed = True

    def step(self) -> None:
        """Compare if it is time.

        Raises:
            StoreError: The store did not answer; the next step asks again.
        """
        sent_steady_ms = self._context.clock.steady_ms()
        if not self._wanted and not (self._claimed and sent_steady_ms >= self._next_ms):
            return
        info = self._context.caller.probe(TIMER_LANE, self._context.backend.probe)
        self._wanted = self._claimed = False
        self._next_ms = sent_steady_ms + EVERY_MS
        if info is not None and info.store_ms is not None:
            self._context.caller.compare_clocks(info.store_ms, sent_steady_ms)
