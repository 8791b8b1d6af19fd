"""What a Redis or Valkey server and the network do to instances, and what comes of it.

Each fault lasts until every instance that it meets has noticed it, and longer than a lease. Then
the history is judged: no run is doubled, and when the store is back none is lost.

``LEASECRON_SYNC_LONG=1`` in the environment plays more kinds of each fault.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Callable

import pytest

from leasecron_sync.backends._redis_scripts import keys_of, script_of
from leasecron_sync.backends.redis import RedisLease
from leasecron_sync.testing import Report
from tests.faults.crew import LIMIT_S, Crew, now_ms
from tests.faults.processes import LONG
from tests.services.fixtures import Own
from tests.services.ports import free_port
from tests.services.process import eventually
from tests.services.proxy import Proxy
from tests.services.redis import RedisServer
from tests.services.redis_groups import Cluster
from tests.services.relay import How
from tests.services.server import Server

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120 if LONG else 60)]

often = pytest.mark.skipif(not LONG, reason="only with LEASECRON_SYNC_LONG=1")

INSTANCES = 3
USER, PASSWORD = "alice", "s3cret"
# Nothing more is needed.
RIGHTS = (
    "+eval +evalsha +info +time +type +hget +hset +hsetnx +hexists +hdel +zadd +zrem +zrange "
    "+zrangebylex +zrevrangebylex +zrangebyscore +zrevrange +zrevrangebyscore +zlexcount"
)
ACCOUNT = f"{USER} on >{PASSWORD} ~leasecron:* {RIGHTS}"
STOP_S = 5.0 if LONG else 1.0


class Scene:
    """Instances on a server of their own, as a user who may do what they need and no more."""

    def __init__(self, server: RedisServer, folder: Path) -> None:
        self.server = server
        self.url = server.url.replace("://", f"://{USER}:{PASSWORD}@")
        self.crew = Crew(folder, lambda: RedisLease(self.server.url))

    def start(self, *places: Proxy) -> None:
        """Start an instance behind each of these, and directly on the server up to the usual."""
        urls = [place.url_of(self.url) for place in places]
        urls += [self.url] * (INSTANCES - len(urls))
        self.crew.start([RedisLease(url) for url in urls])

    def kill_clients(self) -> int:
        """End every connection of the instances; return how many there were."""
        ended = self.server.do("CLIENT", "KILL", "USER", USER)
        assert isinstance(ended, int)
        return ended

    def connections(self) -> int:
        """Return how many connections the instances have."""
        listed = self.server.do("CLIENT", "LIST")
        assert isinstance(listed, str)
        return listed.count(f" user={USER} ")


@pytest.fixture
def scene(own: Own, tmp_path: Path) -> Iterator[Scene]:
    scene = Scene(own.redis(user=ACCOUNT), tmp_path)
    yield scene
    scene.crew.stop()


@pytest.fixture(autouse=True)
def no_secrets(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Whatever happens, no line of the log shows who logs in, and with what."""
    with caplog.at_level(logging.WARNING):
        yield
    assert not any(text in caplog.text for text in (PASSWORD, f"{USER}:", f'"{USER}"'))


def endure(
    scene: Scene,
    begin: Callable[[], object],
    end: Callable[[], object],
    *,
    meets: int = INSTANCES,
    lasts_ms: int = 0,
) -> Report:
    """Let a fault begin, wait until it was noticed, let it end, and judge."""
    crew = scene.crew
    crew.wait_at_work(0 if meets < INSTANCES else None)  # with one that the fault meets
    since_ms = now_ms()
    begin()
    crew.wait_told("store_down", meets, since_ms)
    crew.wait_leases_over(lasts_ms)
    assert crew.dead_threads() == []
    back_ms = now_ms()
    end()
    crew.wait_told("store_back", meets, back_ms)
    crew.wait_finished()
    report = crew.judged()
    # One line when it begins and one when it ends, however long it is.
    for event in ("store_down", "store_back"):
        told = [entry.instance for entry in crew.told(event, since_ms)]
        assert max(map(told.count, told)) <= 2, event
    assert eventually(lambda: scene.connections() == 0, LIMIT_S), "a connection is left"
    return report


# -- the server ------------------------------------------------------------------------------------


