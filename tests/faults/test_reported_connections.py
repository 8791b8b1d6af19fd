"""Connections that a server ends, poolers, and many runs on few connections.

Each as users of other schedulers reported it; see ``docs/reported-faults.rst``.

``LEASECRON_SYNC_LONG=1`` in the environment plays it longer, and on all stores.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Callable

import pytest

from leasecron_sync import Event, LeaseRun, Run, Scheduler, at, every
from leasecron_sync.backends.rabbitmq import RabbitMQClaim
from leasecron_sync.backends.urls import connect, connect_lease
from leasecron_sync.model import RunKey
from leasecron_sync.testing import Entry, check, read_history
from tests.faults.processes import LONG, ROOT
from tests.services.fixtures import Own, had
from tests.services.postgres import as_role, execute, new_database, through
from tests.services.process import eventually
from tests.services.rabbitmq import RabbitMQServer
from tests.services.services import Services

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120 if LONG else 60)]

LIMIT_S = 30.0
ROLE, PASSWORD = "alice", "s3cret"


def now_ms() -> int:
    return time.time_ns() // 1_000_000


@contextmanager
def running(*schedulers: Scheduler[Any]) -> Iterator[None]:
    """Start them, and stop them in the end."""
    with ExitStack() as stack:
        for scheduler in schedulers:
            stack.callback(scheduler.stop, timeout=5.0)
            scheduler.start()
        yield


def listen(scheduler: Scheduler[Any], *names: str) -> list[Event]:
    told: list[Event] = []
    for name in names:
        scheduler.on(name, told.append)  # type: ignore[arg-type]
    return told


# -- PostgreSQL ------------------------------------------------------------------------------------


def test_sessions_that_the_server_ends_when_they_idle_cost_no_run_and_leave_none_behind(
    own: Own,
) -> None:
    """A dead connection is found before it is used: no outage, no error, no run that is late."""
    server = own.postgres()
    for statement in (
        f"CREATE ROLE {ROLE} LOGIN PASSWORD '{PASSWORD}'",
        f"ALTER ROLE {ROLE} SET idle_session_timeout = 200",
        f"CREATE SCHEMA leasecron AUTHORIZATION {ROLE}",
    ):
        execute(server.url, statement)
    url = as_role(server.url, ROLE, PASSWORD) + "?schema=leasecron"
    runs: list[tuple[datetime, int]] = []
    scheduler = Scheduler(connect_lease(url), lease_ms=3_000)
    told = listen(scheduler, "store_down", "run_lost", "run_missed", "run_retried")

    def handler(run: LeaseRun) -> None:
        runs.append((run.scheduled_time, now_ms()))
        run.wait(0.6)  # longer than the server bears it, too

    scheduler.add_job(handler, every(seconds=1), name="job", overlap="allow")
    asked = f"SELECT pid, state FROM pg_stat_activity WHERE usename = '{ROLE}'"
    pids: set[object] = set()
    most, rounds = 0, 20 if LONG else 2
    with running(scheduler):
        while len(runs) < rounds:
            rows = execute(server.url, asked)
            pids |= {pid for pid, _state in rows}
            most = max(most, len(rows))
            assert not [state for _pid, state in rows if str(state).startswith("idle in tr")]
            pause(0.02)
        assert len(pids) > rounds  # they were ended again and again
        assert most <= 6  # one for each of what it does at the same time, and who is about to end
    assert told == []
    times = [int(moment.timestamp()) for moment, _at in runs]
    assert times == list(range(times[0], times[0] + len(times)))
    assert max(at_ms - moment.timestamp() * 1000 for moment, at_ms in runs) < 3_000
    assert eventually(lambda: execute(server.url, asked) == [], LIMIT_S)


INSTANCE = """
import sys
from leasecron_sync import Scheduler
from leasecron_sync.backends.urls import connect_lease
scheduler = Scheduler(connect_lease(sys.argv[1]), lease_ms=600)
def handler(run):
    print("at work", flush=True)
    run.wait(60)
