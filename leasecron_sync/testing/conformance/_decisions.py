"""Cases of the decision table of ``claim``; lines are those of ``docs/protocol.rst``."""

from __future__ import annotations

import pytest

from leasecron_sync.model import LeaseReply, RunState, Verdict
from leasecron_sync.testing.conformance._store import (
    ALLOW,
    DEFER,
    FAILED,
    FINISHED,
    SKIP,
    LeaseStore,
)


def _settled(reply: LeaseReply) -> tuple[Verdict, object, str, bool]:
    return reply.verdict, reply.state, reply.reason, reply.fresh


class DecisionCases:
    """What a claim is answered."""

    # -- lines 1 to 3: the same decision, settled and live runs ----------------------------------

    def test_first_claim_is_granted(self, store: LeaseStore) -> None:
        """Line 6 (d), LIFE-5: the first attempt begins under a lease of full length."""
        holder, run = store.instance(), store.run()
        reply = holder.ask(run)
        assert reply.verdict is Verdict.GRANTED
        assert reply.lease is not None
        assert reply.lease.ref.key == run
        assert (reply.lease.attempt, reply.lease.failures) == (1, 0)
        assert reply.lease.left_ms == store.lease_ms
        assert not reply.lease.takeover
        assert (reply.state, reply.fresh, reply.abandoned) == (RunState.RUNNING, True, ())
        record = store.record(run)
        assert (record.state, record.attempt, record.holder) == (RunState.RUNNING, 1, holder.id)
        assert record.token == reply.lease.ref.token

    def test_live_lease_is_held_with_wait(self, store: LeaseStore) -> None:
        """Line 3: another decision is told how long the lease lasts."""
        run = store.run()
        store.instance().win(run)
        store.advance(store.lease_ms // 2)
        reply = store.instance().ask(run)
        assert (reply.verdict, reply.lease, reply.fresh) == (Verdict.HELD, None, False)
        assert reply.state is RunState.RUNNING
        assert store.is_about(reply.wait_ms, store.lease_ms // 2)

    def test_second_decision_of_the_holder_is_held_too(self, store: LeaseStore) -> None:
        """Line 3: what counts is the decision, not who made it."""
        holder, run = store.instance(), store.run()
        holder.win(run)
        assert holder.ask(run).verdict is Verdict.HELD

    def test_same_decision_is_granted_again(self, store: LeaseStore) -> None:
        """CLAIM-1, CALL-3: same token, same attempt, from another connection too."""
        holder, run = store.instance(), store.run()
        claim = holder.intend(run)
        first = holder.win(claim)
        for instance in (holder, store.instance()):
            reply = instance.ask(claim)
            assert (reply.verdict, reply.fresh) == (Verdict.GRANTED, True)
            assert reply.lease is not None
            assert (reply.lease.ref, reply.lease.attempt) == (first.ref, 1)
        assert len(store.records()) == 1

    def test_repeated_grant_tells_the_time_left(self, store: LeaseStore) -> None:
        """CLAIM-1: not the full length, or the holder would trust its lease too long."""
        holder, run = store.instance(), store.run()
        claim = holder.intend(run)
        holder.win(claim)
        store.advance(store.lease_ms // 2)
        assert store.is_about(holder.win(claim).left_ms, store.lease_ms // 2)

    def test_decision_whose_lease_lapsed_is_judged_as_a_new_claim(self, store: LeaseStore) -> None:
        """Line 1, running and lapsed: by line 4, as the next attempt."""
        holder, run = store.instance(), store.run()
        claim = holder.intend(run)
        first = holder.win(claim)
        store.lapse()
        again = holder.win(claim)
        assert (again.attempt, again.failures, again.takeover) == (2, 1, True)
        assert again.ref.token > first.ref.token

    @pytest.mark.parametrize("state", [RunState.FINISHED, RunState.FAILED, RunState.SKIPPED])
    def test_settled_run_is_never_granted(self, store: LeaseStore, state: RunState) -> None:
        """CLAIM-2, LIFE-2, line 2: however many ask, and however late."""
        holder, run, other = store.instance(), store.run(), store.run(ago_ms=1)
        lease = holder.win(holder.intend(other if state is RunState.SKIPPED else run))
        if state is RunState.SKIPPED:
            holder.ask(run)
        else:
            holder.settle(lease, FINISHED if state is RunState.FINISHED else FAILED)
            if state is RunState.FAILED:
                for _ in range(2):
                    holder.fail(holder.win(run))
        before = store.record(run)
        assert before.state is state
        for _ in range(3):
            for wish in (ALLOW, SKIP, DEFER):
                asker = store.instance()
                reply = asker.ask(asker.intend(run, on_overlap=wish, max_attempts=100))
                assert _settled(reply) == (Verdict.SETTLED, state, before.reason, False)
            store.advance(store.takeover_ms)
        assert store.record(run) == before

    def test_run_that_waits_is_not_granted_by_its_old_decision(self, store: LeaseStore) -> None:
        """Line 1 and 5 (a): a settlement brought the state about, not this decision."""
        holder, run = store.instance(), store.run()
        claim = holder.intend(run)
        holder.fail(holder.win(claim), store.lease_ms)
        assert holder.ask(claim).verdict is Verdict.WAITING

    def test_second_decision_in_one_batch_is_held(self, store: LeaseStore) -> None:
        """LIFE-1, LIFE-3: each claim of a batch is a step of its own."""
        holder, run = store.instance(), store.run()
        verdicts = [reply.verdict for reply in holder.ask_all([run, run])]
        assert verdicts == [Verdict.GRANTED, Verdict.HELD]

    # -- line 4: running, lapsed ------------------------------------------------------------------

    def test_expired_lease_is_taken_over_with_next_attempt(self, store: LeaseStore) -> None:
        """Line 4 (d): the lost attempt is counted."""
        run = store.run()
        first = store.instance().win(run)
        store.lapse()
        standby = store.instance()
        reply = standby.ask(run)
        assert (reply.verdict, reply.fresh) == (Verdict.GRANTED, True)
        assert reply.lease is not None
        assert (reply.lease.attempt, reply.lease.failures) == (2, 1)
        assert (reply.lease.takeover, reply.lease.left_ms) == (True, store.lease_ms)
        assert reply.lease.ref.token > first.ref.token
        assert store.record(run).holder == standby.id

    def test_lease_is_live_before_its_end_and_lapsed_from_its_end_on(
        self, store: LeaseStore
    ) -> None:
        """CLOCK-4: at the very millisecond of its end it has lapsed."""
        store.needs_exact_clock()
        run = store.run()
        store.instance().win(run)
        store.advance(store.lease_ms - 1)
        reply = store.instance().ask(run)
        assert (reply.verdict, reply.wait_ms) == (Verdict.HELD, 1)
        store.advance(1)
        assert store.instance().ask(run).verdict is Verdict.GRANTED

    def test_late_takeover_is_abandoned(self, store: LeaseStore) -> None:
        """CLAIM-4, ABANDON-1, line 4 (a)."""
        run = store.run()
        store.instance().win(run)
        store.lapse()
        store.advance(store.takeover_ms + 1)
        reply = store.instance().ask(run)
        assert _settled(reply) == (Verdict.SETTLED, RunState.FAILED, "abandoned", True)
        assert store.state(run) == (RunState.FAILED, "abandoned")
        assert store.record(run).failures == 1

    def test_takeover_is_granted_to_the_end_of_its_window(self, store: LeaseStore) -> None:
        """CLAIM-4, CLOCK-4: longer means strictly more, counted from the lapse."""
        store.needs_exact_clock()
        run = store.run()
        store.instance().win(run)
        store.lapse()
        store.advance(store.takeover_ms)
        assert store.instance().win(run).attempt == 2

    def test_last_lost_runner_fails_the_run(self, store: LeaseStore) -> None:
        """ATTEMPT-1, ATTEMPT-2, line 4 (b): the claim that finds the last runner lost."""
        run = store.run()
        for attempt in (1, 2, 3):
            assert store.instance().win(run).attempt == attempt
            store.lapse()
        reply = store.instance().ask(run)
        assert _settled(reply) == (Verdict.SETTLED, RunState.FAILED, "runner lost", True)
        record = store.record(run)
        assert (record.attempt, record.failures, record.reason) == (3, 3, "runner lost")

    def test_late_takeover_of_the_last_attempt_is_abandoned(self, store: LeaseStore) -> None:
        """Line 4: (a) is asked before (b)."""
        holder, run = store.instance(), store.run()
        holder.win(holder.intend(run, max_attempts=1))
        store.lapse()
        store.advance(store.takeover_ms + 1)
        holder.ask(holder.intend(run, max_attempts=1))
        assert store.state(run) == (RunState.FAILED, "abandoned")

    def test_takeover_beside_a_live_run_is_deferred(self, store: LeaseStore) -> None:
        """Line 4 (c), OVERLAP-2: even if the claim asks for skip."""
        holder, asker = store.instance(), store.instance()
        old, young = store.run(ago_ms=1), store.run()
        holder.win(holder.intend(old, on_overlap=ALLOW))
        store.lapse()
        holder.win(holder.intend(young, on_overlap=ALLOW))
        before = store.records()
        for wish in (SKIP, DEFER):
            reply = asker.ask(asker.intend(old, on_overlap=wish))
            assert (reply.verdict, reply.state) == (Verdict.DEFERRED, RunState.RUNNING)
            assert store.is_about(reply.wait_ms, store.lease_ms)
        assert store.records() == before
        assert asker.win(asker.intend(old, on_overlap=ALLOW)).takeover

    # -- line 5: waiting --------------------------------------------------------------------------

    def test_failure_waits_then_is_granted(self, store: LeaseStore) -> None:
        """ATTEMPT-3, line 5 (a) and (d): to any instance, as no takeover."""
        holder, run = store.instance(), store.run()
        first = holder.win(run)
        settled = holder.fail(first, 2 * store.lease_ms)
        assert (settled.accepted, settled.state) == (True, RunState.WAITING)
        assert settled.wait_ms == 2 * store.lease_ms
        asker = store.instance()
        store.advance(store.lease_ms)
        reply = asker.ask(run)
        assert (reply.verdict, reply.state) == (Verdict.WAITING, RunState.WAITING)
        assert store.is_about(reply.wait_ms, store.lease_ms)
        store.advance(store.lease_ms)
        again = asker.win(run)
        assert (again.attempt, again.failures, again.takeover) == (2, 1, False)
        assert again.ref.token > first.ref.token

    def test_wait_is_over_from_its_end_on(self, store: LeaseStore) -> None:
        """CLOCK-4, line 5 (a)."""
        store.needs_exact_clock()
        holder, run = store.instance(), store.run()
        holder.fail(holder.win(run), 100)
        store.advance(99)
        reply = holder.ask(run)
        assert (reply.verdict, reply.wait_ms) == (Verdict.WAITING, 1)
        store.advance(1)
        assert holder.win(run).attempt == 2

    def test_late_retry_is_abandoned(self, store: LeaseStore) -> None:
        """CLAIM-4, line 5 (b): counted from the end of the wait; nothing more is counted."""
        holder, run = store.instance(), store.run()
        holder.fail(holder.win(run), store.lease_ms)
        store.advance(store.lease_ms + store.takeover_ms + 1)
        reply = store.instance().ask(run)
        assert _settled(reply) == (Verdict.SETTLED, RunState.FAILED, "abandoned", True)
        assert store.record(run).failures == 1

    def test_retry_behind_a_running_run_is_deferred(self, store: LeaseStore) -> None:
        """Line 5 (c), OVERLAP-2, OVERLAP-3: live or lapsed makes no difference."""
        holder, asker = store.instance(), store.instance()
        old, young = store.run(ago_ms=1), store.run()
        holder.fail(holder.win(old), store.lease_ms // 2)
        holder.win(young)
        store.advance(store.lease_ms // 2)
        before = store.records()
        reply = asker.ask(old)
        assert (reply.verdict, reply.state) == (Verdict.DEFERRED, RunState.WAITING)
        assert store.is_about(reply.wait_ms, store.lease_ms // 2)
        store.lapse()
        assert asker.ask(old).verdict is Verdict.DEFERRED
        assert store.records() == before
        asker.finish(asker.win(young))
        assert asker.win(old).attempt == 2

    # -- line 6: no record ------------------------------------------------------------------------

    def test_early_claim_waits(self, store: LeaseStore) -> None:
        """CLOCK-2, CLOCK-5, line 6 (a): measured from the due time, and nothing is written."""
        asker, run = store.instance(), store.run()
        claim = asker.intend(run, due_ms=run.scheduled_ms + store.lease_ms)
        reply = asker.ask(claim)
        assert (reply.verdict, reply.state, reply.lease) == (Verdict.EARLY, None, None)
        assert store.is_about(reply.wait_ms, store.lease_ms)
        assert store.records() == {}
        store.advance(store.lease_ms)
        assert asker.win(claim).attempt == 1

    def test_run_is_due_from_its_due_time_on(self, store: LeaseStore) -> None:
        """CLOCK-4, line 6 (a)."""
        store.needs_exact_clock()
        asker, run = store.instance(), store.run()
        claim = asker.intend(run, due_ms=run.scheduled_ms + 2)
        store.advance(1)
        assert asker.ask(claim).wait_ms == 1
        store.advance(1)
        assert asker.ask(claim).verdict is Verdict.GRANTED

    def test_run_beyond_its_greatest_age_is_too_old(self, store: LeaseStore) -> None:
        """Line 6 (b), CLOCK-5: measured from the due time, and nothing is written."""
        asker, run = store.instance(), store.run()
        store.advance(store.max_age_ms + 1)
        reply = asker.ask(run)
        assert (reply.verdict, reply.state, reply.lease) == (Verdict.TOO_OLD, None, None)
        assert store.records() == {}
        assert asker.ask(asker.intend(run, due_ms=store.now_ms())).verdict is Verdict.GRANTED

    def test_run_is_granted_up_to_its_greatest_age(self, store: LeaseStore) -> None:
        """CLOCK-4, line 6 (b): older means strictly more."""
        store.needs_exact_clock()
        asker, run = store.instance(), store.run()
        store.advance(store.max_age_ms)
        assert asker.win(run).attempt == 1

    def test_greatest_age_is_read_only_for_a_run_without_a_record(self, store: LeaseStore) -> None:
        """CLAIM-7: not for a takeover, nor for a retry."""
        holder, run = store.instance(), store.run()
        holder.win(run)
        store.lapse()
        lease = holder.win(holder.intend(run, max_age_ms=0))
        assert lease.attempt == 2
        holder.fail(lease)
        store.advance(store.lease_ms)
        assert holder.win(holder.intend(run, max_age_ms=0)).attempt == 3
