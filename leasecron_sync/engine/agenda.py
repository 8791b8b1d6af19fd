"""Heap of each job's coming scheduled times. Pure."""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from typing import NamedTuple, Optional

from leasecron_sync.engine.job import Job
from leasecron_sync.model import RunKey

MAX_SPANS = 8
"""Spans of handed-out times that are remembered of a job; each step of the clock begins one."""

POP_LIMIT = 250
"""Times looked at in one go, so that the first of many that come together are not held up."""

SLACK = 256
"""So many entries of removed jobs may stay in the heap, besides as many as there are others."""


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
    plan: _Plan
    scheduled_ms: int
    nominal: bool  # False: its scheduled time has come, it only waits for its jitter


class _Plan:
    """What the agenda keeps of a job.

    Attributes:
        spans: First and last of the times handed out in a row, the newest row last.
        jittering: Times that have come and wait for their jitter.
        begin_span: True when the next time handed out does not follow the last one.
    """

    def __init__(self, job: Job) -> None:
        self.job = job
        self.name = job.name
        self.spans: list[tuple[int, int]] = []
        self.jittering: set[int] = set()
        self.begin_span = True

    def next_after(self, instant_ms: int) -> Optional[int]:
        """Return the next time that was not handed out yet."""
        scheduled_ms = self.job.schedule.after(instant_ms)
        for _number in range(len(self.spans) + 1):
            span = self._span_of(scheduled_ms)
            if span is None:
                break
            self.begin_span = True
            scheduled_ms = self.job.schedule.after(span[1])
        return scheduled_ms

    def was_handed_out(self, scheduled_ms: int) -> bool:
        """Tell whether a time was handed out, and is not to be handed out again."""
        return self._span_of(scheduled_ms) is not None

    def mark(self, scheduled_ms: int) -> None:
        """Note that a time is handed out."""
        if self.was_handed_out(scheduled_ms):
            return
        row = self._row_before(scheduled_ms) if self.begin_span else self.spans[-1]
        self.begin_span = False
        if row is None:
            self.spans.append((scheduled_ms, scheduled_ms))
        elif row is self.spans[-1]:
            self.spans[-1] = (row[0], scheduled_ms)
        else:
            self.spans.remove(row)
            self.spans.append((row[0], scheduled_ms))
        del self.spans[:-MAX_SPANS]

    def release(self, scheduled_ms: int) -> None:
        """Let a time be handed out again: it was handed out in vain."""
        span = self._span_of(scheduled_ms)
        if span is None:
            return
        schedule, place = self.job.schedule, self.spans.index(span)
        before_ms, after_ms = schedule.before(scheduled_ms), schedule.after(scheduled_ms)
        parts: list[tuple[int, int]] = []
        if before_ms is not None and before_ms >= span[0]:
            parts.append((span[0], before_ms))
        if after_ms is not None and after_ms <= span[1]:
            parts.append((after_ms, span[1]))
        self.spans[place : place + 1] = parts
        del self.spans[:-MAX_SPANS]

    def _row_before(self, scheduled_ms: int) -> Optional[tuple[int, int]]:
        before_ms = self.job.schedule.before(scheduled_ms) if self.spans else None
        return next((span for span in self.spans if span[1] == before_ms), None)

    def _span_of(self, scheduled_ms: Optional[int]) -> Optional[tuple[int, int]]:
        if scheduled_ms is not None:
            for span in self.spans:
                if span[0] <= scheduled_ms <= span[1]:
                    return span
        return None


