# ruff: noqa: ANN401 - what is patched is passed through
"""Faults that are planted in the engine and in the specification, which the simulation must find.

Each is a function that changes the library as long as an ``ExitStack`` is open. Faults of the
specification reach the memory and SQLite backends, which execute it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, Callable, NamedTuple, Optional
from unittest import mock

from leasecron_sync.backends import _local
from leasecron_sync.backends.memory import MemoryTables
from leasecron_sync.engine import catch_up, decide, worker
from leasecron_sync.engine.agenda import Agenda
from leasecron_sync.engine.caller import Caller
from leasecron_sync.engine.catch_up import CatchUp, Found
from leasecron_sync.engine.claiming import Answer, LeaseClaimer, OnceClaimer, _Asking
from leasecron_sync.engine.context import Context
from leasecron_sync.engine.decide import Candidate, LookBack
from leasecron_sync.engine.heartbeat import HeartbeatLoop
from leasecron_sync.engine.job import Job
from leasecron_sync.engine.runtime import LiveRun, Runtime
from leasecron_sync.engine.standby import Standby
from leasecron_sync.engine.starting import Starter
from leasecron_sync.engine.timer import TimerLoop
from leasecron_sync.errors import StoreError
from leasecron_sync.model import LeaseClaim, LeaseReply, OnOverlap, RunRecord, Verdict
from leasecron_sync.protocol.transition import is_live, transition
from leasecron_sync.run import RunControl
from leasecron_sync.testing import harness
from leasecron_sync.testing.simulation import forks
from leasecron_sync.testing.simulation.planner import plan_of
from leasecron_sync.testing.simulation.play import play
from leasecron_sync.testing.simulation.stores import load
from leasecron_sync.testing.simulation.violation import Violation
from tests.mutants import faulty_transition as faulty

HOUR_MS = 3_600_000

Plant = Callable[[ExitStack], None]


@dataclass(frozen=True)
class Planted:
    """A planted fault.

    Attributes:
        name: What it is called.
        text: What was planted.
        profile: Profile in which it is looked for.
        plant: Plants it.
    """

    name: str
    text: str
    profile: str
    plant: Plant


def _patch(stack: ExitStack, owner: object, name: str, new: object) -> None:
    stack.enter_context(mock.patch.object(owner, name, new))


# -- trust -----------------------------------------------------------------------------------------


def trust_from_the_reply_to_a_claim(stack: ExitStack) -> None:
    start = Starter.start

    def late(self: Starter, item: Candidate, reply: LeaseReply, sent_ms: int) -> None:
        start(self, item, reply, max(sent_ms, self._context.clock.steady_ms()))

    _patch(stack, Starter, "start", late)


def trust_from_the_reply_to_a_renewal(stack: ExitStack) -> None:
    renew = HeartbeatLoop._renew

    def late(self: HeartbeatLoop, runs: list[LiveRun], sent_ms: int) -> None:
        before = {id(live): live.control.trusted_until_ms for live in runs}
        renew(self, runs, sent_ms)
        for live in runs:
            if live.control.trusted_until_ms != before[id(live)]:
                took_ms = self._context.clock.steady_ms() - sent_ms
                live.control.trust_until(live.control.trusted_until_ms + took_ms)

    _patch(stack, HeartbeatLoop, "_renew", late)


def no_margin(stack: ExitStack) -> None:
    def renewed(self: RunControl, until_ms: int) -> None:
        self._trusted_until_ms = until_ms + 301

    _patch(stack, RunControl, "trust_until", renewed)


def no_look_before_the_handler(stack: ExitStack) -> None:
    call_handler = worker.call_handler

    def call(context: Context, live: LiveRun) -> worker.Ending:
        control = live.control
        until_ms, started = control._trusted_until_ms, control.started

        def begin() -> None:
            control._trusted_until_ms = until_ms
            started()

        control._trusted_until_ms = 1 << 60
        with mock.patch.object(control, "started", begin):
            return call_handler(context, live)

    _patch(stack, harness, "call_handler", call)


def a_refused_renewal_is_ignored(stack: ExitStack) -> None:
    _patch(stack, RunControl, "trusted", property(lambda self: not self._lost))


# -- decisions -------------------------------------------------------------------------------------


def a_new_decision_for_each_try(stack: ExitStack) -> None:
    prepare = _Asking._prepare

    def anew(self: _Asking, candidates: Sequence[Candidate], sent_ms: int) -> None:
        self._decisions.clear()
        for item in candidates:
            item.decision_id = ""
        prepare(self, candidates, sent_ms)

    _patch(stack, _Asking, "_prepare", anew)


def one_decision_for_all(stack: ExitStack) -> None:
    def same(_self: _Asking, candidates: Sequence[Candidate], sent_ms: int) -> None:
        for item in candidates:
            item.decision_id, item.tried_ms = f"{item.key}", sent_ms

    _patch(stack, _Asking, "_prepare", same)


def an_early_answer_ends_a_decision(stack: ExitStack) -> None:
    ask = _Asking._ask

    def forgetful(self: _Asking, candidates: Sequence[Candidate], call: Any) -> Any:
        answers = ask(self, candidates, call)
        self._decisions.clear()
        for item in candidates:
            item.decision_id = ""
        return answers

    _patch(stack, _Asking, "_ask", forgetful)


def no_answer_is_a_yes(stack: ExitStack) -> None:
    """A claim backend without an answer: the run is taken for won."""
    ask = OnceClaimer.claim

    def hopeful(self: OnceClaimer, candidates: Sequence[Candidate], sent_ms: int) -> Any:
        try:
            return ask(self, candidates, sent_ms)
        except StoreError:
            return [Answer(item, LeaseReply(Verdict.GRANTED)) for item in candidates]

    _patch(stack, OnceClaimer, "claim", hopeful)


# -- catch-up --------------------------------------------------------------------------------------


def looking_back_finds_nothing(stack: ExitStack) -> None:
    step = CatchUp.step
    _patch(stack, CatchUp, "step", lambda self, *rest: step(self, *rest)._replace(owed=[]))


def everything_is_owed(stack: ExitStack) -> None:
    """Also what was before the job was first registered, or its schedule changed."""
    look_back = decide.look_back

    def more(job: Job, now_ms: int, owed_from_ms: int, *rest: Any) -> LookBack:
        return look_back(job, now_ms, owed_from_ms - 60_000, *rest)

    _patch(stack, catch_up, "look_back", more)


def a_wider_window_is_owed(stack: ExitStack) -> None:
    look_back = decide.look_back

    def wider(job: Job, *rest: Any) -> LookBack:
        options = replace(job.options, catch_up_ms=job.options.catch_up_ms + 30_000)
        wide = replace(job, options=options)
        return replace(look_back(wide, *rest), job=wide)

    _patch(stack, catch_up, "look_back", wider)


def the_newest_owed_one_is_forgotten(stack: ExitStack) -> None:
    step = CatchUp.step
    _patch(stack, CatchUp, "step", lambda self, *rest: _fewer(step(self, *rest)))


def _fewer(found: Found) -> Found:
    return found._replace(owed=found.owed[:-1])


def nothing_given_up_is_told(stack: ExitStack) -> None:
    _patch(stack, CatchUp, "_report", lambda *_arguments: None)


def no_registration_after_an_outage(stack: ExitStack) -> None:
    register = CatchUp._register

    def once(self: CatchUp, jobs: list[Job]) -> Any:
        known: dict[str, Any] = self.__dict__.setdefault("_known_standings", {})
        if any(job.name not in known for job in jobs):
            for job, standing in zip(jobs, register(self, jobs)):
                known[job.name] = standing
        return [known[job.name] for job in jobs]

    _patch(stack, CatchUp, "_register", once)


def a_set_back_clock_repeats_the_agenda(stack: ExitStack) -> None:
    add = Agenda.add

    def anew(self: Agenda, now_ms: int, _undecided: object) -> None:
        jobs = [plan.job for plan in self._plans.values()]
        self._heap.clear()
        for job in jobs:
            add(self, job, now_ms)

    _patch(stack, Agenda, "rebase", anew)


# -- takeover --------------------------------------------------------------------------------------


def unsettled_runs_are_not_looked_for(stack: ExitStack) -> None:
    def never(self: Standby) -> Optional[int]:
        return None if self._ask_ms is None else self._ask_ms + HOUR_MS

    _patch(stack, Standby, "ask_ms", never)


def no_hold_off_after_an_outage(stack: ExitStack) -> None:
    _patch(stack, Standby, "hold_off", lambda *_arguments: None)


def who_handed_over_claims_again(stack: ExitStack) -> None:
    _patch(stack, Standby, "handed_over", lambda *_arguments: None)


def beside_its_own_old_handler(stack: ExitStack) -> None:
    _patch(stack, Runtime, "bars_starting", lambda *_arguments: False)
    _patch(stack, decide, "bars_asking", lambda *_arguments, **_options: False)


def a_removed_job_is_looked_back_over(stack: ExitStack) -> None:
    _patch(stack, CatchUp, "leave_out", lambda *_arguments: None)


# -- ends ------------------------------------------------------------------------------------------


def an_end_is_told_once(stack: ExitStack) -> None:
    _patch(stack, worker.Settling, "_failed", lambda *_arguments: None)


def nothing_ends_an_outage(stack: ExitStack) -> None:
    _patch(stack, Caller, "round_ended", lambda *_arguments: None)


def an_outage_is_told_each_time(stack: ExitStack) -> None:
    failed = Caller.failed

    def again(self: Caller, lane: str, error: StoreError) -> None:
        failed(self, lane, error)
        if self._down_since_ms is not None:
            self._on_down(error)

    _patch(stack, Caller, "failed", again)


def a_stopping_instance_starts_what_it_is_granted(stack: ExitStack) -> None:
    start = Starter.start

    def on(self: Starter, item: Candidate, reply: LeaseReply, sent_ms: int) -> None:
        stopping, context = self._context.stopping, self._context
        if not stopping.is_set():
            start(self, item, reply, sent_ms)
            return
        stopping.clear()
        try:
            start(self, item, reply, sent_ms)
        finally:
            context.stopping.set()

    _patch(stack, Starter, "start", on)


def a_forked_child_settles(stack: ExitStack) -> None:
    real = worker.execute

    def both(context: Context, live: LiveRun) -> None:
        with mock.patch.object(worker, "os", mock.Mock(getpid=lambda: 1)):
            real(context, live)

    _patch(stack, forks, "execute", both)


def a_timer_that_does_not_wait(stack: ExitStack) -> None:
    _patch(stack, TimerLoop, "_delay_ms", lambda _self, *, more: 0 if more else 1)


def a_lock_over_a_call(stack: ExitStack) -> None:
    ask = TimerLoop._ask_pending

    def locked(self: TimerLoop) -> None:
        with self._lock:
            ask(self)

    _patch(stack, TimerLoop, "_ask_pending", locked)


# -- what a claim says -----------------------------------------------------------------------------


def _claims(stack: ExitStack, change: Callable[[LeaseClaim, Candidate], LeaseClaim]) -> None:
    claim_of = LeaseClaimer._claim_of

    def changed(self: LeaseClaimer, item: Candidate, now_ms: int, steady_ms: int) -> LeaseClaim:
        return change(claim_of(self, item, now_ms, steady_ms), item)

    _patch(stack, LeaseClaimer, "_claim_of", changed)


def late_runs_are_skipped(stack: ExitStack) -> None:
    def skip(claim: LeaseClaim, _item: Candidate) -> LeaseClaim:
        late = claim.on_overlap is OnOverlap.DEFER
        return replace(claim, on_overlap=OnOverlap.SKIP) if late else claim

    _claims(stack, skip)


def runs_on_time_are_deferred(stack: ExitStack) -> None:
    def defer(claim: LeaseClaim, _item: Candidate) -> LeaseClaim:
        on_time = claim.on_overlap is OnOverlap.SKIP
        return replace(claim, on_overlap=OnOverlap.DEFER) if on_time else claim

    _claims(stack, defer)


def the_due_time_is_now(stack: ExitStack) -> None:
    _claims(stack, lambda claim, _item: replace(claim, due_ms=claim.due_ms - 10_000))


# -- the specification -----------------------------------------------------------------------------


def _decides(function: faulty.Transition) -> Plant:
    return lambda stack: _patch(stack, _local, "transition", function)


def _lists(function: object) -> Plant:
    return lambda stack: _patch(stack, _local, "claimable", function)


def abandons_live_runs(stack: ExitStack) -> None:
    """As the function of that name, also among what pruning finds."""

    def old_ones(tables: MemoryTables, until_ms: int, limit: int) -> list[RunRecord]:
        old = [run for run in tables.unsettled(None) if run.key.scheduled_ms < until_ms]
        return old[:limit]

    _patch(stack, MemoryTables, "lapsed_before", old_ones)
    _patch(stack, _local, "abandon", faulty.abandons_live_runs)


def _registers(function: object) -> Plant:
    return lambda stack: _patch(stack, _local, "register", function)


def takes_over_a_live_lease(record: faulty.Record, job: Any, command: Any, now_ms: int) -> Any:
    if record is not None and isinstance(command, LeaseClaim):
        own = record.decision_id == command.decision_id
        if is_live(record, now_ms) and not own:
            record = replace(record, until_ms=now_ms)
    return transition(record, job, command, now_ms)


def abandons_at_once(record: faulty.Record, job: Any, command: Any, now_ms: int) -> Any:
    if isinstance(command, LeaseClaim):
        command = replace(command, takeover_ms=1_000)
    return transition(record, job, command, now_ms)


def all_planted() -> tuple[Planted, ...]:
    """Return all planted faults."""
    engine = (
        ("hurricane", trust_from_the_reply_to_a_claim, "trust counts from a claim's reply"),
        (
            "hurricane",
            trust_from_the_reply_to_a_renewal,
            "trust counts from a renewal's reply",
        ),
        ("hurricane", no_margin, "trust has no margin after a renewal"),
        ("storm", no_look_before_the_handler, "a handler is called without a look at its lease"),
        ("storm", a_refused_renewal_is_ignored, "trust never ends by the clock"),
        ("mild", a_new_decision_for_each_try, "each try of a claim is a new decision"),
        ("claim-storm", a_new_decision_for_each_try, "the same on a claim backend"),
        ("storm", one_decision_for_all, "all instances claim under one decision"),
        ("claim-storm", one_decision_for_all, "the same on a claim backend"),
        ("claim-storm", an_early_answer_ends_a_decision, "asked too early is a new decision next"),
        ("claim-storm", no_answer_is_a_yes, "a claim without an answer is taken for won"),
        ("crowd", looking_back_finds_nothing, "nothing is made up for"),
        ("deploys", the_newest_owed_one_is_forgotten, "the newest owed run is forgotten"),
        ("storm", everything_is_owed, "times before the owed-since date are made up for"),
        ("crowd", a_wider_window_is_owed, "the window of catch-up is half a minute wider"),
        ("pruning", nothing_given_up_is_told, "what lies before the window is not told"),
        ("outages", no_registration_after_an_outage, "an instance registers only once"),
        ("clocks", a_set_back_clock_repeats_the_agenda, "a step back hands everything out again"),
        ("storm", unsettled_runs_are_not_looked_for, "nobody looks for unsettled runs"),
        ("crowd", no_hold_off_after_an_outage, "takeovers begin right after an outage"),
        ("deploys", a_removed_job_is_looked_back_over, "a removed job is made up for"),
        ("deploys", who_handed_over_claims_again, "who handed a run over claims it again"),
        ("hurricane", beside_its_own_old_handler, "a run begins beside its own old handler"),
        ("mild", an_end_is_told_once, "a settlement without an answer is not repeated"),
        ("storm", nothing_ends_an_outage, "an outage never ends"),
        ("storm", an_outage_is_told_each_time, "an outage is told at each failed call"),
        ("deploys", a_stopping_instance_starts_what_it_is_granted, "a stop does not end claims"),
        ("storm", a_forked_child_settles, "a child that a handler forked settles its run"),
        ("mild", a_timer_that_does_not_wait, "the timer never waits"),
        ("hurricane", a_lock_over_a_call, "the timer's lock is held over a call"),
        ("hurricane", late_runs_are_skipped, "what is caught up or retried is skipped on overlap"),
        ("mild", runs_on_time_are_deferred, "an on-time overlap is deferred instead of skipped"),
        ("storm", the_due_time_is_now, "a run may be claimed before it is due"),
    )
    specification = (
        ("storm", _decides(takes_over_a_live_lease), "takeover without a lapse"),
        ("mild", _decides(faulty.forgets_decisions), "the decision id is ignored"),
        ("storm", _decides(faulty.grants_what_is_settled), "a settled run is granted"),
        ("storm", _decides(faulty.repeats_the_full_lease), "a repeated grant is for longer"),
        ("hurricane", _decides(faulty.does_not_count_the_lost_attempt), "a lost attempt is free"),
        ("crowd", _decides(faulty.allows_one_attempt_too_many), "one attempt too many"),
        ("crowd", _decides(abandons_at_once), "abandoned after a second"),
        ("pruning", _decides(faulty.ignores_what_was_pruned), "pruned_to is ignored"),
        ("storm", _decides(faulty.ignores_overlap), "overlap is not checked"),
        ("crashes", _decides(faulty.ignores_lapsed_runs), "overlap ignores lapsed runs"),
        ("pruning", _decides(faulty.leaves_stale_runs_running), "a stale run stays running"),
        ("crowd", _decides(faulty.lets_a_younger_run_go_first), "a younger run goes first"),
        ("storm", _decides(faulty.draws_tokens_per_run), "tokens rise by run, not by job"),
        ("outages", _decides(faulty.counts_tokens_from_one), "tokens begin at one"),
        ("hurricane", _decides(faulty.renews_without_a_token), "a renewal without its token"),
        ("storm", _decides(faulty.settles_without_a_token), "a settlement without a token"),
        ("storm", _decides(faulty.renews_what_is_settled), "a settled run is renewed"),
        ("storm", _decides(faulty.settles_twice), "a settled run is settled anew"),
        ("clocks", _decides(faulty.never_shortens_a_lease), "a lease too long is not shortened"),
        ("storm", _decides(faulty.grants_before_the_due_time), "a run is granted early"),
        ("crashes", _lists(faulty.lists_a_waiting_run_before_a_lapsed_one), "a waiting run first"),
        ("pruning", abandons_live_runs, "pruning abandons live runs"),
        (
            "deploys",
            _registers(faulty.keeps_the_date_of_a_changed_schedule),
            "a change keeps its date",
        ),
        (
            "outages",
            _registers(faulty.moves_the_date_each_time),
            "each registration moves the date",
        ),
    )
    found = [
        Planted(_title(plant, profile), text, profile, plant) for profile, plant, text in engine
    ]
    found += [
        Planted(f"spec: {text}", text, profile, plant) for profile, plant, text in specification
    ]
    return tuple(found)


def _title(plant: Plant, profile: str) -> str:
    where = " (claims)" if profile.startswith("claim") else ""
    return plant.__name__.replace("_", " ") + where


@contextmanager
def planted(fault: Planted) -> Iterator[None]:
    """Plant a fault."""
    with ExitStack() as stack:
        fault.plant(stack)
        yield


class Finding(NamedTuple):
    """What became of the search for a planted fault.

    Attributes:
        fault: Its name.
        histories: How many were played until it was found; None where it was not.
        kind: Kind of the violation that gave it away.
    """

    fault: str
    histories: Optional[int]
    kind: str


def look_for(name: str, most: int) -> Finding:
    """Play histories until a planted fault is found."""
    (fault,) = (item for item in all_planted() if item.name == name)
    for number in range(most):
        violation = play_planted(fault, number)
        if violation is not None:
            return Finding(name, number + 1, violation.kind)
    return Finding(name, None, "not found")


def play_planted(fault: Planted, seed: int) -> Optional[Violation]:
    """Play one history with a fault planted."""
    plan = plan_of(seed, fault.profile)
    with planted(fault):
        return play(plan, load("memory")[plan.family]).violation
