"""``leasecron-sync doctor`` without servers: files, this process, and how it ends."""

from __future__ import annotations

import configparser
import hashlib
import json
import os
import re
import sqlite3
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, Callable, NamedTuple, NoReturn, Optional

import pytest

from leasecron_sync.backends import _sqlite_mounts
from leasecron_sync.backends._lanes import Deadline
from leasecron_sync.backends._redis_scripts import script_of
from leasecron_sync.backends.base import Backend, BackendSettings
from leasecron_sync.backends.memory import MemoryLease
from leasecron_sync.backends.sqlite import SQLiteLease
from leasecron_sync.backends.urls import _MAKERS, connect
from leasecron_sync.cli import main
from leasecron_sync.clock import SystemClock
from leasecron_sync.doctor import examine as examine_module
from leasecron_sync.doctor import host, redis_settings
from leasecron_sync.doctor.examine import EXAMINERS, examine
from leasecron_sync.doctor.finding import Examination, Finding, Findings, Level
from leasecron_sync.doctor.reach import reach_advice
from leasecron_sync.doctor.redis import commands
from leasecron_sync.doctor.visit import check_answers, tell_skew
from leasecron_sync.errors import MissingDependency, StoreRejected, StoreUnavailable
from leasecron_sync.testing import ManualClock

ROOT = Path(__file__).parents[2]
SETTINGS = BackendSettings("space", "me", 1_000)
HOUR_MS = 3_600_000

Output = pytest.CaptureFixture[str]


class Told(NamedTuple):
    """What the command wrote as JSON, and its status."""

    status: int
    findings: list[dict[str, Any]]

    def level(self, check: str) -> Optional[str]:
        """Return the worst level of a check; None when there is none."""
        levels = [one["level"] for one in self.findings if one["check"] == check]
        return max(levels, key=["ok", "note", "warning", "problem"].index, default=None)

    def text(self, check: str) -> str:
        return " ".join(one["found"] for one in self.findings if one["check"] == check)


def doctor(output: Output, *arguments: str) -> Told:
    status = main(["doctor", *arguments, "--json"])
    out, err = output.readouterr()
    assert not err
    told = Told(status, json.loads(out))
    levels = {one["level"] for one in told.findings}
    assert status == ("problem" in levels)
    for one in told.findings:
        assert one["found"]
        assert one["level"] == "ok" or one["effect"]
        assert one["level"] in ("ok", "note") or one["advice"]
    return told


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("LEASECRON_SYNC_URL", raising=False)
    return tmp_path


@pytest.fixture
def store(folder: Path) -> Path:
    """The file of a store that nobody has open."""
    backend = SQLiteLease("jobs.db")
    backend.open(SETTINGS)
    backend.probe()
    backend.close()
    return folder / "jobs.db"


def contents(folder: Path) -> dict[str, tuple[str, int]]:
    return {
        path.name: (hashlib.sha256(path.read_bytes()).hexdigest(), path.stat().st_mtime_ns)
        for path in folder.iterdir()
    }


# -- the command -----------------------------------------------------------------------------------


def test_a_healthy_file_has_status_0_and_says_so(store: Path, capsys: Output) -> None:
    assert main(["doctor", "sqlite:///jobs.db"]) == 0
    out, err = capsys.readouterr()
    assert not err
    assert out.startswith("SQLiteLease('jobs.db'), namespace 'default'\n")
    assert out.endswith("\nNothing is wrong.\n")
    assert re.search(r"^ok +journal +write-ahead log", out, re.MULTILINE)
    assert max(map(len, out.splitlines())) <= 90
    told = doctor(capsys, f"sqlite:///{store}")
    assert {one["level"] for one in told.findings} == {"ok"}
    assert {"version", "file system", "disk", "rights", "journal", "format", "clock"} <= {
        one["check"] for one in told.findings
    }


