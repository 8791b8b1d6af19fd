"""The scheduler: registration of jobs, the typed face of both families, and the wiring.

The module is over 400 lines long because each option is written out in every overload, which is
what type checkers and editors read.
"""

from __future__ import annotations

import logging
import select
import signal
import threading
import weakref
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from datetime import datetime
from typing import (
    TYPE_CHECKING,
    Any,
    Callable,
    Generic,
    Literal,
    Optional,
    Protocol,
    TypeVar,
    Union,
    cast,
    overload,
)

from leasecron_sync.backends.base import Backend, ClaimBackend, LeaseBackend
from leasecron_sync.backends.urls import connect
from leasecron_sync.clock import Clock, SystemClock
from leasecron_sync.engine.host import block_ending_signals, reset_after_fork
from leasecron_sync.engine.job import Job, name_of, takes_run
from leasecron_sync.engine.lifecycle import Lifecycle, State, check_window
from leasecron_sync.errors import SchedulerStateError
from leasecron_sync.events import EventHub, EventName, Listener
from leasecron_sync.model import RunRecord
from leasecron_sync.options import UNSET, SchedulerOptions, Unset, job_options, scheduler_options
from leasecron_sync.run import LeaseRun, Run, moment
from leasecron_sync.schedule import ScheduleLike, parse_schedule

if TYPE_CHECKING:
    from types import FrameType, TracebackType

B_co = TypeVar("B_co", bound=Backend, covariant=True)
C = TypeVar("C", bound=ClaimBackend)
L = TypeVar("L", bound=LeaseBackend)

RunHandler = Union[Callable[[Run], object], Callable[[], object]]
LeaseRunHandler = Union[Callable[[LeaseRun], object], Callable[[], object]]
H = TypeVar("H", bound=RunHandler)
LH = TypeVar("LH", bound=LeaseRunHandler)

AroundRun = Callable[[Run], AbstractContextManager[object]]
AroundLeaseRun = Callable[[LeaseRun], AbstractContextManager[object]]

_logger = logging.getLogger("leasecron_sync.scheduler")

_NO_HANDLER = object()

_in_use: weakref.WeakSet[Backend] = weakref.WeakSet()


class JobDecorator(Protocol):
    """Registers a handler that takes a ``Run`` or nothing, and returns it unchanged."""

    def __call__(self, handler: H, /) -> H:
        """Register the handler."""
        ...


class LeaseJobDecorator(Protocol):
    """Registers a handler that takes a ``LeaseRun`` or nothing, and returns it unchanged."""

    def __call__(self, handler: LH, /) -> LH:
        """Register the handler."""
        ...


@dataclass(frozen=True)
class LiveRunStatus:
    """A run that this instance executes.

    Attributes:
        job: Its job.
        scheduled_time: Its scheduled time.
        attempt: Attempt, on lease backends.
        age_ms: How long ago it was granted.
        stale: True when its handler goes on although its lease is lost, or past its time limit.
    """

    job: str
    scheduled_time: datetime
    attempt: Optional[int]
    age_ms: int
    stale: bool


STUCK_MS = 60_000
"""A step makes a few calls to the store, each with a time-out of some seconds."""


def _moment(ms: Optional[int]) -> Optional[datetime]:
    return None if ms is None else moment(ms)


