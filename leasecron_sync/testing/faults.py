"""Backends that fail on demand, around backends that work.

``FaultyLease`` and ``FaultyClaim`` pass every call on to another backend, and let it fail as
``faults`` says::

    backend = FaultyLease(MemoryLease())
    backend.faults.lose_reply("claim")     # takes effect, and raises OutcomeUnknown
    backend.faults.down = True             # StoreUnavailable, until it is False again

Switches may be set from any thread while calls are under way; they count for the calls that begin
afterwards.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Callable, ClassVar, Optional, TypeVar

from leasecron_sync.backends.base import Backend, BackendSettings, ClaimBackend, LeaseBackend
from leasecron_sync.errors import OutcomeUnknown, StoreUnavailable
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

T = TypeVar("T")
Hook = Callable[[], object]

_LOCAL = frozenset({"open", "tend", "close", "discard"})
_METHODS = _LOCAL | {
    "probe",
    "register",
    "claim",
    "rehearse",
    "renew",
    "settle",
    "pending",
    "states",
    "history",
    "jobs",
    "prune",
}


@dataclass(frozen=True)
class _Plan:
    """What happens to one call."""

    before: Optional[Hook] = None
    after: Optional[Hook] = None
    error: Optional[BaseException] = None
    refused: bool = False
    request_lost: bool = False
    reply_lost: bool = False


class Faults:
    """Switches of a faulty backend.

    Attributes:
        down: True while the store cannot be reached: every call that would talk to it raises
            ``StoreUnavailable``.
    """

    def __init__(self) -> None:
        self.down = False
        self._lock = threading.Lock()
        self._calls: Counter[str] = Counter()
        self._lost_requests: Counter[str] = Counter()
        self._lost_replies: Counter[str] = Counter()
        self._hooks: dict[str, tuple[Optional[Hook], Optional[Hook]]] = {}
        self._errors: dict[tuple[str, int], BaseException] = {}

    def calls(self, method: str) -> int:
        """Return how often a method was called, failed calls included."""
        with self._lock:
            return self._calls[_known(method)]

    def lose_request(self, method: str, times: int = 1) -> None:
        """Let the next calls raise ``OutcomeUnknown`` without an effect on the store.

        Args:
            method: Name of a method of the backend.
            times: How many calls.
        """
        with self._lock:
            self._lost_requests[_known(method)] = times

    def lose_reply(self, method: str, times: int = 1) -> None:
        """Let the next calls take effect in the store and raise ``OutcomeUnknown``.

        Args:
            method: Name of a method of the backend.
            times: How many calls.
        """
        with self._lock:
            self._lost_replies[_known(method)] = times

    def slow(
        self, method: str, before: Optional[Hook] = None, after: Optional[Hook] = None
    ) -> None:
        """Call hooks around every call of a method, until told otherwise.

        A hook may let a manual clock pass, let other instances work, or wait for an event.

        Args:
            method: Name of a method of the backend.
            before: Called before the request is sent; None for nothing.
            after: Called when the store has decided and the reply is still on its way.
        """
        with self._lock:
            self._hooks[_known(method)] = (before, after)

    def raise_at(self, method: str, error: BaseException, nth: int = 1) -> None:
        """Let one call raise something that no contract foresees.

        Args:
            method: Name of a method of the backend.
            error: What it raises.
            nth: Which call from now on; 1 is the next one.
        """
        with self._lock:
            self._errors[_known(method), self._calls[method] + nth] = error

    def clear(self) -> None:
        """Let everything work again; the counts of calls stay."""
        with self._lock:
            self.down = False
            self._lost_requests.clear()
            self._lost_replies.clear()
            self._hooks.clear()
            self._errors.clear()

    def call(self, method: str, work: Callable[[], T]) -> T:
        """Make one call of the backend behind, or fail instead of it.

        Args:
            method: Name of the method.
            work: Makes the call.
        """
        plan = self._next_plan(method)
        if plan.before is not None:
            plan.before()
        if plan.error is not None:
            raise plan.error
        if plan.refused:
            message = f"{method}: the store is down"
            raise StoreUnavailable(message)
        if plan.request_lost:
            message = f"{method}: the request was lost"
            raise OutcomeUnknown(message)
        result = work()
        if plan.after is not None:
            plan.after()
        if plan.reply_lost:
            message = f"{method}: the reply was lost"
            raise OutcomeUnknown(message)
        return result

    def _next_plan(self, method: str) -> _Plan:
        with self._lock:
            self._calls[method] += 1
            before, after = self._hooks.get(method, (None, None))
            error = self._errors.pop((method, self._calls[method]), None)
            refused = self.down and method not in _LOCAL
            passed = error is None and not refused
            request_lost = passed and _take(self._lost_requests, method)
            reply_lost = passed and not request_lost and _take(self._lost_replies, method)
        return _Plan(before, after, error, refused, request_lost, reply_lost)


def _known(method: str) -> str:
    if method not in _METHODS:
        message = f"a backend has no method {method!r}; it has: {', '.join(sorted(_METHODS))}"
        raise ValueError(message)
    return method


def _take(counts: Counter[str], method: str) -> bool:
    if counts[method] < 1:
        return False
    counts[method] -= 1
    return True


class _Faulty(Backend):
    """What both wrappers share."""

    def __init__(self, backend: Backend) -> None:
        self.faults = Faults()
        self._any = backend

    def __repr__(self) -> str:
        """Show the backend inside."""
        return f"{type(self).__name__}({self._any!r})"

    @property
    def inner(self) -> Backend:
        """The backend inside."""
        return self._any

    def open(self, settings: BackendSettings) -> None:
        self.faults.call("open", lambda: self._any.open(settings))

    def probe(self) -> StoreInfo:
        return self.faults.call("probe", self._any.probe)

    def tend(self) -> Optional[int]:
        return self.faults.call("tend", self._any.tend)

    def close(self) -> None:
        self.faults.call("close", self._any.close)

    def discard(self) -> None:
        self.faults.call("discard", self._any.discard)


class FaultyClaim(_Faulty, ClaimBackend):
    """A claim backend that fails on demand.

    Args:
        backend: The one that does the work.
    """

    name: ClassVar[str] = "faulty-claim"

    def __init__(self, backend: ClaimBackend) -> None:
        super().__init__(backend)
        self._backend = backend
        self.max_window_ms = backend.max_window_ms

    def claim(self, claims: Sequence[OnceClaim]) -> Sequence[ClaimReply]:
        return self.faults.call("claim", lambda: self._backend.claim(claims))


class FaultyLease(_Faulty, LeaseBackend):
    """A lease backend that fails on demand.

    Args:
        backend: The one that does the work.
    """

    name: ClassVar[str] = "faulty-lease"

    def __init__(self, backend: LeaseBackend) -> None:
        super().__init__(backend)
        self._backend = backend

    def register(self, jobs: Sequence[JobStamp]) -> Sequence[JobStanding]:
        return self.faults.call("register", lambda: self._backend.register(jobs))

    def claim(self, claims: Sequence[LeaseClaim]) -> Sequence[LeaseReply]:
        return self.faults.call("claim", lambda: self._backend.claim(claims))

    def rehearse(self, claims: Sequence[LeaseClaim]) -> None:
        self.faults.call("rehearse", lambda: self._backend.rehearse(claims))

    def renew(self, leases: Sequence[LeaseRef], lease_ms: int) -> Sequence[RenewReply]:
        return self.faults.call("renew", lambda: self._backend.renew(leases, lease_ms))

    def settle(self, lease: LeaseRef, settlement: Settlement) -> SettleReply:
        return self.faults.call("settle", lambda: self._backend.settle(lease, settlement))

    def pending(self, jobs: Sequence[str], limit: int) -> Pending:
        return self.faults.call("pending", lambda: self._backend.pending(jobs, limit))

    def states(self, spans: Sequence[JobSpan]) -> Sequence[Mapping[int, RunState]]:
        return self.faults.call("states", lambda: self._backend.states(spans))

    def history(self, job: Optional[str], limit: int) -> Sequence[RunRecord]:
        return self.faults.call("history", lambda: self._backend.history(job, limit))

    def jobs(self, limit: int) -> Sequence[JobSummary]:
        return self.faults.call("jobs", lambda: self._backend.jobs(limit))

    def prune(self, older_than_ms: int, limit: int) -> Pruned:
        return self.faults.call("prune", lambda: self._backend.prune(older_than_ms, limit))
