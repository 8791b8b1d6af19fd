"""The times that a cron expression names on a wall clock.

Local times are whole seconds since 1970-01-01 00:00 on that clock: nothing here knows a zone or an
instant. Sets of numbers are the bits of an int, bit n for the number n, so that the next number is
found without a loop and ten thousand patterns need little memory.
"""

from __future__ import annotations

import calendar
from dataclasses import dataclass
from datetime import date
from typing import Optional

DAY = 86_400

_EPOCH_DAY = date(1970, 1, 1).toordinal()
_FIRST_DAY = date.min.toordinal() - _EPOCH_DAY
_LAST_DAY = date.max.toordinal() - _EPOCH_DAY
# 28 years without a skipped leap day show every month in every length and with every first weekday.
_ALL_KINDS_OF_YEARS = range(2000, 2028)
# Bits 0, 7, 14, ...: times a set of weekdays this is the same set in each of six weeks.
_SIX_WEEKS = sum(1 << 7 * week for week in range(6))
_WEEK = 0x7F


@dataclass(frozen=True)
class Pattern:
    """Which seconds, minutes, hours, days and months a wall clock must show."""

    seconds: int
    minutes: int
    hours: int
    days: int
    months: int
    weekdays: int  # 0 is Sunday
    last_day: bool = False
    nearest: tuple[int, ...] = ()  # days of which the nearest working day is meant
    ordinals: tuple[tuple[int, int], ...] = ()  # (n, weekdays): the n-th in the month, 0 the last
    either_day: bool = False  # day of month or day of week is enough

    def ever_matches(self) -> bool:
        """Tell whether any day matches, for all time to come."""
        return any(
            self.months >> month & 1 and self.days_of(year, month)
            for year in _ALL_KINDS_OF_YEARS
            for month in range(1, 13)
        )

    def first(self, local: int) -> Optional[int]:
        """Return the first matching time at or after a local time."""
        day, second = divmod(local, DAY)
        clock = self._clock_from(second)
        found = self._day_from(day if clock is not None else day + 1)
        if found is None:
            return None
        if clock is None or found != day:
            clock = self._clock_from(0)
        assert clock is not None
        return found * DAY + clock

    def last(self, local: int) -> Optional[int]:
        """Return the last matching time at or before a local time."""
        day, second = divmod(local, DAY)
        clock = self._clock_until(second)
        found = self._day_until(day if clock is not None else day - 1)
        if found is None:
            return None
        if clock is None or found != day:
            clock = self._clock_until(DAY - 1)
        assert clock is not None
        return found * DAY + clock

    def days_of(self, year: int, month: int) -> int:
        """Return the days of a month that match."""
        first, length = calendar.monthrange(year, month)
        whole = (2 << length) - 2
        days = self.days | (1 << length if self.last_day else 0)
        for day in self.nearest:
            days |= 1 << _nearest_working_day(first, length, min(day, length))
        # monthrange() counts from Monday and the first day is 1: shifted by its weekday, a set that
        # is repeated every week lies on the right days.
        weekdays = self.weekdays * _SIX_WEEKS >> first
        for number, bits in self.ordinals:
            week = _WEEK << (7 * number - 6 if number else length - 6)
            weekdays |= bits * _SIX_WEEKS >> first & week
        return whole & (days | weekdays if self.either_day else days & weekdays)

    def _day_from(self, day: int) -> Optional[int]:
        if day > _LAST_DAY:
            return None
        start = date.fromordinal(max(day, _FIRST_DAY) + _EPOCH_DAY)
        lowest = start.day
        for count in range(_months_to(start), _months_to(date.max) + 1):
            year, month = count // 12, count % 12 + 1
            if self.months >> month & 1 and (days := self.days_of(year, month) >> lowest):
                found = date(year, month, lowest + _low_bit(days))
                return found.toordinal() - _EPOCH_DAY
            lowest = 1
        return None

    def _day_until(self, day: int) -> Optional[int]:
        if day < _FIRST_DAY:
            return None
        start = date.fromordinal(min(day, _LAST_DAY) + _EPOCH_DAY)
        highest = start.day
        for count in range(_months_to(start), _months_to(date.min) - 1, -1):
            year, month = count // 12, count % 12 + 1
            if self.months >> month & 1:
                days = self.days_of(year, month) & (2 << highest) - 1
                if days:
                    return date(year, month, _high_bit(days)).toordinal() - _EPOCH_DAY
            highest = 31
        return None

    def _clock_from(self, second: int) -> Optional[int]:
        hour, rest = divmod(second, 3600)
        minute, rest = divmod(rest, 60)
        if self.hours >> hour & 1:
            if self.minutes >> minute & 1 and (later := self.seconds >> rest):
                return second + _low_bit(later)
            if later := self.minutes >> minute + 1:
                minute += 1 + _low_bit(later)
                return hour * 3600 + minute * 60 + _low_bit(self.seconds)
        if later := self.hours >> hour + 1:
            hour += 1 + _low_bit(later)
            return hour * 3600 + _low_bit(self.minutes) * 60 + _low_bit(self.seconds)
        return None

    def _clock_until(self, second: int) -> Optional[int]:
        hour, rest = divmod(second, 3600)
        minute, rest = divmod(rest, 60)
        if self.hours >> hour & 1:
            if self.minutes >> minute & 1 and (earlier := self.seconds & (2 << rest) - 1):
                return hour * 3600 + minute * 60 + _high_bit(earlier)
            if earlier := self.minutes & (1 << minute) - 1:
                return hour * 3600 + _high_bit(earlier) * 60 + _high_bit(self.seconds)
        if earlier := self.hours & (1 << hour) - 1:
            minute = _high_bit(self.minutes)
            return _high_bit(earlier) * 3600 + minute * 60 + _high_bit(self.seconds)
        return None


def _nearest_working_day(first: int, length: int, day: int) -> int:
    """Return the day from Monday to Friday of the same month that lies nearest."""
    weekday = (first + day - 1) % 7
    if weekday == calendar.SATURDAY:
        return day - 1 if day > 1 else day + 2
    if weekday == calendar.SUNDAY:
        return day + 1 if day < length else day - 2
    return day


def _months_to(day: date) -> int:
    return day.year * 12 + day.month - 1


def _low_bit(bits: int) -> int:
    return (bits & -bits).bit_length() - 1


def _high_bit(bits: int) -> int:
    return bits.bit_length() - 1
