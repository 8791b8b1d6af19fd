"""What is due is claimed slice after slice, and the answers are acted on."""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass
from typing import Optional

from leasecron_sync.backends.base import ClaimBackend, LeaseBackend
from leasecron_sync.engine.agenda import Due
from leasecron_sync.engine.backlog import Backlog
from leasecron_sync.engine.claiming import Answer, Claimer, LeaseClaimer, OnceClaimer
from leasecron_sync.engine.context import Context
from leasecron_sync.engine.decide import Asker, Candidate, Origin
from leasecron_sync.engine.look_ahead import LOOK_AHEAD, LookAhead
from leasecron_sync.engine.picking import Pick, pick
from leasecron_sync.engine.reporting import Reporter
from leasecron_sync.engine.standby import Standby
from leasecron_sync.engine.starting import Starter
from leasecron_sync.errors import StoreError
from leasecron_sync.model import Verdict
from leasecron_sync.options import EXTRA_SLOTS, MAX_WAIT_MS, ON_TIME_MS, STILL_MS

_logger = logging.getLogger("leasecron_sync.engine.claims")

DEFER_MS = 1_000
"""A run deferred without a record is asked for again after at most this long."""


@dataclass(frozen=True)
class Plans:
    """What this instance means to claim, and when it looks for more.

    Attributes:
        backlog: Candidates.
        standby: When to look for runs of others.
        lock: Held while one of them, or the agenda, is read or changed, never over a call.
    """

    backlog: Backlog
    standby: Standby
    lock: threading.RLock


