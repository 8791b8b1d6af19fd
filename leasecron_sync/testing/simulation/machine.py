"""Simulated hosts, the processes on them, and the threads of these."""
# It looks when a ManualScheduler wants its next step.
# pyright: reportPrivateUsage=false
# ruff: noqa: SLF001

from __future__ import annotations

import threading
from collections import Counter
from typing import Any, Callable, Final, Optional, cast

from leasecron_sync import every
from leasecron_sync.events import EVENT_NAMES, Event, EventName
from leasecron_sync.model import RunKey
from leasecron_sync.run import Run
from leasecron_sync.scheduler import Scheduler
from leasecron_sync.testing.harness import ManualRun, ManualScheduler
from leasecron_sync.testing.simulation.clocks import HostClock
from leasecron_sync.testing.simulation.plan import HostPlan, JobPlan, MessageFault, Plan, Version
from leasecron_sync.testing.simulation.strands import Body

NEVER_MS: Final = 1 << 60

TIMER: Final = "timer"
HEARTBEAT: Final = "heartbeat"
WORK: Final = "work"
CHILD: Final = "child"
STOP: Final = "stop"
START: Final = "start"
OLD: Final = "old"


class Strand:
    """One thread of a process.

    Attributes:
        kind: What it does.
        body: What it is in the middle of.
        wake_ms: When it goes on, where it is halted or waits.
        event: What ends its wait early.
        run: Workers: the run.
        called: Workers: whether the handler was called.
        pid: Number of the process that it runs in: another one in a forked child.
    """

    __slots__ = ("body", "called", "event", "kind", "pid", "process", "run", "wake_ms")

    def __init__(self, process: Process, kind: str, wake_ms: int = 0) -> None:
        self.process = process
        self.kind = kind
        self.body: Optional[Body] = None
        self.wake_ms = wake_ms
        self.event: Optional[threading.Event] = None
        self.run: Optional[ManualRun] = None
        self.called = False
        self.pid = 1

    def due_ms(self) -> int:
        """Return when it wants to go on."""
        if self.body is not None:
            return 0 if self.event is not None and self.event.is_set() else self.wake_ms
        process = self.process
        if self.kind == TIMER:
            return process.host.clock.when(process.manual._timer_ms)
        if self.kind == HEARTBEAT:
            return process.host.clock.when(process.manual._heartbeat_ms)
        if self.kind == STOP:
            return 0 if process.ended else self.wake_ms
        return self.wake_ms


class Process:
    """A process of the application.

    Attributes:
        name: Label of the host and number of the process there.
        version: Version of the application.
        strands: Its threads.
        works: How many of them execute runs.
        muted: True once it was killed: what its threads still say is not heard.
        events: What was told, and when.
        errors: What was logged as an error, and when.
        steps: Steps of a loop in a second, by loop and second.
        decided: Answers to its claims in a second that decided something.
        after_stop: What follows a stop: ``""`` for the end, or ``"restart"``.
        then_ms: Time between the stop and the next start.
        started_ms: When it started, by the store's clock.
        handlers: Runs whose handlers live in it.
        blind: Whether the probe after an outage failed, and nothing was registered since.
        blind_ms: When such a probe failed last.
        calls: Calls of the timer in its present step.
        unheard: Runs whose newest claim has no answer.
        unheard_before: The same before the claim that is under way.
        heard: What ``register`` answered: id of the instance, and how often the store had lost its
            data by then.
        expects_ms: The smallest reading of its wall clock: what it took for coming came later.
    """

    def __init__(self, host: Host, name: str, version: Version) -> None:
        self.host = host
        self.name = name
        self.version = version
        self.scheduler: Scheduler[Any]
        self.manual: ManualScheduler
        self.strands: list[Strand] = []
        self.works = 0
        self.muted = False
        self.events: list[tuple[int, Event]] = []
        self.errors: list[tuple[int, str]] = []
        self.steps: Counter[tuple[str, int]] = Counter()
        self.decided: Counter[int] = Counter()
        self.after_stop = ""
        self.then_ms = 0
        self.started_ms = self.expects_ms = 0
        self.heard: list[tuple[str, int]] = []
        self.handlers: list[Run] = []
        self.blind = False
        self.blind_ms = -NEVER_MS
        self.calls = 0
        self.unheard: set[RunKey] = set()
        self.unheard_before: set[RunKey] = set()

    @property
    def ended(self) -> bool:
        """Whether nothing is left that a stop waits for."""
        return not any(strand.kind in (TIMER, WORK) for strand in self.strands)

    @property
    def stopping(self) -> bool:
        """Whether it is about to stop."""
        return any(strand.kind in (STOP, START) for strand in self.strands)

    def strand(self, kind: str) -> Optional[Strand]:
        """Return its thread of a kind."""
        return next((strand for strand in self.strands if strand.kind == kind), None)


