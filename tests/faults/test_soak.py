"""The soak, as its users call it: some seconds of it, and that its judge can fail.

An ordinary build has some hundred runs on a Redis server, and as many on an SQLite file, with every
leak planted. ``LEASECRON_SYNC_LONG=1`` in the environment has 3,000 on every store, and plants each
leak by itself.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Sequence

import pytest

from scripts._soak_judge import (
    CONNECTIONS,
    FILES,
    MANY,
    MAY_GROW,
    MEMORY,
    OBJECTS,
    THREADS,
    Sample,
    grown,
    least,
    left,
    points,
)
from scripts._soak_stores import STORES
from scripts.soak import main
from tests.faults.processes import LONG, ROOT
from tests.services.keeper import below
from tests.services.process import eventually

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

often = pytest.mark.skipif(not LONG, reason="only with LEASECRON_SYNC_LONG=1")
LIMIT_S = 220.0
GREW = 1
USAGE = 2
INTERRUPTED = 130
SHORT = ("--runs", "300", "--jobs", "100")


@pytest.fixture(autouse=True)
def servers(request: pytest.FixtureRequest) -> None:
    """Skip what needs a server where that is asked for."""
    name = request.node.name
    if request.config.getoption("--without-services") and any(x in name for x in STORES[1:]):
        pytest.skip("left out with --without-services")


def start(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(ROOT / "scripts" / "soak.py"), *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def end(process: subprocess.Popen[str], status: int) -> tuple[str, str]:
    """Wait for the end and return what was shown, and what was told of errors."""
    try:
        out, err = process.communicate(timeout=LIMIT_S)
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()
    assert process.returncode == status, f"{out[-6_000:]}\n{err[-2_000:]}"
    return out, err


# -- the whole -------------------------------------------------------------------------------------


def flat(store: str, *arguments: str, runs: int) -> None:
    """Nothing grows, half of the runs failed, and the figures are those of something at work."""
    shown, _ = end(start("--store", store, *arguments), 0)
    table = {
        line[:27].strip(): [int(one.replace(",", "")) for one in line[27:].split()]
        for line in shown.splitlines()
        if line[27:].strip() and all(one.replace(",", "").isdigit() for one in line[27:].split())
    }
    counts = table["FIGURE"]
    assert [had >= wanted for had, wanted in zip(counts, points(runs))] == [True] * 4
    shares = [failed / had for failed, had in zip(table["failed attempts"], counts)]
    assert 0.35 < shares[-1] < 0.65
    for name in (*MAY_GROW, "entries of internal lists"):
        assert min(table[name]) > 0, name
    assert shown.endswith("Nothing grows, nothing is left.\n\n")


def test_hundreds_of_runs_half_of_them_failing_leave_nothing_behind_on_redis() -> None:
    flat("redis", *SHORT, runs=300)


@often
@pytest.mark.parametrize("store", STORES)
def test_thousands_of_runs_half_of_them_failing_leave_nothing_behind(store: str) -> None:
    flat(store, runs=3_000)


CULPRITS = {
    "threads": f"GROWS  {THREADS}: ",
    "files": f"GROWS  {FILES}: ",
    "connections": f"GROWS  {CONNECTIONS}: ",
    "memory": f"GROWS  {MEMORY}: ",
    "lists": "GROWS  scheduler.Scheduler._jobs: ",
}


def test_every_leak_that_is_planted_is_named() -> None:
    shown, _ = end(start("--store", "sqlite", *SHORT, "--planted", "all"), GREW)
    for name, culprit in CULPRITS.items():
        assert culprit in shown, name


@often
@pytest.mark.parametrize("store", ["sqlite", "postgres", "redis", "rabbitmq", "nats"])
@pytest.mark.parametrize("planted", CULPRITS)
def test_a_leak_that_is_planted_by_itself_is_named(planted: str, store: str) -> None:
    shown, _ = end(start("--store", store, *SHORT, "--planted", planted), GREW)
    assert CULPRITS[planted] in shown
    others = [x for name, x in CULPRITS.items() if name in ("threads", "files", "memory", "lists")]
    if planted in ("memory", "lists"):
        assert [x for x in others if x in shown] == [CULPRITS[planted]]


def test_ctrl_c_ends_a_soak_and_leaves_no_process() -> None:
    process = start("--store", "sqlite", "--jobs", "20")
    assert process.stderr is not None
    try:
        while "of 3,000 runs" not in process.stderr.readline():
            assert process.poll() is None
        assert eventually(lambda: below(process.pid), 10)
        children = below(process.pid)
        process.send_signal(signal.SIGINT)
    except BaseException:
        process.kill()
        raise
    _, err = end(process, INTERRUPTED)
    assert err.endswith("soak: ended by Ctrl-C\n")
    assert eventually(lambda: not set(below(1)) & set(children), 10)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--store", "mysql"), "--store mysql: no such store, use one of sqlite, "),
        (("--runs", "299"), "--runs must be a whole number from 300 to 10,000,000, not '299'"),
        (("--jobs", "many"), "--jobs must be a whole number from 1 to 500, not 'many'"),
        (("--planted", "water"), "--planted water: no such leak, use one of threads, files, "),
    ],
)
def test_a_wrong_option_is_told_in_one_line(
    arguments: Sequence[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == USAGE
    out, err = capsys.readouterr()
    assert out == ""
    assert err.removeprefix("\r\x1b[K").startswith(f"soak: {told}")
    assert err.count("\n") == 1


# -- the judge -------------------------------------------------------------------------------------


def sample(runs: int, **more: int) -> Sample:
    figures = dict.fromkeys(MAY_GROW, 10)
    figures.update({name: number for name, number in more.items() if name in MAY_GROW})
    lengths = {"engine.backlog.Backlog._items": 3, "run.Run objects": 2}
    lengths.update({name: number for name, number in more.items() if name not in MAY_GROW})
    return Sample(runs, runs // 2, figures, lengths)


@pytest.mark.parametrize("name", MAY_GROW)
def test_a_figure_that_grows_by_more_than_it_may_is_named(name: str) -> None:
    first, may = sample(500), 10 + MAY_GROW[name]
    assert grown([first, sample(3_000, **{name: may})]) == []
    [told] = grown([first, sample(3_000, **{name: may + 1})])
    assert told.startswith(f"{name}: 10 after 500 runs, ")
    assert grown([sample(500, **{name: may + 1}), sample(3_000)]) == [], "it may well shrink"


@pytest.mark.parametrize("name", ["engine.backlog.Backlog._items", "run.Run objects", "new._list"])
def test_a_list_or_a_class_that_grows_is_named(name: str) -> None:
    first = sample(500)
    before = first.lengths.get(name, 0)
    assert grown([first, sample(3_000, **{name: before + MANY})]) == []
    [told] = grown([first, sample(3_000, **{name: before + MANY + 1})])
    assert told.startswith(f"{name}: {before} after 500 runs, ")


def test_of_several_looks_the_least_counts_and_what_one_has_not_seen_is_nothing() -> None:
    looks = [sample(500, **{THREADS: 40, "x": 9}), sample(501, **{THREADS: 9, OBJECTS: 70})]
    found = least(looks)
    assert (found.runs, found.figures[THREADS], found.figures[OBJECTS]) == (501, 9, 10)
    assert (found.lengths["x"], found.lengths["run.Run objects"]) == (0, 2)


def test_what_a_stop_left_is_named() -> None:
    assert left({THREADS: 0, CONNECTIONS: 0}) == []
    assert left({THREADS: 2, CONNECTIONS: 0}) == [f"{THREADS}: 2 left after the stop"]
