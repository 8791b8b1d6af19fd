"""Backends that write down what another backend answered."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Callable, ClassVar, NamedTuple, Optional, TypeVar

from leasecron_sync.backends.base import Backend, BackendSettings, ClaimBackend, LeaseBackend
from leasecron_sync.errors import StoreRejected, StoreUnavailable, StoreUnsupported
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
    Reason,
    RenewReply,
    RunKey,
    RunRecord,
    RunState,
    Settlement,
    SettleReply,
    StoreInfo,
)
from leasecron_sync.testing.history.entry import (
    ABANDONED,
    ACCEPTED,
    CLAIMED,
    CLAIMING,
    INSTANCE,
    NO_EFFECT,
    PRUNED,
    REFUSED,
    REGISTERED,
    RENEWED,
    SETTLED,
    SETTLING,
    UNKNOWN,
)
from leasecron_sync.testing.history.log import HistoryLog, Moment, host_name

T = TypeVar("T")
Fields = dict[str, Any]


class _Call(NamedTuple):
    """A call under way."""

    number: int
    sent: Moment


class _Recording(Backend):
    """What both wrappers share."""

    def __init__(self, backend: Backend, log: HistoryLog) -> None:
        self._any = backend
        self._log = log
        self._instance = ""

    def __repr__(self) -> str:
        """Show the backend inside."""
        return f"{type(self).__name__}({self._any!r})"

    @property
    def inner(self) -> Backend:
        """The backend inside."""
        return self._any

    def open(self, settings: BackendSettings) -> None:
        """Open the backend inside, and write that an instance began."""
        self._any.open(settings)
        self._instance = settings.instance_id
        host = "" if self._log.exact else host_name()
        self._log.note(INSTANCE, instance=self._instance, verdict="began", host=host)

    def probe(self) -> StoreInfo:
        """Pass on."""
        return self._any.probe()

    def tend(self) -> Optional[int]:
        """Pass on."""
        return self._any.tend()

    def close(self) -> None:
        """Close the backend inside, and write that the instance ended."""
        self._any.close()
        if self._instance:
            self._log.note(INSTANCE, instance=self._instance, verdict="ended")
        self._instance = ""

    def discard(self) -> None:
        """Pass on; nothing is written, since this is a forked child."""
        self._instance = ""
        self._any.discard()

    def _begin(self, what: str, items: Sequence[Fields]) -> _Call:
        number = self._log.new_call()
        if not self._log.exact:
            for fields in items:
                self._log.note(what, call=number, **fields)
        return _Call(number, self._log.moment())

    def _failed(self, what: str, call: _Call, items: Sequence[Fields], verdict: str) -> None:
        for fields in items:
            self._log.note(what, call.sent, call=call.number, verdict=verdict, **fields)

    def _asked(self, what: str, call: _Call, items: Sequence[Fields], work: Callable[[], T]) -> T:
        """Make the call; without an answer, write for each item what that means."""
        try:
            return work()
        except (StoreUnavailable, StoreRejected, StoreUnsupported):
            self._failed(what, call, items, NO_EFFECT)
            raise
        except BaseException:  # OutcomeUnknown, and what no contract foresees
            self._failed(what, call, items, UNKNOWN)
            raise


class RecordingClaim(_Recording, ClaimBackend):
    """A claim backend that writes down every claim and its answer.

    Args:
        backend: The one that does the work.
        log: Where to write.
    """

    name: ClassVar[str] = "recording-claim"

    def __init__(self, backend: ClaimBackend, log: HistoryLog) -> None:
        super().__init__(backend, log)
        self._backend = backend
        self.max_window_ms = backend.max_window_ms

    def claim(self, claims: Sequence[OnceClaim]) -> Sequence[ClaimReply]:
        """Claim, and write one entry for each claim."""
        items = [_once_fields(item) for item in claims]
        call = self._begin(CLAIMING, items)
        replies = self._asked(CLAIMED, call, items, lambda: self._backend.claim(claims))
        for fields, reply in zip(items, replies):
            self._log.note(
                CLAIMED,
                call.sent,
                call=call.number,
                verdict=reply.verdict.value,
                wait_ms=reply.wait_ms,
                **fields,
            )
        self._failed(CLAIMED, call, items[len(replies) :], UNKNOWN)
        return replies


class RecordingLease(_Recording, LeaseBackend):
    """A lease backend that writes down what instances ask of it, and the answers.

    Args:
        backend: The one that does the work.
        log: Where to write.
    """

    name: ClassVar[str] = "recording-lease"

    def __init__(self, backend: LeaseBackend, log: HistoryLog) -> None:
        super().__init__(backend, log)
        self._backend = backend

    def register(self, jobs: Sequence[JobStamp]) -> Sequence[JobStanding]:
        """Register, and write one entry for each job."""
        sent = self._log.moment()
        standings = self._backend.register(jobs)
        for stamp, standing in zip(jobs, standings):
            self._log.note(
                REGISTERED,
                sent,
                instance=self._instance,
                job=stamp.job,
                owed_from_ms=standing.owed_from_ms,
                store_ms=standing.store_ms,
                store_id=standing.store_id,
            )
        return standings

    def claim(self, claims: Sequence[LeaseClaim]) -> Sequence[LeaseReply]:
        """Claim, and write one entry for each claim."""
        items = [_lease_fields(item) for item in claims]
        call = self._begin(CLAIMING, items)
        replies = self._asked(CLAIMED, call, items, lambda: self._backend.claim(claims))
        for fields, reply in zip(items, replies):
            self._claimed(call, fields, reply)
        self._failed(CLAIMED, call, items[len(replies) :], UNKNOWN)
        return replies

    def rehearse(self, claims: Sequence[LeaseClaim]) -> None:
        """Rehearse, and write nothing: it has no effect."""
        self._backend.rehearse(claims)

    def _claimed(self, call: _Call, fields: Fields, reply: LeaseReply) -> None:
        for key in reply.abandoned:  # settled in the same step, before the grant
            self._abandoned(call.sent, key, fields["decision_id"])
        lease = reply.lease
        granted: Fields = {}
        if lease is not None:
            granted = {
                "token": lease.ref.token,
                "attempt": lease.attempt,
                "left_ms": lease.left_ms,
                "takeover": lease.takeover,
            }
        self._log.note(
            CLAIMED,
            call.sent,
            call=call.number,
            verdict=reply.verdict.value,
            wait_ms=reply.wait_ms,
            state="" if reply.state is None else reply.state.value,
            reason=reply.reason,
            fresh=reply.fresh,
            **fields,
            **granted,
        )

    def _abandoned(self, sent: Moment, key: RunKey, decision_id: str) -> None:
        self._log.note(
            ABANDONED,
            sent,
            instance=self._instance,
            job=key.job,
            scheduled_ms=key.scheduled_ms,
            decision_id=decision_id,
            state=RunState.FAILED.value,
            reason=Reason.ABANDONED.value,
        )

    def renew(self, leases: Sequence[LeaseRef], lease_ms: int) -> Sequence[RenewReply]:
        """Renew, and write one entry for each lease."""
        items = [{**self._lease(ref), "lease_ms": lease_ms} for ref in leases]
        call = _Call(self._log.new_call(), self._log.moment())
        replies = self._asked(RENEWED, call, items, lambda: self._backend.renew(leases, lease_ms))
        for fields, reply in zip(items, replies):
            self._log.note(RENEWED, call.sent, call=call.number, verdict=reply.value, **fields)
        self._failed(RENEWED, call, items[len(replies) :], UNKNOWN)
        return replies

    def settle(self, lease: LeaseRef, settlement: Settlement) -> SettleReply:
        """Settle, and write one entry."""
        outcome = {"outcome": settlement.outcome.value, "reason": settlement.reason}
        items = [{**self._lease(lease), **outcome}]
        call = self._begin(SETTLING, items)
        reply = self._asked(SETTLED, call, items, lambda: self._backend.settle(lease, settlement))
        self._log.note(
            SETTLED,
            call.sent,
            call=call.number,
            verdict=ACCEPTED if reply.accepted else REFUSED,
            state="" if reply.state is None else reply.state.value,
            wait_ms=reply.wait_ms,
            **items[0],
        )
        return reply

    def _lease(self, ref: LeaseRef) -> Fields:
        return {
            "instance": self._instance,
            "job": ref.key.job,
            "scheduled_ms": ref.key.scheduled_ms,
            "token": ref.token,
        }

    def pending(self, jobs: Sequence[str], limit: int) -> Pending:
        """Pass on."""
        return self._backend.pending(jobs, limit)

    def states(self, spans: Sequence[JobSpan]) -> Sequence[Mapping[int, RunState]]:
        """Pass on."""
        return self._backend.states(spans)

    def history(self, job: Optional[str], limit: int) -> Sequence[RunRecord]:
        """Pass on."""
        return self._backend.history(job, limit)

    def jobs(self, limit: int) -> Sequence[JobSummary]:
        """Pass on."""
        return self._backend.jobs(limit)

    def prune(self, older_than_ms: int, limit: int) -> Pruned:
        """Prune, and write which runs were abandoned and how many records deleted."""
        sent = self._log.moment()
        pruned = self._backend.prune(older_than_ms, limit)
        for key in pruned.abandoned:
            self._abandoned(sent, key, "")
        self._log.note(PRUNED, sent, instance=self._instance, number=pruned.deleted)
        return pruned


def _once_fields(item: OnceClaim) -> Fields:
    return {
        "instance": item.holder,
        "job": item.key.job,
        "scheduled_ms": item.key.scheduled_ms,
        "due_ms": item.due_ms,
        "decision_id": item.decision_id,
        "window_ms": item.window_ms,
    }


def _lease_fields(item: LeaseClaim) -> Fields:
    return {
        "instance": item.holder,
        "job": item.key.job,
        "scheduled_ms": item.key.scheduled_ms,
        "due_ms": item.due_ms,
        "decision_id": item.decision_id,
        "lease_ms": item.lease_ms,
        "overlap": item.on_overlap.value,
    }
