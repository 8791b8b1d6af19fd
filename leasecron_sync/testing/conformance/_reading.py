"""Cases about the commands that only read."""

from __future__ import annotations

from leasecron_sync.model import JobSpan, RunKey, RunState, Verdict
from leasecron_sync.testing.conformance._store import (
    ALLOW,
    DEFER,
    HOUR_MS,
    LeaseStore,
)


class ReadingCases:
    """What ``pending``, ``states``, ``history`` and ``jobs`` answer."""

    # -- pending ----------------------------------------------------------------------------------

    def test_pending_names_the_next_expiry(self, store: LeaseStore) -> None:
        """PENDING-4: the end of a lease, and the end of a wait."""
        holder, asker = store.instance(), store.instance()
        assert asker.pending() == holder.pending()
        assert (asker.pending().keys, asker.pending().unsettled) == ((), False)
        assert asker.pending().next_in_ms is None
        lease = holder.win(store.run())
        store.advance(store.lease_ms // 2)
        pending = asker.pending()
        assert (pending.keys, pending.unsettled) == ((), True)
        assert store.is_about(pending.next_in_ms, store.lease_ms // 2)
        holder.fail(lease, 3 * store.lease_ms)
        pending = asker.pending()
        assert (pending.keys, pending.unsettled) == ((), True)
        assert store.is_about(pending.next_in_ms, 3 * store.lease_ms)

    def test_lapsed_runs_and_due_waiting_runs_are_listed(self, store: LeaseStore) -> None:
        """PENDING-1: of the jobs that were asked for, and they can be claimed."""
        holder, asker = store.instance(), store.instance()
        lapsed, due, settled, unknown = (
            store.run(name) for name in ("lapsed", "due", "settled", "unknown")
        )
        waiting, live = store.run("waiting"), store.run("live")
        for run in (lapsed, unknown):
            holder.win(run)
        holder.finish(holder.win(settled))
        holder.fail(holder.win(due), store.lease_ms)
        holder.fail(holder.win(waiting), 3 * store.lease_ms)
        store.lapse()
        holder.win(live)
        jobs = ("lapsed", "due", "settled", "waiting", "live", "never seen")
        pending = asker.pending(*jobs)
        assert sorted(pending.keys) == sorted([lapsed, due])
        assert store.is_about(pending.next_in_ms, store.lease_ms)
        assert pending.unsettled
        for run in pending.keys:
            asker.finish(asker.win(asker.intend(run, on_overlap=DEFER)))
        assert asker.pending(*jobs).keys == ()

    def test_pending_writes_nothing(self, store: LeaseStore) -> None:
        """CALL-3: it is a reading."""
        holder, asker = store.instance(), store.instance()
        holder.win(store.run())
        store.lapse()
        before = store.records()
        assert asker.pending() == asker.pending()
        assert store.records() == before

    def test_a_rehearsal_has_no_effect(self, store: LeaseStore) -> None:
        """CALL-8: others see nothing of it, and can win."""
        holder, asker, other = store.instance(), store.instance(), store.instance()
        lapsed, live, settled = (store.run(name) for name in ("lapsed", "live", "settled"))
        holder.win(lapsed)
        holder.finish(holder.win(settled))
        store.lapse()
        holder.win(live)
        coming = RunKey("new", store.now_ms() + HOUR_MS)
        runs = (lapsed, live, settled, coming)
        before = store.records()
        for _ in range(2):
            asker.backend.rehearse([asker.intend(run) for run in runs])
        assert store.records() == before
        assert other.ask(coming).verdict is Verdict.EARLY
        assert other.win(lapsed).attempt == 2
        assert other.win(store.run("new")).attempt == 1

    def test_oldest_runs_are_listed_up_to_the_limit(self, store: LeaseStore) -> None:
        """PENDING-1: what is left out is listed when the others are settled."""
        holder, asker = store.instance(), store.instance()
        runs = [store.run(f"job {number}", ago_ms=number) for number in range(5)]
        for run in runs:
            holder.win(run)
        store.lapse()
        jobs = [run.job for run in runs]
        assert asker.pending(*jobs, limit=2).keys == (runs[4], runs[3])
        for run in (runs[4], runs[3]):
            asker.finish(asker.win(run))
        assert asker.pending(*jobs, limit=2).keys == (runs[2], runs[1])

    def test_at_most_one_run_of_a_no_overlap_job_is_listed(self, store: LeaseStore) -> None:
        """PENDING-2: the oldest one that waits and is due."""
        holder, asker = store.instance(), store.instance()
        runs = [store.run(ago_ms=age) for age in (3, 2, 1)]
        for run in (runs[1], runs[0], runs[2]):
            holder.fail(holder.win(run), store.lease_ms)
        store.lapse()
        for run in runs:
            assert asker.pending().keys == (run,)
            asker.finish(asker.win(asker.intend(run, on_overlap=DEFER)))
        assert asker.pending().keys == ()

    def test_lapsed_run_goes_before_a_waiting_one(self, store: LeaseStore) -> None:
        """PENDING-2: even before an older one, which is deferred until it is settled."""
        holder, asker = store.instance(), store.instance()
        old, young = store.run(ago_ms=1), store.run()
        holder.fail(holder.win(old), store.lease_ms)
        holder.win(young)
        store.lapse()
        assert asker.pending().keys == (young,)
        asker.finish(asker.win(asker.intend(young, on_overlap=DEFER)))
        assert asker.pending().keys == (old,)

    def test_nothing_is_listed_behind_a_live_lease(self, store: LeaseStore) -> None:
        """PENDING-3, PENDING-4: of a no-overlap job; the end of the blocker's lease counts."""
        holder, asker = store.instance(), store.instance()
        old, young = store.run(ago_ms=1), store.run()
        holder.fail(holder.win(old), store.lease_ms // 2)
        lease = holder.win(young)
        store.advance(store.lease_ms // 2)
        pending = asker.pending()
        assert (pending.keys, pending.unsettled) == ((), True)
        assert store.is_about(pending.next_in_ms, store.lease_ms // 2)
        holder.finish(lease)
        assert asker.pending().keys == (old,)

    def test_runs_that_may_overlap_are_all_listed(self, store: LeaseStore) -> None:
        """PENDING-2, PENDING-3, OVERLAP-5: also beside a live one."""
        holder, asker = store.instance(), store.instance()
        runs = [store.run(ago_ms=age) for age in (3, 2, 1)]
        for run in runs[:2]:
            holder.win(holder.intend(run, on_overlap=ALLOW))
        store.lapse()
        holder.win(holder.intend(runs[2], on_overlap=ALLOW))
        assert asker.pending().keys == (runs[0], runs[1])

    def test_own_live_runs_are_nothing_to_wait_for(self, store: LeaseStore) -> None:
        """Section 4, pending: an instance asks when it knows of a run that it does not hold."""
        holder, asker = store.instance(), store.instance()
        holder.win(store.run())
        assert not holder.pending().unsettled
        assert asker.pending().unsettled
        assert not asker.pending("other").unsettled
        asker.win(store.run("other"))
        assert asker.pending("job", "other").unsettled
        assert holder.pending("job", "other").unsettled
        assert not asker.pending("other", "never seen").unsettled
        store.lapse()
        assert holder.pending().unsettled

    def test_lease_too_long_for_the_clock_is_listed(self, store: LeaseStore) -> None:
        """PENDING-5: although live, so that somebody claims the run and it is shortened."""
        holder, asker = store.instance(), store.instance()
        run = store.run()
        holder.win(run)
        store.set_back()
        assert asker.pending().keys == (run,)
        assert asker.ask(run).verdict is Verdict.HELD
        assert asker.pending().keys == ()
        assert asker.pending().next_in_ms == store.lease_ms

    def test_wait_too_long_for_the_clock_is_listed_as_due(self, store: LeaseStore) -> None:
        """PENDING-6."""
        holder, asker = store.instance(), store.instance()
        run = store.run()
        holder.fail(holder.win(run), store.lease_ms)
        store.set_back()
        assert asker.pending().keys == (run,)

    # -- states, history, jobs --------------------------------------------------------------------

    def test_looking_back_costs_one_round_trip(self, store: LeaseStore) -> None:
        """STATES-1, CALL-4: any number of jobs, both ends of each span included."""
        holder = store.instance()
        runs = [store.run(ago_ms=age) for age in (4, 3, 2, 1)]
        for run in runs[:2]:
            holder.finish(holder.win(run))
        holder.fail(holder.win(runs[2]), HOUR_MS // 60)
        holder.win(runs[3])
        other = store.run("other")
        holder.win(other)
        holder.ask(RunKey("other", other.scheduled_ms - 1))
        spans = [
            JobSpan("other", 0, other.scheduled_ms),
            JobSpan("job", runs[1].scheduled_ms, runs[2].scheduled_ms),
            JobSpan("never seen", 0, other.scheduled_ms),
            JobSpan("job", runs[3].scheduled_ms, runs[3].scheduled_ms),
            JobSpan("job", runs[3].scheduled_ms + 1, runs[3].scheduled_ms + HOUR_MS),
        ]
        assert [dict(states) for states in holder.backend.states(spans)] == [
            {
                other.scheduled_ms - 1: RunState.SKIPPED,
                other.scheduled_ms: RunState.RUNNING,
            },
            {runs[1].scheduled_ms: RunState.FINISHED, runs[2].scheduled_ms: RunState.WAITING},
            {},
            {runs[3].scheduled_ms: RunState.RUNNING},
            {},
        ]

    def test_history_shows_the_newest_scheduled_time_first(self, store: LeaseStore) -> None:
        """Section 4: of one job or of all, up to a limit."""
        holder = store.instance()
        runs = [store.run(f"job {number % 2}", ago_ms=10 - number) for number in range(6)]
        for run in (runs[3], runs[0], runs[5], runs[1], runs[4], runs[2]):
            holder.finish(holder.win(run))
        newest = runs[::-1]
        history = holder.backend.history
        assert [record.key for record in history(None, 100)] == newest
        assert [record.key for record in history(None, 2)] == newest[:2]
        assert [record.key for record in history("job 1", 100)] == newest[::2]
        assert [record.key for record in history("job 0", 2)] == newest[1:4:2]
        assert list(history("never seen", 10)) == []

    def test_record_tells_how_the_run_came_to_its_state(self, store: LeaseStore) -> None:
        """Section 3."""
        holder, asker, run = store.instance(), store.instance(), store.run()
        claim = holder.intend(run, max_attempts=5, lease_ms=2 * store.lease_ms)
        lease = holder.win(claim)
        record = store.record(run)
        assert record.claimed_ms is not None
        assert record.until_ms == record.claimed_ms + 2 * store.lease_ms
        assert (record.lease_ms, record.takeover_ms) == (claim.lease_ms, claim.takeover_ms)
        assert (record.max_attempts, record.overlap) == (5, False)
        assert (record.decision_id, record.settled_ms) == (claim.decision_id, None)
        holder.hand_over(lease)
        record = store.record(run)
        assert (record.state, record.hand_overs, record.failures) == (RunState.WAITING, 1, 0)
        assert (record.settled_ms, record.reason) == (None, "stopping")
        again = asker.win(asker.intend(run, on_overlap=ALLOW))
        store.advance(1)
        asker.finish(again)
        record = store.record(run)
        assert (record.state, record.reason) == (RunState.FINISHED, "")
        assert (record.holder, record.token) == (asker.id, again.ref.token)
        assert (record.attempt, record.hand_overs, record.overlap) == (2, 1, True)
        assert record.claimed_ms is not None
        assert record.settled_ms is not None
        assert record.settled_ms > record.claimed_ms

    def test_jobs_are_listed_by_name(self, store: LeaseStore) -> None:
        """Section 4: registered ones and those that were only claimed."""
        holder = store.instance()
        standing = holder.register("b")
        run, newest = store.run("a", ago_ms=1), store.run("a")
        holder.win(holder.intend(run, on_overlap=ALLOW))
        holder.finish(holder.win(holder.intend(newest, on_overlap=ALLOW)))
        jobs = holder.backend.jobs(10)
        assert [job.job for job in jobs] == ["a", "b"]
        assert [job.owed_from_ms for job in jobs] == [None, standing.owed_from_ms]
        assert [job.unsettled for job in jobs] == [1, 0]
        assert jobs[0].newest == store.record(newest)
        assert jobs[1].newest is None
        assert [job.job for job in holder.backend.jobs(1)] == ["a"]