class Claims:
    """Claims one slice per step, for as many runs as there are slots.

    Args:
        context: This start of the scheduler.
        plans: What is shared with the timer.
        starter: Begins what is granted.
        reporter: Reports what is not.
    """

    def __init__(
        self, context: Context, plans: Plans, starter: Starter, reporter: Reporter
    ) -> None:
        self._context = context
        self._plans = plans
        self._starter = starter
        self._reporter = reporter
        self._claimer: Claimer
        self._ahead: Optional[LookAhead] = None
        if isinstance(context.backend, LeaseBackend):
            self._claimer = LeaseClaimer(context, context.backend)
            self._ahead = LookAhead(context, context.backend)
        else:
            assert isinstance(context.backend, ClaimBackend)
            self._claimer = OnceClaimer(context, context.backend)
        self._unanswered: list[Candidate] = []
        self.looked_ms = 0
        """Steady time of the newest look at what may be asked for."""
        self.asked = False
        """True when the newest step made a call, and it was answered."""
        self.claimed_at_ms: Optional[int] = None
        """Wall clock of the newest claim that was answered."""
        self.far_ms: Optional[int] = None
        """Due time of a run that the newest step asked for and that lies far ahead of the clock."""

    def step(self) -> bool:
        """Claim one slice; tell whether there is more to claim at once.

        Raises:
            StoreError: There is no answer.
        """
        context, plans, asker = self._context, self._plans, self._asker()
        self.asked, self.far_ms, self.looked_ms = False, None, asker.steady_ms
        with plans.lock:
            chosen = self._again(asker) or pick(plans.backlog.offers(asker), asker)
            for item in list(chosen.candidates):
                # The agenda may name it, too, and a look back: `pending` does when it is time.
                if plans.standby.stands_back(item.key, asker.steady_ms) and not item.unknown:
                    plans.backlog.discard(item)
                    chosen.candidates.remove(item)
        self._reporter.full(starved=chosen.starved, left=chosen.left, free=asker.free)
        if not chosen.candidates:
            return False
        context.claimed.clear()
        self._reporter.asking(chosen.candidates)
        answers = self._ask(chosen.candidates, asker.steady_ms)
        self.asked, self.claimed_at_ms = True, context.clock.now_ms()
        try:
            for answer in answers:
                self._take(answer, asker.steady_ms)
        finally:
            context.wake_heartbeat()  # once for all: a lease may have come with little time left
        if self._ahead is not None:
            self._ahead.note(answers, chosen.left)
        return chosen.more or any(answer.reply.verdict is not Verdict.EARLY for answer in answers)

    def _again(self, asker: Asker) -> Optional[Pick]:
        """Choose what the newest claim asked for, if it may have won that without an answer.

        It goes before all others: a lease runs, and nobody works under it.
        """
        unanswered = [
            item
            for item in self._unanswered
            if item.unknown and item in self._plans.backlog and asker.may_ask(item)
        ]
        self._unanswered = []
        free = max(0, asker.free + EXTRA_SLOTS)
        return Pick(unanswered[:free], starved=False, more=True) if unanswered[:free] else None

    def look_ahead(self) -> None:
        """Leave out what others have claimed, when many claims came too late.

        Raises:
            StoreError: The store did not answer; claims will tell.
        """
        if self._ahead is None or not self._ahead.wanted:
            return
        plans = self._plans
        with plans.lock:
            coming = plans.backlog.ahead(self._asker(), LOOK_AHEAD)
        known = self._ahead.step(coming)
        with plans.lock:
            plans.backlog.drop_known(known.keys)
            if known.unsettled:
                plans.standby.note(DEFER_MS, self._context.clock.steady_ms())

    def rehearse(self, due: Due) -> None:
        """Go through a claim without making it, shortly before it is due.

        Its error says no more than that of the claim, which is told in full.
        """
        if not isinstance(self._claimer, LeaseClaimer):
            return
        try:
            self._claimer.rehearse(due)
        except StoreError as error:
            _logger.debug("a rehearsal failed, the claim will tell error=%r", str(error))
        except Exception:  # the step goes on: the run is due in a moment
            _logger.exception("the backend let a foreign error escape")

    def _ask(self, candidates: list[Candidate], sent_ms: int) -> list[Answer]:
        try:
            with self._context.caller.asking("claim"):
                return self._claimer.claim(candidates, sent_ms)
        except StoreError:
            self._unanswered = candidates
            with self._plans.lock:
                for item in candidates:  # `pending` will name these again
                    if item.origin is Origin.UNSETTLED and not item.unknown:
                        self._plans.backlog.discard(item)
                self._plans.standby.note(0, sent_ms)
            raise

    def _asker(self) -> Asker:
        context = self._context
        return Asker(
            context.instance_id,
            context.options.max_concurrent_runs - context.runtime.taken(),
            context.caller.now_ms(),
            context.clock.steady_ms(),
            context.runtime.by_job(),
        )

    def _take(self, answer: Answer, sent_ms: int) -> None:
        """Act on the answer to one claim."""
        item, reply = answer
        steady_ms = self._context.clock.steady_ms()
        # Its decision stays: an ask may arrive twice, or late. On a claim backend so does the doubt
        # where it is early: its clock may have been set back since, but not by years.
        early = reply.verdict is Verdict.EARLY and isinstance(self._claimer, OnceClaimer)
        doubt = early and reply.wait_ms <= self._context.options.claim_window_ms
        item.refused, item.unknown = False, item.unknown and doubt
        kept = False
        if reply.verdict is Verdict.GRANTED:
            self._starter.start(item, reply, sent_ms)
        elif reply.verdict is Verdict.EARLY:
            caller = self._context.caller
            sent_now_ms = caller.now_ms() - (steady_ms - sent_ms)
            caller.note_early(sent_now_ms - item.due_ms + reply.wait_ms)
            if item.due_ms - caller.now_ms() > ON_TIME_MS:
                self.far_ms = max(item.due_ms, self.far_ms or item.due_ms)
            # Early as before, though that time has passed: the store's clock stands still.
            least_ms = STILL_MS if reply.wait_ms == item.early_ms else 1
            item.early_ms = reply.wait_ms
            ask_ms = min(max(least_ms, reply.wait_ms), MAX_WAIT_MS)
            due_ms = steady_ms + reply.wait_ms
            with self._plans.lock:
                self._plans.backlog.ask_again(item, steady_ms + ask_ms, due_steady_ms=due_ms)
            kept = True
        elif reply.verdict is Verdict.DEFERRED and reply.state is None:
            # It has no record, so nobody but this instance will come back to it.
            item.deferred = True
            with self._plans.lock:
                # Without a wait nobody holds what is in the way: it has to be taken over first.
                ask_ms = min(max(50, reply.wait_ms or DEFER_MS), DEFER_MS)
                self._plans.backlog.ask_again(item, steady_ms + ask_ms)
            kept = True
        else:
            self._reporter.refused(answer)
        self._reporter.abandoned(answer)
        with self._plans.lock:
            if not kept:
                self._plans.backlog.discard(item)
            if reply.unsettled:
                self._plans.standby.note(reply.wait_ms or DEFER_MS, steady_ms)
