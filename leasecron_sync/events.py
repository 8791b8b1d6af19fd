"""Events: their records, the listeners, and the log lines."""

from __future__ import annotations

import logging
import os
import queue
import threading
from dataclasses import dataclass
from datetime import datetime
from typing import Callable, Final, Literal, Optional, get_args

from leasecron_sync.errors import StoreRejected
from leasecron_sync.options import EVENT_QUEUE

EventName = Literal[
    "run_claimed",
    "run_started",
    "run_finished",
    "run_failed",
    "run_retried",
    "run_lost",
    "run_taken_over",
    "run_handed_over",
    "run_skipped",
    "run_missed",
    "store_down",
    "store_back",
    "skew_found",
]
"""What can be listened to."""

EVENT_NAMES: Final[tuple[str, ...]] = get_args(EventName)


@dataclass(frozen=True)
class Event:
    """Something that this instance decided or noticed.

    Attributes:
        name: One of ``EventName``.
        instance_id: Instance that reports it.
        job: Job of the run; None for events of the store.
        scheduled_time: Scheduled time of the run, aware, in UTC; of several missed ones the newest.
        attempt: Attempt, on lease backends.
        token: Fencing token, on lease backends.
        reason: Why it failed, was skipped, missed, lost or handed over.
        count: How many runs a ``run_missed`` stands for.
        first_time: Scheduled time of the oldest of several missed runs.
        at_least: True when ``count`` is where counting stopped.
        delay_ms: Until the retry (``run_retried``), the skew (``skew_found``), or how long the
            outage was (``store_back``).
        error: What the handler raised (``run_failed``, ``run_retried``), or the store's error
            (``store_down``).
    """

    name: EventName
    instance_id: str
    job: Optional[str] = None
    scheduled_time: Optional[datetime] = None
    attempt: Optional[int] = None
    token: Optional[int] = None
    reason: str = ""
    count: int = 1
    first_time: Optional[datetime] = None
    at_least: bool = False
    delay_ms: Optional[int] = None
    error: Optional[BaseException] = None

    @property
    def sentence(self) -> str:
        """What the log says of it."""
        if self.name == "store_down" and isinstance(self.error, StoreRejected):
            return "store refuses what is asked, nothing new is started"
        return _LINES[self.name][1]


Listener = Callable[[Event], object]

_logger = logging.getLogger("leasecron_sync.events")

_LINES: Final[dict[str, tuple[int, str]]] = {
    "run_claimed": (logging.DEBUG, "run claimed"),
    "run_started": (logging.DEBUG, "run started"),
    "run_finished": (logging.INFO, "run finished"),
    "run_failed": (logging.ERROR, "run failed"),
    "run_retried": (logging.WARNING, "attempt failed, the run will be retried"),
    "run_lost": (logging.ERROR, "lease lost, another instance may take the run over"),
    "run_taken_over": (logging.WARNING, "run taken over from an instance that was lost"),
    "run_handed_over": (logging.INFO, "run handed over"),
    "run_skipped": (logging.INFO, "run skipped"),
    "run_missed": (logging.WARNING, "run missed"),
    "store_down": (logging.ERROR, "store does not answer, nothing new is started"),
    "store_back": (logging.WARNING, "store answers again"),
    "skew_found": (logging.WARNING, "this host's clock differs from the store's"),
}


