"""Takes out of a plan whatever its violation does not need."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Callable, Final, Optional

from leasecron_sync.testing.simulation.plan import Happening, Plan, Version

MAX_PLAYS: Final = 600
"""Histories that are played to shorten one, at most."""

PARTS: Final = ("happenings", "faults", "behaviours")

Fails = Callable[[Plan], bool]


class Shortening:
    """Looks for a shorter history that still fails in the same way.

    Args:
        fails: Plays a plan and tells whether it does.
        max_plays: How often it may do that.
    """

    def __init__(self, fails: Fails, max_plays: int = MAX_PLAYS) -> None:
        self._fails = fails
        self._left = max_plays

    def shorten(self, plan: Plan, failed_ms: int) -> Plan:
        """Return a plan from which little can be taken any more.

        Args:
            plan: One that fails.
            failed_ms: When it failed, since its beginning.
        """
        plan = self._try(plan, _until(plan, failed_ms)) or plan
        while True:
            before = plan
            plan = self._without_hosts(plan)
            plan = self._without_jobs(plan)
            for name in PARTS:
                plan = self._without(plan, name)
            plan = self._simpler(plan)
            plan = self._sooner(plan)
            if plan == before or self._left <= 0:
                return plan

    def _try(self, plan: Plan, shorter: Plan) -> Optional[Plan]:
        """Return the shorter plan if it fails too."""
        if shorter == plan or self._left <= 0:
            return None
        self._left -= 1
        return shorter if self._fails(shorter) else None

    def _without(self, plan: Plan, name: str) -> Plan:
        """Take out of one part what is not needed: large pieces first, then smaller ones."""
        items: Sequence[Any] = getattr(plan, name)
        size = len(items)
        while size and self._left > 0:
            place = 0
            while place < len(items):
                rest = (*items[:place], *items[place + size :])
                changed: dict[str, Any] = {name: rest}
                found = self._try(plan, replace(plan, **changed))
                if found is not None:
                    plan, items = found, rest
                else:
                    place += size
            size //= 2
        return plan

    def _without_hosts(self, plan: Plan) -> Plan:
        for host in plan.hosts[::-1]:
            if len(plan.hosts) == 1:
                break
            labels = (host.label, f"{host.label}'")
            shorter = replace(
                plan,
                hosts=tuple(item for item in plan.hosts if item is not host),
                happenings=tuple(item for item in plan.happenings if item.host not in labels),
                faults=tuple(item for item in plan.faults if item.host not in labels),
            )
            plan = self._try(plan, shorter) or plan
        return plan

    def _without_jobs(self, plan: Plan) -> Plan:
        for name in sorted({job.name for version in plan.versions for job in version.jobs}):
            versions = tuple(
                replace(version, jobs=tuple(job for job in version.jobs if job.name != name))
                for version in plan.versions
            )
            if all(version.jobs for version in versions):
                behaviours = tuple(item for item in plan.behaviours if item.job != name)
                shorter = replace(plan, versions=versions, behaviours=behaviours)
                plan = self._try(plan, shorter) or plan
        return plan

    def _simpler(self, plan: Plan) -> Plan:
        """Put ordinary values in the place of odd ones."""
        for simpler in _simpler_plans(plan):
            # Each is made from the plan at the beginning: take over only what it changed.
            candidate = simpler(plan)
            plan = self._try(plan, candidate) or plan
        return plan

    def _sooner(self, plan: Plan) -> Plan:
        """End the storm as soon as the last thing has gone wrong."""
        last_ms = max([item.at_ms for item in plan.happenings], default=0)
        for storm_ms in (last_ms + 1, plan.storm_ms // 2, plan.storm_ms * 3 // 4):
            if last_ms < storm_ms < plan.storm_ms:
                found = self._try(plan, replace(plan, storm_ms=storm_ms))
                if found is not None:
                    return found
        return plan


def _until(plan: Plan, failed_ms: int) -> Plan:
    """Leave out what comes after the failure."""
    return replace(
        plan,
        storm_ms=min(plan.storm_ms, failed_ms + 1),
        happenings=tuple(item for item in plan.happenings if item.at_ms <= failed_ms),
    )


def _simpler_plans(plan: Plan) -> Iterator[Callable[[Plan], Plan]]:
    for place, host in enumerate(plan.hosts):
        ordinary = replace(host, skew_ms=0, speed_ppm=0, boot_ms=1_000_000, slots=32, start_ms=0)
        for field in ("skew_ms", "speed_ppm", "boot_ms", "slots", "start_ms"):
            value = getattr(ordinary, field)
            yield lambda plan, place=place, field=field, value=value: _host(  # type: ignore[misc]
                plan, place, field, value
            )
    yield _one_version
    for place in range(len(plan.happenings)):
        yield lambda plan, place=place: _happening(plan, place)  # type: ignore[misc]


def _host(plan: Plan, place: int, field: str, value: int) -> Plan:
    values: dict[str, Any] = {field: value}
    changed = replace(plan.hosts[place], **values)
    return replace(plan, hosts=(*plan.hosts[:place], changed, *plan.hosts[place + 1 :]))


def _one_version(plan: Plan) -> Plan:
    """Leave out versions that nobody deploys."""
    deployed = [item.version for item in plan.happenings if item.what == "deploy"]
    versions: tuple[Version, ...] = plan.versions[: max(deployed, default=0) + 1]
    return replace(plan, versions=versions)


def _happening(plan: Plan, place: int) -> Plan:
    item: Happening = plan.happenings[place]
    if abs(item.ms) < 2 or item.what in ("restart", "stop"):  # noqa: PLR2004 - nothing to halve
        return plan
    changed = replace(item, ms=int(item.ms / 2), then_ms=min(item.then_ms, abs(item.ms) // 2))
    return replace(
        plan, happenings=(*plan.happenings[:place], changed, *plan.happenings[place + 1 :])
    )
