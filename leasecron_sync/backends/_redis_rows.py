"""Commands as the scripts of Redis take them, and their answers as replies."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Sequence
from typing import Any, Optional

from leasecron_sync.model import (
    STORE_FORMAT,
    JobSummary,
    Lease,
    LeaseClaim,
    LeaseRef,
    LeaseReply,
    RunKey,
    RunRecord,
    RunState,
    Settlement,
    Verdict,
)

_logger = logging.getLogger("leasecron_sync.backends.redis")

_UPGRADE = f"this version of leasecron_sync reads formats up to {STORE_FORMAT}"
_SHIFT = 10**15  # as in common.lua
_DIGITS = 16

Argument = object
"""A text or a number."""


def claim_argument(claims: Iterable[LeaseClaim]) -> str:
    """Return what ``claim.lua`` takes after the id of the store."""
    parts = [
        part
        for claim in claims
        for part in (
            *claim.key,
            claim.due_ms,
            claim.holder,
            claim.decision_id,
            claim.lease_ms,
            claim.max_attempts,
            claim.on_overlap.value,
            claim.max_age_ms,
            claim.takeover_ms,
        )
    ]
    # As it is, not in escapes: what is no text is noticed when it is sent.
    return json.dumps(parts, ensure_ascii=False, separators=(",", ":"))


def lease_arguments(leases: Iterable[LeaseRef]) -> list[Argument]:
    """Return what ``renew.lua`` takes after the length of the leases."""
    return [part for lease in leases for part in (*lease.key, lease.token)]


def settle_arguments(asked: Iterable[tuple[LeaseRef, Settlement]]) -> list[Argument]:
    """Return what ``settle.lua`` takes."""
    return [
        part
        for lease, settlement in asked
        for part in (
            *lease.key,
            lease.token,
            settlement.outcome.value,
            settlement.reason,
            settlement.delay_ms,
        )
    ]


def claim_replies(claims: Iterable[LeaseClaim], answer: bytes) -> list[LeaseReply]:
    """Read the answer of ``claim.lua``."""
    return [_claim_reply(claim.key, row) for claim, row in zip(claims, json.loads(answer))]


def _claim_reply(key: RunKey, row: Sequence[Any]) -> LeaseReply:
    name, token, attempt, failures, ms, takeover, state, reason, fresh, others, abandoned = row
    verdict = Verdict(name)
    if verdict is Verdict.REJECTED:
        return LeaseReply(verdict, reason=unreadable(key.job, reason))
    granted = verdict is Verdict.GRANTED
    lease = None
    if granted:
        ref = LeaseRef(key, int(token))
        lease = Lease(ref, attempt, failures, int(ms), bool(takeover))
    return LeaseReply(
        verdict,
        lease=lease,
        wait_ms=0 if granted else int(ms),
        state=RunState(state) if state else None,
        reason=reason,
        fresh=bool(fresh),
        unsettled=bool(others),
        abandoned=tuple(RunKey(key.job, at_ms) for at_ms in sorted(map(int, abandoned))),
    )


def unreadable(job: str, why: str) -> str:
    """Say that a record is damaged, or of a newer version."""
    return f"the record of job {job!r} cannot be read ({why}): {_UPGRADE}"


def readable(rows: Iterable[Sequence[bytes]]) -> list[RunRecord]:
    """Read members and records of runs, leaving out what cannot be read."""
    records: list[RunRecord] = []
    for member, packed in rows:
        record = _record(member, packed)
        if record is None:
            _logger.debug("left a record out member=%r", member)
        else:
            records.append(record)
    return records


def job_summary(row: Sequence[Any]) -> JobSummary:
    """Read one element of the answer of ``jobs.lua``."""
    name, packed, unsettled, member, record = row
    newest = readable([(member, record)]) if member else []
    return JobSummary(name.decode(), _owed(packed), newest[0] if newest else None, unsettled)


def _owed(packed: bytes) -> Optional[int]:
    parts = _parts(packed)
    try:
        return None if parts is None else _number(parts[3])
    except (ValueError, TypeError, IndexError):  # damaged
        return None


def _parts(packed: bytes) -> Optional[list[Any]]:
    try:
        parts: Any = json.loads(packed)
        known = int(parts[0]) <= STORE_FORMAT
    except (ValueError, TypeError, LookupError):
        return None
    return list(parts) if known else None


def _number(text: str) -> Optional[int]:
    return int(text) if text else None


def _record(member: bytes, packed: bytes) -> Optional[RunRecord]:
    parts = _parts(packed)
    if parts is None:
        return None
    length, _, rest = member.partition(b":")
    try:
        key = RunKey(rest[: int(length)].decode(), int(rest[-_DIGITS:]) - _SHIFT)
        _format, state, token, attempt, failures, hand_overs, holder, decision_id = parts[:8]
        until_ms, lease_ms, max_attempts, overlap, takeover_ms = map(int, parts[8:13])
        claimed_ms, settled_ms, reason = parts[13:]
        return RunRecord(
            key,
            RunState(state),
            int(token),
            int(attempt),
            int(failures),
            int(hand_overs),
            holder,
            decision_id,
            until_ms,
            lease_ms,
            max_attempts,
            bool(overlap),
            takeover_ms,
            _number(claimed_ms),
            _number(settled_ms),
            reason,
        )
    except (ValueError, TypeError):  # damaged, or a state of a newer version
        return None
