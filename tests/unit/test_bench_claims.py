"""The script that measures, with claims: each mechanism, as small as it can be."""

from __future__ import annotations

import json
import os
import re
import uuid
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Callable, cast
from urllib.parse import urlsplit

import pytest

from leasecron_sync.backends.redis_claim import STRATEGIES
from leasecron_sync.model import Verdict
from scripts import bench
from scripts._bench_broker import Broker, NotRestarted, Restart, Usage
from scripts._bench_claim_stores import ClaimStore, NatsStore, RabbitMQStore, claim_store_of
from scripts._bench_claims import answered, base_ms, claim_of
from scripts._bench_crew import BenchError
from scripts._bench_figures import Figure, Scale, Told
from scripts._bench_gates import Again, Step, carried
from scripts._bench_stores import any_store_of
from tests.services import redis
from tests.services.fixtures import Own, had
from tests.services.nats import NatsServer
from tests.services.rabbitmq import RabbitMQServer
from tests.services.server import Server
from tests.services.services import Services

TINY = Scale(
    rounds=2,
    singles=2,
    batch=20,
    batches=1,
    instances=2,
    each_second=2,
    seconds=1,
    together=10,
    lead_s=2,
    gates=(0, 6, 12),
)
MECHANISMS = (*STRATEGIES, "nats", "rabbitmq")


@pytest.fixture(params=MECHANISMS)
def server(request: pytest.FixtureRequest, services: Services) -> Server:
    """A shared server for each mechanism, the newest that has it."""
    kinds: dict[str, Callable[[], Server]] = {
        "idmp": services.redis8,
        "nats": services.nats,
        "rabbitmq": services.rabbitmq,
    }
    return had(kinds.get(request.param, services.redis))


@pytest.fixture
def store(request: pytest.FixtureRequest, server: Server) -> ClaimStore:
    mechanism = request.node.callspec.params["server"]
    strategy = f"?strategy={mechanism}" if mechanism in STRATEGIES else ""
    return claim_store_of(f"{server.url}{strategy}")


def told(store: ClaimStore) -> Told[ClaimStore]:
    return Told(store, TINY, f"bench-{uuid.uuid4().hex}", lambda _text: None)


def test_claims_are_measured_beside_their_floor(store: ClaimStore, server: Server) -> None:
    found: list[Figure] = []
    for name in ("singles", "batches", "lost"):
        found += bench.CLAIM_MEASUREMENTS[name](told(store))
    assert [figure.name for figure in found] == [
        "claims, one a call",
        "claims, 20 in one call",
        "claims, 20 in one call, against claims one a call",
        "lost claims, one a call",
        "lost claims, 20 in one call",
    ]
    for figure in found:
        assert figure.floor, figure
        assert figure.ratio is not None
        assert 0 < figure.ratio < 10_000
    facts = store.facts()
    assert re.search(r"\d+\.\d+", facts["store"])
    assert re.fullmatch(r"(redis|nats-py|pika) \d+\.\d+.*", facts["client"])
    assert left_in(server) == []


def left_in(server: Server) -> Sequence[object]:
    """Return what the floors left behind; of RabbitMQ nothing, since it goes by itself."""
    if isinstance(server, NatsServer):
        return [name for name in server.streams() if name.startswith("bench")]
    if urlsplit(server.url).scheme == "redis":
        return cast("Sequence[object]", redis.execute(server.url, "KEYS", "bench:*"))
    return []


def test_one_process_wins_each_run_of_the_smallest_program(store: ClaimStore) -> None:
    prefix = uuid.uuid4().hex
    second = store.make_raw(prefix)
    assert second is not None
    with store.raw(prefix) as first, closing(second):
        assert first is not None
        keys = [f"{number} job {name}" for number in (1, 2) for name in "ab"]
        assert first.win(keys[:1]) == keys[:1]
        assert second.win(keys[:1]) == []
        assert second.win(keys[:3]) == keys[1:3]
        assert second.win(keys[3:]) == keys[3:]
        assert first.win(keys[1:]) == []
        assert first.win([]) == []


@pytest.mark.timeout(60)
def test_instances_with_claims_execute_each_run_once(services: Services) -> None:
    """And as many processes of the smallest program; that of NATS has a loop of its own."""
    store = NatsStore(had(services.nats).url)
    (figure,) = bench.CLAIM_MEASUREMENTS["delay"](told(store))
    assert re.search("[1-9]", figure.value)
    assert re.search("[1-9]", figure.floor)


