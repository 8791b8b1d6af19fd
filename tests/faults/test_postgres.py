"""What a PostgreSQL server, a pooler and the network do to instances, and what comes of it.

Each fault lasts until every instance that it meets has noticed it, and longer than a lease. Then
the history is judged: no run is doubled, and when the store is back none is lost.

``LEASECRON_SYNC_LONG=1`` in the environment plays more kinds of each fault.
"""

from __future__ import annotations

import logging
import random
import threading
import uuid
from collections.abc import Iterator
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Callable, Union

import pytest

from leasecron_sync.backends.base import BackendSettings
from leasecron_sync.backends.postgres import PostgresLease
from leasecron_sync.clock import SystemClock
from leasecron_sync.model import (
    JobStamp,
    LeaseClaim,
    LeaseRef,
    OnOverlap,
    Outcome,
    RunKey,
    Settlement,
)
from leasecron_sync.testing import Report
from tests.faults.crew import LIMIT_S, Crew, now_ms
from tests.faults.processes import LONG
from tests.services.fixtures import Own
from tests.services.postgres import PASSWORD, PostgresServer, as_role, execute, through
from tests.services.process import eventually
from tests.services.proxy import Proxy, postgres_answered
from tests.services.relay import How
from tests.services.server import Server

pytestmark = [pytest.mark.slow, pytest.mark.timeout(90)]

often = pytest.mark.skipif(not LONG, reason="only with LEASECRON_SYNC_LONG=1")

INSTANCES = 3
ROLE, ROLE_PASSWORD = "alice", "s3cret"


class Scene:
    """Instances on a server of their own."""

    def __init__(
        self, server: PostgresServer, proxy: Callable[[Server], Proxy], folder: Path
    ) -> None:
        self._proxy = proxy
        self.server = server
        # Made by an administrator: the instances' role may use it, and no more.
        backend = PostgresLease(server.url, schema="cron")
        self.sql(backend.schema_sql().replace("%", "%%"))
        self.sql(f"CREATE ROLE {ROLE} LOGIN PASSWORD '{ROLE_PASSWORD}'")
        self.sql(f"GRANT USAGE ON SCHEMA cron TO {ROLE}")
        self.sql(f"GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA cron TO {ROLE}")
        self.url = as_role(server.url, ROLE, ROLE_PASSWORD)
        self.crew = Crew(folder, lambda: PostgresLease(self.server.url, schema="cron"))

    def sql(self, statement: str) -> list[tuple[object, ...]]:
        """Execute a statement as an administrator would."""
        return execute(self.server.url, statement)

    def start(self, *places: Union[Server, Proxy]) -> None:
        """Start an instance behind each of these, and behind quiet proxies up to the usual.

        Directly on the server they would win nearly all runs: a proxy costs time.
        """
        urls = [
            place.url_of(self.url) if isinstance(place, Proxy) else through(self.url, place)
            for place in places
        ]
        urls += [
            self._proxy(self.server).url_of(self.url) if places else self.url
            for _ in range(INSTANCES - len(urls))
        ]
        self.crew.start([PostgresLease(url, schema="cron") for url in urls])

    def terminate_all(self) -> int:
        """End every session of the instances; return how many there were."""
        ended = self.sql(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            f"WHERE usename = '{ROLE}' AND pid <> pg_backend_pid()"
        )
        return len(ended)

    def sessions(self) -> int:
        """Return how many sessions the instances have."""
        [(count,)] = self.sql(
            f"SELECT count(*) FROM pg_stat_activity WHERE usename = '{ROLE}'",
        )
        assert isinstance(count, int)
        return count


@pytest.fixture
def scene(own: Own, proxy: Callable[[Server], Proxy], tmp_path: Path) -> Iterator[Scene]:
    scene = Scene(own.postgres(), proxy, tmp_path)
    yield scene
    scene.crew.stop()


