"""A backend and the reference beside it, which get the same commands and must agree."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Callable, NamedTuple

from leasecron_sync.backends._redis_scripts import keys_of
from leasecron_sync.backends.base import BackendSettings, LeaseBackend
from leasecron_sync.backends.postgres import PostgresLease
from leasecron_sync.backends.redis import RedisLease
from leasecron_sync.backends.sqlite import SQLiteLease
from leasecron_sync.clock import SystemClock
from leasecron_sync.model import (
    JobSpan,
    JobStamp,
    JobStanding,
    LeaseClaim,
    LeaseRef,
    LeaseReply,
    Pending,
    Pruned,
    RenewReply,
    Settlement,
    SettleReply,
)
from leasecron_sync.protocol.transition import Span
from leasecron_sync.testing.clock import ManualClock
from tests.model.histories import HOUR_MS, INSTANCES, JOBS
from tests.model.plain import PlainStore
from tests.services.postgres import execute
from tests.services.redis import execute as execute_on_redis

Factory = Callable[[ManualClock, str], LeaseBackend]
"""Makes an unopened backend under this clock, on the store that this text may name."""

Spans = Mapping[str, tuple[Span, ...]]


class Store(NamedTuple):
    """How to connect to a store, and how to read what was pruned of the jobs of a namespace."""

    connect: Factory
    pruned: Callable[[LeaseBackend, str], Spans]


def spans_of(rows: Iterable[tuple[Any, ...]]) -> Spans:
    """Collect rows of a job, and the first and the last scheduled time of a span."""
    found: dict[str, tuple[Span, ...]] = {}
    for job, first_ms, last_ms in rows:
        found[job] = (*found.get(job, ()), (first_ms, last_ms))
    return found


def spans_in_postgres(url: str, schema: str, namespace: str) -> Spans:
    """Read what was pruned from a PostgreSQL schema, in the order in which it stands there."""
    rows = execute(
        url,
        f"SELECT j.name, p.* FROM {schema}.leasecron_job j "
        f"JOIN {schema}.leasecron_space s ON s.id = j.space_id "
        "CROSS JOIN unnest(j.pruned_first_ms, j.pruned_last_ms) p WHERE s.name = %s",
        namespace,
    )
    return spans_of(rows)


def spans_in_redis(url: str, namespace: str) -> Spans:
    """Read what was pruned from the records of a namespace's jobs."""
    found = execute_on_redis(url, "HGETALL", keys_of(namespace)[2])
    spans: dict[str, tuple[Span, ...]] = {}
    for job, packed in found.items():
        ends = [int(ms) for ms in json.loads(packed)[6]]
        spans[job.decode()] = tuple(zip(ends[::2], ends[1::2]))
    return spans


def _in_order(reply: LeaseReply) -> LeaseReply:
    """Put the runs in order that a claim abandoned, which may come in any."""
    return replace(reply, abandoned=tuple(sorted(reply.abandoned)))


