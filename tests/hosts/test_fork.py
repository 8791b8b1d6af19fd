"""Forked children: stopped, able to start, and harmless to their parent.

``LEASECRON_SYNC_LONG=1`` forks a hundred times under load instead of twenty times.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.hosts.scripts import LONG, run


@pytest.fixture(params=["memory", "sqlite"])
def backend(request: pytest.FixtureRequest) -> str:
    return {"memory": "MemoryLease()", "sqlite": "SQLiteLease(path)"}[str(request.param)]


def test_after_a_fork_the_child_is_stopped_and_can_be_started(backend: str, tmp_path: Path) -> None:
    said = run(
        f"""
        scheduler = Scheduler({backend})
        pids = []
        scheduler.add_job(lambda run: pids.append(os.getpid()), every(seconds=1), name="job")
        scheduler.on("run_finished", lambda event: None)
        scheduler.start()
        assert eventually(lambda: pids)
        before = scheduler.status().instance_id
        pid = os.fork()
        if pid == 0:
            state = scheduler.status().state
            threads = [t.name for t in threading.enumerate() if t.name.startswith("leasecron")]
            scheduler.stop()
            del pids[:]
            scheduler.start()
            after = scheduler.status().instance_id
            alive = all(scheduler.status().threads.values())
            scheduler.stop()
            say(state=state, threads=threads, other=after != before, alive=alive)
            os._exit(0)
        status = reap(pid)
        ran = len(pids)
        goes_on = eventually(lambda: len(pids) >= ran + 2)
        same = scheduler.status().instance_id == before
        scheduler.stop()
        say(status=status, goes_on=goes_on, same=same, only_own=set(pids) == {{os.getpid()}})
        """,
        tmp_path / "store.db",
    )
    assert said == [
        {"state": "stopped", "threads": [], "other": True, "alive": True},
        {"status": 0, "goes_on": True, "same": True, "only_own": True},
    ]


@pytest.mark.parametrize("end", ["os._exit(0)", "sys.exit(0)", "return", "raise ValueError"])
def test_a_handler_that_forks_is_settled_once_by_the_parent(
    end: str, backend: str, tmp_path: Path
) -> None:
    said = run(
        f"""
        import logging
        scheduler = Scheduler({backend}, lease_ms=3_000)
        children, events = [], []
        threading.excepthook = lambda arguments: None  # the child's last words

        def handler(run):
            parent = os.getpid()
            pid = os.fork()
            if pid == 0:
                {end}
            children.append(reap(pid))
            run.wait(0.3)

        def note(event):
            events.append((event.name, os.getpid()))

        for name in ("run_finished", "run_failed", "run_retried", "run_lost", "run_handed_over"):
            scheduler.on(name, note)
        scheduler.add_job(handler, every(seconds=1), name="job")
        parent = os.getpid()
        scheduler.start()
        assert eventually(lambda: len(events) >= 3), (events, children)
        alive = all(scheduler.status().threads.values())
        attempts = {{record.attempt for record in scheduler.history("job") if record.attempt}}
        scheduler.stop()
        assert os.getpid() == parent
        say(events=sorted(set(events)) == [("run_finished", parent)], alive=alive,
            attempts=sorted(attempts), hang="hangs" in children)
        """,
        tmp_path / "store.db",
    )
    assert said == [{"events": True, "alive": True, "attempts": [1], "hang": False}]


def test_a_child_that_lives_on_in_a_handler_settles_and_renews_nothing(tmp_path: Path) -> None:
    """The parent is killed while its handler's child lives: the run is free after a lease."""
    said = run(
        """
        ready = os.pipe()
        middle = os.fork()
        if middle == 0:
            scheduler = Scheduler(SQLiteLease(path), lease_ms=900)

            def handler(run):
                pid = os.fork()
                if pid == 0:
                    os.write(ready[1], ("%d\\n" % os.getpid()).encode())
                    time.sleep(4)
                    return
                time.sleep(60)

            scheduler.add_job(handler, every(seconds=1), name="job")
            scheduler.start()
            time.sleep(60)
        child = int(os.read(ready[0], 20))
        os.kill(middle, signal.SIGKILL)
        os.waitpid(middle, 0)
        attempts = []
        other = Scheduler(SQLiteLease(path), lease_ms=900)
        other.add_job(lambda run: attempts.append(run.attempt), every(seconds=1), name="job")
        other.start()
        taken = eventually(lambda: 2 in attempts, 3.5)
        time.sleep(3)

        def states():
            return sorted({record.state.value for record in other.history("job")})

        # The newest run may be in progress.
        found = []

        def settled():
            found[:] = states()
            return "running" not in found

        eventually(settled)
        other.stop()
        say(taken=taken, states=found)
        """,
        tmp_path / "store.db",
    )
    assert said[0]["taken"]
    assert set(said[0]["states"]) <= {"finished", "skipped"}


