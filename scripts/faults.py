#!/usr/bin/env python3
"""Attack real instances and their real store, and judge what became of their runs.

scripts/faults.py --store STORE       one minute of faults; STORE is sqlite, postgres, redis, valkey
                                      (leases), rabbitmq, nats, redis-script, redis-stream-id or
                                      redis-idmp (claims)
    --minutes N                       how long faults go on (default: 1)
    --seed N                          what is done, when and to whom follows from it (default: 0)
    --only NAME                       a kind of fault, or instances, network or server; may be
                                      repeated
    --only deploys --restarts N       rolling deploys alone: an instance restarts across each of N
                                      scheduled times, now and then all of them at once
    --plan                            print what would be done, and end
    --replay FILE                     play a plan that was written, or changed by hand
    --folder DIR                      keep the plan and the histories there
    --planted NAME                    plant a fault in the instances, which must be found: greedy
                                      or forgetful

It starts a server of its own and 3 to 8 instances as processes, which write down what they ask,
are told and do. They and the server are killed, stopped and restarted, clocks are set, and the
network between them is cut, silent or slow. In the end the history is judged: the status is 1 when
a run was doubled or lost, or a rule was broken, which is shown in as few entries as possible.
Ctrl-C ends the faults, and what there is is judged; a second one ends everything at once.
"""

from __future__ import annotations

import argparse
import shutil
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Final, Optional

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # this checkout

from leasecron_sync.cli.output import BROKEN_PIPE, finish_stdout, human, one_line, table  # noqa: E402
from scripts._environment import use_environment  # noqa: E402
from scripts._faults_crew import CampaignError  # noqa: E402
from scripts._faults_instance import PLANTED  # noqa: E402
from scripts._faults_plan import (  # noqa: E402
    DEPLOYS,
    KINDS,
    LEASE_MS,
    LEASES,
    STORES,
    Plan,
    PlanError,
    Wishes,
    from_json,
    make_plan,
)
from scripts._faults_play import Campaign  # noqa: E402
from scripts._faults_servers import world_readable  # noqa: E402
from scripts._faults_verdict import Finding, injected, shown_entries  # noqa: E402

NAME: Final = "faults"
WRONG: Final = 1
USAGE: Final = 2
INTERRUPTED: Final = 130
MOST_ROWS: Final = 200
"""Rows of a plan that are shown; of a longer one the first tenth of that."""
MOST_WRONG: Final = 10
MIN_MINUTES: Final = 0.05
MAX_MINUTES: Final = 600


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog=NAME,
        usage="%(prog)s --store STORE [--minutes N] [--seed N] [--only NAME] [...]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("--store", help=argparse.SUPPRESS)
    made.add_argument("--minutes", help=argparse.SUPPRESS)
    made.add_argument("--seed", default="0", help=argparse.SUPPRESS)
    made.add_argument("--only", action="append", default=[], help=argparse.SUPPRESS)
    made.add_argument("--restarts", help=argparse.SUPPRESS)
    made.add_argument("--plan", action="store_true", help=argparse.SUPPRESS)
    made.add_argument("--replay", type=Path, help=argparse.SUPPRESS)
    made.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    made.add_argument("--planted", default="", help=argparse.SUPPRESS)
    return made


class UsageError(Exception):
    """The command is not what it should be; told in one line."""


def wishes_of(options: argparse.Namespace) -> Wishes:
    if options.store is None:
        message = f"--store is missing, use one of {', '.join(STORES)}"
        raise UsageError(message)
    if options.store not in STORES:
        message = f"--store {options.store}: no such store, use one of {', '.join(STORES)}"
        raise UsageError(message)
    deploys = DEPLOYS in options.only
    if deploys and len(options.only) > 1:
        message = f"--only {DEPLOYS} is a campaign of its own: leave the other --only out"
        raise UsageError(message)
    if deploys and options.minutes is not None:
        message = f"--minutes {options.minutes}: deploys last as long as --restarts takes"
        raise UsageError(message)
    if options.restarts is not None and not deploys:
        message = f"--restarts {options.restarts}: say --only {DEPLOYS}, too"
        raise UsageError(message)
    seed = whole("--seed", options.seed, 0)
    restarts = whole("--restarts", options.restarts or "100", 1) if deploys else 0
    span_ms = minutes(options.minutes or "1")
    return Wishes(options.store, seed, span_ms, tuple(options.only), restarts)


def whole(option: str, text: str, least: int) -> int:
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if value < least:
        message = f"{option} must be a whole number from {least} on, not {text!r}"
        raise UsageError(message)
    return value


