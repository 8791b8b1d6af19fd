"""Processes of the simulated application: how they start."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Callable, Final, cast

from leasecron_sync.backends.base import Backend, ClaimBackend, LeaseBackend
from leasecron_sync.events import Event
from leasecron_sync.model import LeaseClaim, LeaseReply
from leasecron_sync.testing.faults import FaultyClaim, FaultyLease
from leasecron_sync.testing.harness import ManualScheduler
from leasecron_sync.testing.history.recorders import RecordingClaim
from leasecron_sync.testing.simulation.machine import (
    HEARTBEAT,
    NEVER_MS,
    TIMER,
    Host,
    Process,
    Strand,
    job_options,
    make_scheduler,
)
from leasecron_sync.testing.simulation.plan import JobPlan
from leasecron_sync.testing.simulation.stage import Stage
from leasecron_sync.testing.simulation.watcher import WatchedLease
from leasecron_sync.testing.simulation.wire import Wire

QUIET_EVENTS: Final = frozenset({"run_claimed", "run_started", "run_finished"})
"""Events that say what other lines of a timeline say as well."""


class _Line(FaultyLease):
    """Notes for which runs a claim got no answer."""

    def __init__(self, backend: LeaseBackend, process: Process) -> None:
        super().__init__(backend)
        self._process = process

    def claim(self, claims: Sequence[LeaseClaim]) -> Sequence[LeaseReply]:
        keys = {item.key for item in claims}
        self._process.unheard_before = set(self._process.unheard)
        self._process.unheard |= keys
        replies = super().claim(claims)
        self._process.unheard -= keys
        return replies


def start_process(stage: Stage, host: Host, version: int) -> None:
    """Start a process on a host.

    Args:
        stage: The history.
        host: Where.
        version: Number of the version of the application.
    """
    host.lives += 1
    host.version = version
    process = Process(host, f"{host.label}{host.lives}", stage.plan.versions[version])
    backend = _backend(stage, process)
    tell = functools.partial(_tell_event, stage, process)
    process.scheduler = make_scheduler(process, backend, stage.plan, tell)
    for job in process.version.jobs:
        add_job(stage, process, job)
    process.manual = ManualScheduler(
        process.scheduler,
        host.clock,
        store_clock=stage.store_clock,
        new_id=functools.partial(_new_id, stage, process),
    )
    process.manual.can_start_threads = host.no_threads_ms <= stage.time.now_ms
    host.process = process
    host.processes.append(process)
    stage.tell(f"{process.name} starts, version {version}")
    start_scheduler(stage, process)


def add_job(stage: Stage, process: Process, job: JobPlan) -> None:
    """Add a job to the scheduler of a process."""
    add = cast("Callable[..., object]", process.scheduler.add_job)
    add(stage.handler, **job_options(job, stage.plan.family))


def start_scheduler(stage: Stage, process: Process) -> None:
    """Start the scheduler of a process."""
    stage.counts["starts"] += 1
    process.started_ms = stage.store.now_ms()
    process.expects_ms = process.host.clock.now_ms()
    process.blind, process.blind_ms = False, -NEVER_MS
    process.manual.start()
    process.strands.append(Strand(process, TIMER))
    if stage.plan.family == "lease":
        process.strands.append(Strand(process, HEARTBEAT))
    process.host.look(stage.time.now_ms)


def _backend(stage: Stage, process: Process) -> Backend:
    inner = stage.store.connect()
    wire = Wire(stage, process)
    if isinstance(inner, LeaseBackend):
        lease = _Line(WatchedLease(inner, stage.watcher), process)
        lease.faults = wire
        return lease
    claim = FaultyClaim(RecordingClaim(cast("ClaimBackend", inner), stage.watcher.log))
    claim.faults = wire
    return claim


def _new_id(stage: Stage, process: Process) -> str:
    made = f"{process.name}.{stage.counts['starts']}"
    stage.watcher.began(made, process)
    return made


def _tell_event(stage: Stage, process: Process, event: Event) -> None:
    if stage.timeline is None or event.name in QUIET_EVENTS:
        return
    text = f"{process.name} tells {event.name}"
    if event.job is not None and event.scheduled_time is not None:
        text += f" {event.job}@{round(event.scheduled_time.timestamp())}"
    if event.first_time is not None:
        text += f" from {round(event.first_time.timestamp())} on"
    stage.tell(f"{text} {event.reason}")
