"""Each lease backend with one planted fault fails the case of the suite that is named beside it."""

from __future__ import annotations

import threading
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Callable, NamedTuple, Optional
from unittest import mock

import pytest

from leasecron_sync.backends import _local
from leasecron_sync.backends.base import BackendSettings
from leasecron_sync.backends.memory import MemoryLease, MemoryTables
from leasecron_sync.clock import SystemClock
from leasecron_sync.errors import StoreError
from leasecron_sync.model import (
    JobRecord,
    JobSpan,
    JobStamp,
    JobStanding,
    Lease,
    LeaseClaim,
    LeaseRef,
    LeaseReply,
    OnOverlap,
    Pending,
    Pruned,
    RenewReply,
    RunKey,
    RunRecord,
    RunState,
    Settlement,
    SettleReply,
    Verdict,
)
from leasecron_sync.protocol.transition import JobView, Settle, transition
from leasecron_sync.testing.conformance._store import FAILED, FINISHED, HANDED_OVER
from tests.mutants import faulty_transition as faulty
from tests.mutants.judge import LeaseJudge


class Fault(NamedTuple):
    """A fault, and the case that must notice it."""

    planted: Callable[..., object]
    case: str
    values: tuple[object, ...] = ()

    def __str__(self) -> str:
        return self.planted.__name__


SKIP = OnOverlap.SKIP

# -- faults of the functions that the backend executes --------------------------------------------

