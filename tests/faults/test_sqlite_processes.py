"""The SQLite backend by itself, in real processes: races, kills, stops and forks."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
import textwrap
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, Optional

import pytest

from leasecron_sync.backends.base import BackendSettings
from leasecron_sync.backends.sqlite import SQLiteLease
from leasecron_sync.clock import SystemClock
from leasecron_sync.errors import StoreUnavailable
from leasecron_sync.model import LeaseClaim, OnOverlap, RunKey, RunState, Verdict
from leasecron_sync.testing import HistoryLog, RecordingLease, Report, check, read_history

ROOT = Path(__file__).parents[2]
LIMIT_S = 100.0

pytestmark = pytest.mark.timeout(120)  # on a busy machine; a few seconds each otherwise

PRELUDE = """
import json, os, signal, sys, time
from leasecron_sync.backends.base import BackendSettings
from leasecron_sync.backends.sqlite import SQLiteLease
from leasecron_sync.clock import SystemClock
from leasecron_sync.errors import *
from leasecron_sync.model import *
from leasecron_sync.testing import HistoryLog, RecordingLease

path, me = sys.argv[1], sys.argv[2]
BASE_MS = int(sys.argv[3])
FINISHED = Settlement(Outcome.FINISHED)
clock = SystemClock()
log = HistoryLog(path + ".history")  # one file for all processes

def say(**what):
    os.write(1, (json.dumps(what) + "\\n").encode())

def connect(name=me, timeout_ms=10_000):
    backend = RecordingLease(SQLiteLease(path), log)
    backend.open(BackendSettings("space", name, timeout_ms))
    return backend

def claim_of(job, number=0, wish="allow", name=me):
    key = RunKey(job, BASE_MS + number)
    return LeaseClaim(key, key.scheduled_ms, name, os.urandom(8).hex(), 60_000, 3,
                      OnOverlap(wish), 3_600_000, 600_000)

def answered(call, *arguments):
    # On a busy machine eight processes may keep one of them from its turn for a whole time-out.
    while True:
        try:
            return call(*arguments)
        except StoreUnavailable:
            time.sleep(0.01)

def claim(backend, *what, **options):
    [reply] = answered(backend.claim, [claim_of(*what, **options)])
    return reply
"""


class Process:
    """A script in a process of its own; what it says is one JSON object a line."""

    def __init__(self, script: str, path: Path, name: str, base_ms: int) -> None:
        program = PRELUDE + textwrap.dedent(script)
        self._process = subprocess.Popen(
            [sys.executable, "-c", program, str(path), name, str(base_ms)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        self.pid = self._process.pid

    def listen(self) -> Any:  # noqa: ANN401 - whatever the script says
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self.result()
        return json.loads(line)

    def tell(self) -> None:
        """Let a script go on that reads a line."""
        assert self._process.stdin is not None
        self._process.stdin.write(b"\n")
        self._process.stdin.flush()

    def result(self, status: int = 0) -> list[Any]:
        """Wait for the end of the script; return what it said, by default after a good end."""
        out, err = self._process.communicate(timeout=LIMIT_S)
        assert (err.decode(), self._process.returncode) == ("", status)
        return [json.loads(line) for line in out.splitlines()]

    def gone(self) -> None:
        """Wait until the process is gone; its children may live on and go on talking."""
        self._process.wait(LIMIT_S)

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def end(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.communicate()


class Bench:
    """One file, and the processes on it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.base_ms = SystemClock().now_ms() - 60_000
        self.log = HistoryLog(self._history)
        self.processes: list[Process] = []
        self.backends: list[RecordingLease] = []

    @property
    def _history(self) -> Path:
        return self.path.with_name(f"{self.path.name}.history")

    def start(self, script: str) -> Process:
        process = Process(script, self.path, f"process {len(self.processes)}", self.base_ms)
        self.processes.append(process)
        return process

    def connect(self, call_timeout_ms: int = 5_000) -> RecordingLease:
        backend = RecordingLease(SQLiteLease(self.path), self.log)
        backend.open(BackendSettings("space", "test", call_timeout_ms))
        self.backends.append(backend)
        return backend

    def verdict(self, backend: RecordingLease, job: str, decision: Optional[str] = None) -> Verdict:
        key = RunKey(job, self.base_ms)
        name = decision or os.urandom(8).hex()
        claim = LeaseClaim(
            key,
            key.scheduled_ms,
            "test",
            name,
            60_000,
            3,
            OnOverlap.ALLOW,
            3_600_000,
            600_000,
        )
        [reply] = backend.claim([claim])
        return reply.verdict

    def judge(self) -> Report:
        """Judge what all processes were answered."""
        return check(read_history(self._history).entries)

    def check(self) -> None:
        with closing(sqlite3.connect(self.path)) as connection:
            assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path / "store.db")
    yield bench
    for process in bench.processes:
        process.end()
    for backend in bench.backends:
        backend.close()
    bench.log.close()
    assert bench.judge().faults == ()


