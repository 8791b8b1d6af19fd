"""What makes an SQLite file a store."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Mapping

from leasecron_sync.clock import Clock
from leasecron_sync.errors import StoreUnsupported
from leasecron_sync.model import STORE_FORMAT

TURN_MS = 20
"""Pause before the next try to switch a new file to its write-ahead log."""

META = "leasecron_meta"
TABLES = {META, "leasecron_space", "leasecron_job", "leasecron_run", "leasecron_pruned"}
INDEXES = {"leasecron_run_unsettled", "leasecron_run_time"}

# What the file says of itself; the id tells a store that lost its data from the one before.
_META_ROWS = f"""\
INSERT OR IGNORE INTO leasecron_meta (name, value) VALUES
  ('format', '{STORE_FORMAT}'),
  ('store_id', lower(hex(randomblob(16)))),
  ('clock_ms', '0'),
  ('writes', '0')"""


def use_log(connection: sqlite3.Connection, clock: Clock, deadline_ms: int) -> bool:
    """Switch the file to its write-ahead log, unless it has one.

    SQLite does not wait for its turn here, and processes that make a file together meet.

    Returns:
        False when there can be no such log, and the mode is what it was.
    """
    while not has_log(connection):
        try:
            (mode,) = connection.execute("PRAGMA journal_mode = WAL").fetchone()
        except sqlite3.OperationalError as error:
            if "locked" not in str(error) or clock.steady_ms() + TURN_MS > deadline_ms:
                raise
            clock.wait(threading.Event(), TURN_MS)
        else:
            return str(mode) == "wal"
    return True


def has_log(connection: sqlite3.Connection) -> bool:
    """Tell whether the file has a write-ahead log."""
    (mode,) = connection.execute("PRAGMA journal_mode").fetchone()
    return str(mode) == "wal"


def make_store(connection: sqlite3.Connection, path: str) -> None:
    """Make what is missing, inside the transaction of the caller.

    Raises:
        StoreUnsupported: The file is a store of another format, and stays as it is.
    """
    found = _own_names(connection)
    if META in found:
        check_format(path, read_meta(connection))
    if found >= TABLES | INDEXES:
        return
    for statement in _statements():
        connection.execute(statement)
    connection.execute(_META_ROWS)


def is_whole(connection: sqlite3.Connection) -> bool:
    """Tell whether the file has all tables and indexes of a store."""
    return _own_names(connection) >= TABLES | INDEXES


def read_meta(connection: sqlite3.Connection) -> dict[str, str]:
    """Return what the file says of itself."""
    return dict(connection.execute("SELECT name, value FROM leasecron_meta").fetchall())


def check_format(path: str, meta: Mapping[str, str]) -> None:
    """Refuse a store that another version has made its own.

    Raises:
        StoreUnsupported: Its format is not the one of this version.
    """
    found = meta.get("format", "no")
    if found != str(STORE_FORMAT):
        message = (
            f"the SQLite file {path!r} has store format {found}, this version of leasecron_sync "
            f"reads {STORE_FORMAT}: use a version that knows it"
        )
        raise StoreUnsupported(message)


def _own_names(connection: sqlite3.Connection) -> set[str]:
    rows = connection.execute("SELECT name FROM sqlite_master WHERE name GLOB 'leasecron_*'")
    return {name for (name,) in rows.fetchall()}


def schema_sql() -> str:
    """Return the SQL that makes a store of a file."""
    return f"BEGIN IMMEDIATE;\n\n{_schema()}\n{_META_ROWS};\n\nCOMMIT;\n"


def _statements() -> list[str]:
    return [part for part in _schema().split(";\n") if part.strip()]


def _schema() -> str:
    from importlib import resources  # late: it is slow to import, and needed once

    folder = resources.files("leasecron_sync.backends") / "_sql" / "sqlite"
    return (folder / "schema.sql").read_text(encoding="utf-8")
