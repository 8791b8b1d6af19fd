#!/usr/bin/env python3
"""Attack a backend and the engine in simulated histories.

scripts/simulate.py                             500 histories, the profiles take turns, in memory
scripts/simulate.py --runs 100000 --processes 2 a campaign
scripts/simulate.py --backend sqlite            on a real file
scripts/simulate.py --backend MODULE:FACTORY    on the backend of another author
scripts/simulate.py --profile storm --seed 17 --runs 1 --verbose
                                                one history, with all that happens in it
scripts/simulate.py --replay FILE               a shortened history that was kept
scripts/simulate.py --profiles                  what there is to choose from
scripts/simulate.py --planted                   how soon planted faults are found, of this checkout

Every history follows from its seed and its profile. A violation is shortened, shown, and kept in a
file; the status is 1 if there was one. A factory is called as factory(name, clock) and returns a
backend on the store of that name, which decides by clock() alone; see
leasecron_sync.testing.simulation.stores.load.
"""

from __future__ import annotations

import argparse
import functools
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Optional

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # this checkout, not a version that is installed
sys.path.append(str(Path.cwd()))  # where an author's own backend may be

from leasecron_sync.cli.output import one_line  # noqa: E402 - see above
from leasecron_sync.testing.simulation.campaign import (  # noqa: E402
    CHUNK,
    Found,
    Tally,
    jobs,
    play_all,
    profiles_for,
    shortened,
)
from leasecron_sync.testing.simulation.plan import Plan, from_json  # noqa: E402
from leasecron_sync.testing.simulation.planner import make_plan  # noqa: E402
from leasecron_sync.testing.simulation.play import Result, play  # noqa: E402
from leasecron_sync.testing.simulation.profiles import PROFILES  # noqa: E402
from leasecron_sync.testing.simulation.shorten import MAX_PLAYS  # noqa: E402
from leasecron_sync.testing.simulation.stores import MakeStore, StoreError, left_out, load  # noqa: E402
from scripts._environment import use_environment  # noqa: E402

MOST_SHORTENED: Final = 5
"""Violations that are shortened in one campaign, one of each kind."""

COUNTS: Final = (
    ("instances started", "starts"),
    ("handlers executed", "handlers"),
    ("grants", "grants"),
    ("takeovers", "takeovers"),
    ("runs handed over", "run_handed_over"),
    ("runs retried", "run_retried"),
    ("runs finished", "run_finished"),
    ("runs failed", "run_failed"),
    ("runs skipped", "run_skipped"),
    ("runs missed", "run_missed"),
    ("leases lost", "run_lost"),
    ("calls of the store", "calls"),
    ("  slow", "slow"),
    ("  request lost", "request lost"),
    ("  request lost, arrived late", "late"),
    ("  reply lost", "reply lost"),
    ("  request arrived twice", "twice"),
    ("  failed at once", "refused"),
    ("  refused once", "rejected"),
    ("outages of one instance", "down"),
    ("outages of all", "all down"),
    ("stores that lost their data", "emptied"),
    ("commands refused for a while", "reject"),
    ("kills", "kill"),
    ("processes stopped (SIGSTOP)", "pause"),
    ("hosts suspended", "suspend"),
    ("stops", "stop"),
    ("restarts in one process", "restart"),
    ("forks", "fork"),
    ("deploys to an instance", "deploy"),
    ("steps of the store's clock", "store step"),
    ("  back by seconds", "store back"),
    ("steps of a host's clock", "host step"),
    ("spans without threads", "no threads"),
)


