"""A thread around a step."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from typing import Callable, Optional

from leasecron_sync.clock import Clock
from leasecron_sync.options import MAX_WAIT_MS

_logger = logging.getLogger("leasecron_sync.engine.loop")

AFTER_ERROR_MS = 1_000


class LoopThread:
    """Calls a step again and again until it returns None; survives every exception.

    Args:
        name: Name of the thread.
        step: Does one round of work; returns ms until the next one, None to end.
        clock: What to wait by.
    """

    def __init__(self, name: str, step: Callable[[], Optional[int]], clock: Clock) -> None:
        self._step = step
        self._clock = clock
        self._signal = threading.Event()
        self._due_back_ms: Optional[int] = None
        # A daemon, so that a call that hangs cannot hold the interpreter.
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Start the thread.

        Raises:
            RuntimeError: No thread can be started.
        """
        self.thread.start()

    def wake(self) -> None:
        """End the wait, or the next one if there is none now."""
        self._signal.set()

    def join(self, timeout_s: float) -> bool:
        """Wait for the end of the thread; tell whether it has ended."""
        if self.thread is threading.current_thread():
            return False
        self.thread.join(max(0.0, timeout_s))
        return not self.thread.is_alive()

    def overdue_ms(self) -> int:
        """Return how long the present step has taken, or by how long a wait was overslept."""
        due_back_ms = self._due_back_ms
        return 0 if due_back_ms is None else max(0, self._clock.steady_ms() - due_back_ms)

    def _run(self) -> None:
        while True:
            self._due_back_ms = self._clock.steady_ms()
            delay_ms = self._guarded()
            if delay_ms is None:
                self._due_back_ms = None
                return
            self._due_back_ms = self._clock.steady_ms() + delay_ms
            if delay_ms > 0:
                # In pieces: the wait's clock stands still while the machine is suspended, and no
                # platform's longest wait is ever met.
                self._clock.wait(self._signal, min(delay_ms, MAX_WAIT_MS))
            self._signal.clear()

    def _guarded(self) -> Optional[int]:
        try:
            return self._step()
        except Exception:
            _logger.exception("a step failed thread=%r", self.thread.name)
            return AFTER_ERROR_MS


def join_all(
    threads: Sequence[threading.Thread], clock: Clock, end_ms: int
) -> Sequence[threading.Thread]:
    """Wait for the end of threads; return those that have not ended."""
    others = [thread for thread in threads if thread is not threading.current_thread()]
    for thread in others:
        thread.join(max(0, end_ms - clock.steady_ms()) / 1000)
    return [thread for thread in others if thread.is_alive()]
