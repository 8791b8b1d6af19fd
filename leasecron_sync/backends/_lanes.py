"""Connections to a server, one for each role, and a deadline on every call."""

from __future__ import annotations

import threading
from collections.abc import Generator
from contextlib import contextmanager, suppress
from typing import Callable, Generic, Optional, TypeVar

from leasecron_sync.clock import SystemClock
from leasecron_sync.errors import StoreUnavailable

C = TypeVar("C")
T = TypeVar("T")

CLOSE_MS = 100
"""How long closing waits for a call that is under way."""

_clock = SystemClock()

# In a forked child the parent's connections stay referenced, and unused, for ever: closing one
# would end the parent's session.
_abandoned: list[object] = []


class Deadline:
    """The end of a call's time.

    Args:
        timeout_ms: Time from now.
    """

    def __init__(self, timeout_ms: int) -> None:
        self._ends_ms = _clock.steady_ms() + timeout_ms

    def left_ms(self) -> int:
        """Return the time that is left; 0 when it is over."""
        return max(0, self._ends_ms - _clock.steady_ms())


class Lane(Generic[C]):
    """One connection, made when it is needed, and the lock around it.

    Args:
        close: Closes a connection; bounded, and never raises.
    """

    def __init__(self, close: Callable[[C], None]) -> None:
        self._lock = threading.Lock()
        self._close = close
        self.connection: Optional[C] = None

    @contextmanager
    def held(self, deadline: Deadline) -> Generator[None, None, None]:
        """Keep the connection to oneself.

        Raises:
            StoreUnavailable: Another call had it until the deadline.
        """
        if not self._lock.acquire(timeout=deadline.left_ms() / 1000):
            message = "another call of this instance did not end in time"
            raise StoreUnavailable(message)
        try:
            yield
        finally:
            self._lock.release()

    def drop(self) -> None:
        """Close the connection; called by who holds the lane."""
        connection, self.connection = self.connection, None
        if connection is not None:
            self._close(connection)

    def abandon(self) -> None:
        """Forget the connection without closing it, in a child that inherited it."""
        if self.connection is not None:
            _abandoned.append(self.connection)
        self.connection = None


class Lanes(Generic[C]):
    """The lanes of an instance: a renewal waits for no other call.

    Args:
        close: See ``Lane``.

    Attributes:
        timer: For the timer's commands.
        renew: For the heartbeat's.
        settle: For what comes from any thread.
    """

    def __init__(self, close: Callable[[C], None]) -> None:
        self._close = close
        self._make()

    def _make(self) -> None:
        self.timer = Lane(self._close)
        self.renew = Lane(self._close)
        self.settle = Lane(self._close)

    def all(self) -> tuple[Lane[C], Lane[C], Lane[C]]:
        """Return every lane."""
        return self.timer, self.renew, self.settle

    def settled(self, settle: Callable[[Lane[C]], T]) -> T:
        """Settle by the lane for that; by the timer's where there is no connection to be had.

        A process that ends may be able to make none: uWSGI ends Python when the library that
        encrypts is gone already, and PostgreSQL's passwords and TLS need that.
        """
        try:
            return settle(self.settle)
        except StoreUnavailable:
            if self.settle.connection is not None or self.timer.connection is None:
                raise
            return settle(self.timer)

    def close(self) -> None:
        """Close the connections."""
        for lane in self.all():
            close_lane(lane)

    def abandon(self) -> None:
        """Forget connections and locks without any input or output, in a forked child."""
        for lane in self.all():
            lane.abandon()
        self._make()


def close_lane(lane: Lane[C]) -> None:
    """Close its connection; a call that is still under way has to drop it itself."""
    with suppress(StoreUnavailable), lane.held(Deadline(CLOSE_MS)):
        lane.drop()
