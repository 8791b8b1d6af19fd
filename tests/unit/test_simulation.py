"""The parts of the simulation by themselves: dice, clocks, threads, plans, stores, shortening."""

from __future__ import annotations

import json
import re
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from leasecron_sync.backends.base import BackendSettings, LeaseBackend
from leasecron_sync.errors import OutcomeUnknown
from leasecron_sync.model import JobStamp
from leasecron_sync.schedule import jitter_of
from leasecron_sync.testing import Entry
from leasecron_sync.testing.simulation import PROFILES, from_json, load, make_plan
from leasecron_sync.testing.simulation.campaign import Job, Tally, jobs, play_all
from leasecron_sync.testing.simulation.clocks import HostClock, StoreClock, Time
from leasecron_sync.testing.simulation.dice import Dice
from leasecron_sync.testing.simulation.happenings import describe
from leasecron_sync.testing.simulation.plan import Happening, HostPlan, Plan
from leasecron_sync.testing.simulation.planner import COMMANDS, plan_of
from leasecron_sync.testing.simulation.play import play
from leasecron_sync.testing.simulation.rules import RunRules
from leasecron_sync.testing.simulation.shorten import Shortening
from leasecron_sync.testing.simulation.stores import InMemory, StoreError
from leasecron_sync.testing.simulation.strands import Body, Crew, Gone, on_one_processor
from leasecron_sync.testing.simulation.violation import (
    KINDS,
    TAKEN_OVER_LATE,
    WRONG_DUE,
    Violation,
)
from leasecron_sync.testing.simulation.wire import TIMERS

# -- dice ------------------------------------------------------------------------------------------


def test_dice_fall_the_same_on_every_python() -> None:
    dice = Dice("storm 17")
    assert [dice.below(1_000) for _ in range(5)] == [551, 786, 246, 927, 941]
    assert [dice.between(-3, 3) for _ in range(5)] == [1, -1, 2, -3, 0]
    assert [dice.pick("abcdef") for _ in range(5)] == ["b", "e", "a", "e", "a"]
    assert [dice.chance(500) for _ in range(4)] == [True, False, True, False]
    assert dice.gap(100, 50) == 1


def test_dice_of_other_names_fall_otherwise() -> None:
    one, two = Dice("a"), Dice("b")
    assert [one.below(100) for _ in range(10)] != [two.below(100) for _ in range(10)]


def test_every_value_between_two_comes_up() -> None:
    dice = Dice("all")
    assert {dice.between(2, 5) for _ in range(200)} == {2, 3, 4, 5}
    assert {dice.gap(0, 7) for _ in range(3)} == {7}
    assert {dice.gap(1_000, 7) for _ in range(3)} == {0}


# -- clocks ----------------------------------------------------------------------------------------


def host_clock(speed_ppm: int = 0, skew_ms: int = 0) -> tuple[Time, HostClock]:
    time = Time()
    plan = HostPlan("a", skew_ms=skew_ms, speed_ppm=speed_ppm, boot_ms=5_000)
    return time, HostClock(time, plan, 1_000_000, lambda _event, _ms: None)


@pytest.mark.parametrize("speed_ppm", [0, 4_000, -4_000, 1])
def test_a_host_knows_when_its_clock_will_show_something(speed_ppm: int) -> None:
    time, clock = host_clock(speed_ppm)
    for now_ms in (0, 1, 999, 12_345, 100_000):
        time.now_ms = now_ms
        for ahead_ms in (0, 1, 2, 250, 3_000, 15_000):
            steady_ms = clock.steady_ms() + ahead_ms
            time.now_ms = at_ms = clock.when(steady_ms)
            assert clock.steady_ms() >= steady_ms
            time.now_ms = at_ms - 1
            assert clock.steady_ms() < steady_ms
            time.now_ms = now_ms


