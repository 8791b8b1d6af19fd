"""A lease backend in the memory of one process, for users' own tests."""

from __future__ import annotations

import os
import threading
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator, Mapping, Sequence
from typing import Callable, ClassVar, Optional

from leasecron_sync.backends import _local
from leasecron_sync.backends.base import BackendSettings, LeaseBackend
from leasecron_sync.clock import SystemClock
from leasecron_sync.errors import StoreUnavailable
from leasecron_sync.model import (
    JobRecord,
    JobSpan,
    JobStamp,
    JobStanding,
    JobSummary,
    LeaseClaim,
    LeaseRef,
    LeaseReply,
    Pending,
    Pruned,
    RenewReply,
    RunKey,
    RunRecord,
    RunState,
    Settlement,
    SettleReply,
    StoreInfo,
)
from leasecron_sync.protocol.transition import Span


class MemoryTables:
    """Records of one namespace in dictionaries."""

    def __init__(self) -> None:
        self.jobs: dict[str, JobRecord] = {}
        self.runs: dict[str, dict[int, RunRecord]] = {}
        self._order: dict[str, list[int]] = {}  # scheduled times of a job, rising
        self._unsettled: dict[RunKey, RunRecord] = {}
        self._pruned: dict[str, tuple[Span, ...]] = {}

    def read_ahead(self, keys: Sequence[RunKey], *, others: bool) -> None:
        pass  # all is here

    def run(self, key: RunKey) -> Optional[RunRecord]:
        return self.runs.get(key.job, {}).get(key.scheduled_ms)

    def job(self, name: str) -> Optional[JobRecord]:
        return self.jobs.get(name)

    def unsettled(self, job: Optional[str]) -> tuple[RunRecord, ...]:
        return tuple(
            record for record in self._unsettled.values() if job is None or record.key.job == job
        )

    def lapsed_before(self, until_ms: int, limit: int) -> Sequence[RunRecord]:
        return [record for record in self._unsettled.values() if record.until_ms < until_ms][:limit]

    def settled_before(self, scheduled_ms: int, limit: int) -> Sequence[RunKey]:
        keys = [
            record.key
            for record in self.all_runs()
            if record.state.settled and record.key.scheduled_ms < scheduled_ms
        ]
        return sorted(keys, key=lambda key: (key.scheduled_ms, key.job))[:limit]

    def states(self, span: JobSpan) -> Mapping[int, RunState]:
        runs, order = self.runs.get(span.job, {}), self._order.get(span.job, [])
        known = order[bisect_left(order, span.from_ms) : bisect_right(order, span.to_ms)]
        return {ms: runs[ms].state for ms in known}

    def newest(self, job: str, until_ms: int) -> Optional[int]:
        order = self._order.get(job, [])
        known = bisect_right(order, until_ms)
        return order[known - 1] if known else None

    def put_run(self, record: RunRecord) -> None:
        key = record.key
        runs = self.runs.setdefault(key.job, {})
        if key.scheduled_ms not in runs:
            insort(self._order.setdefault(key.job, []), key.scheduled_ms)
        runs[key.scheduled_ms] = record
        if record.state.settled:
            self._unsettled.pop(key, None)
        else:
            self._unsettled[key] = record

    def put_job(self, record: JobRecord) -> None:
        self.jobs[record.job] = record

    def pruned(self, job: str) -> tuple[Span, ...]:
        return self._pruned.get(job, ())

    def put_pruned(self, job: str, spans: tuple[Span, ...]) -> None:
        self._pruned[job] = spans

    def delete_runs(self, keys: Sequence[RunKey]) -> None:
        for key in keys:
            del self.runs[key.job][key.scheduled_ms]
            self._order[key.job].remove(key.scheduled_ms)

    def all_runs(self) -> Iterator[RunRecord]:
        for runs in self.runs.values():
            yield from runs.values()


class MemoryStore:
    """What several ``MemoryLease`` objects of one name share."""

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self._pid = os.getpid()
        self.lock = threading.Lock()
        self.store_id = os.urandom(16).hex()
        self.namespaces: dict[str, MemoryTables] = {}

    def leave_parent(self) -> None:
        """Begin anew in a forked child, where this is a copy of the parent's store.

        Nobody renews the leases of the parent's runs in the copy: they would lapse, and this
        process would execute those runs beside the parent.
        """
        self.lock = threading.Lock()
        if os.getpid() != self._pid:
            self._begin()


