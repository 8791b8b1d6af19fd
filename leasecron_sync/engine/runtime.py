"""Live runs and slots: the only mutable state that the threads share."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Optional

from leasecron_sync.clock import Clock
from leasecron_sync.engine.job import Job
from leasecron_sync.model import Lease, RunKey
from leasecron_sync.run import Run, RunControl, moment

_logger = logging.getLogger("leasecron_sync.engine.runtime")

LEFT = "a handler did not end in time, its lease is left to lapse"
LOST = "a handler did not end in time, and nobody takes its run over"


@dataclass(eq=False)
class LiveRun:
    """A run whose handler is about to start, runs, or is being settled.

    Attributes:
        job: Its job.
        key: The run.
        run: What the handler is given.
        control: Whether it should go on.
        lease: Its lease; None on claim backends.
        began_ms: Steady time at which it was granted.
        instance_id: Start of the scheduler that it belongs to.
        caught_up: True when it was made up for.
        thread: Its worker thread, once there is one.
        done: True once the handler has returned.
        refused: True once a renewal was refused after the handler had returned.
        given_up: True once ``stop()`` went on without it.
        warned: True once it was warned about.
        give_up: Set when settling is to be given up.
    """

    job: Job
    key: RunKey
    run: Run
    control: RunControl
    lease: Optional[Lease]
    began_ms: int
    instance_id: str
    caught_up: bool = False
    thread: Optional[threading.Thread] = None
    done: bool = False
    refused: bool = False
    given_up: bool = False
    warned: bool = False
    give_up: threading.Event = field(default_factory=threading.Event)

    @property
    def stale(self) -> bool:
        """True when the handler still lives although its lease is not kept any more."""
        control = self.control
        return not self.done and (self.given_up or control.timed_out or not control.trusted)


class Runtime:
    """Counts slots and knows which handlers live in this process.

    It outlives ``stop()``: a handler that ignored it still has its slot after the next start.

    Args:
        clock: Where the time comes from.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._changed = threading.Condition(threading.RLock())
        self._live: list[LiveRun] = []
        self._by_job: dict[str, list[LiveRun]] = {}
        self._ending: list[threading.Thread] = []

    def begin(self, live: LiveRun) -> None:
        """Take a slot."""
        with self._changed:
            self._live.append(live)
            self._by_job.setdefault(live.key.job, []).append(live)

    def end(self, live: LiveRun) -> None:
        """Give the slot back."""
        with self._changed:
            if live in self._live:
                self._live.remove(live)
                self._by_job[live.key.job].remove(live)
                if not self._by_job[live.key.job]:
                    del self._by_job[live.key.job]
            self._ending = [thread for thread in self._ending if thread.is_alive()]
            if live.thread is not None and live.thread.is_alive():
                self._ending.append(live.thread)
            self._changed.notify_all()

    def runs(self) -> list[LiveRun]:
        """Return the live runs; without the lock, which a signal handler's stop could wait for."""
        return list(self._live)

    def ending(self) -> list[threading.Thread]:
        """Return the threads of runs that have ended, which may be about to end as well."""
        with self._changed:
            return list(self._ending)

    def taken(self) -> int:
        """Return how many slots are taken."""
        return len(self._live)

    def renewable(self) -> list[LiveRun]:
        """Return the runs whose leases are to be renewed."""
        return [
            live
            for live in self.runs()
            if live.lease is not None
            and not live.refused
            and not live.given_up
            and not live.control.known_lost
            and not live.control.timed_out
        ]

    def by_job(self) -> dict[str, list[LiveRun]]:
        """Return the live runs by the names of their jobs."""
        with self._changed:
            return {name: list(handlers) for name, handlers in self._by_job.items()}

    def bars_starting(self, job: Job, key: RunKey) -> bool:
        """Tell whether a run that was granted must not be started here."""
        with self._changed:
            handlers = list(self._by_job.get(job.name, ()))
        return any(
            live.key == key or (not job.options.overlap and not live.done) for live in handlers
        )

    def wait_until_empty(self, instance_id: str, timeout_s: float) -> list[LiveRun]:
        """Wait until the runs of a start have ended; return those that have not in time."""
        until_ms = self._clock.steady_ms() + round(timeout_s * 1000)
        with self._changed:
            while True:
                left = [live for live in self._live if live.instance_id == instance_id]
                wait_ms = until_ms - self._clock.steady_ms()
                if not left or wait_ms <= 0:
                    return left
                self._changed.wait(wait_ms / 1000)

    def discard(self) -> None:
        """Forget everything, in a forked child: no other thread came along."""
        self._changed = threading.Condition(threading.RLock())
        for live in self._live:
            live.control.after_fork()
        self._live = []
        self._by_job = {}
        self._ending = []


def bars_asking(
    handlers: Sequence[LiveRun], job: Job, key: RunKey, *, deferring: bool, caught_up: bool
) -> bool:
    """Tell whether a run must not, or need not, be asked for here.

    It must not while its own handler, or a handler of its no-overlap job without a lease that
    still holds, lives in this process. It need not where the answer is known: another run of
    its job is in progress here, and it would be deferred; or one was made up for here already,
    and they go one at a time.

    Args:
        handlers: The live runs of its job.
        job: Its job.
        key: The run.
        deferring: True when it would be deferred while another run is in progress.
        caught_up: True when it is made up for.
    """
    if any(live.key == key for live in handlers):
        return True
    if job.options.overlap:
        return caught_up and any(live.caught_up for live in handlers)
    # Until the end is settled, too: the answer would be to ask again much later.
    return any(live.stale or deferring for live in handlers)


def warn_of_left(live: LiveRun, timeout_s: float) -> None:
    """Warn of a handler that a stop goes on without."""
    live.warned = True
    _logger.warning(
        "%s job=%r scheduled_time=%s timeout_s=%s",
        LOST if live.lease is None else LEFT,
        live.key.job,
        moment(live.key.scheduled_ms).isoformat(),
        timeout_s,
    )
