"""Three instances, one of them killed in the middle of a run: what a newcomer sees first."""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Callable, Final, Optional

from leasecron_sync.backends.base import BackendSettings
from leasecron_sync.backends.sqlite import SQLiteLease
from leasecron_sync.cli.demo_crew import Crew, signals_end_it, signals_wait
from leasecron_sync.cli.demo_facts import (
    Findings,
    Kill,
    Note,
    Recorded,
    find_out,
    open_runs,
    unsettled_times,
)
from leasecron_sync.cli.demo_instance import BODY_MS, JOB, LEASE_MS, PERIOD_S, START, STOP
from leasecron_sync.cli.demo_screen import Facts, Screen, clock_time, make_screen
from leasecron_sync.cli.output import FAILED, CommandError, complain, human, say
from leasecron_sync.clock import SystemClock
from leasecron_sync.errors import StoreUnavailable

NAME: Final = "demo"
HELP: Final = "see three instances at work, and one of them killed, on a temporary SQLite file"

NAMES: Final = ("A", "B", "C")
LIMIT_MS: Final = 27_000
"""The demo ends by then, whatever happened."""

_PERIOD_MS: Final = PERIOD_S * 1000
_RUNS_BEFORE: Final = 4
_RUNS_AFTER: Final = 3
# From here on a busy machine is not waited for any more, so that the rest fits into the limit.
_KILL_BY_MS: Final = 12_000
_END_BY_MS: Final = 20_000
_RECORDS: Final = 1_000

EXAMPLE: Final = """\
from leasecron_sync import Scheduler, SQLiteLease, every

scheduler = Scheduler(SQLiteLease("jobs.db"))

@scheduler.job(every(seconds=2))  # or "0 3 * * *", timezone="Europe/Athens"
def send_invoices(run):
    print("invoices of", run.scheduled_time, "attempt", run.attempt)

if __name__ == "__main__":
    scheduler.run_forever()
"""
"""What the user can paste."""


def configure(parser: argparse.ArgumentParser) -> None:
    """There is nothing to choose."""
    del parser


def command(options: argparse.Namespace) -> int:
    """Show it, and judge what happened."""
    del options
    folder = Path(tempfile.mkdtemp(prefix="leasecron-demo-"))
    crew = Crew(folder)
    try:
        with signals_end_it():
            return _told(Demo(crew, folder / "jobs.db"))
    finally:
        with signals_wait():
            crew.bury()
            shutil.rmtree(folder, ignore_errors=True)