DECISION_FAULTS = (
    Fault(faulty.forgets_decisions, "same_decision_is_granted_again"),
    Fault(
        faulty.knows_the_holder_instead_of_the_decision,
        "second_decision_of_the_holder_is_held_too",
    ),
    Fault(faulty.grants_what_is_settled, "settled_run_is_never_granted", (RunState.FINISHED,)),
    Fault(faulty.repeats_the_full_lease, "repeated_grant_tells_the_time_left"),
    Fault(faulty.allows_one_attempt_too_many, "last_lost_runner_fails_the_run"),
    Fault(faulty.allows_one_attempt_too_many, "attempts_used_up_is_failed"),
    Fault(faulty.does_not_count_the_lost_attempt, "expired_lease_is_taken_over_with_next_attempt"),
    Fault(
        faulty.cuts_the_takeover_window_by_a_second,
        "takeover_is_granted_to_the_end_of_its_window",
    ),
    Fault(faulty.takes_over_however_late, "late_takeover_is_abandoned"),
    Fault(faulty.takes_over_however_late, "late_retry_is_abandoned"),
    Fault(
        faulty.lets_a_lease_lapse_late, "lease_is_live_before_its_end_and_lapsed_from_its_end_on"
    ),
    Fault(faulty.grants_a_wait_early, "failure_waits_then_is_granted"),
    Fault(faulty.grants_before_the_due_time, "early_claim_waits"),
    Fault(faulty.ignores_the_age, "run_beyond_its_greatest_age_is_too_old"),
    Fault(faulty.asks_the_age_of_every_run, "greatest_age_is_read_only_for_a_run_without_a_record"),
    Fault(faulty.ignores_what_was_pruned, "nothing_at_or_before_what_was_pruned_is_granted_anew"),
    Fault(
        faulty.silences_all_before_what_was_pruned,
        "what_was_pruned_ahead_of_the_clock_silences_nothing_but_itself",
    ),
    Fault(
        faulty.forgets_what_was_pruned_when_the_clock_is_set_back,
        "what_was_pruned_ahead_of_the_clock_silences_nothing_but_itself",
    ),
    Fault(faulty.is_fresh_for_everybody, "only_the_deciding_claim_is_fresh"),
    Fault(faulty.never_shortens_a_lease, "lease_too_long_for_the_clock_is_shortened"),
    Fault(faulty.waits_however_long, "wait_longer_than_any_retry_delay_is_over"),
    Fault(faulty.ignores_overlap, "on_time_overlap_is_skipped_once"),
    Fault(faulty.ignores_lapsed_runs, "no_run_is_granted_beside_a_lapsed_one", (SKIP,)),
    Fault(faulty.retries_beside_a_lapsed_run, "retry_behind_a_running_run_is_deferred"),
    Fault(faulty.takes_over_beside_a_live_run, "takeover_beside_a_live_run_is_deferred"),
    Fault(faulty.lets_a_younger_run_go_first, "older_due_run_goes_before_a_younger_one", (SKIP,)),
    Fault(faulty.lets_a_wait_block, "wait_that_is_not_over_blocks_nothing"),
    Fault(
        faulty.leaves_stale_runs_running,
        "run_that_lapsed_too_long_ago_is_abandoned_by_the_next_grant",
    ),
    Fault(faulty.skips_what_is_caught_up, "caught_up_overlap_is_deferred"),
    Fault(faulty.draws_tokens_per_run, "token_rises_over_runs_and_attempts"),
    Fault(faulty.counts_tokens_from_one, "token_is_never_below_the_time_of_the_store"),
    Fault(faulty.renews_without_a_token, "old_token_cannot_renew"),
    Fault(faulty.renews_what_is_settled, "settled_attempt_cannot_be_renewed", (FINISHED,)),
    Fault(
        faulty.does_not_revive_a_lapsed_lease,
        "renewal_revives_a_lapsed_lease_that_nobody_took_over",
    ),
    Fault(faulty.never_shortens_by_a_renewal, "renewal_after_the_clock_was_set_back_is_shorter"),
    Fault(faulty.settles_without_a_token, "old_token_cannot_settle", (FINISHED,)),
    Fault(faulty.settles_without_a_token, "old_token_cannot_settle", (HANDED_OVER,)),
    Fault(faulty.does_not_settle_a_lapsed_lease, "lapsed_but_untaken_lease_can_settle", (FAILED,)),
    Fault(
        faulty.accepts_what_others_settled,
        "what_others_settled_cannot_be_settled_by_the_holder",
        (FINISHED, "abandoned"),
    ),
    Fault(faulty.refuses_a_repeated_settle, "repeated_settle_is_accepted", (FAILED,)),
    Fault(faulty.settles_twice, "first_settlement_under_a_token_stands"),
    Fault(faulty.counts_hand_overs, "hand_over_is_claimable_at_once_and_not_counted"),
    Fault(faulty.never_counts_hand_overs, "from_the_tenth_hand_over_on_they_count"),
    Fault(faulty.retries_at_once, "failure_waits_then_is_granted"),
)

PENDING_FAULTS = (
    Fault(faulty.misses_the_end_of_a_lease, "pending_names_the_next_expiry"),
    Fault(faulty.lists_no_overlong_lease, "lease_too_long_for_the_clock_is_listed"),
    Fault(faulty.lists_a_waiting_run_before_a_lapsed_one, "lapsed_run_goes_before_a_waiting_one"),
    Fault(faulty.lists_what_a_live_lease_blocks, "nothing_is_listed_behind_a_live_lease"),
    Fault(faulty.lists_two_runs_of_a_job, "at_most_one_run_of_a_no_overlap_job_is_listed"),
    Fault(faulty.takes_own_leases_for_those_of_others, "own_live_runs_are_nothing_to_wait_for"),
)

PRUNE_FAULTS = (
    Fault(
        faulty.abandons_without_a_mark,
        "pruning_abandons_what_nobody_can_claim",
        (RunState.RUNNING,),
    ),
)

REGISTER_FAULTS = (
    Fault(faulty.keeps_the_date_of_a_changed_schedule, "changed_schedule_owes_nothing_before"),
    Fault(
        faulty.forgets_displaced_schedules,
        "schedule_that_returns_within_ten_minutes_keeps_its_old_date",
    ),
    Fault(
        faulty.remembers_displaced_schedules_for_ever,
        "schedule_that_returns_later_is_a_new_one",
    ),
    Fault(faulty.owes_from_the_future, "owed_since_date_is_never_in_the_future"),
    Fault(
        faulty.moves_the_date_each_time,
        "job_owes_nothing_from_before_it_was_first_registered",
    ),
)


