"""The contracts that every backend keeps.

Rules for every method of every backend:

Atomicity: each call, or each item of a batched call, takes effect entirely or not at all, in one
step of the store. No transaction stays open between two calls.

Deadline: a call returns or raises within ``settings.call_timeout_ms``, on a silent peer too;
waiting for a connection counts. A suspect connection is thrown away.

Errors: only subclasses of ``StoreError`` leave a backend. ``StoreUnavailable``: surely not applied.
``OutcomeUnknown``: may have been applied. ``StoreRejected``: the store refused.
``StoreUnsupported``: it cannot do this at all.

Repeat: a claim asked again under its ``decision_id``, and a renewal or settlement asked again
under its token, gets the same verdict as the first time, with the time that is left now.

Secrets: ``repr``, log records and errors show a URL without user and password.

Threads: ``claim``, ``rehearse``, ``register``, ``pending``, ``states``, ``prune``, ``probe`` and
``tend`` come from one thread, ``renew`` from another, ``settle`` from any. ``renew`` never waits
for the others. A backend never calls back into the library.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Optional

from leasecron_sync.model import (
    ClaimReply,
    JobSpan,
    JobStamp,
    JobStanding,
    JobSummary,
    LeaseClaim,
    LeaseRef,
    LeaseReply,
    OnceClaim,
    Pending,
    Pruned,
    RenewReply,
    RunRecord,
    RunState,
    Settlement,
    SettleReply,
    StoreInfo,
)


@dataclass(frozen=True)
class BackendSettings:
    """What a scheduler tells its backend when it starts.

    Attributes:
        namespace: Keeps the applications of one store apart.
        instance_id: Random id of this start of the scheduler.
        call_timeout_ms: Longest time that a call may take.
    """

    namespace: str
    instance_id: str
    call_timeout_ms: int


class Backend(ABC):
    """What both families have in common."""

    name: ClassVar[str]
    """Short name, such as ``sqlite-lease``, for log lines and test ids."""

    family: ClassVar[str]
    """``"lease"`` or ``"claim"``."""

    @abstractmethod
    def open(self, settings: BackendSettings) -> None:
        """Make ready for calls; connect lazily or not at all.

        Errors: MissingDependency when the client package is not installed. An unreachable store
        is no error here.
        """

    @abstractmethod
    def probe(self) -> StoreInfo:
        """Ask the store who it is; also makes a connection before it is needed.

        Errors: StoreUnsupported when the store can't do what is asked of it, other
        ``StoreError`` when it can't be reached or refuses.
        """

    def tend(self) -> Optional[int]:
        """Look after the connection between calls; return ms until it wants to be called again."""
        return None

    @abstractmethod
    def close(self) -> None:
        """Give up connections. Bounded, idempotent, never raises."""

    @abstractmethod
    def discard(self) -> None:
        """Forget connections and locks without any input or output, in a forked child."""


class ClaimBackend(Backend):
    """A backend that picks one winner for each run, and can do no more.

    A claim can't be renewed, end early or be taken over, so nothing records that a winner
    stopped: a run whose winner crashed is lost.
    """

    family = "claim"

    max_window_ms: Optional[int] = None
    """Largest ``claim_window_ms`` that the mechanism can keep; None for any."""

    @abstractmethod
    def claim(self, claims: Sequence[OnceClaim]) -> Sequence[ClaimReply]:
        """Claim runs; replies in the order of the claims.

        Atomicity: for one key at most one ``decision_id`` is ever answered ``GRANTED`` while the
        claim is remembered, which is at least 2 x ``window_ms`` after the scheduled time.

        Repeat: the same ``decision_id`` is granted again; where the mechanism cannot tell,
        OutcomeUnknown.
        """


class LeaseBackend(Backend):
    """A backend that keeps a record per run: who executes it, under which token, until when."""

    family = "lease"

    @abstractmethod
    def register(self, jobs: Sequence[JobStamp]) -> Sequence[JobStanding]:
        """Store first sight and schedule digest of each job; tell since when its times are owed.

        Repeat: the same stamps again change nothing.
        """

    @abstractmethod
    def claim(self, claims: Sequence[LeaseClaim]) -> Sequence[LeaseReply]:
        """Decide each claim by the decision table; replies in the order of the claims.

        Atomicity: each claim by itself.

        Repeat: the same ``decision_id`` gets the same verdict while its lease is live.
        """

    def rehearse(self, claims: Sequence[LeaseClaim]) -> None:
        """Do what these claims would do, without any effect, so that the next ones are fast.

        Called 60 ms before a run falls due after a rest, and not waited for longer than that. A
        store in this process finds what it needs near the processor afterwards. A round trip
        would gain nothing, so by default nothing is done.

        Raises:
            StoreError: It was not possible; the claim will tell.
        """
        del claims

    @abstractmethod
    def renew(self, leases: Sequence[LeaseRef], lease_ms: int) -> Sequence[RenewReply]:
        """Extend each lease whose token is still its run's; one round trip for all."""

    @abstractmethod
    def settle(self, lease: LeaseRef, settlement: Settlement) -> SettleReply:
        """Report how an attempt ended.

        Repeat: accepted again as long as nobody claimed the run since.
        """

    @abstractmethod
    def pending(self, jobs: Sequence[str], limit: int) -> Pending:
        """Tell which runs of these jobs are claimable now, and when the next one is."""

    @abstractmethod
    def states(self, spans: Sequence[JobSpan]) -> Sequence[Mapping[int, RunState]]:
        """Return the known states by scheduled time in each span, in one round trip."""

    @abstractmethod
    def history(self, job: Optional[str], limit: int) -> Sequence[RunRecord]:
        """Return records, the newest scheduled time first; of all jobs when ``job`` is None."""

    @abstractmethod
    def jobs(self, limit: int) -> Sequence[JobSummary]:
        """Return the jobs that the store knows, by name."""

    @abstractmethod
    def prune(self, older_than_ms: int, limit: int) -> Pruned:
        """Delete settled runs whose scheduled time is at least ``older_than_ms`` ago, by its clock.

        Raises the job's ``pruned_to_ms`` to the newest scheduled time deleted, and remembers what
        was deleted in a few spans (``protocol.transition.with_pruned``). Settles first, as failed
        (abandoned), what lapsed or has waited longer than that.

        Returns:
            How many records were deleted, at most ``limit``, and which runs were abandoned.
        """
