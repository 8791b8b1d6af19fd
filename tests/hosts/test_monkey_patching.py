"""Threads that gevent or eventlet have replaced: supported within limits, or refused."""

from __future__ import annotations

import importlib.util
import os
import signal
import socket
import subprocess
import sys
import textwrap
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from leasecron_sync import LeaseRun, Scheduler, SQLiteLease, every
from leasecron_sync.testing import HistoryLog, RecordingLease, check, executing, read_history
from tests.services.fixtures import had
from tests.services.postgres import new_database
from tests.services.process import eventually
from tests.services.services import Services

ROOT = Path(__file__).parents[2]


def needs(package: str) -> pytest.MarkDecorator:
    missing = importlib.util.find_spec(package) is None
    return pytest.mark.skipif(missing, reason=f"{package} is not installed")


PATCHED = """
from gevent import monkey
monkey.patch_all()
"""
PRELUDE = """
import json, logging, os, sys, threading, time
logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(levelname)s %(message)s")
from leasecron_sync import *

def eventually(condition, limit_s=20):
    end = time.monotonic() + limit_s
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    return condition()

def compute(seconds):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass
"""


def start(script: str, *arguments: str, patch: str = PATCHED) -> subprocess.Popen[str]:
    """Start a script after threads have been replaced."""
    # Eventlet warns of itself, and so does gevent of what was imported too early.
    code = patch + PRELUDE + textwrap.dedent(script)
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", code, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )


def run(script: str, *arguments: str, patch: str = PATCHED) -> str:
    """Run a script that must end well and write nothing on standard error; return its output."""
    with start(script, *arguments, patch=patch) as process:
        try:
            out, err = process.communicate(timeout=60)
        finally:
            process.kill()
    assert (process.returncode, err) == (0, ""), out
    return out


