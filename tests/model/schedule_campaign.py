"""Compares schedules with a clock on the wall, around the changes of every zone."""

from __future__ import annotations

import random
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import NamedTuple, Optional

from leasecron_sync.schedule import Schedule, parse_schedule
from tests.model.cron_reader import Reading
from tests.model.wall_clock import needs_seconds, scheduled, shown, watched
from tests.model.zone_files import DAY, Change, changes_of, zone_names

HOUR = 3_600
YEAR_2020, YEAR_2031 = 1_577_836_800, 1_924_992_000
# What zones did that none of them does in these years.
EXTREMES = {
    "Africa/Cairo": 2014,  # four changes in a year, for the Ramadan
    "Africa/Casablanca": 2012,
    "Africa/Freetown": 1939,  # back after less than four days
    "Africa/Monrovia": 1972,  # 44 minutes and 30 seconds
    "America/Anchorage": 1867,  # a whole day twice, and an offset with seconds
    "America/Caracas": 2007,
    "America/Inuvik": 1952,  # eight hours back, to where nobody lived before
    "America/Scoresbysund": 2024,  # to another zone on the day of its summer time
    "Antarctica/Casey": 2010,
    "Antarctica/Vostok": 1994,  # seven hours
    "Asia/Kolkata": 1945,
    "Asia/Manila": 1844,  # a whole day left out, and an offset with seconds
    "Asia/Pyongyang": 2015,
    "Australia/Lord_Howe": 1981,
    "Europe/Dublin": 1916,
    "Europe/London": 1941,  # double summer time
    "Europe/Moscow": 1919,
    "Europe/Warsaw": 1944,
    "Pacific/Apia": 2011,  # a whole day left out
    "Pacific/Enderbury": 1937,
    "Pacific/Kiritimati": 1994,
    "Pacific/Kwajalein": 1969,  # 23 hours twice; and 1993, a whole day left out
    "Pacific/Norfolk": 2015,
}


@dataclass
class Tally:
    """What was compared."""

    zones: set[str] = field(default_factory=set)
    changes: int = 0
    expressions: int = 0
    instants: int = 0
    neighbours: int = 0
    disagreements: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return (
            f"{len(self.zones)} zones, {self.changes} changes of clocks, "
            f"{self.expressions} expressions, {self.instants} instants there and back, "
            f"{self.neighbours} neighbours, {len(self.disagreements)} disagreements"
        )


class Place(NamedTuple):
    """Where to compare: around a change of a zone's clock, or somewhere in a zone without one."""

    zone: str
    change: Change


