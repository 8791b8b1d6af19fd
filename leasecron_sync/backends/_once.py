"""What claims have in common in stores that have no clock: the host's decides what is too early."""

from __future__ import annotations

from typing import Optional

from leasecron_sync.model import ClaimReply, OnceClaim, Verdict


def judged(claim: OnceClaim, now_ms: int) -> Optional[ClaimReply]:
    """Return what the clock says to a claim; None where it has to be decided who is first."""
    if now_ms < claim.due_ms:
        return ClaimReply(Verdict.EARLY, claim.due_ms - now_ms)
    if now_ms - claim.due_ms > claim.window_ms:
        return ClaimReply(Verdict.TOO_OLD)
    return None


def late(claim: OnceClaim, now_ms: int) -> bool:
    """Tell whether the store may have forgotten an earlier winner before this claim was answered.

    So it is when the process stood still between the look at its clock and the request. A claim is
    remembered for twice its window.
    """
    return now_ms - claim.due_ms > 2 * claim.window_ms
