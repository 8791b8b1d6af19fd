"""Histories for tests of the checker: played by real instances, recorded on both sides.

Every history is recorded twice: on the store's side, where it is exact, and on the instances' side,
where answers get lost.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Callable, Optional, Union, cast

from leasecron_sync import MemoryLease, Scheduler, every
from leasecron_sync.errors import HandOver
from leasecron_sync.model import LeaseClaim, OnOverlap, Outcome, RunKey, Settlement
from leasecron_sync.run import Run
from leasecron_sync.testing import (
    Checker,
    Entry,
    FaultyClaim,
    FaultyLease,
    HistoryLog,
    ManualClock,
    ManualScheduler,
    MemoryClaim,
    RecordingClaim,
    RecordingLease,
    Terms,
    executing,
)

BEGIN_MS = 1_700_000_010_000
MINUTE = 60_000
LEASE_MS = 15_000
FINISHED = Settlement(Outcome.FINISHED)
_names = itertools.count()


@dataclass
class Player:
    """One instance."""

    manual: ManualScheduler
    backend: Union[FaultyLease, FaultyClaim]
    scheduler: Scheduler[Any]
    plays: list[Callable[[Run], object]] = field(default_factory=list)
    works: bool = True

    def handle(self, run: Run) -> None:
        """Do what the test asks of the next handler; nothing by default."""
        if self.plays:
            self.plays.pop(0)(run)

    @property
    def id(self) -> str:
        return self.manual.instance_id


class Stage:
    """One store, one clock, and the instances on it."""

    def __init__(self, family: str = "lease", clock: Optional[ManualClock] = None) -> None:
        self.clock = ManualClock(BEGIN_MS) if clock is None else clock
        self.family = family
        self.name = f"stage {next(_names)}"
        self.inside: list[Entry] = []
        self.outside: list[Entry] = []
        self.exact_log = HistoryLog(self.inside.append, clock=self.clock, exact=True)
        self.log = HistoryLog(self.outside.append, clock=self.clock)
        self.players: list[Player] = []

    def join(self, *, start: bool = True, seconds: int = 60, **options: object) -> Player:
        """Add an instance with one job."""
        if self.family == "lease":
            faulty: Any = FaultyLease(RecordingLease(MemoryLease(self.name), self.exact_log))
            backend: Any = RecordingLease(faulty, self.log)
        else:
            faulty = FaultyClaim(RecordingClaim(MemoryClaim(self.name), self.exact_log))
            backend = RecordingClaim(faulty, self.log)
        scheduler: Scheduler[Any] = Scheduler(backend)
        manual = ManualScheduler(scheduler, self.clock)
        player = Player(manual, faulty, scheduler)

        def handler(run: Run) -> None:
            context = manual._context
            instance = "" if context is None else context.instance_id
            inside = executing(self.exact_log, run, instance=instance)
            with inside, executing(self.log, run, instance=instance):
                player.handle(run)

        add = cast("Callable[..., object]", scheduler.add_job)
        add(handler, every(seconds=seconds), name="job", **options)
        self.log.listen(scheduler)
        self.exact_log.listen(scheduler)
        self.players.append(player)
        if start:
            manual.start()
        return player

    def advance(self, ms: int, *players: Player, work: bool = True) -> None:
        """Let time pass for some instances, all by default, second by second."""
        end_ms = self.clock.steady_ms() + ms
        while self.clock.steady_ms() < end_ms:
            for player in players or self.players:
                # Their steps at this moment, without letting time pass.
                player.manual.advance(0, work=work and player.works)
            self.clock.advance(max(0, min(1_000, end_ms - self.clock.steady_ms())))

    def takes(self, ms: int) -> Callable[[Run], None]:
        """Return a handler that takes so long."""
        return lambda _run: self.clock.advance(ms)

    def entries(self, side: str) -> list[Entry]:
        return list(self.inside if side == "exact" else self.outside)


def fails(_run: Run) -> None:
    """Fail, as a handler does."""
    message = "no luck"
    raise ValueError(message)


def hands_over(_run: Run) -> None:
    """Give the run up."""
    raise HandOver


def terms_of(side: str, stage: Stage, **more: Any) -> Terms:  # noqa: ANN401 - fields of ``Terms``
    return Terms(exact=side == "exact", begin_ms=stage.inside[0].at_ms, **more)


def faults_of(entries: Sequence[Entry], terms: Terms) -> list[str]:
    """Return the kinds of fault that a checker finds, each once."""
    checker = Checker(exact=terms.exact, begin_ms=terms.begin_ms)
    for entry in entries:
        checker.add(entry)
    checker.end(owed=terms.owed, until_ms=terms.until_ms)
    return list(dict.fromkeys(fault.kind for fault in checker.faults))


# -- plays ---------------------------------------------------------------------------------------


def plain() -> Stage:
    """Three runs of one instance; each takes 2 s."""
    stage = Stage()
    player = stage.join()
    player.plays = [stage.takes(2_000)] * 3
    stage.advance(3 * MINUTE)
    return stage


def long_run() -> Stage:
    """One run whose handler begins 32 s after the grant; its lease is renewed meanwhile."""
    stage = Stage()
    stage.join()
    stage.advance(62_000, work=False)
    stage.advance(30_000)
    return stage


def taken_over(**options: Any) -> Stage:  # noqa: ANN401 - options of a job
    """The first instance is killed in its handler, the second takes over."""
    stage = Stage()
    first, _second = stage.join(**options), stage.join(start=False, **options)
    stage.advance(50_500, first, work=False)
    [run] = first.manual.runs
    with executing(stage.exact_log, run.run), executing(stage.log, run.run):
        pass
    forget_the_end(stage)
    first.manual.kill()
    stage.players.remove(first)
    stage.players[0].manual.start()
    stage.advance(30_000)
    return stage


def forget_the_end(stage: Stage) -> None:
    """The process was killed inside its handler: nobody wrote that it ended."""
    for entries in (stage.inside, stage.outside):
        assert entries.pop().what == "ended"


def killed() -> Stage:
    """An instance that is killed in its handler; nobody is left."""
    stage = taken_over()
    for entries in (stage.inside, stage.outside):
        start = next(place for place, entry in enumerate(entries) if entry.what == "started")
        del entries[start + 1 :]
    return stage


def retried() -> Stage:
    """The first attempt fails, the second one finishes."""
    stage = Stage()
    player = stage.join()
    player.plays = [fails]
    stage.advance(100_000)
    return stage


def asked_again() -> Stage:
    """The answer to a claim is lost; the repeated claim is granted with the time that is left."""
    stage = Stage()
    player = stage.join()
    player.backend.faults.lose_reply("claim")
    stage.advance(60_000)
    return stage


def paused() -> Stage:
    """A holder stands still, is overtaken, and comes back with its result."""
    stage = Stage()
    first, second = stage.join(), stage.join(start=False)
    stage.advance(50_500, first, work=False)
    second.manual.start()
    [run] = first.manual.runs

    def stands_still(_run: Run) -> None:
        stage.advance(40_000, second)

    first.plays = [stands_still]
    run.call_handler()
    run.settle()
    return stage


def beside() -> Stage:
    """Two runs of a job beside each other."""
    stage = Stage()
    stage.join(overlap="allow")
    stage.advance(2 * MINUTE, work=False)
    stage.advance(10_000)
    return stage


def failed_then_next() -> Stage:
    """A run whose runner was lost is settled, and the next run of its job is granted."""
    stage = Stage()
    first = stage.join(max_attempts=1)
    second = stage.join(start=False, max_attempts=1)
    stage.advance(51_000, first, work=False)
    first.manual.kill()
    stage.players.remove(first)
    stage.clock.advance(50_000)
    second.manual.start()
    stage.advance(12_000, second)
    return stage


def skipped() -> Stage:
    """A run is skipped, since the one before is in progress; another instance is told."""
    stage = Stage()
    first, _second = stage.join(), stage.join()
    stage.advance(31_000, first, work=False)
    stage.advance(62_000, work=False)
    stage.advance(10_000)
    return stage


def won() -> Stage:
    """Three runs on a claim backend, with two instances."""
    stage = Stage("claim")
    stage.join()
    stage.join()
    stage.advance(3 * MINUTE)
    stage.clock.advance(2 * MINUTE)
    stage.advance(6 * MINUTE)
    return stage


def claim_of_another(stage: Stage, backend: object, scheduled_ms: int = BEGIN_MS + 30_000) -> None:
    """Ask for a run, by default the first one, as an instance does that finds it late."""
    assert isinstance(backend, RecordingLease)
    key = RunKey("job", scheduled_ms)
    name, wish = f"another-{scheduled_ms}", OnOverlap.DEFER
    claim = LeaseClaim(key, scheduled_ms, "another", name, LEASE_MS, 3, wish, 600_000, 150_000)
    backend.claim([claim])
    assert stage.inside
