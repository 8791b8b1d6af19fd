"""The fault campaign, as its users call it: some seconds of it, and that its judge can fail.

An ordinary build plays it on an SQLite file, and on PostgreSQL until Ctrl-C.
``LEASECRON_SYNC_LONG=1`` in the environment plays a minute on every store.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from scripts._faults_instance import PLANTED
from scripts._faults_plan import LEASES, STORES
from tests.faults.processes import LONG, ROOT
from tests.services.keeper import below
from tests.services.process import eventually

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

often = pytest.mark.skipif(not LONG, reason="only with LEASECRON_SYNC_LONG=1")
LIMIT_S = 200.0
WRONG = 1
INTERRUPTED = 130
SHORT = ("--minutes", "0.08", "--seed", "17")  # a kill, a SIGSTOP, and a file that is locked
FAULTS = 6
"""After so many an ordinary build has seen enough of a server."""


@pytest.fixture(autouse=True)
def servers(request: pytest.FixtureRequest) -> None:
    """Skip what needs a server where that is asked for."""
    if request.config.getoption("--without-services") and "sqlite" not in request.node.name:
        pytest.skip("left out with --without-services")


def start(*arguments: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(ROOT / "scripts" / "faults.py"), *map(str, arguments)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def end(process: subprocess.Popen[str], status: int) -> str:
    """Wait for the end and return what was shown."""
    try:
        out, err = process.communicate(timeout=LIMIT_S)
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()
    assert process.returncode == status, f"{out[-6_000:]}\n{err[-2_000:]}"
    return out


def figures(shown: str, names: Sequence[str]) -> dict[str, int]:
    """Return numbers of the table by their names."""
    found: dict[str, int] = {}
    for line in shown.splitlines():
        for name in names:
            if line.strip().startswith(f"{name}  "):
                found[name] = int(line.strip()[len(name) :].split()[0].replace(",", ""))
    return found


def judged_well(shown: str, least: int) -> None:
    totals = figures(shown, ["executions", "doubled", "lost", "other faults", "all"])
    assert totals.pop("executions") >= least
    assert totals.pop("all") > 4
    assert totals == {"doubled": 0, "lost": 0, "other faults": 0}
    assert shown.endswith("Nothing is wrong.\n")


def test_what_seconds_of_faults_do_to_an_sqlite_file_doubles_and_loses_nothing(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "kept"
    shown = end(start("--store", "sqlite", *SHORT, "--folder", folder), 0)
    judged_well(shown, 8)
    told = [json.loads(line) for line in (folder / "faults.jsonl").read_text().splitlines()]
    begun = [one["reason"] for one in told if one.get("event") == "fault_begins"]
    planned = json.loads((folder / "plan.json").read_text())["injections"]
    assert len(begun) == len(planned), "each is in the history"


def test_ctrl_c_ends_it_judges_what_there_is_and_leaves_no_process() -> None:
    process = start("--store", "postgres", "--minutes", "5", "--seed", "141")
    assert process.stderr is not None
    try:
        begun = 0
        while begun < FAULTS and (line := process.stderr.readline()):
            begun += " s of 300: " in line
        children = below(process.pid)
        assert len(children) > 5
        os.kill(process.pid, signal.SIGINT)
    except BaseException:
        process.kill()
        raise
    judged_well(end(process, INTERRUPTED), 5)
    assert eventually(lambda: not [pid for pid in children if Path(f"/proc/{pid}").exists()], 10)


@often
@pytest.mark.parametrize("store", STORES)
def test_a_minute_of_faults_doubles_and_loses_nothing(store: str) -> None:
    judged_well(end(start("--store", store, "--seed", "1"), 0), 50)


@often
@pytest.mark.parametrize("store", LEASES)
def test_deploys_across_scheduled_times_double_and_lose_nothing(store: str) -> None:
    shown = end(start("--store", store, "--only", "deploys", "--restarts", "60"), 0)
    judged_well(shown, 120)
    assert figures(shown, ["scheduled times with a restart"]) == {
        "scheduled times with a restart": 60
    }


@pytest.mark.parametrize(
    ("planted", "store"),
    [
        ("greedy", "sqlite"),
        *(
            pytest.param(name, store, marks=often)
            for name in PLANTED
            for store in ("sqlite", "redis", "redis-script", "nats")
        ),
    ],
)
def test_instances_that_break_the_rules_are_found_out(planted: str, store: str) -> None:
    minutes = "0.2" if LONG else "0.1"  # chance, or each fifth second, leaves runs out
    shown = end(
        start("--store", store, "--minutes", minutes, "--planted", planted, "--only", "stop short"),
        WRONG,
    )
    totals = figures(shown, ["doubled", "lost"])
    assert totals["doubled" if planted == "greedy" else "lost"] > 0
    assert "\n1. " in shown, "it shows why"
    folder = Path(shown.split("The plan and the histories are in ")[1].strip())
    shutil.rmtree(folder)
