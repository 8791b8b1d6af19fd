"""Simulated histories: a fixed number of seeds, and what else may be relied on."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Optional

import pytest

from leasecron_sync.testing.simulation import strands
from leasecron_sync.testing.simulation.campaign import profiles_for, shortened
from leasecron_sync.testing.simulation.plan import Plan, from_json
from leasecron_sync.testing.simulation.planner import plan_of
from leasecron_sync.testing.simulation.play import Result, play
from leasecron_sync.testing.simulation.profiles import PROFILES
from leasecron_sync.testing.simulation.stores import load
from leasecron_sync.testing.simulation.violation import STILL_DOWN
from tests.simulation.planted import Planted, all_planted, planted, play_planted

ROOT = Path(__file__).parents[2]
LONG = bool(os.environ.get("LEASECRON_SYNC_LONG"))

MEMORY_SEEDS = 400 if LONG else 14
SQLITE_SEEDS = 60 if LONG else 3
PLANTED_SEEDS = 2_000 if LONG else 30

LATE = frozenset(
    {
        "the newest owed one is forgotten",
        "a set back clock repeats the agenda",
        "a removed job is looked back over",
        "a stopping instance starts what it is granted",
        "spec: pruned_to is ignored",
        "spec: a settled run is settled anew",
        "spec: a waiting run first",
    }
)
"""Planted faults that take more histories than the suite plays, and fewer than two thousand."""


def played(seed: int, profile: str, backend: str = "memory", *, verbose: bool = False) -> Result:
    plan = plan_of(seed, profile)
    return play(plan, load(backend)[plan.family], verbose=verbose)


def share(profile: str, seeds: int) -> int:
    """Return how many seeds of a profile are played; those that take long get fewer."""
    return max(2, seeds * PROFILES[profile].weight // 2 // (4 if PROFILES[profile].pruned else 1))


def play_seeds(profile: str, backend: str, seeds: int) -> None:
    handlers = 0
    for seed in range(seeds):
        result = played(seed, profile, backend)
        assert result.violation is None, f"--profile {profile} --seed {seed}: {result.violation}"
        handlers += result.counts.get("handlers", 0)
    assert handlers > 5 * seeds


@pytest.mark.timeout(0)
@pytest.mark.parametrize("profile", PROFILES)
def test_whatever_goes_wrong_nothing_is_doubled_lost_or_left(profile: str) -> None:
    play_seeds(profile, "memory", share(profile, MEMORY_SEEDS))


@pytest.mark.timeout(0)
@pytest.mark.parametrize("profile", profiles_for(load("sqlite")))
def test_the_same_holds_on_a_file(profile: str) -> None:
    play_seeds(profile, "sqlite", share(profile, SQLITE_SEEDS))


@pytest.mark.parametrize(
    ("profile", "backend", "seed"),
    [
        pytest.param("clocks", "sqlite", 2_414_932, id="handed over beside a standing clock"),
        pytest.param("deploys", "memory", 2_815_329, id="begins late beside what a deploy allowed"),
    ],
)
def test_a_rule_that_was_too_strict_accuses_nothing_any_more(
    profile: str, backend: str, seed: int
) -> None:
    assert played(seed, profile, backend).violation is None


def test_histories_do_happen_what_they_are_about() -> None:
    """A profile whose happenings stopped happening would find nothing, and say so never."""
    seen: dict[str, int] = {}
    for profile in PROFILES:
        for seed in range(2):
            for name, number in played(seed, profile).counts.items():
                seen[name] = seen.get(name, 0) + number
    wanted = {name for profile in PROFILES.values() for name in profile.happenings} | {
        "slow", "request lost", "reply lost", "late", "twice", "takeovers", "run_retried",
        "run_handed_over", "run_skipped", "run_missed", "run_failed",
    }  # fmt: skip
    rare = {"fork", "emptied", "store back", "restart", "deploy"}
    assert {name for name in wanted - rare if not seen.get(name)} == set()


# -- determinism -----------------------------------------------------------------------------------

DIGEST = """\
import hashlib, sys
from leasecron_sync.testing.simulation.planner import plan_of
from leasecron_sync.testing.simulation.play import play
from leasecron_sync.testing.simulation.stores import load
for profile, seed in (("storm", 3), ("deploys", 4), ("claim-crashes", 5)):
    plan = plan_of(seed, profile)
    result = play(plan, load("memory")[plan.family], verbose=True)
    text = plan.as_json() + "\\n".join(result.timeline)
    print(hashlib.sha256(text.encode()).hexdigest())
