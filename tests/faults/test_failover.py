"""Failovers of the stores of leases: what they forget, and that nothing else is doubled or lost.

Instances work while a replica is cut off from its primary; then it takes over. What the library can
see of it is told: see docs/stores.rst. ``LEASECRON_SYNC_LONG=1`` in the environment plays all.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Callable

import pytest

from leasecron_sync.backends.postgres import PostgresLease
from leasecron_sync.backends.redis import RedisLease
from tests.faults.crew import LIMIT_S, now_ms
from tests.faults.failover_crew import FailoverCrew
from tests.faults.processes import LONG
from tests.services.fixtures import Own
from tests.services.postgres import PASSWORD, USER, PostgresServer, execute
from tests.services.process import eventually
from tests.services.proxy import Proxy
from tests.services.server import Server

pytestmark = [pytest.mark.slow, pytest.mark.timeout(150)]

often = pytest.mark.skipif(not LONG, reason="only with LEASECRON_SYNC_LONG=1")

INSTANCES = 3
LOST_DATA = "the store has lost its data"
CUT_RUNS = 12 if LONG else 4
"""So many runs come to their end while the replica receives nothing."""

LAG_S = 1

Proxies = Callable[[Server], Proxy]


def fail_over(crew: FailoverCrew, kill: Callable[[], object], promote: Callable[[], object]) -> int:
    """Kill the primary while a run is under way, and let the replica take over.

    Returns:
        When the primary was killed.
    """
    crew.wait_at_work()
    since_ms = now_ms()
    kill()
    crew.died()
    crew.wait_told("store_down", INSTANCES, since_ms)
    promote()
    crew.wait_told("store_back", INSTANCES, since_ms)
    crew.wait_finished()
    return since_ms


def told_of(crew: FailoverCrew, since_ms: int) -> None:
    """Each instance has told of the outage once or twice, and of its end."""
    for event in ("store_down", "store_back"):
        told = [entry.instance for entry in crew.told(event, since_ms)]
        assert len(set(told)) == INSTANCES
        assert max(map(told.count, told)) <= 2, event


# -- PostgreSQL ------------------------------------------------------------------------------------


class Pair:
    """A PostgreSQL server and its streaming replica, with a proxy between them."""

    def __init__(self, own: Own, proxy: Proxies, folder: Path) -> None:
        self.primary = own.postgres()
        self.replica = own.replica(self.primary)
        self.between = proxy(self.primary)
        self._follow()
        here = f"{self.primary.host}:{self.primary.port}"
        both = f"{self.replica.host}:{self.replica.port},{here}"
        # The replica stands first: it refuses writes, so nobody stays with it.
        self.url = self.primary.url.replace(here, both) + "?target_session_attrs=read-write"
        self.now: PostgresServer = self.primary
        self.crew = FailoverCrew(folder, lambda: PostgresLease(self.now.url))

    def _follow(self) -> None:
        place = f"host={self.between.host} port={self.between.port}"
        who = f"user={USER} password={PASSWORD} application_name={USER}"
        execute(self.replica.url, f"ALTER SYSTEM SET primary_conninfo = '{place} {who}'")
        execute(self.replica.url, "SELECT pg_reload_conf()")
        streams = "SELECT count(*) FROM pg_stat_replication WHERE state = 'streaming'"
        assert eventually(
            lambda: self.between.open and execute(self.primary.url, streams) == [(1,)], LIMIT_S
        )

    def start(self) -> None:
        self.crew.start([PostgresLease(self.url) for _ in range(INSTANCES)])

    def promote(self) -> None:
        self.replica.promote()
        self.now = self.replica


@pytest.fixture
def pair(own: Own, proxy: Proxies, tmp_path: Path) -> Iterator[Pair]:
    pair = Pair(own, proxy, tmp_path)
    yield pair
    pair.crew.stop()


def test_an_asynchronous_replica_of_postgresql_forgets_what_it_had_not_received_and_no_more(
    pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    """What was decided meanwhile is executed once more; nothing is lost."""
    crew = pair.crew
    pair.start()
    crew.cut(pair.between.swallow)
    crew.wait_finished(CUT_RUNS)
    since_ms = fail_over(crew, pair.primary.kill, pair.promote)
    found = crew.forgotten()
    assert found.doubled, "what the documents warn of has not happened"
    told_of(crew, since_ms)
    assert LOST_DATA not in caplog.text, "most of it is there"


@often
@pytest.mark.parametrize("cut_off", [False, True])
def test_a_synchronous_replica_of_postgresql_forgets_nothing(pair: Pair, *, cut_off: bool) -> None:
    """Cut off from its replica, the primary answers nobody: nothing is won that could be lost."""
    crew = pair.crew
    pair.primary.configure(synchronous_standby_names="*")
    pair.start()
    if cut_off:
        since_ms = now_ms()
        pair.between.swallow()
        crew.wait_told("store_down", INSTANCES, since_ms)
        silent_ms = now_ms()
        crew.wait_leases_over()
        assert crew.granted_since(silent_ms) == []
        pair.primary.kill()
        pair.promote()
        crew.wait_told("store_back", INSTANCES, since_ms)
        crew.wait_finished()
    else:
        fail_over(crew, pair.primary.kill, pair.promote)
    crew.judged()


@often
def test_a_replica_of_postgresql_that_knew_nothing_of_the_store_is_told_of_as_lost_data(
    pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    crew = pair.crew
    pair.between.swallow()
    pair.start()
    crew.wait_at_work()

    def replace() -> None:
        pair.primary.kill()
        pair.promote()

    crew.empty(replace)
    crew.wait_finished()
    crew.judged()
    assert sum(LOST_DATA in line for line in caplog.messages) == INSTANCES


# -- Redis and Valkey ------------------------------------------------------------------------------


class Moved:
    """A Redis server and its replica behind one address, which moves by an operator's hand."""

    def __init__(self, own: Own, proxy: Proxies, folder: Path) -> None:
        self.primary = own.redis()
        self.between, self.front = proxy(self.primary), proxy(self.primary)
        self.replica = own.redis(replicaof=f"{self.between.host} {self.between.port}")
        follows = "master_link_status:up"
        assert eventually(lambda: follows in str(self.replica.do("INFO", "replication")), LIMIT_S)
        self.url = self.front.url_of(self.primary.url)
        self.crew = FailoverCrew(folder, lambda: RedisLease(self.url))

    def start(self) -> None:
        self.crew.start([RedisLease(self.url) for _ in range(INSTANCES)])

    def promote(self) -> None:
        self.replica.do("REPLICAOF", "NO", "ONE")
        self.front.target = (self.replica.host, self.replica.port)
        self.front.reset()
        self.front.forward()