class Agenda:
    """Tells which scheduled times are due, each once, however the clock is set.

    A job's scheduled times enter one after the other: the next one is computed when the one before
    has come, so that the heap stays as small as the set of jobs. A scheduled time with jitter
    stays in the heap until its jitter is over as well.

    Args:
        keep_ms: How late a due time may be and still be handed out by itself; what is older comes
            back as a gap.
        in_order: Hand a job's times out in rising order, whatever their jitter. Without it, times
            that had come before the job was added are left to whoever looks back.
    """

    def __init__(self, keep_ms: int, *, in_order: bool = False) -> None:
        self._keep_ms = keep_ms
        self._in_order = in_order
        self._heap: list[_Entry] = []
        self._trim_at = SLACK
        self._plans: dict[str, _Plan] = {}
        self._order = 0

    def add(self, job: Job, now_ms: int) -> None:
        """Take a job in; scheduled times after now will be handed out."""
        self._plans[job.name] = plan = _Plan(job)
        self._place(plan, now_ms)

    def expect(self, job: Job, scheduled_ms: int) -> None:
        """Hand out a time that has come already, when its jitter is over."""
        plan = self._plans.get(job.name)
        if plan is None or plan.job is not job or scheduled_ms in plan.jittering:
            return
        if not plan.was_handed_out(scheduled_ms):
            plan.mark(scheduled_ms)
            plan.begin_span = True
            self._push_jittering(plan, scheduled_ms, job.due_ms(scheduled_ms))

    def remove(self, name: str) -> None:
        """Forget a job; entries still in the heap are passed over later."""
        self._plans.pop(name, None)

    def rebase(self, now_ms: int, undecided: Iterable[RunKey]) -> None:
        """Begin anew at an instant, after the clock was set back.

        What was handed out before is not handed out again, except what is still undecided.

        Args:
            now_ms: The wall clock.
            undecided: Runs that were handed out under the wrong clock and came to nothing.
        """
        waiting = [(plan, ms) for plan in self._plans.values() for ms in sorted(plan.jittering)]
        waiting += [
            (self._plans[key.job], key.scheduled_ms) for key in undecided if key.job in self._plans
        ]
        for plan, scheduled_ms in waiting:
            plan.release(scheduled_ms)
        self._heap.clear()
        for plan in self._plans.values():
            plan.jittering.clear()
            plan.begin_span = True
            self._place(plan, now_ms)
        for plan, scheduled_ms in waiting:
            if scheduled_ms <= now_ms:  # it has come, and its jitter is not over
                self.expect(plan.job, scheduled_ms)

    def next_ms(self) -> Optional[int]:
        """Return the instant at which something may come due."""
        while self._heap and not self._current(self._heap[0]):
            heapq.heappop(self._heap)
        return self._heap[0].at_ms if self._heap else None

    def first(self) -> Optional[Due]:
        """Return the scheduled time that may come due next."""
        if self.next_ms() is None:
            return None
        plan, scheduled_ms = self._heap[0].plan, self._heap[0].scheduled_ms
        return Due(plan.job, scheduled_ms, plan.job.due_ms(scheduled_ms))

    def coming(self) -> dict[str, int]:
        """Return each job's next scheduled time."""
        found: dict[str, int] = {}
        for entry in list(self._heap):  # a copy in one step: any thread may ask
            if self._current(entry):
                name = entry.plan.name
                found[name] = min(found.get(name, entry.scheduled_ms), entry.scheduled_ms)
        return found

    def pop(self, now_ms: int, limit: int = POP_LIMIT) -> tuple[list[Due], list[Gap]]:
        """Take out what is due; jobs and ``keep_ms`` bound the work, not the delay.

        Args:
            now_ms: The wall clock.
            limit: How many times to look at, at most; ``next_ms`` has come while others are left.
        """
        due: list[Due] = []
        gaps: list[Gap] = []
        while limit and self._heap and self._heap[0].at_ms <= now_ms:
            entry = heapq.heappop(self._heap)
            if not self._current(entry):
                continue
            limit -= 1
            plan, scheduled_ms = entry.plan, entry.scheduled_ms
            if not entry.nominal:
                plan.jittering.discard(scheduled_ms)
                self._hand_out(plan, scheduled_ms, now_ms, due, gaps)
                continue
            oldest_ms = now_ms - self._keep_ms - plan.job.options.jitter_ms
            if scheduled_ms < oldest_ms:
                gaps.append(Gap(plan.job, scheduled_ms, oldest_ms))
                plan.begin_span = True
                self._push_next(plan, oldest_ms - 1)
            else:
                plan.mark(scheduled_ms)
                self._hand_out(plan, scheduled_ms, now_ms, due, gaps)
                self._push_next(plan, scheduled_ms)
        return due, gaps

    def _place(self, plan: _Plan, now_ms: int) -> None:
        job = plan.job
        if self._in_order and job.options.jitter_ms:
            scheduled_ms = job.schedule.after(now_ms - job.options.jitter_ms - 1)
            while scheduled_ms is not None and scheduled_ms <= now_ms:
                if job.due_ms(scheduled_ms) > now_ms:
                    self.expect(job, scheduled_ms)
                scheduled_ms = job.schedule.after(scheduled_ms)
        self._push_next(plan, now_ms)

    def _hand_out(
        self, plan: _Plan, scheduled_ms: int, now_ms: int, due: list[Due], gaps: list[Gap]
    ) -> None:
        due_ms = plan.job.due_ms(scheduled_ms)
        before = [ms for ms in plan.jittering if ms < scheduled_ms] if self._in_order else []
        if due_ms > now_ms:
            self._push_jittering(plan, scheduled_ms, due_ms)
        elif before:
            at_ms = max(plan.job.due_ms(ms) for ms in before)
            self._push_jittering(plan, scheduled_ms, at_ms)
        elif now_ms - due_ms > self._keep_ms:
            # Not handed out: the clock may be wrong, and the time still to come.
            plan.release(scheduled_ms)
            plan.begin_span = True
            gaps.append(Gap(plan.job, scheduled_ms, scheduled_ms + 1))
        else:
            due.append(Due(plan.job, scheduled_ms, due_ms))

    def _current(self, entry: _Entry) -> bool:
        return self._plans.get(entry.plan.name) is entry.plan

    def _push_next(self, plan: _Plan, instant_ms: int) -> None:
        scheduled_ms = plan.next_after(instant_ms)
        if scheduled_ms is not None:
            self._push(scheduled_ms, plan, scheduled_ms, nominal=True)

    def _push_jittering(self, plan: _Plan, scheduled_ms: int, at_ms: int) -> None:
        plan.jittering.add(scheduled_ms)
        self._push(at_ms, plan, scheduled_ms, nominal=False)

    def _push(self, at_ms: int, plan: _Plan, scheduled_ms: int, *, nominal: bool) -> None:
        self._order += 1
        heapq.heappush(self._heap, _Entry(at_ms, self._order, plan, scheduled_ms, nominal))
        if len(self._heap) > self._trim_at:
            self._heap = [entry for entry in self._heap if self._current(entry)]
            heapq.heapify(self._heap)
            self._trim_at = 2 * len(self._heap) + SLACK
