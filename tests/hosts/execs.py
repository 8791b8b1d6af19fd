"""Calls of ``leasecron-sync exec`` as the crontabs of several hosts would make them.

As a program it is one crontab for many hosts: ``execs.py TIMES HOSTS ARGUMENTS``, where the
arguments are those of ``leasecron-sync`` as JSON. At each of so many even seconds it forks that
many hosts. When all have ended it prints the status of each, those of one second in a list.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Callable, Optional

ROOT = Path(__file__).parents[2]

# Notes when it begins and ends, under which process of exec, and whether another one is at work:
# the kernel gives its lock up when it is dead.
COMMAND = """
import fcntl, json, os, signal, sys, time
signal.signal(signal.SIGINT, signal.SIG_DFL)
lock = os.open(sys.argv[1] + ".lock", os.O_CREAT | os.O_RDWR)
def note(what):
    line = [what, os.environ["LEASECRON_SYNC_SCHEDULED_TIME"], os.getpid(), os.getppid(),
            int(os.environ.get("LEASECRON_SYNC_ATTEMPT", 1)), time.monotonic()]
    os.write(log, (json.dumps(line) + "\\n").encode())
log = os.open(sys.argv[1], os.O_CREAT | os.O_WRONLY | os.O_APPEND)
try:
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
except BlockingIOError:
    note("doubled")
note("began")
time.sleep(float(sys.argv[2]))
note("ended")
"""


@dataclass(frozen=True)
class Note:
    """A line that a command has written."""

    what: str
    scheduled_time: str
    pid: int
    exec_pid: int
    attempt: int
    steady_s: float


def notes(log: Path, what: Optional[str] = None) -> list[Note]:
    """Return what commands have noted so far."""
    lines = log.read_text().splitlines() if log.exists() else []
    found = [Note(*json.loads(line)) for line in lines]
    return [note for note in found if what in (None, note.what)]


def noting(log: Path, seconds: float) -> list[str]:
    """Return a command that takes so long, and notes what it does."""
    return [sys.executable, "-I", "-S", "-c", COMMAND, str(log), str(seconds)]


def until(condition: Callable[[], object], limit_s: float = 20) -> bool:
    """Wait for a condition; tell whether it came."""
    end = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > end:
            return bool(condition())
        time.sleep(0.01)
    return True


def is_alive(pid: int) -> bool:
    """Tell whether a process is there, and is no zombie."""
    try:
        state = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in (b"Z", b"X")


class Exec:
    """One call.

    Args:
        url: The store; None for what the environment says.
        options: Options of ``exec``.
        command: The command.
        environment: What is added to the environment.
    """

    def __init__(
        self, url: Optional[str], options: list[str], command: list[str], **environment: str
    ) -> None:
        arguments = ["exec", *([url] if url else []), "--name", "job", *options, "--", *command]
        self.process = subprocess.Popen(
            [sys.executable, "-W", "error", "-m", "leasecron_sync", *arguments],
            env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    @property
    def pid(self) -> int:
        return self.process.pid

    def send(self, number: int) -> None:
        """Send a signal to the process of exec alone."""
        self.process.send_signal(number)

    def end(self, stdin: bytes = b"", limit_s: float = 25) -> tuple[int, str, str]:
        """Wait for its end, and of whoever has its output; return status, output and errors."""
        out, err = self.process.communicate(stdin, limit_s)
        return self.process.returncode, out.decode(), err.decode()

    def close(self) -> None:
        """Make sure that it is gone, and with it what it started."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.kill()
        with self.process:
            pass


def host(arguments: list[str], folder: Path, number: int) -> None:
    """Be one host: execute the command line, and end with its status."""
    from leasecron_sync.cli import main

    errors = os.open(folder / f"{number}.err", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(errors, 2)
    status = 70
    try:
        status = main(arguments)
    finally:
        sys.stderr.flush()
        os._exit(status)


def crontab(times: int, hosts: int, arguments: list[str]) -> list[list[int]]:
    """Fork the hosts at each even second; return their statuses."""
    from leasecron_sync.engine.caller import import_late_ones

    import_late_ones()
    folder = Path.cwd()
    calls: list[list[int]] = []
    for _turn in range(times):
        time.sleep(2 - time.time() % 2)
        pids: list[int] = []
        for number in range(hosts):
            pid = os.fork()
            if pid == 0:
                host(arguments, folder, number)
            pids.append(pid)
        calls.append(pids)
    return [[os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids] for pids in calls]


if __name__ == "__main__":
    print(json.dumps(crontab(int(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3]))))
