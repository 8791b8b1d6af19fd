"""What is due is claimed, what is granted is begun: one round per step."""

from __future__ import annotations

import logging
import threading
from typing import Optional

from leasecron_sync.backends.base import ClaimBackend, LeaseBackend
from leasecron_sync.engine.agenda import Agenda, Gap
from leasecron_sync.engine.caller import Backoff
from leasecron_sync.engine.catch_up import CatchUp, Found
from leasecron_sync.engine.claiming import LANE, Answer, Claimer, LeaseClaimer, OnceClaimer
from leasecron_sync.engine.context import Context
from leasecron_sync.engine.decide import Candidate, Origin, count, pick
from leasecron_sync.engine.job import Job
from leasecron_sync.engine.runtime import LiveRun
from leasecron_sync.engine.standby import Standby
from leasecron_sync.engine.starting import Starter
from leasecron_sync.errors import StoreError
from leasecron_sync.events import EventName
from leasecron_sync.model import JobSpan, LeaseReply, OnOverlap, Reason, RunKey, RunState, Verdict
from leasecron_sync.options import MAX_WAIT_MS, ON_TIME_MS, PENDING_LIMIT, PRUNE_LIMIT, UPKEEP_MS
from leasecron_sync.run import moment

_logger = logging.getLogger("leasecron_sync.engine.timer")

DEFER_MS = 1_000
"""A run deferred without a record is asked for again after at most this long."""


