"""What only the NATS backend does: its address, its stream, its connection, its errors."""

from __future__ import annotations

import asyncio
import builtins
import gc
import json
import logging
import os
import socket
import threading
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from functools import partial
from itertools import cycle
from typing import Any, Callable, Optional
from unittest import mock

import pytest

from leasecron_sync.backends import _nats_link, _nats_loop, _nats_stream
from leasecron_sync.backends._nats_place import message_id, place_of_url, stream_name, subject_of
from leasecron_sync.backends.base import BackendSettings
from leasecron_sync.backends.nats import NatsClaim
from leasecron_sync.clock import SystemClock
from leasecron_sync.doctor.examine import examine
from leasecron_sync.doctor.finding import Finding, Findings, Level
from leasecron_sync.doctor.nats import _check_replicas
from leasecron_sync.errors import (
    MissingDependency,
    OutcomeUnknown,
    StoreError,
    StoreRejected,
    StoreUnavailable,
    StoreUnsupported,
)
from leasecron_sync.model import ClaimReply, OnceClaim, RunKey, Verdict
from leasecron_sync.testing.conformance._names import ODD_NAMES
from tests.services.fixtures import Own, had
from tests.services.nats import NatsServer
from tests.services.process import eventually
from tests.services.proxy import Proxy
from tests.services.relay import How
from tests.services.services import Services
from tests.services.tls import certificate_in, make_certificate

Proxied = Callable[[NatsServer], Proxy]

LIMIT_S = 4.0
WINDOW_MS = 60_000
NS = 1_000_000
SECRETS = ("alice", "s3cret")
HOWS: tuple[How, ...] = ("reset", "cut", "silence")


