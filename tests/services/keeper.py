"""The parent of all servers of one test session; they end with it, and it ends with the session.

It is a program of its own, so that nothing is left behind however a session ends, be it by SIGKILL:
it notices that its standard input is closed or its parent is another, ends every process below it,
and removes their folders. It runs with the standard library alone.

A request is a line of JSON on standard input, and its answer a line of JSON on standard output:

===============================  ===================================================================
``{"do": "start", ...}``         starts ``argv`` in ``folder`` with its output appended to ``log``;
                                 answers ``pid`` or ``error``
``{"do": "status", "pid"}``      answers ``status``: None while it runs, else as in ``subprocess``
``{"do": "signal", "pid",        sends a signal to this process alone
"number"}``
``{"do": "pause", "pid"}``       SIGSTOP for the process and all below it; ``resume`` is SIGCONT and
                                 ``kill`` SIGKILL
``{"do": "folder", "path"}``     will remove this folder at the end
``{"do": "remove", "path"}``     removes it now
``{"do": "at_end", "argv"}``     will run a command at the end; ``not_at_end`` takes that back
===============================  ===================================================================
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Callable, Optional

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
IPC_RMID = 0

LOOK_S = 0.5
"""How often it looks whether its parent is still there and its children have ended."""

GENTLE_S = 5.0
"""How long servers may take at the end before they are killed."""

COMMAND_S = 30.0
"""How long a command that runs at the end may take."""

_C = ctypes.CDLL(None, use_errno=True)


def children_from_proc() -> dict[int, list[int]]:
    """Return who is whose child, from /proc."""
    found: dict[int, list[int]] = {}
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit():
            continue
        try:
            stat = Path(entry.path, "stat").read_bytes()
        except OSError:  # it has ended meanwhile
            continue
        # The name of the program, in brackets, may hold anything.
        state, parent = stat.rpartition(b")")[2].split()[:2]
        if state not in (b"Z", b"X"):
            found.setdefault(int(parent), []).append(int(entry.name))
    return found


def children_from_ps() -> dict[int, list[int]]:
    """Return who is whose child, where there is no /proc."""
    found: dict[int, list[int]] = {}
    argv = ["ps", "-A", "-o", "pid=,ppid=,stat="]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as ps:
        listing, _ = ps.communicate()
    for line in listing.splitlines():
        pid, parent, state = line.split()[:3]
        if not state.startswith("Z") and int(pid) != ps.pid:
            found.setdefault(int(parent), []).append(int(pid))
    return found


def below(pid: int) -> list[int]:
    """Return the processes below one, children before grandchildren."""
    children = children_from_proc() if Path("/proc/self/stat").exists() else children_from_ps()
    found = list(children.get(pid, ()))
    for one in found:  # grows on the way
        found += children.get(one, ())
    return found


def send(pid: int, number: int) -> None:
    """Send a signal, unless the process has ended."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def pause(pid: int) -> None:
    """Have a process and all below it stand still, such as the sessions of a PostgreSQL server."""
    send(pid, signal.SIGSTOP)
    done: set[int] = set()
    # What stands still starts nothing, so that after some rounds there is nothing new.
    while new := set(below(pid)) - done:
        for one in new:
            send(one, signal.SIGSTOP)
        done |= new


def resume(pid: int) -> None:
    """Let a process and all below it go on."""
    # Those below first: a server that goes on would find them not answering.
    for one in [*reversed(below(pid)), pid]:
        send(one, signal.SIGCONT)


def kill(pid: int) -> list[int]:
    """Kill a process and all below it, and return which these are."""
    # What stands still starts nothing, and is still found below its parent.
    pause(pid)
    killed = [pid, *below(pid)]
    for one in killed:
        send(one, signal.SIGKILL)
    return killed


def remove_folder(path: str) -> None:
    """Remove a folder, and what a PostgreSQL server that was killed has left outside of it."""
    for file in Path(path).glob("**/postmaster.pid"):
        with contextlib.suppress(OSError, IndexError):  # it was killed while it started
            lines = file.read_text().splitlines()
            key, segment = lines[6].split()
            if is_abandoned(int(lines[0]), int(key), int(segment)):
                _C.shmctl(int(segment), IPC_RMID, None)
    shutil.rmtree(path, ignore_errors=True)


def is_abandoned(creator: int, key: int, segment: int) -> bool:
    """Tell whether a segment of shared memory is that of a server and is used by nobody any more.

    A number alone says nothing: a server in a container counts its segments by itself.
    """
    listing = Path("/proc/sysvipc/shm")
    if not listing.exists():
        return False
    for line in listing.read_text().splitlines()[1:]:
        found_key, found_segment, _perms, _size, found_creator, _last, users = line.split()[:7]
        if (int(found_key), int(found_segment), int(found_creator)) == (key, segment, creator):
            return users == "0"
    return False


