"""Eight processes on one SQLite file; some are killed, one stands still for a while.

An ordinary build runs each case for some seconds; ``LEASECRON_SYNC_LONG=1`` in the environment
runs each for a minute.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from leasecron_sync.model import RunState
from tests.faults.processes import (
    LONG,
    Cluster,
    baseless_skips,
    eventually,
    judge,
    lost,
    owed_runs,
)

SECONDS = 60 if LONG else 15
JOBS = 20


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path)
    try:
        yield cluster
    finally:
        cluster.close()


def disturb(cluster: Cluster, seconds: float) -> tuple[int, int]:
    """Kill two in the middle of runs and stop one for 5 s; return the span that is owed."""
    for runner in cluster.runners:
        runner.wait_ready()
    from_ms = time.time_ns() // 1_000_000
    end = time.monotonic() + seconds
    time.sleep(seconds * 0.15)
    for runner in cluster.runners[:2]:
        assert eventually(lambda runner=runner: runner.inside(), 10)  # type: ignore[misc]
        runner.kill()
        time.sleep(seconds * 0.1)
    paused = cluster.runners[2]
    assert eventually(paused.inside, 10)
    paused.pause()
    time.sleep(5)
    paused.go_on()
    time.sleep(max(0.0, end - time.monotonic()))
    return from_ms, time.time_ns() // 1_000_000 - 500


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("overlap", ["allow", "skip"])
def test_no_run_is_doubled_or_lost(overlap: str, cluster: Cluster) -> None:
    for number in range(8):
        cluster.start(f"r{number}", jobs=JOBS, overlap=overlap, lease_ms=2_000, seconds=0.7)
    from_ms, to_ms = disturb(cluster, SECONDS)
    runs = owed_runs(JOBS, 1, from_ms, to_ms)
    # What is under way is brought to its end, within a lease, its takeover and the body.
    eventually(lambda: lost(cluster.records(), runs) == [], 15)
    cluster.stop()
    assert judge(cluster, runs) == []
    owed = [record for record in cluster.records() if from_ms <= record.key.scheduled_ms <= to_ms]
    states = {record.state for record in owed}
    if overlap == "allow":
        assert states == {RunState.FINISHED}
    else:
        assert states <= {RunState.FINISHED, RunState.SKIPPED}
        assert baseless_skips(cluster) == []
    # The disturbed runs were executed again, by others.
    again = [record for record in owed if record.attempt > 1 and record.state is RunState.FINISHED]
    assert again
