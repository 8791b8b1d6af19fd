"""``transition`` under generated histories: the rules of the protocol hold after every step.

Several instances claim, renew, settle and prune; replies and requests are lost, calls are repeated
and come late, and the clock goes on or back. The rules are in ``tests/model/watch.py``. That they
would notice something is shown in ``tests/mutants/test_transition_mutants.py``.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import HealthCheck, given, settings

from leasecron_sync.model import LeaseRef, RunKey, RunState, Verdict
from tests.model.histories import (
    HISTORIES,
    INTERVAL_MS,
    JOBS,
    LEASE_MS,
    Fate,
    Operation,
    random_operation,
)
from tests.model.watch import WatchfulPlayer


@settings(
    derandomize=True,
    database=None,
    max_examples=250,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(HISTORIES)
def test_rules_hold_in_every_history_and_everything_is_settled_in_the_end(
    history: Sequence[Operation],
) -> None:
    player = WatchfulPlayer()
    player.play(history)
    player.settle_everything()


@pytest.mark.parametrize("seed", range(25))
def test_rules_hold_in_a_long_history(seed: int) -> None:
    dice = random.Random(seed)
    player = WatchfulPlayer()
    for _ in range(2_000):
        player.one(random_operation(dice))
    player.settle_everything()
    states = {record.state for record in player.watched.runs.values()}
    assert states <= {RunState.FINISHED, RunState.FAILED, RunState.SKIPPED}


def test_histories_reach_every_verdict_and_every_state() -> None:
    """The rules would hold easily if nothing happened."""
    verdicts: set[Verdict] = set()
    seen: set[tuple[RunState, str]] = set()
    granted: set[LeaseRef] = set()
    takeovers = 0
    for seed in range(6):
        dice = random.Random(100 + seed)
        player = WatchfulPlayer()
        claim = player.store.claim
        for _ in range(800):
            operation = random_operation(dice)
            player.one(operation)
            for record in player.watched.runs.values():
                seen.add((record.state, record.reason))
            last = player.instances[0].last
            if last is not None and dice.random() < 0.3:
                [reply] = claim([last])
                verdicts.add(reply.verdict)
                if reply.lease is not None:
                    takeovers += reply.lease.takeover
                    granted.add(reply.lease.ref)
    assert verdicts == set(Verdict) - {Verdict.TAKEN, Verdict.UNKNOWN, Verdict.REJECTED}
    assert {state for state, _ in seen} == set(RunState)
    assert {"overlap", "runner lost", "abandoned", "failed"} <= {reason for _, reason in seen}
    assert takeovers > 10
    assert len(granted) > 100


def test_late_renewal_of_a_lapsed_run_does_not_make_two_running_runs() -> None:
    """OVERLAP-3, by example: run 1 lapses, run 2 is due, the heartbeat of run 1 comes late."""
    player = WatchfulPlayer()
    ann, bob = player.instances[:2]
    job = JOBS[0].name
    base_ms = player.clock.now_ms() // INTERVAL_MS * INTERVAL_MS
    first, second = RunKey(job, base_ms - INTERVAL_MS), RunKey(job, base_ms)
    player.send_claim(ann, player.intend(ann, first), Fate.ANSWERED)
    player.clock.advance(2 * LEASE_MS)
    player.send_claim(bob, player.intend(bob, second), Fate.ANSWERED)
    player.send_renewals(ann, ann.leases, Fate.ANSWERED)
    assert [record.key for record in player.watched.unsettled(job)] == [first]
    player.settle_everything()