class Keeper:
    """Does what the requests say, and cleans up at the end."""

    def __init__(self) -> None:
        self.parent = os.getppid()
        self.children: dict[int, subprocess.Popen[bytes]] = {}
        self.endings: dict[int, int] = {}
        self.folders: list[str] = []
        self.commands: list[list[str]] = []
        if sys.platform == "linux":
            # The sessions of a PostgreSQL server that was killed become children of this process.
            _C.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)

    def serve(self) -> None:
        """Answer requests until the session has ended."""
        unread = b""
        while True:
            ready, _, _ = select.select([0], [], [], LOOK_S)
            self.reap()
            if os.getppid() != self.parent:
                return
            if not ready:
                continue
            received = os.read(0, 65536)
            if not received:
                return
            *lines, unread = (unread + received).split(b"\n")
            for line in lines:
                answer = self.answer(json.loads(line))
                try:
                    os.write(1, json.dumps(answer).encode() + b"\n")
                except BrokenPipeError:  # nobody waits for it any more
                    return

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Do what a request says."""
        does: dict[str, Callable[..., dict[str, Any]]] = {
            "start": self.start,
            "status": self.status,
            "signal": lambda pid, number: self.tell(send, pid, number),
            "pause": lambda pid: self.tell(pause, pid),
            "resume": lambda pid: self.tell(resume, pid),
            "kill": self.kill,
            "folder": lambda path: self.note(self.folders, path),
            "remove": self.remove,
            "at_end": lambda argv: self.note(self.commands, argv),
            "not_at_end": lambda argv: self.forget(self.commands, argv),
        }
        try:
            return does[request.pop("do")](**request)
        except (OSError, subprocess.SubprocessError) as error:
            return {"error": str(error)}

    def start(
        self,
        *,
        argv: list[str],
        folder: str,
        log: str,
        env: dict[str, str],
        ids: Optional[tuple[int, int]],
        ending: int,
    ) -> dict[str, Any]:
        """Start a process, as another user if ``ids`` says so."""

        def end_with_the_keeper() -> None:
            _C.prctl(PR_SET_PDEATHSIG, ending, 0, 0, 0)

        # This program has one thread, so that what runs before exec meets no lock that is held.
        before = end_with_the_keeper if sys.platform == "linux" else None
        user, group = ids or (None, None)
        with Path(log).open("ab") as output:
            child = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd=folder,
                env=env,
                user=user,
                group=group,
                extra_groups=None if ids is None else [],
                start_new_session=True,
                preexec_fn=before,  # noqa: PLW1509 - see above
            )
        self.children[child.pid] = child
        self.endings[child.pid] = ending
        return {"pid": child.pid}

    def status(self, pid: int) -> dict[str, Any]:
        """Tell whether a process has ended, and how."""
        self.reap()
        return {"status": self.children[pid].returncode}

    def tell(self, does: Callable[..., None], pid: int, *arguments: int) -> dict[str, Any]:
        """Do something to a process that was started here, unless it has ended."""
        self.reap()
        if self.children[pid].returncode is None:
            does(pid, *arguments)
        return {}

    def kill(self, pid: int) -> dict[str, Any]:
        """Kill a process that was started here and all below it, and wait until they are gone."""
        self.reap()
        if self.children[pid].returncode is None:
            killed = kill(pid)
            until(lambda: self.gone(killed), GENTLE_S)
        return {}

    def gone(self, pids: list[int]) -> bool:
        """Tell whether these have ended. They were below this process, and are its own now."""
        self.reap()
        return not set(pids) & set(below(os.getpid()))

    def remove(self, path: str) -> dict[str, Any]:
        """Remove a folder now."""
        remove_folder(path)
        return self.forget(self.folders, path)

    def note(self, notes: list[Any], item: object) -> dict[str, Any]:
        """Remember something for the end."""
        notes.append(item)
        return {}

    def forget(self, notes: list[Any], item: object) -> dict[str, Any]:
        """Do not do at the end what was noted."""
        if item in notes:
            notes.remove(item)
        return {}

    def reap(self) -> None:
        """Take note of what has ended. No other part may wait for a child: one would miss it."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid in self.children:
                code = -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
                self.children[pid].returncode = code

    def running(self) -> list[int]:
        """Return the servers that have not ended."""
        self.reap()
        return [pid for pid, child in self.children.items() if child.returncode is None]

    def close(self) -> None:
        """End everything and remove everything."""
        for pid in self.running():
            resume(pid)
            send(pid, self.endings[pid])
        until(lambda: not self.running(), GENTLE_S)

        def nobody_left() -> bool:
            left = below(os.getpid())
            for pid in left:
                send(pid, signal.SIGKILL)
            self.reap()
            return not left

        until(nobody_left, GENTLE_S)
        for argv in self.commands:
            subprocess.run(argv, stdin=subprocess.DEVNULL, stdout=2, timeout=COMMAND_S, check=False)
        for path in self.folders:
            remove_folder(path)


def until(condition: Callable[[], bool], limit_s: float) -> bool:
    """Wait for a condition within a limit."""
    end = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True


def main() -> None:
    """Serve one session."""
    keeper = Keeper()

    def leave(number: int, _frame: object) -> None:
        sys.exit(128 + number)

    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, leave)
    # Ctrl-C is for the session, which ends this process in its own time.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        keeper.serve()
    finally:
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        keeper.close()


if __name__ == "__main__":
    main()