class Host:
    """A machine with at most one process.

    Attributes:
        label: Its name.
        process: Its process.
        due_ms: When something may happen here.
        restart_ms: When a process starts, where there is none.
        paused_ms: Its process does nothing before this.
        slept_ms: When the last wait is over that stood still while it was suspended.
        cut_off_ms: The store cannot be reached before this.
        no_threads_ms: No thread can be started before this.
        rejected: Commands that the store refuses, and until when.
        calls: How many calls were made.
        lives: How many processes there were.
        version: Number of the version that its processes have.
        faults: What happens to its calls, by number.
        losses: Lanes of calls of which the last one was lost.
    """

    def __init__(self, plan: HostPlan, clock: HostClock, faults: dict[int, MessageFault]) -> None:
        self.plan = plan
        self.label = plan.label
        self.clock = clock
        self.faults = faults
        self.process: Optional[Process] = None
        self.due_ms = 0
        self.restart_ms = plan.start_ms
        self.paused_ms = self.slept_ms = 0
        self.cut_off_ms = 0
        self.no_threads_ms = 0
        self.rejected: dict[str, int] = {}
        self.calls = 0
        self.lives = 0
        self.version = 0
        self.losses: set[str] = set()
        self.processes: list[Process] = []

    def look(self, now_ms: int) -> None:
        """Work out when something may happen here."""
        process = self.process
        if process is None:
            self.due_ms = self.restart_ms
        elif self.paused_ms > now_ms:
            self.due_ms = self.paused_ms
        else:
            self.due_ms = min([strand.due_ms() for strand in process.strands], default=NEVER_MS)

    def ready(self, now_ms: int) -> list[Strand]:
        """Return what may go on; work out when something may happen here, where nothing may."""
        found: list[Strand] = []
        if self.process is not None and self.paused_ms <= now_ms:
            found = [strand for strand in self.process.strands if strand.due_ms() <= now_ms]
        if not found:
            self.look(now_ms)
        return found


def make_scheduler(
    process: Process,
    backend: Any,  # noqa: ANN401 - of either family
    plan: Plan,
    tell: Callable[[Event], None],
) -> Scheduler[Any]:
    """Make the scheduler of a process, as the application's code does at its start.

    Args:
        process: The process.
        backend: Its backend.
        plan: The history.
        tell: Called with each event.
    """
    version = process.version
    options: dict[str, Any] = {"max_concurrent_runs": process.host.plan.slots}
    if plan.family == "lease":
        options.update(lease_ms=version.lease_ms, history_ms=version.history_ms)
    else:
        options["claim_window_ms"] = version.window_ms
    scheduler: Scheduler[Any] = Scheduler(backend, **options)

    def listen(event: Event) -> None:
        if not process.muted:
            process.events.append((process.host.clock.time.now_ms, event))
            tell(event)

    for name in EVENT_NAMES:
        scheduler.on(cast("EventName", name), listen)
    return scheduler


def job_options(job: JobPlan, family: str) -> dict[str, Any]:
    """Return the options of a job for ``add_job``."""
    options: dict[str, Any] = {"name": job.name, "jitter_ms": job.jitter_ms}
    if job.time_limit_ms is not None:
        options["time_limit_ms"] = job.time_limit_ms
    if family == "lease":
        options.update(
            overlap="allow" if job.overlap else "skip",
            max_attempts=job.max_attempts,
            retry_delay_ms=job.retry_delay_ms,
            catch_up_ms=job.catch_up_ms,
            catch_up_limit=job.catch_up_limit,
        )
    return {**options, "schedule": every(seconds=job.period_s)}
