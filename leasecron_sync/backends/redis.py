"""A lease backend in a Redis or Valkey server."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from typing import Any, Callable, ClassVar, Optional, Union

from leasecron_sync.backends._group import Group
from leasecron_sync.backends._lanes import Deadline, Lane, Lanes
from leasecron_sync.backends._redis_caller import Caller
from leasecron_sync.backends._redis_info import Server, server_of
from leasecron_sync.backends._redis_link import Link
from leasecron_sync.backends._redis_place import Place
from leasecron_sync.backends._redis_rows import (
    claim_argument,
    claim_replies,
    job_summary,
    lease_arguments,
    readable,
    settle_arguments,
    unreadable,
)
from leasecron_sync.backends._redis_scripts import keys_for
from leasecron_sync.backends.base import BackendSettings, LeaseBackend
from leasecron_sync.clock import SystemClock
from leasecron_sync.errors import MissingDependency, StoreError, StoreRejected
from leasecron_sync.model import (
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

_logger = logging.getLogger("leasecron_sync.backends.redis")

_clock = SystemClock()


class RedisLease(LeaseBackend):
    """Keeps leases in a Redis or Valkey server that all instances reach.

    The promises hold as long as the server keeps what it was told. Without an append-only file a
    restart forgets everything, with ``appendfsync everysec`` a crash of the host forgets the last
    second, and a failover forgets what the replica had not received yet: runs that were won then
    can be won again. A server that evicts keys when its memory is full keeps no promise. The clock
    that decides is the server's; after a failover it is another one.

    Redis 7 or newer, or Valkey. All keys of a namespace are in one place of a cluster. At most
    three connections are open.

    Args:
        server: A URL such as ``redis://localhost:6379/0``, ``unix:///run/redis.sock``,
            ``redis+sentinel://host:26379/service/0`` or ``redis+cluster://host:6379``; or a client
            of redis-py, whose address and credentials are used on connections of this object's own.

    Raises:
        TypeError: ``server`` is neither.
        ValueError: The URL is wrong.
    """

    name: ClassVar[str] = "redis-lease"

    # Tests put a reading of their own here; else the server's clock is read where it decides.
    _now_ms: Optional[Callable[[], int]] = None

    def __init__(self, server: Any) -> None:  # noqa: ANN401 - a client is of a package imported late
        self._caller = Caller(server, "RedisLease")
        self._keys: tuple[str, ...] = ()
        self._store_id = ""
        self._lanes: Lanes[Link] = Lanes(Link.close)
        self._make_group()

    def _make_group(self) -> None:
        self._settlements: Group[tuple[LeaseRef, Settlement], SettleReply] = Group(
            self._settle_all, _clock, f"settling in {self._caller.label}"
        )

    def __repr__(self) -> str:
        """Show the place without user and password."""
        return f"RedisLease({self._caller.label!r})"

    def open(self, settings: BackendSettings) -> None:
        try:
            import redis
        except ImportError as error:
            message = (
                "RedisLease needs the package redis: pip install 'leasecron_sync[redis]'; it "
                "is the one for Valkey, too"
            )
            raise MissingDependency(message) from error
        self._caller.open(redis, settings)
        self._store_id = ""
        self._keys = keys_for(settings.namespace, self.place.kind)

    def close(self) -> None:
        self._caller.close()
        self._lanes.close()

    def discard(self) -> None:
        self._caller.close()
        self._lanes.abandon()
        self._make_group()

    def probe(self) -> StoreInfo:
        caller, deadline = self._caller, self._caller.deadline()
        with caller.linked(self._lanes.timer, deadline) as link:
            server: Server = server_of(link, caller.label, deadline)
            asked = link.address
            store_ms, store_id = self._call(link, "probe", (), deadline)
            if link.address != asked:  # another node of the cluster has the keys
                server = server_of(link, caller.label, deadline)
        return StoreInfo(server.version, store_ms, store_id.decode(), server.warnings)

    def register(self, jobs: Sequence[JobStamp]) -> Sequence[JobStanding]:
        if not jobs:
            return []
        values = [part for stamp in jobs for part in (stamp.job, stamp.fingerprint)]
        now_ms, packed_id, rows = self._ask(self._lanes.timer, "register", values)
        self._store_id = store_id = packed_id.decode()
        standings: list[JobStanding] = []
        for stamp, (owed_from_ms, newest_ms, why) in zip(jobs, rows):
            if why:
                error = unreadable(stamp.job, why.decode())
                _logger.error("a job is left as it is job=%r error=%r", stamp.job, error)
            newest = None if newest_ms == b"" else newest_ms
            standings.append(JobStanding(owed_from_ms, newest, now_ms, store_id))
        return standings

    def claim(self, claims: Sequence[LeaseClaim]) -> Sequence[LeaseReply]:
        if not claims:
            return []
        values = (self._store_id, claim_argument(claims))
        try:
            answer = self._ask(self._lanes.timer, "claim", values)
        except StoreError:
            # If it was another store than the jobs are registered in, that is told once. After any
            # error they are registered anew.
            self._store_id = ""
            raise
        return claim_replies(claims, answer)

    def renew(self, leases: Sequence[LeaseRef], lease_ms: int) -> Sequence[RenewReply]:
        if not leases:
            return []
        rows = self._ask(self._lanes.renew, "renew", [lease_ms, *lease_arguments(leases)])
        return [RenewReply.RENEWED if renewed else RenewReply.LOST for renewed in rows]

    def settle(self, lease: LeaseRef, settlement: Settlement) -> SettleReply:
        # Runs that end at about the same time share a round trip.
        return self._settlements.ask((lease, settlement), self._caller.opened().call_timeout_ms)

    def _settle_all(
        self, asked: Sequence[tuple[LeaseRef, Settlement]], deadline_ms: int
    ) -> Sequence[Union[SettleReply, StoreRejected]]:
        deadline = Deadline(max(0, deadline_ms - _clock.steady_ms()))

        def settle(lane: Lane[Link]) -> Any:  # noqa: ANN401 - rows of the script
            with self._caller.linked(lane, deadline) as link:
                return self._call(link, "settle", settle_arguments(asked), deadline)

        rows = self._lanes.settled(settle)
        answers: list[Union[SettleReply, StoreRejected]] = []
        for (lease, _settlement), (accepted, state, wait_ms, why) in zip(asked, rows):
            if why:  # nothing was written for it
                answers.append(StoreRejected(unreadable(lease.key.job, why.decode())))
            else:
                known = RunState(state.decode()) if state else None
                answers.append(SettleReply(bool(accepted), known, wait_ms))
        return answers

    def pending(self, jobs: Sequence[str], limit: int) -> Pending:
        values = [self._caller.opened().instance_id, *sorted(set(jobs))]
        next_in_ms, unsettled, found = self._ask(self._lanes.timer, "pending", values)
        keys = [RunKey(job.decode(), scheduled_ms) for job, scheduled_ms in found]
        keys.sort(key=lambda key: (key.scheduled_ms, key.job))
        return Pending(
            tuple(keys[:limit]), None if next_in_ms == b"" else next_in_ms, bool(unsettled)
        )

    def states(self, spans: Sequence[JobSpan]) -> Sequence[Mapping[int, RunState]]:
        if not spans:
            return []
        rows = self._ask(self._lanes.timer, "states", [part for span in spans for part in span])
        return [
            {ms: RunState(state.decode()) for ms, state in zip(row[::2], row[1::2])} for row in rows
        ]

    def prune(self, older_than_ms: int, limit: int) -> Pruned:
        deleted, abandoned = self._ask(self._lanes.timer, "prune", (older_than_ms, limit))
        return Pruned(deleted, tuple(RunKey(job.decode(), ms) for job, ms in abandoned))

    # history() and jobs() come from any thread: on the lane that already takes turns with threads.

    def history(self, job: Optional[str], limit: int) -> Sequence[RunRecord]:
        if job is not None:
            return readable(self._ask(self._lanes.settle, "history", (limit, job)))
        records = readable(self._ask(self._lanes.settle, "history_of_all", (limit,)))
        records.sort(key=lambda record: (-record.key.scheduled_ms, record.key.job))
        return records[:limit]

    def jobs(self, limit: int) -> Sequence[JobSummary]:
        return [job_summary(row) for row in self._ask(self._lanes.settle, "jobs", (limit,))]

    # -- for who only looks ---------------------------------------------------------------------

    @property
    def place(self) -> Place:
        """Where the store is."""
        return self._caller.place

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys of the namespace, once it is open."""
        return self._keys

    def connected(self, deadline: Deadline) -> Link:
        """Return a connection that no call of this object uses; its user closes it."""
        return self._caller.connected(deadline)

    # -- calls ---------------------------------------------------------------------------------

    def _ask(self, lane: Lane[Link], script: str, values: Sequence[object]) -> Any:  # noqa: ANN401
        """Execute a script, in one round trip."""
        deadline = self._caller.deadline()
        with self._caller.linked(lane, deadline) as link:
            return self._call(link, script, values, deadline)

    def _call(self, link: Link, script: str, values: Sequence[object], deadline: Deadline) -> Any:  # noqa: ANN401
        now = "" if self._now_ms is None else self._now_ms()
        # The second one becomes the store's id where there is none yet.
        return link.call(script, self._keys, (now, os.urandom(16).hex(), *values), deadline)