# -- races ----------------------------------------------------------------------------------------


def test_eight_processes_race_for_two_hundred_runs_and_each_has_one_winner(bench: Bench) -> None:
    bench.connect().probe()
    racers = [
        bench.start(
            """
            backend = connect()
            backend.probe()
            say(ready=True)
            sys.stdin.readline()
            claims = [claim_of("job", n) for n in range(200)]
            replies = []
            for first in range(0, 200, 4):
                replies += answered(backend.claim, claims[first:first + 4])
            backend.close()
            won = [reply.lease.ref.key.scheduled_ms - BASE_MS for reply in replies if reply.lease]
            say(won=won)
            """
        )
        for _ in range(8)
    ]
    for racer in racers:
        racer.listen()
    for racer in racers:
        racer.tell()
    won = [number for racer in racers for number in racer.result()[-1]["won"]]
    assert sorted(won) == list(range(200))
    backend = bench.connect()
    records = backend.history("job", 1_000)
    tokens = [record.token for record in records]
    assert len(set(tokens)) == len(records) == 200
    assert {(record.state, record.attempt) for record in records} == {(RunState.RUNNING, 1)}
    backend.close()
    bench.check()


def test_eight_processes_never_have_two_runs_of_a_no_overlap_job_at_a_time(bench: Bench) -> None:
    bench.connect().probe()
    racers = [
        bench.start(
            """
            backend = connect()
            backend.probe()
            say(ready=True)
            sys.stdin.readline()
            left, spans = set(range(30)), []
            while left:
                for number in sorted(left):
                    reply = claim(backend, "job", number, wish="defer")
                    if reply.lease is not None:
                        from_ns = time.monotonic_ns()
                        backend.pending(["job"], 10)
                        spans.append((from_ns, time.monotonic_ns(), number))
                        assert answered(backend.settle, reply.lease.ref, FINISHED).accepted
                    if reply.lease is not None or reply.verdict is Verdict.SETTLED:
                        left.discard(number)
            backend.close()
            say(spans=spans)
            """
        )
        for _ in range(8)
    ]
    for racer in racers:
        racer.listen()
    for racer in racers:
        racer.tell()
    spans = sorted(span for racer in racers for span in racer.result()[-1]["spans"])
    assert sorted(number for _, _, number in spans) == list(range(30))
    for (_, to_ns, _), (from_ns, _, _) in zip(spans, spans[1:]):
        assert to_ns < from_ns
    bench.check()


def test_eight_processes_make_a_new_file_together(bench: Bench) -> None:
    """One of them may find the file locked for a moment, as at any other time."""
    racers = [
        bench.start(
            """
            say(ready=True)
            sys.stdin.readline()
            backend = connect()
            store_id = answered(backend.probe).store_id
            reply = claim(backend, "job")
            backend.close()
            say(store_id=store_id, won=reply.lease is not None)
            """
        )
        for _ in range(8)
    ]
    for racer in racers:
        racer.listen()
    for racer in racers:
        racer.tell()
    said = [racer.result()[-1] for racer in racers]
    assert len({item["store_id"] for item in said}) == 1
    assert Counter(item["won"] for item in said) == {True: 1, False: 7}
    bench.check()


# -- killed and stopped ---------------------------------------------------------------------------

INSIDE_ITS_WRITE = """
from leasecron_sync.backends._sqlite_tables import SQLiteTables
backend = connect()
backend.probe()
write = SQLiteTables.write

def write_and_then(tables):
    has_run = bool(tables._added)
    write(tables)
    if has_run:
        say(inside=True)
        os.kill(os.getpid(), signal.{signal})

SQLiteTables.write = write_and_then
reply = claim(backend, "job")
say(verdict=reply.verdict.value)
backend.close()
"""


def test_a_process_that_is_killed_inside_its_write_leaves_nothing(bench: Bench) -> None:
    process = bench.start(INSIDE_ITS_WRITE.format(signal="SIGKILL"))
    assert process.listen() == {"inside": True}
    process.result(status=-signal.SIGKILL)
    backend = bench.connect()
    assert backend.history(None, 10) == []
    assert bench.verdict(backend, "job") is Verdict.GRANTED
    backend.close()
    bench.check()


def test_while_a_process_is_stopped_inside_its_write_the_store_is_down(bench: Bench) -> None:
    process = bench.start(INSIDE_ITS_WRITE.format(signal="SIGSTOP"))
    assert process.listen() == {"inside": True}
    backend = bench.connect(call_timeout_ms=100)
    for _ in range(2):
        with pytest.raises(StoreUnavailable):
            bench.verdict(backend, "job")
    process.signal(signal.SIGCONT)
    assert process.result() == [{"verdict": "granted"}]
    assert bench.verdict(backend, "job") is Verdict.HELD
    backend.close()
    bench.check()