@pytest.fixture(autouse=True)
def nothing_said(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Neither the client nor the event loop says anything, and nobody says who logs in."""
    with caplog.at_level(logging.DEBUG):
        yield
        gc.collect()  # what complains of a task or a coroutine does so when it is thrown away
    others = [record for record in caplog.records if record.levelno >= logging.INFO]
    assert [(record.name, record.getMessage()) for record in others] == []
    assert not any(secret in caplog.text for secret in SECRETS)


# -- without a server ------------------------------------------------------------------------------


@pytest.mark.parametrize("url", [None, b"nats://localhost", 5])
def test_what_is_no_url_is_refused(url: Any) -> None:  # noqa: ANN401
    with pytest.raises(TypeError, match="needs a URL such as"):
        NatsClaim(url)


@pytest.mark.parametrize(
    "url",
    [
        "nats://alice:s3cret@host/path",
        "nats://alice:s3cret@host:notaport",
        "nats://alice:s3cret@host?replicas=6",
        "nats://alice:s3cret@host?replicas=two",
        "nats://alice:s3cret@host?tls_ca=/etc/passwd",
        "nats://alice:s3cret@host?credentials=/nowhere",
        "nats://alice:s3cret@host?wild=1",
        "nats://alice:s3cret@host#fragment",
        "nats://alice:s3@cret@host,a@b",
        "http://alice:s3cret@host",
    ],
)
def test_a_wrong_url_is_refused_without_its_secrets(url: str) -> None:
    with pytest.raises(ValueError, match="://") as caught:
        NatsClaim(url)
    assert not any(secret in str(caught.value) for secret in SECRETS)


def test_every_part_of_a_url_is_read() -> None:
    place = place_of_url("nats://al%3Aice:s%40cret@one:4000,two,[::1]:5000,localhost?replicas=3")
    assert place.servers == (
        "nats://one:4000",
        "nats://two:4222",
        "nats://[::1]:5000",
        "nats://localhost:4222",
    )
    assert place.connect_options() == {"user": "al:ice", "password": "s@cret"}
    assert place.replicas == 3
    assert place_of_url("nats://s%40cret@one").connect_options() == {"token": "s@cret"}
    assert "cret" not in repr(place) + repr(NatsClaim("nats://alice:s3cret@one"))


def test_a_missing_client_is_named_with_its_extra() -> None:
    real = builtins.__import__

    def without_nats(name: str, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        if name == "nats":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    missing = mock.patch.object(builtins, "__import__", without_nats)
    with missing, pytest.raises(MissingDependency, match=r"leasecron_sync\[nats\]"):
        NatsClaim("nats://localhost").open(BackendSettings("space", "me", 1_000))


def test_a_file_of_credentials_needs_a_package_that_is_named(tmp_path: Any) -> None:  # noqa: ANN401
    file = tmp_path / "user.creds"
    file.write_text("secret")
    backend = NatsClaim(f"nats://localhost?credentials={file}")
    missing = mock.patch("leasecron_sync.backends.nats.find_spec", return_value=None)
    with missing, pytest.raises(MissingDependency, match="pip install nkeys"):
        backend.open(BackendSettings("space", "me", 1_000))


def test_nothing_is_connected_before_the_first_call() -> None:
    backend = NatsClaim("nats://127.0.0.1:1")
    backend.open(BackendSettings("space", "me", 1_000))
    backend.close()


def test_ids_of_messages_are_one_line_of_ascii_and_all_different() -> None:
    names = [*ODD_NAMES, "", "a b", "a%20b", "a+b", "job 1", "job%201"]
    ids = [message_id(RunKey(name, at)) for name in names for at in (1, 11, -1, 0)]
    assert len(set(ids)) == len(ids)
    assert all(one.isascii() and one.isprintable() for one in ids)
    assert len({stream_name(name) for name in names}) == len(names)


# -- with a server ---------------------------------------------------------------------------------


class Bench:
    """A namespace of a server, and backends on it that are closed in the end."""

    def __init__(self, server: NatsServer) -> None:
        self.server = server
        self.space = f"unit {uuid.uuid4().hex}"
        self.stream = stream_name(self.space)
        self._opened: list[NatsClaim] = []
        self._decisions = 0

    def open(self, url: str = "", call_timeout_ms: int = 3_000) -> NatsClaim:
        backend = NatsClaim(url or self.server.url)
        backend.open(BackendSettings(self.space, f"instance {len(self._opened)}", call_timeout_ms))
        self._opened.append(backend)
        return backend

    def close(self) -> None:
        for backend in self._opened:
            backend.close()

    def manage(self, what: str, content: object = None, stream: str = "") -> dict[str, Any]:
        """Do what an operator does to the stream."""
        return self.server.request(f"$JS.API.STREAM.{what}.{stream or self.stream}", content)

    def config(self) -> dict[str, Any]:
        config: dict[str, Any] = self.manage("INFO")["config"]
        return config

    def window_ms(self) -> int:
        return int(self.config()["duplicate_window"]) // NS

    def messages(self) -> int:
        return self.server.streams()[self.stream]

    def intend(self, job: str = "job", *, ago_ms: int = 0, window_ms: int = WINDOW_MS) -> OnceClaim:
        self._decisions += 1
        at_ms = SystemClock().now_ms() - ago_ms
        decision = f"decision {self._decisions}"
        return OnceClaim(RunKey(job, at_ms), at_ms, "me", decision, window_ms)

    def rival(self, claim: OnceClaim) -> OnceClaim:
        other = self.intend()
        return OnceClaim(claim.key, claim.due_ms, "it", other.decision_id, claim.window_ms)


@pytest.fixture
def bench(nats_server: NatsServer) -> Iterator[Bench]:
    with closing(Bench(nats_server)) as bench:
        yield bench


@contextmanager
def bench_of(server: NatsServer) -> Iterator[Bench]:
    with closing(Bench(server)) as bench:
        yield bench


def ask(backend: NatsClaim, claim: OnceClaim) -> Verdict:
    [reply] = backend.claim([claim])
    return reply.verdict


def took_ms(call: Callable[[], object]) -> int:
    began_ms = SystemClock().steady_ms()
    with suppress(StoreError):
        call()
    return SystemClock().steady_ms() - began_ms


def is_claim(request: bytes) -> bool:
    return b"HPUB leasecron.claim." in request


def test_the_probe_tells_the_version_and_makes_the_stream(bench: Bench) -> None:
    info = bench.open().probe()
    assert info.version.partition(" ")[0] == "NATS"
    assert info.version.split()[1][0].isdigit()
    assert info.store_ms is None
    config = bench.config()
    assert config["storage"] == "file"
    assert config["duplicate_window"] == config["max_age"] == 600_000 * NS


@pytest.mark.parametrize("how", HOWS)
def test_once_2_a_lost_reply_is_resolved_by_the_first_message(
    how: How, bench: Bench, nats_server: NatsServer, proxy: Proxied
) -> None:
    between = proxy(nats_server)
    backend, other = bench.open(between.url_of(nats_server.url), 300), bench.open()
    backend.probe()
    won, lost = bench.intend("won"), bench.intend("lost")
    assert ask(other, bench.rival(lost)) is Verdict.GRANTED
    for claim, verdict in ((won, Verdict.GRANTED), (lost, Verdict.TAKEN)):
        rule = between.lose_reply(is_claim, how=how)
        with pytest.raises(OutcomeUnknown):
            ask(backend, claim)
        assert rule.fired.wait(LIMIT_S)
        assert ask(other, bench.rival(claim)) is Verdict.TAKEN
        assert ask(backend, claim) is verdict
    assert bench.messages() == 2


@pytest.mark.parametrize("how", HOWS)
def test_a_lost_request_is_unknown_and_has_no_effect(
    how: How, bench: Bench, nats_server: NatsServer, proxy: Proxied
) -> None:
    between = proxy(nats_server)
    backend, other = bench.open(between.url_of(nats_server.url), 300), bench.open()
    backend.probe()
    rule = between.lose_request(is_claim, how=how)
    claim = bench.intend()
    with pytest.raises(OutcomeUnknown):
        ask(backend, claim)
    assert rule.fired.wait(LIMIT_S)
    assert ask(other, bench.rival(claim)) is Verdict.GRANTED
    assert ask(backend, claim) is Verdict.TAKEN


def test_a_connection_that_ends_is_noticed_at_once_and_not_at_the_deadline(
    bench: Bench, nats_server: NatsServer, proxy: Proxied
) -> None:
    between = proxy(nats_server)
    backend = bench.open(between.url_of(nats_server.url))
    backend.probe()
    between.lose_reply(is_claim, how="reset")
    assert took_ms(partial(ask, backend, bench.intend())) < 1_500
    assert ask(backend, bench.intend()) is Verdict.GRANTED


@pytest.mark.parametrize("ends", ["cut", "swallow"])
def test_nothing_is_sent_later_from_a_buffer(
    ends: str, bench: Bench, nats_server: NatsServer, proxy: Proxied
) -> None:
    """A claim that nobody holds any more would keep a run from everybody."""
    between = proxy(nats_server)
    backend = bench.open(between.url_of(nats_server.url), 300)
    backend.probe()
    if ends == "cut":
        between.refuse()
        between.cut()
    else:
        between.swallow()
    given_up = [bench.intend(f"job {number}") for number in range(3)]
    for claim in given_up:
        with pytest.raises((StoreUnavailable, OutcomeUnknown)):
            ask(backend, claim)
    between.forward()
    later = bench.intend("later")

    def granted() -> bool:
        with suppress(StoreUnavailable, OutcomeUnknown):  # the time of a call is short here
            return ask(backend, later) is Verdict.GRANTED
        return False

    assert eventually(granted, LIMIT_S)
    assert bench.messages() == 1
    other = bench.open()
    for claim in given_up:
        assert ask(other, bench.rival(claim)) is Verdict.GRANTED


def test_a_message_in_process_is_asked_for_again(bench: Bench) -> None:
    backend = bench.open()
    real = _nats_link.Link.ask
    answers = iter([True, True, False])
    in_process = {"code": 409, "err_code": 10158, "description": "duplicate message in process"}

    async def asked(link: Any, subject: str, body: bytes, deadline: Any, *args: Any) -> Any:  # noqa: ANN401
        if subject.startswith("leasecron.claim.") and deadline.left_ms() and next(answers):
            return {"error": in_process}
        return await real(link, subject, body, deadline, *args)

    with mock.patch.object(_nats_link.Link, "ask", asked):
        assert ask(backend, bench.intend()) is Verdict.GRANTED
    with mock.patch.object(_nats_link.Link, "ask", asked):
        answers = iter([True] * 100_000)
        backend = bench.open(call_timeout_ms=200)
        with pytest.raises(StoreUnavailable):
            ask(backend, bench.intend())


def test_a_stream_that_does_not_listen_yet_is_asked_again(bench: Bench) -> None:
    """A server may show a stream that another instance makes before it has subscribed."""
    backend, other = bench.open(), bench.open(call_timeout_ms=100)
    other.probe()
    real = _nats_link.Link.ask
    deaf: Iterator[bool]
    published = 0

    async def asked(link: Any, subject: str, *args: Any) -> Any:  # noqa: ANN401
        nonlocal published
        if subject.startswith("leasecron.claim."):
            published += 1
            if next(deaf):
                subject = "nobody"
        return await real(link, subject, *args)

    with mock.patch.object(_nats_link.Link, "ask", asked):
        deaf = iter([True, True, False])
        claim = bench.intend()
        assert ask(backend, claim) is Verdict.GRANTED
        assert published == 3
        bench.manage("UPDATE", {**bench.config(), "duplicate_window": 100_000 * NS})
        deaf = cycle([False])
        assert ask(backend, bench.rival(claim)) is Verdict.TAKEN
        assert bench.window_ms() == 600_000, "what it heard nothing of is looked at again"
        published = 3
        deaf = cycle([True])
        with pytest.raises(_nats_link.NobodyAnswers):
            ask(backend, bench.intend())  # within the time of a call, and not for ever
        assert published == 3 + 1 + len(_nats_stream.NOBODY_WAITS_MS)
        with pytest.raises(_nats_link.NobodyAnswers):
            ask(other, bench.intend())
        assert published < 3 + 2 * (1 + len(_nats_stream.NOBODY_WAITS_MS))
        deaf = cycle([False])
        assert ask(other, bench.rival(claim)) is Verdict.TAKEN
    assert bench.messages() == 1


def test_an_answer_of_somebody_else_is_no_grant(bench: Bench) -> None:
    """Any client may listen to a subject, and reply."""
    backend = bench.open()
    backend.probe()
    real = _nats_link.Link.ask

    for nonsense in ({}, {"stream": "other", "seq": 1}, {"stream": bench.stream}):

        async def asked(link: Any, subject: str, *args: Any, answer: Any = nonsense) -> Any:  # noqa: ANN401
            return answer if "claim" in subject else await real(link, subject, *args)

        with mock.patch.object(_nats_link.Link, "ask", asked), pytest.raises(OutcomeUnknown):
            ask(backend, bench.intend())


# -- the stream ------------------------------------------------------------------------------------


def test_a_stream_made_by_twelve_instances_at_once(bench: Bench) -> None:
    backends = [bench.open() for _ in range(12)]
    claim = bench.intend()
    with ThreadPoolExecutor(12) as pool:
        verdicts = list(pool.map(lambda one: ask(one, bench.rival(claim)), backends))
    assert sorted(verdicts) == [Verdict.GRANTED, *[Verdict.TAKEN] * 11]
    assert bench.messages() == 1


def test_a_window_is_widened_and_never_narrowed(bench: Bench) -> None:
    first = bench.open()
    claim = bench.intend(window_ms=WINDOW_MS)
    assert ask(first, claim) is Verdict.GRANTED
    assert bench.window_ms() == 600_000
    assert ask(bench.open(), bench.intend(window_ms=700_000)) is Verdict.GRANTED
    assert bench.window_ms() == 1_400_000
    assert bench.config()["max_age"] == 1_400_000 * NS
    assert ask(bench.open(), bench.intend(window_ms=1_000)) is Verdict.GRANTED
    assert bench.window_ms() == 1_400_000
    assert ask(first, bench.rival(claim)) is Verdict.TAKEN


def test_a_stream_that_keeps_messages_for_ever_goes_on_doing_so(bench: Bench) -> None:
    bench.open().probe()
    bench.manage("UPDATE", {**bench.config(), "max_age": 0, "duplicate_window": 100_000 * NS})
    assert ask(bench.open(), bench.intend()) is Verdict.GRANTED
    assert (bench.window_ms(), bench.config()["max_age"]) == (600_000, 0)


def test_two_instances_that_widen_it_at_once_end_with_the_longer_window(bench: Bench) -> None:
    """The one that was undone by the other looks again before that can do harm."""
    backends = [bench.open() for _ in range(6)]
    windows = [400_000 + 100_000 * number for number in range(6)]

    def widen(number: int) -> Verdict:
        return ask(backends[number], bench.intend(f"job {number}", window_ms=windows[number]))

    for _ in range(2):
        with ThreadPoolExecutor(6) as pool:
            assert list(pool.map(widen, range(6))) == [Verdict.GRANTED] * 6
        with mock.patch.object(_nats_stream, "LOOK_AGAIN_MS", 0):
            for number in range(6):
                widen(number)
        assert bench.window_ms() == 2 * windows[-1]


def test_a_stream_whose_window_somebody_narrows_is_widened_again(bench: Bench) -> None:
    backend = bench.open()
    ask(backend, bench.intend())
    bench.manage("UPDATE", {**bench.config(), "duplicate_window": 1_000 * NS})
    assert ask(backend, bench.intend()) is Verdict.GRANTED  # it is not looked at each time
    assert bench.window_ms() == 1_000
    with mock.patch.object(_nats_stream, "LOOK_AGAIN_MS", 0):
        ask(backend, bench.intend())
    assert bench.window_ms() == 600_000


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"storage": "memory"}, "not kept in files"),
        ({"retention": "workqueue"}, "messages go when they are read"),
        ({"retention": "interest"}, "messages go when they are read"),
        ({"max_msgs": 1_000}, "a limit of messages"),
        ({"max_msgs_per_subject": 1}, "a limit of messages"),
        ({"max_bytes": 100_000}, "a limit of bytes"),
        ({"max_msg_size": 10}, "a limit of the size"),
        ({"no_ack": True}, "does not confirm"),
        ({"subjects": ["elsewhere"]}, "other subjects"),
    ],
)
def test_a_stream_that_forgets_claims_is_refused_at_start(
    changed: dict[str, object], why: str, bench: Bench
) -> None:
    config: dict[str, object] = {
        "name": bench.stream,
        "subjects": [subject_of(bench.stream)],
        "storage": "file",
        "retention": "limits",
        "max_age": 600_000 * NS,
        "duplicate_window": 600_000 * NS,
        **changed,
    }
    if "subjects" in changed:
        config["subjects"] = [f"elsewhere.{bench.stream}"]
    assert "error" not in bench.manage("CREATE", config)
    with pytest.raises(StoreUnsupported, match=why) as caught:
        bench.open().probe()
    assert bench.stream in str(caught.value)
    with pytest.raises(StoreUnsupported):
        ask(bench.open(), bench.intend())
    bench.manage("DELETE")


def test_a_sealed_stream_is_refused_at_start(bench: Bench) -> None:
    bench.open().probe()
    bench.manage("UPDATE", {**bench.config(), "sealed": True, "discard": "new", "max_age": 0})
    assert bench.config()["sealed"]
    with pytest.raises(StoreUnsupported, match="sealed"):
        bench.open().probe()


def test_another_stream_that_has_the_subjects_is_named_as_the_reason(own: Own) -> None:
    with bench_of(own.nats()) as bench:
        bench.manage("CREATE", {"name": "all", "subjects": ["leasecron.>"]}, "all")
        with pytest.raises(StoreUnsupported, match="cannot be made or changed: subjects overlap"):
            bench.open().probe()


def test_replicas_without_a_cluster_are_refused_at_start(bench: Bench) -> None:
    with pytest.raises(StoreUnsupported, match="cannot be made or changed: replicas"):
        bench.open(f"{bench.server.url}?replicas=3").probe()


def test_a_stream_deleted_under_way_is_made_anew_and_its_claims_are_forgotten(
    bench: Bench,
) -> None:
    backend = bench.open()
    claim = bench.intend()
    assert ask(backend, claim) is Verdict.GRANTED
    bench.manage("DELETE")
    with pytest.raises(StoreUnavailable, match="nobody answers"):
        ask(backend, bench.intend("other"))
    assert ask(backend, bench.intend("other")) is Verdict.GRANTED
    assert ask(bench.open(), bench.rival(claim)) is Verdict.GRANTED


def test_a_purged_stream_still_knows_who_came_too_late(bench: Bench) -> None:
    """Whose the first claim was cannot be read any more, so nobody is told that it won."""
    backend = bench.open()
    claim = bench.intend()
    assert ask(backend, claim) is Verdict.GRANTED
    bench.manage("PURGE")
    for one in (claim, bench.rival(claim)):
        with pytest.raises(OutcomeUnknown, match="cannot be read"):
            ask(bench.open(), one)
    assert ask(backend, bench.intend("other")) is Verdict.GRANTED


def test_one_claim_that_cannot_be_decided_leaves_the_others_their_answers(bench: Bench) -> None:
    backend = bench.open()
    first = bench.intend("first")
    assert ask(backend, first) is Verdict.GRANTED
    bench.manage("PURGE")
    replies = backend.claim([bench.rival(first), bench.intend("second")])
    assert replies == [ClaimReply(Verdict.DEFERRED, 1_000), ClaimReply(Verdict.GRANTED)]


def test_once_3_an_id_is_remembered_for_the_window_and_no_longer(bench: Bench) -> None:
    """In real time: the server forgets it when twice a window is over."""
    bench.manage(
        "CREATE",
        {
            "name": bench.stream,
            "subjects": [subject_of(bench.stream)],
            "storage": "file",
            "max_age": 1_000 * NS,
            "duplicate_window": 1_000 * NS,
        },
    )
    short = mock.patch.object(_nats_stream, "USUAL_WINDOW_MS", 1_000)
    with short:
        backend = bench.open()
        claim = bench.intend(window_ms=500)
        assert ask(backend, claim) is Verdict.GRANTED
        asked: list[Verdict] = []
        while Verdict.TOO_OLD not in asked:
            asked.append(ask(backend, bench.rival(claim)))
        assert set(asked) == {Verdict.TAKEN, Verdict.TOO_OLD}
        longer = OnceClaim(claim.key, claim.due_ms, "it", "another", 10_000)
        while SystemClock().now_ms() < claim.due_ms + 900:
            # One that has a longer window, as during a rolling deploy; it widens nothing here.
            with mock.patch.object(_nats_stream.Stream, "meet", _nothing):
                assert ask(backend, longer) is Verdict.TAKEN


async def _nothing(_stream: object, _window_ms: int, _deadline: object) -> None: ...


# -- who may not -----------------------------------------------------------------------------------


def test_jetstream_that_is_off_is_named_at_start(own: Own) -> None:
    with bench_of(own.nats(jetstream=False)) as bench:
        with pytest.raises(StoreUnsupported, match="JetStream is not enabled"):
            bench.open().probe()
        with pytest.raises(StoreUnsupported, match="JetStream is not enabled"):
            ask(bench.open(), bench.intend())


USER, PASSWORD = SECRETS
LOGIN = {"user": USER, "password": PASSWORD}
OPERATOR = {"user": "operator", "password": "operator"}


def as_alice(server: NatsServer) -> str:
    return server.url.replace("://", f"://{USER}:{PASSWORD}@")


def accounts(user: dict[str, Any], *, jetstream: bool = True) -> dict[str, Any]:
    """Return settings with a user beside the operator, who needs no password."""
    account: dict[str, Any] = {"users": [{**LOGIN, **user}, OPERATOR]}
    if jetstream:
        account["jetstream"] = "enabled"
    return {"accounts": {"A": account}, "no_auth_user": OPERATOR["user"]}


def test_an_account_without_jetstream_is_named_at_start(own: Own) -> None:
    settings = accounts({}, jetstream=False)
    with bench_of(own.nats(**settings)) as bench:
        backend = bench.open(as_alice(bench.server))
        with pytest.raises(StoreUnsupported, match="JetStream is not enabled"):
            backend.probe()


def denied(**permissions: object) -> dict[str, Any]:
    return accounts({"permissions": permissions})


def test_a_right_that_is_missing_is_named_at_once(own: Own) -> None:
    """Of asking JetStream, of claiming, and of receiving answers."""
    server = own.nats(**denied(publish={"deny": "$JS.API.>"}))
    with bench_of(server) as bench:
        backend = bench.open(as_alice(server))
        assert took_ms(backend.probe) < 2_000
        with pytest.raises(StoreRejected, match=r"(?i)permissions violation for publish"):
            backend.probe()
    server = own.nats(**denied(publish={"deny": "leasecron.>"}))
    with bench_of(server) as bench:
        backend = bench.open(as_alice(server))
        backend.probe()
        claims = [bench.intend(f"job {number}") for number in range(5)]
        assert took_ms(partial(backend.claim, claims)) < 2_000
        with pytest.raises(StoreRejected, match=r"(?i)permissions violation for publish"):
            backend.claim(claims)
        assert bench.messages() == 0
    server = own.nats(**denied(subscribe={"deny": "_INBOX.>"}))
    with bench_of(server) as bench:
        backend = bench.open(as_alice(server))
        with pytest.raises(StoreRejected, match=r"needs to subscribe to _INBOX"):
            ask(backend, bench.intend())


def test_the_rights_that_the_documents_name_are_enough(own: Own) -> None:
    allowed = {
        "publish": {
            "allow": [
                "leasecron.claim.>",
                *(f"$JS.API.STREAM.{verb}.*" for verb in ("INFO", "CREATE", "UPDATE", "MSG.GET")),
            ]
        },
        "subscribe": {"allow": "_INBOX.>"},
    }
    server = own.nats(**denied(**allowed))
    with bench_of(server) as bench:
        backend = bench.open(as_alice(server))
        claim = bench.intend(window_ms=400_000)
        backend.probe()
        assert ask(backend, claim) is Verdict.GRANTED
        assert ask(backend, claim) is Verdict.GRANTED
        assert ask(backend, bench.rival(claim)) is Verdict.TAKEN


@pytest.mark.parametrize("login", ["", "alice:wrong@", "bob:s3cret@", "s3cret@"])
def test_a_wrong_password_is_told_and_tried_again(login: str, own: Own) -> None:
    server = own.nats(user=USER, password=PASSWORD)
    with bench_of(server) as bench:
        wrong = bench.open(f"nats://{login}{server.host}:{server.port}")
        for call in (wrong.probe, partial(ask, wrong, bench.intend())):
            with pytest.raises(StoreUnavailable, match=r"(?i)authorization violation") as caught:
                call()
            assert not any(secret in str(caught.value) for secret in (*SECRETS, "bob"))
        assert ask(bench.open(server.url), bench.intend()) is Verdict.GRANTED


class Fake:
    """A server that says what it is told, and keeps what it hears."""

    def __init__(self, *says: bytes, info: Optional[dict[str, object]] = None) -> None:
        self._says = says
        self._info = info or {"server_id": "fake", "version": "2.9.9", "headers": True}
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.heard = b""
        self.address = self._listener.getsockname()
        self.thread = threading.Thread(target=self._serve, daemon=True)
        self.thread.start()

    def _serve(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                with client:
                    client.sendall(b"INFO " + json.dumps(self._info).encode() + b" \r\n")
                    for words in self._says:
                        self.heard += client.recv(65_536)
                        client.sendall(words)
                    client.recv(65_536)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.thread.join(LIMIT_S)


def test_a_token_is_sent_and_its_refusal_is_told_without_it() -> None:
    with closing(Fake(b"-ERR 'Authorization Violation'\r\n")) as fake:
        backend = NatsClaim(f"nats://s3cret@127.0.0.1:{fake.address[1]}")
        backend.open(BackendSettings("space", "me", 2_000))
        with closing(backend), pytest.raises(StoreUnavailable, match="or token, are wrong"):
            backend.probe()
    assert b'"auth_token": "s3cret"' in fake.heard


def test_a_password_is_never_sent_in_the_clear_where_the_url_asks_for_encryption() -> None:
    with closing(Fake(b"PONG\r\n")) as fake:
        backend = NatsClaim(f"tls://alice:s3cret@127.0.0.1:{fake.address[1]}")
        backend.open(BackendSettings("space", "me", 2_000))
        with closing(backend), pytest.raises(StoreUnavailable, match="does not encrypt"):
            backend.probe()
    assert b"s3cret" not in fake.heard


@pytest.mark.parametrize("version", ["2.9", "2.15"])
def test_an_encrypted_connection_is_used_and_ended(version: str, services: Services) -> None:
    server = had(lambda: services.new_nats(version))
    make_certificate(server.home)
    files = certificate_in(server.home.folder)
    tls: Any = {"cert_file": str(files.certificate), "key_file": str(files.key)}
    server.settings.update(tls=tls, user=USER, password=PASSWORD)
    at = f"tls://{USER}:{PASSWORD}@{server.host}:{server.port}"
    # The tests' own connection speaks no TLS; the server's log says when it is ready.
    with mock.patch.object(server, "answers", return_value=True):
        server.start()
    with closing(server):
        backend = NatsClaim(f"{at}?tls_ca={files.ca}")
        backend.open(BackendSettings("space", "me", 3_000))
        with closing(backend):
            assert backend.probe().version
        stranger = NatsClaim(at)
        stranger.open(BackendSettings("space", "me", 3_000))
        with closing(stranger), pytest.raises(StoreUnavailable, match=r"(?i)certificate"):
            stranger.probe()


def test_a_peer_that_speaks_something_else_is_no_server() -> None:
    with closing(Fake(info={"what": "\0" * 10})) as fake:
        backend = NatsClaim(f"nats://127.0.0.1:{fake.address[1]}")
        backend.open(BackendSettings("space", "me", 500))
        with closing(backend), pytest.raises(StoreUnavailable, match="cannot be reached"):
            backend.probe()


# -- where it is -----------------------------------------------------------------------------------


def test_a_server_that_is_down_is_unavailable_and_its_address_is_named(own: Own) -> None:
    server = own.nats()
    with bench_of(server) as bench:
        backend = bench.open()
        backend.probe()
        server.stop()
        for call in (backend.probe, partial(ask, backend, bench.intend())):
            with pytest.raises(StoreUnavailable, match=r"127\.0\.0\.1:\d+ cannot be reached") as it:
                call()
            assert "refused" in str(it.value)
        server.start()
        assert ask(backend, bench.intend()) is Verdict.GRANTED


def test_a_name_that_nobody_knows_is_told() -> None:
    backend = NatsClaim("nats://nowhere.invalid")
    backend.open(BackendSettings("space", "me", 2_000))
    with closing(backend), pytest.raises(StoreUnavailable, match="cannot be reached"):
        backend.probe()


@pytest.mark.parametrize("dead", ["refuse", "stall"])
def test_a_dead_server_first_in_the_list_leaves_the_next_one_its_time(
    dead: str, bench: Bench, nats_server: NatsServer, proxy: Proxied
) -> None:
    between = proxy(nats_server)
    getattr(between, dead)()
    hosts = f"{between.host}:{between.port},{nats_server.host}:{nats_server.port}"
    first = mock.patch("random.shuffle", lambda servers: servers.reverse())
    with first:
        backend = bench.open(f"nats://{hosts}", 1_500)
        assert backend.probe().version
        assert ask(backend, bench.intend()) is Verdict.GRANTED


@pytest.mark.parametrize("silent", ["stall", "swallow"])
def test_call_1_a_silent_server_ends_every_call_at_its_deadline(
    silent: str, bench: Bench, nats_server: NatsServer, proxy: Proxied
) -> None:
    between = proxy(nats_server)
    known, new = (bench.open(between.url_of(nats_server.url), 200) for _ in range(2))
    known.probe()
    getattr(between, silent)()
    between.swallow()
    for backend in (known, new):
        for call in (backend.probe, partial(ask, backend, bench.intend())):
            # Not each time: the machine may stand still. The client's own limit is two seconds.
            assert any(150 <= took_ms(call) < 1_500 for _ in range(3))
        assert took_ms(backend.close) < 1_500
    between.forward()
    assert ask(bench.open(between.url_of(nats_server.url)), bench.intend()) is Verdict.GRANTED


# -- the doctor ------------------------------------------------------------------------------------


def found(url: str, space: str) -> dict[str, Finding]:
    settings = BackendSettings(space, "me", 3_000)
    return {one.check: one for one in examine(NatsClaim(url), settings)}


def test_the_doctor_looks_and_makes_nothing(bench: Bench) -> None:
    told = found(bench.server.url, bench.space)
    assert told["stream"].level is Level.NOTE
    assert told["client"].found.startswith("nats 2")
    assert bench.stream not in bench.server.streams()
    bench.open().probe()
    told = found(bench.server.url, bench.space)
    assert told["version"].found.startswith("NATS 2.")
    assert (told["stream"].level, told["stream"].measured) == (Level.OK, {"window_ms": 600_000})
    assert told["replicas"].level is Level.NOTE
    assert not {Level.WARNING, Level.PROBLEM} & {one.level for one in told.values()}


def test_the_doctor_finds_that_a_server_without_a_cluster_refuses_the_replicas_of_the_url(
    bench: Bench,
) -> None:
    url = f"{bench.server.url}?replicas=3"
    for stream in (Level.NOTE, Level.OK):  # there is none yet, and one
        told = found(url, bench.space)
        assert told["stream"].level is stream
        assert told["replicas"].level is Level.PROBLEM
        assert "the URL asks for replicas=3" in told["replicas"].found
        assert "?replicas=3" not in told["replicas"].advice
        if stream is Level.NOTE:
            with pytest.raises(StoreUnsupported, match="cannot be made or changed"):
                bench.open(url).probe()
        bench.open().probe()
    with suppress(StoreUnsupported):
        version = bench.open(url).probe().version
        assert version.startswith("NATS 2.9.")  # it takes the change, and keeps the stream alone
        told = found(url, bench.space)
        assert told["replicas"].level is Level.WARNING
        assert told["replicas"].found == "one server keeps the stream, whose settings say 3"


@pytest.mark.parametrize(
    ("replicas", "wanted", "clustered", "level"),
    [
        (1, 1, False, Level.NOTE),
        (1, 3, False, Level.PROBLEM),
        (3, 5, False, Level.PROBLEM),
        (3, 3, False, Level.WARNING),
        (3, 1, False, Level.WARNING),
        (1, 1, True, Level.WARNING),
        (1, 3, True, Level.WARNING),
        (3, 5, True, Level.WARNING),
        (3, 3, True, Level.OK),
        (3, 1, True, Level.OK),
    ],
)
def test_the_doctor_compares_the_replicas_of_stream_and_url(
    replicas: int, wanted: int, level: Level, *, clustered: bool
) -> None:
    findings = Findings()
    facts = _nats_stream.Facts("NATS", "stream", 600_000, replicas, clustered)
    _check_replicas(findings, facts, wanted)
    [told] = findings.all()
    assert told.level is level
    advises_it = "?replicas=3" in told.advice
    assert advises_it == (replicas == wanted == 1)
    is_few = clustered and replicas < wanted
    assert (f"the URL asks for {wanted}" in told.found) == is_few


@pytest.mark.slow
@pytest.mark.timeout(90)
def test_the_doctor_in_a_cluster_finds_that_the_next_start_spreads_the_stream(
    own: Own, nats_version: Optional[str]
) -> None:
    hosts = ",".join(f"{host}:{port}" for host, port in own.nats_cluster(nats_version).addresses)
    one, three = f"nats://{hosts}", f"nats://{hosts}?replicas=3"

    def started(url: str) -> dict[str, Finding]:
        with closing(NatsClaim(url)) as backend:
            backend.open(BackendSettings("space", "me", 5_000))
            backend.probe()
        return found(three, "space")

    assert "replicas" not in found(three, "space")  # there is no stream yet, and one can be made
    told = started(one)["replicas"]
    assert told.level is Level.WARNING
    assert told.found == "one server keeps the stream, and the URL asks for 3"
    assert started(three)["replicas"].level is Level.OK
    assert found(one, "space")["replicas"].level is Level.OK  # a start never takes replicas away


def test_the_doctor_tells_of_a_stream_that_forgets(bench: Bench) -> None:
    subjects = [subject_of(bench.stream)]
    bench.manage("CREATE", {"name": bench.stream, "subjects": subjects, "storage": "memory"})
    told = found(bench.server.url, bench.space)
    assert told["stream"].level is Level.PROBLEM
    assert "not kept in files" in told["stream"].found
    bench.manage("DELETE")


def test_the_doctor_tells_why_nothing_can_be_claimed(own: Own) -> None:
    server = own.nats(jetstream=False)
    assert found(server.url, "space")["jetstream"].level is Level.PROBLEM
    server.stop()
    assert found(server.url, "space")["reachable"].level is Level.PROBLEM
    server = own.nats(**denied(publish={"deny": "$JS.API.>"}))
    assert found(as_alice(server), "space")["rights"].level is Level.PROBLEM


# -- threads, forks and the end --------------------------------------------------------------------


def names_of_threads() -> list[str]:
    return sorted(one.name for one in threading.enumerate() if "leasecron" in one.name)


def test_threads_are_named_and_gone_after_close(bench: Bench) -> None:
    backend = bench.open()
    backend.probe()
    assert names_of_threads() == ["leasecron-nats", "leasecron-nats-names"]
    backend.close()
    backend.close()
    assert names_of_threads() == []


def test_closing_during_a_call_ends_it_and_it_can_be_opened_again(
    bench: Bench, nats_server: NatsServer, proxy: Proxied
) -> None:
    between = proxy(nats_server)
    for stage in ("connecting", "asking"):
        backend = bench.open(between.url_of(nats_server.url))
        if stage == "asking":
            backend.probe()
        between.swallow()
        errors: list[StoreError] = []

        def call(backend: NatsClaim = backend, errors: list[StoreError] = errors) -> None:
            try:
                ask(backend, bench.intend())
            except StoreError as error:
                errors.append(error)

        thread = threading.Thread(target=call)
        before = between.requests + between.accepted
        thread.start()
        while between.requests + between.accepted == before:
            thread.join(0.01)
        assert took_ms(backend.close) < 1_500
        thread.join(LIMIT_S)
        assert len(errors) == 1
        between.forward()
        backend.open(BackendSettings(bench.space, "me", 3_000))
        assert ask(backend, bench.intend()) is Verdict.GRANTED
        backend.close()
        assert names_of_threads() == []
        assert eventually(lambda: between.open == 0, LIMIT_S)


def test_a_call_that_does_not_end_is_given_up() -> None:
    thread = _nats_loop.LoopThread()

    async def slow() -> str:
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(10)
        return "answer"

    async def nothing() -> None: ...

    spare = mock.patch.object(_nats_loop, "SPARE_S", 0)
    with spare, pytest.raises(OutcomeUnknown, match="did not answer in time"):
        thread.call(slow, 0.05)
    thread.close(nothing, 1)
    with pytest.raises(StoreUnavailable):
        thread.call(slow, 1)


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_fork_leaves_the_parent_its_connection_and_the_child_a_new_one(bench: Bench) -> None:
    backend = bench.open()
    backend.probe()
    claim = bench.intend()
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        told = b"it failed"
        with suppress(BaseException):
            backend.discard()
            gc.collect()
            backend.close()
            backend.open(BackendSettings(bench.space, "child", 3_000))
            told = ask(backend, claim).value.encode()
            backend.close()
        os.write(write, told)
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as end:
        assert end.read() == b"granted"
    os.waitpid(pid, 0)
    assert ask(backend, bench.rival(claim)) is Verdict.TAKEN
    assert ask(backend, bench.intend("after")) is Verdict.GRANTED
