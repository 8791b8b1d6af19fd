"""The command line: what each command reads and writes, and how it fails."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Optional

import pytest

from leasecron_sync import Scheduler
from leasecron_sync.backends.base import BackendSettings
from leasecron_sync.backends.postgres import PostgresLease
from leasecron_sync.backends.sqlite import SQLiteLease
from leasecron_sync.cli import demo, main
from leasecron_sync.cli.demo_facts import (
    Kill,
    Note,
    Recorded,
    Takeover,
    find_out,
    read_note,
)
from leasecron_sync.cli.demo_screen import Board, Facts, Lines, Look
from leasecron_sync.cli.output import human, iso, one_line, shown, table, width_of
from leasecron_sync.model import (
    JobStamp,
    LeaseClaim,
    OnOverlap,
    Outcome,
    RunKey,
    RunRecord,
    RunState,
    Settlement,
)

ROOT = Path(__file__).parents[2]
SECRET = "s3cr3t"

Output = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A working directory of its own, whose modules are forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delenv("LEASECRON_SYNC_URL", raising=False)
    before = set(sys.modules)
    importlib.invalidate_caches()
    yield tmp_path
    for name in set(sys.modules) - before:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def told(output: Output, *arguments: str) -> str:
    """Return what a command writes that succeeds."""
    assert main(arguments) == 0
    out, err = output.readouterr()
    assert not err
    return out


def failure(output: Output, status: int, *arguments: str) -> str:
    """Return the one line of a command that fails."""
    assert main(arguments) == status
    out, err = output.readouterr()
    assert not out
    assert err.startswith("leasecron-sync: ")
    assert err.endswith("\n")
    assert len(err.splitlines()) == 1
    return err[len("leasecron-sync: ") : -1]


def program(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", "-m", "leasecron_sync", *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=20,
    )


# -- the command itself ----------------------------------------------------------------------------


def test_version_and_help_are_shown(capsys: Output) -> None:
    assert told(capsys, "--version").startswith("leasecron-sync ")
    text = told(capsys, "--help")
    assert all(name in text for name in ("demo", "run", "next", "jobs", "history", "schema"))
    for name in ("demo", "run", "next", "jobs", "history", "schema"):
        assert f"leasecron-sync {name}" in told(capsys, name, "--help")


@pytest.mark.parametrize("arguments", [(), ("mend",), ("exec",), ("--nonsense",)])
def test_what_is_no_command_is_a_wrong_use(capsys: Output, arguments: tuple[str, ...]) -> None:
    assert "--help" in failure(capsys, 2, *arguments)


def test_options_are_not_guessed(capsys: Output) -> None:
    failure(capsys, 2, "next", "--sched", "* * * * *")


def test_module_is_the_same_command() -> None:
    done = program("next", "--schedule", "* * * * *", "--count", "1")
    assert done.returncode == 0
    assert not done.stderr
    assert done.stdout.endswith("+00:00\n")


def test_an_output_that_nobody_reads_ends_it_silently() -> None:
    done = subprocess.run(
        f'"{sys.executable}" -m leasecron_sync next --schedule "* * * * *" --count 10000 | true; '
        'echo "${PIPESTATUS[0]}"',
        shell=True,
        executable="/bin/bash",
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=20,
    )
    assert done.stdout == "141\n"
    assert not done.stderr


def test_a_full_disk_is_one_line() -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "leasecron_sync", "next", "--schedule", "* * * * *"],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
            timeout=20,
        )
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1
    assert "No space left" in done.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ("jobs", f"foo://user:{SECRET}@host/path"),
        ("jobs", f"amqp://user:{SECRET}@host/a/b"),
        ("jobs", f"redis://:{SECRET}@host", f"redis://:{SECRET}@host"),
        ("jobs", f"user:{SECRET}@host"),
        ("jobs", f"sqlite:///jobs.db?password={SECRET}"),
        ("schema", f"postgresql://user:{SECRET}@host/db?schema=1"),
        ("schema", f"postgresql://user:{SECRET}@host/db?nonsense=1"),
        ("history", f"--limit=redis://:{SECRET}@host"),
        ("history", f"redis://user:{SECRET}/with/slash@host/0"),
        ("run", f"redis://:{SECRET}@host"),
        (f"redis://:{SECRET}@host",),
        (f"redis://:{SECRET}'x@host",),
        ("next", "--from", f"redis://:{SECRET}@host", "--schedule", "* * * * *"),
    ],
)
def test_credentials_are_never_shown(capsys: Output, arguments: tuple[str, ...]) -> None:
    assert SECRET not in failure(capsys, 2, *arguments)


# -- next ------------------------------------------------------------------------------------------

JOBS = """
from datetime import datetime, timezone
from leasecron_sync import Scheduler, at, every

