"""A scheduler without threads, for tests that move the clock by hand."""
# It takes a scheduler apart and puts it together without its threads.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, Callable, Optional

from leasecron_sync.backends.base import Backend, BackendSettings, LeaseBackend
from leasecron_sync.backends.memory import MemoryLease
from leasecron_sync.backends.postgres import PostgresLease
from leasecron_sync.backends.redis import RedisLease
from leasecron_sync.backends.sqlite import SQLiteLease
from leasecron_sync.engine.context import Context
from leasecron_sync.engine.heartbeat import HeartbeatLoop
from leasecron_sync.engine.job import Job
from leasecron_sync.engine.runtime import LiveRun, Runtime
from leasecron_sync.engine.timer import TimerLoop
from leasecron_sync.engine.worker import Ending, Settling, call_handler, finish
from leasecron_sync.errors import SchedulerStateError
from leasecron_sync.model import RunRecord
from leasecron_sync.run import Run
from leasecron_sync.scheduler import Scheduler
from leasecron_sync.testing.clock import ManualClock
from leasecron_sync.testing.memory import MemoryClaim

MAX_ROUNDS = 10_000
"""Steps at one moment after which ``advance`` gives up, should a step never ask for a wait."""


class ManualRun:
    """A granted run that waits for its handler to be called, or for its end to be settled.

    Args:
        context: The start of the scheduler that it belongs to.
        live: The run.
    """

    def __init__(self, context: Context, live: LiveRun) -> None:
        self._context = context
        self._live = live
        self._settling: Optional[Settling] = None
        self.settled = False

    @property
    def job(self) -> str:
        """Name of the job."""
        return self._live.key.job

    @property
    def run(self) -> Run:
        """What the handler is given."""
        return self._live.run

    def call_handler(self) -> Ending:
        """Call the handler on this thread; what it raised is judged, not raised."""
        ending = call_handler(self._context, self._live)
        self._settling = Settling(self._context, self._live, ending)
        return ending

    def settle(self) -> Optional[int]:
        """Tell the store once; return ms until it should be told again, None when it answered."""
        if self._settling is None:
            message = "the handler was not called yet: call_handler() comes first"
            raise SchedulerStateError(message)
        delay_ms = self._settling.step()
        if delay_ms is None and not self.settled:
            self.settled = True
            finish(self._context, self._live)
        return delay_ms


