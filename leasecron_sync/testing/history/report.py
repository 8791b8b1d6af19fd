"""The verdict on a whole history: totals, a row for each run, and the faults."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Optional

from leasecron_sync.model import Outcome, RunKey
from leasecron_sync.testing.history import faults
from leasecron_sync.testing.history._once import Won
from leasecron_sync.testing.history._runs import Grant, RunBook, Standing, standing
from leasecron_sync.testing.history.checker import SKEW_MS, Checker
from leasecron_sync.testing.history.entry import REFUSED, SETTLED, TOLD, UNKNOWN, Entry
from leasecron_sync.testing.history.faults import Fault


@dataclass(frozen=True)
class AttemptRow:
    """One attempt of a run.

    Attributes:
        attempt: Its number; 1 on a claim backend.
        token: Its token; 0 on a claim backend.
        holder: Instance that was granted it.
        started: Whether its handler started.
        takeover: Whether it was taken over from a holder whose lease had lapsed.
        ending: ``finished``, ``failed``, ``handed_over``, ``taken over``, ``fenced``, the reason
            for which the store settled it, or nothing where the history tells no end.
    """

    attempt: int
    token: int
    holder: str
    started: bool
    takeover: bool
    ending: str


@dataclass(frozen=True)
class RunRow:
    """One run.

    Attributes:
        job: Its job.
        scheduled_ms: Its scheduled time.
        state: State in the end, as far as the history tells; nothing where it does not.
        attempts: Its attempts, in order.
        faults: What is wrong with it.
    """

    job: str
    scheduled_ms: int
    state: str
    attempts: tuple[AttemptRow, ...]
    faults: tuple[Fault, ...] = ()

    @property
    def executions(self) -> int:
        """How often its handler started."""
        return sum(attempt.started for attempt in self.attempts)


@dataclass(frozen=True)
class Totals:
    """Figures of a history.

    Attributes:
        entries: Entries that were judged.
        instances: Instances that wrote them.
        runs: Runs of which the history knows.
        grants: Leases granted, repeats left out; on a claim backend runs won.
        executions: Starts of handlers.
        executed_again: Starts beyond the first of a run: after a takeover, a failure or a
            hand-over. They are no doubles.
        takeovers: Leases taken over from a holder whose lease had lapsed.
        hand_overs: Runs handed over by their holder.
        fenced: Settlements refused, since the token was no longer the record's.
        unanswered: Calls without an answer.
        finished: Runs that finished, and so on for ``failed``, ``skipped`` and ``unsettled``.
        failed: See ``finished``.
        skipped: See ``finished``.
        unsettled: Runs that were granted and are not settled.
        missed: Distinct scheduled times that were told as missed, by reason.
        doubled: Faults that are doubled runs.
        lost: Owed scheduled times without a settled record.
        undecided: Owed scheduled times of which the history cannot tell.
        faults: All faults.
    """

    entries: int
    instances: int
    runs: int
    grants: int
    executions: int
    executed_again: int
    takeovers: int
    hand_overs: int
    fenced: int
    unanswered: int
    finished: int
    failed: int
    skipped: int
    unsettled: int
    missed: Mapping[str, int]
    doubled: int
    lost: int
    undecided: int
    faults: int


@dataclass(frozen=True)
class Report:
    """The verdict on a history.

    Attributes:
        runs: A row for each run, by job and scheduled time.
        totals: Figures.
        faults: What is wrong, in the order in which it was found.
    """

    runs: tuple[RunRow, ...]
    totals: Totals
    faults: tuple[Fault, ...]


@dataclass(frozen=True)
class Terms:
    """What a history is judged by.

    Attributes:
        exact: See ``Checker``.
        skew_ms: See ``Checker``.
        owed: Runs that must be settled in the end.
        until_ms: Runs due before this must be settled as well; None asks nothing of them.
        begin_ms: See ``Checker``.
    """

    exact: bool = False
    skew_ms: int = SKEW_MS
    owed: tuple[RunKey, ...] = ()
    until_ms: Optional[int] = None
    begin_ms: Optional[int] = None


PLAIN = Terms()
"""A history of instances on one host, of which nothing has to be settled in the end."""


def check(entries: Iterable[Entry], *, terms: Terms = PLAIN) -> Report:
    """Judge a history.

    Args:
        entries: Its entries in order, as ``read_history`` returns them.
        terms: What to judge by.
    """
    kept = list(entries)
    checker = judged(kept, terms)
    rows = _rows(checker)
    return Report(rows, _totals(kept, checker, rows), tuple(checker.faults))


def judged(entries: Iterable[Entry], terms: Terms) -> Checker:
    """Return a checker that has judged a whole history."""
    checker = Checker(exact=terms.exact, skew_ms=terms.skew_ms, begin_ms=terms.begin_ms)
    for entry in entries:
        checker.add(entry)
    checker.end(owed=terms.owed, until_ms=terms.until_ms)
    return checker


def _rows(checker: Checker) -> tuple[RunRow, ...]:
    by_run: dict[RunKey, list[Fault]] = {}
    for fault in checker.faults:
        by_run.setdefault(RunKey(fault.job, fault.scheduled_ms), []).append(fault)
    rows = [_lease_row(run, read=checker.read) for run in checker.lease_runs()]
    rows += [_once_row(won) for won in checker.once_runs()]
    known = {RunKey(row.job, row.scheduled_ms) for row in rows}
    rows += [RunRow(key.job, key.scheduled_ms, "", ()) for key in by_run if key not in known]
    rows.sort(key=lambda row: (row.job, row.scheduled_ms))
    return tuple(
        RunRow(
            row.job,
            row.scheduled_ms,
            row.state,
            row.attempts,
            tuple(by_run.get(RunKey(row.job, row.scheduled_ms), ())),
        )
        for row in rows
    )


def _lease_row(run: RunBook, *, read: bool) -> RunRow:
    found = standing(run, read=read)
    state = ""
    if found is Standing.SETTLED:
        known = [
            run.record.state if run.record is not None else "",
            run.settled.state if run.settled is not None else "",
            run.told.entry.state if run.told is not None else "",
        ]
        state = next(text for text in known if text)
    elif found is Standing.UNSETTLED:
        state = "unsettled"
    grants = sorted(run.grants, key=lambda grant: grant.token)
    attempts = tuple(_attempt_row(grant) for grant in grants)
    return RunRow(run.key.job, run.key.scheduled_ms, state, attempts)


def _attempt_row(grant: Grant) -> AttemptRow:
    entry = grant.entry
    return AttemptRow(
        grant.attempt,
        grant.token,
        entry.instance,
        grant.start is not None,
        entry.takeover,
        grant.how,
    )


def _once_row(won: Won) -> RunRow:
    attempts: tuple[AttemptRow, ...] = ()
    if won.win is not None:
        holder = won.win.entry.instance
        attempts = (AttemptRow(1, 0, holder, won.starts > 0, takeover=False, ending=""),)
    return RunRow(won.key.job, won.key.scheduled_ms, "won" if attempts else "", attempts)


def _totals(entries: Sequence[Entry], checker: Checker, rows: tuple[RunRow, ...]) -> Totals:
    attempts = [attempt for row in rows for attempt in row.attempts]
    states = Counter(row.state for row in rows)
    kinds = Counter(fault.kind for fault in checker.faults)
    return Totals(
        entries=len(entries),
        instances=len({entry.instance for entry in entries if entry.instance}),
        runs=len(rows),
        grants=len(attempts),
        executions=sum(row.executions for row in rows),
        executed_again=sum(max(0, row.executions - 1) for row in rows),
        takeovers=sum(attempt.takeover for attempt in attempts),
        hand_overs=sum(attempt.ending == Outcome.HANDED_OVER.value for attempt in attempts),
        fenced=sum(entry.what == SETTLED and entry.verdict == REFUSED for entry in entries),
        unanswered=len({(x.instance, x.call) for x in entries if x.verdict == UNKNOWN}),
        finished=states["finished"],
        failed=states["failed"],
        skipped=states["skipped"],
        unsettled=states["unsettled"],
        missed=_missed(entries),
        doubled=sum(number for kind, number in kinds.items() if kind in faults.DOUBLED),
        lost=kinds[faults.LOST],
        undecided=len(checker.undecided),
        faults=len(checker.faults),
    )


def _missed(entries: Sequence[Entry]) -> dict[str, int]:
    """Count what was missed; an event that several instances tell counts once."""
    told: dict[tuple[str, str, Optional[int], Optional[int]], int] = {}
    for entry in entries:
        if entry.what == TOLD and entry.event == "run_missed":
            key = (entry.reason, entry.job, entry.first_ms, entry.scheduled_ms)
            told[key] = max(told.get(key, 0), entry.number)
    counts: Counter[str] = Counter()
    for (reason, *_rest), number in told.items():
        counts[reason] += number
    return dict(sorted(counts.items()))
