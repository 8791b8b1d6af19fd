"""The cases of claim backends."""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from unittest import mock

import pytest

from leasecron_sync.clock import SystemClock
from leasecron_sync.errors import OutcomeUnknown, StoreError
from leasecron_sync.model import RunKey, Verdict
from leasecron_sync.testing.conformance._claim_store import (
    ClaimInstance,
    ClaimStore,
    ClaimSuite,
)
from leasecron_sync.testing.conformance._names import ODD_NAMES, SEPARATORS
from leasecron_sync.testing.conformance._race import race

ROUNDS = 10
NOT_LOST = (Verdict.GRANTED, Verdict.UNKNOWN)
"""What a decision that won, or may have, is answered when it is asked again."""


class ClaimConformance(ClaimSuite):
    """What every claim backend does.

    See the module's text for what to supply: the fixture ``backend_factory`` and the method
    ``advance``, and the attributes and methods of ``ClaimSuite`` where they differ.
    """

    def test_first_claim_is_granted(self, store: ClaimStore) -> None:
        """ONCE-1."""
        reply = store.instance().ask(store.run())
        assert (reply.verdict, reply.wait_ms) == (Verdict.GRANTED, 0)

    def test_second_decision_is_taken(self, store: ClaimStore) -> None:
        """ONCE-1: of the same instance too, however many ask."""
        winner, run = store.instance(), store.run()
        assert winner.ask(run).verdict is Verdict.GRANTED
        for asker in (winner, store.instance(), store.instance()):
            assert asker.ask(run).verdict is Verdict.TAKEN

    def test_same_decision_is_granted_again(self, store: ClaimStore) -> None:
        """ONCE-2, CALL-2: or it is told that the outcome is unknown, but never that it lost."""
        winner, run = store.instance(), store.run()
        claim = winner.intend(run)
        assert winner.ask(claim).verdict is Verdict.GRANTED
        assert store.instance().ask(run).verdict is Verdict.TAKEN
        for asker in store.askers_again(winner):
            with suppress(OutcomeUnknown):
                assert asker.ask(claim).verdict in NOT_LOST
        assert store.instance().ask(run).verdict is Verdict.TAKEN

    def test_refused_decision_stays_refused(self, store: ClaimStore) -> None:
        """ONCE-1, ONCE-2."""
        loser, run = store.instance(), store.run()
        store.instance().ask(run)
        claim = loser.intend(run)
        assert [loser.ask(claim).verdict for _ in range(3)] == [Verdict.TAKEN] * 3

    def test_second_decision_in_one_batch_is_taken(self, store: ClaimStore) -> None:
        """ONCE-1."""
        run = store.run()
        verdicts = [reply.verdict for reply in store.instance().ask_all([run, run])]
        assert verdicts == [Verdict.GRANTED, Verdict.TAKEN]

    def test_replies_keep_the_order(self, store: ClaimStore) -> None:
        """CALL-4: early, granted, taken and too old ones in one batch."""
        asker = store.instance()
        taken, free, early = store.run("taken"), store.run("free"), store.run("early")
        old, last = store.run("old", ago_ms=store.window_ms + 1), store.run("last")
        store.instance().ask(taken)
        later = asker.intend(early, due_ms=early.scheduled_ms + store.window_ms)
        replies = asker.ask_all([taken, later, free, old, last])
        assert [reply.verdict for reply in replies] == [
            Verdict.TAKEN,
            Verdict.EARLY,
            Verdict.GRANTED,
            Verdict.TOO_OLD,
            Verdict.GRANTED,
        ]

    def test_empty_batch_is_answered(self, store: ClaimStore) -> None:
        """CALL-4: with nothing."""
        assert list(store.instance().backend.claim([])) == []

    def test_many_runs_are_claimed_in_one_call(self, store: ClaimStore) -> None:
        """CALL-4, ONCE-1."""
        winner = store.instance()
        runs = [store.run(f"job {number}") for number in range(300)]
        replies = winner.ask_all(runs[100:200])
        assert {reply.verdict for reply in replies} == {Verdict.GRANTED}
        verdicts = [reply.verdict for reply in store.instance().ask_all(runs)]
        granted = [Verdict.GRANTED] * 100
        assert verdicts == [*granted, *[Verdict.TAKEN] * 100, *granted]

    # -- names ------------------------------------------------------------------------------------

    def test_keys_of_other_jobs_and_namespaces_are_independent(self, store: ClaimStore) -> None:
        """CALL-6, CLOCK-3: so are other scheduled times of the job, a millisecond off."""
        winner, run = store.instance(), store.run()
        other = store.instance(f"{store.namespace} too")
        upper = store.instance(store.namespace.upper())
        for asker, key in (
            (winner, run),
            (winner, RunKey("other", run.scheduled_ms)),
            (winner, RunKey("Job", run.scheduled_ms)),
            (other, run),
            (upper, run),
        ):
            assert asker.ask(key).verdict is Verdict.GRANTED
        store.advance(1)
        later = RunKey(run.job, run.scheduled_ms + 1)
        assert winner.ask(later).verdict is Verdict.GRANTED
        assert other.ask(later).verdict is Verdict.GRANTED
        assert other.ask(run).verdict is Verdict.TAKEN

    def test_odd_names_survive(self, store: ClaimStore) -> None:
        """CALL-6: unicode in every form, separators, 200 characters, and differences in case."""
        now_ms = store.now_ms()
        runs = [RunKey(name, now_ms) for name in ODD_NAMES]
        verdicts = [reply.verdict for reply in store.instance().ask_all(runs)]
        assert verdicts == [Verdict.GRANTED] * len(runs)
        verdicts = [reply.verdict for reply in store.instance().ask_all(runs)]
        assert verdicts == [Verdict.TAKEN] * len(runs)

    def test_jobs_and_namespaces_are_kept_apart(self, store: ClaimStore) -> None:
        """CALL-6: a:b with the job c, and a with the job b:c, whatever the separator is."""
        now_ms = store.now_ms()
        right = store.instance()
        for separator in SEPARATORS:
            left = store.instance(f"{store.namespace}{separator}b")
            outer = RunKey(f"b{separator}c", now_ms)
            assert left.ask(RunKey("c", now_ms)).verdict is Verdict.GRANTED
            assert right.ask(outer).verdict is Verdict.GRANTED
            assert left.ask(outer).verdict is Verdict.GRANTED

    # -- clocks and windows -----------------------------------------------------------------------

    def test_early_claim_waits(self, store: ClaimStore) -> None:
        """CLOCK-2, CLOCK-5: measured from the due time, and it takes nothing from anybody."""
        asker, run = store.instance(), store.run()
        half_ms = store.window_ms // 2
        claim = asker.intend(run, due_ms=run.scheduled_ms + half_ms)
        reply = asker.ask(claim)
        assert reply.verdict is Verdict.EARLY
        assert store.is_about(reply.wait_ms, half_ms)
        store.advance(half_ms)
        other = store.instance()
        reply = other.ask(other.intend(run, due_ms=run.scheduled_ms + half_ms))
        assert reply.verdict is Verdict.GRANTED
        assert asker.ask(claim).verdict is Verdict.TAKEN

    def test_run_is_due_from_its_due_time_on(self, store: ClaimStore) -> None:
        """CLOCK-4."""
        store.needs_exact_clock()
        asker, run = store.instance(), store.run()
        claim = asker.intend(run, due_ms=run.scheduled_ms + 2)
        store.advance(1)
        reply = asker.ask(claim)
        assert (reply.verdict, reply.wait_ms) == (Verdict.EARLY, 1)
        store.advance(1)
        assert asker.ask(claim).verdict is Verdict.GRANTED

    def test_key_beyond_window_is_too_old(self, store: ClaimStore) -> None:
        """ONCE-4, CLOCK-5: measured from the due time."""
        asker, run = store.instance(), store.run()
        store.advance(store.window_ms + 1)
        assert asker.ask(run).verdict is Verdict.TOO_OLD
        jittered = asker.intend(run, due_ms=run.scheduled_ms + store.window_ms)
        assert asker.ask(jittered).verdict is Verdict.GRANTED

    def test_run_is_granted_to_the_end_of_its_window(self, store: ClaimStore) -> None:
        """ONCE-4, CLOCK-4: more than one window, itself included."""
        store.needs_exact_clock()
        asker, run = store.instance(), store.run()
        store.advance(store.window_ms)
        assert asker.ask(run).verdict is Verdict.GRANTED

    def test_claim_is_remembered_for_the_window(self, store: ClaimStore) -> None:
        """ONCE-3, ONCE-1: nobody else wins, however late in the window."""
        winner, run = store.instance(), store.run()
        claim = winner.intend(run)
        assert winner.ask(claim).verdict is Verdict.GRANTED
        for _ in range(7):
            store.advance(store.window_ms // 8)
            assert store.instance().ask(run).verdict is Verdict.TAKEN
        with suppress(OutcomeUnknown):
            assert winner.ask(claim).verdict in NOT_LOST

    def test_claim_is_remembered_for_twice_its_window(self, store: ClaimStore) -> None:
        """ONCE-3: also before those whose window is longer, as during a rolling deploy."""
        winner, run = store.instance(), store.run()
        any_window = winner.backend.max_window_ms is None
        window_ms = store.window_ms if any_window else store.window_ms // 2
        assert winner.ask(winner.intend(run, window_ms=window_ms)).verdict is Verdict.GRANTED
        for _ in range(7):
            store.advance(window_ms // 4)
            store.instance().ask(store.run("busy"))  # what sweeps, sweeps now
            asker = store.instance()
            reply = asker.ask(asker.intend(run, window_ms=2 * window_ms))
            assert reply.verdict is Verdict.TAKEN

    def test_claim_outlives_the_run_and_its_runner(self, store: ClaimStore) -> None:
        """ONCE-5: the winner has closed its connection a second later."""
        winner, run = store.instance(), store.run()
        assert winner.ask(run).verdict is Verdict.GRANTED
        winner.backend.close()
        store.advance(1_000)
        assert store.instance().ask(run).verdict is Verdict.TAKEN

    def test_rising_keys_of_a_job_are_all_granted(self, store: ClaimStore) -> None:
        """ONCE-6: one by one and in a batch."""
        asker, other = store.instance(), store.instance()
        runs = [store.run(ago_ms=age) for age in range(20, 0, -1)]
        for run in runs[:5]:
            assert asker.ask(run).verdict is Verdict.GRANTED
            assert other.ask(run).verdict is Verdict.TAKEN
        verdicts = [reply.verdict for reply in other.ask_all(runs[5:])]
        assert verdicts == [Verdict.GRANTED] * 15

    def test_older_key_is_never_granted_twice(self, store: ClaimStore) -> None:
        """ONCE-1, ONCE-6: it is granted, or looks taken; the younger ones stay taken."""
        asker = store.instance()
        old, young = store.run(ago_ms=2), store.run(ago_ms=1)
        asker.ask(young)
        verdicts = [store.instance().ask(old).verdict for _ in range(3)]
        assert verdicts[0] in (Verdict.GRANTED, Verdict.TAKEN)
        assert verdicts[1:] == [Verdict.TAKEN] * 2
        assert asker.ask(young).verdict is Verdict.TAKEN

    def test_store_clock_rules(self, store: ClaimStore) -> None:
        """CLOCK-1: a host whose clock is an hour off decides nothing."""
        if not store.suite.own_clock:
            pytest.skip("this store has no clock but the host's")
        asker = store.instance()
        for off_s in (3_600, -3_600):
            shown_ms = SystemClock().now_ms() + off_s * 1_000
            seconds = mock.patch("time.time", return_value=shown_ms / 1_000)
            nanoseconds = mock.patch("time.time_ns", return_value=shown_ms * 1_000_000)
            with seconds, nanoseconds:
                run = store.run(f"job {off_s}")
                later = asker.intend(run, due_ms=run.scheduled_ms + store.window_ms)
                reply = asker.ask(later)
                assert reply.verdict is Verdict.EARLY
                assert store.is_about(reply.wait_ms, store.window_ms)
                old = store.run("old", ago_ms=store.window_ms + 1)
                assert asker.ask(old).verdict is Verdict.TOO_OLD
                assert asker.ask(run).verdict is Verdict.GRANTED
                assert store.instance().ask(run).verdict is Verdict.TAKEN

    # -- contention, and no answer ----------------------------------------------------------------

    def test_eight_threads_one_grant(self, store: ClaimStore) -> None:
        """ONCE-1: on connections of their own."""
        instances = [store.instance() for _ in range(8)]
        for number in range(ROUNDS):
            run = store.run(f"job {number}")
            replies = race([partial(instance.ask, run) for instance in instances])
            verdicts = sorted(reply.verdict.value for reply in replies)
            assert verdicts == ["granted", *["taken"] * 7]

    def test_eight_threads_with_batches_one_grant_each(self, store: ClaimStore) -> None:
        """ONCE-1, ONCE-6."""
        instances = [store.instance() for _ in range(8)]
        now_ms = store.now_ms()
        runs = [RunKey(f"job {number}", now_ms) for number in range(24)]
        replies = race(
            [
                partial(_granted, instance, runs[3 * turn :] + runs[: 3 * turn])
                for turn, instance in enumerate(instances)
            ]
        )
        assert sorted(run for granted in replies for run in granted) == sorted(runs)

    def test_closed_backend_answers_nothing(self, store: ClaimStore) -> None:
        """CALL-2: no answer is never a yes. It can be closed again, and opened again."""
        asker, run = store.instance(), store.run()
        claim = asker.intend(run)
        asker.backend.close()
        asker.backend.close()
        with pytest.raises(StoreError):
            asker.ask(claim)
        asker.backend.open(store.settings(None, 5_000))
        assert asker.ask(claim).verdict is Verdict.GRANTED

    def test_call_on_a_silent_store_ends_within_its_time_out(self, store: ClaimStore) -> None:
        """CALL-1, CALL-2: it raises; asked again, it is granted, or nobody is."""
        asker = store.instance(call_timeout_ms=100)
        claim = asker.intend(store.run())
        clock = SystemClock()
        with store.suite.locked():
            began_ms = clock.steady_ms()
            with pytest.raises(StoreError):
                asker.ask(claim)
            assert clock.steady_ms() - began_ms < SILENCE_LIMIT_MS
        again = store.askers_again(asker)[-1]
        with suppress(OutcomeUnknown):
            assert again.ask(claim).verdict in NOT_LOST


SILENCE_LIMIT_MS = 3_000  # for a time-out of 100; less than the defaults of client libraries


def _granted(instance: ClaimInstance, runs: list[RunKey]) -> list[RunKey]:
    replies = instance.ask_all(runs)
    return [run for run, reply in zip(runs, replies) if reply.verdict is Verdict.GRANTED]
