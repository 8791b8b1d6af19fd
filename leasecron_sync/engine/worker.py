"""One run: call the handler, judge how it ended, settle."""

from __future__ import annotations

import inspect
import logging
import os
import random
from contextlib import ExitStack
from typing import NamedTuple, Optional

from leasecron_sync.backends.base import LeaseBackend
from leasecron_sync.engine.caller import Backoff
from leasecron_sync.engine.context import Context
from leasecron_sync.engine.runtime import LiveRun
from leasecron_sync.errors import (
    HandOver,
    OutcomeUnknown,
    RunLost,
    RunStopping,
    RunTimeLimit,
    StoreError,
)
from leasecron_sync.model import Lease, Outcome, Reason, RunState, Settlement, SettleReply
from leasecron_sync.options import MAX_REASON
from leasecron_sync.protocol.transition import MAX_RETRY_DELAY_MS

_logger = logging.getLogger("leasecron_sync.engine.worker")

STARTS_FIRST_MS = 25
"""How long the end of a run waits while the timer claims others: they are late, it is not, and runs
that end meanwhile can be settled together."""

NOT_STARTED = "not started in time"
STOPPING = "stopping"
HANDED_OVER = "handed over by the handler"


class Ending(NamedTuple):
    """How an attempt ended.

    Attributes:
        outcome: Finished, failed or handed over.
        reason: Why, where it did not finish.
        error: What the handler raised, where that is news to somebody.
    """

    outcome: Outcome
    reason: str = ""
    error: Optional[BaseException] = None


class _TooLate(Exception):
    """The lease was not trusted any more when the handler was about to be called."""


def execute(context: Context, live: LiveRun) -> None:
    """Do all the work of a run's thread."""
    pid = os.getpid()
    try:
        ending = call_handler(context, live)
        if os.getpid() != pid:
            return
        context.clock.wait(context.claimed, STARTS_FIRST_MS)
        settling = Settling(context, live, ending)
        delay_ms = settling.step()
        while delay_ms is not None:
            context.clock.wait(live.give_up, delay_ms)
            delay_ms = settling.step()
    except Exception:
        if os.getpid() != pid:
            raise
        _logger.exception("settling failed job=%r", live.key.job)
    finally:
        if os.getpid() == pid:
            finish(context, live)


def finish(context: Context, live: LiveRun) -> None:
    """Give the slot back and tell the timer."""
    live.done = True
    context.runtime.end(live)
    context.wake_timer()


def call_handler(context: Context, live: LiveRun) -> Ending:
    """Call the handler, unless its lease was lost on the way; never raises in this process.

    In a child that the handler forked, what it raised goes on, and nothing is judged.
    """
    pid = os.getpid()
    error: Optional[BaseException] = None
    try:
        _call(context, live)
    except _TooLate:
        live.done = True
        return Ending(Outcome.HANDED_OVER, NOT_STARTED)
    except BaseException as raised:  # SystemExit and KeyboardInterrupt end this run alone
        if os.getpid() != pid:
            raise
        error = raised
    if os.getpid() == pid:
        live.done = True
    return judge(live, error)


def _call(context: Context, live: LiveRun) -> None:
    around_run, pid = context.options.around_run, os.getpid()
    with ExitStack() as stack:
        if around_run is not None:
            stack.enter_context(around_run(live.run))
            if os.getpid() != pid:
                return  # it has forked, and the run is the parent's
        # This thread may have been held up for long; what is late is not announced.
        _look(live)
        context.emit_of("run_started", live)
        # The last look, with nothing between it and the work: a log handler may block for long.
        _look(live)
        live.control.started()
        result = live.job.handler(live.run) if live.job.wants_run else live.job.handler()
        if inspect.iscoroutine(result):
            result.close()
            message = (
                "the handler returned a coroutine, so nothing was executed: give a plain function, "
                "for example one that calls asyncio.run()"
            )
            raise TypeError(message)


def _look(live: LiveRun) -> None:
    if not live.control.trusted:
        raise _TooLate


def judge(live: LiveRun, error: Optional[BaseException]) -> Ending:
    """Tell how an attempt ended from what its handler raised."""
    if live.control.timed_out or isinstance(error, RunTimeLimit):
        return Ending(Outcome.FAILED, Reason.TIME_LIMIT.value)
    if error is None:
        return Ending(Outcome.FINISHED)
    if isinstance(error, HandOver):
        return Ending(Outcome.HANDED_OVER, HANDED_OVER)
    if isinstance(error, RunStopping):
        return Ending(Outcome.HANDED_OVER, STOPPING)
    if isinstance(error, RunLost):
        return Ending(Outcome.FAILED, Reason.LEASE_LOST.value)
    return Ending(Outcome.FAILED, error_text(error), error)


def error_text(error: BaseException) -> str:
    """Return the type and text of an error, as long as a record may keep it."""
    try:
        text = f"{type(error).__name__}: {error}"
    except BaseException:  # noqa: BLE001 - an error's own __str__ may raise anything
        text = type(error).__name__
    return text.encode("utf-8", "replace").decode("utf-8").replace("\0", "\\0")[:MAX_REASON]


