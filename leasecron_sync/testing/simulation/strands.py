"""Threads that work one at a time, and only when they are told to.

A step of an instance, or a handler, may come to a halt in the middle, in a call that takes its
time for example, while other instances work. So each is done by a thread. The driver of a history
resumes one and waits until it halts or ends: nothing happens by chance.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Generator
from contextlib import contextmanager
from typing import Callable, Optional

STUCK_S = 10.0
"""A thread that neither halts nor ends for so long waits for a lock that a halted one holds."""

LOOKS = 3
"""How often it has to be found so: a process that got no processor for a while gets it between."""


class Gone(BaseException):
    """The process whose code this was does not exist any more."""


class Stuck(Exception):
    """A lock is held over a call of the store, or over a handler."""


class _Carrier:
    """A thread that does one piece of work after the other."""

    def __init__(self) -> None:
        self.go, self.back = threading.Lock(), threading.Lock()
        self.go.acquire()
        self.back.acquire()
        self.work: Optional[Callable[[], None]] = None
        self.stuck = False
        self.thread = threading.Thread(target=self._run, name="simulated", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        while True:
            self.go.acquire()
            work = self.work
            if work is None:
                self.back.release()
                return
            work()
            if self.stuck:
                return
            self.back.release()


class Body:
    """Work under way that can halt.

    Args:
        crew: Where its thread comes from.
        work: What to do.
    """

    def __init__(self, crew: Crew, work: Callable[[], object]) -> None:
        self._crew = crew
        self._work = work
        self._carrier: Optional[_Carrier] = None
        self._error: Optional[BaseException] = None
        self._cut = False
        self.ended = False

    def resume(self) -> None:
        """Go on until it halts or ends.

        Raises:
            Stuck: It does neither.
        """
        carrier = self._carrier
        if carrier is None:
            carrier = self._carrier = self._crew.take()
            carrier.work = self._run
        carrier.go.release()
        try:
            back = any(carrier.back.acquire(timeout=STUCK_S) for _look in range(LOOKS))
        except BaseException:  # Ctrl-C
            carrier.stuck = True
            raise
        if not back:
            carrier.stuck = True
            message = "a step waits for a lock that is held over a call of the store or a handler"
            raise Stuck(message)
        if self.ended:
            self._crew.give(carrier)
            if self._error is not None:
                raise self._error

    def halt(self) -> None:
        """In the work itself: let others work until this is resumed.

        Raises:
            Gone: It is not to go on.
        """
        carrier = self._carrier
        assert carrier is not None
        if self._cut:  # its clean-up came to another halt
            raise Gone
        if carrier.stuck:  # nobody waits for it any more
            raise Gone
        carrier.back.release()
        carrier.go.acquire()
        if self._cut:
            raise Gone

    def cut(self) -> None:
        """End it where it is, as a killed process ends."""
        self._cut = True
        carrier = self._carrier
        if carrier is not None and not carrier.stuck and not self.ended:
            self.resume()

    def _run(self) -> None:
        try:
            self._work()
        except Gone:
            pass
        except BaseException as error:  # noqa: BLE001 - raised where it was resumed
            if not self._cut:
                self._error = error
        self.ended = True


class Crew:
    """The threads of one history."""

    def __init__(self) -> None:
        self._idle: list[_Carrier] = []
        self._all: list[_Carrier] = []

    def take(self) -> _Carrier:
        """Return a thread that has nothing to do."""
        if self._idle:
            return self._idle.pop()
        carrier = _Carrier()
        self._all.append(carrier)
        return carrier

    def give(self, carrier: _Carrier) -> None:
        """Take a thread back."""
        self._idle.append(carrier)

    def end(self) -> None:
        """End the threads that have nothing to do; those that are stuck are left behind."""
        for carrier in self._idle:
            carrier.work = None
            carrier.go.release()
        for carrier in self._idle:
            carrier.thread.join(STUCK_S)
        self._idle.clear()


@contextmanager
def on_one_processor() -> Generator[None, None, None]:
    """Keep this thread, and those that it starts, on one processor, where the platform can.

    They work in turns, and a turn is handed on ten times faster on one processor than between two.
    """
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    before = os.sched_getaffinity(0)
    if len(before) > 1:
        os.sched_setaffinity(0, {sorted(before)[os.getpid() % len(before)]})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
