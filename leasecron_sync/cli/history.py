"""The runs that a store remembers."""

from __future__ import annotations

import argparse
from typing import Final, Optional

from leasecron_sync.cli.next import bounded
from leasecron_sync.cli.output import cut, human, iso, iso_json, say, say_json, shown, table
from leasecron_sync.cli.store import configure_store, opened_store
from leasecron_sync.model import RunRecord
from leasecron_sync.scheduler import MAX_HISTORY

NAME: Final = "history"
HELP: Final = "show the runs that a store remembers, the newest scheduled time first"

_HEADS = ("SCHEDULED TIME", "JOB", "STATE", ">ATTEMPT", ">STARTED", ">TOOK", "HOLDER", "REASON")
_REASON_WIDTH = 60


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    configure_store(parser)
    parser.add_argument("--job", metavar="NAME", help="one job (default: all)")
    parser.add_argument("--limit", metavar="N", default="20", help="how many (default: 20)")
    parser.add_argument("--json", action="store_true", help="write JSON")


def command(options: argparse.Namespace) -> int:
    """List runs."""
    limit = bounded("--limit", options.limit, MAX_HISTORY)
    job: Optional[str] = options.job
    with opened_store(options.url, options.namespace) as backend:
        found = backend.history(job, limit)
    if options.json:
        say_json([_as_json(record) for record in found])
    elif found:
        for line in table(_HEADS, [_row(record) for record in found]):
            say(line)
    else:
        of_job = "" if job is None else f" of the job {shown(job)}"
        say(f"The store knows no run{of_job} in the namespace {shown(options.namespace)}.")
    return 0


def _row(record: RunRecord) -> tuple[str, ...]:
    late_ms = took_ms = None
    if record.claimed_ms is not None:
        late_ms = record.claimed_ms - record.key.scheduled_ms
        if record.settled_ms is not None:
            took_ms = record.settled_ms - record.claimed_ms
    return (
        iso(record.key.scheduled_ms),
        shown(record.key.job),
        record.state.value,
        str(record.attempt) if record.attempt else "-",
        "-" if late_ms is None else f"+{human(late_ms)}",
        human(took_ms),
        shown(record.holder) or "-",
        cut(shown(record.reason), _REASON_WIDTH),
    )


def _as_json(record: RunRecord) -> dict[str, object]:
    return {
        "job": record.key.job,
        "scheduled_time": iso_json(record.key.scheduled_ms),
        "state": record.state.value,
        "reason": record.reason,
        "attempt": record.attempt,
        "counted_failures": record.failures,
        "max_attempts": record.max_attempts,
        "hand_overs": record.hand_overs,
        "holder": record.holder,
        "token": record.token,
        "claimed_time": iso_json(record.claimed_ms),
        "settled_time": iso_json(record.settled_ms),
        "until_time": None if record.state.settled else iso_json(record.until_ms),
    }