@pytest.fixture
def moved(own: Own, proxy: Proxies, tmp_path: Path) -> Iterator[Moved]:
    moved = Moved(own, proxy, tmp_path)
    yield moved
    moved.crew.stop()


@often
def test_a_replica_of_redis_that_lags_forgets_what_it_had_not_received_and_no_more(
    moved: Moved, caplog: pytest.LogCaptureFixture
) -> None:
    """What was decided meanwhile is executed once more; nothing is lost."""
    crew = moved.crew
    moved.start()
    crew.cut(moved.between.swallow)
    crew.wait_finished(CUT_RUNS)
    since_ms = fail_over(crew, moved.primary.kill, moved.promote)
    found = crew.forgotten()
    assert found.doubled, "what the documents warn of has not happened"
    told_of(crew, since_ms)
    assert LOST_DATA not in caplog.text, "most of it is there"


def wait_until_only_a_long_run_is_under_way(crew: FailoverCrew) -> None:
    """Wait until nobody calls the store but to renew that run: any other call meets an outage."""
    before = len(crew.entries("started"))

    def alone() -> bool:
        long = [one for one in crew.entries("started")[before:] if one.job == "long"]
        due = {one.scheduled_ms for one in long}
        done = {one.scheduled_ms for one in crew.told("run_finished") if one.job == "beside"}
        return bool(due & done)

    assert eventually(alone, LIMIT_S)