scheduler.add_job(handler, "* * * * * *", name="job")
scheduler.start()
sys.stdin.read()
"""


def test_a_holder_killed_behind_a_pooler_leaves_no_lock_behind(
    services: Services, own: Own
) -> None:
    """The pooler goes on with its session: whatever belonged to that would stay."""
    server = had(services.postgres)
    pooler = own.pgbouncer(server, default_pool_size=2)
    with new_database(server, f"pooled_{uuid.uuid4().hex}") as direct:
        url = through(direct, pooler)
        runs: list[LeaseRun] = []
        scheduler = Scheduler(connect_lease(url), lease_ms=600)
        with subprocess.Popen(
            [sys.executable, "-c", INSTANCE, url],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        ) as process:
            try:
                assert process.stdout is not None
                assert process.stdout.readline() == b"at work\n"
                scheduler.add_job(runs.append, "* * * * * *", name="job")
                with running(scheduler):
                    process.send_signal(signal.SIGKILL)
                    killed = time.monotonic()
                    assert eventually(lambda: runs, LIMIT_S)
                    assert time.monotonic() - killed < 10.0
                    # A slow machine may lose the second one, too, before it gets to the handler.
                    assert runs[0].attempt >= 2
                    assert eventually(lambda: len(runs) > 1, LIMIT_S)
                    locks = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'"
                    assert execute(direct, locks) == [(0,)]
            finally:
                process.kill()


# -- RabbitMQ --------------------------------------------------------------------------------------


def test_twenty_jobs_of_each_second_share_one_connection_also_while_it_stops(
    services: Services, namespace: str, caplog: pytest.LogCaptureFixture
) -> None:
    server = had(lambda: services.rabbitmq("4.0"))
    assert isinstance(server, RabbitMQServer)
    ran: list[tuple[str, datetime]] = []
    before = {one["peer_port"] for one in server.connections()}
    schedulers = [Scheduler(RabbitMQClaim(server.url), namespace=namespace) for _ in range(2)]
    told = [listen(one, "store_down", "run_missed", "run_failed") for one in schedulers]

    def handler(run: Run) -> None:
        ran.append((run.job, run.scheduled_time))
        run.wait(0.05)

    for scheduler in schedulers:
        for number in range(20):
            scheduler.add_job(handler, every(seconds=1), name=f"job {number}")
    ticks, ports = 50 if LONG else 1, set()
    with caplog.at_level(logging.WARNING), running(*schedulers):
        while len(ran) < 20 * ticks:
            ports |= {one["peer_port"] for one in server.connections()} - before
            pause(0.05)
        # In the middle of the next second's claims.
        started = len(ran)
        assert eventually(lambda: len(ran) > started, LIMIT_S)
    assert len(ports) <= len(schedulers)
    assert told == [[], []]
    assert caplog.messages == []
    assert max(Counter(ran).values()) == 1


def pause(seconds: float) -> None:
    """Wait for a time that is not a condition's."""
    threading.Event().wait(seconds)


# -- many jobs at once -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind",
    [
        "sqlite",
        *(
            pytest.param(kind, marks=pytest.mark.skipif(not LONG, reason="needs LONG"))
            for kind in ("postgres", "redis", "script", "nats", "rabbitmq")
        ),
    ],
)
def test_hundreds_of_jobs_due_at_once_all_start_soon_on_few_threads(
    kind: str, services: Services, namespace: str, tmp_path: Path
) -> None:
    """Three instances; one job takes long and holds up nobody."""
    with ExitStack() as stack:
        url = _url_of(kind, services, tmp_path, stack)
        jobs, due_s = 500 if LONG else 200, time.time() + (4.0 if LONG else 2.5)
        due = datetime.fromtimestamp(due_s, timezone.utc)
        started: list[tuple[str, float]] = []
        let_go = threading.Event()

        def handler(run: Run) -> None:
            started.append((run.job, time.time()))
            if run.job == "slow":
                assert let_go.wait(LIMIT_S)
            else:
                pause(0.05)

        schedulers: list[Scheduler[Any]] = [
            Scheduler(connect(url), namespace=namespace) for _ in range(3)
        ]
        told = [listen(one, "run_missed", "run_failed", "store_down") for one in schedulers]
        for scheduler in schedulers:
            for number in range(jobs - 1):
                scheduler.add_job(handler, at(due), name=f"job {number}")
            scheduler.add_job(handler, at(due), name="slow")
        threads = 0
        with running(*schedulers):
            while len(started) < jobs and time.time() < due_s + LIMIT_S:
                threads = max(
                    threads, sum(one.name.startswith("leasecron") for one in threading.enumerate())
                )
                pause(0.02)
            let_go.set()
        assert len(started) == len({job for job, _at in started}) == jobs
        assert told == [[], [], []]
        # 32 slots each, and what else they have.
        assert threads <= 3 * (32 + 4)
        assert max(at_s for _job, at_s in started) - due_s < 10