def main(arguments: Optional[Sequence[str]] = None) -> int:
    given = parser().parse_args(arguments)
    try:
        if given.profiles:
            return show_profiles()
        if given.planted:
            return show_planted(given)
        makers = load(given.backend)
        if given.replay is not None:
            return replay(given.replay, makers)
        return campaign(given, makers)
    except (StoreError, ValueError, OSError) as error:
        print(f"simulate: {one_line(str(error))}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nsimulate: ended by Ctrl-C", file=sys.stderr)
        return 130


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--seed", type=int, default=0, help="first seed (default: 0)")
    made.add_argument("--runs", type=positive, default=500, help="histories (default: 500)")
    made.add_argument(
        "--backend", default="memory", help="memory (default), sqlite, or MODULE:FACTORY"
    )
    made.add_argument("--family", choices=("lease", "claim"), help="profiles of one family alone")
    made.add_argument(
        "--profile", action="append", choices=list(PROFILES), help="may be given several times"
    )
    made.add_argument("--processes", type=positive, default=1, help="processes (default: 1)")
    made.add_argument("--fail-fast", action="store_true", help="end at the first violation")
    made.add_argument("--verbose", action="store_true", help="show all that happens")
    made.add_argument(
        "--keep",
        type=Path,
        default=Path(tempfile.gettempdir()),
        help="folder for shortened histories (default: the temporary one)",
    )
    made.add_argument(
        "--effort",
        type=positive,
        default=MAX_PLAYS,
        help=f"histories played to shorten one (default: {MAX_PLAYS})",
    )
    made.add_argument("--replay", type=Path, help="play a history that was kept")
    made.add_argument(
        "--planted",
        action="store_true",
        help="look for planted faults, each in up to --runs histories",
    )
    made.add_argument("--profiles", action="store_true", help="list the profiles")
    return made


def positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        message = f"{text!r} is not a whole number of at least 1"
        raise argparse.ArgumentTypeError(message)
    return int(text)


def show_profiles() -> int:
    for profile in PROFILES.values():
        print(f"{profile.name:14} {profile.family:6} {profile.text}")
    return 0


def show_planted(given: argparse.Namespace) -> int:
    if given.backend != "memory":
        message = f"--planted plays in memory: leave out --backend {given.backend}"
        raise ValueError(message)
    from tests.simulation.planted import Finding, all_planted, look_for  # noqa: PLC0415 - tests

    most = given.runs
    faults = {fault.name: fault for fault in all_planted()}
    work = functools.partial(look_for, most=most)
    print(f"{'planted fault':52}{'profile':14}{'found in':>9}  kind of violation")
    missed = 0

    def show_one(finding: Finding) -> None:
        nonlocal missed
        missed += finding.histories is None
        number = "-" if finding.histories is None else f"{finding.histories:,}"
        fault = faults[finding.fault]
        print(f"{fault.name[:50]:52}{fault.profile:14}{number:>9}  {finding.kind}", flush=True)

    if given.processes == 1:
        for name in faults:
            show_one(work(name))
    else:
        with multiprocessing.get_context("spawn").Pool(given.processes) as pool:
            for finding in pool.imap(work, faults):
                show_one(finding)
    print(f"{len(faults) - missed} of {len(faults)} found within {most:,} histories each")
    return 1 if missed else 0


def chosen(given: argparse.Namespace, makers: dict[str, MakeStore]) -> list[str]:
    """Return the names of the profiles that were asked for."""
    able = profiles_for(makers, given.family)
    names = given.profile or able
    wrong = [name for name in names if name not in able]
    if wrong or not names:
        message = (
            f"--profile {' '.join(wrong)}: backend {given.backend} cannot play it; it can play: "
            f"{', '.join(able) or 'none of this family'}"
        )
        raise ValueError(message)
    return list(names)


def campaign(given: argparse.Namespace, makers: dict[str, MakeStore]) -> int:
    names = chosen(given, makers)
    todo = jobs(given.seed, given.runs, names)
    if given.verbose:
        if given.runs != 1:
            message = "--verbose shows one history: give --runs 1"
            raise ValueError(message)
        profile = PROFILES[todo[0].profile]
        return show(make_plan(todo[0].seed, profile), makers)
    if not given.keep.is_dir():
        message = f"--keep {given.keep}: no such folder, make it or name another"
        raise ValueError(message)
    total, began_s = Tally(), time.monotonic()
    chunk_size = 1 if given.fail_fast else CHUNK
    shown: set[str] = set()
    for line in left_out(makers):
        print(f"simulate: {line}", file=sys.stderr)
    try:
        for tally in play_all(todo, given.backend, given.processes, chunk_size):
            total.merge(tally)
            progress(total, len(todo), time.monotonic() - began_s)
            for found in tally.found:
                if found.kind not in shown and len(shown) < MOST_SHORTENED:
                    shown.add(found.kind)
                    print(file=sys.stderr)
                    show_found(found, given, makers)
            if given.fail_fast and total.found:
                break
    except KeyboardInterrupt:
        print("\nsimulate: ended by Ctrl-C", file=sys.stderr)
        summary(total, given, time.monotonic() - began_s)
        return 130
    print(file=sys.stderr)
    summary(total, given, time.monotonic() - began_s)
    return 1 if total.found else 0


