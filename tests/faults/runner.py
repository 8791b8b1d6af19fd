"""One instance as a process: runs jobs on an SQLite file and writes down what happens.

Its log is a history: what the store answered, the handlers, and the events.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable

from leasecron_sync import HandOver, LeaseRun, Scheduler, SQLiteLease, every
from leasecron_sync.testing import HistoryLog, RecordingLease, executing

SAW_LOSS = "saw_loss"
"""What a handler tells that sees at its end that its run was lost."""


def handler_of(log: HistoryLog, body: str, seconds: float) -> Callable[[LeaseRun], None]:
    def handler(run: LeaseRun) -> None:
        with executing(log, run):
            if body == "hand-over":
                raise HandOver
            if body == "wait":
                run.wait(seconds)
            else:  # as most code does: it only looks at the end
                until = time.monotonic() + seconds
                while time.monotonic() < until:
                    time.sleep(min(0.02, seconds))
            if run.lost:
                scheduled_ms = round(run.scheduled_time.timestamp() * 1000)
                log.note(
                    "told", event=SAW_LOSS, job=run.job, scheduled_ms=scheduled_ms, token=run.token
                )

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
    log = HistoryLog(options.log)
    scheduler = Scheduler(RecordingLease(SQLiteLease(options.path), log), lease_ms=options.lease_ms)
    for number in range(options.jobs):
        scheduler.add_job(
            handler_of(log, options.body, options.seconds),
            every(seconds=options.every),
            name=f"job-{number}",
            overlap=options.overlap,
            max_attempts=options.max_attempts,
            catch_up_ms=options.catch_up_ms,
        )
    log.listen(scheduler)
    if options.end == "signal":
        print("ready", flush=True)
        scheduler.run_forever()
    else:
        scheduler.start()
        print("ready", flush=True)
        sys.stdin.readline()
        scheduler.stop(timeout=options.stop_timeout)


if __name__ == "__main__":
    main()
