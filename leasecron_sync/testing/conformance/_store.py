"""What the cases talk to: a store under test, and instances connected to it."""

from __future__ import annotations

import uuid
from collections.abc import Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from itertools import count
from typing import Callable, ClassVar, Generic, Optional, TypeVar, Union

import pytest

from leasecron_sync.backends.base import Backend, BackendSettings, LeaseBackend
from leasecron_sync.clock import SystemClock
from leasecron_sync.errors import StoreUnavailable
from leasecron_sync.model import (
    JobStamp,
    JobStanding,
    Lease,
    LeaseClaim,
    LeaseRef,
    LeaseReply,
    OnOverlap,
    Outcome,
    Pending,
    RenewReply,
    RunKey,
    RunRecord,
    RunState,
    Settlement,
    SettleReply,
    Verdict,
)

B = TypeVar("B", bound=Backend)
T = TypeVar("T")

HOUR_MS = 3_600_000
RACE_LIMIT_S = 25.0
_races = count()


class Suite(Generic[B]):
    """What the author of a backend supplies, and what may be changed.

    Attributes:
        slack_ms: 0 where ``advance`` sets a clock that otherwise stands still. Where the store's
            clock goes on by itself, the most that passes between two calls of a case; cases that
            need an exact clock, or minutes of it, are then skipped.
        own_clock: False where the store has no clock but the host's, and ``advance`` waits.
    """

    slack_ms: ClassVar[int] = 0
    own_clock: ClassVar[bool] = True

    @pytest.fixture
    def backend_factory(self) -> Callable[[], B]:
        """Return a callable that makes an unopened backend on the one store of this test."""
        raise NotImplementedError

    def advance(self, ms: int) -> None:
        """Let time pass on the store's clock: set it ahead, or really wait."""
        raise NotImplementedError

    def set_back(self, ms: int) -> None:
        """Set the store's clock back; left as it is, the cases about that are skipped."""
        del ms
        pytest.skip("no way to set this store's clock back")

    def locked(self) -> AbstractContextManager[object]:
        """Keep the store from answering anybody while the context is entered.

        Left as it is, the cases about that are skipped.
        """
        pytest.skip("no way to keep this store from answering")

    def now_ms(self, backend: B) -> int:
        """Return the clock by which the store decides."""
        store_ms = backend.probe().store_ms
        return SystemClock().now_ms() if store_ms is None else store_ms


class Store(Generic[B]):
    """The store under test."""

    def __init__(self, suite: Suite[B], factory: Callable[[], B]) -> None:
        self.suite = suite
        self.namespace = f"conformance-{uuid.uuid4().hex}"
        self._factory = factory
        self._backends: list[B] = []
        self._observer: Optional[B] = None
        self._instant_ms: Optional[int] = None

    def backend(self, settings: BackendSettings) -> B:
        """Return a new, opened backend that has answered once."""
        backend = self._factory()
        self._backends.append(backend)
        backend.open(settings)
        for _ in range(2):  # a busy machine may not keep the short time-outs of some cases
            with suppress(StoreUnavailable):
                backend.probe()
                return backend
        backend.probe()
        return backend

    def settings(self, namespace: Optional[str], call_timeout_ms: int) -> BackendSettings:
        """Make settings with an instance id that nobody had before."""
        return BackendSettings(namespace or self.namespace, uuid.uuid4().hex, call_timeout_ms)

    @property
    def observer(self) -> B:
        """A backend that only looks."""
        if self._observer is None:
            self._observer = self.backend(self.settings(None, 5_000))
        return self._observer

    def close(self) -> None:
        """Close every backend."""
        for backend in self._backends:
            backend.close()

    def now_ms(self) -> int:
        """Return the store's clock."""
        return self.suite.now_ms(self.observer)

    def advance(self, ms: int) -> None:
        """Let time pass."""
        self._instant_ms = None
        self.suite.advance(ms)

    def set_back(self, ms: int = HOUR_MS) -> None:
        """Set the clock back, by more than any store bridges."""
        self._instant_ms = None
        self.suite.set_back(ms)

    def needs_exact_clock(self) -> None:
        """Skip the case where the store's clock goes on by itself."""
        if self.suite.slack_ms:
            pytest.skip("this store's clock goes on by itself")

    def is_about(self, actual: Optional[int], expected: int) -> bool:
        """Compare a duration that shrinks while the store's clock goes on."""
        return actual is not None and expected - self.suite.slack_ms <= actual <= expected

    def run(self, job: str = "job", *, ago_ms: int = 0) -> RunKey:
        """Name the run of a job that was scheduled this long ago.

        "Now" is the same for all runs that are named before ``advance`` is called again, so that
        their scheduled times are as far apart as the case says.
        """
        if self._instant_ms is None:
            self._instant_ms = self.now_ms()
        return RunKey(job, self._instant_ms - ago_ms)


class LeaseSuite(Suite[LeaseBackend]):
    """What the author of a lease backend supplies, and what may be changed.

    Attributes:
        lease_ms: Length of the leases that the cases ask for; the other times are multiples of it.
    """

    lease_ms: ClassVar[int] = 10_000

    @pytest.fixture
    def store(
        self, backend_factory: Callable[[], LeaseBackend]
    ) -> Generator[LeaseStore, None, None]:
        """The store under test; not to be overridden."""
        with self.opened(backend_factory) as store:
            yield store

    @contextmanager
    def opened(
        self, backend_factory: Callable[[], LeaseBackend]
    ) -> Generator[LeaseStore, None, None]:
        """Give out the store and close its connections afterwards."""
        store = LeaseStore(self, backend_factory)
        try:
            yield store
        finally:
            store.close()

    def plant_unreadable(self, namespace: str, run: RunKey) -> None:
        """Damage the record of a run, or let it look as if a newer version had written it.

        Left as it is, the cases about that are skipped.
        """
        del namespace, run
        pytest.skip("no way to damage a record of this store")


