"""A command as a child process, in a process group of its own, that dies with its parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Final, Optional

KILL_AFTER_MS: Final = 10_000
"""How long a command has after SIGTERM."""

# Executed in the child before the command takes its place: what is asked of the kernel here holds
# for the command. It is not done between fork and exec, where a process with threads may do little.
_BEFORE: Final = """\
import os, signal, sys
if sys.platform == "linux":
    import ctypes
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
if os.getppid() != int(sys.argv[1]):
    os.kill(os.getpid(), signal.SIGKILL)
try:
    os.execvp(sys.argv[2], sys.argv[2:])
except OSError as error:
    sys.stderr.write(f"leasecron-sync: {sys.argv[2]!r} cannot be run: {error.strerror}\\n")
    sys.exit(127 if isinstance(error, FileNotFoundError) else 126)
"""


class Child:
    """A command that runs.

    Its standard input, output and error are those of this process. On Linux it is killed when this
    process ends, in whatever way; what it has started itself is not.

    Args:
        command: Program and arguments.
        environment: What is added to its environment.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self._process = subprocess.Popen(  # noqa: S603 - what the user wants to be executed
            [sys.executable, "-I", "-S", "-c", _BEFORE, str(os.getpid()), *command],
            env={**os.environ, **environment},
            start_new_session=True,
        )

    def wait(self, limit_ms: int) -> Optional[int]:
        """Return its status as a shell would, or None when it has not ended in time."""
        try:
            code = self._process.wait(max(0, limit_ms) / 1000)
        except subprocess.TimeoutExpired:
            return None
        return code if code >= 0 else 128 - code

    def send(self, number: int) -> None:
        """Send a signal to it and to all that it started in its group."""
        if self._process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)

    def kill(self) -> None:
        """End it and its group at once."""
        self.send(signal.SIGKILL)