def _fails(
    backend_class: type[MemoryLease], case: str, values: tuple[object, ...]
) -> Optional[BaseException]:
    try:
        LeaseJudge(backend_class).run_case(case, *values)
    except (AssertionError, pytest.fail.Exception) as error:
        return error
    return None


@pytest.mark.parametrize("fault", DECISION_FAULTS, ids=str)
def test_fault_of_a_decision_fails_its_case(fault: Fault) -> None:
    with mock.patch.object(_local, "transition", fault.planted):
        assert _fails(MemoryLease, fault.case, fault.values)


@pytest.mark.parametrize("fault", PENDING_FAULTS, ids=str)
def test_fault_of_pending_fails_its_case(fault: Fault) -> None:
    with mock.patch.object(_local, "claimable", fault.planted):
        assert _fails(MemoryLease, fault.case, fault.values)


@pytest.mark.parametrize("fault", PRUNE_FAULTS, ids=str)
def test_fault_of_pruning_fails_its_case(fault: Fault) -> None:
    with mock.patch.object(_local, "abandon", fault.planted):
        assert _fails(MemoryLease, fault.case, fault.values)


@pytest.mark.parametrize("fault", REGISTER_FAULTS, ids=str)
def test_fault_of_register_fails_its_case(fault: Fault) -> None:
    with mock.patch.object(_local, "register", fault.planted):
        assert _fails(MemoryLease, fault.case, fault.values)


# -- faults of the backend itself -----------------------------------------------------------------


def _let_the_others_in() -> None:
    threading.Event().wait(0.01)


class GrantsOnError(MemoryLease):
    def claim(self, claims: Sequence[LeaseClaim]) -> Sequence[LeaseReply]:
        try:
            return super().claim(claims)
        except StoreError:
            leases = [Lease(LeaseRef(claim.key, 1), 1, 0, claim.lease_ms) for claim in claims]
            return [LeaseReply(Verdict.GRANTED, lease=lease) for lease in leases]


class RenewsOnError(MemoryLease):
    def renew(self, leases: Sequence[LeaseRef], lease_ms: int) -> Sequence[RenewReply]:
        try:
            return super().renew(leases, lease_ms)
        except StoreError:
            return [RenewReply.RENEWED for _ in leases]


class ChecksThenSets(MemoryLease):
    """Reads and writes under a lock, but not under one."""

    def claim(self, claims: Sequence[LeaseClaim]) -> Sequence[LeaseReply]:
        replies = []
        for claim in claims:
            with self._store.lock:
                tables = self._tables()
                others = tuple(
                    run for run in tables.unsettled(claim.key.job) if run.key != claim.key
                )
                job = tables.job(claim.key.job) or JobRecord(claim.key.job)
                view = JobView(job, others)
                change = transition(tables.run(claim.key), view, claim, self._now_ms())
            _let_the_others_in()
            with self._store.lock:
                for run in change.runs:
                    tables.put_run(run)
                if change.job is not None:
                    tables.put_job(change.job)
            assert isinstance(change.reply, LeaseReply)
            replies.append(change.reply)
        return replies


class LocksTheRunButNotTheJob(MemoryLease):
    """Looks for other runs in a snapshot from before it waited for its lock."""

    def claim(self, claims: Sequence[LeaseClaim]) -> Sequence[LeaseReply]:
        with self._store.lock:
            stale = self._tables().unsettled(None)
        _let_the_others_in()

        def unsettled(_tables: MemoryTables, job: Optional[str]) -> tuple[RunRecord, ...]:
            return tuple(run for run in stale if run.key.job == job)

        with self._store.lock, mock.patch.object(MemoryTables, "unsettled", unsettled):
            return _local.claim(self._tables(), claims, self._now_ms())


