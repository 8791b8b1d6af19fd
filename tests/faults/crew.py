"""Schedulers of this process on one store, for tests that disturb the store.

What they do is recorded and judged in the end. The outcome of each fault is the same: while the
store is away nothing is doubled, and when it is back nothing is lost.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path
from typing import Optional

from leasecron_sync import LeaseRun, Scheduler, every
from leasecron_sync.backends.base import BackendSettings, LeaseBackend
from leasecron_sync.model import RunKey, RunRecord, RunState
from leasecron_sync.testing import (
    Entry,
    HistoryLog,
    RecordingLease,
    Report,
    Terms,
    check,
    executing,
    read_history,
)
from tests.services.process import eventually

LEASE_MS = 1_500
LIMIT_S = 20.0
EVERY_S = {"quick": 1, "beside": 1, "long": 2}
"""The jobs, and how often each is due."""


class Crew:
    """Several instances.

    Args:
        folder: For the history.
        connect: Makes a backend that nothing stands in front of, to read the records by.
    """

    def __init__(self, folder: Path, connect: Callable[[], LeaseBackend]) -> None:
        self._folder = folder
        self._connect = connect
        self._entries: list[Entry] = []
        self._log = HistoryLog(self._entries.append)
        self._schedulers: list[Scheduler[RecordingLease]] = []
        self._from_ms = 0

    def start(self, backends: Sequence[LeaseBackend]) -> None:
        """Start an instance on each backend, and return when all have registered and run.

        May be called again after ``stop``: what was due meanwhile is owed all the same.
        """
        before = self._registered()
        for backend in backends:
            scheduler = Scheduler(RecordingLease(backend, self._log), lease_ms=LEASE_MS)
            self._add_jobs(scheduler)
            self._log.listen(scheduler)
            self._schedulers.append(scheduler)
            scheduler.start()
        assert eventually(lambda: len(self._registered() - before) == len(backends), LIMIT_S)
        self._from_ms = self._from_ms or now_ms()
        self.wait_finished()

    def _registered(self) -> set[str]:
        return {entry.instance for entry in self.entries("registered")}

    def _add_jobs(self, scheduler: Scheduler[RecordingLease]) -> None:
        def quick(run: LeaseRun) -> None:
            with executing(self._log, run):
                run.wait(0.02)

        def beside(run: LeaseRun) -> None:
            with executing(self._log, run):
                run.wait(0.4)

        def long(run: LeaseRun) -> None:
            with executing(self._log, run):
                run.wait(1.2)

        # An attempt that an outage ended counts; none of them is to be used up.
        for handler in (quick, beside, long):
            name = handler.__name__
            scheduler.add_job(
                handler,
                every(seconds=EVERY_S[name]),
                name=name,
                overlap="allow" if handler is beside else "skip",
                max_attempts=50,
                retry_delay_ms=100,
            )

    # -- what they did so far ------------------------------------------------------------------

    def entries(self, what: str) -> list[Entry]:
        """Return the entries of one kind so far."""
        return [entry for entry in list(self._entries) if entry.what == what]

    def told(self, event: str, since_ms: int = 0) -> list[Entry]:
        """Return the events of one name that were told since an instant."""
        return [
            entry
            for entry in self.entries("told")
            if entry.event == event and entry.at_ms >= since_ms
        ]

    def wait_finished(self, count: int = 3) -> None:
        """Wait until so many runs more have finished."""
        before = len(self.told("run_finished"))
        assert eventually(lambda: len(self.told("run_finished")) >= before + count, LIMIT_S)

    def wait_told(self, event: str, instances: int, since_ms: int) -> None:
        """Wait until so many instances have told an event."""
        assert eventually(
            lambda: len({entry.instance for entry in self.told(event, since_ms)}) >= instances,
            LIMIT_S,
        ), f"{event}: {self.told(event, since_ms)}"

    def wait_leases_over(self, besides_ms: int = 0) -> None:
        """Wait until all leases of now would have lapsed, and so long besides."""
        until_ms = now_ms() + LEASE_MS + 200 + besides_ms
        assert eventually(lambda: now_ms() >= until_ms, LIMIT_S + besides_ms / 1000)

    def wait_at_work(self, instance: Optional[int] = None) -> None:
        """Wait until an instance, or any, has just begun with a run that takes its time."""
        asked = self._schedulers if instance is None else [self._schedulers[instance]]

        def runs() -> set[tuple[str, datetime]]:
            found = [run for scheduler in asked for run in scheduler.status().runs]
            return {(run.job, run.scheduled_time) for run in found if run.job != "quick"}

        before = runs()
        assert eventually(lambda: runs() - before, LIMIT_S)

    def empty(self, empty: Callable[[], object]) -> None:
        """Empty the store. What was due before everybody has registered anew is owed no more."""
        before = len(self.entries("registered"))
        # Twice: calls that were under way belong to the one or to the other.
        self._log.emptied()
        empty()
        self._log.emptied()

        def registered() -> set[str]:
            return {entry.instance for entry in self.entries("registered")[before:]}

        assert eventually(lambda: len(registered()) == len(self._schedulers), LIMIT_S)
        self._from_ms = now_ms()

    # -- the end -------------------------------------------------------------------------------

    def records(self) -> list[RunRecord]:
        """Return the store's records."""
        backend = self._connect()
        backend.open(BackendSettings("default", "reader", 5_000))
        try:
            return list(backend.history(None, 10_000))
        finally:
            backend.close()

    def owed(self, until_ms: int) -> list[RunKey]:
        """Return the runs that were due from the start on until an instant."""
        return [
            RunKey(job, scheduled_ms)
            for job, seconds in EVERY_S.items()
            for scheduled_ms in range(
                -(-self._from_ms // (seconds * 1_000)) * seconds * 1_000,
                until_ms + 1,
                seconds * 1_000,
            )
        ]

    def stop(self) -> None:
        """Stop all; may be called again."""
        self.stop_at_once(10.0)

    def stop_at_once(self, timeout: float) -> float:
        """Stop all at the same time; return how long that took."""
        schedulers, self._schedulers = self._schedulers, []
        began = time.monotonic()
        with ThreadPoolExecutor(max(1, len(schedulers))) as pool:
            for one in [pool.submit(scheduler.stop, timeout=timeout) for scheduler in schedulers]:
                one.result()
        return time.monotonic() - began

    def dead_threads(self) -> list[str]:
        """Return the threads of schedulers that have ended although nobody stopped them."""
        return [
            name
            for scheduler in self._schedulers
            for name, alive in scheduler.status().threads.items()
            if not alive
        ]

    def judged(self) -> Report:
        """Wait until what was due so far is settled, stop, and judge; return the report."""
        until_ms = now_ms()
        owed = self.owed(until_ms)

        def missing() -> list[RunKey]:
            settled = {record.key for record in self.records() if record.state.settled}
            return [key for key in owed if key not in settled]

        complete = eventually(lambda: missing() == [], LIMIT_S)
        assert self.dead_threads() == []
        self.stop()
        assert complete, missing()
        records = self.records()
        self._log.records(records)
        path = self._folder / "history.jsonl"
        path.write_text("".join(f"{entry.to_line()}\n" for entry in self._entries))
        report = check(read_history(path).entries, terms=Terms(owed=tuple(owed)))
        assert [fault.message for fault in report.faults] == []
        assert report.totals.undecided == 0
        assert report.totals.executions > 0
        # Nothing was given up: what did not run was skipped for another run of its job.
        assert {record.reason for record in records if record.state is RunState.SKIPPED} <= {
            "overlap"
        }
        assert [record for record in records if record.state is RunState.FAILED] == []
        return report


def now_ms() -> int:
    """Return the clock of the history."""
    return time.time_ns() // 1_000_000
