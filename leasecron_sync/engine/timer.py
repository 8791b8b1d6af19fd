"""What is due is claimed, what is granted is begun: one round per step."""

from __future__ import annotations

import sys
import threading
from typing import Optional

from leasecron_sync.backends.base import LeaseBackend
from leasecron_sync.engine.agenda import POP_LIMIT, Agenda
from leasecron_sync.engine.backlog import Backlog
from leasecron_sync.engine.caller import Backoff
from leasecron_sync.engine.catch_up import CatchUp
from leasecron_sync.engine.claims import DEFER_MS, Claims, Plans
from leasecron_sync.engine.context import TIMER_LANE, Context
from leasecron_sync.engine.decide import Candidate
from leasecron_sync.engine.expiry import Expiry
from leasecron_sync.engine.job import Job
from leasecron_sync.engine.reporting import Reporter
from leasecron_sync.engine.skew_check import SkewCheck
from leasecron_sync.engine.standby import Standby
from leasecron_sync.engine.starting import Starter
from leasecron_sync.engine.time_watch import TimeWatch
from leasecron_sync.engine.upkeep import Tending, Upkeep
from leasecron_sync.errors import StoreError
from leasecron_sync.model import RunKey
from leasecron_sync.options import LOOK_BACK_COUNT, MAX_WAIT_MS, ON_TIME_MS, PENDING_LIMIT, READY_MS


