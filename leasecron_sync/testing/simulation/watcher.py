"""Looks on: gives the checker what the store decides, and judges what only a simulation can see."""
# It asks the checker until when a lease is live.
# pyright: reportPrivateUsage=false
# ruff: noqa: SLF001

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, Callable, Optional

from leasecron_sync.backends.base import LeaseBackend
from leasecron_sync.model import JobStamp, JobStanding, LeaseRef, RunKey, Verdict
from leasecron_sync.run import LeaseRun, Run
from leasecron_sync.testing.clock import ManualClock
from leasecron_sync.testing.history._ledger import named
from leasecron_sync.testing.history._runs import RunBook, Standing, standing
from leasecron_sync.testing.history.checker import Checker
from leasecron_sync.testing.history.entry import (
    ABANDONED,
    CLAIMED,
    REGISTERED,
    RENEWED,
    SETTLED,
    STARTED,
    Entry,
)
from leasecron_sync.testing.history.log import HistoryLog
from leasecron_sync.testing.history.recorders import RecordingLease
from leasecron_sync.testing.history.report import Terms
from leasecron_sync.testing.history.shorten import shorten
from leasecron_sync.testing.history.text import described
from leasecron_sync.testing.simulation.machine import Process
from leasecron_sync.testing.simulation.plan import Plan
from leasecron_sync.testing.simulation.rules import RunRules
from leasecron_sync.testing.simulation.violation import (
    BESIDE_OWN,
    TRUST_TOO_LONG,
    Violation,
    violation_of,
)


class WatchedLease(RecordingLease):
    """A lease backend that writes down what it answers, and shows what it is asked.

    Args:
        backend: The one that does the work.
        watcher: Who looks on.
    """

    def __init__(self, backend: LeaseBackend, watcher: Watcher) -> None:
        super().__init__(backend, watcher.log)
        self._watcher = watcher

    def register(self, jobs: Sequence[JobStamp]) -> Sequence[JobStanding]:
        """Register, and have the answer judged."""
        answers = super().register(jobs)
        for stamp, answer in zip(jobs, answers):
            self._watcher.rules.registered(stamp, answer)
        return answers


class StoreTime(ManualClock):
    """The store's clock as the store decides by it.

    Args:
        now_ms: Reads it.
    """

    def __init__(self, now_ms: Callable[[], int]) -> None:
        super().__init__()
        self.now_ms = now_ms  # type: ignore[method-assign]


