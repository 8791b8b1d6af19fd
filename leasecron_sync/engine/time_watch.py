"""Notices steps of the wall clock and pauses of the process."""

from __future__ import annotations

import logging
from enum import Enum

from leasecron_sync.options import ON_TIME_MS, SKEW_WARNING_MS

_logger = logging.getLogger("leasecron_sync.engine.time_watch")


class Passage(Enum):
    """How time went since the last look."""

    ORDINARY = "ordinary"
    NUDGED = "nudged"  # set ahead by less than needs a look back; a known skew may be wrong now
    SET_BACK = "set back"
    JUMPED = "jumped"  # set ahead, or the process was paused or suspended


class TimeWatch:
    """Compares the wall clock with the steady one, and both with what was planned.

    Args:
        now_ms: The wall clock.
        steady_ms: The steady clock.
    """

    def __init__(self, now_ms: int, steady_ms: int) -> None:
        self._now_ms = now_ms
        self._steady_ms = self._planned_ms = steady_ms

    def plan(self, steady_ms: int) -> None:
        """Note when the next look is to be."""
        self._planned_ms = steady_ms

    def look(self, now_ms: int, steady_ms: int) -> Passage:
        """Tell how time went; what is not ordinary is logged."""
        stepped_ms = (now_ms - self._now_ms) - (steady_ms - self._steady_ms)
        paused_ms = steady_ms - self._planned_ms
        self._now_ms, self._steady_ms = now_ms, steady_ms
        if stepped_ms < -SKEW_WARNING_MS:
            level = logging.WARNING if stepped_ms < -ON_TIME_MS else logging.INFO
            _logger.log(level, "the clock was set back step_ms=%d", -stepped_ms)
            return Passage.SET_BACK
        if stepped_ms > ON_TIME_MS or paused_ms > ON_TIME_MS:
            _logger.warning(
                "this process was paused or the clock was set ahead paused_ms=%d step_ms=%d",
                max(0, paused_ms),
                max(0, stepped_ms),
            )
            return Passage.JUMPED
        return Passage.NUDGED if stepped_ms > SKEW_WARNING_MS else Passage.ORDINARY
