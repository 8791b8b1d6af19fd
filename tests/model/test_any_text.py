"""Any text is read or refused in words, with an amount of work that has a bound.

The work is counted in executed lines of Python, so that a slow machine changes nothing and a hang
is a number. ``LEASECRON_SYNC_LONG=1`` in the environment draws many more texts.
"""

from __future__ import annotations

import os
import random
from datetime import date, timedelta
from typing import Optional

import pytest

from leasecron_sync.schedule import Schedule, at, every, jitter_of, parse_schedule, zones
from leasecron_sync.schedule.cron import _ALIASES, MAX_TEXT, _read
from leasecron_sync.schedule.fixed import MAX_EVERY_SECONDS
from tests.model.any_text import LONGEST, Counted, draw_text
from tests.model.cron_reader import Reading
from tests.model.zone_files import moment_of

LONG = bool(os.environ.get("LEASECRON_SYNC_LONG"))
SEEDS = range(40 if LONG else 4)
TEXTS = 2_000 if LONG else 300

# Several times of what was found in 30,000 texts: 5,300 lines for reading one, 6,600 for a time.
MOST_TO_READ = 25_000
MOST_TO_FIND = 20_000
# Both ends of the calendar and beyond, the epoch and before it, today.
LOOKS = (
    -(10**20),
    zones.EARLIEST * 1000 - 1,
    zones.EARLIEST * 1000,
    -86_400_001,
    -1,
    0,
    1_700_049_600_123,
    253_370_764_800_000,
    zones.LATEST * 1000,
    10**20,
)
ZONES = ("UTC", "Europe/Athens", "Africa/Monrovia", "Pacific/Apia")


def read(work: Counted, text: str, zone: str) -> Optional[Schedule]:
    """Read a text; None when it is refused as it should be."""
    _read.cache_clear()
    try:
        return work(lambda: parse_schedule(text, zone))
    except ValueError as error:
        message = str(error)
        assert type(error) is ValueError, text  # noqa: PT017
        assert message.startswith("cron expression "), text
        assert message.isprintable(), text
        assert len(message) < 600, text
        return None


def look(work: Counted, schedule: Schedule, instant_ms: int) -> None:
    """Look in both directions from an instant, with nothing remembered from before."""
    found = []
    for direction in (schedule.after, schedule.before):
        zones._stretches.cache_clear()
        found.append(work(lambda direction=direction: direction(instant_ms)))  # type: ignore[misc]
        assert work.lines < MOST_TO_FIND, (schedule, instant_ms, work.lines)
    after, before = found
    if after is not None:
        assert after > instant_ms
        assert schedule.before(after + 1) == after
    if before is not None:
        assert before < instant_ms
        assert schedule.after(before - 1) == before


@pytest.mark.timeout(600 if LONG else 30)
@pytest.mark.parametrize("seed", SEEDS)
def test_no_text_hangs_and_every_refusal_is_in_words(seed: int) -> None:
    rng, work = random.Random(seed), Counted()
    parse_schedule("* * * * *", "Europe/Athens")  # the list of zones is read once
    accepted = 0
    for _ in range(TEXTS):
        text, zone = draw_text(rng), rng.choice(ZONES)
        schedule = read(work, text, zone)
        assert work.lines < MOST_TO_READ, (text[:200], work.lines)
        if schedule is not None:
            accepted += 1
            assert schedule.after(0) is not None
            for instant_ms in rng.sample(LOOKS, 3):
                look(work, schedule, instant_ms)
    assert TEXTS // 8 < accepted < TEXTS // 2


def first_by_the_calendar(reading: Reading, instant: int, days: int) -> Optional[int]:
    begin = moment_of(instant).date()
    for number in range(days):
        day = begin + timedelta(days=number)
        for moment in reading.times_of(day):
            seconds = moment.hour * 3600 + moment.minute * 60 + moment.second
            found = (day - date(1970, 1, 1)).days * 86_400 + seconds
            if found > instant:
                return found
    return None


@pytest.mark.timeout(600 if LONG else 30)
@pytest.mark.parametrize("seed", SEEDS)
def test_what_is_accepted_is_read_as_it_is_written(seed: int) -> None:
    rng = random.Random(1_000 + seed)
    compared = 0
    while compared < TEXTS // 5:
        text = draw_text(rng)
        try:
            schedule = parse_schedule(text, "UTC")
        except ValueError:
            continue
        compared += 1
        reading = Reading(_ALIASES.get(schedule.text.lower(), schedule.text))
        instant, days = rng.randrange(1_577_836_800, 1_924_992_000), 130
        found = schedule.after(instant * 1000)
        assert found is not None
        expected = first_by_the_calendar(reading, instant, days)
        if expected is None:
            assert found >= (instant + (days - 1) * 86_400) * 1000, schedule.text
        else:
            assert found == expected * 1000, schedule.text


@pytest.mark.parametrize("size", [LONGEST + 1, 1_000_000])
@pytest.mark.parametrize("piece", [" ", "* ", "0 0 * * *\n", "\x00", "9", "\u0663"])
def test_a_longer_text_is_refused_before_it_is_read(piece: str, size: int) -> None:
    assert LONGEST == MAX_TEXT
    work = Counted()
    text = (piece * size)[:size]
    assert read(work, text, "UTC") is None
    assert work.lines < 100
    with pytest.raises(ValueError, match="over 10,000 characters, blanks included; write"):
        parse_schedule(text, "UTC")


