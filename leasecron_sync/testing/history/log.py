"""The log that instances write while they work, and what records handlers and events."""
# It knows how the worker says that a handler was not called.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import itertools
import os
import platform
import threading
from collections.abc import Iterable
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Any, Callable, NamedTuple, Optional, Union, cast

from leasecron_sync.clock import Clock, SystemClock
from leasecron_sync.engine.worker import (
    _TooLate,
)
from leasecron_sync.errors import RunInterrupt
from leasecron_sync.events import EVENT_NAMES, Event, EventName
from leasecron_sync.model import RunRecord
from leasecron_sync.run import LeaseRun, Run
from leasecron_sync.scheduler import Scheduler
from leasecron_sync.testing.history.entry import (
    AROUND,
    EMPTIED,
    ENDED,
    NOT_STARTED,
    READ,
    RECORD,
    STARTED,
    TOLD,
    Entry,
    PathLike,
)

Sink = Callable[[Entry], object]
Recording = Callable[[Run], AbstractContextManager[object]]


class Moment(NamedTuple):
    """A reading of both clocks."""

    now_ms: int
    steady_ms: int


class HistoryLog:
    """Writes entries of a history, from any thread and any process.

    Each entry is one line, appended by one call of the operating system, so that several threads
    and processes may write into one file, and a process that is killed leaves at most one line
    that ends in its middle. After a fork, parent and child both go on. A log that cannot be written
    raises ``OSError`` at whoever writes; a backend that records then counts as one that did not
    answer, so nothing is done that is not recorded.

    The clock is the one by which leases are judged. The stores of this version that can be recorded
    are on this host, or in this process, and judge by its wall clock, which is the default. The
    host's steady clock is written beside it: it says in which order things happened, which a wall
    clock that is set does not.

    Args:
        target: A file to append to, or what is called with each entry.
        clock: The store's clock, for tests that move it by hand; this host's when left out.
        exact: True for recorders that sit on the store itself, so that calls take effect one after
            the other, each at one instant of the clock, and every one of them is seen. Nothing is
            written then before a call.

    Raises:
        OSError: The file cannot be opened.
    """

    def __init__(
        self,
        target: Union[PathLike, Sink],
        *,
        clock: Optional[Clock] = None,
        exact: bool = False,
    ) -> None:
        self._clock: Clock = SystemClock() if clock is None else clock
        self._sink: Optional[Sink] = None
        self._file: Optional[int] = None
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._target = repr(target)
        self._calls = itertools.count(1)
        self.exact = exact
        if callable(target):
            self._sink = target
        else:
            self._file = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def __repr__(self) -> str:
        """Show where the entries go."""
        return f"HistoryLog({self._target})"

    def close(self) -> None:
        """Close the file; what is written afterwards raises ``ValueError``."""
        file, self._file = self._file, None
        self._sink = None
        if file is not None:
            os.close(file)

    def write(self, entry: Entry) -> None:
        """Write one entry.

        Args:
            entry: The entry.

        Raises:
            OSError: The file cannot be written.
            ValueError: The log is closed.
        """
        if self._file is not None:
            left = entry.to_line().encode("ascii") + b"\n"
            while left:  # more than one round only where the disk is full, which raises
                left = left[os.write(self._file, left) :]
            return
        if self._sink is None:
            message = f"{self!r} is closed"
            raise ValueError(message)
        if os.getpid() != self._pid:
            # Another thread of the parent may have held it when this process was forked.
            self._lock, self._pid = threading.Lock(), os.getpid()
        with self._lock:
            self._sink(entry)

    def new_call(self) -> int:
        """Return a number for a call, which no other process of this host uses in this log."""
        number = next(self._calls)
        return number if self.exact else (os.getpid() << 24) + number

    def moment(self) -> Moment:
        """Read the clocks, before a call is made."""
        return Moment(self._clock.now_ms(), self._clock.steady_ms())

    def note(self, what: str, sent: Optional[Moment] = None, **fields: Any) -> None:  # noqa: ANN401 - fields of ``Entry``
        """Write an entry about what happened now, or in the call that was made at ``sent``.

        Args:
            what: See ``Entry``.
            sent: What ``moment`` returned before the call.
            fields: Other fields of ``Entry``.
        """
        self.write(self.entry(what, sent, **fields))

    def entry(self, what: str, sent: Optional[Moment] = None, **fields: Any) -> Entry:  # noqa: ANN401 - fields of ``Entry``
        """Return the entry that ``note`` would write.

        Args:
            what: See ``Entry``.
            sent: What ``moment`` returned before the call.
            fields: Other fields of ``Entry``.
        """
        now_ms, steady_ms = self.moment()
        if self.exact:
            return Entry(what, now_ms, now_ms, **fields)
        if sent is None:
            return Entry(what, now_ms, now_ms, steady_ms=steady_ms, **fields)
        took_ms = steady_ms - sent.steady_ms
        # Where the wall clock was set meanwhile, the instant of the store may be on either side.
        return Entry(
            what,
            max(now_ms, sent.now_ms + took_ms),
            min(sent.now_ms, now_ms - took_ms),
            steady_ms=steady_ms,
            took_ms=took_ms,
            **fields,
        )

    # -- what tests write ----------------------------------------------------------------------

    def listen(self, scheduler: Scheduler[Any]) -> None:
        """Write every event that this scheduler tells from now on.

        Args:
            scheduler: Where listeners are registered.
        """
        for name in EVENT_NAMES:
            scheduler.on(cast("EventName", name), self.told)

    def told(self, event: Event) -> None:
        """Write an event; a listener.

        Args:
            event: The event.
        """
        scheduled, first = event.scheduled_time, event.first_time
        self.note(
            TOLD,
            instance=event.instance_id,
            event=event.name,
            job=event.job or "",
            scheduled_ms=None if scheduled is None else _instant_ms(scheduled.timestamp()),
            first_ms=None if first is None else _instant_ms(first.timestamp()),
            attempt=event.attempt or 0,
            token=event.token or 0,
            reason=event.reason,
            number=event.count,
        )

    def records(self, records: Iterable[RunRecord]) -> None:
        """Write the store's records, all of them, read when the history is over.

        With them it is certain which runs are settled.

        Args:
            records: What ``history`` of the backend or the scheduler returned.
        """
        number = 0
        for record in records:
            number += 1
            self.note(
                RECORD,
                job=record.key.job,
                scheduled_ms=record.key.scheduled_ms,
                state=record.state.value,
                token=record.token,
                attempt=record.attempt,
                reason=record.reason,
            )
        self.note(READ, number=number)

    def emptied(self) -> None:
        """Write that the store has lost its data, or was replaced by an empty one."""
        self.note(EMPTIED)