class Both:
    """Sends each command to the reference and to the backend, and compares."""

    def __init__(self, clock: ManualClock, store: Store, look_every: int) -> None:
        self.plain = PlainStore(clock.now_ms)
        self._clock = clock
        self._store = store
        self._namespace = namespace = uuid.uuid4().hex
        self._backends = {name: store.connect(clock, namespace) for name in INSTANCES}
        for name, backend in self._backends.items():
            backend.open(BackendSettings(namespace, name, 5_000))
            backend.probe()  # as the scheduler does: makes the store where there is none
        self.ahead = self.most_spans = 0
        self._turn = 0
        self._look_every = look_every

    def close(self) -> None:
        for backend in self._backends.values():
            backend.close()

    @property
    def backend(self) -> LeaseBackend:
        """A connection, another one each time."""
        self._turn += 1
        return self._backends[INSTANCES[self._turn % len(INSTANCES)]]

    def _compare(self) -> None:
        if self._turn % self._look_every == 0:
            self.compare_records()

    def compare_records(self) -> None:
        """Compare all records of runs."""
        expected = self.plain.history(None, 10_000)
        assert list(self.backend.history(None, 10_000)) == expected

    def _ahead(self, claims: Sequence[LeaseClaim]) -> int:
        """Count claims of runs without a record before what was pruned ahead of the clock."""
        jobs = [(claim.key, self.plain.jobs.get(claim.key.job)) for claim in claims]
        return sum(
            1
            for key, job in jobs
            if key not in self.plain.runs
            and job is not None
            and job.pruned_to_ms is not None
            and job.pruned_to_ms > max(key.scheduled_ms, self._clock.now_ms())
        )

    def claim(self, claims: Sequence[LeaseClaim]) -> Sequence[LeaseReply]:
        self.ahead += self._ahead(claims)
        replies = self.plain.claim(claims)
        found = self.backend.claim(claims)
        assert [_in_order(reply) for reply in found] == [_in_order(reply) for reply in replies]
        self._compare()
        return replies

    def renew(self, leases: Sequence[LeaseRef], lease_ms: int) -> Sequence[RenewReply]:
        replies = self.plain.renew(leases, lease_ms)
        assert list(self.backend.renew(leases, lease_ms)) == replies
        self._compare()
        return replies

    def settle(self, lease: LeaseRef, settlement: Settlement) -> SettleReply:
        reply = self.plain.settle(lease, settlement)
        assert self.backend.settle(lease, settlement) == reply
        self._compare()
        return reply

    def settle_all(self, asked: Sequence[tuple[LeaseRef, Settlement]]) -> None:
        """Settle attempts in one call, where the backend can do that."""
        if not asked:
            return
        replies = [self.plain.settle(lease, settlement) for lease, settlement in asked]
        backend = self.backend
        if isinstance(backend, (SQLiteLease, PostgresLease, RedisLease)):
            # What its group calls when that many threads have something to settle.
            found = list(backend._settle_all(asked, SystemClock().steady_ms() + 5_000))
        else:
            found = [backend.settle(lease, settlement) for lease, settlement in asked]
        assert found == replies
        self._compare()

    def register(self, jobs: Sequence[JobStamp]) -> Sequence[JobStanding]:
        standings = self.plain.register(jobs)
        found = [replace(standing, store_id="plain") for standing in self.backend.register(jobs)]
        assert found == standings
        return standings

    def pending(self, jobs: Sequence[str], limit: int, asker: str) -> Pending:
        pending = self.plain.pending(jobs, limit, asker)
        backend = self._backends.get(asker, self._backends[INSTANCES[0]])
        assert backend.pending(jobs, limit) == pending
        return pending

    def prune(self, older_than_ms: int, limit: int) -> Pruned:
        """Prune both; among equally old records the limit may leave out others, so it is high."""
        del limit
        pruned = self.plain.prune(older_than_ms, 10_000)
        found = self.backend.prune(older_than_ms, 10_000)
        assert found.deleted == pruned.deleted
        assert sorted(found.abandoned) == sorted(pruned.abandoned)
        self._compare()
        return pruned

    def compare_states(self, spans: Sequence[JobSpan]) -> None:
        """Compare the known states in spans."""
        found = [dict(states) for states in self.backend.states(spans)]
        assert found == self.plain.states(spans)

    def compare_pruned(self, jobs: Sequence[str]) -> None:
        """Compare the spans of what was pruned."""
        found = self._store.pruned(self.backend, self._namespace)
        for job in jobs:
            spans = self.plain.pruned.get(job, ())
            assert found.get(job, ()) == spans
            self.most_spans = max(self.most_spans, len(spans))

    def look(self, now_ms: int) -> None:
        """Compare what is only read, and all records."""
        self.compare_records()
        names = [job.name for job in JOBS]
        self.compare_pruned(names)
        for limit in (1, 100):
            for asker in INSTANCES:
                self.pending(names, limit, asker)
        spans = [JobSpan(name, now_ms - 5_000, now_ms) for name in names]
        spans.append(JobSpan(names[0], 0, now_ms + HOUR_MS))
        self.compare_states(spans)
        for name in (None, *names):
            assert list(self.backend.history(name, 3)) == self.plain.history(name, 3)
        self.register([JobStamp(name, "version 0") for name in names])
        summaries = {job.job: job for job in self.backend.jobs(100)}
        for name in names:
            newest = self.plain.history(name, 1)
            assert summaries[name].newest == (newest[0] if newest else None)
            assert summaries[name].unsettled == len(self.plain.unsettled(name))
            assert summaries[name].owed_from_ms == self.plain.jobs[name].owed_from_ms
