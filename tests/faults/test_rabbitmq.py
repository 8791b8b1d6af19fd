"""What a RabbitMQ server does to instances that claim there, and what comes of it.

No run is won twice, whatever happens. What nobody executed is reported: by the instance whose
claim may have won it, or by all of them.

``LEASECRON_SYNC_LONG=1`` in the environment plays all of it on each version, longer and with more
jobs.
"""

from __future__ import annotations

import logging
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Optional

import pytest

from leasecron_sync import Run, Scheduler, every
from leasecron_sync.backends.rabbitmq import RabbitMQClaim
from leasecron_sync.model import RunKey
from leasecron_sync.testing import (
    Entry,
    HistoryLog,
    RecordingClaim,
    check,
    executing,
    read_history,
)
from tests.faults.processes import LONG, ROOT
from tests.services.fixtures import Own
from tests.services.process import eventually
from tests.services.rabbitmq import PASSWORD, USER, RabbitMQServer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240 if LONG else 60)]

INSTANCES = 4
JOBS = 10 if LONG else 3
WORK_S = 10.0 if LONG else 1.0
"""How long the instances are left in peace between two faults."""
HEARTBEATS = 60 if LONG else 6
STOP_S = 7.0 if LONG else 1.5
LIMIT_S = 30.0
UNKNOWN = "unknown outcome"


@pytest.fixture(autouse=True)
def one_version(rabbitmq_version: Optional[str]) -> None:
    """One version, unless there is time for all."""
    if rabbitmq_version == "3.10" and not LONG:
        pytest.skip("the older version only with LEASECRON_SYNC_LONG=1")


