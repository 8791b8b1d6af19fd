"""One instance of the demo: a process of its own, with a scheduler as an application has one.

It writes a line of JSON to standard output for everything that happens, and ends when standard
input does: on the word of the demo, or because the demo's process is gone.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Final

from leasecron_sync.backends.sqlite import SQLiteLease
from leasecron_sync.clock import SystemClock
from leasecron_sync.errors import RunLost
from leasecron_sync.events import Event
from leasecron_sync.run import LeaseRun
from leasecron_sync.schedule import every
from leasecron_sync.scheduler import Scheduler

JOB: Final = "report"
PERIOD_S: Final = 1
BODY_MS: Final = 1_500
LEASE_MS: Final = 2_000

START: Final = b"start\n"
STOP: Final = b"stop\n"

_clock = SystemClock()


def tell(event: str, **details: object) -> None:
    """Write one line, so short that it arrives whole or not at all."""
    note = {"event": event, "at_ms": _clock.steady_ms(), **details}
    os.write(sys.stdout.fileno(), f"{json.dumps(note)}\n".encode())


def report(run: LeaseRun) -> None:
    """The job: work that takes a while and can be interrupted."""
    scheduled_ms = round(run.scheduled_time.timestamp() * 1000)

    def tell_run(event: str, at_ms: int) -> None:
        tell(event, at_ms=at_ms, scheduled_ms=scheduled_ms, attempt=run.attempt, token=run.token)

    tell_run("began", _clock.steady_ms())
    try:
        run.wait(BODY_MS / 1000)
    except RunLost:
        tell_run("lost", _clock.steady_ms())
        raise
    # The clock first: a lease that is trusted afterwards was live at this moment.
    at_ms = _clock.steady_ms()
    tell_run("lost" if run.lost else "returned", at_ms)


def tell_finished(event: Event) -> None:
    """Tell that the store has accepted the end of a run."""
    assert event.scheduled_time is not None
    scheduled_ms = round(event.scheduled_time.timestamp() * 1000)
    tell("finished", scheduled_ms=scheduled_ms, attempt=event.attempt, token=event.token)


def main(path: str) -> None:
    """Be an instance until standard input ends.

    Args:
        path: The SQLite file that all instances share.
    """
    # Blocked by the demo while it started this process, so that a Ctrl-C is the demo's alone.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGHUP})
    # One run at a time, so that the runs spread over the instances before your eyes.
    scheduler = Scheduler(SQLiteLease(path), lease_ms=LEASE_MS, max_concurrent_runs=1)
    scheduler.add_job(report, every(seconds=PERIOD_S), name=JOB, overlap="allow")
    scheduler.on("run_finished", tell_finished)
    tell("loaded")
    asked = sys.stdin.buffer.readline()
    if asked == START:
        scheduler.start()
        tell("ready", instance_id=scheduler.status().instance_id)
        asked = sys.stdin.buffer.readline()
        scheduler.stop(timeout=1.0)
    if asked != STOP:  # nobody is left to tidy up
        shutil.rmtree(Path(path).parent, ignore_errors=True)