# Expression, and a leap day on which it falls; between two of them lie up to forty years.
RARE = [
    ("0 0 29 2 */7", "2032-02-29"),  # a Sunday
    ("0 0 29 2 1#5", "2028-02-29"),  # a leap day, or a fifth Monday, which is one as well
    ("0 0 * 2 1#5", "2044-02-29"),
    ("0 0 */28 2 1#5", "2044-02-29"),
    ("0 0 ? feb sun#5", "2032-02-29"),
    ("59 59 23 29 2 *", "2028-02-29"),
]


@pytest.mark.parametrize(("text", "day"), RARE)
@pytest.mark.parametrize("zone", ["UTC", "Europe/Athens"])
def test_a_rare_day_is_found_in_little_work(text: str, day: str, zone: str) -> None:
    work = Counted()
    schedule = read(work, text, zone)
    assert schedule is not None
    assert work.lines < MOST_TO_READ
    zones._stretches.cache_clear()
    found = work(lambda: schedule.after(1_767_225_600_000))
    assert work.lines < MOST_TO_FIND
    assert found is not None
    assert moment_of(found // 1000 + 7_200 * (zone != "UTC")).date().isoformat() == day


NEVER = [
    "0 0 30 2 *",
    "0 0 31 4,6 *",
    "0 0 31 2,4,6,9,11 *",
    "0 0 30,31 feb *",
    "0 0 30-31 2 */6",
    "0 0 */30 2 1#2",
    "0 0 29W 2 */6",
    "0 0 */31 2-4/2 5#5",
    "0 0 W15 * */7",
    "* * 8W * */7",
    "0 0 31 11 ?",
]


@pytest.mark.parametrize("text", NEVER)
def test_what_can_never_come_is_refused_in_little_work(text: str) -> None:
    reading, work = Reading(text), Counted()
    days = (date(2000, 1, 1) + timedelta(days=number) for number in range(28 * 366))
    assert not any(reading.right_day(day) for day in days)
    assert read(work, text, "Europe/Athens") is None
    assert work.lines < MOST_TO_READ


# Each names times that the clock skips, and nothing else; and the same as fixed times.
SKIPPED = [
    ("Europe/Athens", "*/30 3 * 3 L0", "0,30 3 * 3 L0"),
    ("Europe/Athens", "*/30 3 29 3 */7", "0,30 3 29 3 */7"),
    ("Europe/Athens", "* 3 25-31 3 */7", "0-59 3 25-31 3 */7"),
    ("Europe/Athens", "30 */10 3 * 3 L7", "30 0-50/10 3 * 3 L7"),
    ("America/New_York", "*/15 2 ? 3 sun#2", "0-45/15 2 ? 3 sun#2"),
    ("Antarctica/Troll", "*/20 1-2 * mar L0", "0,20,40 1-2 * mar L0"),
]


@pytest.mark.parametrize(("zone", "text", "fixed"), SKIPPED)
def test_what_the_clock_always_skips_is_refused_in_little_work(
    zone: str, text: str, fixed: str
) -> None:
    # Looking for it up to the end of the calendar took ten seconds, each time it was asked for.
    zones._stretches.cache_clear()
    work = Counted()
    with pytest.raises(ValueError, match=r": hour '[-\d]+': each such time falls into"):
        work(lambda: parse_schedule(text, zone))
    assert work.lines < 10 * MOST_TO_FIND
    assert parse_schedule(fixed, zone).after(0) is not None
    assert parse_schedule(text, "UTC").after(0) is not None


@pytest.mark.parametrize("moment_ms", [0, -1, 1, 253_402_000_000_000, -62_135_000_000_000])
def test_a_moment_costs_nothing_wherever_it_lies(moment_ms: int) -> None:
    schedule, work = at(moment_of(0) + timedelta(milliseconds=moment_ms)), Counted()
    for instant_ms in (*LOOKS, moment_ms - 1, moment_ms, moment_ms + 1):
        after, before = work(lambda: schedule.after(instant_ms)), schedule.before(instant_ms)  # noqa: B023 - called here
        assert work.lines < 10
        assert after == (moment_ms if moment_ms > instant_ms else None)
        assert before == (moment_ms if moment_ms < instant_ms else None)


@pytest.mark.parametrize("seconds", [1, 7, 86_400, MAX_EVERY_SECONDS])
def test_a_period_costs_nothing_from_wherever_it_is_asked(seconds: int) -> None:
    schedule, work = every(seconds=seconds), Counted()
    for instant_ms in LOOKS:
        after, before = work(lambda: schedule.after(instant_ms)), schedule.before(instant_ms)  # noqa: B023 - called here
        assert work.lines < 10
        assert after is None or 0 < after - max(instant_ms, zones.EARLIEST * 1000) <= seconds * 1000
        assert before is None or before < min(instant_ms, zones.LATEST * 1000 + 1)
        assert after is None or after % (seconds * 1000) == 0


@pytest.mark.parametrize("jitter_ms", [-1, 0, 1, 2, 86_400_000, 10**18, 2**64, 10**30])
@pytest.mark.parametrize("scheduled_ms", [-(10**15), -1, 0, 1_700_049_600_000, 10**15])
def test_jitter_stays_in_its_bounds_however_large_they_are(
    jitter_ms: int, scheduled_ms: int
) -> None:
    for name in ("job", "j" * 200, "\u03b1\U0001f600"):
        found = jitter_of(name, scheduled_ms, jitter_ms)
        assert 0 <= found <= max(0, jitter_ms)
        assert found == jitter_of(name, scheduled_ms, jitter_ms)