@pytest.mark.parametrize("end", ["os._exit(0)", "sys.exit(0)"])
def test_the_end_of_a_child_does_not_harm_the_parents_store(end: str, tmp_path: Path) -> None:
    said = run(
        f"""
        scheduler = Scheduler(SQLiteLease(path))
        done = []
        scheduler.add_job(lambda run: done.append(run.token), every(seconds=1), name="job")
        scheduler.start()
        assert eventually(lambda: done)
        for _ in range(5):
            pid = os.fork()
            if pid == 0:
                {end}
            assert reap(pid) == 0
        before = len(done)
        goes_on = eventually(lambda: len(done) >= before + 2)

        def finished():
            records = scheduler.history("job")
            return len([record for record in records if record.state.value == "finished"])

        complete = eventually(lambda: finished() == len(done))
        down = scheduler.status().store_down_since
        scheduler.stop()
        say(goes_on=goes_on, complete=complete, down=down)
        """,
        tmp_path / "store.db",
    )
    assert said == [{"goes_on": True, "complete": True, "down": None}]


def test_a_child_forked_inside_a_write_of_its_parent_can_use_the_store(tmp_path: Path) -> None:
    """SQLite keeps account of its locks per process, and a fork copies that account."""
    said = run(
        """
        backend = SQLiteLease(path)
        scheduler = Scheduler(backend)
        scheduler.start()
        inside, armed, real = threading.Event(), threading.Event(), backend._now_ms

        def slow_clock():  # read by the store inside its transaction
            if armed.is_set() and not inside.is_set():
                inside.set()
                time.sleep(0.5)
            return real()

        backend._now_ms = slow_clock
        armed.set()
        scheduler.add_job(lambda: None, every(seconds=1), name="job")
        assert inside.wait(5)
        pid = os.fork()
        if pid == 0:
            done = []
            scheduler.add_job(lambda: done.append(1), every(seconds=1), name="of the child")
            scheduler.start()
            worked = eventually(lambda: done, 5)
            say(worked=worked, down=scheduler.status().store_down_since is not None)
            os._exit(0)
        reap(pid, 15)
        scheduler.stop()
        """,
        tmp_path / "store.db",
    )
    assert said == [{"worked": True, "down": False}]


THIRD = """if True:
    import os, sys, time
    from leasecron_sync import *
    log = os.open(sys.argv[1] + ".log", os.O_WRONLY | os.O_APPEND)

    def handler(run):
        os.write(log, b"%d %d 3\\n" % (run.scheduled_time.timestamp(), run.attempt))

    scheduler = Scheduler(SQLiteLease(sys.argv[1]))
    scheduler.add_job(handler, every(seconds=1), name="job")
    scheduler.start()
    time.sleep(4)
    scheduler.stop()
"""