"""


def test_a_seed_decides_everything_in_every_process() -> None:
    found = set()
    for hash_seed in ("0", "1", "77"):
        result = subprocess.run(
            [sys.executable, "-c", DIGEST],
            capture_output=True,
            text=True,
            check=True,
            cwd=ROOT,
            env={**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(ROOT)},
        )
        found.add(tuple(result.stdout.split()))
    assert len(found) == 1
    (digests,) = found
    assert len(set(digests)) == 3


def test_a_history_is_the_same_with_and_without_a_timeline() -> None:
    plain, verbose = (played(7, "storm", verbose=verbose) for verbose in (False, True))
    assert plain.counts == verbose.counts
    assert plain.simulated_ms == verbose.simulated_ms
    assert not plain.timeline
    assert verbose.timeline


def test_a_plan_that_was_written_to_a_file_is_the_same_history() -> None:
    plan = plan_of(11, "deploys")
    read = from_json(plan.as_json())
    assert read == plan
    assert play(read, load("memory")["lease"]).counts == played(11, "deploys").counts


# -- planted faults --------------------------------------------------------------------------------


def test_planted_faults_that_come_late_exist() -> None:
    assert {fault.name for fault in all_planted()} > LATE


@pytest.mark.timeout(0)
@pytest.mark.parametrize(
    "fault",
    [fault for fault in all_planted() if LONG or fault.name not in LATE],
    ids=lambda fault: fault.name,
)
def test_a_planted_fault_is_found(fault: Planted, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strands, "STUCK_S", 1.0)  # one of them waits for a lock for so long
    assert any(play_planted(fault, seed) is not None for seed in range(PLANTED_SEEDS)), fault.text


# -- shortening ------------------------------------------------------------------------------------


def fault_named(name: str) -> Planted:
    (found,) = (fault for fault in all_planted() if fault.name == name)
    return found


def first_failure(fault: Planted) -> Plan:
    for seed in range(100):
        violation = play_planted(fault, seed)
        if violation is not None:
            return plan_of(seed, fault.profile)
    pytest.fail(f"{fault.name} is not found")


@pytest.mark.timeout(0)
@pytest.mark.parametrize(
    ("name", "most"),
    [("trust from the reply to a renewal", 14), ("nothing ends an outage", 12)],
)
def test_a_history_that_fails_is_shortened_to_what_it_takes(name: str, most: int) -> None:
    fault = fault_named(name)
    plan = first_failure(fault)
    make_store = load("memory")[plan.family]
    with planted(fault):
        result = shortened(plan, make_store, 250)
        assert result is not None
        assert result.violation is not None
        assert result.plan.size <= min(most, plan.size // 4)
        again = play(from_json(result.plan.as_json()), make_store)
        assert again.violation is not None
        assert again.violation.kind == result.violation.kind
    assert play(result.plan, make_store).violation is None
    assert len(result.timeline) > 5


def test_what_does_not_fail_is_not_shortened() -> None:
    assert shortened(plan_of(0, "mild"), load("memory")["lease"]) is None


def test_a_violation_names_its_rule_and_shows_the_entries() -> None:
    fault = fault_named("one decision for all")
    violation = play_planted(fault, 0)
    assert violation is not None
    assert str(violation).startswith(violation.kind)
    assert violation.entries
    assert play_planted(fault_named("nothing ends an outage"), 0) is not None
    assert STILL_DOWN


# -- the command line ------------------------------------------------------------------------------


def simulate(*arguments: str, cwd: Optional[Path] = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "simulate.py"), *arguments],
        capture_output=True,
        text=True,
        check=False,
        cwd=cwd or ROOT,
        env={**os.environ, "PYTHONPATH": str(cwd or ROOT)},
    )


def test_a_campaign_prints_a_table_and_succeeds() -> None:
    result = simulate("--runs", "14", "--processes", "2")
    assert result.returncode == 0, result.stderr
    assert "14 histories on memory" in result.stdout
    assert "0 violations" in result.stdout
    assert "storm" in result.stdout
    assert "handlers executed" in result.stdout
    assert "14 of 14 histories" in result.stderr


def test_one_history_is_shown_with_all_that_happens() -> None:
    result = simulate("--profile", "crashes", "--seed", "3", "--runs", "1", "--verbose")
    assert result.returncode == 0
    assert "calls claim" in result.stdout
    assert "no violation" in result.stdout


def test_profiles_are_listed() -> None:
    result = simulate("--profiles")
    assert result.returncode == 0
    assert {line.split()[0] for line in result.stdout.splitlines()} == set(PROFILES)


def test_a_kept_history_is_played_again(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(replace(plan_of(1, "mild"), storm_ms=3_000).as_json(), encoding="utf-8")
    result = simulate("--replay", str(path))
    assert result.returncode == 0
    assert "no violation" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("--backend", "postgres"), "unknown backend 'postgres'"),
        (("--backend", "nowhere:factory"), "cannot be loaded"),
        (("--backend", "json:loads"), "json:loads"),
        (("--backend", "json:nothing"), "cannot be loaded"),
        (("--backend", "sqlite", "--profile", "claim-storm"), "cannot play it"),
        (("--backend", "sqlite", "--family", "claim"), "none of this family"),
        (("--runs", "0"), "at least 1"),
        (("--profile", "sunshine"), "invalid choice"),
        (("--replay", "/nowhere/plan.json"), "--replay /nowhere/plan.json: No such file"),
        (("--replay", str(ROOT / "setup.cfg")), "setup.cfg: this is not a plan"),
        (("--replay", sys.executable), "it is no text in UTF-8"),
        (("--keep", "/nowhere", "--runs", "1"), "--keep /nowhere: no such folder, make it"),
        (("--verbose",), "--verbose shows one history: give --runs 1"),
        (("--planted", "--backend", "sqlite"), "leave out --backend sqlite"),
    ],
)
def test_bad_input_gets_one_clear_line(arguments: tuple[str, ...], complaint: str) -> None:
    result = simulate(*arguments)
    assert result.returncode == 2
    assert complaint in result.stderr.splitlines()[-1]
    assert "Traceback" not in result.stderr


FACTORY = """\
from leasecron_sync.backends.memory import MemoryLease


