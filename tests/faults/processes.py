"""Instances as processes: start them, disturb them, read their logs, judge the history."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Callable, Optional, Union

from leasecron_sync import SQLiteLease
from leasecron_sync.backends.base import BackendSettings
from leasecron_sync.model import RunKey, RunRecord, RunState

ROOT = Path(__file__).parents[2]
LONG = bool(os.environ.get("LEASECRON_SYNC_LONG"))
Line = Mapping[str, Any]


def boot_ms() -> int:
    """Return the clock of the logs, which all processes of a host share."""
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

    def lines(self, what: Optional[str] = None) -> list[Line]:
        """Return its log so far, or the lines of one kind."""
        if not self.log.exists():
            return []
        found = [json.loads(line) for line in self.log.read_text().splitlines()]
        return [line for line in found if what in (None, line["what"])]

    def inside(self) -> list[Line]:
        """Return the runs whose handlers are at work."""
        ended = {
            (x["job"], x["scheduled_ms"], x["attempt"]) for x in self.lines() if x["what"] in ENDS
        }
        return [
            x
            for x in self.lines("enter")
            if (x["job"], x["scheduled_ms"], x["attempt"]) not in ended
        ]

    def kill(self) -> None:
        """End it as a crash would."""
        self.disturbed.append(Disturbance(boot_ms()))
        self.process.kill()
        self.process.wait(10)

    def pause(self) -> None:
        """Have it stand still."""
        self.disturbed.append(Disturbance(boot_ms(), boot_ms()))
        self.process.send_signal(signal.SIGSTOP)

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


ENDS = ("leave", "interrupted", "raised")


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

    def lines(self, what: Optional[str] = None) -> list[Line]:
        """Return all logs, in the order of time."""
        found = [line for runner in self.runners for line in runner.lines(what)]
        return sorted(found, key=lambda line: line["at_ms"])

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


def key_of(line: Line) -> RunKey:
    """Return the run that a line is about."""
    return RunKey(line["job"], line["scheduled_ms"])


def judge(cluster: Cluster) -> list[str]:
    """Return what is wrong with the history of a cluster, whatever it was about."""
    enters = cluster.lines("enter")
    wrong = doubled_starts(enters)
    wrong += tokens(enters)
    wrong += early_successors(cluster, enters)
    wrong += starts_after_a_finish(cluster, enters)
    wrong += finished_without_a_start(cluster.records(), enters)
    return wrong


def doubled_starts(enters: Sequence[Line]) -> list[str]:
    """An attempt begins once, on one instance."""
    counts = Counter((key_of(line), line["attempt"]) for line in enters)
    return [f"started {n} times: {key} attempt {a}" for (key, a), n in counts.items() if n > 1]


def tokens(enters: Sequence[Line]) -> list[str]:
    """Tokens of a job are never given twice, and rise from attempt to attempt of a run."""
    wrong = []
    given = Counter((line["job"], line["token"]) for line in enters)
    wrong += [
        f"token {token} of {job} was given {n} times" for (job, token), n in given.items() if n > 1
    ]
    by_run: dict[RunKey, list[Line]] = defaultdict(list)
    for line in enters:
        by_run[key_of(line)].append(line)
    for key, lines in by_run.items():
        ordered = sorted(lines, key=lambda line: line["attempt"])
        rising = [line["token"] for line in ordered]
        if rising != sorted(set(rising)):
            wrong.append(f"tokens of {key} do not rise: {rising}")
    return wrong


def early_successors(cluster: Cluster, enters: Sequence[Line]) -> list[str]:
    """The next attempt begins after the last one has ended, or its process was disturbed."""
    ends = {
        (key_of(line), line["attempt"]): line["at_ms"]
        for line in cluster.lines()
        if line["what"] in ENDS
    }
    disturbed = {runner.pid: runner.disturbed for runner in cluster.runners}
    begins = {(key_of(line), line["attempt"]): line for line in enters}
    wrong = []
    for (key, attempt), line in begins.items():
        before = begins.get((key, attempt - 1))
        if before is None:
            continue
        ended_ms = ends.get((key, attempt - 1))
        if ended_ms is not None and ended_ms <= line["at_ms"]:
            continue
        reasons = [
            item
            for item in disturbed[before["pid"]]
            if item.from_ms <= line["at_ms"]
            and (item.to_ms is None or item.to_ms >= before["at_ms"])
        ]
        if not reasons:
            wrong.append(
                f"attempt {attempt} of {key} began while attempt {attempt - 1} was at work"
            )
    return wrong


def starts_after_a_finish(cluster: Cluster, enters: Sequence[Line]) -> list[str]:
    """Nothing begins after a finish was accepted."""
    finished: dict[RunKey, Line] = {}
    wrong = []
    for line in cluster.lines("run_finished"):
        if key_of(line) in finished:
            wrong.append(f"finished twice: {key_of(line)}")
        finished[key_of(line)] = line
    for line in enters:
        end = finished.get(key_of(line))
        if end is not None and line["attempt"] > end["attempt"]:
            wrong.append(f"attempt {line['attempt']} of {key_of(line)} began after its finish")
    return wrong


def finished_without_a_start(records: Iterable[RunRecord], enters: Sequence[Line]) -> list[str]:
    """What the store calls finished was executed."""
    began = {(key_of(line), line["attempt"]) for line in enters}
    return [
        f"finished, and never begun: {record.key} attempt {record.attempt}"
        for record in records
        if record.state is RunState.FINISHED and (record.key, record.attempt) not in began
    ]


def lost(
    records: Iterable[RunRecord], jobs: int, every_s: int, from_ms: int, to_ms: int
) -> list[str]:
    """Return the scheduled times of a span that have no settled record."""
    known = {record.key: record for record in records}
    step_ms = every_s * 1000
    first_ms = -(-from_ms // step_ms) * step_ms
    wrong = []
    for scheduled_ms in range(first_ms, to_ms + 1, step_ms):
        for number in range(jobs):
            record = known.get(RunKey(f"job-{number}", scheduled_ms))
            if record is None:
                wrong.append(f"no record: job-{number} {scheduled_ms}")
            elif not record.state.settled:
                wrong.append(f"not settled: {record}")
    return wrong


def baseless_skips(cluster: Cluster) -> list[str]:
    """A run is skipped only while another run of its job is in progress, by the store's clock."""
    first_enter: dict[RunKey, int] = {}
    for line in cluster.lines("enter"):
        # Where the first attempt never began, its runner was disturbed right after the grant.
        wall_ms = line["wall_ms"] if line["attempt"] == 1 else 0
        first_enter.setdefault(key_of(line), wall_ms)
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
