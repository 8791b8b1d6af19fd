"""Generated schedules against a slow evaluator that walks every minute.

Its values are generated together with the texts, so nothing has to be read there. The zones of the
world are in ``test_every_zone``, texts of any kind in ``test_any_text``.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from typing import NamedTuple, Optional
from zoneinfo import ZoneInfo

import pytest
from croniter import CroniterBadDateError, croniter
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from leasecron_sync.schedule import Schedule, at, every, parse_schedule
from tests.model.schedule_campaign import backwards, between

MINUTE = 60
DAY = 86_400
YEAR_2020, YEAR_2031 = 1_577_836_800, 1_924_992_000
BOUNDED = settings(
    max_examples=150,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
# Half an hour, two hours, three hours, midnight, Ramadan, negative summer time, no change at all.
ZONES = (
    "Africa/Cairo",
    "Africa/Casablanca",
    "America/Havana",
    "America/New_York",
    "America/Nuuk",
    "America/Santiago",
    "America/Sao_Paulo",
    "Antarctica/Casey",
    "Antarctica/Troll",
    "Asia/Amman",
    "Asia/Beirut",
    "Asia/Gaza",
    "Asia/Kathmandu",
    "Asia/Tehran",
    "Atlantic/Azores",
    "Australia/Lord_Howe",
    "Europe/Athens",
    "Europe/Dublin",
    "Pacific/Apia",
    "Pacific/Chatham",
    "UTC",
)


class Values(NamedTuple):
    """A field as it is written, and what it means."""

    text: str
    values: frozenset[int]

    @property
    def star(self) -> bool:
        return self.text.startswith("*")


@dataclass(frozen=True)
class Expression:
    minute: Values
    hour: Values
    day: Values
    month: Values
    weekday: Values

    @property
    def text(self) -> str:
        return " ".join(
            field.text for field in (self.minute, self.hour, self.day, self.month, self.weekday)
        )

    @property
    def fixed(self) -> bool:
        return not self.minute.star and not self.hour.star

    def matches(self, local: datetime) -> bool:
        by_day = local.day in self.day.values
        by_weekday = local.isoweekday() % 7 in self.weekday.values
        if self.day.star or self.weekday.star:
            right_day = by_day and by_weekday
        else:
            right_day = by_day or by_weekday
        return (
            local.minute in self.minute.values
            and local.hour in self.hour.values
            and local.month in self.month.values
            and right_day
        )


class Local(NamedTuple):
    instant: int
    shown: datetime


@functools.cache
def clock(zone: str, start: int, end: int) -> list[Local]:
    """What a clock on the wall shows, minute by minute."""
    info = ZoneInfo(zone)
    return [
        Local(instant, datetime.fromtimestamp(instant, info).replace(tzinfo=None))
        for instant in range(start, end, MINUTE)
    ]


def slow(expression: Expression, minutes: list[Local]) -> list[int]:
    """Scheduled times by the rules of Debian's cron, as a daemon would come by them."""
    if not expression.fixed:
        return [instant for instant, shown in minutes if expression.matches(shown)]
    found = []
    step = timedelta(minutes=1)
    reached = minutes[0].shown - step
    for instant, shown in minutes:
        jump = shown - reached
        if jump <= timedelta(0):
            continue  # shown before
        due = expression.matches(shown)
        if jump > step and jump - step <= timedelta(hours=3):
            skipped = (reached + step * n for n in range(1, jump // step))
            due = due or any(expression.matches(moment) for moment in skipped)
        if due:
            found.append(instant)
        reached = shown
    return found


@functools.cache
def changes(zone: str) -> list[int]:
    """Instants between 2020 and 2030 at which a zone changes its offset."""
    info = ZoneInfo(zone)

    def offset(instant: int) -> Optional[timedelta]:
        return datetime.fromtimestamp(instant, info).utcoffset()

    found = []
    for start in range(YEAR_2020, YEAR_2031, 2 * DAY):
        low, high = start, start + 2 * DAY
        if offset(low) == offset(high):
            continue
        while high - low > 1:
            middle = (low + high) // 2
            if offset(middle) == offset(start):
                low = middle
            else:
                high = middle
        found.append(high)
    return found


def fields(low: int, high: int) -> st.SearchStrategy[Values]:
    whole = range(low, high + 1)

    def spread(a: int, b: int, step: int) -> Values:
        a, b = min(a, b), max(a, b)
        text = f"{a}-{b}" if step == 1 else f"{a}-{b}/{step}"
        return Values(text, frozenset(range(a, b + 1, step)))

    value = st.integers(low, high)
    step = st.integers(1, high - low + 1)
    single = st.builds(lambda a: Values(f"{a}", frozenset([a])), value)
    part = st.one_of(
        single,
        st.builds(spread, value, value, st.just(1)),
        st.builds(spread, value, value, step),
        st.builds(lambda a, s: Values(f"{a}/{s}", frozenset(whole[a - low :: s])), value, step),
    )
    several = st.builds(
        lambda parts: Values(
            ",".join(one.text for one in parts), frozenset().union(*(one.values for one in parts))
        ),
        st.lists(part, min_size=1, max_size=3),
    )
    star = st.just(Values("*", frozenset(whole)))
    stepped = st.builds(lambda s: Values(f"*/{s}", frozenset(whole[::s])), step)
    return st.one_of(star, stepped, several)


# Hours around which clocks are changed, so that most expressions have to do with it.
HOURS = st.one_of(
    st.sampled_from(
        [
            Values("0", frozenset([0])),
            Values("1-3", frozenset([1, 2, 3])),
            Values("2", frozenset([2])),
            Values("3", frozenset([3])),
            Values("0,23", frozenset([0, 23])),
        ]
    ),
    fields(0, 23),
)
EVERY_MONTH = st.just(Values("*", frozenset(range(1, 13))))
EXPRESSIONS = st.builds(
    Expression,
    minute=fields(0, 59),
    hour=HOURS,
    day=st.one_of(st.just(Values("*", frozenset(range(1, 32)))), fields(1, 31)),
    month=st.one_of(EVERY_MONTH, EVERY_MONTH, fields(1, 12)),
    weekday=st.one_of(st.just(Values("*", frozenset(range(7)))), fields(0, 6)),
)


def parsed(expression: Expression, zone: str) -> Optional[Schedule]:
    try:
        return parse_schedule(expression.text, zone)
    except ValueError as error:
        assert "day of month" in str(error), expression.text  # noqa: PT017
        first = datetime(2000, 1, 1, min(expression.hour.values), min(expression.minute.values))  # noqa: DTZ001
        impossible = all(not expression.matches(first + timedelta(days=n)) for n in range(28 * 366))
        assert impossible, expression.text
        return None


@BOUNDED
@given(data=st.data(), zone=st.sampled_from(ZONES), expression=EXPRESSIONS)
def test_around_changes_of_the_clock(
    data: st.DataObject, zone: str, expression: Expression
) -> None:
    schedule = parsed(expression, zone)
    if schedule is None:
        return
    change = data.draw(st.sampled_from(changes(zone) or [YEAR_2020 + 100 * DAY]))
    change -= change % MINUTE
    start, end = change - 2 * DAY, change + 2 * DAY
    # The evaluator starts a day earlier: it must have seen what is repeated later.
    expected = [
        instant for instant in slow(expression, clock(zone, start - DAY, end)) if instant >= start
    ]
    assert between(schedule, start, end) == expected, expression.text
    assert backwards(schedule, start, end) == expected, expression.text


@BOUNDED
@given(
    zone=st.sampled_from(ZONES),
    expression=EXPRESSIONS,
    start=st.integers(YEAR_2020, YEAR_2031),
    lengths=st.tuples(st.integers(0, 3 * DAY), st.integers(0, 3 * DAY)),
    offset_ms=st.integers(0, 3 * DAY * 1000),
)
def test_no_matter_where_one_starts(
    zone: str, expression: Expression, start: int, lengths: tuple[int, int], offset_ms: int
) -> None:
    schedule = parsed(expression, zone)
    if schedule is None:
        return
    middle = start + lengths[0]
    end = middle + lengths[1]
    whole = between(schedule, start, end)
    assert whole == between(schedule, start, middle) + between(schedule, middle, end)
    assert whole == backwards(schedule, start, end)
    # From any millisecond both neighbours are those of the sequence.
    instant_ms = start * 1000 + offset_ms
    after, before = schedule.after(instant_ms), schedule.before(instant_ms)
    if after is not None and before is not None:
        assert before < instant_ms < after
        assert schedule.before(after) in (before, instant_ms)
        assert schedule.after(before) in (after, instant_ms)
        assert schedule.before(after + 1) == after
        assert schedule.after(before - 1) == before


@BOUNDED
@given(
    period=st.integers(1, 100 * DAY),
    moment=st.integers(YEAR_2020, YEAR_2031),
    start=st.integers(YEAR_2020, YEAR_2031),
    lengths=st.tuples(st.integers(0, 100), st.integers(0, 100)),
)
def test_every_and_at_add_up(
    period: int, moment: int, start: int, lengths: tuple[int, int]
) -> None:
    once = at(datetime.fromtimestamp(moment, timezone.utc))
    schedules: list[Schedule] = [every(seconds=period), once]
    for schedule in schedules:
        middle = start + lengths[0] * period
        end = middle + lengths[1] * period
        whole = between(schedule, start, end)
        assert whole == between(schedule, start, middle) + between(schedule, middle, end)
        assert whole == backwards(schedule, start, end)


def extensions() -> st.SearchStrategy[tuple[str, str]]:
    """Day of month and day of week, one of them a star, in the forms that only croniter has."""
    week = st.integers(0, 6)
    by_day = st.one_of(
        st.sampled_from(["L", "25-L", "L,1", "15,L"]),
        st.builds("{}W".format, st.integers(1, 31)),
        st.builds("W{}".format, st.integers(1, 31)),
    )
    by_week = st.one_of(
        st.builds("L{}".format, week),
        st.builds("{}#{}".format, week, st.integers(1, 5)),
        st.builds("{}#{},L{}".format, week, st.integers(1, 5), week),
        st.sampled_from(["MON-FRI#1", "fri-sun#2", "sat,sun", "TUE-THU", "5-7", "1-7/2"]),
    )
    return st.one_of(
        st.tuples(by_day, st.sampled_from("*?")), st.tuples(st.sampled_from("*?"), by_week)
    )


def spelled_out(field: Values) -> tuple[str, str]:
    """A field, and the same without what croniter's versions read in different ways."""
    return field.text, field.text if field.star else ",".join(map(str, sorted(field.values)))


PLAIN_DAYS = st.tuples(fields(1, 31).map(spelled_out), fields(0, 6).map(spelled_out))
SPECIAL_DAYS = extensions().map(lambda days: tuple((day, day) for day in days))


@BOUNDED
@given(
    days=st.one_of(PLAIN_DAYS, SPECIAL_DAYS),
    month=fields(1, 12).map(spelled_out),
    start=st.integers(YEAR_2020, YEAR_2031),
)
def test_days_are_those_of_croniter(
    days: tuple[tuple[str, str], tuple[str, str]], month: tuple[str, str], start: int
) -> None:
    text, spelled = (f"30 6 {days[0][n]} {month[n]} {days[1][n]}" for n in (0, 1))
    try:
        schedule = parse_schedule(text, "UTC")
    except ValueError as error:
        assert "ever has such a day" in str(error), text  # noqa: PT017
        return
    theirs = croniter(spelled, float(start), implement_cron_bug=True)
    found = start * 1000
    for _ in range(10):
        after = schedule.after(found)
        assert after is not None
        found = after
        try:
            assert found == theirs.get_next() * 1000, text
        except CroniterBadDateError:
            pytest.fail(text)


@settings(BOUNDED, max_examples=1000)
@given(st.text(alphabet="0123456789*/-,#?LWRHlwsunmonjafebMARtehrid @\u0663\x00", max_size=30))
def test_any_text_is_read_or_refused_in_words(text: str) -> None:
    try:
        schedule = parse_schedule(text, "UTC")
    except ValueError as error:
        assert type(error) is ValueError, text  # noqa: PT017
        assert str(error).startswith("cron expression "), text  # noqa: PT017
    else:
        after = schedule.after(YEAR_2020 * 1000)
        assert after is not None
        assert schedule.before(after + 1) == after


TOKENS = [
    "0",
    "1",
    "7",
    "31",
    "59",
    "60",
    "*",
    "/",
    "-",
    ",",
    "#",
    "L",
    "W",
    "?",
    "sun",
    "feb",
    "h",
]


@settings(BOUNDED, max_examples=1000)
@given(
    place=st.integers(0, 5),
    field=st.lists(st.sampled_from(TOKENS), min_size=1, max_size=5).map("".join),
)
def test_any_field_is_read_or_refused_by_name(place: int, field: str) -> None:
    names = ["second", "minute", "hour", "day of month", "month", "day of week"]
    fields = ["*"] * 6
    fields[place] = field
    try:
        schedule = parse_schedule(" ".join(fields), "UTC")
    except ValueError as error:
        assert type(error) is ValueError, field  # noqa: PT017
        assert f": {names[place]} {field!r}: " in str(error)  # noqa: PT017
    else:
        assert schedule.after(0) is not None
