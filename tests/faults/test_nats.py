"""What a NATS server does to instances that claim there, and what comes of it.

No run is won twice, whatever happens, and none is lost: a reply that did not come is resolved by
the first message. How a process ends is looked at, too: there is a thread with an event loop.

``LEASECRON_SYNC_LONG=1`` in the environment plays it on each version, longer and with more jobs,
and ends processes on every Python that is here.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Optional

import pytest

from leasecron_sync.backends._nats_place import stream_name
from leasecron_sync.backends.nats import NatsClaim
from tests.faults.once_crew import LIMIT_S, OnceCrew, pause
from tests.faults.processes import LONG, ROOT
from tests.hosts.exits import pythons
from tests.services.fixtures import Own
from tests.services.nats import NatsServer
from tests.services.process import eventually

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240 if LONG else 60)]

STOP_S = 7.0 if LONG else 1.5
QUICK_S = 4.5
"""By the documents an exit takes two seconds at most; a call that it waited out would take five."""


@pytest.fixture(autouse=True)
def nothing_said(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Neither the client nor the event loop says anything."""
    with caplog.at_level(logging.INFO):
        yield
    names = {record.name for record in caplog.records}
    assert not [name for name in names if name.startswith(("nats", "asyncio"))]


@pytest.fixture
def needs_long(nats_version: Optional[str]) -> None:
    """One version, unless there is time for all."""
    if nats_version == "2.9" and not LONG:
        pytest.skip("the older version only with LEASECRON_SYNC_LONG=1")


@pytest.mark.usefixtures("needs_long")
def test_a_server_that_is_killed_restarted_and_stands_still_doubles_and_loses_nothing(
    own: Own, nats_version: Optional[str], tmp_path: Path
) -> None:
    """Its streams are kept in files: what it had taken in before it was killed is there again."""
    server = own.nats(nats_version)
    crew = OnceCrew(tmp_path, lambda: NatsClaim(server.url))
    try:
        crew.start()
        server.kill()
        crew.wait_told("store_down")
        server.start()
        crew.wait_told("store_back")
        crew.work()
        for _ in range(2 if LONG else 0):
            server.restart()
            crew.work()
        server.pause()
        try:
            pause(STOP_S)
        finally:
            server.resume()
        crew.work()
        assert crew.judged() == []
    finally:
        crew.stop()
    assert crew.told("run_missed") == []


@pytest.mark.skipif(not LONG, reason="only with LEASECRON_SYNC_LONG=1")
def test_a_cluster_whose_leader_is_killed_doubles_and_loses_nothing(
    own: Own, nats_version: Optional[str], tmp_path: Path
) -> None:
    """Nobody can claim for some seconds; many answers are that an id is in process."""
    cluster = own.nats_cluster(nats_version)
    hosts = ",".join(f"{host}:{port}" for host, port in cluster.addresses)
    crew = OnceCrew(tmp_path, lambda: NatsClaim(f"nats://{hosts}?replicas=3"))
    try:
        crew.start()
        leader = cluster.leader_of(stream_name("default"))
        leader.kill()
        crew.work()
        leader.start()
        cluster.wait_complete()
        crew.work()
        assert crew.judged() == []
    finally:
        crew.stop()


# -- how a process ends ----------------------------------------------------------------------------

HEAD = """
import os, sys, threading
from leasecron_sync import Scheduler, every
from leasecron_sync.backends.base import BackendSettings
from leasecron_sync.backends.nats import NatsClaim
url, space = sys.argv[1:]
backend = NatsClaim(url)
"""
OPENED = """
backend.open(BackendSettings(space, "me", 5_000))
backend.probe()
"""
SCHEDULED = """
ran = threading.Event()
def handler(run):
    ran.set()
    run.wait(60)
scheduler = Scheduler(backend, namespace=space)
scheduler.add_job(handler, every(seconds=1), name="job")
scheduler.start()
assert ran.wait(20)
"""
CHILD = """
if os.fork() == 0:
    {child}
    sys.exit()
os.wait()
"""
ENDS = {
    "without close": OPENED,
    "with a call under way": OPENED
    + """
threading.Thread(target=lambda: [backend.probe() for _ in iter(int, 1)], daemon=True).start()
""",
    "a scheduler that is not stopped": SCHEDULED,
    "a scheduler that is stopped in an exit function": "import atexit\n"
    + SCHEDULED
    + "atexit.register(scheduler.stop, timeout=1)\n",
    "a scheduler whose child is forked": SCHEDULED + CHILD.format(child="pass"),
    "a scheduler whose child starts it again": SCHEDULED
    + CHILD.format(
        child="scheduler.start(); ran.clear(); assert ran.wait(20); scheduler.stop(timeout=1)"
    ),
    "a child that only leaves": OPENED
    + CHILD.format(child="backend.discard()")
    + "backend.probe()\nbackend.close()\n",
}


@pytest.mark.usefixtures("needs_long")
@pytest.mark.parametrize("version", ["3.9", "3.11", "3.12", "3.13"] if LONG else [""])
@pytest.mark.parametrize("way", ENDS)
def test_the_end_of_a_process_is_quick_and_says_nothing(
    version: str, way: str, nats_server: NatsServer, namespace: str
) -> None:
    interpreter = _interpreter(version)
    end = "\nimport time\nprint(time.monotonic(), flush=True)\n"
    done = subprocess.run(
        [interpreter, "-c", HEAD + ENDS[way] + end, nats_server.url, namespace],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
        env={"PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore::DeprecationWarning"},
    )
    took_s = time.monotonic() - float(done.stdout.split()[-1]) if done.stdout else 0.0
    assert (done.stderr, done.returncode) == ("", 0)
    assert took_s < QUICK_S
    assert eventually(lambda: nats_server.connections() == [], LIMIT_S)


def _interpreter(version: str) -> str:
    if not version:
        return sys.executable
    found = pythons().get(version)
    if found is None:
        pytest.skip(f"there is no Python {version} with the library's dependencies")
    return str(found)


def test_importing_the_package_imports_no_event_loop() -> None:
    code = "import sys, leasecron_sync; print('asyncio' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.stdout.strip() == "False"
