"""What one start of a scheduler gives to its loops and workers."""

from __future__ import annotations

import threading
from typing import Any, Callable, Optional

from leasecron_sync.backends.base import Backend
from leasecron_sync.clock import Clock
from leasecron_sync.engine.caller import Caller
from leasecron_sync.engine.runtime import LiveRun, Runtime
from leasecron_sync.errors import StoreError
from leasecron_sync.events import Event, EventHub, EventName
from leasecron_sync.model import RunKey
from leasecron_sync.options import SchedulerOptions
from leasecron_sync.run import moment

TIMER_LANE = "timer"
HEARTBEAT_LANE = "heartbeat"


class Context:
    """Everything that lasts from one ``start()`` to its ``stop()``.

    A thread that outlives its stop goes on with the context it was given, and never meets that of
    a later start.

    Args:
        instance_id: Random id of this start.
        options: Options of the scheduler.
        backend: The backend, opened.
        clock: Where the time comes from.
        hub: Where events go.
        runtime: Live runs.
        spawn: Starts the worker of a run; RuntimeError when no thread can be started.
    """

    def __init__(  # noqa: PLR0913 - this is the list of what a start consists of
        self,
        instance_id: str,
        options: SchedulerOptions,
        backend: Backend,
        *,
        clock: Clock,
        hub: EventHub,
        runtime: Runtime,
        spawn: Callable[[Context, LiveRun], None],
    ) -> None:
        self.instance_id = instance_id
        self.options = options
        self.backend = backend
        self.clock = clock
        self.runtime = runtime
        self.spawn = spawn
        self.stopping = threading.Event()
        self.given_up = threading.Event()
        """Set when a stop waits for no handler any more."""
        self.claimed = threading.Event()
        """Set while the timer has no more to claim at once."""
        self.claimed.set()
        self.caller = Caller(
            clock,
            rounds=frozenset({TIMER_LANE}),
            on_down=self._store_down,
            on_back=self._store_back,
            on_skew=self._skew,
        )
        self._hub = hub
        # Set by the loops that listen to them.
        self.wake_timer: Callable[[], None] = lambda: None
        self.wake_heartbeat: Callable[[], None] = lambda: None
        self.note_unsettled: Callable[[int], None] = lambda _wait_ms: None
        self.note_handed_over: Callable[[RunKey], None] = lambda _key: None
        self.note_forgotten: Callable[[str], None] = lambda _name: None

    def emit(self, name: EventName, key: Optional[RunKey] = None, **fields: Any) -> None:  # noqa: ANN401 - fields of Event
        """Report an event, of a run where a key is given."""
        if not self._hub.wants(name):
            return
        if key is not None:
            fields["job"] = key.job
            fields["scheduled_time"] = moment(key.scheduled_ms)
        self._hub.emit(Event(name, self.instance_id, **fields))

    def emit_of(self, name: EventName, live: LiveRun, **fields: Any) -> None:  # noqa: ANN401 - fields of Event
        """Report an event of a live run."""
        if live.lease is not None:
            fields["attempt"] = live.lease.attempt
            fields["token"] = live.lease.ref.token
        self.emit(name, live.key, **fields)

    def _store_down(self, error: StoreError) -> None:
        self.emit("store_down", reason=f"{type(error).__name__}: {error}", error=error)

    def _store_back(self, outage_ms: int) -> None:
        self.emit("store_back", delay_ms=outage_ms)
        self.wake_timer()

    def _skew(self, skew_ms: int) -> None:
        self.emit("skew_found", delay_ms=skew_ms)