class Forgetful(MemoryLease):
    def renew(self, leases, lease_ms):
        if not FAULTY:
            return super().renew(leases, lease_ms)
        # It says yes, and forgets what it was asked.
        return ["renewed" and __import__("leasecron_sync.model").model.RenewReply.RENEWED] * len(
            leases
        )


def factory(name, clock):
    backend = Forgetful(name)
    backend._now_ms = clock
    return backend
"""


@pytest.mark.parametrize("faulty", [False, True])
def test_authors_of_other_backends_attack_theirs_with_one_command(
    tmp_path: Path, *, faulty: bool
) -> None:
    source = FACTORY.replace("FAULTY", str(faulty))
    (tmp_path / "mine.py").write_text(source, encoding="utf-8")
    arguments = ("--backend", "mine:factory", "--runs", "4", "--effort", "40")
    result = simulate(*arguments, "--keep", str(tmp_path), "--fail-fast", cwd=tmp_path)
    assert result.returncode == int(faulty), result.stdout + result.stderr
    assert "stores that lose their data are left out" in result.stdout
    if faulty:
        assert "shortened from" in result.stdout
        assert ", 1 violations" in result.stdout
        kept, *_ = sorted(tmp_path.glob("leasecron-*.json"))
        again = simulate("--backend", "mine:factory", "--replay", str(kept), cwd=tmp_path)
        assert again.returncode == 1
        assert hashlib.sha256(kept.read_bytes()).hexdigest()
        kept.unlink()
        kept.mkdir()
        result = simulate(*arguments, "--keep", str(tmp_path), "--fail-fast", cwd=tmp_path)
        assert result.returncode == 1
        assert "it could not be kept: " in result.stdout
        assert result.stdout.index("shortened from") < result.stdout.index("it could not be kept")
        assert "violations:" in result.stdout
