"""Start, stop, fork and the end of the interpreter.

Every combination has one meaning:

- start twice, or beside a stop: ``SchedulerStateError`` at once; start after stop: a new start with
  a new instance id;
- stop before start, stop twice: nothing; two threads stop: the second waits for the first;
- stop during start (a signal handler): the start is finished, then stopped at once;
- stop from a handler, a listener or another thread of the scheduler: a thread of its own does it,
  since nobody can wait for the end of the thread that he is;
- stop from a signal handler while this thread is stopping: nothing, the stop goes on;
- fork: the child's scheduler is stopped, whatever state its parent's was in;
- the interpreter ends: a stop within a limit that all schedulers of the process share; whatever
  begins before that, and after the end of the main thread, goes back.
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from enum import Enum
from typing import Callable, NamedTuple, Optional

from leasecron_sync.backends.base import Backend, BackendSettings, ClaimBackend, LeaseBackend
from leasecron_sync.clock import Clock
from leasecron_sync.engine.context import TIMER_LANE, Context
from leasecron_sync.engine.greenlets import refuse_other_threads, tell_of_greenlets
from leasecron_sync.engine.host import (
    block_ending_signals,
    call_at_exit,
    defer_to_workers,
    end_forked_thread,
    exit_end_ms,
)
from leasecron_sync.engine.job import Job
from leasecron_sync.engine.loop import join_all
from leasecron_sync.engine.runtime import Runtime, warn_of_left
from leasecron_sync.engine.started import Started, spawn
from leasecron_sync.errors import SchedulerStateError, StoreError, StoreUnsupported
from leasecron_sync.events import EventHub
from leasecron_sync.options import EXIT_STOP_S, SchedulerOptions

_logger = logging.getLogger("leasecron_sync.engine.lifecycle")

JOIN_S = 0.5
"""How long to wait for who stops already, and for listeners at the end."""


class Grace(NamedTuple):
    """How much longer than its timeout a stop may take, where threads are in a call of the store.

    Attributes:
        join_ms: For the threads to end.
        closed_ms: For those whose call the closing of the backend has ended.
    """

    join_ms: int
    closed_ms: int


GRACE = Grace(round(JOIN_S * 1000), 200)
EXIT_GRACE = Grace(200, 100)

ALONE_SHARE = 0.8
"""Part of the time of a stop before handlers on a claim backend are told to end."""

EXIT_REST_MS = 600
"""Part of the time for an exit that is kept for its grace, and for closing the backend."""


class State(Enum):
    """State of a scheduler in this process."""

    STOPPED = "stopped"
    STARTING = "starting"
    RUNNING = "running"
    STOPPING = "stopping"


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
        hub.end_child = end_forked_thread
        self.state = State.STOPPED
        self.runtime = Runtime(clock)
        self.started: Optional[Started] = None
        self.stopped = threading.Event()
        self.stopped.set()

    def start(self, jobs: list[Job]) -> None:
        """Start, or leave it to uWSGI's workers.

        Raises:
            SchedulerStateError: It is started already, or no thread can be started, or threads are
                not what they were.
            StoreUnsupported: The store can't do what is asked of it.
            MissingDependency: The backend's client package is not installed.
            ValueError: The claim window is longer than the backend can keep.
        """
        self._refuse_unless_stopped()  # at once, not when a stop under way is through
        with self._lock:
            self._refuse_unless_stopped()
            refuse_other_threads()
            if defer_to_workers(lambda: self.start(jobs)):
                return
            self.state = State.STARTING
            self._stop_asked = False
            # Before the threads: the interpreter may end while this is under way.
            self._cancel_exit = call_at_exit(self._at_exit)
            signals_come = block_ending_signals()  # not to the threads that are started here
            try:
                self._start(jobs)
            except BaseException:
                self.state = State.STOPPED
                self._cancel_exit()
                self._backend.close()
                raise
            finally:
                signals_come()
            self.stopped.clear()
            self.state = State.RUNNING
            _running.add(self)
            stop_asked = self._stop_asked
        if stop_asked:
            self.stop(0.0)

    def _refuse_unless_stopped(self) -> None:
        if (state := self.state) is not State.STOPPED:
            message = f"this scheduler is {state.value} already: call stop() first, "
            message += "and start it in one place only"
            raise SchedulerStateError(message)

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
        try:
            self._hub.start()
            self._probe(context)
            started = Started(context, jobs)
        except BaseException:
            self._hub.stop(JOIN_S)
            raise
        try:
            started.start()
        except BaseException as error:  # also a signal's exception: nothing goes on behind its back
            context.stopping.set()
            context.given_up.set()
            started.end_beats()
            started.timer_thread.wake()
            self._hub.stop(JOIN_S)
            if not isinstance(error, RuntimeError):
                raise
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
        tell_of_greenlets()

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

    def stop(self, timeout_s: float, grace: Grace = GRACE) -> None:
        """Stop; see the module's table for who may call it when.

        Args:
            timeout_s: How long to wait for handlers.
            grace: How much longer it may take.
        """
        if self._is_own_thread():
            self._stop_elsewhere(timeout_s)
            return
        if not self._lock.acquire(timeout=timeout_s + grace.join_ms / 1000):
            return  # another thread is stopping it and takes longer than this caller will wait
        try:
            if self.state is State.STARTING:
                self._stop_asked = True
            started = self.started
            if self.state is not State.RUNNING or started is None:
                return
            if not started.stop_once.acquire(blocking=False):
                return  # a signal handler came between any two lines, and stopped as well
            self.state = State.STOPPING
            try:
                self._stop(started, timeout_s, grace)
            finally:
                self.started = None
                self.state = State.STOPPED
                self.stopped.set()
                self._cancel_exit()
                _running.discard(self)
        finally:
            self._lock.release()

    def _stop(self, started: Started, timeout_s: float, grace: Grace) -> None:
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
                # Nobody can take runs over, nor what a claim wins that is under way.
                started.timer_thread.join(timeout_s * ALONE_SHARE)
                alone_s = max(0.0, left_s() - timeout_s * (1 - ALONE_SHARE))
                self.runtime.wait_until_empty(instance_id, alone_s)
            self._tell(instance_id)
            started.timer_thread.join(left_s())
            # A run may have begun while the timer was still in its last step.
            self._tell(instance_id)
            self.runtime.wait_until_empty(instance_id, left_s())
        finally:
            # Also when a signal's exception comes through: nothing goes on behind its back.
            self._end(started, timeout_s, max(end_ms, self._clock.steady_ms()), grace)

    def _end(self, started: Started, timeout_s: float, end_ms: int, grace: Grace) -> None:
        """Give up what still runs, and end the threads."""
        instance_id = started.context.instance_id
        started.context.given_up.set()
        left = [live for live in self.runtime.runs() if live.instance_id == instance_id]
        for live in left:
            live.given_up = True
            live.control.stop()
            live.give_up.set()
            if not live.done:
                warn_of_left(live, timeout_s)
        started.end_beats()
        # One grace for all of them: what hangs, hangs in a call that ends by its own time-out.
        end_ms += grace.join_ms
        loops = [loop.thread for loop in started.threads()]
        settling = [live.thread for live in left if live.done and live.thread is not None]
        threads = [*loops, *settling, *self.runtime.ending()]
        join_all(threads, self._clock, end_ms)
        left_ms = max(100, end_ms - self._clock.steady_ms())
        self._hub.stop(min(grace.join_ms, left_ms) / 1000)
        try:
            self._backend.close()
        except Exception:
            _logger.exception("closing the backend failed")
        for thread in join_all(threads, self._clock, self._clock.steady_ms() + grace.closed_ms):
            _logger.warning("a thread is still in a call thread=%r", thread.name)
        _logger.info("scheduler stopped instance=%s left_behind=%d", instance_id, len(left))

    def _tell(self, instance_id: str) -> None:
        for live in self.runtime.runs():
            if live.instance_id == instance_id:
                live.control.stop()

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
        block_ending_signals()  # for good: the process is ending already
        end_ms = exit_end_ms(self._clock.steady_ms(), round(EXIT_STOP_S * 1000))
        for other in list(_running):
            # The time is the same for all of them, so all of them begin now.
            other.begin_to_stop()

        def left_s() -> float:
            return max(0, end_ms - EXIT_REST_MS - self._clock.steady_ms()) / 1000

        if self._lock.acquire(timeout=left_s()):  # else another thread starts or stops it
            try:
                self.stop(left_s(), EXIT_GRACE)
            finally:
                self._lock.release()

    def begin_to_stop(self) -> None:
        """Claim no more, and tell the runs to end where others can take them over."""
        started = self.started
        if started is not None:
            started.context.stopping.set()
            started.timer_thread.wake()
            if isinstance(self._backend, LeaseBackend):
                self._tell(started.context.instance_id)

    def after_fork(self) -> None:
        """Reset in a forked child: nothing of the parent's threads and connections is here."""
        self._lock = threading.RLock()
        self._stop_asked = False
        self.state = State.STOPPED
        self.started = None
        self.stopped = threading.Event()
        self.stopped.set()
        _running.discard(self)
        self._cancel_exit()
        self._cancel_exit = _nothing
        self.runtime.discard()
        self._hub.discard()
        self._backend.discard()


_running: weakref.WeakSet[Lifecycle] = weakref.WeakSet()


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
