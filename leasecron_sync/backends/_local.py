"""Commands on a store that lives in this process or in a file: the specification, executed.

A backend supplies ``Tables``, inside one step of its store, and its clock; what is decided is
``protocol.transition`` alone.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Optional, Protocol, Union

from leasecron_sync.errors import StoreRejected
from leasecron_sync.model import (
    JobRecord,
    JobStamp,
    JobStanding,
    LeaseClaim,
    LeaseRef,
    LeaseReply,
    Pending,
    Pruned,
    RenewReply,
    RunKey,
    RunRecord,
    Settlement,
    SettleReply,
    Verdict,
)
from leasecron_sync.protocol.transition import (
    JobView,
    Renew,
    Settle,
    Span,
    abandon,
    claimable,
    newest_pruned,
    register,
    transition,
    with_pruned,
)

_logger = logging.getLogger("leasecron_sync.backends")


class Tables(Protocol):
    """Records of one namespace, read and written inside one step of the store.

    A record that this version cannot read raises ``StoreRejected``.
    """

    def read_ahead(self, keys: Sequence[RunKey], *, others: bool) -> None:
        """Read together, where that is quicker, what will be asked for one by one.

        Args:
            keys: The runs that will be asked for.
            others: Whether all unsettled runs of their jobs will be, too.
        """
        ...

    def run(self, key: RunKey) -> Optional[RunRecord]:
        """Return a run's record."""
        ...

    def job(self, name: str) -> Optional[JobRecord]:
        """Return a job's record."""
        ...

    def unsettled(self, job: Optional[str]) -> tuple[RunRecord, ...]:
        """Return the unsettled runs of a job, without looking at settled ones.

        Without a job, those of all jobs, leaving out what this version cannot read.
        """
        ...

    def lapsed_before(self, until_ms: int, limit: int) -> Sequence[RunRecord]:
        """Return unsettled runs of any job whose ``until_ms`` is smaller."""
        ...

    def settled_before(self, scheduled_ms: int, limit: int) -> Sequence[RunKey]:
        """Return settled runs of any job scheduled earlier, the oldest first."""
        ...

    def newest(self, job: str, until_ms: int) -> Optional[int]:
        """Return the newest scheduled time of a job, up to an instant, that has a record."""
        ...

    def pruned(self, job: str) -> tuple[Span, ...]:
        """Return the spans of a job's scheduled times that were pruned, rising."""
        ...

    def put_pruned(self, job: str, spans: tuple[Span, ...]) -> None:
        """Write the spans of a job, which has a record, in place of those before."""
        ...

    def put_run(self, record: RunRecord) -> None:
        """Write a run's record."""
        ...

    def put_job(self, record: JobRecord) -> None:
        """Write a job's record."""
        ...

    def delete_runs(self, keys: Sequence[RunKey]) -> None:
        """Delete records of settled runs."""
        ...


def claim(tables: Tables, claims: Sequence[LeaseClaim], now_ms: int) -> list[LeaseReply]:
    """Decide claims one by one."""
    tables.read_ahead([item.key for item in claims], others=True)
    return [_claim_one(tables, item, now_ms) for item in claims]


def _claim_one(tables: Tables, item: LeaseClaim, now_ms: int) -> LeaseReply:
    key = item.key
    try:
        record = tables.run(key)
        job = tables.job(key.job) or JobRecord(key.job)
        others = tuple(other for other in tables.unsettled(key.job) if other.key != key)
        view = _view(tables, job, others, now_ms)
    except StoreRejected as error:
        # Nothing was written for this item yet, and the other claims of the batch stand.
        return LeaseReply(Verdict.REJECTED, reason=str(error))
    change = transition(record, view, item, now_ms)
    for changed in change.runs:
        tables.put_run(changed)
    if change.job is not None:
        tables.put_job(change.job)
    assert isinstance(change.reply, LeaseReply)
    return change.reply


def renew(
    tables: Tables, leases: Sequence[LeaseRef], lease_ms: int, now_ms: int
) -> list[RenewReply]:
    """Renew leases one by one."""
    tables.read_ahead([ref.key for ref in leases], others=False)
    replies: list[RenewReply] = []
    for ref in leases:
        try:
            reply = _command(tables, ref.key, Renew(ref, lease_ms), now_ms)
        except StoreRejected:  # only a newer version's takeover can have written such a record
            reply = RenewReply.LOST
        assert isinstance(reply, RenewReply)
        replies.append(reply)
    return replies


