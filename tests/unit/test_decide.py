"""Which runs are asked for, how many, and what a look back finds."""

from __future__ import annotations

from typing import Any, Optional

import pytest

from leasecron_sync import every
from leasecron_sync.engine.backlog import Backlog
from leasecron_sync.engine.decide import (
    Asker,
    Candidate,
    Known,
    Origin,
    count,
    given_up,
    look_back,
)
from leasecron_sync.engine.expiry import Expiry
from leasecron_sync.engine.job import Job
from leasecron_sync.engine.picking import Pick
from leasecron_sync.engine.picking import pick as pick_of
from leasecron_sync.model import JobSpan, OnOverlap, RunKey, RunState
from leasecron_sync.options import LOOK_BACK_COUNT, job_options, scheduler_options
from leasecron_sync.schedule import Schedule

NOW_MS, STEADY_MS = 1_700_049_600_000, 5_000_000
DAY = 86_400_000
SCHEDULER = scheduler_options({"history_ms": 3_000 * DAY}, "lease", "Test")


def job_of(name: str = "job", schedule: Schedule = every(seconds=60), **given: Any) -> Job:  # noqa: ANN401, B008 - options of a job
    options = job_options({"name": name, **given}, SCHEDULER, "lease", "Test")
    return Job(lambda: None, wants_run=False, schedule=schedule, options=options, takeover_ms=1)


def item_of(
    job: Job, age_ms: int = 0, origin: Origin = Origin.ON_TIME, ask_ms: int = 0
) -> Candidate:
    due_ms = NOW_MS - age_ms
    return Candidate(job, RunKey(job.name, due_ms), due_ms, origin, STEADY_MS, ask_ms)


def asker(free: int = 32, *, label: str = "a") -> Asker:
    return Asker(label, free, NOW_MS, STEADY_MS)


def pick(candidates: list[Candidate], who: Asker, *, in_order: bool = False) -> Pick:
    backlog = Backlog(Expiry(None, 15_000), in_order=in_order)
    backlog.add_owed(candidates, who.now_ms, who.steady_ms)
    return pick_of(backlog.offers(who), who)


def many(number: int, prefix: str = "job") -> list[Candidate]:
    return [item_of(job_of(f"{prefix} {index}")) for index in range(number)]


# -- options of a claim --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("origin", "age_ms", "overlap", "wanted"),
    [
        (Origin.ON_TIME, 10_000, "skip", OnOverlap.SKIP),
        (Origin.ON_TIME, 10_001, "skip", OnOverlap.DEFER),
        (Origin.CAUGHT_UP, 0, "skip", OnOverlap.DEFER),
        (Origin.UNSETTLED, 0, "skip", OnOverlap.DEFER),
        (Origin.ON_TIME, 0, "allow", OnOverlap.ALLOW),
        (Origin.UNSETTLED, 99_999, "allow", OnOverlap.ALLOW),
    ],
)
def test_only_a_run_on_time_is_skipped(
    origin: Origin, age_ms: int, overlap: str, wanted: OnOverlap
) -> None:
    item = item_of(job_of(overlap=overlap), age_ms, origin)
    assert item.on_overlap(NOW_MS, STEADY_MS) is wanted


@pytest.mark.parametrize(
    ("waited_ms", "wanted"), [(10_000, OnOverlap.SKIP), (10_001, OnOverlap.DEFER)]
)
def test_a_clock_that_is_set_back_does_not_bring_a_late_run_back_on_time(
    waited_ms: int, wanted: OnOverlap
) -> None:
    item = item_of(job_of())
    item.late_ms = 2_000  # when it was found
    waited_ms -= 2_000
    assert item.on_overlap(NOW_MS + waited_ms - 20_000, STEADY_MS + waited_ms) is wanted


def test_a_run_that_the_store_called_early_is_on_time_when_it_is_due() -> None:
    item = item_of(job_of())  # found a minute early, by a clock that is ahead
    item.due_steady_ms = STEADY_MS + 60_000
    assert item.on_overlap(NOW_MS + 60_000, STEADY_MS + 60_000) is OnOverlap.SKIP


def test_the_window_of_a_caught_up_run_grows_while_it_waits() -> None:
    job = job_of(catch_up_ms=5_000)
    assert item_of(job).max_age_ms(STEADY_MS + 1_000) == 10_000
    assert item_of(job, 0, Origin.CAUGHT_UP).max_age_ms(STEADY_MS + 1_000) == 6_000


