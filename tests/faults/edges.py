"""What the tests of SQLite's edges share: a file, scripts as processes, an audit of leases."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
import textwrap
from contextlib import closing
from pathlib import Path
from typing import Any, Optional, Union

from leasecron_sync.backends.base import BackendSettings
from leasecron_sync.backends.sqlite import SQLiteLease
from leasecron_sync.clock import SystemClock
from leasecron_sync.model import LeaseClaim, LeaseReply, OnOverlap, RunKey

ROOT = Path(__file__).parents[2]
LIMIT_S = 100.0
NOBODY = 65534

# -- scripts in processes of their own -------------------------------------------------------------

PRELUDE = """
import ctypes, json, logging, os, signal, sqlite3, sys, time
from leasecron_sync.backends.base import BackendSettings
from leasecron_sync.backends.sqlite import SQLiteLease
from leasecron_sync.clock import SystemClock
from leasecron_sync.errors import *
from leasecron_sync.model import *

path, me, BASE_MS = sys.argv[1], sys.argv[2], int(sys.argv[3])
FINISHED = Settlement(Outcome.FINISHED)
logged = []

class Keep(logging.Handler):
    def emit(self, record):
        if record.levelno >= logging.WARNING:
            logged.append(record.getMessage())

logging.getLogger("leasecron_sync").addHandler(Keep())

def say(**what):
    os.write(1, (json.dumps(what) + "\\n").encode())

def hear():
    return sys.stdin.readline().strip()

def connect(where=None, timeout_ms=10_000):
    backend = SQLiteLease(path if where is None else where)
    backend.open(BackendSettings("space", me, timeout_ms))
    return backend

def claim_of(job, number=0, decision=None):
    key = RunKey(job, BASE_MS + number)
    return LeaseClaim(key, key.scheduled_ms, me, decision or os.urandom(8).hex(), 60_000, 3,
                      OnOverlap.ALLOW, 3_600_000, 600_000)

def tried(call, *arguments):
    # What a call brought: its result, or the kind and the text of its error.
    try:
        return call(*arguments)
    except StoreError as error:
        return [type(error).__name__, str(error)]

def claim(backend, job, number=0, decision=None):
    found = tried(backend.claim, [claim_of(job, number, decision)])
    return found if isinstance(found[0], str) else found[0].verdict.value

def answered(call, *arguments):
    # Other processes may keep one from its turn for a whole time-out, or change the file.
    while True:
        try:
            return call(*arguments)
        except StoreUnavailable:
            time.sleep(0.01)

def call(name, *arguments):
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")

def private_mounts():
    # What is mounted from here on is seen by nobody else, and gone with this process.
    call("unshare", 0x20000)
    call("mount", b"none", b"/", None, 0x40000 | 0x4000, None)

def tried_to(function):
    try:
        function()
    except OSError as error:
        return str(error)
    return ""

def mount(source, where, kind, flags=0, data=""):
    call("mount", source.encode(), os.fsencode(where), kind.encode(), flags, data.encode())
"""


class Script:
    """A script in a process of its own; what it says is one JSON object a line."""

    def __init__(self, script: str, path: Path, name: str, base_ms: int) -> None:
        program = PRELUDE + textwrap.dedent(script)
        self.process = subprocess.Popen(
            [sys.executable, "-c", program, str(path), name, str(base_ms)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,  # what one way of reading takes too much of, another would miss
            env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"},
        )

    def listen(self) -> Any:  # noqa: ANN401 - whatever the script says
        """Wait for what it says next."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            self.result()
        return json.loads(line)

    def tell(self, text: str = "") -> None:
        """Let it go on that listens."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{text}\n".encode())
        self.process.stdin.flush()

    def ask(self, text: str = "") -> Any:  # noqa: ANN401 - whatever the script says
        """Let it go on and wait for what it says."""
        self.tell(text)
        return self.listen()

    def result(self, status: int = 0) -> list[Any]:
        """Wait for its end; return what else it said."""
        out, err = self.process.communicate(timeout=LIMIT_S)
        assert (err.decode(), self.process.returncode) == ("", status)
        return [json.loads(line) for line in out.splitlines()]

    def kill(self) -> list[Any]:
        """End it as a crash would; return what else it said, in whole lines."""
        self.process.send_signal(signal.SIGKILL)
        out, _err = self.process.communicate(timeout=LIMIT_S)
        return [json.loads(line) for line in out.splitlines(keepends=True) if line.endswith(b"\n")]

    def end(self) -> None:
        """Make sure that nothing of it is left."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()


