"""The runs that an instance means to claim. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Optional

from leasecron_sync.engine.agenda import Due
from leasecron_sync.engine.decide import Candidate, Origin
from leasecron_sync.engine.job import Job
from leasecron_sync.model import RunKey


@dataclass(frozen=True)
class Expiry:
    """How long candidates are kept.

    Attributes:
        window_ms: Claim backends: age at which a run is too old; None on lease backends, where the
            job's options say it.
        unsettled_ms: How long an unsettled run is kept that cannot be asked for; the store will
            name it again.
        surplus: Claim backends: how many late runs of a job are kept; None on lease backends, where
            the job's options say it.
    """

    window_ms: Optional[int]
    unsettled_ms: int
    surplus: Optional[int] = None


class Backlog:
    """Candidates by run: found once, kept until they are decided or too old."""

    def __init__(self) -> None:
        self._items: dict[RunKey, Candidate] = {}

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self._items)

    def add_due(self, dues: Iterable[Due], steady_ms: int) -> None:
        """Take in what the agenda handed out."""
        for job, scheduled_ms, due_ms in dues:
            key = RunKey(job.name, scheduled_ms)
            if key not in self._items:
                self._items[key] = Candidate(job, key, due_ms, Origin.ON_TIME, steady_ms)

    def add_owed(self, owed: Iterable[Candidate], now_ms: int, steady_ms: int) -> None:
        """Take in what a look back found; what is on time stays so."""
        for item in owed:
            known = self._items.setdefault(item.key, item)
            if known.origin is Origin.ON_TIME and not known.is_on_time(now_ms, steady_ms):
                # It is late by now: its window is judged from the moment it was found.
                known.origin, known.found_ms = Origin.CAUGHT_UP, item.found_ms

    def drop_known(self, recorded: Iterable[RunKey]) -> None:
        """Leave out what somebody has claimed, unless that may have been this instance.

        After an outage its holder may still renew: `pending` names it when nobody did.
        """
        for key in recorded:
            item = self._items.get(key)
            if item is not None and not item.unknown and item.origin is not Origin.UNSETTLED:
                del self._items[key]

    def add_unsettled(
        self, keys: Iterable[RunKey], jobs: Mapping[str, Job], steady_ms: int
    ) -> None:
        """Take in what `pending` named; these go before others, also those known already."""
        for key in keys:
            job = jobs.get(key.job)
            if job is None:
                continue
            item = self._items.get(key)
            if item is None:
                due_ms = job.due_ms(key.scheduled_ms)
                item = Candidate(job, key, due_ms, Origin.UNSETTLED, steady_ms)
                self._items[key] = item
            elif item.origin is not Origin.UNSETTLED:
                item.origin, item.found_ms, item.ask_ms = Origin.UNSETTLED, steady_ms, steady_ms

    def replace_job(self, name: str, job: Optional[Job]) -> list[Candidate]:
        """Forget the runs of a job; what may have been won stays with the job's new definition.

        Returns:
            What may have been won, and is forgotten since there is no such job any more.
        """
        kept: dict[RunKey, Candidate] = {}
        lost: list[Candidate] = []
        for key, item in self._items.items():
            if key.job == name and not item.unknown:
                continue
            if key.job == name and job is None:
                lost.append(item)
                continue
            if key.job == name and job is not None:
                item.job = job
            kept[key] = item
        self._items = kept
        return lost

    def drop_future(self, now_ms: int) -> list[RunKey]:
        """Leave out what is not due after the clock was set back; return those undecided.

        What this instance may have won without knowing it stays, and is asked for again.
        """
        gone = [
            key for key, item in self._items.items() if item.due_ms > now_ms and not item.unknown
        ]
        for key in gone:
            del self._items[key]
        return gone

    def discard(self, item: Candidate) -> None:
        """Forget one candidate, unless another has taken its place."""
        if self._items.get(item.key) is item:
            del self._items[item.key]

    def filtered(self, wanted: Callable[[Candidate], bool]) -> list[Candidate]:
        """Return candidates that pass a test."""
        return [item for item in self._items.values() if wanted(item)]

    def next_ask_ms(self, steady_ms: int) -> Optional[int]:
        """Return the steady time at which the next one that waits may be asked for."""
        waiting = [item.ask_ms for item in self._items.values() if item.ask_ms > steady_ms]
        return min(waiting, default=None)

    def take_expired(self, expiry: Expiry, now_ms: int, steady_ms: int) -> list[Candidate]:
        """Take out what is too old, and what a job has beyond its ``catch_up_limit``."""
        expired = [
            item for item in self._items.values() if _is_over(item, expiry, now_ms, steady_ms)
        ]
        for item in expired:
            del self._items[item.key]
        surplus = self._surplus(expiry, now_ms, steady_ms)
        for item in surplus:
            item.surplus = True
            del self._items[item.key]
        return expired + surplus

    def _surplus(self, expiry: Expiry, now_ms: int, steady_ms: int) -> list[Candidate]:
        by_job: dict[str, list[Candidate]] = {}
        for item in self._items.values():
            late = not item.is_on_time(now_ms, steady_ms)
            if late and item.origin is not Origin.UNSETTLED:
                by_job.setdefault(item.key.job, []).append(item)
        surplus: list[Candidate] = []
        for items in by_job.values():
            limit = expiry.surplus or items[0].job.options.catch_up_limit
            if len(items) > limit:
                items.sort(key=lambda item: item.key)
                surplus += items[: len(items) - limit]
        return surplus


def _is_over(item: Candidate, expiry: Expiry, now_ms: int, steady_ms: int) -> bool:
    if item.origin is Origin.UNSETTLED:
        return steady_ms - item.found_ms > expiry.unsettled_ms
    if expiry.window_ms is not None:
        return item.age_ms(now_ms, steady_ms) > expiry.window_ms
    return item.age_ms(now_ms, steady_ms) > item.max_age_ms(steady_ms)
