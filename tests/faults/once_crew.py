"""Instances of this process on a claim backend: start them, disturb their server, judge them."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Callable

from leasecron_sync import Run, Scheduler, every
from leasecron_sync.backends.base import ClaimBackend
from leasecron_sync.model import RunKey
from leasecron_sync.testing import (
    Entry,
    HistoryLog,
    RecordingClaim,
    check,
    executing,
    read_history,
)
from tests.faults.processes import LONG
from tests.services.process import eventually

INSTANCES = 4
JOBS = 10 if LONG else 3
WORK_S = 10.0 if LONG else 1.0
"""How long the instances are left in peace between two faults."""
LIMIT_S = 30.0


def now_ms() -> int:
    return time.time_ns() // 1_000_000


def pause(seconds: float) -> None:
    """Wait for a time that is not a condition's."""
    threading.Event().wait(seconds)


class OnceCrew:
    """Instances with jobs that fall due each second.

    Args:
        folder: For their history.
        connect: Makes a backend.
    """

    def __init__(self, folder: Path, connect: Callable[[], ClaimBackend]) -> None:
        self._path = folder / "history.jsonl"
        self._connect = connect
        self._entries: list[Entry] = []
        self._log = HistoryLog(self._entries.append)
        self._schedulers: list[Scheduler[RecordingClaim]] = []
        self._from_ms = 0

    def start(self) -> None:
        """Start the instances, and wait until they have done something."""
        for _ in range(INSTANCES):
            scheduler = Scheduler(RecordingClaim(self._connect(), self._log))
            for number in range(JOBS):
                scheduler.add_job(self._handler, every(seconds=1), name=f"job-{number}")
            self._log.listen(scheduler)
            self._schedulers.append(scheduler)
            scheduler.start()
        self._from_ms = now_ms() + 1_000
        self.work()

    def _handler(self, run: Run) -> None:
        with executing(self._log, run):
            run.wait(0.01)

    def work(self) -> None:
        """Leave them in peace until they have executed what fell due in a while."""
        until_ms = now_ms() + round(WORK_S * 1_000)
        assert eventually(lambda: self._newest_ms() > until_ms, LIMIT_S)

    def _newest_ms(self) -> int:
        return max((run.scheduled_ms for run in self.executed()), default=0)

    def executed(self) -> list[RunKey]:
        """Return what was executed."""
        return [_key_of(entry) for entry in list(self._entries) if entry.what == "started"]

    def told(self, event: str) -> list[Entry]:
        """Return who told of an event."""
        entries = list(self._entries)
        return [entry for entry in entries if (entry.what, entry.event) == ("told", event)]

    def wait_told(self, event: str) -> None:
        """Wait until every instance has told of an event."""

        def told() -> bool:
            return len({entry.instance for entry in self.told(event)}) == INSTANCES

        assert eventually(told, LIMIT_S), f"{event} was not told by all"

    def stop(self) -> None:
        """Stop them."""
        for scheduler in self._schedulers:
            scheduler.stop(timeout=5.0)
        self._schedulers.clear()

    def judged(self) -> list[RunKey]:
        """Stop, judge, and return what nobody executed."""
        until_ms = now_ms()
        self.work()
        assert all(all(one.status().threads.values()) for one in self._schedulers)
        self.stop()
        self._path.write_text("".join(f"{entry.to_line()}\n" for entry in self._entries))
        report = check(read_history(self._path).entries)
        assert [fault.message for fault in report.faults] == []
        executed = self.executed()
        assert len(executed) == len(set(executed))
        times = range(-(-self._from_ms // 1_000) * 1_000, until_ms + 1, 1_000)
        owed = {RunKey(f"job-{number}", at_ms) for at_ms in times for number in range(JOBS)}
        return sorted(owed - set(executed))


def _key_of(entry: Entry) -> RunKey:
    assert entry.scheduled_ms is not None
    return RunKey(entry.job, entry.scheduled_ms)
