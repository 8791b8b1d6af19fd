"""scripts/check_history.py: the verdict on recorded histories, for people and for programs."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import stat
import subprocess
import sys
import textwrap
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from leasecron_sync.testing import Entry
from tests.unit import histories
from tests.unit.closed_pipe import into_a_closed_pipe
from tests.unit.histories import BEGIN_MS, Stage

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts/check_history.py"
ONE_MS = BEGIN_MS + 30_000


def _script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_history", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and named tuples look their module up
    spec.loader.exec_module(module)
    return module


script = _script()


def saved(path: Path, entries: Iterable[Entry]) -> str:
    path.write_text("".join(f"{entry.to_line()}\n" for entry in entries), encoding="ascii")
    return str(path)


def judged(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    status = script.main(list(arguments))
    out, err = capsys.readouterr()
    return status, out, err


def started_again(stage: Stage) -> list[Entry]:
    """The first run starts once more when it was finished."""
    start = next(entry for entry in stage.outside if entry.what == "started")
    last = stage.outside[-1]
    steady_ms = (last.steady_ms or 0) + 1_000
    late = start._replace(at_ms=last.at_ms + 1_000, sent_ms=last.at_ms + 1_000, steady_ms=steady_ms)
    return [*stage.outside, late]


def test_a_clean_history_is_called_clean(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = saved(tmp_path / "log", histories.paused().outside)
    status, out, err = judged(capsys, path)
    assert (status, err) == (0, "")
    assert out == textwrap.dedent(
        """\
        FIGURE            NUMBER  REMARK
        entries               29
        lines cut              0
        instances              2
        calls unanswered       0
        runs                   1
          finished             1
          failed               0
          skipped              0
          unsettled            0
        grants                 2
          takeovers            1
          handed over          0
          fenced               1  settlements refused, since the token was an old one
        executions             2
          once more            1  beyond the first of their run, whatever for

        doubled                0
        lost                   -  --owed asks
        other faults           0

        Nothing is wrong.
        """
    )


def test_a_fault_is_shown_with_its_entries(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = saved(tmp_path / "log", started_again(histories.plain()))
    status, out, err = judged(capsys, path)
    assert (status, err) == (1, "")
    table, fault = out.split("\n\n1. ")
    assert "doubled                1" in table
    rows = table.splitlines()[-2:]
    assert rows[0].split() == [
        "JOB", "SCHEDULED", "TIME", "STATE", "GRANTS", "RAN", "TAKEN", "OVER", "ENDINGS", "WRONG",
    ]  # fmt: skip
    assert rows[1].split()[:6] == ["job", "2023-11-14T22:14:00Z", "finished", "1", "1", "0"]
    assert rows[1].endswith("started after its finish")
    lines = fault.splitlines()
    assert lines[0] == (
        "started after its finish: 'job' 2023-11-14T22:14:00Z attempt 1 was started after the run "
        "was finished"
    )
    assert [line.split()[0] for line in lines[1:5]] == ["MS", "0", "2,000", "123,000"]
    assert [line.rpartition("22:14:00Z  ")[2].split(",")[0] for line in lines[2:5]] == [
        "claim: granted",
        "settlement under token 1700000040000 (finished): accepted",
        "handler starts",
    ]
    assert lines[-1] == "1 fault."


def test_several_logs_are_one_history(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stage = histories.taken_over()
    instances = sorted({entry.instance for entry in stage.outside if entry.instance})
    paths = [
        saved(tmp_path / f"{name}.log", [x for x in stage.outside if x.instance == name])
        for name in instances
    ]
    status, out, _err = judged(capsys, *paths, "--runs")
    assert status == 0
    assert "taken over, finished" in out
    # The run was due before the second log begins, so nobody misses its first attempt there.
    assert [judged(capsys, path)[0] for path in paths] == [0, 0]


def test_the_verdict_can_be_read_by_a_program(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = saved(tmp_path / "log", started_again(histories.plain()))
    status, out, err = judged(capsys, path, "--json", "--runs")
    assert (status, err) == (1, "")
    found: dict[str, Any] = json.loads(out)
    assert found["totals"]["doubled"] == 1
    assert found["totals"]["cut"] == 0
    assert [run["faults"] for run in found["runs"]] == [["started after its finish"], [], []]
    [fault] = found["faults"]
    assert fault["doubled"] is True
    assert fault["scheduled_time"] == "2023-11-14T22:14:00+00:00"
    entries = [Entry.from_line(json.dumps(entry)) for entry in fault["entries"]]
    assert [entry.what for entry in entries] == ["claimed", "settled", "started"]


def test_one_job_can_be_judged_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wrong = [
        entry._replace(job="other") if entry.job else entry
        for entry in started_again(histories.plain())
    ]
    path = saved(tmp_path / "log", [*histories.plain().outside, *wrong])
    assert judged(capsys, path)[0] == 1
    assert judged(capsys, path, "--job", "other")[0] == 1
    status, out, _err = judged(capsys, path, "--job", "job", "--runs")
    assert status == 0
    assert "other  " not in out


# -- what is owed ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("owed", "lost"),
    [
        ("job=* * * * *", 0),  # to a minute before the end
        ("job=every 60 s", 0),
        ("job=every 60s@2023-11-14T22:13:00Z..2023-11-14T22:16:00Z", 1),
        ("job=* * * * *@..2023-11-14T22:17:00Z", 1),
        ("job=* * * * *@2023-11-14T22:12:00Z..", 2),
        ("job=at 2023-11-14T22:14:00Z", 0),
        ("job=at 2023-11-14T22:14:01Z", 1),
        ("job=@hourly@2023-11-14T22:00:00+00:00..2023-11-14T22:59:00Z", 1),
        ("a=b=* * * * *@2023-11-14T22:14:00Z..2023-11-14T22:15:00Z", 2),
    ],
)
def test_owed_runs_without_a_record_are_lost(
    owed: str, lost: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = saved(tmp_path / "log", histories.plain().outside)
    status, out, err = judged(capsys, path, "--owed", owed)
    assert (status, err) == (1 if lost else 0, "")
    assert re.search(rf"^lost +{lost}  of [1-9]\d* owed$", out, re.MULTILINE)
    assert out.count("the history holds nothing about it") == lost


def test_the_schedule_of_what_is_owed_has_a_zone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = saved(tmp_path / "log", histories.plain().outside)
    owed = "job=14 0 * * *@2023-11-14T22:00:00Z..2023-11-14T23:00:00Z"
    assert judged(capsys, path, "--owed", owed, "--timezone", "Europe/Athens")[0] == 0
    wrong = owed.replace("14 0", "13 0")
    assert judged(capsys, path, "--owed", wrong)[0] == 2  # none in there
    assert judged(capsys, path, "--owed", wrong, "--timezone", "Europe/Athens")[0] == 1


def test_what_is_owed_is_counted_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = saved(tmp_path / "log", histories.plain().outside)
    span = "job=every 60 s@2023-11-14T22:13:00Z..2023-11-14T22:16:00Z"
    once = judged(capsys, path, "--owed", span)
    assert "lost                   1  of 4 owed" in once[1]
    assert judged(capsys, path, "--owed", span, "--owed", span) == once


def test_runs_that_must_be_settled_by_now_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = saved(tmp_path / "log", histories.killed().outside)
    assert judged(capsys, path)[0] == 0
    assert judged(capsys, path, "--until", "2023-11-14T22:14:00Z")[0] == 0
    status, out, _err = judged(capsys, path, "--until", "2023-11-14T22:14:01Z")
    assert status == 1
    assert "1. left unsettled: 'job' 2023-11-14T22:14:00Z is left unsettled" in out
    assert "handler starts" in out  # all that is known of the run


def test_no_more_faults_are_shown_than_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = saved(tmp_path / "log", histories.plain().outside)
    span = "job=every 1 s@2023-11-14T22:14:01Z..2023-11-14T22:14:20Z"
    status, out, _err = judged(capsys, path, "--owed", span, "--limit", "3")
    assert status == 1
    assert out.endswith("17 more faults are not shown: raise --limit.\n20 faults.\n")
    assert "3. lost" in out
    assert "4. lost" not in out


def test_clocks_that_are_apart_are_forgiven_when_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The host is 2 s behind the store that granted its runs."""
    entries = [
        entry._replace(at_ms=entry.at_ms - 2_000, sent_ms=entry.sent_ms - 2_000)
        for entry in histories.plain().outside
    ]
    path = saved(tmp_path / "log", entries)
    status, out, _err = judged(capsys, path)
    assert status == 1
    assert "was granted 2000 ms before it was due" in out
    assert judged(capsys, path, "--skew-ms", "2000")[0] == 0


