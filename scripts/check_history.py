#!/usr/bin/env python3
"""Judge histories that instances recorded: was a run doubled or lost, was a rule broken?

scripts/check_history.py FILE ...         logs of one history, of one or several instances
    --job NAME                            this job alone
    --runs                                a row for each run, not only for what is wrong
    --owed "JOB=SCHEDULE[@FROM..TO]"      these scheduled times must be settled; may be repeated
    --timezone ZONE                       IANA zone of the schedules (default: UTC)
    --until INSTANT                       every run due before it must be settled
    --skew-ms N                           how far the clocks may be apart (default: 100)
    --limit N                             faults that are shown with their entries (default: 10)
    --json                                write JSON

SCHEDULE is a cron expression, "every 10 s" or "at 2026-03-28T00:00:00Z"; FROM, TO and INSTANT are
ISO 8601 with an offset. Left out, FROM is since when the job is owed by its registration, and TO a
minute before the last entry. The status is 0 when nothing is wrong, 1 when something is, 2 when a
file cannot be read, the history is empty, or the command is not as above.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any, Final, NamedTuple, Optional

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # this checkout

from leasecron_sync import at, every
from leasecron_sync.cli.output import (
    BROKEN_PIPE,
    FAILED,
    INTERRUPTED,
    USAGE,
    finish_stdout,
    iso,
    iso_json,
    one_line,
    say,
    say_json,
    shown,
    table,
)
from leasecron_sync.model import RunKey
from leasecron_sync.schedule import Schedule, parse_schedule
from leasecron_sync.testing import (
    Entry,
    Fault,
    History,
    HistoryError,
    Report,
    RunRow,
    Terms,
    check,
    read_history,
    shorten,
)
from leasecron_sync.testing.history.entry import REGISTERED
from leasecron_sync.testing.history.faults import ABSENCES
from leasecron_sync.testing.history.text import timeline
from scripts._environment import use_environment

NAME: Final = "check_history"
LAST_MINUTE_MS: Final = 60_000
MOST_OWED: Final = 100_000
EPOCH: Final = datetime(1970, 1, 1, tzinfo=timezone.utc)


class UsageError(Exception):
    """The command, or a file, is not what it should be; told in one line."""


class Owed(NamedTuple):
    """A job's scheduled times that must be settled."""

    job: str
    schedule: Schedule
    from_ms: Optional[int]
    to_ms: Optional[int]


class Shown(NamedTuple):
    """A fault and the entries that show it."""

    fault: Fault
    entries: tuple[Entry, ...]


# -- what is asked -------------------------------------------------------------------------------


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog=NAME,
        usage="%(prog)s FILE ... [--job NAME] [--runs] [--owed JOB=SCHEDULE[@FROM..TO]] [...]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("files", metavar="FILE", nargs="+", help=argparse.SUPPRESS)
    made.add_argument("--job", help=argparse.SUPPRESS)
    made.add_argument("--runs", action="store_true", help=argparse.SUPPRESS)
    made.add_argument("--owed", action="append", default=[], help=argparse.SUPPRESS)
    made.add_argument("--timezone", default="UTC", help=argparse.SUPPRESS)
    made.add_argument("--until", help=argparse.SUPPRESS)
    made.add_argument("--skew-ms", default="100", help=argparse.SUPPRESS)
    made.add_argument("--limit", default="10", help=argparse.SUPPRESS)
    made.add_argument("--json", action="store_true", help=argparse.SUPPRESS)
    return made


