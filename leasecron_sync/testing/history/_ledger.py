"""What both families' rules share: the order of entries, the clock, the faults."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, NamedTuple, Optional

from leasecron_sync.model import RunKey
from leasecron_sync.run import moment
from leasecron_sync.testing.history.entry import Entry
from leasecron_sync.testing.history.faults import Fault

CallId = tuple[str, int]

LONGEST_GAP_MS: Final = 10_000
"""A longer time between two entries may be a clock that was set ahead."""


class Mark(NamedTuple):
    """An entry and its place in the history."""

    place: int
    entry: Entry


@dataclass(eq=False)
class Suspicion:
    """A fault, unless something explains it that the history tells a little later.

    Attributes:
        fault: The fault.
        waits_for: Calls under way, or handlers about to start, that may explain it.
        subject: What it is about; calls that are found to have begun in time join ``waits_for``.
    """

    fault: Fault
    waits_for: set[CallId]
    subject: object = None


@dataclass
class Ledger:
    """Faults so far, and how sure the order of entries is.

    Attributes:
        exact: Whether the entries come in the order in which the store did it.
        skew_ms: How far the clocks of a history that is not exact may be apart.
        latest_ms: The greatest reading of the clock so far. The store's time cannot be taken for
            earlier: a store that bridges a step back of the clock stands still there.
        elapsed_ms: How much time has surely passed since the history began.
    """

    exact: bool
    skew_ms: int
    latest_ms: int = 0
    elapsed_ms: int = 0
    begin_ms: Optional[int] = None
    place: int = 0
    faults: list[Fault] = field(default_factory=list[Fault])
    suspicions: list[Suspicion] = field(default_factory=list[Suspicion])
    went_back: bool = False
    _last: Optional[Entry] = None

    def take(self, entry: Entry) -> Mark:
        """Note an entry's times."""
        self.place += 1
        if self.begin_ms is None:
            self.begin_ms = entry.sent_ms
        if self._last is not None:
            passed_ms = min(entry.at_ms - self._last.at_ms, LONGEST_GAP_MS)
            if entry.steady_ms is not None and self._last.steady_ms is not None:
                passed_ms = entry.steady_ms - self._last.steady_ms
            self.elapsed_ms += max(0, passed_ms)
        self._last = entry
        self.went_back = entry.at_ms < self.latest_ms - self.skew_ms
        self.latest_ms = max(self.latest_ms, entry.at_ms, entry.store_ms or 0)
        if self.suspicions:
            self._confirm(entry)
        return Mark(self.place, entry)

    def _confirm(self, entry: Entry) -> None:
        """Suspicions become faults when nothing can explain them any more."""
        for suspicion in list(self.suspicions):
            last = suspicion.fault.entries[-1]
            if not suspicion.waits_for and not self._may_have_begun(entry, last):
                self.suspicions.remove(suspicion)
                self.faults.append(suspicion.fault)

    def _may_have_begun(self, entry: Entry, last: Entry) -> bool:
        """Tell whether what is written by an entry may have been before an answer."""
        if self.exact:
            return False
        if entry.steady_ms is not None and last.steady_ms is not None:
            return entry.steady_ms <= last.steady_ms
        return entry.at_ms <= last.at_ms + self.skew_ms

    def before(self, one: Mark, two: Mark) -> bool:
        """Tell whether the store surely did one before the other."""
        if self.exact:
            return one.place < two.place
        a, b = one.entry, two.entry
        if a.steady_ms is not None and b.steady_ms is not None:
            return a.steady_ms < b.steady_ms - b.took_ms
        return a.at_ms + self.skew_ms < b.sent_ms

    def newest_ms(self, entry: Entry) -> int:
        """Return the greatest that the store's clock can have been at an entry."""
        return entry.at_ms if self.exact else max(self.latest_ms, entry.at_ms) + self.skew_ms

    def oldest_ms(self, entry: Entry) -> int:
        """Return the smallest that the store's clock can have been at an entry."""
        return entry.at_ms if self.exact else entry.sent_ms - self.skew_ms

    def accuse(self, kind: str, key: RunKey, message: str, *entries: Entry) -> None:
        """Note a fault."""
        self.faults.append(_fault(kind, key, message, entries))

    def suspect(self, suspicion: Suspicion) -> None:
        """Note a fault, at once or when nothing can explain it any more."""
        if self.exact and not suspicion.waits_for:
            self.faults.append(suspicion.fault)
        else:
            self.suspicions.append(suspicion)

    def began(self, call: CallId, subject: object, entry: Entry) -> None:
        """Note that a call about a subject begins; it may have been in time to explain things."""
        for suspicion in self.suspicions:
            last = suspicion.fault.entries[-1]
            if suspicion.subject is subject and self._may_have_begun(entry, last):
                suspicion.waits_for.add(call)

    def answered(self, call: CallId, *, explains: bool) -> None:
        """Note the answer of a call that suspicions may wait for."""
        for suspicion in list(self.suspicions):
            if call in suspicion.waits_for:
                suspicion.waits_for.discard(call)
                if explains:
                    self.suspicions.remove(suspicion)
                elif self.exact and not suspicion.waits_for:
                    self.suspicions.remove(suspicion)
                    self.faults.append(suspicion.fault)

    def close(self) -> None:
        """In the end: what waits for a call that was never answered may be explained by it."""
        self.faults += [item.fault for item in self.suspicions if not item.waits_for]
        self.suspicions.clear()


def suspicion_of(
    kind: str, key: RunKey, message: str, *entries: Entry, subject: object = None
) -> Suspicion:
    """Return a suspicion that waits for nothing yet."""
    return Suspicion(_fault(kind, key, message, entries), set(), subject)


def _fault(kind: str, key: RunKey, message: str, entries: tuple[Entry, ...]) -> Fault:
    return Fault(kind, f"{named(key)} {message}", entries, key.job, key.scheduled_ms)


def named(key: RunKey) -> str:
    """Return a run as messages name it."""
    return f"{key.job!r} {instant(key.scheduled_ms)}"


def instant(ms: int) -> str:
    """Return an instant as people read it, in UTC."""
    text = moment(ms).strftime("%Y-%m-%dT%H:%M:%S")
    return f"{text}.{ms % 1000:03}Z" if ms % 1000 else f"{text}Z"
