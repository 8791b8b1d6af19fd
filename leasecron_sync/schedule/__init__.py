"""Schedules: rules that yield scheduled times, and nothing else.

Everything here is pure: no clock is read, and all instants are milliseconds since the epoch, UTC.
"""

from __future__ import annotations

import hashlib
from typing import Optional, Protocol, Union, cast

from leasecron_sync.schedule.cron import CronSchedule
from leasecron_sync.schedule.fixed import At, Every, at, every, jitter_of
from leasecron_sync.schedule.wording import shown
from leasecron_sync.schedule.zones import check_zone

__all__ = [
    "At",
    "Every",
    "Schedule",
    "ScheduleLike",
    "at",
    "every",
    "fingerprint",
    "jitter_of",
    "parse_schedule",
]

_FINGERPRINT_LENGTH = 16


class Schedule(Protocol):
    """A rule that yields scheduled times, strictly rising and the same for every instance."""

    @property
    def text(self) -> str:
        """Canonical text, for the fingerprint, status and log lines."""
        ...

    @property
    def timezone(self) -> str:
        """IANA name of the zone; UTC where it does not matter."""
        ...

    def after(self, instant_ms: int) -> Optional[int]:
        """Return the first scheduled time strictly after an instant, None if there is none."""
        ...

    def before(self, instant_ms: int) -> Optional[int]:
        """Return the last scheduled time strictly before an instant, None if there is none."""
        ...


ScheduleLike = Union[str, Every, At]
"""What a user may write: a cron expression, ``every(...)`` or ``at(...)``."""


def parse_schedule(schedule: ScheduleLike, timezone: str) -> Schedule:
    """Make a schedule of what a user wrote.

    Args:
        schedule: A cron expression, ``every(seconds=...)`` or ``at(datetime)``.
        timezone: IANA name of the zone in which a cron expression is read; checked in any case.

    Raises:
        TypeError: The schedule or the zone is of a wrong type.
        ValueError: The expression is invalid or can never match, or there is no such zone.
    """
    check_zone(timezone)
    if isinstance(schedule, str):
        return CronSchedule(schedule, timezone)
    # Not every caller runs a type checker.
    if isinstance(cast("object", schedule), (Every, At)):
        return schedule
    message = (
        "schedule must be a cron expression, every(seconds=...) or at(datetime), not "
        f"{shown(schedule)}"
    )
    raise TypeError(message)


def fingerprint(schedule: Schedule, jitter_ms: int) -> str:
    """Return a short digest by which instances see that a schedule changed.

    It covers text, zone and jitter and nothing else; upper and lower case are the same to cron.

    Args:
        schedule: The schedule.
        jitter_ms: The job's jitter.
    """
    parts = f"{schedule.text.lower()}\n{schedule.timezone}\n{jitter_ms}"
    return hashlib.sha256(parts.encode()).hexdigest()[:_FINGERPRINT_LENGTH]