# -- what is picked ------------------------------------------------------------------------------


def test_of_a_job_without_overlap_only_the_oldest_is_asked_for() -> None:
    job = job_of()
    picked = pick([item_of(job, age_ms) for age_ms in (1, 3, 2)], asker()).candidates
    assert [item.due_ms for item in picked] == [NOW_MS - 3]


def test_an_unsettled_run_goes_before_others_of_its_job_and_of_all_jobs() -> None:
    job = job_of()
    unsettled = item_of(job, 0, Origin.UNSETTLED)
    other = item_of(job_of("other"), 5)
    picked = pick([item_of(job, 9_000), other, unsettled], asker()).candidates
    assert picked == [unsettled, other]


@pytest.mark.parametrize(("free", "picked"), [(1, 5), (0, 4), (-3, 1), (-4, 0), (-9, 0)])
def test_unsettled_runs_may_use_four_slots_more(free: int, picked: int) -> None:
    unsettled = [item_of(job_of(f"job {n}"), 0, Origin.UNSETTLED) for n in range(9)]
    chosen = pick([*unsettled, *many(3, "other")], asker(free))
    assert len(chosen.candidates) == picked
    assert all(item.origin is Origin.UNSETTLED for item in chosen.candidates)
    assert chosen.starved
    assert not chosen.more


@pytest.mark.parametrize(
    ("number", "free", "size"), [(5, 32, 5), (13, 32, 12), (160, 32, 20), (160, 7, 7), (9, 0, 0)]
)
def test_a_slice_is_an_eighth_at_least_twelve_at_most_what_is_free(
    number: int, free: int, size: int
) -> None:
    chosen = pick(many(number), asker(free))
    assert len(chosen.candidates) == size
    assert chosen.starved == (free == 0)
    assert chosen.more == (free > 0 and size < number)


def test_instances_begin_at_places_of_their_own() -> None:
    everything = many(160)
    asked = {
        item.key.job
        for label in "abcdefgh"
        for item in pick(everything, asker(label=label)).candidates
    }
    assert len(asked) > 60


def test_one_that_waits_keeps_those_behind_it_waiting_but_not_one_on_time() -> None:
    job = job_of()
    waits = item_of(job, 30_000, Origin.CAUGHT_UP, STEADY_MS + 1)
    behind = item_of(job, 20_000, Origin.CAUGHT_UP)
    assert pick([waits, behind], asker()).candidates == []
    early = item_of(job, 500, Origin.ON_TIME, STEADY_MS + 1)
    on_time = item_of(job, 0)
    assert pick([early, on_time], asker()).candidates == [on_time]
    assert pick([early, on_time], asker(), in_order=True).candidates == []


def test_where_overlap_is_allowed_only_caught_up_runs_go_one_at_a_time() -> None:
    job = job_of(overlap="allow")
    late = [item_of(job, age_ms, Origin.CAUGHT_UP) for age_ms in (50_000, 40_000)]
    now = [item_of(job, age_ms) for age_ms in (2, 1)]
    picked = pick([*late, *now], asker()).candidates
    assert sorted(item.due_ms for item in picked) == [item.due_ms for item in (late[0], *now)]


# -- looking back --------------------------------------------------------------------------------


def test_the_newest_of_the_window_are_looked_at() -> None:
    job = job_of(catch_up_ms=600_000, catch_up_limit=3)
    look = look_back(job, NOW_MS, NOW_MS - DAY, Known())
    assert look.scheduled == tuple(NOW_MS - number * 60_000 for number in (2, 1, 0))
    assert look.span == JobSpan("job", NOW_MS - 120_000, NOW_MS)
    assert (look.older_from_ms, look.older_to_ms) == (NOW_MS - DAY, NOW_MS - 120_000)


def test_the_window_includes_its_ends_and_begins_where_runs_are_owed() -> None:
    job = job_of(catch_up_ms=120_000)
    assert len(look_back(job, NOW_MS, 0, Known()).scheduled) == 3
    assert len(look_back(job, NOW_MS + 1, 0, Known()).scheduled) == 2
    assert look_back(job, NOW_MS, NOW_MS - 60_000, Known()).scheduled[0] == NOW_MS - 60_000
    assert look_back(job, NOW_MS, NOW_MS + 1, Known()).span is None