class Demo:
    """One course of the demo.

    Args:
        crew: The processes, not started yet.
        path: Their SQLite file.
    """

    def __init__(self, crew: Crew, path: Path) -> None:
        self._crew = crew
        self._path = path
        self._clock = SystemClock()
        self._started_ms = self._clock.steady_ms()
        self._notes: list[Note] = []
        self._silent: set[str] = set()
        self._screen: Optional[Screen] = None
        self.kill: Optional[Kill] = None

    def watch(self) -> Findings:
        """Go through the whole course and return what happened.

        Raises:
            CommandError: An instance could not be started, or ended by itself.
        """
        self._crew.start(NAMES, self._path)
        facts = Facts(self._crew.pids, JOB, PERIOD_S, BODY_MS)
        screen = self._screen = make_screen(facts, self._started_ms)
        until_ms: Optional[int] = None
        try:
            self._begin()
            self._kill_one(screen)
            if self._until(self._left_is_finished, LIMIT_MS):
                aim = self._count("finished") + _RUNS_AFTER
                self._until(lambda: self._count("finished") >= aim, _END_BY_MS)
            recorded = self._recorded_until_settled()
            until_ms = recorded.until_ms
        finally:
            self._screen = None
            screen.close(self._clock.steady_ms(), until_ms)
        self._crew.dismiss(STOP)
        return find_out(self._notes, self.kill, recorded, _PERIOD_MS)

    # -- the course ------------------------------------------------------------------------------

    def _begin(self) -> None:
        """Let all instances start at the same moment."""
        if self._until(lambda: self._count("loaded") == len(NAMES), LIMIT_MS):
            for name in NAMES:
                self._crew.tell(name, START)
            if self._until(lambda: self._count("ready") == len(NAMES), LIMIT_MS):
                return
        message = f"the instances were not ready within {human(LIMIT_MS)}: this machine is too busy"
        raise CommandError(message)

    def _kill_one(self, screen: Screen) -> None:
        """Kill an instance that is in the middle of a run."""
        self._until(lambda: self._count("finished") >= _RUNS_BEFORE, _KILL_BY_MS)
        if not self._until(lambda: self._in_the_middle() is not None, LIMIT_MS):
            return
        name = self._in_the_middle()
        assert name is not None
        kill = self.kill = Kill(name, self._clock.steady_ms())
        self._crew.kill(name)
        # What it had written before is still to come.
        self._until(lambda: name in self._silent, LIMIT_MS)
        left = [note.scheduled_ms for note in open_runs(self._notes, name)]
        screen.kill(kill, self._crew.pids[name], left)

    def _in_the_middle(self) -> Optional[str]:
        """Return an instance whose run is neither just begun nor about to end."""
        now_ms = self._clock.steady_ms()
        for name in NAMES:
            begun = open_runs(self._notes, name)
            if len(begun) == 1 and BODY_MS // 3 <= now_ms - begun[0].at_ms <= BODY_MS * 2 // 3:
                return name
        return None

    def _left_is_finished(self) -> bool:
        assert self.kill is not None
        left = {note.scheduled_ms for note in open_runs(self._notes, self.kill.instance)}
        return left <= {note.scheduled_ms for note in self._notes if note.event == "finished"}

    def _recorded_until_settled(self) -> Recorded:
        """Ask the store until everything that was due up to now is settled."""
        # Where time is short, what has just begun is not looked at.
        event = "began" if self._elapsed_ms() < _END_BY_MS else "finished"
        until_ms = max(
            (note.scheduled_ms for note in self._notes if note.event == event), default=0
        )
        backend = SQLiteLease(self._path)
        backend.open(BackendSettings("default", "demo", LEASE_MS))
        with contextlib.closing(backend):
            recorded = self._recorded(backend, until_ms)
            while (
                recorded is None or unsettled_times(recorded, _PERIOD_MS)
            ) and self._elapsed_ms() < LIMIT_MS:
                self._listen(0.1)
                recorded = self._recorded(backend, until_ms)
        if recorded is None:
            message = f"the store did not answer within {human(LIMIT_MS)}"
            raise CommandError(message)
        return recorded

    @staticmethod
    def _recorded(backend: SQLiteLease, until_ms: int) -> Optional[Recorded]:
        try:
            owed = [job.owed_from_ms for job in backend.jobs(10) if job.job == JOB]
            records = backend.history(JOB, _RECORDS)
        except StoreUnavailable:  # its instances are writing
            return None
        if not owed or owed[0] is None:
            return None
        return Recorded(owed[0], until_ms, records)

    # -- listening -------------------------------------------------------------------------------

    def _elapsed_ms(self) -> int:
        return self._clock.steady_ms() - self._started_ms

    def _count(self, event: str) -> int:
        return sum(note.event == event for note in self._notes)

    def _until(self, reached: Callable[[], bool], limit_ms: int) -> bool:
        """Listen until something is reached; tell whether it was, in that time of the demo."""
        while not reached():
            if self._elapsed_ms() >= limit_ms:
                return False
            self._listen(0.05)
        return True

    def _listen(self, timeout_s: float) -> None:
        """Take what came, and wait for it no longer than that.

        Raises:
            CommandError: An instance ended that was not killed.
        """
        heard = self._crew.hear(timeout_s)
        while heard is not None:
            if heard.note is None:
                self._silent.add(heard.instance)
                if self.kill is None or heard.instance != self.kill.instance:
                    words = self._crew.last_words(heard.instance)
                    message = f"instance {heard.instance} ended by itself: {words}"
                    raise CommandError(message)
            else:
                self._notes.append(heard.note)
                if self._screen is not None:
                    self._screen.note(heard.note)
            heard = self._crew.hear(0)
        if self._screen is not None:
            self._screen.refresh(self._clock.steady_ms())


