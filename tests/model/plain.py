"""The commands of a lease backend on two dictionaries: what other backends are compared with.

Everything is decided by the functions of ``protocol.transition``; this module only finds the
records for them and keeps what they return. It is written without regard to the package's own
executors, so that a mistake in those shows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Callable, Optional

from leasecron_sync.model import (
    JobRecord,
    JobSpan,
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
    RunState,
    Settlement,
    SettleReply,
)
from leasecron_sync.protocol.transition import (
    Change,
    Command,
    JobView,
    Renew,
    Reply,
    Settle,
    Span,
    abandon,
    claimable,
    newest_pruned,
    register,
    transition,
    with_pruned,
)

Transition = Callable[[Optional[RunRecord], JobView, Command, int], Change]


class PlainStore:
    """Runs and jobs of one namespace."""

    def __init__(self, now_ms: Callable[[], int], decide: Transition = transition) -> None:
        self.runs: dict[RunKey, RunRecord] = {}
        self.jobs: dict[str, JobRecord] = {}
        self.pruned: dict[str, tuple[Span, ...]] = {}
        self._now_ms = now_ms
        self._decide = decide

    def claim(self, claims: Sequence[LeaseClaim]) -> list[LeaseReply]:
        replies = []
        for claim in claims:
            reply = self._execute(claim.key, claim)
            assert isinstance(reply, LeaseReply)
            replies.append(reply)
        return replies

    def renew(self, leases: Sequence[LeaseRef], lease_ms: int) -> list[RenewReply]:
        replies = []
        for ref in leases:
            reply = self._execute(ref.key, Renew(ref, lease_ms))
            assert isinstance(reply, RenewReply)
            replies.append(reply)
        return replies

    def settle(self, lease: LeaseRef, settlement: Settlement) -> SettleReply:
        reply = self._execute(lease.key, Settle(lease, settlement))
        assert isinstance(reply, SettleReply)
        return reply

    def _execute(self, key: RunKey, command: Command) -> Reply:
        job = self.jobs.get(key.job, JobRecord(key.job))
        others = tuple(record for record in self.unsettled(key.job) if record.key != key)
        view = JobView(job, others, self.pruned.get(key.job, ()))
        change = self._decide(self.runs.get(key), view, command, self._now_ms())
        for record in change.runs:
            self.runs[record.key] = record
        if change.job is not None:
            self.jobs[key.job] = change.job
        return change.reply

    def unsettled(self, job: str) -> list[RunRecord]:
        return [
            record
            for key, record in self.runs.items()
            if key.job == job and not record.state.settled
        ]

    def register(self, jobs: Sequence[JobStamp]) -> list[JobStanding]:
        standings = []
        for stamp in jobs:
            before = self.jobs.get(stamp.job, JobRecord(stamp.job))
            record = self.jobs[stamp.job] = register(before, stamp, self._now_ms())
            assert record.owed_from_ms is not None
            now_ms = self._now_ms()
            times = [key.scheduled_ms for key in self.runs if key.job == stamp.job]
            pruned_ms = newest_pruned(JobView(record, (), self.pruned.get(stamp.job, ())), now_ms)
            if pruned_ms is not None:
                times.append(pruned_ms)
            known = [scheduled_ms for scheduled_ms in times if scheduled_ms <= now_ms]
            newest = max(known) if known else None
            standings.append(JobStanding(record.owed_from_ms, newest, now_ms, "plain"))
        return standings

    def pending(self, jobs: Sequence[str], limit: int, asker: str) -> Pending:
        now_ms = self._now_ms()
        answers = [claimable(tuple(self.unsettled(job)), asker, now_ms) for job in set(jobs)]
        keys = sorted(
            (key for answer in answers for key in answer.keys),
            key=lambda key: (key.scheduled_ms, key.job),
        )
        coming = [answer.next_ms - now_ms for answer in answers if answer.next_ms is not None]
        return Pending(
            tuple(keys[:limit]),
            min(coming) if coming else None,
            any(answer.unsettled for answer in answers),
        )

    def states(self, spans: Sequence[JobSpan]) -> list[Mapping[int, RunState]]:
        return [
            {
                key.scheduled_ms: record.state
                for key, record in self.runs.items()
                if key.job == span.job and span.from_ms <= key.scheduled_ms <= span.to_ms
            }
            for span in spans
        ]

    def history(self, job: Optional[str], limit: int) -> list[RunRecord]:
        records = [record for key, record in self.runs.items() if job in (None, key.job)]
        records.sort(key=lambda record: record.key.job)
        records.sort(key=lambda record: record.key.scheduled_ms, reverse=True)
        return records[:limit]

    def prune(self, older_than_ms: int, limit: int) -> Pruned:
        """Prune like a store does; of equally old ones, any may be left out by the limit."""
        now_ms = self._now_ms()
        before_ms = now_ms - older_than_ms
        abandoned: list[RunKey] = []
        for record in list(self.runs.values()):
            settled = abandon(record, before_ms, now_ms)
            if settled is not None and len(abandoned) < limit:
                self.runs[record.key] = settled
                abandoned.append(record.key)
        old = [
            key
            for key, record in self.runs.items()
            if record.state.settled and key.scheduled_ms < before_ms
        ]
        old.sort(key=lambda key: key.scheduled_ms)
        for key in old[:limit]:
            del self.runs[key]
            job = self.jobs.get(key.job, JobRecord(key.job))
            pruned_to_ms = max(key.scheduled_ms, job.pruned_to_ms or key.scheduled_ms)
            self.jobs[key.job] = replace(job, pruned_to_ms=pruned_to_ms)
        for name in {key.job for key in old[:limit]}:
            times = [key.scheduled_ms for key in old[:limit] if key.job == name]
            self.pruned[name] = with_pruned(self.pruned.get(name, ()), times, older_than_ms)
        return Pruned(len(old[:limit]), tuple(abandoned))