@dataclass(frozen=True)
class Status:
    """What a scheduler knows of itself; made without any call to the store.

    Attributes:
        state: ``stopped``, ``starting``, ``running`` or ``stopping``.
        instance_id: Random id of this start; None while stopped.
        threads: The loops' threads and whether each is alive.
        store_down_since: When the store stopped answering; None while it answers.
        skew_ms: Store's clock minus this host's, at the newest comparison.
        runs: The runs that this instance executes.
        next_due: The earliest coming scheduled time.
        stuck_ms: Of each thread, how long its present step has taken, or by how long it has
            overslept; 0 in a wait that is not over.
        store_answered: When the store answered last; None before the first time. An idle scheduler
            does not ask it.
        last_claim: When a claim was answered last; None before the first one.
    """

    state: str
    instance_id: Optional[str]
    threads: Mapping[str, bool]
    store_down_since: Optional[datetime]
    skew_ms: Optional[int]
    runs: Sequence[LiveRunStatus]
    next_due: Optional[datetime]
    stuck_ms: Mapping[str, int] = field(default_factory=dict[str, int])
    store_answered: Optional[datetime] = None
    last_claim: Optional[datetime] = None

    @property
    def problems(self) -> Sequence[str]:
        """What keeps this instance from executing runs, a sentence each; empty when it is well."""
        found = [] if self.state == "running" else [f"the scheduler is {self.state}"]
        found += [f"the thread {name} has ended" for name in self.threads if not self.threads[name]]
        found += [
            f"the thread {name} has been in one step for {late_ms // 1000} s"
            for name, late_ms in self.stuck_ms.items()
            if late_ms >= STUCK_MS
        ]
        if self.store_down_since is not None:
            since = self.store_down_since.isoformat()
            found.append(f"the store does not answer, or refuses a command, since {since}")
        return found


