"""``leasecron-sync exec`` as real processes, which are killed, stopped, signalled and cut off.

With ``LEASECRON_SYNC_LONG=1`` ten hosts meet at fifty scheduled times instead of five.
"""

from __future__ import annotations

import contextlib
import json
import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Callable, Optional

import pytest

from leasecron_sync.backends.base import BackendSettings, LeaseBackend
from leasecron_sync.backends.urls import connect_lease
from leasecron_sync.model import RunRecord, RunState
from tests.hosts.execs import ROOT, Exec, is_alive, notes, noting, until
from tests.hosts.scripts import LONG
from tests.services.fixtures import Own, had
from tests.services.process import stop_outside_writes
from tests.services.proxy import Proxy
from tests.services.services import Services

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="commands die with exec on Linux"),
    pytest.mark.slow,
]

SOON = ["--schedule", "* * * * * *"]
MINUTE = ["--schedule", "* * * * *", "--window", "120"]
# Due twenty minutes ago, and not again for the next forty: all calls of a test mean the same run.
PAST = ["--schedule", f"{(int(time.time()) // 60 - 20) % 60} * * * *", "--window", "3600"]

Call = Callable[..., Exec]


class Place:
    """A folder with a store, and the calls that use it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.url = f"sqlite:///{folder}/jobs.db"
        self.log = folder / "log"
        self.calls: list[Exec] = []

    def call(
        self, options: list[str], command: list[str], url: Optional[str] = None, **more: str
    ) -> Exec:
        """Begin a call."""
        self.calls.append(Exec(url or self.url, options, command, **more))
        return self.calls[-1]

    def at_work(self, options: list[str], seconds: float = 60, url: Optional[str] = None) -> Exec:
        """Begin a call, and wait until its command is at work."""
        before = len(notes(self.log, "began"))
        call = self.call(options, noting(self.log, seconds), url)
        assert until(lambda: len(notes(self.log, "began")) > before), call.process.poll()
        return call

    def records(self, url: Optional[str] = None, namespace: str = "default") -> list[RunRecord]:
        """Return the records, the oldest scheduled time first."""
        backend: LeaseBackend = connect_lease(url or self.url)
        backend.open(BackendSettings(namespace, "reader", 5_000))
        try:
            return list(backend.history(None, 1_000))[::-1]
        finally:
            backend.close()


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    """A place; when the test is over, nothing that it started may be left."""
    monkeypatch.chdir(tmp_path)
    place = Place(tmp_path)
    try:
        yield place
    finally:
        with contextlib.ExitStack() as closed:
            for call in place.calls:
                closed.callback(call.close)
    pids = {note.pid for note in notes(place.log)}
    assert until(lambda: not [pid for pid in pids if is_alive(pid)], 5)


def wait_status(call: Exec, limit_s: float = 20) -> int:
    return call.end(limit_s=limit_s)[0]


# -- many hosts ------------------------------------------------------------------------------------


def meet(
    place: Place, url: str, *, times: int = 1, kills: int = 1, namespace: str = "default"
) -> tuple[list[list[int]], float]:
    """Have ten hosts meet; kill those of some in the middle of a command, and judge.

    Returns:
        The statuses, and how long the slowest takeover took.
    """
    lease = "strategy=" not in url
    # Hosts that fork slowly on a busy machine must still mean the same time: claims may overlap.
    schedule = ["--schedule", "*/2 * * * * *"] if lease else MINUTE
    options = ["--name", "job", *schedule, "--namespace", namespace]
    if lease:
        options += ["--standby", "--lease", "3"]
    arguments = ["exec", url, *options, "--", *noting(place.log, 0.5)]
    crontab = subprocess.Popen(
        [sys.executable, "-m", "tests.hosts.execs", str(times), "10", json.dumps(arguments)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
    )
    killed: dict[str, float] = {}
    with crontab:
        while len(killed) < kills and crontab.poll() is None:
            ended = {note.scheduled_time for note in notes(place.log, "ended")}
            began = [note for note in notes(place.log, "began") if note.attempt == 1]
            # What comes behind a killed one is skipped until that has been taken over.
            for note in began[-1:] if ended >= set(killed) else []:
                if note.scheduled_time not in ended:
                    os.kill(note.exec_pid, signal.SIGKILL)
                    killed[note.scheduled_time] = time.monotonic()
            time.sleep(0.01)
        out, _ = crontab.communicate(timeout=times * 2 + 40)
    assert len(killed) == kills
    assert notes(place.log, "doubled") == []
    takeovers = [
        note.steady_s - killed[note.scheduled_time]
        for note in notes(place.log, "began")
        if note.scheduled_time in killed and note.attempt == 2
    ]
    assert len(takeovers) == kills
    ended_times = [note.scheduled_time for note in notes(place.log, "ended")]
    assert len(ended_times) == len(set(ended_times))
    assert set(killed) <= set(ended_times)
    for errors in place.folder.glob("*.err"):
        assert errors.read_text() == ""
    return json.loads(out), max(takeovers, default=0.0)


@pytest.mark.timing
@pytest.mark.timeout(240 if LONG else 60)
def test_ten_hosts_execute_one_command_at_a_time_and_take_over_from_the_killed(
    place: Place,
) -> None:
    times = 50 if LONG else 5
    statuses, slowest_s = meet(place, place.url, times=times, kills=2)
    assert sorted(status for turn in statuses for status in turn) == [-9] * 2 + [0] * (
        10 * times - 2
    )
    # The lease of a second; the rest is a machine that has other things to do.
    assert slowest_s < 3 + 4
    records = place.records()
    assert {record.state for record in records} <= {RunState.FINISHED, RunState.SKIPPED}
    assert len(notes(place.log, "ended")) >= times - 4
    sys.stderr.write(f"\n{times} scheduled times, slowest takeover {slowest_s:.2f} s ")


@pytest.mark.timeout(60)
def test_ten_hosts_meet_on_postgresql(place: Place, postgres_url: str) -> None:
    meet(place, postgres_url)
    assert {record.state for record in place.records(postgres_url)} == {RunState.FINISHED}


@pytest.mark.timeout(60)
def test_ten_hosts_meet_on_redis(place: Place, services: Services, namespace: str) -> None:
    url = had(services.redis).url
    meet(place, url, namespace=namespace)
    assert {record.state for record in place.records(url, namespace)} == {RunState.FINISHED}


@pytest.mark.timeout(60)
def test_ten_hosts_have_one_winner_under_a_claim(
    place: Place, services: Services, namespace: str
) -> None:
    url = f"{had(services.redis).url}?strategy=script"
    statuses, _ = meet(place, url, kills=0, namespace=namespace)
    assert statuses == [[0] * 10]
    assert len(notes(place.log, "ended")) == 1


def test_the_status_of_the_winner_is_passed_on_and_the_others_are_silent(place: Place) -> None:
    calls = [place.call(PAST, ["sh", "-c", "echo won; sleep 2; exit 3"]) for _ in range(3)]
    ended = sorted(call.end() for call in calls)
    assert ended == [(0, "", "")] * 2 + [(3, "won\n", "")]


# -- death -----------------------------------------------------------------------------------------


def test_the_command_and_all_that_it_started_die_with_exec(place: Place) -> None:
    line = 'sleep 100 & echo $! >> pids; sh -c "sleep 100 & echo \\$! >> pids; wait" & wait'
    call = place.call(SOON, ["sh", "-c", f"echo $$ > pids; {line}"])
    pids = place.folder / "pids"
    assert until(lambda: pids.exists() and len(pids.read_text().split()) == 3)
    call.send(signal.SIGKILL)
    # Whoever reads the output is not kept waiting either.
    assert call.end()[0] == -signal.SIGKILL
    assert until(lambda: not [pid for pid in pids.read_text().split() if is_alive(int(pid))], 5)


def test_nothing_is_left_of_a_call_that_is_over(place: Place) -> None:
    """Neither the guard of the process group nor a zombie."""
    call = place.call(SOON, ["sh", "-c", "ps -A -o ppid=,pid=,args= > seen"])
    assert wait_status(call) == 0
    lines = (place.folder / "seen").read_text().splitlines()
    rows = [line.split(None, 2) for line in lines]
    children = [int(pid) for ppid, pid, _args in rows if int(ppid) == call.pid]
    assert len(children) == 2
    assert not [pid for pid in children if is_alive(pid)]


def test_no_url_is_in_the_process_list(place: Place) -> None:
    line = "cat /proc/*/cmdline 2>/dev/null | tr '\\0' ' ' | grep -c 'hidden[.]db' > seen"
    (place.folder / "url").write_text(f"sqlite:///{place.folder}/hidden.db\n")
    assert wait_status(place.call(SOON, ["sh", "-c", line], "@url")) in (0, 1)
    assert (place.folder / "seen").read_text() == "0\n"


# -- signals ---------------------------------------------------------------------------------------


def test_who_gives_way_is_followed_by_the_next_call_of_the_line(place: Place) -> None:
    first = place.at_work(PAST)
    first.send(signal.SIGINT)
    assert first.end() == (130, "", "")
    (record,) = place.records()
    assert (record.state, record.failures) == (RunState.WAITING, 0)
    assert place.call(PAST, noting(place.log, 0)).end() == (0, "", "")
    assert [note.attempt for note in notes(place.log, "began")][:2] == [1, 2]
    assert {record.state for record in place.records()} == {RunState.FINISHED}


def test_a_standby_goes_on_when_another_host_gives_way(place: Place) -> None:
    first = place.at_work([*PAST, "--standby"])
    second = place.call([*PAST, "--standby"], noting(place.log, 0))
    # Its lease of 15 seconds would be the other way to get the run.
    first.send(signal.SIGHUP)
    assert first.end()[0] == 129
    assert second.end(limit_s=12) == (0, "", "")
    assert [note.attempt for note in notes(place.log, "ended")] == [2]


def test_a_signal_reaches_the_group_and_who_finishes_has_finished(place: Place) -> None:
    (place.folder / "job").write_text(
        "exec 2> /dev/null\n"
        "trap 'echo outer >> heard; wait; exit 0' TERM\n"
        "(trap 'echo inner >> heard; exit 0' TERM; echo > ready; while :; do sleep 0.1; done) &\n"
        "while :; do sleep 0.1; done\n"
    )
    call = place.call(PAST, ["sh", "job"])
    assert until((place.folder / "ready").exists)
    call.send(signal.SIGTERM)
    assert call.end() == (0, "", "")
    assert sorted((place.folder / "heard").read_text().split()) == ["inner", "outer"]
    assert place.records()[0].state is RunState.FINISHED


def test_a_second_signal_is_passed_on_too(place: Place) -> None:
    (place.folder / "job").write_text(
        "trap 'echo > first' TERM; trap 'exit 5' INT; echo > ready; while :; do sleep 0.1; done\n"
    )
    call = place.call(PAST, ["sh", "job"])
    assert until((place.folder / "ready").exists)
    call.send(signal.SIGTERM)
    assert until((place.folder / "first").exists)
    call.send(signal.SIGINT)
    assert wait_status(call) == 5
    assert place.records()[0].state is RunState.WAITING


def test_a_standby_that_waits_ends_with_a_signal_at_once(place: Place) -> None:
    place.at_work(PAST)
    standby = place.call([*PAST, "--standby", "--verbose"], ["true"])
    assert until(lambda: is_alive(standby.pid))
    time.sleep(1)  # until it waits; if it does not yet, the signal ends it all the same
    standby.send(signal.SIGHUP)
    status, out, _err = standby.end(limit_s=5)
    assert (abs(status) % 128, out) == (signal.SIGHUP, "")


# -- lost leases -----------------------------------------------------------------------------------


def test_who_was_stopped_for_longer_than_its_lease_ends_its_command(place: Place) -> None:
    options = [*PAST, "--standby", "--lease", "1"]
    first = place.at_work(options)
    (began,) = notes(place.log, "began")
    stop_outside_writes(first.send, place.folder / "jobs.db")
    os.kill(began.pid, signal.SIGSTOP)  # as a whole machine that stands still
    second = place.call(options, ["true"])
    assert second.end() == (0, "", "")
    os.kill(began.pid, signal.SIGCONT)
    first.send(signal.SIGCONT)
    status, _out, err = first.end(limit_s=5)
    assert status == 75
    assert "another host may execute it again" in err
    assert not is_alive(began.pid)


def test_who_comes_back_before_anybody_took_over_has_finished(place: Place) -> None:
    options = [*PAST, "--lease", "1"]
    call = place.at_work(options, 0.5)
    call.send(signal.SIGSTOP)
    assert until(lambda: notes(place.log, "ended"))
    time.sleep(1.5)  # longer than the lease
    call.send(signal.SIGCONT)
    assert call.end() == (0, "", "")
    assert place.records()[0].state is RunState.FINISHED


def test_a_store_that_is_cut_off_for_longer_than_the_lease_ends_the_command(
    place: Place, own: Own, proxy: Callable[..., Proxy]
) -> None:
    server = own.redis(durable=False)
    way = proxy(server)
    url = way.url_of(server.url)
    options = [*PAST, "--standby", "--lease", "2"]
    first = place.at_work(options, url=url)
    (began,) = notes(place.log, "began")
    way.swallow()
    # While the store is silent: its time-outs keep nobody from looking at the time.
    assert until(lambda: not is_alive(began.pid), 10)
    second = place.call(options, ["true"], server.url)
    assert wait_status(second) == 0
    way.forward()
    status, _out, err = first.end(limit_s=15)
    assert status == 75
    assert "was lost: another host may execute it again" in err


def test_a_signal_ends_a_call_whose_store_is_silent(
    place: Place, own: Own, proxy: Callable[..., Proxy]
) -> None:
    server = own.redis(durable=False)
    way = proxy(server)
    way.swallow()
    call = place.call([*PAST, "--lease", "3"], ["true"], way.url_of(server.url))
    assert until(lambda: way.accepted > 0)
    call.send(signal.SIGTERM)
    status, _out, err = call.end(limit_s=10)
    assert status == 143
    assert "ended by SIGTERM" in err
    assert len(err.splitlines()) == 1


# -- what goes in and out --------------------------------------------------------------------------


def test_bytes_go_through_as_they_are(place: Place) -> None:
    data = bytes(range(256)) * 4_000
    call = place.call(SOON, ["sh", "-c", "cat; echo to stderr >&2"])
    out, err = call.process.communicate(data, 25)
    assert out == data
    assert err == b"to stderr\n"
    assert call.process.returncode == 0


def test_files_that_are_open_go_through_and_no_others(place: Place) -> None:
    line = ["sh", "-c", "echo through >&9; ls /proc/self/fd"]
    call = [sys.executable, "-m", "leasecron_sync", "exec", place.url, "--name", "job", *SOON, "--"]
    said = [
        subprocess.run(
            ["sh", "-c", 'exec 9>> through; exec "$@"', "sh", *command],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            check=True,
            timeout=25,
        ).stdout
        for command in (line, [*call, *line])
    ]
    assert (place.folder / "through").read_text() == "through\nthrough\n"
    assert said[0] == said[1]


def test_a_terminal_stays_one(place: Place) -> None:
    controller, terminal = pty.openpty()
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "leasecron_sync", "exec", place.url, "--name", "job", *SOON),
            *("--", "sh", "-c", "test -t 0 && test -t 1 && read line && echo got $line"),
        ],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        start_new_session=True,
    )
    os.close(terminal)
    os.write(controller, b"this\n")
    said = b""
    with contextlib.suppress(OSError):  # the end of a terminal
        while b"got" not in said:
            said += os.read(controller, 100)
    assert process.wait(20) == 0
    os.close(controller)
    assert b"got this" in said