def settle(tables: Tables, lease: LeaseRef, settlement: Settlement, now_ms: int) -> SettleReply:
    """Settle one attempt."""
    reply = _command(tables, lease.key, Settle(lease, settlement), now_ms)
    assert isinstance(reply, SettleReply)
    return reply


def _view(tables: Tables, job: JobRecord, others: tuple[RunRecord, ...], now_ms: int) -> JobView:
    """Return what a command may read of a job; what was pruned only where it matters."""
    ahead = job.pruned_to_ms is not None and job.pruned_to_ms > now_ms
    return JobView(job, others, tables.pruned(job.job) if ahead else ())


def settle_all(
    tables: Tables, asked: Sequence[tuple[LeaseRef, Settlement]], now_ms: int
) -> list[Union[SettleReply, StoreRejected]]:
    """Settle attempts one by one; what cannot be read is an error of that one alone."""
    tables.read_ahead([lease.key for lease, _settlement in asked], others=False)
    answers: list[Union[SettleReply, StoreRejected]] = []
    for lease, settlement in asked:
        try:
            answers.append(settle(tables, lease, settlement, now_ms))
        except StoreRejected as error:  # nothing was written for it
            answers.append(error)
    return answers


def _command(tables: Tables, key: RunKey, command: Union[Renew, Settle], now_ms: int) -> object:
    change = transition(tables.run(key), JobView(JobRecord(key.job)), command, now_ms)
    for changed in change.runs:
        tables.put_run(changed)
    return change.reply


def register_jobs(
    tables: Tables, stamps: Iterable[JobStamp], now_ms: int, store_id: str
) -> list[JobStanding]:
    """Register jobs one by one."""
    standings: list[JobStanding] = []
    for stamp in stamps:
        try:
            before = tables.job(stamp.job) or JobRecord(stamp.job)
            pruned_ms = newest_pruned(_view(tables, before, (), now_ms), now_ms)
        except StoreRejected as error:
            _logger.error("a job is left as it is job=%r error=%r", stamp.job, str(error))  # noqa: TRY400
            standings.append(JobStanding(now_ms, None, now_ms, store_id))
            continue
        job = register(before, stamp, now_ms)
        if job != before:
            tables.put_job(job)
        assert job.owed_from_ms is not None
        newest = (tables.newest(job.job, now_ms), pruned_ms)
        known = [ms for ms in newest if ms is not None]
        standings.append(JobStanding(job.owed_from_ms, max(known, default=None), now_ms, store_id))
    return standings


def pending(tables: Tables, jobs: Iterable[str], asker: str, limit: int, now_ms: int) -> Pending:
    """Collect what is claimable of these jobs, the oldest runs first."""
    asked = set(jobs)
    by_job: dict[str, list[RunRecord]] = {}
    for record in tables.unsettled(None):
        if record.key.job in asked:
            by_job.setdefault(record.key.job, []).append(record)
    keys: list[RunKey] = []
    coming: list[int] = []
    unsettled = False
    for records in by_job.values():
        answer = claimable(tuple(records), asker, now_ms)
        keys.extend(answer.keys)
        unsettled = unsettled or answer.unsettled
        if answer.next_ms is not None:
            coming.append(answer.next_ms - now_ms)
    keys.sort(key=lambda key: (key.scheduled_ms, key.job))
    return Pending(tuple(keys[:limit]), min(coming, default=None), unsettled)


def prune(tables: Tables, older_than_ms: int, limit: int, now_ms: int) -> Pruned:
    """Abandon and delete old runs; at most ``limit`` of each."""
    before_ms = now_ms - older_than_ms
    abandoned: list[RunKey] = []
    for record in tables.lapsed_before(before_ms, limit):
        settled = abandon(record, before_ms, now_ms)
        if settled is not None:
            tables.put_run(settled)
            abandoned.append(settled.key)
    keys = tables.settled_before(before_ms, limit)
    scheduled: dict[str, list[int]] = {}
    for key in keys:
        scheduled.setdefault(key.job, []).append(key.scheduled_ms)
    for name, times in scheduled.items():
        try:
            job = tables.job(name) or JobRecord(name)
            if job.pruned_to_ms is None or job.pruned_to_ms < max(times):
                tables.put_job(replace(job, pruned_to_ms=max(times)))
            before = tables.pruned(name)  # after that: what is noted holds where these are damaged
        except StoreRejected as error:
            # What cannot be noted is not granted again either (CALL-5).
            _logger.debug("what is pruned of a job is not noted error=%r", str(error))
            continue
        after = with_pruned(before, times, older_than_ms)
        if after != before:
            tables.put_pruned(name, after)
    tables.delete_runs(keys)
    return Pruned(len(keys), tuple(abandoned))
