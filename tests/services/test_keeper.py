"""However a session ends, nothing of its servers is left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Optional

import pytest

from tests.services import keeper
from tests.services.fixtures import had
from tests.services.process import KeeperClient, Program, ServiceError, eventually
from tests.services.services import Services, started

ROOT = Path(__file__).parents[2]
LIMIT_S = 20.0

# Starts servers, tells where they are, and waits to be ended.
SESSION = """\
import json, os, sys
from tests.services.keeper import below
from tests.services.services import Services, started

services = Services()
servers = [services.new_redis()]
if "redis alone" not in sys.argv:
    servers.append(services.new_postgres())
for server in servers:
    started(server)
    if "paused" in sys.argv:
        server.pause()
if "killed" in sys.argv:
    servers[-1].kill()
folders = [str(server.home.folder) for server in servers]
folders += [str(template._data.parent) for template in services._templates.values()]
child = os.fork() if "forked" in sys.argv else None
if child != 0:
    keeper = services._keeper._keeper.pid
    print(json.dumps({"keeper": keeper, "pids": below(keeper), "folders": folders,
                      "child": child}), flush=True)
sys.stdin.read()
if "closed" in sys.argv:
    services.close()
"""


class Session:
    """A process that has started servers."""

    def __init__(self, *words: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", SESSION, *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        assert self.process.stdout is not None
        told: dict[str, Any] = json.loads(self.process.stdout.readline())
        self.keeper: int = told["keeper"]
        self.pids: list[int] = told["pids"]
        self.folders = [Path(folder) for folder in told["folders"]]
        self.child: Optional[int] = told["child"]

    def left(self) -> list[object]:
        """Return what is there of it."""
        found: list[object] = [pid for pid in [self.keeper, *self.pids] if is_alive(pid)]
        found += [folder for folder in self.folders if folder.exists()]
        return found + segments_of(self.pids)

    def close(self) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.stdout.close()
        try:
            self.process.wait(LIMIT_S)
        finally:
            self.process.kill()
            if self.child is not None and is_alive(self.child):
                os.kill(self.child, signal.SIGKILL)


def is_alive(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


def segments_of(pids: list[int]) -> list[object]:
    """Return the shared memory that was made by these processes."""
    lines = Path("/proc/sysvipc/shm").read_text(encoding="utf-8").splitlines()[1:]
    return [f"segment of {line.split()[4]}" for line in lines if int(line.split()[4]) in pids]


@pytest.fixture
def sessions() -> Iterator[list[Session]]:
    sessions: list[Session] = []
    yield sessions
    for session in sessions:
        session.close()


@pytest.fixture(autouse=True)
def _processes_can_be_had(services: Services) -> None:
    for server in (had(services.new_postgres), had(services.new_redis)):
        if server.program.image:
            pytest.skip("what docker runs has another parent")


needs_proc = pytest.mark.skipif(
    not Path("/proc/sysvipc/shm").exists(), reason="looks for processes in /proc"
)


@needs_proc
@pytest.mark.parametrize(
    ("words", "processes"),
    [
        (["at work"], 8),
        (["paused"], 8),
        (["killed"], 2),
        (["redis alone", "forked"], 2),
    ],
    ids=["at work", "paused", "killed", "forked"],
)
def test_nothing_is_left_of_a_session_that_is_killed(
    sessions: list[Session], words: list[str], processes: int
) -> None:
    session = Session(*words)
    sessions.append(session)
    assert len(session.left()) >= processes + len(session.folders)
    session.process.kill()
    assert eventually(lambda: not session.left(), LIMIT_S), session.left()


@needs_proc
def test_nothing_is_left_of_a_session_that_ends_well_and_it_says_nothing(
    sessions: list[Session],
) -> None:
    session = Session("closed")
    sessions.append(session)
    assert session.process.stdin is not None
    session.process.stdin.close()
    assert session.process.wait(LIMIT_S) == 0
    assert session.left() == []


@needs_proc
def test_servers_end_with_their_keeper(sessions: list[Session]) -> None:
    session = Session("at work")
    sessions.append(session)
    os.kill(session.keeper, signal.SIGKILL)
    assert eventually(lambda: not [x for x in session.pids if is_alive(x)], LIMIT_S)
    # Nobody is left who could do this.
    for folder in session.folders:
        keeper.remove_folder(str(folder))
    assert session.left() == []


@needs_proc
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_keeper_that_is_told_to_end_cleans_up_first(
    sessions: list[Session], number: signal.Signals
) -> None:
    session = Session("redis alone")
    sessions.append(session)
    os.kill(session.keeper, number)
    assert eventually(lambda: not session.left(), LIMIT_S), session.left()


def test_ctrl_c_ends_no_server_before_the_session_has_ended(services: Services) -> None:
    server = started(services.new_redis(durable=False))
    try:
        assert services._keeper._keeper is not None
        pid = services._keeper._keeper.pid
        assert os.getpgid(pid) != os.getpgrp()
        os.kill(pid, signal.SIGINT)
        assert server.do("PING") == "PONG"
        assert server.running
    finally:
        server.close()


@needs_proc
def test_shared_memory_of_a_killed_server_is_given_back_with_its_folder(
    services: Services,
) -> None:
    server = started(services.new_postgres())
    pid: int = server._at_work().pid  # type: ignore[attr-defined]  # not in a container
    assert len(segments_of([pid])) == 1
    server.kill()
    assert len(segments_of([pid])) == 1
    server.close()
    assert segments_of([pid]) == []


def test_processes_are_found_with_and_without_proc() -> None:
    try:
        by_ps = keeper.children_from_ps()
    except FileNotFoundError:
        pytest.skip("there is no ps")
    own = os.getpid(), os.getppid()
    assert own[0] in by_ps[own[1]]
    if Path("/proc/self/stat").exists():
        assert own[0] in keeper.children_from_proc()[own[1]]


def test_a_program_that_is_not_there_is_an_error_and_the_keeper_goes_on(tmp_path: Path) -> None:
    client = KeeperClient()
    try:
        for _ in range(2):
            with pytest.raises(ServiceError, match="No such file"):
                client.ask(
                    "start",
                    argv=[str(tmp_path / "nothing")],
                    folder=str(tmp_path),
                    log=str(tmp_path / "log"),
                    env={},
                    ids=None,
                    ending=9,
                )
    finally:
        client.close()


def test_a_keeper_that_has_ended_is_an_error_for_all_that_comes() -> None:
    client = KeeperClient()
    client.ask("folder", path="/nowhere")
    assert client._keeper is not None
    client._keeper.kill()
    client._keeper.wait(LIMIT_S)
    for _ in range(2):
        with pytest.raises(ServiceError, match="the keeper of the servers has ended"):
            client.ask("folder", path="/nowhere")
    client.close()


def test_a_forked_process_neither_uses_nor_ends_the_servers(services: Services) -> None:
    server = started(services.new_redis(durable=False))
    try:
        child = os.fork()
        if child == 0:  # pragma: no cover - its own process
            status = 1
            try:
                server.stop()
            except ServiceError as error:
                status = 0 if "a forked process has no servers" in str(error) else 2
            finally:
                services._keeper.close()
                os._exit(status)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        assert server.do("PING") == "PONG"
    finally:
        server.close()


def test_a_program_says_which_version_it_is() -> None:
    assert str(Program("redis", (7, 0, 15))) == "redis 7.0.15"