def test_a_child_goes_on_with_the_same_store_when_its_parent_stops(tmp_path: Path) -> None:
    """A parent that was the last one would take SQLite's log away from under its child."""
    said = run(
        f"""
        import subprocess
        log = os.open(path + ".log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

        who = [1]

        def handler(run):
            line = b"%d %d %d\\n" % (run.scheduled_time.timestamp(), run.attempt, who[0])
            os.write(log, line)

        scheduler = Scheduler(SQLiteLease(path))
        scheduler.add_job(handler, every(seconds=1), name="job")
        scheduler.start()
        assert eventually(lambda: os.path.getsize(path + ".log"))
        time.sleep(0.4)  # it is not in a call of the store now
        child = os.fork()
        if child == 0:
            who[0] = 2
            scheduler.start()
            time.sleep(6)
            scheduler.stop()
            os._exit(0)
        time.sleep(0.3)
        scheduler.stop()
        # Another program on the host, that inherited nothing.
        third = subprocess.run([sys.executable, "-c", {THIRD!r}, path])
        status = reap(child, 15)
        lines = [tuple(map(int, line.split())) for line in open(path + ".log")]
        starts = [line[:2] for line in lines]
        say(
            statuses=[status, third.returncode],
            doubled=len(starts) - len(set(starts)),
            executed={{1, 2}} <= {{line[2] for line in lines}},
        )
        """,
        tmp_path / "store.db",
    )
    assert said == [{"statuses": [0, 0], "doubled": 0, "executed": True}]


def test_a_child_forked_while_another_thread_starts_the_scheduler_can_start(tmp_path: Path) -> None:
    said = run(
        """
        from leasecron_sync.testing.faults import FaultyLease
        backend = FaultyLease(MemoryLease())
        inside, go_on = threading.Event(), threading.Event()

        def hold():
            inside.set()
            go_on.wait(20)

        backend.faults.slow("probe", before=hold)
        scheduler = Scheduler(backend)
        starter = threading.Thread(target=scheduler.start)
        starter.start()
        assert inside.wait(5)
        pid = os.fork()
        if pid == 0:
            backend.faults._lock = threading.Lock()
            backend.faults.clear()
            scheduler.add_job(lambda: None, every(seconds=1), name="job")
            scheduler.start()
            scheduler.stop()
            os._exit(0)
        say(child=reap(pid, 5))
        go_on.set()
        starter.join()
        scheduler.stop()
        """,
        tmp_path / "store.db",
    )
    assert said == [{"child": 0}]


def test_a_child_forked_while_the_parent_stops_can_start(tmp_path: Path) -> None:
    said = run(
        """
        scheduler = Scheduler(SQLiteLease(path))
        entered, go_on = threading.Event(), threading.Event()

        def handler():
            entered.set()
            go_on.wait(20)

        scheduler.add_job(handler, every(seconds=1), name="job")
        scheduler.start()
        assert entered.wait(5)
        stopper = threading.Thread(target=scheduler.stop)
        stopper.start()
        assert eventually(lambda: scheduler.status().state == "stopping")
        pid = os.fork()
        if pid == 0:
            state = scheduler.status().state
            scheduler.start()
            scheduler.stop()
            say(state=state)
            os._exit(0)
        say(child=reap(pid, 5))
        go_on.set()
        stopper.join()
        """,
        tmp_path / "store.db",
    )
    assert said == [{"state": "stopped"}, {"child": 0}]


