"""Rules that need to know what instances mean: their versions, and when they started.

They are judged as soon as the store decides, by its own clock. The checker of histories knows
neither jobs nor options.
"""
# It asks an instance what it takes the time for.
# pyright: reportPrivateUsage=false
# ruff: noqa: SLF001

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final, Optional

from leasecron_sync import every
from leasecron_sync.model import (
    JobStamp,
    JobStanding,
    OnOverlap,
    Outcome,
    Reason,
    RunKey,
    RunState,
    Verdict,
)
from leasecron_sync.options import ON_TIME_MS
from leasecron_sync.protocol.transition import FREE_HAND_OVERS, MAX_RETRY_DELAY_MS
from leasecron_sync.schedule import fingerprint, jitter_of
from leasecron_sync.testing.history._ledger import instant, named
from leasecron_sync.testing.history.entry import ACCEPTED, Entry
from leasecron_sync.testing.simulation import violation as kinds
from leasecron_sync.testing.simulation.machine import Process
from leasecron_sync.testing.simulation.plan import JobPlan, Plan, Version
from leasecron_sync.testing.simulation.violation import Violation

SLACK_MS: Final = ON_TIME_MS + 3_000
"""How much earlier than it started an instance may come to know of what it takes for on time."""

LATE_MS: Final = ON_TIME_MS + 2_500
KNOWN_MS: Final = 2_000
"""Age at which an instance knows that a run is not on time, whatever it knows of its clock."""

MOST_ASKED_AGAIN: Final = 7
"""Claims of runs that were known to be settled, of one instance."""

SOON_MS: Final = 8_000
SETTLED_IN_MS: Final = 12_000
"""Time after its start in which an instance has come to know the store's clock."""


@dataclass
class _Run:
    """What is known of a run.

    Attributes:
        failures: Attempts that count, as far as they were settled or lapsed.
        hand_overs: How often it was handed over.
        open: Whether an attempt was granted and has not ended.
        until_ms: When the lease lapses, or the wait is over; by the store's clock.
        back: Whether the store's clock was set back since, so that nothing follows from it.
        handed_over: Instance that handed it over last, and when, by the store's clock and by the
            history's.
        known: Instances that were told that it is settled.
        token: Token of the newest grant.
        holder: Instance that has, or had, its newest lease.
        skipped: Whether it was skipped.
        allows: Whether its newest lease was granted to work beside other runs of the job.
    """

    failures: int = 0
    hand_overs: int = 0
    open: bool = False
    until_ms: int = 0
    back: bool = False
    handed_over: tuple[str, int, int] = ("", 0, 0)
    known: set[str] = field(default_factory=set[str])
    token: int = 0
    holder: str = ""
    skipped: bool = False
    allows: bool = False


def _knows_time(process: Process, store_ms: int) -> bool:
    """Tell whether a process takes the store's clock for about what it is.

    A skew that could only be measured in a slow call, or that came a moment ago, is not known.
    """
    context = process.manual._context
    return context is not None and abs(context.caller.now_ms() - store_ms) < KNOWN_MS


