"""The jobs that a store knows."""

from __future__ import annotations

import argparse
from typing import Final

from leasecron_sync.cli.next import bounded
from leasecron_sync.cli.output import complain, iso, iso_json, say, say_json, shown, table
from leasecron_sync.cli.store import configure_store, opened_store
from leasecron_sync.model import JobSummary

NAME: Final = "jobs"
HELP: Final = "show the jobs that a store knows, with the newest run of each"

MAX_JOBS: Final = 10_000
"""Most jobs that are shown."""

_HEADS = ("JOB", "NEWEST RUN", "STATE", ">ATTEMPT", ">UNSETTLED", "OWED SINCE")


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    configure_store(parser)
    parser.add_argument("--limit", metavar="N", default="1000", help="how many (default: 1000)")
    parser.add_argument("--json", action="store_true", help="write JSON")


def command(options: argparse.Namespace) -> int:
    """List jobs by name."""
    limit = bounded("--limit", options.limit, MAX_JOBS)
    with opened_store(options.url, options.namespace) as backend:
        found = list(backend.jobs(limit + 1))
    if len(found) > limit:
        complain(f"there are more than {limit:,} jobs, only the first are shown (see --limit)")
    found = found[:limit]
    if options.json:
        say_json([_as_json(item) for item in found])
    elif found:
        for line in table(_HEADS, [_row(item) for item in found]):
            say(line)
    else:
        say(f"The store knows no job in the namespace {shown(options.namespace)}.")
    return 0


def _row(item: JobSummary) -> tuple[str, ...]:
    newest = item.newest
    run = ("-", "-", "-")
    if newest is not None:
        run = (iso(newest.key.scheduled_ms), newest.state.value, str(newest.attempt))
    return (shown(item.job), *run, str(item.unsettled), iso(item.owed_from_ms))


def _as_json(item: JobSummary) -> dict[str, object]:
    newest = item.newest
    return {
        "job": item.job,
        "newest_scheduled_time": None if newest is None else iso_json(newest.key.scheduled_ms),
        "newest_state": None if newest is None else newest.state.value,
        "newest_attempt": None if newest is None else newest.attempt,
        "unsettled": item.unsettled,
        "owed_from": iso_json(item.owed_from_ms),
    }
