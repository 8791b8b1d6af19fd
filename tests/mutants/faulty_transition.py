"""Faults that could be planted in the functions of ``protocol.transition``, each by itself.

A fault changes what goes into the true function or what comes out of it, so that everything else
stays as it is.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Callable, Optional

from leasecron_sync.model import (
    JobRecord,
    JobStamp,
    LeaseClaim,
    LeaseRef,
    LeaseReply,
    OnOverlap,
    Outcome,
    RenewReply,
    RunRecord,
    RunState,
    Settlement,
    SettleReply,
    Verdict,
)
from leasecron_sync.protocol.transition import (
    Change,
    Claimable,
    Command,
    JobView,
    Renew,
    Settle,
    abandon,
    claimable,
    is_due,
    is_lapsed,
    is_live,
    register,
    transition,
)

Transition = Callable[[Optional[RunRecord], JobView, Command, int], Change]
Record = Optional[RunRecord]

FOR_EVER_MS = 10**15


def _without(job: JobView, unwanted: Callable[[RunRecord], bool]) -> JobView:
    return JobView(job.record, tuple(other for other in job.others if not unwanted(other)))


# -- claim ----------------------------------------------------------------------------------------


def forgets_decisions(record: Record, job: JobView, command: Command, now_ms: int) -> Change:
    if isinstance(command, LeaseClaim):
        command = replace(command, decision_id=f"{command.decision_id} of {now_ms} {record}")
    return transition(record, job, command, now_ms)


def knows_the_holder_instead_of_the_decision(
    record: Record, job: JobView, command: Command, now_ms: int
) -> Change:
    if isinstance(command, LeaseClaim):
        command = replace(command, decision_id=command.holder)
    return transition(record, job, command, now_ms)


def grants_what_is_settled(record: Record, job: JobView, command: Command, now_ms: int) -> Change:
    if isinstance(command, LeaseClaim) and record is not None and record.state.settled:
        record = replace(record, state=RunState.WAITING, until_ms=now_ms, settled_ms=None)
    return transition(record, job, command, now_ms)


def repeats_the_full_lease(record: Record, job: JobView, command: Command, now_ms: int) -> Change:
    change = transition(record, job, command, now_ms)
    reply = change.reply
    if isinstance(reply, LeaseReply) and reply.lease is not None:
        assert isinstance(command, LeaseClaim)
        lease = replace(reply.lease, left_ms=command.lease_ms)
        change = change._replace(reply=replace(reply, lease=lease))
    return change


def allows_one_attempt_too_many(
    record: Record, job: JobView, command: Command, now_ms: int
) -> Change:
    if isinstance(command, LeaseClaim):
        command = replace(command, max_attempts=command.max_attempts + 1)
    return transition(record, job, command, now_ms)


def does_not_count_the_lost_attempt(
    record: Record, job: JobView, command: Command, now_ms: int
) -> Change:
    if isinstance(command, LeaseClaim) and record is not None and is_lapsed(record, now_ms):
        record = replace(record, failures=record.failures - 1)
    return transition(record, job, command, now_ms)


def cuts_the_takeover_window_by_a_second(
    record: Record, job: JobView, command: Command, now_ms: int
) -> Change:
    if isinstance(command, LeaseClaim):
        command = replace(command, takeover_ms=command.takeover_ms - 1_000)
    return transition(record, job, command, now_ms)


def takes_over_however_late(record: Record, job: JobView, command: Command, now_ms: int) -> Change:
    if isinstance(command, LeaseClaim):
        command = replace(command, takeover_ms=FOR_EVER_MS)
    return transition(record, job, command, now_ms)


def lets_a_lease_lapse_late(record: Record, job: JobView, command: Command, now_ms: int) -> Change:
    if record is not None and record.state is RunState.RUNNING:
        record = replace(record, until_ms=record.until_ms + 1)
    return transition(record, job, command, now_ms)


def grants_a_wait_early(record: Record, job: JobView, command: Command, now_ms: int) -> Change:
    if record is not None and record.state is RunState.WAITING:
        record = replace(record, until_ms=min(record.until_ms, now_ms))
    return transition(record, job, command, now_ms)


def grants_before_the_due_time(
    record: Record, job: JobView, command: Command, now_ms: int
) -> Change:
    if isinstance(command, LeaseClaim):
        command = replace(command, due_ms=min(command.due_ms, now_ms))
    return transition(record, job, command, now_ms)


def ignores_the_age(record: Record, job: JobView, command: Command, now_ms: int) -> Change:
    if isinstance(command, LeaseClaim):
        command = replace(command, max_age_ms=FOR_EVER_MS)
    return transition(record, job, command, now_ms)


def asks_the_age_of_every_run(
    record: Record, job: JobView, command: Command, now_ms: int
) -> Change:
    if isinstance(command, LeaseClaim) and now_ms - command.due_ms > command.max_age_ms:
        return Change(LeaseReply(Verdict.TOO_OLD))
    return transition(record, job, command, now_ms)


def ignores_what_was_pruned(record: Record, job: JobView, command: Command, now_ms: int) -> Change:
    blind = JobView(replace(job.record, pruned_to_ms=None), job.others)
    change = transition(record, blind, command, now_ms)
    if change.job is not None:
        kept = replace(change.job, pruned_to_ms=job.record.pruned_to_ms)
        change = change._replace(job=kept)
    return change


def silences_all_before_what_was_pruned(
    record: Record, job: JobView, command: Command, now_ms: int
) -> Change:
    newest_ms = job.record.pruned_to_ms
    whole = () if newest_ms is None else ((0, newest_ms),)
    return transition(record, replace(job, pruned=whole), command, now_ms)


def forgets_what_was_pruned_when_the_clock_is_set_back(
    record: Record, job: JobView, command: Command, now_ms: int
) -> Change:
    return transition(record, replace(job, pruned=()), command, now_ms)


def is_fresh_for_everybody(record: Record, job: JobView, command: Command, now_ms: int) -> Change:
    change = transition(record, job, command, now_ms)
    if isinstance(change.reply, LeaseReply) and change.reply.verdict is Verdict.SETTLED:
        change = change._replace(reply=replace(change.reply, fresh=True))
    return change


def never_shortens_a_lease(record: Record, job: JobView, command: Command, now_ms: int) -> Change:
    if record is not None and isinstance(command, LeaseClaim) and is_live(record, now_ms):
        record = replace(record, lease_ms=FOR_EVER_MS)
    return transition(record, job, command, now_ms)


def waits_however_long(record: Record, job: JobView, command: Command, now_ms: int) -> Change:
    if isinstance(command, LeaseClaim) and record is not None:
        waiting = record.state is RunState.WAITING and record.until_ms > now_ms
        if waiting and is_due(record, now_ms):
            left_ms = record.until_ms - now_ms
            return Change(LeaseReply(Verdict.WAITING, wait_ms=left_ms, state=record.state))
    return transition(record, job, command, now_ms)


# -- overlap --------------------------------------------------------------------------------------


def ignores_overlap(record: Record, job: JobView, command: Command, now_ms: int) -> Change:
    if isinstance(command, LeaseClaim):
        command = replace(command, on_overlap=OnOverlap.ALLOW)
    return transition(record, job, command, now_ms)


def ignores_lapsed_runs(record: Record, job: JobView, command: Command, now_ms: int) -> Change:
    if record is None:
        job = _without(job, lambda other: is_lapsed(other, now_ms))
    return transition(record, job, command, now_ms)


def retries_beside_a_lapsed_run(
    record: Record, job: JobView, command: Command, now_ms: int
) -> Change:
    if record is not None and record.state is RunState.WAITING:
        job = _without(job, lambda other: is_lapsed(other, now_ms))
    return transition(record, job, command, now_ms)


def takes_over_beside_a_live_run(
    record: Record, job: JobView, command: Command, now_ms: int
) -> Change:
    if record is not None and is_lapsed(record, now_ms):
        job = _without(job, lambda other: is_live(other, now_ms))
    return transition(record, job, command, now_ms)


def lets_a_younger_run_go_first(
    record: Record, job: JobView, command: Command, now_ms: int
) -> Change:
    if record is None:
        job = _without(job, lambda other: is_due(other, now_ms))
    return transition(record, job, command, now_ms)


def lets_a_wait_block(record: Record, job: JobView, command: Command, now_ms: int) -> Change:
    if record is None:
        others = tuple(
            replace(other, until_ms=min(other.until_ms, now_ms))
            if other.state is RunState.WAITING
            else other
            for other in job.others
        )
        job = JobView(job.record, others)
    return transition(record, job, command, now_ms)


def leaves_stale_runs_running(
    record: Record, job: JobView, command: Command, now_ms: int
) -> Change:
    change = transition(record, job, command, now_ms)
    if isinstance(change.reply, LeaseReply) and change.reply.abandoned:
        reply = replace(change.reply, abandoned=())
        change = change._replace(reply=reply, runs=change.runs[:1])
    return change


def skips_what_is_caught_up(record: Record, job: JobView, command: Command, now_ms: int) -> Change:
    if isinstance(command, LeaseClaim) and command.on_overlap is OnOverlap.DEFER:
        command = replace(command, on_overlap=OnOverlap.SKIP)
    return transition(record, job, command, now_ms)


# -- tokens ---------------------------------------------------------------------------------------


def draws_tokens_per_run(record: Record, job: JobView, command: Command, now_ms: int) -> Change:
    last_token = record.token if record is not None else 0
    return transition(
        record, JobView(replace(job.record, last_token=last_token), job.others), command, now_ms
    )


def counts_tokens_from_one(record: Record, job: JobView, command: Command, now_ms: int) -> Change:
    change = transition(record, job, command, now_ms)
    if change.job is None or not isinstance(change.reply, LeaseReply):
        return change
    assert change.reply.lease is not None
    token = job.record.last_token + 1
    lease = replace(change.reply.lease, ref=LeaseRef(change.reply.lease.ref.key, token))
    return Change(
        replace(change.reply, lease=lease),
        (replace(change.runs[0], token=token), *change.runs[1:]),
        replace(change.job, last_token=token),
    )


# -- renew ----------------------------------------------------------------------------------------


def renews_without_a_token(record: Record, job: JobView, command: Command, now_ms: int) -> Change:
    if isinstance(command, Renew) and record is not None:
        command = command._replace(ref=LeaseRef(record.key, record.token))
    return transition(record, job, command, now_ms)


def renews_what_is_settled(record: Record, job: JobView, command: Command, now_ms: int) -> Change:
    if isinstance(command, Renew) and record is not None and record.token == command.ref.token:
        return Change(RenewReply.RENEWED)
    return transition(record, job, command, now_ms)


def does_not_revive_a_lapsed_lease(
    record: Record, job: JobView, command: Command, now_ms: int
) -> Change:
    if isinstance(command, Renew) and record is not None and is_lapsed(record, now_ms):
        return Change(RenewReply.LOST)
    return transition(record, job, command, now_ms)


def never_shortens_by_a_renewal(
    record: Record, job: JobView, command: Command, now_ms: int
) -> Change:
    change = transition(record, job, command, now_ms)
    if isinstance(command, Renew) and record is not None and change.runs:
        longer = replace(change.runs[0], until_ms=max(record.until_ms, change.runs[0].until_ms))
        change = change._replace(runs=(longer,))
    return change


# -- settle ---------------------------------------------------------------------------------------


def settles_without_a_token(record: Record, job: JobView, command: Command, now_ms: int) -> Change:
    if isinstance(command, Settle) and record is not None:
        command = command._replace(ref=LeaseRef(record.key, record.token))
    return transition(record, job, command, now_ms)


def does_not_settle_a_lapsed_lease(
    record: Record, job: JobView, command: Command, now_ms: int
) -> Change:
    if isinstance(command, Settle) and record is not None and is_lapsed(record, now_ms):
        return Change(SettleReply(accepted=False, state=record.state))
    return transition(record, job, command, now_ms)


def accepts_what_others_settled(
    record: Record, job: JobView, command: Command, now_ms: int
) -> Change:
    if isinstance(command, Settle) and record is not None and record.state.settled:
        record = replace(record, decision_id="")
    return transition(record, job, command, now_ms)


def refuses_a_repeated_settle(
    record: Record, job: JobView, command: Command, now_ms: int
) -> Change:
    repeated = record is not None and record.state is not RunState.RUNNING
    if isinstance(command, Settle) and record is not None and repeated:
        return Change(SettleReply(accepted=False, state=record.state))
    return transition(record, job, command, now_ms)


def settles_twice(record: Record, job: JobView, command: Command, now_ms: int) -> Change:
    if isinstance(command, Settle) and record is not None and not record.decision_id:
        record = replace(record, state=RunState.RUNNING)
    return transition(record, job, command, now_ms)


def counts_hand_overs(record: Record, job: JobView, command: Command, now_ms: int) -> Change:
    if isinstance(command, Settle) and command.settlement.outcome is Outcome.HANDED_OVER:
        command = command._replace(settlement=Settlement(Outcome.FAILED, "handed over"))
    return transition(record, job, command, now_ms)


def never_counts_hand_overs(record: Record, job: JobView, command: Command, now_ms: int) -> Change:
    if isinstance(command, Settle) and record is not None:
        record = replace(record, hand_overs=0)
    return transition(record, job, command, now_ms)


def retries_at_once(record: Record, job: JobView, command: Command, now_ms: int) -> Change:
    if isinstance(command, Settle):
        command = command._replace(settlement=replace(command.settlement, delay_ms=0))
    return transition(record, job, command, now_ms)


# -- pending and pruning --------------------------------------------------------------------------


def misses_the_end_of_a_lease(
    unsettled: tuple[RunRecord, ...], asker: str, now_ms: int
) -> Claimable:
    answer = claimable(unsettled, asker, now_ms)
    ends = [run.until_ms for run in unsettled if run.state is RunState.WAITING]
    return answer._replace(next_ms=min((ms for ms in ends if ms > now_ms), default=None))


def lists_no_overlong_lease(unsettled: tuple[RunRecord, ...], asker: str, now_ms: int) -> Claimable:
    return claimable(tuple(replace(run, lease_ms=FOR_EVER_MS) for run in unsettled), asker, now_ms)


def lists_a_waiting_run_before_a_lapsed_one(
    unsettled: tuple[RunRecord, ...], asker: str, now_ms: int
) -> Claimable:
    answer = claimable(unsettled, asker, now_ms)
    due = sorted(run.key for run in unsettled if is_due(run, now_ms) and not run.overlap)
    listed = {run.key: run for run in unsettled}
    keys = tuple(
        due[0] if due and is_lapsed(listed[key], now_ms) and not listed[key].overlap else key
        for key in answer.keys
    )
    return answer._replace(keys=keys)


def lists_what_a_live_lease_blocks(
    unsettled: tuple[RunRecord, ...], asker: str, now_ms: int
) -> Claimable:
    answer = claimable(unsettled, asker, now_ms)
    free = claimable(tuple(run for run in unsettled if not is_live(run, now_ms)), asker, now_ms)
    return answer._replace(keys=free.keys)


def lists_two_runs_of_a_job(unsettled: tuple[RunRecord, ...], asker: str, now_ms: int) -> Claimable:
    answer = claimable(unsettled, asker, now_ms)
    if any(is_live(run, now_ms) for run in unsettled):
        return answer
    free = claimable(tuple(replace(run, overlap=True) for run in unsettled), asker, now_ms)
    return answer._replace(keys=free.keys)


def takes_own_leases_for_those_of_others(
    unsettled: tuple[RunRecord, ...], asker: str, now_ms: int
) -> Claimable:
    return claimable(unsettled, f"not {asker}", now_ms)


def abandons_live_runs(record: RunRecord, before_ms: int, now_ms: int) -> Optional[RunRecord]:
    return abandon(replace(record, until_ms=record.key.scheduled_ms), before_ms, now_ms)


def abandons_without_a_mark(record: RunRecord, before_ms: int, now_ms: int) -> Optional[RunRecord]:
    settled = abandon(record, before_ms, now_ms)
    return None if settled is None else replace(settled, decision_id="")


# -- register -------------------------------------------------------------------------------------


def keeps_the_date_of_a_changed_schedule(job: JobRecord, stamp: JobStamp, now_ms: int) -> JobRecord:
    return register(replace(job, fingerprint=stamp.fingerprint), stamp, now_ms)


def forgets_displaced_schedules(job: JobRecord, stamp: JobStamp, now_ms: int) -> JobRecord:
    return register(replace(job, former=()), stamp, now_ms)


def remembers_displaced_schedules_for_ever(
    job: JobRecord, stamp: JobStamp, now_ms: int
) -> JobRecord:
    former = tuple(replace(item, displaced_ms=now_ms) for item in job.former)
    return register(replace(job, former=former), stamp, now_ms)


def owes_from_the_future(job: JobRecord, stamp: JobStamp, now_ms: int) -> JobRecord:
    if job.owed_from_ms is not None and job.fingerprint == stamp.fingerprint:
        return job
    return register(job, stamp, now_ms)


def moves_the_date_each_time(job: JobRecord, stamp: JobStamp, now_ms: int) -> JobRecord:
    return replace(register(job, stamp, now_ms), owed_from_ms=now_ms)
