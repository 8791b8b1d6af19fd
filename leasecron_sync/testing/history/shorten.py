"""From a history with a fault to the few entries that show it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from leasecron_sync.testing.history.entry import Entry
from leasecron_sync.testing.history.faults import Fault
from leasecron_sync.testing.history.report import PLAIN, Terms, judged


def shorten(entries: Sequence[Entry], fault: Fault, *, terms: Terms = PLAIN) -> tuple[Entry, ...]:
    """Return the fewest entries in which the same fault is still found.

    The same is a fault of the same kind, of the same run, found at the same entry. The result is
    minimal: without any one of its entries the fault is gone. A fault that says that something is
    missing needs no entry; then there are none.

    Args:
        entries: The history, in order.
        fault: One of its faults.
        terms: What it was judged by.

    Raises:
        ValueError: The history has no such fault.
    """
    kept = list(entries)
    if terms.begin_ms is None and kept:
        terms = replace(terms, begin_ms=kept[0].sent_ms)  # what is left may begin later
    search = _Search(fault, terms)
    own = [entry for entry in kept if _is_about(entry, fault)]
    of_job = [entry for entry in kept if entry.job == fault.job]
    for fewer in (list(fault.entries), own, of_job, kept):
        if search.shows(fewer):
            return tuple(search.reduced(fewer))
    message = f"this history does not show the fault {fault.kind!r}: {fault.message}"
    raise ValueError(message)


def _is_about(entry: Entry, fault: Fault) -> bool:
    return (entry.job, entry.scheduled_ms) == (fault.job, fault.scheduled_ms)


class _Search:
    """Leaves out entries as long as a fault is still found.

    Args:
        fault: The fault.
        terms: What to judge by.
    """

    def __init__(self, fault: Fault, terms: Terms) -> None:
        self._fault = fault
        self._terms = terms

    def shows(self, entries: Sequence[Entry]) -> bool:
        """Tell whether the fault is found in these entries."""
        return any(self._is_same(found) for found in judged(entries, self._terms).faults)

    def _is_same(self, found: Fault) -> bool:
        fault = self._fault
        return (found.kind, found.job, found.scheduled_ms, found.entries[-1:]) == (
            fault.kind,
            fault.job,
            fault.scheduled_ms,
            fault.entries[-1:],
        )

    def reduced(self, entries: list[Entry]) -> list[Entry]:
        """Leave out ever smaller pieces, until no single entry can go."""
        size = max(1, len(entries) // 2)
        while True:
            kept = self._without_pieces(entries, size)
            if len(kept) < len(entries):
                entries = kept
                size = min(size, max(1, len(entries) // 2))
            elif size > 1:
                size //= 2
            else:
                return entries

    def _without_pieces(self, entries: list[Entry], size: int) -> list[Entry]:
        place = 0
        while place < len(entries):
            rest = entries[:place] + entries[place + size :]
            if self.shows(rest):
                entries = rest
            else:
                place += size
        return entries