class EventHub:
    """Logs events and hands them to listeners on a thread of their own.

    A listener that raises is logged and called again for the next event. The queue in front of the
    thread is bounded: when listeners are too slow, events are dropped for them, counted, and the
    count is logged.
    """

    def __init__(self) -> None:
        # Reentrant, since a signal handler may stop what its own thread is using.
        self._lock = threading.RLock()
        self._listeners: dict[str, tuple[Listener, ...]] = {}
        self._queue: Optional[queue.Queue[Optional[Event]]] = None
        self._thread: Optional[threading.Thread] = None
        self._running = False
        self._dropped = 0
        self.inline = False  # tests without threads: listeners are called by whoever emits
        # Called at the end of a child that a listener has forked.
        self.end_child: Callable[[], None] = _nothing

    def on(self, name: EventName, listener: Listener) -> None:
        """Call a listener for every event of this name, from now on.

        Args:
            name: One of ``EventName``.
            listener: Called with the ``Event``, on the thread ``leasecron-events``.

        Raises:
            ValueError: There is no such event.
            TypeError: The listener cannot be called.
        """
        if name not in EVENT_NAMES:
            message = f"unknown event {name!r}; known: {', '.join(EVENT_NAMES)}"
            raise ValueError(message)
        if not callable(listener):
            message = f"a listener must be callable with the event, not {listener!r}"
            raise TypeError(message)
        with self._lock:
            self._listeners[name] = (*self._listeners.get(name, ()), listener)
            if self._running:
                self._start_thread()

    def start(self) -> None:
        """Deliver events from now on."""
        with self._lock:
            self._running = True
            if self._listeners:
                self._start_thread()

    def stop(self, timeout_s: float) -> None:
        """Deliver what is queued, within a limit, and end the thread."""
        with self._lock:
            self._running = False
            thread, self._thread = self._thread, None
            waiting, self._queue = self._queue, None
        if thread is None or waiting is None:
            return
        try:
            waiting.put(None, timeout=timeout_s)
        except queue.Full:
            _logger.warning("listeners did not keep up, events left events=%d", waiting.qsize())
            _empty(waiting)
            waiting.put(None)
        if thread is not threading.current_thread():
            thread.join(timeout_s)
            if thread.is_alive():
                _logger.warning("a listener did not return in time thread=%r", thread.name)

    def discard(self) -> None:
        """Forget thread and lock, in a forked child."""
        self._lock = threading.RLock()
        self._queue = self._thread = None
        self._running = False

    @property
    def thread(self) -> Optional[threading.Thread]:
        """The thread that calls listeners, if there is one."""
        return self._thread

    def wants(self, name: EventName) -> bool:
        """Tell whether anybody would see an event of this name; most runs go by unseen."""
        level, _ = _LINES[name]
        return self.inline or name in self._listeners or _logger.isEnabledFor(level)

    def emit(self, event: Event) -> None:
        """Log an event and queue it for its listeners; never raises, never waits."""
        level, _ = _LINES[event.name]
        if _logger.isEnabledFor(level):
            trace = event.error if event.job is not None else None
            _logger.log(level, "%s %s", event.sentence, _fields(event), exc_info=trace)
        if self.inline:
            self._call_listeners(event)
            return
        with self._lock:
            waiting = self._queue if event.name in self._listeners else None
        if waiting is None:
            return
        try:
            waiting.put_nowait(event)
        except queue.Full:
            self._dropped += 1
            if self._dropped == 1 or self._dropped % EVENT_QUEUE == 0:
                _logger.warning(
                    "listeners do not keep up, events dropped dropped=%d", self._dropped
                )

    def _start_thread(self) -> None:
        if self._thread is None:
            waiting: queue.Queue[Optional[Event]] = queue.Queue(EVENT_QUEUE)
            thread = threading.Thread(
                target=self._deliver, args=(waiting,), name="leasecron-events", daemon=True
            )
            try:
                thread.start()
            except RuntimeError as error:  # the interpreter is ending
                _logger.debug("no thread for listeners error=%r", str(error))
                return
            except BaseException:  # a signal's exception: the thread may have begun all the same
                waiting.put(None)
                raise
            self._queue, self._thread = waiting, thread

    def _deliver(self, waiting: queue.Queue[Optional[Event]]) -> None:
        pid = os.getpid()
        try:
            while os.getpid() == pid:  # else a listener has forked, and this is the child
                event = waiting.get()
                if event is None:
                    return
                self._call_listeners(event)
        finally:
            if os.getpid() != pid:
                self.end_child()

    def _call_listeners(self, event: Event) -> None:
        pid = os.getpid()
        for listener in self._listeners.get(event.name, ()):
            try:
                listener(event)
            except BaseException:  # a listener's SystemExit must not end this thread either
                if os.getpid() != pid:
                    raise
                _logger.exception("a listener raised event=%s", event.name)
            if os.getpid() != pid:
                return


def _nothing() -> None:
    """Do nothing at the end of a child."""


def _empty(waiting: queue.Queue[Optional[Event]]) -> None:
    try:
        while True:
            waiting.get_nowait()
    except queue.Empty:
        pass


def _fields(event: Event) -> str:
    values: list[tuple[str, object]] = []
    if event.job is not None:
        values.append(("job", repr(event.job)))
    if event.first_time is not None:
        values.append(("from", event.first_time.isoformat()))
    if event.scheduled_time is not None:
        values.append(("scheduled_time", event.scheduled_time.isoformat()))
    if event.attempt is not None:
        values.append(("attempt", event.attempt))
    if event.token is not None:
        values.append(("token", event.token))
    if event.reason:
        values.append(("reason", repr(event.reason)))
    if event.count != 1:
        values.append(("count", f"{'at least ' if event.at_least else ''}{event.count}"))
    if event.delay_ms is not None:
        values.append(("ms", event.delay_ms))
    values.append(("instance", event.instance_id))
    return " ".join(f"{name}={value}" for name, value in values)
