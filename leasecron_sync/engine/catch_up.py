"""Looks back after a start or a pause: what is owed, and what is given up."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Callable, NamedTuple

from leasecron_sync.backends.base import LeaseBackend
from leasecron_sync.engine.context import TIMER_LANE, Context
from leasecron_sync.engine.decide import (
    Candidate,
    Count,
    Known,
    LookBack,
    Origin,
    given_up,
    look_back,
)
from leasecron_sync.engine.job import Job
from leasecron_sync.model import JobStamp, JobStanding, Reason, RunKey, RunState
from leasecron_sync.run import moment

_logger = logging.getLogger("leasecron_sync.engine.catch_up")


LOOK_BACK_JOBS = 500
"""Jobs looked at in one step, so that no call holds the store up for long."""


MOST_SPANS = 100
"""Spans of what was reported that are kept; an older one is reported once more."""


class Found(NamedTuple):
    """What a look back found.

    Attributes:
        owed: Runs to make up for, the oldest first.
        coming: Runs whose scheduled time has come and whose jitter is not over.
        known: Runs of which the store has a record.
        unsettled: Whether the store knows an unsettled run among those looked at.
    """

    owed: list[Candidate]
    coming: list[Candidate]
    known: set[RunKey]
    unsettled: bool


NOTHING = Found([], [], set(), unsettled=False)


class CatchUp:
    """Registers jobs and compares their last scheduled times with the store's records.

    Args:
        context: This start of the scheduler.
        backend: Its lease backend.
    """

    def __init__(self, context: Context, backend: LeaseBackend) -> None:
        self._context = context
        self._backend = backend
        self._wanted: dict[str, Job] = {}
        self._reported: dict[str, int] = {}
        # What was reported one by one while a look back is still to come, in spans, first and last,
        # without a scheduled time between that was not: a pause leaves a hole.
        self._told: dict[str, list[tuple[int, int]]] = {}
        # The oldest that was asked for while a look back is still to come.
        self._asked: dict[str, int] = {}
        self._store_id = ""

    @property
    def wanted(self) -> bool:
        """True when there is something to look at."""
        return bool(self._wanted)

    def look_back(self, jobs: Sequence[Job], *, forget: bool) -> None:
        """Look back over these jobs in the next step.

        Args:
            jobs: The jobs.
            forget: True when the clock was set back, so that what was reported under the wrong
                clock says nothing.
        """
        for job in jobs:
            self._wanted[job.name] = job
            if forget:
                self._reported.pop(job.name, None)
                self._told.pop(job.name, None)

    def leave_out(self, name: str) -> None:
        """Do not look back over a job that was removed, or replaced."""
        self._wanted.pop(name, None)
        self._told.pop(name, None)
        self._asked.pop(name, None)

    def note_asked(self, keys: Iterable[RunKey]) -> None:
        """Note claims that are made before the look back, while the store refuses what it needs."""
        for key in keys:
            if key.job in self._wanted:
                known_ms = self._asked.get(key.job, key.scheduled_ms)
                self._asked[key.job] = min(known_ms, key.scheduled_ms)

    def note_reported(self, key: RunKey) -> None:
        """Note a missed run that was reported by itself."""
        job = self._wanted.get(key.job)
        if job is not None:  # what lies before it may not be reported yet
            spans = [*self._told.get(key.job, ()), (key.scheduled_ms, key.scheduled_ms)]
            self._told[key.job] = _joined(job, spans)[-MOST_SPANS:]
            return
        known_ms = self._reported.get(key.job, key.scheduled_ms)
        self._reported[key.job] = max(known_ms, key.scheduled_ms)

    def step(self, expected: Callable[[RunKey], bool] = lambda _key: False) -> Found:
        """Look back over the jobs that are wanted: two round trips for a batch of them.

        Args:
            expected: Tells whether this instance means to claim a run anyway, so that it is not
                given up.

        Raises:
            StoreError: The store did not answer; the next step asks again.
        """
        jobs = list(self._wanted.values())[:LOOK_BACK_JOBS]
        if not jobs:
            return NOTHING
        clock = self._context.clock
        standings = self._register(jobs)
        now_ms, steady_ms = self._context.caller.now_ms(), clock.steady_ms()
        looks = [
            look_back(job, now_ms, standing.owed_from_ms, self._known(job.name, standing)).without(
                expected
            )
            for job, standing in zip(jobs, standings)
        ]
        found = self._compare([look.without(expected) for look in looks], steady_ms)
        for job in jobs:
            if self._wanted.get(job.name) is job:
                del self._wanted[job.name]
                self._asked.pop(job.name, None)
        return found

    def _known(self, name: str, standing: JobStanding) -> Known:
        return Known(standing.newest_ms, self._reported.get(name), self._asked.get(name))

    def _register(self, jobs: list[Job]) -> Sequence[JobStanding]:
        stamps = [JobStamp(job.name, job.fingerprint()) for job in jobs]
        sent_steady_ms = self._context.clock.steady_ms()
        standings = self._context.caller.call_all(
            TIMER_LANE, lambda: self._backend.register(stamps), len(stamps)
        )
        first = standings[0]
        self._context.caller.compare_clocks(first.store_ms, sent_steady_ms)
        if self._store_id and first.store_id != self._store_id:
            _logger.error(
                "the store has lost its data: runs from before are not known to it any more, and "
                "none of them is made up for"
            )
        self._store_id = first.store_id
        return standings

    def _compare(self, looks: list[LookBack], steady_ms: int) -> Found:
        spans = [look.span for look in looks if look.span is not None]
        answers: Iterator[Mapping[int, RunState]] = iter(())
        if spans:
            answers = iter(
                self._context.caller.call_all(
                    TIMER_LANE, lambda: self._backend.states(spans), len(spans)
                )
            )
        owed: list[Candidate] = []
        coming: list[Candidate] = []
        recorded: set[RunKey] = set()
        unsettled = False
        for look in looks:
            states: Mapping[int, RunState] = {}
            if look.span is not None:
                states = next(answers)
            unsettled = unsettled or any(not state.settled for state in states.values())
            recorded.update(RunKey(look.job.name, ms) for ms in states)
            missing = [ms for ms in look.scheduled if ms not in states]
            owed += [_candidate(look.job, ms, Origin.CAUGHT_UP, steady_ms) for ms in missing]
            coming += [_candidate(look.job, ms, Origin.ON_TIME, steady_ms) for ms in look.coming]
            told = self._told.pop(look.job.name, [])
            self._report(look, given_up(look, states, told))
            if told:
                newest_ms = told[-1][1]
                known_ms = self._reported.get(look.job.name, newest_ms)
                self._reported[look.job.name] = max(known_ms, newest_ms)
        return Found(owed, coming, recorded, unsettled)

    def _report(self, look: LookBack, found: Count) -> None:
        """Report what lies before the window: one event for a job, and no records."""
        if found.first_ms is None or found.last_ms is None:
            return
        key = RunKey(look.job.name, found.last_ms)
        self._reported[key.job] = max(self._reported.get(key.job, found.last_ms), found.last_ms)
        self._context.emit(
            "run_missed",
            key,
            reason=Reason.TOO_OLD.value,
            count=found.number,
            first_time=moment(found.first_ms),
            at_least=found.at_least,
        )


def _joined(job: Job, spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Make one span of those between which no scheduled time lies."""
    joined: list[tuple[int, int]] = []
    for first_ms, last_ms in sorted(spans):
        if joined:
            next_ms = job.schedule.after(joined[-1][1])
            if next_ms is None or next_ms >= first_ms:
                joined[-1] = joined[-1][0], max(joined[-1][1], last_ms)
                continue
        joined.append((first_ms, last_ms))
    return joined


def _candidate(job: Job, scheduled_ms: int, origin: Origin, steady_ms: int) -> Candidate:
    key = RunKey(job.name, scheduled_ms)
    return Candidate(job, key, job.due_ms(scheduled_ms), origin, steady_ms)
