"""Checks of an SQLite file. Nothing is made, not even the files that SQLite keeps beside it."""

from __future__ import annotations

import os
import sqlite3
import stat
from contextlib import closing
from pathlib import Path
from typing import Final, NamedTuple, Optional
from urllib.parse import quote

from leasecron_sync.backends._sqlite_errors import translated
from leasecron_sync.backends._sqlite_mounts import mount_of, read_mounts
from leasecron_sync.backends._sqlite_past import BRIDGED_STEP_MS
from leasecron_sync.backends._sqlite_place import check_place, check_visible
from leasecron_sync.backends._sqlite_schema import INDEXES, META, TABLES
from leasecron_sync.backends.sqlite import SQLiteLease
from leasecron_sync.clock import Clock, SystemClock
from leasecron_sync.doctor.finding import Examination, Findings
from leasecron_sync.doctor.sqlite_lock import CAN_TELL, check_lock
from leasecron_sync.doctor.store_format import tell_format
from leasecron_sync.errors import StoreRejected, StoreUnsupported

SMALL_DISK: Final = 100 * 1024 * 1024
"""Free space, in bytes, below which there is a warning."""

_MAGIC: Final = b"SQLite format 3\0"
_LOG_VERSION: Final = 2  # in the byte after the page size, where the file has a write-ahead log
_HEADER: Final = 100

_IDLE: Final = (
    "No instance can start on it. Nothing is claimed, and what is due is caught up or missed later."
)

_RIGHTS: Final = (
    "Give the application's user the right to read and write the file and its folder, where SQLite "
    "keeps two files beside it; then call this command as that user."
)


class _Look(NamedTuple):
    """What is in the file.

    Attributes:
        own: Names of ours.
        meta: What the store says of itself.
    """

    own: frozenset[str]
    meta: dict[str, str]


def examine_sqlite(backend: SQLiteLease, exam: Examination) -> None:
    """Look at a file.

    Args:
        backend: Knows where it is.
        exam: The examination.
    """
    findings, path = exam.findings, backend.path
    findings.ok("version", f"SQLite {sqlite3.sqlite_version}")
    if not _check_mount(findings, path) or not _check_visible(findings, path):
        return
    if not _check_place(findings, path):
        return
    with findings.checking("disk"):
        _check_disk(findings, path)
    with findings.checking("rights"):
        _check_rights(findings, path)
    if not Path(path).exists():
        findings.note(
            "format",
            f"there is no file {path!r} yet",
            "The first start of a scheduler makes it. If schedulers have been at work, they use "
            "another file, or somebody deleted this one.",
            "Compare the path with the application's: sqlite:///x is relative to the working "
            "directory, sqlite:////x is not.",
        )
        return
    with findings.checking("format"):
        _check_file(exam, path)


def _check_mount(findings: Findings, path: str) -> bool:
    """Look at the table of mounts, before a file system that may hang is touched."""
    mount = mount_of(read_mounts(), path, None)
    if mount is None or not mount.is_network:
        return True
    findings.problem(
        "file system",
        f"{path!r} lies on a network file system ({mount.kind}, mounted on {mount.point!r})",
        "Hosts do not see each other's locks there: two instances win one run. Schedulers refuse "
        "to start on it.",
        "Put the file on a disk of this host, or use PostgreSQL or Redis for several hosts.",
    )
    return False


def _check_visible(findings: Findings, path: str) -> bool:
    try:
        check_visible(path)
    except StoreRejected as error:
        findings.problem("rights", str(error), _IDLE, _RIGHTS)
        return False
    return True


def _check_place(findings: Findings, path: str) -> bool:
    with findings.checking("file system"):
        try:
            warnings = check_place(path)
        except StoreUnsupported as error:
            findings.problem("file system", str(error), _IDLE, "Do what the line before says.")
            return False
        for warning in warnings:
            findings.warning(
                "file system",
                warning,
                "Where that is not kept, runs are lost or doubled.",
                "Do what the line before says.",
            )
        if not warnings:
            mount = mount_of(read_mounts(), os.path.realpath(path), None)
            kind = f" ({mount.kind})" if mount is not None else ""
            findings.ok("file system", f"on a file system of this host{kind}")
    return True


def _check_disk(findings: Findings, path: str) -> None:
    space = os.statvfs(Path(os.path.realpath(path)).parent)
    free = space.f_bavail * space.f_frsize
    found = f"{free // (1024 * 1024)} MiB free"
    if free >= SMALL_DISK:
        findings.ok("disk", found)
    elif free:
        findings.warning(
            "disk",
            found,
            "When the disk is full nothing can be claimed, renewed or settled: runs go on, their "
            "leases lapse, and they are executed again later.",
            "Free space, or move the file to a larger disk while no scheduler runs.",
        )
    else:
        findings.problem(
            "disk",
            "the disk is full",
            "Nothing can be claimed, renewed or settled: an outage until there is space.",
            "Free space on it.",
        )


def _check_rights(findings: Findings, path: str) -> None:
    """Ask the system, without writing anything."""
    real = Path(os.path.realpath(path))
    wrong: list[str] = []
    if os.statvfs(real.parent).f_flag & os.ST_RDONLY:
        wrong.append("the file system is mounted read-only")
    else:
        if not os.access(real.parent, os.W_OK | os.X_OK, effective_ids=_by_effective()):
            wrong.append(f"the folder {str(real.parent)!r} cannot be written to")
        names = [real, Path(f"{real}-wal"), Path(f"{real}-shm")]
        wrong += [
            f"{name.name!r} cannot be written to"
            for name in names
            if name.exists()
            and not os.access(name, os.R_OK | os.W_OK, effective_ids=_by_effective())
        ]
    if not wrong:
        findings.ok("rights", f"user {os.geteuid()} may read and write the file and its folder")
        return
    findings.problem(
        "rights",
        f"{'; '.join(wrong)} by user {os.geteuid()}",
        f"{_IDLE} Only this command's own user was looked at: the application may have another.",
        _RIGHTS,
    )


