"""Plays one history from its plan."""
# It gives the workers another module to ask for the process's number.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import itertools
import logging
import random
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final, Optional

from leasecron_sync.engine import worker
from leasecron_sync.testing.history.text import timeline as timeline_of
from leasecron_sync.testing.simulation import endings, happenings
from leasecron_sync.testing.simulation.machine import Strand
from leasecron_sync.testing.simulation.plan import Happening, Plan
from leasecron_sync.testing.simulation.stores import MakeStore
from leasecron_sync.testing.simulation.strands import on_one_processor
from leasecron_sync.testing.simulation.violation import STEP_RAISED, Violation
from leasecron_sync.testing.simulation.world import World

FIRST_LOOK_MS: Final = 2_500
LOOK_MS: Final = 1_000
CALM_MS: Final = 45_000
"""Time after the storm in which everything must have come to its end."""

_numbers = itertools.count()


@dataclass
class Result:
    """How a history went.

    Attributes:
        plan: What was played.
        violation: What was not as it must be; None when all was well.
        counts: How often what happened.
        simulated_ms: How long the history was.
        timeline: What happened, in lines, where that was asked for.
        shown: The fewest entries of the history that show the violation, in lines.
    """

    plan: Plan
    violation: Optional[Violation]
    counts: dict[str, int]
    simulated_ms: int
    timeline: Sequence[str] = field(default=())
    shown: Sequence[str] = field(default=())


def play(plan: Plan, make_store: MakeStore, *, verbose: bool = False) -> Result:
    """Play a history to its end, or to the first violation.

    Args:
        plan: What goes wrong.
        make_store: Makes its store.
        verbose: Whether to keep a timeline.
    """
    timeline: Optional[list[str]] = [] if verbose else None
    name = f"simulated-{plan.profile}-{plan.seed}-{next(_numbers)}"
    state = random.getstate()
    random.seed(plan.seed)  # delays before another try come from there
    try:
        with on_one_processor():
            world = World(plan, lambda clock: make_store(name, clock), timeline)
            with _workers_of(world), _errors_of(world):
                violation = _played(world)
    finally:
        random.setstate(state)
    result = Result(plan, violation, _counts(world), world.time.now_ms)
    if timeline is not None:
        result.timeline, result.shown = timeline, _shown(world, violation)
    return result


def _shown(world: World, violation: Optional[Violation]) -> list[str]:
    if violation is None:
        return []
    entries = world.watcher.shown() or violation.entries
    return [
        f"{row.ms:>9} ms  {row.instance:8} {row.job:10} {row.scheduled:22} {row.what}"
        for row in timeline_of(entries)
    ]


class _Process:
    """What the workers know of their process."""

    def __init__(self, world: World) -> None:
        self._world = world

    def getpid(self) -> int:
        """Return the number of the simulated process that is at work."""
        return self._world.pid


def _played(world: World) -> Optional[Violation]:
    try:
        world.run_until(world.plan.storm_ms)
        _calm_down(world)
        end_ms = _until_quiet(world)
        return next(endings.at_the_end(world, end_ms), None)
    except Violation as violation:
        return violation
    except Exception as error:  # noqa: BLE001 - whatever a step raises is a fault of it
        return Violation(STEP_RAISED, f"{type(error).__name__}: {error}")
    finally:
        for host in world.hosts:
            if host.process is not None:
                happenings.kill(world, host, 0)
        world.crew.end()
        world.store.close()


def _calm_down(world: World) -> None:
    """Let nothing go wrong from here on; bring every instance to the newest version."""
    world.tell("== calm")
    world.stormy = False
    version = endings.final_version(world)
    item = Happening(world.time.now_ms, "deploy", then_ms=50, version=version, how="live")
    for host in world.hosts:
        host.paused_ms = host.cut_off_ms = host.no_threads_ms = 0
        host.rejected.clear()
        if host.process is None:
            host.version = version
            host.restart_ms = min(host.restart_ms, world.time.now_ms)
        else:
            host.process.then_ms = min(host.process.then_ms, 50)
            host.process.manual.can_start_threads = True
            happenings.deploy(world, host, item)
        host.look(world.time.now_ms)


def _until_quiet(world: World) -> int:
    """Wait until everything has come to its end.

    Returns:
        The instant of the store at which the calm began.

    Raises:
        Violation: It does not.
    """
    begin_ms = world.time.now_ms
    end_ms = world.store.now_ms()
    slept_ms = max(host.slept_ms for host in world.hosts)
    world.run_until(max(begin_ms, slept_ms) + FIRST_LOOK_MS)
    while True:
        left = endings.leftover(world, end_ms)
        if left is None:
            return end_ms
        if world.time.now_ms >= begin_ms + CALM_MS:
            raise left
        world.run_until(world.time.now_ms + LOOK_MS)


def _counts(world: World) -> dict[str, int]:
    counts = world.counts
    counts["hosts"] = len(world.hosts)
    counts["asked again"] = max(world.watcher.rules.asked_again.values(), default=0)
    counts.update(world.watcher.counts)
    for process in (process for host in world.hosts for process in host.processes):
        for _at_ms, event in process.events:
            counts[event.name] += 1
    return dict(counts)


@contextmanager
def _workers_of(world: World) -> Generator[None, None, None]:
    """Let workers ask for the number of the simulated process that they are in."""
    modules: Any = worker
    before, modules.os = modules.os, _Process(world)
    try:
        yield
    finally:
        modules.os = before


@contextmanager
def _errors_of(world: World) -> Generator[None, None, None]:
    """Let what the library logs as an error be known of the process that was at work."""
    logger, events = logging.getLogger("leasecron_sync"), logging.getLogger("leasecron_sync.events")
    before = logger.level, logger.propagate, events.disabled
    handler = _Listener(world)
    logger.addHandler(handler)
    logger.setLevel(logging.ERROR)
    logger.propagate, events.disabled = False, True
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before[0])
        logger.propagate, events.disabled = before[1:]


class _Listener(logging.Handler):
    def __init__(self, world: World) -> None:
        super().__init__(logging.ERROR)
        self._world = world

    def emit(self, record: logging.LogRecord) -> None:
        strand: Optional[Strand] = self._world.current
        if strand is not None:
            text = record.getMessage()
            if record.exc_info:
                text += f" ({record.exc_info[1]!r})"
            strand.process.errors.append((self._world.time.now_ms, text))
