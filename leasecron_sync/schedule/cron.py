"""Cron expressions.

croniter says which values an expression names. Which times follow from them is worked out here and
in ``pattern``: the answer has to be the same forwards and backwards, from any start and from
several threads at once, and clock changes are treated as Debian's cron treats them.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any, NamedTuple, Optional

from leasecron_sync.schedule.pattern import DAY, Pattern
from leasecron_sync.schedule.wording import shown
from leasecron_sync.schedule.zones import EARLIEST, LATEST, Stretch, stretch_at

# Far above what people write; both bound the work that a text can cause. Blanks beyond one between
# two fields count for the second alone.
MAX_EXPRESSION = 255
MAX_TEXT = 10_000
# Nothing is made up after a longer jump of the local clock.
MAX_MADE_UP = 3 * 3600

_CACHED_PATTERNS = 1024
# More than any clock was ever set by.
_FAR = 2 * DAY
# Every kind of year comes within 28 years, or within 40 where a century leaves a leap day out. What
# does not come in this time falls into a gap each time it would come.
_HORIZON = 50 * 366 * DAY
# By then every zone keeps the rules that it has, as far as anybody knows them.
_SETTLED = 4_102_444_800  # 2100-01-01

_ALIASES = {
    "@hourly": "0 * * * *",
    "@daily": "0 0 * * *",
    "@midnight": "0 0 * * *",
    "@weekly": "0 0 * * 0",
    "@monthly": "0 0 1 * *",
    "@yearly": "0 0 1 1 *",
    "@annually": "0 0 1 1 *",
}


class _Field(NamedTuple):
    name: str
    lowest: int
    highest: int  # without the second number of Sunday, 7
    names: dict[str, int]
    ends: dict[str, int]  # names that mean something else as the end of a range


_MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
_WEEKDAYS = ("sun", "mon", "tue", "wed", "thu", "fri", "sat")
_HOUR = _Field("hour", 0, 23, {}, {})
_DAY_OF_MONTH = _Field("day of month", 1, 31, {}, {"l": 31})
_DAY_OF_WEEK = _Field("day of week", 0, 6, {day: n for n, day in enumerate(_WEEKDAYS)}, {"sun": 7})
_FIELDS = (
    _Field("second", 0, 59, {}, {}),
    _Field("minute", 0, 59, {}, {}),
    _HOUR,
    _DAY_OF_MONTH,
    _Field("month", 1, 12, {month: n for n, month in enumerate(_MONTHS, 1)}, {}),
    _DAY_OF_WEEK,
)

_ENTRY = re.compile(
    r"(?:\*|(?P<low>[0-9]+|[a-z]+)(?:-(?P<high>[0-9]+|[a-z]+))?)"
    r"(?:/(?P<step>[0-9]+)|(?P<nth>#[1-5]))?"
)
_FORMS = "write *, a value, a range such as 1-5, a list such as 1,5, or a step such as */5"
# What people bring along from other kinds of cron, and what to write here.
_HINTS = (
    (r"", "a list has an empty entry; write single commas between its values"),
    (r"[hr]([(/].*)?", "H and R stand for a value drawn by lot; write the value, or use jitter_ms"),
    (r".*\?.*", "? stands alone and for a day; write * or a value"),
    (r"[0-7]l", "the last weekday of its kind in a month is written L and number, such as L5"),
    (r"lw|wl", "there is no last working day; write L, or a day with W such as 31W"),
    (r"l-.*", "days are not counted from the end of the month; write L, or a range such as 25-31"),
    (r"-.*", "there are no negative values; write a value, or a range with both its ends"),
    (r".+#.*", "write a weekday and its number in the month, such as 1#2 for the second Monday"),
)


def _number(field: _Field, text: str) -> int:
    value = int(text) if text.isdigit() else field.names.get(text)
    highest = max(field.highest, *field.ends.values(), 0)
    if value is None or not field.lowest <= value <= highest:
        names = f" or a name ({', '.join(field.names)})" if field.names else ""
        message = f"there is no {text}; write a value from {field.lowest} to {highest}{names}"
        raise ValueError(message)
    return value


def _is_single(field: _Field, first: str, last: str) -> bool:
    """Tell whether a range holds a single value; refuses one that runs backwards."""
    low = _number(field, first)
    at_end = last in field.ends and first != last
    high = field.ends[last] if at_end else _number(field, last)
    if low > high:
        turned = f"{field.lowest}-{high}"
        turned = f"{low}-{field.highest},{turned}" if low <= field.highest else turned
        message = f"range {first}-{last} runs backwards; write {turned}"
        raise ValueError(message)
    return low == high


def _check_entry(field: _Field, entry: str) -> str:
    """Return an entry of a list as croniter is to read it; a ValueError tells what to write."""
    if field is _DAY_OF_MONTH and (day := re.fullmatch(r"w([0-9]+)|([0-9]+)w", entry)):
        _number(field, day[1] or day[2])
        return entry
    if entry == "l" and field is _DAY_OF_MONTH:
        return entry
    if field is _DAY_OF_WEEK and re.fullmatch(r"l[0-9]", entry):
        _number(field, entry[1:])
        return entry
    match = _ENTRY.fullmatch(entry)
    if match is None:
        raise ValueError(_FORMS)
    low, high, step, nth = match["low"], match["high"], match["step"], match["nth"]
    # croniter takes a range with # by names alone.
    if nth and (field is not _DAY_OF_WEEK or not low or (high and re.search("[0-9].*#", entry))):
        raise ValueError(_FORMS)
    size = field.highest - field.lowest + 1
    if step and not 1 <= int(step) <= size:
        message = f"step {step} does not fit; write 1 to {size}, or use every(seconds=...)"
        raise ValueError(message)
    if low and not high:
        # Below version 7 croniter reads 59/5 as */5; every version reads 7/5, for Sunday, as 0/5.
        return low if _number(field, low) >= field.highest and step else entry
    # croniter reads a range of one value as the whole field.
    return low + (nth or "") if high and _is_single(field, low, high) else entry


def _check_field(field: _Field, text: str) -> str:
    if not text.isascii():
        message = "only ASCII characters are read; write digits from 0 to 9"
        raise ValueError(message)
    if text == "?" and field in (_DAY_OF_MONTH, _DAY_OF_WEEK):
        return text
    entries = text.lower().split(",")
    special = re.compile("w" if field is _DAY_OF_MONTH else "^l|#")
    found = sum(bool(special.search(entry)) for entry in entries)
    checked = [_hinted(field, entry) for entry in entries]
    if found and len(entries) > (found if field is _DAY_OF_WEEK else 1):
        message = "W, # and L5 do not go with other days in one list; write two jobs"
        raise ValueError(message)
    return ",".join(checked)


def _hinted(field: _Field, entry: str) -> str:
    try:
        return _check_entry(field, entry)
    except ValueError as error:
        hints = (hint for pattern, hint in _HINTS if re.fullmatch(pattern, entry))
        raise ValueError(next(hints, str(error))) from None


def _split(expression: str) -> list[str]:
    """Return the fields of an expression as the user wrote them, always with the second first."""
    if len(expression) > MAX_EXPRESSION:
        message = (
            f"cron expression {shown(expression)} has over {MAX_EXPRESSION} characters; write a "
            "range"
        )
        raise ValueError(message)
    alias = _ALIASES.get(expression.lower())
    if alias is None and expression.startswith("@"):
        message = (
            f"cron expression {shown(expression)} is not known; write one of "
            f"{', '.join(_ALIASES)}, or the fields themselves, or use every(seconds=...); the "
            "start of a machine or of an application is no scheduled time"
        )
        raise ValueError(message)
    fields = (alias or expression).split(" ")
    if len(fields) == len(_FIELDS) - 1:
        return ["0", *fields]
    if len(fields) != len(_FIELDS):
        message = (
            f"cron expression {shown(expression)} has {len(fields) if expression else 0} fields; "
            "write five (minute, hour, day of month, month, day of week) or six with the second "
            "in front; there is no year"
        )
        raise ValueError(message)
    return fields


def _refusal(expression: str, field: _Field, text: str, reason: object) -> ValueError:
    return ValueError(f"cron expression {shown(expression)}: {field.name} {shown(text)}: {reason}")


def _check(expression: str, field: _Field, text: str) -> str:
    try:
        return _check_field(field, text)
    except ValueError as error:
        raise _refusal(expression, field, text, error) from None


@lru_cache(maxsize=_CACHED_PATTERNS)
def _read(fields: tuple[str, ...]) -> Pattern:
    # The import takes 40 ms, which a process without cron expressions need not pay.
    from croniter import croniter  # noqa: PLC0415

    read: Any = croniter(" ".join(fields[1:]), 0.0)
    minutes, hours, days, months, weekdays = (
        _bits(values, field) for values, field in zip(read.expanded, _FIELDS[1:])
    )
    seconds = 1
    if fields[0] != "0":
        # On their own, as if they were minutes: with six fields croniter 6 refuses 7 for Sunday.
        seconds = _bits(croniter(f"{fields[0]} * * * *", 0.0).expanded[0], _FIELDS[0])
    ordinals: dict[int, int] = {}
    for weekday, numbers in read.nth_weekday_of_month.items():
        for number in numbers:
            key = 0 if number == "l" else number
            ordinals[key] = ordinals.get(key, 0) | 1 << weekday
    return Pattern(
        seconds=seconds,
        minutes=minutes,
        hours=hours,
        days=0 if read.nearest_weekday else days,
        months=months,
        weekdays=0 if ordinals else weekdays,
        last_day="l" in read.expanded[2],
        nearest=tuple(read.nearest_weekday),
        ordinals=tuple(ordinals.items()),
        either_day=fields[3][0] not in "*?" and fields[5][0] not in "*?",
    )


def _bits(values: list[Any], field: _Field) -> int:
    if "*" in values:
        return (2 << field.highest) - (1 << field.lowest)
    return sum(1 << value for value in values if value != "l")


class CronSchedule:
    """The scheduled times of a cron expression in a time zone.

    An expression whose minute and hour do not begin with ``*`` names fixed times: what falls into
    a gap of up to three hours is made up once, right after the gap, and where the clock repeats
    only the first pass counts. Any other expression matches whatever the clock shows, as often as
    it shows it.
    """

    __slots__ = ("_fixed", "_pattern", "text", "timezone")

    def __init__(self, expression: str, timezone: str) -> None:
        """Read an expression.

        Args:
            expression: Five fields, six with the second first, or an alias such as ``@daily``.
            timezone: A checked name of a zone.

        Raises:
            ValueError: The expression is invalid or can never match.
        """
        if len(expression) > MAX_TEXT:
            message = (
                f"cron expression {shown(expression[:MAX_TEXT])} has over {MAX_TEXT:,} characters, "
                "blanks included; write it without those that do not count"
            )
            raise ValueError(message)
        self.text = " ".join(re.findall(r"[^ \t\r\n]+", expression))
        self.timezone = timezone
        fields = tuple(
            _check(self.text, field, text) for field, text in zip(_FIELDS, _split(self.text))
        )
        self._fixed = fields[1][0] != "*" and fields[2][0] != "*"
        self._pattern = _read(fields)
        if not self._pattern.ever_matches():
            reason = (
                f"no month of {fields[4]!r} ever has such a day; write one that it has, L for its "
                "last, or a day of week that can fall on it"
            )
            raise _refusal(self.text, _DAY_OF_MONTH, fields[3], reason)
        # Fixed times are made up for, and no zone skips more than that again and again.
        if timezone != "UTC" and not self._fixed and self.after(_SETTLED * 1000) is None:
            reason = (
                f"each such time falls into the hour that clocks in {timezone} skip; write another "
                "hour, or fixed times without *, which are made up for right after it"
            )
            raise _refusal(self.text, _HOUR, fields[2], reason)

    def __repr__(self) -> str:
        return f"CronSchedule({self.text!r}, {self.timezone!r})"

    def after(self, instant_ms: int) -> Optional[int]:
        """Return the first scheduled time strictly after an instant."""
        at = max(instant_ms // 1000 + 1, EARLIEST)
        last = min(at + _HORIZON, LATEST)
        while at <= last:
            stretch = stretch_at(self.timezone, at)
            if at == stretch.start and self._makes_up(stretch):
                return at * 1000
            local = at + stretch.offset
            found = self._pattern.first(max(local, stretch.reached) if self._fixed else local)
            if found is None:
                return None
            hit = found - stretch.offset
            if hit < stretch.end:
                return hit * 1000 if hit <= LATEST else None
            # Two days on, no change of the clock leads back below `local`, and nothing matches
            # before `found`. Without the leap a rare date costs every stretch on the way to it.
            leap = hit - _FAR if stretch.end - at > _FAR else at
            at = max(stretch.end, leap)
        return None

    def before(self, instant_ms: int) -> Optional[int]:
        """Return the last scheduled time strictly before an instant."""
        end = min(-(-instant_ms // 1000), LATEST + 1)
        first = max(end - _HORIZON, EARLIEST)
        while end > first:
            stretch = stretch_at(self.timezone, end - 1)
            found = self._pattern.last(end - 1 + stretch.offset)
            lowest = stretch.start + stretch.offset
            if self._fixed:
                lowest = max(lowest, stretch.reached)
            if found is not None and found >= lowest:
                hit = found - stretch.offset
                return hit * 1000 if hit >= EARLIEST else None
            if self._makes_up(stretch):
                return stretch.start * 1000
            if found is None:
                return None
            leap = found - stretch.offset + _FAR if end - stretch.start > _FAR else end
            end = min(stretch.start, leap)
        return None

    def _makes_up(self, stretch: Stretch) -> bool:
        """Tell whether a time fell into the gap with which a stretch begins."""
        if not self._fixed or not 0 < stretch.skipped <= MAX_MADE_UP:
            return False
        opening = stretch.start + stretch.offset
        found = self._pattern.first(opening - stretch.skipped)
        return found is not None and found < opening
