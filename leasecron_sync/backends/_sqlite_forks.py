"""Whose turn it is with a connection or a file: calls, and forks that want everything closed."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import wraps
from typing import Any, Callable, Optional, TypeVar, cast

from leasecron_sync.clock import SystemClock

F = TypeVar("F", bound=Callable[..., Any])

_clock = SystemClock()

FIRST_MS = 100
"""How long a fork lets calls go first that wait for a connection."""


class Lock:
    """A lock that knows who has it, and who waits for it.

    A thread that has it does not get it once more: what a signal handler does in the middle of a
    call of its own thread cannot wait for the end of that call. Where the handler comes between
    getting it and the call, or between the call and giving it back, it does get it: that harms
    neither.

    Attributes:
        holder: Thread that has it.
        waiting: Threads that want it.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self.holder: Optional[int] = None
        self.waiting: set[int] = set()

    def acquire(self, timeout: float = -1) -> bool:
        """Take it, as a ``threading.Lock``; tell whether this thread has it."""
        thread = threading.get_ident()
        if self.holder == thread:
            return False
        self.waiting.add(thread)
        try:
            mine = self._lock.acquire(timeout=timeout)
        finally:
            self.waiting.discard(thread)
        if mine:
            self.holder = thread
        return mine

    def release(self) -> None:
        """Give it back."""
        self.holder = None
        self._lock.release()

    def __enter__(self) -> None:
        """Take it."""
        self.acquire()

    def __exit__(self, *_: object) -> None:
        """Give it back."""
        self.release()


class Fork:
    """A fork that is to come, or under way.

    Attributes:
        thread: The thread that forks.
        locks: The locks that are held for it.
        over: Set when it is over.
    """

    def __init__(self) -> None:
        self.thread = threading.get_ident()
        self.locks: list[Lock] = []
        self.over = threading.Event()


class GaveWay(Exception):
    """A call let a fork go first, before it had any effect; it begins anew."""


# A thread has several where a signal handler forks in the middle of what is done here for a fork.
# So every change is one step, and what such a handler adds it has removed when it returns.
_forks: list[Fork] = []


def begin_fork() -> Fork:
    """Note a fork of this thread."""
    fork = Fork()
    _forks.append(fork)
    return fork


def end_fork() -> None:
    """Give back what is held for the newest fork of this thread."""
    thread = threading.get_ident()
    mine = [fork for fork in list(_forks) if fork.thread == thread]
    if not mine:
        return  # it had begun before anything was to be done for forks
    fork = mine[-1]
    for lock in reversed(fork.locks):
        lock.release()
    _forks.remove(fork)
    fork.over.set()


def forget_forks() -> None:
    """Forget the parent's forks, in a child."""
    _forks.clear()


def fork_waits() -> bool:
    """Tell whether a fork waits for calls to end."""
    return bool(_forks)


def let_forks_pass(deadline_ms: int) -> None:
    """Wait until the forks that wait now are over, no longer than to a steady time."""
    waiting = tuple(_forks)
    for fork in waiting:
        _clock.wait(fork.over, max(0, deadline_ms - _clock.steady_ms()))


def giving_way(step: F) -> F:
    """Have a step of the store, whose third argument is its deadline, done anew after forks."""

    @wraps(step)
    def until_done(store: Any, lane: Any, work: Any, deadline_ms: int, **how: Any) -> Any:  # noqa: ANN401
        while True:
            try:
                return step(store, lane, work, deadline_ms, **how)
            except GaveWay:
                let_forks_pass(deadline_ms)

    return cast("F", until_done)


def let_calls_go_first(locks: Sequence[Lock]) -> None:
    """Leave a moment to calls that wait, in a fork: somebody may be forking all the time."""
    thread = threading.get_ident()
    # Whoever waits for what this thread has already waits for the end of this.
    others = [lock for lock in locks if lock.holder != thread]
    end_ms = _clock.steady_ms() + FIRST_MS
    while any(lock.waiting - {thread} for lock in others) and _clock.steady_ms() < end_ms:
        _clock.wait(threading.Event(), 1)
