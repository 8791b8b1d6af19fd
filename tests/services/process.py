"""Servers as processes: where they live, how they are told something, how they end."""

from __future__ import annotations

import contextlib
import json
import os
import pwd
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Optional, Protocol

START_S = 25.0
"""How long a server may take until it answers; below the limit of a test, whose error says less."""

STOP_S = 20.0
"""How long a server may take to end when it is asked to."""

KILL_S = 10.0
"""How long a process may take to end when it is killed, and a command at most otherwise."""


MEMORY = "/dev/shm"
"""A file system in memory, where it is."""

ROOM_BYTES = 2 * 1024**3
"""How much of it must be free: a PostgreSQL server takes about 60 MB, and containers have 64."""


class ServiceError(Exception):
    """A server did not do what it should; the text has the end of its log."""


class ServiceMissing(Exception):
    """A server cannot be had; the text says what to install."""


def eventually(condition: Callable[[], object], limit_s: float, pause_s: float = 0.01) -> bool:
    """Wait until a condition holds, within a limit."""
    end = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() >= end:
            return bool(condition())
        time.sleep(pause_s)
    return True


def stop_outside_writes(
    send: Callable[[signal.Signals], object], database: Path, limit_s: float = 10
) -> None:
    """Have a process stand still, but not in the middle of a write to an SQLite file.

    There it would keep the file locked until it goes on, and nobody else could do anything.

    Args:
        send: Sends it a signal.
        database: The file; there is nothing to look at where it is missing.
        limit_s: How long to try.
    """

    def stopped() -> bool:
        send(signal.SIGSTOP)
        if not database.exists():
            return True
        try:
            with contextlib.closing(sqlite3.connect(database, timeout=0.5)) as connection:
                connection.execute("BEGIN IMMEDIATE")
                connection.execute("ROLLBACK")
        except sqlite3.OperationalError:
            send(signal.SIGCONT)
            return False
        return True

    assert eventually(stopped, limit_s), f"{database} is locked all the time"


