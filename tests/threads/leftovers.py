"""What must not be left when a test has ended: threads, sockets, open files."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Callable, Optional

LIMIT_S = 10.0


def eventually(condition: Callable[[], object], limit_s: float = LIMIT_S) -> bool:
    """Wait until a condition holds, within a limit."""
    end = time.monotonic() + limit_s
    pause = threading.Event()
    while not condition():
        if time.monotonic() >= end:
            return bool(condition())
        pause.wait(0.01)
    return True


_EARLIER: set[threading.Thread] = set()


def own_threads() -> list[str]:
    """Return the names of the library's threads that this test brought about."""
    return sorted(
        t.name
        for t in threading.enumerate()
        if t.name.startswith("leasecron-") and t not in _EARLIER
    )


def descriptors() -> Optional[dict[str, str]]:
    """Return what each open descriptor leads to; None where the platform cannot tell."""
    folder = Path("/proc/self/fd")
    if not folder.is_dir():
        return None
    found = {}
    for entry in folder.iterdir():
        try:
            target = str(entry.readlink())
        except OSError:  # the descriptor of this very listing
            continue
        found[entry.name] = target
    return found


def open_files(of: str = "") -> list[str]:
    """Return the open files and sockets of this process, only those whose name holds a text."""
    found = descriptors() or {}
    return sorted(target for target in found.values() if of in target)


@contextmanager
def nothing_left() -> Iterator[None]:
    """Check that no thread, socket or file is left that was not there before."""
    threads_before = set(threading.enumerate())
    _EARLIER.clear()
    _EARLIER.update(threads_before)
    files_before = descriptors()
    yield

    def new_threads() -> list[str]:
        return [t.name for t in threading.enumerate() if t not in threads_before]

    # Threads whose work is done may take a moment to end; the tests of stop() are stricter.
    assert eventually(lambda: not new_threads()), f"threads are left: {new_threads()}"

    def new_files() -> list[str]:
        files = descriptors()
        if files is None or files_before is None:
            return []
        return [
            target
            for number, target in files.items()
            if files_before.get(number) != target and not target.startswith("/dev/")
        ]

    assert eventually(lambda: not new_files(), 2), f"files are left open: {new_files()}"
