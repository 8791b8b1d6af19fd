"""One instance as a process, for the tests of SQLite's edges; does what its standard input says.

Everything that happens is one JSON object a line in its log, written in one piece.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import threading
import time
from typing import Any, Callable

from leasecron_sync import Event, LeaseRun, RunInterrupt, Scheduler, SQLiteLease, every
from leasecron_sync.backends import sqlite


class Log(logging.Handler):
    """Writes lines, also those that the library logs as warnings or worse."""

    def __init__(self, path: str) -> None:
        super().__init__(logging.WARNING)
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def write(self, what: str, **fields: object) -> None:
        line = {"what": what, "pid": os.getpid(), "at_ms": time.time_ns() // 1_000_000, **fields}
        os.write(self._file, (json.dumps(line) + "\n").encode())

    def emit(self, record: logging.LogRecord) -> None:
        self.write("logged", level=record.levelname, text=record.getMessage())


def handler_of(log: Log, seconds: float) -> Callable[[LeaseRun], None]:
    def handler(run: LeaseRun) -> None:
        run_ms = round(run.scheduled_time.timestamp() * 1000)
        fields: dict[str, Any] = {"job": run.job, "scheduled_ms": run_ms, "attempt": run.attempt}
        log.write("enter", token=run.token, **fields)
        try:
            run.wait(seconds)
        except RunInterrupt as error:
            log.write("interrupted", error=type(error).__name__, **fields)
            raise
        log.write("leave", **fields)

    return handler


def no_log(*_arguments: object) -> bool:
    """Stand in for the switch to write-ahead logging, as where a disk cannot have it."""
    return False


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--path", required=True)
    parser.add_argument("--log", required=True)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--lease-ms", type=int, default=15_000)
    parser.add_argument("--seconds", type=float, default=0.3)
    parser.add_argument("--rollback", action="store_true")
    options = parser.parse_args()
    if options.rollback:
        vars(sqlite)["use_log"] = no_log
    log = Log(options.log)
    logging.getLogger("leasecron_sync").addHandler(log)
    scheduler = Scheduler(SQLiteLease(options.path), lease_ms=options.lease_ms)
    for number in range(options.jobs):
        scheduler.add_job(
            handler_of(log, options.seconds),
            every(seconds=1),
            name=f"job-{number}",
            overlap="allow",
        )

    def note(event: Event) -> None:
        scheduled = event.scheduled_time
        scheduled_ms = None if scheduled is None else round(scheduled.timestamp() * 1000)
        log.write(event.name, job=event.job, scheduled_ms=scheduled_ms, reason=event.reason)

    scheduler.on("run_finished", note)
    scheduler.on("run_missed", note)
    scheduler.on("store_down", note)
    scheduler.on("store_back", note)
    scheduler.start()
    print("ready", flush=True)
    for line in sys.stdin:
        began = time.monotonic()
        alive = sorted(thread.name for thread in threading.enumerate())
        scheduler.stop(timeout=float(line))
        log.write("stopped", seconds=time.monotonic() - began, alive=alive)
        print("stopped", flush=True)


if __name__ == "__main__":
    main()
