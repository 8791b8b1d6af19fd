"""Schedules without a calendar, and the deterministic spread of runs."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Optional, cast

from leasecron_sync.schedule.wording import shown
from leasecron_sync.schedule.zones import EARLIEST, EPOCH, LATEST

# A longer period is a mistake of units: the second scheduled time would be a century away.
MAX_EVERY_SECONDS = 100 * 366 * 86_400

_EARLIEST_MS = EARLIEST * 1000
_LATEST_MS = LATEST * 1000


@dataclass(frozen=True)
class Every:
    """Scheduled times at a fixed distance, counted from the epoch.

    Made by :func:`every`. They follow real time: no zone and no clock change has a part in them.
    """

    seconds: int

    def __post_init__(self) -> None:
        """Refuse what is no period."""
        if type(self.seconds) is not int:  # True is an int, too
            message = (
                f"every(seconds=...) takes a whole number of seconds, not {shown(self.seconds)}"
            )
            raise TypeError(message)
        if not 1 <= self.seconds <= MAX_EVERY_SECONDS:
            message = (
                f"every(seconds={shown(self.seconds)}): seconds must lie between 1 and "
                f"{MAX_EVERY_SECONDS} (100 years)"
            )
            raise ValueError(message)

    @property
    def text(self) -> str:
        """The canonical text, such as ``every 10 s``."""
        return f"every {self.seconds} s"

    @property
    def timezone(self) -> str:
        """Always UTC: a zone does not matter here."""
        return "UTC"

    def after(self, instant_ms: int) -> Optional[int]:
        """Return the first scheduled time strictly after an instant."""
        period_ms = self.seconds * 1000
        found = (max(instant_ms, _EARLIEST_MS) // period_ms + 1) * period_ms
        return found if found <= _LATEST_MS else None

    def before(self, instant_ms: int) -> Optional[int]:
        """Return the last scheduled time strictly before an instant."""
        period_ms = self.seconds * 1000
        found = (min(instant_ms - 1, _LATEST_MS) // period_ms) * period_ms
        return found if found > _EARLIEST_MS else None


@dataclass(frozen=True)
class At:
    """One scheduled time.

    Made by :func:`at`. Equal instants in different zones are equal schedules.
    """

    scheduled_ms: int

    def __post_init__(self) -> None:
        """Refuse what a datetime in UTC could not show."""
        if not _EARLIEST_MS < self.scheduled_ms <= _LATEST_MS:
            message = "at(...): the moment lies at the very end of the calendar; use one inside it"
            raise ValueError(message)

    @property
    def text(self) -> str:
        """The canonical text: ``at`` and the moment in UTC."""
        return f"at {(EPOCH + timedelta(milliseconds=self.scheduled_ms)).isoformat()}"

    @property
    def timezone(self) -> str:
        """Always UTC: a zone does not matter here."""
        return "UTC"

    def after(self, instant_ms: int) -> Optional[int]:
        """Return the moment if it lies strictly after an instant."""
        return self.scheduled_ms if self.scheduled_ms > instant_ms else None

    def before(self, instant_ms: int) -> Optional[int]:
        """Return the moment if it lies strictly before an instant."""
        return self.scheduled_ms if self.scheduled_ms < instant_ms else None


def every(*, seconds: int) -> Every:
    """Make a schedule with a scheduled time every so many seconds.

    The times are multiples of the period since the epoch, so that all instances agree on them,
    however often they restart.

    Args:
        seconds: Whole seconds, at least 1.

    Raises:
        TypeError: It is no whole number.
        ValueError: It is below 1 or above a hundred years.
    """
    return Every(seconds)


def at(moment: datetime) -> At:
    """Make a schedule with a single scheduled time.

    Args:
        moment: An aware datetime, cut to milliseconds. A past one has no scheduled time left.

    Raises:
        TypeError: It is no datetime.
        ValueError: It is naive, so nobody knows which instant is meant.
    """
    if not isinstance(cast("object", moment), datetime):
        message = f"at(...) takes a datetime, not {shown(moment)}"
        raise TypeError(message)
    if moment.utcoffset() is None:
        message = (
            f"at({moment.isoformat()}): the datetime is naive; give it a zone, "
            "such as tzinfo=timezone.utc"
        )
        raise ValueError(message)
    return At((moment - EPOCH) // timedelta(milliseconds=1))


def jitter_of(job: str, scheduled_ms: int, jitter_ms: int) -> int:
    """Return by how many milliseconds a run starts after its scheduled time.

    Every instance must get the same answer, hence a digest and neither random() nor hash().

    Args:
        job: The job's name.
        scheduled_ms: The scheduled time.
        jitter_ms: The most that may come out.
    """
    if jitter_ms <= 0:
        return 0
    digest = hashlib.sha256(f"{scheduled_ms}:{job}".encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:8], "big") % (jitter_ms + 1)
