"""The runs that an instance means to claim. Pure.

However many wait, a look at them costs what changed since the last one: what may be asked for is
kept in order, and worked out anew for the jobs alone to which something happened.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Callable, Optional

from leasecron_sync.engine.agenda import Due
from leasecron_sync.engine.decide import Asker, Candidate, Origin
from leasecron_sync.engine.expiry import Expiry, is_over
from leasecron_sync.engine.job import Job
from leasecron_sync.engine.moments import Moments
from leasecron_sync.engine.picking import NO_TURN, Entry, Offers, Turn, sliced_from, turn_of
from leasecron_sync.model import RunKey

FEW = 8
"""Up to this part of a line, what comes and goes is put into its place one by one."""


class Backlog:
    """Candidates by run: found once, kept until they are decided or too old.

    A candidate is changed by the methods here alone, since they note what has to be looked at
    again; whoever asks for it may set its marks of the last ask.

    Args:
        expiry: How long candidates are kept.
        in_order: Offer the runs of each job one at a time in the order of their scheduled times,
            since the mechanism may not accept an older one later.
    """

    def __init__(self, expiry: Expiry, *, in_order: bool = False) -> None:
        self._expiry = expiry
        self._in_order = in_order
        self._items: dict[RunKey, Candidate] = {}
        self._jobs: dict[str, list[Entry]] = {}
        # What may be asked for, and of which jobs that has to be worked out anew.
        self._turns: dict[str, Turn] = {}
        self._first = _Line()
        self._rest = _Line()
        self._changed: set[str] = set()
        self._fleeting: set[str] = set()
        # When something is to be looked at again without anything else happening to it.
        self._asks = Moments()
        self._ends = _Ends(expiry)
        self._crowded: set[str] = set()

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self._items)

    def __contains__(self, item: Candidate) -> bool:
        """Tell whether it is still to be decided."""
        return self._items.get(item.key) is item

    def knows(self, key: RunKey) -> bool:
        """Tell whether a run is still to be decided."""
        return key in self._items

    # -- what comes and goes -------------------------------------------------------------------

    def add_due(self, dues: Iterable[Due], now_ms: int, steady_ms: int) -> None:
        """Take in what the agenda handed out."""
        for job, scheduled_ms, due_ms in dues:
            key = RunKey(job.name, scheduled_ms)
            if key not in self._items:
                late_ms = max(0, now_ms - due_ms)
                item = Candidate(job, key, due_ms, Origin.ON_TIME, steady_ms, late_ms=late_ms)
                self._add(item)

    def add_owed(self, owed: Iterable[Candidate], now_ms: int, steady_ms: int) -> None:
        """Take in what a look back found; what is on time stays so."""
        for item in owed:
            known = self._items.get(item.key)
            if known is None:
                self._add(item)
            elif known.origin is Origin.ON_TIME and not known.is_on_time(now_ms, steady_ms):
                # It is late by now: its window is judged from the moment it was found.
                known.origin, known.found_ms = Origin.CAUGHT_UP, item.found_ms
                self._note_change(known)

    def drop_known(self, recorded: Iterable[RunKey]) -> None:
        """Leave out what somebody has claimed, unless that may have been this instance.

        After an outage its holder may still renew: `pending` names it when nobody did.
        """
        for key in recorded:
            item = self._items.get(key)
            if item is not None and not item.unknown and item.origin is not Origin.UNSETTLED:
                self._remove(item)

    def add_unsettled(
        self, keys: Iterable[RunKey], jobs: Mapping[str, Job], steady_ms: int
    ) -> None:
        """Take in what `pending` named; these go before others, also those known already."""
        for key in keys:
            job = jobs.get(key.job)
            if job is None:
                continue
            item = self._items.get(key)
            if item is None:
                due_ms = job.due_ms(key.scheduled_ms)
                self._add(Candidate(job, key, due_ms, Origin.UNSETTLED, steady_ms))
            elif item.origin is not Origin.UNSETTLED:
                item.origin, item.found_ms, item.ask_ms = Origin.UNSETTLED, steady_ms, steady_ms
                self._note_change(item)

    def drop_unsettled(self) -> None:
        """Leave out what `pending` named before an outage: its holder may renew first.

        What this instance may have won without knowing it stays.
        """
        for item in self.filtered(lambda item: item.origin is Origin.UNSETTLED):
            if not item.unknown:
                self._remove(item)

    def replace_job(self, name: str, job: Optional[Job]) -> list[Candidate]:
        """Forget the runs of a job; what may have been won stays with the job's new definition.

        Returns:
            What may have been won, and is forgotten since there is no such job any more.
        """
        lost: list[Candidate] = []
        for _at_ms, _key, item in list(self._jobs.get(name, ())):
            if item.unknown and job is not None:
                item.job = job
                self._note_change(item)
                continue
            self._remove(item)
            if item.unknown:
                lost.append(item)
        return lost

    def drop_future(self, now_ms: int) -> list[RunKey]:
        """Leave out what is not due after the clock was set back; return those undecided.

        What this instance may have won without knowing it stays, and is asked for again.
        """
        gone = self.filtered(lambda item: item.due_ms > now_ms and not item.unknown)
        for item in gone:
            self._remove(item)
        self._changed.update(self._jobs)  # what was late may be on time again
        return [item.key for item in gone]

    def discard(self, item: Candidate) -> None:
        """Forget one candidate, unless another has taken its place."""
        if self._items.get(item.key) is item:
            self._remove(item)

    def filtered(self, wanted: Callable[[Candidate], bool]) -> list[Candidate]:
        """Return candidates that pass a test."""
        return [item for item in self._items.values() if wanted(item)]

    # -- what to ask for -----------------------------------------------------------------------

    def ask_again(
        self, item: Candidate, ask_ms: int, *, due_steady_ms: Optional[int] = None
    ) -> None:
        """Keep a candidate, and do not ask for it before a steady time.

        Args:
            item: The candidate.
            ask_ms: That time.
            due_steady_ms: Steady time at which it is due by the store's clock, where it said so.
        """
        item.ask_ms = ask_ms
        if due_steady_ms is not None:
            item.due_steady_ms = due_steady_ms
        if self._items.get(item.key) is item:
            self._note_change(item)

    def next_ask_ms(self, steady_ms: int) -> Optional[int]:
        """Return the steady time at which the next one that waits may be asked for."""
        self._wake(steady_ms)
        return self._asks.next_ms(self._still_waits)

    def offers(self, asker: Asker) -> Offers:
        """Return everything that may be asked for now."""
        self._wake(asker.steady_ms)
        busy = asker.handlers.keys()
        changed = self._changed | self._fleeting | busy
        turns = {
            name: turn_of(self._jobs.get(name, ()), asker, in_order=self._in_order)
            for name in changed
        }
        before = [self._turns.pop(name, NO_TURN) for name in turns]
        self._turns.update({name: turn for name, turn in turns.items() if turn is not NO_TURN})
        after = turns.values()
        self._first.replace((turn.first for turn in before), (turn.first for turn in after))
        self._rest.replace((turn.rest for turn in before), (turn.rest for turn in after))
        self._changed = set()
        # Whether a handler bars others changes by itself: its lease lapses, its time is over.
        self._fleeting = {*busy, *(name for name, turn in turns.items() if turn.passed)}
        return Offers(self._first.entries, self._rest.entries)

    def ahead(self, asker: Asker, limit: int) -> list[Candidate]:
        """Return runs that come after those just picked, as far as nobody has claimed them."""
        coming = sliced_from(self._rest.entries, asker.instance_id, limit)
        return [item for item in coming if self._items.get(item.key) is item and not item.unknown]

    # -- what is given up ----------------------------------------------------------------------

    def take_expired(self, now_ms: int, steady_ms: int) -> list[Candidate]:
        """Take out what is too old, and what a job has beyond its ``catch_up_limit``."""
        expired: list[Candidate] = []
        for item in self._ends.passed(now_ms, steady_ms):
            if self._items.get(item.key) is not item:
                continue
            if is_over(item, self._expiry, now_ms, steady_ms):
                self._remove(item)
                expired.append(item)
            elif item.unknown:
                self._ends.keep(item)
        for name in sorted(self._crowded):
            for item in self._surplus(name, now_ms, steady_ms):
                item.surplus = True
                self._remove(item)
                expired.append(item)
        self._crowded = {name for name in self._crowded if self._is_crowded(name)}
        self._asks.trim(len(self._items), self._still_waits)
        self._ends.trim(self._items)
        return expired

    def take_left(self, due_ms: Optional[int]) -> list[Candidate]:
        """Take out what was asked for without an answer, and what fell due until an instant."""
        left = self.filtered(
            lambda item: item.unknown or (due_ms is not None and item.due_ms <= due_ms)
        )
        for item in left:
            self._remove(item)
        return sorted(left, key=_key)

    def _surplus(self, name: str, now_ms: int, steady_ms: int) -> list[Candidate]:
        late = [
            entry.candidate
            for entry in self._jobs.get(name, ())
            if entry.candidate.origin is not Origin.UNSETTLED
            and not entry.candidate.is_on_time(now_ms, steady_ms)
        ]
        late.sort(key=_key)
        return late[: max(0, len(late) - self._limit_of(late[0].job))] if late else []

    def _is_crowded(self, name: str) -> bool:
        entries = self._jobs.get(name, [])
        return bool(entries) and len(entries) > self._limit_of(entries[0].candidate.job)

    def _limit_of(self, job: Job) -> int:
        return self._expiry.surplus or job.options.catch_up_limit

    # -- keeping account -----------------------------------------------------------------------

    def _add(self, item: Candidate) -> None:
        self._items[item.key] = item
        insort(self._jobs.setdefault(item.key.job, []), self._entry_of(item))
        self._note_change(item)

    def _remove(self, item: Candidate) -> None:
        name = item.key.job
        del self._items[item.key]
        entries = self._jobs[name]
        del entries[bisect_left(entries, self._entry_of(item))]
        if not entries:
            del self._jobs[name]
        self._changed.add(name)

    def _note_change(self, item: Candidate) -> None:
        name = item.key.job
        self._changed.add(name)
        self._ends.note(item)
        if item.ask_ms:
            self._asks.put(item.ask_ms, item)
        if len(self._jobs[name]) > self._limit_of(item.job):
            self._crowded.add(name)

    def _entry_of(self, item: Candidate) -> Entry:
        return Entry(item.key.scheduled_ms if self._in_order else item.due_ms, item.key, item)

    def _wake(self, steady_ms: int) -> None:
        """Look again at the jobs of which one may be asked for by now."""
        self._changed.update(item.key.job for item in self._asks.passed(steady_ms))

    def _still_waits(self, item: Candidate, ask_ms: int) -> bool:
        return self._items.get(item.key) is item and item.ask_ms == ask_ms


class _Line:
    """Entries in order, of which a few come and go at a time, or many."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []

    def replace(self, before: Iterable[Sequence[Entry]], after: Iterable[Sequence[Entry]]) -> None:
        """Take entries out, and others in; some of them may be the same."""
        gone, come = [*chain.from_iterable(before)], [*chain.from_iterable(after)]
        if (len(gone) + len(come)) * FEW > len(self.entries):
            left = {id(entry) for entry in gone}
            self.entries = [entry for entry in self.entries if id(entry) not in left]
            self.entries += come
            self.entries.sort()
            return
        for entry in gone:
            del self.entries[bisect_left(self.entries, entry)]
        for entry in come:
            insort(self.entries, entry)


