"""Heap of each job's coming scheduled times. Pure."""

from __future__ import annotations

import heapq
from typing import NamedTuple, Optional

from leasecron_sync.engine.job import Job


class Due(NamedTuple):
    """A scheduled time whose due time has come."""

    job: Job
    scheduled_ms: int
    due_ms: int


class Gap(NamedTuple):
    """Scheduled times that passed too long ago to be handed out one by one.

    Attributes:
        job: Their job.
        from_ms: The oldest of them.
        to_ms: They are all before this instant.
    """

    job: Job
    from_ms: int
    to_ms: int


class _Entry(NamedTuple):
    at_ms: int
    order: int
    job: Job
    scheduled_ms: int
    nominal: bool  # False: its scheduled time has come, it only waits for its jitter


class Agenda:
    """Tells which scheduled times are due, each once, however the clock is read.

    A job's scheduled times enter one after the other: the next one is computed when the one before
    has come, so that the heap stays as small as the set of jobs. A scheduled time with jitter
    stays in the heap until its jitter is over as well.

    Args:
        keep_ms: How late a due time may be and still be handed out by itself; what is older comes
            back as a gap.
    """

    def __init__(self, keep_ms: int) -> None:
        self._keep_ms = keep_ms
        self._heap: list[_Entry] = []
        self._jobs: dict[str, Job] = {}
        self._order = 0

    def add(self, job: Job, now_ms: int) -> None:
        """Take a job in; scheduled times whose due time is after now will be handed out."""
        self._jobs[job.name] = job
        scheduled_ms = job.schedule.after(now_ms - job.options.jitter_ms - 1)
        while scheduled_ms is not None and scheduled_ms <= now_ms:
            if job.due_ms(scheduled_ms) > now_ms:
                self._push(job.due_ms(scheduled_ms), job, scheduled_ms, nominal=False)
            scheduled_ms = job.schedule.after(scheduled_ms)
        if scheduled_ms is not None:
            self._push(scheduled_ms, job, scheduled_ms, nominal=True)

    def remove(self, name: str) -> None:
        """Forget a job; entries still in the heap are passed over later."""
        self._jobs.pop(name, None)

    def rebase(self, now_ms: int) -> None:
        """Begin anew at an instant, after the clock was set back."""
        jobs = list(self._jobs.values())
        self._heap.clear()
        for job in jobs:
            self.add(job, now_ms)

    def next_ms(self) -> Optional[int]:
        """Return the instant at which something may come due."""
        while self._heap and not self._current(self._heap[0]):
            heapq.heappop(self._heap)
        return self._heap[0].at_ms if self._heap else None

    def coming(self) -> dict[str, int]:
        """Return each job's next scheduled time."""
        found: dict[str, int] = {}
        for entry in self._heap:
            if self._current(entry):
                known = found.get(entry.job.name, entry.scheduled_ms)
                found[entry.job.name] = min(known, entry.scheduled_ms)
        return found

    def pop(self, now_ms: int) -> tuple[list[Due], list[Gap]]:
        """Take out what is due; jobs and ``keep_ms`` bound the work, not the delay."""
        due: list[Due] = []
        gaps: list[Gap] = []
        while self._heap and self._heap[0].at_ms <= now_ms:
            entry = heapq.heappop(self._heap)
            if not self._current(entry):
                continue
            job, scheduled_ms = entry.job, entry.scheduled_ms
            if not entry.nominal:
                self._hand_out(job, scheduled_ms, now_ms, due, gaps)
                continue
            oldest_ms = now_ms - self._keep_ms - job.options.jitter_ms
            if scheduled_ms < oldest_ms:
                gaps.append(Gap(job, scheduled_ms, oldest_ms))
                following_ms = job.schedule.after(oldest_ms - 1)
            else:
                self._hand_out(job, scheduled_ms, now_ms, due, gaps)
                following_ms = job.schedule.after(scheduled_ms)
            if following_ms is not None:
                self._push(following_ms, job, following_ms, nominal=True)
        return due, gaps

    def _hand_out(
        self, job: Job, scheduled_ms: int, now_ms: int, due: list[Due], gaps: list[Gap]
    ) -> None:
        due_ms = job.due_ms(scheduled_ms)
        if due_ms > now_ms:
            self._push(due_ms, job, scheduled_ms, nominal=False)
        elif now_ms - due_ms > self._keep_ms:
            gaps.append(Gap(job, scheduled_ms, scheduled_ms + 1))
        else:
            due.append(Due(job, scheduled_ms, due_ms))

    def _current(self, entry: _Entry) -> bool:
        return self._jobs.get(entry.job.name) is entry.job

    def _push(self, at_ms: int, job: Job, scheduled_ms: int, *, nominal: bool) -> None:
        self._order += 1
        heapq.heappush(self._heap, _Entry(at_ms, self._order, job, scheduled_ms, nominal))
