"""A granted run gets its worker, or goes back at once."""

from __future__ import annotations

import functools
import logging
from typing import Optional

from leasecron_sync.backends.base import LeaseBackend
from leasecron_sync.engine.context import TIMER_LANE, Context
from leasecron_sync.engine.decide import Candidate, Origin
from leasecron_sync.engine.runtime import LiveRun
from leasecron_sync.errors import OutcomeUnknown, StoreError
from leasecron_sync.model import Lease, LeaseReply, Outcome, RunKey, RunState, Settlement
from leasecron_sync.run import LeaseRun, Run, RunControl

_logger = logging.getLogger("leasecron_sync.engine.starting")

STOPPING = "granted while stopping"
STILL_HERE = "an earlier handler of it still lives here"
NO_THREAD = "its thread could not be started"


class Starter:
    """Begins granted runs; keeps those that must go back until the store has taken them back.

    Args:
        context: This start of the scheduler.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._warned = False
        self._handing_back: dict[RunKey, tuple[Lease, int]] = {}

    @property
    def handing_back(self) -> bool:
        """True while the store has not taken a run back yet."""
        return bool(self._handing_back)

    def start(self, item: Candidate, reply: LeaseReply, sent_ms: int) -> None:
        """Begin a granted run.

        Args:
            item: The candidate.
            reply: The grant.
            sent_ms: Steady time before this claim was sent.
        """
        context = self._context
        job, key, lease = item.job, item.key, reply.lease
        # What a claim has won nobody else can have: a stop waits for its handler, while it can.
        too_late = context.given_up if lease is None else context.stopping
        if too_late.is_set():
            self._refuse(key, lease, STOPPING)
            return
        if context.runtime.bars_starting(job, key):
            self._refuse(key, lease, STILL_HERE)
            return
        live = self._live_run(item, lease, sent_ms)
        context.emit_of("run_claimed", live)
        if lease is not None and lease.takeover:
            context.emit_of("run_taken_over", live)
        # Before the thread: whoever stops the scheduler from here on sees this run.
        context.runtime.begin(live)
        if too_late.is_set():  # it may have looked before that
            context.runtime.end(live)
            self._refuse(key, lease, STOPPING)
            return
        try:
            context.spawn(context, live)
        except RuntimeError as error:
            if not context.stopping.is_set():  # else the interpreter is ending, which is no news
                self._warn_of_threads(error)
            context.runtime.end(live)
            self._refuse(key, lease, NO_THREAD)
        except BaseException:  # no memory: without its thread nobody would ever end it
            context.runtime.end(live)
            raise

    def _warn_of_threads(self, error: RuntimeError) -> None:
        """Warn once: where this goes on, every run goes to other instances."""
        if not self._warned:
            self._warned = True
            _logger.error("no thread can be started, runs are handed back error=%r", str(error))

    def _live_run(self, item: Candidate, lease: Optional[Lease], sent_ms: int) -> LiveRun:
        context = self._context
        options = context.options
        trusted_until_ms = None
        if lease is not None:
            # Never more than a whole lease: after a clock was set back the store may have shown
            # more, and take it back.
            left_ms = min(lease.left_ms, options.lease_ms)
            trusted_until_ms = sent_ms + left_ms - options.margin_ms
        control = RunControl(
            context.clock,
            trusted_until_ms=trusted_until_ms,
            time_limit_ms=item.job.options.time_limit_ms,
            on_lost=lambda: context.emit_of("run_lost", live),
        )
        if lease is None:
            run = Run(item.key, control)
        else:
            run = LeaseRun(item.key, control, lease.ref, lease.attempt)
        live = LiveRun(
            item.job,
            item.key,
            run,
            control,
            lease,
            began_ms=context.clock.steady_ms(),
            instance_id=context.instance_id,
            caught_up=item.origin is Origin.CAUGHT_UP,
        )
        return live

    def _refuse(self, key: RunKey, lease: Optional[Lease], reason: str) -> None:
        context = self._context
        if lease is None:
            # A claim cannot be given back.
            context.emit("run_failed", key, reason=reason)
            return
        until_ms = context.clock.steady_ms() + lease.left_ms
        self._handing_back[key] = (lease, until_ms)
        context.note_handed_over(key)
        context.emit(
            "run_handed_over",
            key,
            reason=reason,
            attempt=lease.attempt,
            token=lease.ref.token,
        )
        try:
            self.hand_back()
        except StoreError as error:
            _logger.debug("handing back is tried again job=%r error=%r", key.job, str(error))

    def hand_back(self, *, last: bool = False) -> None:
        """Tell the store of the runs that go back; tried again until their leases have lapsed.

        Args:
            last: True when there will be no other try.

        Raises:
            StoreError: The store did not answer, and there will be another try.
        """
        backend, clock = self._context.backend, self._context.clock
        for key, (lease, until_ms) in list(self._handing_back.items()):
            assert isinstance(backend, LeaseBackend)
            if clock.steady_ms() >= until_ms:
                del self._handing_back[key]
                self._context.note_unsettled(0)
                continue
            ref, settlement = lease.ref, Settlement(Outcome.HANDED_OVER, "handed back")
            try:
                reply = self._context.caller.call(
                    TIMER_LANE, functools.partial(backend.settle, ref, settlement)
                )
            except StoreError as error:
                if isinstance(error, OutcomeUnknown):  # others may have it by now
                    self._context.note_handed_over(key)
                if last:
                    continue
                raise
            del self._handing_back[key]
            if reply.state is RunState.WAITING:
                self._context.note_handed_over(key)  # from now on others can claim it
                self._context.note_unsettled(reply.wait_ms)
