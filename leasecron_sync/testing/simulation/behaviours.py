"""What the handlers of the simulated application do: drawn with the plan."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from leasecron_sync.testing.simulation.dice import Dice
from leasecron_sync.testing.simulation.plan import Behaviour, Version
from leasecron_sync.testing.simulation.profiles import Profile

BEFORE_MS = 5_000
"""Scheduled times this long before the beginning may still be executed: the clock is set back."""

ATTEMPTS = 3
"""Attempts of a run, at most, of which something is drawn."""

LONG_MS = 61_000, 120_000
"""How long some handlers are at work where the history is shorter than that."""


def behaviours_of(
    dice: Dice, profile: Profile, versions: tuple[Version, ...], begin_ms: int, storm_ms: int
) -> Iterator[Behaviour]:
    """Draw what the handlers do in the attempts of every run that may come up.

    Args:
        dice: The stream to draw from.
        profile: How long they are, and how often they fail.
        versions: What the jobs are.
        begin_ms: The store's clock at the beginning.
        storm_ms: How long handlers misbehave.
    """
    names = sorted({job.name for version in versions for job in version.jobs})
    for name in names:
        for scheduled_ms in _scheduled_ms(name, versions, begin_ms, storm_ms):
            for attempt in range(1, ATTEMPTS + 1):
                made = _behaviour(dice, profile, versions[0].lease_ms)
                if profile.pruned and attempt == 1 and dice.chance(20):
                    long_ms = dice.between(*LONG_MS)
                    if scheduled_ms + long_ms < begin_ms + storm_ms:  # it has to come to its end
                        made = replace(made, length_ms=long_ms)
                if made.length_ms or made.late_ms or made.outcome:
                    yield replace(made, job=name, scheduled_ms=scheduled_ms, attempt=attempt)
                if dice.chance(500):
                    break


def _scheduled_ms(
    name: str, versions: tuple[Version, ...], begin_ms: int, storm_ms: int
) -> list[int]:
    found: set[int] = set()
    for version in versions:
        job = version.job(name)
        if job is not None:
            period_ms = job.period_s * 1_000
            first_ms = (begin_ms - BEFORE_MS) // period_ms * period_ms
            found.update(range(first_ms, begin_ms + storm_ms, period_ms))
    return sorted(found)


def _behaviour(dice: Dice, profile: Profile, lease_ms: int) -> Behaviour:
    longest_ms = round(profile.longest * lease_ms)
    busy = dice.chance(profile.busy)
    length_ms = dice.between(1, dice.pick((50, lease_ms // 3, longest_ms))) if busy else 0
    late_ms = dice.pick((0, 0, 0, 5, lease_ms // 10))
    if not profile.gentle and dice.chance(50):
        late_ms = dice.between(0, 2 * lease_ms)
    outcome = ""
    if dice.chance(profile.failing):
        outcome = dice.pick(("hand over", "raise", "raise", "exit"))
    looks, waits = dice.chance(700), dice.chance(150)
    stubborn, forks = dice.chance(50), dice.chance(20)
    return Behaviour(
        job="",
        scheduled_ms=0,
        late_ms=late_ms,
        length_ms=length_ms,
        look_ms=dice.between(1, max(2, lease_ms // 2)),
        looks=looks,
        stubborn=stubborn and not profile.gentle,
        waits=waits,
        outcome=outcome,
        forks=forks and not profile.gentle,
    )