def test_a_server_that_is_killed_and_comes_back_with_what_it_wrote(scene: Scene) -> None:
    scene.start()
    endure(scene, scene.server.kill, scene.server.start)


@often
def test_a_valkey_server_that_is_killed_and_comes_back(own: Own, tmp_path: Path) -> None:
    scene = Scene(own.valkey(user=ACCOUNT), tmp_path)
    scene.start()
    endure(scene, scene.server.kill, scene.server.start)


@often
def test_a_server_that_is_stopped_and_started(scene: Scene) -> None:
    scene.start()
    endure(scene, scene.server.stop, scene.server.start)


@pytest.mark.parametrize("lasts_ms", [0, pytest.param(40_000, marks=often)])
def test_a_server_that_stands_still(scene: Scene, lasts_ms: int) -> None:
    """What was sent to it takes effect when it goes on, long after its sender has given up."""
    scene.start()
    report = endure(scene, scene.server.pause, scene.server.resume, lasts_ms=lasts_ms)
    assert report.totals.unanswered > 0


def test_connections_and_scripts_that_are_ended_again_and_again(scene: Scene) -> None:
    """A connection that has died is no outage, and a server without the scripts neither."""
    scene.start()
    crew = scene.crew
    for _ in range(40 if LONG else 6):
        crew.wait_finished(1)
        assert scene.kill_clients() > 0
        scene.server.do("SCRIPT", "FLUSH")
    report = crew.judged()
    assert report.totals.takeovers == 0
    assert eventually(lambda: scene.connections() == 0, LIMIT_S)


@often
@pytest.mark.parametrize("how", ["as a replica", "too few replicas"])
def test_a_server_that_takes_no_writes_for_a_while(scene: Scene, how: str) -> None:
    scene.start()
    server = scene.server
    if how == "as a replica":  # of a primary that cannot be reached, so it keeps its data
        primary = (server.host, str(free_port()))
        endure(
            scene,
            lambda: server.do("REPLICAOF", *primary),
            lambda: server.do("REPLICAOF", "NO", "ONE"),
            lasts_ms=30_000,
        )
    else:
        endure(
            scene,
            lambda: server.do("CONFIG", "SET", "min-replicas-to-write", "1"),
            lambda: server.do("CONFIG", "SET", "min-replicas-to-write", "0"),
        )


@often
def test_a_full_server(scene: Scene) -> None:
    """What runs goes on; no lease is lost."""
    scene.start()
    report = endure(
        scene,
        lambda: scene.server.do("CONFIG", "SET", "maxmemory", "1"),
        lambda: scene.server.do("CONFIG", "SET", "maxmemory", "0"),
    )
    assert report.totals.takeovers == 0
    assert scene.crew.told("run_lost") == []


@often
@pytest.mark.parametrize("lasts_ms", [0, 10_000])
def test_a_password_that_is_changed_on_the_server_first(scene: Scene, lasts_ms: int) -> None:
    def password(text: str) -> None:
        scene.server.do("ACL", "SETUSER", USER, "resetpass", f">{text}")
        scene.kill_clients()

    scene.start()
    endure(scene, lambda: password("an0ther"), lambda: password(PASSWORD), lasts_ms=lasts_ms)


@often
def test_rights_that_are_taken_away_for_a_while(scene: Scene) -> None:
    """Nothing is half-written: what was in the middle of its run is settled in the end."""
    scene.start()
    endure(
        scene,
        lambda: scene.server.do("ACL", "SETUSER", USER, "-zadd"),
        lambda: scene.server.do("ACL", "SETUSER", USER, "+zadd"),
    )


@often
def test_a_script_of_somebody_else_that_does_not_end(scene: Scene) -> None:
    """The server answers everybody that it is busy, until its operator ends the script."""
    server = scene.server
    server.configure(busy_reply_threshold="100")
    scene.start()

    def begin() -> None:
        with server.connect() as connection:
            connection.send("EVAL", "while true do end", "0")

    endure(scene, begin, lambda: server.do("SCRIPT", "KILL"))