def test_a_job_without_catch_up_owes_nothing_but_the_very_moment() -> None:
    job = job_of(catch_up_ms=0)
    assert look_back(job, NOW_MS, 0, Known()).scheduled == (NOW_MS,)
    assert look_back(job, NOW_MS + 1, 0, Known()).scheduled == ()


def test_what_waits_for_its_jitter_is_coming_and_each_time_is_in_one_place() -> None:
    job = job_of(catch_up_ms=120_000, jitter_ms=300_000)
    look = look_back(job, NOW_MS, NOW_MS - 3_600_000, Known())
    for scheduled_ms in look.scheduled:
        assert NOW_MS - 120_000 <= job.due_ms(scheduled_ms) <= NOW_MS
    assert all(job.due_ms(scheduled_ms) > NOW_MS for scheduled_ms in look.coming)
    assert all(job.due_ms(scheduled_ms) < NOW_MS - 120_000 for scheduled_ms in look.too_late)
    everything = sorted((*look.scheduled, *look.coming, *look.too_late))
    assert everything == list(range(NOW_MS - 420_000, NOW_MS + 1, 60_000))


@pytest.mark.parametrize(("newest", "reported"), [(3, None), (None, 3), (3, 9), (9, 3)])
def test_what_is_older_begins_behind_what_is_known(
    newest: Optional[int], reported: Optional[int]
) -> None:
    job = job_of(catch_up_ms=0)
    known = [None if n is None else NOW_MS - n * 60_000 for n in (newest, reported)]
    look = look_back(job, NOW_MS + 1, 0, Known(known[0], known[1]))
    assert given_up(look, {}).number == 3


@pytest.mark.parametrize("limit", [1, 100])
def test_what_is_older_than_own_records_is_compared_one_by_one(limit: int) -> None:
    """What this instance asked for before it looked back, says nothing of earlier times."""
    job = job_of(catch_up_ms=60_000, catch_up_limit=limit)
    newest_ms = NOW_MS - 120_000
    others = look_back(job, NOW_MS, 0, Known(newest_ms, None, newest_ms + 1))
    assert others == look_back(job, NOW_MS, 0, Known(newest_ms))
    own = look_back(job, NOW_MS, NOW_MS - 600_000, Known(newest_ms, None, newest_ms - 60_000))
    everything = [NOW_MS - 60_000 * number for number in range(10, -1, -1)]
    assert sorted((*own.scheduled, *own.too_late)) == everything
    states = dict.fromkeys(everything[:9:2], RunState.FINISHED)
    missing = [ms for ms in own.too_late if ms not in states]
    found = given_up(own, states)
    assert (found.number, found.first_ms, found.last_ms) == (len(missing), missing[0], missing[-1])
    endless = look_back(job, NOW_MS, 0, Known(newest_ms, None, newest_ms))
    assert len(endless.too_late) == LOOK_BACK_COUNT
    assert given_up(endless, dict.fromkeys(endless.too_late, RunState.FINISHED)).number == 0


def test_what_is_counted_has_a_limit_and_names_both_ends() -> None:
    job = job_of()
    few = count(job, NOW_MS, NOW_MS + 120_001)
    assert (few.number, few.first_ms, few.last_ms) == (3, NOW_MS, NOW_MS + 120_000)
    many_of_them = count(job, NOW_MS, NOW_MS + 3_000 * DAY)
    assert (many_of_them.number, many_of_them.at_least) == (LOOK_BACK_COUNT, True)
    assert many_of_them.last_ms == NOW_MS + 3_000 * DAY - 60_000
    exactly = count(job, NOW_MS, NOW_MS + LOOK_BACK_COUNT * 60_000)
    assert (exactly.number, exactly.at_least) == (LOOK_BACK_COUNT, False)
    assert count(job, NOW_MS + 1, NOW_MS + 2).number == 0


def test_what_has_a_record_is_not_given_up() -> None:
    job = job_of(catch_up_ms=60_000, jitter_ms=240_000)
    look = look_back(job, NOW_MS, NOW_MS - 600_000, Known())
    everything = given_up(look, {}).number
    states = dict.fromkeys(look.too_late[:1], RunState.FINISHED)
    assert given_up(look, states).number == everything - len(states)
