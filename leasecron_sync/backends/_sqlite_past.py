"""What an instance knows of a file from before, and what it logs when the file does not know it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from typing import NamedTuple, Optional

from leasecron_sync.backends._sqlite_errors import Unusable
from leasecron_sync.backends._sqlite_files import Identity
from leasecron_sync.clock import SystemClock

_clock = SystemClock()

_logger = logging.getLogger("leasecron_sync.backends.sqlite")

BRIDGED_STEP_MS = 10_000
"""The host's clock may step back this far before the newest time in the file is given up."""

STEP_WARNING_MS = 60_000
"""A clock that is behind the file is warned of this often at most."""


class Seen(NamedTuple):
    """How often the store had been written to when a connection last looked.

    Attributes:
        age: Counts the losses that were told before.
        writes: The number.
    """

    age: int
    writes: int


class Past:
    """Tells each loss of the file's contents once, whichever connection meets it.

    Args:
        path: The file, for the log.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._age = 0
        self._store_id = ""
        self._quiet_until_ms = 0
        self.identity: Optional[Identity] = None

    def forget_threads(self) -> None:
        """Get over a lock of a thread that does not exist in a forked child."""
        self._lock = threading.Lock()

    def note_opened(self, found: Optional[Identity]) -> None:
        """Compare the file that was opened with the one before."""
        with self._lock:
            if self.identity not in (None, found):
                self._tell_replaced()
            self.identity = found

    def note_gone(self, former: Optional[Identity]) -> None:
        """Note that a file is not at its place any more, unless its successor was opened before."""
        with self._lock:
            if self.identity == former:
                self._tell_replaced()
                self.identity = None

    def note_log_gone(self) -> None:
        """Note that the log is gone while the file is the same."""
        with self._lock:
            self._tell("the log of the SQLite file is gone, what was claimed last may run again")
            self._store_id = ""

    def look(self, meta: Mapping[str, str], seen: Seen, now_ms: int) -> tuple[int, int]:
        """Read what the file says of its past, and tell what was lost.

        Args:
            meta: What it says.
            seen: What the connection saw last; another one may have seen more by now.
            now_ms: The host's clock.

        Returns:
            The store's clock: the host's, without its small steps back. And how often it was
            written to.

        Raises:
            Unusable: It says nothing of the kind.
        """
        try:
            stored_ms, writes = int(meta["clock_ms"]), int(meta["writes"])
        except (KeyError, ValueError) as error:
            message = f"the SQLite file {self._path!r} is damaged: it has no clock"
            raise Unusable(message) from error
        self._note_store(meta.get("store_id", ""), writes, seen)
        if now_ms >= stored_ms:
            return now_ms, writes
        if stored_ms - now_ms <= BRIDGED_STEP_MS:
            return stored_ms, writes
        self._note_step_back(stored_ms - now_ms, _clock.steady_ms())
        return now_ms, writes

    def _note_store(self, store_id: str, writes: int, seen: Seen) -> None:
        """Compare what a transaction reads with what was there before."""
        if store_id == self._store_id and (seen.age != self._age or writes >= seen.writes):
            return  # as ever
        with self._lock:
            before, self._store_id = self._store_id, store_id
            if before and before != store_id:
                self._tell("the SQLite file holds another store, what was claimed may run again")
            elif seen.age == self._age and writes < seen.writes:
                self._tell(
                    "the SQLite file is an earlier one, what was claimed since may run again"
                )

    def _note_step_back(self, step_ms: int, steady_ms: int) -> None:
        """Warn of a clock that stepped back, now and then.

        Until somebody writes, each look at the file finds the step again, and instances whose
        clocks differ find it at each turn.
        """
        if steady_ms < self._quiet_until_ms:
            return
        self._quiet_until_ms = steady_ms + STEP_WARNING_MS
        _logger.warning(
            "the clock stepped back behind the newest time in the file path=%r step_ms=%d",
            self._path,
            step_ms,
        )

    def seen(self, writes: int) -> Seen:
        """Return what a connection is to remember."""
        return Seen(self._age, writes)

    def _tell_replaced(self) -> None:
        self._tell("the SQLite file was deleted or replaced, what was claimed in it may run again")
        self._store_id = ""

    def _tell(self, sentence: str) -> None:
        self._age += 1
        _logger.error("%s path=%r", sentence, self._path)