# -- what is no history ----------------------------------------------------------------------------


def test_an_empty_history_gets_no_verdict(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = saved(tmp_path / "log", [])
    message = f"check_history: the history is empty: no entry in {path}\n"
    for more in ([], ["--json"], ["--owed", "job=* * * * *"]):
        assert judged(capsys, path, *more) == (2, "", message)


def test_a_log_that_is_named_twice_is_read_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = saved(tmp_path / "log", histories.plain().outside)
    (tmp_path / "link").symlink_to(path)
    once = judged(capsys, path)
    assert once[0] == 0
    assert judged(capsys, path, path, str(tmp_path / "link")) == once


def test_what_a_killed_process_left_is_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "log"
    saved(path, histories.plain().outside)
    path.write_text(path.read_text()[:-9])
    status, out, _err = judged(capsys, str(path))
    assert status == 0
    assert "lines cut              1  left by processes that were killed inside a write" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["none"], "none: No such file or directory"),
        (["{log}", "--job", "lunch"], "--job: the history knows no job 'lunch'"),
        (["{log}", "--owed", "job"], "--owed takes JOB=SCHEDULE or JOB=SCHEDULE@FROM..TO, not"),
        (["{log}", "--owed", "=* * * * *"], "--owed takes JOB=SCHEDULE"),
        (["{log}", "--owed", "job=lunch"], "--owed: "),
        (["{log}", "--owed", "job=every 0 s"], "--owed: "),
        (["{log}", "--owed", "job=at lunch"], "not in the form of ISO 8601"),
        (["{log}", "--owed", "job=* * * * *@lunch.."], "not in the form of ISO 8601"),
        (["{log}", "--owed", "job=* * * * *@2026-01-01T00:00:00.."], "has no offset"),
        (
            ["{log}", "--owed", "job=0 0 1 1 *@2023-11-14T22:13:00Z..2023-11-14T22:16:00Z"],
            "'job' lies between 2023-11-14T22:13:00Z and 2023-11-14T22:16:00Z: give @FROM..TO",
        ),
        (["{log}", "--owed", "lunch=* * * * *"], "since when 'lunch' is owed: give @FROM..TO"),
        (
            ["{log}", "--owed", "job=* * * * *@2030-01-01T00:00:00Z.."],
            "its last minute left out for runs under way: give @FROM..TO",
        ),
        (["{log}", "--owed", "job=every 1 s@2000-01-01T00:00:00Z.."], "more than 100,000"),
        (["{log}", "--timezone", "Mars", "--owed", "job=* * * * *"], "--owed: "),
        (["{log}", "--until", "lunch"], "--until: 'lunch' is not in the form"),
        (["{log}", "--limit", "-1"], "--limit must be a whole number from 0 on, not '-1'"),
        (["{log}", "--skew-ms", "x"], "--skew-ms must be a whole number from 0 on, not 'x'"),
    ],
)
def test_a_mistake_is_one_line(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = saved(tmp_path / "log", histories.plain().outside)
    status, out, err = judged(capsys, *(text.format(log=log) for text in arguments))
    assert (status, out) == (2, "")
    assert err.startswith("check_history: ")
    assert message in err
    assert err.count("\n") == 1


def test_a_line_that_is_none_is_named_with_its_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "log"
    entry = histories.plain().outside[0].to_line()
    path.write_text(f"{entry}\nlunch\n{entry}\n")
    status, out, err = judged(capsys, str(path))
    assert (status, out) == (2, "")
    assert err == f"check_history: {path}, line 2: no entry of a history\n"


def test_without_a_file_the_usage_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        script.main([])
    assert left.value.code == 2
    assert "usage: check_history FILE ..." in capsys.readouterr().err
    with pytest.raises(SystemExit) as left:
        script.main(["--help"])
    assert left.value.code == 0
    assert "--skew-ms N" in capsys.readouterr().out


def test_odd_names_stay_on_their_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    odd = "job\n\x1b[2J\u202e \\ \ud800"
    entries = [
        entry._replace(job=odd) if entry.job else entry
        for entry in started_again(histories.plain())
    ]
    status, out, _err = judged(capsys, saved(tmp_path / "log", entries), "--runs")
    assert status == 1
    assert "\x1b" not in out
    assert "\u202e" not in out
    assert "job\\n\\x1b[2J\\u202e \\\\ \\ud800" in out


def test_an_interrupted_script_ends_quietly(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_files: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(script, "read_history", interrupt)
    assert judged(capsys, saved(tmp_path / "log", [])) == (130, "", "")


def test_the_script_can_be_called_from_anywhere(tmp_path: Path) -> None:
    assert SCRIPT.stat().st_mode & stat.S_IXUSR
    path = saved(tmp_path / "log", started_again(histories.plain()))
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    called = subprocess.run(
        [sys.executable, str(SCRIPT), path],
        cwd=tmp_path,
        env={**environment, "LC_ALL": "C"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (called.returncode, called.stderr) == (1, "")
    assert "doubled                1" in called.stdout


def test_a_reader_that_goes_away_is_no_error(tmp_path: Path) -> None:
    path = saved(tmp_path / "log", histories.plain().outside)
    assert into_a_closed_pipe(str(SCRIPT), path, "--runs") == (b"", 141)
