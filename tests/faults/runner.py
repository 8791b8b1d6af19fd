"""One instance as a process: runs jobs on an SQLite file and writes down what happens.

Every line of its log is one JSON object, written in one piece, so that a kill loses nothing that
was logged before. Times are CLOCK_BOOTTIME, which all processes of a host share.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable

from leasecron_sync import Event, HandOver, LeaseRun, RunInterrupt, Scheduler, SQLiteLease, every


class Log:
    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def write(self, what: str, **fields: object) -> None:
        now_ms = time.clock_gettime_ns(time.CLOCK_BOOTTIME) // 1_000_000
        wall_ms = time.time_ns() // 1_000_000
        head = {"what": what, "pid": os.getpid(), "at_ms": now_ms, "wall_ms": wall_ms}
        line = json.dumps({**head, **fields}) + "\n"
        os.write(self._file, line.encode())


def handler_of(log: Log, body: str, seconds: float) -> Callable[[LeaseRun], None]:
    def handler(run: LeaseRun) -> None:
        key = {
            "job": run.job,
            "scheduled_ms": round(run.scheduled_time.timestamp() * 1000),
            "attempt": run.attempt,
            "token": run.token,
        }
        log.write("enter", **key)
        try:
            if body == "hand-over":
                log.write("raised", **key)
                raise HandOver
            if body == "wait":
                run.wait(seconds)
            else:  # as most code does: it only looks at the end
                until = time.monotonic() + seconds
                while time.monotonic() < until:
                    time.sleep(min(0.02, seconds))
        except RunInterrupt as error:
            log.write("interrupted", error=type(error).__name__, **key)
            raise
        log.write("leave", lost=run.lost, **key)

    return handler


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--path", required=True)
    parser.add_argument("--log", required=True)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--overlap", default="skip")
    parser.add_argument("--lease-ms", type=int, default=2_000)
    parser.add_argument("--seconds", type=float, default=0.05)
    parser.add_argument("--body", default="sleep")
    parser.add_argument("--catch-up-ms", type=int, default=60_000)
    parser.add_argument("--end", default="line", choices=["line", "signal"])
    parser.add_argument("--stop-timeout", type=float, default=10.0)
    parser.add_argument("--max-attempts", type=int, default=3)
    options = parser.parse_args()
    log = Log(options.log)
    scheduler = Scheduler(SQLiteLease(options.path), lease_ms=options.lease_ms)
    for number in range(options.jobs):
        scheduler.add_job(
            handler_of(log, options.body, options.seconds),
            every(seconds=options.every),
            name=f"job-{number}",
            overlap=options.overlap,
            max_attempts=options.max_attempts,
            catch_up_ms=options.catch_up_ms,
        )

    def note(event: Event) -> None:
        scheduled = event.scheduled_time
        log.write(
            event.name,
            job=event.job,
            scheduled_ms=None if scheduled is None else round(scheduled.timestamp() * 1000),
            attempt=event.attempt,
            token=event.token,
            reason=event.reason,
            instance=event.instance_id,
        )

    for name in (
        "run_claimed", "run_finished", "run_failed", "run_retried", "run_lost", "run_taken_over",
        "run_handed_over", "run_skipped", "run_missed", "store_down", "store_back",
    ):  # fmt: skip
        scheduler.on(name, note)
    if options.end == "signal":
        print("ready", flush=True)
        scheduler.run_forever()
    else:
        scheduler.start()
        log.write("ready", instance=scheduler.status().instance_id)
        print("ready", flush=True)
        sys.stdin.readline()
        scheduler.stop(timeout=options.stop_timeout)
    log.write("stopped")


if __name__ == "__main__":
    main()