def test_a_step_moves_the_wall_clock_alone() -> None:
    time, clock = host_clock(skew_ms=300)
    assert (clock.now_ms(), clock.steady_ms()) == (1_000_300, 5_000)
    clock.step(-700)
    time.now_ms = 50
    assert (clock.now_ms(), clock.steady_ms()) == (999_650, 5_050)


def test_the_stores_clock_goes_on_with_the_history() -> None:
    time = Time()
    clock = StoreClock(time, 2_000)
    time.now_ms = 30
    clock.step(-5)
    assert (clock.now_ms(), clock.steady_ms()) == (2_025, 30)


def test_a_wait_lets_others_work_unless_its_event_is_set() -> None:
    time = Time()
    slept: list[int] = []
    clock = HostClock(time, HostPlan("a"), 0, lambda _event, ms: slept.append(ms))
    event = threading.Event()
    assert not clock.wait(event, 70)
    event.set()
    assert clock.wait(event, 90)
    assert slept == [70]


# -- threads that take turns -----------------------------------------------------------------------


def test_a_body_halts_and_goes_on_where_it_was() -> None:
    crew = Crew()
    said: list[str] = []

    def work() -> None:
        said.append("one")
        body.halt()
        said.append("two")

    body = Body(crew, work)
    body.resume()
    assert (said, body.ended) == (["one"], False)
    body.resume()
    assert (said, body.ended) == (["one", "two"], True)
    crew.end()


def test_what_a_body_raises_is_raised_where_it_was_resumed() -> None:
    crew = Crew()

    def work() -> None:
        message = "the store is down"
        raise OutcomeUnknown(message)

    with pytest.raises(OutcomeUnknown, match="down"):
        Body(crew, work).resume()
    crew.end()


def test_a_body_that_is_cut_ends_where_it_was_however_often_it_would_halt() -> None:
    crew = Crew()
    said: list[str] = []

    def work() -> None:
        try:
            body.halt()
        except Gone:
            said.append("gone")
            body.halt()
        finally:
            said.append("cleaned up")

    body = Body(crew, work)
    body.resume()
    body.cut()
    assert (said, body.ended) == (["gone", "cleaned up"], True)
    Body(crew, work).cut()  # never begun
    assert len(said) == 2
    crew.end()


def test_threads_are_used_again_and_none_is_left() -> None:
    before = threading.active_count()
    crew = Crew()
    for _ in range(20):
        Body(crew, lambda: None).resume()
    assert threading.active_count() == before + 1
    crew.end()
    assert threading.active_count() == before


def test_staying_on_one_processor_ends_with_the_block() -> None:
    os_module: Any = __import__("os")
    if not hasattr(os_module, "sched_getaffinity"):
        pytest.skip("this platform does not tell")
    before = os_module.sched_getaffinity(0)
    with on_one_processor():
        assert len(os_module.sched_getaffinity(0)) == 1
    assert os_module.sched_getaffinity(0) == before


# -- plans -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("profile", PROFILES)
def test_plans_are_what_their_profile_says(profile: str) -> None:
    for seed in range(12):
        plan = plan_of(seed, profile)
        assert plan == make_plan(seed, PROFILES[profile])
        assert plan.family == PROFILES[profile].family
        assert {item.what for item in plan.happenings} <= set(PROFILES[profile].happenings)
        times = [item.at_ms for item in plan.happenings]
        assert times == sorted(times)
        assert all(0 <= ms < plan.storm_ms for ms in times)
        numbers = [(item.host, item.number) for item in plan.faults]
        assert len(numbers) == len(set(numbers))
        attempts = [(item.job, item.scheduled_ms, item.attempt) for item in plan.behaviours]
        assert len(attempts) == len(set(attempts))
        names = [[job.name for job in version.jobs] for version in plan.versions]
        assert all(len(jobs) == len(set(jobs)) for jobs in names)