def progress(total: Tally, runs: int, took_s: float) -> None:
    rate = total.number / max(0.001, took_s)
    text = f"\r{total.number:,} of {runs:,} histories, {rate:.0f}/s, {len(total.found)} violations"
    print(f"{text:<70}", end="", file=sys.stderr, flush=True)


def summary(total: Tally, given: argparse.Namespace, took_s: float) -> None:
    hours = sum(total.simulated_ms.values()) / 3_600_000
    print(
        f"{total.number:,} histories on {given.backend} in {took_s:.0f} s, "
        f"{hours:,.1f} simulated hours, {len(total.found)} violations"
    )
    for line in left_out(load(given.backend)):
        print(line)
    print()
    print(f"{'profile':16}{'histories':>10}{'hours':>10}{'violations':>12}")
    for name in PROFILES:
        if total.histories[name]:
            found = sum(item.profile == name for item in total.found)
            span = total.simulated_ms[name] / 3_600_000
            print(f"{name:16}{total.histories[name]:>10,}{span:>10,.1f}{found:>12}")
    print()
    for text, name in COUNTS:
        if total.counts[name]:
            print(f"{text:32}{total.counts[name]:>14,}")
    if total.found:
        print()
        print("violations:")
        for item in total.found[:100]:
            print(f"  --profile {item.profile} --seed {item.seed}: {item.text}"[:200])


def show_found(found: Found, given: argparse.Namespace, makers: dict[str, MakeStore]) -> None:
    """Shorten a history that failed and show what is left of it."""
    profile = PROFILES[found.profile]
    print(f"violation in --profile {found.profile} --seed {found.seed}: {found.text}")
    plan = make_plan(found.seed, profile)
    result = shortened(plan, makers[profile.family], given.effort)
    if result is None or result.violation is None:
        print("it does not fail again: something but the seed decides, which is a fault by itself")
        return
    print(f"shortened from {plan.size} parts to {result.plan.size}:")
    show_result(result)
    path = given.keep / f"leasecron-{found.profile}-{found.seed}.json"
    try:
        path.write_text(result.plan.as_json(), encoding="utf-8")
        print(f"replay: scripts/simulate.py --backend {given.backend} --replay {path}")
    except OSError as error:
        print(f"it could not be kept: {error}")
    print(
        f"whole:  scripts/simulate.py --backend {given.backend} --profile {found.profile} "
        f"--seed {found.seed} --runs 1 --verbose",
        flush=True,
    )


def show(plan: Plan, makers: dict[str, MakeStore]) -> int:
    result = play(plan, makers[plan.family], verbose=True)
    show_result(result)
    return 0 if result.violation is None else 1


def show_result(result: Result) -> None:
    for line in result.timeline:
        print(line)
    if result.shown:
        print("what shows it:")
    for line in result.shown:
        print(line)
    print(f"violation: {result.violation}" if result.violation else "no violation")


def kept(path: Path) -> Plan:
    """Return the history that a file holds."""
    try:
        return from_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        text = error.strerror
    except UnicodeDecodeError:
        text = "this is not a plan of a simulated history: it is no text in UTF-8"
    except ValueError as error:
        text = str(error)
    message = f"--replay {path}: {text}"
    raise ValueError(message)


def replay(path: Path, makers: dict[str, MakeStore]) -> int:
    plan = kept(path)
    if plan.family not in makers:
        message = f"--replay {path}: a history of the {plan.family} family, use another --backend"
        raise ValueError(message)
    return show(plan, makers)


if __name__ == "__main__":
    use_environment()
    sys.exit(main())