def test_a_store_that_is_emptied_is_noticed_by_every_instance(
    scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    """What was claimed by then may run again; what is claimed afterwards is doubled no more."""
    scene.start()
    crew = scene.crew
    crew.wait_at_work()
    since_ms = now_ms()
    crew.empty(lambda: scene.server.do("FLUSHALL"))

    def noticed() -> int:
        return sum("the store has lost its data" in line for line in caplog.messages)

    assert eventually(lambda: noticed() == INSTANCES, LIMIT_S)
    crew.wait_finished()
    crew.judged()
    assert noticed() == INSTANCES
    # Whoever had a run under way may have looked back, and learned it without an outage.
    downs, backs = (
        [entry.instance for entry in crew.told(event, since_ms)]
        for event in ("store_down", "store_back")
    )
    assert sorted(downs) == sorted(backs)
    assert len(set(downs)) == len(downs)


# -- stopping --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "what",
    ["stands still", *(pytest.param(what, marks=often) for what in ("killed", "read-only"))],
)
def test_stopping_returns_in_time_while_the_store_is_away(scene: Scene, what: str) -> None:
    """What the instances had begun is taken up by those that are started afterwards."""
    server = scene.server
    faults: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
        "stands still": (server.pause, server.resume),
        "killed": (server.kill, server.start),
        "read-only": (
            lambda: server.do("REPLICAOF", server.host, str(free_port())),
            lambda: server.do("REPLICAOF", "NO", "ONE"),
        ),
    }
    begin, end = faults[what]
    scene.start()
    crew = scene.crew
    crew.wait_at_work()
    since_ms = now_ms()
    begin()
    crew.wait_told("store_down", INSTANCES, since_ms)
    assert crew.stop_at_once(STOP_S) < STOP_S + 3.0
    end()
    scene.start()
    crew.judged()


# -- the network -----------------------------------------------------------------------------------

# Every instance is behind a proxy where one is: it costs time, and who is slower wins nothing.


@often
@pytest.mark.parametrize("meets", [1, INSTANCES])
def test_a_network_that_falls_silent(
    scene: Scene, proxy: Callable[[Server], Proxy], meets: int
) -> None:
    """Also where it falls silent for one of them: what that one had begun is taken over."""
    between = [proxy(scene.server) for _ in range(INSTANCES)]
    scene.start(*between)

    def silent() -> None:
        for one in between[:meets]:
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
    scene.start(between, *(proxy(scene.server) for _ in range(INSTANCES - 1)))
    endure(scene, lambda: between.hold("to_server"), between.forward, meets=1)


@often
def test_a_network_that_refuses_everybody(scene: Scene, proxy: Callable[[Server], Proxy]) -> None:
    between = proxy(scene.server)
    scene.start(between, *(proxy(scene.server) for _ in range(INSTANCES - 1)))

    def refuse() -> None:
        between.refuse()
        between.reset()

    endure(scene, refuse, between.forward, meets=1)


def is_script(name: str) -> Callable[[bytes], bool]:
    """Return what recognizes the call of a script."""
    digest = script_of(name).digest
    return lambda request: digest in request


SCRIPTS = ("claim", "renew", "settle")


@pytest.mark.parametrize(
    "how", ["reset", pytest.param("cut", marks=often), pytest.param("silence", marks=often)]
)
def test_replies_that_are_lost(scene: Scene, proxy: Callable[[Server], Proxy], how: How) -> None:
    """The server has done what it was asked for, and the one who asked does not know."""
    between = proxy(scene.server)
    scene.start(between, between, between)
    crew = scene.crew
    lost = 0
    for name in SCRIPTS * (3 if LONG else 1):
        rule = between.lose_reply(is_script(name), how=how)
        assert rule.fired.wait(LIMIT_S), name
        lost += 1
        crew.wait_finished(1)
    report = crew.judged()
    assert report.totals.unanswered >= lost
    if how != "silence":  # asked again at once, under the same lease
        assert report.totals.takeovers == 0
        assert crew.told("run_lost") == []


@often
@pytest.mark.parametrize("name", ["register", "pending", "states", "prune"])
def test_replies_that_are_lost_after_an_outage(
    scene: Scene, proxy: Callable[[Server], Proxy], name: str
) -> None:
    """An instance that comes back asks for more than one in the middle of its work."""
    between = proxy(scene.server)
    scene.start(between, between, between)
    rule = between.lose_reply(is_script(name))
    endure(scene, scene.server.kill, scene.server.start)
    assert rule.fired.is_set() or name == "prune"


