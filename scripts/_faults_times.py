"""How long things took in a fault campaign: late starts, takeovers, hand-overs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, Optional

from leasecron_sync.model import Outcome, RunKey, Verdict
from leasecron_sync.testing import Entry
from leasecron_sync.testing.history.entry import (
    ACCEPTED,
    CLAIMED,
    CLAIMING,
    ENDED,
    SETTLED,
    STARTED,
)
from scripts._faults_crew import Instance

CALM_MS: Final = 4_000
"""How long after a fault that met everybody something may be late because of it."""
STORE_CLOCK: Final = "store clock step"
REACHABLE: Final = ", all could reach the store"

Span = tuple[int, int]


class Happened(NamedTuple):
    """A fault that was injected, by the clock of the history; ``amount`` is that of the plan."""

    kind: str
    from_ms: int
    to_ms: int
    slot: Optional[int] = None
    amount: int = 0


@dataclass(frozen=True)
class Spread:
    """How long something took, in ms."""

    values: Sequence[int]

    def at(self, share: float) -> Optional[int]:
        """Return the value below which this share of them is."""
        ordered = sorted(self.values)
        return ordered[min(len(ordered) - 1, int(len(ordered) * share))] if ordered else None


class Times:
    """Looks at how long things took.

    Args:
        entries: The history.
        by_id: Which process an instance was.
        happened: What was injected.
        span: From when to when runs are looked at.
    """

    def __init__(
        self,
        entries: Sequence[Entry],
        by_id: Mapping[str, Instance],
        happened: Sequence[Happened],
        span: Span,
    ) -> None:
        self._entries = entries
        self._by_id = by_id
        self._happened = happened
        self._from_ms, self._until_ms = span

    def spreads(self, *, lease: bool) -> dict[str, Spread]:
        """Return how long things took, by their names."""
        spans = {"late starts": self._late()}
        if lease:
            spans["takeovers, from SIGKILL or SIGSTOP"] = self._passages("kill", "stop")
            spans["hand-overs, from SIGTERM"] = self._passages("end")
            spans["hand-overs, from the handler's wish"] = self._wished()
        found: dict[str, Spread] = {}
        for name, taken in spans.items():
            calm = [span for span in taken if not self._was_away(*span)]
            found[name] = Spread([to_ms - from_ms for from_ms, to_ms in taken])
            found[f"{name}{REACHABLE}"] = Spread([to_ms - from_ms for from_ms, to_ms in calm])
        return found

    def _late(self) -> list[Span]:
        """Return when each run was due, and when it was started first."""
        due: dict[RunKey, int] = {}
        first: dict[RunKey, int] = {}
        for entry in self._entries:
            if entry.what == CLAIMING and entry.due_ms is not None:
                due.setdefault(entry.key, entry.due_ms)
            elif entry.what == STARTED:
                first.setdefault(entry.key, entry.at_ms)
        return [
            (self._fell_due(due[key], at_ms), at_ms)
            for key, at_ms in first.items()
            if key in due and self._from_ms <= key.scheduled_ms <= self._until_ms
        ]

    def _fell_due(self, due_ms: int, started_ms: int) -> int:
        """Return when a run fell due by a store's clock that was set."""
        steps = [one.amount for one in self._happened if one.kind == STORE_CLOCK]
        if not steps:
            return due_ms
        offset_ms = sum(
            one.amount
            for one in self._happened
            if one.kind == STORE_CLOCK and one.from_ms <= started_ms
        )
        # One that stands still until the machine has caught up is less behind than it was set.
        return min(due_ms - offset_ms, started_ms)

    def _was_away(self, from_ms: int, to_ms: int) -> bool:
        """Tell whether a fault that met everybody was there in a span, or may still have shown."""
        return any(
            one.from_ms <= to_ms and from_ms <= one.to_ms + CALM_MS
            for one in self._happened
            if one.slot is None
        )

    def _grants(self) -> dict[RunKey, list[Entry]]:
        """Return the grants of each run in the order of their tokens, each once."""
        found: dict[RunKey, dict[int, Entry]] = {}
        for entry in self._entries:
            if entry.what == CLAIMED and entry.verdict == Verdict.GRANTED.value:
                found.setdefault(entry.key, {}).setdefault(entry.token, entry)
        return {key: [by[token] for token in sorted(by)] for key, by in found.items()}

    def _of_tokens(self, what: str) -> dict[tuple[str, int], Entry]:
        return {(x.job, x.token): x for x in self._entries if x.what == what}

    def _passages(self, *kinds: str) -> list[Span]:
        """Return when something was done to a holder, and when its run was started elsewhere."""
        starts, taken = self._of_tokens(STARTED), list[Span]()
        for grants in self._grants().values():
            for before, after in zip(grants, grants[1:]):
                start = starts.get((after.job, after.token))
                holder = self._by_id.get(before.instance)
                if start is None or holder is None or after.takeover is not ("kill" in kinds):
                    continue
                begins = [
                    one.from_ms
                    for one in holder.disturbed
                    if one.kind in kinds and before.at_ms <= one.from_ms <= start.at_ms
                ]
                if begins:
                    taken.append((begins[0], start.at_ms))
        return taken

    def _wished(self) -> list[Span]:
        """Return when a handler handed its run over, and when it was started next."""
        starts, taken = self._of_tokens(STARTED), list[Span]()
        settled = {
            (x.job, x.token): x
            for x in self._entries
            if x.what == SETTLED and x.verdict == ACCEPTED
        }
        for grants in self._grants().values():
            for before, after in zip(grants, grants[1:]):
                start = starts.get((after.job, after.token))
                end = settled.get((before.job, before.token))
                holder = self._by_id.get(before.instance)
                if start is None or end is None or holder is None:
                    continue
                if end.outcome != Outcome.HANDED_OVER.value:
                    continue
                if not any(one.kind == "end" for one in holder.disturbed):
                    taken.append((end.at_ms, start.at_ms))
        return taken

    def beside(self) -> tuple[int, int]:
        """Count executions that began while the one before was at work."""
        starts, ends = self._of_tokens(STARTED), self._of_tokens(ENDED)
        calm = disturbed = 0
        for grants in self._grants().values():
            executed = [x for x in grants if (x.job, x.token) in starts]
            for before, after in zip(executed, executed[1:]):
                begin, end = starts[after.job, after.token], ends.get((before.job, before.token))
                if end is not None and end.at_ms <= begin.at_ms:
                    continue
                holder = self._by_id.get(before.instance)
                if holder is not None and any(
                    one.kind != "end" and one.from_ms <= begin.at_ms for one in holder.disturbed
                ):
                    disturbed += 1
                else:
                    calm += 1
        return calm, disturbed