class DecidesABatchOnOneView(MemoryLease):
    """All claims of a batch see the same records."""

    def claim(self, claims: Sequence[LeaseClaim]) -> Sequence[LeaseReply]:
        with self._store.lock:
            stale = self._tables().unsettled(None)

            def unsettled(_tables: MemoryTables, job: Optional[str]) -> tuple[RunRecord, ...]:
                return tuple(run for run in stale if run.key.job == job)

            with mock.patch.object(MemoryTables, "unsettled", unsettled):
                return _local.claim(self._tables(), claims, self._now_ms())


class ChecksThenSettles(MemoryLease):
    def settle(self, lease: LeaseRef, settlement: Settlement) -> SettleReply:
        with self._store.lock:
            tables = self._tables()
            view = JobView(JobRecord(lease.key.job))
            command = Settle(lease, settlement)
            change = transition(tables.run(lease.key), view, command, self._now_ms())
        _let_the_others_in()
        with self._store.lock:
            for run in change.runs:
                tables.put_run(run)
        assert isinstance(change.reply, SettleReply)
        return change.reply


class ChecksThenRenews(MemoryLease):
    def renew(self, leases: Sequence[LeaseRef], lease_ms: int) -> Sequence[RenewReply]:
        with self._store.lock:
            before = [self._tables().run(ref.key) for ref in leases]
            replies = _local.renew(self._tables(), leases, lease_ms, self._now_ms())
            after = [self._tables().run(ref.key) for ref in leases]
            for run in before:
                if run is not None:
                    self._tables().put_run(run)
        _let_the_others_in()
        with self._store.lock:
            for run in after:
                if run is not None:
                    self._tables().put_run(run)
        return replies


class ReadsTheHostClock(MemoryLease):
    def claim(self, claims: Sequence[LeaseClaim]) -> Sequence[LeaseReply]:
        with self._store.lock:
            return _local.claim(self._tables(), claims, SystemClock().now_ms())


class AnswersInAnOrderOfItsOwn(MemoryLease):
    def claim(self, claims: Sequence[LeaseClaim]) -> Sequence[LeaseReply]:
        return super().claim(sorted(claims, key=lambda claim: claim.key))


class LosesAllForOne(MemoryLease):
    def renew(self, leases: Sequence[LeaseRef], lease_ms: int) -> Sequence[RenewReply]:
        replies = super().renew(leases, lease_ms)
        return [RenewReply.LOST] * len(replies) if RenewReply.LOST in replies else replies


class ClaimsWhatItRehearses(MemoryLease):
    def rehearse(self, claims: Sequence[LeaseClaim]) -> None:
        self.claim(claims)


class RenewsTheFirstHundred(MemoryLease):
    def renew(self, leases: Sequence[LeaseRef], lease_ms: int) -> Sequence[RenewReply]:
        rest = [RenewReply.RENEWED] * len(leases[100:])
        return [*super().renew(leases[:100], lease_ms), *rest]


class ResetsTokensWhenPruning(MemoryLease):
    def prune(self, older_than_ms: int, limit: int) -> Pruned:
        pruned = super().prune(older_than_ms, limit)
        jobs = self._tables().jobs
        jobs.update({name: replace(job, last_token=0) for name, job in jobs.items()})
        return pruned


class DoesNotNoteWhatItPruned(MemoryLease):
    def prune(self, older_than_ms: int, limit: int) -> Pruned:
        pruned = super().prune(older_than_ms, limit)
        jobs = self._tables().jobs
        jobs.update({name: replace(job, pruned_to_ms=None) for name, job in jobs.items()})
        return pruned


