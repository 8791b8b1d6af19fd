"""Instances as processes: start them, disturb them, read their histories, judge them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Callable, Optional, Union

from leasecron_sync import SQLiteLease
from leasecron_sync.backends.base import BackendSettings
from leasecron_sync.model import RunKey, RunRecord, RunState
from leasecron_sync.testing import (
    Entry,
    Fault,
    History,
    HistoryLog,
    Report,
    Terms,
    check,
    read_history,
)
from leasecron_sync.testing.history import faults
from tests.services.process import stop_outside_writes

ROOT = Path(__file__).parents[2]
LONG = bool(os.environ.get("LEASECRON_SYNC_LONG"))
GOING_ON_MS = 1_000
"""How long a process that goes on may take to do what it had begun when it was stopped."""


def boot_ms() -> int:
    """Return the steady clock of the logs, which all processes of a host share."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME) // 1_000_000


def eventually(condition: Callable[[], object], limit_s: float) -> bool:
    """Wait until a condition holds, within a limit."""
    end = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() >= end:
            return bool(condition())
        time.sleep(0.02)
    return True


@dataclass
class Disturbance:
    """Times in which a process was not at work, by the clock of the logs."""

    from_ms: int
    to_ms: Optional[int] = None  # None: it was killed


class Runner:
    """One instance, in a process of its own."""

    def __init__(self, folder: Path, name: str, **options: Union[str, float]) -> None:
        self.name = name
        self.log = folder / f"{name}.log"
        self._read: list[Entry] = []
        self._place = 0
        self.disturbed: list[Disturbance] = []
        self.errors = (folder / f"{name}.err").open("w+b")
        arguments = [sys.executable, str(Path(__file__).with_name("runner.py"))]
        arguments += ["--path", str(folder / "store.db"), "--log", str(self.log)]
        for option, value in options.items():
            arguments += [f"--{option.replace('_', '-')}", str(value)]
        self.process = subprocess.Popen(
            arguments,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )

    @property
    def pid(self) -> int:
        return self.process.pid

    def wait_ready(self) -> None:
        """Wait until it says that it has started."""
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == b"ready\n", self.standard_error()

    def standard_error(self) -> str:
        """Return what it wrote on standard error."""
        self.errors.seek(0)
        return self.errors.read().decode()

    def entries(self, what: Optional[str] = None) -> list[Entry]:
        """Return its log so far, or the entries of one kind."""
        if self.log.exists():
            with self.log.open("rb") as file:
                file.seek(self._place)
                whole, end, _rest = file.read().rpartition(b"\n")
            self._place += len(whole + end)
            self._read += [Entry.from_line(line) for line in whole.decode().split("\n") if line]
        return [entry for entry in self._read if what in (None, entry.what)]

    def events(self, name: str) -> list[Entry]:
        """Return the events of one name that it told so far."""
        return [entry for entry in self.entries("told") if entry.event == name]

    def inside(self) -> list[Entry]:
        """Return the starts of the handlers that are at work."""
        ended = {entry.token for entry in self.entries("ended")}
        return [entry for entry in self.entries("started") if entry.token not in ended]

    def kill(self) -> None:
        """End it as a crash would."""
        self.disturbed.append(Disturbance(boot_ms()))
        self.process.kill()
        self.process.wait(10)

    def pause(self) -> None:
        """Have it stand still."""
        self.disturbed.append(Disturbance(boot_ms(), boot_ms()))
        stop_outside_writes(self.process.send_signal, self.log.with_name("store.db"))

    def go_on(self) -> None:
        """Let it work again."""
        self.process.send_signal(signal.SIGCONT)
        self.disturbed[-1].to_ms = boot_ms()

    def terminate(self) -> None:
        """Ask it to end, by a signal."""
        self.process.send_signal(signal.SIGTERM)

    def stop(self) -> None:
        """Ask it to end, by its standard input."""
        assert self.process.stdin is not None
        if self.process.poll() is None:
            self.process.stdin.write(b"\n")
            self.process.stdin.flush()

    def end(self, limit_s: float = 15) -> int:
        """Wait for its end and return its status."""
        return self.process.wait(limit_s)

    def close(self) -> None:
        """Make sure that nothing of it is left."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.kill()
            self.process.wait(10)
        for stream in (self.process.stdin, self.process.stdout, self.errors):
            if stream is not None:
                stream.close()


@dataclass
class Cluster:
    """Several runners on one store."""

    folder: Path
    runners: list[Runner] = field(default_factory=list)

    def start(self, name: str, **options: Union[str, float]) -> Runner:
        """Start one runner; it may not be ready yet."""
        runner = Runner(self.folder, name, **options)
        self.runners.append(runner)
        return runner

    def stop(self) -> None:
        """Stop all that are still there, and check that they end well."""
        alive = [runner for runner in self.runners if runner.process.poll() is None]
        for runner in alive:
            runner.stop()
        for runner in alive:
            assert runner.end(30) == 0, runner.name
        for runner in alive:
            assert runner.standard_error() == "", runner.name

    def close(self) -> None:
        """Make sure that nothing is left."""
        for runner in self.runners:
            runner.close()

    def entries(self, what: Optional[str] = None) -> list[Entry]:
        """Return all logs so far, or the entries of one kind, in the order of time."""
        found = [entry for runner in self.runners for entry in runner.entries(what)]
        return sorted(found, key=lambda entry: entry.steady_ms or 0)

    def events(self, name: str) -> list[Entry]:
        """Return the events of one name that were told so far."""
        return [entry for entry in self.entries("told") if entry.event == name]

    def runner_of(self, entry: Entry) -> Runner:
        """Return whose entry it is."""
        return next(runner for runner in self.runners if entry in runner.entries(entry.what))

    def history(self) -> History:
        """Return the whole history, with the store's records of now at its end."""
        end = self.folder / "end.log"
        end.unlink(missing_ok=True)
        log = HistoryLog(end)
        log.records(self.records())
        log.close()
        return read_history(*(runner.log for runner in self.runners), end)

    def records(self) -> list[RunRecord]:
        """Return the store's records."""
        backend = SQLiteLease(self.folder / "store.db")
        backend.open(BackendSettings("default", "reader", 5_000))
        try:
            return list(backend.history(None, 10_000))
        finally:
            backend.close()

    def unsettled(self) -> list[RunRecord]:
        """Return the records that are not settled yet."""
        return [record for record in self.records() if not record.state.settled]