@often
@pytest.mark.parametrize("how", ["reset", "silence"])
def test_requests_that_are_lost(scene: Scene, proxy: Callable[[Server], Proxy], how: How) -> None:
    between = proxy(scene.server)
    scene.start(between, between, between)
    crew = scene.crew
    for name in SCRIPTS:
        rule = between.lose_request(is_script(name), how=how)
        assert rule.fired.wait(LIMIT_S), name
        crew.wait_finished(2)
    crew.judged()


# -- several servers -------------------------------------------------------------------------------


@often
def test_a_primary_that_dies_after_its_replica_has_everything(own: Own, tmp_path: Path) -> None:
    """What the replica had not received would be forgotten; here nothing is."""
    group = own.sentinels(requirepass=PASSWORD)
    hosts = ",".join(f"{host}:{port}" for host, port in group.addresses)
    url = f"redis+sentinel://:{PASSWORD}@{hosts}/{group.service}/0"
    crew = Crew(tmp_path, lambda: RedisLease(url))
    try:
        crew.start([RedisLease(url) for _ in range(INSTANCES)])
        crew.wait_at_work()
        primary, replica = group.servers
        since_ms = now_ms()
        primary.do("CLIENT", "PAUSE", "10000", "WRITE")
        assert eventually(lambda: _offset(primary) == _offset(replica), LIMIT_S)
        primary.kill()
        crew.wait_told("store_down", INSTANCES, since_ms)
        assert eventually(lambda: group.primary() is replica, LIMIT_S)
        crew.wait_told("store_back", INSTANCES, since_ms)
        primary.start()  # as a primary, until the sentinels tell it otherwise
        crew.wait_finished(10)
        crew.judged()
    finally:
        crew.stop()


def _offset(server: RedisServer) -> int:
    told = server.do("INFO", "replication")
    assert isinstance(told, str)
    lines = dict(line.split(":", 1) for line in told.splitlines() if ":" in line)
    place = lines["master_repl_offset"]
    return int(lines.get("slave_repl_offset", place))


@often
def test_keys_that_move_to_another_node_of_the_cluster(own: Own, tmp_path: Path) -> None:
    cluster = own.cluster()
    url = "redis+cluster://" + ",".join(f"{host}:{port}" for host, port in cluster.addresses)
    crew = Crew(tmp_path, lambda: RedisLease(url))
    try:
        crew.start([RedisLease(url) for _ in range(INSTANCES)])
        keys = keys_of("default")
        for _ in range(len(cluster.nodes) + 1):
            crew.wait_at_work()
            move(cluster, keys[0])
            crew.wait_finished()
        crew.judged()
    finally:
        crew.stop()


def move(cluster: Cluster, key: str) -> None:
    """Move the slot of a key to the next node, as an operator would."""
    number = cluster.nodes[0].do("CLUSTER", "KEYSLOT", key)
    assert isinstance(number, int)
    slot = str(number)
    owners = [node for node in cluster.nodes if _has(node, slot)]
    assert len(owners) == 1
    source = owners[0]
    target = cluster.nodes[(cluster.nodes.index(source) + 1) % len(cluster.nodes)]
    ids = [str(node.do("CLUSTER", "MYID")) for node in (source, target)]
    target.do("CLUSTER", "SETSLOT", slot, "IMPORTING", ids[0])
    source.do("CLUSTER", "SETSLOT", slot, "MIGRATING", ids[1])

    def moved() -> bool:
        found = source.do("CLUSTER", "GETKEYSINSLOT", slot, "100")
        assert isinstance(found, list)
        if found:
            keys = [str(one) for one in found]
            place = (target.host, str(target.port), "", "0", "5000")
            source.do("MIGRATE", *place, "KEYS", *keys)
        return not found

    assert eventually(moved, LIMIT_S)
    for node in (target, *(node for node in cluster.nodes if node is not target)):
        node.do("CLUSTER", "SETSLOT", slot, "NODE", ids[1])


def _has(node: RedisServer, slot: str) -> bool:
    found = node.do("CLUSTER", "COUNTKEYSINSLOT", slot)
    assert isinstance(found, int)
    return found > 0