class KeeperClient:
    """Has the keeper start servers, and knows its language.

    The keeper is a process of its own and the parent of all servers (see ``keeper.py``). It is
    started with the first request, or ``open()``. Requests may come from any thread.
    """

    def __init__(self) -> None:
        self._keeper: Optional[subprocess.Popen[bytes]] = None
        self._owner = os.getpid()
        self._lock = threading.Lock()

    def open(self) -> None:
        """Start the keeper now."""
        self._running()

    def ask(self, do: str, **arguments: object) -> dict[str, Any]:
        """Have something done and return the answer.

        Raises:
            ServiceError: It could not be done.
        """
        if os.getpid() != self._owner:
            message = "a forked process has no servers: they belong to the process that started it"
            raise ServiceError(message)
        with self._lock:
            keeper = self._running()
            assert keeper.stdin is not None
            assert keeper.stdout is not None
            try:
                keeper.stdin.write(json.dumps({"do": do, **arguments}).encode() + b"\n")
                keeper.stdin.flush()
                line = keeper.stdout.readline()
            except BrokenPipeError:
                line = b""
        if not line:
            message = f"the keeper of the servers has ended, and they with it: {keeper.poll()}"
            raise ServiceError(message)
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise ServiceError(answer["error"])
        return answer

    def _running(self) -> subprocess.Popen[bytes]:
        if self._keeper is None:
            self._keeper = subprocess.Popen(
                [sys.executable, "-I", "-S", str(Path(__file__).with_name("keeper.py"))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                cwd="/",
                # Ctrl-C ends the tests first, which still need their servers to end well.
                start_new_session=True,
            )
        return self._keeper

    def close(self) -> None:
        """End all servers that are left."""
        if self._keeper is None or os.getpid() != self._owner:
            return
        keeper, self._keeper = self._keeper, None
        assert keeper.stdin is not None
        assert keeper.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended, and something was not sent
            keeper.stdin.close()
        try:
            keeper.wait(STOP_S)
        except subprocess.TimeoutExpired:
            keeper.kill()
            keeper.wait(KILL_S)
            raise
        finally:
            keeper.stdout.close()


@dataclass(frozen=True)
class Program:
    """Programs of one version: a folder of this machine, or an image for docker."""

    name: str
    version: tuple[int, ...]
    folder: str = ""
    image: str = ""

    def __str__(self) -> str:
        return f"{self.name} {'.'.join(map(str, self.version))}"


@dataclass(frozen=True)
class Home:
    """The folder of one server, and the user whom it belongs to."""

    folder: Path
    ids: Optional[tuple[int, int]]

    @property
    def log(self) -> Path:
        return self.folder / "log"

    def write(self, name: str, text: str) -> Path:
        """Write a file that the server can read."""
        path = self.folder / name
        path.write_text(text, encoding="utf-8")
        path.chmod(0o600)
        if self.ids is not None:
            os.chown(path, *self.ids)
        return path

    def log_size(self) -> int:
        """Return how much the server has written."""
        return self.log.stat().st_size if self.log.exists() else 0

    def log_since(self, size: int) -> str:
        """Return what the server wrote after it had written so much."""
        if not self.log.exists():
            return ""
        with self.log.open("rb") as log:
            log.seek(size)
            return log.read().decode(errors="replace")

    def log_tail(self, lines: int) -> str:
        """Return the end of what the server wrote."""
        return "\n".join(self.log_since(0).splitlines()[-lines:])


def new_home(keeper: KeeperClient, name: str, *, unprivileged: bool) -> Home:
    """Make the folder of a server.

    Args:
        keeper: Removes it at the end if nobody does before.
        name: Part of the folder's name.
        unprivileged: The server refuses to run as root.
    """
    ids = None
    if unprivileged and os.geteuid() == 0:
        user = _first_user("postgres", "nobody")
        ids = user.pw_uid, user.pw_gid
    folder = Path(tempfile.mkdtemp(prefix=f"leasecron-{name}-", dir=_base()))
    keeper.ask("folder", path=str(folder))
    if ids is not None:
        os.chown(folder, *ids)
    return Home(folder, ids)


def _base() -> Optional[str]:
    """Return where folders are made, or None for the usual place.

    In memory if there is room: a server that forces its data to the disk, as those must that are
    killed, then starts and ends ten times as fast. ``TMPDIR`` goes before that.
    """
    if "TMPDIR" in os.environ or not os.access(MEMORY, os.W_OK):
        return None
    return MEMORY if shutil.disk_usage(MEMORY).free >= ROOM_BYTES else None


def _first_user(*names: str) -> pwd.struct_passwd:
    for name in names:
        try:
            return pwd.getpwnam(name)
        except KeyError:
            continue
    message = f"PostgreSQL does not run as root, and there is none of the users {', '.join(names)}"
    raise ServiceMissing(message)


class Process(Protocol):
    """A server at work, on this machine or in a container."""

    def running(self) -> bool:
        """Tell whether it has not ended; one that is paused runs."""

    def signal(self, number: int) -> None:
        """Send a signal to its first process."""

    def pause(self) -> None:
        """Have all its processes stand still."""

    def resume(self) -> None:
        """Let all its processes go on."""

    def kill(self) -> None:
        """Kill all its processes."""

    def ended(self) -> int:
        """Return its status after it has ended, and forget it."""


class Launcher(Protocol):
    """Starts programs."""

    def launch(
        self,
        argv: Sequence[str],
        home: Home,
        *,
        ending: int = signal.SIGKILL,
        environment: Optional[Mapping[str, str]] = None,
    ) -> Process:
        """Start a server, whose output is appended to the log of its home.

        Args:
            argv: The name of the program without its folder, and its arguments.
            home: Its folder and user.
            ending: The signal that ends it when nobody is left to end it gently.
            environment: What it finds in its environment beside what all find.
        """


@dataclass(frozen=True)
class LocalLauncher:
    """Starts programs of this machine."""

    keeper: KeeperClient
    program: Program

    def launch(
        self,
        argv: Sequence[str],
        home: Home,
        *,
        ending: int = signal.SIGKILL,
        environment: Optional[Mapping[str, str]] = None,
    ) -> Process:
        own = f"{self.program.folder}/{argv[0]}"
        everything = {
            # Nothing of the caller's: PGPORT and its like would lead a server astray.
            "PATH": f"{self.program.folder}:/usr/bin:/bin",
            "HOME": str(home.folder),
            "LC_ALL": "C",
            "TZ": "UTC",
            **(environment or {}),
        }
        answer = self.keeper.ask(
            "start",
            # Some need a program of the system, such as a shell, which PATH leads to.
            argv=[own if Path(own).exists() else argv[0], *argv[1:]],
            folder=str(home.folder),
            log=str(home.log),
            env=everything,
            ids=home.ids,
            ending=ending,
        )
        return LocalProcess(self.keeper, answer["pid"])


@dataclass(frozen=True)
class LocalProcess:
    """A process of this machine, a child of the keeper."""

    keeper: KeeperClient
    pid: int

    def running(self) -> bool:
        return self.keeper.ask("status", pid=self.pid)["status"] is None

    def signal(self, number: int) -> None:
        self.keeper.ask("signal", pid=self.pid, number=number)

    def pause(self) -> None:
        self.keeper.ask("pause", pid=self.pid)

    def resume(self) -> None:
        self.keeper.ask("resume", pid=self.pid)

    def kill(self) -> None:
        self.keeper.ask("kill", pid=self.pid)

    def ended(self) -> int:
        status: Optional[int] = self.keeper.ask("status", pid=self.pid)["status"]
        assert status is not None
        return status


def run(launcher: Launcher, argv: Sequence[str], home: Home) -> None:
    """Run a program to its end.

    Raises:
        ServiceError: It failed or took too long.
    """
    process = launcher.launch(argv, home)
    if not eventually(lambda: not process.running(), START_S):
        process.kill()
        eventually(lambda: not process.running(), KILL_S)
        process.ended()
        message = f"{argv[0]} did not end within {START_S:.0f} s: {home.log_tail(20)}"
        raise ServiceError(message)
    status = process.ended()
    if status != 0:
        message = f"{argv[0]} ended with status {status}: {home.log_tail(20)}"
        raise ServiceError(message)


def remove_home(keeper: KeeperClient, home: Home) -> None:
    """Remove the folder of a server that has ended.

    Raises:
        ServiceError: Something of it could not be removed.
    """
    keeper.ask("remove", path=str(home.folder))
    if home.folder.exists():
        shutil.rmtree(home.folder)  # says what is in the way


def require(program: Optional[Program], what: str) -> Program:
    """Return a program that was found.

    Raises:
        ServiceMissing: There is none.
    """
    if program is None:
        raise ServiceMissing(what)
    return program
