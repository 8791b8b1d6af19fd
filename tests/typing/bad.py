"""Uses that mypy and pyright must refuse in strict mode, each on a line of its own.

Each line names the error that each checker must find in it; both report an ignored error that is
not there, so one that vanishes is an error too. ``test_typing.py`` also executes the lines, one by
one, and wants the exception that stands above the function; it makes an argument for each name of a
parameter.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import Callable, Final, Optional, TypeVar

from leasecron_sync import (
    Event,
    LeaseRun,
    MemoryLease,
    NatsClaim,
    PostgresLease,
    RabbitMQClaim,
    RedisClaim,
    RedisLease,
    Run,
    Scheduler,
    SQLiteLease,
    connect,
    connect_claim,
    connect_lease,
    every,
)
from leasecron_sync.backends import Backend, ClaimBackend, LeaseBackend
from leasecron_sync.testing import MemoryClaim

DAILY = "0 3 * * *"

Group = TypeVar("Group", bound=Callable[..., None])

EXPECTED: Final[dict[str, Optional[type[Exception]]]] = {}
"""Function -> what each of its lines raises when it is executed."""


def raises(error: type[Exception]) -> Callable[[Group], Group]:
    def note(group: Group) -> Group:
        EXPECTED[group.__name__] = error
        return group

    return note


def passes(group: Group) -> Group:
    """Mark what only a checker can see: nothing is raised when it is executed."""
    EXPECTED[group.__name__] = None
    return group


# -- handlers ------------------------------------------------------------------------------------


def takes_nothing() -> None:
    pass


def takes_run(run: Run) -> None:
    pass


def takes_lease_run(run: LeaseRun) -> None:
    pass


def takes_two(run: Run, other: Run) -> None:
    pass


def takes_a_keyword(*, run: Run) -> None:
    pass


def takes_a_number(run: int) -> None:
    pass


class Importer:
    def on_lease_run(self, run: LeaseRun) -> None:
        pass

    def takes_two(self, run: Run, limit: int) -> None:
        pass


@contextmanager
def around_lease(run: LeaseRun) -> Generator[int, None, None]:
    yield run.token


@contextmanager
def around_nothing() -> Generator[None, None, None]:
    yield


def no_context(run: Run) -> None:
    pass


def for_claims(scheduler: Scheduler[ClaimBackend]) -> None:
    pass


def for_leases(scheduler: Scheduler[LeaseBackend]) -> None:
    pass


def for_sqlite(scheduler: Scheduler[SQLiteLease]) -> None:
    pass


def on_a_lease(backend: LeaseBackend) -> None:
    pass


def on_a_claim(backend: ClaimBackend) -> None:
    pass


class HalfALease(LeaseBackend):
    name = "half"


class HalfAClaim(ClaimBackend):
    name = "half"


# -- options of the other family; the default value spelled out is refused like any other --------


@raises(TypeError)
def lease_options_of_a_job(scheduler: Scheduler[MemoryClaim]) -> None:
    scheduler.job(DAILY, overlap="skip")  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    scheduler.job(DAILY, overlap="allow")  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    scheduler.job(DAILY, max_attempts=3)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    scheduler.job(DAILY, retry_delay_ms=1_000)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    scheduler.job(DAILY, catch_up_ms=60_000)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    scheduler.job(DAILY, catch_up_limit=100)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    scheduler.job(DAILY, name="all", jitter_ms=0, max_attempts=1, catch_up_ms=0)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    scheduler.add_job(takes_run, DAILY, overlap="skip")  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    scheduler.add_job(takes_run, DAILY, overlap="allow")  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    scheduler.add_job(takes_run, DAILY, max_attempts=3)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    scheduler.add_job(takes_run, DAILY, retry_delay_ms=1_000)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    scheduler.add_job(takes_run, DAILY, catch_up_ms=60_000)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    scheduler.add_job(takes_run, DAILY, catch_up_limit=100)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    scheduler.add_job(takes_nothing, DAILY, name="all", jitter_ms=0, max_attempts=1, catch_up_ms=0)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]


@raises(TypeError)
def lease_options_of_a_job_on_any_claim(claim_scheduler: Scheduler[ClaimBackend]) -> None:
    claim_scheduler.job(DAILY, overlap="skip")  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    claim_scheduler.job(DAILY, overlap="allow")  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    claim_scheduler.job(DAILY, max_attempts=3)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    claim_scheduler.job(DAILY, retry_delay_ms=1_000)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    claim_scheduler.job(DAILY, catch_up_ms=60_000)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    claim_scheduler.job(DAILY, catch_up_limit=100)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    claim_scheduler.add_job(takes_run, DAILY, overlap="skip")  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    claim_scheduler.add_job(takes_run, DAILY, overlap="allow")  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    claim_scheduler.add_job(takes_run, DAILY, max_attempts=3)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    claim_scheduler.add_job(takes_run, DAILY, retry_delay_ms=1_000)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    claim_scheduler.add_job(takes_run, DAILY, catch_up_ms=60_000)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    claim_scheduler.add_job(takes_run, DAILY, catch_up_limit=100)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]


@raises(TypeError)
def lease_options_of_a_scheduler(claim: ClaimBackend, claim_url: str) -> None:
    Scheduler(MemoryClaim(), lease_ms=15_000)  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType]
    Scheduler(MemoryClaim(), heartbeat_ms=None)  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType]
    Scheduler(MemoryClaim(), heartbeat_ms=5_000)  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType]
    Scheduler(MemoryClaim(), history_ms=604_800_000)  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType]
    Scheduler(MemoryClaim(), namespace="a", claim_window_ms=60_000, lease_ms=15_000)  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue]
    Scheduler(claim, lease_ms=15_000)  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType]
    Scheduler(claim, heartbeat_ms=None)  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType]
    Scheduler(claim, history_ms=604_800_000)  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType]
    Scheduler(connect_claim(claim_url), lease_ms=15_000)  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType]
    Scheduler(connect_claim(claim_url), heartbeat_ms=None)  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType]
    Scheduler(connect_claim(claim_url), history_ms=604_800_000)  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType]


@raises(TypeError)
def lease_options_on_brokers() -> None:
    Scheduler(RabbitMQClaim("amqp://localhost"), lease_ms=15_000)  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType]
    Scheduler(RabbitMQClaim("amqp://localhost"), heartbeat_ms=None)  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType]
    Scheduler(RabbitMQClaim("amqp://localhost"), history_ms=604_800_000)  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType]
    Scheduler(NatsClaim("nats://localhost"), lease_ms=15_000)  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType]
    Scheduler(NatsClaim("nats://localhost"), heartbeat_ms=None)  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType]
    Scheduler(NatsClaim("nats://localhost"), history_ms=604_800_000)  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType]
    Scheduler(RedisClaim("redis://localhost"), lease_ms=15_000)  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType]
    Scheduler(RedisClaim("redis://localhost"), heartbeat_ms=None)  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType]
    Scheduler(RedisClaim("redis://localhost"), history_ms=604_800_000)  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType]
    Scheduler(RabbitMQClaim("amqp://localhost")).job(DAILY, overlap="skip")  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    Scheduler(RabbitMQClaim("amqp://localhost")).add_job(takes_run, DAILY, overlap="skip")  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    Scheduler(RabbitMQClaim("amqp://localhost")).job(DAILY, max_attempts=3)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    Scheduler(RabbitMQClaim("amqp://localhost")).add_job(takes_run, DAILY, max_attempts=3)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    Scheduler(RabbitMQClaim("amqp://localhost")).job(DAILY, retry_delay_ms=1_000)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    Scheduler(RabbitMQClaim("amqp://localhost")).add_job(takes_run, DAILY, retry_delay_ms=1_000)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    Scheduler(RabbitMQClaim("amqp://localhost")).job(DAILY, catch_up_ms=60_000)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    Scheduler(RabbitMQClaim("amqp://localhost")).add_job(takes_run, DAILY, catch_up_ms=60_000)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    Scheduler(RabbitMQClaim("amqp://localhost")).job(DAILY, catch_up_limit=100)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    Scheduler(RabbitMQClaim("amqp://localhost")).add_job(takes_run, DAILY, catch_up_limit=100)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    Scheduler(NatsClaim("nats://localhost")).job(DAILY, overlap="skip")  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    Scheduler(NatsClaim("nats://localhost")).add_job(takes_run, DAILY, overlap="skip")  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    Scheduler(NatsClaim("nats://localhost")).job(DAILY, max_attempts=3)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    Scheduler(NatsClaim("nats://localhost")).add_job(takes_run, DAILY, max_attempts=3)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    Scheduler(NatsClaim("nats://localhost")).job(DAILY, retry_delay_ms=1_000)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    Scheduler(NatsClaim("nats://localhost")).add_job(takes_run, DAILY, retry_delay_ms=1_000)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    Scheduler(NatsClaim("nats://localhost")).job(DAILY, catch_up_ms=60_000)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    Scheduler(NatsClaim("nats://localhost")).add_job(takes_run, DAILY, catch_up_ms=60_000)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    Scheduler(NatsClaim("nats://localhost")).job(DAILY, catch_up_limit=100)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    Scheduler(NatsClaim("nats://localhost")).add_job(takes_run, DAILY, catch_up_limit=100)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    Scheduler(RedisClaim("redis://localhost")).job(DAILY, overlap="skip")  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    Scheduler(RedisClaim("redis://localhost")).add_job(takes_run, DAILY, overlap="skip")  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    Scheduler(RedisClaim("redis://localhost")).job(DAILY, max_attempts=3)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    Scheduler(RedisClaim("redis://localhost")).add_job(takes_run, DAILY, max_attempts=3)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    Scheduler(RedisClaim("redis://localhost")).job(DAILY, retry_delay_ms=1_000)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    Scheduler(RedisClaim("redis://localhost")).add_job(takes_run, DAILY, retry_delay_ms=1_000)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    Scheduler(RedisClaim("redis://localhost")).job(DAILY, catch_up_ms=60_000)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    Scheduler(RedisClaim("redis://localhost")).add_job(takes_run, DAILY, catch_up_ms=60_000)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    Scheduler(RedisClaim("redis://localhost")).job(DAILY, catch_up_limit=100)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    Scheduler(RedisClaim("redis://localhost")).add_job(takes_run, DAILY, catch_up_limit=100)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]


@raises(TypeError)
def claim_options_of_a_scheduler(lease: LeaseBackend, lease_url: str, folder: Path) -> None:
    Scheduler(MemoryLease(), claim_window_ms=60_000)  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType]
    Scheduler(SQLiteLease(folder / "jobs.db"), claim_window_ms=30_000)  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType]
    Scheduler(PostgresLease("postgresql://localhost/jobs"), claim_window_ms=60_000)  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType]
    Scheduler(RedisLease("redis://localhost"), claim_window_ms=60_000)  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType]
    Scheduler(lease, claim_window_ms=60_000)  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType]
    Scheduler(connect_lease(lease_url), claim_window_ms=60_000)  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType]
    Scheduler(MemoryLease(), lease_ms=15_000, claim_window_ms=60_000)  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue]


# -- what a claim backend does not have ----------------------------------------------------------


@raises(AttributeError)
def lease_attributes_of_a_run(run: Run) -> None:
    run.token  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]
    run.attempt  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]
    run.lost  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]


@raises(TypeError)
def history_of_claims(
    scheduler: Scheduler[MemoryClaim], claim_scheduler: Scheduler[ClaimBackend]
) -> None:
    scheduler.history()  # type: ignore[misc]  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]
    scheduler.history("takes_run")  # type: ignore[misc]  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]
    claim_scheduler.history(limit=10)  # type: ignore[misc]  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]


@passes
def handlers_that_want_a_lease(
    scheduler: Scheduler[MemoryClaim], claim_scheduler: Scheduler[ClaimBackend]
) -> None:
    scheduler.job(DAILY)(takes_lease_run)  # type: ignore[type-var]  # pyright: ignore[reportArgumentType]
    scheduler.add_job(takes_lease_run, DAILY, name="added")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    scheduler.add_job(Importer().on_lease_run, DAILY)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    claim_scheduler.job(DAILY)(takes_lease_run)  # type: ignore[type-var]  # pyright: ignore[reportArgumentType]
    claim_scheduler.add_job(takes_lease_run, DAILY, name="added")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]

    @claim_scheduler.job(DAILY)  # type: ignore[type-var]  # pyright: ignore[reportArgumentType, reportUntypedFunctionDecorator]
    def decorated(run: LeaseRun) -> None: ...


@passes
def around_run_that_wants_a_lease(claim: ClaimBackend, claim_url: str) -> None:
    Scheduler(MemoryClaim(), around_run=around_lease)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType, reportCallIssue]
    Scheduler(claim, around_run=around_lease)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType, reportCallIssue]
    Scheduler(connect_claim(claim_url), around_run=around_lease)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType, reportCallIssue]


@passes
def one_family_for_the_other(
    lease_scheduler: Scheduler[LeaseBackend], claim_scheduler: Scheduler[ClaimBackend], run: Run
) -> None:
    for_claims(lease_scheduler)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    for_leases(claim_scheduler)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    for_sqlite(lease_scheduler)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    on_a_lease(claim_scheduler.backend)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    on_a_claim(lease_scheduler.backend)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    takes_lease_run(run)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


# -- a URL tells a checker only what both families have ------------------------------------------


@passes
def lease_options_of_a_url(lease_url: str) -> None:
    Scheduler(lease_url, lease_ms=15_000)  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType]
    Scheduler(lease_url, heartbeat_ms=None)  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType]
    Scheduler(lease_url, history_ms=604_800_000)  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType]
    Scheduler(connect(lease_url), lease_ms=15_000)  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType]
    Scheduler(connect(lease_url), heartbeat_ms=None)  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType]
    Scheduler(connect(lease_url), history_ms=604_800_000)  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType]
    Scheduler(lease_url, around_run=around_lease)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType, reportCallIssue]
    Scheduler(connect(lease_url), around_run=around_lease)  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType, reportCallIssue]


@raises(TypeError)
def claim_options_of_a_url(lease_url: str) -> None:
    Scheduler(lease_url, claim_window_ms=60_000)  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType]
    Scheduler(connect(lease_url), claim_window_ms=60_000)  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType]


@passes
def lease_options_of_a_job_on_a_url(scheduler_of_url: Scheduler[Backend]) -> None:
    scheduler_of_url.job(DAILY, overlap="skip")  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    scheduler_of_url.job(DAILY, max_attempts=3)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    scheduler_of_url.job(DAILY, retry_delay_ms=1_000)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    scheduler_of_url.job(DAILY, catch_up_ms=60_000)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    scheduler_of_url.job(DAILY, catch_up_limit=100)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    scheduler_of_url.job(DAILY)(takes_lease_run)  # type: ignore[type-var]  # pyright: ignore[reportArgumentType]
    scheduler_of_url.add_job(takes_run, DAILY, name="a", overlap="skip")  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    scheduler_of_url.add_job(takes_run, DAILY, name="b", max_attempts=3)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    scheduler_of_url.add_job(takes_run, DAILY, name="c", retry_delay_ms=1_000)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    scheduler_of_url.add_job(takes_run, DAILY, name="d", catch_up_ms=60_000)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    scheduler_of_url.add_job(takes_run, DAILY, name="e", catch_up_limit=100)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    scheduler_of_url.add_job(takes_lease_run, DAILY, name="f")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    scheduler_of_url.history  # type: ignore[misc]  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]


# -- what no backend takes -----------------------------------------------------------------------


@raises(TypeError)
def handlers_with_wrong_parameters(
    lease_scheduler: Scheduler[LeaseBackend], claim_scheduler: Scheduler[ClaimBackend]
) -> None:
    lease_scheduler.job(DAILY)(takes_two)  # type: ignore[type-var]  # pyright: ignore[reportArgumentType]
    lease_scheduler.job(DAILY)(takes_a_keyword)  # type: ignore[type-var]  # pyright: ignore[reportArgumentType]
    lease_scheduler.job(DAILY)("a text")  # type: ignore[type-var]  # pyright: ignore[reportArgumentType]
    lease_scheduler.add_job(takes_two, DAILY)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType, reportCallIssue]
    lease_scheduler.add_job(takes_a_keyword, DAILY)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType, reportCallIssue]
    lease_scheduler.add_job(Importer().takes_two, DAILY)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType, reportCallIssue]
    lease_scheduler.add_job(Importer.on_lease_run, DAILY)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType, reportCallIssue]
    lease_scheduler.add_job(lambda run, more: (run, more), DAILY, name="lambda")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType, reportCallIssue, reportUnknownLambdaType]
    lease_scheduler.add_job(60, DAILY)  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType, reportCallIssue]
    claim_scheduler.job(DAILY)(takes_two)  # type: ignore[type-var]  # pyright: ignore[reportArgumentType]
    claim_scheduler.job(DAILY)(takes_a_keyword)  # type: ignore[type-var]  # pyright: ignore[reportArgumentType]
    claim_scheduler.add_job(takes_two, DAILY)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    claim_scheduler.add_job(takes_a_keyword, DAILY)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    claim_scheduler.add_job(Importer().takes_two, DAILY)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    claim_scheduler.add_job(None, DAILY)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]

    @claim_scheduler.job(DAILY)  # type: ignore[type-var]  # pyright: ignore[reportArgumentType, reportUntypedFunctionDecorator]
    def decorated(run: Run, other: Run) -> None: ...


@passes
def handlers_that_want_something_else(
    lease_scheduler: Scheduler[LeaseBackend], claim_scheduler: Scheduler[ClaimBackend]
) -> None:
    lease_scheduler.job(DAILY)(takes_a_number)  # type: ignore[type-var]  # pyright: ignore[reportArgumentType]
    lease_scheduler.add_job(takes_a_number, DAILY, name="added")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType, reportCallIssue]
    claim_scheduler.job(DAILY)(takes_a_number)  # type: ignore[type-var]  # pyright: ignore[reportArgumentType]
    claim_scheduler.add_job(takes_a_number, DAILY, name="added")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


@raises(TypeError)
def unknown_options(
    lease_scheduler: Scheduler[LeaseBackend], claim_scheduler: Scheduler[ClaimBackend]
) -> None:
    Scheduler(MemoryLease(), lease=15)  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue]
    Scheduler(MemoryLease(), catch_up_ms=60_000)  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue]
    Scheduler(MemoryClaim(), claim_window=60)  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue]
    Scheduler("memory://unknown", jitter_ms=5)  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue]
    lease_scheduler.job(DAILY, catch_up=True)  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue]
    lease_scheduler.job(DAILY, lease_ms=15_000)  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue]
    lease_scheduler.add_job(takes_run, DAILY, retries=3)  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue]
    claim_scheduler.job(DAILY, time_limit=60)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    claim_scheduler.job(DAILY, claim_window_ms=60_000)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    claim_scheduler.add_job(takes_run, DAILY, zone="UTC")  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]


@raises(TypeError)
def options_without_their_names(lease_scheduler: Scheduler[LeaseBackend]) -> None:
    Scheduler(MemoryLease(), "billing")  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue]
    Scheduler(MemoryClaim(), "billing")  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue]
    lease_scheduler.job(DAILY, "name")  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue]
    lease_scheduler.add_job(takes_run, DAILY, "name")  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue]


@raises(TypeError)
def values_of_a_wrong_type(
    lease_scheduler: Scheduler[LeaseBackend], claim_scheduler: Scheduler[ClaimBackend]
) -> None:
    Scheduler(MemoryLease(), lease_ms=15.5)  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType]
    Scheduler(MemoryLease(), lease_ms=None)  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType]
    Scheduler(MemoryLease(), lease_ms="15000")  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType]
    Scheduler(MemoryLease(), heartbeat_ms=0.5)  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType]
    Scheduler(MemoryLease(), namespace=None)  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType, reportCallIssue]
    Scheduler(MemoryLease(), timezone=None)  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType, reportCallIssue]
    Scheduler(MemoryLease(), max_concurrent_runs="8")  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType, reportCallIssue]
    Scheduler(MemoryLease(), around_run="application")  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType, reportCallIssue]
    Scheduler(MemoryClaim(), claim_window_ms=None)  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType]
    lease_scheduler.job(DAILY, catch_up_ms=None)  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType]
    lease_scheduler.job(DAILY, max_attempts="3")  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType]
    lease_scheduler.job(DAILY, retry_delay_ms=0.5)  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType]
    lease_scheduler.job(DAILY, catch_up_limit=None)  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType]
    lease_scheduler.job(DAILY, name=3)  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType, reportCallIssue]
    claim_scheduler.job(DAILY, jitter_ms=0.5)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    claim_scheduler.job(DAILY, time_limit_ms="60000")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    claim_scheduler.job(DAILY, timezone=3)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    claim_scheduler.job(60)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    claim_scheduler.job(datetime(2030, 1, 1, tzinfo=timezone.utc))  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    claim_scheduler.job(every)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    every(seconds="30")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    every(seconds=0.5)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


@raises(TypeError)
def what_is_no_backend(folder: Path) -> None:
    Scheduler()  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue]
    Scheduler(None)  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType, reportCallIssue]
    Scheduler(folder / "jobs.db")  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType, reportCallIssue]
    Scheduler(MemoryLease)  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType, reportCallIssue]
    Scheduler([MemoryLease(), MemoryLease()])  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType, reportCallIssue]
    connect(folder / "jobs.db")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


@raises(TypeError)
def incomplete_backends() -> None:
    Backend()  # type: ignore[abstract]  # pyright: ignore[reportAbstractUsage]
    LeaseBackend()  # type: ignore[abstract]  # pyright: ignore[reportAbstractUsage]
    ClaimBackend()  # type: ignore[abstract]  # pyright: ignore[reportAbstractUsage]
    HalfALease()  # type: ignore[abstract]  # pyright: ignore[reportAbstractUsage]
    HalfAClaim()  # type: ignore[abstract]  # pyright: ignore[reportAbstractUsage]


@passes
def around_run_with_wrong_parameters() -> None:
    Scheduler(MemoryLease(), around_run=around_nothing)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType, reportCallIssue]
    Scheduler(MemoryClaim(), around_run=around_nothing)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType, reportCallIssue]
    Scheduler("memory://around", around_run=around_nothing)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType, reportCallIssue]
    Scheduler(MemoryLease(), around_run=no_context)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType, reportCallIssue]
    Scheduler(MemoryClaim(), around_run=no_context)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType, reportCallIssue]


@raises(ValueError)
def words_that_are_not_known(
    lease_scheduler: Scheduler[LeaseBackend], claim_scheduler: Scheduler[ClaimBackend]
) -> None:
    lease_scheduler.job(DAILY, overlap="queue")  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType]
    lease_scheduler.job(DAILY, overlap="SKIP")  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType]
    lease_scheduler.job(DAILY, overlap=True)  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType]
    lease_scheduler.add_job(takes_run, DAILY, overlap="forbid")  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType]
    lease_scheduler.on("run_finish", print)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    claim_scheduler.on("started", print)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    claim_scheduler.on("RUN_LOST", print)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


@passes
def listeners_with_wrong_parameters(scheduler: Scheduler[MemoryClaim]) -> None:
    scheduler.on("run_lost", takes_nothing)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    scheduler.on("run_lost", takes_run)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    scheduler.on("run_lost", lambda: None)  # type: ignore[arg-type, misc]  # pyright: ignore[reportArgumentType]


@raises(TypeError)
def what_is_no_listener(scheduler: Scheduler[MemoryClaim]) -> None:
    scheduler.on("run_lost", None)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    scheduler.on("run_lost", "print")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    scheduler.on("run_lost")  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]


@raises(AttributeError)
def what_cannot_be_set(
    run: Run, lease_run: LeaseRun, event: Event, scheduler: Scheduler[MemoryClaim]
) -> None:
    run.stopping = True  # type: ignore[misc]  # pyright: ignore[reportAttributeAccessIssue]
    run.job = "other"  # type: ignore[misc]  # pyright: ignore[reportAttributeAccessIssue]
    lease_run.token = 7  # type: ignore[misc]  # pyright: ignore[reportAttributeAccessIssue]
    lease_run.lost = False  # type: ignore[misc]  # pyright: ignore[reportAttributeAccessIssue]
    event.reason = "another"  # type: ignore[misc]  # pyright: ignore[reportAttributeAccessIssue]
    scheduler.backend = MemoryClaim()  # type: ignore[misc]  # pyright: ignore[reportAttributeAccessIssue]