print("imported")
scheduler = Scheduler("sqlite:///jobs.db", timezone="Europe/Athens")


@scheduler.job("0 3 * * *")
def nightly():
    pass


@scheduler.job(every(seconds=90), name="odd \\n name")
def odd():
    pass


@scheduler.job(at(datetime(2026, 3, 28, 12, tzinfo=timezone.utc)))
def once():
    pass


class Holder:
    held = scheduler


def make():
    return scheduler
"""

FROM = ("--from", "2026-03-28T00:00:00+02:00")


def test_next_shows_scheduled_times_in_the_zone(capsys: Output) -> None:
    zone = ("--schedule", "0 3 * * *", "--timezone", "Europe/Athens")
    out = told(capsys, "next", *zone, *FROM, "--count", "3", "--json")
    # On the 29th the clock goes from 3 to 4.
    expected = [
        "2026-03-28T03:00:00+02:00",
        "2026-03-29T04:00:00+03:00",
        "2026-03-30T03:00:00+03:00",
    ]
    assert json.loads(out) == expected
    assert told(capsys, "next", *zone, *FROM, "--count", "3").splitlines() == expected


@pytest.mark.parametrize("start", ["2026-01-01T00:00:00Z", "2026-01-01T02:00:00+02:00"])
def test_next_begins_strictly_after_an_instant(capsys: Output, start: str) -> None:
    out = told(capsys, "next", "--schedule", "0 0 * * *", "--from", start, "--count", "1")
    assert out == "2026-01-02T00:00:00+00:00\n"


def test_next_shows_five_from_now_on(capsys: Output) -> None:
    assert len(told(capsys, "next", "--schedule", "@daily").splitlines()) == 5


@pytest.mark.parametrize(
    ("start", "left"), [("9999-12-28T00:00:00Z", 2), ("9999-12-30T12:00:00Z", 0)]
)
def test_next_says_when_there_are_no_more(capsys: Output, start: str, left: int) -> None:
    arguments = ("next", "--schedule", "0 3 * * *", "--from", start)
    *times, last = told(capsys, *arguments).splitlines()
    assert len(times) == left
    assert "no more scheduled times" in last
    assert len(json.loads(told(capsys, *arguments, "--json"))) == left


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (("--schedule", "0 0 30 2 *"), "0 0 30 2 *"),
        (("--schedule", "61 * * * *"), "minute"),
        (("--schedule", "* * * * *", "--timezone", "Europe/Sparta"), "Europe/Sparta"),
        (("--schedule", "* * * * *", "--from", "2026-03-28T00:00:00"), "offset"),
        (("--schedule", "* * * * *", "--from", "soon"), "ISO 8601"),
        (("--schedule", "* * * * *", "--from", ""), "ISO 8601"),
        (("--schedule", "* * * * *", "--count", "0"), "1 to 10,000"),
        (("--schedule", "* * * * *", "--count", "many"), "1 to 10,000"),
        ((), "either"),
        (("jobs:scheduler", "--schedule", "* * * * *"), "either"),
        (("jobs:scheduler", "--timezone", "UTC"), "--timezone"),
    ],
)
def test_next_refuses(capsys: Output, arguments: tuple[str, ...], part: str) -> None:
    assert part in failure(capsys, 2, "next", *arguments)


def test_next_shows_all_jobs_of_a_scheduler(capsys: Output, folder: Path) -> None:
    (folder / "some_jobs.py").write_text(JOBS)
    assert main(["next", "some_jobs:scheduler", *FROM, "--count", "2"]) == 0
    out, err = capsys.readouterr()
    assert err == "imported\n"
    rows = [line.split("  ") for line in out.splitlines()]
    cells = [[cell.strip() for cell in row if cell] for row in rows]
    assert cells == [
        ["JOB", "SCHEDULE", "TIME ZONE", "SCHEDULED TIMES"],
        ["nightly", "0 3 * * *", "Europe/Athens", "2026-03-28T03:00:00+02:00"],
        ["2026-03-29T04:00:00+03:00"],
        ["odd \\n name", "every 90 s", "UTC", "2026-03-27T22:01:30+00:00"],
        ["2026-03-27T22:03:00+00:00"],
        ["once", "at 2026-03-28T12:00:00+00:00", "UTC", "2026-03-28T12:00:00+00:00"],
        ["no more scheduled times"],
    ]


def test_next_writes_the_jobs_of_a_scheduler_as_json(capsys: Output, folder: Path) -> None:
    (folder / "more_jobs.py").write_text(JOBS)
    assert main(["next", "more_jobs:Holder.held", *FROM, "--count", "1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "nightly": ["2026-03-28T03:00:00+02:00"],
        "odd \n name": ["2026-03-27T22:01:30+00:00"],
        "once": ["2026-03-28T12:00:00+00:00"],
    }


def test_next_of_a_scheduler_without_jobs_says_so(capsys: Output, folder: Path) -> None:
    (folder / "no_jobs.py").write_text(JOBS.partition("\n\n\n@")[0])
    assert main(["next", "no_jobs:scheduler"]) == 0
    assert capsys.readouterr().out == "The scheduler has no jobs.\n"


# -- MODULE:ATTRIBUTE ------------------------------------------------------------------------------

MODULES = [
    ("import not_there_at_all", ["broken.py, line 1", "ModuleNotFoundError", "not_there_at_all"]),
    ("x = 1\ny = (\n", ["broken.py, line 2", "SyntaxError"]),
    ('import json\n\njson.loads("{")\n', ["broken.py, line 3", "JSONDecodeError"]),
    ("raise ValueError('two\\nlines')", ["broken.py, line 1", "ValueError: two\\nlines"]),
    ("raise SystemExit(3)", ["SystemExit(3)"]),
    (
        """from leasecron_sync import Scheduler