@often
def test_a_failover_that_nobody_notices_is_told_by_who_lost_a_run_and_made_up_for_by_its_job(
    moved: Moved,
) -> None:
    """The replica is promoted and the address moved between two calls: there is no outage.

    The holder of a run that was forgotten learns of it at its next renewal. Its run ends without a
    record then, so that it looks back over the job, also over what had finished. Nobody else learns
    of anything: what other jobs had finished stays without a record.
    """
    crew = moved.crew
    moved.start()
    crew.cut(moved.between.swallow)
    crew.wait_finished(CUT_RUNS)
    wait_until_only_a_long_run_is_under_way(crew)
    since_ms = now_ms()
    moved.promote()
    crew.died()
    moved.primary.kill()
    crew.wait_told("run_lost", 1, since_ms)
    crew.wait_finished(5)
    # One whose call was under way meets an outage; the others do not.
    assert len({one.instance for one in crew.told("store_down", since_ms)}) < INSTANCES
    found = crew.forgotten(settled=False)
    assert "long" in {key.job for key in found.doubled}, "its holder has not looked back"


@often
def test_replicas_that_writes_must_reach_bound_what_a_failover_of_redis_forgets(
    moved: Moved,
) -> None:
    """Cut off, the primary grants for little longer than min-replicas-max-lag, then refuses."""
    moved.primary.configure(min_replicas_to_write=1, min_replicas_max_lag=LAG_S)
    crew = moved.crew
    moved.start()
    since_ms = now_ms()
    crew.cut(moved.between.swallow)
    crew.wait_told("store_down", INSTANCES, since_ms)
    silent_ms = now_ms()
    crew.wait_leases_over(2_000)
    assert crew.granted_since(silent_ms) == [], "granted after it was told to refuse"
    moved.primary.kill()
    crew.died()
    moved.promote()
    crew.wait_told("store_back", INSTANCES, silent_ms)
    crew.wait_finished()
    found = crew.forgotten()
    # The server counts in whole seconds, and looks once a second.
    assert found.newest_ms < since_ms + (LAG_S + 2) * 1_000


@often
def test_a_replica_of_redis_that_knew_nothing_of_the_store_is_told_of_as_lost_data(
    moved: Moved, caplog: pytest.LogCaptureFixture
) -> None:
    crew = moved.crew
    moved.between.swallow()
    moved.start()
    crew.wait_at_work()

    def replace() -> None:
        moved.primary.kill()
        moved.promote()

    crew.empty(replace)
    crew.wait_finished()
    crew.judged()
    assert sum(LOST_DATA in line for line in caplog.messages) == INSTANCES


@often
@pytest.mark.parametrize("kind", ["redis", "valkey"])
def test_sentinels_that_promote_a_replica_that_lags_forget_what_it_had_not_received_and_no_more(
    own: Own, tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    group = own.sentinels(kind, requirepass=PASSWORD)
    primary, replica = group.servers
    hosts = ",".join(f"{host}:{port}" for host, port in group.addresses)
    url = f"redis+sentinel://:{PASSWORD}@{hosts}/{group.service}/0"
    crew = FailoverCrew(tmp_path, lambda: RedisLease(url))

    def cut() -> None:
        replica.do("CONFIG", "SET", "masterauth", "wrong")
        primary.do("CLIENT", "KILL", "TYPE", "replica")

    try:
        crew.start([RedisLease(url) for _ in range(INSTANCES)])
        crew.cut(cut)
        crew.wait_finished(CUT_RUNS)
        since_ms = fail_over(
            crew,
            primary.kill,
            lambda: eventually(lambda: group.primary() is replica, LIMIT_S),
        )
        found = crew.forgotten()
        assert found.doubled, "what the documents warn of has not happened"
        told_of(crew, since_ms)
        assert LOST_DATA not in caplog.text, "most of it is there"
    finally:
        crew.stop()
