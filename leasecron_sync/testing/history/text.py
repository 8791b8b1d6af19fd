"""Entries as people read them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Callable, Final, NamedTuple

from leasecron_sync.testing.history._ledger import instant
from leasecron_sync.testing.history.entry import (
    ABANDONED,
    AROUND,
    CLAIMED,
    CLAIMING,
    EMPTIED,
    ENDED,
    INSTANCE,
    PRUNED,
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


class TimelineRow(NamedTuple):
    """One entry, in words.

    Attributes:
        ms: When it happened, or between when and when, in ms since the first entry.
        instance: Who.
        job: The job.
        scheduled: The run's scheduled time, in UTC.
        what: What happened.
    """

    ms: str
    instance: str
    job: str
    scheduled: str
    what: str


def timeline(entries: Sequence[Entry]) -> list[TimelineRow]:
    """Return entries as the rows of a table, with times counted from the first one's.

    Names stand in the rows as they are in the entries.

    Args:
        entries: Entries in order.
    """
    begin_ms = min((entry.sent_ms for entry in entries), default=0)
    return [
        TimelineRow(
            _span(entry, begin_ms),
            entry.instance,
            entry.job,
            "" if entry.scheduled_ms is None else instant(entry.scheduled_ms),
            described(entry),
        )
        for entry in entries
    ]


def _span(entry: Entry, begin_ms: int) -> str:
    sent, at = entry.sent_ms - begin_ms, entry.at_ms - begin_ms
    return f"{at:,}" if sent == at else f"{sent:,} to {at:,}"


def described(entry: Entry) -> str:
    """Return in words what an entry says.

    Args:
        entry: The entry.
    """
    describe = _WORDS.get(entry.what)
    return entry.what if describe is None else describe(entry)


def _claimed(entry: Entry) -> str:
    if entry.verdict != "granted":
        more = [part for part in (entry.state, entry.reason) if part]
        if entry.wait_ms:
            more.append(f"ask again in {entry.wait_ms:,} ms")
        if entry.fresh:
            more.append("decided by this claim")
        return f"claim: {', '.join([entry.verdict.replace('_', ' '), *more])}"
    if entry.window_ms:
        return f"claim: won, decision {entry.decision_id}"
    how = "takeover" if entry.takeover else f"attempt {entry.attempt}"
    attempt = f", attempt {entry.attempt}" if entry.takeover else ""
    return f"claim: granted, {how}{attempt}, token {entry.token}, for {entry.left_ms:,} ms"


def _renewed(entry: Entry) -> str:
    return f"renewal of token {entry.token}: {entry.verdict}, for {entry.lease_ms:,} ms"


def _settled(entry: Entry) -> str:
    state = f", {entry.state}" if entry.state else ""
    return f"settlement under token {entry.token} ({_outcome(entry)}): {entry.verdict}{state}"


def _outcome(entry: Entry) -> str:
    outcome = entry.outcome.replace("_", " ")
    return f"{outcome}, {entry.reason}" if entry.reason else outcome


def _handler(entry: Entry) -> str:
    of = f", attempt {entry.attempt}, token {entry.token}" if entry.token else ""
    if entry.what == STARTED:
        doubt = ", if its lease is trusted" if entry.verdict == AROUND else ""
        return f"handler starts{of}{doubt}"
    return f"handler: {entry.verdict}{of}"


def _told(entry: Entry) -> str:
    number = f", {entry.number:,} runs" if entry.number != 1 else ""
    reason = f", {entry.reason}" if entry.reason else ""
    return f"event {entry.event}{reason}{number}"


def _registered(entry: Entry) -> str:
    since = "" if entry.owed_from_ms is None else f", owed since {instant(entry.owed_from_ms)}"
    return f"job registered{since}"


def _instance(entry: Entry) -> str:
    return f"instance {entry.verdict}"


_WORDS: Final[dict[str, Callable[[Entry], str]]] = {
    INSTANCE: _instance,
    REGISTERED: _registered,
    CLAIMING: lambda entry: f"claim sent, decision {entry.decision_id}",
    CLAIMED: _claimed,
    RENEWED: _renewed,
    SETTLING: lambda entry: f"settlement sent under token {entry.token} ({_outcome(entry)})",
    SETTLED: _settled,
    ABANDONED: lambda _entry: "abandoned by a claim of another run, or by pruning",
    PRUNED: lambda entry: f"pruning deleted {entry.number:,} records",
    STARTED: _handler,
    ENDED: _handler,
    TOLD: _told,
    EMPTIED: lambda _entry: "the store lost its data",
    RECORD: lambda entry: f"record in the end: {entry.state}, attempt {entry.attempt}",
    READ: lambda entry: f"{entry.number:,} records read in the end",
}
