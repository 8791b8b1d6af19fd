"""The RabbitMQ backend with one planted fault fails the case of the suite that is named with it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Callable
from unittest import mock

import pytest

from leasecron_sync.backends import _rabbitmq_gates, rabbitmq
from leasecron_sync.backends._rabbitmq_gates import Gate, Outcome
from leasecron_sync.backends.base import ClaimBackend
from leasecron_sync.backends.rabbitmq import RabbitMQClaim
from leasecron_sync.errors import StoreError
from leasecron_sync.model import RunKey
from leasecron_sync.testing.clock import ManualClock
from tests.mutants import test_redis_claim_mutants as others
from tests.services.fixtures import had
from tests.services.proxy import Proxy
from tests.services.server import Server
from tests.services.services import Services

Sound = Callable[..., Any]


class RabbitMQJudge(others.Judge):
    own_clock = False
    reads_back = False

    def __init__(self, server: Server, through: Proxy) -> None:
        def connect(clock: ManualClock) -> ClaimBackend:
            backend = RabbitMQClaim(through.url_of(server.url))
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


def _has_no_clock(_sound: Sound) -> Sound:
    return lambda *_args: None


def _wins_without_an_answer(sound: Sound) -> Sound:
    def decided(backend: RabbitMQClaim, gates: list[Gate], *args: object) -> None:
        try:
            sound(backend, gates, *args)
        except StoreError:
            for gate in gates:
                gate.outcome = Outcome.WON

    return decided


def _wins_whatever_is_answered(_sound: Sound) -> Sound:
    def answered(gate: Gate, _fate: object) -> None:
        gate.outcome = Outcome.WON

    return answered


def _takes_a_gate_for_new(sound: Sound) -> Sound:
    """Every decision has a gate of its own."""
    return lambda queue, body, **options: sound(f"{queue}.{body.decode()}"[-250:], body, **options)


FAULTS: tuple[tuple[object, str, Callable[[Sound], Sound], str], ...] = (
    (rabbitmq, "judged", _has_no_clock, "early_claim_waits"),
    (rabbitmq, "judged", _has_no_clock, "key_beyond_window_is_too_old"),
    (rabbitmq, "Gate", _takes_a_gate_for_new, "second_decision_is_taken"),
    (
        rabbitmq,
        "gate_name",
        lambda sound: lambda _space, run: sound("everybody", run),
        "keys_of_other_jobs_and_namespaces_are_independent",
    ),
    (
        rabbitmq,
        "gate_name",
        lambda sound: lambda space, run: sound(space, RunKey("any", run.scheduled_ms)),
        "keys_of_other_jobs_and_namespaces_are_independent",
    ),
    (
        rabbitmq,
        "gate_name",
        lambda sound: lambda space, run: sound(space, RunKey(run.job, run.scheduled_ms // 1_000)),
        "rising_keys_of_a_job_are_all_granted",
    ),
    (
        rabbitmq,
        "gate_name",
        lambda sound: lambda space, run: sound(space, RunKey(run.job.lower(), run.scheduled_ms)),
        "odd_names_survive",
    ),
    (
        RabbitMQClaim,
        "_remember",
        lambda _sound: lambda *_args: None,
        "same_decision_is_granted_again",
    ),
    (
        RabbitMQClaim,
        "_decide",
        _wins_without_an_answer,
        "call_on_a_silent_store_ends_within_its_time_out",
    ),
    (
        _rabbitmq_gates,
        "_answered",
        _wins_whatever_is_answered,
        "eight_threads_with_batches_one_grant_each",
    ),
)


@pytest.fixture
def judge(services: Services) -> Iterator[RabbitMQJudge]:
    server = had(services.rabbitmq)
    with ExitStack() as closed:
        yield RabbitMQJudge(server, closed.enter_context(Proxy((server.host, server.port))))


@pytest.mark.parametrize(("where", "name", "plant", "case"), FAULTS)
def test_fault_in_the_rabbitmq_backend_fails_its_case(
    where: object, name: str, plant: Callable[[Sound], Sound], case: str, judge: RabbitMQJudge
) -> None:
    assert others._fails(judge, case) is None
    with mock.patch.object(where, name, plant(getattr(where, name))):
        assert others._fails(judge, case)
