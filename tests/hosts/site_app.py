"""A web application with a scheduler, for whichever server the tests put it under.

Its settings come from the environment. Whatever its processes do goes to one history; which of them
executed what, to ``workers.log``.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Callable

from leasecron_sync import LeaseRun, Scheduler, connect_lease, every
from leasecron_sync.testing import HistoryLog, RecordingLease, executing

FOLDER = Path(os.environ["SITE_FOLDER"])
EVERY_S = int(os.environ["SITE_EVERY_S"])
LONG_RUN_S = float(os.environ["SITE_LONG_RUN_S"])
HISTORY = FOLDER / "history.jsonl"
WORKERS = FOLDER / "workers.log"

logging.basicConfig(level=logging.INFO, format="%(process)d %(levelname)s %(name)s: %(message)s")

log = HistoryLog(HISTORY)
scheduler = Scheduler(
    RecordingLease(connect_lease(os.environ["SITE_STORE"]), log),
    namespace=os.environ["SITE_NAMESPACE"],
    lease_ms=int(os.environ["SITE_LEASE_MS"]),
)
log.listen(scheduler)


def seconds_of(scheduled_s: int) -> float:
    """Return how long a run takes: every second one is long enough to be cut."""
    return LONG_RUN_S if scheduled_s // EVERY_S % 2 else 0.1


@scheduler.job(every(seconds=EVERY_S), name="job", overlap="allow", max_attempts=50)
def job(run: LeaseRun) -> None:
    """Note who executes it, and take a while."""
    line = json.dumps({"pid": os.getpid(), "token": run.token})
    with WORKERS.open("a") as file:
        file.write(line + "\n")
    with executing(log, run):
        lasts_s = seconds_of(round(run.scheduled_time.timestamp()))
        if os.environ.get("SITE_IGNORES_STOP"):
            time.sleep(lasts_s)
        else:
            run.wait(lasts_s)


def application(_environ: dict[str, Any], start_response: Callable[..., object]) -> Iterable[bytes]:
    """Tell which process answers, and how its scheduler is."""
    start_response("200 OK", [("Content-Type", "application/json")])
    status = scheduler.status()
    answer = {"pid": os.getpid(), "state": status.state, "problems": list(status.problems)}
    return [json.dumps(answer).encode()]


if os.environ["SITE_START"] == "import":
    scheduler.start()