class LeaseStore(Store[LeaseBackend]):
    """A lease store under test."""

    def __init__(self, suite: LeaseSuite, factory: Callable[[], LeaseBackend]) -> None:
        super().__init__(suite, factory)
        self.lease_ms = suite.lease_ms
        self.takeover_ms = 10 * suite.lease_ms
        self.max_age_ms = 6 * suite.lease_ms
        self.plant_unreadable = suite.plant_unreadable

    def instance(
        self, namespace: Optional[str] = None, call_timeout_ms: int = 5_000
    ) -> LeaseInstance:
        """Connect a new instance."""
        return LeaseInstance(self, self.settings(namespace, call_timeout_ms))

    def lapse(self) -> None:
        """Let a lease that was granted or renewed just now lapse."""
        self.advance(self.lease_ms)

    def records(self) -> dict[RunKey, RunRecord]:
        """Return every record of the namespace."""
        return {record.key: record for record in self.observer.history(None, 10_000)}

    def record(self, run: RunKey) -> RunRecord:
        """Return the record of a run."""
        return self.records()[run]

    def state(self, run: RunKey) -> tuple[RunState, str]:
        """Return state and reason of a run."""
        record = self.record(run)
        return record.state, record.reason


class LeaseInstance:
    """An instance with a connection of its own, in the words of the cases."""

    def __init__(self, store: LeaseStore, settings: BackendSettings) -> None:
        self.backend = store.backend(settings)
        self.id = settings.instance_id
        self._store = store

    def intend(  # noqa: PLR0913 - the options of a claim, by name
        self,
        run: RunKey,
        *,
        due_ms: Optional[int] = None,
        lease_ms: Optional[int] = None,
        max_attempts: int = 3,
        on_overlap: OnOverlap = OnOverlap.SKIP,
        max_age_ms: Optional[int] = None,
        takeover_ms: Optional[int] = None,
    ) -> LeaseClaim:
        """Make a decision to claim a run; sent twice, it is a repeated claim."""
        store = self._store
        return LeaseClaim(
            key=run,
            due_ms=run.scheduled_ms if due_ms is None else due_ms,
            holder=self.id,
            decision_id=uuid.uuid4().hex,
            lease_ms=store.lease_ms if lease_ms is None else lease_ms,
            max_attempts=max_attempts,
            on_overlap=on_overlap,
            max_age_ms=store.max_age_ms if max_age_ms is None else max_age_ms,
            takeover_ms=store.takeover_ms if takeover_ms is None else takeover_ms,
        )

    def ask(self, what: Union[RunKey, LeaseClaim]) -> LeaseReply:
        """Claim a run, by a new decision where only the run is named."""
        [reply] = self.ask_all([what])
        return reply

    def ask_all(self, what: Sequence[Union[RunKey, LeaseClaim]]) -> Sequence[LeaseReply]:
        """Claim runs in one batch."""
        claims = [self.intend(item) if isinstance(item, RunKey) else item for item in what]
        replies = self.backend.claim(claims)
        assert len(replies) == len(claims)
        return replies

    def win(self, what: Union[RunKey, LeaseClaim]) -> Lease:
        """Claim a run that must be granted."""
        reply = self.ask(what)
        assert reply.verdict is Verdict.GRANTED
        assert reply.lease is not None
        return reply.lease

    def renew(self, lease: Lease) -> RenewReply:
        """Renew one lease."""
        [reply] = self.backend.renew([lease.ref], self._store.lease_ms)
        return reply

    def settle(self, lease: Lease, settlement: Settlement) -> SettleReply:
        """Settle the attempt of a lease."""
        return self.backend.settle(lease.ref, settlement)

    def finish(self, lease: Lease) -> SettleReply:
        """Report a success."""
        return self.settle(lease, FINISHED)

    def fail(self, lease: Lease, delay_ms: int = 0) -> SettleReply:
        """Report a failure."""
        return self.settle(lease, Settlement(Outcome.FAILED, "it broke", delay_ms))

    def hand_over(self, lease: Lease) -> SettleReply:
        """Give the run back."""
        return self.settle(lease, HANDED_OVER)

    def pending(self, *jobs: str, limit: int = 100) -> Pending:
        """Ask what is claimable."""
        return self.backend.pending(jobs or ("job",), limit)

    def register(self, job: str = "job", fingerprint: str = "every minute") -> JobStanding:
        """Register one job."""
        [standing] = self.backend.register([JobStamp(job, fingerprint)])
        return standing


FINISHED = Settlement(Outcome.FINISHED)
FAILED = Settlement(Outcome.FAILED, "it broke")
HANDED_OVER = Settlement(Outcome.HANDED_OVER, "stopping")
ENDINGS = (FINISHED, FAILED, HANDED_OVER)

ALLOW, SKIP, DEFER = OnOverlap.ALLOW, OnOverlap.SKIP, OnOverlap.DEFER


def unknown_lease(run: RunKey, token: int = 1) -> Lease:
    """Return a lease that nobody was granted."""
    return Lease(LeaseRef(run, token), attempt=1, failures=0, left_ms=1)
