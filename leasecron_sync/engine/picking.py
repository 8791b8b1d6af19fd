"""Which runs to ask for, in which order and how many. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from leasecron_sync.engine.decide import Asker, Candidate, Origin
from leasecron_sync.model import RunKey
from leasecron_sync.options import EXTRA_SLOTS, MIN_SLICE, SLICE_DIVISOR


class Entry(NamedTuple):
    """A candidate in its place among others: the oldest first, among equals by job."""

    at_ms: int
    key: RunKey
    candidate: Candidate


@dataclass
class Pick:
    """What to claim in one call.

    Attributes:
        candidates: At most one run of a job without overlap, at most the free slots.
        starved: True when something was left out for want of a slot.
        more: True when something was left out for the next call.
        left: How many were left out.
    """

    candidates: list[Candidate]
    starved: bool
    more: bool
    left: int = 0


class Offers(NamedTuple):
    """Everything that may be asked for now.

    Attributes:
        first: Unsettled runs, in order.
        rest: Others, in order.
    """

    first: Sequence[Entry]
    rest: Sequence[Entry]


class Turn(NamedTuple):
    """What may be asked for of one job.

    Attributes:
        first: Its unsettled runs.
        rest: Its others.
        passed: True when one of the rest goes before an older one that waits.
    """

    first: list[Entry]
    rest: list[Entry]
    passed: bool = False


NO_TURN = Turn([], [])


def turn_of(entries: Sequence[Entry], asker: Asker, *, in_order: bool) -> Turn:
    """Find what may be asked for now of one job.

    Args:
        entries: Everything of the job that this instance means to claim.
        asker: Who asks, and when.
        in_order: True where the mechanism may not accept an older run later.
    """
    if entries and entries[0].key.job in asker.handlers:
        entries = [entry for entry in entries if asker.may_ask(entry.candidate)]
    if not entries:
        return NO_TURN
    if len(entries) == 1:  # as it nearly always is
        if entries[0].candidate.ask_ms > asker.steady_ms:
            return NO_TURN
        unsettled = entries[0].candidate.origin is Origin.UNSETTLED
        return Turn([*entries], []) if unsettled else Turn([], [*entries])
    unsettled_ones = [entry for entry in entries if entry.candidate.origin is Origin.UNSETTLED]
    first, _passed = _in_turn(unsettled_ones, asker, in_order=in_order)
    if any(not entry.candidate.job.options.overlap for entry in first):
        return Turn(first, [])
    others = [entry for entry in entries if entry.candidate.origin is not Origin.UNSETTLED]
    rest, passed = _in_turn(others, asker, in_order=in_order)
    return Turn(first, rest, passed)


def _in_turn(entries: Sequence[Entry], asker: Asker, *, in_order: bool) -> tuple[list[Entry], bool]:
    """Keep what may be asked for now: where runs go one at a time, the oldest alone.

    Runs go one at a time where overlap is forbidden, where they are made up for, and where the
    mechanism wants them in order. One that waits for its turn keeps those behind it waiting, but
    not a run that is on time: that one is asked for, and may be skipped.
    """
    kept: list[Entry] = []
    seen = waits = passed = False
    for entry in entries:
        item = entry.candidate
        alone = in_order or not item.job.options.overlap or item.origin is Origin.CAUGHT_UP
        ready = item.ask_ms <= asker.steady_ms
        if not alone:
            if ready:
                kept.append(entry)
            continue
        if seen:
            continue
        if ready:
            kept.append(entry)
            passed = waits
        if ready or in_order or not item.is_on_time(asker.now_ms, asker.steady_ms):
            seen = True
        else:
            waits = True
    return kept, passed


def pick(offers: Offers, asker: Asker) -> Pick:
    """Choose the runs of the next claim; the work depends on what is chosen, not on what waits.

    Unsettled runs come first and may use slots beyond the limit. Of the rest an instance takes a
    slice, beginning at an offset of its own, so that runs which are due together spread over the
    instances.

    Args:
        offers: What may be asked for.
        asker: Who picks, and when.
    """
    first, rest = offers.first, offers.rest
    chosen = [entry.candidate for entry in first[: max(0, asker.free + EXTRA_SLOTS)]]
    free = max(0, asker.free - len(chosen))
    size = min(free, max(MIN_SLICE, -(-len(rest) // SLICE_DIVISOR)))
    sliced = sliced_from(rest, asker.instance_id, size)
    left_out = len(first) + len(rest) - len(chosen) - len(sliced)
    # Not where all slots might be taken by this claim: it may win nothing, and more is asked for.
    starved = len(chosen) < len(first) or (bool(rest) and asker.free <= 0)
    return Pick(chosen + sliced, starved, left_out > 0 and not starved, left_out)


def sliced_from(rest: Sequence[Entry], instance_id: str, size: int) -> list[Candidate]:
    """Take a slice that begins at a place of the instance's own, and goes on from the front.

    The place depends on the instance, the oldest scheduled time, and how many there are.
    """
    if not rest or not size:
        return []
    text = f"{instance_id} {rest[0].key.scheduled_ms}"
    digest = hashlib.sha256(text.encode()).digest()
    start = int.from_bytes(digest[:8], "big") % len(rest)
    entries = [*rest[start : start + size]]
    entries += rest[: min(start, size - len(entries))]
    return [entry.candidate for entry in entries]