def test_a_problem_has_status_1_and_tells_what_can_happen_and_what_to_do(
    folder: Path, capsys: Output
) -> None:
    (folder / "jobs.db").write_bytes(b"a letter to my aunt, which is longer than a header " * 9)
    assert main(["doctor", "sqlite:///jobs.db"]) == 1
    out, err = capsys.readouterr()
    assert not err
    told = " ".join(out.split())
    assert "problem format '" in told
    assert "jobs.db' is not an SQLite database No instance can start on it." in told
    assert "-> Choose another path" in told
    assert out.endswith("\n1 problem.\n")


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("nonsense",),
        ("oracle://host/x",),
        ("sqlite:///jobs.db", "more"),
        ("sqlite:///jobs.db", "--namespace", ""),
        ("jobs:scheduler",),
    ],
)
def test_wrong_use_is_one_line_and_status_2(capsys: Output, arguments: tuple[str, ...]) -> None:
    assert main(["doctor", *arguments]) == 2
    out, err = capsys.readouterr()
    assert not out
    assert len(err.splitlines()) == 1


def test_a_connection_string_that_cannot_be_read_is_a_wrong_use(capsys: Output) -> None:
    assert main(["doctor", "postgresql://worker:s3cr3t@[::1/x"]) == 2
    out, err = capsys.readouterr()
    assert not out
    assert "s3cr3t" not in err
    assert "worker" not in err


def test_the_url_may_come_from_a_file_or_the_environment(
    store: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("url").write_text(f"sqlite:///{store}\n")
    assert doctor(capsys, "@url").status == 0
    monkeypatch.setenv("LEASECRON_SYNC_URL", f"sqlite:///{store}")
    assert doctor(capsys).status == 0


def test_a_store_in_memory_is_a_problem(capsys: Output) -> None:
    told = doctor(capsys, "memory://tests")
    assert told.level("store") == "problem"


@pytest.mark.parametrize(
    "url", ["redis://:s3cr3t@127.0.0.1:1/0", "postgresql://a:s3cr3t@127.0.0.1:1/x"]
)
def test_where_nobody_listens_it_says_so_and_shows_no_password(capsys: Output, url: str) -> None:
    told = doctor(capsys, url)
    assert told.status == 1
    assert told.level("reachable") == "problem"
    assert "refused" in told.text("reachable")
    [finding] = [one for one in told.findings if one["check"] == "reachable"]
    assert finding["advice"].startswith("Nobody listens there.")
    assert main(["doctor", url]) == 1
    assert "s3cr3t" not in "".join([*capsys.readouterr(), json.dumps(told.findings)])


# -- SQLite ----------------------------------------------------------------------------------------


def test_nothing_is_made_or_changed(store: Path, folder: Path, capsys: Output) -> None:
    before = contents(folder)
    assert before.keys() == {"jobs.db"}
    assert doctor(capsys, "sqlite:///jobs.db").status == 0
    assert contents(folder) == before
    assert doctor(capsys, "sqlite:///other.db").status == 0
    assert contents(folder) == before
    assert store.exists()


def test_a_log_that_a_crash_left_is_left_where_it_is(
    store: Path, folder: Path, capsys: Output
) -> None:
    crash = (
        "import os, sqlite3; c = sqlite3.connect('jobs.db'); c.execute('CREATE TABLE t (a)'); "
        "c.commit(); os._exit(0)"
    )
    subprocess.run([sys.executable, "-c", crash], check=True)
    Path("jobs.db-shm").unlink()
    before = contents(folder)
    assert before.keys() == {"jobs.db", "jobs.db-wal"}
    assert doctor(capsys, f"sqlite:///{store}").status == 0
    assert contents(folder) == before


HOLD = """\
from leasecron_sync.backends.base import BackendSettings
from leasecron_sync.backends.sqlite import SQLiteLease
backend = SQLiteLease("jobs.db")
backend.open(BackendSettings("space", "me", 1_000))
backend.probe()
print("ready", flush=True)
input()
"""


def test_a_file_in_use_is_read_with_its_log(folder: Path, capsys: Output) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLD],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        assert b"leasecron_meta" not in (folder / "jobs.db").read_bytes()
        told = doctor(capsys, "sqlite:///jobs.db")
        process.communicate("\n")
    assert {one["level"] for one in told.findings} == {"ok"}
    assert told.level("format") == "ok"


