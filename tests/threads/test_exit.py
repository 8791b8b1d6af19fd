"""The interpreter ends while a scheduler runs: quietly, soon, and nothing is left claimed."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

from tests.threads.leftovers import eventually

PRELUDE = """
import os, sys, threading, time
from leasecron_sync import *
path = sys.argv[1]
scheduler = Scheduler(SQLiteLease(path), lease_ms=15_000)
entered = threading.Event()
"""


def run(script: str, path: Path, limit_s: float = 20) -> tuple[int, str, str, float]:
    """Run a script to its end: status, both outputs, seconds since it said it was at its end."""
    process = subprocess.Popen(
        [sys.executable, "-c", PRELUDE + script, str(path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        said = process.stdout.readline()
        began = time.monotonic()
        out, err = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        raise
    return process.returncode, said + out, err, time.monotonic() - began


def states(path: Path) -> dict[str, int]:
    with closing(sqlite3.connect(path)) as connection:
        rows = connection.execute("SELECT state, count(*) FROM leasecron_run GROUP BY state")
        return dict(rows.fetchall())


END = 'os.write(1, b"at the end\\n")\n'


def test_a_handler_that_waits_is_ended_and_its_run_handed_over(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    script = f"""
def handler(run):
    entered.set()
    run.wait(60)

scheduler.add_job(handler, every(seconds=1), name="job", overlap="allow")
scheduler.start()
assert entered.wait(5)
{END}"""
    status, _, err, took = run(script, path)
    assert (status, err) == (0, "")
    assert took < 3
    assert "running" not in states(path)


def test_a_handler_that_hangs_does_not_hold_the_process(tmp_path: Path) -> None:
    script = f"""
def handler():
    entered.set()
    threading.Event().wait(60)

scheduler.add_job(handler, every(seconds=1), name="job")
scheduler.on("run_finished", lambda event: None)
scheduler.start()
assert entered.wait(5)
{END}"""
    status, _, err, took = run(script, tmp_path / "store.db")
    assert (status, err) == (0, "")
    assert took < 4.5


def test_a_listener_that_hangs_does_not_hold_the_process(tmp_path: Path) -> None:
    script = f"""
def listener(event):
    entered.set()
    threading.Event().wait(60)

scheduler.add_job(lambda: None, every(seconds=1), name="job")
scheduler.on("run_finished", listener)
scheduler.start()
assert entered.wait(5)
{END}"""
    status, _, err, took = run(script, tmp_path / "store.db")
    assert (status, err) == (0, "")
    assert took < 4.5


def end_while_locked(script: str, path: Path) -> tuple[int, str, float]:
    """Run a script to its end while another process has the file: status, errors, seconds."""
    process = subprocess.Popen(
        [sys.executable, "-c", PRELUDE + script, str(path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "lock it\n"
        with closing(sqlite3.connect(path, isolation_level=None, timeout=10)) as connection:
            connection.execute("BEGIN IMMEDIATE")
            Path(f"{path}.locked").touch()
            assert process.stdout.readline() == "at the end\n"
            began = time.monotonic()
            _, err = process.communicate(timeout=20)
            took = time.monotonic() - began
            connection.execute("ROLLBACK")
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()
    return process.returncode, err, took


def test_a_locked_store_file_does_not_hold_the_process(tmp_path: Path) -> None:
    script = """
def handler(run):
    entered.set()
    run.wait(60)

for number in range(20):
    scheduler.add_job(handler, every(seconds=1), name="job %d" % number)
scheduler.add_job(lambda: None, every(seconds=1), name="other")
scheduler.start()
assert entered.wait(5)
os.write(1, b"lock it\\n")
while not os.path.exists(path + ".locked"):
    time.sleep(0.01)
time.sleep(1.2)
os.write(1, b"at the end\\n")
"""
    status, err, took = end_while_locked(script, tmp_path / "store.db")
    assert (status, err) == (0, "")
    assert took < 2 + 1.5


def test_an_error_that_ends_the_script_shows_that_error_alone(tmp_path: Path) -> None:
    script = f"""
