"""A holder that stood still writes late, and is refused: PostgreSQL, SQLite, Redis and a file.

The guards are those of the page 'Fencing', as they stand there.
"""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
from contextlib import ExitStack, closing
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.docs.test_examples import ROOT
from tests.faults.fenced_writer import JOB
from tests.services.fixtures import Own
from tests.services.postgres import execute
from tests.services.process import eventually, stop_outside_writes
from tests.services.redis import execute as execute_in_redis

LIMIT_S = 60.0
LEASES = "jobs.db"
"""Where the leases are, when they are not where the data are."""


class Writer:
    """An instance as a process, and what it has said so far."""

    def __init__(self, folder: Path, name: str, options: dict[str, str]) -> None:
        self._said = folder / f"{name}.out"
        with self._said.open("wb") as said:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.faults.fenced_writer", json.dumps(options)],
                stdin=subprocess.PIPE,
                stdout=said,
                stderr=subprocess.STDOUT,
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": str(ROOT)},
            )

    def said(self) -> list[str]:
        return self._said.read_text(encoding="utf-8").splitlines()

    def wait_said(self, line: str) -> None:
        assert eventually(lambda: line in self.said(), LIMIT_S), (line, self.said())

    def send(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def tell(self, line: str = "") -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n".encode())
        self._process.stdin.flush()

    def end(self) -> int:
        self.tell()
        return self._process.wait(LIMIT_S)

    def close(self) -> None:
        if self._process.poll() is None:
            self.send(signal.SIGCONT)
            self._process.kill()
            self._process.wait(LIMIT_S)
        assert self._process.stdin is not None
        self._process.stdin.close()


class Shop(NamedTuple):
    """Where the data are, and the leases."""

    place: str
    url: str


TABLES = """
    CREATE TABLE fence (thing text PRIMARY KEY, token bigint NOT NULL);
    CREATE TABLE account (total bigint NOT NULL);
    INSERT INTO account VALUES (0);
"""


def shop_of(kind: str, folder: Path, request: pytest.FixtureRequest) -> Shop:
    """Make a place for the data and one for the leases."""
    leases = f"sqlite:///{folder / LEASES}"
    if kind in ("postgresql", "redis"):
        own: Own = request.getfixturevalue("own")
        if kind == "redis":
            return Shop(*[own.redis(durable=False).url] * 2)
        url = own.postgres(durable=False).url
        execute(url, TABLES)
        return Shop(url, url)
    place = folder / "shop"
    if kind == "sqlite":
        with closing(sqlite3.connect(place)) as connection:
            connection.executescript(TABLES)
    return Shop(str(place), leases)


def value_in(kind: str, place: str) -> str:
    """Return what was written last."""
    if kind == "postgresql":
        return str(execute(place, "SELECT total FROM account")[0][0])
    if kind == "redis":
        value: bytes = execute_in_redis(place, "GET", f"value:{{{JOB}}}")
        return value.decode()
    if kind == "sqlite":
        with closing(sqlite3.connect(place)) as connection:
            return str(connection.execute("SELECT total FROM account").fetchone()[0])
    return Path(place).read_text(encoding="utf-8")


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("kind", ["postgresql", "sqlite", "redis", "file"])
def test_the_late_write_of_a_holder_that_stood_still_is_refused(
    kind: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    shop = shop_of(kind, tmp_path, request)
    options = {"kind": kind, "place": shop.place, "url": shop.url}
    with ExitStack() as closed:
        writers = [Writer(tmp_path, name, options) for name in ("a", "b")]
        for writer in writers:
            closed.callback(writer.close)
            writer.wait_said("up")
        due = datetime.now(timezone.utc) + timedelta(seconds=2)
        for writer in writers:
            writer.tell(due.isoformat())

        def holder() -> list[Writer]:
            return [writer for writer in writers if "inside 1" in writer.said()]

        assert eventually(holder, LIMIT_S), [writer.said() for writer in writers]
        [old] = holder()
        [new] = [writer for writer in writers if writer is not old]
        stop_outside_writes(old.send, tmp_path / LEASES)
        new.wait_said("written")
        assert value_in(kind, shop.place) == "2"

        old.tell()  # the first thing it does is to write
        old.send(signal.SIGCONT)
        old.wait_said("fenced")
        assert value_in(kind, shop.place) == "2"

        new.tell()
        assert [writer.end() for writer in writers] == [0, 0]
        assert [line for line in old.said() if line != "up"] == ["inside 1", "fenced"]
        assert [line for line in new.said() if line != "up"] == ["inside 2", "written"]
