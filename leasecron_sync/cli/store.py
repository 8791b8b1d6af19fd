"""From a URL on the command line to a backend, and to a store that is only read."""

from __future__ import annotations

import argparse
import contextlib
import os
import secrets
import sqlite3
from collections.abc import Generator
from pathlib import Path
from typing import Final, NamedTuple, Optional
from urllib.parse import quote, unquote, urlsplit

from leasecron_sync.backends._sqlite_errors import translated
from leasecron_sync.backends._sqlite_place import check_visible
from leasecron_sync.backends.base import Backend, BackendSettings, LeaseBackend
from leasecron_sync.backends.memory import MemoryLease
from leasecron_sync.backends.sqlite import SQLiteLease
from leasecron_sync.backends.urls import connect
from leasecron_sync.cli.output import CommandError, UsageError
from leasecron_sync.errors import StoreRejected
from leasecron_sync.options import CALL_TIMEOUT_MS, check_name

VARIABLE: Final = "LEASECRON_SYNC_URL"

_MAX_FILE = 64 * 1024


def configure_url(parser: argparse.ArgumentParser) -> None:
    """Declare the argument that says where a store is."""
    parser.add_argument(
        "url",
        metavar="URL",
        nargs="?",
        help=f"the store, such as sqlite:///jobs.db; @FILE reads the URL from a file; {VARIABLE} "
        "is used when it is left out",
    )


def configure_store(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments that name a store."""
    configure_url(parser)
    parser.add_argument(
        "--namespace",
        metavar="NAME",
        default="default",
        help="namespace of the scheduler (default: default)",
    )


@contextlib.contextmanager
def opened_store(url: Optional[str], namespace: str) -> Generator[LeaseBackend, None, None]:
    """Open the store for reading.

    Args:
        url: As given on the command line.
        namespace: Likewise.

    Raises:
        UsageError: There is no URL, or it is none, or the namespace is none.
        CommandError: There is nothing that could be read.
        StoreError: The store did not answer.
    """
    settings = reader_settings(namespace)
    backend = _backend(url)
    backend.open(settings)
    try:
        yield backend
    finally:
        backend.close()


def reader_settings(namespace: str) -> BackendSettings:
    """Return what a backend is opened with by who only looks.

    Args:
        namespace: As given on the command line.

    Raises:
        UsageError: It is none.
    """
    try:
        check_name("--namespace", namespace)
    except ValueError as error:
        raise UsageError(str(error)) from error
    # No instance: it registers nothing and claims nothing.
    return BackendSettings(namespace, f"cli-{secrets.token_hex(4)}", CALL_TIMEOUT_MS)


def given_backend(given: Optional[str]) -> Backend:
    """Return the backend that the command line or the environment names; nothing is connected.

    Args:
        given: The URL as given on the command line.

    Raises:
        UsageError: There is no URL, or it is none.
        CommandError: The file with the URL cannot be read.
    """
    return _connected(_url(given))


class _Url(NamedTuple):
    """A URL, and where it was found, if it was not given."""

    text: str
    source: str


def _url(given: Optional[str]) -> _Url:
    text, source = (given, "") if given is not None else (os.environ.get(VARIABLE), VARIABLE)
    if not text:
        message = f"there is no URL: give one such as sqlite:///jobs.db, or set {VARIABLE}"
        raise UsageError(message)
    if text.startswith("@"):
        source = f"file {text[1:]!r}"
        text = _read(text[1:])
    if "://" not in text:
        message = f"{source}: " if source else ""
        message += (
            "a URL starts with a scheme: sqlite:///jobs.db for the file jobs.db in this folder"
        )
        raise UsageError(message)
    return _Url(text, source)


def _connected(url: _Url) -> Backend:
    try:
        return connect(url.text)
    except ValueError as error:
        message = f"{url.source}: {error}" if url.source else str(error)
        raise UsageError(message) from error


def _backend(given: Optional[str]) -> LeaseBackend:
    url = _url(given)
    backend = _connected(url)
    if not isinstance(backend, LeaseBackend):
        message = f"{type(backend).__name__} keeps no record of runs: there is nothing to show"
        raise CommandError(message)
    if isinstance(backend, MemoryLease):
        message = "a memory:// store lives inside one process: there is nothing to see from here"
        raise CommandError(message)
    if isinstance(backend, SQLiteLease):
        _check_file(unquote(urlsplit(url.text).path[1:], errors="surrogateescape"))
    return backend


def _read(path: str) -> str:
    try:
        with Path(path).open("rb") as file:
            text = file.read(_MAX_FILE).decode("utf-8").strip()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it holds no text"
        message = f"the file {path!r} with the URL cannot be read: {reason}"
        raise CommandError(message) from error
    if not text or len(text.splitlines()) != 1:
        message = f"the file {path!r} must hold one line, the URL"
        raise CommandError(message)
    return text


def _check_file(path: str) -> None:
    """Refuse a file that is missing or has no store, which opening it would make.

    Raises:
        CommandError: There is no such file, it cannot be read, or it holds something else.
    """
    shown_path = str(Path(path).absolute())
    try:
        check_visible(shown_path)
    except StoreRejected as error:
        raise CommandError(str(error)) from error
    if not Path(path).exists():
        message = (
            f"there is no SQLite file {shown_path!r}: no scheduler was started on it yet, or it is "
            "another one (sqlite:///x is relative to this folder, sqlite:////x is not)"
        )
        raise CommandError(message)
    if not Path(path).is_file():  # opening a pipe would wait for its other end
        message = f"{shown_path!r} is no file"
        raise CommandError(message)
    try:
        with contextlib.closing(
            sqlite3.connect(f"file:{quote(path)}?mode=ro", uri=True, timeout=CALL_TIMEOUT_MS / 1000)
        ) as connection:
            found = connection.execute(
                "SELECT 1 FROM sqlite_master WHERE name = 'leasecron_meta'"
            ).fetchall()
    except sqlite3.Error as error:
        message = f"the file cannot be read: {translated(shown_path, error)}"
        raise CommandError(message) from error
    if not found:
        message = f"the SQLite file {shown_path!r} holds no store of leasecron_sync"
        raise CommandError(message)