scheduler.add_job(lambda run: run.wait(60), every(seconds=1), name="job")
scheduler.start()
{END}
raise SystemExit(7)
"""
    status, _, err, _ = run(script, tmp_path / "store.db")
    assert (status, err) == (7, "")


def test_after_the_exit_nothing_of_the_process_is_left(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    script = f"""
scheduler.add_job(lambda: None, every(seconds=1), name="job")
with scheduler:
    time.sleep(0.2)
{END}"""
    status, _, err, _ = run(script, path)
    assert (status, err) == (0, "")
    # The last connection was closed in order: SQLite has taken its log back into the file.
    assert eventually(lambda: not Path(f"{path}-wal").exists(), 2)


def test_runs_go_on_while_other_threads_outlive_the_main_thread(tmp_path: Path) -> None:
    """3.12.0 and 3.12.1 start no thread then: that is logged, and nothing more is claimed."""
    script = f"""
import logging
logging.basicConfig(level=logging.WARNING, stream=sys.stdout)
runs = []
scheduler.add_job(lambda run: runs.append(run), every(seconds=1), name="job")

def worker():
    time.sleep(2.5)
    sys.stdout.flush()
    handed_back = [record.hand_overs for record in scheduler.history("job")]
    print("runs", len(runs), "threads", scheduler.status().threads, handed_back, flush=True)

scheduler.start()
threading.Thread(target=worker).start()
{END}"""
    status, out, err, _ = run(script, tmp_path / "store.db")
    assert (status, err) == (0, "")
    if "runs 0" in out:
        assert (3, 12) <= sys.version_info < (3, 12, 2)
        assert out.count("the main thread has ended") == 1
        assert "'leasecron-timer': False" in out
        assert out.rstrip().endswith("[1]")
    else:
        assert "'leasecron-timer': True" in out
        assert "ERROR" not in out


def test_a_program_that_takes_long_in_its_exit_functions_claims_nothing_more(
    tmp_path: Path,
) -> None:
    """Its handlers would have no time, and from Python 3.12 on no thread."""
    path = tmp_path / "store.db"
    script = f"""
import atexit, logging
logging.basicConfig(level=logging.WARNING)
runs = []
scheduler.add_job(lambda run: runs.append(run), every(seconds=1), name="job")
scheduler.start()
atexit.register(lambda: os.write(1, b"runs %d\\n" % len(runs)))
atexit.register(time.sleep, 2.2)
{END}"""
    status, out, err, _ = run(script, path)
    assert (status, err) == (0, "")
    assert "runs 0" in out
    assert states(path) == {}


def test_the_exit_waits_for_a_start_of_another_thread_and_stops_it(tmp_path: Path) -> None:
    """Else the threads of that start would be cut off, whatever they had just claimed."""
    path = tmp_path / "store.db"
    script = f"""
import atexit
from leasecron_sync.backends import sqlite as module
probe, inside = module.SQLiteLease.probe, threading.Event()

def slow_probe(backend):
    inside.set()
    time.sleep(0.5)
    return probe(backend)

module.SQLiteLease.probe = slow_probe
# Called after what the start registers, since it was registered before.
atexit.register(lambda: os.write(1, scheduler.status().state.encode()))
scheduler.add_job(lambda: None, every(seconds=1), name="job")

def start():
    try:
        scheduler.start()
    except SchedulerStateError:  # from Python 3.12 on there are no threads for it
        pass

threading.Thread(target=start, daemon=True).start()
assert inside.wait(5)
{END}"""
    status, out, err, _ = run(script, path)
    assert (status, err) == (0, "")
    assert out.endswith("stopped")


def test_an_exit_while_the_store_is_locked_blames_no_handler(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    script = """
import logging, sqlite3
logging.basicConfig(level=logging.WARNING)

def handler(run):
    entered.set()
    run.wait(60)

scheduler.add_job(handler, every(seconds=1), name="job")
scheduler.start()
assert entered.wait(5)
os.write(1, b"lock it\\n")
while not os.path.exists(path + ".locked"):
    time.sleep(0.01)
os.write(1, b"at the end\\n")
"""
    status, err, _took = end_while_locked(script, path)
    assert status == 0
    assert "did not end in time" not in err
    assert "the end of a run was not told to the store" in err or "still in a call" in err
