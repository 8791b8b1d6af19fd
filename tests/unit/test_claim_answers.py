"""Answers of claim backends to single claims of a batch: what the engine makes of each."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from leasecron_sync.model import ClaimReply, OnceClaim, Verdict
from leasecron_sync.testing import MemoryClaim
from tests.fleet import MIDDAY_MS, MINUTE, SECOND, Fleet


class Stub:
    """Answers the claims of some jobs as it is told, and leaves the others to the store."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.answers: dict[str, ClaimReply] = {}
        self.asked: list[OnceClaim] = []
        claim = MemoryClaim.claim

        def answered(store: MemoryClaim, claims: Sequence[OnceClaim]) -> Sequence[ClaimReply]:
            self.asked += claims
            replies = iter(
                claim(store, [item for item in claims if item.key.job not in self.answers])
            )
            return [self.answers.get(item.key.job) or next(replies) for item in claims]

        monkeypatch.setattr(MemoryClaim, "claim", answered)


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> Stub:
    return Stub(monkeypatch)


def started(*jobs: str) -> Fleet:
    fleet = Fleet("claim")
    only = fleet.add("only")
    for job in jobs:
        only.job(job, "* * * * *")
    only.start()
    return fleet


def test_a_run_of_which_nobody_knows_the_winner_is_missed_at_once_and_not_executed(
    stub: Stub,
) -> None:
    fleet = started("lost", "fine")
    stub.answers["lost"] = ClaimReply(Verdict.UNKNOWN)
    fleet.advance(30 * SECOND)
    assert {start.job for start in fleet.starts} == {"fine"}
    [event] = fleet.missed()
    assert (event.job, event.reason) == ("lost", "unknown outcome")
    asked = len(stub.asked)
    fleet.advance(20 * SECOND)
    assert len(stub.asked) == asked


def test_a_run_that_could_not_be_asked_for_is_asked_for_again_under_its_decision(
    stub: Stub,
) -> None:
    fleet = started("left out", "fine")
    stub.answers["left out"] = ClaimReply(Verdict.DEFERRED, 1_000)
    fleet.advance(31 * SECOND)
    del stub.answers["left out"]
    fleet.advance(5 * SECOND)
    assert {start.job for start in fleet.starts} == {"left out", "fine"}
    assert fleet.missed() == []
    decisions = {item.decision_id for item in stub.asked if item.key.job == "left out"}
    assert len(decisions) == 1


def test_a_run_that_could_not_be_asked_for_until_it_is_too_old_is_missed(stub: Stub) -> None:
    fleet = started("left out")
    stub.answers["left out"] = ClaimReply(Verdict.DEFERRED, 1_000)
    fleet.advance(30 * SECOND + 2 * MINUTE)
    assert fleet.starts == []
    first = fleet.missed()[0]
    assert first.job == "left out"
    assert first.scheduled_time is not None
    assert round(first.scheduled_time.timestamp() * 1000) == MIDDAY_MS


def test_a_run_that_is_rejected_is_missed_with_its_reason_in_the_log(
    stub: Stub, caplog: pytest.LogCaptureFixture
) -> None:
    fleet = started("refused", "fine")
    stub.answers["refused"] = ClaimReply(Verdict.REJECTED, reason="another x-expires")
    fleet.advance(30 * SECOND)
    assert {start.job for start in fleet.starts} == {"fine"}
    [event] = fleet.missed()
    assert event.job == "refused"
    assert "another x-expires" in caplog.text
