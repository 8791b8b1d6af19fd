"""The plan of a fault campaign: a function of the seed, and wrong arguments."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from scripts import faults
from scripts._faults_plan import (
    AFTER_MS,
    ALL_EVERY,
    BY_NAME,
    CLOCKS,
    DEPLOY_SLOTS,
    FEWEST,
    FIRST,
    HOST_CLOCK,
    KINDS,
    LEAD_MS,
    LEASES,
    MOST,
    MOST_AHEAD_MS,
    MOST_BACK_MS,
    STORES,
    WINDOW_MS,
    Plan,
    PlanError,
    Wishes,
    from_json,
    kinds_of,
    make_plan,
)
from scripts._faults_play import acts_of
from tests.unit.closed_pipe import into_a_closed_pipe

LONG_MS = 1_800_000


@pytest.mark.parametrize("store", STORES)
def test_the_same_seed_gives_the_same_plan_and_another_one_another(store: str) -> None:
    plan = make_plan(Wishes(store, 7, 120_000))
    assert plan == make_plan(Wishes(store, 7, 120_000))
    assert plan.injections != make_plan(Wishes(store, 8, 120_000)).injections


def test_the_plan_of_a_seed_stays_what_it_is() -> None:
    """Or seeds that are written down somewhere would mean something else."""
    plan = make_plan(Wishes("postgres", 1, 20_000))
    assert [(one.at_ms, one.kind, one.slot) for one in plan.injections[:4]] == [
        (1_730, "delay", None),
        (1_896, "read-only", None),
        (3_087, "stop short", 1),
        (3_926, "deploy on time", 0),
    ]


@pytest.mark.parametrize("store", STORES)
def test_a_long_plan_has_every_kind_that_the_store_knows_and_no_other(store: str) -> None:
    plan = make_plan(Wishes(store, 3, LONG_MS))
    assert {one.kind for one in plan.injections} == {kind.name for kind in kinds_of(store)}


@pytest.mark.parametrize("store", STORES)
def test_three_to_eight_instances_are_there_and_each_fault_meets_one_that_is(store: str) -> None:
    plan = make_plan(Wishes(store, 5, LONG_MS))
    up = set(range(plan.first))
    away: dict[int, int] = {}  # until when a slot is disturbed
    assert plan.first == FIRST
    for one in plan.injections:
        if BY_NAME[one.kind].group != "instances":
            continue
        assert one.slot is not None
        assert one.at_ms >= away.get(one.slot, 0), "two faults of one instance at a time"
        away[one.slot] = one.end_ms
        if one.kind == "one more":
            assert one.slot not in up
            up.add(one.slot)
        else:
            assert one.slot in up
        if one.kind == "one fewer":
            up.remove(one.slot)
        assert FEWEST <= len(up) <= MOST


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("group", ["network", "server"])
def test_faults_of_the_network_and_of_the_store_come_one_at_a_time(group: str, store: str) -> None:
    plan = make_plan(Wishes(store, 5, LONG_MS))
    end_ms = 0
    for one in plan.injections:
        if BY_NAME[one.kind].group == group:
            assert one.at_ms > end_ms
            end_ms = one.end_ms
    assert end_ms <= LONG_MS


@pytest.mark.parametrize("store", STORES)
def test_clocks_are_set_no_further_than_the_promise_goes(store: str) -> None:
    offset_ms, steps = 0, Counter[int]()
    for one in make_plan(Wishes(store, 5, LONG_MS)).injections:
        if one.kind == "store clock step":
            offset_ms += one.amount
            assert -MOST_BACK_MS <= offset_ms <= MOST_AHEAD_MS
            assert one.amount <= MOST_AHEAD_MS
        elif one.kind == "clock step":
            steps[one.amount] += 1
    if store in HOST_CLOCK:
        assert max(map(abs, steps)) < WINDOW_MS
    assert (store == "sqlite") is not bool(steps), "an SQLite file is on one host"


def test_restarts_lie_across_their_scheduled_times() -> None:
    """Those of deploys alone; now and then nobody is there."""
    plan = make_plan(Wishes("redis", 1, only=("deploys",), restarts=100))
    times = Counter(one.on_ms for one in plan.injections)
    assert len(times) == 100
    everybody = [on_ms for on_ms, count in times.items() if count == DEPLOY_SLOTS]
    assert len(everybody) == 100 // ALL_EVERY
    for one in plan.injections:
        assert one.on_ms is not None
        assert one.on_ms % 1_000 == 0
        assert one.on_ms - LEAD_MS <= one.at_ms <= one.end_ms <= one.on_ms + AFTER_MS + 1_000
        if one.on_ms in everybody:
            assert one.at_ms <= one.on_ms <= one.end_ms
    for slot in range(DEPLOY_SLOTS):
        own = [one for one in plan.injections if one.slot == slot]
        assert all(before.end_ms < after.at_ms for before, after in zip(own, own[1:]))


def test_a_plan_can_be_written_and_read_again() -> None:
    plan = make_plan(Wishes("nats", 4, 60_000, only=("kill", "network")))
    assert from_json(plan.to_json()) == plan


def test_what_the_machine_has_not_is_left_out_and_the_rest_stays() -> None:
    plan = make_plan(Wishes("redis", 4, 300_000))
    without = plan.without([CLOCKS])
    gone = set(plan.injections) - set(without.injections)
    assert {one.kind for one in gone} == {"clock step", "store clock step"}


def test_what_begins_has_an_end_and_a_successor_is_ready_before_its_turn() -> None:
    plan = make_plan(Wishes("postgres", 4, 300_000))
    for acts in acts_of(plan.injections).values():
        assert [act.at_ms for act in acts] == sorted(act.at_ms for act in acts)
        seen: dict[int, list[str]] = {}
        for act in acts:
            seen.setdefault(id(act.one), []).append(act.what)
        for one in [act.one for act in acts]:
            if one.kind in ("kill", "deploy", "deploy on time"):
                assert sorted(seen[id(one)]) == ["begin", "end", "prepare"]
                assert seen[id(one)][-1] == "end"
            else:
                ends = bool(one.lasts_ms) or one.kind == "server restart"
                assert seen[id(one)] == ["begin", "end"][: 1 + ends]


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"wishes": {"store": "redis"}}'])
def test_a_file_that_is_no_plan_is_refused(text: str) -> None:
    with pytest.raises(PlanError, match="not a plan"):
        from_json(text)


def test_a_plan_of_kinds_that_are_not_known_is_refused() -> None:
    written = json.loads(make_plan(Wishes("redis", 1, 20_000)).to_json())
    written["injections"][0]["kind"] = "earthquake"
    with pytest.raises(PlanError, match="it names earthquake"):
        from_json(json.dumps(written))


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        ([], "--store is missing, use one of sqlite, postgres,"),
        (["--store", "oracle"], "--store oracle: no such store, use one of sqlite,"),
        (["--store", "redis", "--seed", "x"], "--seed must be a whole number from 0 on, not 'x'"),
        (["--store", "redis", "--minutes", "0"], "--minutes must be a number from 0.05 to 600"),
        (["--store", "redis", "--minutes", "soon"], "not 'soon'"),
        (["--store", "redis", "--only", "flood"], "--only flood: no such kind, use deploys,"),
        (["--store", "nats", "--only", "script flush"], "cannot be played on nats"),
        (["--store", "nats", "--only", "deploys"], "nats is a claim backend, use a lease store"),
        (["--store", "redis", "--only", "deploys", "--only", "kill"], "leave the other --only out"),
        (["--store", "redis", "--restarts", "9"], "--restarts 9: say --only deploys, too"),
        (
            ["--store", "redis", "--only", "deploys", "--restarts", "0"],
            "--restarts must be a whole number from 1 on, not '0'",
        ),
        (["--store", "redis", "--only", "deploys", "--minutes", "3"], "as long as --restarts"),
        (["--store", "redis", "--planted", "weeds"], "--planted weeds: no such fault, use one of"),
        (["--replay", "/nowhere/plan.json"], "--replay /nowhere/plan.json: No such file"),
        (["--replay", "x", "--store", "redis"], "plays what the file says: leave --store out"),
    ],
)
def test_a_wrong_argument_is_one_line_that_says_what_to_do(
    arguments: list[str], part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert faults.main(arguments) == 2
    captured = capsys.readouterr()
    [line] = [line for line in captured.err.splitlines() if line]
    assert line.startswith("faults: ")
    assert part in line
    assert captured.out == ""


def test_a_folder_with_something_in_it_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "old").touch()
    assert faults.main(["--store", "sqlite", "--folder", str(tmp_path)]) == 2
    assert "is not empty: name a new one" in capsys.readouterr().err


def test_the_plan_alone_is_shown_and_nothing_is_done(capsys: pytest.CaptureFixture[str]) -> None:
    assert faults.main(["--store", "valkey", "--seed", "3", "--plan"]) == 0
    shown = capsys.readouterr().out
    plan = make_plan(Wishes("valkey", 3))
    assert shown.startswith(f"valkey, seed 3, 1 min: {len(plan.injections)} faults")
    assert all(f"{one.at_ms / 1000:.3f}  {one.kind}" in shown for one in plan.injections)


def test_a_reader_of_the_plan_that_goes_away_is_no_error() -> None:
    assert into_a_closed_pipe(faults.__file__, "--store", "sqlite", "--plan") == (b"", 141)


def test_help_names_every_store(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        faults.main(["--help"])
    shown = capsys.readouterr().out
    assert all(store in shown for store in STORES)


def test_every_kind_is_one_of_its_group_and_can_be_played_somewhere() -> None:
    assert len(BY_NAME) == len(KINDS)
    assert all(kind.group in ("instances", "network", "server") for kind in KINDS)
    assert all(set(kind.stores) <= set(STORES) and kind.stores for kind in KINDS)
    assert set(LEASES) < set(STORES)
    assert isinstance(make_plan(Wishes("sqlite", 0)), Plan)