@pytest.fixture(autouse=True)
def no_secrets(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """Whatever happens, no line of the log shows who logs in, and none is of pika."""
    with caplog.at_level(logging.DEBUG):
        yield caplog
    assert not any(text in caplog.text for text in (f":{PASSWORD}@", f"{USER}:", f"'{USER}'"))
    assert [record for record in caplog.records if record.name.startswith("pika")] == []


class Tended(RabbitMQClaim):
    """Counts how often the connection was looked after."""

    tended = 0

    def tend(self) -> Optional[int]:
        self.tended += 1
        return super().tend()


class Crew:
    """Instances of this process on one server, and what they did."""

    def __init__(self, server: RabbitMQServer, folder: Path) -> None:
        self.server = server
        self.backends: list[Tended] = []
        self._path = folder / "history.jsonl"
        self._entries: list[Entry] = []
        self._log = HistoryLog(self._entries.append)
        self._schedulers: list[Scheduler[RecordingClaim]] = []
        self._from_ms = 0

    def start(self) -> None:
        """Start the instances, and wait until they have done something."""
        self.begin()
        self.work()

    def begin(self, *, window_ms: int = 60_000) -> None:
        """Start the instances."""
        for _ in range(INSTANCES):
            backend = Tended(self.server.url)
            recording = RecordingClaim(backend, self._log)
            scheduler = Scheduler(recording, claim_window_ms=window_ms)
            for number in range(JOBS):
                scheduler.add_job(self._handler, every(seconds=1), name=f"job-{number}")
            self._log.listen(scheduler)
            self.backends.append(backend)
            self._schedulers.append(scheduler)
            scheduler.start()
        self._from_ms = now_ms() + 1_000

    def _handler(self, run: Run) -> None:
        with executing(self._log, run):
            run.wait(0.01)

    def work(self) -> None:
        """Leave them in peace until they have executed what fell due in a while."""
        until_ms = now_ms() + round(WORK_S * 1_000)
        assert eventually(lambda: self._newest_ms() > until_ms, LIMIT_S)

    def _newest_ms(self) -> int:
        return max((run.scheduled_ms for run in self.executed()), default=0)

    def entries(self, what: str) -> list[Entry]:
        return [entry for entry in list(self._entries) if entry.what == what]

    def executed(self) -> list[RunKey]:
        return [key_of(entry) for entry in self.entries("started")]

    def told(self, event: str) -> list[Entry]:
        return [entry for entry in self.entries("told") if entry.event == event]

    def wait_told(self, event: str, times: int) -> None:
        """Wait until every instance has told an event so often."""

        def enough() -> bool:
            told = [entry.instance for entry in self.told(event)]
            return len(set(told)) == len(self._schedulers) and all(
                told.count(one) >= times for one in set(told)
            )

        assert eventually(enough, LIMIT_S), [(x.instance, x.event) for x in self.told(event)]

    def stop(self) -> None:
        for scheduler in self._schedulers:
            scheduler.stop(timeout=5.0)
        self._schedulers.clear()

    def judged(self) -> dict[RunKey, set[str]]:
        """Stop, judge, and return what nobody executed with the reasons that were reported."""
        instances = len(self._schedulers)
        until_ms = now_ms()
        self.work()
        dead = [one.status().threads for one in self._schedulers]
        assert all(all(threads.values()) for threads in dead)
        self.stop()
        self._path.write_text("".join(f"{entry.to_line()}\n" for entry in self._entries))
        report = check(read_history(self._path).entries)
        assert [fault.message for fault in report.faults] == []
        executed = self.executed()
        assert len(executed) == len(set(executed))
        reported: dict[RunKey, list[Entry]] = {}
        for entry in self.told("run_missed"):
            for key in keys_of(entry):
                reported.setdefault(key, []).append(entry)
        missing = [key for key in self._owed(until_ms) if key not in set(executed)]
        for key in missing:
            reasons = [entry.reason for entry in reported.get(key, [])]
            assert UNKNOWN in reasons or len(reasons) == instances, (key, reasons)
        return {key: {entry.reason for entry in reported[key]} for key in missing}

    def _owed(self, until_ms: int) -> list[RunKey]:
        first_ms = -(-self._from_ms // 1_000) * 1_000
        times = range(first_ms, until_ms + 1, 1_000)
        return [RunKey(f"job-{number}", at_ms) for at_ms in times for number in range(JOBS)]


def key_of(entry: Entry) -> RunKey:
    assert entry.scheduled_ms is not None
    return RunKey(entry.job, entry.scheduled_ms)


def keys_of(entry: Entry) -> list[RunKey]:
    newest_ms = key_of(entry).scheduled_ms
    oldest_ms = newest_ms if entry.first_ms is None else entry.first_ms
    return [RunKey(entry.job, at_ms) for at_ms in range(oldest_ms, newest_ms + 1, 1_000)]


def now_ms() -> int:
    return time.time_ns() // 1_000_000


@pytest.fixture
def crew(own: Own, rabbitmq_version: Optional[str], tmp_path: Path) -> Iterator[Crew]:
    crew = Crew(own.rabbitmq(rabbitmq_version), tmp_path)
    yield crew
    crew.stop()


def test_a_server_that_is_killed_restarted_twice_and_stands_still_doubles_nothing(
    crew: Crew,
) -> None:
    """What it had taken in before it was killed is there again: no run is won anew."""
    crew.start()
    crew.server.kill()
    crew.wait_told("store_down", 1)
    crew.server.start()
    crew.wait_told("store_back", 1)
    crew.work()
    for _ in range(2 if LONG else 0):
        crew.server.restart()
        crew.work()
    crew.server.pause()
    try:
        pause(STOP_S)
    finally:
        crew.server.resume()
    crew.work()
    missing = crew.judged()
    assert all(UNKNOWN in reasons for reasons in missing.values()), missing


def pause(seconds: float) -> None:
    """Wait for a time that is not a condition's."""
    threading.Event().wait(seconds)


def test_an_outage_longer_than_the_window_is_reported_by_every_instance(
    crew: Crew, no_secrets: pytest.LogCaptureFixture
) -> None:
    """Here from the start on. One line when it begins and one when it ends; no busy loop."""
    crew.server.stop()
    crew.begin(window_ms=1_000)
    crew.wait_told("store_down", 1)
    assert eventually(lambda: len(crew.told("run_missed")) > INSTANCES * JOBS * 2, LIMIT_S)
    # Delays of 100, 200, 400 ms and so on: about ten tries in half a minute.
    assert max(backend.tended for backend in crew.backends) <= 12
    crew.server.start()
    crew.wait_told("store_back", 1)
    missing = crew.judged()
    assert len(crew.told("store_down")) == len(crew.told("store_back")) == INSTANCES
    assert any("store down" in reasons for reasons in missing.values())
    lines = [one.getMessage() for one in no_secrets.records if one.levelno >= logging.WARNING]
    told = [line for line in lines if line.startswith("store ")]
    assert sum(line.startswith("store does not answer") for line in told) == INSTANCES
    assert sum(line.startswith("store answers again") for line in told) == INSTANCES
    assert len(told) == 2 * INSTANCES


def test_idling_keeps_one_connection_alive_and_claims_in_time(
    rabbitmq_server: RabbitMQServer, namespace: str, tmp_path: Path
) -> None:
    """With a heartbeat of a second, a server drops who says nothing for two of them."""
    server = rabbitmq_server
    path = tmp_path / "history.jsonl"
    log = HistoryLog(path)
    executed: list[Run] = []
    backend = RecordingClaim(RabbitMQClaim(server.url + "?heartbeat=1"), log)
    scheduler = Scheduler(backend, namespace=namespace)
    scheduler.add_job(executed.append, every(seconds=4), name="seldom")
    told: list[str] = []
    for event in ("store_down", "store_back", "run_missed"):
        scheduler.on(event, lambda fact: told.append(fact.name))
    scheduler.start()
    try:
        assert eventually(server.connections, LIMIT_S)
        [connection] = server.connections()
        assert connection["heartbeat"] == 1
        end = time.monotonic() + HEARTBEATS
        while time.monotonic() < end:
            assert {one["peer_port"] for one in server.connections()} == {connection["peer_port"]}
            pause(0.1)
        assert eventually(lambda: len(executed) >= HEARTBEATS // 4, LIMIT_S)
        assert {one["peer_port"] for one in server.connections()} == {connection["peer_port"]}
    finally:
        scheduler.stop(timeout=5.0)
    assert told == []
    claimed = [x for x in read_history(path).entries if x.what == "claimed"]
    assert {entry.verdict for entry in claimed} <= {"granted", "early"}


def test_a_process_that_stood_still_for_three_heartbeats_claims_nothing_old(
    rabbitmq_server: RabbitMQServer, namespace: str, tmp_path: Path
) -> None:
    """The server has dropped its connection: it makes another one, and goes on."""
    server = rabbitmq_server
    options = ("--window-ms", "1000", "--namespace", namespace)
    instance = Process(tmp_path, server.url + "?heartbeat=1", *options)
    with instance:
        assert eventually(lambda: len(instance.granted()) >= 2, LIMIT_S)
        [before] = server.connections()
        instance.signal(signal.SIGSTOP)
        stopped_ms = now_ms()
        assert eventually(lambda: not server.connections(), LIMIT_S), "it was not dropped"
        pause(1.0)
        going_ms = now_ms()
        instance.signal(signal.SIGCONT)
        assert eventually(lambda: max(instance.granted(), default=0) > going_ms + 1_000, LIMIT_S)
        [after] = server.connections()
    assert before["peer_port"] != after["peer_port"]
    old = [at_ms for at_ms in instance.granted() if stopped_ms < at_ms < going_ms - 1_000]
    assert old == []
    gaps = [(x.first_ms, x.scheduled_ms) for x in instance.entries() if x.event == "run_missed"]
    assert gaps
    assert instance.errors() == ""


class Process:
    """An instance as a process of its own."""

    def __init__(self, folder: Path, url: str, *options: str) -> None:
        self._log, self._errors = folder / "instance.log", folder / "instance.err"
        script = Path(__file__).with_name("once_instance.py")
        arguments: Sequence[object] = (sys.executable, script, "--url", url, "--log", self._log)
        with self._errors.open("wb") as errors:
            self._process = subprocess.Popen(
                [*map(str, arguments), *options],
                stdin=subprocess.PIPE,
                stderr=errors,
                stdout=subprocess.DEVNULL,
                env={"PYTHONPATH": str(ROOT)},
            )

    def __enter__(self) -> Process:
        return self

    def __exit__(self, kind: object, *details: object) -> None:
        if kind is None:
            self._process.communicate(b"\n", timeout=LIMIT_S)
        else:
            self._process.kill()
            self._process.communicate()

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def errors(self) -> str:
        return self._errors.read_text()

    def entries(self) -> list[Entry]:
        if not self._log.exists():
            return []
        whole, _, _ = self._log.read_text().rpartition("\n")
        return [Entry.from_line(line) for line in whole.split("\n") if line]

    def granted(self) -> list[int]:
        """Return the scheduled times that it has won."""
        return [
            key_of(entry).scheduled_ms
            for entry in self.entries()
            if entry.what == "claimed" and entry.verdict == "granted"
        ]
