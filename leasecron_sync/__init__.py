"""Runs one cron schedule in every instance of an application, each run in one of them."""

from __future__ import annotations

import logging

from leasecron_sync.backends.memory import MemoryLease
from leasecron_sync.backends.nats import NatsClaim
from leasecron_sync.backends.postgres import PostgresLease
from leasecron_sync.backends.rabbitmq import RabbitMQClaim
from leasecron_sync.backends.redis import RedisLease
from leasecron_sync.backends.redis_claim import RedisClaim
from leasecron_sync.backends.sqlite import SQLiteLease
from leasecron_sync.backends.urls import connect, connect_claim, connect_lease
from leasecron_sync.errors import (
    HandOver,
    LeasecronError,
    MissingDependency,
    OutcomeUnknown,
    RunInterrupt,
    RunLost,
    RunStopping,
    RunTimeLimit,
    SchedulerStateError,
    StoreError,
    StoreRejected,
    StoreUnavailable,
    StoreUnsupported,
)
from leasecron_sync.events import Event, EventName
from leasecron_sync.model import RunRecord, RunState
from leasecron_sync.run import LeaseRun, Run
from leasecron_sync.schedule import at, every
from leasecron_sync.scheduler import LiveRunStatus, Scheduler, Status

__all__ = [
    "Event",
    "EventName",
    "HandOver",
    "LeaseRun",
    "LeasecronError",
    "LiveRunStatus",
    "MemoryLease",
    "MissingDependency",
    "NatsClaim",
    "OutcomeUnknown",
    "PostgresLease",
    "RabbitMQClaim",
    "RedisClaim",
    "RedisLease",
    "Run",
    "RunInterrupt",
    "RunLost",
    "RunRecord",
    "RunState",
    "RunStopping",
    "RunTimeLimit",
    "SQLiteLease",
    "Scheduler",
    "SchedulerStateError",
    "Status",
    "StoreError",
    "StoreRejected",
    "StoreUnavailable",
    "StoreUnsupported",
    "at",
    "connect",
    "connect_claim",
    "connect_lease",
    "every",
]

logging.getLogger("leasecron_sync").addHandler(logging.NullHandler())
