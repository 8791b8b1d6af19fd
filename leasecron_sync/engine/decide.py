"""Which runs to ask for, in which order and how many. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Optional

from leasecron_sync.engine.job import Job
from leasecron_sync.model import OnOverlap, Reason, RunKey, RunState
from leasecron_sync.options import (
    EXTRA_SLOTS,
    LOOK_BACK_COUNT,
    MIN_SLICE,
    ON_TIME_MS,
    SLICE_DIVISOR,
)


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
        decision_id: Id of the decision, kept while an earlier ask has no answer; empty before.
        tried_ms: Steady time of the newest ask.
        unknown: True when the newest ask may have taken effect.
        refused: True when the newest ask surely had no effect, since the store was down.
        deferred: True when it was answered once that another run is in progress.
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

    def missed_for(self) -> Reason:
        """Return why this instance gives the run up."""
        if self.unknown:
            return Reason.UNKNOWN_OUTCOME
        if self.refused:
            return Reason.STORE_DOWN
        return Reason.TOO_OLD if self.deferred else Reason.NO_FREE_SLOT

    def max_age_ms(self, steady_ms: int) -> int:
        """Return the age after its due time at which this run is too old.

        The window of a caught-up run is judged when it is found, not when its turn comes.
        """
        catch_up_ms = self.job.options.catch_up_ms
        if self.origin is Origin.ON_TIME:
            return max(catch_up_ms, ON_TIME_MS)
        return catch_up_ms + steady_ms - self.found_ms

    def on_overlap(self, now_ms: int) -> OnOverlap:
        """Return what to do when another run of the job is in progress."""
        on_time = self.origin is Origin.ON_TIME and now_ms - self.due_ms <= ON_TIME_MS
        if on_time and not self.job.options.overlap:
            return OnOverlap.SKIP
        return self.job.options.late_overlap


@dataclass
class Pick:
    """What to claim in one call.

    Attributes:
        candidates: At most one run of a job without overlap, at most the free slots.
        starved: True when something was left out for want of a slot.
        more: True when something was left out for the next call.
    """

    candidates: list[Candidate] = field(default_factory=list)
    starved: bool = False
    more: bool = False


def pick(
    candidates: Iterable[Candidate],
    free: int,
    instance_id: str,
    steady_ms: int,
    *,
    in_order: bool = False,
) -> Pick:
    """Choose the runs of the next claim.

    Unsettled runs come first and may use slots beyond the limit. Of the rest an instance takes a
    slice, beginning at an offset of its own, so that runs which are due together spread over the
    instances.

    Args:
        candidates: Everything this instance means to claim, that may be asked for now.
        free: Free slots; negative when slots beyond the limit are in use.
        instance_id: Id of this instance.
        steady_ms: Steady time.
        in_order: Ask for one run of each job at a time, the oldest, since the mechanism may not
            accept an older one later.
    """
    ready = [item for item in candidates if item.ask_ms <= steady_ms]
    first = _one_per_job([item for item in ready if item.origin is Origin.UNSETTLED], in_order)
    jobs = {item.job.name for item in first if not item.job.options.overlap}
    others = [item for item in ready if item.origin is not Origin.UNSETTLED]
    rest = [item for item in _one_per_job(others, in_order) if item.job.name not in jobs]
    chosen = first[: max(0, free + EXTRA_SLOTS)]
    free = max(0, free - len(chosen))
    size = min(free, max(MIN_SLICE, -(-len(rest) // SLICE_DIVISOR)))
    sliced = _rotated(rest, instance_id)[:size]
    left_out = len(first) + len(rest) - len(chosen) - len(sliced)
    starved = len(chosen) < len(first) or (len(rest) > len(sliced) and free <= size)
    return Pick(chosen + sliced, starved, left_out > 0 and not starved)


def _one_per_job(candidates: list[Candidate], in_order: bool) -> list[Candidate]:  # noqa: FBT001
    """Keep the oldest run of each job without overlap, and one caught-up run of each other job."""
    seen: set[str] = set()
    kept = []
    for item in sorted(candidates, key=lambda item: (item.due_ms, item.key)):
        alone = in_order or not item.job.options.overlap or item.origin is Origin.CAUGHT_UP
        if alone and item.key.job in seen:
            continue
        if alone:
            seen.add(item.key.job)
        kept.append(item)
    return kept


def _rotated(candidates: list[Candidate], instance_id: str) -> list[Candidate]:
    """Begin at a place that depends on the instance and the oldest scheduled time."""
    if len(candidates) <= 1:
        return candidates
    text = f"{instance_id} {candidates[0].key.scheduled_ms}"
    digest = hashlib.sha256(text.encode()).digest()
    start = int.from_bytes(digest[:8], "big") % len(candidates)
    return candidates[start:] + candidates[:start]


@dataclass(frozen=True)
class LookBack:
    """Scheduled times of a job to compare with the store's records.

    Attributes:
        job: The job.
        scheduled: Those that are made up for if the store has no record of them, the oldest first.
        older_from_ms: Scheduled times from here ...
        older_to_ms: ... to before here are given up.
    """

    job: Job
    scheduled: tuple[int, ...]
    older_from_ms: int
    older_to_ms: int


def look_back(
    job: Job, now_ms: int, owed_from_ms: int, newest_ms: Optional[int], reported_ms: Optional[int]
) -> LookBack:
    """Find the scheduled times that may be owed.

    The work is bounded by ``catch_up_limit``, however long the outage was and however wide the
    window is.

    Args:
        job: The job.
        now_ms: The wall clock.
        owed_from_ms: Scheduled times before this one are not owed.
        newest_ms: Newest scheduled time of which the store has, or had, a record.
        reported_ms: Newest scheduled time that this instance has reported as missed.
    """
    options = job.options
    window_from_ms = now_ms - options.catch_up_ms - options.jitter_ms
    found: list[int] = []
    scheduled_ms = job.schedule.before(now_ms + 1)
    while (
        scheduled_ms is not None
        and scheduled_ms >= max(owed_from_ms, window_from_ms)
        and len(found) < options.catch_up_limit
    ):
        # Judged with the jitter, like the claim: neither early nor too old.
        if now_ms - options.catch_up_ms <= job.due_ms(scheduled_ms) <= now_ms:
            found.append(scheduled_ms)
        scheduled_ms = job.schedule.before(scheduled_ms)
    oldest_ms = found[-1] if found else max(window_from_ms, owed_from_ms)
    known = [owed_from_ms]
    known += [ms + 1 for ms in (newest_ms, reported_ms) if ms is not None]
    return LookBack(job, tuple(reversed(found)), max(known), oldest_ms)


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


def owed(look: LookBack, states: Mapping[int, RunState]) -> tuple[list[int], bool]:
    """Compare scheduled times with the store's records.

    Returns:
        Those without a record, the oldest first, and whether one of the others is unsettled.
    """
    missing = [ms for ms in look.scheduled if ms not in states]
    unsettled = any(not state.settled for state in states.values())
    return missing, unsettled
