"""Keeps pika's log lines about the connections of this library out of the application's log."""

from __future__ import annotations

import logging
import threading
from collections.abc import Generator
from contextlib import contextmanager

_calls = threading.local()


def filter_pika() -> None:
    """Make ``quiet`` work; called when pika is imported."""
    for name in list(logging.Logger.manager.loggerDict):
        if name == "pika" or name.startswith("pika."):
            logging.getLogger(name).addFilter(_is_wanted)  # nothing if it is there


@contextmanager
def quiet() -> Generator[None, None, None]:
    """Drop what pika logs in this thread meanwhile.

    What happens to a connection is told by this library, once and in its own words. The
    application's own connections are not meant. Whoever has given the logger ``pika`` a level
    wants to see all.
    """
    before = getattr(_calls, "quiet", False)
    _calls.quiet = True
    try:
        yield
    finally:
        _calls.quiet = before


def _is_wanted(_record: logging.LogRecord) -> bool:
    return not getattr(_calls, "quiet", False) or logging.getLogger("pika").level != logging.NOTSET
