"""Coming scheduled times, of one expression or of all jobs of a scheduler."""

from __future__ import annotations

import argparse
import contextlib
import sys
from datetime import datetime, timedelta, timezone
from typing import Final, Optional
from zoneinfo import ZoneInfo

from leasecron_sync.cli.output import UsageError, say, say_json, shown, table
from leasecron_sync.cli.target import HELP as TARGET_HELP
from leasecron_sync.cli.target import load_scheduler
from leasecron_sync.clock import SystemClock
from leasecron_sync.run import moment
from leasecron_sync.schedule import Schedule, parse_schedule

NAME: Final = "next"
HELP: Final = "show when a schedule, or each job of a scheduler, will be due"

MAX_COUNT: Final = 10_000
"""Most scheduled times that are shown of one schedule."""

_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
_NO_MORE = "no more scheduled times"


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("target", metavar="MODULE:ATTRIBUTE", nargs="?", help=TARGET_HELP)
    parser.add_argument("--schedule", metavar="CRON", help='a cron expression: "0 3 * * *"')
    parser.add_argument("--timezone", metavar="ZONE", help="IANA zone of --schedule (default: UTC)")
    parser.add_argument(
        "--from",
        dest="start",
        metavar="INSTANT",
        help="show what is due after this instant, ISO 8601 with an offset (default: now)",
    )
    parser.add_argument(
        "--count", metavar="N", default="5", help="how many scheduled times (default: 5)"
    )
    parser.add_argument("--json", action="store_true", help="write JSON")


def command(options: argparse.Namespace) -> int:
    """Show scheduled times strictly after an instant."""
    if (options.target is None) == (options.schedule is None):
        message = 'give either MODULE:ATTRIBUTE or --schedule "0 3 * * *"'
        raise UsageError(message)
    count = bounded("--count", options.count, MAX_COUNT)
    start_ms = _start_ms(options.start)
    if options.schedule is not None:
        try:
            schedule = parse_schedule(options.schedule, options.timezone or "UTC")
        except ValueError as error:
            raise UsageError(str(error)) from error
        _show_one(schedule, _coming(schedule, start_ms, count), count, as_json=options.json)
        return 0
    if options.timezone is not None:
        message = "--timezone goes with --schedule: the jobs of a scheduler have their own zones"
        raise UsageError(message)
    _show_jobs(_schedules(options.target), start_ms, count, as_json=options.json)
    return 0


def bounded(option: str, text: str, highest: int) -> int:
    """Return a number from 1 to a bound.

    Args:
        option: Name of the option, for the error.
        text: What was given.
        highest: The bound.

    Raises:
        UsageError: It is something else.
    """
    try:
        number = int(text)
    except ValueError:
        number = 0
    if not 1 <= number <= highest:
        message = f"{option} must be a whole number from 1 to {highest:,}, not {text!r}"
        raise UsageError(message)
    return number


def _start_ms(text: Optional[str]) -> int:
    if text is None:
        return SystemClock().now_ms()
    try:
        # Python 3.9 and 3.10 do not read the Z.
        start = datetime.fromisoformat(f"{text[:-1]}+00:00" if text[-1:] in "zZ" else text)
    except ValueError:
        message = f"--from {text!r} is not in the form of ISO 8601: 2026-03-28T00:00:00+02:00"
        raise UsageError(message) from None
    if start.utcoffset() is None:
        message = (
            f"--from {text!r} has no offset, so nobody knows which instant is meant: write "
            "2026-03-28T00:00:00+02:00, or Z at the end for UTC"
        )
        raise UsageError(message)
    return (start - _EPOCH) // timedelta(milliseconds=1)


def _coming(schedule: Schedule, start_ms: int, count: int) -> list[datetime]:
    """Return scheduled times strictly after an instant, in the schedule's zone."""
    # UTC is also there where the host has no zone database.
    zone = timezone.utc if schedule.timezone == "UTC" else ZoneInfo(schedule.timezone)
    found: list[datetime] = []
    at = schedule.after(start_ms)
    while at is not None and len(found) < count:
        found.append(moment(at).astimezone(zone))
        at = schedule.after(at)
    return found


def _show_one(schedule: Schedule, found: list[datetime], count: int, *, as_json: bool) -> None:
    if as_json:
        say_json([instant.isoformat() for instant in found])
        return
    for instant in found:
        say(instant.isoformat())
    if len(found) < count:
        say(f"{shown(schedule.text)} has {_NO_MORE}{' after that' if found else ''}.")


def _schedules(target: str) -> dict[str, Schedule]:
    # What the module prints while it is imported must not stand between the JSON.
    with contextlib.redirect_stdout(sys.stderr):
        scheduler = load_scheduler(target)
    # next_runs() knows one time of each job, and from now on only.
    jobs = scheduler._jobs.values()  # noqa: SLF001 # pyright: ignore[reportPrivateUsage]
    return {job.name: job.schedule for job in jobs}


def _show_jobs(schedules: dict[str, Schedule], start_ms: int, count: int, *, as_json: bool) -> None:
    coming = {name: _coming(schedule, start_ms, count) for name, schedule in schedules.items()}
    if as_json:
        say_json({name: [one.isoformat() for one in found] for name, found in coming.items()})
        return
    if not schedules:
        say("The scheduler has no jobs.")
        return
    rows: list[tuple[str, ...]] = []
    for name, found in coming.items():
        schedule = schedules[name]
        times = [instant.isoformat() for instant in found]
        if len(times) < count:
            times.append(_NO_MORE)
        for number, text in enumerate(times):
            first = (shown(name), shown(schedule.text), schedule.timezone)
            rows.append((*(first if number == 0 else ("", "", "")), text))
    for line in table(("JOB", "SCHEDULE", "TIME ZONE", "SCHEDULED TIMES"), rows):
        say(line)
