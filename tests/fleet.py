"""Several instances on one store in one thread, moved by one clock."""

from __future__ import annotations

import itertools
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Callable, NamedTuple, Optional, Union, cast

from leasecron_sync import Scheduler
from leasecron_sync.backends.memory import MemoryLease
from leasecron_sync.events import EVENT_NAMES, Event
from leasecron_sync.model import RunKey, RunRecord, RunState
from leasecron_sync.run import LeaseRun, Run
from leasecron_sync.schedule import ScheduleLike
from leasecron_sync.testing import (
    FaultyClaim,
    FaultyLease,
    ManualClock,
    ManualRun,
    ManualScheduler,
    MemoryClaim,
)

_numbers = itertools.count()

# A whole minute, far from midnight and from the real time.
MIDDAY_MS = 1_700_049_600_000
SECOND, MINUTE, HOUR, DAY = 1_000, 60_000, 3_600_000, 86_400_000
STORE_CALLS = ("register", "claim", "settle", "pending", "states", "prune", "renew")
Handler = Callable[[Any], object]


class Start(NamedTuple):
    """A handler was called."""

    instance: str
    job: str
    scheduled_ms: int
    attempt: int
    at_ms: int


@dataclass
class Instance:
    """One scheduler, its store's face and what it reported."""

    label: str
    fleet: Fleet
    scheduler: Scheduler[Any]
    backend: Union[FaultyLease, FaultyClaim]
    clock: ManualClock
    manual: ManualScheduler
    events: list[Event] = field(default_factory=list)
    alive: bool = False
    paused: bool = False
    steps: int = 0

    def job(
        self,
        name: str,
        schedule: object,
        handler: Optional[Handler] = None,
        **options: Any,  # noqa: ANN401 - those of a job
    ) -> None:
        """Add a job that notes its starts."""

        def noted(run: Run) -> object:
            attempt = run.attempt if isinstance(run, LeaseRun) else 1
            scheduled_ms = round(run.scheduled_time.timestamp() * 1000)
            self.fleet.starts.append(
                Start(self.label, run.job, scheduled_ms, attempt, self.fleet.store_clock.now_ms())
            )
            return None if handler is None else handler(run)

        self.scheduler.add_job(noted, cast("ScheduleLike", schedule), name=name, **options)
        if self.alive:
            assert self.manual._timer is not None
            self.manual._timer.change(name, self.scheduler._jobs[name])

    def remove(self, name: str) -> None:
        self.scheduler.remove_job(name)
        if self.alive:
            assert self.manual._timer is not None
            self.manual._timer.change(name, None)

    def start(self) -> Instance:
        self.manual.start()
        self.alive = True
        return self

    def kill(self) -> None:
        self.manual.kill()
        self.alive = False

    def calls(self, method: Optional[str] = None) -> int:
        """Count the calls to the store that were made."""
        if method is not None:
            return self.backend.faults.calls(method)
        if isinstance(self.backend, FaultyClaim):
            return self.backend.faults.calls("claim")
        return sum(self.backend.faults.calls(name) for name in STORE_CALLS)

    def named(self, *names: str) -> list[Event]:
        return [event for event in self.events if event.name in names]


