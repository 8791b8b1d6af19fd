"""Cases about registering jobs and about pruning the store."""

from __future__ import annotations

import pytest

from leasecron_sync.errors import StoreUnavailable
from leasecron_sync.model import JobSpan, JobStamp, RenewReply, RunState, Verdict
from leasecron_sync.testing.conformance._store import (
    ALLOW,
    ENDINGS,
    FINISHED,
    HOUR_MS,
    LeaseStore,
)

MINUTE_MS = 60_000


class UpkeepCases:
    """What ``register`` and ``prune`` do."""

    # -- register ---------------------------------------------------------------------------------

    def test_job_owes_nothing_from_before_it_was_first_registered(self, store: LeaseStore) -> None:
        """REGISTER-1, CALL-3: asked again, by anybody, the date stays."""
        asker, now_ms = store.instance(), store.now_ms()
        first = asker.register()
        assert store.is_about(now_ms, first.owed_from_ms)
        assert first.newest_ms is None
        store.advance(store.lease_ms)
        for instance in (asker, store.instance()):
            again = instance.register()
            assert (again.owed_from_ms, again.newest_ms) == (first.owed_from_ms, None)
            assert again.store_ms >= first.store_ms + store.lease_ms

    def test_changed_schedule_owes_nothing_before(self, store: LeaseStore) -> None:
        """REGISTER-2: and the new date stays too."""
        asker = store.instance()
        before = asker.register(fingerprint="every minute")
        store.advance(store.lease_ms)
        now_ms = store.now_ms()
        changed = asker.register(fingerprint="every hour")
        assert store.is_about(now_ms, changed.owed_from_ms)
        assert changed.owed_from_ms > before.owed_from_ms
        store.advance(store.lease_ms)
        again = store.instance().register(fingerprint="every hour")
        assert again.owed_from_ms == changed.owed_from_ms

    def test_schedule_that_returns_within_ten_minutes_keeps_its_old_date(
        self, store: LeaseStore
    ) -> None:
        """REGISTER-3: old and new instances of a rolling deploy register in turns."""
        old, new = store.instance(), store.instance()
        first = old.register(fingerprint="old")
        store.advance(store.lease_ms)
        second = new.register(fingerprint="new")
        for _ in range(3):
            store.advance(store.lease_ms)
            assert old.register(fingerprint="old").owed_from_ms == first.owed_from_ms
            assert new.register(fingerprint="new").owed_from_ms == second.owed_from_ms

    def test_schedule_that_returns_later_is_a_new_one(self, store: LeaseStore) -> None:
        """REGISTER-3: counted from when it was displaced."""
        store.needs_exact_clock()
        asker = store.instance()
        first = asker.register(fingerprint="old")
        store.advance(HOUR_MS)
        asker.register(fingerprint="new")
        store.advance(9 * MINUTE_MS)
        assert asker.register(fingerprint="old").owed_from_ms == first.owed_from_ms
        asker.register(fingerprint="new")
        store.advance(11 * MINUTE_MS)
        now_ms = store.now_ms()
        assert asker.register(fingerprint="old").owed_from_ms == now_ms

    def test_last_eight_definitions_are_remembered(self, store: LeaseStore) -> None:
        """REGISTER-3."""
        asker = store.instance()
        dates = {}
        for job in ("remembered", "forgotten"):
            for number in range(10):
                store.advance(2)
                standing = asker.register(job, f"definition {number}")
                dates[job, number] = standing.owed_from_ms
        store.advance(2)
        back = asker.register("remembered", "definition 1")
        assert back.owed_from_ms == dates["remembered", 1]
        now_ms = store.now_ms()
        back = asker.register("forgotten", "definition 0")
        assert back.owed_from_ms >= now_ms > dates["forgotten", 9]

    def test_schedule_displaced_while_the_clock_was_far_ahead_is_a_new_one(
        self, store: LeaseStore
    ) -> None:
        """REGISTER-3: ten minutes, in both directions."""
        store.needs_exact_clock()
        asker = store.instance()
        asker.register(fingerprint="old")
        store.advance(HOUR_MS)
        asker.register(fingerprint="new")
        store.set_back()
        store.advance(1)
        now_ms = store.now_ms()
        assert asker.register(fingerprint="old").owed_from_ms == now_ms

    def test_owed_since_date_is_never_in_the_future(self, store: LeaseStore) -> None:
        """REGISTER-4: if the clock was set back behind it, it counts as now."""
        asker = store.instance()
        asker.register(fingerprint="old")
        store.advance(store.lease_ms)
        asker.register(fingerprint="new")
        store.set_back()
        for fingerprint in ("new", "old", "new"):
            standing = asker.register(fingerprint=fingerprint)
            assert standing.owed_from_ms <= standing.store_ms

    def test_standing_names_the_newest_known_scheduled_time(self, store: LeaseStore) -> None:
        """Section 4, register, CATCHUP-8: a pruned one counts."""
        holder = store.instance()
        old, young = store.run(ago_ms=2 * store.lease_ms), store.run(ago_ms=store.lease_ms)
        for run in (young, old):
            holder.finish(holder.win(run))
        assert holder.register().newest_ms == young.scheduled_ms
        assert holder.register("other").newest_ms is None
        store.advance(1)
        assert holder.backend.prune(0, 100).deleted == 2
        assert store.records() == {}
        assert holder.register().newest_ms == young.scheduled_ms

    def test_standing_names_no_scheduled_time_of_the_future(self, store: LeaseStore) -> None:
        """Section 4, register: one that the clock, set back, has yet to come to again."""
        holder = store.instance()
        young, old = store.run(), store.run(ago_ms=2 * HOUR_MS)
        for run in (young, old):
            holder.finish(holder.win(holder.intend(run, max_age_ms=3 * HOUR_MS)))
        assert holder.register().newest_ms == young.scheduled_ms
        store.set_back()
        assert holder.register().newest_ms == old.scheduled_ms

    def test_jobs_are_registered_in_one_batch(self, store: LeaseStore) -> None:
        """CALL-4, REGISTER-5: one id, drawn when the store was set up, for all of them."""
        asker = store.instance()
        run = store.run("b", ago_ms=1)
        asker.win(run)
        stamps = [JobStamp(name, "every minute") for name in ("c", "b", "a")]
        standings = asker.backend.register(stamps)
        assert [standing.newest_ms for standing in standings] == [None, run.scheduled_ms, None]
        ids = {standing.store_id for standing in standings}
        other = store.instance(f"{store.namespace} too")
        ids |= {store.instance().register().store_id, other.register().store_id}
        assert len(ids) == 1
        assert ids != {""}

    # -- prune ------------------------------------------------------------------------------------

    def test_prune_keeps_tokens_and_live_runs(self, store: LeaseStore) -> None:
        """PRUNE-1, TOKEN-2."""
        holder = store.instance()
        settled, skipped = store.run(ago_ms=3), store.run(ago_ms=1)
        live, waiting = store.run("live", ago_ms=2), store.run("waiting", ago_ms=2)
        lease = holder.win(settled)
        holder.ask(skipped)
        for _ in range(5):  # the token runs ahead of the clock
            holder.hand_over(lease)
            lease = holder.win(settled)
        holder.finish(lease)
        held = holder.win(live)
        holder.fail(holder.win(waiting), HOUR_MS // 60)
        store.advance(1)
        pruned = holder.backend.prune(0, 100)
        assert (pruned.deleted, pruned.abandoned) == (2, ())
        assert sorted(store.records()) == [live, waiting]
        assert holder.win(store.run()).ref.token > lease.ref.token
        assert holder.renew(held) is RenewReply.RENEWED
        assert holder.finish(held).accepted

    def test_prune_deletes_what_is_older_than_the_history(self, store: LeaseStore) -> None:
        """PRUNE-1: by its scheduled time, not by when it was settled."""
        holder = store.instance()
        young, old = store.run(), store.run(ago_ms=3 * store.lease_ms)
        for run in (young, old):
            holder.finish(holder.win(run))
        assert holder.backend.prune(2 * store.lease_ms, 100).deleted == 1
        assert list(store.records()) == [young]
        store.advance(3 * store.lease_ms)
        assert holder.backend.prune(2 * store.lease_ms, 100).deleted == 1
        assert store.records() == {}

    def test_prune_deletes_the_oldest_in_portions(self, store: LeaseStore) -> None:
        """PRUNE-1, CALL-3: at most a given number per call, of all jobs together."""
        holder = store.instance()
        runs = [store.run(f"job {age % 2}", ago_ms=age) for age in (5, 4, 3, 2, 1)]
        for run in runs[::-1]:
            holder.finish(holder.win(run))
        store.advance(1)
        left = [(holder.backend.prune(0, 2).deleted, sorted(store.records())) for _ in range(4)]
        assert left == [
            (2, sorted(runs[2:])),
            (2, sorted(runs[4:])),
            (1, []),
            (0, []),
        ]

    def test_nothing_at_or_before_what_was_pruned_is_granted_anew(self, store: LeaseStore) -> None:
        """PRUNE-2: though the run itself never had a record."""
        holder = store.instance()
        before, pruned, after = (store.run(ago_ms=age) for age in (3, 2, 1))
        other = store.run("other", ago_ms=3)
        holder.finish(holder.win(pruned))
        store.advance(1)
        holder.backend.prune(0, 100)
        for run in (before, pruned):
            for _ in range(2):
                assert store.instance().ask(run).verdict is Verdict.TOO_OLD
        assert holder.win(after).attempt == 1
        assert holder.win(other).attempt == 1

    def test_what_was_pruned_is_not_forgotten_when_an_older_run_is_pruned(
        self, store: LeaseStore
    ) -> None:
        """PRUNE-2, CATCHUP-8: the newest scheduled time that was deleted counts."""
        holder = store.instance()
        oldest, between, young = (store.run(ago_ms=age) for age in (3, 2, 1))
        lease = holder.win(holder.intend(oldest, on_overlap=ALLOW))
        holder.finish(holder.win(holder.intend(young, on_overlap=ALLOW)))
        store.advance(1)
        assert holder.backend.prune(0, 100).deleted == 1
        assert holder.register().newest_ms == young.scheduled_ms
        holder.finish(lease)
        assert holder.backend.prune(0, 100).deleted == 1
        assert holder.register().newest_ms == young.scheduled_ms
        assert holder.ask(between).verdict is Verdict.TOO_OLD
        newer = store.run()
        holder.win(newer)
        assert holder.register().newest_ms == newer.scheduled_ms

    def test_what_was_pruned_ahead_of_the_clock_silences_nothing_but_itself(
        self, store: LeaseStore
    ) -> None:
        """PRUNE-2, CATCHUP-8: the clock was ahead for long, and is set right."""
        holder = store.instance()
        old = holder.intend(store.run(ago_ms=3 * HOUR_MS), max_age_ms=4 * HOUR_MS)
        ahead = store.run(ago_ms=1)
        holder.finish(holder.win(old))
        holder.finish(holder.win(ahead))
        store.advance(1)
        assert holder.backend.prune(0, 100).deleted == 2
        store.set_back()
        assert holder.register().newest_ms == old.key.scheduled_ms
        again = holder.intend(old.key, max_age_ms=4 * HOUR_MS)
        assert holder.ask(again).verdict is Verdict.TOO_OLD
        assert store.instance().ask(ahead).verdict is Verdict.EARLY
        assert holder.win(store.run()).attempt == 1

    @pytest.mark.parametrize("state", [RunState.RUNNING, RunState.WAITING])
    def test_pruning_abandons_what_nobody_can_claim(
        self, store: LeaseStore, state: RunState
    ) -> None:
        """PRUNE-3, SETTLE-3: also of jobs that nobody registered."""
        holder, run, older = store.instance(), store.run("unknown job"), store.run(ago_ms=1)
        holder.finish(holder.win(older))
        lease = holder.win(run)
        if state is RunState.WAITING:
            holder.fail(lease, store.lease_ms)
        before = store.record(run)
        store.lapse()
        store.advance(1)
        assert holder.backend.prune(store.takeover_ms, 100).abandoned == ()
        assert store.record(run) == before
        store.advance(store.takeover_ms)
        pruned = holder.backend.prune(store.takeover_ms, 1)
        assert (pruned.deleted, pruned.abandoned) == (1, (run,))
        assert store.state(run) == (RunState.FAILED, "abandoned")
        assert store.record(run).failures == 1
        assert holder.renew(lease) is RenewReply.LOST
        for ending in ENDINGS:
            reply = holder.settle(lease, ending)
            assert (reply.accepted, reply.state) == (False, RunState.FAILED)
        again = holder.ask(holder.intend(run, takeover_ms=HOUR_MS))
        assert (again.verdict, again.fresh) == (Verdict.SETTLED, False)
        assert holder.backend.prune(store.takeover_ms, 100).abandoned == ()
        assert store.records() == {}

    def test_settle_is_refused_once_the_record_was_pruned(self, store: LeaseStore) -> None:
        """CALL-3: what is gone is gone."""
        holder, run = store.instance(), store.run()
        lease = holder.win(run)
        holder.finish(lease)
        store.advance(1)
        holder.backend.prune(0, 100)
        reply = holder.settle(lease, FINISHED)
        assert (reply.accepted, reply.state) == (False, None)
        assert holder.renew(lease) is RenewReply.LOST
        assert store.records() == {}

    # -- no answer --------------------------------------------------------------------------------

    def test_closed_backend_answers_nothing(self, store: LeaseStore) -> None:
        """CALL-2: no answer is never a yes. It can be closed again, and opened again."""
        asker, run = store.instance(), store.run()
        claim = asker.intend(run)
        lease = store.instance().win(store.run("held"))
        asker.backend.close()
        asker.backend.close()
        for call in (
            lambda: asker.ask(claim),
            lambda: asker.renew(lease),
            lambda: asker.finish(lease),
            asker.register,
            asker.pending,
            lambda: asker.backend.states([JobSpan("job", 0, run.scheduled_ms)]),
            lambda: asker.backend.prune(0, 100),
            asker.backend.probe,
        ):
            with pytest.raises(StoreUnavailable):
                call()
        assert store.state(lease.ref.key) == (RunState.RUNNING, "")
        assert run not in store.records()
        asker.backend.open(store.settings(None, 5_000))
        assert asker.win(claim).attempt == 1