class PrunesWhateverIsOld(MemoryLease):
    def prune(self, older_than_ms: int, limit: int) -> Pruned:
        pruned = super().prune(older_than_ms, limit)
        tables = self._tables()
        before_ms = self._now_ms() - older_than_ms
        old = [run.key for run in tables.unsettled(None) if run.key.scheduled_ms < before_ms]
        for key in old:
            del tables._unsettled[key]
        tables.delete_runs(old)
        return pruned


class PrunesWithoutALimit(MemoryLease):
    def prune(self, older_than_ms: int, limit: int) -> Pruned:
        return super().prune(older_than_ms, 100 * limit)


class PrunesTheNewestFirst(MemoryLease):
    def prune(self, older_than_ms: int, limit: int) -> Pruned:
        settled_before = MemoryTables.settled_before

        def newest(tables: MemoryTables, scheduled_ms: int, limit: int) -> Sequence[RunKey]:
            return settled_before(tables, scheduled_ms, 10_000)[::-1][:limit]

        with mock.patch.object(MemoryTables, "settled_before", newest):
            return super().prune(older_than_ms, limit)


class _RenamesJobs(MemoryLease):
    """Keeps runs under another name than the one that was given."""

    def renamed(self, job: str) -> str:
        raise NotImplementedError

    def claim(self, claims: Sequence[LeaseClaim]) -> Sequence[LeaseReply]:
        return super().claim(
            [
                replace(claim, key=RunKey(self.renamed(claim.key.job), claim.key.scheduled_ms))
                for claim in claims
            ]
        )


class FoldsCase(_RenamesJobs):
    def renamed(self, job: str) -> str:
        return job.lower() if job.isascii() else job


class NormalisesUnicode(_RenamesJobs):
    def renamed(self, job: str) -> str:
        return unicodedata.normalize("NFC", job)


class StripsNames(_RenamesJobs):
    def renamed(self, job: str) -> str:
        return job.strip()


class CutsLongNames(_RenamesJobs):
    def renamed(self, job: str) -> str:
        return job[:199]


class JoinsNamesByAColon(_RenamesJobs):
    joint = ":"

    def open(self, settings: BackendSettings) -> None:
        self._own = settings.namespace
        super().open(replace(settings, namespace="everybody"))

    def renamed(self, job: str) -> str:
        return f"{self._own}{self.joint}{job}"


class JoinsNamesByASpace(JoinsNamesByAColon):
    joint = " "


class SharesTheNamespace(MemoryLease):
    def open(self, settings: BackendSettings) -> None:
        super().open(replace(settings, namespace="everybody"))


class LeavesOutTheEndOfASpan(MemoryLease):
    def states(self, spans: Sequence[JobSpan]) -> Sequence[Mapping[int, RunState]]:
        return super().states([span._replace(to_ms=span.to_ms - 1) for span in spans])


class ShowsTheOldestFirst(MemoryLease):
    def history(self, job: Optional[str], limit: int) -> Sequence[RunRecord]:
        return super().history(job, 10_000)[::-1][:limit]


class CutsReasons(MemoryLease):
    def settle(self, lease: LeaseRef, settlement: Settlement) -> SettleReply:
        return super().settle(lease, replace(settlement, reason=settlement.reason[:255]))


class ListsEveryJob(MemoryLease):
    def pending(self, jobs: Sequence[str], limit: int) -> Pending:
        del jobs
        return super().pending(list(self._tables().jobs), limit)


class ListsWithoutALimit(MemoryLease):
    def pending(self, jobs: Sequence[str], limit: int) -> Pending:
        return super().pending(jobs, 100 * limit)


class ForgetsPrunedTimes(MemoryLease):
    def register(self, jobs: Sequence[JobStamp]) -> Sequence[JobStanding]:
        standings = super().register(jobs)
        tables = self._tables()
        return [
            replace(standing, newest_ms=tables.newest(stamp.job, self._now_ms()))
            for stamp, standing in zip(jobs, standings)
        ]


