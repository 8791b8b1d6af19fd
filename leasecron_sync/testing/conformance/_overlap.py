"""Cases about runs of one job that get into each other's way."""

from __future__ import annotations

import pytest

from leasecron_sync.model import OnOverlap, RenewReply, RunKey, RunState, Verdict
from leasecron_sync.testing.conformance._store import (
    ALLOW,
    DEFER,
    ENDINGS,
    HOUR_MS,
    SKIP,
    LeaseInstance,
    LeaseStore,
)


class OverlapCases:
    """What a claim is answered when another run of the job is in progress."""

    def test_on_time_overlap_is_skipped_once(self, store: LeaseStore) -> None:
        """OVERLAP-1, line 6 (c): the first one records it, the others are told."""
        holder, asker = store.instance(), store.instance()
        first, second = store.run(ago_ms=1), store.run()
        holder.win(first)
        reply = asker.ask(second)
        assert (reply.verdict, reply.state, reply.reason) == (
            Verdict.SETTLED,
            RunState.SKIPPED,
            "overlap",
        )
        assert reply.fresh
        record = store.record(second)
        assert (record.state, record.reason) == (RunState.SKIPPED, "overlap")
        assert (record.token, record.attempt) == (0, 0)
        told = holder.ask(second)
        assert (told.verdict, told.state, told.fresh) == (Verdict.SETTLED, RunState.SKIPPED, False)

    def test_caught_up_overlap_is_deferred(self, store: LeaseStore) -> None:
        """OVERLAP-2, line 6 (c): nothing is written, and it can be claimed later."""
        holder, asker = store.instance(), store.instance()
        first, second = store.run(ago_ms=1), store.run()
        lease = holder.win(first)
        before = store.records()
        store.advance(store.lease_ms // 2)
        claim = asker.intend(second, on_overlap=DEFER)
        reply = asker.ask(claim)
        assert (reply.verdict, reply.state, reply.fresh) == (Verdict.DEFERRED, None, False)
        assert store.is_about(reply.wait_ms, store.lease_ms // 2)
        assert store.records() == before
        holder.finish(lease)
        assert asker.win(claim).attempt == 1

    @pytest.mark.parametrize("wish", [SKIP, DEFER])
    def test_older_run_is_not_granted_beside_a_younger_one(
        self, store: LeaseStore, wish: OnOverlap
    ) -> None:
        """OVERLAP-2, line 6 (c): any other run of the job, not only an older one."""
        holder, asker = store.instance(), store.instance()
        old, young = store.run(ago_ms=1), store.run()
        holder.win(young)
        assert asker.ask(asker.intend(old, on_overlap=wish)).verdict is _refusal(wish)

    @pytest.mark.parametrize("wish", [SKIP, DEFER])
    def test_no_run_is_granted_beside_a_lapsed_one(
        self, store: LeaseStore, wish: OnOverlap
    ) -> None:
        """OVERLAP-3, LIFE-4, line 6 (c): it may still be taken over, or renewed."""
        holder, asker = store.instance(), store.instance()
        first, second = store.run(ago_ms=1), store.run()
        lease = holder.win(first)
        store.lapse()
        reply = asker.ask(asker.intend(second, on_overlap=wish))
        assert reply.verdict is _refusal(wish)
        assert reply.wait_ms == 0
        assert holder.renew(lease) is RenewReply.RENEWED
        assert _running(store) == [first]

    def test_run_that_lapsed_too_long_ago_is_abandoned_by_the_next_grant(
        self, store: LeaseStore
    ) -> None:
        """OVERLAP-3, ABANDON-1, line 6 (d): in the same step, and the answer names it."""
        holder, asker = store.instance(), store.instance()
        first = store.run()
        lease = holder.win(first)
        store.lapse()
        store.advance(store.takeover_ms + 1)
        second = store.run()
        claim = asker.intend(second)
        reply = asker.ask(claim)
        assert reply.verdict is Verdict.GRANTED
        assert reply.abandoned == (first,)
        assert not reply.unsettled
        assert store.state(first) == (RunState.FAILED, "abandoned")
        assert store.record(first).failures == 1
        assert _running(store) == [second]
        assert asker.ask(claim).verdict is Verdict.GRANTED
        assert holder.renew(lease) is RenewReply.LOST
        for ending in ENDINGS:
            assert not holder.settle(lease, ending).accepted
        assert _running(store) == [second]

    def test_lapsed_run_stands_in_the_way_to_the_end_of_its_window(self, store: LeaseStore) -> None:
        """OVERLAP-3, CLOCK-4, line 6 (c): no longer than the takeover window, itself included."""
        store.needs_exact_clock()
        holder, asker = store.instance(), store.instance()
        holder.win(store.run())
        store.lapse()
        store.advance(store.takeover_ms)
        claim = asker.intend(store.run(), on_overlap=DEFER)
        assert asker.ask(claim).verdict is Verdict.DEFERRED
        store.advance(1)
        assert asker.ask(claim).verdict is Verdict.GRANTED

    @pytest.mark.parametrize("wish", [SKIP, DEFER])
    def test_older_due_run_goes_before_a_younger_one(
        self, store: LeaseStore, wish: OnOverlap
    ) -> None:
        """OVERLAP-4, line 6 (c): so nothing starves."""
        holder, asker = store.instance(), store.instance()
        old, young = store.run(ago_ms=1), store.run()
        holder.hand_over(holder.win(old))
        reply = asker.ask(asker.intend(young, on_overlap=wish))
        assert reply.verdict is _refusal(wish)
        assert asker.win(old).attempt == 2

    def test_younger_due_run_does_not_hold_up_an_older_one(self, store: LeaseStore) -> None:
        """OVERLAP-4, line 6 (c)."""
        holder, asker = store.instance(), store.instance()
        old, young = store.run(ago_ms=1), store.run()
        holder.hand_over(holder.win(young))
        assert asker.win(old).attempt == 1

    def test_wait_that_is_not_over_blocks_nothing(self, store: LeaseStore) -> None:
        """OVERLAP-4, line 6."""
        holder, asker = store.instance(), store.instance()
        old, young = store.run(ago_ms=1), store.run()
        holder.fail(holder.win(old), store.lease_ms)
        assert asker.win(young).attempt == 1

    def test_settled_run_blocks_nothing(self, store: LeaseStore) -> None:
        """Section 7: it is no longer in progress."""
        holder, asker = store.instance(), store.instance()
        finished, failed = store.run(ago_ms=2), store.run(ago_ms=1)
        holder.finish(holder.win(finished))
        holder.fail(holder.win(holder.intend(failed, max_attempts=1)))
        assert asker.win(store.run()).attempt == 1

    def test_allowed_overlap_asks_nothing(self, store: LeaseStore) -> None:
        """OVERLAP-5: live, lapsed and waiting runs of the job are all the same to it."""
        holder = store.instance()
        lapsed, waiting, live, last = (store.run(ago_ms=age) for age in (4, 3, 2, 1))
        holder.win(holder.intend(lapsed, on_overlap=ALLOW))
        holder.hand_over(holder.win(holder.intend(waiting, on_overlap=ALLOW)))
        store.lapse()
        for run in (live, last, waiting, lapsed):
            holder.win(holder.intend(run, on_overlap=ALLOW))
        assert sorted(_running(store)) == sorted([lapsed, waiting, live, last])

    def test_runs_of_other_jobs_do_not_count(self, store: LeaseStore) -> None:
        """CALL-6, section 7."""
        holder = store.instance()
        holder.win(store.run("job"))
        for name in ("job ", "Job", "jo", "job\n"):
            assert holder.win(store.run(name)).attempt == 1

    def test_two_runs_of_a_job_in_one_batch_are_decided_in_turn(self, store: LeaseStore) -> None:
        """LIFE-1, LIFE-4: the second sees what the first one wrote."""
        holder = store.instance()
        first, second, third = (store.run(ago_ms=age) for age in (3, 2, 1))
        replies = holder.ask_all([first, second, holder.intend(third, on_overlap=DEFER)])
        assert [reply.verdict for reply in replies] == [
            Verdict.GRANTED,
            Verdict.SETTLED,
            Verdict.DEFERRED,
        ]
        assert _running(store) == [first]

    def test_nothing_starves_and_nothing_overlaps(self, store: LeaseStore) -> None:
        """LIFE-4, OVERLAP-2 to OVERLAP-4: three runs, each fails once, and one runner is lost."""
        a, b = store.instance(), store.instance()
        runs = [store.run(ago_ms=age) for age in (3, 2, 1)]
        finished: list[RunKey] = []
        for turn in range(30):
            asker: LeaseInstance = (a, b)[turn % 2]
            for run in runs:
                reply = asker.ask(asker.intend(run, on_overlap=DEFER, max_age_ms=HOUR_MS))
                assert len(_running(store)) <= 1
                if reply.lease is None or (run == runs[1] and reply.lease.attempt == 1):
                    continue  # refused, or the runner is lost here
                if reply.lease.failures == 0:
                    asker.fail(reply.lease, store.lease_ms // 2)
                else:
                    asker.finish(reply.lease)
                    finished.append(run)
            store.advance(store.lease_ms // 2)
        assert sorted(store.records()) == sorted(runs)
        assert {record.state for record in store.records().values()} == {RunState.FINISHED}
        assert len(finished) == len(runs)


def _refusal(wish: OnOverlap) -> Verdict:
    return Verdict.SETTLED if wish is SKIP else Verdict.DEFERRED


def _running(store: LeaseStore) -> list[RunKey]:
    records = store.records().values()
    return [record.key for record in records if record.state is RunState.RUNNING]
