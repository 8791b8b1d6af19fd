"""Failovers of the stores of claims: what they forget, and that nothing else is doubled or lost.

The node that leads, or keeps a gate, is killed under instances at work, or between two claims of
one run. ``LEASECRON_SYNC_LONG=1`` in the environment plays them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path
from typing import Callable, Optional

import pytest

from leasecron_sync.backends._nats_place import stream_name
from leasecron_sync.backends._rabbitmq_gates import ARGUMENTS
from leasecron_sync.backends._rabbitmq_place import gate_name
from leasecron_sync.backends.base import BackendSettings, ClaimBackend
from leasecron_sync.backends.nats import NatsClaim
from leasecron_sync.backends.rabbitmq import RabbitMQClaim
from leasecron_sync.errors import StoreError
from leasecron_sync.model import OnceClaim, RunKey, Verdict
from tests.faults.crew import now_ms
from tests.faults.once_crew import INSTANCES, OnceCrew
from tests.faults.processes import LONG
from tests.faults.test_rabbitmq import Crew
from tests.services.erlang import Atom
from tests.services.fixtures import Own
from tests.services.process import eventually
from tests.services.rabbitmq import KHEPRI, RabbitMQServer

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(150),
    pytest.mark.skipif(not LONG, reason="only with LEASECRON_SYNC_LONG=1"),
]

WINDOW_MS = 300_000
CALL_MS = 5_000
CLUSTER_S = 40.0
AHEAD_MS = 20_000
"""So long before runs are due their gates are made, and the node of these is killed."""
WHILE_ONLINE = (False,)
"""A node is forgotten by those that run."""


# -- NATS ------------------------------------------------------------------------------------------


ClaimOf = Callable[[str, str], OnceClaim]


@pytest.fixture
def claim_of() -> ClaimOf:
    """Return the claim of a job's run for a holder; the run was due just now."""
    due_ms = now_ms()
    return lambda job, holder: OnceClaim(
        RunKey(job, due_ms), due_ms, holder, f"{holder} {job}", WINDOW_MS
    )


def opened(backend: ClaimBackend, namespace: str) -> ClaimBackend:
    backend.open(BackendSettings(namespace, "somebody", CALL_MS))
    return backend


def answer(backend: ClaimBackend, claim: OnceClaim) -> Optional[Verdict]:
    """Return the answer to a claim, None without one."""
    try:
        [reply] = backend.claim([claim])
    except StoreError:
        return None
    return reply.verdict


def asked_until_answered(backend: ClaimBackend, claim: OnceClaim) -> Verdict:
    """Ask as instances do, until there is an answer."""
    found: list[Verdict] = []

    def ask() -> bool:
        verdict = answer(backend, claim)
        if verdict not in (None, Verdict.DEFERRED):
            assert verdict is not None
            found.append(verdict)
        return bool(found)

    assert eventually(ask, CLUSTER_S)
    return found[0]


def test_nats_with_three_replicas_forgets_nothing_when_its_leader_is_killed(
    own: Own, nats_version: Optional[str], tmp_path: Path, namespace: str, claim_of: ClaimOf
) -> None:
    """For some seconds nobody can claim; what fell due then is claimed afterwards."""
    cluster = own.nats_cluster(nats_version)
    hosts = ",".join(f"{host}:{port}" for host, port in cluster.addresses)
    url = f"nats://{hosts}?replicas=3"
    crew = OnceCrew(tmp_path, lambda: NatsClaim(url))
    first, second = opened(NatsClaim(url), namespace), opened(NatsClaim(url), namespace)
    try:
        crew.start()
        for number in range(2):
            claims = [claim_of(f"job-{number}", holder) for holder in ("first", "second")]
            assert asked_until_answered(first, claims[0]) is Verdict.GRANTED
            leader = cluster.leader_of(stream_name("default"))
            leader.kill()
            assert asked_until_answered(second, claims[1]) is Verdict.TAKEN
            assert asked_until_answered(first, claims[0]) is Verdict.GRANTED, "asked again"
            crew.work()
            leader.start()
            cluster.wait_complete()
        assert crew.judged() == []
        assert crew.told("run_missed") == []
    finally:
        crew.stop()
        first.close()
        second.close()


def test_nats_with_one_replica_forgets_nothing_that_comes_back_with_its_node(
    own: Own, nats_version: Optional[str], namespace: str, claim_of: ClaimOf
) -> None:
    """Until then nobody can claim."""
    cluster = own.nats_cluster(nats_version)
    url = "nats://" + ",".join(f"{host}:{port}" for host, port in cluster.addresses)
    first, second = opened(NatsClaim(url), namespace), opened(NatsClaim(url), namespace)
    try:
        assert asked_until_answered(first, claim_of("job", "first")) is Verdict.GRANTED
        home = cluster.leader_of(stream_name(namespace))
        home.kill()
        for holder in ("second", "third"):
            assert answer(second, claim_of("job", holder)) is None
            assert answer(second, claim_of("another", holder)) is None
        home.start()
        cluster.wait_complete()
        assert asked_until_answered(second, claim_of("job", "second")) is Verdict.TAKEN
        assert asked_until_answered(second, claim_of("another", "second")) is Verdict.GRANTED
    finally:
        first.close()
        second.close()


# -- RabbitMQ --------------------------------------------------------------------------------------


