"""Cases about what a holder does: renew and settle, tokens and attempts."""

from __future__ import annotations

from typing import Optional

import pytest

from leasecron_sync.model import (
    LeaseRef,
    Outcome,
    RenewReply,
    RunState,
    Settlement,
    Verdict,
)
from leasecron_sync.testing.conformance._store import (
    ALLOW,
    ENDINGS,
    FAILED,
    FINISHED,
    HANDED_OVER,
    LeaseStore,
    unknown_lease,
)

MANY = 1_000


class LifeCases:
    """What the holder of a lease is answered."""

    # -- tokens -----------------------------------------------------------------------------------

    def test_token_rises_over_runs_and_attempts(self, store: LeaseStore) -> None:
        """TOKEN-1, TOKEN-2, CLAIM-6: by at least one with each grant of the job."""
        holder = store.instance()
        runs = [store.run(ago_ms=age) for age in (1, 4, 2, 3)]
        claims = [holder.intend(run, on_overlap=ALLOW) for run in runs]
        tokens = [holder.win(claim).ref.token for claim in claims]
        store.lapse()
        for run in (runs[3], runs[0]):
            lease = holder.win(run)
            tokens.append(lease.ref.token)
            holder.finish(lease)
        assert tokens == sorted(set(tokens))

    def test_token_is_never_below_the_time_of_the_store(self, store: LeaseStore) -> None:
        """TOKEN-1, TOKEN-3: so tokens go on rising after the store lost its data."""
        holder = store.instance()
        first, second = store.run(ago_ms=1), store.run()
        now_ms = store.now_ms()
        lease = holder.win(first)
        assert store.is_about(now_ms, lease.ref.token)
        holder.finish(lease)
        assert holder.win(second).ref.token > lease.ref.token
        store.advance(store.lease_ms)
        now_ms = store.now_ms()
        assert store.is_about(now_ms, holder.win(store.run("other")).ref.token)

    def test_token_rises_when_the_clock_was_set_back(self, store: LeaseStore) -> None:
        """TOKEN-1, TOKEN-2: one more than the last one."""
        holder, run = store.instance(), store.run()
        before = holder.win(run)
        holder.hand_over(before)
        store.set_back()
        assert holder.win(run).ref.token == before.ref.token + 1

    # -- renew ------------------------------------------------------------------------------------

    def test_renewal_extends_the_lease_from_now_on(self, store: LeaseStore) -> None:
        """RENEW-5, CALL-3: as often as it is asked, and by the length that it names."""
        holder, run = store.instance(), store.run()
        lease = holder.win(run)
        for _ in range(3):
            store.advance(store.lease_ms // 2)
            assert holder.renew(lease) is RenewReply.RENEWED
            assert holder.renew(lease) is RenewReply.RENEWED
        assert store.is_about(store.instance().ask(run).wait_ms, store.lease_ms)
        [reply] = holder.backend.renew([lease.ref], 2 * store.lease_ms)
        assert reply is RenewReply.RENEWED
        assert store.is_about(store.instance().ask(run).wait_ms, 2 * store.lease_ms)
        store.advance(2 * store.lease_ms)
        assert store.instance().win(run).takeover

    def test_old_token_cannot_renew(self, store: LeaseStore) -> None:
        """RENEW-1, TOKEN-4: and the newer lease is left as it is."""
        holder, run = store.instance(), store.run()
        old = holder.win(run)
        store.lapse()
        new = holder.win(run)
        store.advance(store.lease_ms // 2)
        assert holder.renew(old) is RenewReply.LOST
        assert store.is_about(store.instance().ask(run).wait_ms, store.lease_ms // 2)
        assert holder.renew(new) is RenewReply.RENEWED

    def test_token_is_all_that_a_renewal_compares(self, store: LeaseStore) -> None:
        """RENEW-1: never the holder; and a greater token is as foreign as a smaller one."""
        run = store.run()
        lease = store.instance().win(run)
        other = store.instance()
        assert other.renew(lease) is RenewReply.RENEWED
        for token in (lease.ref.token - 1, lease.ref.token + 1, 0, -1):
            assert other.renew(unknown_lease(run, token)) is RenewReply.LOST

    def test_renewal_revives_a_lapsed_lease_that_nobody_took_over(self, store: LeaseStore) -> None:
        """RENEW-2."""
        holder, run = store.instance(), store.run()
        lease = holder.win(run)
        store.advance(2 * store.lease_ms)
        assert holder.renew(lease) is RenewReply.RENEWED
        reply = store.instance().ask(run)
        assert reply.verdict is Verdict.HELD
        assert store.is_about(reply.wait_ms, store.lease_ms)

    def test_one_lost_lease_does_not_spoil_the_batch(self, store: LeaseStore) -> None:
        """RENEW-3, CALL-4: lost, unknown and settled ones among the others."""
        holder = store.instance()
        names = ("kept", "taken over", "settled", "kept too")
        leases = {name: holder.win(store.run(name)) for name in names}
        store.lapse()
        store.instance().win(leases["taken over"].ref.key)
        holder.finish(leases["settled"])
        refs = [leases[name].ref for name in names]
        refs.insert(1, LeaseRef(store.run("unknown"), 1))
        assert list(holder.backend.renew(refs, store.lease_ms)) == [
            RenewReply.RENEWED,
            RenewReply.LOST,
            RenewReply.LOST,
            RenewReply.LOST,
            RenewReply.RENEWED,
        ]
        for name in ("kept", "kept too"):
            reply = store.instance().ask(leases[name].ref.key)
            assert store.is_about(reply.wait_ms, store.lease_ms)

    @pytest.mark.parametrize("ending", ENDINGS, ids=lambda ending: ending.outcome.value)
    def test_settled_attempt_cannot_be_renewed(self, store: LeaseStore, ending: Settlement) -> None:
        """RENEW-4: also when the run waits for its next attempt."""
        holder, run = store.instance(), store.run()
        lease = holder.win(run)
        holder.settle(lease, ending)
        before = store.record(run)
        assert holder.renew(lease) is RenewReply.LOST
        assert store.record(run) == before

    def test_renewal_after_the_clock_was_set_back_is_shorter(self, store: LeaseStore) -> None:
        """RENEW-5: from now, also when that is earlier than the old end."""
        holder, run = store.instance(), store.run()
        lease = holder.win(run)
        store.set_back()
        assert holder.renew(lease) is RenewReply.RENEWED
        asker = store.instance()
        pending = asker.pending()
        assert (pending.keys, pending.next_in_ms) == ((), store.lease_ms)
        reply = asker.ask(run)
        assert (reply.verdict, reply.wait_ms) == (Verdict.HELD, store.lease_ms)

    def test_thousand_leases_are_renewed_in_one_call(self, store: LeaseStore) -> None:
        """RENEW-3, CALL-4."""
        holder = store.instance()
        runs = [store.run(f"job {number}") for number in range(MANY)]
        replies = holder.ask_all(runs)
        refs = [reply.lease.ref for reply in replies if reply.lease is not None]
        assert [ref.key for ref in refs] == runs
        refs[500] = LeaseRef(runs[500], refs[500].token + 1)
        store.advance(store.lease_ms // 2)
        renewed = holder.backend.renew(refs, 2 * store.lease_ms)
        assert [n for n, reply in enumerate(renewed) if reply is RenewReply.LOST] == [500]
        store.advance(store.lease_ms)
        verdicts = [reply.verdict for reply in store.instance().ask_all(runs[498:503])]
        assert verdicts == [
            Verdict.HELD,
            Verdict.HELD,
            Verdict.GRANTED,
            Verdict.HELD,
            Verdict.HELD,
        ]

    # -- settle -----------------------------------------------------------------------------------

    @pytest.mark.parametrize("ending", ENDINGS, ids=lambda ending: ending.outcome.value)
    def test_old_token_cannot_settle(self, store: LeaseStore, ending: Settlement) -> None:
        """SETTLE-1, TOKEN-4: finish, fail and hand-over alike, and nothing changes."""
        holder, run = store.instance(), store.run()
        old = holder.win(run)
        store.lapse()
        new = store.instance().win(run)
        before = store.record(run)
        reply = holder.settle(old, ending)
        assert (reply.accepted, reply.state) == (False, RunState.RUNNING)
        for token in (new.ref.token + 1, 0):
            assert not holder.settle(unknown_lease(run, token), ending).accepted
        assert store.record(run) == before
        assert holder.finish(new).accepted
        late = holder.settle(old, ending)
        assert (late.accepted, late.state) == (False, RunState.FINISHED)

    @pytest.mark.parametrize("ending", ENDINGS, ids=lambda ending: ending.outcome.value)
    def test_lapsed_but_untaken_lease_can_settle(
        self, store: LeaseStore, ending: Settlement
    ) -> None:
        """SETTLE-2: nobody else began an attempt, so its result counts."""
        holder, run = store.instance(), store.run()
        lease = holder.win(run)
        store.advance(3 * store.lease_ms)
        reply = holder.settle(lease, ending)
        assert reply.accepted
        state = RunState.FINISHED if ending is FINISHED else RunState.WAITING
        assert reply.state is state
        assert store.record(run).state is state

    @pytest.mark.parametrize("reason", ["runner lost", "abandoned"])
    @pytest.mark.parametrize("ending", ENDINGS, ids=lambda ending: ending.outcome.value)
    def test_what_others_settled_cannot_be_settled_by_the_holder(
        self, store: LeaseStore, ending: Settlement, reason: str
    ) -> None:
        """SETTLE-3: although no other token was drawn."""
        holder, asker, run = store.instance(), store.instance(), store.run()
        lease = holder.win(run)
        store.lapse()
        if reason == "abandoned":
            store.advance(store.takeover_ms + 1)
        asker.ask(asker.intend(run, max_attempts=1))
        assert store.state(run) == (RunState.FAILED, reason)
        before = store.record(run)
        reply = holder.settle(lease, ending)
        assert (reply.accepted, reply.state) == (False, RunState.FAILED)
        assert store.record(run) == before

    def test_settle_of_a_run_without_a_record_is_refused(self, store: LeaseStore) -> None:
        """SETTLE-1: nobody was granted it, or it was pruned."""
        holder, run = store.instance(), store.run()
        for job in ("job", "nobody's job"):
            for ending in ENDINGS:
                reply = holder.settle(unknown_lease(store.run(job)), ending)
                assert (reply.accepted, reply.state) == (False, None)
        assert store.records() == {}
        assert holder.win(run).attempt == 1

    @pytest.mark.parametrize("ending", ENDINGS, ids=lambda ending: ending.outcome.value)
    def test_repeated_settle_is_accepted(self, store: LeaseStore, ending: Settlement) -> None:
        """SETTLE-4, CALL-3: with the state that the first one brought about, and no effect."""
        holder, run = store.instance(), store.run()
        lease = holder.win(run)
        first = holder.settle(lease, ending)
        before = store.record(run)
        for instance in (holder, holder, store.instance()):
            assert instance.settle(lease, ending) == first
        assert store.record(run) == before

    def test_repeated_failure_tells_the_wait_that_is_left(self, store: LeaseStore) -> None:
        """CALL-3, SETTLE-5: the wait of the first, and the time left now."""
        holder, run = store.instance(), store.run()
        lease = holder.win(run)
        assert holder.fail(lease, 2 * store.lease_ms).wait_ms == 2 * store.lease_ms
        store.advance(store.lease_ms)
        reply = holder.fail(lease, 2 * store.lease_ms)
        assert (reply.accepted, reply.state) == (True, RunState.WAITING)
        assert store.is_about(reply.wait_ms, store.lease_ms)
        store.advance(2 * store.lease_ms)
        assert holder.fail(lease, 2 * store.lease_ms).wait_ms == 0
        assert store.record(run).failures == 1

    def test_first_settlement_under_a_token_stands(self, store: LeaseStore) -> None:
        """CALL-3: a different one changes nothing and is told the state of the first."""
        holder = store.instance()
        for first, state in ((FINISHED, RunState.FINISHED), (HANDED_OVER, RunState.WAITING)):
            run = store.run(first.outcome.value)
            lease = holder.win(run)
            holder.settle(lease, first)
            before = store.record(run)
            for other in ENDINGS:
                reply = holder.settle(lease, other)
                assert (reply.accepted, reply.state) == (True, state)
            assert store.record(run) == before

    @pytest.mark.parametrize("ending", [FAILED, HANDED_OVER], ids=["failed", "handed over"])
    def test_repeated_settle_is_refused_once_somebody_claimed_the_run(
        self, store: LeaseStore, ending: Settlement
    ) -> None:
        """SETTLE-4, CALL-3: accepted until a later claim changes the record."""
        holder, run = store.instance(), store.run()
        lease = holder.win(run)
        holder.settle(lease, ending)
        new = store.instance().win(run)
        before = store.record(run)
        assert not holder.settle(lease, ending).accepted
        assert store.record(run) == before
        holder.finish(new)
        assert not holder.settle(lease, ending).accepted

    # -- attempts and hand-overs ------------------------------------------------------------------

    def test_attempts_used_up_is_failed(self, store: LeaseStore) -> None:
        """ATTEMPT-2, SETTLE-5, LIFE-5: by the settle that reports the last failure."""
        holder, run = store.instance(), store.run()
        states: list[Optional[RunState]] = []
        for attempt in (1, 2, 3):
            lease = holder.win(run)
            assert (lease.attempt, lease.failures) == (attempt, attempt - 1)
            states.append(holder.fail(lease).state)
        assert states == [RunState.WAITING, RunState.WAITING, RunState.FAILED]
        record = store.record(run)
        assert (record.attempt, record.failures, record.reason) == (3, 3, "it broke")
        assert holder.ask(run).verdict is Verdict.SETTLED

    def test_single_attempt_is_failed_at_once(self, store: LeaseStore) -> None:
        """ATTEMPT-2: whatever wait the command brings."""
        holder, run = store.instance(), store.run()
        lease = holder.win(holder.intend(run, max_attempts=1))
        reply = holder.fail(lease, store.lease_ms)
        assert (reply.accepted, reply.state, reply.wait_ms) == (True, RunState.FAILED, 0)

    def test_failures_and_lost_runners_count_together(self, store: LeaseStore) -> None:
        """ATTEMPT-1, LIFE-5."""
        holder, run = store.instance(), store.run()
        holder.fail(holder.win(run))
        holder.win(run)
        store.lapse()
        lease = holder.win(run)
        assert (lease.attempt, lease.failures) == (3, 2)
        assert holder.fail(lease).state is RunState.FAILED

    def test_hand_over_is_claimable_at_once_and_not_counted(self, store: LeaseStore) -> None:
        """HANDOVER-1: without a wait, whatever the command says."""
        holder, run = store.instance(), store.run()
        lease = holder.win(holder.intend(run, max_attempts=1))
        reply = holder.settle(lease, Settlement(Outcome.HANDED_OVER, "stopping", store.lease_ms))
        assert (reply.accepted, reply.state, reply.wait_ms) == (True, RunState.WAITING, 0)
        other = store.instance()
        again = other.win(other.intend(run, max_attempts=1))
        assert (again.attempt, again.failures, again.takeover) == (2, 0, False)

    def test_from_the_tenth_hand_over_on_they_count(self, store: LeaseStore) -> None:
        """HANDOVER-3: so a run that everybody gives back comes to an end."""
        holder, run = store.instance(), store.run()
        seen: list[tuple[int, int, Optional[RunState]]] = []
        for number in range(1, 12):
            lease = holder.win(holder.intend(run, max_attempts=2))
            assert lease.attempt == number
            state = holder.hand_over(lease).state
            seen.append((number, store.record(run).failures, state))
        assert seen == [
            *((number, 0, RunState.WAITING) for number in range(1, 10)),
            (10, 1, RunState.WAITING),
            (11, 2, RunState.FAILED),
        ]

    def test_tenth_hand_over_of_a_single_attempt_is_failed(self, store: LeaseStore) -> None:
        """HANDOVER-3, ATTEMPT-2."""
        holder, run = store.instance(), store.run()
        states: list[Optional[RunState]] = []
        for _ in range(10):
            lease = holder.win(holder.intend(run, max_attempts=1))
            states.append(holder.hand_over(lease).state)
        assert states == [*[RunState.WAITING] * 9, RunState.FAILED]
        assert store.state(run) == (RunState.FAILED, "stopping")

    def test_repeated_hand_over_counts_once(self, store: LeaseStore) -> None:
        """SETTLE-4, HANDOVER-3."""
        holder, run = store.instance(), store.run()
        for number in range(1, 10):
            lease = holder.win(run)
            for _ in range(3):
                holder.hand_over(lease)
            assert store.record(run).hand_overs == number
        assert store.record(run).failures == 0

    @pytest.mark.parametrize(
        "reason",
        [
            "x" * 1_000,
            "\N{GREEK SMALL LETTER OMEGA}" * 1_000,
            "two\nlines\ttab 'quote' \"x\" \\ %s",
        ],
        ids=["long", "long and not ASCII", "odd"],
    )
    def test_reason_of_a_failure_is_kept(self, store: LeaseStore, reason: str) -> None:
        """Section 3: the text of the handler's error, up to 1,000 characters."""
        holder, run = store.instance(), store.run()
        lease = holder.win(run)
        holder.settle(lease, Settlement(Outcome.FAILED, reason, store.lease_ms))
        assert store.state(run) == (RunState.WAITING, reason)
        store.advance(store.lease_ms)
        lease = holder.win(holder.intend(run, max_attempts=1))
        assert store.record(run).reason == ""
        holder.settle(lease, Settlement(Outcome.FAILED, reason))
        assert store.state(run) == (RunState.FAILED, reason)
        reply = store.instance().ask(run)
        assert (reply.verdict, reply.reason) == (Verdict.SETTLED, reason)
