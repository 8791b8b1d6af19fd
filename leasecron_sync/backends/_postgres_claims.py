"""A batch of claims as the arrays that ``claim_v1`` takes, and its rows as replies."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Optional, Protocol

from leasecron_sync.backends._postgres_rows import Rounds, Row, number_array, text_array, unreadable
from leasecron_sync.errors import OutcomeUnknown, StoreUnavailable
from leasecron_sync.model import (
    Lease,
    LeaseClaim,
    LeaseRef,
    LeaseReply,
    OnOverlap,
    Reason,
    RunKey,
    RunState,
    Verdict,
)

_GRANTS = ("first", "next", "takeover", "repeated")
_REFUSALS = {
    "held": Verdict.HELD,
    "waiting": Verdict.WAITING,
    "deferred": Verdict.DEFERRED,
    "early": Verdict.EARLY,
}
_SETTLES = {
    "abandoned": (RunState.FAILED, Reason.ABANDONED.value),
    "runner lost": (RunState.FAILED, Reason.RUNNER_LOST.value),
    "overlap": (RunState.SKIPPED, Reason.OVERLAP.value),
}


class Call(Protocol):
    """Calls a function of the store, in one round trip."""

    def __call__(self, name: str, values: tuple[object, ...], *, more: str = "") -> list[Row]: ...


STORE_ID = ", (SELECT value FROM {schema}.{prefix}meta WHERE name = 'store_id')"
"""Who decides is told with each claim."""


class Registered:
    """The jobs that were registered in this store, which keeps them as long as it keeps anything.

    Args:
        label: Names the store in errors.
    """

    def __init__(self, label: str) -> None:
        self.label = label
        self._jobs: set[str] = set()
        self._store_id = ""

    def note(self, jobs: Iterable[str], store_id: str) -> None:
        """Note that these are registered, and where."""
        self._jobs.update(jobs)
        self._store_id = store_id

    def checked(self, rows: list[Row]) -> list[Row]:
        """Return rows without the id of the store at their ends, if it is still the same.

        Another instance may have registered the same jobs after the data were lost, so that none
        of them is unknown.

        Raises:
            OutcomeUnknown: It is another store by now, which may have granted something.
        """
        known = self._store_id
        if known and any(row[-1] != known for row in rows):
            self._jobs.clear()
            self._store_id = ""
            message = f"{self.label}: it has lost its data"
            raise OutcomeUnknown(message)
        return [row[:-1] for row in rows]

    def check_unknown(self, unknown: Iterable[str]) -> None:
        """Look whether the store should know what it does not know.

        Else nobody would notice that it has lost its data, and look what is owed now. After any
        error jobs are registered anew, so this is told once.

        Raises:
            StoreUnavailable: It has lost its data.
        """
        if not self._jobs.isdisjoint(unknown):
            self._jobs.clear()
            self._store_id = ""
            message = f"{self.label}: it has lost its data"
            raise StoreUnavailable(message)


class ClaimBatch:
    """Claims in the order in which the store decides them.

    Args:
        claims: In the order in which they were made.
    """

    def __init__(self, claims: Sequence[LeaseClaim]) -> None:
        self._claims = claims
        self._rounds = Rounds([claim.key.job for claim in claims])

    def arrays(self) -> tuple[str, ...]:
        """Return the arguments of ``claim_v1`` from ``p_jobs`` on."""
        claims = [self._claims[number] for number in self._rounds.order]
        names = self._rounds.names
        strict = {claim.key.job for claim in claims if claim.on_overlap is not OnOverlap.ALLOW}
        return (
            text_array(names),
            text_array(["t" if job in strict else "f" for job in names]),
            number_array(self._rounds.ends),
            text_array([claim.key.job for claim in claims]),
            number_array([claim.key.scheduled_ms for claim in claims]),
            number_array([claim.due_ms for claim in claims]),
            text_array([claim.holder for claim in claims]),
            text_array([claim.decision_id for claim in claims]),
            number_array([claim.lease_ms for claim in claims]),
            number_array([claim.max_attempts for claim in claims]),
            text_array([claim.on_overlap.value for claim in claims]),
            number_array([claim.max_age_ms for claim in claims]),
            number_array([claim.takeover_ms for claim in claims]),
        )

    def decided(
        self, call: Call, now_ms: Optional[int], registered: Registered
    ) -> list[LeaseReply]:
        """Have the store decide; return the replies in the order of the claims.

        Raises:
            StoreError: There is no answer, or the store has lost its data.
        """
        values = (now_ms, *self.arrays())
        rows = call("claim_v1", values, more=STORE_ID)
        unknown = self.unknown_jobs(rows)
        if unknown:  # claimed before they were registered
            registered.check_unknown(unknown)
            call("meet_v1", (text_array(unknown),))
            rows = call("claim_v1", values, more=STORE_ID)
            if self.unknown_jobs(rows):
                message = (
                    f"{registered.label}: jobs that were made just now cannot be seen: somebody "
                    "deletes them, or a policy of row-level security hides them"
                )
                raise StoreUnavailable(message)
        return self.replies(registered.checked(rows))

    def unknown_jobs(self, rows: Iterable[Row]) -> list[str]:
        """Return the jobs in key order that have to be made before anything can be decided."""
        jobs: set[str] = set()
        for pos, line, *_rest in rows:
            if line == "unknown job":
                place: int = pos - 1
                jobs.add(self._claims[self._rounds.order[place]].key.job)
        return sorted(jobs)

    def replies(self, rows: Iterable[Row]) -> list[LeaseReply]:
        """Return the replies in the order of the claims."""
        decided: dict[int, Row] = {}
        beside: dict[int, list[int]] = {}
        for pos, line, *rest in rows:
            place: int = pos - 1
            number = self._rounds.order[place]
            if line == "beside":
                beside.setdefault(number, []).append(rest[3])
            else:
                decided[number] = (line, *rest)
        return [
            _reply(claim.key, decided[number], beside.get(number, ()))
            for number, claim in enumerate(self._claims)
        ]


def _reply(key: RunKey, row: Row, beside: Iterable[int]) -> LeaseReply:
    line, token, attempt, failures, ms, state, reason, own, others = row
    if line in _GRANTS:
        return LeaseReply(
            Verdict.GRANTED,
            lease=Lease(LeaseRef(key, token), attempt, failures, ms, line == "takeover"),
            state=RunState.RUNNING,
            fresh=True,
            unsettled=bool(others),
            abandoned=tuple(RunKey(key.job, at_ms) for at_ms in sorted(beside)),
        )
    if line in _REFUSALS:
        known = None if state is None else RunState(state)
        unsettled = line != "early" or bool(others)
        return LeaseReply(_REFUSALS[line], wait_ms=ms, state=known, unsettled=unsettled)
    if line == "too old":
        return LeaseReply(Verdict.TOO_OLD, unsettled=bool(others))
    if line == "unreadable":
        return LeaseReply(Verdict.REJECTED, reason=unreadable(key.job, reason))
    if line == "settled":
        now, why, fresh = RunState(state), reason, own
    else:
        (now, why), fresh = _SETTLES[line], True
    return LeaseReply(Verdict.SETTLED, state=now, reason=why, fresh=fresh, unsettled=bool(others))
