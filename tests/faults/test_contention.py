"""Six processes that want six runs of one job at the same moment, where overlap is forbidden.

``LEASECRON_SYNC_LONG=1`` in the environment plays 1,000 rounds on each store.
"""

from __future__ import annotations

import multiprocessing
import uuid
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from leasecron_sync.backends.base import BackendSettings
from leasecron_sync.backends.urls import connect_lease
from leasecron_sync.model import JobStamp, LeaseClaim, OnOverlap, RunKey
from tests.faults.processes import LONG
from tests.services.fixtures import had
from tests.services.services import Services

ROUNDS = 1_000 if LONG else 60
CONTENDERS = 6
LIMIT_S = 30.0
REFUSED = {OnOverlap.SKIP: "settled", OnOverlap.DEFER: "deferred"}
# Valkey decides by the same scripts as Redis.
STORES = ("sqlite", "postgres", "redis", *(["valkey"] if LONG else []))


def wish_of(number: int) -> OnOverlap:
    return (OnOverlap.SKIP, OnOverlap.DEFER)[number % 2]


def contend(url: str, namespace: str, rank: int, barrier: Any, told: Any) -> None:  # noqa: ANN401
    """Claim a run of each round's job; a process of its own."""
    backend = connect_lease(url)
    backend.open(BackendSettings(namespace, f"process {rank}", 5_000))
    verdicts: list[str] = []
    try:
        now_ms = backend.probe().store_ms
        assert now_ms is not None
        for number in range(ROUNDS):
            job = f"job {number}"
            backend.register([JobStamp(job, "x")])
            scheduled_ms = now_ms // 100_000 * 100_000 - rank
            claim = LeaseClaim(
                key=RunKey(job, scheduled_ms),
                due_ms=scheduled_ms,
                holder=f"process {rank}",
                decision_id=uuid.uuid4().hex,
                lease_ms=600_000,
                max_attempts=3,
                on_overlap=wish_of(number),
                max_age_ms=600_000,
                takeover_ms=600_000,
            )
            barrier.wait(LIMIT_S)
            [reply] = backend.claim([claim])
            verdicts.append(reply.verdict.value)
    finally:
        backend.close()
        told.put(verdicts)


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


@pytest.mark.slow
@pytest.mark.timeout(600 if LONG else 90)
def test_six_processes_that_contend_for_a_job_never_both_win(url: str, namespace: str) -> None:
    context = multiprocessing.get_context("spawn")
    barrier, told = context.Barrier(CONTENDERS), context.Queue()
    processes = [
        context.Process(target=contend, args=(url, namespace, rank, barrier, told))
        for rank in range(CONTENDERS)
    ]
    for process in processes:
        process.start()
    verdicts = [told.get(timeout=500 if LONG else 60) for _ in processes]
    for process in processes:
        process.join(LIMIT_S)
    assert [process.exitcode for process in processes] == [0] * CONTENDERS
    for number, answers in enumerate(zip(*verdicts)):
        refused = {REFUSED[wish_of(number)]: CONTENDERS - 1}
        assert Counter(answers) == {"granted": 1, **refused}, f"round {number}"
    assert {len(it) for it in verdicts} == {ROUNDS}
