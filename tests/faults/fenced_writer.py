"""One instance as a process: its handler writes late, through a guard of the page 'Fencing'.

A line tells it when its job is due. It says ``inside`` with the attempt when its handler has a run,
then ``written`` or ``fenced``. The first attempt writes when the next line comes, whatever happened
meanwhile; the others write at once. A last line ends it.
"""

from __future__ import annotations

import ast
import json
import sys
import threading
from datetime import datetime
from typing import Any, Callable

from leasecron_sync import LeaseRun, Scheduler, at, connect_lease
from tests.docs.test_examples import ROOT, blocks_of

JOB = "totals"
FENCING = ROOT / "docs/fencing.rst"

Write = Callable[[int, str], None]


def guards() -> dict[str, Any]:
    """Return what the page defines, without doing what it does with it."""
    names: dict[str, Any] = {}
    for block in blocks_of(FENCING):
        if block.language == "python":
            tree = ast.parse(block.text)
            tree.body = [node for node in tree.body if _defines(node)]
            exec(compile(tree, "docs/fencing.rst", "exec"), names)
    return names


def _defines(node: ast.stmt) -> bool:
    if isinstance(node, ast.Assign):
        return isinstance(node.value, ast.Constant)
    return isinstance(node, (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef))


def writer_to(kind: str, place: str, names: dict[str, Any]) -> Write:
    """Return what writes a value with a token."""
    if kind == "postgresql":
        import psycopg2

        shop = psycopg2.connect(place)
        return lambda token, value: names["write_postgres_total"](shop, JOB, token, value)
    if kind == "sqlite":
        import sqlite3

        def write(token: int, value: str) -> None:
            connection = sqlite3.connect(place)
            with connection:
                names["pass_fence"](connection, JOB, token)
                connection.execute("UPDATE account SET total = ?", (value,))
            connection.close()

        return write
    if kind == "redis":
        import redis

        client = redis.Redis.from_url(place)
        return lambda token, value: names["set_fenced"](client, JOB, value, token)
    assert kind == "file"
    return lambda token, value: names["publish"](place, value, token)


def main() -> None:
    options = json.loads(sys.argv[1])
    names = guards()
    write = writer_to(options["kind"], options["place"], names)
    late = threading.Event()

    def handler(run: LeaseRun) -> None:
        print("inside", run.attempt, flush=True)
        if run.attempt == 1:
            late.wait()  # it does not look whether it still holds its run
        try:
            write(run.token, str(run.attempt))
        except names["Fenced"]:
            print("fenced", flush=True)
        else:
            print("written", flush=True)

    print("up", flush=True)
    due = datetime.fromisoformat(sys.stdin.readline().strip())
    scheduler = Scheduler(connect_lease(options["url"]), lease_ms=1_000)
    scheduler.add_job(handler, at(due), name=JOB)
    with scheduler:
        sys.stdin.readline()
        late.set()
        sys.stdin.readline()


if __name__ == "__main__":
    main()