def _by_effective() -> bool:
    return os.access in os.supports_effective_ids


def _check_file(exam: Examination, path: str) -> None:
    findings = exam.findings
    if not stat.S_ISREG(Path(path).stat().st_mode):
        return  # told by the check of its place
    try:
        with Path(path).open("rb") as file:
            header = file.read(_HEADER)
    except PermissionError:
        return  # told by the check of rights
    if not header:
        findings.note("format", "the file is empty", "The first start makes a store of it.")
        return
    if not header.startswith(_MAGIC):
        findings.problem(
            "format",
            f"{path!r} is not an SQLite database",
            _IDLE,
            "Choose another path, or look who has written over the file.",
        )
        return
    _check_log(findings, header)
    try:
        look = _looked(path, exam, has_log=header[18] == _LOG_VERSION)
    except (sqlite3.Error, UnicodeDecodeError) as error:
        problem = translated(path, error)
        locked = "locked" in str(error)
        findings.problem(
            "format",
            str(problem),
            "Another process has held the file for long: claims wait for it, and past their "
            "time-out that is an outage."
            if locked
            else _IDLE,
            "Look which process has the file open (fuser, lsof) and in a transaction, and end it."
            if locked
            else "Keep a copy of the file and of those beside it. Then do what the line before "
            "says.",
        )
        return
    if CAN_TELL:
        with findings.checking("lock"):
            check_lock(findings, path)
    _check_store(findings, look)
    _check_clock(findings, look.meta.get("clock_ms", ""), SystemClock())


def _check_log(findings: Findings, header: bytes) -> None:
    if header[18] == _LOG_VERSION:
        findings.ok("journal", "write-ahead log, and commits reach the disk (synchronous = FULL)")
        return
    findings.note(
        "journal",
        "the file has no write-ahead log (its journal mode is DELETE or one like it)",
        "A scheduler's start switches it to one. Where that cannot be had, claims are slower and "
        "whoever reads the file holds them up.",
        "If schedulers have been at work on it: keep other programs from switching it back, or "
        "put the file on another disk.",
    )


def _looked(path: str, exam: Examination, *, has_log: bool) -> _Look:
    log, index = Path(f"{os.path.realpath(path)}-wal"), Path(f"{os.path.realpath(path)}-shm")
    # A connection that only reads makes the log and its index where there are none, and leaves
    # them behind, with this process's user as their owner. Without them all is in the file itself.
    in_use = not has_log or (log.exists() and index.exists())
    if in_use:
        return _read(path, exam, "mode=ro")
    try:
        return _read(path, exam, "immutable=1")
    except sqlite3.DatabaseError:
        if not (log.exists() and index.exists()):
            raise
        return _read(path, exam, "mode=ro")  # somebody began to write meanwhile


def _read(path: str, exam: Examination, mode: str) -> _Look:
    clock, left_ms = SystemClock(), exam.call().left_ms()
    ends_ms = clock.steady_ms() + left_ms
    url = f"file:{quote(os.fsencode(path))}?{mode}"
    with closing(sqlite3.connect(url, uri=True, timeout=left_ms / 2_000)) as connection:
        connection.set_progress_handler(lambda: int(clock.steady_ms() > ends_ms), 10_000)
        rows = connection.execute("SELECT name FROM sqlite_master WHERE name GLOB 'leasecron_*'")
        own = frozenset(str(name) for (name,) in rows.fetchall())
        meta: dict[str, str] = {}
        if META in own:
            found = connection.execute("SELECT name, value FROM leasecron_meta").fetchall()
            meta = {str(name): str(value) for name, value in found}
    return _Look(own, meta)


def _check_store(findings: Findings, look: _Look) -> None:
    if META not in look.own:
        findings.note(
            "format",
            "the file holds no store of leasecron_sync yet",
            "The first start of a scheduler makes it, beside the tables that are there.",
        )
        return
    tell_format(findings, look.meta.get("format", ""))
    if not look.own >= TABLES | INDEXES:
        missing = ", ".join(sorted((TABLES | INDEXES) - look.own))
        findings.warning(
            "tables",
            f"there is no {missing}",
            "The next start makes it anew; records that were in a table are lost.",
            "Put back a copy of the file from before, while no scheduler runs, or let it start.",
        )


def _check_clock(findings: Findings, stored: str, clock: Clock) -> None:
    newest: Optional[int] = int(stored) if stored.isdigit() else None
    if newest is None:
        return
    ahead_ms = newest - clock.now_ms()
    if ahead_ms <= BRIDGED_STEP_MS:
        findings.ok("clock", "the store has no clock but this host's")
        return
    findings.warning(
        "clock",
        f"the newest time in the file is {ahead_ms // 1000} s ahead of this host's clock",
        "The clock was set back, or was wrong before. Leases that were granted then seem to last "
        "longer: a run whose instance crashed is taken over late.",
        "Set the clock by NTP. Nothing has to be done about the file: it follows.",
    )
