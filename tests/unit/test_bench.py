"""The script that measures: wrong arguments, and each measurement once, as small as it can be."""

from __future__ import annotations

import json
import re
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from scripts import bench
from scripts._bench_crew import BenchError, Start
from scripts._bench_figures import Figure, Scale, Told, compared, percentile
from scripts._bench_fleet import once_each
from scripts._bench_stores import KINDS, Floor, Store, TemporarySQLite, store_of

TINY = Scale(
    rounds=2,
    singles=2,
    batch=20,
    batches=1,
    history=200,
    instances=2,
    each_second=2,
    seconds=1,
    together=10,
    lead_s=2,
    many=20,
    many_lead_s=2,
    many_step_s=1,
    trials=1,
    lease_ms=500,
)
ALONE = [name for name in bench.MEASUREMENTS if name not in bench.BETWEEN_PROCESSES]


def told(store: Store) -> Told:
    return Told(store, TINY, "bench", lambda _text: None)


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--only", "nothing"], "--only nothing: no such measurement, use one of singles,"),
        (["redis://user:secret@host/0"], "not in this version"),
        (["nonsense"], "a backend URL starts with a scheme"),
        (["sqlite:///x?y=1"], "takes no parameters"),
        (["--json", "/nowhere/at/all.json"], "its folder does not exist, make it"),
        (["--json", "/"], "--json / is a folder: name a file"),
        (["--unknown"], "unrecognized arguments: --unknown"),
    ],
)
def test_a_wrong_argument_is_one_line_that_says_what_to_do(
    arguments: list[str], part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        bench.main(arguments)
    assert ended.value.code == 2
    captured = capsys.readouterr()
    *_usage, line = captured.err.splitlines()
    assert part in line
    assert "secret" not in captured.err
    assert not captured.out


def test_help_names_every_measurement(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench.main(["--help"])
    shown = " ".join(capsys.readouterr().out.split())
    assert all(name in shown for name in bench.MEASUREMENTS)
    assert set(bench.BETWEEN_PROCESSES) < set(bench.MEASUREMENTS)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", bench.MEASUREMENTS)
def test_each_measurement_works(name: str) -> None:
    store = TemporarySQLite()
    try:
        figures = bench.MEASUREMENTS[name](told(store))
    finally:
        store.close()
    assert figures
    for figure in figures:
        assert re.search("[1-9]", figure.value), figure
        assert figure.ratio is None or 0 < figure.ratio < 10_000
    if name in ALONE:
        assert all(figure.ratio is not None and figure.floor for figure in figures)


def test_the_table_and_the_file_hold_what_was_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "QUICK", TINY)
    written = tmp_path / "figures.json"
    url = f"sqlite:///{tmp_path / 'jobs.db'}"
    assert bench.main([url, "--quick", "--only", "singles", "--json", str(written)]) == 0
    shown = capsys.readouterr()
    assert "claims, one a call" in shown.out
    assert "SQLite" in shown.out
    assert "singles: begins" in shown.err
    (read,) = json.loads(written.read_text(encoding="utf-8"))
    assert read["store"] == url
    assert [figure["measurement"] for figure in read["figures"]] == ["singles", "singles"]
    assert read["figures"][0]["value"] in shown.out
    with closing(sqlite3.connect(tmp_path / "jobs.db")) as connection:
        names = [name for (name,) in connection.execute("SELECT name FROM sqlite_master")]
    assert names
    assert not [name for name in names if "leasecron" not in name]


@pytest.mark.parametrize("name", bench.MEASUREMENTS)
def test_a_store_of_one_process_is_measured_as_far_as_it_goes(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench, "QUICK", TINY)
    assert bench.main([f"memory://bench-{name}", "--quick", "--only", name]) == 0
    shown = capsys.readouterr().out
    assert ("not measured" in shown) is (name not in ("singles", "batches"))


def test_what_goes_wrong_is_one_line_and_a_status(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def doubled(_told: Told) -> list[Figure]:
        once_each([Start(0, "job", 1, 1), Start(1, "job", 1, 2)], 1)
        return []

    monkeypatch.setitem(bench.MEASUREMENTS, "singles", doubled)
    url = f"sqlite:///{tmp_path / 'jobs.db'}"
    assert bench.main([url, "--only", "singles"]) == 1
    assert capsys.readouterr().err.splitlines()[-1] == (
        f"bench.py: {url}: 1 runs were executed more than once, the first: ('job', 1)"
    )


def test_an_interruption_ends_it_quietly(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(_told: Told) -> list[Figure]:
        raise KeyboardInterrupt

    monkeypatch.setitem(bench.MEASUREMENTS, "singles", interrupted)
    assert bench.main(["--only", "singles"]) == 130
    assert capsys.readouterr().err.splitlines()[-1] == "bench.py: interrupted"


def test_a_run_that_is_missing_is_noticed() -> None:
    with pytest.raises(BenchError, match="1 of 2 runs were executed"):
        once_each([Start(0, "job", 1, 1)], 2)


def test_figure_floor_and_ratio_tell_the_same() -> None:
    """One quick round of the store, or of its floor, decides none of them."""
    figure = compared("claims", [2.0, 0.1, 2.0], [1.0, 1.0, 0.1], "", 100)
    assert figure.value == "50 a second (20,000 us each)"
    assert figure.floor == "100 a second"
    assert figure.ratio == 2
    assert compared("claims", [1.0], [0.0], "", 1).ratio is None


def test_a_percentile_is_one_of_the_values() -> None:
    values = [float(number) for number in range(1, 101)]
    assert [percentile(values, share) for share in (0.0, 0.5, 0.99, 1.0)] == [1, 50, 99, 100]
    assert percentile([7.0], 0.99) == 7.0
    with pytest.raises(BenchError):
        percentile([], 0.5)


def test_a_kind_of_store_without_a_floor_does_nothing_for_one() -> None:
    store = Store("memory://bench")
    with store.floor() as floor:
        assert type(floor) is Floor
        floor.insert(1)
        floor.update(1)
    assert not store.fill("bench", "job", 1)
    assert store.empty_twin() is store
    assert {type(store_of(f"{scheme}:///bench.db")) for scheme in KINDS} == set(KINDS.values())
