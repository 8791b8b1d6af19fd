"""The specification of every store command, as pure functions.

``transition`` decides the three commands on one run (claim, renew, settle), ``register`` the one
on a job, ``claimable`` what ``pending`` answers for a job, and ``abandon`` what pruning does to a
run that nobody took over. The memory and SQLite backends execute these functions; a backend that
decides in another language is compared with them, reply by reply and record by record.

The module is over 400 lines long because the specification is read in one piece.

The line numbers in the comments are those of the decision table in ``docs/protocol.rst``.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple, Optional, Union

from leasecron_sync.model import (
    FormerSchedule,
    JobRecord,
    JobStamp,
    Lease,
    LeaseClaim,
    LeaseRef,
    LeaseReply,
    OnOverlap,
    Outcome,
    Reason,
    RenewReply,
    RunKey,
    RunRecord,
    RunState,
    Settlement,
    SettleReply,
    Verdict,
)

FREE_HAND_OVERS = 9
"""Hand-overs of a run that do not count as attempts; from the next one on they do."""

MAX_RETRY_DELAY_MS = 300_000
"""The longest wait that a failed run is ever given."""

FORMER_SCHEDULE_MS = 600_000
"""A definition that returns within this time (a rolling deploy) keeps its old date."""

FORMER_SCHEDULES = 8
"""How many displaced definitions of a job are remembered."""

STORE_DECISION = "store"
"""Decision id of what pruning settled; never made by an instance."""


class Renew(NamedTuple):
    """Command: extend a lease by ``lease_ms`` from now."""

    ref: LeaseRef
    lease_ms: int


class Settle(NamedTuple):
    """Command: report how an attempt ended."""

    ref: LeaseRef
    settlement: Settlement


PRUNED_SPANS = 8
"""How many spans of pruned scheduled times are remembered of a job."""

Span = tuple[int, int]
"""First and last scheduled time of a span."""

Command = Union[LeaseClaim, Renew, Settle]
Reply = Union[LeaseReply, RenewReply, SettleReply]


@dataclass(frozen=True)
class JobView:
    """What a command on one run may read besides its own record.

    Attributes:
        record: The job's record.
        others: Every unsettled run of the job besides the run itself.
        pruned: Spans of its scheduled times that were pruned; read only where the newest of them
            lies ahead of the clock.
    """

    record: JobRecord
    others: tuple[RunRecord, ...] = ()
    pruned: tuple[Span, ...] = ()


class Change(NamedTuple):
    """A reply and what to write with it, in the same step.

    Attributes:
        reply: The answer.
        runs: Run records to write.
        job: Job record to write, when it changed.
    """

    reply: Reply
    runs: tuple[RunRecord, ...] = ()
    job: Optional[JobRecord] = None


def transition(record: Optional[RunRecord], job: JobView, command: Command, now_ms: int) -> Change:
    """Decide one command on one run.

    Args:
        record: The run's record; None when there is none.
        job: The job's record and its other unsettled runs.
        command: A claim, a renewal or a settlement.
        now_ms: The store's clock, read in the same step.
    """
    if isinstance(command, Renew):
        return _renew(record, command, now_ms)
    if isinstance(command, Settle):
        return _settle(record, command, now_ms)
    return _claim(record, job, command, now_ms)


def is_live(record: RunRecord, now_ms: int) -> bool:
    """Tell whether the run is running under a lease that has not lapsed."""
    return record.state is RunState.RUNNING and record.until_ms > now_ms


def is_lapsed(record: RunRecord, now_ms: int) -> bool:
    """Tell whether the run is running under a lease that has lapsed."""
    return record.state is RunState.RUNNING and record.until_ms <= now_ms


def is_due(record: RunRecord, now_ms: int) -> bool:
    """Tell whether the run waits and its wait is over.

    A wait longer than any retry delay shows that the clock was set back; it counts as over.
    """
    left = record.until_ms - now_ms
    return record.state is RunState.WAITING and (left <= 0 or left > MAX_RETRY_DELAY_MS)


def is_overlong(record: RunRecord, now_ms: int) -> bool:
    """Tell whether a live lease is so long that the clock must have been set back."""
    return is_live(record, now_ms) and record.until_ms - now_ms > 2 * record.lease_ms


def _claim(record: Optional[RunRecord], job: JobView, claim: LeaseClaim, now_ms: int) -> Change:
    if record is None:
        change = _claim_new(job, claim, now_ms)
    elif record.state.settled:  # lines 1 and 2
        fresh = record.decision_id == claim.decision_id
        change = Change(_settled(record, fresh=fresh))
    elif record.state is RunState.WAITING:
        change = _claim_waiting(record, job, claim, now_ms)
    elif is_live(record, now_ms):
        change = _claim_live(record, claim, now_ms)
    else:
        change = _claim_lapsed(record, job, claim, now_ms)
    return _note_unsettled(change, job, claim, now_ms)


def _claim_live(record: RunRecord, claim: LeaseClaim, now_ms: int) -> Change:
    written: tuple[RunRecord, ...] = ()
    if is_overlong(record, now_ms):
        record = replace(record, until_ms=now_ms + record.lease_ms)
        written = (record,)
    left_ms = record.until_ms - now_ms
    if record.decision_id == claim.decision_id:  # line 1
        lease = Lease(
            ref=LeaseRef(record.key, record.token),
            attempt=record.attempt,
            failures=record.failures,
            left_ms=left_ms,
            takeover=False,
        )
        return Change(_granted(lease), written)
    return Change(  # line 3
        LeaseReply(Verdict.HELD, wait_ms=left_ms, state=record.state), written
    )


def _claim_lapsed(record: RunRecord, job: JobView, claim: LeaseClaim, now_ms: int) -> Change:
    """Line 4."""
    failures = record.failures + 1  # the attempt whose runner was lost
    if now_ms - record.until_ms > claim.takeover_ms:
        return _fail(record, claim, Reason.ABANDONED, failures, now_ms)
    if failures >= claim.max_attempts:
        return _fail(record, claim, Reason.RUNNER_LOST, failures, now_ms)
    if claim.on_overlap is not OnOverlap.ALLOW:
        blockers = [other for other in job.others if is_live(other, now_ms)]
        if blockers:
            return _deferred(record, blockers, now_ms)
    return _grant(replace(record, failures=failures), job, claim, now_ms, takeover=True)


def _claim_waiting(record: RunRecord, job: JobView, claim: LeaseClaim, now_ms: int) -> Change:
    """Line 5."""
    if not is_due(record, now_ms):
        wait_ms = record.until_ms - now_ms
        return Change(LeaseReply(Verdict.WAITING, wait_ms=wait_ms, state=record.state))
    if now_ms - record.until_ms > claim.takeover_ms:
        return _fail(record, claim, Reason.ABANDONED, record.failures, now_ms)
    if claim.on_overlap is not OnOverlap.ALLOW:
        blockers = [other for other in job.others if other.state is RunState.RUNNING]
        if blockers:
            return _deferred(record, blockers, now_ms)
    return _grant(record, job, claim, now_ms)


def _claim_new(job: JobView, claim: LeaseClaim, now_ms: int) -> Change:
    """Line 6."""
    key = claim.key
    if now_ms < claim.due_ms:
        return Change(LeaseReply(Verdict.EARLY, wait_ms=claim.due_ms - now_ms))
    if was_pruned(job, key.scheduled_ms, now_ms) or now_ms - claim.due_ms > claim.max_age_ms:
        return Change(LeaseReply(Verdict.TOO_OLD))
    abandoned: tuple[RunRecord, ...] = ()
    if claim.on_overlap is not OnOverlap.ALLOW:
        stale = [other for other in job.others if _to_abandon(other, claim, now_ms)]
        blockers = [
            other
            for other in job.others
            if (other.state is RunState.RUNNING and other not in stale)
            or (other.key.scheduled_ms < key.scheduled_ms and is_due(other, now_ms))
        ]
        if blockers and claim.on_overlap is OnOverlap.SKIP:
            return _skip(claim, now_ms)
        if blockers:
            return _deferred(None, blockers, now_ms)
        # A run that lapsed too long ago does not hold its job up. It is settled here and now:
        # left as it is, a late renewal would make it a second running run of the job.
        abandoned = tuple(
            _failed(other, claim.decision_id, Reason.ABANDONED, other.failures + 1, now_ms)
            for other in stale
        )
    return _grant(None, job, claim, now_ms, abandoned=abandoned)


def _to_abandon(record: RunRecord, claim: LeaseClaim, now_ms: int) -> bool:
    return is_lapsed(record, now_ms) and now_ms - record.until_ms > claim.takeover_ms


def _grant(  # noqa: PLR0913 - the parts of one decision
    record: Optional[RunRecord],
    job: JobView,
    claim: LeaseClaim,
    now_ms: int,
    *,
    takeover: bool = False,
    abandoned: tuple[RunRecord, ...] = (),
) -> Change:
    # Never below the store's clock: tokens go on rising when the job's record was lost.
    token = max(job.record.last_token + 1, now_ms)
    granted = RunRecord(
        key=claim.key,
        state=RunState.RUNNING,
        token=token,
        attempt=1 if record is None else record.attempt + 1,
        failures=0 if record is None else record.failures,
        hand_overs=0 if record is None else record.hand_overs,
        holder=claim.holder,
        decision_id=claim.decision_id,
        until_ms=now_ms + claim.lease_ms,
        lease_ms=claim.lease_ms,
        max_attempts=claim.max_attempts,
        overlap=claim.on_overlap is OnOverlap.ALLOW,
        takeover_ms=claim.takeover_ms,
        claimed_ms=now_ms,
    )
    lease = Lease(
        ref=LeaseRef(granted.key, token),
        attempt=granted.attempt,
        failures=granted.failures,
        left_ms=claim.lease_ms,
        takeover=takeover,
    )
    reply = _granted(lease, tuple(other.key for other in abandoned))
    return Change(reply, (granted, *abandoned), replace(job.record, last_token=token))


def _granted(lease: Lease, abandoned: tuple[RunKey, ...] = ()) -> LeaseReply:
    return LeaseReply(
        Verdict.GRANTED, lease=lease, state=RunState.RUNNING, fresh=True, abandoned=abandoned
    )


def _settled(record: RunRecord, *, fresh: bool) -> LeaseReply:
    return LeaseReply(Verdict.SETTLED, state=record.state, reason=record.reason, fresh=fresh)


def _deferred(record: Optional[RunRecord], blockers: list[RunRecord], now_ms: int) -> Change:
    wait_ms = max(0, min(other.until_ms for other in blockers) - now_ms)
    state = record.state if record is not None else None
    return Change(LeaseReply(Verdict.DEFERRED, wait_ms=wait_ms, state=state))


def _skip(claim: LeaseClaim, now_ms: int) -> Change:
    skipped = RunRecord(
        key=claim.key,
        state=RunState.SKIPPED,
        holder=claim.holder,
        decision_id=claim.decision_id,
        settled_ms=now_ms,
        reason=Reason.OVERLAP.value,
    )
    return Change(_settled(skipped, fresh=True), (skipped,))


def _fail(
    record: RunRecord, claim: LeaseClaim, reason: Reason, failures: int, now_ms: int
) -> Change:
    failed = _failed(record, claim.decision_id, reason, failures, now_ms)
    return Change(_settled(failed, fresh=True), (failed,))


def _failed(
    record: RunRecord, decision_id: str, reason: Reason, failures: int, now_ms: int
) -> RunRecord:
    return replace(
        record,
        state=RunState.FAILED,
        decision_id=decision_id,
        failures=failures,
        settled_ms=now_ms,
        reason=reason.value,
    )


def _note_unsettled(change: Change, job: JobView, claim: LeaseClaim, now_ms: int) -> Change:
    """Tell the claiming instance whether the job has a run that somebody may have to take over."""
    reply = change.reply
    assert isinstance(reply, LeaseReply)
    own = reply.verdict in (Verdict.HELD, Verdict.WAITING, Verdict.DEFERRED)
    rest = any(
        not (is_live(other, now_ms) and other.holder == claim.holder)
        for other in job.others
        if other.key not in reply.abandoned
    )
    return change._replace(reply=replace(reply, unsettled=True)) if own or rest else change


def _renew(record: Optional[RunRecord], command: Renew, now_ms: int) -> Change:
    if record is None or record.state is not RunState.RUNNING or record.token != command.ref.token:
        return Change(RenewReply.LOST)
    return Change(RenewReply.RENEWED, (replace(record, until_ms=now_ms + command.lease_ms),))


def _settle(record: Optional[RunRecord], command: Settle, now_ms: int) -> Change:
    if record is None or record.token != command.ref.token:
        return Change(SettleReply(accepted=False, state=record.state if record else None))
    if record.state is not RunState.RUNNING:
        # The token's own settlement, asked again after a lost reply. One that a claim or pruning
        # settled (decision id) was taken out of the holder's hands.
        repeated = not record.decision_id
        return Change(_settle_reply(record, now_ms) if repeated else _fenced(record))
    settled = _apply(record, command.settlement, now_ms)
    return Change(_settle_reply(settled, now_ms), (settled,))


def _apply(record: RunRecord, settlement: Settlement, now_ms: int) -> RunRecord:
    record = replace(record, decision_id="", reason=settlement.reason, settled_ms=now_ms)
    if settlement.outcome is Outcome.FINISHED:
        return replace(record, state=RunState.FINISHED)
    counted, wait_ms = 1, settlement.delay_ms
    if settlement.outcome is Outcome.HANDED_OVER:
        record = replace(record, hand_overs=record.hand_overs + 1)
        counted, wait_ms = int(record.hand_overs > FREE_HAND_OVERS), 0
    record = replace(record, failures=record.failures + counted)
    if counted and record.failures >= record.max_attempts:
        return replace(record, state=RunState.FAILED)
    return replace(record, state=RunState.WAITING, until_ms=now_ms + wait_ms, settled_ms=None)


def _settle_reply(record: RunRecord, now_ms: int) -> SettleReply:
    waiting = record.state is RunState.WAITING
    wait_ms = max(0, record.until_ms - now_ms) if waiting else 0
    return SettleReply(accepted=True, state=record.state, wait_ms=wait_ms)


def _fenced(record: RunRecord) -> SettleReply:
    return SettleReply(accepted=False, state=record.state)


def register(job: JobRecord, stamp: JobStamp, now_ms: int) -> JobRecord:
    """Decide since when the scheduled times of a job are owed."""
    if job.owed_from_ms is None:
        return replace(job, owed_from_ms=now_ms, fingerprint=stamp.fingerprint)
    if job.fingerprint == stamp.fingerprint:
        return replace(job, owed_from_ms=min(job.owed_from_ms, now_ms))
    # In both directions: one displaced under a clock that was far ahead is not recent for years.
    recent = [
        former for former in job.former if abs(now_ms - former.displaced_ms) < FORMER_SCHEDULE_MS
    ]
    returning = [former for former in recent if former.fingerprint == stamp.fingerprint]
    owed_from_ms = min(returning[0].owed_from_ms, now_ms) if returning else now_ms
    displaced = FormerSchedule(job.fingerprint, job.owed_from_ms, now_ms)
    kept = [
        former
        for former in recent
        if former.fingerprint not in (stamp.fingerprint, job.fingerprint)
    ]
    return replace(
        job,
        owed_from_ms=owed_from_ms,
        fingerprint=stamp.fingerprint,
        former=(displaced, *kept)[:FORMER_SCHEDULES],
    )


def was_pruned(job: JobView, scheduled_ms: int, now_ms: int) -> bool:
    """Tell whether a scheduled time is at or before what was pruned of its job.

    When the newest of that lies ahead of the clock, the clock was ahead for long when it was
    pruned, and may have been set right since. Then only what was pruned itself counts: all before
    it would be silenced until the clock has come there again, which may take years.
    """
    newest_ms = job.record.pruned_to_ms
    if newest_ms is None or scheduled_ms > newest_ms:
        return False
    if newest_ms <= now_ms:
        return True
    return any(first_ms <= scheduled_ms <= last_ms for first_ms, last_ms in job.pruned)


def newest_pruned(job: JobView, now_ms: int) -> Optional[int]:
    """Return the newest scheduled time, up to now, that was pruned; None if there is none."""
    newest_ms = job.record.pruned_to_ms
    if newest_ms is None or newest_ms <= now_ms:
        return newest_ms
    past = [min(last_ms, now_ms) for first_ms, last_ms in job.pruned if first_ms <= now_ms]
    return max(past, default=None)


def with_pruned(
    spans: tuple[Span, ...], scheduled: Iterable[int], older_than_ms: int
) -> tuple[Span, ...]:
    """Return the spans of pruned scheduled times with some more of them.

    What lies close together is one span. A clock that was ahead by less than the history leaves
    nothing ahead of it when it is set right, so a hole of half a history needs no care.

    Args:
        spans: The spans so far, rising.
        scheduled: What is pruned now.
        older_than_ms: Length of the history.
    """
    joined: list[Span] = []
    for first_ms, last_ms in sorted([*spans, *((ms, ms) for ms in scheduled)]):
        if joined and first_ms - joined[-1][1] <= older_than_ms // 2:
            joined[-1] = (joined[-1][0], max(last_ms, joined[-1][1]))
        else:
            joined.append((first_ms, last_ms))
    while len(joined) > PRUNED_SPANS:
        holes = [after[0] - before[1] for before, after in zip(joined, joined[1:])]
        place = holes.index(min(holes))
        joined[place : place + 2] = [(joined[place][0], joined[place + 1][1])]
    return tuple(joined)


class Claimable(NamedTuple):
    """What ``pending`` answers for one job.

    Attributes:
        keys: Runs to claim now.
        next_ms: Store's instant at which the next one may become claimable.
        unsettled: Whether there is a run that the asking instance does not hold.
    """

    keys: tuple[RunKey, ...]
    next_ms: Optional[int]
    unsettled: bool


def claimable(unsettled: tuple[RunRecord, ...], asker: str, now_ms: int) -> Claimable:
    """Tell which of a job's unsettled runs are claimable now, and when the next one is.

    Where overlap is forbidden, a lapsed run goes before a waiting one, since a waiting run is
    deferred until the lapsed one is settled; among equals the older one goes first.
    """
    runs = sorted(unsettled, key=lambda record: record.key)
    overlong = [record for record in runs if is_overlong(record, now_ms)]
    live = [record for record in runs if is_live(record, now_ms)]
    lapsed = [record for record in runs if is_lapsed(record, now_ms)]
    due = [record for record in runs if is_due(record, now_ms)]
    free = [record for record in lapsed + due if record.overlap]
    queue = [record for record in lapsed + due if not record.overlap]
    keys = [record.key for record in overlong + free]
    if queue and not live:
        keys.append(queue[0].key)
    coming = [record.until_ms for record in runs if record.until_ms > now_ms]
    others = any(not (is_live(record, now_ms) and record.holder == asker) for record in runs)
    return Claimable(tuple(sorted(keys)), min(coming, default=None), others)


def abandon(record: RunRecord, before_ms: int, now_ms: int) -> Optional[RunRecord]:
    """Settle an unsettled run that lapsed or fell due before an instant; None if it stays.

    Pruning does this for jobs that no running version knows any more.
    """
    if record.state.settled or record.until_ms >= before_ms:
        return None
    failures = record.failures + (record.state is RunState.RUNNING)
    return _failed(record, STORE_DECISION, Reason.ABANDONED, failures, now_ms)
