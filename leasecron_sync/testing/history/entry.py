"""One line of a history: what an instance asked of the store, was told, and did.

A line is one JSON object with the format's number under ``v``; fields that have their default are
left out. ``read_history`` reads files of such lines back.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, Optional, Union, cast

from leasecron_sync.model import RunKey, Verdict

FORMAT: Final = 1
"""Number of the format of a line."""

INSTANCE: Final = "instance"
REGISTERED: Final = "registered"
CLAIMING: Final = "claiming"
CLAIMED: Final = "claimed"
RENEWED: Final = "renewed"
SETTLING: Final = "settling"
SETTLED: Final = "settled"
ABANDONED: Final = "abandoned"
PRUNED: Final = "pruned"
STARTED: Final = "started"
ENDED: Final = "ended"
TOLD: Final = "told"
EMPTIED: Final = "emptied"
RECORD: Final = "record"
READ: Final = "read"

KINDS: Final = frozenset(
    {
        INSTANCE,
        REGISTERED,
        CLAIMING,
        CLAIMED,
        RENEWED,
        SETTLING,
        SETTLED,
        ABANDONED,
        PRUNED,
        STARTED,
        ENDED,
        TOLD,
        EMPTIED,
        RECORD,
        READ,
    }
)
"""What an entry may be about."""

UNKNOWN: Final = "unknown"
"""Verdict of a call without an answer: it may have taken effect, or still do so."""

NO_EFFECT: Final = "no effect"
"""Verdict of a call that surely had no effect."""

ACCEPTED: Final = "accepted"
REFUSED: Final = "refused"
"""Verdict of a settlement that was refused: its holder is fenced."""

AROUND: Final = "around"
"""Verdict of a start that was written around the handler: the last look at trust comes after it."""

NOT_STARTED: Final = "not started"
"""Verdict of an end: the handler was not called, since its lease was not trusted any more."""

_START = '{"v":'

PathLike = Union[str, "os.PathLike[str]"]


class HistoryError(ValueError):
    """A history that cannot be read; the text names the file and the line."""


class Entry(NamedTuple):
    """One thing that an instance asked, was told, or did; immutable.

    ``sent_ms`` and ``at_ms`` are readings of the clock by which leases are judged: that of the
    store, or the wall clock of the host that the store is on. The store decided at an instant
    between them. ``steady_ms`` and ``took_ms`` are of the host's steady clock and tell the order
    of what happened, which a wall clock that is set does not.

    Attributes:
        what: ``instance`` (``began`` or ``ended``), ``registered``, ``claiming`` and ``claimed``
            (a claim before and after the call), ``renewed``, ``settling`` and ``settled``,
            ``abandoned`` (a run that a claim or pruning settled on the side), ``pruned``,
            ``started`` and ``ended`` (of a handler), ``told`` (an event), ``emptied`` (the store
            lost its data), ``record`` and ``read`` (the store's records, read at the end).
        at_ms: When the answer was there, or when it happened.
        sent_ms: Before the call was made; ``at_ms`` where there was no call.
        instance: Id of the instance.
        steady_ms: Steady clock at ``at_ms``; None in an exact history, whose entries stand in the
            order in which the store did it.
        took_ms: How long the call took, by the steady clock.
        call: Number of the call, the same for all items of a batch, its claiming and its claimed.
        job: Job of the run.
        scheduled_ms: Scheduled time of the run; of several missed ones the newest.
        due_ms: Scheduled time plus jitter.
        decision_id: Of the claim.
        token: Fencing token; 0 on claim backends.
        attempt: Number of the attempt.
        lease_ms: Length of a lease that was asked for.
        left_ms: How long a granted lease lasts from the store's decision on.
        wait_ms: When to ask again.
        window_ms: Window of a claim; tells that the backend is a claim backend.
        verdict: The answer, or ``unknown``, or ``no effect``.
        state: State of the run's record.
        outcome: How an attempt ended, as its holder reports it.
        reason: Why it is so.
        fresh: Whether this decision brought the state about.
        takeover: Whether the lease was taken over.
        overlap: Wish of a claim: ``allow``, ``skip`` or ``defer``.
        owed_from_ms: Since when the job's scheduled times are owed.
        store_ms: The store's clock, as it told it.
        store_id: The store's id.
        event: Name of the event that was told.
        number: How many: runs of an event, records deleted or read.
        first_ms: Scheduled time of the oldest of several missed runs.
        host: Name of the host and its start, of an instance that began.
    """

    what: str
    at_ms: int
    sent_ms: int
    instance: str = ""
    steady_ms: Optional[int] = None
    took_ms: int = 0
    call: int = 0
    job: str = ""
    scheduled_ms: Optional[int] = None
    due_ms: Optional[int] = None
    decision_id: str = ""
    token: int = 0
    attempt: int = 0
    lease_ms: int = 0
    left_ms: int = 0
    wait_ms: int = 0
    window_ms: int = 0
    verdict: str = ""
    state: str = ""
    outcome: str = ""
    reason: str = ""
    fresh: bool = False
    takeover: bool = False
    overlap: str = ""
    owed_from_ms: Optional[int] = None
    store_ms: Optional[int] = None
    store_id: str = ""
    event: str = ""
    number: int = 1
    first_ms: Optional[int] = None
    host: str = ""

    @property
    def key(self) -> RunKey:
        """The run that this entry is about.

        Raises:
            ValueError: It is about none.
        """
        if self.scheduled_ms is None:
            message = f"an entry {self.what!r} is about no run"
            raise ValueError(message)
        return RunKey(self.job, self.scheduled_ms)

    def to_object(self) -> dict[str, Any]:
        """Return the fields as they stand in a line; those with their default are left out."""
        fields = {
            name: value
            for name, value in zip(self._fields, self)
            if name not in _DEFAULTS or value != _DEFAULTS[name]
        }
        return {"v": FORMAT, **fields}

    def to_line(self) -> str:
        """Return the entry as one line of JSON, without the end of the line."""
        return json.dumps(self.to_object(), separators=(",", ":"))

    @classmethod
    def from_line(cls, line: str) -> Entry:
        """Return the entry of a line.

        Args:
            line: What ``to_line`` returned.

        Raises:
            HistoryError: The line is none, or of another format.
        """
        try:
            loaded: object = json.loads(line)
        except ValueError:
            loaded = None
        if not isinstance(loaded, dict):
            message = "no JSON object"
            raise HistoryError(message)
        found = cast("dict[str, Any]", loaded)
        version = found.pop("v", None)
        if version != FORMAT:
            message = f"the format of the entry is {version!r}, and this version reads {FORMAT}"
            raise HistoryError(message)
        _check(found)
        return cls(**found)


_DEFAULTS: Final[dict[str, Any]] = dict(Entry._field_defaults)
_NUMBERS: Final = frozenset(
    name for name in Entry._fields if name.endswith("_ms") or isinstance(_DEFAULTS.get(name), int)
) - {"fresh", "takeover"}
_FLAGS: Final = frozenset({"fresh", "takeover"})
_OF_RUNS: Final = frozenset(
    {CLAIMING, CLAIMED, RENEWED, SETTLING, SETTLED, ABANDONED, STARTED, ENDED, RECORD}
)


def _check(found: dict[str, Any]) -> None:
    for name, value in found.items():
        if name not in Entry._fields:
            message = f"an entry has no field {name!r}"
            raise HistoryError(message)
        kind = int if name in _NUMBERS else bool if name in _FLAGS else str
        if type(value) is not kind and not (value is None and _DEFAULTS.get(name, 0) is None):
            message = f"{name} is {value!r} and should be {_KIND_NAMES[kind]}"
            raise HistoryError(message)
    missing = [name for name in ("what", "at_ms", "sent_ms") if name not in found]
    if found.get("what") in _OF_RUNS:
        missing += [name for name in ("job", "scheduled_ms") if found.get(name) in (None, "")]
    if _has_token(found) and not found.get("token"):
        missing.append("token")
    if missing:
        message = f"an entry without {missing[0]}"
        raise HistoryError(message)
    if found["what"] not in KINDS:
        message = f"what is {found['what']!r} and should be one of {', '.join(sorted(KINDS))}"
        raise HistoryError(message)


def _has_token(found: dict[str, Any]) -> bool:
    """Tell whether an entry can only be about a lease, which has a token."""
    if found.get("what") == CLAIMED:
        return found.get("verdict") == Verdict.GRANTED.value and not found.get("window_ms")
    return found.get("what") in {RENEWED, SETTLING, SETTLED}


_KIND_NAMES: Final = {int: "a whole number", bool: "true or false", str: "text"}


class History(NamedTuple):
    """Entries of one or several logs, in order.

    Attributes:
        entries: The entries.
        cut: Lines that end in their middle, as a killed process leaves them.
        exact: Whether the entries stand in the order in which the store did it.
    """

    entries: tuple[Entry, ...]
    cut: int = 0
    exact: bool = False


def read_history(*paths: PathLike) -> History:
    """Read logs and bring their entries in order.

    Args:
        paths: Files that ``HistoryLog`` wrote, of one or several instances.

    Raises:
        HistoryError: A line cannot be read; the text names file and line.
        OSError: A file cannot be read.
    """
    files = [_read(path) for path in paths]
    cut = sum(item.cut for item in files)
    return merged([item.entries for item in files])._replace(cut=cut)


def merged(logs: Sequence[Sequence[Entry]]) -> History:
    """Bring the entries of several logs in order.

    Args:
        logs: Entries of each log, as they were written.
    """
    entries = [entry for log in logs for entry in log]
    if all(entry.steady_ms is None for entry in entries):
        exact = len([log for log in logs if log]) <= 1
        if not exact:
            entries.sort(key=lambda entry: entry.at_ms)
        return History(tuple(entries), exact=exact)
    hosts = {entry.host for entry in entries if entry.what == INSTANCE and entry.host}
    if len(hosts) > 1 or any(entry.steady_ms is None for entry in entries):
        # Steady clocks of several hosts have nothing to do with each other.
        entries = [entry._replace(steady_ms=None) for entry in entries]
        entries.sort(key=lambda entry: entry.at_ms)
    else:
        entries.sort(key=lambda entry: entry.steady_ms or 0)
    return History(tuple(entries))


def _read(path: PathLike) -> History:
    text = Path(path).read_bytes().decode("utf-8", "replace")
    lines = text.split("\n")
    entries: list[Entry] = []
    cut = 0
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            for piece in _pieces(line, last=number == len(lines)):
                if piece is None:
                    cut += 1
                else:
                    entries.append(piece)
        except HistoryError as error:
            message = f"{os.fspath(path)}, line {number}: {error}"
            raise HistoryError(message) from None
    return History(tuple(entries), cut)


def _pieces(line: str, *, last: bool) -> Iterator[Optional[Entry]]:
    """Yield the entries of a line, None for each that was cut.

    A process that is killed inside its write leaves the beginning of an entry. It is the last of
    its file, or another process wrote its own entry right behind it. The beginning of an entry
    cannot be found inside one: there every quotation mark of a text is escaped.
    """
    starts = _starts(line)
    head = line[: starts[0]] if starts else line
    if not _START.startswith(head) or not (starts or last):
        message = "no entry of a history"
        raise HistoryError(message)
    if head:
        yield None
    for begin, end in zip(starts, [*starts[1:], None]):
        piece = line[begin:end]
        whole = _is_whole(piece)
        if not whole and (end is not None or last):
            yield None
        else:
            yield Entry.from_line(piece)


def _starts(line: str) -> list[int]:
    found: list[int] = []
    place = line.find(_START)
    while place >= 0:
        found.append(place)
        place = line.find(_START, place + 1)
    return found


def _is_whole(piece: str) -> bool:
    try:
        json.loads(piece)
    except ValueError:
        return False
    return True
