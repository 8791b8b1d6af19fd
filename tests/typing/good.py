"""Uses that mypy and pyright must accept in strict mode.

``assert_type`` pins the types that a checker finds. ``test_typing.py`` also calls the functions; it
makes an argument for each name of a parameter.
"""

from __future__ import annotations

import functools
import queue
from collections.abc import Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Optional, Union

import leasecron_sync
from leasecron_sync import (
    Event,
    HandOver,
    LeaseRun,
    MemoryLease,
    NatsClaim,
    PostgresLease,
    RabbitMQClaim,
    RedisClaim,
    RedisLease,
    Run,
    RunInterrupt,
    RunRecord,
    RunState,
    Scheduler,
    SQLiteLease,
    Status,
    at,
    connect,
    connect_claim,
    connect_lease,
    every,
)
from leasecron_sync.backends import Backend, ClaimBackend, LeaseBackend
from leasecron_sync.testing import MemoryClaim

if TYPE_CHECKING:
    # Not installed by anything here: both checkers carry its types with them.
    from typing_extensions import assert_type
else:

    def assert_type(value: object, _expected: object) -> object:
        return value


DAILY = "0 3 * * *"


# -- handlers ------------------------------------------------------------------------------------


def takes_nothing() -> None:
    pass


def takes_run(run: Run) -> str:
    return run.job


def takes_lease_run(run: LeaseRun) -> int:
    return run.token


def takes_anything(thing: object) -> None:
    pass


def may_take_run(run: Optional[Run] = None) -> bool:
    return run is None


def takes_more(run: LeaseRun, folder: Path, *, limit: int = 10) -> int:
    return run.attempt + limit + len(folder.parts)


class Importer:
    def __init__(self, url: str) -> None:
        self.url = url

    def plain(self) -> None:
        pass

    def on_run(self, run: Run) -> None:
        run.check()

    def on_lease_run(self, run: LeaseRun) -> None:
        run.check()

    @classmethod
    def of_class(cls, run: Run) -> None:
        pass

    @staticmethod
    def static(run: Run) -> None:
        pass

    def __call__(self, run: Run) -> None:
        pass


@contextmanager
def around_any(run: Run) -> Generator[None, None, None]:
    assert_type(run.job, str)
    yield


@contextmanager
def around_lease(run: LeaseRun) -> Generator[int, None, None]:
    yield run.token


class Application:
    def context(self) -> AbstractContextManager[Application]:
        return nullcontext(self)


# -- what a handler is given -----------------------------------------------------------------------


def attributes_of_a_run(run: Run) -> None:
    assert_type(run.job, str)
    assert_type(run.scheduled_time, datetime)
    assert_type(run.stopping, bool)
    run.check()
    run.wait(0)
    run.wait(0.001)
    run.wait(seconds=0)


def attributes_of_a_lease_run(lease_run: LeaseRun) -> None:
    assert_type(lease_run.job, str)
    assert_type(lease_run.attempt, int)
    assert_type(lease_run.token, int)
    assert_type(lease_run.lost, bool)
    as_any_run: Run = lease_run
    assert_type(as_any_run.stopping, bool)


def interrupts_are_base_exceptions(run: Run) -> None:
    try:
        run.check()
        raise HandOver
    except RunInterrupt as interrupt:
        assert_type(interrupt, RunInterrupt)


# -- schedulers ------------------------------------------------------------------------------------


def schedulers_of_lease_backends(folder: Path) -> None:
    scheduler = Scheduler(
        SQLiteLease(folder / "all.db"),
        namespace="billing",
        timezone="Europe/Athens",
        max_concurrent_runs=4,
        around_run=around_lease,
        lease_ms=15_000,
        heartbeat_ms=5_000,
        history_ms=86_400_000,
    )
    assert_type(scheduler, Scheduler[SQLiteLease])
    assert_type(scheduler.backend, SQLiteLease)
    assert_type(Scheduler(SQLiteLease(str(folder / "text.db"))), Scheduler[SQLiteLease])
    assert_type(Scheduler(MemoryLease()), Scheduler[MemoryLease])
    assert_type(Scheduler(MemoryLease(), heartbeat_ms=None), Scheduler[MemoryLease])
    assert_type(Scheduler(MemoryLease(), around_run=None), Scheduler[MemoryLease])
    assert_type(Scheduler(MemoryLease(), around_run=around_any), Scheduler[MemoryLease])
    application = Application()
    assert_type(
        Scheduler(MemoryLease(), around_run=lambda _run: application.context()),
        Scheduler[MemoryLease],
    )