def between(schedule: Schedule, start: int, end: int) -> list[int]:
    """Scheduled times from start on and before end, in seconds."""
    found = []
    instant_ms = schedule.after(start * 1000 - 1)
    while instant_ms is not None and instant_ms < end * 1000:
        assert instant_ms % 1000 == 0
        found.append(instant_ms // 1000)
        following = schedule.after(instant_ms)
        assert following is None or following > instant_ms
        instant_ms = following
    return found


def backwards(schedule: Schedule, start: int, end: int) -> list[int]:
    """Return the same, found from the end."""
    found = []
    instant_ms = schedule.before(end * 1000)
    while instant_ms is not None and instant_ms >= start * 1000:
        found.append(instant_ms // 1000)
        earlier = schedule.before(instant_ms)
        assert earlier is None or earlier < instant_ms
        instant_ms = earlier
    return found[::-1]


def by_the_minute(last: datetime, rng: random.Random) -> Iterator[str]:
    """Yield expressions that have to do with a clock changed after it had shown a time."""
    hour, minute = last.hour, last.minute
    hours = [(hour + number) % 24 for number in range(-1, 4)]
    yield "* * * * *"
    yield f"*/{rng.choice((7, 15, 20, 30))} * * * *"
    yield f"*/{rng.choice((5, 15, 30))} {hours[2]} * * *"
    yield f"{rng.randrange(60)} */{rng.randrange(1, 24)} * * *"
    yield f"{rng.randrange(60)},{minute} * * * *"
    yield "0,30 0-23 * * *"
    yield f"{rng.randrange(60)} 0-23/{rng.randrange(1, 5)} * * *"
    for number in hours:
        yield f"{rng.choice((0, 15, 29, 30, 31, 59))} {number} * * *"
    yield f"{(minute + 1) % 60} {hours[rng.randrange(1, 4)]} * * *"
    yield f"0 {','.join(map(str, sorted({*hours[1:4]})))} * * *"
    day, weekday = last.day, last.isoweekday() % 7
    name = ("SUN", "Mon", "tue", "WED", "Thu", "fri", "Sat")[weekday]
    at = f"{rng.choice((0, 30, 59))} {hours[rng.randrange(1, 5)]}"
    week = (day - 1) // 7 + 1
    yield from (
        f"{at} {days}"
        for days in (
            f"{day} * *",
            f"{day}W * *",
            f"{max(1, day - 1)}W {last.month} ?",
            "L * *",
            f"L,{day} * ?",
            f"25-L {last.month} *",
            f"* * {weekday}#{week}",
            f"? * {name}#{min(5, week + 1)},L{weekday}",
            f"* {last.month} L{weekday or 7}",
            f"{(day + 11) % 28 + 1} * {weekday}",
            f"*/2 * {name}",
            f"{day}-31/3 {last.month} {weekday}-6",
            f"13,{day} */{rng.randrange(1, 7)} {rng.randrange(7)}-7/2",
            "1-31 * *",
        )
    )
    for _ in range(4):
        yield drawn(rng)


def by_the_second(last: datetime, rng: random.Random) -> Iterator[str]:
    hour = last.hour
    yield f"*/{rng.choice((10, 20, 30))} * * * * *"
    yield f"{rng.randrange(60)},59 {last.minute} {(hour + rng.randrange(2)) % 24} * * *"
    yield f"{rng.randrange(60)} */{rng.randrange(5, 60)} * * * *"
    yield f"1-59/{rng.randrange(15, 60)} 0-59/10 0-23 * * *"
    yield f"0 {rng.randrange(60)} {(hour + 1) % 24} ? * {last.isoweekday() % 7}"


def drawn(rng: random.Random) -> str:
    """Draw an expression of any kind."""

    def part(low: int, high: int) -> str:
        kind, a, b = rng.randrange(5), rng.randrange(low, high + 1), rng.randrange(low, high + 1)
        step = rng.randrange(1, high - low + 2)
        return (
            f"{a}",
            f"{min(a, b)}-{max(a, b)}",
            f"{min(a, b)}-{max(a, b)}/{step}",
            f"{a}/{step}",
            f"{low}-{high}",
        )[kind]

    def text(low: int, high: int) -> str:
        if rng.random() < 0.3:
            return rng.choice(("*", f"*/{rng.randrange(1, high - low + 2)}"))
        return ",".join(part(low, high) for _ in range(rng.choice((1, 1, 2))))

    days = text(1, 31) if rng.random() < 0.5 else "*"
    week = text(0, 6) if rng.random() < 0.5 else "*"
    return f"{text(0, 59)} {text(0, 23)} {days} * {week}"


def distinct_places() -> list[Place]:
    """Return one place for each kind of change: from where, to where, at which time of the day.

    And those of which the history of zones has more to tell.
    """
    found: dict[object, Place] = {}
    for zone in zone_names():
        changes = [change for change in changes_of(zone) if YEAR_2020 <= change.at < YEAR_2031]
        for change in changes:
            kind = (change.before, change.after, (change.at + change.before) % DAY)
            found.setdefault(kind, Place(zone, change))
    for zone, year in EXTREMES.items():
        for change in changes_of(zone):
            if shown(zone, change.at - 1).year in (year, 1993 if "Kwaj" in zone else year):
                found[zone, change.at] = Place(zone, change)
    return list(found.values())


def every_place(rng: random.Random) -> Iterator[Place]:
    """Yield every change of these years in every zone, and a day in each zone without one."""
    for zone in zone_names():
        changes = [change for change in changes_of(zone) if YEAR_2020 <= change.at < YEAR_2031]
        for change in changes:
            yield Place(zone, change)
        if not changes:
            earlier = [change.after for change in changes_of(zone) if change.at < YEAR_2020]
            offset = earlier[-1] if earlier else 0
            at = rng.randrange(YEAR_2020, YEAR_2031) // 60 * 60
            yield Place(zone, Change(at, offset, offset))


def historic_places() -> Iterator[Place]:
    """Yield every change that any zone has ever seen, one zone for all that saw the same."""
    seen: set[object] = set()
    for zone in zone_names():
        for change in changes_of(zone):
            near = tuple(other for other in changes_of(zone) if abs(other.at - change.at) < 5 * DAY)
            if near not in seen:
                seen.add(near)
                yield Place(zone, change)


class Campaign:
    """Compares, and keeps account.

    Args:
        seed: Decides which expressions are compared, and where they are looked at.
    """

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self.tally = Tally()

    def compare_all(self, places: Iterable[Place], *, share: float = 1.0) -> Tally:
        """Compare expressions at these places; a share of them where time is short."""
        for place in places:
            self.tally.zones.add(place.zone)
            self.tally.changes += bool(place.change.jump)
            last = shown(place.zone, place.change.at - 1)
            for texts, seconds in ((by_the_minute, False), (by_the_second, True)):
                for text in texts(last, self._rng):
                    if self._rng.random() < share:
                        self.compare(place, text, seconds=seconds)
        return self.tally

    def compare(self, place: Place, text: str, *, seconds: bool) -> None:
        zone, change = place
        around = 36 * HOUR + 2 * abs(change.jump)
        start, end = change.at - around, change.at + around
        step = 60
        if seconds or needs_seconds(zone, start, end):
            around = 2 * HOUR + abs(change.jump)
            start, end, step = change.at - around, change.at + around, 1
        reading = Reading(text)
        schedule = self._parsed(reading, zone)
        if schedule is None:
            return
        expected = scheduled(reading, watched(zone, start, end, step))
        start -= start % step
        tally = self.tally
        tally.expressions += 1
        tally.instants += len(expected)
        self._check(place, text, "after", between(schedule, start, end), expected)
        self._check(place, text, "before", backwards(schedule, start, end), expected)
        self._look_from_anywhere(place, schedule, (start, end), expected)

    def _look_from_anywhere(
        self, place: Place, schedule: Schedule, span: tuple[int, int], expected: list[int]
    ) -> None:
        """Look from instants in the span; what is outside it, nobody has watched."""
        at_ms, (start, end) = place.change.at * 1000, span
        looks = [at_ms - 1, at_ms, at_ms + 1]
        looks += [self._rng.randrange(start * 1000, end * 1000) for _ in range(4)]
        for instant_ms in looks:
            self.tally.neighbours += 2
            later = bisect_right(expected, instant_ms // 1000)
            earlier = bisect_left(expected, -(-instant_ms // 1000)) - 1
            after, before = schedule.after(instant_ms), schedule.before(instant_ms)
            if later < len(expected):
                self._check(
                    place, schedule.text, f"after {instant_ms}", after, expected[later] * 1000
                )
            elif after is not None and after < end * 1000:
                self._check(place, schedule.text, f"after {instant_ms}", after, None)
            if earlier >= 0:
                wanted = expected[earlier] * 1000
                self._check(place, schedule.text, f"before {instant_ms}", before, wanted)
            elif before is not None and before >= start * 1000:
                self._check(place, schedule.text, f"before {instant_ms}", before, None)
            if after is not None and before is not None:
                back, forth = schedule.before(after), schedule.after(before)
                hit = schedule.before(instant_ms + 1) == instant_ms
                self._check(place, schedule.text, "there", back, instant_ms if hit else before)
                self._check(place, schedule.text, "and back", forth, instant_ms if hit else after)
        middle = self._rng.randrange(start, end)
        parts = between(schedule, start, middle) + between(schedule, middle, end)
        self._check(place, schedule.text, f"in parts, {middle}", parts, expected)

    def _parsed(self, reading: Reading, zone: str) -> Optional[Schedule]:
        try:
            return parse_schedule(reading.text, zone)
        except ValueError as error:
            assert "ever has such a day" in str(error), reading.text  # noqa: PT017
            first = datetime(2000, 1, 1)  # noqa: DTZ001
            days = (first + timedelta(days=number) for number in range(28 * 366))
            if any(reading.right_day(day.date()) for day in days):
                self.tally.disagreements.append(f"{reading.text!r} is refused: {error}")
            return None

    def _check(self, place: Place, text: str, what: str, found: object, wanted: object) -> None:
        if found != wanted and len(self.tally.disagreements) < 100:
            if isinstance(found, list) and isinstance(wanted, list):
                only = sorted(set(found) ^ set(wanted))[:6]
                found, wanted = f"{len(found)} times", f"{len(wanted)}, they differ in {only}"
            self.tally.disagreements.append(
                f"{text!r} in {place.zone} around {place.change}, {what}: {found}, not {wanted}"
            )
