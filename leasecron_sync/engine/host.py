"""What the process around us is: uWSGI's master, a forked child."""

from __future__ import annotations

import atexit
import os
import sys
import threading
import weakref
from typing import Any, Callable, Protocol

from leasecron_sync.errors import SchedulerStateError


class Forkable(Protocol):
    """Something that a forked child must reset."""

    def after_fork(self) -> None:
        """Reset, without input or output."""
        ...


EXIT_PRIORITY = 100
"""Before multiprocessing's own clean-up, whose priorities are lower."""

_forkables: weakref.WeakSet[Forkable] = weakref.WeakSet()
_hooked = threading.Event()


def reset_after_fork(forkable: Forkable) -> None:
    """Have an object reset in every child that this process forks from now on."""
    _forkables.add(forkable)
    if not _hooked.is_set():
        _hooked.set()
        os.register_at_fork(after_in_child=_in_child)


def _in_child() -> None:
    for forkable in list(_forkables):
        forkable.after_fork()


def call_at_exit(function: Callable[[], None]) -> Callable[[], None]:
    """Call a function when this process ends; return what cancels that.

    A child of multiprocessing ends without the functions of ``atexit``, and has its own way.
    """
    util: Any = sys.modules.get("multiprocessing.util")
    process: Any = sys.modules.get("multiprocessing.process")
    if util is None or process is None or process.parent_process() is None:
        atexit.register(function)
        return lambda: atexit.unregister(function)
    finalizer = util.Finalize(None, function, exitpriority=EXIT_PRIORITY)
    cancel: Callable[[], None] = finalizer.cancel
    return cancel


def defer_to_workers(start: Callable[[], None]) -> bool:
    """Under uWSGI, see to it that a start takes effect where threads can run.

    In a master that forks its workers later, the start is registered for every worker.

    Args:
        start: Starts the scheduler.

    Returns:
        True when the start was put off to the workers.

    Raises:
        SchedulerStateError: uWSGI runs without threads, so nothing would ever run.
    """
    uwsgi: Any = sys.modules.get("uwsgi")
    if uwsgi is None or not hasattr(uwsgi, "opt"):
        return False
    options = uwsgi.opt
    if not any(_is_set(options, name) for name in ("enable-threads", "threads")):
        message = "uWSGI runs without threads, so no job would ever run: set enable-threads = true"
        raise SchedulerStateError(message)
    if uwsgi.worker_id() != 0:
        return False
    before = getattr(uwsgi, "post_fork_hook", None)

    def after_fork() -> None:
        if before is not None:
            before()
        start()

    uwsgi.post_fork_hook = after_fork
    return True


def _is_set(options: dict[Any, Any], name: str) -> bool:
    value = options.get(name, options.get(name.encode()))
    return value not in (None, False, 0, b"0", b"false", "0", "false")