def test_calls_that_take_their_time_keep_to_their_time_out() -> None:
    for profile in PROFILES:
        plan = plan_of(5, profile)
        least_ms = min(version.lease_ms for version in plan.versions) // 3
        call_ms = 1_000 if plan.family == "claim" else least_ms
        for fault in plan.faults:
            assert fault.before_ms + fault.after_ms <= call_ms + fault.before_ms
            if fault.what in ("slow", "reply lost", "twice"):
                assert fault.before_ms + fault.after_ms < call_ms


def test_steps_of_the_stores_clock_stay_within_the_margin() -> None:
    for seed in range(200):
        plan = plan_of(seed, "clocks")
        margin_ms = min(version.margin_ms for version in plan.versions)
        steps = [item for item in plan.happenings if item.what == "store step"]
        assert all(-margin_ms <= item.ms < margin_ms for item in steps)
        gaps = [two.at_ms - one.at_ms for one, two in zip(steps, steps[1:])]
        lease_ms = max(version.lease_ms for version in plan.versions)
        assert all(gap_ms > 2 * lease_ms for gap_ms in gaps)


def test_no_clock_goes_back_in_a_history_whose_store_loses_its_data() -> None:
    seen = 0
    for seed in range(300):
        plan = plan_of(seed, "storm")
        if any(item.what == "emptied" for item in plan.happenings):
            seen += 1
            about = [item for item in plan.happenings if item.what.startswith("store")]
            assert all(item.ms >= 0 for item in about)
    assert seen > 20


def test_a_plan_survives_being_written_to_a_file() -> None:
    for profile in PROFILES:
        plan = plan_of(3, profile)
        assert from_json(plan.as_json()) == plan


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", "null", '{"format": 1}', '{"format": 2, "seed": 1}', "not json"],
)
def test_what_is_no_plan_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="plan of a simulated history"):
        from_json(text)


@pytest.mark.parametrize(
    ("part", "name", "value", "complaint"),
    [
        ("hosts", "colour", "red", "a HostPlan has a field 'colour'"),
        ("hosts", "label", 5, "label is 5 and should be text"),
        ("hosts", "skew_ms", True, "skew_ms is True and should be a whole number"),
        ("versions", "jobs", [{}], "a JobPlan has no 'name'"),
        ("versions", "jobs", "print", "jobs is 'print' and should be a list"),
        ("", "begin_ms", "x", "begin_ms is 'x' and should be a whole number"),
        ("", "begin_ms", 1.5, "begin_ms is 1.5 and should be a whole number"),
        ("", "gentle", 1, "gentle is 1 and should be true or false"),
        ("", "hosts", [], "it has no host"),
        ("", "versions", [], "it has no version"),
        ("", "hosts", ["a"], "'a' is no JSON object"),
        ("", "hosts", None, "hosts is None and should be a list"),
        ("", "format", None, "its format is None, and this version reads 1"),
    ],
)
def test_what_is_wrong_with_a_plan_is_told(
    part: str, name: str, value: object, complaint: str
) -> None:
    fields = json.loads(plan_of(0, "mild").as_json())
    (fields[part][0] if part else fields)[name] = value
    with pytest.raises(ValueError, match=re.escape(complaint)):
        from_json(json.dumps(fields))


def test_a_plan_without_a_part_is_refused() -> None:
    fields = json.loads(plan_of(0, "mild").as_json())
    for name in ("format", "seed", "hosts", "versions"):
        less = {key: value for key, value in fields.items() if key != name}
        with pytest.raises(ValueError, match=f"has no '{name}'"):
            from_json(json.dumps(less))


def test_happenings_have_words() -> None:
    item = Happening(5, "deploy", "a", ms=3, version=2, how="live")
    assert describe(item) == "deploy a version 2 live 3 ms"
    assert describe(Happening(5, "all down", ms=300)) == "all down everybody 300 ms"


def test_kinds_of_violations_have_names_of_their_own() -> None:
    assert len(KINDS) == len(set(KINDS))
    assert set(COMMANDS) <= TIMERS | {"renew", "settle"}


