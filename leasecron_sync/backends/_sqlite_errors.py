"""From an error of SQLite to one of the library, with what to do about it."""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path
from typing import Union

from leasecron_sync.errors import (
    StoreError,
    StoreRejected,
    StoreUnavailable,
    StoreUnsupported,
)

_DAMAGED = ("malformed", "could not decode", "unsupported file format")
_FOREIGN = ("no such table", "no such column", "no such index", "has no column")
_REFUSED = ("not authorized", "permission denied")


class Unusable(StoreRejected):
    """The file is damaged, or its tables are not ours: what a start has to end with."""


def is_locked(error: Exception) -> bool:
    """Tell whether another connection was in the way, and nothing else is wrong."""
    return str(error) == "database is locked"


def translated(path: str, error: Union[sqlite3.Error, UnicodeDecodeError]) -> StoreError:
    """Return what to raise for an error before which nothing was committed."""
    # A damaged schema may get into the text of SQLite's error, which Python then cannot read.
    text = "malformed" if isinstance(error, UnicodeDecodeError) else ascii(str(error))[1:-1]
    kind, advice = _explained(path, text.lower())
    message = f"SQLite file {path!r}: {text}"
    return kind(f"{message}: {advice}" if advice else message)


def _explained(path: str, text: str) -> tuple[type[StoreError], str]:  # noqa: C901, PLR0911 - a table
    if text == "database is locked":
        return StoreUnavailable, "another process did not end its transaction in time"
    if "not a database" in text:
        return StoreUnsupported, "choose another path"
    if any(part in text for part in _DAMAGED):
        return Unusable, (
            "it is damaged: stop all instances, move it away together with its -wal and -shm "
            "files, and put a copy from before in its place or let a new one be made"
        )
    if text == "no such table: leasecron_meta":
        return Unusable, "it holds no store"
    if any(part in text for part in _FOREIGN):
        return Unusable, "its tables are not those that this version made"
    if "is full" in text:
        return StoreRejected, "free space on its disk"
    if "readonly" in text:
        return StoreRejected, needed_rights()
    if "unable to open" in text:
        return _why_not_opened(path)
    if "disk i/o error" in text:
        return StoreUnavailable, _why_no_input_or_output(path)
    if any(part in text for part in _REFUSED):
        return StoreRejected, ""
    return StoreUnavailable, ""


def needed_rights() -> str:
    """Return which rights this user needs."""
    return (
        f"user {os.geteuid()} must be able to read and write the file and its folder, where SQLite "
        "keeps two files beside it"
    )


def _why_not_opened(path: str) -> tuple[type[StoreError], str]:
    file, folder = Path(path), Path(path).parent
    try:
        # Not the file itself: closing it would end the locks of this process's connections.
        os.close(os.open(os.devnull, os.O_RDONLY))
        file.lstat()
        file.stat()
    except FileNotFoundError:
        if not folder.is_dir():
            return StoreUnavailable, f"the folder {str(folder)!r} does not exist"
        if file.is_symlink():
            return StoreUnavailable, "it is a symbolic link that leads nowhere"
    except OSError as error:  # no descriptors left, a name too long, links in a circle, no access
        if not isinstance(error, PermissionError):
            return StoreUnavailable, str(error.strerror).lower()
    return StoreRejected, needed_rights()


def _why_no_input_or_output(path: str) -> str:
    try:
        space = os.statvfs(Path(path).parent)
    except OSError as error:
        return str(error.strerror).lower()
    if space.f_bavail == 0:
        return "free space on its disk"
    return "look into the system's log for what is wrong with its disk"