@pytest.mark.parametrize("comes_back", [True, False])
def test_a_gate_of_rabbitmq_whose_node_is_down_is_won_by_nobody_until_the_cluster_forgets_the_node(
    own: Own,
    rabbitmq_version: Optional[str],
    namespace: str,
    claim_of: ClaimOf,
    *,
    comes_back: bool,
) -> None:
    """Who was first is known when the node is back; a node that is given up takes it along."""
    cluster = own.rabbitmq_cluster(rabbitmq_version)
    home, other = cluster.nodes
    first = opened(RabbitMQClaim(home.url), namespace)
    second = opened(RabbitMQClaim(other.url), namespace)
    try:
        assert answer(first, claim_of("job", "first")) is Verdict.GRANTED
        home.call("mnesia", "sync_log")  # what was declared just now may not be on disk
        home.kill()
        assert eventually(lambda: _running_on(other) == [other.node], CLUSTER_S)
        assert answer(first, claim_of("early", "first")) is None, "its node is gone"
        # Since 4.0 the declaration of such a gate has no answer for about a minute.
        assert answer(second, claim_of("job", "second")) in (Verdict.DEFERRED, None)
        assert answer(second, claim_of("another", "second")) is Verdict.GRANTED, "on its own node"
        if comes_back:
            home.start()
            cluster.wait_complete()
            assert asked_until_answered(second, claim_of("job", "fourth")) is Verdict.TAKEN
            assert asked_until_answered(first, claim_of("another", "first")) is Verdict.TAKEN
        else:
            _forget(other, home.node)
            assert asked_until_answered(second, claim_of("job", "fourth")) is Verdict.GRANTED
    finally:
        first.close()
        second.close()


def _running_on(node: RabbitMQServer) -> list[str]:
    if node.version < KHEPRI:
        found = node.call("rabbit_mnesia", "cluster_nodes", Atom("running"))
    else:
        found = node.call("rabbit_nodes", "list_running")
    return sorted(map(str, found))


def _forget(node: RabbitMQServer, gone: str) -> None:
    if node.version < KHEPRI:
        node.call("rabbit_mnesia", "forget_cluster_node", Atom(gone), *WHILE_ONLINE)
    else:
        node.call("rabbit_db_cluster", "forget_member", Atom(gone), *WHILE_ONLINE)


def test_instances_at_a_cluster_of_rabbitmq_double_nothing_when_a_node_is_killed(
    own: Own, rabbitmq_version: Optional[str], tmp_path: Path
) -> None:
    """Those at the other node go on. What had its gate at the dead one is missed, and told."""
    cluster = own.rabbitmq_cluster(rabbitmq_version)
    home, other = cluster.nodes
    urls = itertools.cycle([home.url, other.url])
    crew = OnceCrew(tmp_path, lambda: RabbitMQClaim(next(urls)))
    try:
        crew.start()
        home.kill()
        crew.work()
        crew.work()
        home.start()
        cluster.wait_complete()
        crew.work()
        missing = crew.judged()
        told = {(one.job, one.scheduled_ms) for one in crew.told("run_missed")}
        assert {(key.job, key.scheduled_ms) for key in missing} <= told
        # Those at the dead node, at least; the others where a gate was there that they wanted.
        assert len({entry.instance for entry in crew.told("store_down")}) >= INSTANCES // 2
    finally:
        crew.stop()


@pytest.mark.timeout(400)
def test_runs_with_gates_at_a_node_that_is_down_are_executed_when_it_is_back_and_others_meanwhile(
    own: Own, rabbitmq_version: Optional[str], tmp_path: Path
) -> None:
    """Since 4.0 such a gate has no answer for a minute; before, the channel is closed at once.

    None of the runs is missed. What does not need that node is executed as if it were there.
    """
    cluster = own.rabbitmq_cluster(rabbitmq_version)
    home, other = cluster.nodes
    crew = Crew(other, tmp_path)
    try:
        crew.begin(window_ms=WINDOW_MS)
        crew.work()
        first_ms = -(-(now_ms() + AHEAD_MS) // 1_000) * 1_000
        times = [first_ms + 1_000 * number for number in range(3)]
        stuck = {RunKey(job, at_ms) for job in ("job-0", "job-1") for at_ms in times}
        beside = {RunKey(job, at_ms) for job in ("job-2", "job-3") for at_ms in times}
        _make_gates(home, stuck)
        home.kill()
        assert now_ms() < first_ms, "too late: their gates may have been made elsewhere"
        assert eventually(lambda: beside <= set(crew.executed()), AHEAD_MS / 1_000 + CLUSTER_S)
        crew.work()
        assert not stuck & set(crew.executed())
        home.start()
        cluster.wait_complete()
        assert eventually(lambda: stuck <= set(crew.executed()), WINDOW_MS / 1_000)
        assert eventually(lambda: _channels(other) == {1}, CLUSTER_S), "left channels stay"
        assert crew.judged() == {}
        assert crew.told("run_missed") == []
    finally:
        crew.stop()


def _make_gates(node: RabbitMQServer, runs: Iterable[RunKey]) -> None:
    """Make the gates of runs at a node, as an instance does that ends before it publishes."""
    import pika

    with closing(pika.BlockingConnection(pika.URLParameters(node.url))) as connection:
        channel = connection.channel()
        for run in runs:
            channel.queue_declare(gate_name("default", run), durable=True, arguments=ARGUMENTS)
    node.call("mnesia", "sync_log")  # what was declared just now may not be on disk


def _channels(node: RabbitMQServer) -> set[int]:
    return {one["channels"] for one in node.connections()}
