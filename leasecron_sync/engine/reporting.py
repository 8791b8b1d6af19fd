"""What the timer reports: decisions of its own commands, and what it missed."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Optional

from leasecron_sync.backends.base import LeaseBackend
from leasecron_sync.engine.agenda import Gap
from leasecron_sync.engine.catch_up import CatchUp
from leasecron_sync.engine.claiming import Answer
from leasecron_sync.engine.context import TIMER_LANE, Context
from leasecron_sync.engine.decide import Candidate, Origin, count
from leasecron_sync.engine.runtime import LiveRun
from leasecron_sync.errors import StoreError
from leasecron_sync.events import EventName
from leasecron_sync.model import JobSpan, Reason, RunKey, RunState, Verdict
from leasecron_sync.options import PENDING_LIMIT
from leasecron_sync.run import moment

_logger = logging.getLogger("leasecron_sync.engine.reporting")


class Reporter:
    """Turns answers into events; others' decisions are theirs to report.

    Args:
        context: This start of the scheduler.
        catch_up: What must not report the same again; None on a claim backend.
    """

    def __init__(self, context: Context, catch_up: Optional[CatchUp]) -> None:
        self._context = context
        self._catch_up = catch_up
        self._full_told = False
        self._starved_ms = -1  # steady time at which a run was left out for want of a slot last

    def asking(self, items: Iterable[Candidate]) -> None:
        """Note what is asked for: a record that comes of it says nothing of earlier runs."""
        if self._catch_up is not None and self._catch_up.wanted:
            self._catch_up.note_asked(item.key for item in items)

    def refused(self, answer: Answer) -> None:
        """Report an answer that neither grants the run nor keeps it waiting."""
        item, reply = answer
        if reply.verdict is Verdict.SETTLED and reply.fresh:
            name: EventName = "run_skipped" if reply.state is RunState.SKIPPED else "run_failed"
            self._context.emit(name, item.key, reason=reply.reason)
        elif reply.verdict is Verdict.TOO_OLD:
            self.missed(item, Reason.TOO_OLD)
        elif reply.verdict is Verdict.UNKNOWN:
            self.missed(item, Reason.UNKNOWN_OUTCOME)
        elif reply.verdict is Verdict.REJECTED:
            _logger.error("a run was refused job=%r reason=%r", item.key.job, reply.reason)
            self.missed(item, Reason.UNKNOWN_OUTCOME)
        else:
            _logger.debug(
                "not won job=%r scheduled_ms=%d verdict=%s",
                item.key.job,
                item.key.scheduled_ms,
                reply.verdict.value,
            )

    def abandoned(self, answer: Answer) -> None:
        """Report the other runs that a claim settled."""
        for key in answer.reply.abandoned:
            self._context.emit("run_failed", key, reason=Reason.ABANDONED.value)

    def missed(self, item: Candidate, reason: Reason) -> None:
        """Report a run of which this instance knows nobody who ran it."""
        self._context.emit("run_missed", item.key, reason=reason.value)
        if self._catch_up is not None:
            self._catch_up.note_reported(item.key)

    def expired(self, items: list[Candidate], *, down: bool) -> bool:
        """Report what this instance could not ask for until it was too old.

        Nothing is missed that somebody ran: the store is asked, while it answers.

        Args:
            items: What was given up.
            down: True while the store does not answer.

        Returns:
            Whether one of them is unsettled in the store.
        """
        items = [item for item in items if item.origin is not Origin.UNSETTLED]
        states: dict[RunKey, RunState] = {}
        for start in range(0, 0 if down else len(items), PENDING_LIMIT):
            found = self._states(items[start : start + PENDING_LIMIT])
            if found is None:
                break
            states.update(found)
        for item in items:
            if item.key not in states:
                item.refused = item.refused or down
                self.missed(item, item.missed_for(starved=self._starved_ms >= item.found_ms))
        return any(not state.settled for state in states.values())

    def _states(self, items: list[Candidate]) -> Optional[dict[RunKey, RunState]]:
        lease = self._context.backend
        if not isinstance(lease, LeaseBackend):
            return None
        keys = [item.key for item in items]
        spans = [JobSpan(key.job, key.scheduled_ms, key.scheduled_ms) for key in keys]
        try:
            answers = self._context.caller.call_all(
                TIMER_LANE, lambda: lease.states(spans), len(spans)
            )
        except StoreError:
            return None
        return {
            RunKey(key.job, scheduled_ms): state
            for key, answer in zip(keys, answers)
            for scheduled_ms, state in answer.items()
        }

    def gap(self, gap: Gap) -> None:
        """Report what passed too long ago on a claim backend, where nothing is caught up."""
        found = count(gap.job, gap.from_ms, gap.to_ms)
        if found.first_ms is not None and found.last_ms is not None:
            self._context.emit(
                "run_missed",
                RunKey(gap.job.name, found.last_ms),
                reason=Reason.TOO_OLD.value,
                count=found.number,
                first_time=moment(found.first_ms),
                at_least=found.at_least,
            )

    def stale(self, runs: list[LiveRun]) -> None:
        """Warn once of each handler that goes on although nothing is kept for it any more."""
        for live in runs:
            if live.stale and not live.warned:
                live.warned = True
                _logger.warning(
                    "a handler goes on although its run is lost, past its time limit or given up; "
                    "it keeps its slot job=%r scheduled_time=%s age_ms=%d thread=%r",
                    live.key.job,
                    moment(live.key.scheduled_ms).isoformat(),
                    self._context.clock.steady_ms() - live.began_ms,
                    live.thread.name if live.thread is not None else "",
                )

    def full(self, *, starved: bool, left: int, free: int) -> None:
        """Warn once when runs wait for a slot, until there is a free one that none waits for.

        Args:
            starved: True when a run was left out for want of a slot.
            left: How many were left out, for whatever reason.
            free: Free slots.
        """
        if starved:
            self._starved_ms = self._context.clock.steady_ms()
        if starved and not self._full_told:
            self._full_told = True
            _logger.warning(
                "every slot of this instance is taken, due runs wait max_concurrent_runs=%d",
                self._context.options.max_concurrent_runs,
            )
        elif free > 0 and not left:
            self._full_told = False
