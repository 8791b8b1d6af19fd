"""Each fault planted in how Redis or NATS claims fails the case that is named beside it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Callable, NamedTuple, Optional
from unittest import mock

import pytest

from leasecron_sync.backends import _nats_stream, _redis_scripts, nats, redis_claim
from leasecron_sync.backends._redis_scripts import script_of
from leasecron_sync.backends.base import ClaimBackend
from leasecron_sync.backends.nats import NatsClaim
from leasecron_sync.backends.redis_claim import RedisClaim
from leasecron_sync.errors import StoreError
from leasecron_sync.model import RunKey
from leasecron_sync.testing.clock import ManualClock
from leasecron_sync.testing.conformance import ClaimConformance
from tests.conformance.expiry import age
from tests.services.fixtures import had
from tests.services.proxy import Proxy
from tests.services.server import Server
from tests.services.services import Services


class Fault(NamedTuple):
    """A text of Lua, what it is replaced by, and the case that must notice it."""

    strategy: str
    file: str
    text: str
    instead: str
    case: str

    def planted(self, text: str) -> str:
        """Return the text of the file with the fault in it."""
        assert text.count(self.text) == 1
        return text.replace(self.text, self.instead)

    def __str__(self) -> str:
        return f"{self.strategy}: {self.case}"


REMEMBERED = "claim_is_remembered_for_twice_its_window"

FAULTS = (
    # -- every script -----------------------------------------------------------------------------
    Fault("script", "common", "if wait_ms <= 0 then", "if true then", "early_claim_waits"),
    Fault(
        "script",
        "common",
        "now - claim.due_ms > claim.window_ms)",
        "now - claim.due_ms >= claim.window_ms)",
        "run_is_granted_to_the_end_of_its_window",
    ),
    Fault(
        "stream-id",
        "common",
        "now - claim.due_ms > claim.window_ms)",
        "false)",
        "key_beyond_window_is_too_old",
    ),
    Fault(
        "script",
        "common",
        "rows[place] = {verdict, math.max(0, wait_ms)}",
        "rows[#rows + 1] = {verdict, 0}",
        "early_claim_waits",
    ),
    # -- script -----------------------------------------------------------------------------------
    Fault(
        "script",
        "script",
        "return winner == claim.decision_id",
        "return false",
        "same_decision_is_granted_again",
    ),
    Fault("script", "script", "if winner then", "if false then", "second_decision_is_taken"),
    Fault(
        "script",
        "script",
        "local keep_ms = claim.due_ms + 2 * claim.window_ms - now",
        "local keep_ms = claim.window_ms",
        REMEMBERED,
    ),
    # -- stream-id --------------------------------------------------------------------------------
    Fault(
        "stream-id",
        "stream_id",
        "return entry[2][2] == claim.decision_id",
        "return false",
        "same_decision_is_granted_again",
    ),
    Fault(
        "stream-id",
        "stream_id",
        "'equal or smaller') then\n      return false",
        "'equal or smaller') then\n      return true",
        "older_key_is_never_granted_twice",
    ),
    Fault(
        "stream-id",
        "stream_id",
        "local id = text(claim.ms) .. '-0'",
        "local id = text(math.floor(claim.ms / 1000)) .. '-0'",
        "rising_keys_of_a_job_are_all_granted",
    ),
    Fault(
        "stream-id",
        "stream_id",
        "matters_until_ms >= now then",
        "matters_until_ms < now then",
        "same_decision_is_granted_again",
    ),
    Fault(
        "stream-id",
        "stream_id",
        "local until_ms = claim.due_ms + 2 * claim.window_ms",
        "local until_ms = claim.due_ms + claim.window_ms",
        REMEMBERED,
    ),
    # -- idmp -------------------------------------------------------------------------------------
    Fault(
        "idmp",
        "idmp",
        "return entry ~= nil and entry[2][2] == claim.decision_id",
        "return entry ~= nil",
        "second_decision_is_taken",
    ),
    Fault(
        "idmp",
        "idmp",
        "entry[2][2] == claim.decision_id",
        "false",
        "first_claim_is_granted",
    ),
    Fault("idmp", "idmp", "if is_old then", "if false then", "key_beyond_window_is_too_old"),
    Fault(
        "idmp",
        "idmp",
        "'IDMP', claim.job, text(claim.ms)",
        "'IDMP', 'job', text(claim.ms)",
        "keys_of_other_jobs_and_namespaces_are_independent",
    ),
    Fault(
        "idmp",
        "idmp",
        "if redis.call('EXISTS', key) == 1 then",
        "redis.call('DEL', key)\n  if false then",
        "second_decision_is_taken",
    ),
)


class Judge(ClaimConformance):
    """The claim suite over a mechanism, by a clock that the cases move."""

    def __init__(self, connect: Callable[[ManualClock], ClaimBackend]) -> None:
        self.clock = ManualClock()
        self.namespace = ""
        self.connect: Callable[[], ClaimBackend] = lambda: connect(self.clock)

    def now_ms(self, backend: ClaimBackend) -> int:
        del backend
        return self.clock.now_ms()

    def advance(self, ms: int) -> None:
        self.clock.advance(ms)

    def run_case(self, case: str) -> None:
        """Run a case; it raises if the backend fails it."""
        with self.opened(self.connect) as store:
            self.namespace = store.namespace
            getattr(self, f"test_{case}")(store)


class RedisJudge(Judge):
    """And by that clock the keys expire, too."""

    def __init__(self, url: str, strategy: str) -> None:
        def connect(clock: ManualClock) -> ClaimBackend:
            backend = RedisClaim(url, strategy=strategy)
            backend._now_ms = clock.now_ms
            return backend

        super().__init__(connect)
        self._url = url

    def advance(self, ms: int) -> None:
        super().advance(ms)
        age(self._url, self.namespace, ms)


def _fails(judge: Judge, case: str) -> Optional[BaseException]:
    try:
        judge.run_case(case)
    except (AssertionError, StoreError, pytest.fail.Exception) as error:
        return error
    return None


# -- Redis -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def url(services: Services) -> str:
    return had(services.redis8).url


@contextmanager
def _planted(fault: Fault) -> Iterator[None]:
    sound = _redis_scripts._text_of

    def with_the_fault(name: str) -> str:
        text = sound(name)
        return fault.planted(text) if name == f"redis_claim/{fault.file}" else text

    script_of.cache_clear()
    try:
        with mock.patch.object(_redis_scripts, "_text_of", with_the_fault):
            yield
    finally:
        script_of.cache_clear()


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_fault_in_the_lua_fails_its_case(fault: Fault, url: str) -> None:
    with _planted(fault):
        assert _fails(RedisJudge(url, fault.strategy), fault.case)


@pytest.mark.parametrize(
    ("strategy", "case"), sorted({(fault.strategy, fault.case) for fault in FAULTS})
)
def test_lua_without_a_fault_passes_the_case(strategy: str, case: str, url: str) -> None:
    assert _fails(RedisJudge(url, strategy), case) is None


FAULTS_IN_KEYS = (
    ("script", lambda _tag, run: f"k:{run.job}:{run.scheduled_ms}"),
    ("script", lambda tag, run: f"k:{tag}:{run.scheduled_ms}"),
    ("script", lambda tag, run: f"k:{tag}:{run.job}"),
    ("stream-id", lambda tag, _run: f"k:{tag}"),
)


@pytest.mark.parametrize(("strategy", "key"), FAULTS_IN_KEYS)
def test_keys_that_leave_something_out_fail_their_case(
    strategy: str, key: Callable[[str, RunKey], str], url: str
) -> None:
    case = "keys_of_other_jobs_and_namespaces_are_independent"
    assert _fails(RedisJudge(url, strategy), case) is None
    with mock.patch.dict(redis_claim._KEYS, {strategy: key}):
        assert _fails(RedisJudge(url, strategy), case)


# -- NATS ------------------------------------------------------------------------------------------

Sound = Callable[..., Any]


def _forgets_decisions(_sound: Sound) -> Sound:
    async def first(*_args: object) -> bytes:
        return b""

    return first


def _believes_every_confirmation(sound: Sound) -> Sound:
    async def published(*args: object) -> dict[str, Any]:
        answer = await sound(*args)
        return {**answer, "duplicate": False}

    return published


def _wins_without_an_answer(sound: Sound) -> Sound:
    async def claimed(*args: object) -> object:
        answer = await sound(*args)
        return True if isinstance(answer, StoreError) else answer

    return claimed


def _has_no_clock(_sound: Sound) -> Sound:
    return lambda *_args: None


NATS_FAULTS: tuple[tuple[object, str, Callable[[Sound], Sound], str], ...] = (
    (_nats_stream.Stream, "_first", _forgets_decisions, "same_decision_is_granted_again"),
    (
        _nats_stream.Stream,
        "_published",
        _believes_every_confirmation,
        "second_decision_is_taken",
    ),
    (
        _nats_stream.Stream,
        "_claim_one",
        _wins_without_an_answer,
        "call_on_a_silent_store_ends_within_its_time_out",
    ),
    (nats, "judged", _has_no_clock, "early_claim_waits"),
    (nats, "judged", _has_no_clock, "key_beyond_window_is_too_old"),
    (
        nats,
        "message_id",
        lambda _sound: lambda run: f"{run.scheduled_ms}",
        "keys_of_other_jobs_and_namespaces_are_independent",
    ),
    (
        nats,
        "message_id",
        lambda sound: lambda run: sound(RunKey(run.job, run.scheduled_ms // 1_000)),
        "rising_keys_of_a_job_are_all_granted",
    ),
    (
        nats,
        "message_id",
        lambda sound: lambda run: sound(RunKey(run.job.lower(), run.scheduled_ms)),
        "odd_names_survive",
    ),
    (
        _nats_stream,
        "stream_name",
        lambda sound: lambda _namespace: sound("everybody"),
        "keys_of_other_jobs_and_namespaces_are_independent",
    ),
)


class NatsJudge(Judge):
    def __init__(self, server: Server, through: Proxy) -> None:
        def connect(clock: ManualClock) -> ClaimBackend:
            backend = NatsClaim(through.url_of(server.url))
            backend._now_ms = clock.now_ms
            return backend

        super().__init__(connect)
        self._through = through

    @contextmanager
    def locked(self) -> Iterator[None]:
        self._through.swallow()
        try:
            yield
        finally:
            self._through.forward()


@pytest.fixture
def nats_judge(services: Services) -> Iterator[NatsJudge]:
    server = had(lambda: services.nats("2.15"))
    with ExitStack() as closed:
        yield NatsJudge(server, closed.enter_context(Proxy((server.host, server.port))))


@pytest.mark.parametrize(("where", "name", "plant", "case"), NATS_FAULTS)
def test_fault_in_the_nats_backend_fails_its_case(
    where: object,
    name: str,
    plant: Callable[[Sound], Sound],
    case: str,
    nats_judge: NatsJudge,
) -> None:
    assert _fails(nats_judge, case) is None
    with mock.patch.object(where, name, plant(getattr(where, name))):
        assert _fails(nats_judge, case)
