"""A lease backend in a PostgreSQL database."""

from __future__ import annotations

import logging
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Callable, ClassVar, Optional, Union

from leasecron_sync.backends._group import Group
from leasecron_sync.backends._lanes import Deadline, Lane, Lanes
from leasecron_sync.backends._postgres_claims import ClaimBatch, Registered
from leasecron_sync.backends._postgres_link import Link, with_environment
from leasecron_sync.backends._postgres_rows import (
    Rounds,
    Row,
    lease_arrays,
    number_array,
    readable,
    settlement_arrays,
    text_array,
    unreadable,
)
from leasecron_sync.backends._postgres_schema import Facts, Names, met, schema_sql, sql_of
from leasecron_sync.backends._secrets import shown_dsn
from leasecron_sync.backends.base import BackendSettings, LeaseBackend
from leasecron_sync.clock import SystemClock
from leasecron_sync.errors import (
    MissingDependency,
    OutcomeUnknown,
    StoreRejected,
    StoreUnavailable,
)
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

_logger = logging.getLogger("leasecron_sync.backends.postgres")

_clock = SystemClock()

# A table that has grown since it was analyzed looks small enough to be read from end to end.
_BY_INDEX = "SET LOCAL enable_seqscan = off; SET LOCAL jit = off; "


class PostgresLease(LeaseBackend):
    """Keeps leases in a PostgreSQL database that all instances reach.

    The promises hold as long as the database keeps what it was told. With
    ``synchronous_commit = off`` a crash of the server forgets the last moments, and so may a
    failover to a replica that follows asynchronously: runs that were won then can be won again.
    The clock that decides is the server's; after a failover it is another one.

    Works behind pgbouncer in transaction mode: each call is one string of statements, and nothing
    is left behind in the session. At most three connections are open.

    Args:
        dsn: A URL such as ``postgresql://user@host/database``, or libpq's ``host=… dbname=…``.
        schema: PostgreSQL's schema for the tables and functions; made when missing.
        table_prefix: What their names begin with.

    Raises:
        TypeError: An argument is not text.
        ValueError: ``dsn`` is empty, or a name cannot be one.
    """

    name: ClassVar[str] = "postgres-lease"

    # Tests put a reading of their own here; else the server's clock is read where it decides.
    _now_ms: Optional[Callable[[], int]] = None

    def __init__(
        self, dsn: str, *, schema: str = Names.schema, table_prefix: str = Names.prefix
    ) -> None:
        for option, value in (("dsn", dsn), ("schema", schema), ("table_prefix", table_prefix)):
            if not isinstance(value, str):  # pyright: ignore[reportUnnecessaryIsInstance]
                message = f"{option} must be text, not {type(value).__name__}"
                raise TypeError(message)
        if not dsn.strip() or "\0" in dsn:
            message = (
                "PostgresLease needs the address of a database, such as "
                "'postgresql://localhost/jobs' or 'host=localhost dbname=jobs'"
            )
            raise ValueError(message)
        self._dsn = dsn
        self._names = Names(schema, table_prefix)
        self._label = shown_dsn(dsn)
        self._settings: Optional[BackendSettings] = None
        self._client: Any = None
        self._parameters: dict[str, str] = {}
        self._lanes: Lanes[Link] = Lanes(Link.close)
        self._registered = Registered(self._label)
        self._make_group()

    def _make_group(self) -> None:
        self._settlements: Group[tuple[LeaseRef, Settlement], SettleReply] = Group(
            self._settle_all, _clock, f"settling in {self._label}"
        )

    def __repr__(self) -> str:
        """Show the place without user and password."""
        names = self._names
        parts = [repr(self._label)]
        if names.schema != "public":
            parts.append(f"schema={names.schema!r}")
        if names.prefix != Names.prefix:
            parts.append(f"table_prefix={names.prefix!r}")
        return f"PostgresLease({', '.join(parts)})"

    def schema_sql(self) -> str:
        """Return the SQL that makes the tables and functions where they are missing.

        An administrator runs it where the user of the scheduler may not create tables. It may be
        run again, also while schedulers are at work.
        """
        return schema_sql(self._names)

    def open(self, settings: BackendSettings) -> None:
        try:
            import psycopg2
            from psycopg2.extensions import parse_dsn
        except ImportError as error:
            message = (
                "PostgresLease needs the package psycopg2: "
                "pip install 'leasecron_sync[postgres]', or psycopg2 of your system"
            )
            raise MissingDependency(message) from error
        try:
            parameters = with_environment(parse_dsn(self._dsn))
        except psycopg2.Error:
            # libpq quotes the text that it could not read, and with it perhaps a password.
            message = (
                f"libpq cannot read the connection string of {self!r}: it is a URL with special "
                "characters percent-encoded, or a list of keyword=value"
            )
            raise ValueError(message) from None
        parameters.setdefault("fallback_application_name", "leasecron_sync")
        parameters["client_encoding"] = "UTF8"
        self._client, self._parameters, self._settings = psycopg2, parameters, settings
        self._registered = Registered(self._label)

    def close(self) -> None:
        self._settings = None
        self._lanes.close()

    def discard(self) -> None:
        self._settings = None
        self._lanes.abandon()
        self._make_group()

    def probe(self) -> StoreInfo:
        lane, deadline = self._lanes.timer, self._deadline()
        with self._held(lane, deadline):
            link, facts = self._link(lane, deadline, make=True)
            if facts is None:
                facts = self._met(link, deadline, make=True)
        warnings: list[str] = []
        if facts.synchronous_commit == "off":
            warnings.append(
                "synchronous_commit is off: after a crash of the server runs may be won again"
            )
        if facts.fsync == "off":
            warnings.append("fsync is off: after a crash of the host the store may be damaged")
        if facts.replica:
            warnings.append("this server is a replica, which takes no writes: name the primary")
        now_ms = self._given_now()
        return StoreInfo(
            f"PostgreSQL {facts.version}",
            facts.store_ms if now_ms is None else now_ms,
            facts.store_id or "",
            tuple(warnings),
        )

    def register(self, jobs: Sequence[JobStamp]) -> Sequence[JobStanding]:
        if not jobs:
            return []
        rounds = Rounds([stamp.job for stamp in jobs])
        stamps = [jobs[number] for number in rounds.order]
        values = (
            self._given_now(),
            text_array(rounds.names),
            number_array(rounds.ends),
            text_array([stamp.job for stamp in stamps]),
            text_array([stamp.fingerprint for stamp in stamps]),
        )
        standings: dict[int, JobStanding] = {}
        for pos, owed_from_ms, newest_ms, store_ms, store_id, why in self._ask(
            self._lanes.timer, "register_v1", values
        ):
            place: int = pos - 1
            if why is not None:
                job = stamps[place].job
                error = unreadable(job, why)
                _logger.error("a job is left as it is job=%r error=%r", job, error)
            standing = JobStanding(owed_from_ms, newest_ms, store_ms, store_id)
            standings[rounds.order[place]] = standing
        if standings:
            self._registered.note(rounds.names, standings[0].store_id)
        return [standings[number] for number in range(len(jobs))]

    def claim(self, claims: Sequence[LeaseClaim]) -> Sequence[LeaseReply]:
        if not claims:
            return []
        deadline = self._deadline()
        with self._linked(self._lanes.timer, deadline) as link:
            call = partial(self._call, link, deadline=deadline)
            return ClaimBatch(claims).decided(call, self._given_now(), self._registered)

    def renew(self, leases: Sequence[LeaseRef], lease_ms: int) -> Sequence[RenewReply]:
        if not leases:
            return []
        values = (
            self._given_now(),
            lease_ms,
            *lease_arrays(leases),
        )
        renewed = {pos for (pos,) in self._ask(self._lanes.renew, "renew_v1", values)}
        return [
            RenewReply.RENEWED if pos in renewed else RenewReply.LOST
            for pos in range(1, len(leases) + 1)
        ]

    def settle(self, lease: LeaseRef, settlement: Settlement) -> SettleReply:
        # Runs that end at about the same time share a round trip.
        return self._settlements.ask((lease, settlement), self._opened().call_timeout_ms)

    def _settle_all(
        self, asked: Sequence[tuple[LeaseRef, Settlement]], deadline_ms: int
    ) -> Sequence[Union[SettleReply, StoreRejected]]:
        leases = [lease for lease, _settlement in asked]
        settlements = settlement_arrays(settlement for _lease, settlement in asked)
        values = (self._given_now(), *lease_arrays(leases), *settlements)
        deadline = Deadline(max(0, deadline_ms - _clock.steady_ms()))

        def settle(lane: Lane[Link]) -> list[Row]:
            with self._linked(lane, deadline) as link:
                return self._call(link, "settle_v1", values, deadline)

        rows = self._lanes.settled(settle)
        answers: list[Union[SettleReply, StoreRejected]] = []
        for lease, (_pos, accepted, state, wait_ms, why) in zip(leases, sorted(rows)):
            if why is not None:  # nothing was written for it
                answers.append(StoreRejected(unreadable(lease.key.job, why)))
            else:
                known = None if state is None else RunState(state)
                answers.append(SettleReply(accepted, known, wait_ms))
        return answers

    def pending(self, jobs: Sequence[str], limit: int) -> Pending:
        asker = self._opened().instance_id
        values = (self._given_now(), text_array(set(jobs)), asker, limit)
        rows = self._ask(self._lanes.timer, "pending_v1", values, make=False)
        [(_job, _ms, next_in_ms, unsettled), *found] = rows
        keys = tuple(RunKey(job, scheduled_ms) for job, scheduled_ms, *_rest in found)
        return Pending(keys, next_in_ms, unsettled)

    def states(self, spans: Sequence[JobSpan]) -> Sequence[Mapping[int, RunState]]:
        found: list[dict[int, RunState]] = [{} for _ in spans]
        if not spans:
            return found
        values = (
            text_array([span.job for span in spans]),
            number_array([span.from_ms for span in spans]),
            number_array([span.to_ms for span in spans]),
        )
        known = {state.value: state for state in RunState}
        rows = self._ask(self._lanes.timer, "states_v1", values, make=False)
        for pos, scheduled_ms, state in rows:
            place: int = pos - 1
            # A state of a newer version says at least that the run is known, so it is not owed.
            found[place][scheduled_ms] = known.get(state, RunState.RUNNING)
        return found

    def prune(self, older_than_ms: int, limit: int) -> Pruned:
        values = (self._given_now(), older_than_ms, limit)
        rows = self._ask(self._lanes.timer, "prune_v1", values)
        deleted = sum(count for count, _job, _ms in rows if count is not None)
        return Pruned(deleted, tuple(RunKey(job, ms) for count, job, ms in rows if count is None))

    # history() and jobs() come from any thread: on the lane that already takes turns with threads.

    def history(self, job: Optional[str], limit: int) -> Sequence[RunRecord]:
        name = "history_of_all" if job is None else "history"
        return readable(self._look(name, {"job": job, "limit": limit}))

    def jobs(self, limit: int) -> Sequence[JobSummary]:
        found: list[JobSummary] = []
        for owed_from_ms, unsettled, job, *rest in self._look("jobs", {"limit": limit}):
            newest = readable([(job, *rest)]) if rest[0] is not None else []
            found.append(JobSummary(job, owed_from_ms, newest[0] if newest else None, unsettled))
        return found

    # -- for who only looks ---------------------------------------------------------------------

    @property
    def names(self) -> Names:
        """Where the store lies in its database."""
        return self._names

    def connected(self, deadline: Deadline) -> Link:
        """Return a connection that no call of this object uses; its user closes it."""
        self._opened()
        return Link(self._client, self._parameters, self._label, deadline)

    # -- calls ---------------------------------------------------------------------------------

    def _given_now(self) -> Optional[int]:
        return None if self._now_ms is None else self._now_ms()

    def _opened(self) -> BackendSettings:
        if self._settings is None:
            message = f"{self._label} is closed"
            raise StoreUnavailable(message)
        return self._settings

    def _deadline(self) -> Deadline:
        return Deadline(self._opened().call_timeout_ms)

    def _ask(
        self, lane: Lane[Link], function: str, values: tuple[object, ...], *, make: bool = True
    ) -> list[Row]:
        """Call a function of the store, in one round trip."""
        deadline = self._deadline()
        with self._linked(lane, deadline, make=make) as link:
            return self._call(link, function, values, deadline)

    def _call(
        self, link: Link, name: str, values: tuple[object, ...], deadline: Deadline, more: str = ""
    ) -> list[Row]:
        values = (self._opened().namespace, *values)
        places = ", ".join(["%s"] * len(values))
        statement = f"SELECT *{more} FROM {{schema}}.{{prefix}}{name}({places})"
        return link.ask(self._names.filled(statement), values, deadline)

    def _look(self, name: str, values: Mapping[str, object]) -> list[Row]:
        """Read, by the text of a file."""
        deadline = self._deadline()
        with self._linked(self._lanes.settle, deadline, make=False) as link:
            values = {"space": self._opened().namespace, **values}
            return link.ask(self._names.filled(_BY_INDEX + sql_of(name)), values, deadline)

    @contextmanager
    def _linked(
        self, lane: Lane[Link], deadline: Deadline, *, make: bool = True
    ) -> Generator[Link, None, None]:
        """Keep a lane, and give out its connection."""
        with self._held(lane, deadline):
            yield self._link(lane, deadline, make=make)[0]

    @contextmanager
    def _held(self, lane: Lane[Link], deadline: Deadline) -> Generator[None, None, None]:
        with lane.held(deadline):
            self._opened()  # not closed while this call waited
            try:
                yield
            finally:
                link = lane.connection
                if self._settings is None or (link is not None and not link.is_sound):
                    lane.drop()  # closed meanwhile, or suspect

    def _link(
        self, lane: Lane[Link], deadline: Deadline, *, make: bool
    ) -> tuple[Link, Optional[Facts]]:
        """Return the lane's connection, and what the store says to a new one."""
        if lane.connection is not None and not lane.connection.is_quiet():
            lane.drop()
        if lane.connection is not None:
            return lane.connection, None
        link = Link(self._client, self._parameters, self._label, deadline)
        try:
            facts = self._met(link, deadline, make=make)
        except BaseException:
            link.close()
            raise
        lane.connection = link
        return link, facts

    def _met(self, link: Link, deadline: Deadline, *, make: bool) -> Facts:
        try:
            return met(link, self._names, self._label, make=make, deadline=deadline)
        except OutcomeUnknown as error:  # of a look at the store: the command was not sent
            raise StoreUnavailable(str(error)) from error