def recording(log: HistoryLog) -> Recording:
    """Return an ``around_run`` that writes when handlers start and how they end.

    The scheduler looks a last time whether the lease is trusted after ``around_run`` was entered. A
    handler that is not called because of that is written as ``not started``; until then it counts
    as started in doubt. Tests that want the very instant use ``executing`` inside the handler.

    Args:
        log: Where to write.
    """

    def around(run: Run) -> AbstractContextManager[object]:
        return _Written(log, run, "", AROUND)

    return around


def executing(log: HistoryLog, run: Run, *, instance: str = "") -> AbstractContextManager[object]:
    """Return a context manager for the body of a handler, which writes its start and its end.

    Args:
        log: Where to write.
        run: What the handler was given.
        instance: Id of the instance, where the test knows it.
    """
    return _Written(log, run, instance, "")


class _Written(AbstractContextManager[None]):
    """Writes the start of a handler and its end."""

    def __init__(self, log: HistoryLog, run: Run, instance: str, how: str) -> None:
        self._log = log
        self._how = how
        self._pid = os.getpid()
        self._fields: dict[str, Any] = {
            "instance": instance,
            "job": run.job,
            "scheduled_ms": _instant_ms(run.scheduled_time.timestamp()),
        }
        if isinstance(run, LeaseRun):
            self._fields.update(token=run.token, attempt=run.attempt)

    def __enter__(self) -> None:
        self._log.note(STARTED, verdict=self._how, **self._fields)

    def __exit__(
        self,
        kind: Optional[type[BaseException]],
        error: Optional[BaseException],
        trace: Optional[TracebackType],
    ) -> None:
        if os.getpid() != self._pid:
            return  # a child that the handler forked
        if error is None:
            self._log.note(ENDED, verdict="returned", **self._fields)
        else:
            reason = type(error).__name__
            self._log.note(ENDED, verdict=_ending(error), reason=reason, **self._fields)


def _ending(error: BaseException) -> str:
    if isinstance(error, _TooLate):
        return NOT_STARTED
    return "interrupted" if isinstance(error, RunInterrupt) else "raised"


def _instant_ms(seconds: float) -> int:
    return round(seconds * 1000)


def host_name() -> str:
    """Return a name of this host and of its start, on which the steady clock depends."""
    try:
        start = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        start = ""
    return start or platform.node()
