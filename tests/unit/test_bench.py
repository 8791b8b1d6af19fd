"""The script that measures: wrong arguments, and each measurement once, as small as it can be."""

from __future__ import annotations

import json
import re
import socket
import sqlite3
import sys
import uuid
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlsplit

import pytest

from leasecron_sync.backends.redis_claim import STRATEGIES
from leasecron_sync.model import JobSpan, JobStamp, RunState
from scripts import bench
from scripts._bench_crew import BenchError, Start
from scripts._bench_figures import (
    Figure,
    Scale,
    Timing,
    Told,
    claim_of,
    compared,
    now_ms,
    percentile,
    settle_all,
    won,
)
from scripts._bench_fleet import once_each
from scripts._bench_sqlite import TemporarySQLite
from scripts._bench_store import AnyStore, Floor, Store
from scripts._bench_stores import KINDS, store_of
from tests.services import redis
from tests.services.postgres import execute, new_database
from tests.services.services import Services

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
    gates=(0, 6, 12),
)
S = TypeVar("S", bound=AnyStore)
on_linux = pytest.mark.skipif(sys.platform != "linux", reason="what is never written is Linux's")
ALONE = [name for name in bench.MEASUREMENTS if name not in bench.BETWEEN_PROCESSES]


def told(store: S, namespace: str = "bench") -> Told[S]:
    return Told(store, TINY, namespace, lambda _text: None)


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--only", "nothing"], "--only nothing: no such measurement, use one of singles,"),
        (["redis://user:secret@host/0?size=1"], "takes the parameters db,"),
        (["nonsense"], "a backend URL starts with a scheme"),
        (["sqlite:///x?y=1"], "takes no parameters"),
        (["--json", "/nowhere/at/all.json"], "its folder does not exist, make it"),
        (["--json", "/"], "--json / is a folder: name a file"),
        pytest.param(
            ["--json", "/proc/new.json"],
            "--json /proc/new.json cannot be written (",
            marks=on_linux,
        ),
        (["--services", "sqlite:///x"], "--services starts servers of its own: leave the URLs out"),
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
    assert all(name in shown for name in bench.ALL)
    assert set(bench.BETWEEN_PROCESSES) < set(bench.MEASUREMENTS)
    assert {*bench.OF_LEASES} == {*bench.MEASUREMENTS} - {*bench.CLAIM_MEASUREMENTS}
    assert {*bench.OF_CLAIMS} == {*bench.CLAIM_MEASUREMENTS} - {*bench.MEASUREMENTS}


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


def test_each_measurement_works_on_postgres(postgres_url: str) -> None:
    store = store_of(postgres_url)
    facts = store.facts()
    assert facts["store"].startswith("PostgreSQL ")
    assert {"fsync", "synchronous_commit"} < set(facts)
    for figure in measured_alone(store):
        assert figure.ratio is not None
        assert 0 < figure.ratio < 10_000
    left = execute(
        postgres_url,
        "SELECT nspname FROM pg_namespace WHERE nspname LIKE 'bench%%' UNION ALL "
        "SELECT relname FROM pg_class WHERE relname LIKE 'bench%%'",
    )
    assert left == []


def test_each_measurement_works_on_redis(redis_url: str) -> None:
    store = store_of(redis_url)
    facts = store.facts()
    assert facts["store"].partition(" ")[0] in ("Redis", "Valkey")
    assert facts["append-only file"] == "off"
    assert facts["snapshots"] == "none"
    for figure in measured_alone(store):
        assert figure.ratio is not None
        assert 0 < figure.ratio < 10_000
    assert redis.execute(redis_url, "KEYS", "bench:*") == []


def measured_alone(store: Store) -> list[Figure]:
    """Do what needs no other process, and see that a batch of renewals is one transaction."""
    figures = []
    for name in ("singles", "batches", "history"):
        figures += bench.MEASUREMENTS[name](told(store, f"bench-{uuid.uuid4().hex}"))
    notes = [figure.note for figure in figures if figure.name.startswith("renewals")]
    assert [note.endswith("transactions of the store for each: 1") for note in notes] == [True]
    return figures


