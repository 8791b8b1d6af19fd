"""The loops and workers of one start of a scheduler."""

from __future__ import annotations

import logging
import os
import threading
from typing import Optional

from leasecron_sync.backends.base import LeaseBackend
from leasecron_sync.engine.context import Context
from leasecron_sync.engine.greenlets import have_changed
from leasecron_sync.engine.heartbeat import HeartbeatLoop
from leasecron_sync.engine.host import end_forked_thread, is_ending
from leasecron_sync.engine.job import Job
from leasecron_sync.engine.loop import LoopThread
from leasecron_sync.engine.runtime import LiveRun
from leasecron_sync.engine.timer import TimerLoop
from leasecron_sync.engine.worker import execute
from leasecron_sync.run import moment

_logger = logging.getLogger("leasecron_sync.engine.started")


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
        self.timer_thread = LoopThread("leasecron-timer", self._timer_step, clock)
        context.wake_timer = self.timer_thread.wake
        context.spawn = self._spawn
        self._no_more_threads = False
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

    def _timer_step(self) -> Optional[int]:
        stopping, ending = self.context.stopping, is_ending()
        if self._no_more_threads and not ending and not stopping.is_set():
            _logger.error(
                "the main thread has ended and Python starts no thread any more, nothing more is "
                "claimed here instance=%s",
                self.context.instance_id,
            )
        replaced = have_changed()
        if replaced and not stopping.is_set():
            _logger.error(
                "gevent has replaced Python's threads after the start, nothing more is claimed "
                "here: call gevent.monkey.patch_all() first of all instance=%s",
                self.context.instance_id,
            )
        if self._no_more_threads or ending or replaced:
            # What was granted now would find no thread to run in, or no time to run.
            stopping.set()
        return self.timer.step()

    def _spawn(self, context: Context, live: LiveRun) -> None:
        try:
            spawn(context, live)
        except RuntimeError as error:
            if is_ending():
                context.stopping.set()
            elif "interpreter shutdown" in str(error):
                # 3.12.0 and 3.12.1 say so from the end of the main thread on, whoever goes on.
                self._no_more_threads = True
            raise

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


def spawn(context: Context, live: LiveRun) -> None:
    """Start the worker thread of a run.

    Raises:
        RuntimeError: No thread can be started.
    """
    name = f"leasecron-run {live.key.job} {moment(live.key.scheduled_ms).isoformat()}"
    thread = threading.Thread(target=_work, args=(context, live), name=name, daemon=True)
    live.thread = thread
    thread.start()


def _work(context: Context, live: LiveRun) -> None:
    pid = os.getpid()
    try:
        execute(context, live)
    finally:
        if os.getpid() != pid:  # the handler has forked, and this is the child
            end_forked_thread()
