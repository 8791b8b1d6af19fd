"""Scripts that end just as a run comes due, on every Python that is here.

The number of scripts is small in an ordinary build. With ``LEASECRON_SYNC_LONG=1`` in the
environment it is a hundred for each Python and each kind of script. Other interpreters are taken
from ``LEASECRON_SYNC_PYTHONS`` (paths joined by colons); they need the library's dependencies.
"""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest

LONG = bool(os.environ.get("LEASECRON_SYNC_LONG"))
PYTHONS = [sys.executable, *filter(None, os.environ.get("LEASECRON_SYNC_PYTHONS", "").split(":"))]
SCRIPTS = 100 if LONG else 12
ROOT = Path(__file__).parents[2]

SCRIPT = """
import sys, time
from leasecron_sync import Scheduler, SQLiteLease, every
path, offset_ms, body, listens = sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4] == "1"
entered = open(path + ".entered", "a", buffering=1)
scheduler = Scheduler(SQLiteLease(path))

def handler(run):
    entered.write("%d %d\\n" % (run.token, run.attempt))
    if body == "waits":
        run.wait(30)
    elif body == "sleeps":
        time.sleep(0.2)

for number in range(3):
    scheduler.add_job(handler, every(seconds=1), name="job %d" % number)
if listens:
    for name in ("run_claimed", "run_finished", "run_handed_over"):
        scheduler.on(name, lambda event: None)
scheduler.start()
# The end comes between 50 ms before and 50 ms after a scheduled time.
left = 1 - time.time() % 1 + offset_ms / 1000
if left < 0.15:
    left += 1
time.sleep(left)
"""


def end_near_a_scheduled_time(
    python: str, folder: Path, number: int, count: int, body: str
) -> list[str]:
    """Run one script; return what is wrong with how it ended."""
    path = folder / f"{number}.db"
    offset_ms = -50 + 100 * number // max(1, count - 1)
    done = subprocess.run(
        [python, "-c", SCRIPT, str(path), str(offset_ms), body, str(number % 2)],
        check=False,
        capture_output=True,
        text=True,
        timeout=30,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    where = f"script {number} ({offset_ms:+d} ms): "
    wrong = []
    if done.returncode != 0:
        wrong.append(f"{where}status {done.returncode}")
    if done.stderr or done.stdout:
        wrong.append(f"{where}output {done.stdout!r} {done.stderr!r}")
    entered = {int(line.split()[0]) for line in Path(f"{path}.entered").read_text().splitlines()}
    with closing(sqlite3.connect(path)) as connection:
        for job_id, state, token in connection.execute(
            "SELECT job_id, state, token FROM leasecron_run"
        ).fetchall():
            if state == "running":
                began = "began" if token in entered else "never began"
                wrong.append(f"{where}a run of job {job_id} is left running, its handler {began}")
    return wrong


@pytest.mark.slow
@pytest.mark.timeout(600 if LONG else 60)
@pytest.mark.parametrize("body", ["returns", "waits", "sleeps"])
@pytest.mark.parametrize("python", PYTHONS, ids=lambda python: Path(python).parents[1].name)
def test_a_script_that_ends_as_a_run_comes_due_ends_quietly(
    python: str, body: str, tmp_path: Path
) -> None:
    with ThreadPoolExecutor(4) as pool:
        results = pool.map(
            lambda number: end_near_a_scheduled_time(python, tmp_path, number, SCRIPTS, body),
            range(SCRIPTS),
        )
        wrong = [text for found in results for text in found]
    assert wrong == []