@pytest.mark.parametrize("kind", ["postgres", "redis"])
def test_one_process_wins_each_run_of_the_smallest_program(
    kind: str, request: pytest.FixtureRequest
) -> None:
    """And the history that was written for a measurement is one that the library reads."""
    if kind == "postgres":
        url = new_database_of(request)
    else:
        url = request.getfixturevalue("services").redis().url
    store = store_of(url)
    first, second = store.make_winners(), store.make_winners()
    assert first is not None
    assert second is not None
    keys = [f"{uuid.uuid4().hex} {number}" for number in range(3)]
    with closing(first), closing(second):
        assert sorted(first.win(keys[:2])) == sorted(keys[:2])
        assert second.win(keys) == keys[2:]
        first.remove()
    namespace = f"bench-{uuid.uuid4().hex}"
    with closing(store.opened(namespace)) as backend:
        backend.register([JobStamp("job", "bench")])
        settle_all(backend, won(backend, [claim_of("job", now_ms(backend) - 1)]))
        assert store.fill(namespace, "job", 20)
        records = backend.history("job", 100)
        assert [record.key.scheduled_ms for record in records[1:]] == list(range(20, 0, -1))
        assert {record.state for record in records} == {RunState.FINISHED}
        (states,) = backend.states([JobSpan("job", 5, 7)])
        assert sorted(states) == [5, 6, 7]
        assert backend.prune(1_000, 100).deleted == 20
    store.empty(namespace)


def new_database_of(request: pytest.FixtureRequest) -> str:
    made = new_database(request.getfixturevalue("services").postgres(), f"test_{uuid.uuid4().hex}")
    url = made.__enter__()
    request.addfinalizer(lambda: made.__exit__(None, None, None))
    return url


def test_servers_of_its_own_are_measured_and_removed(
    services: Services, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One that cannot be had is one line, and the others are measured all the same."""
    del services  # skipped without them
    from scripts import _bench_services

    missing = {"Redis": _bench_services.places()["Redis"], "Valkey": no_server}
    monkeypatch.setattr(_bench_services, "places", lambda: missing)
    monkeypatch.setattr(_bench_services, "claim_places", dict)
    monkeypatch.setattr(bench, "QUICK", TINY)
    assert bench.main(["--services", "--quick", "--only", "singles"]) == 1
    shown = capsys.readouterr()
    assert "snapshots: 3600 1 300 100 60 10000" in shown.out
    assert shown.err.splitlines()[-1] == "bench.py: Valkey: install it"
    (url,) = re.findall(r"^redis://\S+", shown.out, flags=re.MULTILINE)
    with pytest.raises(OSError, match="refused"):
        socket.create_connection((urlsplit(url).hostname, urlsplit(url).port or 0)).close()


@contextmanager
def no_server() -> Iterator[AnyStore]:
    message = "install it"
    raise BenchError(message)
    yield


def test_each_kind_of_server_of_this_machine_is_measured() -> None:
    from scripts._bench_services import claim_places, places

    names = [name.partition(" ")[0] for name in places()]
    assert sorted(set(names)) == ["PostgreSQL", "Redis", "Valkey", "a"]
    names = [name.replace("claims by ", "") for name in claim_places()]
    redis = [f"Redis, {strategy}" for strategy in STRATEGIES]
    assert names == [*redis, "NATS, claims", "RabbitMQ, claims"]


@on_linux
def test_figures_that_cannot_be_written_are_shown_all_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "QUICK", TINY)
    arguments = [f"sqlite:///{tmp_path / 'jobs.db'}", "--quick", "--only", "singles"]
    assert bench.main([*arguments, "--json", "/dev/full"]) == 1
    shown = capsys.readouterr()
    assert "claims, one a call" in shown.out
    assert shown.err.splitlines()[-1].startswith("bench.py: --json /dev/full: No space left")


def test_a_file_for_figures_is_not_made_before_there_are_any(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    assert bench.unwritable(path) == ""
    assert not path.exists()
    path.write_text("kept")
    assert bench.unwritable(path) == ""
    assert path.read_text() == "kept"


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
    def doubled(_told: Told[Store]) -> list[Figure]:
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
    def interrupted(_told: Told[Store]) -> list[Figure]:
        raise KeyboardInterrupt

    monkeypatch.setitem(bench.MEASUREMENTS, "singles", interrupted)
    assert bench.main(["--only", "singles"]) == 130
    assert capsys.readouterr().err.splitlines()[-1] == "bench.py: interrupted"


def test_a_run_that_is_missing_is_noticed() -> None:
    with pytest.raises(BenchError, match="1 of 2 runs were executed"):
        once_each([Start(0, "job", 1, 1)], 2)


def test_figure_floor_and_ratio_tell_the_same() -> None:
    """One quick round of the store, or of its floor, decides none of them."""
    figure = compared("claims", Timing([2.0, 0.1, 2.0], [1.0, 1.0, 0.1], 100), "", "at most 3")
    assert figure.value == "50 a second (20,000 us each)"
    assert figure.floor == "100 a second"
    assert figure.ratio == 2
    assert compared("claims", Timing([1.0], [0.0], 1), "").ratio is None


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
    assert store.empty_twin().url == store.url
    assert {type(store_of(f"{scheme}:///0")) for scheme in KINDS} == set(KINDS.values())