s = Scheduler("sqlite:///x.db")
s.job("99 * * * *")
""",
        ["broken.py, line 3", "ValueError", "99 * * * *"],
    ),
    (
        f"from leasecron_sync import Scheduler\nScheduler('foo://a:{SECRET}@h')",
        ["line 2", "foo://"],
    ),
]


@pytest.mark.parametrize(("text", "parts"), MODULES, ids=range(len(MODULES)))
@pytest.mark.parametrize("command", ["run", "next"])
def test_a_module_that_cannot_be_imported_is_one_line(
    capsys: Output, folder: Path, command: str, text: str, parts: list[str]
) -> None:
    (folder / "broken.py").write_text(text)
    line = failure(capsys, 1, command, "broken:scheduler")
    assert [part for part in parts if part not in line] == []
    assert SECRET not in line


@pytest.mark.parametrize(
    ("target", "status", "part"),
    [
        ("nowhere:scheduler", 1, "no module 'nowhere'"),
        ("os.nowhere:scheduler", 1, "no module 'os.nowhere'"),
        ("target_jobs:nope", 1, "'scheduler'"),
        ("target_jobs:Holder.nope", 1, "'Holder.nope'"),
        ("target_jobs:make", 1, "function"),
        ("target_jobs:Holder", 1, "class"),
        ("target_jobs:at.__name__", 1, "'str'"),
        ("target_jobs.py:scheduler", 1, "here target_jobs"),
        ("./a/target_jobs.py:scheduler", 2, "here a.target_jobs"),
        ("target_jobs", 2, "MODULE:ATTRIBUTE"),
        ("target_jobs:", 2, "MODULE:ATTRIBUTE"),
        (":scheduler", 2, "MODULE:ATTRIBUTE"),
        ("", 2, "MODULE:ATTRIBUTE"),
    ],
)
def test_a_target_that_is_no_scheduler_is_one_line(
    capsys: Output, folder: Path, target: str, status: int, part: str
) -> None:
    (folder / "target_jobs.py").write_text(JOBS.replace('print("imported")', ""))
    assert part in failure(capsys, status, "run", target)


def test_an_interruption_is_one_line(capsys: Output, folder: Path) -> None:
    (folder / "interrupted.py").write_text("raise KeyboardInterrupt")
    assert failure(capsys, 130, "next", "interrupted:scheduler") == "interrupted"


# -- run -------------------------------------------------------------------------------------------

WORKER = """
from leasecron_sync import Scheduler, every

scheduler = Scheduler("sqlite:///jobs.db")
scheduler.add_job(lambda: None, every(seconds=1000), name="idle")
"""


def worker(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-m", "leasecron_sync", "run", *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_run_ends_with_status_0_on_the_first_signal(folder: Path, number: signal.Signals) -> None:
    (folder / "jobs.py").write_text(WORKER)
    with worker("jobs:scheduler") as process:
        assert process.stderr is not None
        for line in process.stderr:
            assert " INFO " in line
            if "ready" in line:
                break
        process.send_signal(number)
        out, _rest = process.communicate(timeout=20)
    assert process.returncode == 0
    assert not out


STOPS_ITSELF = """
import threading


def stop():
    while scheduler.status().state != "running":
        threading.Event().wait(0.01)
    scheduler.stop()