def test_claims_that_are_answered_otherwise_end_the_measurement(services: Services) -> None:
    store = claim_store_of(f"{had(services.redis).url}?strategy=script")
    with closing(store.opened(f"bench-{uuid.uuid4().hex}")) as backend:
        claims = [claim_of("job", 1_000)]
        with pytest.raises(BenchError, match="a claim was answered too_old, not granted"):
            answered(backend, claims, Verdict.GRANTED)


@pytest.mark.parametrize(
    ("url", "names", "reason"),
    [
        ("amqp://user:secret@127.0.0.1:1", "history", "a claim leaves no record of its run"),
        ("nats://127.0.0.1:1", "takeover", "nobody takes over a run that was claimed"),
        ("redis://127.0.0.1:1?strategy=idmp", "hand-over", "a claim cannot be handed over"),
        ("redis://127.0.0.1:1?strategy=script", "gates", "RabbitMQ has them"),
        ("nats://127.0.0.1:1", "many", "together tells how claims fare"),
        ("nats://127.0.0.1:1", "start", "nothing is registered with a claim"),
        ("amqp://user:secret@127.0.0.1:1", "gates", "with one of its own: --services"),
        ("memory://bench", "gates", "RabbitMQ has them"),
        ("sqlite:///jobs.db", "lost", "of claims"),
    ],
)
def test_what_makes_no_sense_says_so_and_asks_no_server(url: str, names: str, reason: str) -> None:
    store = any_store_of(url)
    ((name, figure),) = bench.measure(store, bench.names_of(store, [names]), TINY)
    assert (name, figure.value) == (names, "not measured")
    assert reason in figure.note


def test_by_default_a_store_is_measured_as_far_as_it_goes() -> None:
    claims = ["singles", "batches", "lost", "delay", "together"]
    assert bench.names_of(NatsStore("nats://127.0.0.1:1"), None) == claims
    rabbitmq = RabbitMQStore("amqp://127.0.0.1:1")
    assert bench.names_of(rabbitmq, None) == claims
    rabbitmq.broker = cast("Broker", object())
    assert bench.names_of(rabbitmq, None) == [*claims, "gates"]
    assert bench.names_of(any_store_of("memory://bench"), None) == [*bench.MEASUREMENTS]
    assert bench.names_of(rabbitmq, ["together", "history"]) == ["history", "together"]