class ManualScheduler:
    """Runs a scheduler's steps by hand: no thread, no waiting, a clock that the test moves.

    The scheduler must not be started as well. A backend of this package takes its store's clock
    from the manual clock, unless ``store_clock`` is another one.

    Args:
        scheduler: Jobs, options and backend.
        clock: The instance's clock.
        store_clock: The store's clock; the instance's when left out.
        new_id: Makes the id of a start; a random one when left out.
    """

    def __init__(
        self,
        scheduler: Scheduler[Any],
        clock: ManualClock,
        *,
        store_clock: Optional[ManualClock] = None,
        new_id: Optional[Callable[[], str]] = None,
    ) -> None:
        self.clock = clock
        self._scheduler = scheduler
        scheduler._clock = clock  # noqa: SLF001
        self._backend: Backend = scheduler._backend  # noqa: SLF001 - a part of this package
        self._store_clock = clock if store_clock is None else store_clock
        self._runtime = Runtime(clock)
        self._hub = scheduler._hub  # noqa: SLF001
        self._hub.inline = True
        self._context: Optional[Context] = None
        self._timer: Optional[TimerLoop] = None
        self._heartbeat: Optional[HeartbeatLoop] = None
        self._new_id = _random_id if new_id is None else new_id
        self._known_jobs: Mapping[str, Job] = {}
        self._timer_ms = self._heartbeat_ms = 0
        self.runs: list[ManualRun] = []
        """Granted runs that are not settled, the oldest grant first."""
        self.can_start_threads = True
        """Set to false, every grant meets an interpreter that can start no thread."""

    @property
    def instance_id(self) -> str:
        """Id of this start."""
        return self._started().instance_id

    def history(self, job: Optional[str] = None, limit: int = 100) -> Sequence[RunRecord]:
        """Return the store's records of runs, as ``Scheduler.history`` does.

        Args:
            job: Name of a job; all jobs when left out.
            limit: How many records at most.

        Raises:
            TypeError: The backend is a claim backend.
        """
        self._started()
        if not isinstance(self._backend, LeaseBackend):
            message = "history() needs a lease backend"
            raise TypeError(message)
        return self._backend.history(job, limit)

    def start(self) -> None:
        """Open the backend; the first step looks back."""
        options = self._scheduler._options  # noqa: SLF001
        backend = self._backend
        inner = _innermost(backend)
        if isinstance(inner, (MemoryLease, SQLiteLease, PostgresLease, RedisLease, MemoryClaim)):
            inner._now_ms = self._store_clock.now_ms  # noqa: SLF001
        instance_id = self._new_id()
        backend.open(BackendSettings(options.namespace, instance_id, options.call_timeout_ms))
        self._context = Context(
            instance_id,
            options,
            backend,
            clock=self.clock,
            hub=self._hub,
            runtime=self._runtime,
            spawn=self._spawn,
        )
        self._known_jobs = dict(self._scheduler._jobs)  # noqa: SLF001
        self._timer = TimerLoop(self._context, list(self._known_jobs.values()))
        self._heartbeat = None
        if isinstance(backend, LeaseBackend):
            self._heartbeat = HeartbeatLoop(self._context, backend)
        self._context.wake_timer = self._wake_timer
        self._context.wake_heartbeat = self._wake_heartbeat
        self._wake_timer()
        self._wake_heartbeat()

    def step_timer(self) -> Optional[int]:
        """Do one round of the timer; return ms until the next one."""
        self._started()
        assert self._timer is not None
        # Set before the step, so that what wakes the timer meanwhile is not forgotten.
        self._timer_ms = self.clock.steady_ms() + 1_000_000
        delay_ms = self._timer.step()
        if delay_ms is not None:
            self._timer_ms = min(self._timer_ms, self.clock.steady_ms() + delay_ms)
        return delay_ms

    def step_heartbeat(self) -> Optional[int]:
        """Do one round of the heartbeat; None on a claim backend."""
        self._started()
        if self._heartbeat is None:
            return None
        self._heartbeat_ms = self.clock.steady_ms() + 1_000_000
        delay_ms = self._heartbeat.step()
        self._heartbeat_ms = min(self._heartbeat_ms, self.clock.steady_ms() + delay_ms)
        return delay_ms

    def work(self) -> int:
        """Call the handlers of all granted runs and settle them; return how many were settled.

        Runs whose settlement the store did not answer stay in ``runs``.
        """
        count = 0
        for run in list(self.runs):
            if not run.settled and run._settling is None:  # noqa: SLF001
                run.call_handler()
            if run.settle() is None:
                count += 1
        self.runs = [run for run in self.runs if not run.settled]
        return count

    def advance(self, ms: int, *, work: bool = True) -> None:
        """Move the clock on, doing every step when it is due.

        Args:
            ms: How far.
            work: Whether granted runs are executed as well; else they stay in ``runs``.
        """
        end_ms = self.clock.steady_ms() + ms
        rounds = 0
        while rounds < MAX_ROUNDS:
            rounds += 1
            now_ms = self.clock.steady_ms()
            if self._timer_ms <= now_ms:
                self.step_timer()
            if self._heartbeat is not None and self._heartbeat_ms <= now_ms:
                self.step_heartbeat()
            if work:
                self.work()
            now_ms = self.clock.steady_ms()
            due_ms = [self._timer_ms]
            if self._heartbeat is not None:
                due_ms.append(self._heartbeat_ms)
            if now_ms >= end_ms and min(due_ms) > now_ms:
                return
            wait_ms = min(*due_ms, end_ms) - now_ms
            if wait_ms > 0:
                self.clock.advance(wait_ms)
                rounds = 0
        message = f"after {MAX_ROUNDS:,} steps the scheduler still asks for another one at once"
        raise RuntimeError(message)

    def refresh(self) -> None:
        """Tell the timer of jobs that were added to the scheduler, or removed, since the start."""
        self._started()
        assert self._timer is not None
        before, jobs = self._known_jobs, dict(self._scheduler._jobs)  # noqa: SLF001
        self._known_jobs = jobs
        for name in [*before, *(name for name in jobs if name not in before)]:
            if jobs.get(name) is not before.get(name):
                self._timer.change(name, jobs.get(name))

    def stop(self) -> None:
        """Stop: hand back what is granted from here on, and tell the runs to end."""
        self.begin_stop()
        self.step_timer()

    def begin_stop(self) -> None:
        """Tell the timer and the runs to end; the timer's next step is its last one."""
        context = self._started()
        context.stopping.set()
        for live in self._runtime.runs():
            live.control.stop()
        self._wake_timer()

    def end_stop(self) -> None:
        """Give up the runs that have not ended, as a stop does when its time is over.

        Their handlers may go on: they stay in ``runs``, and keep their slots over another start.
        """
        context = self._started()
        context.given_up.set()
        for live in self._runtime.runs():
            live.given_up = True
            live.control.stop()
            live.give_up.set()
        context.backend.close()
        self._context = self._timer = self._heartbeat = None

    def kill(self) -> None:
        """End without a word to the store, as a crash does."""
        self._context = self._timer = self._heartbeat = None
        self.runs = []
        self._runtime.discard()

    def _started(self) -> Context:
        if self._context is None:
            message = "this ManualScheduler is not started: call start() first"
            raise SchedulerStateError(message)
        return self._context

    def _spawn(self, context: Context, live: LiveRun) -> None:
        if not self.can_start_threads:
            message = "can't start new thread"
            raise RuntimeError(message)
        self.runs.append(ManualRun(context, live))

    def _wake_timer(self) -> None:
        self._timer_ms = self.clock.steady_ms()

    def _wake_heartbeat(self) -> None:
        self._heartbeat_ms = self.clock.steady_ms()


def _innermost(backend: Backend) -> Backend:
    """Return the backend that does the work, where others are wrapped around it."""
    inner: object = getattr(backend, "inner", None)
    return _innermost(inner) if isinstance(inner, Backend) else backend


def _random_id() -> str:
    return os.urandom(6).hex()
