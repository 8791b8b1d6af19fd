"""When a run that an instance means to claim is too old for it. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional

from leasecron_sync.engine.decide import Candidate, Origin


@dataclass(frozen=True)
class Expiry:
    """How long candidates are kept.

    Attributes:
        window_ms: Claim backends: age at which a run is too old; None on lease backends, where the
            job's options say it.
        unsettled_ms: The length of a lease: so long an unsettled run is kept that cannot be asked
            for, the store will name it again; 0 on claim backends.
        surplus: Claim backends: how many late runs of a job are kept; None on lease backends, where
            the job's options say it.
    """

    window_ms: Optional[int]
    unsettled_ms: int
    surplus: Optional[int] = None

    def held_until_ms(self, item: Candidate) -> int:
        """Return the steady time until which a run may be held that was asked for last then."""
        return item.tried_ms + self.unsettled_ms if self.unsettled_ms else -1


def is_over(item: Candidate, expiry: Expiry, now_ms: int, steady_ms: int) -> bool:
    """Tell whether a candidate is too old to be asked for.

    What may have been won is asked for while its lease may last, else an attempt would be lost.
    """
    if item.unknown and steady_ms <= expiry.held_until_ms(item):
        return False
    if item.origin is Origin.UNSETTLED:
        return steady_ms - item.found_ms > expiry.unsettled_ms
    if expiry.window_ms is not None:
        return item.age_ms(now_ms, steady_ms) > expiry.window_ms
    return item.age_ms(now_ms, steady_ms) > item.max_age_ms(steady_ms)