LOCK = """\
import sqlite3, sys, time
connection = sqlite3.connect("jobs.db", isolation_level=None)
connection.execute("PRAGMA journal_mode = " + sys.argv[1])
connection.execute("CREATE TABLE IF NOT EXISTS mine (a)")
connection.execute("BEGIN IMMEDIATE")
print("ready", flush=True)
while sys.argv[2] == "often":
    connection.execute("ROLLBACK")
    time.sleep(0.001)
    connection.execute("BEGIN IMMEDIATE")
input()
"""


@pytest.mark.parametrize("journal", ["WAL", "DELETE"])
@pytest.mark.parametrize("how", ["for long", "often"])
def test_a_transaction_that_does_not_end_is_a_problem(
    store: Path, capsys: Output, journal: str, how: str
) -> None:
    del store
    with subprocess.Popen(
        [sys.executable, "-c", LOCK, journal, how],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            told = doctor(capsys, "sqlite:///jobs.db")
        finally:
            process.kill()
    if how == "often":
        assert told.level("lock") == "ok"
        return
    assert (told.status, told.level("lock")) == (1, "problem")
    assert f"process {process.pid} has kept others from writing" in told.text("lock")


def test_a_journal_that_is_deleted_is_noted_and_kept(folder: Path, capsys: Output) -> None:
    with closing(sqlite3.connect("jobs.db")) as connection:
        connection.execute("CREATE TABLE mine (a)")
        connection.commit()
    before = contents(folder)
    told = doctor(capsys, "sqlite:///jobs.db")
    assert told.status == 0
    assert told.level("journal") == "note"
    assert contents(folder) == before


def test_a_missing_file_is_a_note_and_a_missing_folder_a_problem(capsys: Output) -> None:
    told = doctor(capsys, "sqlite:///jobs.db")
    assert (told.status, told.level("format")) == (0, "note")
    told = doctor(capsys, "sqlite:///nowhere/jobs.db")
    assert (told.status, told.level("file system")) == (1, "problem")


@pytest.mark.parametrize("name", ["", "/dev/null"])
def test_what_is_no_file_is_a_problem(folder: Path, capsys: Output, name: str) -> None:
    told = doctor(capsys, f"sqlite:///{name or folder}")
    assert told.level("file system") == "problem"


def test_a_damaged_file_is_a_problem(store: Path, capsys: Output) -> None:
    with store.open("r+b") as file:
        file.seek(100)
        file.write(b"\xff" * 3_000)
    told = doctor(capsys, f"sqlite:///{store}")
    assert told.level("format") == "problem"
    assert "damaged" in told.text("format")


def test_a_newer_store_format_is_a_problem(store: Path, capsys: Output) -> None:
    change(store, "UPDATE leasecron_meta SET value = '2' WHERE name = 'format'")
    told = doctor(capsys, f"sqlite:///{store}")
    assert told.level("format") == "problem"
    assert "format 2" in told.text("format")


def test_a_table_that_is_gone_is_a_warning(store: Path, capsys: Output) -> None:
    change(store, "DROP TABLE leasecron_run")
    told = doctor(capsys, f"sqlite:///{store}")
    assert (told.status, told.level("tables")) == (0, "warning")


def test_a_time_from_the_future_is_a_warning(store: Path, capsys: Output) -> None:
    ahead = SystemClock().now_ms() + HOUR_MS
    change(store, f"UPDATE leasecron_meta SET value = '{ahead}' WHERE name = 'clock_ms'")
    assert doctor(capsys, f"sqlite:///{store}").level("clock") == "warning"


def change(path: Path, statement: str) -> None:
    with closing(sqlite3.connect(path)) as connection:
        connection.execute(statement)
        connection.commit()


def test_a_network_file_system_is_a_problem_and_is_not_touched(
    folder: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = folder / "mounts"
    table.write_text(f"1 1 0:1 / / rw - ext4 x rw\n2 1 0:2 / {folder} rw - nfs4 host:/x rw\n")
    monkeypatch.setattr(_sqlite_mounts, "MOUNTS", table)

    def hang(_path: str) -> NoReturn:
        pytest.fail("the file system was touched")

    monkeypatch.setattr("leasecron_sync.doctor.sqlite.check_place", hang)
    told = doctor(capsys, "sqlite:///jobs.db")
    assert told.level("file system") == "problem"
    assert "nfs4" in told.text("file system")
    assert told.level("disk") is None


@pytest.mark.parametrize(("free", "level"), [(0, "problem"), (50, "warning"), (5_000, "ok")])
def test_a_full_disk_is_seen(
    store: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch, free: int, level: str
) -> None:
    real = os.statvfs(store)
    blocks = free * 1024 * 1024 // real.f_frsize

    class Space(NamedTuple):
        f_bavail: int
        f_frsize: int
        f_flag: int

    monkeypatch.setattr(os, "statvfs", lambda _path: Space(blocks, real.f_frsize, real.f_flag))
    assert doctor(capsys, f"sqlite:///{store}").level("disk") == level


AS_NOBODY = """\
import contextlib, io, os, sys
from leasecron_sync.cli import main
with contextlib.redirect_stdout(io.StringIO()):
    main(["doctor", sys.argv[1], "--json"])  # imports what another user may not read
if os.geteuid() == 0:
    os.setuid(65534)
sys.exit(main(["doctor", sys.argv[1], "--json"]))
"""


@pytest.fixture
def public() -> Iterator[Path]:
    """A folder that every user may look into, with a store."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        backend = SQLiteLease(folder / "jobs.db")
        backend.open(SETTINGS)
        backend.probe()
        backend.close()
        try:
            yield folder
        finally:
            folder.chmod(0o700)


def test_a_file_that_may_only_be_read_is_a_problem(public: Path) -> None:
    file = public / "jobs.db"
    file.chmod(0o444)
    public.chmod(0o555)
    done = subprocess.run(
        [sys.executable, "-c", AS_NOBODY, f"sqlite:///{file}"],
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    told = Told(1, json.loads(done.stdout))
    assert told.level("rights") == "problem"
    assert "'jobs.db' cannot be written to" in told.text("rights")
    assert f"the folder {str(public)!r}" in told.text("rights")
    assert told.level("format") == "ok"  # the next checks are done all the same


@pytest.mark.parametrize("command", ["doctor", "history"])
def test_a_folder_that_lets_nobody_through_is_named_with_who_needs_what(
    public: Path, command: str
) -> None:
    public.chmod(0)
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            AS_NOBODY.replace('"doctor"', repr(command)),
            f"sqlite:///{public}/jobs.db",
        ],
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    told = done.stderr if command == "history" else Told(1, json.loads(done.stdout)).text("rights")
    assert f"{str(public / 'jobs.db')!r}: permission denied: user " in told
    assert "must be able to read and write the file and its folder" in told


# -- one check does not hide the others, and none hangs --------------------------------------------


class Strange(MemoryLease):
    """A backend of a kind that nobody has made checks for."""

    def __init__(self, probe: Callable[[], Any]) -> None:
        super().__init__()
        self._probe = probe
        self.closed = False

    def probe(self) -> Any:  # noqa: ANN401
        return self._probe()

    def close(self) -> None:
        self.closed = True
        super().close()


@pytest.fixture
def unknown_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(examine_module, "EXAMINERS", {})


def levels(found: list[Finding]) -> dict[str, Level]:
    return {finding.check: finding.level for finding in found}


@pytest.mark.usefixtures("unknown_kind")
def test_an_unknown_kind_of_store_is_looked_at_by_its_probe() -> None:
    other = MemoryLease("other")
    other.open(SETTINGS)
    backend = Strange(other.probe)
    found = levels(examine(backend, SETTINGS))
    assert found["reachable"] is Level.OK
    assert found["clock"] is Level.OK
    assert backend.closed


@pytest.mark.usefixtures("unknown_kind")
def test_an_unknown_kind_that_cannot_be_reached_is_a_problem() -> None:
    def probe() -> NoReturn:
        message = "it is away"
        raise StoreUnavailable(message)

    assert levels(examine(Strange(probe), SETTINGS))["reachable"] is Level.PROBLEM


@pytest.mark.usefixtures("unknown_kind")
def test_a_check_that_never_ends_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(examine_module, "_STUCK_MS", 50)
    release = threading.Event()
    backend = Strange(lambda: release.wait(20))
    found = examine(backend, SETTINGS, limit_ms=50)
    assert levels(found)["reachable"] is Level.PROBLEM
    assert "no end in sight" in found[-1].found
    release.set()


def test_a_package_that_is_missing_is_a_problem() -> None:
    class Without(MemoryLease):
        def open(self, settings: BackendSettings) -> None:
            del settings
            message = "pip install something"
            raise MissingDependency(message)

    found = examine(Without(), SETTINGS)
    assert levels(found)["client"] is Level.PROBLEM
    assert found[-1].found == "pip install something"


@pytest.mark.parametrize(
    ("error", "level"),
    [
        (StoreRejected("no right"), Level.WARNING),
        (StoreUnavailable("away"), Level.PROBLEM),
        (PermissionError(13, "Permission denied", "/x"), Level.PROBLEM),
        (KeyError("s3cr3t"), Level.PROBLEM),
    ],
)
def test_a_check_that_fails_is_told_and_hides_no_other(error: Exception, level: Level) -> None:
    findings = Findings()
    with findings.checking("one"):
        raise error
    with findings.checking("two"):
        findings.ok("two", "fine")
    assert levels(findings.all()) == {"one": level, "two": Level.OK}
    assert "s3cr3t" not in findings.all()[0].found


def test_every_backend_that_a_url_names_has_checks_of_its_own() -> None:
    examples = {"sqlite": "sqlite:///x", "unix": "unix:///x"}
    for scheme in _MAKERS:
        service = "/name/0" if "+sentinel" in scheme else ""
        backend = connect(examples.get(scheme, f"{scheme}://host{service}"))
        assert isinstance(backend, Backend)
        assert any(isinstance(backend, kind) for kind in EXAMINERS), (
            f"{scheme}:// has no row in EXAMINERS: its probe() may change the store"
        )


# -- clocks and answers ----------------------------------------------------------------------------


def exam() -> Examination:
    return Examination(SETTINGS, Findings(), Deadline(10_000))


@pytest.mark.parametrize(
    ("skew_ms", "took_ms", "level"),
    [
        (0, 0, Level.OK),
        (500, 0, Level.OK),
        (-501, 0, Level.WARNING),
        (501, 0, Level.WARNING),
        (600, 400, Level.OK),  # what may come from the way is no skew
        (-11_000, 0, Level.PROBLEM),
    ],
)
def test_a_skew_is_told_by_its_size(skew_ms: int, took_ms: int, level: Level) -> None:
    one = exam()
    tell_skew(one, skew_ms, took_ms)
    [finding] = one.findings.all()
    assert finding.level is level
    assert finding.measured == {"skew_ms": skew_ms}
    if level is not Level.OK:
        assert ("behind" in finding.found) == (skew_ms < 0)
        assert ("late" in finding.effect) == (skew_ms < 0)


@pytest.mark.parametrize(("took_ms", "level"), [(0, Level.OK), (150, Level.WARNING)])
def test_round_trips_are_measured(clock: ManualClock, took_ms: int, level: Level) -> None:
    one = Examination(replace(SETTINGS, call_timeout_ms=9_000), Findings(), Deadline(10_000))
    waits = iter([7 * took_ms, took_ms, *[2 * took_ms] * 99])

    def ask_ms() -> int:
        clock.advance(next(waits))
        return clock.now_ms() + 2_000

    check_answers(one, ask_ms, clock)
    answers, skew = one.findings.all()
    assert answers.level is level
    assert answers.measured["p50_ms"] == 2 * took_ms
    assert answers.measured["max_ms"] == 7 * took_ms
    assert skew.measured["skew_ms"] == 2_000 + took_ms - took_ms // 2  # by the quickest answer
    assert skew.level is Level.WARNING


def test_a_store_without_an_answer_has_no_skew() -> None:
    def ask_ms() -> NoReturn:
        message = "away"
        raise StoreUnavailable(message)

    one = exam()
    check_answers(one, ask_ms)
    assert levels(one.findings.all()) == {"reachable": Level.PROBLEM, "clock": Level.WARNING}


@pytest.mark.parametrize(
    ("reason", "start"),
    [
        ("host cannot be reached: Connection refused", "Nobody listens"),
        ("host cannot be reached: no answer in time", "Something takes"),
        ("the connection broke: Timeout reading from socket", "Something takes"),
        ('could not translate host name "x" to address: Name or service', "The host's name"),
        ('FATAL:  no pg_hba.conf entry for host "1.2.3.4"', "The server lets nobody in"),
        ("unsupported startup parameter: options", "The pooler refuses"),
        ('password authentication failed for user "***"', "User and password"),
        ("WRONGPASS invalid username-password pair", "User and password"),
        ('FATAL:  role "***" does not exist', "User and password"),
        ('FATAL:  database "x" does not exist', "Create the database"),
        ("FATAL:  sorry, too many clients already", "The server has no connection"),
        ("SSL connection has been closed unexpectedly", "Encryption"),
        ("FATAL:  the database system is starting up", "The server is starting"),
        ("session is read-only", "No server of the URL"),
        ("sentinel a:1 knows no such service", "The name after the sentinels"),
        ("Error 2 connecting to unix:/x. No such file or directory", "There is no socket"),
        ("No route to host", "There is no way"),
        ("was ist das?", "Look whether the server runs"),
    ],
)
def test_each_reason_has_its_advice(reason: str, start: str) -> None:
    assert reach_advice(reason).startswith(start)


def test_the_advice_on_a_password_is_right_for_every_store() -> None:
    """Only PostgreSQL's client reads passwords from a file."""
    advice = reach_advice("amqp://h refuses this user or password")
    assert advice.partition(";")[2] == " PostgreSQL also looks into ~/.pgpass."
    assert "correct them in the URL" in advice.partition(";")[0]


# -- this process ----------------------------------------------------------------------------------


def test_the_oldest_clients_are_those_of_the_extras() -> None:
    settings = configparser.ConfigParser()
    settings.read(ROOT / "setup.cfg")
    extras = settings["options.extras_require"]
    assert extras["redis"].strip() == f"redis >= {host.LOWEST['redis']}"
    assert extras["postgres"].strip() == f"psycopg2-binary >= {host.LOWEST['psycopg2']}"


@pytest.mark.parametrize(
    ("version", "level"),
    [("2.9.5 (dt dec pq3 ext lo64)", Level.OK), ("2.10.0", Level.OK), ("2.9.4", Level.WARNING)],
)
def test_an_old_client_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, version: str, level: Level
) -> None:
    class Module:
        __version__ = version

    monkeypatch.setitem(sys.modules, "psycopg2", Module)
    findings = Findings()
    host.check_client(findings, "psycopg2")
    assert levels(findings.all()) == {"client": level}


def test_a_host_without_zones_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(_name: str) -> NoReturn:
        raise KeyError

    monkeypatch.setattr("zoneinfo.ZoneInfo", missing)
    findings = Findings()
    host.check_host(findings)
    assert levels(findings.all())["time zones"] is Level.PROBLEM


# -- Redis: what settings mean ---------------------------------------------------------------------


def settled(
    config: Optional[dict[str, str]] = None, kind: str = "", **info: str
) -> dict[str, Level]:
    findings = Findings()
    good = {"role": "master", "aof_enabled": "1", "maxmemory_policy": "noeviction"}
    known = {"appendfsync": "always", "save": "", "min-replicas-to-write": "0"}
    facts = redis_settings.Facts({**good, **info}, {**known, **(config or {})}, kind)
    redis_settings.check_settings(findings, facts)
    return levels(findings.all())


def test_a_durable_primary_is_in_order() -> None:
    assert set(settled().values()) == {Level.OK}


@pytest.mark.parametrize(
    ("policy", "limit", "level"),
    [
        ("noeviction", "100", Level.OK),
        ("allkeys-lru", "100", Level.PROBLEM),
        ("allkeys-random", "100", Level.PROBLEM),
        ("allkeys-lfu", "0", Level.NOTE),
        ("volatile-lru", "100", Level.NOTE),
    ],
)
def test_a_server_that_deletes_leases_is_a_problem(policy: str, limit: str, level: Level) -> None:
    assert settled(maxmemory_policy=policy, maxmemory=limit)["eviction"] is level


def test_keys_that_expire_are_deleted_by_more_policies() -> None:
    findings = Findings()
    info = {"maxmemory_policy": "volatile-ttl", "maxmemory": "100"}
    redis_settings.check_settings(findings, redis_settings.Facts(info, {}, kind="", expiring=True))
    assert levels(findings.all())["eviction"] is Level.PROBLEM


def test_a_full_memory_is_a_warning() -> None:
    assert settled(maxmemory="100", used_memory="95")["memory"] is Level.WARNING
    assert "memory" not in settled(maxmemory="100", used_memory="50")


@pytest.mark.parametrize(
    ("aof", "config", "level"),
    [
        ("1", {"appendfsync": "everysec"}, Level.NOTE),
        ("1", {"appendfsync": "no"}, Level.WARNING),
        ("1", {"appendfsync": ""}, Level.NOTE),
        ("0", {"save": "3600 1"}, Level.PROBLEM),
        ("0", {"save": ""}, Level.PROBLEM),
    ],
)
def test_what_a_crash_forgets_is_told(aof: str, config: dict[str, str], level: Level) -> None:
    assert settled(config, aof_enabled=aof)["persistence"] is level


def test_a_disk_that_cannot_be_written_is_a_problem() -> None:
    assert settled(aof_last_write_status="err")["disk"] is Level.PROBLEM
    assert settled(rdb_last_bgsave_status="err")["disk"] is Level.PROBLEM
    goes_on = {"stop-writes-on-bgsave-error": "no"}
    assert "disk" not in settled(goes_on, rdb_last_bgsave_status="err")


@pytest.mark.parametrize(
    ("followers", "good", "least", "kind", "level"),
    [
        ("0", "0", "0", "", Level.OK),
        ("0", "0", "0", "sentinel", Level.WARNING),
        ("2", "0", "0", "", Level.WARNING),
        ("2", "0", "", "", Level.NOTE),
        ("2", "2", "1", "", Level.OK),
        ("2", "0", "1", "", Level.PROBLEM),
    ],
)
def test_what_a_failover_forgets_is_told(
    followers: str, good: str, least: str, kind: str, level: Level
) -> None:
    found = settled(
        {"min-replicas-to-write": least},
        kind,
        connected_slaves=followers,
        min_slaves_good_slaves=good,
    )
    assert found["replicas"] is level


def test_few_connections_left_is_a_warning() -> None:
    found = settled(connected_clients="95", maxclients="100")
    assert found["connections"] is Level.WARNING


def test_the_commands_whose_rights_are_asked_for_are_those_of_the_scripts() -> None:
    folder = ROOT / "leasecron_sync/backends/_lua/redis"
    text = "\n".join(path.read_text(encoding="utf-8") for path in folder.glob("*.lua"))
    called = re.findall(r"\b(?:redis|server)\.p?call\b\W*(\w*)", text)
    assert set(commands()) == set(called)
    assert {"HGET", "HSET", "ZADD", "TIME"} < set(called)
    assert script_of("rights").text.startswith(b"#!lua flags=no-writes\n")
