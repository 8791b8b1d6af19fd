from __future__ import annotations

from datetime import datetime, timedelta, timezone, tzinfo
from typing import Optional, cast
from zoneinfo import ZoneInfo

import pytest

from leasecron_sync.schedule import (
    At,
    Every,
    Schedule,
    at,
    every,
    fingerprint,
    jitter_of,
    parse_schedule,
)
from leasecron_sync.schedule.fixed import MAX_EVERY_SECONDS

NEW_YEAR = datetime(2026, 1, 1, tzinfo=timezone.utc)
NEW_YEAR_MS = 1_767_225_600_000


@pytest.mark.parametrize("seconds", [1, 7, 10, 60, 86_400, MAX_EVERY_SECONDS])
@pytest.mark.parametrize("instant_ms", [0, 1, -1, 999, NEW_YEAR_MS, NEW_YEAR_MS + 1, -NEW_YEAR_MS])
def test_every_is_aligned_to_the_epoch(seconds: int, instant_ms: int) -> None:
    schedule = every(seconds=seconds)
    after, before = schedule.after(instant_ms), schedule.before(instant_ms)
    assert after is not None
    assert before is not None
    assert before < instant_ms < after
    assert after % (seconds * 1000) == before % (seconds * 1000) == 0
    assert after - before in (seconds * 1000, 2 * seconds * 1000)
    assert schedule.before(after) == (instant_ms if instant_ms % (seconds * 1000) == 0 else before)


def test_each_period_comes_once_to_a_clock_that_wakes_early() -> None:
    schedule = every(seconds=1)
    seen = [NEW_YEAR_MS]
    for _ in range(300):
        hit = schedule.after(seen[-1])
        assert hit is not None
        assert schedule.after(hit - 2) == hit
        seen.append(hit)
    assert seen == list(range(NEW_YEAR_MS, NEW_YEAR_MS + 301_000, 1000))


@pytest.mark.parametrize(
    "seconds", [0, -1, MAX_EVERY_SECONDS + 1, 10**100, 10**4_000, -(10**9_000)], ids=range(6)
)
def test_period_out_of_bounds_is_refused(seconds: int) -> None:
    with pytest.raises(ValueError, match="must lie between 1 and") as caught:
        every(seconds=seconds)
    assert len(str(caught.value)) < 250


@pytest.mark.parametrize("seconds", [True, False, 1.0, 0.5, "10", None, timedelta(seconds=1)])
def test_period_that_is_no_whole_number_is_refused(seconds: object) -> None:
    with pytest.raises(TypeError, match="whole number of seconds"):
        every(seconds=cast("int", seconds))


def test_every_ends_with_the_calendar() -> None:
    schedule = every(seconds=10)
    for instant_ms in (10**15, 10**30):
        assert schedule.after(instant_ms) is None
        newest = schedule.before(instant_ms)
        assert newest is not None
        assert (NEW_YEAR + timedelta(milliseconds=newest - NEW_YEAR_MS)).year == 9999
        assert schedule.after(newest) is None
        assert schedule.before(-instant_ms) is None
        oldest = schedule.after(-instant_ms)
        assert oldest is not None
        assert schedule.before(oldest) is None


def test_every_shows_itself() -> None:
    schedule = parse_schedule(every(seconds=10), "Europe/Athens")
    assert (schedule.text, schedule.timezone) == ("every 10 s", "UTC")
    assert schedule == every(seconds=10) == Every(10)


def test_at_comes_once() -> None:
    schedule = at(NEW_YEAR)
    assert schedule.after(NEW_YEAR_MS - 1) == NEW_YEAR_MS
    assert schedule.after(NEW_YEAR_MS) is None
    assert schedule.before(NEW_YEAR_MS) is None
    assert schedule.before(NEW_YEAR_MS + 1) == NEW_YEAR_MS
    assert schedule.before(-(10**20)) is None
    assert schedule.after(10**20) is None


def test_past_moment_is_taken() -> None:
    schedule = at(datetime(1066, 10, 14, tzinfo=timezone.utc))
    assert schedule.after(NEW_YEAR_MS) is None
    assert schedule.before(NEW_YEAR_MS) == -28_502_755_200_000