class Bench:
    """One file in a folder of its own, with the processes and backends on it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = folder / "store.db"
        self.base_ms = SystemClock().now_ms() - 60_000
        self._scripts: list[Script] = []
        self._backends: list[SQLiteLease] = []

    def start(self, script: str) -> Script:
        """Start a script."""
        started = Script(script, self.path, f"process {len(self._scripts)}", self.base_ms)
        self._scripts.append(started)
        return started

    def connect(
        self, path: Union[str, bytes, Path, None] = None, call_timeout_ms: int = 5_000
    ) -> SQLiteLease:
        """Return a backend of this process."""
        backend = SQLiteLease(self.path if path is None else path)
        backend.open(BackendSettings("space", "test", call_timeout_ms))
        self._backends.append(backend)
        return backend

    def end(self) -> None:
        """Give everything up."""
        for script in self._scripts:
            script.end()
        for backend in self._backends:
            backend.close()

    def claim(
        self, backend: SQLiteLease, job: str, number: int = 0, decision: Optional[str] = None
    ) -> LeaseReply:
        """Claim one run."""
        key = RunKey(job, self.base_ms + number)
        name = decision or os.urandom(8).hex()
        wish = OnOverlap.ALLOW
        [reply] = backend.claim(
            [LeaseClaim(key, key.scheduled_ms, "t", name, 60_000, 3, wish, 3_600_000, 600_000)]
        )
        return reply

    def beside(self, suffix: str) -> Path:
        """Return the path of a file beside the database."""
        return self.path.with_name(self.path.name + suffix)

    def backup(self) -> Path:
        """Copy the store as it is now, by SQLite."""
        copy = self.beside(".backup")
        with closing(sqlite3.connect(self.path)) as old, closing(sqlite3.connect(copy)) as new:
            old.backup(new)
        return copy

    def sql(self, statement: str, *values: object) -> list[tuple[Any, ...]]:
        """Execute one statement past the library."""
        with closing(sqlite3.connect(self.path)) as connection, connection:
            return connection.execute(statement, values).fetchall()

    def check(self) -> None:
        """Check that the file is sound."""
        assert self.sql("PRAGMA integrity_check") == [("ok",)]


# -- every lease that was ever granted -------------------------------------------------------------

_AUDIT = """
CREATE TABLE audit (
  number INTEGER PRIMARY KEY, job_id, scheduled_ms, state, token, attempt, until_ms, overlap, at_ms
);
CREATE TRIGGER audit_insert AFTER INSERT ON leasecron_run BEGIN {insert} END;
CREATE TRIGGER audit_update AFTER UPDATE ON leasecron_run BEGIN {insert} END;
"""
_INSERT = """
INSERT INTO audit SELECT NULL, NEW.job_id, NEW.scheduled_ms, NEW.state, NEW.token, NEW.attempt,
  NEW.until_ms, NEW.overlap, CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER);
"""


def begin_audit(path: Path) -> None:
    """Have the file itself write down each change of a run, in the transaction that makes it."""
    backend = SQLiteLease(path)
    backend.open(BackendSettings("audit", "audit", 5_000))
    backend.probe()
    backend.close()
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript(_AUDIT.format(insert=_INSERT))


def double_leases(path: Path) -> list[str]:
    """Return the grants that were made beside a live lease of the run, or of its no-overlap job.

    The time in the audit is read after the store's clock was, so it is never too early.
    """
    with closing(sqlite3.connect(path)) as connection:
        rows = connection.execute(
            "SELECT job_id, scheduled_ms, state, token, until_ms, overlap, at_ms FROM audit "
            "ORDER BY number"
        ).fetchall()
    assert rows, "nothing was audited"
    live: dict[int, dict[int, tuple[int, int]]] = {}
    wrong = []
    for job_id, scheduled_ms, state, token, until_ms, overlap, at_ms in rows:
        runs = live.setdefault(job_id, {})
        before = runs.get(scheduled_ms)
        if state != "running":
            runs.pop(scheduled_ms, None)
            continue
        if before is None or before[0] != token:  # a grant, no renewal
            others = runs if not overlap else {scheduled_ms: before} if before else {}
            wrong += [
                f"run {scheduled_ms} of job {job_id} was granted at {at_ms}, run {other} had a "
                f"lease until {lease[1]}"
                for other, lease in others.items()
                if lease[1] > at_ms
            ]
        runs[scheduled_ms] = token, until_ms
    return wrong


def grants(path: Path) -> int:
    """Return how many leases were granted."""
    with closing(sqlite3.connect(path)) as connection:
        [(count,)] = connection.execute(
            "SELECT count(DISTINCT job_id || ' ' || token) FROM audit WHERE state = 'running'"
        ).fetchall()
    return int(count)
