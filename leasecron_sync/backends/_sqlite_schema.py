"""What makes an SQLite file a store."""

from __future__ import annotations

import os
import sqlite3
import threading

from leasecron_sync.clock import Clock
from leasecron_sync.model import STORE_FORMAT

TURN_MS = 20
"""Pause before the next try to switch a new file to its write-ahead log."""


def use_log(connection: sqlite3.Connection, clock: Clock, deadline_ms: int) -> None:
    """Switch the file to its write-ahead log, unless it has one.

    SQLite does not wait for its turn here, and processes that make a file together meet.
    """
    while connection.execute("PRAGMA journal_mode").fetchone()[0] != "wal":
        try:
            connection.execute("PRAGMA journal_mode = WAL")
        except sqlite3.OperationalError as error:
            if "locked" not in str(error) or clock.steady_ms() + TURN_MS > deadline_ms:
                raise
            clock.wait(threading.Event(), TURN_MS)
        else:
            return  # a file system that can't keep such a log leaves the mode as it was


def make_tables(connection: sqlite3.Connection) -> None:
    """Make the tables that are missing, inside the transaction of the caller."""
    for statement in _schema():
        connection.execute(statement)
    for name, value in (
        ("format", str(STORE_FORMAT)),
        ("store_id", os.urandom(16).hex()),
        ("clock_ms", "0"),
    ):
        connection.execute(
            "INSERT OR IGNORE INTO leasecron_meta (name, value) VALUES (?, ?)", (name, value)
        )


def read_meta(connection: sqlite3.Connection) -> dict[str, str]:
    """Return what the file says of itself."""
    return dict(connection.execute("SELECT name, value FROM leasecron_meta").fetchall())


def _schema() -> list[str]:
    from importlib import resources  # late: it is slow to import, and needed once

    folder = resources.files("leasecron_sync.backends") / "_sql" / "sqlite"
    text = (folder / "schema.sql").read_text(encoding="utf-8")
    return [part for part in text.split(";\n") if part.strip()]
