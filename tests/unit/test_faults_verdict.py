"""The judge of a fault campaign can fail: histories of which something is wrong on purpose."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from leasecron_sync.model import RunKey, RunRecord, RunState
from leasecron_sync.testing import Entry, HistoryLog, ManualClock
from scripts._faults_crew import Disturbance, Instance
from scripts._faults_instance import Job
from scripts._faults_plan import WINDOW_MS, Plan, Wishes
from scripts._faults_verdict import TELLING_MS, Finding, Judge, Scene, owed_runs

BEGIN_MS = 1_700_000_000_000
JOBS = [Job("job", 1)]
KEY = RunKey("job", BEGIN_MS + 1_000)


class Story:
    """A history that is told by hand, of instances that are no processes.

    Args:
        folder: For their logs.
        store: Name of the store.
    """

    def __init__(self, folder: Path, store: str) -> None:
        self.clock = ManualClock(BEGIN_MS)
        self.crew: list[Instance] = []
        self.records: list[RunRecord] = []
        self.troubles: list[str] = []
        self._store = store
        self._folder = folder
        self._logs: list[HistoryLog] = []

    def instance(self) -> int:
        """Add an instance that begins; return its number."""
        number = len(self.crew)
        path = self._folder / f"{number}.jsonl"
        process = cast("subprocess.Popen[bytes]", SimpleNamespace(pid=number))
        self.crew.append(Instance(number, path, process, path))
        self._logs.append(HistoryLog(path, clock=self.clock))
        self.note(number, "instance", verdict="began")
        return number

    def note(self, number: int, what: str, **fields: Any) -> None:  # noqa: ANN401 - of an entry
        if what in ("claiming", "claimed") and self._store == "nats":
            fields = {"window_ms": WINDOW_MS, **fields}
        self._logs[number].note(what, instance=str(number), **fields)

    def about(self, number: int, what: str, key: RunKey = KEY, **fields: Any) -> None:  # noqa: ANN401
        self.note(number, what, job=key.job, scheduled_ms=key.scheduled_ms, **fields)

    def claim(self, number: int, verdict: str, key: RunKey = KEY, **fields: Any) -> None:  # noqa: ANN401
        """Ask, and be told."""
        call = {"call": number + 1, "decision_id": str(number), "due_ms": key.scheduled_ms}
        self.about(number, "claiming", key, **call)
        self.clock.advance(10)
        self.about(number, "claimed", key, verdict=verdict, **call, **fields)

    def run(self, number: int, token: int, key: RunKey = KEY) -> None:
        """Win on a lease backend, execute, finish."""
        self.claim(number, "granted", key, token=token, attempt=1, left_ms=1_500)
        self.about(number, "started", key, token=token, attempt=1)
        self.about(number, "ended", key, token=token, attempt=1, verdict="returned")
        self.about(
            number, "settled", key, token=token, verdict="accepted", state="finished",
            outcome="finished",
        )  # fmt: skip
        self.records.append(RunRecord(key, RunState.FINISHED, token=token, attempt=1))

    def judged(self, until_ms: int = BEGIN_MS + 1_000) -> Finding:
        plan = Plan(Wishes(self._store, 0), 1)
        scene = Scene(
            plan, JOBS, self.crew, [], BEGIN_MS + 1_000, until_ms, self.records, self.troubles
        )
        end: list[Entry] = []
        log = HistoryLog(end.append, clock=self.clock)
        lease = self._store != "nats"
        if lease:
            log.records(self.records)
        return Judge(scene, [end]).find(lease=lease)


@pytest.fixture
def lease(tmp_path: Path) -> Story:
    story = Story(tmp_path, "sqlite")
    story.instance()
    story.clock.advance(1_000)
    return story


@pytest.fixture
def claim(tmp_path: Path) -> Story:
    story = Story(tmp_path, "nats")
    story.instance()
    story.instance()
    story.clock.advance(2_500)
    return story


def titles(finding: Finding) -> list[str]:
    return [one.title for one in finding.wrong]


LATER = RunKey("job", BEGIN_MS + 3_000)


def executed(story: Story) -> None:
    """Have something executed, or that alone is wrong."""
    story.claim(0, "granted", LATER)
    story.about(0, "started", LATER)


def lives_on(story: Story) -> None:
    """Let the time pass in which it would be told what became of a run."""
    for _ in range((WINDOW_MS + TELLING_MS) // 1_000 + 5):
        story.clock.advance(1_000)
        for number in range(len(story.crew)):
            story.note(number, "pruned")


# -- leases ----------------------------------------------------------------------------------------


def test_a_run_that_went_well_is_not_accused(lease: Story) -> None:
    lease.run(0, 7)
    finding = lease.judged()
    assert titles(finding) == []
    assert (finding.owed, finding.report.totals.executions) == (1, 1)
    assert finding.times["late starts"].values == [10]


def test_a_run_that_two_won_is_doubled_and_shown_in_few_entries(lease: Story) -> None:
    lease.run(0, 7)
    lease.instance()
    lease.run(1, 8)
    finding = lease.judged()
    assert finding.doubled > 0
    assert len(finding.wrong[0].entries) == 2


def test_a_run_without_a_settled_record_is_lost_whatever_instances_were_told(
    lease: Story,
) -> None:
    lease.claim(0, "settled", state="finished")
    other = RunKey("job", BEGIN_MS + 2_000)
    lease.clock.advance(1_000)
    lease.run(0, 8, other)
    assert lease.judged(BEGIN_MS + 2_000).lost == 1


def test_a_run_that_was_given_up_is_wrong(lease: Story) -> None:
    lease.run(0, 7)
    lease.records[0] = RunRecord(KEY, RunState.FAILED, token=7, attempt=1, reason="abandoned")
    assert "failed" in titles(lease.judged())


def test_a_skip_needs_a_run_that_was_in_the_way(lease: Story) -> None:
    at_ms = BEGIN_MS + 9_000
    lease.run(0, 7)
    lease.records[0] = RunRecord(
        KEY, RunState.FINISHED, token=7, attempt=1, settled_ms=BEGIN_MS + 1_010
    )
    skipped = RunKey("job", at_ms)
    lease.records.append(RunRecord(skipped, RunState.SKIPPED, reason="overlap", settled_ms=at_ms))
    assert titles(lease.judged()) == ["skipped without cause"]


def test_an_instance_that_ended_badly_is_wrong(lease: Story) -> None:
    lease.run(0, 7)
    lease.troubles.append("instance 0 ended with status 1")
    assert titles(lease.judged()) == ["ended badly"]


def test_nothing_at_all_is_wrong_too(lease: Story) -> None:
    assert titles(lease.judged()) == ["lost", "nothing done"]


def start_without_lease(story: Story) -> None:
    story.claim(0, "granted", token=7, attempt=1, left_ms=1_500)
    story.clock.advance(3_000)
    story.about(0, "started", token=7, attempt=1)
    story.about(0, "ended", token=7, attempt=1, verdict="returned")
    story.records.append(RunRecord(KEY, RunState.FINISHED, token=7, attempt=1))


def test_a_start_after_the_lease_is_excused_for_a_process_that_stood_still(lease: Story) -> None:
    start_without_lease(lease)
    assert "started without a live lease" in titles(lease.judged())
    stop = Disturbance("stop", BEGIN_MS + 1_100, BEGIN_MS + 4_000)
    lease.crew[0].disturbed.append(stop)
    finding = lease.judged()
    assert titles(finding) == []
    assert finding.excused == 1


# -- claims ----------------------------------------------------------------------------------------


def nothing(_story: Story) -> None:
    """Neither asks."""


def both_miss(story: Story) -> None:
    for number in (0, 1):
        story.about(number, "told", RunKey("job", BEGIN_MS + 2_000), event="run_missed", reason="x")


def one_misses(story: Story) -> None:
    story.about(0, "told", RunKey("job", BEGIN_MS + 2_000), event="run_missed", reason="x")


def won_and_killed(story: Story) -> None:
    story.claim(0, "granted", RunKey("job", BEGIN_MS + 2_000))
    story.claim(1, "taken", RunKey("job", BEGIN_MS + 2_000))
    story.crew[0].disturbed.append(Disturbance("kill", story.clock.now_ms() + 5))


def won_and_forgotten(story: Story) -> None:
    story.claim(0, "granted", RunKey("job", BEGIN_MS + 2_000))
    story.claim(1, "taken", RunKey("job", BEGIN_MS + 2_000))


def taken_from_nobody(story: Story) -> None:
    for number in (0, 1):
        story.claim(number, "taken", RunKey("job", BEGIN_MS + 2_000))


@pytest.mark.parametrize(
    ("tale", "wrong", "missed"),
    [
        (nothing, ["lost"], []),
        (one_misses, ["lost"], []),
        (both_miss, [], ["x"]),
        (won_and_killed, [], ["its winner, or who asked for it, was killed"]),
        (won_and_forgotten, ["won and not told of"], []),
        (taken_from_nobody, ["lost"], []),
    ],
)
def test_who_sees_a_run_through_on_a_claim_backend_tells_what_became_of_it(
    claim: Story, tale: Callable[[Story], None], wrong: Sequence[str], missed: Sequence[str]
) -> None:
    tale(claim)
    claim.clock.advance(1_000)
    executed(claim)
    lives_on(claim)
    claim.crew[0].log.touch()
    finding = claim.judged(BEGIN_MS + 2_000)
    # Of the run of BEGIN_MS + 1,000 nobody was there early enough to know.
    assert list(dict.fromkeys(titles(finding))) == list(wrong)
    assert [reason for reason in finding.missed if not reason.startswith("nobody")] == list(missed)


def test_owed_runs_leave_out_those_whose_jitter_is_not_over() -> None:
    plain = list(owed_runs([Job("job", 2)], BEGIN_MS + 1, BEGIN_MS + 6_000))
    assert [key.scheduled_ms - BEGIN_MS for key in plain] == [2_000, 4_000, 6_000]
    spread = list(owed_runs([Job("job", 2, jitter_ms=1_999)], BEGIN_MS + 1, BEGIN_MS + 6_000))
    assert len(spread) == 2
