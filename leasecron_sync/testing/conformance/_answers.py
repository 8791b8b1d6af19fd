"""Cases about what holds for every line of the decision table, and about clocks."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from unittest import mock

import pytest

from leasecron_sync.clock import SystemClock
from leasecron_sync.model import LeaseReply, RenewReply, RunState, Verdict
from leasecron_sync.testing.conformance._store import (
    ALLOW,
    DEFER,
    HOUR_MS,
    LeaseStore,
)


def _settled(reply: LeaseReply) -> tuple[Verdict, object, str, bool]:
    return reply.verdict, reply.state, reply.reason, reply.fresh


class AnswerCases:
    """What holds for every answer to a claim."""

    # -- what holds for every line ----------------------------------------------------------------

    def test_only_the_deciding_claim_is_fresh(self, store: LeaseStore) -> None:
        """CLAIM-8, CALL-3: a repeat of it is fresh too, the others are told and stay silent."""
        holder, asker = store.instance(), store.instance()
        blocker, skipped = store.run("skipped", ago_ms=1), store.run("skipped")
        lost, abandoned = store.run("lost"), store.run("abandoned")
        holder.win(lost)
        holder.win(abandoned)
        store.advance(store.lease_ms + store.takeover_ms + 1)
        holder.win(holder.intend(blocker, due_ms=store.now_ms()))
        claims = [
            asker.intend(skipped, due_ms=store.now_ms()),
            asker.intend(lost, max_attempts=1, takeover_ms=2 * store.takeover_ms),
            asker.intend(abandoned),
        ]
        expected = [
            (Verdict.SETTLED, RunState.SKIPPED, "overlap", True),
            (Verdict.SETTLED, RunState.FAILED, "runner lost", True),
            (Verdict.SETTLED, RunState.FAILED, "abandoned", True),
        ]
        assert [_settled(reply) for reply in asker.ask_all(claims)] == expected
        assert [_settled(reply) for reply in asker.ask_all(claims)] == expected
        others = store.instance().ask_all([skipped, lost, abandoned])
        assert [_settled(reply) for reply in others] == [(*row[:3], False) for row in expected]

    def test_refused_claims_write_nothing(self, store: LeaseStore) -> None:
        """CLAIM-9: early, too old, held, waiting and deferred."""
        holder, asker = store.instance(), store.instance()
        held, young = store.run("held", ago_ms=1), store.run("held")
        waiting, early, old = store.run("waiting"), store.run("early"), store.run("old")
        lease = holder.win(held)
        holder.fail(holder.win(waiting), 2 * store.lease_ms)
        before = store.records()
        asked = [
            asker.intend(held),
            asker.intend(young, on_overlap=DEFER),
            asker.intend(waiting),
            asker.intend(early, due_ms=early.scheduled_ms + HOUR_MS),
            asker.intend(old, due_ms=old.scheduled_ms - HOUR_MS, max_age_ms=1),
        ]
        verdicts = [reply.verdict for reply in asker.ask_all(asked)]
        assert verdicts == [
            Verdict.HELD,
            Verdict.DEFERRED,
            Verdict.WAITING,
            Verdict.EARLY,
            Verdict.TOO_OLD,
        ]
        assert store.records() == before
        assert holder.renew(lease) is RenewReply.RENEWED

    def test_grant_writes_the_options_of_its_claim(self, store: LeaseStore) -> None:
        """SETTLE-5, section 5: the attempts of the last claim count."""
        holder, run = store.instance(), store.run()
        holder.win(holder.intend(run, max_attempts=9))
        store.lapse()
        lease = holder.win(holder.intend(run, max_attempts=2, lease_ms=3 * store.lease_ms))
        assert lease.left_ms == 3 * store.lease_ms
        record = store.record(run)
        assert (record.max_attempts, record.lease_ms) == (2, 3 * store.lease_ms)
        store.advance(2 * store.lease_ms)
        assert store.instance().ask(run).verdict is Verdict.HELD
        assert holder.fail(lease).state is RunState.FAILED

    def test_claim_names_an_unsettled_run_of_its_job(self, store: LeaseStore) -> None:
        """Section 4, pending: that is how an instance learns of a run that it may take over."""
        holder, asker = store.instance(), store.instance()
        run, other = store.run(ago_ms=1), store.run()
        claim = holder.intend(run, on_overlap=ALLOW)
        assert not holder.ask(claim).unsettled
        assert asker.ask(run).unsettled
        assert asker.ask(asker.intend(other, on_overlap=ALLOW)).unsettled
        third = store.run(ago_ms=2)
        assert holder.ask(holder.intend(third, on_overlap=ALLOW)).unsettled  # asker's run
        alone = store.run("alone")
        assert not asker.ask(alone).unsettled

    def test_own_live_run_is_no_run_to_take_over(self, store: LeaseStore) -> None:
        """Section 4, pending: until its lease has lapsed."""
        holder, first = store.instance(), store.run(ago_ms=2)
        holder.win(holder.intend(first, on_overlap=ALLOW))
        second = holder.intend(store.run(ago_ms=1), on_overlap=ALLOW)
        assert not holder.ask(second).unsettled
        store.lapse()
        assert holder.ask(holder.intend(store.run(), on_overlap=ALLOW)).unsettled

    def test_replies_keep_the_order(self, store: LeaseStore) -> None:
        """CALL-4."""
        holder, asker = store.instance(), store.instance()
        runs = [store.run(f"job {number}") for number in (7, 2, 9, 1, 8, 3)]
        holder.ask_all(runs[1::2])
        replies = asker.ask_all(runs)
        verdicts = [reply.verdict for reply in replies]
        assert verdicts == [Verdict.GRANTED, Verdict.HELD] * 3
        granted = [reply.lease.ref.key for reply in replies if reply.lease is not None]
        assert granted == runs[::2]

    def test_empty_batches_are_answered(self, store: LeaseStore) -> None:
        """CALL-4: with nothing."""
        backend = store.instance().backend
        assert list(backend.claim([])) == []
        assert list(backend.renew([], store.lease_ms)) == []
        assert list(backend.register([])) == []
        assert list(backend.states([])) == []
        pending = backend.pending([], 10)
        assert (pending.keys, pending.next_in_ms, pending.unsettled) == ((), None, False)

    def test_one_unreadable_record_does_not_spoil_the_batch(self, store: LeaseStore) -> None:
        """CALL-5: the item is refused by itself, and its run is not started."""
        holder, asker = store.instance(), store.instance()
        first, damaged, last = (store.run(name) for name in ("first", "damaged", "last"))
        leases = [holder.win(run) for run in (first, damaged, last)]
        store.plant_unreadable(store.namespace, damaged)
        renewed = holder.backend.renew([lease.ref for lease in leases], store.lease_ms)
        assert list(renewed) == [RenewReply.RENEWED, RenewReply.LOST, RenewReply.RENEWED]
        store.lapse()
        replies = asker.ask_all([first, damaged, last])
        verdicts = [reply.verdict for reply in replies]
        assert verdicts == [Verdict.GRANTED, Verdict.REJECTED, Verdict.GRANTED]
        assert (replies[1].lease, replies[1].fresh) == (None, False)
        assert replies[1].reason

    def test_store_clock_rules(self, store: LeaseStore) -> None:
        """CLOCK-1: a host whose clock is an hour off decides nothing."""
        if not store.suite.own_clock:
            pytest.skip("this store has no clock but the host's")
        asker, run = store.instance(), store.run()
        for off_s in (3_600, -3_600):
            with _host_clock_off_by(off_s):
                later = store.run(f"later {off_s}")
                claim = asker.intend(later, due_ms=later.scheduled_ms + store.lease_ms)
                assert store.is_about(asker.ask(claim).wait_ms, store.lease_ms)
                assert store.instance().ask(store.run(f"on time {off_s}")).lease is not None
        holder = store.instance()
        lease = holder.win(run)
        for off_s in (3_600, -3_600):
            with _host_clock_off_by(off_s):
                reply = asker.ask(run)
                assert reply.verdict is Verdict.HELD
                assert store.is_about(reply.wait_ms, store.lease_ms)
                assert holder.renew(lease) is RenewReply.RENEWED
        store.lapse()
        with _host_clock_off_by(-3_600):
            assert asker.win(run).takeover

    # -- a clock that was set back ----------------------------------------------------------------

    def test_lease_too_long_for_the_clock_is_shortened(self, store: LeaseStore) -> None:
        """CLAIM-3, line 3: to now plus the length that its own claim asked for."""
        holder, asker = store.instance(), store.instance()
        run = store.run()
        holder.win(run)
        store.set_back()
        reply = asker.ask(asker.intend(run, lease_ms=7 * store.lease_ms))
        assert (reply.verdict, reply.wait_ms) == (Verdict.HELD, store.lease_ms)
        store.lapse()
        assert asker.win(run).takeover

    def test_same_decision_is_granted_no_more_than_one_lease(self, store: LeaseStore) -> None:
        """CLAIM-3, line 1: the shortening comes first here too."""
        holder, run = store.instance(), store.run()
        claim = holder.intend(run)
        lease = holder.win(claim)
        store.set_back()
        again = holder.win(claim)
        assert (again.ref, again.left_ms) == (lease.ref, store.lease_ms)
        assert store.is_about(store.instance().ask(run).wait_ms, store.lease_ms)

    def test_lease_of_twice_its_length_is_left_alone(self, store: LeaseStore) -> None:
        """CLAIM-3: more than twice, not twice."""
        store.needs_exact_clock()
        holder, run = store.instance(), store.run()
        claim = holder.intend(run, lease_ms=HOUR_MS)
        holder.win(claim)
        store.set_back(HOUR_MS)
        assert holder.win(claim).left_ms == 2 * HOUR_MS
        store.set_back(HOUR_MS)
        assert holder.win(claim).left_ms == HOUR_MS

    def test_wait_longer_than_any_retry_delay_is_over(self, store: LeaseStore) -> None:
        """CLAIM-5: so long a wait shows that the clock was set back."""
        holder, run = store.instance(), store.run()
        holder.fail(holder.win(run), store.lease_ms)
        store.set_back()
        assert store.instance().win(run).attempt == 2


@contextmanager
def _host_clock_off_by(off_s: int) -> Generator[None, None, None]:
    """Let the host's wall clock stand still at an instant that is off by some seconds."""
    shown_ms = SystemClock().now_ms() + off_s * 1_000
    seconds = mock.patch("time.time", return_value=shown_ms / 1_000)
    nanoseconds = mock.patch("time.time_ns", return_value=shown_ms * 1_000_000)
    with seconds, nanoseconds:
        yield
