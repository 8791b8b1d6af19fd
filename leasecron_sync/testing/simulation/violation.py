"""What a history may show that must not be."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from leasecron_sync.testing.history.entry import Entry
from leasecron_sync.testing.history.faults import FAULT_KINDS, Fault

TRUST_TOO_LONG: Final = "trust outlasts the lease"
OWED_TOO_MUCH: Final = "made up for what was not owed"
OWED_DATE: Final = "owed since the wrong date"
WRONG_DUE: Final = "claimed with a wrong due time"
SKIPPED_LATE: Final = "skipped although late"
DEFERRED_ON_TIME: Final = "deferred although on time"
TOO_MANY_ATTEMPTS: Final = "more attempts than allowed"
TOO_FEW_ATTEMPTS: Final = "given up before its attempts were used up"
TAKEN_OVER_LATE: Final = "taken over after the window"
RETRIED_EARLY: Final = "retried before its wait was over"
ABANDONED_EARLY: Final = "abandoned within the window"
LEASE_TOO_LONG: Final = "a lease that is too long was not shortened"
CLAIMED_BACK: Final = "claimed again by who handed it over"
YOUNGER_FIRST: Final = "a younger run went first"
ASKED_AGAIN: Final = "asked again for a settled run"
BESIDE_OWN: Final = "started beside its own old handler"
STARTS_STOPPING: Final = "started while stopping"
CLAIMS_BLIND: Final = "claims before it looks back after an outage"
TAKEOVER_SOON: Final = "takes over right after an outage"
LOOP_SPINS: Final = "a loop spins"
STEP_RAISED: Final = "a step raised"
UNEXPECTED_ERROR: Final = "unexpected error in the log"
CHILD_CALLS: Final = "a forked child uses its parent's store"
CHILD_GOES_ON: Final = "a forked child goes on with its parent's run"
NOT_RUNNING: Final = "no scheduler that runs"
STILL_DOWN: Final = "still calls the store down"
STILL_RUNNING: Final = "still has a run"
STILL_WANTED: Final = "still means to claim a run"
KEEPS_TOO_MUCH: Final = "keeps more than it needs"
TOLD_TWICE: Final = "told twice"
NOT_REPORTED: Final = "missed and not told of"
LOSS_NOT_LOGGED: Final = "lost data and not logged"
ATTEMPT_LOST: Final = "attempt lost for nothing"
RECORD_DIFFERS: Final = "record differs"
STUCK: Final = "a lock is held over a call"

KINDS: Final = (
    *FAULT_KINDS,
    TRUST_TOO_LONG,
    OWED_TOO_MUCH,
    OWED_DATE,
    WRONG_DUE,
    SKIPPED_LATE,
    DEFERRED_ON_TIME,
    TOO_MANY_ATTEMPTS,
    TOO_FEW_ATTEMPTS,
    TAKEN_OVER_LATE,
    RETRIED_EARLY,
    ABANDONED_EARLY,
    LEASE_TOO_LONG,
    CLAIMED_BACK,
    YOUNGER_FIRST,
    ASKED_AGAIN,
    BESIDE_OWN,
    STARTS_STOPPING,
    CLAIMS_BLIND,
    TAKEOVER_SOON,
    LOOP_SPINS,
    STEP_RAISED,
    UNEXPECTED_ERROR,
    CHILD_CALLS,
    CHILD_GOES_ON,
    NOT_RUNNING,
    STILL_DOWN,
    STILL_RUNNING,
    STILL_WANTED,
    KEEPS_TOO_MUCH,
    TOLD_TWICE,
    NOT_REPORTED,
    LOSS_NOT_LOGGED,
    ATTEMPT_LOST,
    RECORD_DIFFERS,
    STUCK,
)
"""All kinds of violations: those of the checker of histories, and those of the simulation."""


class Violation(Exception):
    """Something that must not be.

    Args:
        kind: One of ``KINDS``.
        text: What was wrong.
        entries: Entries of the history that show it.

    Attributes:
        kind: See above.
        entries: See above.
    """

    def __init__(self, kind: str, text: str, entries: Sequence[Entry] = ()) -> None:
        super().__init__(f"{kind}: {text}")
        self.kind = kind
        self.entries = tuple(entries)


def violation_of(fault: Fault) -> Violation:
    """Return a fault of a history as a violation."""
    return Violation(fault.kind, fault.message, fault.entries)