def _url_of(kind: str, services: Services, folder: Path, stack: ExitStack) -> str:
    if kind == "sqlite":
        return f"sqlite:///{folder / 'jobs.db'}"
    if kind == "postgres":
        return stack.enter_context(new_database(had(services.postgres), f"many_{uuid.uuid4().hex}"))
    if kind == "rabbitmq":
        return had(lambda: services.rabbitmq("4.0")).url
    if kind == "nats":
        return had(lambda: services.nats("2.15")).url
    url = had(services.redis).url
    return url if kind == "redis" else f"{url}?strategy={kind}"


# -- a claimer that stood still --------------------------------------------------------------------

WINDOW_MS = 1_000


@pytest.mark.parametrize("kind", ["nats", *(["script", "stream-id", "idmp"] if LONG else [])])
def test_who_stood_still_until_its_claims_are_forgotten_claims_nothing_old(
    kind: str, services: Services, namespace: str, tmp_path: Path
) -> None:
    """What is remembered lasts twice the window; the process stands still for longer."""
    server: Callable[[], Any] = (
        (lambda: services.nats("2.15")) if kind == "nats" else services.redis8
    )
    url = had(server).url + ("" if kind == "nats" else f"?strategy={kind}")
    script = Path(__file__).with_name("once_instance.py")
    options = ["--url", url, "--namespace", namespace, "--window-ms", str(WINDOW_MS)]
    logs = [tmp_path / f"{name}.log" for name in "ab"]
    with ExitStack() as stack:
        processes = [
            stack.enter_context(
                subprocess.Popen(
                    [sys.executable, str(script), *options, "--log", str(log)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.DEVNULL,
                    env={**os.environ, "PYTHONPATH": str(ROOT)},
                )
            )
            for log in logs
        ]
        for process in processes:
            stack.callback(process.kill)
        assert eventually(lambda: all(_entries(log, "claimed") for log in logs), LIMIT_S)
        processes[1].send_signal(signal.SIGSTOP)
        stopped_ms = now_ms()
        pause(2 * WINDOW_MS / 1000 + 1.0)
        going_ms = now_ms()
        processes[1].send_signal(signal.SIGCONT)
        assert eventually(
            lambda: [x for x in _entries(logs[1], "claimed") if x.at_ms > going_ms + 500], LIMIT_S
        )
        for process in processes:
            process.communicate(b"\n", timeout=LIMIT_S)
    entries = read_history(*logs).entries
    assert [fault.message for fault in check(entries).faults] == []
    started = Counter(_key(entry) for entry in entries if entry.what == "started")
    assert max(started.values()) == 1
    # What fell due meanwhile was all executed by the other one, and none of it is asked for late.
    between = range(-(-stopped_ms // 1_000) * 1_000, going_ms - WINDOW_MS - 500, 1_000)
    assert between
    told = {_key(entry) for entry in _entries(logs[0], "told") if entry.event == "run_missed"}
    # A claim that takes longer than the window leaves a run out, and the event says so.
    assert {RunKey("job-0", ms) for ms in between} <= set(started) | told
    late = [x for x in _entries(logs[1], "claimed") if _key(x).scheduled_ms in between]
    assert not [entry for entry in late if entry.verdict == "granted"]


def _entries(log: Path, what: str) -> list[Entry]:
    whole, _, _ = (log.read_text() if log.exists() else "").rpartition("\n")
    found = [Entry.from_line(line) for line in whole.split("\n") if line]
    return [entry for entry in found if entry.what == what]


def _key(entry: Entry) -> RunKey:
    assert entry.scheduled_ms is not None
    return RunKey(entry.job, entry.scheduled_ms)