# -- shortening ------------------------------------------------------------------------------------


def test_what_the_failure_does_not_need_is_taken_out() -> None:
    plan = next(
        found
        for found in (plan_of(seed, "storm") for seed in range(50))
        if {"kill", "pause"} <= {item.what for item in found.happenings} and len(found.hosts) > 2
    )

    def fails(shorter: Plan) -> bool:
        kinds = {item.what for item in shorter.happenings}
        return {"kill", "pause"} <= kinds and len(shorter.faults) > 3

    shorter = Shortening(fails).shorten(plan, plan.storm_ms)
    assert fails(shorter)
    assert sorted(item.what for item in shorter.happenings) == ["kill", "pause"]
    assert len(shorter.faults) == 4
    assert shorter.behaviours == ()
    assert shorter.size <= 9
    assert shorter.storm_ms <= plan.storm_ms


def test_shortening_gives_up_after_as_many_histories_as_it_may_play() -> None:
    played = []

    def fails(shorter: Plan) -> bool:
        played.append(shorter)
        return True

    Shortening(fails, 7).shorten(plan_of(1, "storm"), 5_000)
    assert len(played) == 7


def test_what_comes_after_the_failure_goes_first() -> None:
    plan = plan_of(2, "storm")
    tried = []

    def fails(shorter: Plan) -> bool:
        tried.append(shorter)
        return False

    assert Shortening(fails, 1).shorten(plan, 4_000) == plan
    assert tried == [
        replace(
            plan,
            storm_ms=4_001,
            happenings=tuple(item for item in plan.happenings if item.at_ms <= 4_000),
        )
    ]


# -- stores ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["memory", "sqlite"])
def test_a_store_that_lost_its_data_is_another_one(backend: str) -> None:
    store = load(backend)["lease"]("mine", lambda: 1_700_000_000_000)
    try:
        connection = store.connect()
        assert isinstance(connection, LeaseBackend)
        connection.open(BackendSettings("default", "a", 1_000))
        (before,) = connection.register([JobStamp("job", "print")])
        other = store.connect()
        other.open(BackendSettings("default", "b", 1_000))
        assert other.probe().store_id == before.store_id
        assert other.probe().store_ms == store.now_ms() == 1_700_000_000_000
        store.empty()
        (after,) = connection.register([JobStamp("job", "print")])
        assert after.store_id != before.store_id
        connection.close()
        other.close()
    finally:
        store.close()


def test_a_file_bridges_a_small_step_back_of_its_clock() -> None:
    reading = [1_700_000_000_000]
    store = load("sqlite")["lease"]("mine", lambda: reading[0])
    try:
        connection = store.connect()
        assert isinstance(connection, LeaseBackend)
        connection.open(BackendSettings("default", "a", 1_000))
        connection.register([JobStamp("job", "print")])
        for step_ms, seen_ms in ((-4_000, 0), (-5_000, 0), (-9_000, -18_000)):
            reading[0] += step_ms
            store.stepped()
            assert store.now_ms() == 1_700_000_000_000 + seen_ms
            assert connection.probe().store_ms == store.now_ms()
        connection.close()
    finally:
        store.close()


