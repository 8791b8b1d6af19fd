"""Prunes the store's history in small steps, and looks after the connection."""

from __future__ import annotations

from typing import Optional

from leasecron_sync.backends.base import LeaseBackend
from leasecron_sync.engine.caller import Backoff
from leasecron_sync.engine.context import TIMER_LANE, Context
from leasecron_sync.errors import StoreError
from leasecron_sync.model import Reason
from leasecron_sync.options import PRUNE_LIMIT, UPKEEP_MS

MORE_MS = 1_000
"""After a step that deleted as much as it may, the next one comes this soon."""


class Upkeep:
    """Prunes after claims only: an idle scheduler asks its store nothing.

    Args:
        context: This start of the scheduler.
        backend: Its lease backend.
    """

    def __init__(self, context: Context, backend: LeaseBackend) -> None:
        self._context = context
        self._backend = backend
        self._next_ms = 0  # after the first claim: a process may be too short for a later one
        self._claimed = False
        self._backoff = Backoff(UPKEEP_MS)

    def note_claim(self) -> None:
        """Note that something was claimed."""
        self._claimed = True

    def step(self) -> bool:
        """Prune if it is time; tell whether the store was asked.

        Raises:
            StoreError: The store did not answer; it is asked again after a growing while.
        """
        context, steady_ms = self._context, self._context.clock.steady_ms()
        if not self._claimed or steady_ms < self._next_ms:
            return False
        self._next_ms = steady_ms + UPKEEP_MS
        history_ms = context.options.history_ms
        try:
            with context.caller.asking("prune"):
                pruned = context.caller.call(
                    TIMER_LANE, lambda: self._backend.prune(history_ms, PRUNE_LIMIT)
                )
        except StoreError:  # once it was refused, the outage lasts until it is answered
            self._next_ms = steady_ms + self._backoff.next_ms()
            raise
        self._backoff.reset()
        for key in pruned.abandoned:
            context.emit("run_failed", key, reason=Reason.ABANDONED.value)
        self._claimed = pruned.deleted >= PRUNE_LIMIT
        if self._claimed:
            self._next_ms = steady_ms + MORE_MS
        return True


class Tending:
    """Looks after the connection of a backend that wants it, between other calls.

    Args:
        context: This start of the scheduler.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self.next_ms: Optional[int] = 0
        """Steady time at which it is wanted again; None when it is not."""

    def step(self) -> None:
        """Look after it if it is time.

        Raises:
            StoreError: The store did not answer; the next step tries again.
        """
        steady_ms = self._context.clock.steady_ms()
        if self.next_ms is None or steady_ms < self.next_ms:
            return
        again_ms = self._context.caller.call(TIMER_LANE, self._context.backend.tend)
        self.next_ms = None if again_ms is None else steady_ms + again_ms
