"""Schedulers of this process through a failover, judged by what it may forget, and nothing besides.

What the new primary had not received is forgotten: runs that were decided then are *in doubt*. They
may be executed once more, by others. For all others the rules hold as if nothing had happened.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from leasecron_sync.backends.base import LeaseBackend
from leasecron_sync.model import RunKey, RunRecord, RunState
from leasecron_sync.testing import Entry, HistoryLog, Terms, check, read_history
from tests.faults.crew import Crew, now_ms
from tests.services.process import eventually

BEHIND_MS = 500
"""How far a replica that follows is taken to be behind at most."""

MADE_UP_FOR_S = 60.0
"""How long a crew may take to do all again that was forgotten; runs of a job go one at a time."""

DECIDED = ("claimed", "renewed", "settled", "abandoned")
NO_DECISION = ("no effect", "early", "held", "waiting", "deferred", "lost", "refused")


@dataclass(frozen=True)
class Forgotten:
    """What a failover made of the runs.

    Attributes:
        doubt: Runs that were decided when the new primary received nothing any more.
        doubled: Runs that were brought to their end more than once.
        newest_ms: When the newest decision was made that is forgotten; 0 without any.
    """

    doubt: set[RunKey]
    doubled: set[RunKey]
    newest_ms: int


class FailoverCrew(Crew):
    """Several instances, whose store is replaced by a copy that lacks the newest decisions.

    Args:
        folder: For the history.
        connect: Makes a backend that nothing stands in front of, to read the records by.
    """

    def __init__(self, folder: Path, connect: Callable[[], LeaseBackend]) -> None:
        super().__init__(folder, connect)
        self._cut_ms = self._died_ms = 0

    def cut(self, cut: Callable[[], object]) -> None:
        """Have the replica receive nothing from now on."""
        self._cut_ms = now_ms() - BEHIND_MS
        cut()

    def died(self) -> None:
        """Note that the primary decides nothing any more."""
        self._died_ms = now_ms()

    def granted_since(self, at_ms: int) -> list[Entry]:
        """Return grants whose answers came after an instant."""
        claims = self.entries("claimed")
        return [one for one in claims if one.verdict == "granted" and one.at_ms > at_ms]

    def forgotten(self, *, settled: bool = True) -> Forgotten:
        """Wait until what was due is settled, stop, judge, and return what was forgotten.

        Args:
            settled: Whether all that was due must be settled; else what is in doubt may be without
                a record.
        """
        until_ms = now_ms()
        owed = self.owed(until_ms)
        doubt = self._in_doubt()
        needed = owed if settled else [key for key in owed if key not in doubt]

        def missing() -> list[RunKey]:
            known = {record.key for record in self.records() if record.state.settled}
            return [key for key in needed if key not in known]

        complete = eventually(
            lambda: missing() == [] and self._unheard(doubt) == set(), MADE_UP_FOR_S
        )
        assert self.dead_threads() == []
        self.stop()
        assert complete, (missing(), self._unheard(doubt))
        records = self.records()
        self._judge_others(records, doubt, owed)
        self._judge_tokens()
        return self._judge_doubt(records, doubt)

    def _in_doubt(self) -> set[RunKey]:
        keys: set[RunKey] = set()
        for what in DECIDED:
            for entry in self.entries(what):
                decided = entry.verdict not in NO_DECISION and not (
                    entry.verdict == "settled" and not entry.fresh
                )
                if decided and self._cut_ms <= entry.at_ms and entry.sent_ms <= self._died_ms:
                    keys.add(key_of(entry))
        return keys

    def _ends(self) -> Counter[RunKey]:
        return Counter(key_of(one) for one in self.entries("ended") if one.verdict == "returned")

    def _unheard(self, doubt: set[RunKey]) -> set[RunKey]:
        """Return runs that were neither brought to their end nor skipped."""
        claims = self.entries("claimed")
        skipped = {key_of(one) for one in claims if one.state == RunState.SKIPPED.value}
        return doubt - set(self._ends()) - skipped

    def _judge_others(
        self, records: list[RunRecord], doubt: set[RunKey], owed: list[RunKey]
    ) -> None:
        """Runs that nobody can have forgotten: no rule was broken, and none was lost."""
        entries = [
            entry
            for entry in list(self._entries)
            if entry.scheduled_ms is None or key_of(entry) not in doubt
        ]
        log = HistoryLog(entries.append)
        log.records([record for record in records if record.key not in doubt])
        path = self._folder / "history.jsonl"
        path.write_text("".join(f"{entry.to_line()}\n" for entry in entries))
        wanted = tuple(key for key in owed if key not in doubt)
        report = check(read_history(path).entries, terms=Terms(owed=wanted))
        assert [fault.message for fault in report.faults] == []
        assert report.totals.executions > 0

    def _judge_tokens(self) -> None:
        """Of each job no token was granted to two, and those of the new primary are greater."""
        grants = [one for one in self.entries("claimed") if one.verdict == "granted"]
        given: dict[tuple[str, int], str] = {}
        for one in grants:
            known = given.setdefault((one.job, one.token), one.decision_id)
            assert known == one.decision_id, f"{one.job}: token {one.token} was granted to two"
        for job in {one.job for one in grants}:
            before = [x.token for x in grants if x.job == job and x.at_ms <= self._died_ms]
            after = [x.token for x in grants if x.job == job and x.sent_ms > self._died_ms]
            assert max(before, default=0) < min(after, default=max(before, default=0) + 1), job

    def _judge_doubt(self, records: list[RunRecord], doubt: set[RunKey]) -> Forgotten:
        """Runs that may be forgotten: executed once more at most, and those alone."""
        ends = self._ends()
        doubled = {key for key, number in ends.items() if number > 1}
        assert doubled <= doubt, sorted(doubled - doubt)
        assert max(ends.values()) <= 2, ends.most_common(3)
        finished = {record.key for record in records if record.state is RunState.FINISHED}
        assert finished <= set(ends), "a record says that a run was executed, and it was not"
        assert [record for record in records if record.state is RunState.FAILED] == []
        newest_ms = max(
            (one.at_ms for one in self.granted_since(self._cut_ms) if one.at_ms <= self._died_ms),
            default=0,
        )
        return Forgotten(doubt, doubled, newest_ms)


def key_of(entry: Entry) -> RunKey:
    """Return the run that an entry is about."""
    assert entry.scheduled_ms is not None
    return RunKey(entry.job, entry.scheduled_ms)
