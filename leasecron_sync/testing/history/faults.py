"""What can be wrong with a history."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from leasecron_sync.testing.history.entry import Entry

GRANTED_TWICE: Final = "granted twice"
WON_TWICE: Final = "won twice"
LIVE_TWICE: Final = "two live leases of a run"
JOB_LIVE_TWICE: Final = "two live leases of a job"
STARTED_AFTER_FINISH: Final = "started after its finish"

DOUBLED: Final = frozenset(
    {GRANTED_TWICE, WON_TWICE, LIVE_TWICE, JOB_LIVE_TWICE, STARTED_AFTER_FINISH}
)
"""Kinds that are a doubled run: two grants of one attempt (of a run, on a claim backend), two live
leases of one run, or of one job where overlap is forbidden, or a start after an accepted finish."""

GRANTED_BESIDE: Final = "granted beside an unsettled run"
GRANTED_EARLY: Final = "granted early"
GRANTED_SETTLED: Final = "granted although settled"
GRANTED_LONGER: Final = "granted again for longer"
ATTEMPT_LEFT_OUT: Final = "attempt left out"
TOKEN_NOT_RISING: Final = "token does not rise"  # noqa: S105 - no password
TWO_IN_A_BATCH: Final = "two runs of a job in one batch"
RENEWED_AFTER_END: Final = "renewed after its end"
RENEWED_UNKNOWN: Final = "renewed without a grant"
SETTLED_BY_OLD: Final = "settled by a fenced holder"
SETTLED_TWICE: Final = "settled twice"
SETTLED_LIVE: Final = "settled under a live lease"
SETTLED_UNKNOWN: Final = "settled without a grant"
STARTED_UNKNOWN: Final = "started without a grant"
STARTED_WITHOUT_LEASE: Final = "started without a live lease"
STARTED_EARLY: Final = "started early"
STARTED_TWICE: Final = "started twice"
FINISHED_UNSTARTED: Final = "finished without a start"

LOST: Final = "lost"
LEFT_UNSETTLED: Final = "left unsettled"
NOT_TOLD: Final = "won and not told of"

ABSENCES: Final = frozenset({LOST, LEFT_UNSETTLED, NOT_TOLD})
"""Kinds that say what is not there; nothing can be left out of a history to show them."""

FAULT_KINDS: Final = (
    GRANTED_TWICE,
    WON_TWICE,
    LIVE_TWICE,
    JOB_LIVE_TWICE,
    STARTED_AFTER_FINISH,
    LOST,
    LEFT_UNSETTLED,
    NOT_TOLD,
    GRANTED_BESIDE,
    GRANTED_EARLY,
    GRANTED_SETTLED,
    GRANTED_LONGER,
    ATTEMPT_LEFT_OUT,
    TOKEN_NOT_RISING,
    TWO_IN_A_BATCH,
    RENEWED_AFTER_END,
    RENEWED_UNKNOWN,
    SETTLED_BY_OLD,
    SETTLED_TWICE,
    SETTLED_LIVE,
    SETTLED_UNKNOWN,
    STARTED_UNKNOWN,
    STARTED_WITHOUT_LEASE,
    STARTED_EARLY,
    STARTED_TWICE,
    FINISHED_UNSTARTED,
)
"""All kinds, the ones that matter most first."""


@dataclass(frozen=True)
class Fault:
    """Something that no correct history can hold.

    Attributes:
        kind: One of ``FAULT_KINDS``.
        message: What is wrong, for people.
        entries: The entries that show it; the last one is where it was found. None where
            something is missing.
        job: The job.
        scheduled_ms: The run's scheduled time.
    """

    kind: str
    message: str
    entries: tuple[Entry, ...]
    job: str
    scheduled_ms: int

    @property
    def doubled(self) -> bool:
        """True when it is one of those that make a doubled run."""
        return self.kind in DOUBLED