class RunRules:
    """Judges claims and settlements by the options of those who made them.

    Args:
        plan: The history.
        report: Takes violations.

    Attributes:
        sent_ms: The store's clock when the call was made that it decides now.
        sent_at_ms: The time of the history then.
        asked_again: Claims of each instance of runs that it knew to be settled.
    """

    def __init__(self, plan: Plan, report: Callable[[Violation], None]) -> None:
        self._plan = plan
        self._report = report
        self._runs: dict[RunKey, _Run] = {}
        self._dates: dict[tuple[str, str], int] = {}
        self._due_ms: dict[RunKey, frozenset[int]] = {}
        self._waiting: dict[str, dict[RunKey, int]] = {}  # until when, by job
        self.sent_ms = self.sent_at_ms = 0
        self.asked_again: Counter[str] = Counter()
        self._jobs: dict[str, list[tuple[Version, JobPlan]]] = {}
        for version in plan.versions:
            for job in version.jobs:
                self._jobs.setdefault(job.name, []).append((version, job))

    def forget(self) -> None:
        """Note that the store lost its data."""
        self._runs.clear()
        self._waiting.clear()
        self._dates.clear()

    def set_back(self) -> None:
        """Note that the store's clock was set back: ends that were expected come later."""
        for run in self._runs.values():
            run.back = True

    def _accuse(self, kind: str, entry: Entry, text: str) -> None:
        about = repr(entry.job) if entry.scheduled_ms is None else named(entry.key)
        self._report(Violation(kind, f"{entry.instance}: {about}: {text}", (entry,)))

    # -- register ------------------------------------------------------------------------------

    def registered(self, stamp: JobStamp, standing: JobStanding) -> None:
        """A definition is owed since it was seen first, and never from the future."""
        known, now_ms = (stamp.job, stamp.fingerprint), standing.store_ms
        date_ms = self._dates[known] = min(self._dates.get(known, now_ms), now_ms)
        if standing.owed_from_ms != date_ms:
            since = instant(standing.owed_from_ms)
            text = f"{stamp.job!r} is owed since {since}, and should be since {instant(date_ms)}"
            self._report(Violation(kinds.OWED_DATE, text))

    # -- claims --------------------------------------------------------------------------------

    def claimed(self, entry: Entry, process: Process) -> None:
        """Judge a claim and its answer."""
        run = self._runs.setdefault(entry.key, _Run())
        if not run.token:  # else another version's schedule may be asked about
            self._judge_due(entry)
        job = process.version.job(entry.job)
        if entry.instance in run.known:
            # A look back may find a run whose jitter is not over; it asks once more then.
            self.asked_again[entry.instance] += 1
            most = MOST_ASKED_AGAIN + self._plan.storm_ms // 10_000
            if self.asked_again[entry.instance] > most:
                self._accuse(kinds.ASKED_AGAIN, entry, "asked for again, like others before")
        if entry.verdict == Verdict.GRANTED.value:
            self._granted(entry, run, process, job)
        elif entry.verdict == Verdict.SETTLED.value:
            if entry.fresh:
                self._settled_by_claim(entry, run)
        elif entry.verdict == Verdict.HELD.value and entry.wait_ms > 2 * self._longest_lease_ms():
            self._accuse(kinds.LEASE_TOO_LONG, entry, f"held for {entry.wait_ms} ms")
        self._judge_wish(entry, run, process, job)

    def is_alone(self, key: RunKey) -> bool:
        """Tell whether a run, as it was won, may not work beside others of its job."""
        run = self._runs.get(key)
        return run is not None and not run.allows

    def heard(self, entries: Iterable[Entry]) -> None:
        """Note that an instance has heard the answers to its claims."""
        for entry in entries:
            if entry.verdict == Verdict.SETTLED.value and entry.key in self._runs:
                self._runs[entry.key].known.add(entry.instance)

    def _judge_due(self, entry: Entry) -> None:
        """Claimed are scheduled times, each with its own due time."""
        key = entry.key
        right = self._due_ms.get(key)
        if right is None:
            right = self._due_ms[key] = frozenset(
                key.scheduled_ms + jitter_of(key.job, key.scheduled_ms, job.jitter_ms)
                for _version, job in self._jobs.get(key.job, ())
                if not key.scheduled_ms % (job.period_s * 1_000)
            )
        if entry.due_ms not in right:
            wanted = " or ".join(instant(ms) for ms in sorted(right)) or "at any time"
            text = f"claimed as due at {instant(entry.due_ms or 0)}, not {wanted}"
            self._accuse(kinds.WRONG_DUE, entry, text)

    def _judge_wish(
        self, entry: Entry, run: _Run, process: Process, job: Optional[JobPlan]
    ) -> None:
        """What is late is never skipped; what is on time is not deferred."""
        age_ms = entry.at_ms - (entry.due_ms or 0)
        skipped = entry.fresh and entry.state == RunState.SKIPPED.value and not run.skipped
        run.skipped = run.skipped or skipped
        # A request may be long on its way: what counts is when it was sent.
        sent_age_ms = min(self.sent_ms, entry.at_ms) - (entry.due_ms or 0)
        if skipped and sent_age_ms > LATE_MS and _knows_time(process, entry.at_ms):
            self._accuse(kinds.SKIPPED_LATE, entry, f"skipped {age_ms} ms after it was due")
        new = not run.failures and not run.hand_overs and not run.open
        expected = (entry.due_ms or 0) > process.started_ms + SETTLED_IN_MS
        if self._plan.gentle and new and expected and age_ms < SOON_MS:
            deferred = entry.verdict == Verdict.DEFERRED.value
            if deferred and entry.overlap == OnOverlap.DEFER.value and job is not None:
                self._accuse(kinds.DEFERRED_ON_TIME, entry, "deferred although it is on time")

    def _granted(self, entry: Entry, run: _Run, process: Process, job: Optional[JobPlan]) -> None:
        if entry.token == run.token:
            return  # a repeated answer
        run.token = entry.token
        self._waiting.get(entry.job, {}).pop(entry.key, None)
        if entry.attempt == 1:
            self._judge_order(entry)
            if job is not None:
                self._judge_owed(entry, process, job)
        else:
            self._judge_next(entry, run)
            self._judge_hold_off(entry, run, process)
        run.holder, run.allows = entry.instance, entry.overlap == OnOverlap.ALLOW.value
        holder, since_ms, since_at_ms = run.handed_over
        lease_ms = process.version.lease_ms
        # Who handed it over waits by a steady clock, which the store's may stand still beside.
        waited_ms = max(entry.at_ms - since_ms, self.sent_at_ms - since_at_ms)
        if holder == entry.instance and waited_ms < lease_ms - lease_ms // 50:
            text = f"claimed by who handed it over {waited_ms} ms ago"
            # A claim may have been on its way since before; the store's clock does not tell.
            if not run.back and since_at_ms <= self.sent_at_ms:
                self._accuse(kinds.CLAIMED_BACK, entry, text)
        run.handed_over = ("", 0, 0)
        run.failures += run.open
        run.open, run.back, run.until_ms = True, False, entry.at_ms + entry.left_ms
        most = max((job.max_attempts for _version, job in self._jobs.get(entry.job, ())), default=1)
        if run.failures >= most:
            text = f"attempt {entry.attempt} after {run.failures} that count, of {most}"
            self._accuse(kinds.TOO_MANY_ATTEMPTS, entry, text)

    def _judge_order(self, entry: Entry) -> None:
        """An older run that waits and is due goes first."""
        if entry.overlap == OnOverlap.ALLOW.value:
            return
        for key, until_ms in self._waiting.get(entry.job, {}).items():
            if key.scheduled_ms < entry.key.scheduled_ms and until_ms <= entry.at_ms:
                text = f"granted before {named(key)}, which is due"
                self._accuse(kinds.YOUNGER_FIRST, entry, text)

    def _judge_next(self, entry: Entry, run: _Run) -> None:
        """A takeover comes in its window, a retry after its wait."""
        over_ms = entry.at_ms - run.until_ms
        if run.back or not run.until_ms:
            return
        if over_ms > self._takeover_ms(entry.job, max):
            self._accuse(kinds.TAKEN_OVER_LATE, entry, f"taken over {over_ms} ms late")
        if over_ms < 0 and not run.open:
            self._accuse(kinds.RETRIED_EARLY, entry, f"retried {-over_ms} ms early")

    def _judge_hold_off(self, entry: Entry, run: _Run, process: Process) -> None:
        """After an outage the holders may renew first."""
        waited_ms = self.sent_at_ms - process.blind_ms
        own = run.holder == entry.instance or entry.key in process.unheard_before
        if (entry.due_ms or 0) >= process.expects_ms - SLACK_MS:
            return  # it is still to come by a wrong clock: who asks cannot know that others have it
        if entry.takeover and not own and 0 <= waited_ms < process.version.lease_ms // 3:
            text = f"taken over {waited_ms} ms after an outage"
            self._accuse(kinds.TAKEOVER_SOON, entry, text)

    def _judge_owed(self, entry: Entry, process: Process, job: JobPlan) -> None:
        """A run is granted for the first time: it was expected, or it was owed."""
        due_ms = entry.due_ms or 0
        # What is not owed was expected: it was still to come by this instance's own clock.
        if due_ms >= process.expects_ms - SLACK_MS:
            return
        late_ms = process.started_ms - due_ms
        if late_ms > job.catch_up_ms + SLACK_MS:
            text = f"it was {late_ms} ms old when the instance started"
            self._accuse(kinds.OWED_TOO_MUCH, entry, text)
        since_ms = [
            self._dates[entry.job, print_]
            for print_, period_s in self._prints(entry.job)
            if (entry.job, print_) in self._dates
            and not entry.key.scheduled_ms % (period_s * 1_000)
        ]
        if since_ms and due_ms < min(since_ms) - SLACK_MS:
            since = instant(min(since_ms))
            self._accuse(kinds.OWED_TOO_MUCH, entry, f"it is owed from {since} on")

    # -- settled by the store ------------------------------------------------------------------

    def _settled_by_claim(self, entry: Entry, run: _Run) -> None:
        if not run.open and entry.reason == Reason.RUNNER_LOST.value:
            return  # a repeated answer
        if entry.reason == Reason.ABANDONED.value:
            self._judge_abandoned(entry, run, self._takeover_ms(entry.job, min))
            self._waiting.get(entry.job, {}).pop(entry.key, None)
        elif entry.reason == Reason.RUNNER_LOST.value:
            least = min(job.max_attempts for _version, job in self._jobs[entry.job])
            if run.failures + run.open < least:
                text = f"given up after {run.failures + run.open} attempts that count, of {least}"
                self._accuse(kinds.TOO_FEW_ATTEMPTS, entry, text)
        run.open = False

    def abandoned(self, entry: Entry) -> None:
        """Judge a run that was settled on the side, by a claim of another one or by pruning."""
        run = self._runs.setdefault(entry.key, _Run())
        history_ms = min(version.history_ms for version in self._plan.versions)
        window_ms = self._takeover_ms(entry.job, min) if entry.decision_id else history_ms
        self._judge_abandoned(entry, run, window_ms)
        self._waiting.get(entry.job, {}).pop(entry.key, None)
        run.open = False

    def _judge_abandoned(self, entry: Entry, run: _Run, window_ms: int) -> None:
        over_ms = entry.at_ms - run.until_ms
        if over_ms <= window_ms and not run.back:
            self._accuse(kinds.ABANDONED_EARLY, entry, f"abandoned after {over_ms} ms")

    # -- renewals and settlements --------------------------------------------------------------

    def renewed(self, entry: Entry) -> None:
        """Note a new end of a lease."""
        run = self._runs.get(entry.key)
        if run is not None and entry.verdict == "renewed":
            run.until_ms, run.back = entry.at_ms + entry.lease_ms, False

    def settled(self, entry: Entry) -> None:
        """Judge a settlement."""
        run = self._runs.setdefault(entry.key, _Run())
        if entry.verdict != ACCEPTED or not run.open:
            return
        run.open, run.back, run.until_ms = False, False, entry.at_ms + entry.wait_ms
        if entry.state == RunState.WAITING.value:
            self._waiting.setdefault(entry.job, {})[entry.key] = run.until_ms
        counted = entry.outcome == Outcome.FAILED.value
        if entry.outcome == Outcome.HANDED_OVER.value:
            run.hand_overs += 1
            counted = run.hand_overs > FREE_HAND_OVERS
            if entry.state == RunState.WAITING.value:
                since_ms = min(self.sent_ms, entry.at_ms)
                run.handed_over = (run.holder, since_ms, self.sent_at_ms)
        run.failures += counted
        if entry.wait_ms > MAX_RETRY_DELAY_MS:
            self._accuse(kinds.RETRIED_EARLY, entry, f"to wait for {entry.wait_ms} ms")
        if entry.state == RunState.FAILED.value:
            least = min(job.max_attempts for _version, job in self._jobs[entry.job])
            if run.failures < least:
                text = f"failed after {run.failures} attempts that count, of {least}"
                self._accuse(kinds.TOO_FEW_ATTEMPTS, entry, text)

    # -- options -------------------------------------------------------------------------------

    def _takeover_ms(self, name: str, choose: Callable[[Iterable[int]], int]) -> int:
        """Return the takeover window of a job, the widest or the narrowest of all versions."""
        jobs = self._jobs.get(name, [])
        return choose([max(job.catch_up_ms, 10 * version.lease_ms) for version, job in jobs])

    def _prints(self, name: str) -> list[tuple[str, int]]:
        """Return the definitions of a job that some version has, with their periods."""
        return [
            (fingerprint(every(seconds=job.period_s), job.jitter_ms), job.period_s)
            for _version, job in self._jobs.get(name, ())
        ]

    def _longest_lease_ms(self) -> int:
        return max(version.lease_ms for version in self._plan.versions)