class StaysOpen(MemoryLease):
    def close(self) -> None:
        pass


BACKEND_FAULTS = (
    Fault(GrantsOnError, "closed_backend_answers_nothing"),
    Fault(RenewsOnError, "closed_backend_answers_nothing"),
    Fault(StaysOpen, "closed_backend_answers_nothing"),
    Fault(ChecksThenSets, "eight_threads_one_grant"),
    Fault(ChecksThenSets, "eight_threads_draw_eight_tokens"),
    Fault(LocksTheRunButNotTheJob, "six_contenders_for_six_runs_of_one_job_never_get_two"),
    Fault(DecidesABatchOnOneView, "two_runs_of_a_job_in_one_batch_are_decided_in_turn"),
    Fault(ChecksThenSettles, "finish_or_takeover_but_never_both"),
    Fault(ChecksThenRenews, "renewal_or_takeover_but_never_both"),
    Fault(ReadsTheHostClock, "store_clock_rules"),
    Fault(AnswersInAnOrderOfItsOwn, "replies_keep_the_order"),
    Fault(LosesAllForOne, "one_lost_lease_does_not_spoil_the_batch"),
    Fault(ClaimsWhatItRehearses, "a_rehearsal_has_no_effect"),
    Fault(RenewsTheFirstHundred, "thousand_leases_are_renewed_in_one_call"),
    Fault(ResetsTokensWhenPruning, "prune_keeps_tokens_and_live_runs"),
    Fault(PrunesWhateverIsOld, "prune_keeps_tokens_and_live_runs"),
    Fault(DoesNotNoteWhatItPruned, "nothing_at_or_before_what_was_pruned_is_granted_anew"),
    Fault(PrunesWithoutALimit, "prune_deletes_the_oldest_in_portions"),
    Fault(PrunesTheNewestFirst, "prune_deletes_the_oldest_in_portions"),
    Fault(FoldsCase, "odd_names_survive"),
    Fault(NormalisesUnicode, "odd_names_survive"),
    Fault(StripsNames, "odd_names_survive"),
    Fault(CutsLongNames, "odd_names_survive"),
    Fault(JoinsNamesByAColon, "jobs_and_namespaces_are_kept_apart"),
    Fault(JoinsNamesByASpace, "jobs_and_namespaces_are_kept_apart"),
    Fault(SharesTheNamespace, "namespaces_share_nothing"),
    Fault(LeavesOutTheEndOfASpan, "looking_back_costs_one_round_trip"),
    Fault(ShowsTheOldestFirst, "history_shows_the_newest_scheduled_time_first"),
    Fault(CutsReasons, "reason_of_a_failure_is_kept", ("x" * 1_000,)),
    Fault(ListsEveryJob, "lapsed_runs_and_due_waiting_runs_are_listed"),
    Fault(ListsWithoutALimit, "oldest_runs_are_listed_up_to_the_limit"),
    Fault(ForgetsPrunedTimes, "standing_names_the_newest_known_scheduled_time"),
)


@pytest.mark.parametrize("fault", BACKEND_FAULTS, ids=str)
def test_faulty_backend_fails_its_case(fault: Fault) -> None:
    assert isinstance(fault.planted, type)
    assert _fails(fault.planted, fault.case, fault.values)


# -- and without a fault --------------------------------------------------------------------------

ALL_FAULTS = (
    *DECISION_FAULTS,
    *PENDING_FAULTS,
    *PRUNE_FAULTS,
    *REGISTER_FAULTS,
    *BACKEND_FAULTS,
)


@pytest.mark.parametrize(
    ("case", "values"),
    sorted({(fault.case, fault.values) for fault in ALL_FAULTS}, key=str),
    ids=lambda item: item if isinstance(item, str) else "",
)
def test_sound_backend_passes_the_case(case: str, values: tuple[object, ...]) -> None:
    assert _fails(MemoryLease, case, values) is None