@pytest.mark.parametrize(
    ("backend", "complaint"),
    [
        ("oracle", "unknown backend 'oracle'"),
        ("module:", "unknown backend"),
        ("no_such_module:factory", "cannot be loaded"),
        ("json:no_such_name", "cannot be loaded"),
        ("json:__name__", "name a function"),
        ("json:loads", "factory"),
        ("threading:Lock", "factory"),
        (".x:factory", "cannot be loaded: TypeError"),
    ],
)
def test_a_backend_that_cannot_be_simulated_is_named_with_the_reason(
    backend: str, complaint: str
) -> None:
    with pytest.raises(StoreError, match=complaint) as caught:
        load(backend)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("source", "complaint"),
    [("def factory(:\n", "SyntaxError: "), ("1 / 0\n", "ZeroDivisionError: division by zero")],
)
def test_a_module_that_cannot_be_imported_is_told(
    source: str, complaint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_broken_backend.py").write_text(source, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    text = f"backend 'my_broken_backend:factory' cannot be loaded: {complaint}"
    with pytest.raises(StoreError, match=re.escape(text)):
        load("my_broken_backend:factory")


class Lasting(InMemory):
    """A store that cannot lose its data."""

    empties = False


@pytest.mark.parametrize(("make_store", "number"), [(InMemory, 1), (Lasting, 0)])
def test_losses_of_data_are_counted_where_they_happen(
    make_store: type[InMemory], number: int
) -> None:
    plan = replace(
        plan_of(1, "mild"),
        happenings=(Happening(2_000, "emptied", ms=500, then_ms=100),),
        faults=(),
    )
    result = play(plan, make_store, verbose=True)
    assert result.violation is None
    assert result.counts.get("emptied", 0) == number
    assert any("the store loses its data" in line for line in result.timeline) is bool(number)


# -- rules -----------------------------------------------------------------------------------------


def judged(attempt: int) -> list[Violation]:
    """Return what the rules say to the first grant that they see of a run."""
    found: list[Violation] = []
    plan = plan_of(1, "mild")
    job = plan.versions[0].jobs[0]
    scheduled_ms = plan.begin_ms // 60_000 * 60_000 + 60_000
    due_ms = scheduled_ms + jitter_of(job.name, scheduled_ms, job.jitter_ms)
    at_ms = due_ms + 500
    entry = Entry(
        "claimed", at_ms, at_ms, "a", job=job.name, scheduled_ms=scheduled_ms, due_ms=due_ms,
        token=at_ms, attempt=attempt, left_ms=3_000, verdict="granted", overlap="skip",
    )  # fmt: skip
    process: Any = SimpleNamespace(
        version=plan.versions[0], started_ms=0, expects_ms=0, blind_ms=0, unheard_before=set()
    )
    rules = RunRules(plan, found.append)
    rules.claimed(entry, process)
    rules.claimed(entry._replace(due_ms=due_ms + 1, scheduled_ms=scheduled_ms + 60_000), process)
    return found


def test_a_lease_that_nobody_saw_is_not_taken_over_late() -> None:
    assert TAKEN_OVER_LATE not in {violation.kind for violation in judged(attempt=2)}


def test_violations_name_a_run_as_the_checker_does() -> None:
    text = next(str(item) for item in judged(attempt=1) if item.kind == WRONG_DUE)
    assert re.fullmatch(
        r"claimed with a wrong due time: a: '\w+' \S+T\S+Z: claimed as due at \S+T\S+Z, "
        r"not \S+T\S+Z",
        text,
    )


# -- campaigns -------------------------------------------------------------------------------------


def test_profiles_take_turns_and_those_with_more_weight_more_of_them() -> None:
    number = sum(profile.weight for profile in PROFILES.values())
    todo = jobs(0, number, list(PROFILES))
    assert len({job.seed for job in todo}) == number
    for name, profile in PROFILES.items():
        assert sum(job.profile == name for job in todo) == profile.weight
    assert jobs(7, 2, ["pruning"]) == [Job(7, "pruning"), Job(8, "pruning")]


def test_a_campaign_that_ends_at_the_first_violation_is_told_of_each_history() -> None:
    tallies = play_all(jobs(0, 3, ["mild"]), "memory", chunk_size=1)
    assert [tally.number for tally in tallies] == [1, 1, 1]


def test_tallies_are_added_up() -> None:
    one, two = Tally(), Tally()
    for tally, number in ((one, 2), (two, 3)):
        tally.histories["storm"] += number
        tally.counts["kill"] += number
    one.merge(two)
    assert (one.number, one.counts["kill"]) == (5, 5)
