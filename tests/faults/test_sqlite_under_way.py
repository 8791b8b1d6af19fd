"""Schedulers at work while somebody does to their SQLite file what should never be done."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Callable

import pytest

from tests.faults.edges import Bench, begin_audit, double_leases
from tests.faults.edges_crew import (
    Instances,
    doubled_attempts,
    eventually,
    now_ms,
    pause,
    stop_all,
    unsettled,
)

LONG = bool(os.environ.get("LEASECRON_SYNC_LONG"))
REPLACED = "the SQLite file was deleted or replaced, what was claimed in it may run again"
AMID = "was replaced while it was opened"
"""What an instance says that opens a connection just then."""


@pytest.fixture
def instances(tmp_path: Path) -> Iterator[Instances]:
    instances = Instances(Bench(tmp_path))
    yield instances
    for instance in instances:
        instance.end()
    instances.bench.end()


# -- what makes the store unusable for a while ----------------------------------------------------


@contextmanager
def a_letter_in_its_place(bench: Bench) -> Iterator[str]:
    bench.beside(".letter").write_bytes(b"Dear Sir or Madam, " * 500)
    bench.beside(".letter").replace(bench.path)
    yield "not a database"
    bench.path.unlink()


@contextmanager
def a_folder_in_its_place(bench: Bench) -> Iterator[str]:
    bench.path.unlink()
    bench.path.mkdir()
    yield "is a folder: name a file in it"
    bench.path.rmdir()


@contextmanager
def a_newer_version(bench: Bench) -> Iterator[str]:
    bench.sql("UPDATE leasecron_meta SET value = '2' WHERE name = 'format'")
    yield "store format 2"
    before = bench.sql("SELECT * FROM leasecron_run")
    pause(0.5)
    assert bench.sql("SELECT * FROM leasecron_run") == before, "they stopped writing"
    bench.sql("UPDATE leasecron_meta SET value = '1' WHERE name = 'format'")


@contextmanager
def the_folder_away(bench: Bench) -> Iterator[str]:
    away = bench.path.parent.with_name("away")
    bench.path.parent.rename(away)
    yield "does not exist"
    away.rename(bench.path.parent)


@contextmanager
def a_damaged_page(bench: Bench) -> Iterator[str]:
    content = bytearray(bench.backup().read_bytes())
    content[100:4096] = bytes(3996)
    bench.beside(".backup").write_bytes(content)
    bench.beside(".backup").replace(bench.path)
    yield "malformed"
    bench.path.unlink()


Trouble = Callable[[Bench], AbstractContextManager[str]]
TROUBLES: list[Trouble] = [
    a_letter_in_its_place,
    a_folder_in_its_place,
    a_newer_version,
    the_folder_away,
    a_damaged_page,
]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_whatever_stands_in_the_place_of_the_file_is_an_outage_that_no_thread_dies_of(
    instances: Instances,
) -> None:
    """One after the other, on the same instances: each is told at both ends, and got over."""
    bench = instances.bench
    data = bench.folder / "data"
    data.mkdir()
    bench.path = data / "store.db"
    instances.start(2, "--lease-ms", "1500", "--seconds", "0.05", "--jobs", "2")
    assert eventually(lambda: instances.lines("run_finished"), 30)
    for number, trouble in enumerate(TROUBLES, 1):
        with trouble(bench) as text:
            for instance in instances:
                reason = instance.wait_for("store_down", number)["reason"]
                assert text in reason or AMID in reason, trouble
        for instance in instances:
            instance.wait_for("store_back", number)
        instances[number % 2].wait_for("run_finished", after_ms=now_ms())
    stop_all(instances)
    for instance in instances:
        told = ("store does not answer", "store refuses what is asked")
        assert sum(map(instance.logged, told)) == len(TROUBLES)
        assert instance.logged("store answers again") == len(TROUBLES)
        assert instance.logged("let a foreign error escape") == 0
        assert instance.logged("a step failed") == 0


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_backup_put_in_place_under_way_doubles_nothing_that_is_claimed_afterwards(
    instances: Instances,
) -> None:
    """All instances write to the former file and its log until they notice, each by itself."""
    bench, jobs = instances.bench, 20 if LONG else 6
    begin_audit(bench.path)
    lease_ms = 15_000 if LONG else 1_500
    options = ("--jobs", str(jobs), "--lease-ms", str(lease_ms), "--seconds", "0.2")
    instances.start(8 if LONG else 3, *options)
    pause(60 if LONG else 1.3)
    backup = bench.backup()
    pause(20 if LONG else 1.1)
    backup.replace(bench.path)
    replaced_ms = now_ms()
    pause(60 if LONG else 2.2)
    to_ms = now_ms()
    eventually(lambda: not unsettled(bench, jobs, replaced_ms, to_ms), 60)
    assert unsettled(bench, jobs, replaced_ms, to_ms) == []
    stop_all(instances)
    for instance in instances:
        assert instance.logged(REPLACED) == 1
    assert double_leases(bench.path) == []
    doubled = doubled_attempts(instances)
    assert [key for key in doubled if key.scheduled_ms > replaced_ms] == []
    # Nothing but what was claimed within catch_up_ms, which is a minute.
    assert all(key.scheduled_ms > replaced_ms - 62_000 for key in doubled)
    bench.check()
