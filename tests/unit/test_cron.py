from __future__ import annotations

import json
import time
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any, Optional, cast

import pytest

from leasecron_sync.schedule import Schedule, fingerprint, parse_schedule, zones
from leasecron_sync.schedule.cron import MAX_EXPRESSION

EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
MS = timedelta(milliseconds=1)
CASES = json.loads((Path(__file__).parent / "cron_cases.json").read_text("utf-8"))
MATCHING = [case for case in CASES if case["expected"]]
DAY_MS = 86_400_000


def ms(text: str) -> int:
    return (datetime.fromisoformat(text) - EPOCH) // MS


def local(instant_ms: Optional[int], zone: timezone) -> str:
    assert instant_ms is not None
    return (EPOCH + timedelta(milliseconds=instant_ms)).astimezone(zone).isoformat()


def name(case: dict[str, Any]) -> str:
    return f"{case['expr']} {case['tz']} {case['start']}"


def following(schedule: Schedule, instant_ms: int, count: int) -> list[int]:
    found: list[int] = []
    for _ in range(count):
        after = schedule.after(found[-1] if found else instant_ms)
        assert after is not None
        found.append(after)
    return found


@pytest.fixture
def host_zone(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TZ", request.param)
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


@pytest.mark.parametrize("case", MATCHING, ids=name)
def test_scheduled_times_are_the_known_ones(case: dict[str, Any]) -> None:
    schedule = parse_schedule(case["expr"], case["tz"])
    expected = [ms(text) for text in case["expected"]]
    assert following(schedule, ms(case["start"]), len(expected)) == expected


@pytest.mark.parametrize("case", MATCHING, ids=name)
def test_scheduled_times_are_the_same_backwards(case: dict[str, Any]) -> None:
    schedule = parse_schedule(case["expr"], case["tz"])
    expected = [ms(text) for text in case["expected"]]
    earlier = schedule.before(expected[0])
    assert earlier is None or earlier <= ms(case["start"])
    assert [schedule.before(later) for later in expected[1:]] == expected[:-1]
    assert schedule.before(expected[-1] + 1) == expected[-1]


@pytest.mark.parametrize("host_zone", ["Europe/London", "America/New_York"], indirect=True)
@pytest.mark.usefixtures("host_zone")
def test_zone_of_the_host_has_no_influence() -> None:
    zones._stretches.cache_clear()
    for case in MATCHING:
        schedule = parse_schedule(case["expr"], case["tz"])
        expected = [ms(text) for text in case["expected"]]
        assert following(schedule, ms(case["start"]), len(expected)) == expected, name(case)


@pytest.mark.parametrize("case", MATCHING, ids=name)
def test_milliseconds_around_a_hit_decide(case: dict[str, Any]) -> None:
    schedule = parse_schedule(case["expr"], case["tz"])
    hit = ms(case["expected"][0])
    following_ms = schedule.after(hit)
    assert following_ms is not None
    assert following_ms > hit
    assert [schedule.after(hit - early) for early in (1, 2, 999, 1000)] == [hit] * 4
    assert [schedule.before(hit + late) for late in (1, 2, 999, 1000)] == [hit] * 4
    assert [schedule.after(hit + late) for late in (1, 2, 999)] == [following_ms] * 3
    assert schedule.before(hit) == schedule.before(hit - 999)


def test_cutting_time_into_blocks_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    # With blocks of a day each change of a clock has bounds of blocks around it.
    monkeypatch.setattr(zones, "_BLOCK", DAY_MS // 1000)
    zones._stretches.cache_clear()
    for case in MATCHING:
        test_scheduled_times_are_the_known_ones(case)
        test_scheduled_times_are_the_same_backwards(case)
    zones._stretches.cache_clear()


def test_first_pass_is_found_from_within_the_second() -> None:
    schedule = parse_schedule("50 3 26 10 *", "Europe/Athens")
    first_pass = ms("2025-10-26T03:50:00+03:00")
    assert schedule.before(ms("2025-10-26T03:10:00+02:00")) == first_pass
    assert schedule.after(first_pass) == ms("2026-10-26T03:50:00+02:00")


def test_each_minute_comes_once_to_a_clock_that_wakes_early() -> None:
    schedule = parse_schedule("* * * * *", "Europe/Athens")
    now = ms("2025-10-26T02:00:00+03:00")
    seen: list[int] = []
    for _ in range(300):
        hit = schedule.after(seen[-1] if seen else now)
        assert hit is not None
        seen.append(hit)
        assert schedule.after(hit - 2) == hit  # woken 2 ms early, nothing else is due
    assert seen == list(range(seen[0], seen[0] + 300 * 60_000, 60_000))


REFUSED = [
    # expression, field, what the text must offer
    ("60 * * * *", "minute", "0 to 59"),
    ("* 24 * * *", "hour", "0 to 23"),
    ("* * 0 * *", "day of month", "1 to 31"),
    ("* * 32 * *", "day of month", "1 to 31"),
    ("* * * 0 *", "month", "1 to 12"),
    ("* * * 13 *", "month", "1 to 12"),
    ("* * * * 8", "day of week", "0 to 7"),
    ("60 * * * * *", "second", "0 to 59"),
    ("x * * * *", "minute", "0 to 59"),
    ("* * * foo *", "month", "jan, feb"),
    ("* * * * foo", "day of week", "sun, mon"),
    ("jan * * * *", "minute", "0 to 59"),
    ("* * * mon *", "month", "jan, feb"),
    ("0 22-2 * * *", "hour", "22-23,0-2"),
    ("50-10 * * * *", "minute", "50-59,0-10"),
    ("0 0 25-5 * *", "day of month", "25-31,1-5"),
    ("0 0 * nov-feb *", "month", "11-12,1-2"),
    ("0 0 * * fri-mon", "day of week", "5-6,0-1"),
    ("0 0 * * 7-1", "day of week", "0-1"),
    ("0 0 * * 5-1#2", "day of week", "1#2"),
    ("*/70 * * * *", "minute", "every(seconds=...)"),
    ("0 */25 * * *", "hour", "1 to 24"),
    ("0 0 */32 * *", "day of month", "1 to 31"),
    ("0 0 1 */13 *", "month", "1 to 12"),
    ("0 0 * * */8", "day of week", "1 to 7"),
    ("*/61 * * * * *", "second", "1 to 60"),
    ("*/0 * * * *", "minute", "1 to 60"),
    ("0-10/0 * * * *", "minute", "1 to 60"),
    ("*/ * * * *", "minute", "*/5"),
    ("/5 * * * *", "minute", "*/5"),
    ("5- * * * *", "minute", "1-5"),
    ("-5 * * * *", "minute", "range"),
    ("1-2-3 * * * *", "minute", "1-5"),
    ("*/5/5 * * * *", "minute", "*/5"),
    ("*-5 * * * *", "minute", "*"),
    ("** * * * *", "minute", "*"),
    ("1.5 * * * *", "minute", "value"),
    ("+5 * * * *", "minute", "value"),
    ("1,,2 * * * *", "minute", "single commas"),
    ("1, * * * *", "minute", "single commas"),
    (", * * * *", "minute", "single commas"),
    ("\u0665 * * * *", "minute", "digits from 0 to 9"),
    ("* \uff11 * * *", "hour", "digits from 0 to 9"),
    ("*\u00a0 * * * *", "minute", "ASCII"),
    ("\x00 * * * *", "minute", "value"),
    ("R * * * *", "minute", "jitter_ms"),
    ("0 r(1-5) * * *", "hour", "jitter_ms"),
    ("H H * * *", "minute", "jitter_ms"),
    ("H/15 * * * *", "minute", "jitter_ms"),
    ("0 h(0-7)/2 * * *", "hour", "jitter_ms"),
    ("0 0 * * R", "day of week", "jitter_ms"),
    ("? * * * *", "minute", "*"),
    ("0 0 ?,1 * *", "day of month", "*"),
    ("0 0 * * 5L", "day of week", "L5"),
    ("0 0 * * L", "day of week", "0 to 7"),
    ("0 0 * * L8", "day of week", "0 to 7"),
    ("0 0 L5 * *", "day of month", "value"),
    ("0 L * * *", "hour", "0 to 23"),
    ("0 0 LW * *", "day of month", "31W"),
    ("0 0 L-3 * *", "day of month", "25-31"),
    ("0 0 L/2 * *", "day of month", "1 to 31"),
    ("0 0 0W * *", "day of month", "1 to 31"),
    ("0 0 32W * *", "day of month", "1 to 31"),
    ("0 0 1,15W * *", "day of month", "two jobs"),
    ("0 0 W * *", "day of month", "1 to 31"),
    ("0 15W * * *", "hour", "value"),
    ("0 0 * * 1#0", "day of week", "1#2"),
    ("0 0 * * 1#6", "day of week", "1#2"),
    ("0 0 * * 1#", "day of week", "1#2"),
    ("0 0 * * #2", "day of week", "value"),
    ("0 0 * * *#2", "day of week", "1#2"),
    ("0 0 * * 1-5#2", "day of week", "1#2"),
    ("0 0 * * 1#2/2", "day of week", "1#2"),
    ("0 0 1#2 * *", "day of month", "1#2"),
    ("0 0 * * 1,2#2", "day of week", "two jobs"),
    ("0 0 * * L5,mon", "day of week", "two jobs"),
    ("0 0 30 2 *", "day of month", "L for its last"),
    ("0 0 31 2,4,6,9,11 *", "day of month", "L for its last"),
    ("0 0 0 31 feb *", "day of month", "L for its last"),
    ("0 0 */31 * 1#2", "day of month", "day of week that can fall"),
]


@pytest.mark.parametrize(("expression", "field", "offer"), REFUSED, ids=ascii)
def test_refusal_names_expression_and_field_and_what_to_write(
    expression: str, field: str, offer: str
) -> None:
    with pytest.raises(ValueError, match="cron expression") as caught:
        parse_schedule(expression, "UTC")
    assert type(caught.value) is ValueError
    text = str(caught.value)
    shown = f"cron expression {expression!r}: {field} "
    assert text.startswith(shown)
    assert offer in text[len(shown) :]


@pytest.mark.parametrize(
    ("expression", "offer"),
    [
        ("", "has 0 fields; write five"),
        (" \t\n", "has 0 fields; write five"),
        ("* * * *", "has 4 fields; write five"),
        ("0 0 0 1 1 * 2026", "has 7 fields; write five"),
        ("0 0 1 1 * * * 2026", "there is no year"),
        ("every 5 minutes", "has 3 fields"),
        ("@reboot", "@hourly"),
        ("@every 5m", "every(seconds=...)"),
        ("@Daily now", "@daily"),
        ("@", "@daily"),
        ("0\u00a00\u00a0*\u00a0*\u00a0*", "has 1 fields"),
    ],
)
def test_other_forms_are_refused(expression: str, offer: str) -> None:
    with pytest.raises(ValueError, match="cron expression") as caught:
        parse_schedule(expression, "UTC")
    assert offer in str(caught.value)


@pytest.mark.parametrize(
    "expression",
    [
        "*" * 10_000,
        "*/5" * 3_333,
        "1," * 5_000 + "1 * * * *",
        "1-" * 5_000,
        "9" * 10_000 + " * * * *",
        "* " * 5_000,
        "*/" + "9" * 9_990 + " * * * *",
        "a" * 10_000 + "#" * 10,
        "0 0 * * " + "1#1," * 2_000 + "1#1",
        "\u0661" * 10_000,
        "@" * 10_000,
        ("H(" * 2_500) + (")/" * 2_500),
        "9" * 245 + " * * * *",
        "0 0 " + "9" * 240 + "w * *",
    ],
    ids=range(14),
)
def test_long_texts_are_refused_and_do_not_fill_the_log(expression: str) -> None:
    with pytest.raises(ValueError, match="cron expression") as caught:
        parse_schedule(expression, "UTC")
    assert len(str(caught.value)) < 1000


def test_blanks_around_and_between_do_not_count() -> None:
    padded = "  0 \t 3" + " " * 9_900 + "* * *\r\n"
    schedule = parse_schedule(padded, "UTC")
    assert schedule.text == "0 3 * * *"
    assert len(",".join(map(str, range(60)))) + 8 < MAX_EXPRESSION


@pytest.mark.parametrize(
    ("alias", "fields"),
    [
        ("@hourly", "0 * * * *"),
        ("@daily", "0 0 * * *"),
        ("@midnight", "0 0 * * *"),
        ("@weekly", "0 0 * * 0"),
        ("@monthly", "0 0 1 * *"),
        ("@yearly", "0 0 1 1 *"),
        ("@annually", "0 0 1 1 *"),
        (" @DAILY ", "0 0 * * *"),
    ],
)
def test_aliases_are_the_fields_they_stand_for(alias: str, fields: str) -> None:
    start = ms("2025-03-01T00:00:00+00:00")
    schedule = parse_schedule(alias, "Europe/Athens")
    assert schedule.text == alias.strip()
    assert following(schedule, start, 30) == following(
        parse_schedule(fields, "Europe/Athens"), start, 30
    )


@pytest.mark.parametrize(
    ("expression", "same"),
    [
        ("0 0 * JAN-MAR MON", "0 0 * 1-3 1"),
        ("0 0 * jan,mar,DEC sun,7", "0 0 * 1,3,12 0"),
        ("0 0 * * mon-fri/2", "0 0 * * 1,3,5"),
        ("0 0 * * sun-tue", "0 0 * * 0-2"),
        ("0 0 * * sun-sun", "0 0 * * 0"),
        ("0 0 * * 0-7", "0 0 * * *"),
        ("0 0 * * 7/3", "0 0 * * 0"),  # from the last number on there is no other
        ("59/5 * * * *", "59 * * * *"),
        ("0 0 * dec/3 *", "0 0 * 12 *"),
        ("0 0 w15 * *", "0 0 15W * *"),
        ("0 0 25-L * *", "0 0 25-31 * *"),
        ("0 0 * * mon-wed#1", "0 0 * * 1#1,2#1,3#1"),
        ("10/20 * * * *", "10,30,50 * * * *"),
        ("*/60 * * * *", "0 * * * *"),
        ("007 05 * * *", "7 5 * * *"),
        ("0 0 ? * ?", "0 0 * * *"),
        ("00 0 0 * * *", "0 0 * * *"),
    ],
)
def test_two_ways_to_write_the_same(expression: str, same: str) -> None:
    start = ms("2024-01-01T00:00:00+00:00")
    first = following(parse_schedule(expression, "UTC"), start, 100)
    assert first == following(parse_schedule(same, "UTC"), start, 100)


def test_seconds_come_first() -> None:
    schedule = parse_schedule("15,45 59 23 31 12 *", "UTC")
    start = ms("2025-01-01T00:00:00+00:00")
    assert following(schedule, start, 3) == [
        ms("2025-12-31T23:59:15+00:00"),
        ms("2025-12-31T23:59:45+00:00"),
        ms("2026-12-31T23:59:15+00:00"),
    ]


@pytest.mark.parametrize("zone", ["UTC", "Europe/Athens", "Pacific/Apia", "Asia/Tokyo"])
@pytest.mark.parametrize("expression", ["* * * * *", "0 0 29 2 *", "30 2 * * *", "@yearly"])
def test_no_instant_is_too_early_or_too_late(zone: str, expression: str) -> None:
    schedule = parse_schedule(expression, zone)
    first_ms, last_ms = zones.EARLIEST * 1000, zones.LATEST * 1000
    for instant in (
        -(10**20),
        -(10**15),
        first_ms - 1,
        -1,
        0,
        last_ms,
        last_ms + 1,
        10**15,
        10**20,
    ):
        after, before = schedule.after(instant), schedule.before(instant)
        assert after is None or instant < after <= last_ms
        assert before is None or first_ms <= before < instant
        for found in (after, before):
            if found is not None:  # what other code will do with it
                (EPOCH + timedelta(milliseconds=found)).astimezone(timezone(timedelta(hours=14)))
    assert schedule.after(last_ms) is None
    assert schedule.before(first_ms) is None
    assert schedule.after(-(10**20)) is not None
    assert schedule.before(10**20) is not None
    newest = schedule.before(10**20)
    assert newest is not None
    assert schedule.after(newest) is None


@pytest.mark.parametrize("zone", ["UTC", "Europe/Athens"])
def test_rare_dates_are_found_across_decades(zone: str) -> None:
    schedule = parse_schedule("0 9 29 2 */7", zone)  # a leap day on a Sunday
    assert local(schedule.after(ms("2089-01-01T00:00:00+00:00")), timezone.utc)[:10] == "2128-02-29"
    assert (
        local(schedule.before(ms("2128-02-01T00:00:00+00:00")), timezone.utc)[:10] == "2088-02-29"
    )


@pytest.mark.parametrize(
    "zone",
    [
        "",
        " ",
        "../UTC",
        "/etc/localtime",
        "/usr/share/zoneinfo/UTC",
        "Europe",
        "Europe/",
        "./UTC",
        "Europe//Athens",
        "Europe/Athens ",
        "Mars/Olympus",
        "UTC+2",
        "+02:00",
        "localtime",
        "posixrules",
        "right/UTC",
        "posix/UTC",
        "zone.tab",
        "a\0b",
        "\u00e9",
        "\ud800",
        "x" * 10_000,
    ],
    ids=lambda value: ascii(value)[:20],
)
def test_unknown_zone_is_refused_by_name(zone: str) -> None:
    with pytest.raises(ValueError, match="timezone") as caught:
        parse_schedule("* * * * *", zone)
    assert repr(zone[:80]) in str(caught.value)


def test_wrong_case_of_a_zone_is_put_right() -> None:
    with pytest.raises(ValueError, match="write 'Europe/Athens'"):
        parse_schedule("* * * * *", "europe/athens")


@pytest.mark.parametrize("zone", [None, 2, b"UTC", timezone.utc])
def test_zone_that_is_no_text_is_a_type_error(zone: object) -> None:
    with pytest.raises(TypeError, match="timezone must be an IANA name"):
        parse_schedule("* * * * *", cast("str", zone))


def test_utc_needs_no_zone_database(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zones, "_zone_names", frozenset)
    assert parse_schedule("* * * * *", "UTC").after(0) == 60_000
    with pytest.raises(ValueError, match="install the package tzdata"):
        parse_schedule("* * * * *", "Europe/Athens")


@pytest.mark.parametrize("schedule", [None, 5, 1.5, b"* * * * *", timedelta(seconds=5), EPOCH, []])
def test_other_things_are_no_schedule(schedule: object) -> None:
    with pytest.raises(TypeError, match="must be a cron expression"):
        parse_schedule(cast("str", schedule), "UTC")


@pytest.mark.parametrize(
    "schedule", [b"0" * 10_000, ["0"] * 10_000, 10**9_000], ids=["bytes", "list", "number"]
)
def test_a_large_thing_does_not_fill_the_log(schedule: object) -> None:
    with pytest.raises(TypeError, match="must be a cron expression") as caught:
        parse_schedule(cast("str", schedule), "UTC")
    assert len(str(caught.value)) < 300
    with pytest.raises(TypeError, match="timezone must be an IANA name") as caught:
        parse_schedule("* * * * *", cast("str", schedule))
    assert len(str(caught.value)) < 300


def test_text_and_zone_are_shown() -> None:
    schedule = parse_schedule(" 0  9 * * Fri ", "Europe/Athens")
    assert (schedule.text, schedule.timezone) == ("0 9 * * Fri", "Europe/Athens")
    assert repr(schedule) == "CronSchedule('0 9 * * Fri', 'Europe/Athens')"


def test_fingerprint_is_of_text_zone_and_jitter() -> None:
    schedule = parse_schedule("0 9 * * FRI", "Europe/Athens")
    assert fingerprint(schedule, 0) == "2b7347c6451325ae"
    assert fingerprint(parse_schedule("0  9 * * fri", "Europe/Athens"), 0) == fingerprint(
        schedule, 0
    )
    others = {
        fingerprint(parse_schedule("0 9 * * FRI", "UTC"), 0),
        fingerprint(parse_schedule("1 9 * * FRI", "Europe/Athens"), 0),
        fingerprint(schedule, 1),
        fingerprint(schedule, 0),
    }
    assert len(others) == 4


def test_a_thousand_different_jobs_are_no_burden() -> None:
    before = time.process_time()
    schedules = [parse_schedule(f"{n % 60} {n // 60} * * *", "UTC") for n in range(1000)]
    now = ms("2026-01-01T00:00:00+00:00")
    assert all(now < (schedule.after(now) or 0) <= now + DAY_MS for schedule in schedules)
    assert time.process_time() - before < 1  # some 0.1 s are usual
