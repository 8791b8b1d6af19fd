"""Values that travel between the engine, the protocol and the backends.

All instants and durations are whole milliseconds with the suffix ``_ms``. Instants of the store
never leave it: replies carry durations, except ``store_ms``, which exists to report the skew.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple, Optional

STORE_FORMAT = 1
"""Number of the record format; a release reads the next one a release before any writes it."""


class RunKey(NamedTuple):
    """Name of a run: a job and one of its scheduled times."""

    job: str
    scheduled_ms: int


class RunState(str, Enum):
    """State of a run in the store."""

    RUNNING = "running"
    WAITING = "waiting"
    FINISHED = "finished"
    FAILED = "failed"
    SKIPPED = "skipped"

    @property
    def settled(self) -> bool:
        """Tell whether the run has come to its end."""
        return self not in (RunState.RUNNING, RunState.WAITING)


class Verdict(str, Enum):
    """Answer to a claim."""

    GRANTED = "granted"
    EARLY = "early"
    TOO_OLD = "too_old"
    TAKEN = "taken"  # claim backends: another decision won
    UNKNOWN = "unknown"  # claim backends: it may have won, and nobody can find out
    HELD = "held"  # lease backends from here on: another holder's lease is live
    SETTLED = "settled"
    WAITING = "waiting"
    DEFERRED = "deferred"
    REJECTED = "rejected"  # this item could not be read or decided; the reason says why


class OnOverlap(str, Enum):
    """What a claim asks for when another run of the job is in progress."""

    ALLOW = "allow"
    SKIP = "skip"
    DEFER = "defer"


class Reason(str, Enum):
    """Why a run was settled without success, or not run at all."""

    OVERLAP = "overlap"
    RUNNER_LOST = "runner lost"
    ABANDONED = "abandoned"
    TIME_LIMIT = "time limit"
    LEASE_LOST = "lease lost"
    TOO_OLD = "too old"
    NO_FREE_SLOT = "no free slot"
    UNKNOWN_OUTCOME = "unknown outcome"
    STORE_DOWN = "store down"


# -- commands ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class JobStamp:
    """What an instance registers of a job: its name and the digest of its schedule."""

    job: str
    fingerprint: str


@dataclass(frozen=True)
class OnceClaim:
    """Claim of a run on a claim backend."""

    key: RunKey
    due_ms: int
    holder: str
    decision_id: str
    window_ms: int


@dataclass(frozen=True)
class LeaseClaim:
    """Claim of a run on a lease backend, with the options that its record will keep.

    Attributes:
        key: The run.
        due_ms: Scheduled time plus jitter; before it the store answers ``EARLY``.
        holder: Id of the claiming instance, kept for people; never compared.
        decision_id: Made once per decision and kept over repeats of the call.
        lease_ms: Length of the lease.
        max_attempts: Counted attempts after which a failed run stays failed.
        on_overlap: What to do when another run of the job is in progress.
        max_age_ms: Age after ``due_ms`` at which a run without a record is too old.
        takeover_ms: Time after its lapse in which a run may be taken over.
    """

    key: RunKey
    due_ms: int
    holder: str
    decision_id: str
    lease_ms: int
    max_attempts: int
    on_overlap: OnOverlap
    max_age_ms: int
    takeover_ms: int


class LeaseRef(NamedTuple):
    """A lease as its holder names it."""

    key: RunKey
    token: int


class Outcome(str, Enum):
    """How an attempt ended, as the holder reports it."""

    FINISHED = "finished"
    FAILED = "failed"
    HANDED_OVER = "handed_over"


@dataclass(frozen=True)
class Settlement:
    """Report of how an attempt ended.

    Attributes:
        outcome: Finished, failed or handed over.
        reason: Text that the record keeps; empty for a success.
        delay_ms: Time until a failed run may be claimed again.
    """

    outcome: Outcome
    reason: str = ""
    delay_ms: int = 0


class JobSpan(NamedTuple):
    """Scheduled times of a job from ``from_ms`` to ``to_ms``, both included."""

    job: str
    from_ms: int
    to_ms: int


# -- replies -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class JobStanding:
    """What the store knows of a registered job.

    Attributes:
        owed_from_ms: Scheduled times before this one are not owed.
        newest_ms: Newest scheduled time of the job, up to the store's clock, that has a record or
            was pruned; None if there is none.
        store_ms: The store's clock.
        store_id: Random id made with the store's schema.
    """

    owed_from_ms: int
    newest_ms: Optional[int]
    store_ms: int
    store_id: str


@dataclass(frozen=True)
class ClaimReply:
    """Answer of a claim backend.

    Attributes:
        verdict: The decision. ``DEFERRED`` is the answer for one that could not be asked for, while
            others of its batch were decided.
        wait_ms: When to ask again.
        reason: Why it was rejected.
    """

    verdict: Verdict
    wait_ms: int = 0
    reason: str = ""


@dataclass(frozen=True)
class Lease:
    """A granted lease.

    Attributes:
        ref: Run and fencing token.
        attempt: Number of this execution of the run, from 1.
        failures: Attempts so far that count against ``max_attempts``.
        left_ms: Time until the lease lapses, from the moment the store decided.
        takeover: True when the run was taken over from a holder whose lease had lapsed.
    """

    ref: LeaseRef
    attempt: int
    failures: int
    left_ms: int
    takeover: bool = False


@dataclass(frozen=True)
class LeaseReply:
    """Answer of a lease backend to one claim.

    Attributes:
        verdict: The decision.
        lease: Present when granted.
        wait_ms: When to ask again, or when the run that blocks this one may lapse.
        state: State of the run's record; None without one.
        reason: Why it is settled, where it is.
        fresh: True for the decision that brought the state about, and for its repeats.
        unsettled: True when the store knows an unsettled run of this job that this reply does not
            grant.
        abandoned: Other runs of the job that this claim settled as failed (abandoned).
    """

    verdict: Verdict
    lease: Optional[Lease] = None
    wait_ms: int = 0
    state: Optional[RunState] = None
    reason: str = ""
    fresh: bool = False
    unsettled: bool = False
    abandoned: tuple[RunKey, ...] = ()


class RenewReply(str, Enum):
    """Answer to the renewal of one lease."""

    RENEWED = "renewed"
    LOST = "lost"


@dataclass(frozen=True)
class SettleReply:
    """Answer to a settlement; not accepted means fenced: the token is no longer the record's."""

    accepted: bool
    state: Optional[RunState] = None
    wait_ms: int = 0


