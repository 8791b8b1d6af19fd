"""What happened in the demo, found out from what its instances wrote and what the store says."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Optional

from leasecron_sync.model import RunRecord, RunState


class Note(NamedTuple):
    """One line that an instance wrote.

    Attributes:
        instance: Its name.
        event: What happened: loaded, ready, began, returned, lost, finished.
        at_ms: When, on the steady clock of this host, which all its processes share.
        scheduled_ms: Which run, for the events of a run.
        attempt: Likewise.
        token: Likewise.
        instance_id: Id under which the store knows the instance; with ready.
    """

    instance: str
    event: str
    at_ms: int
    scheduled_ms: int = 0
    attempt: int = 0
    token: int = 0
    instance_id: str = ""


class Kill(NamedTuple):
    """The end of an instance.

    Attributes:
        instance: Its name.
        at_ms: When it was killed, on the steady clock.
    """

    instance: str
    at_ms: int


class Takeover(NamedTuple):
    """A run that the killed instance did not bring to its end.

    Attributes:
        scheduled_ms: Which run.
        taken_by: Instance of its newest attempt; empty if there was only the killed one.
        attempt: Its newest attempt.
        state: Its state.
        after_ms: Time from the kill until the next attempt began; None if none did.
    """

    scheduled_ms: int
    taken_by: str
    attempt: int
    state: RunState
    after_ms: Optional[int]


@dataclass(frozen=True)
class Recorded:
    """What the store says in the end.

    Attributes:
        owed_from_ms: Since when the scheduled times of the job are owed.
        until_ms: The last scheduled time that is looked at.
        records: Its records of runs.
    """

    owed_from_ms: int
    until_ms: int
    records: Sequence[RunRecord]


@dataclass(frozen=True)
class Findings:
    """The facts of the summary.

    Attributes:
        scheduled: How many scheduled times were owed.
        finished: How many of their runs are finished.
        runs: Finished runs by instance.
        takeovers: What the killed instance left behind.
        doubled: A sentence for everything that happened twice and must not.
        lost: Scheduled times that were owed and have no settled record.
        leases_lost: How many handlers lost their lease without being killed: a busy machine.
    """

    scheduled: int
    finished: int
    runs: Mapping[str, int]
    takeovers: Sequence[Takeover]
    doubled: Sequence[str]
    lost: Sequence[int]
    leases_lost: int

    @property
    def taken_over(self) -> bool:
        """True when everything that the killed instance left was finished by another."""
        return bool(self.takeovers) and all(
            one.state is RunState.FINISHED and one.after_ms is not None for one in self.takeovers
        )


def read_note(instance: str, line: bytes) -> Optional[Note]:
    """Return what a line tells; None for one that was cut off or is not the demo's."""
    try:
        return Note(instance, **json.loads(line))
    except (TypeError, ValueError):
        return None


def expected_times(recorded: Recorded, period_ms: int) -> list[int]:
    """Return the scheduled times that were owed."""
    first_ms = -(-recorded.owed_from_ms // period_ms) * period_ms
    return list(range(first_ms, recorded.until_ms + 1, period_ms))


def unsettled_times(recorded: Recorded, period_ms: int) -> list[int]:
    """Return the scheduled times that were owed and have no settled record."""
    settled = {record.key.scheduled_ms for record in recorded.records if record.state.settled}
    return [ms for ms in expected_times(recorded, period_ms) if ms not in settled]


def open_runs(notes: Sequence[Note], instance: str) -> list[Note]:
    """Return the beginnings of the runs that an instance has begun and not finished."""
    over = {
        (note.scheduled_ms, note.attempt)
        for note in notes
        if note.instance == instance and note.event in ("finished", "lost")
    }
    return [
        note
        for note in notes
        if note.instance == instance
        and note.event == "began"
        and (note.scheduled_ms, note.attempt) not in over
    ]


def find_out(
    notes: Sequence[Note], kill: Optional[Kill], recorded: Recorded, period_ms: int
) -> Findings:
    """Bring together what the instances wrote and what the store says.

    Args:
        notes: What the instances wrote, each of them in its order.
        kill: Which instance was killed, and when.
        recorded: What the store says.
        period_ms: Distance of the scheduled times.
    """
    names = {note.instance_id: note.instance for note in notes if note.event == "ready"}
    expected = set(expected_times(recorded, period_ms))
    records = {record.key.scheduled_ms: record for record in recorded.records}
    finished = [
        record
        for ms, record in records.items()
        if ms in expected and record.state is RunState.FINISHED
    ]
    runs = Counter(names.get(record.holder, record.holder) for record in finished)
    return Findings(
        scheduled=len(expected),
        finished=len(finished),
        runs={name: runs[name] for name in sorted({*names.values(), *runs})},
        takeovers=() if kill is None else _takeovers(notes, kill, records, names),
        doubled=_doubled(notes, kill),
        lost=unsettled_times(recorded, period_ms),
        leases_lost=sum(note.event == "lost" for note in notes),
    )


def _takeovers(
    notes: Sequence[Note],
    kill: Kill,
    records: Mapping[int, RunRecord],
    names: Mapping[str, str],
) -> list[Takeover]:
    found: list[Takeover] = []
    for left in open_runs(notes, kill.instance):
        record = records.get(left.scheduled_ms)
        if record is None or (record.token == left.token and record.state.settled):
            continue  # its end reached the store in the moment of the kill
        later = [
            note.at_ms
            for note in notes
            if note.event == "began"
            and note.scheduled_ms == left.scheduled_ms
            and note.attempt > left.attempt
        ]
        found.append(
            Takeover(
                left.scheduled_ms,
                names.get(record.holder, record.holder) if later else "",
                record.attempt,
                record.state,
                min(later) - kill.at_ms if later else None,
            )
        )
    return found


def _doubled(notes: Sequence[Note], kill: Optional[Kill]) -> list[str]:
    """Look for what the promise excludes, in what the instances did."""
    found: list[str] = []
    began = sorted((note for note in notes if note.event == "began"), key=lambda note: note.at_ms)
    accepted = [note for note in notes if note.event == "finished"]
    for what, counted in (
        ("attempt granted twice", Counter((note.scheduled_ms, note.attempt) for note in began)),
        ("token granted twice", Counter(note.token for note in began)),
        ("end accepted twice", Counter(note.scheduled_ms for note in accepted)),
    ):
        found += [f"{what}: {item}" for item, times in counted.items() if times > 1]
    for end in accepted:
        later = [
            note
            for note in began
            if note.scheduled_ms == end.scheduled_ms and note.attempt > end.attempt
        ]
        found += [f"begun after it was finished: {note.scheduled_ms}" for note in later]
    for number, first in enumerate(began):
        until_ms = _holds_until(notes, kill, first)
        found += [
            f"two holders at a time: {first.scheduled_ms}"
            for second in began[number + 1 :]
            if second.scheduled_ms == first.scheduled_ms
            and second.attempt != first.attempt
            and (until_ms is None or second.at_ms < until_ms)
        ]
    return found


def _holds_until(notes: Sequence[Note], kill: Optional[Kill], began: Note) -> Optional[int]:
    """Return when a handler came to its end, as far as its lease was live; None if it did not."""
    for note in notes:
        same = (note.instance, note.scheduled_ms, note.attempt) == (
            began.instance,
            began.scheduled_ms,
            began.attempt,
        )
        if same and note.event == "lost":
            return began.at_ms  # it lapsed at some time before it was noticed
        if same and note.event == "returned":
            return note.at_ms
    if kill is not None and kill.instance == began.instance:
        return kill.at_ms
    return None
