"""Programs without a web server: their own signal handlers, supervisors, containers, restarts.

``LEASECRON_SYNC_LONG=1`` restarts twenty times across a scheduled time instead of twice.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Callable

import pytest

from tests.hosts.conftest import Outcome
from tests.hosts.sites import LIMIT_S, LONG, Site, python
from tests.services.process import eventually

ROOT = Path(__file__).parents[2]

SERVICE = """
import logging, signal, sys, threading
logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(message)s")
from leasecron_sync import Scheduler, SQLiteLease, every

scheduler = Scheduler(SQLiteLease(sys.argv[1]))
ends = threading.Event()

@scheduler.job(every(seconds=1), name="job")
def job(run):
    print("ENTERED", flush=True)
    run.wait(60)

def end(number, frame):
    {on_signal}

signal.signal(signal.SIGTERM, end)
scheduler.start()
while not ends.wait(0.2):
    pass
scheduler.stop(20)
print("the service has ended", flush=True)
"""


@pytest.mark.timeout(90)
@pytest.mark.parametrize(
    ("on_signal", "status", "says"),
    [
        ("ends.set()", 0, "the service has ended"),
        ("scheduler.stop(20); ends.set()", 0, "the service has ended"),
        ("sys.exit(7)", 7, "scheduler stopped"),
    ],
    ids=["ends its loop", "stops in the signal handler", "leaves by an exception"],
)
def test_a_service_with_a_handler_for_sigterm_hands_over(
    on_signal: str, status: int, says: str, tmp_path: Path
) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", SERVICE.format(on_signal=on_signal), str(tmp_path / "store.db")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    ) as service:
        try:
            assert service.stdout is not None
            while "ENTERED" not in (line := service.stdout.readline()):
                assert line, service.communicate()
            service.send_signal(signal.SIGTERM)
            out, err = service.communicate(timeout=60)
        finally:
            service.kill()
    assert (service.returncode, err) == (status, ""), out
    assert says in out
    assert "run handed over job='job'" in out


def worker() -> list[str]:
    """Return the command of a worker process."""
    return python("-m", "leasecron_sync", "run", "tests.hosts.site_app:scheduler")


def wait_ready(site: Site, times: int) -> None:
    """Wait until so many processes have said that they are ready."""
    ready = "ready, waiting for SIGTERM or SIGINT"
    assert eventually(lambda: site.output().count(ready) >= times, LIMIT_S), site.output()
    assert site.output().count(ready) == times


def restarts() -> None:
    """End 2.5 s before a scheduled time, with a successor up 0.7 s after it, again and again."""
    every_s, rounds = 5, 20 if LONG else 2

    def wait_until(wall_s: float) -> None:
        assert eventually(lambda: time.time() >= wall_s, 60)

    with Site(every_s=every_s, lease_ms=15_000, start="hook") as site:
        site.environment["SITE_LONG_RUN_S"] = "0.2"
        site.start(worker(), 1)
        for number in range(1, rounds + 1):
            wait_ready(site, number)
            scheduled_s = (int(time.time() + 3) // every_s + 1) * every_s
            wait_until(scheduled_s - 2.5)
            assert site.end(signal.SIGTERM) == 0, site.output()
            wait_until(scheduled_s + 0.1)
            site.launch(worker(), 1)
        site.wait_settled()
        assert site.end(signal.SIGTERM) == 0, site.output()
        report = site.judged()
        assert report.totals.takeovers == 0
        assert {record.attempt for record in site.records()} == {1}


def containers() -> None:
    """Have three processes with pid 1 on one store."""
    inner = textwrap.dedent("""
        import os, socket

        socket.sethostname("container")
        print("PID", os.getpid(), socket.gethostname(), flush=True)
        from tests.hosts.site_app import scheduler
        scheduler.run_forever()
    """)
    # They share nothing but the store.
    three = " & ".join(3 * [f'unshare --pid --uts --fork {sys.executable} -c "$CODE"'])
    with Site(start="hook") as site:
        site.environment.update(CODE=inner, SITE_LONG_RUN_S="0.3")
        site.start(["sh", "-c", f"{three} & wait"], 3)
        site.wait_finished(5)
        assert site.output().count("PID 1 container") == 3, site.output()
        assert len(site.instances()) == 3
        site.wait_settled()
        site.end_all(signal.SIGKILL)
        site.judged()


CAMPAIGNS: dict[str, Callable[[], object]] = {"restarts": restarts}
MAY_UNSHARE = os.geteuid() == 0 and shutil.which("unshare") is not None
if MAY_UNSHARE:
    CAMPAIGNS["containers"] = containers


@pytest.mark.slow
@pytest.mark.timeout(900 if LONG else 240)
def test_a_restart_across_a_scheduled_time_loses_and_doubles_nothing(outcome: Outcome) -> None:
    outcome("restarts")


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.skipif(not MAY_UNSHARE, reason="a process with pid 1 takes root and unshare")
def test_containers_that_all_have_pid_1_and_one_host_name_are_different_instances(
    outcome: Outcome,
) -> None:
    outcome("containers")
