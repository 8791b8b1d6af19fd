"""The agenda: each scheduled time once, however the clock is set."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import NamedTuple, Optional

import pytest

from leasecron_sync import every
from leasecron_sync.engine.agenda import MAX_SPANS, SLACK, Agenda, Due, Gap
from leasecron_sync.engine.job import Job
from leasecron_sync.model import RunKey
from leasecron_sync.options import job_options, scheduler_options
from leasecron_sync.schedule import Schedule

KEEP_MS = 10_000
BEGIN_MS = 1_700_049_600_000
SECOND, HOUR = 1_000, 3_600_000
SCHEDULER = scheduler_options({}, "lease", "Test")


def job_of(schedule: Schedule, name: str = "job", jitter_ms: int = 0) -> Job:
    options = job_options({"name": name, "jitter_ms": jitter_ms}, SCHEDULER, "lease", "Test")
    return Job(lambda: None, wants_run=False, schedule=schedule, options=options, takeover_ms=1)


def times(due: list[Due]) -> list[int]:
    return [item.scheduled_ms - BEGIN_MS for item in due]


def test_what_had_come_before_a_job_was_added_is_not_handed_out() -> None:
    agenda = Agenda(KEEP_MS)
    agenda.add(job_of(every(seconds=10)), BEGIN_MS)
    assert agenda.next_ms() == BEGIN_MS + 10 * SECOND
    assert agenda.pop(BEGIN_MS + 9_999) == ([], [])
    assert times(agenda.pop(BEGIN_MS + 10_000)[0]) == [10_000]
    assert agenda.pop(BEGIN_MS + 10_000) == ([], [])


def test_what_passed_long_ago_is_one_gap() -> None:
    agenda = Agenda(KEEP_MS)
    job = job_of(every(seconds=10))
    agenda.add(job, BEGIN_MS)
    due, gaps = agenda.pop(BEGIN_MS + 100 * SECOND)
    assert times(due) == [90_000, 100_000]
    assert gaps == [Gap(job, BEGIN_MS + 10_000, BEGIN_MS + 90_000)]


def test_ten_years_of_a_gap_cost_no_more_than_a_minute() -> None:
    calls = 0

    class Counted(NamedTuple):
        text: str = "counted"
        timezone: str = "UTC"

        def after(self, instant_ms: int) -> Optional[int]:
            nonlocal calls
            calls += 1
            return every(seconds=1).after(instant_ms)

        def before(self, instant_ms: int) -> Optional[int]:
            raise NotImplementedError(instant_ms)

    agenda = Agenda(KEEP_MS)
    agenda.add(job_of(Counted()), BEGIN_MS)
    due, gaps = agenda.pop(BEGIN_MS + 87_600 * HOUR)
    assert (len(due), len(gaps)) == (11, 1)
    assert calls < 30


def test_a_job_that_is_replaced_or_removed_leaves_nothing() -> None:
    agenda = Agenda(KEEP_MS)
    agenda.add(job_of(every(seconds=10)), BEGIN_MS)
    agenda.add(job_of(every(seconds=60)), BEGIN_MS)
    assert agenda.coming() == {"job": BEGIN_MS + 60_000}
    agenda.remove("job")
    agenda.remove("unknown")
    assert agenda.next_ms() is None
    assert agenda.coming() == {}
    assert agenda.pop(BEGIN_MS + HOUR) == ([], [])


def test_a_run_comes_when_its_jitter_is_over_and_not_before() -> None:
    agenda = Agenda(KEEP_MS)
    job = job_of(every(seconds=10), jitter_ms=25 * SECOND)
    agenda.add(job, BEGIN_MS)
    seen: dict[int, int] = {}
    for now_ms in range(BEGIN_MS, BEGIN_MS + 200 * SECOND, 50):
        for item in agenda.pop(now_ms)[0]:
            assert item.scheduled_ms not in seen
            seen[item.scheduled_ms] = now_ms
    for scheduled_ms, now_ms in seen.items():
        assert 0 <= now_ms - job.due_ms(scheduled_ms) <= 50
    assert len(seen) >= 17


def test_in_order_no_run_comes_before_an_older_one_of_its_job() -> None:
    agenda = Agenda(60 * SECOND, in_order=True)
    agenda.add(job_of(every(seconds=10), jitter_ms=25 * SECOND), BEGIN_MS)
    seen: list[int] = []
    for now_ms in range(BEGIN_MS, BEGIN_MS + 300 * SECOND, 50):
        seen += times(agenda.pop(now_ms)[0])
    assert seen == sorted(seen)
    assert seen[0] < 10_000  # one that had come already and waited for its jitter
    assert len(seen) > 25


def test_a_time_that_is_expected_comes_once() -> None:
    agenda = Agenda(KEEP_MS)
    job = job_of(every(seconds=10), jitter_ms=25 * SECOND)
    agenda.add(job, BEGIN_MS + 5)
    agenda.expect(job, BEGIN_MS)
    agenda.expect(job, BEGIN_MS)
    agenda.expect(job_of(every(seconds=10)), BEGIN_MS)  # of a definition that was replaced
    seen = []
    for now_ms in range(BEGIN_MS + 5, BEGIN_MS + 26_000, 500):
        seen += times(agenda.pop(now_ms)[0])
    assert seen.count(0) == 1
    agenda.expect(job, BEGIN_MS)
    assert 0 not in times(agenda.pop(BEGIN_MS + 60_000)[0])


def test_a_step_back_repeats_nothing_but_what_is_undecided() -> None:
    agenda = Agenda(KEEP_MS)
    agenda.add(job_of(every(seconds=10)), BEGIN_MS)
    for second in range(10, 61, 10):
        agenda.pop(BEGIN_MS + second * SECOND)
    agenda.rebase(BEGIN_MS + 15 * SECOND, [RunKey("job", BEGIN_MS + 50_000), RunKey("x", 1)])
    assert agenda.next_ms() == BEGIN_MS + 50_000
    seen = []
    for second in range(15, 91, 5):
        seen += times(agenda.pop(BEGIN_MS + second * SECOND)[0])
    assert seen == [50_000, 70_000, 80_000, 90_000]


def test_a_false_future_silences_nothing() -> None:
    agenda = Agenda(KEEP_MS)
    agenda.add(job_of(every(seconds=10)), BEGIN_MS)
    for round_number in range(3):
        now_ms = BEGIN_MS + round_number * 60 * SECOND
        agenda.pop(now_ms + 87_600 * HOUR)
        agenda.rebase(now_ms, [])
        seen = []
        for second in range(10, 61, 10):
            seen += agenda.pop(now_ms + second * SECOND)[0]
        assert len(seen) == 6
    (plan,) = agenda._plans.values()
    assert len(plan.spans) <= MAX_SPANS


@pytest.mark.parametrize("in_order", [False, True])
def test_a_time_that_was_too_late_under_a_wrong_clock_for_its_jitter_comes_again(
    *, in_order: bool
) -> None:
    """Found by a simulated history: with its jitter it was too late, without it not yet."""
    job, by_themselves = job_of(every(seconds=3), jitter_ms=4 * SECOND), 0
    for ahead_s in range(20, 60):
        agenda = Agenda(KEEP_MS, in_order=in_order)
        agenda.add(job, BEGIN_MS)
        due, gaps = agenda.pop(BEGIN_MS + ahead_s * SECOND)
        by_themselves += sum(gap.to_ms == gap.from_ms + 1 for gap in gaps)
        agenda.rebase(BEGIN_MS, [RunKey("job", item.scheduled_ms) for item in due])
        seen: list[int] = []
        for second in range(90):
            due, gaps = agenda.pop(BEGIN_MS + second * SECOND)
            assert gaps == []
            seen += times(due)
        coming = sorted(ms for ms in seen if 0 < ms < 80 * SECOND)
        assert coming == list(range(3_000, 80_000, 3_000))
    assert by_themselves > 5


@pytest.mark.parametrize("undecided", [False, True])
def test_what_has_come_and_waits_for_its_jitter_stays_so_when_the_clock_is_set_back(
    *, undecided: bool
) -> None:
    """Found by a simulated history: a look back took it for late, and it was not skipped."""
    job = job_of(every(seconds=10), jitter_ms=9 * SECOND)
    scheduled_ms = job.schedule.after(BEGIN_MS)
    assert scheduled_ms is not None
    while job.due_ms(scheduled_ms) - scheduled_ms < SECOND:
        scheduled_ms += 10 * SECOND
    due_ms = job.due_ms(scheduled_ms)
    agenda = Agenda(KEEP_MS)
    agenda.add(job, scheduled_ms - SECOND)
    due, gaps = agenda.pop(due_ms + 100 if undecided else due_ms - 1)
    assert ([item.scheduled_ms for item in due], gaps) == ([scheduled_ms] * undecided, [])
    agenda.rebase(due_ms - 500, [RunKey("job", scheduled_ms)] * undecided)
    assert agenda.pop(due_ms - 1) == ([], [])
    assert agenda.pop(due_ms) == ([Due(job, scheduled_ms, due_ms)], [])


def test_a_second_false_future_silences_nothing_that_the_first_one_left_undecided() -> None:
    agenda = Agenda(KEEP_MS)
    agenda.add(job_of(every(seconds=10)), BEGIN_MS)
    due, _gaps = agenda.pop(BEGIN_MS + 300 * SECOND)
    agenda.rebase(BEGIN_MS, [RunKey("job", item.scheduled_ms) for item in due])
    agenda.pop(BEGIN_MS + 87_600 * HOUR)
    agenda.rebase(BEGIN_MS, [])
    seen = []
    for second in range(1, 401):
        seen += times(agenda.pop(BEGIN_MS + second * SECOND)[0])
    assert seen == list(range(10_000, 400_001, 10_000))


class Story:
    """A wall clock that goes wrong, and a store that does not.

    Args:
        seed: Decides everything.
        in_order: As on a claim backend.
    """

    def __init__(self, seed: int, *, in_order: bool) -> None:
        self.rng = random.Random(seed)
        self.job = job_of(every(seconds=10), jitter_ms=self.rng.choice((0, 0, 4_000, 25_000)))
        self.agenda = Agenda(KEEP_MS if not in_order else 60_000, in_order=in_order)
        self.true_ms, self.offset_ms = BEGIN_MS, 0
        self.agenda.add(self.job, BEGIN_MS)
        self.waiting: dict[int, int] = {}  # handed out, early by the store's clock
        self.decided: list[int] = []
        self.gone: list[tuple[int, int]] = []

    @property
    def now_ms(self) -> int:
        return self.true_ms + self.offset_ms

    def poll(self) -> None:
        due, gaps = self.agenda.pop(self.now_ms)
        for item in due:
            assert item.due_ms <= self.now_ms
            assert item.scheduled_ms not in self.decided
            assert item.scheduled_ms not in self.waiting
            self.waiting[item.scheduled_ms] = item.due_ms
        self.gone += [(gap.from_ms, gap.to_ms) for gap in gaps]
        for scheduled_ms, due_ms in list(self.waiting.items()):
            if due_ms <= self.true_ms:
                del self.waiting[scheduled_ms]
                self.decided.append(scheduled_ms)

    def step(self) -> None:
        back_ms = self.rng.choice((15_000, 40_000, 300_000))
        if self.offset_ms <= 0:
            self.offset_ms += back_ms
        else:
            self.offset_ms = 0
            again = [ms for ms, due_ms in self.waiting.items() if due_ms > self.now_ms]
            for ms in again:
                del self.waiting[ms]
            self.agenda.rebase(self.now_ms, [RunKey("job", ms) for ms in again])
            self.look_back()

    def look_back(self) -> None:
        """Expect what has come and waits for its jitter, as a look back does."""
        scheduled_ms = self.now_ms // 10_000 * 10_000
        while scheduled_ms > max(BEGIN_MS, self.now_ms - self.job.options.jitter_ms - 1):
            if self.job.due_ms(scheduled_ms) > self.now_ms:
                self.agenda.expect(self.job, scheduled_ms)
            scheduled_ms -= 10_000

    def play(self) -> None:
        steps = 0
        for _number in range(160):
            self.poll()
            if steps < MAX_SPANS - 3 and self.rng.random() < 0.05:
                steps += 1
                self.step()
                self.poll()
            self.true_ms += self.rng.choice((1, 700, 2_000, 5_000))
        if self.offset_ms:
            self.step()
        for _number in range(800):
            self.poll()
            self.true_ms += 1_000


@pytest.mark.parametrize("in_order", [False, True])
@pytest.mark.parametrize("seed", range(25))
def test_whatever_the_clock_does_each_time_is_decided_once(seed: int, *, in_order: bool) -> None:
    story = Story(seed, in_order=in_order)
    story.play()
    assert len(story.decided) == len(set(story.decided))
    first_ms, last_ms = BEGIN_MS + 10_000, story.true_ms - 40_000
    wanted = set(range(first_ms, last_ms, 10_000))
    passed = {ms for ms in wanted for gap in story.gone if gap[0] <= ms < gap[1]}
    assert wanted - passed <= set(story.decided)
    (plan,) = story.agenda._plans.values()
    assert len(plan.spans) <= MAX_SPANS
    assert len(story.agenda._heap) < 10


def test_a_clock_that_is_set_often_costs_no_memory() -> None:
    agenda = Agenda(KEEP_MS)
    job = job_of(every(seconds=10), jitter_ms=25 * SECOND)
    agenda.add(replace(job), BEGIN_MS)
    now_ms, rng = BEGIN_MS, random.Random(1)
    for _number in range(500):
        now_ms += rng.choice((5_000, 60_000, -30_000, -5_000))
        agenda.rebase(now_ms, [])
        agenda.pop(now_ms)
    (plan,) = agenda._plans.values()
    assert len(plan.spans) <= MAX_SPANS
    assert len(agenda._heap) < 30
    assert len(plan.jittering) < 40


def test_a_job_that_is_added_and_removed_for_ever_costs_no_memory() -> None:
    """Its times lie far ahead, where nothing ever takes them out."""
    agenda = Agenda(KEEP_MS)
    agenda.add(job_of(every(seconds=10), "stays"), BEGIN_MS)
    comes_and_goes = job_of(every(seconds=86_400), "comes and goes")
    sizes = []
    for _number in range(10 * SLACK):
        agenda.remove("comes and goes")
        agenda.add(comes_and_goes, BEGIN_MS)
        sizes.append(len(agenda._heap))
    assert max(sizes) <= 2 * len(agenda._plans) + SLACK
    assert agenda.coming()["stays"] == BEGIN_MS + 10_000
    due, _gaps = agenda.pop(agenda.coming()["comes and goes"])
    assert [item.job.name for item in due].count("comes and goes") == 1
    assert [item.job.name for item in due].count("stays") == 2