def judge(cluster: Cluster, owed: Iterable[RunKey] = ()) -> list[str]:
    """Return what is wrong with the history of a cluster, whatever it was about."""
    report = check(cluster.history().entries, terms=Terms(owed=tuple(owed)))
    assert report.totals.executions > 0
    assert report.totals.undecided == 0
    wrong = [fault.message for fault in report.faults if not stopped_before(cluster, fault)]
    return wrong + early_successors(cluster, report)


def stopped_before(cluster: Cluster, fault: Fault) -> bool:
    """Tell whether a process was stopped between its look at trust and the handler's first line.

    Then it starts the handler when it goes on, whatever became of the run. No code can prevent it.
    """
    if fault.kind not in (faults.STARTED_WITHOUT_LEASE, faults.STARTED_AFTER_FINISH):
        return False
    start = fault.entries[-1]
    assert start.steady_ms is not None
    return any(
        item.to_ms is not None and item.from_ms <= start.steady_ms <= item.to_ms + GOING_ON_MS
        for item in cluster.runner_of(start).disturbed
    )


def early_successors(cluster: Cluster, report: Report) -> list[str]:
    """The next attempt begins after the last one has ended, or its process was disturbed.

    One that was stopped right before the handler's first line begins late, beside its successor.
    """
    begins = {(entry.job, entry.token): entry for entry in cluster.entries("started")}
    ends = {(entry.job, entry.token): entry for entry in cluster.entries("ended")}
    wrong = []
    for run in report.runs:
        started = [attempt for attempt in run.attempts if attempt.started]
        for before, after in zip(started, started[1:]):
            old, new = begins[run.job, before.token], begins[run.job, after.token]
            end = ends.get((run.job, before.token))
            assert old.steady_ms is not None
            assert new.steady_ms is not None
            if end is not None and (end.steady_ms or 0) <= new.steady_ms:
                continue
            reasons = [
                item
                for item in cluster.runner_of(old).disturbed
                if item.from_ms <= new.steady_ms
                and (item.to_ms is None or old.steady_ms <= item.to_ms + GOING_ON_MS)
            ]
            if not reasons:
                wrong.append(
                    f"attempt {after.attempt} of {new.key} began while attempt {before.attempt} "
                    f"was at work: {told_apart(cluster, old, end, new)}"
                )
    return wrong


def told_apart(cluster: Cluster, old: Entry, end: Optional[Entry], new: Entry) -> str:
    """Say when two attempts ran and where, and what was done to the first one's process."""
    assert old.steady_ms is not None
    assert new.steady_ms is not None
    runner = cluster.runner_of(old)
    begin_ms = old.steady_ms
    ended = "never" if end is None or end.steady_ms is None else f"{end.steady_ms - begin_ms:+}"
    disturbed = [
        (item.from_ms - begin_ms, item.to_ms and item.to_ms - begin_ms) for item in runner.disturbed
    ]
    return (
        f"in ms from the start of the first, in {runner.name}: its end {ended}, the next "
        f"{new.steady_ms - begin_ms:+} in {cluster.runner_of(new).name}, disturbed {disturbed}"
    )


def owed_runs(jobs: int, every_s: int, from_ms: int, to_ms: int) -> list[RunKey]:
    """Return the runs of a span."""
    step_ms = every_s * 1000
    first_ms = -(-from_ms // step_ms) * step_ms
    return [
        RunKey(f"job-{number}", scheduled_ms)
        for scheduled_ms in range(first_ms, to_ms + 1, step_ms)
        for number in range(jobs)
    ]


def lost(records: Iterable[RunRecord], owed: Iterable[RunKey]) -> list[str]:
    """Return the owed runs that have no settled record."""
    settled = {record.key for record in records if record.state.settled}
    return [f"lost: {key}" for key in owed if key not in settled]


def baseless_skips(cluster: Cluster) -> list[str]:
    """A run is skipped only while another run of its job is in progress, by the store's clock."""
    first_enter: dict[RunKey, int] = {}
    for entry in cluster.entries("started"):
        # Where the first attempt never began, its runner was disturbed right after the grant.
        wall_ms = entry.at_ms if entry.attempt == 1 else 0
        first_enter.setdefault(entry.key, wall_ms)
    records = cluster.records()
    by_job: dict[str, list[RunRecord]] = defaultdict(list)
    for record in records:
        by_job[record.key.job].append(record)
    wrong = []
    for record in records:
        if record.state is not RunState.SKIPPED:
            continue
        at_ms = record.settled_ms
        assert at_ms is not None
        others = [
            other
            for other in by_job[record.key.job]
            if other.key != record.key
            and other.attempt > 0
            and other.key.scheduled_ms <= at_ms
            and (other.settled_ms is None or other.settled_ms >= at_ms)
            # Its handler began soon after the grant that stood in the way.
            and first_enter.get(other.key, at_ms) <= at_ms + 1_000
        ]
        if record.reason != "overlap" or not others:
            wrong.append(f"skipped without cause: {record}")
    return wrong
