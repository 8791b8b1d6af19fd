"""What an instance may ask for, and what may be owed when it looks back. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Callable, Optional

from leasecron_sync.engine.job import Job
from leasecron_sync.engine.runtime import LiveRun, bars_asking
from leasecron_sync.model import JobSpan, OnOverlap, Reason, RunKey, RunState
from leasecron_sync.options import LOOK_BACK_COUNT, ON_TIME_MS


class Origin(Enum):
    """How an instance came to know that a run is to be claimed."""

    ON_TIME = "on time"
    CAUGHT_UP = "caught up"
    UNSETTLED = "unsettled"


@dataclass
class Candidate:
    """A run that this instance means to claim.

    Attributes:
        job: Its job.
        key: The run.
        due_ms: Scheduled time plus jitter.
        origin: How it was found.
        found_ms: Steady time at which it was found.
        ask_ms: Steady time before which it is not asked for.
        decision_id: Id of the decision, kept until the run is decided; empty before the first ask.
        tried_ms: Steady time of the newest ask.
        unknown: True when the newest ask may have taken effect.
        refused: True when the newest ask surely had no effect, since the store was down.
        deferred: True when it was answered once that another run is in progress.
        surplus: True when its job had more late runs than may be made up for.
        due_steady_ms: Steady time at which it is due by the store's clock, once the store said so.
        late_ms: How late it was when the agenda handed it out.
        early_ms: How early it was by the newest answer that said so.
    """

    job: Job
    key: RunKey
    due_ms: int
    origin: Origin
    found_ms: int
    ask_ms: int = 0
    decision_id: str = ""
    tried_ms: int = 0
    unknown: bool = False
    refused: bool = False
    deferred: bool = False
    surplus: bool = False
    due_steady_ms: Optional[int] = None
    late_ms: int = 0
    early_ms: int = 0

    def age_ms(self, now_ms: int, steady_ms: int) -> int:
        """Return how long ago it fell due, by the store's clock where that is known."""
        if self.due_steady_ms is not None:
            return steady_ms - self.due_steady_ms
        return now_ms - self.due_ms

    def missed_for(self, *, starved: bool) -> Reason:
        """Return why this instance gives the run up.

        Args:
            starved: True when a run was left out for want of a slot since this one was found.
        """
        if self.unknown:
            return Reason.UNKNOWN_OUTCOME
        if self.refused:
            return Reason.STORE_DOWN
        waited = starved and not (self.deferred or self.surplus)
        return Reason.NO_FREE_SLOT if waited else Reason.TOO_OLD

    def max_age_ms(self, steady_ms: int) -> int:
        """Return the age after its due time at which this run is too old.

        The window of a caught-up run is judged when it is found, not when its turn comes.
        """
        catch_up_ms = self.job.options.catch_up_ms
        if self.origin is Origin.ON_TIME:
            return max(catch_up_ms, ON_TIME_MS)
        return catch_up_ms + steady_ms - self.found_ms

    def is_on_time(self, now_ms: int, steady_ms: int) -> bool:
        """Tell whether it was in the agenda before it was due, a short while ago."""
        if self.origin is not Origin.ON_TIME:
            return False
        age_ms = self.age_ms(now_ms, steady_ms)
        if self.due_steady_ms is None:  # a clock that was set back makes nothing younger
            age_ms = max(age_ms, self.late_ms + steady_ms - self.found_ms)
        return age_ms <= ON_TIME_MS

    def on_overlap(self, now_ms: int, steady_ms: int) -> OnOverlap:
        """Return what to do when another run of the job is in progress."""
        if self.is_on_time(now_ms, steady_ms) and not self.job.options.overlap:
            return OnOverlap.SKIP
        return self.job.options.late_overlap


@dataclass(frozen=True)
class Asker:
    """Who picks, and when.

    Attributes:
        instance_id: Id of this instance.
        free: Free slots; negative when slots beyond the limit are in use.
        now_ms: The wall clock.
        steady_ms: Steady time.
        handlers: The live runs in this process, by the names of their jobs.
    """

    instance_id: str
    free: int
    now_ms: int
    steady_ms: int
    handlers: Mapping[str, Sequence[LiveRun]] = field(default_factory=dict[str, Sequence[LiveRun]])

    def may_ask(self, item: Candidate) -> bool:
        """Tell whether no handler in this process stands in the way."""
        return not bars_asking(
            self.handlers.get(item.key.job, ()),
            item.job,
            item.key,
            deferring=item.on_overlap(self.now_ms, self.steady_ms) is OnOverlap.DEFER,
            caught_up=item.origin is Origin.CAUGHT_UP,
        )


@dataclass(frozen=True)
class LookBack:
    """Scheduled times of a job to compare with the store's records.

    Attributes:
        job: The job.
        scheduled: Those that are made up for if the store has no record of them, the oldest first.
        coming: Those that have come and still wait for their jitter.
        too_late: Those whose jitter was over before the window.
        older_from_ms: Scheduled times from here ...
        older_to_ms: ... to before here are given up.
        expected: Those before the others that this instance means to claim all the same. Somebody
            may hold them, so they are compared as well.
    """

    job: Job
    scheduled: tuple[int, ...]
    coming: tuple[int, ...]
    too_late: tuple[int, ...]
    older_from_ms: int
    older_to_ms: int
    expected: tuple[int, ...] = ()

    @property
    def span(self) -> Optional[JobSpan]:
        """What to ask the store about; None when there is nothing to compare."""
        compared = (*self.expected, *self.too_late, *self.scheduled)
        return JobSpan(self.job.name, min(compared), max(compared)) if compared else None

    def without(self, expected: Callable[[RunKey], bool]) -> LookBack:
        """Leave out of what is given up what this instance means to claim all the same."""
        name, older_to_ms = self.job.name, self.older_to_ms
        known = {ms for ms in self.too_late if expected(RunKey(name, ms))}
        late = [ms for ms in self.too_late if ms not in known]
        newest_ms = self.job.schedule.before(older_to_ms)
        while newest_ms is not None and expected(RunKey(name, newest_ms)):
            known.add(newest_ms)
            older_to_ms = newest_ms
            newest_ms = self.job.schedule.before(older_to_ms)
        return replace(
            self,
            too_late=tuple(late),
            older_to_ms=older_to_ms,
            expected=(*self.expected, *sorted(known)),
        )


