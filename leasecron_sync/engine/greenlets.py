"""What threads are here: the operating system's own, or gevent's greenlets in their place.

Under gevent everything here runs in greenlets, as it is written. One thing is different: a handler
that computes without a pause holds up the heartbeat and the timer, until its lease is lost.
"""

from __future__ import annotations

import logging
import sys
from typing import Any, Final

from leasecron_sync.errors import SchedulerStateError

_logger = logging.getLogger("leasecron_sync.engine.greenlets")

_PARTS: Final = ("threading", "socket", "select")
"""What the library and its backends wait in."""


def are_greenlets() -> bool:
    """Tell whether gevent has replaced threads here."""
    return "threading" in _patched()


def have_changed() -> bool:
    """Tell whether gevent has replaced threads since this package was imported."""
    return are_greenlets() != _AT_IMPORT


def tell_of_greenlets() -> None:
    """Log the limit of this module, where it holds."""
    if are_greenlets():
        _logger.info(
            "threads are greenlets of gevent here, a handler that computes without a pause holds "
            "up heartbeats and other runs"
        )


def refuse_other_threads() -> None:
    """Refuse to start where threads are not what they must be.

    Raises:
        SchedulerStateError: Eventlet has replaced them; gevent has replaced a part of what they
            need; or gevent has replaced them after this package was imported.
    """
    eventlet: Any = sys.modules.get("eventlet.patcher")
    if eventlet is not None and eventlet.is_monkey_patched("thread"):
        message = "eventlet has replaced Python's threads, which is not supported: use gevent"
        raise SchedulerStateError(message)
    patched = _patched()
    missing = [name for name in _PARTS if name not in patched]
    if patched and missing:
        # Threads that share a connection would each wait for it in a hub of their own; greenlets
        # would all stand still while one of them waits.
        message = (
            f"gevent has replaced {', '.join(patched)} and not {', '.join(missing)}: call "
            "gevent.monkey.patch_all() without leaving out any of them, or not at all"
        )
        raise SchedulerStateError(message)
    if have_changed():
        # The locks that exist are the operating system's: one that is held by a greenlet while it
        # waits would stop all of them, or none.
        message = (
            "leasecron_sync was imported before gevent replaced Python's threads: call "
            "gevent.monkey.patch_all() first of all (gunicorn with preload_app: at the top of its "
            "configuration file)"
        )
        raise SchedulerStateError(message)


def _patched() -> list[str]:
    monkey: Any = sys.modules.get("gevent.monkey")
    if monkey is None or not hasattr(monkey, "is_module_patched"):
        return []
    return [name for name in _PARTS if monkey.is_module_patched(name)]


_AT_IMPORT: Final = are_greenlets()