def minutes(text: str) -> int:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not MIN_MINUTES <= value <= MAX_MINUTES:
        message = f"--minutes must be a number from {MIN_MINUTES} to {MAX_MINUTES}, not {text!r}"
        raise UsageError(message)
    return round(value * 60_000)


def plan_of(options: argparse.Namespace) -> Plan:
    if options.planted and options.planted not in PLANTED:
        message = f"--planted {options.planted}: no such fault, use one of {', '.join(PLANTED)}"
        raise UsageError(message)
    if options.replay is None:
        try:
            return make_plan(wishes_of(options))
        except PlanError as error:
            raise UsageError(str(error)) from error
    given = [name for name in ("store", "minutes", "restarts") if getattr(options, name)]
    if given or options.only:
        message = f"--replay plays what the file says: leave --{[*given, 'only'][0]} out"
        raise UsageError(message)
    try:
        return from_json(options.replay.read_text(encoding="utf-8"))
    except OSError as error:
        message = f"--replay {options.replay}: {error.strerror}"
        raise UsageError(message) from error
    except (PlanError, UnicodeDecodeError) as error:
        message = f"--replay {options.replay}: {error}"
        raise UsageError(message) from error


def folder_of(options: argparse.Namespace) -> Path:
    """Return the folder for what is written; a new one, so that no histories mix."""
    if options.folder is None:
        return world_readable(Path(tempfile.mkdtemp(prefix="leasecron-faults-")))
    try:
        options.folder.mkdir(parents=True, exist_ok=True)
        if any(options.folder.iterdir()):
            message = f"--folder {options.folder} is not empty: name a new one"
            raise UsageError(message)
    except OSError as error:
        message = f"--folder {options.folder}: {error.strerror}"
        raise UsageError(message) from error
    return world_readable(options.folder.resolve())


# -- what is shown ---------------------------------------------------------------------------------


