"""Scheduled times as somebody finds them who watches a clock on the wall, second by second.

The rules are those of Debian's cron, told from that clock alone: no offset is looked at, and what
was skipped or repeated is seen from what the clock shows after what it had shown.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import NamedTuple
from zoneinfo import ZoneInfo

from tests.model.cron_reader import Reading
from tests.model.zone_files import DAY, changes_of, moment_of

HOURS_MADE_UP = timedelta(hours=3)
MEMORY = 2 * DAY  # no clock was ever set by more than a day


class Local(NamedTuple):
    """What the clock shows at an instant."""

    instant: int
    shown: datetime


class Watch(NamedTuple):
    """A span of time in front of a clock.

    Attributes:
        step: Seconds between two looks.
        reached: The latest that the clock had shown before.
        looks: What it shows at each look.
    """

    step: int
    reached: datetime
    looks: Sequence[Local]


def shown(zone: str, instant: int) -> datetime:
    return moment_of(instant).astimezone(ZoneInfo(zone)).replace(tzinfo=None)


@functools.lru_cache(maxsize=64)
def watched(zone: str, start: int, end: int, step: int) -> Watch:
    """Watch a clock from an instant until before another, once a second or once a minute."""
    start -= start % step
    before = [start - 1]
    before += [change.at - 1 for change in changes_of(zone) if start - MEMORY < change.at < start]
    reached = max(shown(zone, instant) for instant in before)
    info = ZoneInfo(zone)
    moment, tick = moment_of(start), timedelta(seconds=step)
    looks = []
    for instant in range(start, end, step):
        looks.append(Local(instant, moment.astimezone(info).replace(tzinfo=None)))
        moment += tick
    return Watch(step, reached.replace(second=reached.second - reached.second % step), looks)


def scheduled(reading: Reading, watch: Watch) -> list[int]:
    """Return the scheduled times of an expression during a watch."""
    assert watch.step == 1 or reading.whole_minutes
    if not reading.fixed:
        return [instant for instant, now in watch.looks if reading.matches(now)]
    found = []
    tick = timedelta(seconds=watch.step)
    reached = watch.reached
    for instant, now in watch.looks:
        jump = now - reached
        if jump <= timedelta(0):
            continue  # it has shown this before
        due = reading.matches(now)
        if jump > tick and jump - tick <= HOURS_MADE_UP and not due:
            due = _was_skipped(reading, reached, now)
        if due:
            found.append(instant)
        reached = now
    return found


def _was_skipped(reading: Reading, reached: datetime, now: datetime) -> bool:
    """Tell whether a time lies between two that the clock has shown one after the other."""
    return any(
        reached < moment < now
        for day in {reached.date(), now.date()}
        for moment in reading.times_of(day)
    )


def needs_seconds(zone: str, start: int, end: int) -> bool:
    """Tell whether somebody who looks once a minute would miss something of this clock."""
    changes = changes_of(zone)
    near = [change for change in changes if start - MEMORY <= change.at <= end]
    offsets = {change.before for change in near} | {change.after for change in near}
    if not near:
        earlier = [change.after for change in changes if change.at < start]
        offsets = set(earlier[-1:] or [changes[0].before] if changes else [0])
    return any(offset % 60 for offset in offsets) or any(change.at % 60 for change in near)
