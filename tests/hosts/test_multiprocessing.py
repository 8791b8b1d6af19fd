"""Pools of processes beside a running scheduler, and inside its handlers."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Callable

import pytest

from tests.hosts.conftest import Outcome

ROOT = Path(__file__).parents[2]

METHODS = ["fork", "spawn", "forkserver"]

PROGRAM = """
import json, multiprocessing, os, sys, threading, time, warnings
from concurrent.futures import ProcessPoolExecutor

# From Python 3.12 on: forking a process that has threads is what this is about.
warnings.filterwarnings("ignore", message=".*multi-threaded.*fork", category=DeprecationWarning)

from leasecron_sync import Scheduler, SQLiteLease, every

path, method = sys.argv[1:]
scheduler = Scheduler(SQLiteLease(path), lease_ms=20_000)
starts, told = [], []


def square(number):
    time.sleep(0.05)
    # A child has a scheduler that is stopped, and no thread of its parent but the one that forked.
    others = set(threading.enumerate()) - {threading.current_thread()}
    names = [thread.name for thread in others if "leasecron" in thread.name]
    return number * number, scheduler.status().state, names, os.getpid()


def pool():
    context = multiprocessing.get_context(method)
    with ProcessPoolExecutor(2, mp_context=context) as executor:
        return list(executor.map(square, range(6)))


def wrong(results):
    squares, states, names, pids = zip(*results)
    return [*squares] != [0, 1, 4, 9, 16, 25] or set(states) != {"stopped"} or any(names)


@scheduler.job(every(seconds=1), name="pools")
def pools(run):
    starts.append((run.scheduled_time, run.attempt, os.getpid()))
    assert not wrong(pool())


@scheduler.job(every(seconds=1), name="plain", overlap="allow")
def plain(run):
    starts.append((run.scheduled_time, run.attempt, os.getpid()))


def main():
    for name in ("run_failed", "run_retried", "run_lost", "run_taken_over", "store_down"):
        scheduler.on(name, lambda event: told.append((event.name, event.reason)))
    scheduler.start()
    bad = [wrong(pool()) for _ in range(3)]
    end = time.monotonic() + 40
    finished = []
    while len(finished) < 6 and time.monotonic() < end:
        time.sleep(0.1)
        finished = [r for r in scheduler.history() if r.state.value == "finished"]
    jobs = {record.key.job for record in finished}
    scheduler.stop(30)
    attempts = {record.attempt for record in finished}
    print(json.dumps({"bad": any(bad), "told": told, "jobs": sorted(jobs),
                      "attempts": sorted(attempts),
                      "foreign": sorted({pid for _, _, pid in starts} - {os.getpid()})}))


if __name__ == "__main__":
    main()
"""


def ended(method: str) -> subprocess.CompletedProcess[str]:
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder, "program.py")
        program.write_text(PROGRAM)
        return subprocess.run(
            [sys.executable, str(program), f"{folder}/store.db", method],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )


CAMPAIGNS: dict[str, Callable[[], object]] = {
    method: functools.partial(ended, method) for method in METHODS
}


@pytest.mark.timeout(240)
@pytest.mark.parametrize("method", METHODS)
def test_pools_of_processes_beside_and_inside_handlers_do_no_harm(
    method: str, outcome: Outcome
) -> None:
    done = outcome(method)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    assert json.loads(done.stdout) == {
        "bad": False,
        "told": [],
        "jobs": ["plain", "pools"],
        "attempts": [1],
        "foreign": [],
    }