class Watcher:
    """Looks on one history.

    Args:
        plan: What is played.
        now_ms: The store's clock, as the store decides by it.

    Attributes:
        rules: What only a simulation can judge of decisions.
        violation: The first one.
        disturbed: Whether a lease may have ended by what others did, since it was last unset.
        counts: How often what was decided.
        answers: Answers to claims, until somebody takes them out.
        losses: How often the store has lost its data.
        tell: Takes lines of the timeline, where somebody reads it.
        entries: What the checker was given, where that is kept.
    """

    def __init__(self, plan: Plan, now_ms: Callable[[], int]) -> None:
        self.now_ms = now_ms
        self.checker = Checker(exact=True)
        self.log = HistoryLog(self._take, clock=StoreTime(now_ms), exact=True)
        self.violation: Optional[Violation] = None
        self.disturbed = False
        self.answers: list[Entry] = []
        self.losses = 0
        self.counts: Counter[str] = Counter()
        self.tell: Optional[Callable[[str], None]] = None
        self.entries: Optional[list[Entry]] = None
        self._processes: dict[str, Process] = {}
        self._due_ms: dict[RunKey, int] = {}
        self.rules = RunRules(plan, self.report)

    def began(self, instance_id: str, process: Process) -> None:
        """Note whose id that is."""
        self._processes[instance_id] = process

    def report(self, violation: Violation) -> None:
        """Note a violation; the first one ends the history, after the step that is under way."""
        if self.violation is None:
            self.violation = violation

    def lose_data(self) -> None:
        """Note that the store lost its data."""
        self.losses += 1
        self.rules.forget()
        for process in self._processes.values():
            process.expects_ms = 0  # what it had found owed before, it may still claim
        self.log.emptied()
        for book in self.checker._books.jobs.values():
            book.owed_from_ms = None  # until it is registered again

    # -- what the store decides ----------------------------------------------------------------

    def _take(self, entry: Entry) -> None:
        what = entry.what
        process = self._processes.get(entry.instance)
        if what == REGISTERED:
            # That the store lost its data was noted when it did; since then it may have granted.
            entry = entry._replace(store_id="")
        elif what == CLAIMED:
            entry = self._claimed(entry, process)
            self.answers.append(entry)
        elif what == RENEWED:
            self.rules.renewed(entry)
        elif what == SETTLED:
            self.disturbed = True
            self.rules.settled(entry)
        elif what == ABANDONED:
            self.disturbed = True
            self.rules.abandoned(entry)
        if self.entries is not None:
            self.entries.append(entry)
        self.checker.add(entry)
        if self.checker.faults:
            self.report(violation_of(self.checker.faults[0]))
        if self.tell is not None:
            at = "" if entry.scheduled_ms is None else f"@{entry.scheduled_ms // 1000}"
            self.tell(f"    {entry.job}{at} {described(entry)}")

    def _claimed(self, entry: Entry, process: Optional[Process]) -> Entry:
        if process is not None and not entry.window_ms:
            self.rules.claimed(entry, process)
        if entry.due_ms is not None:
            # Another version's jitter makes no started run early.
            due_ms = min(entry.due_ms, self._due_ms.get(entry.key, entry.due_ms))
            self._due_ms[entry.key] = due_ms
            entry = entry._replace(due_ms=due_ms)
        if entry.verdict == Verdict.GRANTED.value:
            self.counts["grants"] += 1
            self.counts["takeovers"] += entry.takeover
            self.disturbed = self.disturbed or entry.attempt > 1
        elif entry.fresh:
            self.disturbed = True
        return entry

    def shown(self) -> Sequence[Entry]:
        """Return the fewest entries that show the violation, as far as they were kept."""
        if self.violation is None:
            return ()
        faults = self.checker.faults
        if not faults or self.entries is None:
            return self.violation.entries
        begin_ms = self.entries[0].sent_ms if self.entries else None
        return shorten(self.entries, faults[0], terms=Terms(exact=True, begin_ms=begin_ms))

    def owed_from_ms(self, job: str) -> Optional[int]:
        """Return since when a job is owed by what the store said last."""
        return self.checker._books.job(job).owed_from_ms

    # -- what instances do ---------------------------------------------------------------------

    def started(self, run: Run, process: Process) -> None:
        """Note that a handler starts."""
        self.counts["handlers"] += 1
        if isinstance(run, LeaseRun):
            self._judge_beside(run, process)
        if self.losses and not isinstance(run, LeaseRun):
            return  # it may have been won before the store lost its data, and once more afterwards
        key = run._key
        fields: dict[str, Any] = {"job": key.job, "scheduled_ms": key.scheduled_ms}
        if isinstance(run, LeaseRun):
            fields.update(token=run.token, attempt=run.attempt)
        self.log.note(STARTED, instance=process.name, **fields)

    def _judge_beside(self, run: LeaseRun, process: Process) -> None:
        """No handler starts beside an old one of its run, or of its no-overlap job.

        A deploy may change the job while the run waits for its thread: what was won since may be
        at work already, if it was won to work beside others.
        """
        key, alone = run._key, self.rules.is_alone(run._key)
        for other in process.handlers:
            assert isinstance(other, LeaseRun)
            beside = other.token > run.token and not self.rules.is_alone(other._key)
            if other._key == key or (alone and other.job == key.job and not beside):
                text = f"{process.name}: {named(key)} beside {named(other._key)}"
                self.report(Violation(BESIDE_OWN, text))

    def watch(self, process: Process) -> None:
        """See whether a process trusts a lease for longer than the store keeps it."""
        if not process.manual._runtime.taken():
            return
        for live in process.manual._runtime.runs():
            control, lease = live.control, live.lease
            if lease is None or live.done or not control.trusted:
                continue
            trusted_ms = control.trusted_until_ms - process.host.clock.steady_ms()
            left_ms = self._left_ms(lease.ref)
            if left_ms is not None and trusted_ms > left_ms:
                about = f"{named(lease.ref.key)}, token {lease.ref.token}"
                text = f"{process.name} trusts {about}, for {trusted_ms} ms, left are {left_ms}"
                self.report(Violation(TRUST_TOO_LONG, text))

    def _left_ms(self, ref: LeaseRef) -> Optional[int]:
        """Return how long the store keeps a lease; None where it has lost it."""
        grant = self.checker._books.job(ref.key.job).tokens.get(ref.token)
        if grant is None or grant.key != ref.key or grant.end is not None:
            return -1
        return None if grant.forgotten else grant.live_until_ms - self.now_ms()

    # -- what is known of runs -----------------------------------------------------------------

    def runs(self) -> Iterator[RunBook]:
        """Yield what is known of every run, since the store lost its data last."""
        for job in self.checker._books.jobs.values():
            yield from job.runs.values()

    def standing(self, key: RunKey) -> Standing:
        """Tell what is known of the end of a run."""
        run = self.checker._books.job(key.job).runs.get(key.scheduled_ms)
        return Standing.UNHEARD if run is None else standing(run, read=False)