_named: dict[str, MemoryStore] = {}
_named_lock = threading.Lock()


class MemoryLease(LeaseBackend):
    """Keeps leases in this process, for tests of an application's jobs.

    Nothing outlives the process, and other processes see nothing of it: several instances in one
    process share a store by giving the same ``name``.

    Args:
        name: Store to share with other objects of that name; a private one when left out.
    """

    name: ClassVar[str] = "memory-lease"

    # Tests put a reading of their own here; everything else uses the host's clock.
    _now_ms: Callable[[], int] = SystemClock().now_ms

    def __init__(self, name: Optional[str] = None) -> None:
        self._label = name
        if name is None:
            self._store = MemoryStore()
        else:
            with _named_lock:
                self._store = _named.setdefault(name, MemoryStore())
        self._settings: Optional[BackendSettings] = None

    def __repr__(self) -> str:
        """Show the name of the shared store."""
        return "MemoryLease()" if self._label is None else f"MemoryLease({self._label!r})"

    def open(self, settings: BackendSettings) -> None:
        self._settings = settings

    def close(self) -> None:
        self._settings = None

    def discard(self) -> None:
        # The lock may have been held by a thread that does not exist in this process.
        global _named_lock  # noqa: PLW0603 - replaced once, in a forked child
        _named_lock = threading.Lock()
        self._store.leave_parent()
        self._settings = None

    def probe(self) -> StoreInfo:
        self._opened()
        return StoreInfo("memory", store_ms=self._now_ms(), store_id=self._store.store_id)

    def register(self, jobs: Sequence[JobStamp]) -> Sequence[JobStanding]:
        with self._store.lock:
            return _local.register_jobs(self._tables(), jobs, self._now_ms(), self._store.store_id)

    def claim(self, claims: Sequence[LeaseClaim]) -> Sequence[LeaseReply]:
        with self._store.lock:
            return _local.claim(self._tables(), claims, self._now_ms())

    def renew(self, leases: Sequence[LeaseRef], lease_ms: int) -> Sequence[RenewReply]:
        with self._store.lock:
            return _local.renew(self._tables(), leases, lease_ms, self._now_ms())

    def settle(self, lease: LeaseRef, settlement: Settlement) -> SettleReply:
        with self._store.lock:
            return _local.settle(self._tables(), lease, settlement, self._now_ms())

    def pending(self, jobs: Sequence[str], limit: int) -> Pending:
        asker = self._opened().instance_id
        with self._store.lock:
            return _local.pending(self._tables(), jobs, asker, limit, self._now_ms())

    def states(self, spans: Sequence[JobSpan]) -> Sequence[Mapping[int, RunState]]:
        with self._store.lock:
            tables = self._tables()
            return [tables.states(span) for span in spans]

    def history(self, job: Optional[str], limit: int) -> Sequence[RunRecord]:
        with self._store.lock:
            runs = [record for record in self._tables().all_runs() if job in (None, record.key.job)]
        runs.sort(key=lambda record: (-record.key.scheduled_ms, record.key.job))
        return runs[:limit]

    def jobs(self, limit: int) -> Sequence[JobSummary]:
        with self._store.lock:
            tables = self._tables()
            return [self._summary(tables, tables.jobs[name]) for name in sorted(tables.jobs)][
                :limit
            ]

    @staticmethod
    def _summary(tables: MemoryTables, job: JobRecord) -> JobSummary:
        runs = tables.runs.get(job.job)
        newest = runs[max(runs)] if runs else None
        return JobSummary(job.job, job.owed_from_ms, newest, len(tables.unsettled(job.job)))

    def prune(self, older_than_ms: int, limit: int) -> Pruned:
        with self._store.lock:
            return _local.prune(self._tables(), older_than_ms, limit, self._now_ms())

    def _opened(self) -> BackendSettings:
        if self._settings is None:
            message = "the memory store is closed"
            raise StoreUnavailable(message)
        return self._settings

    def _tables(self) -> MemoryTables:
        namespace = self._opened().namespace
        return self._store.namespaces.setdefault(namespace, MemoryTables())
