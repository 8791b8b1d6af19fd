"""Notices steps of the wall clock and pauses of the process."""

from __future__ import annotations

import logging
from enum import Enum
from typing import Optional

from leasecron_sync.options import ON_TIME_MS, SKEW_WARNING_MS

_logger = logging.getLogger("leasecron_sync.engine.time_watch")


class Passage(Enum):
    """How time went since the last look."""

    ORDINARY = "ordinary"
    NUDGED = "nudged"  # set ahead by less than needs a look back; a known skew may be wrong now
    SET_BACK = "set back"
    BEHIND = "behind"  # set back by little, but to before what the agenda has left behind
    JUMPED = "jumped"  # set ahead, or the process was paused or suspended

    @property
    def begins_anew(self) -> bool:
        """True when the agenda has to begin anew."""
        return self in (Passage.SET_BACK, Passage.BEHIND)

    @property
    def looks_back(self) -> bool:
        """True when there may be runs that only a look back finds."""
        return self.begins_anew or self is Passage.JUMPED

    @property
    def measures(self) -> bool:
        """True when a known skew may be wrong now."""
        return self in (Passage.NUDGED, Passage.SET_BACK, Passage.JUMPED)


class TimeWatch:
    """Compares the wall clock with the steady one, and both with what was planned.

    Args:
        now_ms: The wall clock.
        steady_ms: The steady clock.
    """

    def __init__(self, now_ms: int, steady_ms: int) -> None:
        self._now_ms = now_ms
        self._steady_ms = self._planned_ms = steady_ms
        self._reached_ms: Optional[int] = None

    def agenda_is_at(self, instant_ms: int) -> None:
        """Note that the agenda is at an instant: what falls due until there, it has left behind."""
        if self._reached_ms is None or self._reached_ms < instant_ms:
            self._reached_ms = instant_ms

    def is_behind(self, now_ms: int) -> bool:
        """Tell whether the agenda is ahead of the clock, so that it has to begin anew.

        The clock was put right, by whatever little, since the agenda came there. What falls due in
        between is not handed out any more, and a look back does not see it yet.
        """
        return self._reached_ms is not None and now_ms < self._reached_ms

    def is_even(self, now_ms: int, steady_ms: int) -> bool:
        """Tell whether both clocks went on alike since the newest look, or nearly so."""
        stepped_ms = (now_ms - self._now_ms) - (steady_ms - self._steady_ms)
        return abs(stepped_ms) <= SKEW_WARNING_MS

    def plan(self, steady_ms: int) -> None:
        """Note when the next look is to be."""
        self._planned_ms = steady_ms

    def look(self, now_ms: int, steady_ms: int) -> Passage:
        """Tell how time went; what is not ordinary is logged."""
        stepped_ms = (now_ms - self._now_ms) - (steady_ms - self._steady_ms)
        paused_ms = steady_ms - self._planned_ms
        self._now_ms, self._steady_ms = now_ms, steady_ms
        behind = self.is_behind(now_ms)
        self._reached_ms = None
        if behind or stepped_ms < -SKEW_WARNING_MS:
            self._reached_ms = now_ms
        if stepped_ms < -SKEW_WARNING_MS:
            level = logging.WARNING if stepped_ms < -ON_TIME_MS else logging.INFO
            _logger.log(level, "the clock was set back step_ms=%d", -stepped_ms)
            return Passage.SET_BACK
        if behind:
            return Passage.BEHIND
        if stepped_ms > ON_TIME_MS or paused_ms > ON_TIME_MS:
            _logger.warning(
                "this process was paused or the clock was set ahead paused_ms=%d step_ms=%d",
                max(0, paused_ms),
                max(0, stepped_ms),
            )
            return Passage.JUMPED
        return Passage.NUDGED if stepped_ms > SKEW_WARNING_MS else Passage.ORDINARY
