"""What became of a fault campaign: what is wrong, what was missed and why, how long things took."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, Optional

from leasecron_sync.cli.output import iso
from leasecron_sync.model import RunKey, RunRecord, RunState, Verdict
from leasecron_sync.schedule.fixed import jitter_of
from leasecron_sync.testing import Entry, Fault, Report, Terms, check, read_history, shorten
from leasecron_sync.testing.history import faults
from leasecron_sync.testing.history.checker import SKEW_MS
from leasecron_sync.testing.history.entry import (
    CLAIMED,
    CLAIMING,
    INSTANCE,
    STARTED,
    TOLD,
    UNKNOWN,
    merged,
)
from leasecron_sync.testing.history.text import timeline
from scripts._faults_crew import Instance
from scripts._faults_instance import Job
from scripts._faults_plan import (
    BY_NAME,
    HOST_CLOCK,
    MOST_AHEAD_MS,
    MOST_BACK_MS,
    SMALL_STEPS_MS,
    WINDOW_MS,
    Plan,
)
from scripts._faults_times import STORE_CLOCK, Happened, Spread, Times

GOING_ON_MS: Final = 1_000
"""A process that goes on after SIGSTOP may be so late with what it was about to do."""
SKIP_MS: Final = 1_000
"""How far a skip may be from the run that was in its way, where clocks are set."""
TELLING_MS: Final = 6_000 + MOST_BACK_MS
"""How long after its window an instance may take to tell that a run was missed."""
MOST_SHOWN: Final = 5
GIVEN_UP: Final = ("run_missed", "run_failed")
KILLED: Final = "its winner, or who asked for it, was killed"
NOBODY: Final = "nobody was there all the time"


@dataclass(frozen=True)
class Wrong:
    """Something that must not be.

    Attributes:
        title: What it is, in a few words.
        text: What it is, in one line.
        entries: The entries that show it.
    """

    title: str
    text: str
    entries: tuple[Entry, ...] = ()


@dataclass
class Scene:
    """What there is to judge.

    Attributes:
        plan: What was meant.
        jobs: The jobs.
        crew: All instances.
        happened: What was injected.
        from_ms: From here on runs are owed.
        until_ms: Up to here.
        records: The store's records in the end; nothing on a claim backend.
        troubles: How instances ended that should have ended well.
    """

    plan: Plan
    jobs: Sequence[Job]
    crew: Sequence[Instance]
    happened: Sequence[Happened]
    from_ms: int
    until_ms: int
    records: Sequence[RunRecord] = ()
    troubles: Sequence[str] = ()


@dataclass
class Finding:
    """The verdict.

    Attributes:
        report: That of the checker.
        owed: How many scheduled times were looked at.
        wrong: What must not be.
        excused: Starts of handlers that a process was about to make when it was stopped.
        missed: Scheduled times that nobody ran, by reason.
        times: How long things took.
        beside: Executions that began while the one before was at work, in a process that was not
            disturbed; and in one that was.
    """

    report: Report
    owed: int
    wrong: list[Wrong] = field(default_factory=list[Wrong])
    excused: int = 0
    missed: Counter[str] = field(default_factory=Counter)
    times: dict[str, Spread] = field(default_factory=dict[str, Spread])
    beside: tuple[int, int] = (0, 0)

    @property
    def doubled(self) -> int:
        """How many doubled runs there are."""
        return sum(one.title in faults.DOUBLED for one in self.wrong)

    @property
    def lost(self) -> int:
        """How many lost ones."""
        return sum(one.title == faults.LOST for one in self.wrong)


def owed_runs(jobs: Iterable[Job], from_ms: int, until_ms: int) -> Iterator[RunKey]:
    """Yield the runs that fell due in a span."""
    for job in jobs:
        step_ms = job.every_s * 1_000
        for scheduled_ms in range(-(-from_ms // step_ms) * step_ms, until_ms + 1, step_ms):
            if scheduled_ms + jitter_of(job.name, scheduled_ms, job.jitter_ms) <= until_ms:
                yield RunKey(job.name, scheduled_ms)


def skew_of(plan: Plan) -> int:
    """Return how far the clocks of the history and those that decide may be apart."""
    kinds = {one.kind for one in plan.injections}
    skew_ms = SKEW_MS
    if STORE_CLOCK in kinds:
        skew_ms += MOST_AHEAD_MS
    if "clock step" in kinds and plan.wishes.store in HOST_CLOCK:
        skew_ms += max(SMALL_STEPS_MS)
    return skew_ms


class Judge:
    """Looks at a whole history.

    Args:
        scene: What there is to judge.
        logs: Further logs: what was injected, and the records.
    """

    def __init__(self, scene: Scene, logs: Sequence[Sequence[Entry]]) -> None:
        self._scene = scene
        self._by_id: dict[str, Instance] = {}
        self._starters: dict[tuple[str, Optional[int], Optional[int]], Instance] = {}
        self._lives: dict[int, tuple[int, int]] = {}
        own: list[Sequence[Entry]] = []
        self.cut = 0
        for instance in scene.crew:
            if instance.log.exists():
                history = read_history(instance.log)
                self.cut += history.cut
                own.append(history.entries)
                self._learn(instance, history.entries)
        self.entries = merged([*own, *logs]).entries

    def _learn(self, instance: Instance, entries: Sequence[Entry]) -> None:
        if entries:
            self._lives[instance.process.pid] = entries[0].at_ms, entries[-1].at_ms
        for entry in entries:
            if entry.what == INSTANCE:
                self._by_id[entry.instance] = instance
            elif entry.what == STARTED:
                self._starters[entry.job, entry.scheduled_ms, entry.steady_ms] = instance

    def find(self, *, lease: bool) -> Finding:
        """Return the verdict."""
        scene = self._scene
        owed = tuple(owed_runs(scene.jobs, scene.from_ms, scene.until_ms))
        terms = Terms(
            skew_ms=skew_of(scene.plan),
            owed=owed if lease else (),
            until_ms=scene.until_ms if lease else None,
            begin_ms=self.entries[0].sent_ms if self.entries else None,
        )
        report = check(self.entries, terms=terms)
        finding = Finding(report, len(owed))
        for fault in report.faults:
            if self._was_stopped_before(fault):
                finding.excused += 1
            else:
                finding.wrong.append(self._shown(fault, terms, len(finding.wrong)))
        finding.wrong += [Wrong("ended badly", text) for text in scene.troubles]
        if report.totals.executions == 0:
            finding.wrong.append(Wrong("nothing done", "no handler was executed"))
        if lease:
            self._look_at_records(finding, owed)
        else:
            self._look_at_missed(finding, owed)
        span = scene.from_ms, scene.until_ms
        times = Times(self.entries, self._by_id, scene.happened, span)
        finding.times = times.spreads(lease=lease)
        finding.beside = times.beside()
        return finding

    def _was_stopped_before(self, fault: Fault) -> bool:
        """Between the last look at trust and the handler's first line no code can help."""
        if fault.kind not in (faults.STARTED_WITHOUT_LEASE, faults.STARTED_AFTER_FINISH):
            return False
        start = fault.entries[-1]
        instance = self._starters.get((start.job, start.scheduled_ms, start.steady_ms))
        return instance is not None and any(
            one.kind == "stop"
            and one.from_ms <= start.at_ms
            and (one.to_ms is None or start.at_ms <= one.to_ms + GOING_ON_MS)
            for one in instance.disturbed
        )

    def _shown(self, fault: Fault, terms: Terms, number: int) -> Wrong:
        entries: tuple[Entry, ...]
        if fault.kind in faults.ABSENCES or number >= MOST_SHOWN:
            # Nothing shows what is missing: what there is of the run tells most.
            entries = self._about(fault.job, fault.scheduled_ms)
        else:
            entries = shorten(self.entries, fault, terms=terms)
        return Wrong(fault.kind, fault.message, entries)

    def _about(self, job: str, scheduled_ms: int) -> tuple[Entry, ...]:
        wanted = (job, scheduled_ms)
        return tuple(x for x in self.entries if (x.job, x.scheduled_ms) == wanted)

    # -- leases ----------------------------------------------------------------------------------

    def _look_at_records(self, finding: Finding, owed: Sequence[RunKey]) -> None:
        """What an instance was told is one thing, what the store has in the end another.

        Nothing is given up, and nothing is skipped without a run that was in its way.
        """
        settled = {record.key for record in self._scene.records if record.state.settled}
        known = {(one.job, one.scheduled_ms) for one in finding.report.faults}
        for key in owed:
            if key not in settled and (key.job, key.scheduled_ms) not in known:
                text = f"{named(key)} was owed, and the store has no settled record of it"
                about = self._about(key.job, key.scheduled_ms)
                finding.wrong.append(Wrong(faults.LOST, text, about))
        by_job: dict[str, list[RunRecord]] = {}
        for record in self._scene.records:
            by_job.setdefault(record.key.job, []).append(record)
        overlapping = {job.name for job in self._scene.jobs if job.overlap == "allow"}
        stepped = any(one.kind == STORE_CLOCK for one in self._scene.happened)
        slack_ms = SKIP_MS + (MOST_BACK_MS if stepped else 0)
        for record in self._scene.records:
            about = self._about(record.key.job, record.key.scheduled_ms)
            if record.state is RunState.FAILED:
                text = f"{named(record.key)} failed: {record.reason}"
                finding.wrong.append(Wrong("failed", text, about))
            elif record.state is RunState.SKIPPED and (
                record.key.job in overlapping or not _was_in_the_way(record, by_job, slack_ms)
            ):
                text = f"{named(record.key)} was skipped, and nothing was in its way"
                finding.wrong.append(Wrong("skipped without cause", text, about))

    # -- claims ----------------------------------------------------------------------------------

    def _look_at_missed(self, finding: Finding, owed: Sequence[RunKey]) -> None:
        """On a claim backend: why was it not executed, and did those who were there tell?"""
        executed = {x.key for x in self.entries if x.what == STARTED}
        told = self._told()
        claims: dict[RunKey, list[Entry]] = {}
        for entry in self.entries:
            if entry.what in (CLAIMING, CLAIMED):
                claims.setdefault(entry.key, []).append(entry)
        for key in owed:
            if key in executed:
                continue
            tellers = {name for name, _reason in told.get(key, ())}
            reasons = sorted({reason for _name, reason in told.get(key, ())})
            asked = claims.get(key, [])
            winners = self._may_have_won(asked)
            killed = {name for name, ms in winners.items() if self._was_killed(name, ms)}
            about = self._about(key.job, key.scheduled_ms)
            if set(winners) - killed - tellers:
                text = f"{named(key)} may have been won by an instance that told of no end of it"
                finding.wrong.append(Wrong(faults.NOT_TOLD, text, about))
            elif killed:
                finding.missed[KILLED] += 1
            elif not tellers and any(x.verdict == Verdict.TAKEN.value for x in asked):
                text = f"{named(key)} was told to be taken, and nobody has won it"
                finding.wrong.append(Wrong(faults.LOST, text, about))
            elif self._silent(key, asked, tellers):
                text = f"{named(key)} was not executed, and not all told that saw it through"
                finding.wrong.append(Wrong(faults.LOST, text, about))
            else:
                finding.missed[", ".join(reasons) or NOBODY] += 1

    def _may_have_won(self, asked: Sequence[Entry]) -> dict[str, int]:
        """Return who has won it, or may have, by the newest answer, and when they asked."""
        answered = {(x.instance, x.call) for x in asked if x.what == CLAIMED}
        last: dict[str, tuple[bool, int]] = {}
        for entry in asked:
            if entry.what == CLAIMED:
                won = entry.verdict in (Verdict.GRANTED.value, UNKNOWN)
                last[entry.instance] = won, entry.sent_ms
            elif (entry.instance, entry.call) not in answered:
                last[entry.instance] = True, entry.sent_ms
        return {name: sent_ms for name, (won, sent_ms) in last.items() if won}

    def _was_killed(self, name: str, since_ms: int) -> bool:
        instance = self._by_id.get(name)
        return instance is not None and any(
            one.kind == "kill" and one.from_ms >= since_ms for one in instance.disturbed
        )

    def _told(self) -> dict[RunKey, set[tuple[str, str]]]:
        """Return who told of which run that it was missed, or won and not executed, and why."""
        steps = {job.name: job.every_s * 1_000 for job in self._scene.jobs}
        told: dict[RunKey, set[tuple[str, str]]] = {}
        for entry in self.entries:
            if entry.what != TOLD or entry.event not in GIVEN_UP or entry.scheduled_ms is None:
                continue
            first_ms = entry.scheduled_ms if entry.first_ms is None else entry.first_ms
            # A clock that is set by an hour makes many of them; those of the campaign count.
            first_ms = max(first_ms, self._scene.from_ms // 60_000 * 60_000)
            for scheduled_ms in range(first_ms, entry.scheduled_ms + 1, steps[entry.job]):
                key = RunKey(entry.job, scheduled_ms)
                told.setdefault(key, set()).add((entry.instance, entry.reason))
        return told

    def _silent(self, key: RunKey, asked: Sequence[Entry], told: set[str]) -> list[str]:
        """Return the instances that saw it through and know nothing of it."""
        jitters = {job.name: job.jitter_ms for job in self._scene.jobs}
        due_ms = key.scheduled_ms + jitter_of(key.job, key.scheduled_ms, jitters[key.job])
        taken = {x.instance for x in asked if x.verdict == Verdict.TAKEN.value}
        found = []
        for name, instance in self._by_id.items():
            begin_ms, end_ms = self._lives[instance.process.pid]
            ends = [one.from_ms for one in instance.disturbed if one.kind in ("kill", "end")]
            quiet_ms = due_ms + WINDOW_MS
            for one in instance.disturbed:
                if one.kind == "stop" and one.from_ms <= quiet_ms + TELLING_MS:
                    quiet_ms = max(quiet_ms, one.to_ms or end_ms)
            for fault in self._scene.happened:
                if fault.from_ms <= quiet_ms + TELLING_MS and fault.to_ms > due_ms:
                    quiet_ms = max(quiet_ms, fault.to_ms)
            was_there = begin_ms + 1_000 < key.scheduled_ms
            saw_it = was_there and min([end_ms, *ends]) > quiet_ms + TELLING_MS
            if saw_it and name not in told and name not in taken:
                found.append(name)
        return found


def named(key: RunKey) -> str:
    """Return a run as messages name it."""
    return f"{key.job!r} {iso(key.scheduled_ms)}"


def _was_in_the_way(record: RunRecord, by_job: dict[str, list[RunRecord]], slack_ms: int) -> bool:
    """Tell whether another run of the job was in progress when one was skipped for it."""
    at_ms = record.settled_ms
    return (
        record.reason == "overlap"
        and at_ms is not None
        and any(
            other.key != record.key
            and other.attempt > 0
            and other.key.scheduled_ms <= at_ms + slack_ms
            and (other.settled_ms is None or other.settled_ms >= at_ms - slack_ms)
            for other in by_job[record.key.job]
        )
    )


def injected(happened: Sequence[Happened]) -> list[tuple[str, int]]:
    """Return how often each kind of fault was injected, in the order of the table of kinds."""
    counts = Counter(one.kind for one in happened)
    return [(name, counts[name]) for name in BY_NAME if counts[name]]


def shown_entries(entries: Sequence[Entry]) -> list[tuple[str, str, str, str]]:
    """Return entries as the rows of a table."""
    return [(row.ms, row.instance, row.scheduled, row.what) for row in timeline(entries)]


def now_ms() -> int:
    """Return the clock of the history."""
    return time.time_ns() // 1_000_000
