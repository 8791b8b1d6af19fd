"""What a test is told that needs servers: what to install, and what they wrote."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.services.fixtures import had
from tests.services.programs import Programs, missing
from tests.services.services import Services

ROOT = Path(__file__).parents[2]

TESTS = """\
def test_shared(services):
    from tests.services.fixtures import had
    had(services.redis)

def test_param(redis_server):
    pass

def test_own(own):
    server = own.redis()
    assert server.do("PING") == "something else"

def test_without_a_server():
    pass
"""


LEFTOVERS = """\
import socket
import pytest
from tests.threads.leftovers import nothing_left

@pytest.fixture(autouse=True)
def _nothing_left():
    with nothing_left():
        yield

def test_shared_and_own(redis_server, own, proxy):
    with socket.create_connection((proxy(own.redis()).host, proxy(redis_server).port)):
        pass
"""


def run(folder: Path, *options: str, path: str, tests: str = TESTS) -> tuple[int, str]:
    """Run tests in a process of its own, on a machine that has what is on a path."""
    file = folder / "test_given.py"
    file.write_text(tests, encoding="utf-8")
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-p", "tests.services.fixtures", "-rA"),
            *("-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", str(folder)),
            *(str(file), *options),
        ],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        cwd=folder,
        env={"PYTHONPATH": str(ROOT), "PATH": path},
        text=True,
        check=False,
    )
    return done.returncode, done.stdout


@pytest.fixture
def no_redis(tmp_path: Path) -> str:
    if Programs(path=str(tmp_path)).redis() or Programs(path="").redis():
        pytest.skip("this machine has a Redis that is found without PATH")
    return str(tmp_path)


def test_a_test_fails_without_its_server_and_says_what_to_install(
    tmp_path: Path, no_redis: str
) -> None:
    status, text = run(tmp_path, "-k", "not valkey", path=no_redis)
    assert status == 1
    assert "2 failed, 1 passed, 1 deselected, 1 error" in text
    assert f"\n{missing('redis')}\n" in text
    # Alone: no stack of what looked for it.
    assert "services.py" not in text


def test_tests_are_skipped_without_services_and_say_so(tmp_path: Path, no_redis: str) -> None:
    status, text = run(tmp_path, "--without-services", path=no_redis)
    assert status == 0
    assert "1 passed, 4 skipped" in text
    assert "left out with --without-services" in text


def test_servers_and_proxies_do_not_count_as_left_open_by_a_test(
    tmp_path: Path, services: Services
) -> None:
    for get in (services.new_redis, services.new_valkey):
        had(get)
    docker = ["--docker"] if services.sources.docker else []
    status, text = run(tmp_path, *docker, path=os.environ["PATH"], tests=LEFTOVERS)
    assert status == 0, text
    assert "2 passed" in text


def test_a_failed_test_shows_what_its_servers_wrote(tmp_path: Path, services: Services) -> None:
    had(services.new_redis)
    docker = ["--docker"] if services.sources.docker else []
    status, text = run(tmp_path, "-k", "own", *docker, path=os.environ["PATH"])
    assert status == 1
    assert "end of the log of Redis" in text
    assert "Ready to accept connections" in text
