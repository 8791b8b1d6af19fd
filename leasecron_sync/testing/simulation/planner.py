"""Draws plans: everything that goes wrong in a history follows from its seed and its profile."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

from leasecron_sync.testing.simulation.behaviours import behaviours_of
from leasecron_sync.testing.simulation.dice import Dice
from leasecron_sync.testing.simulation.plan import (
    Happening,
    HostPlan,
    JobPlan,
    MessageFault,
    Plan,
    Version,
)
from leasecron_sync.testing.simulation.profiles import PROFILES, Profile

BEGIN_MS: Final = 1_700_049_600_000
HOUR_MS: Final = 3_600_000
LENGTHS_MS: Final = (
    *(((8_000, 16_000),) * 15),
    *(((16_000, 40_000),) * 4),
    (60_000, 100_000),
)
"""How long things go wrong, one is drawn."""

CALLS_PER_S: Final = 5
"""Calls of an instance to which something may happen; of more, what comes later is left alone."""

COMMANDS: Final = ("register", "claim", "renew", "settle", "pending", "states", "prune", "probe")


@dataclass
class _Drawing:
    """What is known while a plan is drawn."""

    seed: int
    profile: Profile
    storm_ms: int
    versions: tuple[Version, ...]
    hosts: tuple[HostPlan, ...]

    def dice(self, what: str) -> Dice:
        return Dice(f"{self.profile.name} {self.seed} {what}")

    @property
    def least_lease_ms(self) -> int:
        return min(version.lease_ms for version in self.versions)

    @property
    def call_ms(self) -> int:
        """Longest time that a call may take on every version."""
        if self.profile.family == "claim":
            return 1_000
        return min(5_000, self.least_lease_ms // 3)


def make_plan(seed: int, profile: Profile) -> Plan:
    """Draw the plan of a seed.

    Args:
        seed: Any number.
        profile: What may go wrong.
    """
    dice = Dice(f"{profile.name} {seed}")
    storm_ms = round(_length_ms(dice) * profile.length)
    begin_ms = BEGIN_MS + dice.between(0, 60_000)
    versions = _versions(dice, profile)
    drawing = _Drawing(seed, profile, storm_ms, versions, _hosts(dice, profile))
    return Plan(
        seed=seed,
        profile=profile.name,
        family=profile.family,
        order=f"{seed}",
        begin_ms=begin_ms,
        storm_ms=storm_ms,
        gentle=profile.gentle,
        hosts=drawing.hosts,
        versions=versions,
        happenings=tuple(_happenings(drawing)),
        faults=tuple(_faults(drawing)),
        behaviours=tuple(
            behaviours_of(drawing.dice("handlers"), profile, versions, begin_ms, storm_ms)
        ),
    )


def plan_of(seed: int, profile: str) -> Plan:
    """Draw the plan of a seed and the name of a profile."""
    return make_plan(seed, PROFILES[profile])


def _length_ms(dice: Dice) -> int:
    """Most histories are short: what goes wrong soon needs no long one."""
    low_ms, high_ms = dice.pick(LENGTHS_MS)
    return dice.between(low_ms, high_ms)


def _hosts(dice: Dice, profile: Profile) -> tuple[HostPlan, ...]:
    number = dice.pick((2, 3, 3, 4))
    skews = (0, 0, 200, -300, 700, -900, 4_000, -6_000, 30_000, -30_000)
    return tuple(
        HostPlan(
            label="abcd"[place],
            start_ms=dice.between(0, 2_000) * place,
            skew_ms=dice.pick(skews),
            speed_ppm=dice.pick((0, 0, 0, 400, -400, 4_000, -4_000)),
            boot_ms=1_000_000 * dice.between(1, 9),
            slots=dice.pick(profile.slots),
        )
        for place in range(number)
    )


# -- versions --------------------------------------------------------------------------------------


def _versions(dice: Dice, profile: Profile) -> tuple[Version, ...]:
    lease_ms = dice.pick(profile.leases_ms)
    jobs = _claim_jobs(dice) if profile.family == "claim" else _lease_jobs(dice, profile)
    first = _with_history(Version(jobs, lease_ms), profile)
    if "deploy" not in profile.happenings:
        return (first,)
    second = _changed(dice, first, profile)
    third = first if dice.chance(400) else _changed(dice, second, profile)
    return first, second, third


def _with_history(version: Version, profile: Profile) -> Version:
    if not profile.pruned:
        return version
    return replace(version, history_ms=60_000)  # as short as it may be


def _claim_jobs(dice: Dice) -> tuple[JobPlan, ...]:
    return (
        JobPlan("solo", dice.pick((2, 3, 5))),
        JobPlan("open", dice.pick((3, 5, 7)), jitter_ms=4_000),
        JobPlan("brief", dice.pick((4, 6)), time_limit_ms=4_000),
    )[: dice.between(2, 3)]


def _lease_jobs(dice: Dice, profile: Profile) -> tuple[JobPlan, ...]:
    # Everything is made up for in these two; with a short history, nothing may be.
    late_ms, limit = (4_000, 100) if profile.pruned else (HOUR_MS, 1_000)
    jobs = [
        JobPlan(
            "solo",
            dice.pick((2, 3, 5, 10)),
            catch_up_ms=late_ms,
            catch_up_limit=limit,
            retry_delay_ms=300,
        ),
        JobPlan(
            "open",
            dice.pick((3, 5, 7)),
            jitter_ms=4_000,
            overlap=True,
            catch_up_ms=late_ms,
            catch_up_limit=limit,
            retry_delay_ms=300,
        ),
        JobPlan("brief", dice.pick((3, 5)), catch_up_ms=0, max_attempts=2, time_limit_ms=4_000),
        JobPlan(
            "small",
            dice.pick((2, 3)),
            dice.pick((0, 0, 1_000)),
            dice.chance(300),
            dice.pick((3_000, 8_000)) if profile.pruned else dice.pick((3_000, 8_000, 20_000)),
            dice.between(1, 3),
            dice.between(1, 3),
            300,
        ),
    ]
    jobs += [
        replace(jobs[0], name=f"more {number}", period_s=dice.pick((2, 3, 5)))
        for number in range(4)
    ]
    return tuple(jobs[: dice.between(2, profile.jobs)])


def _changed(dice: Dice, version: Version, profile: Profile) -> Version:
    """Return a version after a change or two."""
    for _ in range(dice.between(1, 2)):
        place = dice.below(len(version.jobs))
        job = version.jobs[place]
        change = dice.pick(("period", "period", "options", "jitter", "set", "set", "scheduler"))
        if change == "scheduler":
            version = replace(version, lease_ms=dice.pick(profile.leases_ms))
        elif change == "set":
            version = replace(version, jobs=_other_set(dice, version, place))
        else:
            changed = _other_job(dice, job, change, profile)
            jobs = (*version.jobs[:place], changed, *version.jobs[place + 1 :])
            version = replace(version, jobs=jobs)
    return _with_history(version, profile)


def _other_set(dice: Dice, version: Version, place: int) -> tuple[JobPlan, ...]:
    """Remove a job, add one, or give one another name."""
    job = version.jobs[place]
    rest = (*version.jobs[:place], *version.jobs[place + 1 :])
    what = dice.pick(("remove", "add", "rename"))
    if what == "remove" and rest:
        return rest
    name = f"{job.name}'"
    while version.job(name) is not None:
        name += "'"
    if what == "rename":
        return (*rest, replace(job, name=name))
    return (*version.jobs, replace(job, name=name, period_s=dice.pick((2, 3, 5))))


def _other_job(dice: Dice, job: JobPlan, change: str, profile: Profile) -> JobPlan:
    if change == "period":
        return replace(job, period_s=dice.pick((2, 3, 4, 6)))
    if change == "jitter":
        return replace(job, jitter_ms=dice.pick((0, 500, 3_000)))
    if profile.family == "claim":
        return replace(job, time_limit_ms=dice.pick((None, 2_000)))
    return replace(
        job,
        overlap=not job.overlap if dice.chance(400) else job.overlap,
        max_attempts=dice.between(1, 4),
        catch_up_ms=job.catch_up_ms if job.catch_up_ms == HOUR_MS else dice.pick((0, 5_000)),
        time_limit_ms=dice.pick((None, None, 3_000)),
    )


# -- what happens ----------------------------------------------------------------------------------


def _happenings(drawing: _Drawing) -> Iterator[Happening]:
    profile = drawing.profile
    if not profile.every_ms:
        return
    dice = drawing.dice("happenings")
    kinds = [what for what, weight in profile.happenings.items() for _ in range(weight)]
    made: list[Happening] = []
    stepped_ms = -HOUR_MS
    at_ms = dice.between(1, 2 * profile.every_ms)
    while at_ms < drawing.storm_ms:
        what = dice.pick(kinds)
        spaced = what != "store step" or at_ms - stepped_ms > 2 * _longest_lease_ms(drawing)
        if what == "store step" and spaced:
            stepped_ms = at_ms
        if what == "deploy":
            made += _rollout(dice, drawing, at_ms)
        elif spaced:
            made.append(_one(dice, drawing, at_ms, what))
        at_ms += dice.between(1, 2 * profile.every_ms)
    if any(item.what == "emptied" for item in made):
        # Tokens go on rising in a store that lost its data, unless its clock was set back as well.
        made = [item for item in made if item.what != "store back"]
        made = [
            replace(item, ms=abs(item.ms) // 2) if item.what == "store step" else item
            for item in made
        ]
    yield from sorted(made, key=lambda item: item.at_ms)


def _longest_lease_ms(drawing: _Drawing) -> int:
    return max(version.lease_ms for version in drawing.versions)


def _rollout(dice: Dice, drawing: _Drawing, at_ms: int) -> Iterator[Happening]:
    """A deploy reaches one instance after the other."""
    version = dice.below(len(drawing.versions))
    gap_ms = dice.pick((50, 500, 3_000))
    how = dice.pick(("live", "restart"))
    for place, host in enumerate(drawing.hosts):
        when_ms = at_ms + place * gap_ms
        if when_ms < drawing.storm_ms:
            then_ms = dice.pick((20, 500, 2_000))
            yield Happening(
                when_ms, "deploy", host.label, then_ms=then_ms, version=version, how=how
            )


def _one(dice: Dice, drawing: _Drawing, at_ms: int, what: str) -> Happening:
    host = dice.pick(drawing.hosts).label
    span_ms = dice.pick((300, 2_000, 5_000, 15_000))
    then_ms = dice.pick((50, 1_000, 6_000, 12_000))
    least_margin_ms = min(version.margin_ms for version in drawing.versions)
    if what == "pause":
        spans_ms = (3_000, 15_000, 61_000, 75_000) if drawing.profile.pruned else ()
        span_ms = dice.pick(spans_ms or (500, 3_000, 8_000, 15_000))
    elif what == "suspend":
        span_ms = dice.pick((1_000, 4_000, 11_000, 25_000))
    elif what == "emptied":
        span_ms = dice.pick((500, 2_000, 6_000))
        then_ms = dice.between(0, span_ms)
    elif what in ("stop", "restart"):
        span_ms = 4_000
    elif what == "store step":
        span_ms = dice.between(-least_margin_ms, least_margin_ms - min(50, least_margin_ms // 2))
    elif what == "store back":
        span_ms = -dice.between(1, 9_000)
    elif what == "host step":
        span_ms = dice.pick((-3, 50, -700, 3_000, -9_000, 20_000, -20_000, 300_000))
    how = dice.pick(COMMANDS) if what == "reject" else ""
    together = 500 if what == "reject" else 300 if drawing.profile.pruned else 0
    if what in ("all down", "emptied", "store step", "store back") or dice.chance(together):
        host = ""
    return Happening(at_ms, what, host, ms=span_ms, then_ms=then_ms, how=how)


# -- messages --------------------------------------------------------------------------------------


def _faults(drawing: _Drawing) -> Iterator[MessageFault]:
    for host in drawing.hosts:
        yield from _faults_of(drawing, host.label)
        if "fork" in drawing.profile.happenings:
            yield from _faults_of(drawing, f"{host.label}'")


def _faults_of(drawing: _Drawing, label: str) -> Iterator[MessageFault]:
    profile, dice = drawing.profile, drawing.dice(f"messages {label}")
    share = profile.slow + profile.lost + profile.twice + profile.refused
    calls = drawing.storm_ms * CALLS_PER_S // 1_000
    number = dice.gap(share, calls)
    while number < calls:
        yield _fault(dice, drawing, label, number)
        number += 1 + dice.gap(share, calls)


def _fault(dice: Dice, drawing: _Drawing, label: str, number: int) -> MessageFault:
    profile, call_ms = drawing.profile, drawing.call_ms
    where = dice.below(profile.slow + profile.lost + profile.twice + profile.refused)
    what = "slow"
    if where < profile.lost:
        late = "late" if dice.chance(profile.late) else "request lost"
        what = late if dice.chance(500) else "reply lost"
    elif where < profile.lost + profile.twice:
        what = "twice"
    elif where < profile.lost + profile.twice + profile.refused:
        what = dice.pick(("refused", "rejected"))
    if profile.gentle:
        call_ms //= 3  # several slow calls in a row do cost an attempt
    before_ms = dice.between(0, call_ms * 3 // 10)
    longest_ms = call_ms - call_ms // 20 - before_ms
    after_ms = dice.between(0, dice.pick((call_ms // 10, longest_ms)))
    if what in ("request lost", "late"):
        after_ms = dice.pick((0, after_ms, call_ms))
    later_ms = dice.between(0, 3 * call_ms) if what in ("late", "twice") else 0
    if what == "twice" and profile.gentle:
        later_ms = 0  # a claim that was early and arrives once more may win, and nobody hears of it
    return MessageFault(label, number, what, before_ms, after_ms, later_ms)
