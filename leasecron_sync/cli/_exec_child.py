"""A command as a child process, in a session of its own, that dies with its parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final, Optional

KILL_AFTER_MS: Final = 10_000
"""How long a command has after SIGTERM."""

_GUARD_S: Final = 1.0

# Executed in the child before the command takes its place: what is asked of the kernel here holds
# for the command. It is not done between fork and exec, where a process with threads may do little.
# Python ignores SIGPIPE, and what is ignored stays so in the command. A script without "#!" goes to
# a shell, as it does in a crontab without this program.
_BEFORE: Final = """\
import errno, os, signal, sys
parent, mask, *command = sys.argv[1:]
def ask():
    import ctypes
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
def run():
    if not command[0]:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
    try:
        os.execvp(command[0], command)
    except OSError as error:
        if error.errno != errno.ENOEXEC:
            raise
        for folder in [""] if "/" in command[0] else os.get_exec_path():
            path = os.path.join(folder, command[0])
            if os.access(path, os.X_OK):
                os.execv("/bin/sh", ["/bin/sh", path, *command[1:]])
        raise
if sys.platform == "linux":
    try:
        ask()
    except (ImportError, OSError, AttributeError):
        pass
if os.getppid() != int(parent):
    os.kill(os.getpid(), signal.SIGKILL)
signal.signal(signal.SIGPIPE, signal.SIG_DFL)
signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
signal.pthread_sigmask(signal.SIG_SETMASK, [int(number) for number in mask.split()])
try:
    run()
except OSError as error:
    told = f"leasecron-sync: {command[0]!r} cannot be run: {error.strerror}\\n"
    try:
        os.write(2, told.encode("utf-8", "backslashreplace"))
    except OSError:
        pass
    os._exit(127 if isinstance(error, FileNotFoundError) else 126)
"""

# The kernel kills the command itself when this process dies, and nothing that it has started, such
# as the programs of a shell's line. The guard does that: its standard input ends with this process.
_GUARD: Final = """\
trap "" TERM INT HUP
read -r group && { read -r end || kill -s KILL -- "-$group"; }
"""


class Child:
    """A command that runs.

    Its standard input, output and error, and all other files that it is given, are those of this
    process. When this process ends, in whatever way, the command and its process group are killed.

    Args:
        command: Program and arguments.
        environment: What is added to its environment.
        mask: Signals that stay blocked in it.

    Attributes:
        denied: True once a signal to it was refused, since it runs as another user.

    Raises:
        OSError: No process could be started.
    """

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], mask: Iterable[int] = ()
    ) -> None:
        self.denied = False
        self._over = False
        self._guard = _guard()
        before = [str(os.getpid()), " ".join(str(int(number)) for number in mask)]
        try:
            self._process = subprocess.Popen(  # noqa: S603 - what the user wants to be executed
                [sys.executable, "-I", "-S", "-c", _BEFORE, *before, *command],
                env={**os.environ, **environment},
                start_new_session=True,
                # What a shell opened for the command is for the command. What this process opens
                # itself is closed by exec.
                close_fds=False,
            )
        except BaseException:
            self.release()
            raise
        self._tell_guard(f"{self._process.pid}\n")

    def wait(self, limit_ms: int) -> Optional[int]:
        """Return its status as a shell would, or None when it has not ended in time."""
        try:
            code = self._process.wait(max(0, limit_ms) / 1000)
        except subprocess.TimeoutExpired:
            return None
        return code if code >= 0 else 128 - code

    def is_gone(self) -> bool:
        """After its end, tell whether nothing of its process group is left."""
        try:
            os.killpg(self._process.pid, 0)
        except ProcessLookupError:
            self._over = True
        except PermissionError:  # it is somebody else's, and will not listen
            self.denied = self._over = True
        else:
            self._over = not _lives(self._process.pid)
        return self._over

    def send(self, number: int) -> None:
        """Send a signal to it and to all that it started in its group."""
        if not self._over:
            try:
                os.killpg(self._process.pid, number)
            except ProcessLookupError:
                pass
            except PermissionError:
                self.denied = True

    def kill(self) -> None:
        """End it and its group at once."""
        self.send(signal.SIGKILL)

    def release(self) -> None:
        """Leave alone what it started and left running."""
        self._over = True
        if self._guard is not None:
            self._tell_guard("end\n")
            assert self._guard.stdin is not None
            with suppress(OSError):
                self._guard.stdin.close()
            try:
                self._guard.wait(_GUARD_S)
            except subprocess.TimeoutExpired:  # somebody has stopped it
                self._guard.kill()
                self._guard.wait()
            self._guard = None

    def _tell_guard(self, line: str) -> None:
        if self._guard is not None:
            assert self._guard.stdin is not None
            with suppress(OSError):  # somebody killed it
                self._guard.stdin.write(line.encode("ascii"))


def _lives(group: int) -> bool:
    """Tell whether a process group that exists holds more than zombies.

    Where the first process of a container does not wait for its children, those stay for ever.
    """
    seen = False
    for place in Path("/proc").iterdir() if sys.platform == "linux" else ():
        if place.name.isdigit():
            with suppress(OSError), (place / "stat").open("rb") as file:
                # Behind the name of the program, which may hold anything.
                state, _parent, its_group = file.read().rpartition(b")")[2].split()[:3]
                seen = True
                if int(its_group) == group and state not in (b"Z", b"X"):
                    return True
    return not seen  # nothing can be found out here


def _guard() -> Optional[subprocess.Popen[bytes]]:
    """Start the guard; None where there is no shell: then only the command itself dies."""
    try:
        return subprocess.Popen(  # noqa: S603 - nothing of it comes from outside
            ["/bin/sh", "-c", _GUARD],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            env={},
            cwd="/",
            start_new_session=True,
        )
    except FileNotFoundError:
        return None