@dataclass(frozen=True)
class Pending:
    """What is claimable now, and when to look again.

    Attributes:
        keys: Runs that are claimable now; of a job without overlap at most one: the oldest lapsed
            run, else the oldest that waits and is due.
        next_in_ms: Time until the next one, when known.
        unsettled: True when the store knows an unsettled run other than those that the asking
            instance holds under a live lease.
    """

    keys: tuple[RunKey, ...]
    next_in_ms: Optional[int]
    unsettled: bool


@dataclass(frozen=True)
class Pruned:
    """Answer to pruning.

    Attributes:
        deleted: How many records were deleted.
        abandoned: Unsettled runs that were settled as failed (abandoned).
    """

    deleted: int
    abandoned: tuple[RunKey, ...] = ()


@dataclass(frozen=True)
class StoreInfo:
    """Answer to a probe."""

    version: str
    store_ms: Optional[int] = None
    store_id: str = ""
    warnings: tuple[str, ...] = ()


# -- records -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class RunRecord:
    """The store's record of a run.

    Attributes:
        key: The run.
        state: Its state.
        token: Fencing token of the newest lease; 0 when none was ever granted.
        attempt: Number of the newest execution; 0 when it never started.
        failures: Attempts that count against ``max_attempts``.
        hand_overs: How often it was handed over.
        holder: Instance of the newest lease.
        decision_id: Decision that brought the state about; empty when a settlement did.
        until_ms: When the lease lapses (running) or the wait is over (waiting).
        lease_ms: Options of the last claim, from here to ``takeover_ms``.
        max_attempts: See ``LeaseClaim``.
        overlap: True where other runs of the job may be in progress beside this one.
        takeover_ms: See ``LeaseClaim``.
        claimed_ms: When the newest lease was granted; None when it never was.
        settled_ms: When the state became a settled one.
        reason: Why it failed, waits or was skipped.
    """

    key: RunKey
    state: RunState
    token: int = 0
    attempt: int = 0
    failures: int = 0
    hand_overs: int = 0
    holder: str = ""
    decision_id: str = ""
    until_ms: int = 0
    lease_ms: int = 0
    max_attempts: int = 1
    overlap: bool = False
    takeover_ms: int = 0
    claimed_ms: Optional[int] = None
    settled_ms: Optional[int] = None
    reason: str = ""


@dataclass(frozen=True)
class FormerSchedule:
    """A definition of a job that another one displaced."""

    fingerprint: str
    owed_from_ms: int
    displaced_ms: int


@dataclass(frozen=True)
class JobRecord:
    """The store's record of a job.

    Attributes:
        job: Its name.
        last_token: Newest token granted for any of its runs.
        pruned_to_ms: Newest scheduled time that pruning deleted; None when it deleted none.
        owed_from_ms: See ``JobStanding``; None until the job was registered.
        fingerprint: Digest of the schedule that was registered last.
        former: Definitions displaced lately, newest first.
    """

    job: str
    last_token: int = 0
    pruned_to_ms: Optional[int] = None
    owed_from_ms: Optional[int] = None
    fingerprint: str = ""
    former: tuple[FormerSchedule, ...] = field(default=())


@dataclass(frozen=True)
class JobSummary:
    """A job as the command line lists it."""

    job: str
    owed_from_ms: Optional[int]
    newest: Optional[RunRecord]
    unsettled: int
