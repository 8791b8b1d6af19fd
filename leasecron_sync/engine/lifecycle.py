"""Start, stop, fork and the end of the interpreter.

Every combination has one meaning:

- start twice: ``SchedulerStateError``; start after stop: a new start with a new instance id;
- stop before start, stop twice: nothing; two threads stop: the second waits for the first;
- stop during start (a signal handler): the start is finished, then stopped at once;
- stop from a handler, a listener or another thread of the scheduler: a thread of its own does it,
  since nobody can wait for the end of the thread that he is;
- stop from a signal handler while this thread is stopping: nothing, the stop goes on;
- fork: the child's scheduler is stopped, whatever state its parent's was in.
"""

from __future__ import annotations

import logging
import os
import threading
from enum import Enum
from typing import Callable, Optional

from leasecron_sync.backends.base import Backend, BackendSettings, ClaimBackend, LeaseBackend
from leasecron_sync.clock import Clock
from leasecron_sync.engine.context import TIMER_LANE, Context
from leasecron_sync.engine.heartbeat import HeartbeatLoop
from leasecron_sync.engine.host import call_at_exit, defer_to_workers
from leasecron_sync.engine.job import Job
from leasecron_sync.engine.loop import LoopThread
from leasecron_sync.engine.runtime import LiveRun, Runtime
from leasecron_sync.engine.timer import TimerLoop
from leasecron_sync.engine.worker import execute
from leasecron_sync.errors import (
    SchedulerStateError,
    StoreError,
    StoreUnsupported,
)
from leasecron_sync.events import EventHub
from leasecron_sync.options import EXIT_STOP_S, SchedulerOptions
from leasecron_sync.run import moment

_logger = logging.getLogger("leasecron_sync.engine.lifecycle")

JOIN_S = 0.5
"""How much longer than its timeout a stop waits for threads that are in a call."""


class State(Enum):
    """State of a scheduler in this process."""

    STOPPED = "stopped"
    STARTING = "starting"
    RUNNING = "running"
    STOPPING = "stopping"


class Started:
    """The loops of one start.

    Args:
        context: What they share.
        jobs: The jobs it begins with.
    """

    def __init__(self, context: Context, jobs: list[Job]) -> None:
        clock = context.clock
        self.context = context
        self.timer = TimerLoop(context, jobs)
        self.timer_thread = LoopThread("leasecron-timer", self.timer.step, clock)
        context.wake_timer = self.timer_thread.wake
        self.heartbeat_thread: Optional[LoopThread] = None
        self._beats_end = threading.Event()
        self.stop_once = threading.Lock()  # taken, and never released, by whoever stops this start
        if isinstance(context.backend, LeaseBackend):
            heartbeat = HeartbeatLoop(context, context.backend)
            self.heartbeat_thread = LoopThread(
                "leasecron-heartbeat",
                lambda: None if self._beats_end.is_set() else heartbeat.step(),
                clock,
            )
            context.wake_heartbeat = self.heartbeat_thread.wake

    def start(self) -> None:
        """Start the threads, the heartbeat first: no lease is ever without one."""
        if self.heartbeat_thread is not None:
            self.heartbeat_thread.start()
        self.timer_thread.start()

    def end_beats(self) -> None:
        """End the heartbeat."""
        self._beats_end.set()
        if self.heartbeat_thread is not None:
            self.heartbeat_thread.wake()

    def threads(self) -> list[LoopThread]:
        """Return the loops' threads."""
        beats = [] if self.heartbeat_thread is None else [self.heartbeat_thread]
        return [self.timer_thread, *beats]