@pytest.fixture(autouse=True)
def no_secrets(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Whatever happens, no line of the log shows who logs in, and with what."""
    with caplog.at_level(logging.WARNING):
        yield
    assert not any(text in caplog.text for text in (ROLE_PASSWORD, f"{ROLE}:", f'"{ROLE}"'))
    assert PASSWORD not in caplog.text.replace("secrets", "")


def endure(
    scene: Scene,
    begin: Callable[[], object],
    end: Callable[[], object],
    *,
    meets: int = INSTANCES,
    sessions: int = 0,
) -> Report:
    """Let a fault begin, wait until it was noticed, let it end, and judge."""
    crew = scene.crew
    crew.wait_at_work(0 if meets < INSTANCES else None)  # with one that the fault meets
    since_ms = now_ms()
    begin()
    crew.wait_told("store_down", meets, since_ms)
    crew.wait_leases_over()
    back_ms = now_ms()
    end()
    crew.wait_told("store_back", meets, back_ms)
    crew.wait_finished()
    report = crew.judged()
    # One line when it begins and one when it ends, however long it is.
    for event in ("store_down", "store_back"):
        told = [entry.instance for entry in crew.told(event, since_ms)]
        assert max(map(told.count, told)) <= 2, event
    assert eventually(lambda: scene.sessions() <= sessions, LIMIT_S), "a session is left"
    return report


# -- the server ------------------------------------------------------------------------------------


def test_a_server_that_is_killed_and_comes_back(scene: Scene) -> None:
    scene.start()
    endure(scene, scene.server.kill, scene.server.start)


@often
def test_a_server_that_is_stopped_and_started(scene: Scene) -> None:
    scene.start()
    endure(scene, scene.server.stop, scene.server.start)


def test_a_server_that_stands_still(scene: Scene) -> None:
    """What was sent to it takes effect when it goes on, long after its sender has given up."""
    scene.start()
    report = endure(scene, scene.server.pause, scene.server.resume)
    assert report.totals.unanswered > 0


def test_sessions_that_are_ended_again_and_again(scene: Scene) -> None:
    """A connection that has died is no outage."""
    scene.start()
    crew = scene.crew
    for _ in range(40 if LONG else 6):
        crew.wait_finished(1)
        assert scene.terminate_all() > 0
    crew.judged()
    assert eventually(lambda: scene.sessions() == 0, LIMIT_S)


@often
def test_a_server_that_takes_no_writes_for_a_while(scene: Scene) -> None:
    def read_only(value: str) -> None:
        scene.sql(f"ALTER ROLE {ROLE} SET default_transaction_read_only = {value}")
        scene.terminate_all()

    scene.start()
    endure(scene, lambda: read_only("on"), lambda: read_only("off"))


@often
def test_a_password_that_is_changed_on_the_server_first(scene: Scene) -> None:
    def password(text: str) -> None:
        scene.sql(f"ALTER ROLE {ROLE} PASSWORD '{text}'")
        scene.terminate_all()

    scene.start()
    endure(scene, lambda: password("an0ther"), lambda: password(ROLE_PASSWORD))


@often
def test_rights_that_are_taken_away_for_a_while(scene: Scene) -> None:
    scene.start()
    endure(
        scene,
        lambda: scene.sql(f"REVOKE UPDATE ON cron.leasecron_run FROM {ROLE}"),
        lambda: scene.sql(f"GRANT UPDATE ON cron.leasecron_run TO {ROLE}"),
    )


@often
def test_a_server_without_a_free_session(scene: Scene) -> None:
    def limit(count: int) -> None:
        scene.sql(f"ALTER ROLE {ROLE} CONNECTION LIMIT {count}")
        scene.terminate_all()

    scene.start()
    endure(scene, lambda: limit(0), lambda: limit(-1))


@often
def test_a_table_that_somebody_locks(scene: Scene) -> None:
    scene.start()
    locked, free = threading.Event(), threading.Event()

    def hold() -> None:
        import psycopg2

        connection = psycopg2.connect(scene.server.url)
        try:
            connection.cursor().execute("LOCK TABLE cron.leasecron_run")
            locked.set()
            free.wait(LIMIT_S)
        finally:
            connection.close()

    holder = threading.Thread(target=hold)

    def begin() -> None:
        holder.start()
        assert locked.wait(LIMIT_S)

    def end() -> None:
        free.set()
        holder.join(LIMIT_S)

    endure(scene, begin, end)


# -- the network -----------------------------------------------------------------------------------


@pytest.mark.parametrize("meets", [1, pytest.param(INSTANCES, marks=often)])
def test_a_network_that_falls_silent(
    scene: Scene, proxy: Callable[[Server], Proxy], meets: int
) -> None:
    """Also where it falls silent for one of them: what that one had begun is taken over."""
    between = [proxy(scene.server) for _ in range(meets)]
    scene.start(*between)

    def silent() -> None:
        for one in between:
            one.swallow()

    def forward() -> None:
        if meets < INSTANCES:
            scene.crew.wait_told("run_taken_over", 1, 0)
        for one in between:
            one.forward()

    endure(scene, silent, forward, meets=meets)


@often
def test_a_network_that_delivers_late_what_was_given_up(
    scene: Scene, proxy: Callable[[Server], Proxy]
) -> None:
    between = proxy(scene.server)
    scene.start(between)
    endure(scene, lambda: between.hold("to_server"), between.forward, meets=1)


@often
def test_a_network_that_refuses_everybody(scene: Scene, proxy: Callable[[Server], Proxy]) -> None:
    between = proxy(scene.server)
    scene.start(between)

    def refuse() -> None:
        between.refuse()
        between.reset()

    endure(scene, refuse, between.forward, meets=1)


COMMANDS = (b"claim_v1(", b"renew_v1(", b"settle_v1(")


@pytest.mark.parametrize(
    "how", ["reset", pytest.param("cut", marks=often), pytest.param("silence", marks=often)]
)
def test_replies_that_are_lost(scene: Scene, proxy: Callable[[Server], Proxy], how: How) -> None:
    """The server has done what it was asked for, and the one who asked does not know."""
    between = proxy(scene.server)
    scene.start(between, between)
    crew = scene.crew
    lost = 0
    for command in COMMANDS * (3 if LONG else 1):
        rule = between.lose_reply(
            lambda request, command=command: command in request,  # type: ignore[misc]
            complete=postgres_answered,
            how=how,
        )
        assert rule.fired.wait(LIMIT_S), command
        lost += 1
        crew.wait_finished(1)
    report = crew.judged()
    assert report.totals.unanswered >= lost
    if how != "silence":  # asked again at once, under the same lease
        assert report.totals.takeovers == 0
        assert crew.told("run_lost") == []


@often
@pytest.mark.parametrize("how", ["reset", "silence"])
def test_requests_that_are_lost(scene: Scene, proxy: Callable[[Server], Proxy], how: How) -> None:
    between = proxy(scene.server)
    scene.start(between, between)
    crew = scene.crew
    for command in COMMANDS:
        rule = between.lose_request(
            lambda request, command=command: command in request,  # type: ignore[misc]
            how=how,
        )
        assert rule.fired.wait(LIMIT_S), command
        crew.wait_finished(2)
    crew.judged()


# -- a pooler --------------------------------------------------------------------------------------


def test_pgbouncer_with_fewer_sessions_than_instances_need(scene: Scene, own: Own) -> None:
    pooler = own.pgbouncer(scene.server, default_pool_size=2)
    scene.start(pooler, pooler, pooler)
    scene.crew.wait_finished(5)
    assert scene.sessions() <= 2
    report = scene.crew.judged()
    assert report.totals.unanswered == 0


@often
@pytest.mark.parametrize("what", ["killed", "stands still", "server killed"])
def test_pgbouncer_when_it_or_its_server_fails(scene: Scene, own: Own, what: str) -> None:
    pooler = own.pgbouncer(scene.server, default_pool_size=3, server_login_retry=1)
    scene.start(pooler, pooler, pooler)
    faults: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
        "killed": (pooler.kill, pooler.start),
        "stands still": (pooler.pause, pooler.resume),
        "server killed": (scene.server.kill, scene.server.start),
    }
    endure(scene, *faults[what], sessions=3)  # those are the pooler's


@often
def test_pgbouncer_when_the_sessions_of_its_server_are_ended(scene: Scene, own: Own) -> None:
    pooler = own.pgbouncer(scene.server, default_pool_size=3)
    scene.start(pooler, pooler, pooler)
    for _ in range(10):
        scene.crew.wait_finished(1)
        scene.terminate_all()
    scene.crew.judged()


# -- another server --------------------------------------------------------------------------------


@often
def test_a_replica_that_follows_synchronously_takes_over(scene: Scene, own: Own) -> None:
    """Nothing is forgotten, and no instance ever asks the one that takes no writes."""
    primary, replica = scene.server, own.replica(scene.server)
    primary.configure(synchronous_standby_names="*")
    place = f"{primary.host}:{primary.port}"
    both = f"{replica.host}:{replica.port},{place}"
    scene.url = scene.url.replace(place, both) + "?target_session_attrs=read-write"
    scene.start()

    def fail_over() -> None:
        replica.promote()
        scene.server = replica

    endure(scene, primary.kill, fail_over)


# -- calls of every kind at once -------------------------------------------------------------------


class Caller:
    """One instance that asks for whatever comes to its mind, of a few runs that all have in mind.

    Args:
        url: Of the database.
        rank: Decides what.
        refs: The leases that were granted, of all callers.
    """

    JOBS = tuple(f"job {number}" for number in range(6))

    def __init__(self, url: str, rank: int, refs: list[LeaseRef]) -> None:
        self._backend = PostgresLease(url, schema="cron")
        self._name = f"caller {rank}"
        self._dice = random.Random(rank)
        self._refs = refs
        self.calls = 0

    def call_until(self, end: threading.Event) -> None:
        """Call; an error ends it."""
        backend, dice = self._backend, self._dice
        backend.open(BackendSettings("default", self._name, 5_000))
        steps = (self._claim, self._claim, self._renew, self._settle, self._prune, self._register)
        try:
            while not end.is_set():
                dice.choice(steps)()
                self.calls += 1
        finally:
            backend.close()

    def _claim(self) -> None:
        claims = [self._intend() for _ in range(self._dice.choice([1, 3, 8]))]
        replies = self._backend.claim(claims)
        self._refs += [reply.lease.ref for reply in replies if reply.lease is not None]

    def _intend(self) -> LeaseClaim:
        dice, at_ms = self._dice, now_ms()
        return LeaseClaim(
            key=RunKey(dice.choice(self.JOBS), at_ms - dice.randrange(60)),
            due_ms=at_ms - 10_000,
            holder=self._name,
            decision_id=uuid.uuid4().hex,
            lease_ms=dice.choice([5, 50, 500]),
            max_attempts=100,
            on_overlap=dice.choice(list(OnOverlap)),
            max_age_ms=60_000,
            takeover_ms=dice.choice([5, 100, 60_000]),
        )

    def _some(self) -> list[LeaseRef]:
        newest = self._refs[-60:]
        return self._dice.sample(newest, min(len(newest), self._dice.choice([1, 5, 12])))

    def _renew(self) -> None:
        self._backend.renew(self._some(), 50)

    def _settle(self) -> None:
        asked = [(ref, Settlement(self._dice.choice(list(Outcome)))) for ref in self._some()]
        if asked:
            self._backend._settle_all(asked, SystemClock().steady_ms() + 5_000)

    def _prune(self) -> None:
        self._backend.prune(self._dice.choice([0, 5, 40]), self._dice.choice([3, 1_000]))

    def _register(self) -> None:
        self._backend.register([JobStamp(job, "x") for job in self._dice.sample(self.JOBS, 4)])


def test_batches_of_every_kind_at_once_never_wait_for_each_other_in_a_circle(scene: Scene) -> None:
    refs: list[LeaseRef] = []
    callers = [Caller(scene.url, rank, refs) for rank in range(8)]
    end = threading.Event()
    with ThreadPoolExecutor(len(callers)) as pool:
        waiting = [pool.submit(caller.call_until, end) for caller in callers]
        wait(waiting, timeout=60 if LONG else 3, return_when=FIRST_EXCEPTION)
        end.set()
        for one in waiting:
            one.result(LIMIT_S)
    assert min(caller.calls for caller in callers) > 10