def schedulers_of_claim_backends() -> None:
    scheduler = Scheduler(
        MemoryClaim(),
        namespace="billing",
        timezone="Europe/Athens",
        max_concurrent_runs=4,
        around_run=around_any,
        claim_window_ms=60_000,
    )
    assert_type(scheduler, Scheduler[MemoryClaim])
    assert_type(scheduler.backend, MemoryClaim)
    assert_type(Scheduler(MemoryClaim()), Scheduler[MemoryClaim])
    assert_type(Scheduler(MemoryClaim(), around_run=None), Scheduler[MemoryClaim])


def schedulers_on_servers() -> None:
    postgres = PostgresLease("postgresql://localhost/jobs", schema="cron", table_prefix="jobs_")
    on_postgres = Scheduler(postgres, lease_ms=6_000, history_ms=604_800_000)
    assert_type(on_postgres, Scheduler[PostgresLease])
    on_postgres.job(DAILY, overlap="allow", max_attempts=1)(takes_lease_run)
    on_redis = Scheduler(RedisLease("redis://localhost"), heartbeat_ms=2_000)
    assert_type(on_redis, Scheduler[RedisLease])
    on_redis.add_job(takes_lease_run, DAILY, catch_up_ms=3_600_000)


def schedulers_on_brokers() -> None:
    on_rabbitmq = Scheduler(RabbitMQClaim("amqp://localhost"), claim_window_ms=30_000)
    assert_type(on_rabbitmq, Scheduler[RabbitMQClaim])
    on_rabbitmq.job(DAILY, jitter_ms=500, time_limit_ms=60_000)(takes_run)
    on_nats = Scheduler(NatsClaim("nats://a,b,c?replicas=3"))
    assert_type(on_nats, Scheduler[NatsClaim])
    on_nats.add_job(takes_nothing, DAILY)
    on_redis = Scheduler(RedisClaim("redis://localhost", strategy="stream-id"))
    assert_type(on_redis, Scheduler[RedisClaim])
    on_redis.add_job(takes_run, DAILY)


def schedulers_of_urls(lease_url: str, claim_url: str) -> None:
    lease = connect_lease(lease_url)
    assert_type(lease, LeaseBackend)
    scheduler_of_lease = Scheduler(lease, lease_ms=6_000)
    assert_type(scheduler_of_lease, Scheduler[LeaseBackend])
    scheduler_of_lease.job(DAILY, catch_up_ms=3_600_000)(takes_lease_run)

    claim = connect_claim(claim_url)
    assert_type(claim, ClaimBackend)
    scheduler_of_claim = Scheduler(claim, claim_window_ms=30_000)
    assert_type(scheduler_of_claim, Scheduler[ClaimBackend])
    scheduler_of_claim.job(DAILY, jitter_ms=500)(takes_run)

    # A URL tells a checker nothing of the family.
    any_family = connect(lease_url)
    assert_type(any_family, Backend)
    assert_type(Scheduler(any_family), Scheduler[Backend])
    scheduler = Scheduler(
        lease_url,
        namespace="billing",
        timezone="UTC",
        max_concurrent_runs=1,
        around_run=around_any,
    )
    assert_type(scheduler, Scheduler[Backend])
    assert_type(scheduler.backend, Backend)
    scheduler.job(DAILY, name="a", timezone="UTC", jitter_ms=1, time_limit_ms=1_000)(takes_run)
    scheduler.add_job(takes_nothing, DAILY)


def a_chosen_backend_of_either_family(url: Optional[str] = None) -> None:
    backend: Union[MemoryLease, MemoryClaim] = MemoryLease() if url is None else MemoryClaim()
    scheduler = Scheduler(backend)
    scheduler.job(DAILY)(takes_run)


def with_keeps_the_type(folder: Path) -> None:
    with Scheduler(SQLiteLease(folder / "with.db")) as scheduler:
        assert_type(scheduler, Scheduler[SQLiteLease])
        scheduler.add_job(takes_lease_run, DAILY, overlap="allow")
        assert_type(scheduler.history(), Sequence[RunRecord])
        assert_type(scheduler.history("takes_lease_run", limit=5), Sequence[RunRecord])
    with Scheduler(MemoryClaim()) as of_claim:
        assert_type(of_claim, Scheduler[MemoryClaim])
    with Scheduler("memory://with") as of_url:
        assert_type(of_url, Scheduler[Backend])


