"""For tests: of an application's jobs, and of backends.

``ManualScheduler`` and ``ManualClock`` run a scheduler's steps without threads and without waiting;
``MemoryClaim`` is a claim backend without a server (``leasecron_sync.MemoryLease`` is the lease
one); ``FaultyLease`` and ``FaultyClaim`` make a backend fail on demand. ``RecordingLease``,
``RecordingClaim`` and ``recording`` write what instances decided and did into a ``HistoryLog``,
which ``read_history`` reads back and ``check`` judges. The suites for authors of backends are in
``leasecron_sync.testing.conformance``, which needs pytest.
"""

from __future__ import annotations

from leasecron_sync.testing.clock import ManualClock
from leasecron_sync.testing.faults import FaultyClaim, FaultyLease
from leasecron_sync.testing.harness import ManualRun, ManualScheduler
from leasecron_sync.testing.history import (
    AttemptRow,
    Checker,
    Entry,
    Fault,
    History,
    HistoryError,
    HistoryLog,
    RecordingClaim,
    RecordingLease,
    Report,
    RunRow,
    Terms,
    Totals,
    check,
    executing,
    read_history,
    recording,
    shorten,
)
from leasecron_sync.testing.memory import MemoryClaim

__all__ = [
    "AttemptRow",
    "Checker",
    "Entry",
    "Fault",
    "FaultyClaim",
    "FaultyLease",
    "History",
    "HistoryError",
    "HistoryLog",
    "ManualClock",
    "ManualRun",
    "ManualScheduler",
    "MemoryClaim",
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