class TimerLoop:
    """The timer of one start: the only caller of the backend but for renewals and settlements.

    Args:
        context: This start of the scheduler.
        jobs: The jobs it begins with.
    """

    def __init__(self, context: Context, jobs: list[Job]) -> None:
        self._context = context
        backend = context.backend
        self._lease = backend if isinstance(backend, LeaseBackend) else None
        self._claimer: Claimer
        keep_ms = ON_TIME_MS
        if isinstance(backend, LeaseBackend):
            self._claimer = LeaseClaimer(context, backend)
        else:
            assert isinstance(backend, ClaimBackend)
            self._claimer = OnceClaimer(context, backend)
            keep_ms = context.options.claim_window_ms
        self._starter = Starter(context)
        self._standby = Standby()
        self._catch_up = CatchUp(context, self._lease) if self._lease is not None else None
        self._agenda = Agenda(keep_ms)
        self._candidates: dict[RunKey, Candidate] = {}
        self._backoff = Backoff()
        self._retry_ms = 0
        self._tend_ms: Optional[int] = 0
        self._full_warned = False
        self._changes_lock = threading.RLock()
        self._changes: list[tuple[str, Optional[Job]]] = [(job.name, job) for job in jobs]
        self._jobs: dict[str, Job] = {}
        self._last_now_ms = context.clock.now_ms()
        self._last_steady_ms = self._planned_ms = context.clock.steady_ms()
        self._upkeep_ms = self._last_steady_ms + UPKEEP_MS
        self._claimed_since_upkeep = False
        self._seen_back_ms: Optional[int] = None
        context.note_unsettled = self.note_unsettled
        context.note_handed_over = self.note_handed_over

    # -- called by other threads ---------------------------------------------------------------

    def change(self, name: str, job: Optional[Job]) -> None:
        """Add or replace a job, or remove it (None)."""
        with self._changes_lock:
            self._changes.append((name, job))
        self._context.wake_timer()

    def note_unsettled(self, wait_ms: int) -> None:
        """Look for a waiting run in time; called by workers."""
        with self._changes_lock:
            self._standby.note(wait_ms, self._context.clock.steady_ms())
        self._context.wake_timer()

    def note_handed_over(self, key: RunKey) -> None:
        """Leave a run to other instances for the length of a lease."""
        until_ms = self._context.clock.steady_ms() + self._context.options.lease_ms
        with self._changes_lock:
            self._standby.handed_over(key, until_ms)

    def coming(self) -> dict[str, int]:
        """Return each job's next scheduled time."""
        with self._changes_lock:
            return self._agenda.coming()

    # -- the step ------------------------------------------------------------------------------

    def step(self) -> Optional[int]:
        """Do one round; return ms until the next call, None when the scheduler is stopping."""
        clock = self._context.clock
        if self._context.stopping.is_set():
            self._starter.hand_back(last=True)
            return None
        now_ms, steady_ms = clock.now_ms(), clock.steady_ms()
        with self._changes_lock:
            self._notice_time(now_ms, steady_ms)
            self._apply_changes(now_ms)
            self._collect(now_ms, steady_ms)
        self._warn_of_stale()
        more = False
        if steady_ms >= self._retry_ms:
            try:
                self._talk()
                more = self._claim()
                self._backoff.reset()
            except StoreError:
                self._retry_ms = clock.steady_ms() + self._backoff.next_ms()
        self._drop_expired()
        return self._delay_ms(more=more)

    def _notice_time(self, now_ms: int, steady_ms: int) -> None:
        """Compare the clocks: a step back begins the agenda anew, a pause looks back."""
        stepped_ms = (now_ms - self._last_now_ms) - (steady_ms - self._last_steady_ms)
        paused_ms = steady_ms - self._planned_ms
        self._last_now_ms, self._last_steady_ms = now_ms, steady_ms
        if stepped_ms < -ON_TIME_MS:
            _logger.warning("the clock was set back step_ms=%d", -stepped_ms)
            self._agenda.rebase(now_ms)
            # What the wrong clock called due comes again in its time.
            self._candidates = {
                key: item for key, item in self._candidates.items() if item.due_ms <= now_ms
            }
            self._look_back(forget=True)
        elif stepped_ms > ON_TIME_MS or paused_ms > ON_TIME_MS:
            _logger.warning(
                "this process was paused or the clock was set ahead paused_ms=%d step_ms=%d",
                max(0, paused_ms),
                max(0, stepped_ms),
            )
            self._look_back(forget=False)
        self._notice_back()

    def _notice_back(self) -> None:
        """After an outage: look back, and let holders renew before anything is taken over."""
        back_ms = self._context.caller.back_at_ms
        if back_ms is not None and back_ms != self._seen_back_ms:
            self._seen_back_ms = back_ms
            self._standby.hold_off(back_ms + self._context.options.heartbeat_ms)
            self._look_back(forget=False)

    def _look_back(self, *, forget: bool) -> None:
        if self._catch_up is not None:
            self._catch_up.look_back(list(self._jobs.values()), forget=forget)
            self._standby.note(0, self._context.clock.steady_ms())

    def _apply_changes(self, now_ms: int) -> None:
        changes, self._changes = self._changes, []
        added: dict[str, Job] = {}
        for name, job in changes:
            self._agenda.remove(name)
            self._jobs.pop(name, None)
            added.pop(name, None)
            self._candidates = {
                key: item for key, item in self._candidates.items() if key.job != name
            }
            if job is not None:
                self._agenda.add(job, now_ms)
                self._jobs[name] = added[name] = job
        if added and self._catch_up is not None:
            self._catch_up.look_back(list(added.values()), forget=False)
            self._standby.note(0, self._context.clock.steady_ms())

    def _collect(self, now_ms: int, steady_ms: int) -> None:
        due, gaps = self._agenda.pop(now_ms)
        for job, scheduled_ms, due_ms in due:
            key = RunKey(job.name, scheduled_ms)
            if key not in self._candidates:
                self._candidates[key] = Candidate(job, key, due_ms, Origin.ON_TIME, steady_ms)
        if self._catch_up is not None:
            self._catch_up.look_back([gap.job for gap in gaps], forget=False)
        else:
            for gap in gaps:
                self._report_gap(gap)

    def _report_gap(self, gap: Gap) -> None:
        """On a claim backend nothing is caught up: what passed too long ago was missed."""
        found = count(gap.job, gap.from_ms, gap.to_ms)
        if found.first_ms is not None and found.last_ms is not None:
            self._context.emit(
                "run_missed",
                RunKey(gap.job.name, found.last_ms),
                reason=Reason.TOO_OLD.value,
                count=found.number,
                first_time=moment(found.first_ms),
                at_least=found.at_least,
            )

    def _warn_of_stale(self) -> None:
        for live in self._context.runtime.runs():
            if live.stale and not live.warned:
                live.warned = True
                self._warn(live)

    def _warn(self, live: LiveRun) -> None:
        _logger.warning(
            "a handler goes on although its run is lost, past its time limit or given up; it keeps "
            "its slot job=%r scheduled_time=%s age_ms=%d thread=%r",
            live.key.job,
            moment(live.key.scheduled_ms).isoformat(),
            self._context.clock.steady_ms() - live.began_ms,
            live.thread.name if live.thread is not None else "",
        )

    # -- store calls besides claims --------------------------------------------------------------

    def _talk(self) -> None:
        """Make the calls that are due, each at most once."""
        if self._context.caller.down_since_ms is not None:
            # Ask for nothing but an answer: what the outage calls for comes before other calls.
            self._context.caller.call(LANE, self._context.backend.probe)
            with self._changes_lock:
                self._notice_back()
        self._starter.hand_back()
        if self._catch_up is not None:
            found = self._catch_up.step()
            with self._changes_lock:
                self._take_up(found)
                if found.unsettled:
                    self._standby.note(0, self._context.clock.steady_ms())
            self._ask_pending()
            self._upkeep()
        self._tend()

    def _take_up(self, found: Found) -> None:
        for key in found.known:
            known = self._candidates.get(key)
            # Claimed by somebody: left to `pending`, which holders may forestall by renewing. What
            # may have been granted to this instance is asked for again.
            if known is not None and not known.unknown and known.origin is not Origin.UNSETTLED:
                del self._candidates[key]
        for item in found.owed:
            known = self._candidates.get(item.key)
            if known is None:
                self._candidates[item.key] = item
            elif self._context.clock.now_ms() - known.due_ms > ON_TIME_MS:
                # It is late by now: its window is judged from the moment it was found.
                known.origin, known.found_ms = Origin.CAUGHT_UP, item.found_ms

    def _ask_pending(self) -> None:
        clock, lease = self._context.clock, self._lease
        ask_ms = self._standby.ask_ms()
        if lease is None or ask_ms is None or ask_ms > clock.steady_ms() or not self._jobs:
            return
        names = sorted(self._jobs)
        pending = self._context.caller.call(LANE, lambda: lease.pending(names, PENDING_LIMIT))
        steady_ms = clock.steady_ms()
        with self._changes_lock:
            keys = self._standby.answered(pending, PENDING_LIMIT, steady_ms)
            for key in keys:
                job = self._jobs.get(key.job)
                if job is not None and key not in self._candidates:
                    due_ms = job.due_ms(key.scheduled_ms)
                    self._candidates[key] = Candidate(job, key, due_ms, Origin.UNSETTLED, steady_ms)

    def _upkeep(self) -> None:
        """Prune in small steps, after claims only: an idle scheduler asks its store nothing."""
        lease, steady_ms = self._lease, self._context.clock.steady_ms()
        if lease is None or not self._claimed_since_upkeep or steady_ms < self._upkeep_ms:
            return
        history_ms = self._context.options.history_ms
        pruned = self._context.caller.call(LANE, lambda: lease.prune(history_ms, PRUNE_LIMIT))
        for key in pruned.abandoned:
            self._context.emit("run_failed", key, reason=Reason.ABANDONED.value)
        full = pruned.deleted >= PRUNE_LIMIT
        self._upkeep_ms = steady_ms + (DEFER_MS if full else UPKEEP_MS)
        self._claimed_since_upkeep = full
        # A run that nobody told this instance of is found here at the latest.
        with self._changes_lock:
            self._standby.note(0, steady_ms)

    def _tend(self) -> None:
        steady_ms = self._context.clock.steady_ms()
        if self._tend_ms is None or steady_ms < self._tend_ms:
            return
        again_ms = self._context.caller.call(LANE, self._context.backend.tend)
        self._tend_ms = None if again_ms is None else steady_ms + again_ms

    # -- claims ----------------------------------------------------------------------------------

    def _claim(self) -> bool:
        """Claim one slice; tell whether there is more to claim at once."""
        context = self._context
        runtime, options = context.runtime, context.options
        steady_ms = context.clock.steady_ms()
        now_ms = context.clock.now_ms()
        with self._changes_lock:
            askable = [
                item
                for item in self._candidates.values()
                if not runtime.bars_asking(
                    item.job,
                    item.key,
                    deferring=item.on_overlap(now_ms) is OnOverlap.DEFER,
                    caught_up=item.origin is Origin.CAUGHT_UP,
                )
            ]
        free = options.max_concurrent_runs - runtime.taken()
        chosen = pick(askable, free, context.instance_id, steady_ms, in_order=self._lease is None)
        self._warn_when_full(starved=chosen.starved)
        if not chosen.candidates:
            return False
        try:
            answers = self._claimer.claim(chosen.candidates, steady_ms)
        except StoreError:
            with self._changes_lock:
                for item in chosen.candidates:  # `pending` will name these again
                    if item.origin is Origin.UNSETTLED and not item.unknown:
                        self._candidates.pop(item.key, None)
                self._standby.note(0, steady_ms)
            raise
        self._claimed_since_upkeep = True
        for answer in answers:
            self._take(answer, steady_ms)
        return chosen.more or any(answer.reply.verdict is not Verdict.EARLY for answer in answers)

    def _warn_when_full(self, *, starved: bool) -> None:
        if starved and not self._full_warned:
            _logger.warning(
                "every slot of this instance is taken, due runs wait max_concurrent_runs=%d",
                self._context.options.max_concurrent_runs,
            )
        self._full_warned = starved

    def _take(self, answer: Answer, sent_ms: int) -> None:
        """Act on the answer to one claim."""
        item, reply = answer
        context = self._context
        item.unknown = item.refused = False
        item.decision_id = ""
        steady_ms = context.clock.steady_ms()
        kept = False
        if reply.verdict is Verdict.GRANTED:
            self._starter.start(item, reply, sent_ms)
        elif reply.verdict is Verdict.EARLY:
            item.ask_ms, kept = steady_ms + min(max(1, reply.wait_ms), MAX_WAIT_MS), True
        elif reply.verdict is Verdict.DEFERRED and reply.state is None:
            # It has no record, so nobody but this instance will come back to it.
            item.ask_ms, item.deferred = steady_ms + min(max(50, reply.wait_ms), DEFER_MS), True
            kept = True
        elif reply.verdict is Verdict.SETTLED:
            self._report_settled(item, reply)
        elif reply.verdict is Verdict.TOO_OLD:
            self._miss(item, Reason.TOO_OLD)
        elif reply.verdict is Verdict.REJECTED:
            _logger.error("a run was refused job=%r reason=%r", item.key.job, reply.reason)
            self._miss(item, Reason.UNKNOWN_OUTCOME)
        else:
            _logger.debug(
                "not won job=%r scheduled_ms=%d verdict=%s",
                item.key.job,
                item.key.scheduled_ms,
                reply.verdict.value,
            )
        for key in reply.abandoned:
            context.emit("run_failed", key, reason=Reason.ABANDONED.value)
        with self._changes_lock:
            if not kept and self._candidates.get(item.key) is item:
                del self._candidates[item.key]
            if reply.unsettled:
                self._standby.note(reply.wait_ms or DEFER_MS, steady_ms)

    def _report_settled(self, item: Candidate, reply: LeaseReply) -> None:
        """Report what this instance's command decided; others' decisions are theirs to report."""
        if not reply.fresh:
            return
        name: EventName = "run_skipped" if reply.state is RunState.SKIPPED else "run_failed"
        self._context.emit(name, item.key, reason=reply.reason)

    def _miss(self, item: Candidate, reason: Reason) -> None:
        self._context.emit("run_missed", item.key, reason=reason.value)
        if self._catch_up is not None:
            self._catch_up.note_reported(item.key)

    def _drop_expired(self) -> None:
        """Give up what this instance could not ask for until it was too old."""
        clock = self._context.clock
        now_ms, steady_ms = clock.now_ms(), clock.steady_ms()
        with self._changes_lock:
            expired = [
                item for item in self._candidates.values() if self._expired(item, now_ms, steady_ms)
            ]
            expired += self._surplus({item.key for item in expired})
            for item in expired:
                del self._candidates[item.key]
        known = self._known_to_store(expired)
        for item in expired:
            if item.key not in known and item.origin is not Origin.UNSETTLED:
                self._miss(item, item.missed_for())

    def _expired(self, item: Candidate, now_ms: int, steady_ms: int) -> bool:
        options = self._context.options
        if item.origin is Origin.UNSETTLED:
            # An answer that never came: after a lease nothing is left of the decision.
            return steady_ms - item.found_ms > options.lease_ms
        if self._lease is None:
            return now_ms - item.due_ms > options.claim_window_ms
        return now_ms - item.due_ms > item.max_age_ms(steady_ms)

    def _surplus(self, gone: set[RunKey]) -> list[Candidate]:
        """Return the oldest runs of jobs that have more waiting than may be made up for."""
        by_job: dict[str, list[Candidate]] = {}
        for item in self._candidates.values():
            if item.key not in gone and item.origin is not Origin.UNSETTLED:
                by_job.setdefault(item.key.job, []).append(item)
        surplus = []
        for items in by_job.values():
            limit = items[0].job.options.catch_up_limit
            if len(items) > limit:
                items.sort(key=lambda item: item.key)
                surplus += items[: len(items) - limit]
        return surplus

    def _known_to_store(self, expired: list[Candidate]) -> set[RunKey]:
        """Return those of which the store has a record; nothing is missed that somebody ran."""
        lease = self._lease
        if lease is None or not expired or self._context.caller.down_since_ms is not None:
            return set()
        spans = [
            JobSpan(item.key.job, item.key.scheduled_ms, item.key.scheduled_ms) for item in expired
        ]
        try:
            states = self._context.caller.call(LANE, lambda: lease.states(spans))
        except StoreError:
            return set()
        return {item.key for item, found in zip(expired, states) if found}

    # -- the next step ---------------------------------------------------------------------------

    def _delay_ms(self, *, more: bool) -> int:
        clock = self._context.clock
        now_ms, steady_ms = clock.now_ms(), clock.steady_ms()
        delays = [MAX_WAIT_MS]
        with self._changes_lock:
            next_ms = self._agenda.next_ms()
            if next_ms is not None:
                delays.append(next_ms - now_ms)
            steady: list[Optional[int]] = [self._tend_ms, self._standby.ask_ms()]
            steady += [item.ask_ms for item in self._candidates.values() if item.ask_ms > steady_ms]
            if self._changes:
                more = True
        if self._catch_up is not None and self._catch_up.wanted:
            steady.append(steady_ms)
        if self._starter.handing_back:
            steady.append(steady_ms + DEFER_MS)
        if more:
            steady.append(steady_ms)
        if self._candidates:  # those without a slot are looked at again at least this often
            steady.append(steady_ms + DEFER_MS)
        # While the store does not answer, the next call is made when the backoff says so.
        delays += [max(ms, self._retry_ms) - steady_ms for ms in steady if ms is not None]
        delay_ms = max(0, min(delays))
        self._planned_ms = steady_ms + delay_ms
        return delay_ms