threading.Thread(target=stop, daemon=True).start()
"""


def test_run_logs_no_more_than_it_was_told(folder: Path) -> None:
    (folder / "jobs.py").write_text(WORKER + STOPS_ITSELF)
    with worker("jobs:scheduler", "--log-level", "error") as process:
        out, err = process.communicate(timeout=20)
    assert process.returncode == 0
    assert not out
    assert not err


def test_run_warns_of_a_scheduler_without_jobs_and_tells_what_start_refuses(
    capsys: Output, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (folder / "elsewhere.py").write_text(
        "from leasecron_sync import Scheduler\nscheduler = Scheduler('sqlite:///no/folder.db')\n"
    )
    assert "folder" in failure(capsys, 1, "run", "elsewhere:scheduler")
    assert "no jobs" in caplog.text


def test_run_refuses_an_unknown_level(capsys: Output) -> None:
    assert "--log-level" in failure(capsys, 2, "run", "jobs:scheduler", "--log-level", "loud")


# -- jobs and history ------------------------------------------------------------------------------

START_MS = 1_774_648_800_000  # 2026-03-27T22:00:00Z
OWED = "2026-03-27T21:59:59Z"
ODD = "\x1b[31m名\n\u202ex\\"


def claim_of(key: RunKey, *, attempts: int = 1) -> LeaseClaim:
    return LeaseClaim(
        key=key,
        due_ms=key.scheduled_ms,
        holder="instance",
        decision_id=f"decision {key.job} {key.scheduled_ms}",
        lease_ms=15_000,
        max_attempts=attempts,
        on_overlap=OnOverlap.SKIP,
        max_age_ms=60_000,
        takeover_ms=150_000,
    )


@pytest.fixture
def store(folder: Path) -> str:
    """The URL of a store with four runs of three jobs."""
    now_ms = START_MS - 1_000

    class Timed(SQLiteLease):
        _now_ms = staticmethod(lambda: now_ms)

    backend = Timed(folder / "jobs.db")
    backend.open(BackendSettings("default", "instance", 5_000))
    stamps = [JobStamp(name, "") for name in ("nightly", ODD, "idle")]
    backend.register(stamps)
    for job, took_ms, outcome in (
        ("nightly", 93_000, Outcome.FINISHED),
        (ODD, 500, Outcome.FAILED),
        (ODD, 500, Outcome.FAILED),
    ):
        now_ms = -(-(now_ms - START_MS) // 60_000) * 60_000 + START_MS + 20
        (reply,) = backend.claim([claim_of(RunKey(job, now_ms - 20))])
        assert reply.lease is not None
        now_ms += took_ms
        backend.settle(
            reply.lease.ref, Settlement(outcome, "no\nway" if outcome.value == "failed" else "")
        )
    now_ms += 60_000 - (now_ms - START_MS) % 60_000
    backend.claim([claim_of(RunKey("nightly", now_ms))])
    backend.close()
    return "sqlite:///jobs.db"


def test_jobs_are_listed_with_their_newest_run(capsys: Output, store: str) -> None:
    lines = told(capsys, "jobs", store).splitlines()
    assert [re.split("  +", line) for line in lines] == [
        ["JOB", "NEWEST RUN", "STATE", "ATTEMPT", "UNSETTLED", "OWED SINCE"],
        ["\\x1b[31m名\\n\\u202ex\\\\", "2026-03-27T22:03:00Z", "failed", "1", "0", OWED],
        ["idle", "-", "-", "-", "0", OWED],
        ["nightly", "2026-03-27T22:04:00Z", "running", "1", "1", OWED],
    ]
    assert len({width_of(line[: line.index(OWED)]) for line in lines[1:]}) == 1


def test_jobs_are_written_as_json(capsys: Output, store: str) -> None:
    found = json.loads(told(capsys, "jobs", store, "--json"))
    assert [item["job"] for item in found] == [ODD, "idle", "nightly"]
    assert found[2] == {
        "job": "nightly",
        "newest_scheduled_time": "2026-03-27T22:04:00+00:00",
        "newest_state": "running",
        "newest_attempt": 1,
        "unsettled": 1,
        "owed_from": "2026-03-27T21:59:59+00:00",
    }


def test_more_jobs_than_asked_for_are_told_of(capsys: Output, store: str) -> None:
    assert main(["jobs", store, "--limit", "2"]) == 0
    out, err = capsys.readouterr()
    assert len(out.splitlines()) == 3
    assert "more than 2" in err


def test_history_begins_with_the_newest_run(capsys: Output, store: str) -> None:
    lines = told(capsys, "history", store).splitlines()
    assert lines[0].split() == [
        "SCHEDULED", "TIME", "JOB", "STATE", "ATTEMPT", "STARTED", "TOOK", "HOLDER", "REASON",
    ]  # fmt: skip
    assert [line.split()[0] for line in lines[1:]] == [
        "2026-03-27T22:04:00Z",
        "2026-03-27T22:03:00Z",
        "2026-03-27T22:02:00Z",
        "2026-03-27T22:00:00Z",
    ]
    assert lines[1].split()[1:] == ["nightly", "running", "1", "+0", "ms", "-", "instance"]
    assert lines[2].endswith("instance  no\\nway")
    assert lines[4].split()[1:] == [
        "nightly", "finished", "1", "+20", "ms", "1", "min", "33", "s", "instance",
    ]  # fmt: skip
    columns = {width_of(line[: line.index("instance")]) for line in lines[1:]}
    assert len(columns) == 1


def test_history_of_one_job_is_limited(capsys: Output, store: str) -> None:
    lines = told(capsys, "history", store, "--job", "nightly", "--limit", "1").splitlines()
    assert len(lines) == 2
    (only,) = json.loads(told(capsys, "history", store, "--job", ODD, "--limit", "1", "--json"))
    assert (only["job"], only["state"], only["reason"]) == (ODD, "failed", "no\nway")
    assert only["scheduled_time"] == "2026-03-27T22:03:00+00:00"
    assert only["claimed_time"] == "2026-03-27T22:03:00.020000+00:00"
    assert only["settled_time"] == "2026-03-27T22:03:00.520000+00:00"
    assert only["until_time"] is None


def test_nothing_found_is_said_in_a_sentence(capsys: Output, store: str) -> None:
    assert told(capsys, "jobs", store, "--namespace", "a\tb") == (
        "The store knows no job in the namespace a\\tb.\n"
    )
    assert told(capsys, "history", store, "--job", "nope") == (
        "The store knows no run of the job nope in the namespace default.\n"
    )
    assert told(capsys, "history", store, "--namespace", "x", "--json") == "[]\n"


def test_letters_that_the_output_does_not_have_are_shown_as_numbers(store: str) -> None:
    done = program("jobs", store, PYTHONIOENCODING="ascii")
    assert done.returncode == 0
    assert "\\x1b[31m\\u540d\\n\\u202ex\\\\  2026" in done.stdout


def test_url_comes_from_a_file_or_the_environment(
    capsys: Output, store: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = told(capsys, "jobs", store)
    (folder / "url").write_text(f"\n  {store}\n")
    assert told(capsys, "jobs", "@url") == expected
    monkeypatch.setenv("LEASECRON_SYNC_URL", store)
    assert told(capsys, "jobs") == expected
    monkeypatch.setenv("LEASECRON_SYNC_URL", "@url")
    assert told(capsys, "jobs") == expected


@pytest.mark.parametrize(
    ("text", "status"),
    [
        (None, 1),
        (b"", 1),
        (b"sqlite:///a\nsqlite:///b\n", 1),
        (b"\xff\xfe", 1),
        (f"foo://u:{SECRET}@h".encode(), 2),
        (f"{SECRET} is no URL".encode(), 2),
    ],
)
def test_a_file_without_a_url_is_one_line(
    capsys: Output, folder: Path, text: Optional[bytes], status: int
) -> None:
    if text is not None:
        (folder / "url").write_bytes(text)
    line = failure(capsys, status, "jobs", "@url")
    assert "'url'" in line
    assert SECRET not in line


def test_no_url_is_a_wrong_use(capsys: Output, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "LEASECRON_SYNC_URL" in failure(capsys, 2, "jobs")
    monkeypatch.setenv("LEASECRON_SYNC_URL", "")
    assert "LEASECRON_SYNC_URL" in failure(capsys, 2, "history")
    monkeypatch.setenv("LEASECRON_SYNC_URL", f"jobs.db-{SECRET}")
    line = failure(capsys, 2, "history")
    assert "LEASECRON_SYNC_URL: a URL starts with a scheme" in line
    assert SECRET not in line


@pytest.mark.parametrize("command", ["jobs", "history"])
def test_a_file_that_is_missing_is_not_made(capsys: Output, folder: Path, command: str) -> None:
    assert str(folder / "nope.db") in failure(capsys, 1, command, "sqlite:///nope.db")
    assert list(folder.iterdir()) == []


def test_what_holds_no_store_is_left_as_it_is(capsys: Output, folder: Path) -> None:
    (folder / "empty.db").touch()
    (folder / "text.db").write_text("no database at all " * 100)
    with sqlite3.connect(folder / "other.db") as connection:
        connection.execute("CREATE TABLE other (x)")
    connection.close()
    (folder / "folder.db").mkdir()
    before = {path: path.read_bytes() for path in folder.glob("*.db") if path.is_file()}
    for name in ("empty", "text", "other", "folder"):
        assert f"{name}.db" in failure(capsys, 1, "jobs", f"sqlite:///{name}.db")
    assert {path: path.read_bytes() for path in folder.iterdir() if path.is_file()} == before


def test_a_store_in_memory_cannot_be_seen(capsys: Output) -> None:
    assert "memory://" in failure(capsys, 1, "jobs", "memory://tests")


@pytest.mark.parametrize(
    "arguments",
    [
        ("jobs", "sqlite:///jobs.db", "--limit", "0"),
        ("history", "sqlite:///jobs.db", "--limit", "10001"),
        ("history", "sqlite:///jobs.db", "--namespace", ""),
        ("history", "sqlite:///jobs.db", "--namespace", "x" * 201),
        ("jobs", "sqlite:///"),
    ],
)
def test_wrong_values_are_a_wrong_use(capsys: Output, arguments: tuple[str, ...]) -> None:
    failure(capsys, 2, *arguments)


def test_looking_does_not_disturb_a_scheduler(capsys: Output, folder: Path) -> None:
    with Scheduler(SQLiteLease(folder / "jobs.db")) as scheduler:
        scheduler.add_job(lambda: None, "@yearly", name="rare")
        backend = scheduler.backend
        assert main(["jobs", "sqlite:///jobs.db"]) == 0
        assert main(["history", "sqlite:///jobs.db"]) == 0
        assert backend.history(None, 10) == []
        assert scheduler.status().store_down_since is None
    assert capsys.readouterr().err == ""


# -- what is written -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("duration_ms", "text"),
    [
        (None, "-"),
        (0, "0 ms"),
        (999, "999 ms"),
        (1_000, "1.0 s"),
        (1_550, "1.6 s"),
        (59_949, "59.9 s"),
        (59_960, "1 min 00 s"),
        (3_599_499, "59 min 59 s"),
        (3_599_500, "1 h 00 min"),
        (86_399_000, "23 h 59 min"),
        (86_400_000, "1 d 00 h"),
        (200_000_000, "2 d 07 h"),
        (-1_500, "-1.5 s"),
    ],
)
def test_durations_are_for_people(duration_ms: Optional[int], text: str) -> None:
    assert human(duration_ms) == text


def test_instants_have_milliseconds_where_they_matter() -> None:
    assert iso(START_MS) == "2026-03-27T22:00:00Z"
    assert iso(START_MS + 7) == "2026-03-27T22:00:00.007Z"
    assert iso(None) == "-"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("plain name", "plain name"),
        ("naïve 名前", "naïve 名前"),
        ("a\nb", "a\\nb"),
        ("\x1b]0;title\x07", "\\x1b]0;title\\x07"),
        ("a\\nb", "a\\\\nb"),
        ("\u202eabc", "\\u202eabc"),
        (" a ", '" a "'),
    ],
)
def test_names_control_no_terminal(capsys: Output, name: str, text: str) -> None:
    assert shown(name) == text
    assert one_line(f"a\n\x1b[0m{name}").isprintable()
    del capsys


def test_tables_are_aligned_by_what_a_terminal_shows() -> None:
    lines = table(("NAME", ">N"), [("名前", "1"), ("abcdef", "22"), ("e\u0301", "333")])
    assert lines == ["NAME      N", "名前      1", "abcdef   22", "e\u0301       333"]


# -- the demo's judgement --------------------------------------------------------------------------

A, B, C = "id-a", "id-b", "id-c"
READY = [Note(name, "ready", 0, instance_id=one) for name, one in zip("ABC", (A, B, C))]
KILL = Kill("B", 2_500)


def done(
    instance: str, scheduled_ms: int, began_ms: int, *, attempt: int = 1, token: int = 0
) -> list[Note]:
    """Return what an instance writes of a run from its begin to its end."""
    run = (scheduled_ms, attempt, token or scheduled_ms + attempt)
    return [
        Note(instance, "began", began_ms, *run),
        Note(instance, "returned", began_ms + 1_500, *run),
        Note(instance, "finished", began_ms + 1_510, *run),
    ]


def record_of(
    scheduled_ms: int,
    holder: str,
    *,
    attempt: int = 1,
    state: RunState = RunState.FINISHED,
) -> RunRecord:
    return RunRecord(
        RunKey("report", scheduled_ms),
        state,
        token=scheduled_ms + attempt,
        attempt=attempt,
        holder=holder,
    )


# The run of 2,000 is begun by B, which is killed; A takes it over.
COURSE = [
    *READY,
    *done("A", 1_000, 1_010),
    done("B", 2_000, 2_010)[0],
    *done("C", 3_000, 3_010),
    *done("A", 2_000, 4_400, attempt=2),
]
RECORDS = [
    record_of(1_000, A),
    record_of(2_000, A, attempt=2),
    record_of(3_000, C),
]
RECORDED = Recorded(owed_from_ms=500, until_ms=3_000, records=RECORDS)


def test_demo_finds_the_takeover() -> None:
    findings = find_out(COURSE, KILL, RECORDED, 1_000)
    assert findings.takeovers == [Takeover(2_000, "A", 2, RunState.FINISHED, 1_900)]
    assert findings.taken_over
    assert findings.runs == {"A": 2, "B": 0, "C": 1}
    assert (findings.scheduled, findings.finished) == (3, 3)
    assert (findings.doubled, findings.lost, findings.leases_lost) == ([], [], 0)
    assert demo.failure_of(findings, KILL) == ""
    lines = demo.summary(findings, KILL)
    assert "  instances    A 2 runs, B 0 runs (killed), C 1 run" in lines
    assert "  killed       B, in the middle of report 00:00:02" in lines
    assert "  taken over   report 00:00:02 by A, attempt 2, finished" in lines
    assert "  doubled      0" in lines
    assert "  lost         0" in lines


@pytest.mark.parametrize(
    ("more", "what"),
    [
        (done("C", 1_000, 9_000), "attempt granted twice"),
        (done("C", 9_000, 9_000, token=1_001), "token granted twice"),
        (done("C", 1_000, 9_000, attempt=2), "begun after it was finished"),
        (done("C", 2_000, 4_500, attempt=3), "two holders at a time"),
        (done("C", 2_000, 2_300, attempt=2), "two holders at a time"),
    ],
)
def test_demo_finds_what_is_doubled(more: list[Note], what: str) -> None:
    findings = find_out([*COURSE, *more], KILL, RECORDED, 1_000)
    assert [text for text in findings.doubled if what in text]
    assert demo.failure_of(findings, KILL).startswith("doubled")


def test_demo_does_not_count_a_lapsed_lease_as_doubled() -> None:
    lapsed = [Note("A", "began", 3_000, 9_000, 1, 1), Note("A", "lost", 5_100, 9_000, 1, 1)]
    findings = find_out(
        [*COURSE, *lapsed, *done("C", 9_000, 5_000, attempt=2)], KILL, RECORDED, 1_000
    )
    assert findings.doubled == []
    assert findings.leases_lost == 1
    assert any("leases lost" in line for line in demo.summary(findings, KILL))


@pytest.mark.parametrize("state", [None, RunState.RUNNING, RunState.WAITING])
def test_demo_finds_what_is_lost(state: Optional[RunState]) -> None:
    records = RECORDS[:2] if state is None else [*RECORDS[:2], record_of(3_000, C, state=state)]
    findings = find_out(COURSE, KILL, Recorded(500, 3_000, records), 1_000)
    assert findings.lost == [3_000]
    assert "00:00:03" in demo.failure_of(findings, KILL)


def test_demo_fails_without_a_takeover() -> None:
    nobody = [*READY, *done("A", 1_000, 1_010), done("B", 2_000, 2_010)[0]]
    left = Recorded(500, 2_000, [RECORDS[0], record_of(2_000, B, state=RunState.RUNNING)])
    findings = find_out(nobody, KILL, left, 1_000)
    assert not findings.taken_over
    assert "not taken over" in demo.failure_of(findings, KILL)
    assert any("by nobody" in line for line in demo.summary(findings, KILL))
    in_time = Recorded(500, 2_000, [RECORDS[0], record_of(2_000, B)])
    assert "had just ended" in demo.failure_of(find_out(nobody, KILL, in_time, 1_000), KILL)
    assert "no instance" in demo.failure_of(find_out(COURSE, None, RECORDED, 1_000), None)


def test_demo_leaves_out_lines_that_are_cut_off() -> None:
    assert read_note("A", b'{"event": "began", "at_ms": 1}\n') == Note("A", "began", 1)
    for line in (b'{"event": "beg', b"warning: odd\n", b"[]\n", b'{"x": 1}\n', b"\xff\n"):
        assert read_note("A", line) is None


# -- the demo's screen -----------------------------------------------------------------------------

FACTS = Facts(dict.fromkeys("ABC", 4_194_304), "report", 1, 1_500)


@pytest.mark.parametrize("rows", [5, 13])
@pytest.mark.parametrize("colour", [False, True])
def test_demo_table_fits_and_keeps_its_height(rows: int, *, colour: bool) -> None:
    board = Board(FACTS, Look(colour=colour, blocks=True), rows, 0)
    heights = set()
    for number, note in enumerate(
        [*COURSE, *done("C", 20_000, 20_000), *done("A", 90_000, 90_000)]
    ):
        board.note(note)
        if number == 10:
            board.kill(KILL, 4_194_304, [2_000])
        lines = board.lines(note.at_ms)
        heights.add(len(lines))
        assert ("\x1b" in "".join(lines)) is colour
        if not colour:
            assert max(width_of(line) for line in lines) <= 79
    assert heights == {rows + 9}


def test_demo_table_shows_who_runs_what() -> None:
    board = Board(FACTS, Look(colour=False, blocks=False), 13, 0)
    for note in COURSE[:-2]:
        board.note(note)
    board.kill(KILL, 7, [2_000])
    board.note(Note("A", "began", 4_000, 4_000, 1, 4_001))
    board.leave_out_after(3_000)
    text = "\n".join(board.lines(4_900))
    assert "00:00:04" not in text
    assert "00:00:01   ######## done" in text
    assert "00:00:02   ##...... attempt 2    ##x      KILLED" in text
    assert "alive, 1 run          KILLED, 0 runs        alive, 1 run" in text
    assert "B (pid 7) is killed with SIGKILL in the middle of report 00:00:02" in text
    assert "A took report 00:00:02 over as attempt 2" in text


def test_demo_lines_are_one_per_event(capsys: Output) -> None:
    lines = Lines(FACTS)
    for note in [*COURSE, Note("C", "lost", 9_000, 9_000, 1, 1)]:
        if note.attempt == 2 and note.event == "began":
            lines.kill(KILL, 7, [2_000])
        lines.note(note)
    lines.refresh(10_000)
    lines.close(10_000, None)
    out = capsys.readouterr().out.splitlines()
    assert out[:4] == [
        "A is ready (pid 4194304)",
        "B is ready (pid 4194304)",
        "C is ready (pid 4194304)",
        "A runs report 00:00:01",
    ]
    assert out[-4:] == [
        "B (pid 7) is killed with SIGKILL in the middle of report 00:00:02",
        "A took report 00:00:02 over as attempt 2, 1.9 s after the kill",
        "A finished report 00:00:02, attempt 2",
        "C lost its lease of report 00:00:09: this machine is busy",
    ]


def test_demo_takes_no_arguments(capsys: Output) -> None:
    demo.configure(argparse.ArgumentParser())
    failure(capsys, 2, "demo", "--fast")


# -- schema ----------------------------------------------------------------------------------------


def test_the_schema_of_a_database_is_printed_without_a_connection(capsys: Output) -> None:
    url = f"postgresql://user:{SECRET}@nowhere.invalid/db?schema=cron&table_prefix=own_"
    text = told(capsys, "schema", url)
    backend = PostgresLease("host=elsewhere", schema="cron", table_prefix="own_")
    assert text == backend.schema_sql()
    assert 'CREATE TABLE IF NOT EXISTS "cron".own_run (' in text
    assert not any(word in text for word in (SECRET, "nowhere", "leasecron_run", "{prefix}"))


def test_the_schema_of_a_file_makes_a_store_of_it(capsys: Output, tmp_path: Path) -> None:
    text = told(capsys, "schema", f"sqlite:///{tmp_path}/jobs.db")
    assert list(tmp_path.iterdir()) == [], "nothing is made"
    ids: list[str] = []
    for name in ("one.db", "two.db"):
        for _ in range(2):  # it may be run again
            with contextlib.closing(sqlite3.connect(tmp_path / name)) as connection:
                connection.executescript(text)
                rows = connection.execute("SELECT value FROM leasecron_meta WHERE name='store_id'")
                [(store_id,)] = rows.fetchall()
        backend = SQLiteLease(tmp_path / name)
        backend.open(BackendSettings("default", "me", 5_000))
        ids.append(backend.probe().store_id)
        backend.close()
        assert ids[-1] == store_id
    assert ids[0] != ids[1]


def test_what_keeps_no_tables_has_no_schema(
    capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "keeps no tables" in failure(capsys, 1, "schema", "memory://tests")
    monkeypatch.delenv("LEASECRON_SYNC_URL", raising=False)
    assert "there is no URL" in failure(capsys, 2, "schema")
    monkeypatch.setenv("LEASECRON_SYNC_URL", "sqlite:///jobs.db")
    assert "CREATE TABLE" in told(capsys, "schema")
