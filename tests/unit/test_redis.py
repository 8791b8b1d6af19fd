"""What only the Redis backend does: its address, its scripts, its connections, its errors."""

from __future__ import annotations

import builtins
import importlib
import json
import os
import socket
import threading
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from functools import partial
from typing import Any, Callable, Optional
from unittest import mock

import pytest

from leasecron_sync.backends import _redis_link
from leasecron_sync.backends._lanes import Deadline
from leasecron_sync.backends._redis_place import place_of_client
from leasecron_sync.backends._redis_scripts import Script, keys_of
from leasecron_sync.backends.base import BackendSettings
from leasecron_sync.backends.redis import RedisLease
from leasecron_sync.clock import SystemClock
from leasecron_sync.errors import (
    MissingDependency,
    OutcomeUnknown,
    StoreError,
    StoreRejected,
    StoreUnavailable,
    StoreUnsupported,
)
from leasecron_sync.model import (
    JobSpan,
    JobStamp,
    Lease,
    LeaseClaim,
    LeaseReply,
    OnOverlap,
    Outcome,
    RenewReply,
    RunKey,
    Settlement,
    Verdict,
)
from leasecron_sync.testing.conformance._names import ODD_NAMES
from tests.services.fixtures import Own
from tests.services.process import eventually
from tests.services.proxy import Proxy
from tests.services.redis import RedisServer, execute
from tests.services.relay import How
from tests.services.server import Server

LEASE_MS = 10_000
HOUR_MS = 3_600_000
LIMIT_S = 10.0
FINISHED = Settlement(Outcome.FINISHED)
SECRETS = ("alice", "s3cret")


# -- without a server -----------------------------------------------------------------------------


@pytest.mark.parametrize("server", [None, b"redis://localhost", 5, object()])
def test_what_is_neither_a_url_nor_a_client_is_refused(server: object) -> None:
    with pytest.raises(TypeError, match="a client of redis-py, not"):
        RedisLease(server)