def progress(text: str) -> None:
    """Show how far it is: on a terminal in one line, else a line for each step."""
    if sys.stderr is None:
        return
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\x1b[K{text[:110]}")
    elif text:
        sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def show_plan(plan: Plan) -> None:
    wishes = plan.wishes
    what = "deploys" if wishes.deploys else f"{wishes.span_ms / 60_000:g} min"
    print(
        f"{wishes.store}, seed {wishes.seed}, {what}: {len(plan.injections):,} faults, "
        f"{plan.first} instances at the beginning, lease {LEASE_MS} ms\n"
    )
    count = len(plan.injections)
    number = count if count <= MOST_ROWS else MOST_ROWS // 10
    rows = [
        (f"{one.at_ms / 1000:.3f}", one.kind, one.whom, human(one.lasts_ms), one.details)
        for one in plan.injections[:number]
    ]
    for line in table((">AT (S)", "FAULT", "WHOM", ">LASTS", "DETAILS"), rows):
        print(line)
    if number < count:
        print(f"... and {count - number:,} more (--folder DIR keeps all of them in plan.json)")
    print(flush=True)


def show_verdict(campaign: Campaign, finding: Finding) -> None:
    for line in table(("FAULT", ">INJECTED"), injected_rows(campaign)):
        print(line)
    print()
    for line in table(("FIGURE", ">NUMBER", "REMARK"), figure_rows(campaign, finding)):
        print(line)
    print()
    rows = [
        (name, f"{len(spread.values):,}", *(human(spread.at(x)) for x in (0.5, 0.99, 1.0)))
        for name, spread in finding.times.items()
    ]
    for line in table(("TIME", ">NUMBER", ">P50", ">P99", ">LONGEST"), rows):
        print(line)
    for place, wrong in enumerate(finding.wrong[:MOST_WRONG], 1):
        print(f"\n{place}. {wrong.title}: {one_line(wrong.text)}")
        cells = shown_entries(wrong.entries)
        for line in table((">MS", "INSTANCE", "RUN", "WHAT"), cells) if cells else ():
            print(f"   {line}")
    left = len(finding.wrong) - MOST_WRONG
    if left > 0:
        print(f"\n{left:,} more are not shown.")
    print()
    print(f"{len(finding.wrong):,} things are wrong." if finding.wrong else "Nothing is wrong.")


def injected_rows(campaign: Campaign) -> list[tuple[str, str]]:
    counts = dict(injected(campaign.happened))
    rows = [(name, f"{number:,}") for name, number in counts.items()]
    return [*rows, ("all", f"{sum(counts.values()):,}")]


def figure_rows(campaign: Campaign, finding: Finding) -> list[tuple[str, str, str]]:
    totals = finding.report.totals
    lease = campaign.plan.wishes.store in LEASES
    rows = [
        ("scheduled times", finding.owed, "that fell due while it went on"),
        ("instances", len(campaign.crew.all), "processes"),
        ("entries judged", totals.entries, ""),
        ("calls unanswered", totals.unanswered, "they may have taken effect, or not"),
        ("runs", totals.runs, ""),
    ]
    if lease:
        rows += [
            ("  finished", totals.finished, ""),
            ("  skipped", totals.skipped, "another run of the job was in progress"),
            ("  failed", totals.failed, ""),
            ("  unsettled", totals.unsettled, "granted, and still not settled in the end"),
            ("grants", totals.grants, ""),
            ("  takeovers", totals.takeovers, ""),
            ("  handed over", totals.hand_overs, ""),
            ("  fenced", totals.fenced, "settlements refused, since the token was an old one"),
        ]
    rows += [("executions", totals.executions, "")]
    if lease:
        calm, disturbed = finding.beside
        rows += [
            (
                "  once more",
                totals.executed_again,
                "beyond the first of their run, whatever for",
            ),
            (
                "  beside the one before",
                calm + disturbed,
                f"{disturbed:,} of a process that was killed or stood still",
            ),
        ]
    alone = campaign.restarts_without_anybody()
    if alone is not None and campaign.plan.wishes.deploys:
        rows += [
            ("scheduled times with a restart", alone[0], ""),
            ("  without any instance", alone[1], "caught up by those that came next"),
        ]
    lines = [(name, f"{number:,}", text if number else "") for name, number, text in rows]
    lines += [(f"missed: {why}", f"{number:,}", "") for why, number in finding.missed.items()]
    if lease:
        lines += [(f"told as missed: {why}", f"{x:,}", "") for why, x in totals.missed.items()]
    lines += [("", "", ""), ("doubled", f"{finding.doubled:,}", "")]
    lines.append(("lost", f"{finding.lost:,}", f"of {finding.owed:,}"))
    others = len(finding.wrong) - finding.doubled - finding.lost
    lines.append(("other faults", f"{others:,}", ""))
    if finding.excused:
        why = "handlers that began when a stopped process went on: nothing can prevent that"
        lines.append(("excused", f"{finding.excused:,}", why))
    return lines


# -- from begin to end -----------------------------------------------------------------------------


def play(plan: Plan, folder: Path, planted: str) -> int:
    campaign = Campaign(plan, folder, planted, progress)

    def end(_number: int, _frame: Optional[FrameType]) -> None:
        if campaign.interrupted:
            raise KeyboardInterrupt
        campaign.interrupt()

    before = {number: signal.signal(number, end) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        campaign.open()
        for need, why in campaign.missing.items():
            left_out = [kind.name for kind in KINDS if kind.needs == need]
            print(f"left out: {', '.join(left_out)} ({one_line(why)})\n", flush=True)
        finding = campaign.play()
        progress("")
        show_verdict(campaign, finding)
    finally:
        progress("")
        campaign.close()
        for number, handler in before.items():
            signal.signal(number, handler)
    if finding.wrong:
        return WRONG
    return INTERRUPTED if campaign.interrupted else 0


def main(arguments: Optional[Sequence[str]] = None) -> int:
    options = parser().parse_args(arguments)
    folder: Optional[Path] = None
    status = USAGE
    try:
        plan = plan_of(options)
        show_plan(plan)
        if options.plan:
            return 0
        folder = folder_of(options)
        (folder / "plan.json").write_text(plan.to_json(), encoding="utf-8")
        status = play(plan, folder, options.planted)
        finish_stdout()
    except (UsageError, CampaignError) as error:
        progress("")
        sys.stderr.write(f"{NAME}: {one_line(str(error))}\n")
    except BrokenPipeError:  # who reads it has seen enough
        finish_stdout()
        status = BROKEN_PIPE
    except KeyboardInterrupt:
        progress("")
        sys.stderr.write(f"{NAME}: ended by Ctrl-C\n")
        status = INTERRUPTED
    if folder is not None and options.folder is None:
        if status == WRONG:
            print(f"The plan and the histories are in {folder}")
        else:
            shutil.rmtree(folder, ignore_errors=True)
    return status


if __name__ == "__main__":
    use_environment()
    sys.exit(main())
