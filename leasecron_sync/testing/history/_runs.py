"""What a checker knows of jobs, runs and their grants on a lease backend."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Final, NamedTuple, Optional

from leasecron_sync.model import RunKey, RunState
from leasecron_sync.testing.history import faults
from leasecron_sync.testing.history._ledger import CallId, Ledger, Mark
from leasecron_sync.testing.history.entry import Entry

LONG_AGO: Final = -(1 << 60)

LONGEST_READING_MS: Final = 10_000
"""Up to so long before they are written down records may have been read."""

_SETTLED_STATES: Final = frozenset(state.value for state in RunState if state.settled)


@dataclass(eq=False)
class Grant:
    """A lease as the store gave it.

    Attributes:
        mark: The entry that granted it.
        granted_by_ms: The latest instant of the store's clock at which it was granted.
        live_until_ms: Up to here it was surely live, unless something ended it.
        lapsed_from_ms: From here on it has surely lapsed; None where nobody knows, since a renewal
            was not answered.
        lapsed_from_steady_ms: The same by the host's steady clock.
        end: What surely ended it: an accepted settlement, the next grant, a decision of the store.
        doubt: Whether something that nobody saw answered may have ended it.
        settling: Settlements under way.
        accepted: The accepted settlement.
        start: When its handler started.
        how: How the attempt ended.
        forgotten: Whether the store lost its data since.
        wrong: Whether it should not have been granted, which was said already.
    """

    mark: Mark
    granted_by_ms: int
    live_until_ms: int = LONG_AGO
    lapsed_from_ms: Optional[int] = None
    lapsed_from_steady_ms: Optional[int] = None
    end: Optional[Mark] = None
    doubt: bool = False
    settling: set[CallId] = field(default_factory=set[CallId])
    accepted: Optional[Mark] = None
    start: Optional[Mark] = None
    how: str = ""
    forgotten: bool = False
    wrong: bool = False

    @property
    def entry(self) -> Entry:
        """The entry that granted it."""
        return self.mark.entry

    @property
    def key(self) -> RunKey:
        """The run."""
        return self.mark.entry.key

    @property
    def attempt(self) -> int:
        """Number of the attempt."""
        return self.mark.entry.attempt

    @property
    def token(self) -> int:
        """The token."""
        return self.mark.entry.token

    def lasts(self, ledger: Ledger, entry: Entry, left_ms: int) -> None:
        """Note that at an entry the store gave it so much time."""
        self.live_until_ms = ledger.oldest_ms(entry) + left_ms
        self.lapsed_from_ms = ledger.newest_ms(entry) + left_ms
        self.lapsed_from_steady_ms = None
        if entry.steady_ms is not None:
            self.lapsed_from_steady_ms = entry.steady_ms + left_ms

    def has_lapsed(self, ledger: Ledger, entry: Entry) -> bool:
        """Tell whether it had surely lapsed at an entry."""
        if self.lapsed_from_ms is None or ledger.oldest_ms(entry) < self.lapsed_from_ms:
            return False
        until_ms = self.lapsed_from_steady_ms
        # A wall clock that was set ahead makes nothing lapse sooner for who trusts a lease.
        return until_ms is None or entry.steady_ms is None or entry.steady_ms >= until_ms


class Settled(NamedTuple):
    """How a run was settled: by its holder under a token, or by the store on a decision."""

    mark: Mark
    state: str
    by: str


@dataclass(eq=False)
class RunBook:
    """What is known of one run.

    Attributes:
        key: The run.
        due_ms: When it was due, by the newest claim.
        grants: Its grants, in the order of the entries.
        settled: What settled it.
        told: The first entry by which somebody was told that it is settled.
        reopened: What the store did or showed since, as if it had never been settled: it has lost
            that. None while its newest word is that the run is settled.
        record: Its record, as it was read in the end.
        unknown: Claims without an answer.
        tried: The first claim without an answer of each decision.
        claiming: Claims under way.
    """

    key: RunKey
    due_ms: Optional[int] = None
    grants: list[Grant] = field(default_factory=list[Grant])
    settled: Optional[Settled] = None
    told: Optional[Mark] = None
    reopened: Optional[Mark] = None
    record: Optional[Entry] = None
    unknown: int = 0
    tried: dict[str, Mark] = field(default_factory=dict[str, Mark])
    claiming: set[CallId] = field(default_factory=set[CallId])

    @property
    def began_ms(self) -> int:
        """When it was due, as far as that is known."""
        return self.key.scheduled_ms if self.due_ms is None else self.due_ms

    @property
    def word(self) -> Optional[Mark]:
        """The first entry that says that it is settled."""
        return self.told if self.settled is None else self.settled.mark

    def hears_of_end(self, mark: Mark) -> None:
        """Note an entry by which somebody was told that it is settled."""
        self.told = self.told or mark
        self.reopened = None

    @property
    def open_claims(self) -> int:
        """Claims that may have had an effect that nobody was told of."""
        return self.unknown + len(self.claiming)


class Standing(Enum):
    """What a history says of the end of a run."""

    SETTLED = "settled"
    UNSETTLED = "unsettled"
    UNKNOWN = "unknown"  # something without an answer may have settled it
    UNHEARD = "unheard"


def standing(run: RunBook, *, read: bool) -> Standing:
    """Tell what a history says of the end of a run.

    The store's newest word counts. A run that was settled, and of which the store has lost that
    record, is unsettled from the entry on that shows it: a lease of it that was granted since, or a
    record in the end that is not settled. Without either it stays settled, also where no record of
    it was read in the end: it may have been pruned, and what it was for was done, or told as
    failed. That the store lost all its data is said by an entry, and what is known of a run begins
    anew there: one that is owed all the same has to be settled once more.

    Args:
        run: What is known of it.
        read: Whether the store's records were read in the end.
    """
    if run.word is not None and run.reopened is None:
        return Standing.SETTLED
    if run.record is not None:
        return Standing.SETTLED if is_settled(run.record.state) else Standing.UNSETTLED
    if read:
        return Standing.UNHEARD
    if run.open_claims or any(grant.doubt or grant.settling for grant in run.grants):
        return Standing.UNKNOWN
    return Standing.UNSETTLED if run.grants else Standing.UNHEARD


def is_settled(state: str) -> bool:
    """Tell whether a state is a settled one."""
    return state in _SETTLED_STATES


@dataclass(eq=False)
class JobBook:
    """What is known of one job.

    Attributes:
        runs: Its runs by their scheduled times, since the store lost its data last.
        former: Runs that the store lost.
        tokens: Every grant by its token.
        open: Grants that nothing ended yet, by their tokens.
        rising: Entries that granted, each with the greatest token up to it.
        accused: Tokens that were found to belong to no grant.
        unknown: Claims without an answer.
        claiming: Claims under way.
        owed_from_ms: Since when its scheduled times are owed.
    """

    runs: dict[int, RunBook] = field(default_factory=dict[int, RunBook])
    former: list[RunBook] = field(default_factory=list[RunBook])
    tokens: dict[int, Grant] = field(default_factory=dict[int, Grant])
    open: dict[int, Grant] = field(default_factory=dict[int, Grant])
    rising: list[tuple[Mark, int]] = field(default_factory=list[tuple[Mark, int]])
    accused: set[int] = field(default_factory=set[int])
    unknown: int = 0
    claiming: set[CallId] = field(default_factory=set[CallId])
    owed_from_ms: Optional[int] = None

    @property
    def open_claims(self) -> int:
        """Claims that may have had an effect that nobody was told of."""
        return self.unknown + len(self.claiming)

    def run(self, key: RunKey) -> RunBook:
        """Return what is known of a run."""
        found = self.runs.get(key.scheduled_ms)
        if found is None:
            found = self.runs[key.scheduled_ms] = RunBook(key)
        return found

    def former_run(self, key: RunKey) -> RunBook:
        """Return what was known of a run before the store lost it."""
        found = [run for run in self.former if run.key == key]
        if not found:
            found = [RunBook(key)]
            self.former += found
        return found[-1]

    def last_token_before(self, ledger: Ledger, mark: Mark) -> Optional[Mark]:
        """Return the grant with the greatest token among those surely before an entry."""
        for other, token in reversed(self.rising):
            if ledger.before(other, mark):
                return self.tokens[token].mark
        return None

    def note_token(self, grant: Grant) -> None:
        """Note a new token."""
        self.tokens[grant.token] = grant
        greatest = self.rising[-1][1] if self.rising else grant.token
        self.rising.append((grant.mark, max(greatest, grant.token)))

    def forget(self) -> None:
        """Forget what the store knew: it lost its data."""
        for run in self.runs.values():
            for grant in run.grants:
                grant.forgotten = True
        self.former += self.runs.values()
        self.runs = {}
        self.open = {}
        self.unknown = 0


class Books:
    """What is known of every job, with the ledger of faults.

    Args:
        ledger: Where the order of entries and the faults are kept.
    """

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.jobs: dict[str, JobBook] = {}
        self.went_back = False
        self.lost: Optional[Mark] = None
        """Where the store was known last to have lost its data."""
        self._store_ids: set[str] = set()
        self._new_store = True

    def job(self, name: str) -> JobBook:
        """Return what is known of a job."""
        found = self.jobs.get(name)
        if found is None:
            found = self.jobs[name] = JobBook()
        return found

    def run(self, key: RunKey) -> RunBook:
        """Return what is known of a run."""
        return self.job(key.job).run(key)

    def is_older(self, run: RunBook) -> bool:
        """Tell whether a run was due when the history began, so that grants may be missing."""
        begin_ms = self.ledger.begin_ms
        return begin_ms is None or run.began_ms <= begin_ms

    def clock_went_back(self) -> None:
        """Trust no end of a lease until the store names it again."""
        self.went_back = True
        if self.ledger.exact:
            return  # each end is known
        for job in self.jobs.values():
            for grant in job.open.values():
                grant.live_until_ms = LONG_AGO

    def registered(self, mark: Mark) -> None:
        """Note since when a job is owed; a store with another id has lost its data."""
        entry = mark.entry
        if entry.store_id and entry.store_id not in self._store_ids:
            if not self._new_store:
                self.emptied(mark)
            self._store_ids.add(entry.store_id)
            self._new_store = False
        self.job(entry.job).owed_from_ms = entry.owed_from_ms

    def emptied(self, mark: Mark) -> None:
        """Forget what the store knew; the next new id is that of the store after it."""
        self._new_store = True
        self.lost = mark
        self.ledger.suspicions.clear()
        for job in self.jobs.values():
            job.forget()

    def forgotten(self) -> dict[RunKey, Entry]:
        """Return what said that runs were settled, before the store lost all its data."""
        former = (run for job in self.jobs.values() for run in job.former)
        return {run.key: run.word.entry for run in former if run.word is not None}

    def record(self, mark: Mark) -> None:
        """Note a record that was read in the end."""
        run, entry = self.run(mark.entry.key), mark.entry
        run.record = entry
        word = run.word
        if is_settled(entry.state):
            run.reopened = None
        elif word is not None and word.entry.at_ms < entry.at_ms - LONGEST_READING_MS:
            run.reopened = mark

    def settle(self, run: RunBook, settled: Settled) -> None:
        """Note what settled a run; a run is settled once."""
        before = run.settled
        run.reopened = None
        if before is None:
            run.settled = settled
        elif (before.state, before.by) != (settled.state, settled.by):
            self.accuse_of_settling_twice(run, before, settled.mark.entry)

    def accuse_of_settling_twice(self, run: RunBook, before: Settled, entry: Entry) -> None:
        """Note that a settled run changed."""
        message = f"was settled as {before.state}, and then as {entry.state}"
        self.ledger.accuse(faults.SETTLED_TWICE, run.key, message, before.mark.entry, entry)