def test_a_claim_url_is_measured_shown_and_written(
    services: Services,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(bench, "QUICK", TINY)
    written = tmp_path / "figures.json"
    url = had(services.rabbitmq).url
    chosen = ["--only", "singles", "--only", "history"]
    assert bench.main([url, "--quick", *chosen, "--json", str(written)]) == 0
    shown = capsys.readouterr()
    assert "claims, one a call" in shown.out
    assert "a claim leaves no record of its run" in shown.out
    assert "client: pika" in shown.out
    assert "secret" not in shown.out + shown.err
    (read,) = json.loads(written.read_text(encoding="utf-8"))
    assert [figure["measurement"] for figure in read["figures"]] == ["singles", "history"]


def test_a_claim_url_without_a_server_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    url = "amqp://leasecron:secret@127.0.0.1:1"
    assert bench.main([url, "--quick", "--only", "singles"]) == 1
    captured = capsys.readouterr()
    (line,) = captured.err.splitlines()
    assert line.startswith("bench.py: amqp://127.0.0.1:1: amqp://127.0.0.1:1 cannot be reached")
    assert "secret" not in line


# -- gates ----------------------------------------------------------------------------------------


class SharedBroker(Broker):
    """A server that others use, too: it is not restarted, and has other queues."""

    def __init__(self, server: RabbitMQServer, namespace: str, last: int = 9) -> None:
        super().__init__(server)
        self.restarts = 0
        self._last = last
        self._namespace = namespace

    def empty(self) -> None:
        """Leave it as it is."""

    def restart(self) -> Restart:
        """Only say so."""
        self.restarts += 1
        if self.restarts == self._last:
            message = "it ended"
            raise NotRestarted(message)
        return Restart(1.0, 1.0 + self.restarts)

    def usage(self) -> Usage:
        """Count the gates of the measurement alone."""
        queues = [queue["name"] for queue in self._server.queues()]
        mine = [name for name in queues if self._namespace in name]
        found = super().usage()
        assert found.queues >= len(queues)
        return found._replace(queues=len(mine))


def gates_of(store: ClaimStore, namespace: str) -> list[Figure]:
    return bench.CLAIM_MEASUREMENTS["gates"](replace(told(store), namespace=namespace))


def test_gates_are_made_counted_and_told(services: Services) -> None:
    server = had(services.rabbitmq)
    if not isinstance(server, RabbitMQServer):
        pytest.skip("the server is somebody else's")
    store, namespace = RabbitMQStore(server.url), f"bench-{uuid.uuid4().hex}"
    broker = store.broker = SharedBroker(server, namespace)
    figures = {figure.name: figure for figure in gates_of(store, namespace)}
    assert broker.restarts == 3
    for count in TINY.gates:
        shown = [name for name in figures if name.startswith(f"{count} gates: ")]
        assert len(shown) == 7
    assert re.fullmatch(r"[1-9]\d* MB", figures["0 gates: memory of the broker"].value)
    files = [int(figures[f"{count} gates: open files"].value) for count in TINY.gates]
    assert files == sorted(set(files))  # of each gate one
    assert figures["12 gates: restart"].ratio == 5 / 3
    assert figures["12 gates: claims after that, one a call"].ratio is not None
    assert "a minute" in figures["a broker with 65,536 files carries"].value


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.skipif(not os.environ.get("LEASECRON_SYNC_LONG"), reason="LEASECRON_SYNC_LONG=1")
def test_a_broker_of_its_own_is_emptied_and_restarted(own: Own) -> None:
    server = own.rabbitmq()
    store = RabbitMQStore(server.url)
    with closing(store.opened("bench-before")) as backend:
        answered(backend, [claim_of("job", base_ms(backend, 0))], Verdict.GRANTED)
    store.broker = Broker(server)
    figures = {figure.name: figure for figure in gates_of(store, "bench-gates")}
    restart = figures["12 gates: restart"]
    assert restart.ratio is not None
    assert 0.1 < restart.ratio < 10


def test_a_broker_with_other_queues_ends_the_measurement(services: Services) -> None:
    server = had(services.rabbitmq)
    if not isinstance(server, RabbitMQServer):
        pytest.skip("the server is somebody else's")
    store = RabbitMQStore(server.url)
    store.broker = SharedBroker(server, "bench-")
    with pytest.raises(BenchError, match="queues where 0 gates were made"):
        gates_of(store, f"bench-{uuid.uuid4().hex}")


def step_of(gates: int, memory_kb: float, files: int, again: tuple[float, int]) -> Step:
    usage = Usage(gates, memory_kb, 0.0, files, "100", 0.0)
    afterwards = usage._replace(memory_kb=again[0], files=again[1])
    return Step(gates, usage, 1.0, gates, Again(Restart(1.0, 1.0), afterwards, 1.0))


def test_what_a_broker_carries_is_its_room_for_gates_of_ten_minutes() -> None:
    """Whatever it takes more, before a restart or after it."""
    first = step_of(0, 48_576, 24, (48_576, 24))
    last = step_of(1_000, 148_576, 1_024, (140_000, 2_024))
    failed = last._replace(gates=9_000, again=None)
    values = [figure.value for figure in carried([first, last, failed])]
    assert values == ["50 runs a minute", "3,276 runs a minute", "1,000 runs a minute"]
    last = step_of(10, 40_000, 24, (40_000, 24))
    values = [figure.value for figure in carried([first, last])]
    assert values == ["too few gates to tell"] * 3


def test_a_broker_that_does_not_start_again_is_a_figure(services: Services) -> None:
    """What was found before is told all the same."""
    server = had(services.rabbitmq)
    if not isinstance(server, RabbitMQServer):
        pytest.skip("the server is somebody else's")
    store, namespace = RabbitMQStore(server.url), f"bench-{uuid.uuid4().hex}"
    store.broker = SharedBroker(server, namespace, last=2)
    figures = {figure.name: figure for figure in gates_of(store, namespace)}
    assert figures["6 gates: restart"].value == "did not start again"
    assert figures["6 gates: restart"].note == "it ended"
    assert "6 gates: disk" in figures
    assert not [name for name in figures if name.startswith("12 gates")]
