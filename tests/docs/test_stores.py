"""What the page 'Choosing a store' tells an administrator to set works as it stands there."""

from __future__ import annotations

import uuid
from typing import Any

from leasecron_sync import PostgresLease, RedisLease
from leasecron_sync.backends.base import BackendSettings, LeaseBackend
from leasecron_sync.clock import SystemClock
from leasecron_sync.model import JobStamp, LeaseClaim, OnOverlap, Outcome, RunKey, Settlement
from tests.docs.test_examples import ROOT, blocks_of
from tests.services.fixtures import Own
from tests.services.postgres import as_role, execute
from tests.services.redis import execute as execute_in_redis

STORES = ROOT / "docs/stores.rst"


def block_with(text: str) -> str:
    [found] = [block.text for block in blocks_of(STORES) if text in block.text]
    return found


def use(backend: LeaseBackend) -> None:
    """Take every step that a scheduler takes."""
    now_ms = SystemClock().now_ms()
    backend.open(BackendSettings("default", "0123456789ab", 5_000))
    try:
        # The shared server of the tests does without it, to be quick.
        assert all(finding.startswith("fsync is off") for finding in backend.probe().warnings)
        backend.register([JobStamp("job", "fingerprint")])
        key = RunKey("job", now_ms - 1_000)
        claim = LeaseClaim(
            key, key.scheduled_ms, "0123456789ab", uuid.uuid4().hex, 15_000, 3, OnOverlap.SKIP,
            60_000, 150_000,
        )  # fmt: skip
        [reply] = backend.claim([claim])
        assert reply.lease is not None
        backend.renew([reply.lease.ref], 15_000)
        assert backend.settle(reply.lease.ref, Settlement(Outcome.FINISHED)).accepted
        backend.pending(["job"], 10)
        backend.prune(1_000_000, 100)
        assert [record.key for record in backend.history("job", 10)] == [key]
        assert [summary.job for summary in backend.jobs(10)] == ["job"]
    finally:
        backend.close()


def test_the_rights_that_the_page_names_are_all_that_postgresql_needs(postgres_url: str) -> None:
    role = f"worker_{uuid.uuid4().hex}"
    execute(
        postgres_url, PostgresLease(postgres_url, schema="cron").schema_sql().replace("%", "%%")
    )
    execute(postgres_url, f"CREATE ROLE {role} LOGIN PASSWORD 's3cret'")
    try:
        for statement in block_with("GRANT USAGE").split(";"):
            if statement.strip():
                execute(postgres_url, statement.replace("TO worker", f"TO {role}"))
        use(PostgresLease(as_role(postgres_url, role, "s3cret"), schema="cron"))
    finally:
        execute(postgres_url, f"DROP OWNED BY {role}; DROP ROLE {role}")


def test_the_settings_and_the_user_that_the_page_names_are_all_that_redis_needs(own: Own) -> None:
    lines = [line.split(" ", 1) for line in block_with("appendonly yes").splitlines()]
    settings: dict[str, Any] = {name.replace("-", "_"): value for name, value in lines}
    server = own.redis(**settings)
    execute_in_redis(server.url, *block_with("ACL SETUSER").split())
    use(RedisLease(server.url.replace("redis://", "redis://worker:secret@")))
