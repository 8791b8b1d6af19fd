"""From candidates to claims of either family, and the answers back in one form."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Callable, NamedTuple, Protocol, Union

from leasecron_sync.backends.base import ClaimBackend, LeaseBackend
from leasecron_sync.engine.agenda import Due
from leasecron_sync.engine.context import TIMER_LANE, Context
from leasecron_sync.engine.decide import Candidate, Origin
from leasecron_sync.errors import OutcomeUnknown, StoreError
from leasecron_sync.model import ClaimReply, LeaseClaim, LeaseReply, OnceClaim, RunKey, Verdict

UNDECIDED = frozenset({Verdict.EARLY, Verdict.DEFERRED})
"""Answers after which the same instance asks again."""

MAX_DECISIONS = 1_000
"""Decisions that are remembered of runs that are not decided, the newest."""


class Answer(NamedTuple):
    """What the store said of one candidate."""

    candidate: Candidate
    reply: LeaseReply


class Claimer(Protocol):
    """Asks the store for candidates; the only difference between the families when claiming."""

    def claim(self, candidates: Sequence[Candidate], sent_ms: int) -> list[Answer]:
        """Ask once; the answers come in the order of the candidates.

        Raises:
            StoreError: There is no answer; the candidates are marked with what that means.
        """
        ...


class _Asking:
    """What both families share: ids of decisions, and marks on those left without an answer.

    Args:
        context: This start of the scheduler.
        keep_ms: How long after its last ask a decision may still be granted, or have been.
    """

    def __init__(self, context: Context, keep_ms: int) -> None:
        self._context = context
        self._keep_ms = keep_ms
        self._numbers = itertools.count(1)
        # Of runs that are not decided: a claim may reach the store twice, or late, and win then.
        self._decisions: dict[RunKey, tuple[str, int]] = {}

    def _prepare(self, candidates: Sequence[Candidate], sent_ms: int) -> None:
        for item in candidates:
            if not item.decision_id:
                item.decision_id, item.tried_ms = self._decisions.pop(item.key, ("", 0))
            # After that long nothing is left of the old decision, whatever became of it.
            expired = sent_ms - item.tried_ms > self._keep_ms
            if not item.decision_id or expired:
                item.decision_id = f"{self._context.instance_id}-{next(self._numbers)}"
            item.tried_ms = sent_ms
            self._decisions.pop(item.key, None)  # the newest ones stand at the end
            self._decisions[item.key] = (item.decision_id, sent_ms)
        while len(self._decisions) > MAX_DECISIONS:
            del self._decisions[next(iter(self._decisions))]

    def _ask(
        self,
        candidates: Sequence[Candidate],
        call: Callable[[], Sequence[Union[LeaseReply, ClaimReply]]],
    ) -> list[Answer]:
        try:
            replies = self._context.caller.call_all(TIMER_LANE, call, len(candidates))
        except StoreError as error:
            for item in candidates:
                item.unknown = item.unknown or isinstance(error, OutcomeUnknown)
                item.refused = True
            raise
        answers = [Answer(item, _in_one_form(reply)) for item, reply in zip(candidates, replies)]
        for item, reply in answers:
            if reply.verdict not in UNDECIDED:
                self._decisions.pop(item.key, None)
        return answers


def _in_one_form(reply: Union[LeaseReply, ClaimReply]) -> LeaseReply:
    if isinstance(reply, LeaseReply):
        return reply
    return LeaseReply(reply.verdict, wait_ms=reply.wait_ms, reason=reply.reason)


class LeaseClaimer(_Asking):
    """Claims leases."""

    def __init__(self, context: Context, backend: LeaseBackend) -> None:
        super().__init__(context, context.options.lease_ms)
        self._backend = backend

    def claim(self, candidates: Sequence[Candidate], sent_ms: int) -> list[Answer]:
        """Ask once for leases."""
        self._prepare(candidates, sent_ms)
        now_ms = self._context.caller.now_ms()
        claims = [self._claim_of(item, now_ms, sent_ms) for item in candidates]
        return self._ask(candidates, lambda: self._backend.claim(claims))

    def rehearse(self, due: Due) -> None:
        """Do what asking for a run takes, without asking.

        Raises:
            StoreError: It was not possible; the claim will tell.
        """
        now_ms, steady_ms = self._context.caller.now_ms(), self._context.clock.steady_ms()
        key = RunKey(due.job.name, due.scheduled_ms)
        item = Candidate(due.job, key, due.due_ms, Origin.ON_TIME, steady_ms)
        self._backend.rehearse([self._claim_of(item, now_ms, steady_ms)])

    def _claim_of(self, item: Candidate, now_ms: int, steady_ms: int) -> LeaseClaim:
        return LeaseClaim(
            key=item.key,
            due_ms=item.due_ms,
            holder=self._context.instance_id,
            decision_id=item.decision_id,
            lease_ms=self._context.options.lease_ms,
            max_attempts=item.job.options.max_attempts,
            on_overlap=item.on_overlap(now_ms, steady_ms),
            max_age_ms=item.max_age_ms(steady_ms),
            takeover_ms=item.job.takeover_ms,
        )


class OnceClaimer(_Asking):
    """Claims runs of which one instance is the winner, and no more."""

    def __init__(self, context: Context, backend: ClaimBackend) -> None:
        # As long as the mechanism remembers who won, at least.
        super().__init__(context, 2 * context.options.claim_window_ms)
        self._backend = backend

    def claim(self, candidates: Sequence[Candidate], sent_ms: int) -> list[Answer]:
        """Ask once for runs."""
        self._prepare(candidates, sent_ms)
        window_ms = self._context.options.claim_window_ms
        holder = self._context.instance_id
        claims = [
            OnceClaim(item.key, item.due_ms, holder, item.decision_id, window_ms)
            for item in candidates
        ]
        return self._ask(candidates, lambda: self._backend.claim(claims))