def retry_delay_ms(lease: Lease, base_ms: int) -> int:
    """Return the wait before the next attempt: doubled for each counted failure, with jitter."""
    doubled_ms = base_ms << min(lease.failures, 20)
    # The jitter keeps runs that failed together, of one cause, from coming back together.
    return round(min(MAX_RETRY_DELAY_MS, doubled_ms * random.uniform(1.0, 1.25)))  # noqa: S311


class Settling:
    """Reports how an attempt ended, until the store has answered or it makes no sense any more.

    Args:
        context: This start of the scheduler.
        live: The run.
        ending: How it ended.
    """

    def __init__(self, context: Context, live: LiveRun, ending: Ending) -> None:
        self._context = context
        self._live = live
        self._ending = ending
        self._lane = f"settle {live.key.job} {live.key.scheduled_ms}"
        self._backoff: Optional[Backoff] = None
        self._unknown = False
        self._settlement = self._make_settlement()  # once: a repeat asks for the same wait
        self._until_ms = context.clock.steady_ms() + live.job.takeover_ms

    def step(self) -> Optional[int]:
        """Ask once; return ms until the next try, None when there is no more to do."""
        context, lease = self._context, self._live.lease
        if lease is None:
            self._report_claimed()
            return None
        backend = context.backend
        assert isinstance(backend, LeaseBackend)
        settlement = self._settlement
        try:
            reply = context.caller.call(self._lane, lambda: backend.settle(lease.ref, settlement))
        except StoreError as error:
            return self._failed(error)
        context.caller.forget(self._lane)
        self._report(reply)
        return None

    def _make_settlement(self) -> Settlement:
        lease, delay_ms = self._live.lease, 0
        if self._ending.outcome is Outcome.FAILED and lease is not None:
            delay_ms = retry_delay_ms(lease, self._live.job.options.retry_delay_ms)
        return Settlement(self._ending.outcome, self._ending.reason, delay_ms)

    def _failed(self, error: StoreError) -> Optional[int]:
        context, live = self._context, self._live
        self._unknown = self._unknown or isinstance(error, OutcomeUnknown)
        over = live.give_up.is_set() or context.clock.steady_ms() >= self._until_ms
        if not over:
            if self._backoff is None:
                self._backoff = Backoff()
            return self._backoff.next_ms()
        context.caller.forget(self._lane)
        _logger.error(
            "the end of a run was not told to the store, another instance may run it again "
            "job=%r scheduled_ms=%d outcome=%s error=%r",
            live.key.job,
            live.key.scheduled_ms,
            self._ending.outcome.value,
            str(error),
        )
        self._tell_unknown()
        context.note_unsettled(0)
        return None

    def _report(self, reply: SettleReply) -> None:
        context, live, ending = self._context, self._live, self._ending
        if not reply.accepted:
            if self._unknown:
                # An earlier try may have been accepted, and the run claimed by another since.
                self._tell_unknown()
            else:
                live.control.refuse()
            if reply.state is None:
                self._report_forgotten()
        elif reply.state is RunState.FINISHED:
            context.emit_of("run_finished", live)
        elif reply.state is RunState.FAILED:
            context.emit_of("run_failed", live, reason=ending.reason, error=ending.error)
        elif ending.outcome is Outcome.HANDED_OVER:
            context.emit_of("run_handed_over", live, reason=ending.reason)
        else:
            context.emit_of(
                "run_retried",
                live,
                reason=ending.reason,
                error=ending.error,
                delay_ms=reply.wait_ms,
            )
        if reply.state is RunState.WAITING:
            if ending.outcome is Outcome.HANDED_OVER:
                context.note_handed_over(live.key)
            context.note_unsettled(reply.wait_ms)

    def _report_forgotten(self) -> None:
        """Tell of a run that the store knows nothing of; look back, unless it is done."""
        context, live = self._context, self._live
        _logger.error(
            "the store has no record of a run that was won here: it has lost its newest data, or "
            "somebody has deleted them job=%r scheduled_ms=%d outcome=%s",
            live.key.job,
            live.key.scheduled_ms,
            self._ending.outcome.value,
        )
        if self._ending.outcome is not Outcome.FINISHED:
            context.note_forgotten(live.key.job)  # nobody else knows that it is not done

    def _tell_unknown(self) -> None:
        if not self._live.control.known_lost:  # a loss is told once
            self._context.emit_of("run_lost", self._live, reason=Reason.UNKNOWN_OUTCOME.value)

    def _report_claimed(self) -> None:
        """A claim backend keeps nothing: the end is only reported."""
        context, live, ending = self._context, self._live, self._ending
        if ending.outcome is Outcome.FINISHED:
            context.emit_of("run_finished", live)
        else:
            context.emit_of("run_failed", live, reason=ending.reason, error=ending.error)
