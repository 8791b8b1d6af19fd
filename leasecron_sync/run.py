"""What a handler is given, and the control that the engine keeps over it."""

from __future__ import annotations

import threading
from datetime import datetime, timedelta, timezone
from typing import Callable, Optional

from leasecron_sync.clock import Clock
from leasecron_sync.errors import RunInterrupt, RunLost, RunStopping, RunTimeLimit
from leasecron_sync.model import LeaseRef, RunKey
from leasecron_sync.options import MAX_WAIT_MS

_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)


def moment(instant_ms: int) -> datetime:
    """Return an instant as an aware datetime in UTC."""
    return _EPOCH + timedelta(milliseconds=instant_ms)


class RunControl:
    """Whether a run should go on. Shared by its handler, the heartbeat and ``stop()``.

    Every field is written as a whole, so no lock is needed: ``lost`` and ``stopping`` only ever
    turn true, and a renewal that comes after the loss was told changes nothing any more.
    """

    def __init__(
        self,
        clock: Clock,
        *,
        trusted_until_ms: Optional[int],
        time_limit_ms: Optional[int],
        on_lost: Callable[[], None],
    ) -> None:
        self._clock = clock
        self._on_lost = on_lost
        self._trusted_until_ms = trusted_until_ms
        self._lost = False
        self._told = threading.Lock()  # taken once, by whoever finds the loss first
        self._limit_ms = time_limit_ms
        self._deadline_ms: Optional[int] = None
        self._wake = threading.Event()
        self.stopping = False

    def started(self) -> None:
        """Start the time limit."""
        if self._limit_ms is not None:
            self._deadline_ms = self._clock.steady_ms() + self._limit_ms

    def trust_until(self, until_ms: int) -> None:
        """Note an accepted renewal; too late once the loss was told."""
        self._trusted_until_ms = until_ms

    def refuse(self) -> None:
        """Note that the store refused this token."""
        self._lose()

    def stop(self) -> None:
        """Ask the handler to end."""
        self.stopping = True
        self._wake.set()

    def after_fork(self) -> None:
        """Leave the run to the parent, in a child that may still ask about it.

        Nobody renews the lease here, so it is lost by the clock, at the latest when the parent's
        would be without another renewal. What this child finds is nothing that happened to the run.
        """
        self._on_lost = _nothing
        self._told = threading.Lock()
        self._wake = threading.Event()  # another thread may have had its lock
        if self.stopping or self._lost:
            self._wake.set()

    @property
    def trusted_until_ms(self) -> int:
        """Steady time until which the lease is trusted; only of runs with a lease."""
        assert self._trusted_until_ms is not None
        return self._trusted_until_ms

    @property
    def trusted(self) -> bool:
        """Tell whether the lease is trusted now, without making a loss final."""
        until_ms = self._trusted_until_ms
        return not self._lost and (until_ms is None or self._clock.steady_ms() < until_ms)

    @property
    def lost(self) -> bool:
        """Tell whether the lease is lost; from then on it is."""
        if not self._lost and not self.trusted:
            self._lose()
        return self._lost

    @property
    def known_lost(self) -> bool:
        """Tell whether the loss is final already."""
        return self._lost

    @property
    def timed_out(self) -> bool:
        """Tell whether the run is past its time limit."""
        deadline_ms = self._deadline_ms
        return deadline_ms is not None and self._clock.steady_ms() >= deadline_ms

    def check(self) -> None:
        """Raise what should end the handler, if anything should."""
        error = self._interrupt()
        if error is not None:
            raise error

    def wait(self, seconds: float) -> None:
        """Sleep; raise like ``check`` as soon as the run should end."""
        until_ms = self._clock.steady_ms() + round(seconds * 1000)
        while True:
            self.check()
            now_ms = self._clock.steady_ms()
            if now_ms >= until_ms:
                return
            ends = (until_ms, self._trusted_until_ms, self._deadline_ms)
            # In pieces: the wait's clock stands still while the machine is suspended.
            left_ms = min(end_ms for end_ms in ends if end_ms is not None) - now_ms
            self._clock.wait(self._wake, max(1, min(left_ms, MAX_WAIT_MS)))

    def _interrupt(self) -> Optional[RunInterrupt]:
        if self.lost:
            return RunLost("the lease of this run is no longer trusted")
        if self.timed_out:
            return RunTimeLimit("the run is past its time_limit_ms")
        if self.stopping:
            return RunStopping("the scheduler is stopping")
        return None

    def _lose(self) -> None:
        self._lost = True
        self._wake.set()
        if self._told.acquire(blocking=False):
            self._on_lost()


def _nothing() -> None:
    """Tell nobody."""


class Run:
    """One run of a job, as its handler sees it.

    On a claim backend this run was won, and nothing more is known: if this process dies now,
    nobody takes it over.
    """

    def __init__(self, key: RunKey, control: RunControl) -> None:
        self._key = key
        self._control = control

    def __repr__(self) -> str:
        """Show job and scheduled time."""
        return f"<{type(self).__name__} {self.job!r} {self.scheduled_time.isoformat()}>"

    @property
    def job(self) -> str:
        """Name of the job."""
        return self._key.job

    @property
    def scheduled_time(self) -> datetime:
        """The scheduled time, aware, in UTC; without the jitter."""
        return moment(self._key.scheduled_ms)

    @property
    def stopping(self) -> bool:
        """True once the scheduler wants this run to end."""
        return self._control.stopping

    def check(self) -> None:
        """Return when the run may go on; call it between pieces of work.

        Raises:
            RunLost: The lease is no longer trusted (lease backends).
            RunTimeLimit: The run is past its ``time_limit_ms``.
            RunStopping: The scheduler is stopping; on a lease backend the run is handed over when
                the handler lets this pass.
        """
        self._control.check()

    def wait(self, seconds: float) -> None:
        """Sleep, and raise like ``check`` as soon as the run should end.

        Args:
            seconds: How long.
        """
        self._control.wait(seconds)


class LeaseRun(Run):
    """One run of a job on a lease backend.

    The lease is a belief, not a lock on the world: a handler that is paused for longer than the
    lease may wake up beside its successor. What it writes is safe where the resource refuses an
    older ``token``.
    """

    def __init__(self, key: RunKey, control: RunControl, lease: LeaseRef, attempt: int) -> None:
        super().__init__(key, control)
        self._lease = lease
        self._attempt = attempt

    @property
    def attempt(self) -> int:
        """Number of this execution of the run, from 1."""
        return self._attempt

    @property
    def token(self) -> int:
        """Fencing token: rises with every lease granted for any run of this job."""
        return self._lease.token

    @property
    def lost(self) -> bool:
        """True once the lease is no longer trusted; it never turns false again."""
        return self._control.lost
