"""Servers in containers do what they are told as well. Only with ``--docker``: few have it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Union

import pytest

from tests.services.docker import IMAGES
from tests.services.fixtures import had
from tests.services.postgres import PostgresServer, execute
from tests.services.process import ServiceMissing, eventually
from tests.services.programs import VARIABLES, VERSIONS, Programs
from tests.services.redis import RedisServer
from tests.services.services import Services, Sources

ROOT = Path(__file__).parents[2]
LIMIT_S = 20.0
NOTHING = Programs(root=Path("/nowhere"), path="", postgres_folders=())

pytestmark = pytest.mark.timeout(600)  # images may have to be fetched


@pytest.fixture
def in_docker(request: pytest.FixtureRequest) -> Iterator[Services]:
    if not request.config.getoption("--docker"):
        pytest.skip("docker is not asked for with --docker")
    services = Services(Sources(docker=True, environment={}, programs=NOTHING))
    try:
        yield services
    finally:
        services.close()


def use(server: Union[PostgresServer, RedisServer], word: str) -> int:
    """Write something and return how much is there."""
    if isinstance(server, PostgresServer):
        execute(server.url, "CREATE TABLE IF NOT EXISTS kept (word text)")
        execute(server.url, "INSERT INTO kept VALUES (%s)", word)
        return int(execute(server.url, "SELECT count(*) FROM kept")[0][0])
    length = server.do("RPUSH", "kept", word)
    assert isinstance(length, int)
    return length


@pytest.mark.parametrize("kind", ["postgres", "redis", "valkey"])
def test_a_container_is_stopped_killed_and_paused_like_a_process(
    in_docker: Services, kind: str
) -> None:
    server: Union[PostgresServer, RedisServer] = had(getattr(in_docker, f"new_{kind}"))
    before = set(containers(in_docker))
    server.start()
    url = server.url
    assert use(server, "first") == 1
    server.restart()
    assert use(server, "second") == 2
    server.kill()
    assert not server.running
    server.start()
    server.pause()
    assert server.running
    server.resume()
    assert use(server, "third") == 3
    assert server.url == url
    assert "ready" in server.log_tail().lower()
    server.pause()
    folder = server.home.folder
    server.close()
    assert not folder.exists()
    assert set(containers(in_docker)) == before


def test_pgbouncer_and_a_replica_in_containers_reach_their_server(in_docker: Services) -> None:
    server = had(in_docker.new_postgres)
    server.start()
    assert use(server, "first") == 1
    bouncer = had(lambda: in_docker.new_pgbouncer(server))
    bouncer.start()
    assert execute(bouncer.url, "SELECT word FROM kept") == [("first",)]
    bouncer.stop()
    replica = in_docker.new_replica(server)
    replica.start()
    assert eventually(lambda: execute(replica.url, "SELECT word FROM kept"), LIMIT_S)


SESSION = """\
import sys
from pathlib import Path
from tests.services.programs import Programs
from tests.services.services import Services, Sources, started

nothing = Programs(root=Path("/nowhere"), path="", postgres_folders=())
services = Services(Sources(docker=True, environment={}, programs=nothing))
server = started(services.new_redis())
print(server._process._container.id, server.home.folder, flush=True)
sys.stdin.read()
"""


def test_no_container_is_left_of_a_session_that_is_killed(in_docker: Services) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", SESSION],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    ) as session:
        assert session.stdout is not None
        container, folder = session.stdout.readline().decode().split()
        assert container in containers(in_docker)
        session.kill()
    assert eventually(lambda: container not in containers(in_docker), LIMIT_S)
    assert eventually(lambda: not Path(folder).exists(), LIMIT_S)


def containers(services: Services) -> list[str]:
    return [x.id for x in services._docker._connected().containers.list(all=True)]


def test_an_image_that_cannot_be_had_is_missing(
    in_docker: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(IMAGES, "redis", {7: "localhost:1/nothing:1"})
    with pytest.raises(ServiceMissing, match="localhost:1/nothing:1 cannot be had"):
        in_docker.new_redis()


def test_the_images_of_every_server_are_named_the_newest_first() -> None:
    assert set(IMAGES) == set(VARIABLES)
    for name, images in IMAGES.items():
        numbers = [[int(part) for part in str(version).split(".")] for version in images]
        assert numbers == sorted(numbers, reverse=True)
        assert list(images) == list(VERSIONS.get(name, images))
        for version, image in images.items():
            assert f":v{version}." in image or f":{version}" in image
