"""Judges a history entry by entry."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Callable, Final, Optional

from leasecron_sync.model import LeaseRef, RunKey
from leasecron_sync.testing.history import faults
from leasecron_sync.testing.history._claims import ClaimRules, missing_attempts
from leasecron_sync.testing.history._holders import HolderRules, finished_unstarted
from leasecron_sync.testing.history._ledger import Ledger, Mark
from leasecron_sync.testing.history._once import OnceRules, Won
from leasecron_sync.testing.history._runs import Books, JobBook, RunBook, Standing, standing
from leasecron_sync.testing.history.entry import (
    ABANDONED,
    CLAIMED,
    CLAIMING,
    EMPTIED,
    ENDED,
    READ,
    RECORD,
    REGISTERED,
    RENEWED,
    SETTLED,
    SETTLING,
    STARTED,
    TOLD,
    Entry,
)
from leasecron_sync.testing.history.faults import Fault

SKEW_MS: Final = 100
"""How far the clocks of a history are taken to be apart."""


class Checker:
    """Judges a history of either family, entry by entry; knows nothing of the engine.

    It never accuses a correct history. An answer says what the store decided, not when: at some
    instant between ``sent_ms`` and ``at_ms``. So a lease is taken for live no longer than from
    ``sent_ms`` on, a grant for no earlier than ``at_ms``, and the order of two decisions is known
    where one call ended before the other began. What a call without an answer may have done excuses
    what it can explain.

    In an exact history all this is known: every entry stands in the order in which the store did
    it, with the store's clock at that instant. Give entries as they come, and look at ``faults``
    after each::

        checker = Checker(exact=True)
        log = HistoryLog(checker.add, clock=store_clock, exact=True)
        backend = RecordingLease(MemoryLease(), log)      # on the store's side of all faults
        ...
        if checker.faults: ...                            # at any time
        checker.end(owed=[RunKey("job", 1_700_000_060_000)], until_ms=...)

    Args:
        exact: Whether the history is exact.
        skew_ms: How far the clocks of the recorded hosts and of the store may be apart, and how far
            a wall clock may be moved without a notice; 0 in an exact history.
        begin_ms: When the history began; its first entry when left out. Of runs that were due
            before it, grants may be missing.
    """

    def __init__(
        self, *, exact: bool = False, skew_ms: int = SKEW_MS, begin_ms: Optional[int] = None
    ) -> None:
        self._ledger = Ledger(exact, 0 if exact else skew_ms, begin_ms=begin_ms)
        self._books = Books(self._ledger)
        self._once = OnceRules(self._ledger)
        claims, holders = ClaimRules(self._books), HolderRules(self._books)
        self.read = self._starts = False
        """``read`` tells whether the store's records were read in the end."""
        self.undecided: list[RunKey] = []
        """Owed runs of which this history cannot say whether they are settled."""
        self._lease_steps: Final[dict[str, Callable[[Mark], None]]] = {
            REGISTERED: self._books.registered,
            CLAIMING: claims.claiming,
            CLAIMED: claims.claimed,
            RENEWED: holders.renewed,
            SETTLING: holders.settling,
            SETTLED: holders.settled,
            ABANDONED: claims.abandoned,
            STARTED: holders.started,
            ENDED: holders.ended,
            EMPTIED: self._books.emptied,
            RECORD: self._books.record,
        }
        self._once_steps: Final[dict[str, Callable[[Mark], None]]] = {
            CLAIMED: self._once.claimed,
            STARTED: self._once.started,
            ENDED: self._once.ended,
            EMPTIED: self._once.emptied,
        }

    @property
    def faults(self) -> list[Fault]:
        """What was found so far, in the order in which it was certain."""
        return self._ledger.faults

    def add(self, entry: Entry) -> None:
        """Judge the next entry.

        Args:
            entry: The entry.
        """
        mark = self._ledger.take(entry)
        if self._ledger.went_back:
            self._books.clock_went_back()
        if entry.instance:
            self._once.lives(entry)
        what = entry.what
        if what in (CLAIMING, CLAIMED):
            once, lease = entry.window_ms > 0, entry.window_ms == 0
        elif what in (STARTED, ENDED):
            once, lease = entry.token == 0, entry.token != 0
            self._starts = True
        else:
            once = lease = True
        if lease and what in self._lease_steps:
            self._lease_steps[what](mark)
        if once and what in self._once_steps:
            self._once_steps[what](mark)
        if what == TOLD:
            self._once.told(entry)
        elif what == READ:
            self.read = True

    def lease_runs(self) -> Iterator[RunBook]:
        """Yield what is known of every run on a lease backend."""
        for job in self._books.jobs.values():
            yield from job.former
            yield from job.runs.values()

    def once_runs(self) -> Iterator[Won]:
        """Yield what is known of every run on a claim backend."""
        yield from self._once.runs.values()

    def is_live(self, lease: LeaseRef, now_ms: int) -> bool:
        """Tell whether a lease is surely live by the history.

        Args:
            lease: Run and token, as the holder names them.
            now_ms: The store's clock.
        """
        grant = self._books.job(lease.key.job).tokens.get(lease.token)
        if grant is None or grant.key != lease.key or grant.forgotten:
            return False
        return grant.end is None and not grant.doubt and grant.live_until_ms > now_ms

    def end(self, *, owed: Iterable[RunKey] = (), until_ms: Optional[int] = None) -> list[Fault]:
        """Judge what is left when the history is over, and return all faults.

        Args:
            owed: Runs that must have a settled record by now.
            until_ms: Runs that were due before this, and of which the history knows, must be
                settled; nothing is asked of runs when left out.
        """
        self._ledger.close()
        wanted = dict.fromkeys(owed)
        for job in self._books.jobs.values():
            for run in list(job.runs.values()):
                missing_attempts(self._books, run)
                if until_ms is not None and run.began_ms < until_ms and run.key not in wanted:
                    self._judge_left(run)
            if self._starts:
                finished_unstarted(self._books, job)
        forgotten = self._books.forgotten()
        for key in wanted:
            self._judge_owed(key, forgotten)
        self._once.end()
        return self.faults

    def _judge_left(self, run: RunBook) -> None:
        if standing(run, read=self.read) is Standing.UNSETTLED:
            message = "is left unsettled"
            self._ledger.accuse(faults.LEFT_UNSETTLED, run.key, message, *_shown(run))

    def _judge_owed(self, key: RunKey, forgotten: Mapping[RunKey, Entry]) -> None:
        run = self._books.jobs.get(key.job, JobBook()).runs.get(key.scheduled_ms)
        found = Standing.UNHEARD if run is None else standing(run, read=self.read)
        if run is not None and found is Standing.UNSETTLED:
            self._ledger.accuse(faults.LOST, key, "was owed and is not settled", *_shown(run))
        elif found is Standing.UNHEARD:
            message = "was owed and has no record"
            if key in forgotten:
                message += ": the store has lost it, and it was not settled again"
                self._ledger.accuse(faults.LOST, key, message, forgotten[key])
            else:
                self._ledger.accuse(faults.LOST, key, message)
        elif found is Standing.UNKNOWN:
            self.undecided.append(key)


def _shown(run: RunBook) -> tuple[Entry, ...]:
    return tuple(grant.entry for grant in run.grants[-1:])
