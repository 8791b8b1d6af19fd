"""Plays many histories, on one or several processors."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Optional, cast

from leasecron_sync.testing.simulation.plan import Plan
from leasecron_sync.testing.simulation.planner import make_plan
from leasecron_sync.testing.simulation.play import Result, play
from leasecron_sync.testing.simulation.profiles import PROFILES
from leasecron_sync.testing.simulation.shorten import MAX_PLAYS, Shortening
from leasecron_sync.testing.simulation.stores import MakeStore, load

if TYPE_CHECKING:
    from multiprocessing.pool import Pool

CHUNK = 20
"""Histories that one process plays before it reports, unless asked otherwise."""


class Job(NamedTuple):
    """One history to play."""

    seed: int
    profile: str


@dataclass(frozen=True)
class Found:
    """A violation.

    Attributes:
        seed: The seed.
        profile: Name of the profile.
        kind: Name of the broken rule.
        text: What was wrong.
    """

    seed: int
    profile: str
    kind: str
    text: str


@dataclass
class Tally:
    """What came of some histories.

    Attributes:
        histories: How many were played, by profile.
        simulated_ms: How long they were, by profile.
        counts: How often what happened.
        found: Violations.
    """

    histories: Counter[str] = field(default_factory=Counter[str])
    simulated_ms: Counter[str] = field(default_factory=Counter[str])
    counts: Counter[str] = field(default_factory=Counter[str])
    found: list[Found] = field(default_factory=list[Found])

    def add(self, result: Result) -> None:
        """Take in a history."""
        plan = result.plan
        self.histories[plan.profile] += 1
        self.simulated_ms[plan.profile] += result.simulated_ms
        self.counts.update(result.counts)
        if result.violation is not None:
            violation = result.violation
            self.found.append(Found(plan.seed, plan.profile, violation.kind, str(violation)))

    def merge(self, other: Tally) -> None:
        """Take in what came of other histories."""
        self.histories.update(other.histories)
        self.simulated_ms.update(other.simulated_ms)
        self.counts.update(other.counts)
        self.found += other.found

    @property
    def number(self) -> int:
        """How many histories were played."""
        return sum(self.histories.values())


def jobs(seed: int, runs: int, profiles: Sequence[str]) -> list[Job]:
    """Return the histories of a campaign: the profiles take turns, those with more weight more.

    Args:
        seed: The first seed.
        runs: How many.
        profiles: Names of profiles.
    """
    weights = {name: PROFILES[name].weight if len(profiles) > 1 else 1 for name in profiles}
    turns = [
        name for turn in range(max(weights.values())) for name in profiles if weights[name] > turn
    ]
    return [Job(number, turns[number % len(turns)]) for number in range(seed, seed + runs)]


def profiles_for(makers: dict[str, MakeStore], family: Optional[str] = None) -> list[str]:
    """Return the names of the profiles that a backend can be tried with."""
    return [
        profile.name
        for profile in PROFILES.values()
        if profile.family in makers and family in (None, profile.family)
    ]


def play_one(job: Job, makers: dict[str, MakeStore], *, verbose: bool = False) -> Result:
    """Play the history of a seed."""
    profile = PROFILES[job.profile]
    return play(make_plan(job.seed, profile), makers[profile.family], verbose=verbose)


def play_all(
    todo: Sequence[Job], backend: str, processes: int = 1, chunk_size: int = CHUNK
) -> Iterator[Tally]:
    """Play histories; yield what came of them, a few at a time.

    Args:
        todo: The histories.
        backend: See ``stores.load``.
        processes: How many processes play.
        chunk_size: Histories that one process plays before it reports.
    """
    chunks = [
        (todo[place : place + chunk_size], backend) for place in range(0, len(todo), chunk_size)
    ]
    if processes == 1:
        for chunk in chunks:
            yield _play_chunk(chunk)
        return
    pool = _pool(processes)
    try:
        yield from cast("Iterator[Tally]", pool.imap_unordered(_play_chunk, chunks))
        pool.close()
    finally:
        pool.terminate()
        pool.join()


def _pool(processes: int) -> Pool:
    from multiprocessing import get_context  # noqa: PLC0415 - not needed to play a history

    context = get_context("spawn")
    numbers: Any = context.Value("i", 0)
    return context.Pool(processes, _begin, (numbers,))


def _begin(numbers: Any) -> None:  # noqa: ANN401 - a number that processes share
    """Prepare a process that plays: a processor of its own, and no part in Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with numbers.get_lock():
        number: int = numbers.value
        numbers.value += 1
    if hasattr(os, "sched_setaffinity"):
        processors = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {processors[number % len(processors)]})


def _play_chunk(chunk: tuple[Sequence[Job], str]) -> Tally:
    todo, backend = chunk
    makers = load(backend)
    tally = Tally()
    for job in todo:
        tally.add(play_one(job, makers))
    return tally


def shortened(plan: Plan, make_store: MakeStore, max_plays: int = MAX_PLAYS) -> Optional[Result]:
    """Shorten a history that fails; return the shortened one, played with a timeline.

    Args:
        plan: The history.
        make_store: Makes its store.
        max_plays: Histories that may be played for it.

    Returns:
        The shortened history; None when it does not fail at all.
    """
    first = play(plan, make_store)
    if first.violation is None:
        return None
    kind = first.violation.kind

    def fails(shorter: Plan) -> bool:
        violation = play(shorter, make_store).violation
        return violation is not None and violation.kind == kind

    shorter = Shortening(fails, max_plays).shorten(plan, first.simulated_ms)
    return play(shorter, make_store, verbose=True)
