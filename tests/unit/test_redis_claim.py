"""What only the Redis claim backend does: three mechanisms, their keys, and what they refuse."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from typing import Any, Callable, Optional
from unittest import mock

import pytest

from leasecron_sync.backends._redis_scripts import hash_tag
from leasecron_sync.backends.base import BackendSettings
from leasecron_sync.backends.redis import RedisLease
from leasecron_sync.backends.redis_claim import STRATEGIES, RedisClaim
from leasecron_sync.backends.urls import connect
from leasecron_sync.clock import SystemClock
from leasecron_sync.doctor.examine import examine
from leasecron_sync.doctor.finding import Finding, Level
from leasecron_sync.errors import (
    OutcomeUnknown,
    StoreError,
    StoreRejected,
    StoreUnavailable,
    StoreUnsupported,
)
from leasecron_sync.model import JobStamp, OnceClaim, RunKey, Verdict
from tests.services.fixtures import Own
from tests.services.proxy import Proxy
from tests.services.redis import execute
from tests.services.relay import How
from tests.services.server import Server

LIMIT_S = 4.0
WINDOW_MS = 60_000
SECRETS = ("alice", "s3cret")


# -- without a server ------------------------------------------------------------------------------


@pytest.mark.parametrize("server", [None, b"redis://localhost", 5, object()])
def test_what_is_neither_a_url_nor_a_client_is_refused(server: object) -> None:
    with pytest.raises(TypeError, match="RedisClaim needs a URL such as"):
        RedisClaim(server)


@pytest.mark.parametrize("strategy", ["", "Script", "stream_id", "lease", "idmp "])
def test_an_unknown_strategy_is_refused_and_the_known_ones_are_named(strategy: str) -> None:
    with pytest.raises(ValueError, match="use one of script, stream-id, idmp"):
        RedisClaim("redis://localhost", strategy=strategy)


def test_only_idmp_has_a_largest_window() -> None:
    windows = {
        one: RedisClaim("redis://localhost", strategy=one).max_window_ms for one in STRATEGIES
    }
    assert windows == {"script": None, "stream-id": None, "idmp": 300_000}


def test_a_repr_shows_the_strategy_and_no_secrets() -> None:
    text = repr(RedisClaim("redis://alice:s3cret@host/1", strategy="idmp"))
    assert text == "RedisClaim('redis://host/1', strategy='idmp')"


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_url_names_the_strategy(strategy: str) -> None:
    backend = connect(f"redis://host/1?client_name=me&strategy={strategy}")
    assert isinstance(backend, RedisClaim)
    assert backend.strategy == strategy


# -- with a server ---------------------------------------------------------------------------------


class Bench:
    """A namespace of a server, and backends on it that are closed in the end."""

    def __init__(self, url: str, strategy: str) -> None:
        self.url = url
        self.strategy = strategy
        self.space = f"unit {uuid.uuid4().hex}"
        self._opened: list[RedisClaim] = []
        self._decisions = 0

    def open(
        self,
        url: str = "",
        call_timeout_ms: int = 3_000,
        now_ms: Optional[Callable[[], int]] = None,
    ) -> RedisClaim:
        backend = RedisClaim(url or self.url, strategy=self.strategy)
        backend._now_ms = now_ms
        backend.open(BackendSettings(self.space, f"instance {len(self._opened)}", call_timeout_ms))
        self._opened.append(backend)
        return backend

    def close(self) -> None:
        for backend in self._opened:
            backend.close()

    def do(self, *words: object) -> Any:  # noqa: ANN401
        return execute(self.url, *words)

    def now_ms(self) -> int:
        seconds, micros = self.do("TIME")
        return int(seconds) * 1_000 + int(micros) // 1_000

    def intend(
        self, job: str = "job", *, at_ms: Optional[int] = None, window_ms: int = WINDOW_MS
    ) -> OnceClaim:
        self._decisions += 1
        at_ms = self.now_ms() if at_ms is None else at_ms
        decision = f"decision {self._decisions}"
        return OnceClaim(RunKey(job, at_ms), at_ms, "me", decision, window_ms)

    def rival(self, claim: OnceClaim, window_ms: Optional[int] = None) -> OnceClaim:
        self._decisions += 1
        decision = f"decision {self._decisions}"
        return OnceClaim(claim.key, claim.due_ms, "it", decision, window_ms or claim.window_ms)

    def keys(self) -> dict[str, str]:
        """Return the keys of the namespace behind its hash tag, and what they are."""
        head = f"leasecron:{hash_tag(self.space)}:"
        found = [key.decode() for key in self.do("KEYS", head.replace("*", r"\*") + "*")]
        return {key[len(head) :]: self.do("TYPE", key).decode() for key in found}

    def key(self, name: str) -> str:
        return f"leasecron:{hash_tag(self.space)}:{name}"


@pytest.fixture(params=STRATEGIES)
def bench(request: pytest.FixtureRequest, redis8_url: str) -> Iterator[Bench]:
    """On a server that has all three mechanisms."""
    with closing(Bench(redis8_url, request.param)) as bench:
        yield bench


@pytest.fixture
def script(redis8_url: str) -> Iterator[Bench]:
    with closing(Bench(redis8_url, "script")) as bench:
        yield bench


@pytest.fixture
def stream_id(redis8_url: str) -> Iterator[Bench]:
    with closing(Bench(redis8_url, "stream-id")) as bench:
        yield bench


@pytest.fixture
def idmp(redis8_url: str) -> Iterator[Bench]:
    with closing(Bench(redis8_url, "idmp")) as bench:
        yield bench


def ask(backend: RedisClaim, claim: OnceClaim) -> Verdict:
    [reply] = backend.claim([claim])
    return reply.verdict


def is_claim(request: bytes) -> bool:
    return b"decision" in request


def test_the_probe_tells_version_and_clock(bench: Bench) -> None:
    info = bench.open().probe()
    assert info.version.startswith("Redis 8.")
    assert info.store_ms is not None
    assert abs(info.store_ms - bench.now_ms()) < 5_000


HOWS: tuple[How, ...] = ("reset", "cut", "silence")


@pytest.mark.parametrize("how", HOWS)
def test_once_2_a_lost_reply_is_resolved_by_what_is_stored(
    how: How, bench: Bench, redis8_server: Server, proxy: Callable[[Server], Proxy]
) -> None:
    between = proxy(redis8_server)
    backend, other = bench.open(between.url_of(bench.url), 300), bench.open()
    backend.probe()
    won, lost = bench.intend("won"), bench.intend("lost")
    assert ask(other, bench.rival(lost)) is Verdict.GRANTED
    for claim, verdict in ((won, Verdict.GRANTED), (lost, Verdict.TAKEN)):
        before = between.requests
        rule = between.lose_reply(is_claim, how=how)
        with pytest.raises(OutcomeUnknown):
            ask(backend, claim)
        assert rule.fired.wait(LIMIT_S)
        assert between.requests <= before + 2, "it was not sent again unseen"
        assert ask(other, bench.rival(claim)) is Verdict.TAKEN
        assert ask(backend, claim) is verdict


def test_a_lost_request_has_no_effect(
    bench: Bench, redis8_server: Server, proxy: Callable[[Server], Proxy]
) -> None:
    between = proxy(redis8_server)
    backend = bench.open(between.url_of(bench.url))
    backend.probe()
    claim = bench.intend()
    between.lose_request(is_claim)
    with pytest.raises(OutcomeUnknown):
        ask(backend, claim)
    assert ask(bench.open(), bench.rival(claim)) is Verdict.GRANTED
    assert ask(backend, claim) is Verdict.TAKEN


def test_one_round_trip_for_a_batch(
    bench: Bench, redis8_server: Server, proxy: Callable[[Server], Proxy]
) -> None:
    between = proxy(redis8_server)
    backend = bench.open(between.url_of(bench.url))
    assert ask(backend, bench.intend()) is Verdict.GRANTED
    before = between.requests
    now_ms = bench.now_ms()
    backend.claim([bench.intend(f"job {number}", at_ms=now_ms) for number in range(100)])
    assert between.requests == before + 1
    assert between.accepted == 1


def test_clock_1_early_and_too_old_are_told_by_the_server_in_real_time(bench: Bench) -> None:
    backend = bench.open()
    host = SystemClock().now_ms() / 1_000 + 3_600
    with mock.patch("time.time", return_value=host):
        now_ms = bench.now_ms()
        [early] = backend.claim([bench.intend(at_ms=now_ms + 10_000)])
        assert early.verdict is Verdict.EARLY
        assert 5_000 < early.wait_ms <= 10_000
        assert ask(backend, bench.intend("old", at_ms=now_ms - WINDOW_MS - 1)) is Verdict.TOO_OLD
        assert ask(backend, bench.intend("new", at_ms=now_ms)) is Verdict.GRANTED


def test_once_3_a_claim_is_remembered_for_twice_its_window_in_real_time(bench: Bench) -> None:
    """Also before an instance whose window is longer, as during a rolling deploy."""
    backend, other = bench.open(), bench.open()
    claim = bench.intend(window_ms=400)
    assert ask(backend, claim) is Verdict.GRANTED
    asked: list[Verdict] = []
    while bench.now_ms() < claim.due_ms + 700:
        asked += [ask(other, bench.rival(claim, 10_000)), ask(other, bench.rival(claim))]
    assert set(asked) == {Verdict.TAKEN, Verdict.TOO_OLD} - ({Verdict.TOO_OLD} & _no(bench))


def _no(bench: Bench) -> set[Verdict]:
    # These look before they ask how old it is.
    return {Verdict.TOO_OLD} if bench.strategy != "idmp" else set()


def test_a_server_that_lost_its_scripts_or_its_data_goes_on(bench: Bench, own: Own) -> None:
    server = own.redis8()
    with closing(Bench(server.url, bench.strategy)) as mine:
        backend = mine.open()
        claim = mine.intend()
        assert ask(backend, claim) is Verdict.GRANTED
        mine.do("SCRIPT", "FLUSH")
        assert ask(backend, mine.rival(claim)) is Verdict.TAKEN
        mine.do("FLUSHALL")
        assert ask(backend, mine.intend("other")) is Verdict.GRANTED
        assert ask(backend, mine.rival(claim)) is Verdict.GRANTED  # it is forgotten
        server.kill()
        with pytest.raises((OutcomeUnknown, StoreUnavailable)):
            ask(backend, claim)
        server.start()
        assert ask(backend, claim) is Verdict.TAKEN


def test_a_key_of_somebody_else_is_named_and_nothing_is_half_written(bench: Bench) -> None:
    backend = bench.open()
    first, second = bench.intend("first"), bench.intend("second")
    names = {
        "script": f"once:6:second:{second.key.scheduled_ms}",
        "stream-id": "stream:second",
        "idmp": "idmp",
    }
    key = bench.key(names[bench.strategy])
    bench.do("SADD", key, "member")
    with pytest.raises(StoreRejected, match="belongs to something else") as caught:
        backend.claim([first, second])
    assert "is a set" in str(caught.value)
    assert list(bench.keys().values()) == ["set"]
    bench.do("DEL", key)
    assert ask(backend, bench.rival(first)) is Verdict.GRANTED


def test_a_full_server_refuses_a_batch_as_a_whole(bench: Bench, own: Own) -> None:
    server = own.redis8()
    with closing(Bench(server.url, bench.strategy)) as mine:
        backend = mine.open()
        claims = [mine.intend(f"job {number}") for number in range(10)]
        server.configure(maxmemory=1)
        with pytest.raises(StoreError, match=r"(?i)memory"):
            backend.claim(claims)
        server.configure(maxmemory=0)
        assert mine.keys() == {}
        assert {ask(backend, mine.rival(claim)) for claim in claims} == {Verdict.GRANTED}


def test_a_replica_is_refused_and_takes_nothing(bench: Bench, own: Own) -> None:
    primary = own.redis8()
    replica = own.redis8(replicaof=f"{primary.host} {primary.port}")
    with closing(Bench(replica.url, bench.strategy)) as mine:
        backend = mine.open()
        for call in (backend.probe, partial(ask, backend, mine.intend())):
            with pytest.raises(StoreRejected, match="it is a replica: name the primary"):
                call()


def test_a_wrong_password_is_told_without_it(bench: Bench, own: Own) -> None:
    server = own.redis8(requirepass="right")
    with closing(Bench(server.url, bench.strategy)) as mine:
        wrong = mine.open(f"redis://alice:s3cret@{server.host}:{server.port}")
        for call in (wrong.probe, partial(ask, wrong, mine.intend())):
            with pytest.raises(StoreUnavailable, match="cannot be reached") as caught:
                call()
            assert not any(secret in str(caught.value) for secret in SECRETS)
        assert ask(mine.open(), mine.intend()) is Verdict.GRANTED


def test_a_right_that_is_missing_is_told_as_that(bench: Bench, own: Own) -> None:
    server = own.redis8(user="alice on >s3cret ~leasecron:* +eval +evalsha +info +time +type")
    with closing(Bench(server.url, bench.strategy)) as mine:
        backend = mine.open(server.url.replace("://", "://alice:s3cret@"))
        with pytest.raises(StoreRejected, match="the user needs"):
            ask(backend, mine.intend())
        assert mine.keys() == {}


RIGHTS = {
    "script": "+get +set",
    "stream-id": "+xrange +xadd +xdel +pttl +pexpire",
    "idmp": "+exists +xinfo +xcfgset +xadd +xrange",
}


def test_the_rights_that_the_documents_name_are_enough(bench: Bench, own: Own) -> None:
    rights = f"+eval +evalsha +info +time +type {RIGHTS[bench.strategy]}"
    server = own.redis8(user=f"alice on >s3cret ~leasecron:* {rights}")
    with closing(Bench(server.url, bench.strategy)) as mine:
        backend = mine.open(server.url.replace("://", "://alice:s3cret@"))
        backend.probe()
        claim = mine.intend()
        assert ask(backend, claim) is Verdict.GRANTED
        assert ask(backend, mine.rival(claim)) is Verdict.TAKEN


def test_a_policy_that_evicts_claims_is_a_warning(bench: Bench, own: Own) -> None:
    """Also one that deletes only what expires: claims do."""
    for policy in ("volatile-ttl", "allkeys-lru"):
        server = own.redis8(maxmemory="64mb", maxmemory_policy=policy)
        with closing(Bench(server.url, bench.strategy)) as mine:
            [warning] = [one for one in mine.open().probe().warnings if policy in one]
            assert "forgotten lease or claim" in warning


@pytest.mark.timeout(30)
@pytest.mark.parametrize(("kind", "strategy"), [("sentinel", "script"), ("cluster", "stream-id")])
def test_sentinel_and_cluster_are_followed(kind: str, strategy: str, own: Own) -> None:
    if kind == "sentinel":
        sentinels = own.sentinels()
        end, addresses = f"/{sentinels.service}/0", sentinels.addresses
    else:
        end, addresses = "", own.cluster().addresses
    hosts = ",".join(f"{host}:{port}" for host, port in addresses)
    with closing(Bench(f"redis+{kind}://{hosts}{end}", strategy)) as mine:
        backend, other = mine.open(), mine.open()
        assert backend.probe().version.startswith("Redis ")
        at_ms = SystemClock().now_ms()
        claims = [mine.intend(f"job {number}", at_ms=at_ms) for number in range(5)]
        assert {reply.verdict for reply in backend.claim(claims)} == {Verdict.GRANTED}
        rivals = [mine.rival(claim) for claim in claims]
        assert {reply.verdict for reply in other.claim(rivals)} == {Verdict.TAKEN}


def test_a_closed_backend_and_a_discarded_one_can_be_opened_again(bench: Bench) -> None:
    backend = bench.open()
    claim = bench.intend()
    assert ask(backend, claim) is Verdict.GRANTED
    for leave in (backend.close, backend.discard):
        leave()
        with pytest.raises(StoreUnavailable, match="is closed"):
            ask(backend, claim)
        backend.open(BackendSettings(bench.space, "again", 3_000))
        assert ask(backend, claim) is Verdict.GRANTED


def test_claims_and_leases_of_one_namespace_do_not_meet(bench: Bench) -> None:
    lease = RedisLease(bench.url)
    lease.open(BackendSettings(bench.space, "me", 3_000))
    with closing(lease):
        lease.register([JobStamp("job", "x")])
        assert ask(bench.open(), bench.intend()) is Verdict.GRANTED
        assert list(lease.history(None, 10)) == []
        assert [job.job for job in lease.jobs(10)] == ["job"]


# -- the doctor ------------------------------------------------------------------------------------


def found(bench: Bench) -> dict[str, Finding]:
    settings = BackendSettings(bench.space, "me", 3_000)
    backend = RedisClaim(bench.url, strategy=bench.strategy)
    return {one.check: one for one in examine(backend, settings)}


def test_the_doctor_looks_and_writes_nothing(bench: Bench) -> None:
    told = found(bench)
    assert told["rights"].level is Level.OK
    assert bench.keys() == {}
    if bench.strategy == "idmp":
        assert told["idmp"].level is Level.NOTE
        bench.open().probe()
        assert found(bench)["idmp"].level is Level.OK
        bench.do("XCFGSET", bench.key("idmp"), "IDMP-DURATION", 5)
        assert found(bench)["idmp"].level is Level.PROBLEM


def test_the_doctor_tells_that_claims_are_evicted_by_any_policy(own: Own) -> None:
    server = own.redis8(maxmemory="64mb", maxmemory_policy="volatile-lru")
    with closing(Bench(server.url, "script")) as bench:
        told = found(bench)
        assert told["eviction"].level is Level.PROBLEM
        assert "volatile-lru" in told["eviction"].found


def test_the_doctor_tells_that_a_server_has_no_idempotent_ids(redis_url: str) -> None:
    with closing(Bench(redis_url, "idmp")) as bench:
        assert found(bench)["idmp"].level is Level.PROBLEM


# -- script ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("window_ms", "keep_ms"), [(1_000, 600_000), (WINDOW_MS, 600_000), (500_000, 1_000_000)]
)
def test_script_keeps_a_key_for_each_run_until_twice_its_window_and_ten_minutes_at_least(
    script: Bench, window_ms: int, keep_ms: int
) -> None:
    """One with a longer window finds what one with a shorter one has won."""
    claim = script.intend(window_ms=window_ms)
    assert ask(script.open(), claim) is Verdict.GRANTED
    [(name, kind)] = script.keys().items()
    assert kind == "string"
    left_ms = script.do("PTTL", script.key(name))
    assert keep_ms - 5_000 < left_ms <= keep_ms


# -- stream-id -------------------------------------------------------------------------------------


def test_stream_id_cannot_claim_an_older_run_after_a_newer_one(stream_id: Bench) -> None:
    """Whether it was ever claimed: it looks taken. Other jobs have streams of their own."""
    backend = stream_id.open()
    now_ms = stream_id.now_ms()
    assert ask(backend, stream_id.intend(at_ms=now_ms)) is Verdict.GRANTED
    older = stream_id.intend(at_ms=now_ms - 1)
    assert ask(backend, older) is Verdict.TAKEN
    assert ask(backend, stream_id.intend("other", at_ms=now_ms - 1)) is Verdict.GRANTED


def test_stream_id_never_expires_before_it_may(stream_id: Bench) -> None:
    """A later claim with a shorter window does not cut it; one with a longer window extends it."""
    backend = stream_id.open()
    now_ms = stream_id.now_ms()
    key = stream_id.key("stream:job")
    left_ms: list[int] = []
    for number, window_ms in enumerate((WINDOW_MS, 1_000, 10 * WINDOW_MS, 1_000)):
        claim = stream_id.intend(at_ms=now_ms - 10 + number, window_ms=window_ms)
        assert ask(backend, claim) is Verdict.GRANTED
        left_ms.append(stream_id.do("PTTL", key))
    for left, keep_ms in zip(left_ms, (600_000, 600_000, 20 * WINDOW_MS, 20 * WINDOW_MS)):
        assert keep_ms - 5_000 < left <= keep_ms
    stream_id.do("PERSIST", key)
    assert ask(backend, stream_id.intend()) is Verdict.GRANTED
    assert stream_id.do("PTTL", key) == -1


def test_stream_id_sweeps_what_does_not_matter_any_more(stream_id: Bench) -> None:
    now_ms = stream_id.now_ms()
    clock = [now_ms]
    backend = stream_id.open(now_ms=lambda: clock[0])
    for _ in range(300):
        clock[0] += 10_000
        claim = stream_id.intend(at_ms=clock[0], window_ms=10_000)
        assert ask(backend, claim) is Verdict.GRANTED
        assert ask(backend, stream_id.rival(claim)) is Verdict.TAKEN
    # Those of ten minutes, and no more.
    assert 60 <= stream_id.do("XLEN", stream_id.key("stream:job")) <= 62
    old = stream_id.intend(at_ms=clock[0] - 2_500_000, window_ms=10**7)
    assert ask(backend, old) is Verdict.TAKEN, "the newest id is known, whatever was swept"


def test_stream_id_is_not_confused_by_entries_of_somebody_else(stream_id: Bench) -> None:
    backend = stream_id.open()
    stream_id.do("XADD", stream_id.key("stream:job"), "5-0", "what", "ever")
    claim = stream_id.intend()
    assert ask(backend, claim) is Verdict.GRANTED
    assert ask(backend, stream_id.rival(claim)) is Verdict.TAKEN
    assert stream_id.do("XLEN", stream_id.key("stream:job")) == 2


@pytest.mark.parametrize("at_ms", [0, -5])
def test_a_run_of_long_ago_spoils_no_batch(at_ms: int, bench: Bench) -> None:
    replies = bench.open().claim([bench.intend("first"), bench.intend(at_ms=at_ms)])
    assert [reply.verdict for reply in replies] == [Verdict.GRANTED, Verdict.TOO_OLD]


# -- idmp ------------------------------------------------------------------------------------------


def settings_of(bench: Bench) -> tuple[int, int]:
    facts = bench.do("XINFO", "STREAM", bench.key("idmp"))
    # Older clients leave the answer as it comes: names and values in turn.
    pairs = facts.items() if isinstance(facts, dict) else zip(facts[::2], facts[1::2])
    named = {_text(name): value for name, value in pairs}
    return named["idmp-duration"], named["idmp-maxsize"]


def _text(name: Any) -> str:  # noqa: ANN401 - whatever the client makes of it
    return name.decode() if isinstance(name, bytes) else str(name)


def test_idmp_makes_and_configures_its_stream_at_start(idmp: Bench) -> None:
    idmp.open().probe()
    assert idmp.keys() == {"idmp": "stream"}
    assert settings_of(idmp) == (600, 10_000)
    assert idmp.do("PTTL", idmp.key("idmp")) == -1


def test_idmp_is_never_wiped_by_a_second_instance(idmp: Bench) -> None:
    backend = idmp.open()
    claims = [idmp.intend(f"job {number}") for number in range(5)]
    assert {reply.verdict for reply in backend.claim(claims)} == {Verdict.GRANTED}
    others = [idmp.open() for _ in range(8)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(RedisClaim.probe, others))
    for other in others:
        assert {ask(other, idmp.rival(claim)) for claim in claims} == {Verdict.TAKEN}


def test_idmp_made_by_twelve_instances_at_once(idmp: Bench) -> None:
    backends = [idmp.open() for _ in range(12)]
    claim = idmp.intend()
    with ThreadPoolExecutor(12) as pool:
        verdicts = list(pool.map(lambda one: ask(one, idmp.rival(claim)), backends))
    assert sorted(verdicts) == [Verdict.GRANTED, *[Verdict.TAKEN] * 11]


@pytest.mark.parametrize("setting", [("IDMP-DURATION", 300), ("IDMP-MAXSIZE", 100)])
def test_idmp_refuses_a_stream_with_other_settings_and_leaves_it_alone(
    setting: tuple[str, int], idmp: Bench
) -> None:
    key = idmp.key("idmp")
    idmp.do("XADD", key, "*", "made", "by somebody")
    idmp.do("XCFGSET", key, "IDMP-DURATION", 600, "IDMP-MAXSIZE", 10_000)
    idmp.do("XCFGSET", key, *setting)
    backend = idmp.open()
    for call in (backend.probe, partial(ask, backend, idmp.intend())):
        with pytest.raises(StoreUnsupported, match="has other settings than this version") as it:
            call()
        assert key in str(it.value)
    assert setting[1] in settings_of(idmp)


def test_idmp_keeps_all_runs_of_a_job_that_falls_due_each_second(idmp: Bench) -> None:
    """Six hundred ids in its memory's time, of ten thousand; other jobs have their own."""
    backend, now_ms = idmp.open(), idmp.now_ms()
    claims = [idmp.intend(at_ms=now_ms - age, window_ms=300_000) for age in range(1_200, 0, -1)]
    assert {reply.verdict for reply in backend.claim(claims)} == {Verdict.GRANTED}
    rivals = [idmp.rival(claim) for claim in claims]
    assert {reply.verdict for reply in idmp.open().claim(rivals)} == {Verdict.TAKEN}


def test_idmp_forgets_no_winner_whose_entry_is_gone(idmp: Bench) -> None:
    backend, claim = idmp.open(), idmp.intend()
    assert ask(backend, claim) is Verdict.GRANTED
    idmp.do("XTRIM", idmp.key("idmp"), "MAXLEN", 0)
    assert ask(backend, idmp.rival(claim)) is Verdict.TAKEN


def test_idmp_on_a_server_without_it_is_refused_at_start_with_its_version(redis_url: str) -> None:
    with closing(Bench(redis_url, "idmp")) as bench:
        backend = bench.open()
        with pytest.raises(
            StoreUnsupported, match=r"needs Redis 8\.6 or newer: .* \(this is"
        ) as it:
            backend.probe()
        assert any(name in str(it.value) for name in ("Redis 7", "Valkey 9"))
        with pytest.raises(StoreUnsupported):
            ask(backend, bench.intend())
        assert bench.keys() == {}


@pytest.fixture(autouse=True)
def no_secrets(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    with caplog.at_level(logging.DEBUG, "leasecron_sync"):
        yield
    assert not any(secret in caplog.text for secret in SECRETS)