class TimerLoop:
    """The timer of one start: the only caller of the backend but for renewals and settlements.

    Args:
        context: This start of the scheduler.
        jobs: The jobs it begins with.
    """

    def __init__(self, context: Context, jobs: list[Job]) -> None:
        self._context = context
        backend, options = context.backend, context.options
        self._lease = backend if isinstance(backend, LeaseBackend) else None
        if isinstance(backend, LeaseBackend):
            self._agenda = Agenda(ON_TIME_MS)
            self._backlog = Backlog(Expiry(None, options.lease_ms))
            self._catch_up: Optional[CatchUp] = CatchUp(context, backend)
            self._upkeep: Optional[Upkeep] = Upkeep(context, backend)
        else:
            self._agenda = Agenda(options.claim_window_ms, in_order=True)
            expiry = Expiry(options.claim_window_ms, 0, surplus=LOOK_BACK_COUNT)
            self._backlog = Backlog(expiry, in_order=True)
            self._catch_up = self._upkeep = None
        self._starter = Starter(context)
        self._reporter = Reporter(context, self._catch_up)
        self._standby = Standby()
        self._backoff = Backoff()
        self._retry_ms = 0
        self._tending = Tending(context)
        # On a lease backend the look back at the start compares the clocks.
        self._skew = SkewCheck(context, soon=self._catch_up is None)
        self._held_off = self._getting_ready = False
        # Held while the agenda, the backlog and the standby are read or changed, never over a call.
        self._lock = threading.RLock()
        plans = Plans(self._backlog, self._standby, self._lock)
        self._claims = Claims(context, plans, self._starter, self._reporter)
        self._changes: list[tuple[str, Optional[Job]]] = [(job.name, job) for job in jobs]
        self._jobs: dict[str, Job] = {}
        self._forgotten: set[str] = set()
        self._watch = TimeWatch(context.caller.now_ms(), context.clock.steady_ms())
        self._began_ms = context.clock.steady_ms()
        self._born_ms: Optional[int] = None
        self._seen_back_ms: Optional[int] = None
        context.note_unsettled = self.note_unsettled
        context.note_handed_over = self.note_handed_over
        context.note_forgotten = self.note_forgotten

    # -- called by other threads ---------------------------------------------------------------

    def change(self, name: str, job: Optional[Job]) -> None:
        """Add or replace a job, or remove it (None)."""
        with self._lock:
            self._changes.append((name, job))
        self._context.wake_timer()

    def note_unsettled(self, wait_ms: int) -> None:
        """Look for a waiting run in time; called by workers."""
        with self._lock:
            self._standby.note(wait_ms, self._context.clock.steady_ms())
        self._context.wake_timer()

    def note_handed_over(self, key: RunKey) -> None:
        """Leave a run to other instances for the length of a lease."""
        until_ms = self._context.clock.steady_ms() + self._context.options.lease_ms
        with self._lock:
            self._standby.handed_over(key, until_ms)

    def note_forgotten(self, name: str) -> None:
        """Look back over a job of which the store has forgotten a run; called by workers."""
        with self._lock:
            self._forgotten.add(name)
        self._context.wake_timer()

    def coming(self) -> dict[str, int]:
        """Return each job's next scheduled time.

        Without the lock: a signal handler may stop what its own thread is asking, and the timer
        could not end while that thread has it.
        """
        return self._agenda.coming()

    @property
    def claimed_at_ms(self) -> Optional[int]:
        """Wall clock of the newest claim that was answered; None before the first one."""
        return self._claims.claimed_at_ms

    # -- the step ------------------------------------------------------------------------------

    def step(self) -> Optional[int]:
        """Do one round; return ms until the next call, None when the scheduler is stopping."""
        clock = self._context.clock
        if self._context.stopping.is_set():
            self._context.claimed.set()
            self._give_up()
            self._starter.hand_back(last=True)
            return None
        now_ms, steady_ms = self._context.caller.now_ms(), clock.steady_ms()
        with self._lock:
            self._notice_time(now_ms, steady_ms)
            self._apply_changes(now_ms)
            self._collect(now_ms, steady_ms)
        self._reporter.stale(self._context.runtime.runs())
        more = False
        if steady_ms >= self._retry_ms:
            try:
                more = self._round()
            except StoreError:
                self._retry_ms = clock.steady_ms() + self._backoff.next_ms()
        if not more:
            self._context.claimed.set()
        self._drop_expired()
        if self._getting_ready:
            self._rehearse()
        return self._delay_ms(more=more)

    def _round(self) -> bool:
        """Make the calls that are due; tell whether there is more to claim at once."""
        caller = self._context.caller
        failing = caller.is_failing(TIMER_LANE)
        if failing:
            self._ask_for_an_answer()
        error = self._talk(tolerant=failing)
        if error is None and self._catch_up is not None and self._catch_up.wanted:
            return True  # claims come when it is known what others hold
        more = self._claims.step()
        if self._claims.far_ms is not None:
            self._watch.agenda_is_at(self._claims.far_ms)  # left from a clock that was ahead
        if self._claims.asked:
            self._skew.note_claim()
            if self._upkeep is not None:
                self._upkeep.note_claim()
        if error is not None:
            raise error
        self._backoff.reset()
        self._held_off = False
        if failing:
            caller.round_ended(TIMER_LANE)
            self._seen_back_ms = caller.back_at_ms  # this round has done what the outage called for
        return more

    def _ask_for_an_answer(self) -> None:
        """In an outage, ask for nothing else first: what it calls for comes before other calls."""
        try:
            self._skew.want()  # what is due depends on it, and registering may fail
            self._skew.step()
        except StoreError:
            self._held_off = False
            raise
        if not self._held_off:  # once: a store that refuses one command all the time is not away
            self._held_off = True
            with self._lock:
                self._recover(self._context.clock.steady_ms())

    def _notice_time(self, now_ms: int, steady_ms: int) -> None:
        """Compare the clocks: a step back begins the agenda anew, a pause looks back."""
        if self._born_ms is None and self._context.caller.skew_ms is not None:
            # On a host that is behind, the agenda began before the instance did.
            self._born_ms = now_ms - (steady_ms - self._began_ms)
        passage = self._watch.look(now_ms, steady_ms)
        if passage.begins_anew:
            # What only the wrong clock called due comes again in its time.
            self._agenda.rebase(now_ms, self._backlog.drop_future(now_ms))
            self._born_ms = None  # by the clock that is left; the next look tells it by this one
        if passage.looks_back:
            self._look_back(forget=passage.begins_anew)
        if passage.measures:
            self._skew.want()
        back_ms = self._context.caller.back_at_ms
        if back_ms is not None and back_ms != self._seen_back_ms:
            self._seen_back_ms = back_ms
            self._recover(back_ms)

    def _recover(self, back_ms: int) -> None:
        """After an outage: look back, and let holders renew before anything is taken over."""
        self._backlog.drop_unsettled()
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
            self._expect_lapses(self._backlog.replace_job(name, job))
            self._jobs.pop(name, None)
            added.pop(name, None)
            if self._catch_up is not None:
                self._catch_up.leave_out(name)
            if job is not None:
                self._agenda.add(job, now_ms)
                self._watch.agenda_is_at(now_ms)
                self._jobs[name] = added[name] = job
        names, self._forgotten = self._forgotten, set()
        added.update({name: self._jobs[name] for name in names if name in self._jobs})
        if added and self._catch_up is not None:
            self._catch_up.look_back(list(added.values()), forget=False)
            self._standby.note(0, self._context.clock.steady_ms())

    def _collect(self, now_ms: int, steady_ms: int, limit: int = POP_LIMIT) -> None:
        due, gaps = self._agenda.pop(now_ms, limit)
        self._backlog.add_due(due, now_ms, steady_ms)
        if self._catch_up is not None:
            self._catch_up.look_back([gap.job for gap in gaps], forget=False)
        else:
            for gap in gaps:
                self._reporter.gap(gap._replace(from_ms=max(gap.from_ms, self._born_ms or 0)))

    # -- store calls besides claims ------------------------------------------------------------

    def _talk(self, *, tolerant: bool) -> Optional[StoreError]:
        """Make the calls that are due, each at most once.

        Args:
            tolerant: True while the store answers and refuses a kind of call: the others go on.

        Returns:
            The first error, where errors are tolerated.

        Raises:
            StoreError: A call failed, where they are not.
        """
        first: Optional[StoreError] = None
        calls = (self._starter.hand_back, self._skew.step, self._catch_up_step)
        for call in (
            *calls,
            self._claims.look_ahead,
            self._ask_pending,
            self._prune,
            self._tending.step,
        ):
            try:
                call()
            except StoreError as error:
                if not tolerant:
                    raise
                first = first or error
        return first

    def _catch_up_step(self) -> None:
        if self._catch_up is None or not self._catch_up.wanted:
            return
        now_ms, steady_ms = self._context.caller.now_ms(), self._context.clock.steady_ms()
        with self._lock:  # what is in the agenda is on time, and is not to be found first
            self._collect(now_ms, steady_ms, limit=sys.maxsize)
        found = self._catch_up.step(self._expects)
        with self._lock:
            now_ms, steady_ms = self._context.caller.now_ms(), self._context.clock.steady_ms()
            self._collect(now_ms, steady_ms, limit=sys.maxsize)  # what fell due meanwhile
            self._backlog.drop_known(found.known)
            self._backlog.add_owed(found.owed, now_ms, steady_ms)
            for item in found.coming:
                self._agenda.expect(item.job, item.key.scheduled_ms)
            if found.unsettled:
                self._standby.note(0, steady_ms)

    def _expects(self, key: RunKey) -> bool:
        with self._lock:
            # What fell due while the store was asked is on time, too.
            now_ms, steady_ms = self._context.caller.now_ms(), self._context.clock.steady_ms()
            self._collect(now_ms, steady_ms, limit=sys.maxsize)
            return self._backlog.knows(key)

    def _prune(self) -> None:
        if self._upkeep is not None and self._upkeep.step():
            # A run that nobody told this instance of is found here at the latest.
            with self._lock:
                self._standby.note(0, self._context.clock.steady_ms())

    def _ask_pending(self) -> None:
        clock, lease = self._context.clock, self._lease
        with self._lock:
            ask_ms = self._standby.ask_ms()
            due = ask_ms is not None and ask_ms <= clock.steady_ms() and bool(self._jobs)
            if lease is None or not due:
                return
            self._standby.asking(clock.steady_ms())
            names = sorted(self._jobs)
        try:
            with self._context.caller.asking("pending"):
                pending = self._context.caller.call(
                    TIMER_LANE, lambda: lease.pending(names, PENDING_LIMIT)
                )
        except StoreError:
            with self._lock:
                self._standby.note(0, clock.steady_ms())
            raise
        with self._lock:
            keys = self._standby.answered(pending, PENDING_LIMIT, clock.steady_ms())
            self._backlog.add_unsettled(keys, self._jobs, clock.steady_ms())

    # -- what is given up ----------------------------------------------------------------------

    def _drop_expired(self) -> None:
        """Give up what this instance could not ask for until it was too old."""
        context, clock = self._context, self._context.clock
        down = context.caller.is_failing(TIMER_LANE)
        with self._lock:
            now_ms, steady_ms = context.caller.now_ms(), clock.steady_ms()
            if not self._watch.is_even(now_ms, steady_ms):
                return  # a clock was set during this step; the next one looks into it first
            expired = self._backlog.take_expired(now_ms, steady_ms)
            self._expect_lapses([item for item in expired if item.unknown])
        if self._reporter.expired(expired, down=down):
            with self._lock:
                self._standby.note(0, clock.steady_ms())

    def _give_up(self) -> None:
        """At the end, report on a claim backend what nobody looks back at.

        That is what may have been won, and in an outage whatever is due.
        """
        if self._lease is not None:
            return
        down = self._context.caller.is_failing(TIMER_LANE)
        now_ms, steady_ms = self._context.caller.now_ms(), self._context.clock.steady_ms()
        with self._lock:
            if down:
                self._collect(now_ms, steady_ms, limit=sys.maxsize)
            left = self._backlog.take_left(now_ms if down else None)
        self._reporter.expired(left, down=down)

    def _expect_lapses(self, items: list[Candidate]) -> None:
        """Look for runs that may have been won, and are given up, when their leases have lapsed."""
        for item in items:
            self._standby.expect_lapse(item.tried_ms + self._context.options.lease_ms + 1)

    # -- the next step -------------------------------------------------------------------------

    def _rehearse(self) -> None:
        """Warm up before what comes due after a rest, unless the time for that has passed."""
        self._getting_ready = False
        with self._lock:
            due = self._agenda.first()
        if due is None or self._context.caller.is_failing(TIMER_LANE):
            return
        if READY_MS // 4 < due.due_ms - self._context.caller.now_ms() <= READY_MS:
            self._claims.rehearse(due)

    def _delay_ms(self, *, more: bool) -> int:
        clock = self._context.clock
        now_ms, steady_ms = self._context.caller.now_ms(), clock.steady_ms()
        steady: list[Optional[int]] = [self._tending.next_ms]
        delays = [MAX_WAIT_MS]
        with self._lock:
            next_ms = self._agenda.next_ms()
            if next_ms is not None:
                delays.append(next_ms - now_ms)
            if self._lease is not None and self._jobs:
                steady.append(self._standby.ask_ms())
            steady.append(self._backlog.next_ask_ms(self._claims.looked_ms))
            if self._backlog:  # those without a slot are looked at again at least this often
                steady.append(steady_ms + DEFER_MS)
            more = more or bool(self._changes) or self._watch.is_behind(now_ms)
        if self._starter.handing_back:
            steady.append(steady_ms + DEFER_MS)
        if more or (self._catch_up is not None and self._catch_up.wanted):
            steady.append(steady_ms)
        # While the store does not answer, the next call is made when the backoff says so.
        delays += [max(ms, self._retry_ms) - steady_ms for ms in steady if ms is not None]
        delay_ms = max(0, min(delays))
        if delay_ms >= 4 * READY_MS:
            # What a process has not touched for a while is far from the processor. A step and a
            # rehearsal shortly before the time comes are paid for by nobody who waits.
            delay_ms -= READY_MS
            self._getting_ready = True
        self._watch.plan(steady_ms + delay_ms)
        return delay_ms
