"""Holders that are stopped, killed, or told to end; the next instance goes on.

``LEASECRON_SYNC_LONG=1`` in the environment repeats more often.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from leasecron_sync.model import RunState
from leasecron_sync.testing import Entry
from tests.faults.processes import (
    LONG,
    Cluster,
    Runner,
    boot_ms,
    eventually,
    judge,
    lost,
    owed_runs,
)
from tests.faults.runner import SAW_LOSS


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path)
    try:
        yield cluster
    finally:
        cluster.close()


def holder_of(cluster: Cluster, within_ms: int = 500) -> tuple[Runner, Entry]:
    """Wait for a handler that began no longer ago than this; one that is nearly over is no good."""

    def beginning() -> list[tuple[Runner, Entry]]:
        return [
            (runner, start)
            for runner in cluster.runners
            for start in runner.inside()
            if boot_ms() - (start.steady_ms or 0) < within_ms
        ]

    found: list[tuple[Runner, Entry]] = []

    def look() -> bool:
        found[:] = beginning()
        return bool(found)

    assert eventually(look, 10)
    return found[0]


@pytest.mark.slow
@pytest.mark.timeout(60)
def test_a_holder_that_stood_still_is_refused_and_its_handler_sees_the_loss(
    cluster: Cluster,
) -> None:
    for name in ("a", "b"):
        cluster.start(name, every=4, lease_ms=3_000, seconds=1.5).wait_ready()
    holder, held = holder_of(cluster)
    holder.pause()
    other = next(runner for runner in cluster.runners if runner is not holder)
    assert eventually(
        lambda: [
            entry
            for entry in other.events("run_finished")
            if entry.key == held.key and entry.attempt == 2
        ],
        20,
    )
    holder.go_on()
    assert eventually(lambda: [x for x in holder.entries("ended") if x.token == held.token], 10)
    assert eventually(lambda: [x for x in holder.events("run_lost") if x.key == held.key], 5)
    cluster.stop()
    assert [entry.token for entry in holder.events(SAW_LOSS)] == [held.token]
    left = next(entry for entry in holder.entries("ended") if entry.token == held.token)
    assert left.verdict == "returned"
    assert not [entry for entry in holder.events("run_finished") if entry.key == held.key]
    refused = [entry for entry in holder.entries("settled") if entry.token == held.token]
    assert [entry.verdict for entry in refused] == ["refused"]
    record = next(record for record in cluster.records() if record.key == held.key)
    assert (record.state, record.attempt) == (RunState.FINISHED, 2)
    assert record.token > held.token
    assert judge(cluster) == []


@pytest.mark.slow
@pytest.mark.timeout(60)
def test_a_killed_run_is_executed_again_before_the_later_runs_of_its_job(cluster: Cluster) -> None:
    """The body takes nearly as long as the time to the next run."""
    for name in ("a", "b", "c"):
        cluster.start(name, every=2, lease_ms=4_000, seconds=1.9).wait_ready()
    holder, held = holder_of(cluster)
    time.sleep(0.8)
    holder.kill()
    assert eventually(
        lambda: [
            entry
            for entry in cluster.events("run_finished")
            if entry.key.scheduled_ms >= held.key.scheduled_ms + 6_000
        ],
        35,
    )
    cluster.stop()
    assert judge(cluster) == []
    starts = cluster.entries("started")
    [again] = [x for x in starts if x.key == held.key and x.attempt == 2]
    assert cluster.runner_of(again) is not holder
    later = [x for x in starts if x.key.scheduled_ms > held.key.scheduled_ms]
    assert later
    assert all((x.steady_ms or 0) > (again.steady_ms or 0) for x in later)
    assert {record.reason for record in cluster.records()} <= {"", "overlap", "stopping"}
    assert {record.state for record in cluster.records()} <= {
        RunState.FINISHED,
        RunState.SKIPPED,
        RunState.WAITING,  # handed over when the test ended
    }


@pytest.mark.slow
@pytest.mark.timeout(60)
def test_a_stopped_instance_hands_over_long_before_its_lease_would_lapse(cluster: Cluster) -> None:
    lease_ms = 15_000
    for name in ("a", "b"):
        cluster.start(
            name, every=3, lease_ms=lease_ms, seconds=20, body="wait", max_attempts=1
        ).wait_ready()
    holder, held = holder_of(cluster, within_ms=15_000)
    other = next(runner for runner in cluster.runners if runner is not holder)
    # The standby learns of the run when it asks for a later one.
    assert eventually(lambda: cluster.events("run_skipped"), 8)
    holder.stop()
    assert holder.end() == 0
    assert eventually(lambda: [x for x in other.entries("started") if x.key == held.key], 8)
    told = next(entry for entry in holder.entries("ended") if entry.token == held.token)
    begun = next(entry for entry in other.entries("started") if entry.key == held.key)
    assert (told.verdict, told.reason) == ("interrupted", "RunStopping")
    assert begun.attempt == 2
    assert begun.at_ms - told.at_ms < lease_ms / 5
    cluster.stop()
    assert judge(cluster) == []


@pytest.mark.slow
@pytest.mark.timeout(60)
def test_a_handler_that_always_hands_over_does_not_spin_between_processes(cluster: Cluster) -> None:
    lease_ms, seconds = 1_000, 6
    for name in ("a", "b"):
        cluster.start(name, every=2, lease_ms=lease_ms, body="hand-over").wait_ready()
    time.sleep(seconds)
    cluster.stop()
    starts = cluster.entries("started")
    runs = {entry.key for entry in starts}
    # Each process stands back for the length of a lease after each hand-over of a run.
    assert len(starts) <= 2 * len(runs) * (seconds * 1_000 / lease_ms + 1)
    assert max(entry.attempt for entry in starts) >= 3
    assert judge(cluster) == []


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_restarts_across_scheduled_times_lose_nothing(cluster: Cluster) -> None:
    """The only instance ends 2.5 s before a scheduled time, the next one is up 0.7 s after it."""
    every_s, rounds = 5, 20 if LONG else 3

    def sleep_until(wall_s: float) -> None:
        time.sleep(max(0.0, wall_s - time.time()))

    runner = cluster.start("r0", every=every_s, end="signal", catch_up_ms=5_000)
    runner.wait_ready()
    from_ms = time.time_ns() // 1_000_000
    scheduled_s = (int(time.time()) // every_s + 1) * every_s
    if scheduled_s - time.time() < 3:
        scheduled_s += every_s
    for number in range(1, rounds + 1):
        sleep_until(scheduled_s - 2.5)
        runner.terminate()
        assert runner.end() == 0, runner.standard_error()
        sleep_until(scheduled_s + 0.2)
        runner = cluster.start(f"r{number}", every=every_s, end="signal", catch_up_ms=5_000)
        runner.wait_ready()
        assert eventually(lambda runner=runner: runner.entries("started"), 4)  # type: ignore[misc]
        scheduled_s += every_s
    to_ms = time.time_ns() // 1_000_000 - 500
    owed = owed_runs(1, every_s, from_ms, to_ms)
    assert eventually(lambda: lost(cluster.records(), owed) == [], 5)
    runner.terminate()
    assert runner.end() == 0
    assert judge(cluster, owed) == []
    assert {record.state for record in cluster.records()} == {RunState.FINISHED}
