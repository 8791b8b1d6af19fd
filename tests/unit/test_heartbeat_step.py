"""Renewals: in time, in one call, and only of what is still held."""

from __future__ import annotations

from leasecron_sync.run import LeaseRun
from tests.fleet import MINUTE, SECOND, Fleet


def test_a_lease_granted_with_little_time_left_is_renewed_before_it_ends() -> None:
    fleet = Fleet()
    first, second = fleet.add("a"), fleet.add("b")
    lost: list[bool] = []

    def work(run: LeaseRun) -> None:
        for _ in range(30):
            fleet.advance(SECOND)
            lost.append(run.lost)

    for item in (first, second):
        item.job("job", "0 * * * *", work)
        item.start()
    fleet.advance(29 * SECOND)
    second.paused = True
    first.backend.faults.lose_reply("claim")
    fleet.advance(SECOND)
    first.backend.faults.down = True
    second.paused = False
    fleet.advance(9 * SECOND + 500)
    first.backend.faults.down = False
    fleet.advance(MINUTE)
    assert fleet.who() == ["a"]
    assert not any(lost)