class Lifecycle:
    """Owns the threads of a scheduler.

    Args:
        backend: Its backend.
        options: Its options.
        clock: Where the time comes from.
        hub: Where events go.
    """

    def __init__(
        self, backend: Backend, options: SchedulerOptions, clock: Clock, hub: EventHub
    ) -> None:
        self._backend = backend
        self._options = options
        self._clock = clock
        self._hub = hub
        # Reentrant, since a signal handler may stop what its own thread is just starting.
        self._lock = threading.RLock()
        self._stop_asked = False
        self._cancel_exit: Callable[[], None] = _nothing
        self.state = State.STOPPED
        self.runtime = Runtime(clock)
        self.started: Optional[Started] = None
        self.stopped = threading.Event()
        self.stopped.set()

    def start(self, jobs: list[Job]) -> None:
        """Start, or leave it to uWSGI's workers.

        Raises:
            SchedulerStateError: It is started already, or no thread can be started.
            StoreUnsupported: The store can't do what is asked of it.
            MissingDependency: The backend's client package is not installed.
            ValueError: The claim window is longer than the backend can keep.
        """
        with self._lock:
            if self.state is not State.STOPPED:
                message = f"this scheduler is {self.state.value} already: call stop() first"
                raise SchedulerStateError(message)
            if defer_to_workers(lambda: self.start(jobs)):
                return
            self.state = State.STARTING
            self._stop_asked = False
            try:
                self._start(jobs)
            except BaseException:
                self.state = State.STOPPED
                self._backend.close()
                raise
            self.stopped.clear()
            self._cancel_exit = call_at_exit(self._at_exit)
            self.state = State.RUNNING
            stop_asked = self._stop_asked
        if stop_asked:
            self.stop(0.0)

    def _start(self, jobs: list[Job]) -> None:
        instance_id = os.urandom(6).hex()
        self._backend.open(
            BackendSettings(self._options.namespace, instance_id, self._options.call_timeout_ms)
        )
        context = Context(
            instance_id,
            self._options,
            self._backend,
            clock=self._clock,
            hub=self._hub,
            runtime=self.runtime,
            spawn=spawn,
        )
        self._hub.start()
        try:
            self._probe(context)
            started = Started(context, jobs)
        except BaseException:
            self._hub.stop(JOIN_S)
            raise
        try:
            started.start()
        except RuntimeError as error:
            context.stopping.set()
            started.end_beats()
            started.timer_thread.wake()
            self._hub.stop(JOIN_S)
            message = f"the threads of the scheduler could not be started: {error}"
            raise SchedulerStateError(message) from error
        self.started = started
        _logger.info(
            "scheduler started instance=%s namespace=%r backend=%r jobs=%d",
            instance_id,
            self._options.namespace,
            self._backend,
            len(jobs),
        )

    def _probe(self, context: Context) -> None:
        """Ask the store once; what time may mend is an outage that begins here."""
        try:
            info = self._backend.probe()
        except StoreUnsupported:
            raise
        except StoreError as error:
            context.caller.failed(TIMER_LANE, error)
            return
        except Exception:
            _logger.exception("the backend let a foreign error escape")
            return
        for warning in info.warnings:
            _logger.warning("the store is not set up safely finding=%r", warning)
        backend, window_ms = self._backend, self._options.claim_window_ms
        if isinstance(backend, ClaimBackend):
            check_window(backend, window_ms)

    def stop(self, timeout_s: float) -> None:
        """Stop; see the module's table for who may call it when.

        Args:
            timeout_s: How long to wait for handlers.
        """
        if self._is_own_thread():
            self._stop_elsewhere(timeout_s)
            return
        if not self._lock.acquire(timeout=timeout_s + JOIN_S):
            return  # another thread is stopping it and takes longer than this caller will wait
        try:
            if self.state is State.STARTING:
                self._stop_asked = True
            started = self.started
            if self.state is not State.RUNNING or started is None:
                return
            # In one step: a signal handler may come between any two others, and stop as well.
            if not started.stop_once.acquire(blocking=False):
                return
            self.state = State.STOPPING
            try:
                self._stop(started, timeout_s)
            finally:
                self.started = None
                self.state = State.STOPPED
                self.stopped.set()
                self._cancel_exit()
        finally:
            self._lock.release()

    def _stop(self, started: Started, timeout_s: float) -> None:
        context = started.context
        instance_id, end_ms = context.instance_id, self._clock.steady_ms() + round(timeout_s * 1000)

        def left_s() -> float:
            return max(0.0, (end_ms - self._clock.steady_ms()) / 1000)

        runs = [live for live in self.runtime.runs() if live.instance_id == instance_id]
        if runs:
            _logger.info(
                "stopping, waiting for handlers to end timeout_s=%s runs=%d jobs=%r",
                timeout_s,
                len(runs),
                sorted({live.key.job for live in runs}),
            )
        try:
            # No more claims; what is granted from here on goes back.
            context.stopping.set()
            started.timer_thread.wake()
            if not isinstance(self._backend, LeaseBackend):
                # Nobody can take a run over, so it gets most of the time to end by itself.
                self.runtime.wait_until_empty(instance_id, timeout_s * 0.8)
            self._tell(instance_id)
            started.timer_thread.join(left_s())
            # A run may have begun while the timer was still in its last step.
            self._tell(instance_id)
            self.runtime.wait_until_empty(instance_id, left_s())
        finally:
            # Also when a signal's exception comes through: nothing goes on behind its back.
            self._end(started, timeout_s, end_ms)

    def _end(self, started: Started, timeout_s: float, end_ms: int) -> None:
        """Give up what still runs, and end the threads."""
        instance_id = started.context.instance_id
        left_behind = 0
        for live in self.runtime.runs():
            if live.instance_id == instance_id:
                left_behind += 1
                live.given_up = True
                live.control.stop()
                live.give_up.set()
                self._warn(live, timeout_s)
        started.end_beats()
        # One grace for all of them: what hangs, hangs in a call that ends by its own time-out.
        end_ms = max(end_ms, self._clock.steady_ms()) + round(JOIN_S * 1000)

        def grace_s() -> float:
            return max(0.0, (end_ms - self._clock.steady_ms()) / 1000)

        for loop in started.threads():
            if not loop.join(grace_s()):
                _logger.warning("a thread is still in a call thread=%r", loop.thread.name)
        for thread in self.runtime.ending():
            if thread is not threading.current_thread():
                thread.join(grace_s())
        self._hub.stop(min(JOIN_S, max(0.1, grace_s())))
        try:
            self._backend.close()
        except Exception:
            _logger.exception("closing the backend failed")
        _logger.info("scheduler stopped instance=%s left_behind=%d", instance_id, left_behind)

    def _tell(self, instance_id: str) -> None:
        for live in self.runtime.runs():
            if live.instance_id == instance_id:
                live.control.stop()

    @staticmethod
    def _warn(live: LiveRun, timeout_s: float) -> None:
        live.warned = True
        _logger.warning(
            "a handler did not end in time, its lease is left to lapse job=%r scheduled_time=%s "
            "timeout_s=%s",
            live.key.job,
            moment(live.key.scheduled_ms).isoformat(),
            timeout_s,
        )

    def _is_own_thread(self) -> bool:
        current = threading.current_thread()
        started = self.started
        loops = [] if started is None else [loop.thread for loop in started.threads()]
        workers = [live.thread for live in self.runtime.runs()]
        return current in (*loops, *workers, self._hub.thread)

    def _stop_elsewhere(self, timeout_s: float) -> None:
        thread = threading.Thread(
            target=self.stop, args=(timeout_s,), name="leasecron-stop", daemon=True
        )
        try:
            thread.start()
        except RuntimeError as error:  # the interpreter is ending, and stops it by itself
            _logger.debug("no thread for stopping error=%r", str(error))

    def _at_exit(self) -> None:
        self.stop(EXIT_STOP_S)

    def after_fork(self) -> None:
        """Reset in a forked child: nothing of the parent's threads and connections is here."""
        self._lock = threading.RLock()
        self._stop_asked = False
        self.state = State.STOPPED
        self.started = None
        self.stopped = threading.Event()
        self.stopped.set()
        self.runtime.discard()
        self._hub.discard()
        self._backend.discard()
        self._cancel_exit()
        self._cancel_exit = _nothing


def _nothing() -> None:
    """Cancel what was never registered."""


def check_window(backend: ClaimBackend, window_ms: int) -> None:
    """Refuse a claim window that the mechanism cannot keep.

    Raises:
        ValueError: It is longer.
    """
    longest_ms = backend.max_window_ms
    if longest_ms is not None and window_ms > longest_ms:
        message = (
            f"claim_window_ms={window_ms} is longer than {type(backend).__name__} can keep: use at "
            f"most {longest_ms}"
        )
        raise ValueError(message)


def spawn(context: Context, live: LiveRun) -> None:
    """Start the worker thread of a run.

    Raises:
        RuntimeError: No thread can be started.
    """
    name = f"leasecron-run {live.key.job} {moment(live.key.scheduled_ms).isoformat()}"
    thread = threading.Thread(target=execute, args=(context, live), name=name, daemon=True)
    live.thread = thread
    thread.start()
