"""Whether somebody holds an SQLite file's write lock, asked without taking it.

The locks of SQLite are locks of bytes; which bytes stands in its documents of the file format
(https://sqlite.org/fileformat2.html#the_shared_memory_or_wal_index_file) and of locking
(https://sqlite.org/lockingv3.html). The system tells who holds one.
"""

from __future__ import annotations

import fcntl
import os
import struct
import sys
import threading
from typing import Final, Optional

from leasecron_sync.clock import Clock, SystemClock
from leasecron_sync.doctor.finding import Findings

HELD_MS: Final = 2_000
"""No transaction of an instance is that long, and claims wait little longer for one."""

LOOK_MS: Final = 50

_LOG_WRITE_BYTE: Final = 120  # of the log's index
_PENDING_BYTE: Final = 0x40000000  # of the file itself; the next one reserves it for a writer
_FLOCK: Final = struct.Struct("hhqqi0q")

CAN_TELL: Final = sys.platform == "linux"
"""Elsewhere the system's record of a lock is laid out in another way."""


def check_lock(findings: Findings, path: str) -> None:
    """Tell of a transaction that does not end; see ``long_holder`` for where that may be asked."""
    holder = long_holder(path, SystemClock())
    if holder is None:
        findings.ok("lock", "no other process keeps instances from writing")
        return
    who = f"process {holder}" if holder else "a process of another container"
    findings.problem(
        "lock",
        f"{who} has kept others from writing for {HELD_MS // 1000} s: its transaction does not end",
        "Claims, renewals and settlements wait for it, and past their time-out that is an outage: "
        "nothing new is started, and leases lapse.",
        f"Look what it does (ps {holder or '...'}; fuser and lsof name those that have the file "
        "open), and end its transaction or the process.",
    )


def long_holder(path: str, clock: Clock) -> Optional[int]:
    """Look for a moment who holds the write lock.

    Must not be called in a process that has the file open otherwise: it would lose its own locks.

    Args:
        path: The file.
        clock: Tells how long.

    Returns:
        Id of the process that held it all the time, 0 when it is one that is not seen from here,
        such as in another container; None when it was free, or changed hands.
    """
    first, count = _LOG_WRITE_BYTE, 1
    try:
        file = os.open(f"{os.path.realpath(path)}-shm", os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:  # no log is in use
        first, count = _PENDING_BYTE, 2
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        holder = _holder(file, first, count)
        ends_ms, never = clock.steady_ms() + HELD_MS, threading.Event()
        while holder is not None and clock.steady_ms() < ends_ms:
            clock.wait(never, LOOK_MS)
            if _holder(file, first, count) != holder:
                return None
    finally:
        os.close(file)
    return holder


def _holder(file: int, first: int, count: int) -> Optional[int]:
    """Return the process with a lock that bars writing these bytes."""
    wanted = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, first, count, 0)
    kind, _whence, _first, _count, process = _FLOCK.unpack(fcntl.fcntl(file, fcntl.F_GETLK, wanted))
    return None if kind == fcntl.F_UNLCK else max(0, process)
