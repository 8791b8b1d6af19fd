"""Holders that are stopped, killed, or told to end; the next instance goes on.

``LEASECRON_SYNC_LONG=1`` in the environment repeats more often.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from leasecron_sync.model import RunState
from tests.faults.processes import LONG, Cluster, Runner, eventually, judge, key_of, lost


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path)
    try:
        yield cluster
    finally:
        cluster.close()


def holder_of(cluster: Cluster, limit_s: float = 10) -> Runner:
    """Wait until somebody executes a run."""
    assert eventually(lambda: any(runner.inside() for runner in cluster.runners), limit_s)
    return next(runner for runner in cluster.runners if runner.inside())


@pytest.mark.slow
@pytest.mark.timeout(60)
def test_a_holder_that_stood_still_is_refused_and_its_handler_sees_the_loss(
    cluster: Cluster,
) -> None:
    for name in ("a", "b"):
        cluster.start(name, every=4, lease_ms=1_000, seconds=1.5).wait_ready()
    holder = holder_of(cluster)
    held = holder.inside()[0]
    holder.pause()
    other = next(runner for runner in cluster.runners if runner is not holder)
    assert eventually(
        lambda: [
            line
            for line in other.lines("run_finished")
            if key_of(line) == key_of(held) and line["attempt"] == 2
        ],
        10,
    )
    holder.go_on()
    assert eventually(lambda: [x for x in holder.lines("leave") if key_of(x) == key_of(held)], 10)
    assert eventually(lambda: [x for x in holder.lines("run_lost") if key_of(x) == key_of(held)], 5)
    cluster.stop()
    left = next(line for line in holder.lines("leave") if key_of(line) == key_of(held))
    assert left["lost"] is True
    assert not [line for line in holder.lines("run_finished") if key_of(line) == key_of(held)]
    record = next(record for record in cluster.records() if record.key == key_of(held))
    assert (record.state, record.attempt) == (RunState.FINISHED, 2)
    assert record.token > held["token"]
    assert judge(cluster) == []


@pytest.mark.slow
@pytest.mark.timeout(60)
def test_a_killed_run_is_executed_again_before_the_later_runs_of_its_job(cluster: Cluster) -> None:
    """The body takes nearly as long as the time to the next run."""
    for name in ("a", "b", "c"):
        cluster.start(name, every=2, lease_ms=1_000, seconds=1.9).wait_ready()
    holder = holder_of(cluster)
    held = holder.inside()[0]
    time.sleep(0.8)
    holder.kill()
    assert eventually(
        lambda: [
            line
            for line in cluster.lines("run_finished")
            if line["scheduled_ms"] >= held["scheduled_ms"] + 6_000
        ],
        25,
    )
    cluster.stop()
    assert judge(cluster) == []
    enters = cluster.lines("enter")
    again = [x for x in enters if key_of(x) == key_of(held) and x["attempt"] == 2]
    assert len(again) == 1
    assert again[0]["pid"] != held["pid"]
    later = [x for x in enters if x["scheduled_ms"] > held["scheduled_ms"]]
    assert later
    assert all(x["at_ms"] > again[0]["at_ms"] for x in later)
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
    holder = holder_of(cluster)
    held = holder.inside()[0]
    other = next(runner for runner in cluster.runners if runner is not holder)
    # The standby learns of the run when it asks for a later one.
    assert eventually(lambda: other.lines("run_skipped") or holder.lines("run_skipped"), 8)
    holder.stop()
    assert holder.end() == 0
    assert eventually(lambda: [x for x in other.lines("enter") if key_of(x) == key_of(held)], 8)
    told = next(line for line in holder.lines("interrupted") if key_of(line) == key_of(held))
    begun = next(line for line in other.lines("enter") if key_of(line) == key_of(held))
    assert told["error"] == "RunStopping"
    assert begun["attempt"] == 2
    assert begun["at_ms"] - told["at_ms"] < lease_ms / 5
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
    runs = {key_of(line) for line in cluster.lines("enter")}
    # Each process stands back for the length of a lease after each hand-over of a run.
    assert len(cluster.lines("enter")) <= 2 * len(runs) * (seconds * 1_000 / lease_ms + 1)
    assert max(line["attempt"] for line in cluster.lines("enter")) >= 3
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
        assert eventually(lambda runner=runner: runner.lines("enter"), 4)  # type: ignore[misc]
        scheduled_s += every_s
    to_ms = time.time_ns() // 1_000_000 - 500
    assert eventually(lambda: lost(cluster.records(), 1, every_s, from_ms, to_ms) == [], 5)
    runner.terminate()
    assert runner.end() == 0
    assert judge(cluster) == []
    assert {record.state for record in cluster.records()} == {RunState.FINISHED}