class Fleet:
    """Instances that share one store.

    Args:
        family: ``"lease"`` or ``"claim"``.
    """

    def __init__(self, family: str = "lease") -> None:
        self._family = family
        self._name = f"fleet {next(_numbers)}"
        self.store_clock = ManualClock(MIDDAY_MS - 30_000)
        self.instances: list[Instance] = []
        self.starts: list[Start] = []
        self.held: set[str] = set()
        self._busy: set[int] = set()

    def add(
        self,
        label: str = "a",
        *,
        skew_ms: int = 0,
        around_run: Optional[Callable[[Any], AbstractContextManager[object]]] = None,
        **options: Any,  # noqa: ANN401 - those of a scheduler
    ) -> Instance:
        """Add an instance; without a skew the store's clock is its wall clock."""
        clock = self.store_clock
        if skew_ms:
            clock = ManualClock(self.store_clock.now_ms() + skew_ms, 9_000_000 + skew_ms % 7)
        backend: Union[FaultyLease, FaultyClaim]
        if self._family == "lease":
            lease = MemoryLease(self._name)
            lease._now_ms = self.store_clock.now_ms
            backend = FaultyLease(lease)
        else:
            claim = MemoryClaim(self._name)
            claim._now_ms = self.store_clock.now_ms
            backend = FaultyClaim(claim)
        scheduler: Scheduler[Any] = Scheduler(backend, around_run=around_run, **options)
        manual = ManualScheduler(scheduler, clock, store_clock=self.store_clock)
        made = Instance(label, self, scheduler, backend, clock, manual)
        for name in EVENT_NAMES:
            scheduler.on(name, made.events.append)  # type: ignore[arg-type]
        self.instances.append(made)
        return made

    def own_clock(self, instance: Instance) -> ManualClock:
        """Give an instance that is not started a wall clock of its own."""
        clock = ManualClock(self.store_clock.now_ms(), 7_000_000)
        instance.clock = clock
        instance.manual = ManualScheduler(instance.scheduler, clock, store_clock=self.store_clock)
        return clock

    # -- time ----------------------------------------------------------------------------------

    def let_pass(self, ms: int) -> None:
        """Let time pass without a step of anybody, as a suspension does."""
        clocks = {id(clock): clock for clock in self._clocks()}
        for clock in clocks.values():
            clock.advance(ms)

    def advance(self, ms: int, *, limit: int = 200_000) -> None:
        """Let time pass; whoever is due does its step, and granted runs are executed."""
        end_ms = self.store_clock.steady_ms() + ms
        for _round in range(limit):
            self.settle_down()
            left_ms = end_ms - self.store_clock.steady_ms()
            if left_ms <= 0:
                return
            waits = [self._wait_ms(item) for item in self.instances if item.alive]
            self.let_pass(max(1, min([left_ms, *waits])))
        message = f"{limit} rounds and no end"
        raise AssertionError(message)

    def settle_down(self, limit: int = 2_000) -> None:
        """Do every step that is due now."""
        for _round in range(limit):
            did = [self.step(item) for item in self.instances]
            if not any(did):
                return
        message = f"{limit} rounds, and somebody still asks for another step at once"
        raise AssertionError(message)

    def step(self, item: Instance) -> bool:
        """Do what is due of one instance; tell whether there was anything."""
        if not item.alive or item.paused:
            return False
        manual, steady_ms, did = item.manual, item.clock.steady_ms(), False
        if manual._timer_ms <= steady_ms:
            item.steps += 1
            manual.step_timer()
            did = True
        if manual._heartbeat is not None and manual._heartbeat_ms <= steady_ms:
            manual.step_heartbeat()
            did = True
        for run in list(manual.runs):
            # A handler may have killed its own instance, or executed others' runs.
            if run in manual.runs and not self.is_held(run):
                did = self.work(item, run) or did
        return did

    def work(self, item: Instance, run: ManualRun) -> bool:
        """Call one handler and report its end once."""
        if run._settling is not None:
            return self._settle(item, run, again=True)
        self._busy.add(id(run))
        try:
            run.call_handler()
        finally:
            self._busy.discard(id(run))
        if item.alive and run in item.manual.runs:
            self._settle(item, run, again=False)
        return True

    def _settle(self, item: Instance, run: ManualRun, *, again: bool) -> bool:
        retry_ms = getattr(run, "retry_at_ms", 0)
        if again and item.clock.steady_ms() < retry_ms:
            return False
        delay_ms = run.settle()
        if delay_ms is None:
            item.manual.runs.remove(run)
        else:
            run.retry_at_ms = item.clock.steady_ms() + delay_ms  # type: ignore[attr-defined]
        return True

    def is_held(self, run: ManualRun) -> bool:
        return id(run) in self._busy or (run.job in self.held and run._settling is None)

    def _wait_ms(self, item: Instance) -> int:
        if item.paused:
            return DAY
        steady_ms = item.clock.steady_ms()
        ends = [item.manual._timer_ms]
        if item.manual._heartbeat is not None:
            ends.append(item.manual._heartbeat_ms)
        ends += [
            getattr(run, "retry_at_ms", 0)
            for run in item.manual.runs
            if run._settling is not None and id(run) not in self._busy
        ]
        return min(ends) - steady_ms

    def _clocks(self) -> list[ManualClock]:
        return [self.store_clock, *(item.clock for item in self.instances)]

    # -- what happened -------------------------------------------------------------------------

    def started(self, job: Optional[str] = None) -> list[int]:
        """Return the scheduled times whose handlers were called, in that order."""
        return [start.scheduled_ms for start in self.starts if job in (None, start.job)]

    def who(self, job: Optional[str] = None) -> list[str]:
        return [start.instance for start in self.starts if job in (None, start.job)]

    def records(self, job: Optional[str] = None) -> dict[RunKey, RunRecord]:
        inner = self.instances[0].backend.inner
        assert isinstance(inner, MemoryLease)
        if inner._settings is None:
            inner = next(
                lease
                for item in self.instances
                if isinstance(lease := item.backend.inner, MemoryLease) and lease._settings
            )
        return {record.key: record for record in inner.history(job, 1_000_000)}

    def states(self, job: str) -> dict[int, RunState]:
        return {key.scheduled_ms: item.state for key, item in self.records(job).items()}

    def missed(self) -> list[Event]:
        return [event for item in self.instances for event in item.named("run_missed")]


def minutes(first: int, last: int) -> list[int]:
    """Return minutes counted from midday, both ends included; a fleet begins 30 s before it."""
    return [MIDDAY_MS + number * MINUTE for number in range(first, last + 1)]
