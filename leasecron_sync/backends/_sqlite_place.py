"""Whether an SQLite file can be a store where it lies, told before anything is made."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Optional, Union

from leasecron_sync.backends._sqlite_errors import needed_rights
from leasecron_sync.backends._sqlite_mounts import mount_of, read_mounts
from leasecron_sync.errors import StoreRejected, StoreUnsupported

MAX_PATH = 504
"""Longest path that SQLite opens, in bytes and without symbolic links."""


def given_path(path: Union[str, bytes, os.PathLike[str], os.PathLike[bytes]]) -> tuple[str, str]:
    """Return a path as it was given, and from the root.

    Raises:
        ValueError: It names no file that another process could open.
    """
    given = os.fsdecode(path)
    if "://" in given:
        message = (
            "SQLiteLease takes a path, not a URL: write SQLiteLease('jobs.db') or "
            "Scheduler('sqlite:///jobs.db')"
        )
        raise ValueError(message)
    if not given or given == ":memory:" or "\0" in given:
        message = (
            f"SQLiteLease needs the path of a file, not {given!r}: for tests within one process "
            "use MemoryLease()"
        )
        raise ValueError(message)
    try:
        return given, os.path.abspath(given)  # noqa: PTH100 - resolve() follows links only once
    except OSError as error:
        message = (
            f"SQLiteLease({given!r}) is relative to a working directory that does not exist any "
            "more: give an absolute path"
        )
        raise ValueError(message) from error


def check_place(path: str) -> tuple[str, ...]:
    """Look at a path from outside.

    Args:
        path: Absolute.

    Returns:
        What an operator should know, one line each.

    Raises:
        StoreUnsupported: There can be no store.
    """
    # SQLite keeps its two other files beside the one that symbolic links lead to.
    real = os.path.realpath(path)
    found = check_file(path)
    device = _folder_device(Path(real).parent) if found is None else found.st_dev
    if len(os.fsencode(real)) > MAX_PATH:
        message = (
            f"the path of the SQLite file {real!r} is {len(os.fsencode(real))} bytes long, SQLite "
            f"opens at most {MAX_PATH}: choose a shorter one"
        )
        raise StoreUnsupported(message)
    warnings = _check_mount(real, device)
    if found is not None and found.st_nlink > 1:
        warnings.append(
            f"the SQLite file {path!r} has {found.st_nlink} names (hard links), and each name a "
            "log of its own: an instance that opens it by another name loses or doubles runs; "
            "remove the other names"
        )
    return tuple(warnings)


def check_file(path: str) -> Optional[os.stat_result]:
    """Refuse what is there and no file; SQLite would read a pipe, or write to a device.

    Returns:
        What the file system says of the file; None when there is none.

    Raises:
        StoreUnsupported: It is something else.
    """
    try:
        found = Path(path).stat()
    except OSError:
        return None
    if stat.S_ISDIR(found.st_mode):
        message = f"the SQLite file {path!r} is a folder: name a file in it"
        raise StoreUnsupported(message)
    if not stat.S_ISREG(found.st_mode):
        message = f"the SQLite file {path!r} is a pipe, a socket or a device: name a file"
        raise StoreUnsupported(message)
    return found


def check_visible(path: str) -> None:
    """Refuse a file of which nobody can say here whether it is there.

    Raises:
        StoreRejected: A folder on the way does not let this user through.
    """
    try:
        Path(path).stat()
    except PermissionError as error:
        reason = str(error.strerror).lower()
        message = f"SQLite file {path!r}: {reason}: {needed_rights()}"
        raise StoreRejected(message) from error
    except OSError:
        return  # it is not there


def _folder_device(folder: Path) -> Optional[int]:
    """Return the device number of a folder; None when nobody may look, which opening will tell."""
    try:
        found = folder.stat()
    except (FileNotFoundError, NotADirectoryError):
        found = None
    except OSError:
        return None
    if found is None or not stat.S_ISDIR(found.st_mode):
        message = f"the folder {str(folder)!r} for the SQLite file does not exist: make it"
        raise StoreUnsupported(message)
    return found.st_dev


def _check_mount(real: str, device: Optional[int]) -> list[str]:
    mount = mount_of(read_mounts(), real, device)
    if mount is None:
        return []
    if mount.is_network:
        message = (
            f"the SQLite file {real!r} lies on a network file system ({mount.kind}, mounted on "
            f"{mount.point!r}), where hosts do not see each other's locks and two instances could "
            "win one run: put it on a disk of this host"
        )
        raise StoreUnsupported(message)
    if mount.point == real:
        message = (
            f"the SQLite file {real!r} is mounted by itself, and SQLite's two files beside it are "
            "not, so that others with the file would win the same runs: mount its folder"
        )
        raise StoreUnsupported(message)
    if mount.is_shared:
        warning = (
            f"the SQLite file {real!r} lies in a folder that another system shares ({mount.kind}, "
            f"mounted on {mount.point!r}): an instance over there does not see the locks of one "
            "over here, so run all of them on one side"
        )
        return [warning]
    return []
