"""Which checks a store gets, and that they end."""

from __future__ import annotations

import threading
from typing import Any, Callable, Final

from leasecron_sync.backends._lanes import Deadline
from leasecron_sync.backends.base import Backend, BackendSettings
from leasecron_sync.backends.memory import MemoryLease
from leasecron_sync.backends.nats import NatsClaim
from leasecron_sync.backends.postgres import PostgresLease
from leasecron_sync.backends.rabbitmq import RabbitMQClaim
from leasecron_sync.backends.redis import RedisLease
from leasecron_sync.backends.redis_claim import RedisClaim
from leasecron_sync.backends.sqlite import SQLiteLease
from leasecron_sync.clock import SystemClock
from leasecron_sync.doctor.finding import Examination, Finding, Findings
from leasecron_sync.doctor.host import check_host
from leasecron_sync.doctor.nats import examine_nats
from leasecron_sync.doctor.postgres import examine_postgres
from leasecron_sync.doctor.rabbitmq import examine_rabbitmq
from leasecron_sync.doctor.redis import examine_redis
from leasecron_sync.doctor.redis_claim import examine_redis_claim
from leasecron_sync.doctor.sqlite import examine_sqlite
from leasecron_sync.doctor.visit import tell_skew, tell_unreachable
from leasecron_sync.errors import MissingDependency, StoreUnavailable

LIMIT_MS: Final = 15_000
"""How long all checks may take; each call has its own, shorter time-out."""

_STUCK_MS: Final = 1_000
"""How much longer is waited for what keeps to no time-out."""

_clock = SystemClock()


def _examine_memory(backend: Backend, exam: Examination) -> None:
    exam.findings.problem(
        "store",
        f"{backend!r} lives in the memory of one process",
        "Every process has its own, and executes every run: with several instances all runs are "
        "executed several times. It is gone when the process ends, and nothing is caught up.",
        "Use it in tests only. An SQLite file, sqlite:///jobs.db, is what one host needs.",
    )


def _examine_by_probe(backend: Backend, exam: Examination) -> None:
    """Look at a store that has no checks of its own by what its backend asks at each start."""
    findings = exam.findings
    findings.under_way = "reachable"
    sent_ms, sent_steady_ms = _clock.now_ms(), _clock.steady_ms()
    try:
        info = backend.probe()
    except StoreUnavailable as error:
        tell_unreachable(findings, error)
        return
    took_ms = _clock.steady_ms() - sent_steady_ms
    findings.ok("reachable", f"answers in {took_ms} ms", {"p50_ms": took_ms, "max_ms": took_ms})
    findings.ok("version", info.version)
    if info.store_ms is not None:
        tell_skew(exam, info.store_ms - (sent_ms + took_ms // 2), took_ms)
    for warning in info.warnings:
        findings.warning(
            "settings", warning, "Runs may be lost or doubled.", "Do what the line before says."
        )


# The first one that fits. A kind of store without a row is looked at by its backend's probe(), so
# one whose probe makes something (a queue, a stream, a table) needs a row.
EXAMINERS: dict[type[Backend], Callable[[Any, Examination], None]] = {
    SQLiteLease: examine_sqlite,
    PostgresLease: examine_postgres,
    RedisLease: examine_redis,
    RedisClaim: examine_redis_claim,
    NatsClaim: examine_nats,
    RabbitMQClaim: examine_rabbitmq,
    MemoryLease: _examine_memory,
}


def examine(
    backend: Backend, settings: BackendSettings, *, limit_ms: int = LIMIT_MS
) -> list[Finding]:
    """Look at a store and at this process; nothing in the store changes.

    Args:
        backend: Of the store, not open.
        settings: As a scheduler would give them.
        limit_ms: How long all checks may take.

    Raises:
        ValueError: The backend cannot use its address.
    """
    findings = Findings()
    exam = Examination(settings, findings, Deadline(limit_ms))
    check_host(findings)
    try:
        backend.open(settings)
    except MissingDependency as error:
        findings.problem(
            "client", str(error), "No scheduler can use this store.", "Install it, as it says."
        )
        return findings.all()
    done = threading.Event()

    def look() -> None:
        try:
            with findings.checking("store"):
                fitting = (one for kind, one in EXAMINERS.items() if isinstance(backend, kind))
                next(fitting, _examine_by_probe)(backend, exam)
            backend.close()
        finally:
            done.set()

    # A thread of its own: looking up a host's name, and touching a file system whose server is
    # gone, keep to no time-out.
    threading.Thread(target=look, name="leasecron-doctor", daemon=True).start()
    if not _clock.wait(done, limit_ms + _STUCK_MS):
        findings.problem(
            findings.under_way or "store",
            f"no answer after {(limit_ms + _STUCK_MS) // 1000} s, and no end in sight",
            "Something waits that cannot be interrupted; schedulers would wait as well.",
            "Look at this host's DNS if the URL names a host, and at the file system of the path "
            "if it names a file.",
        )
    return findings.all()
