"""A log of what every instance decided and did, and a checker that judges it.

Record, with every instance of an application or a test::

    log = HistoryLog("history.jsonl")
    backend = RecordingLease(SQLiteLease("jobs.db"), log)
    scheduler = Scheduler(backend, around_run=recording(log))
    log.listen(scheduler)

Judge, afterwards or entry by entry::

    history = read_history("history.jsonl")
    report = check(history.entries)
    assert not report.faults
"""

from __future__ import annotations

from leasecron_sync.testing.history.checker import Checker
from leasecron_sync.testing.history.entry import Entry, History, HistoryError, read_history
from leasecron_sync.testing.history.faults import FAULT_KINDS, Fault
from leasecron_sync.testing.history.log import HistoryLog, executing, recording
from leasecron_sync.testing.history.recorders import RecordingClaim, RecordingLease
from leasecron_sync.testing.history.report import (
    AttemptRow,
    Report,
    RunRow,
    Terms,
    Totals,
    check,
)
from leasecron_sync.testing.history.shorten import shorten

__all__ = [
    "FAULT_KINDS",
    "AttemptRow",
    "Checker",
    "Entry",
    "Fault",
    "History",
    "HistoryError",
    "HistoryLog",
    "RecordingClaim",
    "RecordingLease",
    "Report",
    "RunRow",
    "Terms",
    "Totals",
    "check",
    "executing",
    "read_history",
    "recording",
    "shorten",
]
