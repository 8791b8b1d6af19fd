"""Processes that want runs of one job at the same moment: one of them has its way.

On leases six of them want six runs where overlap is forbidden, on claims eight want the same run.
``LEASECRON_SYNC_LONG=1`` in the environment plays 1,000 and 500 rounds, on every server.
"""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Callable, TypeVar

import pytest

from leasecron_sync.backends.base import BackendSettings, ClaimBackend
from leasecron_sync.backends.urls import connect_claim, connect_lease
from leasecron_sync.model import JobStamp, LeaseClaim, OnceClaim, OnOverlap, RunKey, Verdict
from tests.faults.contention import Claim, Rounds, Seat, play
from tests.faults.processes import LONG
from tests.services.fixtures import had
from tests.services.server import Server
from tests.services.services import Services

pytestmark = pytest.mark.slow

T = TypeVar("T")

WINDOW_MS = 300_000
REFUSED = {OnOverlap.SKIP: "settled", OnOverlap.DEFER: "deferred"}
# Valkey decides by the same scripts as Redis.
STORES = ("sqlite", "postgres", "redis", *(["valkey"] if LONG else []))


def wish_of(number: int) -> OnOverlap:
    return (OnOverlap.SKIP, OnOverlap.DEFER)[number % 2]


@contextmanager
def lease_rounds(seat: Seat) -> Iterator[Rounds]:
    """Want a run of one's own of each round's job."""
    backend, holder = connect_lease(seat.url), f"process {seat.rank}"
    backend.open(BackendSettings(seat.namespace, holder, 5_000))
    try:
        scheduled_ms = seat.began_ms - seat.rank

        def prepare(number: int) -> Claim:
            job = f"job {number}"
            backend.register([JobStamp(job, "x")])
            claim = LeaseClaim(
                key=RunKey(job, scheduled_ms),
                due_ms=scheduled_ms,
                holder=holder,
                decision_id=uuid.uuid4().hex,
                lease_ms=600_000,
                max_attempts=3,
                on_overlap=wish_of(number),
                max_age_ms=600_000,
                takeover_ms=600_000,
            )
            return lambda: backend.claim([claim])[0].verdict.value

        yield prepare
    finally:
        backend.close()


@contextmanager
def claim_rounds(seat: Seat) -> Iterator[Rounds]:
    """Want the same run as everybody; each round's is newer than the last one's."""
    backend, holder = connect_claim(seat.url), f"process {seat.rank}"
    backend.open(BackendSettings(seat.namespace, holder, 5_000))
    try:
        backend.probe()

        def prepare(number: int) -> Claim:
            scheduled_ms = seat.began_ms - 1_000 + number
            claim = OnceClaim(
                key=RunKey("job", scheduled_ms),
                due_ms=scheduled_ms,
                holder=holder,
                decision_id=uuid.uuid4().hex,
                window_ms=WINDOW_MS,
            )
            return lambda: answered(backend, claim)

        yield prepare
    finally:
        backend.close()


def answered(backend: ClaimBackend, claim: OnceClaim) -> str:
    """Claim, and again while it could not be asked, as instances do; return the verdict."""
    for _ in range(10):
        [reply] = backend.claim([claim])
        if reply.verdict is not Verdict.DEFERRED:
            break
    return reply.verdict.value


@pytest.fixture(params=STORES)
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path}/jobs.db"
        return
    services: Services = request.getfixturevalue("services")
    if request.param == "postgres":
        yield f"{had(services.postgres).url}?schema=contention"
    else:
        yield had(services.redis if request.param == "redis" else services.valkey).url


@pytest.mark.timeout(600 if LONG else 90)
def test_six_processes_that_contend_for_a_job_never_both_win(url: str, namespace: str) -> None:
    rounds = 1_000 if LONG else 60
    [played] = play(lease_rounds, {"it": url}, namespace, processes=6, rounds=rounds).values()
    assert len(played) == rounds
    for number, answers in enumerate(played):
        assert Counter(answers) == {"granted": 1, REFUSED[wish_of(number)]: 5}, f"round {number}"


def wanted(all_of_them: Sequence[T]) -> Sequence[T]:
    """Leave out all but the first one, where time is short."""
    return all_of_them if LONG else all_of_them[:1]


def mechanisms(services: Services) -> dict[str, str]:
    """Return the URL of each mechanism on each version of its servers; once each unless LONG."""
    redis: dict[str, Callable[[], Server]] = {
        "redis": services.redis,
        "valkey": services.valkey,
        "redis8": services.redis8,
    }
    found = {
        f"{strategy} on {name}": f"{had(redis[name]).url}?strategy={strategy}"
        for strategy, names in (
            ("script", ("redis", "valkey", "redis8")),
            ("stream-id", ("valkey", "redis", "redis8")),
            ("idmp", ("redis8",)),
        )
        for name in wanted(names)
    }
    for version in wanted(services.sources.versions("nats")):
        found[f"nats {version}"] = had(partial(services.nats, version)).url
    for version in wanted(services.sources.versions("rabbitmq")):
        found[f"rabbitmq {version}"] = had(partial(services.rabbitmq, version)).url
    return found


@pytest.mark.timeout(1_800 if LONG else 120)
def test_eight_processes_that_claim_a_run_have_one_winner(
    services: Services, namespace: str
) -> None:
    rounds = 500 if LONG else 25
    found = play(claim_rounds, mechanisms(services), namespace, processes=8, rounds=rounds)
    assert len(found) == (11 if LONG else 5)
    for name, played in found.items():
        assert len(played) == rounds
        for number, answers in enumerate(played):
            assert Counter(answers) == {"granted": 1, "taken": 7}, f"{name}, round {number}"
