"""One instance as a process on a claim backend: runs jobs and writes down what happens.

Its log is a history: what the store answered, the handlers, and the events.
"""

from __future__ import annotations

import argparse
import sys

from leasecron_sync import Run, Scheduler, every
from leasecron_sync.backends.urls import connect_claim
from leasecron_sync.testing import HistoryLog, RecordingClaim, executing


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--url", required=True)
    parser.add_argument("--log", required=True)
    parser.add_argument("--namespace", default="default")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--window-ms", type=int, default=60_000)
    options = parser.parse_args()
    log = HistoryLog(options.log)

    def handler(run: Run) -> None:
        with executing(log, run):
            run.wait(0.01)

    backend = RecordingClaim(connect_claim(options.url), log)
    scheduler = Scheduler(backend, namespace=options.namespace, claim_window_ms=options.window_ms)
    for number in range(options.jobs):
        scheduler.add_job(handler, every(seconds=options.every), name=f"job-{number}")
    log.listen(scheduler)
    scheduler.start()
    print("ready", flush=True)
    sys.stdin.readline()
    scheduler.stop(timeout=5.0)


if __name__ == "__main__":
    main()
