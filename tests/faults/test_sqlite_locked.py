"""An SQLite file that somebody else locks for long, with several instances at work on it.

An ordinary build holds the file for four fifths of a call's time-out, and for six time-outs.
``LEASECRON_SYNC_LONG=1`` in the environment runs the same with the usual ``lease_ms``, locks of 4
and 40 seconds, eight instances, twenty jobs a second, for three minutes.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.faults.edges import Bench, begin_audit, double_leases, grants
from tests.faults.edges_crew import (
    Instances,
    doubled_attempts,
    eventually,
    finished_twice,
    now_ms,
    pause,
    stop_all,
    unsettled,
)

LONG = bool(os.environ.get("LEASECRON_SYNC_LONG"))


@dataclass(frozen=True)
class Scale:
    """How long and how much."""

    instances: int
    jobs: int
    lease_ms: int
    short_s: float
    long_s: float
    calm_s: float


SCALE = Scale(8, 20, 15_000, 4.0, 40.0, 45.0) if LONG else Scale(3, 4, 1_500, 0.4, 3.0, 0.6)


@pytest.fixture
def instances(tmp_path: Path) -> Iterator[Instances]:
    instances = Instances(Bench(tmp_path))
    yield instances
    for instance in instances:
        instance.end()
    instances.bench.end()


@contextmanager
def locked(path: Path, how: str) -> Iterator[None]:
    """Hold the file, from a process that is none of the instances."""
    with closing(sqlite3.connect(path, isolation_level=None, timeout=20)) as connection:
        connection.execute(how)
        yield
        connection.execute("ROLLBACK")


def test_the_audit_would_find_a_lease_that_was_granted_beside_a_live_one(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    begin_audit(bench.path)
    backend = bench.connect()
    for number in range(2):
        bench.claim(backend, "job", number)
    assert double_leases(bench.path) == []
    bench.sql("UPDATE leasecron_run SET until_ms = until_ms + 1")
    assert double_leases(bench.path) == [], "they were renewed"
    bench.sql("UPDATE leasecron_run SET overlap = 0, token = token + 10 WHERE scheduled_ms % 2 = 0")
    assert len(double_leases(bench.path)) == 2, "beside its own lease, and beside the other one"
    bench.end()


@pytest.mark.timeout(400)
@pytest.mark.slow
@pytest.mark.parametrize("journal", ["wal", "delete"])
def test_a_file_that_somebody_locks_is_an_outage_after_which_everything_due_is_run_once(
    instances: Instances, journal: str
) -> None:
    bench = instances.bench
    begin_audit(bench.path)
    bench.sql("PRAGMA journal_mode = DELETE")  # as of a file that another application made
    options = ["--jobs", str(SCALE.jobs), "--lease-ms", str(SCALE.lease_ms)]
    options += ["--rollback"] if journal == "delete" else []
    instances.start(SCALE.instances, *options)
    from_ms = now_ms() + 1_000
    pause(SCALE.calm_s)
    with locked(bench.path, "BEGIN IMMEDIATE"):
        pause(SCALE.short_s)
    for instance in instances:
        if instance.lines("store_down"):
            instance.wait_for("store_back")
    pause(SCALE.calm_s)
    downs = [instance.logged("store does not answer") for instance in instances]
    with locked(bench.path, "BEGIN EXCLUSIVE"):
        pause(SCALE.long_s)
        to_ms = now_ms()
        for instance, before in zip(instances, downs):
            # However many calls failed on three connections.
            assert instance.logged("store does not answer") == before + 1
    eventually(lambda: not unsettled(bench, SCALE.jobs, from_ms, to_ms), 60)
    assert unsettled(bench, SCALE.jobs, from_ms, to_ms) == []
    for instance, before in zip(instances, downs):
        instance.wait_for("store_back", before + 1)
    stop_all(instances)
    for instance in instances:
        kinds = [line["what"] for line in instance.lines("store_down", "store_back")]
        # A machine that is busy may bring one more, and the stop may come into it.
        told = len(kinds) * ["store_down", "store_back"]
        assert kinds == told[: len(kinds)], "each end is told once"
        assert instance.logged("store does not answer") == kinds.count("store_down")
        assert instance.logged("store answers again") == kinds.count("store_back")
        assert instance.logged("may run again") == 0, "the file and its log are what they were"
    assert bench.sql("PRAGMA journal_mode") == [(journal,)]
    assert double_leases(bench.path) == []
    assert grants(bench.path) >= SCALE.jobs * (to_ms - from_ms) // 1000
    assert doubled_attempts(instances) == []
    assert finished_twice(instances) == []
    assert instances.lines("run_missed") == []
    bench.check()


@pytest.mark.timeout(120)
@pytest.mark.timing
def test_a_stop_returns_while_the_file_is_locked(instances: Instances) -> None:
    """With the usual time-outs: each of its calls would wait for seconds, one after the other."""
    bench = instances.bench
    instances.start(1, "--jobs", "3", "--seconds", "60")
    [instance] = instances
    assert eventually(lambda: len(instance.lines("enter")) >= 3, 30)
    with locked(bench.path, "BEGIN EXCLUSIVE"):
        pause(1.2)  # the timer is in a call by then, for the next scheduled time
        instance.stop(timeout=1.0)
        said = instance.wait_stopped()
    assert said["seconds"] < 10, "it would be locked for ever"
    bench.check()


@pytest.mark.timeout(120)
def test_a_start_on_a_locked_file_is_one_warning_and_mended_by_itself(
    instances: Instances,
) -> None:
    bench = instances.bench
    bench.sql("CREATE TABLE invoice (number)")
    with locked(bench.path, "BEGIN EXCLUSIVE"):
        instances.start(2, "--lease-ms", "1500", "--seconds", "0.05")
        pause(1.0)
        assert [len(instance.lines("logged")) for instance in instances] == [1, 1]
        assert instances.lines("enter") == []
    assert eventually(lambda: instances.lines("run_finished"), 30)
    stop_all(instances)
    assert bench.sql("PRAGMA journal_mode") == [("wal",)]
