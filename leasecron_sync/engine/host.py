"""What the process around us is: uWSGI's master, a forked child, an interpreter that ends."""

from __future__ import annotations

import atexit
import importlib
import logging
import os
import signal
import sys
import threading
import weakref
from contextlib import suppress
from typing import Any, Callable, Final, Protocol

from leasecron_sync.engine.caller import import_late_ones
from leasecron_sync.errors import SchedulerStateError

_logger = logging.getLogger("leasecron_sync.engine.host")


class Forkable(Protocol):
    """Something that a forked child must reset."""

    def after_fork(self) -> None:
        """Reset, without input or output."""
        ...


EXIT_PRIORITY = 100
"""Before multiprocessing's own clean-up, whose priorities are lower."""

_forkables: weakref.WeakSet[Forkable] = weakref.WeakSet()
_hooked = threading.Event()
_at_end: list[Callable[[], None]] = []
_exit_ends: list[int] = []  # steady time; empty until the exit begins


def reset_after_fork(forkable: Forkable) -> None:
    """Have an object reset in every child that this process forks from now on."""
    _forkables.add(forkable)
    if not _hooked.is_set():
        _hooked.set()
        # What another thread is importing at the fork can never be imported in the child: it waits
        # for that thread. So what the library imports late is complete before any fork.
        os.register_at_fork(before=import_late_ones, after_in_child=_in_child)


def _in_child() -> None:
    for forkable in list(_forkables):
        try:
            forkable.after_fork()
        except Exception:
            # One bad backend; the other schedulers are reset all the same.
            _logger.exception("a scheduler could not be reset in a forked child")
    _at_end.clear()
    _exit_ends.clear()


def call_at_exit(function: Callable[[], None]) -> Callable[[], None]:
    """Call a function when this process ends; return what cancels that.

    A child of multiprocessing ends without the functions of ``atexit``, and has its own way.
    """
    cancel_exit = _registered(function)
    _at_end.append(function)

    def cancel() -> None:
        cancel_exit()
        if function in _at_end:
            _at_end.remove(function)

    return cancel


def exit_end_ms(now_ms: int, limit_ms: int) -> int:
    """Return the steady time until which whatever is called at the exit has to be through.

    Args:
        now_ms: Steady time.
        limit_ms: How long it may take, from the first call on.
    """
    if not _exit_ends:
        _exit_ends.append(now_ms + limit_ms)
    return _exit_ends[0]


def _registered(function: Callable[[], None]) -> Callable[[], None]:
    util: Any = sys.modules.get("multiprocessing.util")
    process: Any = sys.modules.get("multiprocessing.process")
    if util is None or process is None or process.parent_process() is None:
        atexit.register(function)
        return lambda: atexit.unregister(function)
    finalizer = util.Finalize(None, function, exitpriority=EXIT_PRIORITY)
    cancel: Callable[[], None] = finalizer.cancel
    return cancel


def end_forked_thread() -> None:
    """End a child in the thread that was forked, when what it was forked in has returned.

    This thread is all that the child began with, and its end is no end of an interpreter: no
    function of ``atexit`` is called, and any thread that was started here would keep the process
    alive for ever. So what was to be called at the exit is called now, as late as the interpreter
    would do it.
    """
    this = threading.current_thread()
    while True:
        others = [t for t in threading.enumerate() if t is not this and not t.daemon]
        if not others:
            break
        others[0].join()
    for function in reversed(list(_at_end)):
        function()


def is_ending() -> bool:
    """Tell whether the interpreter ends: nothing is left to run but what was registered for that.

    From Python 3.12 on no thread can be started then.
    """
    main = threading.main_thread()
    # Where Python is embedded, its main thread is whichever imported `threading` first, and may end
    # long before the interpreter does.
    if main.is_alive() or not getattr(threading, "_SHUTTING_DOWN", True):
        return False
    return all(thread is main or thread.daemon for thread in threading.enumerate())


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
    uwsgi = _uwsgi()
    if uwsgi is None:
        return False
    options = uwsgi.opt
    if not any(_is_set(options, name) for name in ("enable-threads", "threads")):
        message = "uWSGI runs without threads, so no job would ever run: set enable-threads = true"
        raise SchedulerStateError(message)
    if uwsgi.worker_id() != 0:
        return False
    # It takes the only hook for itself when it is imported, so it is imported before that. It may
    # be missing, and it refuses a uWSGI without a master by a bare Exception.
    with suppress(Exception):
        importlib.import_module("uwsgidecorators")
    before = getattr(uwsgi, "post_fork_hook", None)

    def after_fork() -> None:
        if before is not None:
            before()
        start()

    uwsgi.post_fork_hook = after_fork
    return True


_ENDING: Final = frozenset({signal.SIGHUP, signal.SIGINT, signal.SIGTERM})
"""Signals that end a worker of uWSGI."""


def block_ending_signals() -> Callable[[], None]:
    """Under uWSGI, keep the signals that end a worker from this thread, and from those it starts.

    A worker of uWSGI ends the interpreter inside its handler of the signal, in whichever thread
    that runs. In a thread of the scheduler it would hang, and in the middle of a stop a second one
    would cut that short: a service manager signals every process, and so does uWSGI's master.

    Returns:
        What lets them come again.
    """
    if _uwsgi() is None:
        return _nothing
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)

    def undo() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)

    return undo


def _nothing() -> None:
    """Undo what was not done."""


def _uwsgi() -> Any:  # noqa: ANN401 - a module that exists only inside uWSGI
    uwsgi = sys.modules.get("uwsgi")
    return uwsgi if hasattr(uwsgi, "opt") else None


def _is_set(options: dict[Any, Any], name: str) -> bool:
    value = options.get(name, options.get(name.encode()))
    return value not in (None, False, 0, b"0", b"false", "0", "false")