def test_a_stopped_process_that_is_killed_lets_the_others_on(bench: Bench) -> None:
    process = bench.start(INSIDE_ITS_WRITE.format(signal="SIGSTOP"))
    assert process.listen() == {"inside": True}
    process.signal(signal.SIGKILL)
    process.result(status=-signal.SIGKILL)
    backend = bench.connect()
    assert bench.verdict(backend, "job") is Verdict.GRANTED
    backend.close()


def test_closing_does_not_wait_for_ever_for_a_call_that_is_stuck(bench: Bench) -> None:
    backend = bench.connect()
    assert bench.verdict(backend, "job") is Verdict.GRANTED
    inner = backend.inner
    assert isinstance(inner, SQLiteLease)
    lane, done = inner._timer_lane, threading.Event()

    def close() -> None:
        backend.close()
        done.set()

    with lane.lock:
        threading.Thread(target=close, daemon=True).start()
        assert done.wait(LIMIT_S)
    lane.drop()


# -- forks ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("end", ["os._exit(0)", "sys.exit(0)", "pass"])
def test_a_child_that_ends_does_no_harm_to_its_parent(bench: Bench, end: str) -> None:
    process = bench.start(
        f"""
        backend = connect()
        lease = claim(backend, "held").lease
        backend.renew([lease.ref], 60_000)
        pid = os.fork()
        if pid == 0:
            backend.discard()
            try:
                backend.claim([claim_of("child")])
            except StoreUnavailable:
                say(child="closed")
            {end}
        else:
            assert os.waitpid(pid, 0)[1] == 0
            say(renewed=backend.renew([lease.ref], 60_000)[0].value)
            say(won=claim(backend, "parent").verdict.value)
            sys.stdin.readline()
            say(settled=backend.settle(lease.ref, FINISHED).accepted)
            backend.close()
        """
    )
    assert process.listen() == {"child": "closed"}
    assert process.listen() == {"renewed": "renewed"}
    assert process.listen() == {"won": "granted"}
    backend = bench.connect()
    assert [bench.verdict(backend, job) for job in ("held", "parent", "child")] == [
        Verdict.HELD,
        Verdict.HELD,
        Verdict.GRANTED,
    ]
    process.tell()
    assert process.result() == [{"settled": True}]
    assert bench.verdict(backend, "held") is Verdict.SETTLED
    backend.close()
    bench.check()


def test_a_child_with_connections_of_its_own_competes_with_its_parent(bench: Bench) -> None:
    process = bench.start(
        """
        backend = connect()
        backend.probe()
        pid = os.fork()
        if pid == 0:
            backend.discard()
            backend = connect("child")
        won = [n for n in range(50) if claim(backend, "job", n).lease is not None]
        backend.close()
        say(child=pid == 0, won=won)
        if pid == 0:
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
        """
    )
    said = process.result()
    assert [item["child"] for item in said].count(True) == 1
    assert sorted(number for item in said for number in item["won"]) == list(range(50))
    bench.check()


@pytest.mark.parametrize(
    "end", ["backend.close(); os._exit(0)", "os.kill(os.getpid(), signal.SIGKILL)"]
)
def test_a_child_goes_on_safely_when_its_parent_is_gone(bench: Bench, end: str) -> None:
    """Others come and leave, before and after it claims; each run still has one winner."""
    process = bench.start(
        f"""
        backend = connect()
        backend.probe()
        ready, tell = os.pipe()
        pid = os.fork()
        if pid == 0:
            backend.discard()
            backend.open(BackendSettings("space", "child", 10_000))
            claim(backend, "first")
            os.write(tell, b"x")
            sys.stdin.readline()
            won = [n for n in range(20) if claim(backend, "job", n).lease is not None]
            say(won=won)
            sys.stdin.readline()
            os._exit(0)
        os.read(ready, 1)
        {end}
        """
    )
    process.gone()
    assert _visitor(bench, 10) == list(range(10))
    process.tell()
    assert process.listen() == {"won": list(range(10, 20))}
    assert _visitor(bench, 30) == list(range(20, 30))
    process.tell()
    bench.check()


def _visitor(bench: Bench, runs: int) -> list[int]:
    """Let a process claim the first so many runs and leave; return those that it won."""
    visitor = bench.start(
        f"""
        backend = connect()
        won = [n for n in range({runs}) if claim(backend, "job", n).lease is not None]
        backend.close()
        say(won=won)
        """
    )
    [said] = visitor.result()
    won = said["won"]
    assert isinstance(won, list)
    return won
