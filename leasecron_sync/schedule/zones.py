"""Time zones as stretches of constant distance from UTC.

All instants here are whole seconds since the epoch; local times are the same count made from what
a wall clock shows, so that local = instant + offset. Nothing in this module reads the host's zone.
"""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from functools import lru_cache
from typing import NamedTuple
from zoneinfo import ZoneInfo, available_timezones

from leasecron_sync.schedule.pattern import DAY
from leasecron_sync.schedule.wording import shown

EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)

# Two days inside what datetime can hold, so that local time exists in every zone as well.
EARLIEST = -62_135_596_800 + 2 * DAY
LATEST = 253_402_300_799 - 2 * DAY

# Offsets are found by looking once a day: no zone of the database ever left an offset and was back
# within three days, so that no change is overlooked.
_LOOK = DAY
_BLOCK = 128 * DAY
# No clock was ever set by more than a day and a bit: after two days a change is history.
_LOOK_BACK = 2 * DAY
_CACHED_BLOCKS = 4096
_CACHED_ZONES = 1024

# Files of the zone folder that are no zones; the first one is the host's own zone.
_NO_ZONES = frozenset({"localtime", "posixrules", "Factory"})


class Stretch(NamedTuple):
    """A span in which a zone keeps its distance from UTC.

    Attributes:
        start: First second.
        end: First second after it.
        offset: Local time minus UTC.
        skipped: How far the local clock was put forward at ``start``, 0 if it was not.
        reached: How far it had come before; what it shows below that is a repetition.
    """

    start: int
    end: int
    offset: int
    skipped: int
    reached: int


_UTC = Stretch(EARLIEST - _LOOK_BACK, LATEST + _LOOK_BACK, 0, 0, EARLIEST - _LOOK_BACK)


# Held for good: a zone database that is exchanged under a running process must not disturb it.
@lru_cache(maxsize=_CACHED_ZONES)
def _load(name: str) -> ZoneInfo:
    return ZoneInfo(name)


@lru_cache(maxsize=1)
def _zone_names() -> frozenset[str]:
    return frozenset(available_timezones()) - _NO_ZONES


def check_zone(name: object) -> str:
    """Return the name of a time zone after checking it.

    Args:
        name: What a user gave as the zone.

    Raises:
        TypeError: It is no text.
        ValueError: It is no name of the IANA database.
    """
    if not isinstance(name, str):
        message = f"timezone must be an IANA name such as 'Europe/Athens', not {shown(name)}"
        raise TypeError(message)
    if name == "UTC":  # also where the host has no zone database at all
        return name
    # The list is asked instead of ZoneInfo: a file system that ignores case would let wrong names
    # pass, and the folder holds files that are no zones.
    known = _zone_names()
    if name in known:
        try:
            _load(name)
        except (OSError, ValueError, KeyError) as error:
            message = f"timezone {name!r} cannot be read on this host: {error}"
            raise ValueError(message) from error
        return name
    close = sorted(zone for zone in known if zone.lower() == name.strip().lower())
    if close:
        hint = f"write {close[0]!r}"
    elif known:
        hint = "write a name such as 'Europe/Athens' or 'UTC'"
    else:
        hint = "this host has no zone database: install the package tzdata"
    message = f"timezone {name[:80]!r} is not the name of an IANA time zone; {hint}"
    raise ValueError(message)


def stretch_at(zone: str, instant: int) -> Stretch:
    """Return the stretch that holds an instant.

    Stretches end at the bounds of the blocks in which they are looked up, too.

    Args:
        zone: A checked name.
        instant: Seconds since the epoch, between ``EARLIEST`` and ``LATEST``.
    """
    if zone == "UTC":
        return _UTC
    stretches = _stretches(zone, instant // _BLOCK)
    return next(stretch for stretch in stretches if instant < stretch.end)


@lru_cache(maxsize=_CACHED_BLOCKS)
def _stretches(name: str, block: int) -> tuple[Stretch, ...]:
    zone = _load(name)
    start, end = block * _BLOCK, (block + 1) * _BLOCK
    at = since = start - _LOOK_BACK
    offset, skipped = _offset(zone, at), 0
    reached = at + offset
    found: list[Stretch] = []
    while at < end - 1:
        look = min(at + _LOOK, end - 1)
        if _offset(zone, look) == offset:
            at = look
            continue
        change = _first_change(zone, at, look)
        found.append(Stretch(since, change, offset, skipped, reached))
        reached = max(reached, change + offset)
        skipped = max(0, _offset(zone, change) - offset)
        offset = _offset(zone, change)
        at = since = change
    found.append(Stretch(since, end, offset, skipped, reached))
    # What began in an earlier block has its jump there.
    return tuple(
        stretch if stretch.start >= start else stretch._replace(start=start, skipped=0)
        for stretch in found
        if stretch.end > start
    )


def _first_change(zone: ZoneInfo, before: int, after: int) -> int:
    offset = _offset(zone, before)
    while after - before > 1:
        middle = (before + after) // 2
        if _offset(zone, middle) == offset:
            before = middle
        else:
            after = middle
    return after


def _offset(zone: ZoneInfo, instant: int) -> int:
    # astimezone() fails at the ends of the calendar, and blocks reach a little beyond them.
    moment = EPOCH + timedelta(seconds=min(max(instant, EARLIEST), LATEST))
    offset = moment.astimezone(zone).utcoffset()
    assert offset is not None
    return offset // timedelta(seconds=1)
