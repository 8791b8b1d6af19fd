"""Leaves out what others have claimed, where many runs are due together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from leasecron_sync.backends.base import LeaseBackend
from leasecron_sync.engine.claiming import Answer
from leasecron_sync.engine.context import TIMER_LANE, Context
from leasecron_sync.engine.decide import Candidate
from leasecron_sync.model import JobSpan, RunKey, RunState, Verdict

LOOK_AHEAD = 500
"""Runs looked at in one reading, so that no call holds the store up for long."""

FEW = 64
"""So few are looked at before each claim, where others are known to claim as well: a reading is
cheaper than a claim, and claims of all instances wait for each other."""


class Known(NamedTuple):
    """What a look ahead found.

    Attributes:
        keys: Runs that somebody has claimed.
        unsettled: Whether one of them is not settled.
    """

    keys: list[RunKey]
    unsettled: bool


class LookAhead:
    """Reads many states at once when claims are lost, instead of losing one slice after the other.

    Every instance has every run in its agenda. To learn by its claims alone which of them others
    have, it would ask for each; a reading tells it of hundreds, and nothing is written.

    Args:
        context: This start of the scheduler.
        backend: Its lease backend.
    """

    def __init__(self, context: Context, backend: LeaseBackend) -> None:
        self._context = context
        self._backend = backend
        self._wanted = False
        self._met_others = False

    @property
    def wanted(self) -> bool:
        """True when half of the newest claims came too late, or few others are left to make."""
        return self._wanted

    def note(self, answers: Sequence[Answer], left: int) -> None:
        """Note the answers to claims.

        Args:
            answers: The answers.
            left: How many other runs may be asked for.
        """
        lost = sum(_is_lost(answer) for answer in answers)
        self._met_others = self._met_others or lost > 0
        crowded = 2 * lost >= len(answers) or (self._met_others and left <= FEW)
        self._wanted = left > 0 and crowded

    def step(self, coming: Sequence[Candidate]) -> Known:
        """Look which of these runs somebody has claimed.

        A run that waits is left to a claim: it may be its time again.

        Raises:
            StoreError: The store did not answer. Claims find out by themselves.
        """
        self._wanted = False
        if not coming:
            return Known([], unsettled=False)
        spans = [
            JobSpan(item.key.job, item.key.scheduled_ms, item.key.scheduled_ms) for item in coming
        ]
        answers = self._context.caller.call_all(
            TIMER_LANE, lambda: self._backend.states(spans), len(spans)
        )
        known: list[RunKey] = []
        unsettled = False
        for item, states in zip(coming, answers):
            state = states.get(item.key.scheduled_ms)
            if state is not None and state is not RunState.WAITING:
                known.append(item.key)
                unsettled = unsettled or not state.settled
        self._met_others = bool(known)
        return Known(known, unsettled)


def _is_lost(answer: Answer) -> bool:
    reply = answer.reply
    return reply.verdict is Verdict.HELD or (reply.verdict is Verdict.SETTLED and not reply.fresh)
