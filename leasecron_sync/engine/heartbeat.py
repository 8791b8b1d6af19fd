"""Renews all leases of this instance in one call."""

from __future__ import annotations

from leasecron_sync.backends.base import LeaseBackend
from leasecron_sync.engine.caller import Backoff
from leasecron_sync.engine.context import HEARTBEAT_LANE, Context
from leasecron_sync.engine.runtime import LiveRun
from leasecron_sync.errors import StoreError
from leasecron_sync.model import RenewReply
from leasecron_sync.options import MAX_WAIT_MS


class HeartbeatLoop:
    """One round of renewals per step, on a lane of its own.

    Args:
        context: This start of the scheduler.
        backend: Its lease backend.
    """

    def __init__(self, context: Context, backend: LeaseBackend) -> None:
        self._context = context
        self._backend = backend
        self._backoff = Backoff(max(50, context.options.heartbeat_ms // 4))
        self._retry_ms = 0
        self._idle = True

    def step(self) -> int:
        """Renew what is due; return ms until the next call."""
        context = self._context
        runs = context.runtime.renewable()
        if not runs:
            if not self._idle:
                self._idle = True
                context.caller.forget(HEARTBEAT_LANE)
            return MAX_WAIT_MS
        self._idle = False
        next_ms = self._next_ms(runs)
        if context.clock.steady_ms() >= next_ms:
            self._renew(runs, context.clock.steady_ms())
            next_ms = self._next_ms(context.runtime.renewable())
        return max(0, next_ms - context.clock.steady_ms())

    def _next_ms(self, runs: list[LiveRun]) -> int:
        """Return the steady time of the next round: when the oldest of the leases calls for it.

        Most runs end before that. A round in between would only write what nobody needs.
        """
        options = self._context.options
        trusted_ms = options.lease_ms - options.margin_ms
        oldest_ms = min((live.control.trusted_until_ms - trusted_ms for live in runs), default=None)
        if oldest_ms is None:
            return self._context.clock.steady_ms() + MAX_WAIT_MS
        # One that came with little time left, after a reply that was lost, counts as that old.
        return max(oldest_ms + options.heartbeat_ms, self._retry_ms)

    def _renew(self, runs: list[LiveRun], sent_ms: int) -> None:
        """Make one call."""
        context = self._context
        lease_ms = context.options.lease_ms
        refs = [live.lease.ref for live in runs if live.lease is not None]
        try:
            replies = context.caller.call_all(
                HEARTBEAT_LANE, lambda: self._backend.renew(refs, lease_ms), len(refs)
            )
        except StoreError:
            # Trust runs on: what is not renewed in time is lost by the clock, without an answer.
            self._retry_ms = context.clock.steady_ms() + self._backoff.next_ms()
            return
        self._backoff.reset()
        # Counted from before the call was sent: the store cannot have renewed it earlier.
        trusted_until_ms = sent_ms + lease_ms - context.options.margin_ms
        for live, reply in zip(runs, replies):
            if reply is RenewReply.RENEWED:
                live.control.trust_until(trusted_until_ms)
            elif live.done:
                live.refused = True  # it is settled, or being settled: it has no lease to lose
            else:
                live.control.refuse()
                context.note_unsettled(context.options.lease_ms)