def test_a_missing_client_is_named_with_its_extra() -> None:
    real = builtins.__import__

    def without_redis(name: str, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        if name == "redis":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    backend = RedisLease("redis://localhost")
    missing = mock.patch.object(builtins, "__import__", without_redis)
    with missing, pytest.raises(MissingDependency, match=r"leasecron_sync\[redis\]"):
        backend.open(BackendSettings("space", "me", 1_000))


def test_nothing_is_connected_before_the_first_call() -> None:
    RedisLease("redis://127.0.0.1:1").open(BackendSettings("space", "me", 1_000))


@pytest.mark.parametrize("namespace", ODD_NAMES)
def test_all_keys_of_a_namespace_have_one_hash_tag_of_their_own(namespace: str) -> None:
    assert len(_tags(namespace)) == 1
    assert not _tags(namespace) & (_tags(namespace + "}") | _tags("{" + namespace))


def _tags(namespace: str) -> set[str]:
    return {key.partition("{")[2].partition("}")[0] for key in keys_of(namespace)}


# -- with a server --------------------------------------------------------------------------------


class Bench:
    """A namespace of a server, and backends on it that are closed in the end."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.space = f"unit {uuid.uuid4().hex}"
        self._opened: list[RedisLease] = []
        self._decisions = 0

    def open(self, server: object = "", call_timeout_ms: int = 5_000) -> RedisLease:
        backend = RedisLease(server or self.url)
        name = f"instance {len(self._opened)}"
        backend.open(BackendSettings(self.space, name, call_timeout_ms))
        self._opened.append(backend)
        return backend

    def hurry(self, backend: RedisLease, call_timeout_ms: int) -> None:
        """Give calls less time from now on, after those that make the connections."""
        backend.open(BackendSettings(self.space, "me", call_timeout_ms))

    def close(self) -> None:
        for backend in self._opened:
            backend.close()

    def do(self, *words: object) -> Any:  # noqa: ANN401
        return execute(self.url, *words)

    def intend(self, job: str = "job", *, ago_ms: int = 0) -> LeaseClaim:
        self._decisions += 1
        scheduled_ms = SystemClock().now_ms() - ago_ms
        return LeaseClaim(
            key=RunKey(job, scheduled_ms),
            due_ms=scheduled_ms - HOUR_MS // 2,
            holder="somebody",
            decision_id=f"decision {self._decisions}",
            lease_ms=LEASE_MS,
            max_attempts=3,
            on_overlap=OnOverlap.ALLOW,
            max_age_ms=HOUR_MS,
            takeover_ms=HOUR_MS,
        )


@pytest.fixture
def bench(redis_server: Server) -> Iterator[Bench]:
    bench = Bench(redis_server.url)
    yield bench
    bench.close()


def ask(backend: RedisLease, claim: LeaseClaim) -> LeaseReply:
    [reply] = backend.claim([claim])
    return reply


def win(backend: RedisLease, claim: LeaseClaim) -> Lease:
    reply = ask(backend, claim)
    assert reply.lease is not None
    return reply.lease


def use_every_lane(bench: Bench, backend: RedisLease) -> None:
    lease = win(backend, bench.intend(f"every lane {uuid.uuid4().hex}"))
    assert list(backend.renew([lease.ref], LEASE_MS)) == [RenewReply.RENEWED]
    assert backend.settle(lease.ref, FINISHED).accepted


def client_ids(backend: RedisLease) -> list[int]:
    """Return the server's numbers of a backend's connections."""
    return [
        lane.connection.ask(("CLIENT", "ID"), Deadline(5_000))
        for lane in backend._lanes.all()
        if lane.connection is not None
    ]


def every_call(backend: RedisLease, claim: LeaseClaim, lease: Lease) -> list[Callable[[], object]]:
    return [
        partial(backend.register, [JobStamp("job", "x")]),
        partial(backend.claim, [claim]),
        partial(backend.renew, [lease.ref], LEASE_MS),
        partial(backend.settle, lease.ref, FINISHED),
        partial(backend.pending, ["job"], 10),
        partial(backend.states, [JobSpan("job", 0, claim.due_ms)]),
        partial(backend.history, None, 10),
        partial(backend.history, "job", 10),
        partial(backend.jobs, 10),
        partial(backend.prune, HOUR_MS, 10),
    ]


def error_of(call: Callable[[], object]) -> Optional[StoreError]:
    try:
        call()
    except StoreError as error:
        return error
    return None


def test_the_probe_tells_version_clock_and_id(bench: Bench) -> None:
    info = bench.open().probe()
    assert info.version.startswith(("Redis ", "Valkey "))
    assert info.store_ms is not None
    assert abs(info.store_ms - SystemClock().now_ms()) < HOUR_MS
    assert info.store_id == bench.open().register([JobStamp("job", "x")])[0].store_id
    assert [warning for warning in info.warnings if "appendonly is no" in warning]


def test_register_5_a_store_that_lost_its_data_has_another_id(bench: Bench) -> None:
    backend = bench.open()
    [before] = backend.register([JobStamp("job", "x")])
    bench.do("DEL", *keys_of(bench.space))
    [after] = backend.register([JobStamp("job", "x")])
    assert after.store_id not in ("", before.store_id)


def test_a_claim_in_a_store_that_lost_its_data_decides_nothing_and_is_told_once(
    bench: Bench,
) -> None:
    """By each instance, also where another one has made a new store of it meanwhile."""
    first, second, third = (bench.open() for _ in range(3))
    for backend in (first, second):
        backend.register([JobStamp("job", "x")])
    bench.do("DEL", *keys_of(bench.space))
    for backend in (first, second):
        claim = bench.intend()
        with pytest.raises(StoreUnavailable, match="has lost its data"):
            ask(backend, claim)
        assert backend.history("job", 10) == []
    assert ask(third, bench.intend()).verdict is Verdict.GRANTED  # it knew no other store
    for number, backend in enumerate((first, second)):
        backend.register([JobStamp("job", "x")])
        assert ask(backend, bench.intend(f"job {number}")).verdict is Verdict.GRANTED


def test_clock_1_the_server_decides_by_its_own_clock(bench: Bench) -> None:
    backend = bench.open()
    seconds, micros = bench.do("TIME")
    [standing] = backend.register([JobStamp("job", "x")])
    passed = standing.store_ms - (int(seconds) * 1000 + int(micros) // 1000)
    assert 0 <= passed < HOUR_MS


def test_a_server_that_forgot_its_scripts_is_told_them_in_the_same_call(bench: Bench) -> None:
    backend = bench.open()
    claim = bench.intend()
    lease = win(backend, claim)
    for call in every_call(backend, bench.intend("other"), lease):
        bench.do("SCRIPT", "FLUSH")
        call()


def test_a_restarted_server_is_used_again_by_the_next_call(own: Own) -> None:
    server = own.redis()
    bench = Bench(server.url)
    with closing(bench):
        backend = bench.open()
        use_every_lane(bench, backend)
        lease = win(backend, bench.intend())
        server.stop()
        assert isinstance(error_of(partial(ask, backend, bench.intend())), StoreUnavailable)
        server.start()
        assert list(backend.renew([lease.ref], LEASE_MS)) == [RenewReply.RENEWED]
        use_every_lane(bench, backend)


def test_one_round_trip_per_command_and_per_batch(
    bench: Bench, redis_server: Server, proxy: Callable[[Server], Proxy]
) -> None:
    between = proxy(redis_server)
    backend = bench.open(between.url_of(bench.url))
    lease = win(backend, bench.intend())
    for call in every_call(backend, bench.intend("warm"), lease):
        call()
    lease = win(backend, bench.intend())
    for call in every_call(backend, bench.intend("other"), lease):
        before = between.requests
        call()
        assert between.requests == before + 1, call
    before = between.requests
    backend.claim([bench.intend(f"job {number}") for number in range(100)])
    assert between.requests == before + 1
    assert between.accepted == 3


def test_a_lost_reply_is_unknown_and_the_repeat_is_the_same_grant(
    bench: Bench, redis_server: Server, proxy: Callable[[Server], Proxy]
) -> None:
    between = proxy(redis_server)
    backend = bench.open(between.url_of(bench.url))
    use_every_lane(bench, backend)
    claim = bench.intend()
    hows: tuple[How, ...] = ("reset", "cut")
    for how in hows:
        before = between.requests
        rule = between.lose_reply(lambda request: b"decision" in request, how=how)
        with pytest.raises(OutcomeUnknown):
            ask(backend, claim)
        assert rule.fired.wait(LIMIT_S)
        assert between.requests == before + 1, "it was not sent again unseen"
    lease = win(backend, claim)
    assert (lease.attempt, lease.left_ms <= LEASE_MS) == (1, True)
    assert len(backend.history("job", 10)) == 1


def test_call_1_a_silent_server_ends_a_call_at_its_deadline(
    bench: Bench, redis_server: Server, proxy: Callable[[Server], Proxy]
) -> None:
    between = proxy(redis_server)
    lease = win(bench.open(), bench.intend())
    backend = bench.open(between.url_of(bench.url))
    use_every_lane(bench, backend)
    bench.hurry(backend, 200)
    between.swallow()
    for call in [backend.probe, *every_call(backend, bench.intend(), lease)]:
        began_ms = SystemClock().steady_ms()
        assert isinstance(error_of(call), (OutcomeUnknown, StoreUnavailable)), call
        assert SystemClock().steady_ms() - began_ms < 4_000
    assert client_ids(backend) == [], "no suspect connection is kept"
    between.forward()
    bench.hurry(backend, 5_000)
    use_every_lane(bench, backend)


def test_call_1_connecting_to_a_server_that_accepts_nobody_ends_at_the_deadline(
    bench: Bench, redis_server: Server, proxy: Callable[[Server], Proxy]
) -> None:
    between = proxy(redis_server)
    backend = bench.open(between.url_of(bench.url), call_timeout_ms=300)
    between.swallow()
    for _ in range(2):
        assert isinstance(error_of(backend.probe), StoreUnavailable)
    between.forward()
    bench.hurry(backend, 5_000)
    assert ask(backend, bench.intend()).verdict is Verdict.GRANTED


def test_call_1_a_server_that_sends_a_byte_now_and_then_ends_a_call_at_its_deadline() -> None:
    """Each byte is an answer, but none of them is the end of it."""
    over = threading.Event()

    def drip(listener: socket.socket) -> None:
        asked, _address = listener.accept()
        with asked, suppress(OSError):
            asked.sendall(b"$100000\r\n")
            while not over.wait(0.02):
                asked.sendall(b"x")

    with socket.create_server(("127.0.0.1", 0)) as listener, closing(Bench("")) as bench:
        thread = threading.Thread(target=drip, args=(listener,))
        thread.start()
        backend = bench.open(f"redis://127.0.0.1:{listener.getsockname()[1]}", call_timeout_ms=200)
        try:
            began_ms = SystemClock().steady_ms()
            with pytest.raises(OutcomeUnknown):
                ask(backend, bench.intend())
            assert SystemClock().steady_ms() - began_ms < 3_000
        finally:
            over.set()
            thread.join(LIMIT_S)


def test_call_1_a_name_with_many_silent_addresses_ends_a_call_at_its_deadline() -> None:
    """They are tried one after the other, and share the time."""
    real = socket.getaddrinfo
    many = mock.patch.object(socket, "getaddrinfo", lambda *a, **k: real(*a, **k) * 20)
    with ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(3):  # who comes after these gets no answer
            filler = stack.enter_context(socket.socket())
            filler.setblocking(False)  # noqa: FBT003
            filler.connect_ex(listener.getsockname())
        bench = stack.enter_context(closing(Bench("")))
        place = f"redis://127.0.0.1:{listener.getsockname()[1]}"
        backend = bench.open(place, call_timeout_ms=200)
        stack.enter_context(many)
        began_ms = SystemClock().steady_ms()
        with pytest.raises(StoreUnavailable, match="no answer in time"):
            backend.probe()
        assert SystemClock().steady_ms() - began_ms < 2_000


def test_a_connection_that_died_is_replaced_before_anything_is_sent(bench: Bench) -> None:
    backend = bench.open()
    use_every_lane(bench, backend)
    for number in client_ids(backend):
        bench.do("CLIENT", "KILL", "ID", number)
    use_every_lane(bench, backend)


def test_a_port_where_nobody_listens_is_unavailable(
    bench: Bench, redis_server: Server, proxy: Callable[[Server], Proxy]
) -> None:
    between = proxy(redis_server)
    between.refuse()
    with pytest.raises(StoreUnavailable, match="cannot be reached"):
        bench.open(between.url_of(bench.url)).probe()


@pytest.mark.parametrize("place", range(8))
def test_a_key_of_somebody_else_is_rejected_before_anything_is_written(
    bench: Bench, place: int
) -> None:
    backend = bench.open()
    keys = keys_of(bench.space)
    bench.do("SET", keys[place], "theirs")
    with pytest.raises(StoreRejected, match="belongs to something else"):
        ask(backend, bench.intend())
    assert [bench.do("EXISTS", key) for key in keys] == [int(key == keys[place]) for key in keys]


def test_a_newer_store_format_is_unsupported_and_left_as_it_is(bench: Bench) -> None:
    backend = bench.open()
    backend.probe()
    bench.do("HSET", keys_of(bench.space)[0], "format", "2")
    with pytest.raises(StoreUnsupported, match="store format 2"):
        ask(backend, bench.intend())
    assert bench.do("EXISTS", keys_of(bench.space)[3]) == 0


@pytest.mark.parametrize(
    "record", ["", "{}", "[]", '["1"]', '["x"]', '["2"]', "\x00", '["1","new"]']
)
def test_call_5_an_unreadable_record_is_refused_by_itself(bench: Bench, record: str) -> None:
    backend = bench.open()
    bad, good = bench.intend("bad"), bench.intend("good")
    lease = win(backend, bad)
    runs = keys_of(bench.space)[3]
    [member] = bench.do("HKEYS", runs)
    bench.do("HSET", runs, member, record)
    verdicts = [reply.verdict for reply in backend.claim([bad, bench.intend("bad"), good])]
    assert verdicts == [Verdict.REJECTED, Verdict.REJECTED, Verdict.GRANTED]
    assert list(backend.renew([lease.ref], LEASE_MS)) == [RenewReply.LOST]
    with pytest.raises(StoreRejected, match="'bad' cannot be read"):
        backend.settle(lease.ref, FINISHED)
    assert [found.key for found in backend.history(None, 10)] == [good.key]
    assert backend.pending(["bad", "good"], 10).keys == ()
    assert len(backend.jobs(10)) == 2


@pytest.mark.parametrize("record", ["", "[]", '["2"]', '["1","x","","","",[],[]]'])
def test_call_5_an_unreadable_job_does_not_stop_the_others(bench: Bench, record: str) -> None:
    backend = bench.open()
    bench.do("HSET", keys_of(bench.space)[2], "bad", record)
    standings = backend.register([JobStamp("bad", "x"), JobStamp("good", "x")])
    assert [standing.newest_ms for standing in standings] == [None, None]
    verdicts = [
        reply.verdict for reply in backend.claim([bench.intend("bad"), bench.intend("good")])
    ]
    assert verdicts == [Verdict.REJECTED, Verdict.GRANTED]
    assert bench.do("HGET", keys_of(bench.space)[2], "bad").decode() == record


def test_text_that_cannot_be_stored_is_rejected_and_the_connection_stays(bench: Bench) -> None:
    backend = bench.open()
    backend.probe()
    before = client_ids(backend)
    with pytest.raises(StoreRejected, match="cannot be stored"):
        ask(backend, bench.intend("\ud800"))
    assert client_ids(backend) == before


@pytest.mark.parametrize("kind", ["redis", "valkey"])
def test_a_full_server_grants_nothing_new_and_keeps_what_was_granted(own: Own, kind: str) -> None:
    """What is running there goes on and comes to its end, and old records make room."""
    make = own.redis if kind == "redis" else own.valkey
    server = make(durable=False, maxmemory_policy="noeviction")
    bench = Bench(server.url)
    with closing(bench):
        backend = bench.open()
        lease, other = win(backend, bench.intend()), win(backend, bench.intend("other"))
        server.configure(maxmemory="1")
        assert isinstance(error_of(partial(ask, backend, bench.intend("new"))), StoreRejected)
        assert backend.history("new", 1) == []
        leases = [lease.ref, other.ref]
        assert list(backend.renew(leases, LEASE_MS)) == [RenewReply.RENEWED] * 2
        assert backend.settle(lease.ref, FINISHED).accepted
        assert [record.state.value for record in backend.history("job", 1)] == ["finished"]
        assert backend.prune(-HOUR_MS, 1).deleted == 1
        server.configure(maxmemory="0")
        assert ask(backend, bench.intend("new")).verdict is Verdict.GRANTED


@pytest.mark.parametrize("command", ["hset", "hsetnx", "hdel", "zadd", "zrem"])
def test_a_user_who_may_not_do_everything_is_refused_before_anything_is_written(
    own: Own, command: str
) -> None:
    server = own.redis(durable=False)
    server.do("ACL", "SETUSER", "alice", "on", ">s3cret", "~*", "+@all", f"-{command}")
    with closing(Bench(server.url)) as bench:
        backend = bench.open(server.url.replace("://", "://alice:s3cret@"))
        with pytest.raises(StoreRejected, match=f"no permission for {command.upper()}: the user"):
            ask(backend, bench.intend())
        assert server.do("KEYS", "*") == []


@pytest.mark.parametrize("kind", ["redis", "valkey"])
@pytest.mark.parametrize("command", ["type", "time", "hget", "zrangebylex"])
def test_a_user_who_may_not_read_everything_is_told_what_is_needed(
    own: Own, kind: str, command: str
) -> None:
    make = own.redis if kind == "redis" else own.valkey
    server = make(durable=False)
    server.do("ACL", "SETUSER", "alice", "on", ">s3cret", "~*", "+@all", f"-{command}")
    with closing(Bench(server.url)) as bench:
        backend = bench.open(server.url.replace("://", "://alice:s3cret@"))
        with pytest.raises(StoreRejected, match="the user needs EVAL, EVALSHA and"):
            ask(backend, bench.intend())
        assert server.do("EXISTS", keys_of(bench.space)[3]) == 0


@pytest.mark.parametrize("kind", ["redis", "valkey"])
def test_a_script_that_was_killed_did_nothing_and_is_asked_again(own: Own, kind: str) -> None:
    """A server lets its operator kill one only as long as it has written nothing."""
    make = own.redis if kind == "redis" else own.valkey
    bench = Bench(make(durable=False, busy_reply_threshold=50).url)
    backend = bench.open()
    lease = win(backend, bench.intend())
    endless = Script(b"#!lua\nwhile true do end", b"0" * 40)

    def killed() -> bool:
        try:
            return bool(bench.do("SCRIPT", "KILL"))
        except Exception as error:  # noqa: BLE001 - of a package imported late
            assert "NOTBUSY" in str(error)  # noqa: PT017
            return False

    everything = mock.patch.object(_redis_link, "script_of", return_value=endless)
    with everything, ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(error_of, partial(backend.settle, lease.ref, FINISHED))
        assert eventually(killed, LIMIT_S)
        assert isinstance(waiting.result(LIMIT_S), StoreUnavailable)
    assert backend.settle(lease.ref, FINISHED).accepted
    bench.close()


def test_a_credential_provider_that_fails_is_an_outage_that_shows_no_secret(bench: Bench) -> None:
    import redis

    class Provider(redis.CredentialProvider):
        asked = 0

        def get_credentials(self) -> tuple[str]:
            self.asked += 1
            message = "s3cret"
            raise RuntimeError(message)

    provider = Provider()
    with closing(redis.Redis.from_url(bench.url, credential_provider=provider)) as client:
        error = error_of(partial(ask, bench.open(client), bench.intend()))
    assert isinstance(error, StoreUnavailable)
    assert "raised RuntimeError" in str(error)
    assert "s3cret" not in str(error)
    assert provider.asked == 1


def test_a_replica_is_named_by_the_probe_and_refuses(own: Own) -> None:
    primary = own.redis(durable=False)
    replica = own.redis(durable=False, replicaof=f"{primary.host} {primary.port}")
    with closing(Bench(replica.url)) as bench:
        error = error_of(partial(ask, bench.open(), bench.intend()))
        assert isinstance(error, StoreRejected)
        assert "name the primary" in str(error)


def test_no_error_shows_a_user_or_password(own: Own) -> None:
    server = own.redis(durable=False, requirepass="other")
    server.do("ACL", "SETUSER", "alice", "on", ">s3cret", "~*", "+info")
    place = f"{server.host}:{server.port}"
    with closing(Bench("")) as bench:
        for user, kind in (
            ("", StoreRejected),
            ("alice:s3cret@", StoreRejected),
            ("alice:s3cret1@", StoreUnavailable),
            (":s3cret@", StoreUnavailable),
        ):
            backend = bench.open(f"redis://{user}{place}/0")
            error = error_of(partial(ask, backend, bench.intend()))
            assert isinstance(error, kind), user
            assert not any(secret in f"{error} {backend!r}" for secret in SECRETS)


def test_a_socket_and_an_encrypted_connection_are_used(own: Own) -> None:
    plain, encrypted = own.redis(durable=False), own.redis(durable=False, tls=True)
    with closing(Bench("")) as bench:
        for url in (plain.unix_url, encrypted.url):
            backend = bench.open(url)
            backend.probe()
            use_every_lane(bench, backend)
            assert len(client_ids(backend)) == 3


def test_a_client_of_the_users_own_tells_the_place_only(bench: Bench) -> None:
    import redis

    with closing(redis.Redis.from_url(bench.url, decode_responses=True)) as client:
        backend = bench.open(client)
        use_every_lane(bench, backend)
        place = place_of_client(client)
        assert place is not None
        assert "decode_responses" not in place.options
        assert "retry" not in place.options


@pytest.mark.timeout(30)
def test_sentinels_and_their_primary_are_asked_over_encrypted_connections(own: Own) -> None:
    """By URL, and as a client of the user's own has it."""
    sentinels: Any = importlib.import_module("redis.sentinel")
    primary = own.redis(durable=False, tls=True)
    watching = own.sentinel_of(primary, "cron")
    assert primary.tls is not None
    assert watching.tls is not None
    trusted = watching.home.folder / "trusted.pem"
    trusted.write_bytes(primary.tls.ca.read_bytes() + watching.tls.ca.read_bytes())
    given = {"ssl": True, "ssl_ca_certs": str(trusted)}
    address = (watching.host, watching.port)
    clients = sentinels.Sentinel([address], sentinel_kwargs=given, **given)
    url = f"rediss+sentinel://{address[0]}:{address[1]}/cron/0?ssl_ca_certs={trusted}"
    with closing(Bench("")) as bench, closing(clients.master_for("cron")) as client:
        for server in (url, client):
            backend = bench.open(server)
            backend.probe()
            use_every_lane(bench, backend)
            before = client_ids(backend)
            use_every_lane(bench, backend)
            assert client_ids(backend) == before
    for one in clients.sentinels:
        one.close()


def test_sentinels_may_be_plain_where_their_primary_is_not() -> None:
    sentinels: Any = importlib.import_module("redis.sentinel")
    clients = sentinels.Sentinel([("a", 1)], password="s3cret", ssl=True)
    place = place_of_client(clients.master_for("cron", db=3))
    assert place is not None
    assert (place.kind, place.service, place.addresses) == ("sentinel", "cron", (("a", 1),))
    assert (place.tls, place.tls_of_sentinels) == (True, False)
    assert (place.options["db"], place.options["password"]) == (3, "s3cret")
    assert "s3cret" not in repr(place)


@pytest.mark.timeout(60)
def test_what_sentinels_know_is_used_through_a_failover(own: Own) -> None:
    sentinels = own.sentinels(requirepass="s3cret")
    hosts = ",".join(f"{host}:{port}" for host, port in sentinels.addresses)
    with closing(Bench(f"redis+sentinel://:s3cret@{hosts}/{sentinels.service}/0")) as bench:
        backend = bench.open()
        use_every_lane(bench, backend)
        first = sentinels.primary()
        assert first is not None
        first.kill()
        assert error_of(partial(ask, backend, bench.intend())) is not None
        assert eventually(lambda: error_of(partial(use_every_lane, bench, backend)) is None, 20.0)


@pytest.mark.timeout(60)
def test_a_cluster_is_used_from_any_of_its_nodes(own: Own) -> None:
    cluster = own.cluster()
    with closing(Bench("")) as bench:
        for host, port in cluster.addresses:
            backend = bench.open(f"redis+cluster://{host}:{port}")
            backend.probe()
            use_every_lane(bench, backend)
        elsewhere = next(
            node for node in cluster.nodes if node is not cluster.node_of(keys_of(bench.space)[0])
        )
        plain = bench.open(elsewhere.url)
        assert error_of(partial(ask, plain, bench.intend())) is not None


@pytest.mark.timeout(60)
def test_a_cluster_whose_keys_are_moving_is_asked_where_they_are(own: Own) -> None:
    """Until they have moved a node sends everybody on, each time."""
    from redis.cluster import RedisCluster

    cluster = own.cluster()
    host, port = cluster.addresses[0]
    with closing(Bench("")) as bench, closing(RedisCluster(host=host, port=port)) as client:
        backend = bench.open(client)
        assert backend.settle(win(backend, bench.intend()).ref, FINISHED).accepted
        lease = win(backend, bench.intend(ago_ms=60_000))
        source = cluster.node_of(keys_of(bench.space)[0])
        target = next(node for node in cluster.nodes if node is not source)
        slot, names = start_moving(source, target, bench.space)
        for _ in range(3):
            assert list(backend.renew([lease.ref], LEASE_MS)) == [RenewReply.RENEWED]
        assert len(backend.history("job", 10)) == 2
        for node in cluster.nodes:
            node.do("CLUSTER", "SETSLOT", slot, "NODE", names[1])
        use_every_lane(bench, backend)


def start_moving(source: RedisServer, target: RedisServer, space: str) -> tuple[str, list[str]]:
    """Move all keys of a namespace, and leave it at that; return the slot and the nodes' names."""
    slot = str(source.do("CLUSTER", "KEYSLOT", keys_of(space)[0]))
    names = [str(node.do("CLUSTER", "MYID")) for node in (source, target)]
    target.do("CLUSTER", "SETSLOT", slot, "IMPORTING", names[0])
    source.do("CLUSTER", "SETSLOT", slot, "MIGRATING", names[1])
    found = source.do("CLUSTER", "GETKEYSINSLOT", slot, "100")
    assert isinstance(found, list)
    assert len(found) == 9
    place = (target.host, str(target.port), "", "0", "5000")
    source.do("MIGRATE", *place, "KEYS", *map(str, found))
    return slot, names


def test_closing_is_repeatable_and_gives_up_all_connections(bench: Bench) -> None:
    backend = bench.open()
    use_every_lane(bench, backend)
    numbers = client_ids(backend)
    backend.close()
    backend.close()

    def gone() -> bool:
        listed = bench.do("CLIENT", "LIST", "ID", *numbers)
        return not listed

    assert eventually(gone, LIMIT_S)
    with pytest.raises(StoreUnavailable, match="closed"):
        ask(backend, bench.intend())


def test_a_forked_child_leaves_the_connections_of_its_parent_alone(bench: Bench) -> None:
    backend = bench.open()
    use_every_lane(bench, backend)
    before = client_ids(backend)
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:  # pragma: no cover - in the child
        try:
            backend.discard()
            backend.open(BackendSettings(bench.space, "child", 5_000))
            won = ask(backend, bench.intend("child")).verdict.value
            told = {"won": won, "ids": client_ids(backend)}
            backend.close()
            os.write(writer, json.dumps(told).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        told = json.loads(pipe.read())
    os.waitpid(pid, 0)
    assert told["won"] == "granted"
    assert not set(told["ids"]) & set(before)
    use_every_lane(bench, backend)
    assert client_ids(backend) == before


def test_names_that_begin_alike_are_kept_apart(bench: Bench) -> None:
    backend = bench.open()
    names: Sequence[str] = ("a", "a:", "a:1", "1:a", "", "a:1001", *ODD_NAMES)
    claims = [bench.intend(name) for name in dict.fromkeys(names)]
    assert {reply.verdict for reply in backend.claim(claims)} == {Verdict.GRANTED}
    for claim in claims:
        assert [found.key for found in backend.history(claim.key.job, 10)] == [claim.key]
        ms = claim.key.scheduled_ms
        [states] = backend.states([JobSpan(claim.key.job, ms, ms)])
        assert list(states) == [ms]