def for_any(any_scheduler: Scheduler[Backend]) -> None:
    any_scheduler.add_job(takes_run, DAILY, name="for any")


def for_any_lease(lease_scheduler: Scheduler[LeaseBackend]) -> None:
    lease_scheduler.add_job(takes_lease_run, DAILY, name="for any lease", max_attempts=1)


def for_any_claim(claim_scheduler: Scheduler[ClaimBackend]) -> None:
    claim_scheduler.add_job(takes_run, DAILY, name="for any claim")


def a_scheduler_is_one_of_its_family(folder: Path) -> None:
    lease = Scheduler(SQLiteLease(folder / "family.db"))
    for_any_lease(lease)
    for_any(lease)
    claim = Scheduler(MemoryClaim())
    for_any_claim(claim)
    for_any(claim)


# -- jobs ------------------------------------------------------------------------------------------


def every_option_of_a_lease_job(lease_scheduler: Scheduler[LeaseBackend]) -> None:
    lease_scheduler.job(
        DAILY,
        name="decorated",
        timezone="Europe/Athens",
        jitter_ms=0,
        time_limit_ms=60_000,
        overlap="skip",
        max_attempts=3,
        retry_delay_ms=1_000,
        catch_up_ms=60_000,
        catch_up_limit=100,
    )(takes_lease_run)
    lease_scheduler.add_job(
        takes_lease_run,
        DAILY,
        name="added",
        timezone="Europe/Athens",
        jitter_ms=0,
        time_limit_ms=60_000,
        overlap="allow",
        max_attempts=3,
        retry_delay_ms=1_000,
        catch_up_ms=60_000,
        catch_up_limit=100,
    )
    lease_scheduler.add_job(takes_nothing, DAILY, name=None, timezone=None, time_limit_ms=None)
    lease_scheduler.remove_job("added")


def every_option_of_a_claim_job(claim_scheduler: Scheduler[ClaimBackend]) -> None:
    claim_scheduler.job(
        DAILY, name="decorated", timezone="Europe/Athens", jitter_ms=0, time_limit_ms=60_000
    )(takes_run)
    claim_scheduler.add_job(
        takes_run, DAILY, name="added", timezone="Europe/Athens", jitter_ms=0, time_limit_ms=60_000
    )
    claim_scheduler.add_job(takes_nothing, DAILY, name=None, timezone=None, time_limit_ms=None)
    claim_scheduler.remove_job("added")


def all_kinds_of_schedules(claim_scheduler: Scheduler[ClaimBackend]) -> None:
    claim_scheduler.add_job(takes_run, "*/10 * * * * *", name="seconds")
    claim_scheduler.add_job(takes_run, "@hourly", name="hourly")
    claim_scheduler.add_job(takes_run, every(seconds=30), name="every")
    in_an_hour = datetime.now(timezone.utc) + timedelta(hours=1)  # noqa: TID251 - any instant
    claim_scheduler.add_job(takes_run, at(in_an_hour), name="at")


def decorated_handlers_keep_their_type(
    lease_scheduler: Scheduler[LeaseBackend],
    claim_scheduler: Scheduler[ClaimBackend],
    run: Run,
    lease_run: LeaseRun,
) -> None:
    @lease_scheduler.job(DAILY, catch_up_ms=3_600_000)
    def with_lease_run(run: LeaseRun) -> int:
        return run.attempt

    assert_type(with_lease_run(run=lease_run), int)

    @lease_scheduler.job(DAILY)
    def with_run_on_a_lease(run: Run) -> str:
        return run.job

    assert_type(with_run_on_a_lease(run), str)

    @lease_scheduler.job(DAILY)
    @claim_scheduler.job(DAILY)
    def with_run(run: Run) -> str:
        return run.job

    assert_type(with_run(run=run), str)

    @lease_scheduler.job(DAILY)
    @claim_scheduler.job(DAILY)
    def without_run() -> list[str]:
        return []

    assert_type(without_run(), list[str])

    @claim_scheduler.job(DAILY)
    def with_a_default(run: Optional[Run] = None, *, limit: int = 3) -> int:
        return limit if run is None else 0

    assert_type(with_a_default(), int)
    assert_type(with_a_default(run, limit=4), int)

    assert_type(lease_scheduler.job(DAILY)(takes_lease_run)(lease_run), int)
    assert_type(claim_scheduler.job(DAILY)(takes_run)(run), str)
    importer = lease_scheduler.job(DAILY, name="an object")(Importer("https://localhost"))
    assert_type(importer, Importer)