def _told(demo: Demo) -> int:
    """Run the demo and tell how it went."""
    say("Three instances start on an SQLite file in a temporary folder; this takes 15 s.")
    sys.stdout.flush()
    findings = demo.watch()
    for line in summary(findings, demo.kill):
        say(line)
    failure = failure_of(findings, demo.kill)
    if failure:
        sys.stdout.flush()
        complain(f"the demo failed: {failure}")
        return FAILED
    _say_what_next()
    return 0


def summary(findings: Findings, kill: Optional[Kill]) -> list[str]:
    """Return the facts as lines.

    Args:
        findings: The facts.
        kill: Which instance was killed, if one was.
    """
    runs = [
        f"{name} {number} {'run' if number == 1 else 'runs'}"
        f"{' (killed)' if kill is not None and name == kill.instance else ''}"
        for name, number in findings.runs.items()
    ]
    left = " and ".join(f"{JOB} {clock_time(one.scheduled_ms)}" for one in findings.takeovers)
    killed = "none" if kill is None else kill.instance
    lines = [
        "",
        "Summary",
        f"  instances    {', '.join(runs) or 'none was ready'}",
        f"  schedule     {findings.scheduled} scheduled times, {findings.finished} runs finished",
        f"  killed       {killed}{', in the middle of ' if left else ''}{left}",
    ]
    for one in findings.takeovers:
        run = f"{JOB} {clock_time(one.scheduled_ms)}"
        if one.after_ms is None:
            lines.append(f"  taken over   {run}: by nobody, it is {one.state.value}")
            continue
        beside = f"lease_ms is {LEASE_MS}, from the last renewal"
        lines += [
            f"  taken over   {run} by {one.taken_by}, attempt {one.attempt}, {one.state.value}",
            f"               {human(one.after_ms)} after the kill; {beside}",
        ]
    lines += [
        f"  doubled      {len(findings.doubled)}",
        f"  lost         {len(findings.lost)}",
    ]
    if findings.leases_lost:
        number = findings.leases_lost
        lines.append(f"  leases lost  {number}, because this machine was busy")
    return lines


def failure_of(findings: Findings, kill: Optional[Kill]) -> str:
    """Return what went wrong; empty if nothing did."""
    if kill is None:
        return f"no instance was in the middle of a run within {human(LIMIT_MS)}"
    if findings.doubled:
        return f"doubled: {findings.doubled[0]}"
    if not findings.takeovers:
        return f"nothing was left to take over: the run of {kill.instance} had just ended"
    if not findings.taken_over:
        return f"the run of {kill.instance} was not taken over within {human(LIMIT_MS)}"
    if findings.lost:
        times = ", ".join(clock_time(ms) for ms in findings.lost)
        return f"lost, or not settled within {human(LIMIT_MS)}: {times}"
    return ""


def _python() -> str:
    """Return the interpreter that has this library, as short as it can be said from here."""
    here = f"{Path.cwd()}{os.sep}"
    return sys.executable.removeprefix(here)


def _say_what_next() -> None:
    say()
    say("Your turn: save this as jobs.py, and start it in two terminals:")
    say(f"  {_python()} jobs.py")
    say()
    say(EXAMPLE)
    say("It shows its failures when it configures logging, as README.rst does.")
    say("Read on: README.rst, then docs/ beside it. All commands:")
    say(f"  {_python()} -m leasecron_sync --help")
