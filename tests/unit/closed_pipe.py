"""Scripts whose reader has gone away."""

from __future__ import annotations

import os
import signal
import subprocess
import sys


def into_a_closed_pipe(script: str, *arguments: str) -> tuple[bytes, int]:
    """Run a script whose output nobody reads; return its standard error and its status."""
    reading, writing = os.pipe()
    os.close(reading)
    called = subprocess.run(
        [sys.executable, script, *arguments],
        stdout=writing,
        stderr=subprocess.PIPE,
        check=False,
        preexec_fn=lambda: signal.signal(signal.SIGPIPE, signal.SIG_IGN),
    )
    os.close(writing)
    return called.stderr, called.returncode