def all_kinds_of_handlers(
    lease_scheduler: Scheduler[LeaseBackend], claim_scheduler: Scheduler[ClaimBackend], folder: Path
) -> None:
    importer = Importer("https://localhost")
    lease_scheduler.add_job(takes_nothing, DAILY)
    lease_scheduler.add_job(takes_run, DAILY)
    lease_scheduler.add_job(takes_lease_run, DAILY)
    lease_scheduler.add_job(takes_anything, DAILY)
    lease_scheduler.add_job(may_take_run, DAILY)
    lease_scheduler.add_job(importer.plain, DAILY)
    lease_scheduler.add_job(importer.on_run, DAILY)
    lease_scheduler.add_job(importer.on_lease_run, DAILY)
    lease_scheduler.add_job(Importer.of_class, DAILY)
    lease_scheduler.add_job(Importer.static, DAILY)
    lease_scheduler.add_job(importer, DAILY, name="object")
    lease_scheduler.add_job(lambda run: run.check(), DAILY, name="lambda")
    lease_scheduler.add_job(lambda: None, DAILY, name="lambda without run")
    with_folder = functools.partial(takes_more, folder=folder, limit=20)
    lease_scheduler.add_job(with_folder, DAILY, name="partial", max_attempts=5)
    all_given = functools.partial(print, "nothing is left to give")
    lease_scheduler.add_job(all_given, DAILY, name="partial without run")

    claim_scheduler.add_job(takes_nothing, DAILY)
    claim_scheduler.add_job(takes_run, DAILY)
    claim_scheduler.add_job(takes_anything, DAILY)
    claim_scheduler.add_job(may_take_run, DAILY)
    claim_scheduler.add_job(importer.plain, DAILY)
    claim_scheduler.add_job(importer.on_run, DAILY)
    claim_scheduler.add_job(importer, DAILY, name="object")
    claim_scheduler.add_job(lambda run: run.check(), DAILY, name="lambda")
    claim_scheduler.add_job(functools.partial(print, "run"), DAILY, name="partial")


# -- listeners, and what a scheduler knows ---------------------------------------------------------


def listeners(claim_scheduler: Scheduler[ClaimBackend]) -> None:
    def missed(event: Event) -> None:
        assert_type(event.job, Optional[str])
        assert_type(event.scheduled_time, Optional[datetime])
        assert_type(event.attempt, Optional[int])
        assert_type(event.token, Optional[int])
        assert_type(event.reason, str)
        assert_type(event.count, int)
        assert_type(event.error, Optional[BaseException])

    claim_scheduler.on("run_missed", missed)
    claim_scheduler.on("store_down", lambda event: event.reason)
    seen: list[Event] = []
    claim_scheduler.on("run_finished", seen.append)
    waiting: queue.Queue[Event] = queue.Queue(10)
    claim_scheduler.on("skew_found", waiting.put)


def what_a_scheduler_knows(claim_scheduler: Scheduler[ClaimBackend]) -> None:
    status = claim_scheduler.status()
    assert_type(status, Status)
    assert_type(status.state, str)
    assert_type(status.instance_id, Optional[str])
    assert_type(status.threads, Mapping[str, bool])
    assert_type(status.store_down_since, Optional[datetime])
    assert_type(status.skew_ms, Optional[int])
    assert_type(status.next_due, Optional[datetime])
    for run in status.runs:
        assert_type(run.job, str)
        assert_type(run.attempt, Optional[int])
    assert_type(claim_scheduler.next_runs(), dict[str, Optional[datetime]])


def records(folder: Path) -> None:
    with Scheduler(SQLiteLease(folder / "records.db")) as scheduler:
        for record in scheduler.history(limit=1):
            assert_type(record, RunRecord)
            assert_type(record.state, RunState)


def starting_and_stopping() -> None:
    scheduler = Scheduler(MemoryLease())
    scheduler.start()
    scheduler.stop()
    scheduler.stop(5)
    scheduler.stop(timeout=0.5)


def the_package_itself() -> None:
    assert_type(leasecron_sync.Scheduler(leasecron_sync.MemoryLease()), Scheduler[MemoryLease])