def test_same_moment_of_two_zones_is_the_same_schedule() -> None:
    athens = NEW_YEAR.astimezone(ZoneInfo("Europe/Athens"))
    assert at(athens) == at(NEW_YEAR) == At(NEW_YEAR_MS)
    schedule = parse_schedule(at(athens), "Europe/Athens")
    assert (schedule.text, schedule.timezone) == ("at 2026-01-01T00:00:00+00:00", "UTC")
    assert fingerprint(schedule, 5) == fingerprint(at(NEW_YEAR), 5)


def test_repeated_moment_is_read_with_its_fold() -> None:
    moment = datetime(2025, 10, 26, 3, 30, tzinfo=ZoneInfo("Europe/Athens"))
    first, second = at(moment).scheduled_ms, at(moment.replace(fold=1)).scheduled_ms
    assert second - first == 3_600_000


def test_moment_is_cut_to_milliseconds() -> None:
    assert at(NEW_YEAR + timedelta(microseconds=1999)).scheduled_ms == NEW_YEAR_MS + 1
    assert at(NEW_YEAR + timedelta(microseconds=1999)).text == "at 2026-01-01T00:00:00.001000+00:00"


class Nowhere(tzinfo):
    def utcoffset(self, _moment: Optional[datetime]) -> None:
        return None

    def dst(self, _moment: Optional[datetime]) -> None:
        return None

    def tzname(self, _moment: Optional[datetime]) -> None:
        return None


@pytest.mark.parametrize("zone", [None, Nowhere()])
def test_naive_moment_is_refused(zone: Optional[tzinfo]) -> None:
    with pytest.raises(ValueError, match="is naive"):
        at(datetime(2026, 1, 1, tzinfo=zone))


@pytest.mark.parametrize(
    "moment", [None, 1, "2026-01-01", NEW_YEAR.date(), "x" * 10_000, 10**9_000], ids=range(6)
)
def test_moment_that_is_no_datetime_is_refused(moment: object) -> None:
    with pytest.raises(TypeError, match="takes a datetime") as caught:
        at(cast("datetime", moment))
    assert len(str(caught.value)) < 250


@pytest.mark.parametrize(
    "moment",
    [
        datetime.max.replace(tzinfo=timezone(-timedelta(hours=12))),
        datetime.min.replace(tzinfo=timezone(timedelta(hours=14))),
    ],
)
def test_moment_beyond_the_calendar_is_refused(moment: datetime) -> None:
    with pytest.raises(ValueError, match="end of the calendar"):
        at(moment)


def test_zone_is_checked_in_any_case() -> None:
    with pytest.raises(ValueError, match="timezone 'Nowhere'"):
        parse_schedule(every(seconds=1), "Nowhere")


def test_fingerprints_tell_schedules_apart() -> None:
    schedules: list[Schedule] = [every(seconds=1), every(seconds=11), at(NEW_YEAR)]
    digests = {fingerprint(schedule, jitter) for schedule in schedules for jitter in (0, 1, 11)}
    assert len(digests) == 9


def test_jitter_is_the_same_everywhere() -> None:
    # Another answer than an older version's makes instances of both run one scheduled time apart.
    assert jitter_of("import", NEW_YEAR_MS, 60_000) == 55_054
    assert jitter_of("\u03b1\U0001f600\ud800", NEW_YEAR_MS, 60_000) == 16_601
    assert jitter_of("import", NEW_YEAR_MS, 0) == 0


def test_jitter_fills_its_bounds() -> None:
    few = {jitter_of("job", n * 1000, 3) for n in range(200)}
    assert few == {0, 1, 2, 3}
    many = [jitter_of("job", n * 60_000, 10_000) for n in range(2000)]
    assert 0 <= min(many) < 100
    assert 9_900 < max(many) <= 10_000
    assert 4_700 < sum(many) / len(many) < 5_300


def test_jitter_differs_between_jobs_and_times() -> None:
    assert len({jitter_of(f"job {n}", NEW_YEAR_MS, 10**9) for n in range(100)}) == 100
    assert len({jitter_of("job", NEW_YEAR_MS + n, 10**9) for n in range(100)}) == 100