class _Ends:
    """When candidates are too old: each by the clock, or the clocks, that decide about it.

    Args:
        expiry: How long candidates are kept.
    """

    def __init__(self, expiry: Expiry) -> None:
        self._expiry = expiry
        self._by_wall = Moments()
        self._by_steady = Moments()
        self._by_both = Moments()  # by how far the wall clock is ahead of the steady one

    def note(self, item: Candidate) -> None:
        """Note a candidate that is new, or was changed."""
        moments, at_ms = self._end_of(item)
        if at_ms is not None:
            moments.put(at_ms, item)

    def keep(self, item: Candidate) -> None:
        """Note a candidate that is kept only because it may have been won."""
        self._by_steady.put(self._expiry.held_until_ms(item) + 1, item)

    def passed(self, now_ms: int, steady_ms: int) -> list[Candidate]:
        """Return candidates that may be too old by now; those that are, are among them."""
        return [
            *self._by_wall.passed(now_ms),
            *self._by_steady.passed(steady_ms),
            *self._by_both.passed(now_ms - steady_ms),
        ]

    def trim(self, items: Mapping[RunKey, Candidate]) -> None:
        """Forget what is not in the backlog any more."""
        for moments in (self._by_wall, self._by_steady, self._by_both):

            def current(item: Candidate, at_ms: int, mine: Moments = moments) -> bool:
                held = (self._by_steady, self._expiry.held_until_ms(item) + 1)
                ends = (self._end_of(item), held if item.unknown else None)
                return items.get(item.key) is item and (mine, at_ms) in ends

            moments.trim(len(items), current)

    def _end_of(self, item: Candidate) -> tuple[Moments, Optional[int]]:
        """Return the first instant of a clock at which ``is_over`` is true."""
        if item.origin is Origin.UNSETTLED:
            return self._by_steady, item.found_ms + self._expiry.unsettled_ms + 1
        window_ms = self._expiry.window_ms
        if window_ms is None and item.origin is Origin.CAUGHT_UP:
            # Its age and the age that it may reach grow together.
            catch_up_ms = item.job.options.catch_up_ms
            if item.due_steady_ms is None:
                return self._by_both, item.due_ms + catch_up_ms - item.found_ms + 1
            over = item.found_ms - item.due_steady_ms > catch_up_ms
            return self._by_steady, item.found_ms if over else None
        limit_ms = item.max_age_ms(item.found_ms) if window_ms is None else window_ms
        if item.due_steady_ms is None:
            return self._by_wall, item.due_ms + limit_ms + 1
        return self._by_steady, item.due_steady_ms + limit_ms + 1


def _key(item: Candidate) -> RunKey:
    return item.key
