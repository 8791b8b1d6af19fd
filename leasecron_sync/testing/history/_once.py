"""The rules of a claim backend, judged entry by entry."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from typing import Final, Optional

from leasecron_sync.model import RunKey, Verdict
from leasecron_sync.testing.history import faults
from leasecron_sync.testing.history._ledger import Ledger, Mark
from leasecron_sync.testing.history.entry import NOT_STARTED, Entry

SEEN_EVERY_MS: Final = 1_000
"""How far apart the instants are, of those at which an instance was there, that are kept."""

TOLD_GRACE_MS: Final = 12_000
"""How much later than its window an instance must have told what became of a run that it won."""


@dataclass(eq=False)
class Won:
    """What is known of one run on a claim backend.

    Attributes:
        key: The run.
        win: The claim that won, the newest one where the store lost its data between two.
        won_ms: When it was won, in ms since the history began.
        wins: How many there are.
        start: When its handler started, the newest time.
        starts: How often it did.
        forgotten: Whether the store lost its data since it was won.
    """

    key: RunKey
    win: Optional[Mark] = None
    won_ms: int = 0
    wins: int = 0
    start: Optional[Mark] = None
    starts: int = 0
    forgotten: bool = False


class OnceRules:
    """Judges wins and starts.

    Args:
        ledger: Where the order of entries and the faults are kept.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self.runs: dict[RunKey, Won] = {}
        self._accused: set[RunKey] = set()
        self._told: dict[str, list[tuple[int, int]]] = {}
        self._telling: set[str] = set()
        self._seen_ms: dict[str, list[int]] = {}
        self._last_ms: dict[str, int] = {}

    def emptied(self, _mark: Mark) -> None:
        """Forget what the store knew."""
        for won in self.runs.values():
            won.forgotten = True

    def lives(self, entry: Entry) -> None:
        """Note that an instance was still there."""
        self._last_ms[entry.instance] = self._ledger.oldest_ms(entry)
        seen_ms, now_ms = self._seen_ms.setdefault(entry.instance, []), self._ledger.elapsed_ms
        if not seen_ms or now_ms - seen_ms[-1] >= SEEN_EVERY_MS:
            seen_ms.append(now_ms)

    def claimed(self, mark: Mark) -> None:
        """Judge the answer to a claim."""
        entry, ledger = mark.entry, self._ledger
        won = self._run(entry.key)
        if entry.verdict != Verdict.GRANTED.value:
            return
        if entry.due_ms is not None and ledger.newest_ms(entry) < entry.due_ms:
            message = f"was won {entry.due_ms - entry.at_ms} ms before it was due"
            ledger.accuse(faults.GRANTED_EARLY, entry.key, message, entry)
        first = won.win
        if first is None or won.forgotten:
            won.win, won.forgotten = mark, False
            won.won_ms = ledger.elapsed_ms
            won.wins += 1
        elif (first.entry.decision_id, first.entry.instance) != (
            entry.decision_id,
            entry.instance,
        ):
            ledger.accuse(faults.WON_TWICE, entry.key, "was won twice", first.entry, entry)

    def started(self, mark: Mark) -> None:
        """Judge the start of a handler."""
        entry, ledger = mark.entry, self._ledger
        won = self._run(entry.key)
        key, win, first = won.key, won.win, won.start
        if win is None:
            # Of a run from before this history the claim may be missing.
            older = key.scheduled_ms <= (ledger.begin_ms or 0)
            if not older and key not in self._accused:
                self._accused.add(key)
                message = "was started, and no claim of it was granted"
                ledger.accuse(faults.STARTED_UNKNOWN, key, message, entry)
        elif first is not None and won.starts >= won.wins:
            ledger.accuse(faults.STARTED_TWICE, key, "was started twice", first.entry, entry)
        else:
            due_ms = win.entry.due_ms
            newest_ms = max(ledger.latest_ms, ledger.newest_ms(entry))
            if due_ms is not None and newest_ms < due_ms:
                message = f"was started {due_ms - newest_ms} ms before it was due"
                ledger.accuse(faults.STARTED_EARLY, key, message, win.entry, entry)
        won.start = mark
        won.starts += 1

    def ended(self, mark: Mark) -> None:
        """Note the end of a handler; one that was not called never started."""
        if mark.entry.verdict == NOT_STARTED:
            self._run(mark.entry.key).starts -= 1

    def told(self, entry: Entry) -> None:
        """Note an event about one run or several."""
        self._telling.add(entry.instance)
        if entry.scheduled_ms is not None:
            first_ms = entry.scheduled_ms if entry.first_ms is None else entry.first_ms
            self._told.setdefault(entry.job, []).append((first_ms, entry.scheduled_ms))

    def end(self) -> None:
        """Judge what was won and never told of, by instances that lived on."""
        for won in self.runs.values():
            if won.win is None or won.starts or self._is_told(won.key):
                continue
            if self._lived_on(won, won.win.entry):
                message = "was won, and its instance told of no end of it"
                self._ledger.accuse(faults.NOT_TOLD, won.key, message, won.win.entry)

    def _lived_on(self, won: Won, entry: Entry) -> bool:
        """Tell whether an instance that tells events had the time to tell of a run that it won."""
        if entry.instance not in self._telling:
            return False
        # A clock that is set back gives it its window anew.
        if self._last_ms[entry.instance] <= (entry.due_ms or 0) + entry.window_ms + TOLD_GRACE_MS:
            return False
        # It may have stood still for the whole window: what counts is that it was there later.
        seen_ms = self._seen_ms[entry.instance]
        first = bisect_left(seen_ms, won.won_ms + entry.window_ms)
        return first < len(seen_ms) and seen_ms[-1] - seen_ms[first] >= TOLD_GRACE_MS

    def _is_told(self, key: RunKey) -> bool:
        spans = self._told.get(key.job, ())
        return any(first_ms <= key.scheduled_ms <= last_ms for first_ms, last_ms in spans)

    def _run(self, key: RunKey) -> Won:
        found = self.runs.get(key)
        if found is None:
            found = self.runs[key] = Won(key)
        return found
