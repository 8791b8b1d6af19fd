"""Schedulers in processes of their own on one file, for the tests of SQLite's edges."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Callable

from leasecron_sync import SQLiteLease
from leasecron_sync.backends.base import BackendSettings
from leasecron_sync.model import RunKey, RunRecord
from tests.faults.edges import ROOT, Bench


class Instance:
    """A scheduler in a process of its own."""

    def __init__(self, bench: Bench, number: int, *options: str) -> None:
        self._log = bench.folder / f"instance-{number}.log"
        self._errors = (bench.folder / f"instance-{number}.err").open("w+b")
        program = Path(__file__).with_name("edges_instance.py")
        self.process = subprocess.Popen(
            [sys.executable, program, "--path", bench.path, "--log", self._log, *options],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )

    def wait_ready(self) -> None:
        """Wait until it has started."""
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == b"ready\n", self.standard_error()

    def stop(self, timeout: float = 20.0) -> None:
        """Ask it to stop."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{timeout}\n".encode())
        self.process.stdin.flush()

    def wait_stopped(self) -> dict[str, Any]:
        """Wait until it has stopped; return what it says of that."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == b"stopped\n", self.standard_error()
        self.process.stdin.close()
        assert self.process.wait(60) == 0
        assert self.standard_error() == ""
        [line] = self.lines("stopped")
        assert {"leasecron-timer", "leasecron-heartbeat"} <= set(line["alive"]), "a thread has died"
        return line

    def standard_error(self) -> str:
        """Return what it wrote there."""
        self._errors.seek(0)
        return self._errors.read().decode()

    def lines(self, *kinds: str) -> list[dict[str, Any]]:
        """Return its log, or the lines of some kinds."""
        if not self._log.exists():
            return []
        found = [json.loads(line) for line in self._log.read_text().splitlines()]
        return [line for line in found if not kinds or line["what"] in kinds]

    def logged(self, sentence: str) -> int:
        """Return how often the library logged a sentence."""
        return sum(sentence in line["text"] for line in self.lines("logged"))

    def wait_for(self, kind: str, number: int = 1, after_ms: int = 0) -> dict[str, Any]:
        """Wait for so many lines of a kind; return the last one."""

        def found() -> list[dict[str, Any]]:
            return [line for line in self.lines(kind) if line["at_ms"] > after_ms]

        assert eventually(lambda: len(found()) >= number, 30), (kind, number, found())
        return found()[number - 1]

    def end(self) -> None:
        """Make sure that nothing of it is left."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait(10)
        for stream in (self.process.stdin, self.process.stdout, self._errors):
            if stream is not None:
                stream.close()


class Instances(list[Instance]):
    """Some of them on one file."""

    def __init__(self, bench: Bench) -> None:
        super().__init__()
        self.bench = bench

    def start(self, count: int, *options: str) -> None:
        """Start some more."""
        more = [Instance(self.bench, len(self) + number, *options) for number in range(count)]
        self.extend(more)
        for instance in more:
            instance.wait_ready()

    def lines(self, *kinds: str) -> list[dict[str, Any]]:
        """Return the lines of all logs."""
        return [line for instance in self for line in instance.lines(*kinds)]


def pause(seconds: float) -> None:
    """Let time pass: it is the subject here."""
    threading.Event().wait(seconds)


def eventually(condition: Callable[[], object], limit_s: float) -> bool:
    """Wait until a condition holds, within a limit."""
    end = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() >= end:
            return bool(condition())
        pause(0.1)
    return True


def stop_all(instances: Instances) -> None:
    """Stop all, and check that each of them was well until then."""
    for instance in instances:
        instance.stop()
    for instance in instances:
        instance.wait_stopped()


def now_ms() -> int:
    """Return the clock by which the instances work."""
    return time.time_ns() // 1_000_000


def records(bench: Bench) -> Sequence[RunRecord]:
    """Return the records of the instances."""
    backend = SQLiteLease(bench.path)
    backend.open(BackendSettings("default", "reader", 5_000))
    try:
        return backend.history(None, 100_000)
    finally:
        backend.close()


def unsettled(bench: Bench, jobs: int, from_ms: int, to_ms: int) -> list[str]:
    """Return the scheduled times of a span that have no settled record."""
    known = {record.key: record for record in records(bench)}
    wrong = []
    for scheduled_ms in range(-(-from_ms // 1000) * 1000, to_ms + 1, 1000):
        for number in range(jobs):
            record = known.get(RunKey(f"job-{number}", scheduled_ms))
            if record is None or not record.state.settled:
                wrong.append(f"job-{number} {scheduled_ms}: {record}")
    return wrong


def doubled_attempts(instances: Instances) -> list[RunKey]:
    """Return the runs of which an attempt began more than once."""
    counts = Counter(
        (line["job"], line["scheduled_ms"], line["attempt"]) for line in instances.lines("enter")
    )
    return [RunKey(job, at_ms) for (job, at_ms, _), count in counts.items() if count > 1]


def finished_twice(instances: Instances) -> list[str]:
    """Return the runs that two instances say they have finished."""
    counts = Counter(
        (line["job"], line["scheduled_ms"]) for line in instances.lines("run_finished")
    )
    return [f"{key} finished {count} times" for key, count in counts.items() if count > 1]