class Scheduler(Generic[B_co]):
    """Runs one cron schedule in every instance of an application, each run in one of them.

    On a lease backend at most one instance wins a run and at most one live holder has it, as long
    as the store keeps its writes and its clock does not jump ahead by more than the trust margin;
    a run that was won is brought to an end, by another instance if need be. That is not exactly
    once: a holder that is paused for longer than its lease may go on for a moment beside its
    successor, and what it writes is safe only where ``run.token`` is checked. On a claim backend
    one instance wins a run, and nothing more: a run whose winner crashes is lost.

    Args:
        backend: A backend object, or a URL such as ``sqlite:///jobs.db``. One backend object
            serves one scheduler.
        namespace: Keeps applications that share a store apart.
        timezone: IANA zone of the jobs that name none.
        max_concurrent_runs: Runs that this instance executes at a time.
        around_run: Called with each run; returns a context manager for its handler.
        claim_window_ms: Claim backends: how long after its scheduled time a run may be claimed.
        lease_ms: Lease backends: length of a lease.
        heartbeat_ms: Lease backends: time between two renewals.
        history_ms: Lease backends: how long records of settled runs are kept.

    Raises:
        TypeError: An option of the other family, whatever its value, or a value of a wrong type.
        ValueError: A value, or a relation of two, that cannot work; a URL that names no backend.
    """

    @overload
    def __init__(
        self: Scheduler[C],
        backend: C,
        *,
        namespace: str = ...,
        timezone: str = ...,
        max_concurrent_runs: int = ...,
        around_run: Optional[AroundRun] = ...,
        claim_window_ms: int = ...,
    ) -> None: ...

    @overload
    def __init__(
        self: Scheduler[L],
        backend: L,
        *,
        namespace: str = ...,
        timezone: str = ...,
        max_concurrent_runs: int = ...,
        around_run: Optional[AroundLeaseRun] = ...,
        lease_ms: int = ...,
        heartbeat_ms: Optional[int] = ...,
        history_ms: int = ...,
    ) -> None: ...

    @overload
    def __init__(
        self: Scheduler[Backend],
        backend: str,
        *,
        namespace: str = ...,
        timezone: str = ...,
        max_concurrent_runs: int = ...,
        around_run: Optional[AroundRun] = ...,
    ) -> None: ...

    # A backend of either family, as ``connect()`` returns it. With around_run here, a lambda for it
    # would fit this overload and the lease's, and mypy would make a Scheduler[Any] of that.
    @overload
    def __init__(
        self: Scheduler[Backend],
        backend: Backend,
        *,
        namespace: str = ...,
        timezone: str = ...,
        max_concurrent_runs: int = ...,
        around_run: None = ...,
    ) -> None: ...

    def __init__(
        self,
        backend: Union[Backend, str],
        *,
        namespace: Union[str, Unset] = UNSET,
        timezone: Union[str, Unset] = UNSET,
        max_concurrent_runs: Union[int, Unset] = UNSET,
        around_run: Union[AroundRun, AroundLeaseRun, Unset, None] = UNSET,
        claim_window_ms: Union[int, Unset] = UNSET,
        lease_ms: Union[int, Unset] = UNSET,
        heartbeat_ms: Union[int, Unset, None] = UNSET,
        history_ms: Union[int, Unset] = UNSET,
    ) -> None:
        """Check the backend and the options; nothing is connected or started."""
        self._backend = _taken(backend)
        self._options: SchedulerOptions = scheduler_options(
            {
                "namespace": namespace,
                "timezone": timezone,
                "max_concurrent_runs": max_concurrent_runs,
                "around_run": around_run,
                "claim_window_ms": claim_window_ms,
                "lease_ms": lease_ms,
                "heartbeat_ms": heartbeat_ms,
                "history_ms": history_ms,
            },
            self._backend.family,
            type(self._backend).__name__,
        )
        parse_schedule("* * * * *", self._options.timezone)  # an unknown zone is refused here
        if isinstance(self._backend, ClaimBackend):
            check_window(self._backend, self._options.claim_window_ms)
        self._clock: Clock = SystemClock()
        self._hub = EventHub()
        self._jobs: dict[str, Job] = {}
        self._jobs_lock = threading.RLock()
        self._lifecycle = Lifecycle(self._backend, self._options, self._clock, self._hub)
        _in_use.add(self._backend)
        reset_after_fork(self)

    def __repr__(self) -> str:
        """Show the backend without credentials, and the state."""
        return f"<Scheduler {self._backend!r} {self._lifecycle.state.value}>"

    def after_fork(self) -> None:
        """Become a stopped scheduler, in a forked child; called by the library."""
        self._jobs_lock = threading.RLock()
        self._lifecycle.after_fork()

    @property
    def backend(self) -> B_co:
        """The backend."""
        return cast("B_co", self._backend)

    # -- jobs ------------------------------------------------------------------------------------

    @overload
    def job(
        self: Scheduler[LeaseBackend],
        schedule: ScheduleLike,
        *,
        name: Optional[str] = ...,
        timezone: Optional[str] = ...,
        jitter_ms: int = ...,
        time_limit_ms: Optional[int] = ...,
        overlap: Literal["skip", "allow"] = ...,
        max_attempts: int = ...,
        retry_delay_ms: int = ...,
        catch_up_ms: int = ...,
        catch_up_limit: int = ...,
    ) -> LeaseJobDecorator: ...

    @overload
    def job(
        self,
        schedule: ScheduleLike,
        *,
        name: Optional[str] = ...,
        timezone: Optional[str] = ...,
        jitter_ms: int = ...,
        time_limit_ms: Optional[int] = ...,
    ) -> JobDecorator: ...

    def job(
        self,
        schedule: ScheduleLike,
        *,
        name: Union[str, Unset, None] = UNSET,
        timezone: Union[str, Unset, None] = UNSET,
        jitter_ms: Union[int, Unset] = UNSET,
        time_limit_ms: Union[int, Unset, None] = UNSET,
        overlap: Union[str, Unset] = UNSET,
        max_attempts: Union[int, Unset] = UNSET,
        retry_delay_ms: Union[int, Unset] = UNSET,
        catch_up_ms: Union[int, Unset] = UNSET,
        catch_up_limit: Union[int, Unset] = UNSET,
    ) -> Any:
        """Register the decorated function as a job's handler.

        The handler takes the run or nothing; what it returns is ignored.

        Args:
            schedule: A cron expression, ``every(seconds=…)`` or ``at(…)``.
            name: Name of the job, the same in every instance; the handler's ``__qualname__`` when
                left out.
            timezone: IANA zone of the schedule.
            jitter_ms: Spreads the runs by up to this much.
            time_limit_ms: Past it ``run.check()`` raises ``RunTimeLimit``.
            overlap: Lease backends: ``"skip"`` or ``"allow"``.
            max_attempts: Lease backends: attempts that may fail.
            retry_delay_ms: Lease backends: wait before a retry, doubled for each failure.
            catch_up_ms: Lease backends: how far back scheduled times are made up for.
            catch_up_limit: Lease backends: how many of them.

        Raises:
            TypeError: An option of the other family, or a handler that cannot be called so.
            ValueError: A schedule that is invalid or never matches, a name that is taken or
                missing, a value that cannot work.
        """
        given = _given(
            name=name,
            timezone=timezone,
            jitter_ms=jitter_ms,
            time_limit_ms=time_limit_ms,
            overlap=overlap,
            max_attempts=max_attempts,
            retry_delay_ms=retry_delay_ms,
            catch_up_ms=catch_up_ms,
            catch_up_limit=catch_up_limit,
        )
        # Everything but the handler is checked here, where the line with the mistake is.
        self._checked(_NO_HANDLER, schedule, given)

        def register(handler: Callable[..., object], /) -> Callable[..., object]:
            self._register(handler, schedule, given)
            return handler

        return register

    @overload
    def add_job(
        self: Scheduler[LeaseBackend],
        handler: LeaseRunHandler,
        schedule: ScheduleLike,
        *,
        name: Optional[str] = ...,
        timezone: Optional[str] = ...,
        jitter_ms: int = ...,
        time_limit_ms: Optional[int] = ...,
        overlap: Literal["skip", "allow"] = ...,
        max_attempts: int = ...,
        retry_delay_ms: int = ...,
        catch_up_ms: int = ...,
        catch_up_limit: int = ...,
    ) -> None: ...

    @overload
    def add_job(
        self,
        handler: RunHandler,
        schedule: ScheduleLike,
        *,
        name: Optional[str] = ...,
        timezone: Optional[str] = ...,
        jitter_ms: int = ...,
        time_limit_ms: Optional[int] = ...,
    ) -> None: ...

    def add_job(
        self,
        handler: Callable[..., object],
        schedule: ScheduleLike,
        *,
        name: Union[str, Unset, None] = UNSET,
        timezone: Union[str, Unset, None] = UNSET,
        jitter_ms: Union[int, Unset] = UNSET,
        time_limit_ms: Union[int, Unset, None] = UNSET,
        overlap: Union[str, Unset] = UNSET,
        max_attempts: Union[int, Unset] = UNSET,
        retry_delay_ms: Union[int, Unset] = UNSET,
        catch_up_ms: Union[int, Unset] = UNSET,
        catch_up_limit: Union[int, Unset] = UNSET,
    ) -> None:
        """Register a job without a decorator; see ``job``. Also while the scheduler runs.

        Args:
            handler: Takes the run or nothing.
            schedule: See ``job``, like every further argument.
            name: See ``job``.
            timezone: See ``job``.
            jitter_ms: See ``job``.
            time_limit_ms: See ``job``.
            overlap: See ``job``.
            max_attempts: See ``job``.
            retry_delay_ms: See ``job``.
            catch_up_ms: See ``job``.
            catch_up_limit: See ``job``.

        Raises:
            TypeError: See ``job``.
            ValueError: See ``job``.
        """
        given = _given(
            name=name,
            timezone=timezone,
            jitter_ms=jitter_ms,
            time_limit_ms=time_limit_ms,
            overlap=overlap,
            max_attempts=max_attempts,
            retry_delay_ms=retry_delay_ms,
            catch_up_ms=catch_up_ms,
            catch_up_limit=catch_up_limit,
        )
        self._register(handler, schedule, given)

    def remove_job(self, name: str) -> None:
        """Forget a job. Its runs in progress go on; its records stay until they are pruned.

        Args:
            name: Name of the job.

        Raises:
            ValueError: There is no such job.
        """
        with self._jobs_lock:
            if name not in self._jobs:
                message = f"there is no job {name!r}; there are: {sorted(self._jobs)}"
                raise ValueError(message)
            del self._jobs[name]
            self._changed(name, None)

    def _register(
        self, handler: Callable[..., object], schedule: ScheduleLike, given: Mapping[str, object]
    ) -> None:
        job = self._checked(handler, schedule, given)
        assert job is not None
        with self._jobs_lock:
            if job.name in self._jobs:
                message = (
                    f"the name {job.name!r} is taken by another job of this scheduler: give one of "
                    'them another with name="…"'
                )
                raise ValueError(message)
            self._jobs[job.name] = job
            self._changed(job.name, job)

    def _checked(
        self,
        handler: object,
        schedule: ScheduleLike,
        given: Mapping[str, object],
    ) -> Optional[Job]:
        """Check everything that can be checked; without a handler there is no job yet."""
        named = dict(given)
        wants_run = False
        if handler is not _NO_HANDLER:
            wants_run = takes_run(handler)
            named["name"] = name_of(handler, None if given["name"] is UNSET else given["name"])
        elif given["name"] in (None, UNSET):
            named["name"] = "not known yet"
        options = job_options(
            named, self._options, self._backend.family, type(self._backend).__name__
        )
        rule = parse_schedule(schedule, options.timezone)
        if handler is _NO_HANDLER:
            return None
        assert callable(handler)
        takeover_ms = self._options.takeover_ms(options.catch_up_ms)
        return Job(handler, wants_run, rule, options, takeover_ms)

    def _changed(self, name: str, job: Optional[Job]) -> None:
        started = self._lifecycle.started
        if started is not None:
            started.timer.change(name, job)

    # -- running ---------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the threads and return at once.

        The store is asked once whether it can do what is needed. If it can't be reached, that is
        one warning, and it is tried again for as long as it takes.

        Raises:
            SchedulerStateError: It is started already, or a stop is not through, for which this
                does not wait; or threads can't be started here.
            StoreUnsupported: The store can't do what is asked of it.
            MissingDependency: The backend's client package is not installed.
        """
        with self._jobs_lock:
            self._lifecycle.start(list(self._jobs.values()))

    def stop(self, timeout: float = 30.0) -> None:
        """Claim no more, let the handlers end, hand over what gave up, and end the threads.

        Stopping what is not started does nothing. Called from a handler or a listener it returns at
        once, and the stop goes on in a thread of its own.

        Args:
            timeout: Seconds that handlers get. The lease of one that ignores it lapses, and a
                standby takes the run over.
        """
        self._lifecycle.stop(_seconds(timeout))

    def run_forever(self) -> None:
        """Start, and block until SIGTERM or SIGINT, or until another thread calls ``stop()``.

        The first signal stops the scheduler as ``stop()`` does, the second ends the process at
        once. Outside the main thread no signal can be caught; that is logged, and ``stop()`` ends
        it.

        Raises:
            SchedulerStateError: It is started already.
        """
        asked: list[int] = []
        lifecycle = self._lifecycle
        restore = self._catch_signals(asked)
        try:
            self.start()
            _logger.info("ready, waiting for SIGTERM or SIGINT backend=%r", self._backend)
            while not asked and lifecycle.state is not State.STOPPED:
                _pause()
            self.stop()
            while lifecycle.state is not State.STOPPED:  # another thread is stopping it
                _pause()
        finally:
            restore()

    def _catch_signals(self, asked: list[int]) -> Callable[[], None]:
        """Note the first signal and die of the second; return what undoes it."""
        if threading.current_thread() is not threading.main_thread():
            _logger.info("not in the main thread, signals are left alone: call stop() to end")
            return lambda: None

        def note(number: int, _frame: Optional[FrameType]) -> None:
            # Only a note: a signal handler may interrupt code that holds any lock.
            asked.append(number)
            for other in before:
                signal.signal(other, signal.SIG_DFL)

        before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
        for number in before:
            signal.signal(number, note)

        def restore() -> None:
            for number, handler in before.items():
                if handler is not None:  # set by other code than Python's
                    signal.signal(number, handler)

        return restore

    def __enter__(self) -> Scheduler[B_co]:
        """Start."""
        self.start()
        return self

    def __exit__(
        self,
        kind: Optional[type[BaseException]],
        error: Optional[BaseException],
        traceback: Optional[TracebackType],
    ) -> None:
        """Stop."""
        self.stop()

    # -- what it knows ---------------------------------------------------------------------------

    def on(self, event: EventName, listener: Listener) -> None:
        """Call a listener for every event of this name; see ``leasecron_sync.Event``.

        Args:
            event: Name of the event.
            listener: Called with it, on a thread of its own, behind a bounded queue.

        Raises:
            ValueError: There is no such event.
            TypeError: The listener can't be called.
        """
        signals_come = block_ending_signals()  # not to the thread that may be started here
        try:
            self._hub.on(event, listener)
        finally:
            signals_come()

    def status(self) -> Status:
        """Return what this scheduler knows of itself, without asking the store."""
        lifecycle, now_ms = self._lifecycle, self._clock.steady_ms()
        started = lifecycle.started
        runs = [
            LiveRunStatus(
                live.key.job,
                moment(live.key.scheduled_ms),
                None if live.lease is None else live.lease.attempt,
                now_ms - live.began_ms,
                live.stale,
            )
            for live in lifecycle.runtime.runs()
        ]
        if started is None:
            return Status(lifecycle.state.value, None, {}, None, None, runs, None)
        caller = started.context.caller
        down_ms = caller.down_since_ms
        coming = started.timer.coming().values()
        return Status(
            lifecycle.state.value,
            started.context.instance_id,
            {loop.thread.name: loop.thread.is_alive() for loop in started.threads()},
            _moment(down_ms),
            caller.skew_ms,
            runs,
            moment(min(coming)) if coming else None,
            {loop.thread.name: loop.overdue_ms() for loop in started.threads()},
            _moment(caller.answered_at_ms),
            _moment(started.timer.claimed_at_ms),
        )

    def next_runs(self) -> dict[str, Optional[datetime]]:
        """Return each job's next scheduled time, without jitter; None when there is none."""
        now_ms = self._clock.now_ms()
        with self._jobs_lock:
            coming = {name: job.schedule.after(now_ms) for name, job in self._jobs.items()}
        return {name: None if ms is None else moment(ms) for name, ms in coming.items()}

    def history(
        self: Scheduler[LeaseBackend], job: Optional[str] = None, limit: int = 100
    ) -> Sequence[RunRecord]:
        """Return the store's records of runs, the newest scheduled time first.

        Args:
            job: Name of a job; all jobs when left out.
            limit: How many records at most, from 1 to 10,000.

        Raises:
            TypeError: The backend is a claim backend, which keeps no record of a run.
            SchedulerStateError: The scheduler is not started.
            StoreError: The store did not answer.
        """
        backend: Backend = self._backend
        if not isinstance(backend, LeaseBackend):
            message = (
                f"history() needs a lease backend: {type(backend).__name__} only picks one winner "
                "and keeps no record of the run"
            )
            raise TypeError(message)
        if not 1 <= limit <= MAX_HISTORY:
            message = f"limit must be from 1 to {MAX_HISTORY:,}, not {limit}"
            raise ValueError(message)
        if self._lifecycle.started is None:
            message = "history() asks the store, which is closed: call start() first"
            raise SchedulerStateError(message)
        return backend.history(job, limit)


MAX_HISTORY = 10_000
PAUSE_S = 0.2


def _taken(backend: Union[Backend, str]) -> Backend:
    if isinstance(backend, str):
        return connect(backend)
    if not isinstance(backend, (LeaseBackend, ClaimBackend)):
        message = (
            "a Scheduler takes a backend such as SQLiteLease('jobs.db') or a URL such as "
            f"'sqlite:///jobs.db', not {backend!r}"
        )
        raise TypeError(message)
    if backend in _in_use:
        message = f"{backend!r} serves another scheduler already: give each its own backend object"
        raise ValueError(message)
    return backend


def _pause() -> None:
    """Wait a moment without a lock, since a signal handler that stops may want any."""
    select.select((), (), (), PAUSE_S)


def _given(**options: object) -> dict[str, object]:
    return options


def _seconds(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= 0:
        message = f"timeout must be a number of seconds, 0 or more, not {value!r}"
        raise ValueError(message)
    return min(float(value), threading.TIMEOUT_MAX / 2)
