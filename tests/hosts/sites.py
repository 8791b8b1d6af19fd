"""A web application with a scheduler in each of its processes: start it, disturb it, judge it."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Optional

from leasecron_sync import connect_lease
from leasecron_sync.backends.base import BackendSettings
from leasecron_sync.model import RunKey, RunRecord, RunState
from leasecron_sync.testing import Entry, HistoryLog, Report, Terms, check, read_history
from tests.services.process import eventually

ROOT = Path(__file__).parents[2]
LONG = bool(os.environ.get("LEASECRON_SYNC_LONG"))
LIMIT_S = 60.0
"""How long to wait for anything; the machine may be busy."""
PAUSE_S = 0.1

APPLICATION = "tests.hosts.site_app:application"


class Site:
    """An application under a server of its own.

    Args:
        store: URL of the store; an SQLite file in the site's folder when left out.
        namespace: Keeps sites on one store apart.
        every_s: How often the job is due.
        lease_ms: Length of a lease.
        start: ``import``, or ``hook`` where something else starts the scheduler.
    """

    def __init__(
        self,
        store: str = "",
        namespace: str = "default",
        *,
        every_s: int = 1,
        lease_ms: int = 3_000,
        start: str = "import",
    ) -> None:
        # Short, since sockets live in it.
        self.folder = Path(tempfile.mkdtemp(prefix="site-"))
        self.store = store or f"sqlite:///{self.folder}/store.db"
        self.lease_ms = lease_ms
        self._namespace = namespace
        self._every_s = every_s
        self._from_ms = 0
        self._owed: list[RunKey] = []
        self._read: list[Entry] = []
        self._place = 0
        self._gaps: dict[str, list[int]] = {}
        self._process: Optional[subprocess.Popen[bytes]] = None
        self.environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "HOME": str(self.folder),  # where gunicorn puts its control socket
            "SITE_FOLDER": str(self.folder),
            "SITE_STORE": self.store,
            "SITE_NAMESPACE": namespace,
            "SITE_EVERY_S": str(every_s),
            "SITE_LONG_RUN_S": "6",
            "SITE_LEASE_MS": str(lease_ms),
            "SITE_START": start,
        }
        self.environment.pop("PYTHONWARNINGS", None)

    def __enter__(self) -> Site:
        return self

    def __exit__(
        self,
        kind: Optional[type[BaseException]],
        error: Optional[BaseException],
        trace: Optional[TracebackType],
    ) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(10)
        shutil.rmtree(self.folder, ignore_errors=True)

    # -- the server ----------------------------------------------------------------------------

    @property
    def socket(self) -> Path:
        """Where it answers requests."""
        return self.folder / "web.sock"

    def start(self, command: Sequence[str], instances: int) -> None:
        """Start the server, and wait for so many instances and a run."""
        self.launch(command, instances)
        self.wait_finished()

    def launch(self, command: Sequence[str], instances: int) -> None:
        """Start the server, and wait for so many instances."""
        before = len(self.instances())
        with (self.folder / "output").open("ab") as output:
            self._process = subprocess.Popen(
                command,
                cwd=self.folder,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        self.wait_instances(before + instances)
        self._from_ms = self._from_ms or time.time_ns() // 1_000_000

    @property
    def pid(self) -> int:
        """The server's first process."""
        assert self._process is not None
        return self._process.pid

    def send(self, number: signal.Signals) -> None:
        """Send the server a signal, to its first process alone."""
        assert self._process is not None
        self._process.send_signal(number)

    def end(self, number: signal.Signals) -> int:
        """Have the server end, and return its status."""
        assert self._process is not None
        self._process.send_signal(number)
        return self._process.wait(LIMIT_S)

    def end_all(self, number: signal.Signals) -> None:
        """Send every process of the server a signal, and wait for the end of the first."""
        assert self._process is not None
        os.killpg(self._process.pid, number)
        self._process.wait(LIMIT_S)

    def output(self) -> str:
        """Return what its processes wrote."""
        return (self.folder / "output").read_text(errors="replace")

    def ask(self) -> dict[str, Any]:
        """Ask the application for its status, which any of its processes may answer."""
        connection = http.client.HTTPConnection("localhost", timeout=10)
        connection.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.sock.settimeout(10)
        try:
            connection.sock.connect(str(self.socket))
            connection.request("GET", "/", headers={"Connection": "close"})
            found: dict[str, Any] = json.loads(connection.getresponse().read())
            return found
        finally:
            connection.close()

    def recycle(self, pid: int) -> None:
        """Send requests until the server has replaced one of its processes."""

        def gone() -> bool:
            with contextlib.suppress(OSError, http.client.HTTPException):
                self.ask()
            return not is_alive(pid)

        assert eventually(gone, LIMIT_S, PAUSE_S), self.output()

    def touch(self, *files: Path) -> None:
        """Have a reloader notice a change; what was touched before its first look is none."""
        before, next_s = len(self.instances()), 0.0

        def noticed() -> bool:
            nonlocal next_s
            if time.monotonic() >= next_s:
                for file in files:
                    os.utime(file)
                next_s = time.monotonic() + 5
            return len(self.instances()) > before

        assert eventually(noticed, LIMIT_S, PAUSE_S), self.output()

    # -- what its instances did ----------------------------------------------------------------

    def entries(self, what: str) -> list[Entry]:
        """Return the entries of one kind in the history so far."""
        path = self.folder / "history.jsonl"
        if path.exists():
            with path.open("rb") as file:
                file.seek(self._place)
                whole, end, _rest = file.read().rpartition(b"\n")
            self._place += len(whole + end)
            self._read += [Entry.from_line(line) for line in whole.decode().split("\n") if line]
        return [entry for entry in self._read if entry.what == what]

    def told(self, event: str) -> list[Entry]:
        """Return the events of one name so far."""
        return [entry for entry in self.entries("told") if entry.event == event]

    def instances(self) -> set[str]:
        """Return the instances that ever registered their jobs."""
        return {entry.instance for entry in self.entries("registered")}

    def wait_instances(self, count: int) -> None:
        """Wait until so many instances have registered, since the beginning."""
        assert eventually(lambda: len(self.instances()) >= count, LIMIT_S, PAUSE_S), self.output()

    def wait_finished(self, count: int = 1) -> None:
        """Wait until so many runs more have finished."""
        before = len(self.told("run_finished"))

        def done() -> bool:
            return len(self.told("run_finished")) >= before + count

        assert eventually(done, LIMIT_S, PAUSE_S), self.output()

    def holder(self, *, of_a_child: bool = False) -> tuple[int, Entry]:
        """Wait for a run that has just begun and takes long; return who executes it.

        Args:
            of_a_child: True where it must not be the server's first process.
        """
        found: list[tuple[int, Entry]] = []

        def look() -> bool:
            ended = {entry.token for entry in self.entries("ended")}
            pids = self._pids()
            now_ms = time.time_ns() // 1_000_000
            found[:] = [
                (pids[entry.token], entry)
                for entry in self.entries("started")
                if entry.token not in ended
                and 1_000 < now_ms - entry.at_ms < 3_000
                and not (of_a_child and pids[entry.token] == self.pid)
                and is_alive(pids[entry.token])
            ]
            return bool(found)

        assert eventually(look, LIMIT_S, PAUSE_S), self.output()
        return found[-1]

    def _pids(self) -> dict[int, int]:
        lines = (self.folder / "workers.log").read_text().splitlines()
        return {line["token"]: line["pid"] for line in map(json.loads, lines)}

    def again(self, cut: Entry) -> Entry:
        """Wait for the next start of a run that was cut, by another process; return it.

        It need not be the next attempt: that may have been granted to one who was just stopping.
        """
        found: list[Entry] = []

        def look() -> bool:
            found[:] = [
                entry
                for entry in self.entries("started")
                if entry.key == cut.key and (entry.attempt or 0) > (cut.attempt or 0)
            ]
            return bool(found)

        assert eventually(look, LIMIT_S, PAUSE_S), self.output()
        pids = self._pids()
        assert pids[found[0].token] != pids[cut.token]
        return found[0]

    def is_taken_over(self, started: Entry) -> bool:
        """Tell whether a lease had lapsed; else its holder had handed the run over."""
        return any(
            entry.takeover
            for entry in self.entries("claimed")
            if entry.key == started.key and entry.token == started.token
        )

    def handed_over(self, cut: Entry) -> None:
        """Wait for the next attempt of a run that was cut, which must not wait for its lease."""
        again = self.again(cut)
        assert not self.is_taken_over(again), self.output()
        ended = [entry for entry in self.entries("ended") if entry.token == cut.token]
        assert [entry.reason for entry in ended] == ["RunStopping"]
        self.note_gap("hand-over", again.at_ms - ended[0].at_ms)

    def note_gap(self, kind: str, gap_ms: int) -> None:
        """Note how long a run that was cut stood still."""
        self._gaps.setdefault(kind, []).append(gap_ms)

    def gaps(self) -> str:
        """Return how long runs that were cut stood still, for people."""
        return ", ".join(f"{kind} {max(gaps)} ms at most" for kind, gaps in self._gaps.items())

    # -- the verdict ---------------------------------------------------------------------------

    def records(self) -> list[RunRecord]:
        """Return the store's records."""
        backend = connect_lease(self.store)
        backend.open(BackendSettings(self._namespace, "reader", 5_000))
        try:
            return list(backend.history(None, 10_000))
        finally:
            backend.close()

    def wait_settled(self) -> None:
        """Wait until everything that has been due so far is settled."""
        owed = self.owed(time.time_ns() // 1_000_000)

        def missing() -> list[RunKey]:
            settled = {record.key for record in self.records() if record.state.settled}
            return [key for key in owed if key not in settled]

        assert eventually(lambda: not missing(), LIMIT_S, 0.5), (missing(), self.output())
        self._owed = owed

    def owed(self, until_ms: int) -> list[RunKey]:
        """Return the runs due from the start on until an instant."""
        step_ms = self._every_s * 1_000
        first_ms = -(-self._from_ms // step_ms) * step_ms
        return [RunKey("job", at_ms) for at_ms in range(first_ms, until_ms + 1, step_ms)]

    def judged(self) -> Report:
        """Judge what its instances did until ``wait_settled``; call it when they have ended."""
        log = HistoryLog(self.folder / "history.jsonl")
        log.records(self.records())
        log.close()
        entries = read_history(self.folder / "history.jsonl").entries
        report = check(entries, terms=Terms(owed=tuple(self._owed)))
        assert [fault.message for fault in report.faults] == []
        assert report.totals.executions > 0
        assert len(self._owed) > 0
        failed = [record for record in self.records() if record.state is RunState.FAILED]
        assert failed == []
        assert "Traceback" not in self.output(), self.output()
        return report


def recycled(site: Site) -> None:
    """Have a worker recycled in the middle of a run, which it has to hand over."""
    before = len(site.instances())
    pid, cut = site.holder()
    site.recycle(pid)
    site.handed_over(cut)
    site.wait_instances(before + 1)


def killed(site: Site) -> None:
    """Kill a worker in the middle of a run, which is taken over when its lease has lapsed."""
    before = len(site.instances())
    pid, cut = site.holder()
    at_ms = time.time_ns() // 1_000_000
    os.kill(pid, signal.SIGKILL)
    again = site.again(cut)
    assert site.is_taken_over(again), site.output()
    site.note_gap("takeover", again.at_ms - at_ms)
    # uWSGI forgets to end a worker that is told to while it loads the application.
    site.wait_instances(before + 1)


def reloaded(site: Site, workers: int) -> None:
    """Have a server replace all its workers, whose runs are handed over."""
    before = len(site.instances())
    _pid, cut = site.holder()
    site.send(signal.SIGHUP)
    site.wait_instances(before + workers)
    site.handed_over(cut)


def is_alive(pid: int) -> bool:
    """Tell whether a process is there, and more than a status to be fetched."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


def python(*arguments: str) -> list[str]:
    """Return a command of this interpreter."""
    return [sys.executable, *arguments]
