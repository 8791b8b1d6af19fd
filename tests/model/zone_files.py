"""The changes of every zone, read from the files of the zone database themselves.

The library looks once a day whether a zone's distance from UTC has changed, through ``zoneinfo``.
What is found here is found without either, so that a change which that way overlooks shows.
"""

from __future__ import annotations

import functools
import re
import struct
from datetime import date, datetime, timedelta, timezone
from importlib import resources
from pathlib import Path
from typing import NamedTuple
from zoneinfo import TZPATH, available_timezones

DAY = 86_400
NO_ZONES = {"localtime", "posixrules", "Factory"}
LAST_YEAR = 2037


class Change(NamedTuple):
    """A zone's distance from UTC changes, in seconds."""

    at: int
    before: int
    after: int

    @property
    def jump(self) -> int:
        """How far the clock on the wall is put forward; negative: back."""
        return self.after - self.before


def zone_names() -> list[str]:
    return sorted(available_timezones() - NO_ZONES)


def zone_bytes(name: str) -> bytes:
    for folder in TZPATH:
        path = Path(folder) / name
        if path.is_file():
            return path.read_bytes()
    place = resources.files("tzdata") / "zoneinfo"
    for part in name.split("/"):
        place = place / part
    return place.read_bytes()


@functools.cache
def changes_of(name: str) -> tuple[Change, ...]:
    """Return every change of a zone up to the year 2037, the oldest first."""
    return parsed(zone_bytes(name))


def parsed(data: bytes) -> tuple[Change, ...]:
    """Read a zone file: the changes it lists, and those that its last line tells of."""
    body = data[44 + _length(data, 4) :]  # behind the part with 32 bits
    assert body[:4] == b"TZif", "a zone file of version 1"
    times, kinds, offsets = _lists(body)
    footer = body[44 + _length(body, 8) :].decode("ascii").strip("\n")
    now = offsets[0]
    moments = [(at, offsets[kind]) for at, kind in zip(times, kinds)]
    last = times[-1] if times else -(2**62)
    moments += [(at, offset) for at, offset in _ruled(footer) if at > last]
    found = []
    for at, offset in moments:
        if offset != now:
            found.append(Change(at, now, offset))
            now = offset
    return tuple(found)


def _counts(data: bytes) -> tuple[int, ...]:
    return struct.unpack(">6I", data[20:44])


def _length(data: bytes, size: int) -> int:
    utc, standard, leap, times, types, chars = _counts(data)
    return times * (size + 1) + types * 6 + chars + leap * (size + 4) + standard + utc


def _lists(body: bytes) -> tuple[tuple[int, ...], bytes, list[int]]:
    count, types = _counts(body)[3:5]
    times: tuple[int, ...] = struct.unpack(f">{count}q", body[44 : 44 + 8 * count])
    kinds = body[44 + 8 * count : 44 + 9 * count]
    place = 44 + 9 * count
    offsets = [struct.unpack_from(">i", body, place + 6 * number)[0] for number in range(types)]
    return times, kinds, offsets


_NAME = r"(?:<[^>]+>|[A-Za-z]+)"
_CLOCK = r"[-+]?\d+(?::\d+)?(?::\d+)?"
_RULE = rf"M(\d+)\.(\d)\.(\d)(?:/({_CLOCK}))?"
_FOOTER = re.compile(rf"{_NAME}({_CLOCK})(?:{_NAME}({_CLOCK})?,(?:{_RULE},{_RULE}|[J\d].*))?")


def _ruled(footer: str) -> list[tuple[int, int]]:
    """Return the changes that the last line of a zone file tells of, until ``LAST_YEAR``."""
    match = _FOOTER.fullmatch(footer)
    assert match is not None, footer
    if "," not in footer:
        return []
    if match[3] is None:
        # Julian days occur with summer time all year round only, which changes nothing.
        assert re.search(r",0/0,J365/2[35]$", footer), footer
        return []
    standard = -_seconds(match[1])
    summer = -_seconds(match[2]) if match[2] else standard + 3600
    found = []
    for year in range(1971, LAST_YEAR + 1):
        begin = _moment(year, match[3], match[4], match[5]) + _seconds(match[6] or "2")
        end = _moment(year, match[7], match[8], match[9]) + _seconds(match[10] or "2")
        found += [(begin - standard, summer), (end - summer, standard)]
    return sorted(found)


def _moment(year: int, month: str, week: str, weekday: str) -> int:
    """Return the n-th weekday of a month at midnight, as if it were in UTC."""
    days = [date(year, int(month), 1) + timedelta(days=number) for number in range(31)]
    right = [
        day for day in days if day.month == int(month) and day.isoweekday() % 7 == int(weekday)
    ]
    day = right[min(int(week), len(right)) - 1]
    return (day - date(1970, 1, 1)).days * DAY


def _seconds(clock: str) -> int:
    parts = [int(part) for part in clock.lstrip("+-").split(":")]
    whole = sum(part * unit for part, unit in zip(parts, (3600, 60, 1)))
    return -whole if clock.startswith("-") else whole


def moment_of(instant: int) -> datetime:
    """Return an instant as a datetime in UTC, also where the platform's functions give up."""
    return datetime(1970, 1, 1, tzinfo=timezone.utc) + timedelta(seconds=instant)
