"""Renewals: in time, in one call, and only of what is still held."""

from __future__ import annotations

from collections.abc import Sequence

from leasecron_sync import at
from leasecron_sync.model import LeaseRef, RenewReply, RunState
from leasecron_sync.run import LeaseRun, moment
from leasecron_sync.testing.faults import FaultyLease
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


def test_short_runs_that_follow_one_another_are_settled_before_anybody_renews_them() -> None:
    """A round is due when the oldest lease calls for it, not at fixed times."""
    fleet = Fleet()
    only = fleet.add("a")
    only.job("job", "* * * * * *", lambda _run: fleet.advance(SECOND // 2))
    only.start()
    fleet.advance(MINUTE)
    assert len(fleet.started()) >= MINUTE // SECOND - 1
    assert only.calls("renew") == 0


def test_leases_of_different_age_are_renewed_in_one_call_when_the_oldest_calls_for_it() -> None:
    fleet = Fleet()
    only = fleet.add("a")
    lost: list[bool] = []
    store = only.backend
    assert isinstance(store, FaultyLease)
    began_ms, renewed, renew = fleet.store_clock.now_ms(), list[tuple[int, int]](), store.renew

    def noted(leases: Sequence[LeaseRef], lease_ms: int) -> Sequence[RenewReply]:
        renewed.append((fleet.store_clock.now_ms() - began_ms, len(leases)))
        return renew(leases, lease_ms)

    store.renew = noted  # type: ignore[method-assign]

    def work(run: LeaseRun) -> None:
        for _ in range(20):
            fleet.advance(SECOND)
            lost.append(run.lost)

    for wait_s in (1, 3, 5):
        due_ms = fleet.store_clock.now_ms() + wait_s * SECOND
        only.job(f"job {wait_s}", at(moment(due_ms)), work)
    only.start()
    fleet.advance(SECOND)
    assert len(fleet.started()) == 3
    assert not any(lost)
    assert renewed[:4] == [(second * SECOND, 3) for second in (6, 11, 16, 21)]


def test_a_run_whose_settlement_stays_without_an_answer_is_renewed_once_at_most() -> None:
    """Else every step would ask for it again, until an answer comes."""
    fleet = Fleet()
    only = fleet.add("a")
    only.job("job", "0 * * * *", lambda _run: None)
    only.start()
    only.backend.faults.lose_reply("settle", times=10)
    fleet.advance(30 * SECOND)
    assert only.calls("settle") >= 1
    assert [record.state for record in fleet.records().values()] == [RunState.FINISHED]
    fleet.advance(MINUTE)
    assert only.calls("settle") == 11
    assert only.calls("renew") <= 1
    assert only.named("run_lost") == []