@pytest.fixture(params=["sqlite", "postgres", "redis"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A store of this test."""
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path}/store.db"
        return
    services: Services = request.getfixturevalue("services")
    if request.param == "redis":
        yield had(services.redis).url
        return
    with new_database(had(services.postgres), f"test_{uuid.uuid4().hex}") as url:
        yield url


@pytest.mark.timeout(90)
@needs("gevent")
def test_runs_are_executed_renewed_and_handed_over_in_greenlets(url: str, namespace: str) -> None:
    out = run(
        """
        scheduler = Scheduler(connect_lease(sys.argv[1]), namespace=sys.argv[2], lease_ms=1_500)
        done, cut = [], []

        @scheduler.job(every(seconds=1), overlap="allow")
        def short(run):
            run.wait(0.1)
            done.append(run.token)

        @scheduler.job(every(seconds=1), name="long")
        def long(run):
            try:
                run.wait(60)
            except BaseException as error:
                cut.append(type(error).__name__)
                raise

        told = []
        for name in ("run_lost", "run_failed", "run_retried", "run_taken_over", "store_down"):
            scheduler.on(name, told.append)
        scheduler.start()
        assert eventually(lambda: len(done) >= 2)
        problems = scheduler.status().problems
        scheduler.stop(5)
        print("RESULT", json.dumps([problems, cut, [event.name for event in told]]))
        names = [thread.name for thread in threading.enumerate() if "leasecron" in thread.name]
        print("THREADS", names)
        """,
        url,
        namespace,
    )
    assert 'RESULT [[], ["RunStopping"], []]' in out
    assert "THREADS []" in out
    assert "run handed over job='long'" in out
    assert "INFO threads are greenlets of gevent here" in out


@pytest.mark.timeout(90)
@needs("gevent")
@pytest.mark.parametrize("kind", ["nats", "rabbitmq", "redis"])
def test_claims_are_made_in_greenlets_and_hold_up_no_other(
    kind: str, services: Services, namespace: str
) -> None:
    url = had(getattr(services, kind)).url
    out = run(
        """
        import gevent
        turns, done = [], []

        def turn():
            while True:
                turns.append(time.monotonic())
                gevent.sleep(0.01)

        scheduler = Scheduler(connect_claim(sys.argv[1]), namespace=sys.argv[2])
        scheduler.add_job(lambda: done.append(len(turns)), every(seconds=1), name="job")
        gevent.spawn(turn)
        scheduler.start()
        assert eventually(lambda: len(done) >= 3)
        problems = scheduler.status().problems
        scheduler.stop(5)
        names = [thread.name for thread in threading.enumerate() if "leasecron" in thread.name]
        print("RESULT", problems, names, done[-1] - done[0] > 20)
        """,
        f"{url}?strategy=script" if kind == "redis" else url,
        namespace,
    )
    assert "RESULT [] [] True" in out


@pytest.mark.timeout(90)
@needs("gevent")
def test_a_process_in_greenlets_hands_over_when_it_ends_without_a_stop(tmp_path: Path) -> None:
    out = run(
        """
        scheduler = Scheduler(SQLiteLease(sys.argv[1]))
        entered = threading.Event()

        @scheduler.job(every(seconds=1), name="job")
        def job(run):
            entered.set()
            run.wait(60)

        scheduler.start()
        assert entered.wait(20)
        """,
        str(tmp_path / "store.db"),
    )
    assert "run handed over job='job'" in out


@pytest.mark.timeout(90)
@needs("gevent")
def test_a_worker_process_in_greenlets_ends_by_a_signal(tmp_path: Path) -> None:
    script = """
        scheduler = Scheduler(SQLiteLease(sys.argv[1]))
        scheduler.job(every(seconds=1), name="job")(lambda run: run.wait(60))
        scheduler.on("run_started", lambda event: print("STARTED", flush=True))
        scheduler.run_forever()
        """
    with start(script, str(tmp_path / "store.db")) as process:
        try:
            assert process.stdout is not None
            while "STARTED" not in (line := process.stdout.readline()):
                assert line, process.communicate()
            process.send_signal(signal.SIGTERM)
            out, err = process.communicate(timeout=60)
        finally:
            process.kill()
    assert (process.returncode, err) == (0, ""), out
    assert "run handed over job='job'" in out


@pytest.mark.timeout(90)
@needs("gevent")
@pytest.mark.parametrize("scheme", ["redis", "postgresql"])
def test_a_store_that_hangs_does_not_hold_up_the_other_greenlets(scheme: str) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen(50)
        out = run(
            """
            import gevent
            turns = []

            def turn():
                while True:
                    turns.append(1)
                    gevent.sleep(0.01)

            scheduler = Scheduler(connect_lease(sys.argv[1]), lease_ms=3_000)
            scheduler.add_job(lambda: None, every(seconds=1), name="job")
            gevent.spawn(turn)
            gevent.sleep(0)
            before = len(turns)
            scheduler.start()
            during = len(turns) - before
            down = scheduler.status().store_down_since is not None
            scheduler.stop(0)
            print("RESULT", down, during > 20)
            """,
            f"{scheme}://127.0.0.1:{silent.getsockname()[1]}",
        )
    assert "RESULT True True" in out, out


COMPUTES = """
    import gevent
    from leasecron_sync.testing import HistoryLog, RecordingLease, executing
    log = HistoryLog(sys.argv[2])
    scheduler = Scheduler(RecordingLease(SQLiteLease(sys.argv[1]), log), lease_ms=900)
    log.listen(scheduler)
    lost = []

    def job(run):
        with executing(log, run):
            if not lost:
                WORK
                lost.append(run.lost)

    scheduler.add_job(job, every(seconds=1), name="job", max_attempts=50)
    scheduler.start()
    print("READY", flush=True)
    assert eventually(lambda: lost)
    scheduler.stop()
    log.close()
    print("RESULT", lost[0])
    """


@pytest.mark.timeout(120)
@needs("gevent")
@pytest.mark.parametrize(
    "work",
    ["compute(3)", "gevent.get_hub().threadpool.apply(compute, (3,))"],
    ids=["in its greenlet", "in gevent's pool of threads"],
)
def test_a_handler_that_computes_without_a_pause_loses_its_lease_and_can_see_it(
    work: str, tmp_path: Path
) -> None:
    lost = "threadpool" not in work
    path, history = str(tmp_path / "store.db"), tmp_path / "history.jsonl"
    log = HistoryLog(history)
    standby = Scheduler(RecordingLease(SQLiteLease(path), log), lease_ms=900)
    log.listen(standby)

    def job(run: LeaseRun) -> None:
        with executing(log, run):
            run.wait(0.05)

    with start(COMPUTES.replace("WORK", work), path, str(history)) as process:
        try:
            assert process.stdout is not None
            while "READY" not in (line := process.stdout.readline()):
                assert line, process.communicate()
            assert eventually(
                lambda: any(x.what == "started" for x in read_history(history).entries), 30
            )
            standby.add_job(job, every(seconds=1), name="job", max_attempts=50)
            standby.start()
            out, err = process.communicate(timeout=60)
            standby.stop()
        finally:
            process.kill()
    assert (process.returncode, err) == (0, ""), out
    assert f"RESULT {lost}" in out
    log.close()
    entries = read_history(history).entries
    assert check(entries).faults == ()
    first = next(entry for entry in entries if entry.what == "started")
    again = [x for x in entries if x.what == "started" and x.key == first.key and x.attempt > 1]
    assert bool(again) is lost


REFUSED = """
    scheduler = Scheduler(SQLiteLease(sys.argv[1]))
    try:
        scheduler.start()
    except SchedulerStateError as error:
        print("REFUSED", error, flush=True)
    print(scheduler.status().state)
    """


@pytest.mark.parametrize(
    ("package", "patch", "text"),
    [
        (
            "eventlet",
            "import eventlet\neventlet.monkey_patch()",
            "eventlet has replaced Python's threads, which is not supported: use gevent",
        ),
        (
            "gevent",
            "from gevent import monkey\nmonkey.patch_all(thread=False)",
            "gevent has replaced socket, select and not threading: call",
        ),
        (
            "gevent",
            "from gevent import monkey\nmonkey.patch_all(select=False)",
            "gevent has replaced threading, socket and not select: call",
        ),
        (
            "gevent",
            f"import leasecron_sync{PATCHED}",
            "leasecron_sync was imported before gevent replaced Python's threads: call",
        ),
    ],
    ids=["eventlet", "no threads", "no select", "too late"],
)
def test_replaced_threads_that_cannot_work_are_an_error_at_the_start(
    package: str, patch: str, text: str, tmp_path: Path
) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    out = run(REFUSED, str(tmp_path / "store.db"), patch=patch)
    assert f"REFUSED {text}" in out
    assert out.endswith("stopped\n")


@pytest.mark.parametrize("package", ["gevent.monkey", "eventlet"])
def test_a_package_that_has_replaced_nothing_does_no_harm(package: str, tmp_path: Path) -> None:
    if importlib.util.find_spec(package.partition(".")[0]) is None:
        pytest.skip(f"{package} is not installed")
    out = run(
        f"""
        import {package}
        scheduler = Scheduler(SQLiteLease(sys.argv[1]))
        scheduler.start()
        print("RESULT", scheduler.status().problems)
        scheduler.stop()
        """,
        str(tmp_path / "store.db"),
        patch="",
    )
    assert "RESULT []" in out


@pytest.mark.timeout(60)
@needs("gevent")
def test_threads_that_are_replaced_after_the_start_end_the_claims_with_an_error(
    tmp_path: Path,
) -> None:
    """Else a run would be claimed, and wait for ever for its thread."""
    out = run(
        """
        scheduler = Scheduler(SQLiteLease(sys.argv[1]))
        claimed, done = [], []
        scheduler.on("run_claimed", claimed.append)
        scheduler.add_job(lambda: done.append(1), every(seconds=1), name="job")
        scheduler.start()
        assert eventually(lambda: done)
        from gevent import monkey
        monkey.patch_all()
        assert eventually(lambda: scheduler.status().problems)
        print("RESULT", scheduler.status().problems, len(claimed) <= len(done), flush=True)
        os._exit(0)  # Python itself stumbles over threads that were started before
        """,
        str(tmp_path / "store.db"),
        patch="",
    )
    assert "RESULT ['the thread leasecron-timer has ended'] True" in out
    assert "ERROR gevent has replaced Python's threads after the start" in out
