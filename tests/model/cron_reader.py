"""An own, slow reading of cron expressions: what one reading of a wall clock says to them.

It is written after the description of the expressions alone and shares nothing with the library:
no field is checked, sets are sets, and days are tried one by one with a calendar in the hand.
"""

from __future__ import annotations

import calendar
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import date, datetime, timedelta

MONTHS = ["", *(calendar.month_abbr[number].lower() for number in range(1, 13))]
WEEKDAYS = ["sun", "mon", "tue", "wed", "thu", "fri", "sat", "sun"]
SATURDAY, SUNDAY = 6, 7


def number_of(text: str, names: list[str]) -> int:
    return names.index(text) if text in names else int(text)


def numbers(text: str, low: int, high: int, names: list[str]) -> set[int]:
    """Return what a list of values, ranges and steps names."""
    found: set[int] = set()
    for entry in text.split(","):
        span, _, step = entry.partition("/")
        if span in ("*", "?"):
            first, last = low, high
        elif "-" in span:
            begin, end = span.split("-")
            first = number_of(begin, names)
            last = first if begin == end else _end_of(end, names, high)
        else:
            first = number_of(span, names)
            last = max(first, high) if step else first  # 7 is Sunday, and the last one
        found |= set(range(first, last + 1, int(step or 1)))
    return found


def _end_of(text: str, names: list[str], high: int) -> int:
    if text == "l":
        return high
    # A week may be written from Monday to Sunday.
    return SUNDAY if text == "sun" and names is WEEKDAYS else number_of(text, names)


@dataclass
class Reading:
    """One expression."""

    text: str
    fixed: bool = field(init=False)
    seconds: set[int] = field(init=False)
    minutes: set[int] = field(init=False)
    hours: set[int] = field(init=False)
    months: set[int] = field(init=False)
    _known: dict[date, bool] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        parts = self.text.lower().split()
        if len(parts) == 5:
            parts = ["0", *parts]
        second, minute, hour, self._day, month, self._weekday = parts
        self.seconds = numbers(second, 0, 59, [])
        self.minutes = numbers(minute, 0, 59, [])
        self.hours = numbers(hour, 0, 23, [])
        self.months = numbers(month, 1, 12, MONTHS)
        self.fixed = not minute.startswith("*") and not hour.startswith("*")

    @property
    def whole_minutes(self) -> bool:
        return self.seconds == {0}

    def right_day(self, day: date) -> bool:
        """Tell whether a day is named, by month, day of month and day of week."""
        known = self._known.get(day)
        if known is None:
            known = self._known[day] = day.month in self.months and self._named(day)
        return known

    def matches(self, shown: datetime) -> bool:
        return (
            shown.minute in self.minutes
            and shown.hour in self.hours
            and shown.second in self.seconds
            and self.right_day(shown.date())
        )

    def times_of(self, day: date) -> Iterator[datetime]:
        """Yield every time of a day that is named, in order."""
        if self.right_day(day):
            for hour in sorted(self.hours):
                for minute in sorted(self.minutes):
                    for second in sorted(self.seconds):
                        yield datetime(day.year, day.month, day.day, hour, minute, second)  # noqa: DTZ001

    def _named(self, day: date) -> bool:
        by_day = any(_is_day(entry, day) for entry in self._day.split(","))
        by_week = any(_is_weekday(entry, day) for entry in self._weekday.split(","))
        if self._day[0] in "*?" or self._weekday[0] in "*?":
            return by_day and by_week
        return by_day or by_week


def _last_of(day: date) -> int:
    return calendar.monthrange(day.year, day.month)[1]


def _is_day(entry: str, day: date) -> bool:
    if entry == "l":
        return day.day == _last_of(day)
    if "w" in entry:
        wanted = day.replace(day=min(int(entry.strip("w")), _last_of(day)))
        return day == _working_day(wanted)
    return day.day in numbers(entry, 1, 31, [])


def _working_day(day: date) -> date:
    """Return the nearest day from Monday to Friday in the same month."""
    for distance in (0, 1, -1, 2, -2):
        # From a Saturday the Friday is nearer, from a Sunday the Monday.
        sign = -1 if day.isoweekday() == SATURDAY else 1
        near = day + timedelta(days=sign * distance)
        if near.month == day.month and near.isoweekday() < SATURDAY:
            return near
    raise AssertionError(day)


def _is_weekday(entry: str, day: date) -> bool:
    span, _, nth = entry.partition("#")
    if span[0] == "l":  # the last of its kind in the month
        last = day.day + 7 > _last_of(day)
        return last and int(span[1:]) % 7 == day.isoweekday() % 7
    right = {number % 7 for number in numbers(span, 0, 6, WEEKDAYS)}
    return day.isoweekday() % 7 in right and (not nth or (day.day - 1) // 7 + 1 == int(nth))