@pytest.mark.slow
@pytest.mark.timeout(600 if LONG else 120)
@pytest.mark.parametrize("end", ["os._exit(0)", "sys.exit(0)"])
def test_forks_under_load_leave_no_gap_in_the_parents_runs(end: str, tmp_path: Path) -> None:
    said = run(
        f"""
        forks = {100 if LONG else 20}
        scheduler = Scheduler(SQLiteLease(path), max_concurrent_runs=200)
        series, stop = Series(scheduler), threading.Event()
        for number in range(40):
            series.add("short %d" % number)
        for number in range(20):  # of these, twenty handlers run at any time
            series.add("long %d" % number, lambda run: run.wait(1.1))
        for name in ("run_claimed", "run_finished"):
            scheduler.on(name, lambda event: None)
        scheduler.start()

        def read():
            # Somebody is inside of SQLite nearly all the time.
            while not stop.is_set():
                scheduler.history(None, 200)

        readers = [threading.Thread(target=read) for _ in range(2)]
        for reader in readers:
            reader.start()
        assert series.goes_on(60)
        parents_id, statuses = scheduler.status().instance_id, []
        for number in range(forks):
            time.sleep(0.003 * (number % 7))
            pid = os.fork()
            if pid == 0:
                # Not each of them: an instance that stops hands back what it has just won, and a
                # run that this happens to for the tenth time is given up.
                wrong = shared() if number % 5 else works(scheduler, parents_id)
                if wrong:
                    say(child=wrong)
                    os._exit(1)
                {end}
            statuses.append(reap(pid, 20))
        stop.set()
        for reader in readers:
            reader.join()
        goes_on = series.goes_on(60)
        alive = all(scheduler.status().threads.values())
        say(bad=[status for status in statuses if status != 0], goes_on=goes_on, alive=alive,
            wrong=series.wrong())
        scheduler.stop()
        """,
        tmp_path / "store.db",
        limit_s=580 if LONG else 100,
    )
    assert said == [{"bad": [], "goes_on": True, "alive": True, "wrong": []}]


MULTIPROCESSING = """
import json, multiprocessing, os, sys, threading, time, warnings
warnings.filterwarnings("ignore", message=".*multi-threaded.*fork", category=DeprecationWarning)
from leasecron_sync import Scheduler, SQLiteLease, every

def eventually(condition, limit_s=10):
    end = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True

scheduler = Scheduler(SQLiteLease(sys.argv[1]))
done = []

@scheduler.job(every(seconds=1), name="job")
def handler(run):
    done.append(os.getpid())

# Twenty handlers are at work whenever a child is made.
for number in range(20):
    scheduler.add_job(lambda run: run.wait(0.9), every(seconds=1), name="long %d" % number)

def child(results):
    before = scheduler.status().state
    scheduler.start()
    results.put([before, scheduler.status().instance_id])
    scheduler.stop()

if __name__ == "__main__":
    context = multiprocessing.get_context(sys.argv[2])
    scheduler.start()
    assert eventually(lambda: done)
    results = context.Queue()
    children = [context.Process(target=child, args=(results,)) for _ in range(3)]
    for process in children:
        process.start()
    answers = [results.get(timeout=20) for _ in children]
    for process in children:
        process.join(20)
    before = len(done)
    goes_on = eventually(lambda: len(done) >= before + 2)
    ids = {answer[1] for answer in answers} | {scheduler.status().instance_id}
    scheduler.stop()
    print(json.dumps({
        "states": [answer[0] for answer in answers],
        "codes": [process.exitcode for process in children],
        "ids": len(ids),
        "goes_on": goes_on,
    }))
"""


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_children_of_multiprocessing(method: str, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(MULTIPROCESSING)
    done = subprocess.run(
        [sys.executable, str(program), str(tmp_path / "store.db"), method],
        check=False,
        capture_output=True,
        text=True,
        timeout=28,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout) == {
        "states": ["stopped"] * 3,
        "codes": [0] * 3,
        "ids": 4,
        "goes_on": True,
    }


def test_a_child_of_multiprocessing_that_leaves_without_stop_gives_its_runs_back(
    tmp_path: Path,
) -> None:
    """Such a child ends without the functions that were registered for the interpreter's exit."""
    said = run(
        """
        import multiprocessing
        scheduler = Scheduler(SQLiteLease(path), lease_ms=20_000)
        entered = threading.Event()

        def handler(run):
            entered.set()
            run.wait(60)

        scheduler.add_job(handler, every(seconds=1), name="job")

        def child():
            scheduler.start()
            assert entered.wait(5)

        process = multiprocessing.get_context("fork").Process(target=child)
        process.start()
        process.join(15)
        import sqlite3
        rows = sqlite3.connect(path).execute("SELECT state FROM leasecron_run")
        states = [row[0] for row in rows]
        say(code=process.exitcode, left_running="running" in states)
        """,
        tmp_path / "store.db",
    )
    assert said == [{"code": 0, "left_running": False}]
