"""The rules of claims on a lease backend, judged entry by entry."""

from __future__ import annotations

from typing import Final

from leasecron_sync.model import OnOverlap, Verdict
from leasecron_sync.testing.history import faults
from leasecron_sync.testing.history._ledger import Mark, instant, suspicion_of
from leasecron_sync.testing.history._runs import Books, Grant, JobBook, RunBook, Settled
from leasecron_sync.testing.history.entry import SETTLED, UNKNOWN, Entry

SHORTEST_HISTORY_MS: Final = 60_000
"""What lapsed longer ago than this may have been abandoned by pruning."""

MANY_BATCHES: Final = 1_000
"""Batches that are remembered, until all their answers were seen."""


class ClaimRules:
    """Judges what claims were answered.

    Args:
        books: What is known of jobs, runs and leases.
    """

    def __init__(self, books: Books) -> None:
        self._books = books
        self._ledger = books.ledger
        self._batches: dict[tuple[str, int, str], Entry] = {}

    def claiming(self, mark: Mark) -> None:
        """Note a claim under way."""
        entry = mark.entry
        call = (entry.instance, entry.call)
        job = self._books.job(entry.job)
        job.run(entry.key).claiming.add(call)
        job.claiming.add(call)
        for suspicion in self._ledger.suspicions:
            if suspicion.fault.kind == faults.GRANTED_BESIDE and suspicion.fault.job == entry.job:
                # It may have settled the run that stood in the way.
                self._ledger.began(call, suspicion.subject, entry)

    def claimed(self, mark: Mark) -> None:
        """Judge the answer to a claim."""
        entry = mark.entry
        job, run = self._books.job(entry.job), self._books.run(entry.key)
        call = (entry.instance, entry.call)
        run.claiming.discard(call)
        job.claiming.discard(call)
        self._ledger.answered(call, explains=True)
        if entry.due_ms is not None:
            run.due_ms = entry.due_ms
        self._judge_batch(mark)
        if entry.verdict == UNKNOWN:
            run.unknown += 1
            run.tried.setdefault(entry.decision_id, mark)
            job.unknown += 1
            for grant in run.grants:
                self._may_be_shorter(grant, entry, grant.entry.lease_ms)
        elif entry.verdict == Verdict.GRANTED.value:
            self._granted(job, run, mark)
        elif entry.verdict == Verdict.SETTLED.value:
            if self._may_be_forgotten(job, run, mark):
                return
            if entry.fresh:
                self._settled_by_store(run, mark)
            else:
                self._told_settled(run, mark)
        elif entry.verdict == Verdict.HELD.value:
            self._held(run, entry)
        elif entry.verdict == Verdict.WAITING.value:
            self._is_not_running(run)

    def _judge_batch(self, mark: Mark) -> None:
        entry = mark.entry
        if entry.overlap == OnOverlap.ALLOW.value or self._was_asked(entry):
            return  # or asked for once more, perhaps after a deploy that forbids what was won
        seen = self._batches.setdefault((entry.instance, entry.call, entry.job), entry)
        if seen.key != entry.key:
            message = (
                f"was asked for in one batch with {instant(seen.key.scheduled_ms)}, and runs of "
                "this job may not overlap"
            )
            self._ledger.accuse(faults.TWO_IN_A_BATCH, entry.key, message, seen, entry)
        if len(self._batches) > MANY_BATCHES:
            del self._batches[next(iter(self._batches))]

    def _was_asked(self, entry: Entry) -> bool:
        run = self._books.run(entry.key)
        granted = {grant.entry.decision_id for grant in run.grants}
        return entry.decision_id in run.tried or entry.decision_id in granted

    def _granted(self, job: JobBook, run: RunBook, mark: Mark) -> None:
        entry = mark.entry
        known = job.tokens.get(entry.token)
        if known is not None and not self._may_repeat(known):
            self._granted_again(known, mark)
            return
        grant = Grant(mark, self._ledger.newest_ms(entry))
        grant.lasts(self._ledger, entry, entry.left_ms)
        if self._may_be_forgotten(job, run, mark):
            grant.forgotten = True
            job.former_run(run.key).grants.append(grant)
            job.note_token(grant)
            return
        known_faults = len(self._ledger.faults)
        # One fault is enough to say of one entry; what follows from it is no fault of its own.
        _ = (
            self._judge_attempt(run, grant)
            or self._judge_early(grant)
            or self._judge_beside_own(run, grant)
            or self._judge_beside_others(job, run, grant)
            or self._judge_gap(run, grant)
            or self._judge_token(job, run, grant)
        )
        grant.wrong = len(self._ledger.faults) > known_faults
        self._enter(job, run, grant)

    def _enter(self, job: JobBook, run: RunBook, grant: Grant) -> None:
        if run.word is not None and self._ledger.before(run.word, grant.mark):
            run.reopened = grant.mark
        newer = [other for other in run.grants if other.token > grant.token]
        if newer or run.settled is not None:  # this answer was long on its way
            grant.end = newer[0].mark if newer else run.settled and run.settled.mark
        elif run.told is not None and run.reopened is None and not self._ledger.exact:
            grant.doubt = True
        else:
            job.open[grant.token] = grant
        for other in run.grants:
            if other.token < grant.token:
                if other.end is None:
                    other.end = grant.mark
                    other.how = other.how or "taken over"
                job.open.pop(other.token, None)
        run.grants.append(grant)
        job.note_token(grant)

    def _may_repeat(self, known: Grant) -> bool:
        """Tokens name the clock: an empty store whose clock was set back knows of none before."""
        return known.forgotten and self._books.went_back

    def _granted_again(self, known: Grant, mark: Mark) -> None:
        """The answer to a repeated claim, or a token that was given twice."""
        entry, ledger = mark.entry, self._ledger
        first = known.entry
        # An instance repeats its own decisions alone: to another holder this is another grant.
        same = (first.key, first.decision_id, first.attempt, first.instance) == (
            entry.key,
            entry.decision_id,
            entry.attempt,
            entry.instance,
        )
        if not same or known.forgotten:
            message = f"was granted under token {entry.token}, which was granted before"
            self._books.job(entry.job).accused.add(entry.token)
            ledger.accuse(faults.GRANTED_TWICE, entry.key, message, first, entry)
        elif known.end is not None and ledger.before(known.end, mark):
            message = f"was granted again under token {entry.token} after that lease had ended"
            ledger.accuse(faults.GRANTED_SETTLED, entry.key, message, first, known.end.entry, entry)
        else:
            self._judge_rest(known, entry)
            known.lasts(ledger, entry, entry.left_ms)

    def _judge_rest(self, known: Grant, entry: Entry) -> None:
        """A repeated grant names the time that is left; it extends nothing."""
        until_ms = known.lapsed_from_ms
        # Elsewhere a renewal may have come between that is not answered yet.
        if self._ledger.exact and until_ms is not None and entry.at_ms + entry.left_ms > until_ms:
            message = f"was granted again for {entry.left_ms} ms, and less was left"
            self._ledger.accuse(faults.GRANTED_LONGER, entry.key, message, known.entry, entry)

    def _judge_attempt(self, run: RunBook, grant: Grant) -> bool:
        """An attempt is granted once, and none after the run was settled."""
        entry, ledger = grant.entry, self._ledger
        for other in run.grants:
            if other.attempt == entry.attempt:
                message = f"attempt {entry.attempt} was granted twice"
                ledger.accuse(faults.GRANTED_TWICE, run.key, message, other.entry, entry)
                return True
        settled = run.settled
        if settled is None:
            return self._judge_told(run, grant)
        # A holder's settlement was accepted under its token, so what has a greater one came later.
        later = ledger.before(settled.mark, grant.mark)
        if settled.mark.entry.what == SETTLED:
            later = later or entry.token > settled.mark.entry.token
        if later:
            message = f"was granted although it was {settled.state}"
            ledger.accuse(faults.GRANTED_SETTLED, run.key, message, settled.mark.entry, entry)
        return later

    def _judge_told(self, run: RunBook, grant: Grant) -> bool:
        """What somebody was told to be settled is granted no more."""
        if run.told is None or not self._ledger.before(run.told, grant.mark):
            return False
        told, entry = run.told.entry, grant.entry
        message = f"was granted although {told.instance or 'somebody'} was told: {told.state}"
        self._ledger.accuse(faults.GRANTED_SETTLED, run.key, message, told, entry)
        return True

    def _judge_early(self, grant: Grant) -> bool:
        entry, ledger = grant.entry, self._ledger
        # A later attempt may come before it, after the store's clock was set back.
        if entry.due_ms is None or entry.attempt > 1 or ledger.newest_ms(entry) >= entry.due_ms:
            return False
        message = f"was granted {entry.due_ms - entry.at_ms} ms before it was due"
        ledger.accuse(faults.GRANTED_EARLY, entry.key, message, entry)
        return True

    def _judge_beside_own(self, run: RunBook, grant: Grant) -> bool:
        for other in run.grants:
            older, newer = sorted((other, grant), key=lambda item: item.token)
            if self._surely_live(older, newer.granted_by_ms):
                message = (
                    f"attempt {newer.attempt} was granted while the lease of attempt "
                    f"{older.attempt} was live"
                )
                self._suspect(faults.LIVE_TWICE, message, older, newer)
                return True
        return False

    def _judge_beside_others(self, job: JobBook, run: RunBook, grant: Grant) -> bool:
        """A no-overlap job has one running run, live or lapsed."""
        alone = not run.grants and run.settled is None and run.told is None
        for other in job.open.values():
            # Tokens tell the order: an answer may come long after others that were decided later.
            older, newer = sorted((other, grant), key=lambda item: item.token)
            if other.key == grant.key or newer.entry.overlap == OnOverlap.ALLOW.value:
                continue
            scheduled = instant(older.key.scheduled_ms)
            if self._surely_live(older, newer.granted_by_ms):
                message = f"was granted while the lease of {scheduled} was live"
                self._suspect(faults.JOB_LIVE_TWICE, message, older, newer)
                return True
            bare = (alone or older is other) and not newer.entry.takeover
            if bare and not self._may_have_ended(job, older):
                message = f"was granted while {scheduled} was lapsed and not settled"
                self._suspect(faults.GRANTED_BESIDE, message, older, newer)
                return True
        return False

    def _suspect(self, kind: str, message: str, older: Grant, newer: Grant) -> None:
        suspicion = suspicion_of(kind, newer.key, message, older.entry, newer.entry, subject=older)
        suspicion.waits_for |= older.settling
        self._ledger.suspect(suspicion)

    def _may_have_ended(self, job: JobBook, grant: Grant) -> bool:
        """Tell whether a lapsed run may have been settled without a word in this history."""
        ledger = self._ledger
        if ledger.exact:
            return False
        lapsed_ms = ledger.latest_ms - grant.live_until_ms
        return grant.doubt or bool(job.open_claims) or lapsed_ms > SHORTEST_HISTORY_MS

    @staticmethod
    def _surely_live(grant: Grant, at_ms: int) -> bool:
        """Tell whether a lease was surely live at an instant of the store's clock."""
        ended = grant.end is not None or grant.doubt or grant.forgotten
        return not ended and grant.live_until_ms > at_ms

    def _judge_gap(self, run: RunBook, grant: Grant) -> bool:
        """In an exact history each attempt follows on the one before."""
        if not self._ledger.exact:
            return False  # see ``missing_attempts``
        last = max((other.attempt for other in run.grants), default=0)
        if grant.attempt == last + 1 or (not last and self._books.is_older(run)):
            return False
        _accuse_of_gap(self._books, run, grant, last)
        return True

    def _judge_token(self, job: JobBook, run: RunBook, grant: Grant) -> bool:
        # It may have been granted when it was asked for first, and nobody saw the answer.
        first = run.tried.get(grant.entry.decision_id, grant.mark)
        last = job.last_token_before(self._ledger, first)
        if last is None or last.entry.token < grant.token:
            return False
        if self._may_repeat(job.tokens[last.entry.token]):
            return False
        message = f"was granted token {grant.token} after token {last.entry.token}"
        self._ledger.accuse(faults.TOKEN_NOT_RISING, grant.key, message, last.entry, grant.entry)
        return True

    def _held(self, run: RunBook, entry: Entry) -> None:
        """The answer names the rest of the lease; a step back of the clock may have cut it."""
        if not run.grants or run.grants[-1].end is not None:
            return
        grant = run.grants[-1]
        if self._ledger.exact:
            grant.lasts(self._ledger, entry, entry.wait_ms)
        else:
            self._may_be_shorter(grant, entry, entry.wait_ms)

    def _may_be_shorter(self, grant: Grant, entry: Entry, left_ms: int) -> None:
        until_ms = self._ledger.oldest_ms(entry) + left_ms
        grant.live_until_ms = min(grant.live_until_ms, until_ms)

    def _is_not_running(self, run: RunBook) -> None:
        """Its attempt has ended, perhaps without a word in this history."""
        for grant in run.grants:
            if grant.end is None and not self._ledger.exact:
                grant.doubt = True

    # -- settled by the store ------------------------------------------------------------------

    def _settled_by_store(self, run: RunBook, mark: Mark) -> None:
        entry = mark.entry
        by = f"decision {entry.decision_id}"
        if run.settled is None:
            self._judge_live(run, entry)
        self._books.settle(run, Settled(mark, entry.state, by))
        job = self._books.job(run.key.job)
        for grant in run.grants:
            if grant.end is None:
                grant.end = mark
                grant.how = grant.how or entry.reason
            job.open.pop(grant.token, None)

    def _judge_live(self, run: RunBook, entry: Entry) -> None:
        for grant in run.grants:
            if self._surely_live(grant, self._ledger.newest_ms(entry)):
                message = f"was settled as {entry.state} while its lease was live"
                suspicion = suspicion_of(
                    faults.SETTLED_LIVE, run.key, message, grant.entry, entry, subject=grant
                )
                suspicion.waits_for |= grant.settling
                self._ledger.suspect(suspicion)
                return

    def _told_settled(self, run: RunBook, mark: Mark) -> None:
        entry, settled = mark.entry, run.settled
        run.hears_of_end(mark)
        if settled is not None and settled.state != entry.state:
            self._books.accuse_of_settling_twice(run, settled, entry)
        if settled is None:
            self._is_not_running(run)

    def abandoned(self, mark: Mark) -> None:
        """Note a run that a claim of another one, or pruning, settled."""
        job, run = self._books.job(mark.entry.job), self._books.run(mark.entry.key)
        if not self._may_be_forgotten(job, run, mark):
            self._settled_by_store(run, mark)

    def _may_be_forgotten(self, job: JobBook, run: RunBook, mark: Mark) -> bool:
        """Tell whether the store may have said it before it lost its data; it proves nothing then.

        It is as good as no answer: the run may be settled in the store of now, or may not.
        """
        lost = self._books.lost
        if lost is None or self._ledger.before(lost, mark):
            return False
        run.unknown += 1
        job.unknown += 1
        self._is_not_running(run)
        return True


def missing_attempts(books: Books, run: RunBook) -> None:
    """Judge attempts in the end, where entries of different instances may come in another order."""
    if books.ledger.exact or not run.grants:
        return
    ordered = sorted(run.grants, key=lambda grant: grant.attempt)
    last = ordered[0].attempt - 1 if books.is_older(run) else 0
    excused = run.open_claims
    for grant in ordered:
        excused -= max(0, grant.attempt - last - 1)
        if excused < 0:
            _accuse_of_gap(books, run, grant, last)
            return
        last = grant.attempt


def _accuse_of_gap(books: Books, run: RunBook, grant: Grant, last: int) -> None:
    message = f"attempt {grant.attempt} was granted after attempt {last}"
    known = [other.entry for other in run.grants if other.attempt == last]
    books.ledger.accuse(faults.ATTEMPT_LEFT_OUT, run.key, message, *known, grant.entry)