@dataclass(frozen=True)
class Known:
    """What is known of a job before a look back.

    Attributes:
        newest_ms: Newest scheduled time of which the store has, or had, a record.
        reported_ms: Newest scheduled time that this instance has reported as missed.
        asked_ms: Oldest scheduled time that this instance has asked for before it could look back.
            A record from there on says of no earlier time that somebody looked after it, so those
            are compared one by one.
    """

    newest_ms: Optional[int] = None
    reported_ms: Optional[int] = None
    asked_ms: Optional[int] = None

    @property
    def own(self) -> bool:
        """Whether the newest record may be this instance's own."""
        if self.newest_ms is None or self.asked_ms is None:
            return False
        return self.newest_ms >= self.asked_ms

    def older_from_ms(self, owed_from_ms: int) -> int:
        """Return where that begins of which nothing is known."""
        known = [None if self.own else self.newest_ms, self.reported_ms]
        return max([owed_from_ms, *(ms + 1 for ms in known if ms is not None)])


def look_back(job: Job, now_ms: int, owed_from_ms: int, known: Known) -> LookBack:
    """Find the scheduled times that may be owed.

    The work is bounded by ``catch_up_limit``, however long the outage was and however wide the
    window is.

    Args:
        job: The job.
        now_ms: The wall clock.
        owed_from_ms: Scheduled times before this one are not owed.
        known: What is known of it.
    """
    options = job.options
    own, older_from_ms = known.own, known.older_from_ms(owed_from_ms)
    # Judged with the jitter, like the claim: neither early nor too old.
    window_from_ms = now_ms - options.catch_up_ms
    oldest_ms = max(owed_from_ms, window_from_ms - options.jitter_ms)
    if own:
        oldest_ms = min(oldest_ms, older_from_ms)
    found: list[int] = []
    coming: list[int] = []
    too_late: list[int] = []
    scheduled_ms = job.schedule.before(now_ms + 1)
    to_ms = now_ms + 1
    while scheduled_ms is not None and scheduled_ms >= oldest_ms:
        due_ms = job.due_ms(scheduled_ms)
        if due_ms > now_ms:
            coming.append(scheduled_ms)
        elif due_ms >= window_from_ms and len(found) < options.catch_up_limit:
            found.append(scheduled_ms)
        elif due_ms >= window_from_ms and not own:
            break
        elif scheduled_ms >= older_from_ms and len(too_late) < LOOK_BACK_COUNT:
            too_late.append(scheduled_ms)
        elif own:
            break
        to_ms = scheduled_ms
        scheduled_ms = job.schedule.before(scheduled_ms)
    older_to_ms = to_ms if scheduled_ms is not None and scheduled_ms >= oldest_ms else oldest_ms
    if own:
        older_from_ms = max(older_from_ms, older_to_ms)
    scheduled, late = tuple(reversed(found)), tuple(reversed(too_late))
    return LookBack(job, scheduled, tuple(reversed(coming)), late, older_from_ms, older_to_ms)


@dataclass(frozen=True)
class Count:
    """How many scheduled times lie in a span, and which.

    Attributes:
        number: How many, as far as counted.
        first_ms: The oldest one; None when there is none.
        last_ms: The newest one counted.
        at_least: True when counting stopped at its limit.
    """

    number: int
    first_ms: Optional[int]
    last_ms: Optional[int]
    at_least: bool


def count(job: Job, from_ms: int, to_ms: int) -> Count:
    """Count scheduled times from an instant to before another, up to a limit."""
    number = 0
    first_ms = last_ms = None
    scheduled_ms = job.schedule.after(from_ms - 1)
    while scheduled_ms is not None and scheduled_ms < to_ms:
        if number == LOOK_BACK_COUNT:
            last_ms = job.schedule.before(to_ms)
            return Count(number, first_ms, last_ms, at_least=True)
        first_ms = scheduled_ms if first_ms is None else first_ms
        last_ms = scheduled_ms
        number += 1
        scheduled_ms = job.schedule.after(scheduled_ms)
    return Count(number, first_ms, last_ms, at_least=False)


def given_up(
    look: LookBack, states: Mapping[int, RunState], told: Sequence[tuple[int, int]] = ()
) -> Count:
    """Count what lies before the window and has no record.

    Args:
        look: What was looked at.
        states: What the store has of it.
        told: Spans of times that were reported one by one, their first and last, rising.
    """
    late = [
        ms
        for ms in look.too_late
        if ms not in states and not any(first_ms <= ms <= last_ms for first_ms, last_ms in told)
    ]
    parts: list[Count] = []
    from_ms = look.older_from_ms
    for first_ms, last_ms in told:
        parts.append(count(look.job, from_ms, min(look.older_to_ms, first_ms)))
        from_ms = max(from_ms, last_ms + 1)
    parts.append(count(look.job, from_ms, look.older_to_ms))
    ends = [ms for part in parts for ms in (part.first_ms, part.last_ms) if ms is not None]
    ends += late[:1] + late[-1:]
    return Count(
        sum(part.number for part in parts) + len(late),
        min(ends, default=None),
        max(ends, default=None),
        any(part.at_least for part in parts),
    )