def number(option: str, text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = -1
    if value < 0:
        message = f"{option} must be a whole number from 0 on, not {text!r}"
        raise UsageError(message)
    return value


def instant_of(option: str, text: str) -> int:
    try:
        # Python 3.9 and 3.10 do not read the Z.
        found = datetime.fromisoformat(f"{text[:-1]}+00:00" if text[-1:] in "zZ" else text)
    except ValueError:
        message = f"{option}: {text!r} is not in the form of ISO 8601: 2026-03-28T00:00:00+02:00"
        raise UsageError(message) from None
    if found.utcoffset() is None:
        message = f"{option}: {text!r} has no offset: write 2026-03-28T00:00:00+02:00, or Z for UTC"
        raise UsageError(message)
    return (found - EPOCH) // timedelta(milliseconds=1)


def owed_of(text: str, zone: str) -> Owed:
    job, separator, rest = text.rpartition("=")
    if not separator or not job:
        message = f"--owed takes JOB=SCHEDULE or JOB=SCHEDULE@FROM..TO, not {text!r}"
        raise UsageError(message)
    from_ms = to_ms = None
    span = re.fullmatch(r"(.*)@([^@]*)\.\.([^@]*)", rest)
    if span is not None:
        rest = span[1]
        from_ms = instant_of("--owed", span[2]) if span[2] else None
        to_ms = instant_of("--owed", span[3]) if span[3] else None
    return Owed(job, schedule_of(rest.strip(), zone), from_ms, to_ms)


def schedule_of(text: str, zone: str) -> Schedule:
    try:
        period = re.fullmatch(r"every (\d+) ?s", text)
        if period is not None:
            return parse_schedule(every(seconds=int(period[1])), zone)
        if text.startswith("at "):
            moment = EPOCH + timedelta(milliseconds=instant_of("--owed", text[3:]))
            return parse_schedule(at(moment), zone)
        return parse_schedule(text, zone)
    except ValueError as error:
        message = f"--owed: {error}"
        raise UsageError(message) from error


def owed_runs(owed: Owed, history: History) -> Iterator[RunKey]:
    """Yield the runs of a job that must be settled."""
    from_ms, to_ms = owed.from_ms, owed.to_ms
    if from_ms is None:
        since = [
            entry.owed_from_ms
            for entry in history.entries
            if entry.what == REGISTERED and entry.job == owed.job and entry.owed_from_ms is not None
        ]
        if not since:
            message = f"the history does not say since when {owed.job!r} is owed: give @FROM..TO"
            raise UsageError(message)
        from_ms = since[-1]
    if to_ms is None:
        to_ms = max(entry.at_ms for entry in history.entries) - LAST_MINUTE_MS
        if to_ms < from_ms:
            message = (
                f"--owed: {owed.job!r} is owed from {iso(from_ms)} on, and the history ends at "
                f"{iso(to_ms)}, its last minute left out for runs under way: give @FROM..TO"
            )
            raise UsageError(message)
    scheduled_ms = owed.schedule.after(from_ms - 1)
    count = 0
    while scheduled_ms is not None and scheduled_ms <= to_ms:
        count += 1
        if count > MOST_OWED:
            message = f"--owed: {owed.job!r} has more than {MOST_OWED:,} scheduled times there"
            raise UsageError(message)
        yield RunKey(owed.job, scheduled_ms)
        scheduled_ms = owed.schedule.after(scheduled_ms)
    if not count:
        message = (
            f"--owed: no scheduled time of {owed.job!r} lies between {iso(from_ms)} and "
            f"{iso(to_ms)}: give @FROM..TO"
        )
        raise UsageError(message)


def read(files: Sequence[str], job: Optional[str]) -> History:
    once: dict[str, str] = {}  # a log that is read twice would look like a doubled run
    for file in files:
        once.setdefault(os.path.realpath(file), file)
    try:
        history = read_history(*once.values())
    except HistoryError as error:
        raise UsageError(str(error)) from error
    except OSError as error:
        message = f"{error.filename}: {error.strerror}"
        raise UsageError(message) from error
    if not history.entries:
        message = f"the history is empty: no entry in {', '.join(once.values())}"
        raise UsageError(message)
    if job is None:
        return history
    of_job = tuple(entry for entry in history.entries if entry.job in ("", job))
    if all(entry.job != job for entry in of_job):
        message = f"--job: the history knows no job {job!r}"
        raise UsageError(message)
    return history._replace(entries=of_job)


# -- what is answered ----------------------------------------------------------------------------


def progress(text: str) -> None:
    if sys.stderr is not None and sys.stderr.isatty():
        sys.stderr.write(f"\r\x1b[K{text}")
        sys.stderr.flush()


def shortened(history: History, report: Report, terms: Terms, limit: int) -> list[Shown]:
    """Return the first faults with the entries that show them."""
    found = []
    for place, fault in enumerate(report.faults[:limit], 1):
        progress(f"shortening fault {place} of {min(limit, len(report.faults))}")
        if fault.kind in ABSENCES:
            # Nothing shows what is missing: what there is of the run tells most.
            entries = tuple(
                entry
                for entry in history.entries
                if (entry.job, entry.scheduled_ms) == (fault.job, fault.scheduled_ms)
            )
        else:
            entries = shorten(history.entries, fault, terms=terms)
        found.append(Shown(fault, entries))
    progress("")
    return found


def figures(history: History, report: Report, owed: int) -> list[tuple[str, str, str]]:
    """Return the rows of the table of totals, where so many runs are owed: name, number, remark."""
    totals = report.totals
    others = totals.faults - totals.doubled - totals.lost
    rows = [
        ("entries", totals.entries, ""),
        ("lines cut", history.cut, "left by processes that were killed inside a write"),
        ("instances", totals.instances, ""),
        ("calls unanswered", totals.unanswered, ""),
        ("runs", totals.runs, ""),
        ("  finished", totals.finished, ""),
        ("  failed", totals.failed, ""),
        ("  skipped", totals.skipped, ""),
        ("  unsettled", totals.unsettled, "granted, and not settled when the history ends"),
        ("grants", totals.grants, ""),
        ("  takeovers", totals.takeovers, ""),
        ("  handed over", totals.hand_overs, ""),
        ("  fenced", totals.fenced, "settlements refused, since the token was an old one"),
        ("executions", totals.executions, ""),
        (
            "  once more",
            totals.executed_again,
            "beyond the first of their run, whatever for",
        ),
        *((f"missed: {reason}", count, "") for reason, count in totals.missed.items()),
    ]
    lines = [(name, f"{count:,}", text if count else "") for name, count, text in rows]
    lines.append(("", "", ""))
    lines.append(("doubled", f"{totals.doubled:,}", ""))
    remark = f"of {owed:,} owed" if owed else "--owed asks"
    lines.append(("lost", f"{totals.lost:,}" if owed else "-", remark))
    if totals.undecided:
        lines.append(("undecided", f"{totals.undecided:,}", "owed, and a lost reply may tell more"))
    lines.append(("other faults", f"{others:,}", ""))
    return lines


def run_row(row: RunRow) -> tuple[str, ...]:
    return (
        shown(row.job),
        iso(row.scheduled_ms),
        row.state or "-",
        str(len(row.attempts)),
        str(row.executions),
        str(sum(attempt.takeover for attempt in row.attempts)),
        shown(", ".join(attempt.ending or "?" for attempt in row.attempts)) or "-",
        ", ".join(dict.fromkeys(fault.kind for fault in row.faults)) or "-",
    )


HEADS = ("JOB", "SCHEDULED TIME", "STATE", ">GRANTS", ">RAN", ">TAKEN OVER", "ENDINGS", "WRONG")


def show(
    lines: list[tuple[str, str, str]], report: Report, found: list[Shown], *, runs: bool
) -> None:
    for line in table(("FIGURE", ">NUMBER", "REMARK"), lines):
        say(line)
    rows = [row for row in report.runs if runs or row.faults]
    if rows:
        say()
        for line in table(HEADS, [run_row(row) for row in rows]):
            say(line)
    for place, (fault, entries) in enumerate(found, 1):
        say()
        say(f"{place}. {fault.kind}: {shown(fault.message)}")
        if not entries:
            say("   the history holds nothing about it")
        cells = [
            (row.ms, shown(row.instance) or "-", row.scheduled, shown(row.what))
            for row in timeline(entries)
        ]
        for line in table((">MS", "INSTANCE", "RUN", "WHAT"), cells) if cells else ():
            say(f"   {line}")
    left = len(report.faults) - len(found)
    say()
    if left > 0:
        say(f"{left:,} more faults are not shown: raise --limit.")
    count = len(report.faults)
    many = "" if count == 1 else "s"
    say(f"{count:,} fault{many}." if count else "Nothing is wrong.")


def as_json(history: History, report: Report, found: list[Shown], *, runs: bool) -> dict[str, Any]:
    return {
        "totals": {"cut": history.cut, **asdict(report.totals)},
        "runs": [
            {
                "job": row.job,
                "scheduled_time": iso_json(row.scheduled_ms),
                "state": row.state,
                "attempts": [asdict(attempt) for attempt in row.attempts],
                "faults": [fault.kind for fault in row.faults],
            }
            for row in report.runs
            if runs or row.faults
        ],
        "faults": [
            {
                "kind": fault.kind,
                "doubled": fault.doubled,
                "message": fault.message,
                "job": fault.job,
                "scheduled_time": iso_json(fault.scheduled_ms),
                "entries": [entry.to_object() for entry in entries],
            }
            for fault, entries in found
        ],
    }


def judge(options: argparse.Namespace) -> int:
    limit, skew_ms = number("--limit", options.limit), number("--skew-ms", options.skew_ms)
    until_ms = None if options.until is None else instant_of("--until", options.until)
    owed = [owed_of(text, options.timezone) for text in options.owed]
    progress("reading")
    history = read(options.files, options.job)
    keys = tuple(dict.fromkeys(key for item in owed for key in owed_runs(item, history)))
    terms = Terms(history.exact, skew_ms, keys, until_ms, history.entries[0].sent_ms)
    progress(f"judging {len(history.entries):,} entries")
    report = check(history.entries, terms=terms)
    found = shortened(history, report, terms, limit)
    if options.json:
        say_json(as_json(history, report, found, runs=options.runs))
    else:
        lines = figures(history, report, len(keys))
        show(lines, report, found, runs=options.runs)
    return FAILED if report.faults else 0


def main(arguments: Optional[Sequence[str]] = None) -> int:
    options = parser().parse_args(arguments)
    try:
        status = judge(options)
        finish_stdout()
    except UsageError as error:
        progress("")
        sys.stderr.write(f"{NAME}: {one_line(str(error))}\n")
        return USAGE
    except BrokenPipeError:
        finish_stdout()
        return BROKEN_PIPE
    except KeyboardInterrupt:
        progress("")
        return INTERRUPTED
    return status


if __name__ == "__main__":
    use_environment()
    sys.exit(main())
