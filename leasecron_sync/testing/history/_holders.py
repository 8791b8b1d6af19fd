"""The rules of renewals, settlements and handlers on a lease backend."""

from __future__ import annotations

from typing import Optional

from leasecron_sync.model import Outcome, RenewReply, RunState
from leasecron_sync.testing.history import faults
from leasecron_sync.testing.history._ledger import CallId, Mark, suspicion_of
from leasecron_sync.testing.history._runs import Books, Grant, JobBook, RunBook, Settled, is_settled
from leasecron_sync.testing.history.entry import (
    ACCEPTED,
    AROUND,
    NOT_STARTED,
    REFUSED,
    UNKNOWN,
    Entry,
)


class HolderRules:
    """Judges what holders were answered, and what they did.

    Args:
        books: What is known of jobs, runs and leases.
    """

    def __init__(self, books: Books) -> None:
        self._books = books
        self._ledger = books.ledger

    # -- renew ---------------------------------------------------------------------------------

    def renewed(self, mark: Mark) -> None:
        """Judge the answer to a renewal."""
        entry, ledger = mark.entry, self._ledger
        if entry.verdict == UNKNOWN:
            grant = self._books.job(entry.job).tokens.get(entry.token)
            if grant is not None:
                until_ms = ledger.oldest_ms(entry) + entry.lease_ms
                grant.live_until_ms = min(grant.live_until_ms, until_ms)
                grant.lapsed_from_ms = None
            return
        if entry.verdict == RenewReply.LOST.value:
            self._has_ended(self._books.job(entry.job).tokens.get(entry.token))
        if entry.verdict != RenewReply.RENEWED.value:
            return
        grant = self._grant_of(mark, faults.RENEWED_UNKNOWN, "was renewed")
        if grant is None:
            return
        if grant.end is not None and not grant.wrong and ledger.before(grant.end, mark):
            message = f"was renewed under token {entry.token} after that lease had ended"
            ledger.accuse(
                faults.RENEWED_AFTER_END, entry.key, message, grant.entry, grant.end.entry, entry
            )
            return
        grant.lasts(ledger, entry, entry.lease_ms)

    # -- settle --------------------------------------------------------------------------------

    def settling(self, mark: Mark) -> None:
        """Note a settlement under way."""
        entry = mark.entry
        grant = self._books.job(entry.job).tokens.get(entry.token)
        if grant is not None:
            call = (entry.instance, entry.call)
            grant.settling.add(call)
            self._ledger.began(call, grant, entry)

    def settled(self, mark: Mark) -> None:
        """Judge the answer to a settlement."""
        entry = mark.entry
        call = (entry.instance, entry.call)
        known = self._books.job(entry.job).tokens.get(entry.token)
        if known is not None:
            known.settling.discard(call)
        if entry.verdict == ACCEPTED:
            self._ledger.answered(call, explains=True)
            grant = self._grant_of(mark, faults.SETTLED_UNKNOWN, "was settled")
            if grant is not None and not grant.forgotten:
                self._accepted(grant, mark)
            return
        if entry.verdict == UNKNOWN and known is not None:
            known.doubt = True
        if entry.verdict == REFUSED and known is not None:
            known.how = known.how or "fenced"
            self._told(known, mark)
        self._ledger.answered(call, explains=entry.verdict == UNKNOWN)

    def _told(self, grant: Grant, mark: Mark) -> None:
        """A refusal names the state of the run."""
        self._has_ended(grant)
        if is_settled(mark.entry.state) and not grant.forgotten:
            run = self._books.run(grant.key)
            run.hears_of_end(mark)
            for other in run.grants:
                self._has_ended(other)

    def _has_ended(self, grant: Optional[Grant]) -> None:
        """Note that something ended a lease, perhaps without a word in this history."""
        if grant is not None and grant.end is None and not self._ledger.exact:
            grant.doubt = True

    def _accepted(self, grant: Grant, mark: Mark) -> None:
        entry, ledger = mark.entry, self._ledger
        run = self._books.run(grant.key)
        newer = [item for item in run.grants if item.token > grant.token]
        late = [item for item in newer if ledger.before(item.mark, mark)]
        if late and not grant.wrong:
            message = (
                f"was settled under token {entry.token} although attempt {late[0].attempt} was "
                f"granted token {late[0].token}"
            )
            ledger.accuse(faults.SETTLED_BY_OLD, run.key, message, late[0].entry, entry)
            return
        if grant.accepted is None:
            grant.accepted = mark
        grant.how = entry.outcome
        if grant.end is None or (newer and not late):
            grant.end = mark
        self._books.job(entry.job).open.pop(grant.token, None)
        if grant.wrong:
            if is_settled(entry.state):
                run.reopened = None
            return
        if not is_settled(entry.state):
            settled = run.settled
            if settled is not None and ledger.before(settled.mark, mark):
                self._books.accuse_of_settling_twice(run, settled, entry)
            return
        self._books.settle(run, Settled(mark, entry.state, f"token {entry.token}"))
        if newer:
            message = f"was granted although it was {entry.state}"
            ledger.accuse(faults.GRANTED_SETTLED, run.key, message, entry, newer[0].entry)

    # -- handlers ------------------------------------------------------------------------------

    def started(self, mark: Mark) -> None:
        """Judge the start of a handler."""
        grant = self._grant_of(mark, faults.STARTED_UNKNOWN, "was started")
        if grant is None:
            return
        run = self._books.run(grant.key)
        if not grant.forgotten:
            _ = (
                self._judge_finish(run, mark)
                or self._judge_twice(grant, mark)
                or self._judge_early(grant, mark)
                or (not grant.wrong and self._judge_lease(grant, mark))
            )
        if grant.start is None:
            grant.start = mark

    def _judge_twice(self, grant: Grant, mark: Mark) -> bool:
        if grant.start is None:
            return False
        message = f"attempt {grant.attempt} was started twice"
        self._ledger.accuse(faults.STARTED_TWICE, grant.key, message, grant.start.entry, mark.entry)
        return True

    def _judge_finish(self, run: RunBook, mark: Mark) -> bool:
        settled = run.settled
        if settled is None or settled.state != RunState.FINISHED.value:
            return False
        if not self._ledger.before(settled.mark, mark):
            return False
        message = f"attempt {mark.entry.attempt} was started after the run was finished"
        self._accuse_start(faults.STARTED_AFTER_FINISH, message, settled.mark.entry, mark.entry)
        return True

    def _judge_early(self, grant: Grant, mark: Mark) -> bool:
        due_ms = grant.entry.due_ms
        newest_ms = max(self._ledger.latest_ms, self._ledger.newest_ms(mark.entry))
        if due_ms is None or newest_ms >= due_ms:
            return False
        message = f"attempt {grant.attempt} was started {due_ms - newest_ms} ms before it was due"
        self._ledger.accuse(faults.STARTED_EARLY, grant.key, message, grant.entry, mark.entry)
        return True

    def _judge_lease(self, grant: Grant, mark: Mark) -> bool:
        entry, ledger = mark.entry, self._ledger
        shown = [grant.entry]
        if grant.end is not None and ledger.before(grant.end, mark):
            shown.append(grant.end.entry)
            message = f"attempt {grant.attempt} was started after its lease had ended"
        elif grant.has_lapsed(ledger, entry):
            message = f"attempt {grant.attempt} was started after its lease had lapsed"
        else:
            return False
        self._accuse_start(faults.STARTED_WITHOUT_LEASE, message, *shown, entry)
        return True

    def _accuse_start(self, kind: str, message: str, *entries: Entry) -> None:
        entry = entries[-1]
        suspicion = suspicion_of(kind, entry.key, message, *entries)
        if entry.verdict == AROUND:
            suspicion.waits_for.add(start_id(entry))
        self._ledger.suspect(suspicion)

    def ended(self, mark: Mark) -> None:
        """Note the end of a handler; one that was not called never started."""
        entry = mark.entry
        called = entry.verdict != NOT_STARTED
        self._ledger.answered(start_id(entry), explains=not called)
        grant = self._books.job(entry.job).tokens.get(entry.token)
        if grant is not None and not called:
            grant.start = None

    def _grant_of(self, mark: Mark, kind: str, what: str) -> Optional[Grant]:
        """Return the grant of an entry's token; accuse once where there is none."""
        entry = mark.entry
        job = self._books.job(entry.job)
        grant = job.tokens.get(entry.token)
        if grant is not None and grant.key == entry.key:
            return grant
        run = job.run(entry.key)
        if entry.token not in job.accused and not self._may_be_granted(run):
            job.accused.add(entry.token)
            message = f"{what} under token {entry.token}, which was never granted for it"
            self._ledger.accuse(kind, entry.key, message, entry)
        return None

    def _may_be_granted(self, run: RunBook) -> bool:
        """Tell whether a grant may be older than this history."""
        return self._books.is_older(run)


def start_id(entry: Entry) -> CallId:
    """Return what stands for a start in suspicions."""
    return f"start {entry.job} {entry.scheduled_ms}", entry.token


def finished_unstarted(books: Books, job: JobBook) -> None:
    """In the end: what was finished had a start, where starts were recorded at all."""
    for grant in job.tokens.values():
        shown = _finish_of(job, grant)
        if shown is not None and grant.start is None:
            message = f"attempt {grant.attempt} was finished and never started"
            books.ledger.accuse(faults.FINISHED_UNSTARTED, grant.key, message, grant.entry, shown)


def _finish_of(job: JobBook, grant: Grant) -> Optional[Entry]:
    """Return the entry that says that a grant's attempt was finished."""
    accepted = grant.accepted
    if accepted is not None and accepted.entry.outcome == Outcome.FINISHED.value:
        return accepted.entry
    run = job.runs.get(grant.key.scheduled_ms)
    record = None if run is None or grant.forgotten else run.record
    if record is None or record.token != grant.token:
        return None
    return record if record.state == RunState.FINISHED.value else None
