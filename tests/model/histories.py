"""Generated histories: what several instances do to one store, with faults in between.

A history is a list of operations that hypothesis makes up. ``Player`` plays one, whatever the
store is: it keeps what each instance knows, and turns an operation into a command that such an
instance could really send.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple, Optional, Protocol, Union

from hypothesis import strategies as st

from leasecron_sync.model import (
    JobStamp,
    JobStanding,
    LeaseClaim,
    LeaseRef,
    LeaseReply,
    OnOverlap,
    Outcome,
    Pending,
    Pruned,
    RenewReply,
    RunKey,
    Settlement,
    SettleReply,
    Verdict,
)
from leasecron_sync.testing.clock import ManualClock

LEASE_MS = 1_000
TAKEOVER_MS = 10_000
MAX_AGE_MS = 6_000
HISTORY_MS = 2 * TAKEOVER_MS
INTERVAL_MS = 700
HOUR_MS = 3_600_000


class Job(NamedTuple):
    """Options that all instances agree on."""

    name: str
    overlap: bool
    max_attempts: int


JOBS = (
    Job("strict", overlap=False, max_attempts=3),
    Job("loose", overlap=True, max_attempts=2),
    Job("single", overlap=False, max_attempts=1),
)
INSTANCES = ("ann", "bob", "cy")


class Fate(Enum):
    """What becomes of a call."""

    ANSWERED = "answered"
    REPLY_LOST = "reply lost"
    REQUEST_LOST = "request lost"


class Pass(NamedTuple):
    """Time goes by."""

    ms: int


class SetBack(NamedTuple):
    """The store's clock is set back."""

    ms: int


class Claim(NamedTuple):
    """An instance claims a run that its schedule names."""

    who: int
    job: int
    back: int
    skip: bool
    fate: Fate


class Take(NamedTuple):
    """An instance asks what is pending and claims one of it, or a run that it knows anyway."""

    who: int
    pick: int
    fate: Fate


class Again(NamedTuple):
    """An instance repeats its last claim under the same decision."""

    who: int
    fate: Fate


class Beat(NamedTuple):
    """An instance renews the leases that it believes in."""

    who: int
    fate: Fate


class Late(NamedTuple):
    """A renewal or a settlement of any old lease arrives."""

    who: int
    pick: int
    outcome: Optional[Outcome]


class End(NamedTuple):
    """A handler ends, and its attempt is settled."""

    who: int
    pick: int
    outcome: Outcome
    delay_ms: int
    fate: Fate


class Prune(NamedTuple):
    """An instance prunes."""

    limit: int


class Register(NamedTuple):
    """An instance registers a job."""

    job: int
    version: int


Operation = Union[Pass, SetBack, Claim, Take, Again, Beat, Late, End, Prune, Register]

_who = st.integers(0, len(INSTANCES) - 1)
_job = st.sampled_from([0, 0, 0, 1, 2])
_pick = st.integers(0, 9)
_fate = st.sampled_from([Fate.ANSWERED] * 6 + [Fate.REPLY_LOST, Fate.REQUEST_LOST])
_outcome = st.sampled_from(
    [Outcome.FINISHED, Outcome.FAILED, Outcome.FAILED, Outcome.HANDED_OVER, Outcome.HANDED_OVER]
)
_pass = st.builds(
    Pass,
    st.sampled_from(
        [0, 1, 100, 500, 500, LEASE_MS, LEASE_MS + 1, 3_000, 3_000, TAKEOVER_MS, 12_000, 25_000]
    ),
)
_set_back = st.builds(SetBack, st.sampled_from([1, 900, 5_000, 30_000, 200_000, HOUR_MS]))
_claim = st.builds(Claim, _who, _job, st.integers(-1, 5), st.booleans(), _fate)
_take = st.builds(Take, _who, _pick, _fate)
_end = st.builds(End, _who, _pick, _outcome, st.sampled_from([0, 0, 400, 4_000]), _fate)

OPERATIONS: st.SearchStrategy[Operation] = st.one_of(
    _pass,
    _pass,
    _set_back,
    _claim,
    _claim,
    _claim,
    _take,
    _take,
    st.builds(Again, _who, _fate),
    st.builds(Beat, _who, _fate),
    st.builds(Late, _who, _pick, st.none() | _outcome),
    _end,
    _end,
    st.builds(Prune, st.sampled_from([1, 3, 100])),
    st.builds(Register, _job, st.integers(0, 2)),
)

HISTORIES: st.SearchStrategy[list[Operation]] = st.lists(OPERATIONS, min_size=40, max_size=80)


def random_operation(dice: random.Random) -> Operation:
    """Make an operation for histories that are far longer than the generated ones."""
    who, pick = dice.randrange(len(INSTANCES)), dice.randrange(12)
    job = dice.choice([0, 0, 1, 2])
    fate = dice.choice([Fate.ANSWERED] * 6 + [Fate.REPLY_LOST, Fate.REQUEST_LOST])
    outcome = dice.choice(list(Outcome))
    delay_ms = dice.choice([0, 0, 400, 4_000])
    choices: tuple[tuple[float, Operation], ...] = (
        (16, Pass(dice.choice([0, 50, 200, 500, 900, LEASE_MS, 2_000]))),
        (2, Pass(dice.choice([12_000, 30_000]))),
        (3, SetBack(dice.choice([1, 900, 5_000, 30_000]))),
        (0.1, SetBack(dice.choice([200_000, HOUR_MS]))),
        (18, Claim(who, job, dice.randrange(-1, 6), dice.random() < 0.5, fate)),
        (18, Take(who, pick, fate)),
        (6, Again(who, fate)),
        (10, Beat(who, fate)),
        (6, Late(who, pick, dice.choice([None, outcome]))),
        (12, End(who, pick, outcome, delay_ms, fate)),
        (2, Prune(dice.choice([1, 3, 100]))),
        (1, Register(job, dice.randrange(3))),
    )
    weights = [weight for weight, _operation in choices]
    [(_weight, operation)] = dice.choices(choices, weights)
    return operation


class Commands(Protocol):
    """What a player asks of a store."""

    def claim(self, claims: Sequence[LeaseClaim]) -> Sequence[LeaseReply]: ...
    def renew(self, leases: Sequence[LeaseRef], lease_ms: int) -> Sequence[RenewReply]: ...
    def settle(self, lease: LeaseRef, settlement: Settlement) -> SettleReply: ...
    def register(self, jobs: Sequence[JobStamp]) -> Sequence[JobStanding]: ...
    def pending(self, jobs: Sequence[str], limit: int, asker: str) -> Pending: ...
    def prune(self, older_than_ms: int, limit: int) -> Pruned: ...


@dataclass
class Knowledge:
    """What an instance knows.

    Attributes:
        name: Its id.
        leases: Leases that its handlers work under.
        old: Every lease that it ever had.
        last: Its last claim.
    """

    name: str
    leases: list[LeaseRef] = field(default_factory=list)
    old: list[LeaseRef] = field(default_factory=list)
    last: Optional[LeaseClaim] = None


class Player:
    """Plays histories on a store. Subclasses look at what happens."""

    def __init__(self, store: Commands, clock: ManualClock) -> None:
        self.store = store
        self.clock = clock
        self.instances = [Knowledge(name) for name in INSTANCES]
        self._decisions = 0
        self._claimed: list[RunKey] = []

    def play(self, history: Sequence[Operation]) -> None:
        """Play all of it."""
        for operation in history:
            self.one(operation)

    def one(self, operation: Operation) -> None:  # noqa: C901 - one line for each kind
        """Play one operation; impossible ones do nothing."""
        if isinstance(operation, Pass):
            self.clock.advance(operation.ms)
        elif isinstance(operation, SetBack):
            self.clock.step(-operation.ms)
        elif isinstance(operation, Claim):
            self._claim(operation)
        elif isinstance(operation, Take):
            self._take(operation)
        elif isinstance(operation, Again):
            who = self.instances[operation.who]
            if who.last is not None:
                self.send_claim(who, who.last, operation.fate)
        elif isinstance(operation, Beat):
            who = self.instances[operation.who]
            if operation.fate is not Fate.REQUEST_LOST:
                self.send_renewals(who, who.leases, operation.fate)
        elif isinstance(operation, Late):
            self._late(operation)
        elif isinstance(operation, End):
            self._end(operation)
        elif isinstance(operation, Prune):
            self.store.prune(HISTORY_MS, operation.limit)
        else:
            name = JOBS[operation.job].name
            self.store.register([JobStamp(name, f"version {operation.version}")])

    def intend(self, who: Knowledge, key: RunKey, *, skip: bool = False) -> LeaseClaim:
        """Make a new decision."""
        job = next(job for job in JOBS if job.name == key.job)
        self._decisions += 1
        wish = OnOverlap.SKIP if skip else OnOverlap.DEFER
        return LeaseClaim(
            key=key,
            due_ms=key.scheduled_ms + 5,
            holder=who.name,
            decision_id=f"decision {self._decisions}",
            lease_ms=LEASE_MS,
            max_attempts=job.max_attempts,
            on_overlap=OnOverlap.ALLOW if job.overlap else wish,
            max_age_ms=MAX_AGE_MS,
            takeover_ms=TAKEOVER_MS,
        )

    def _claim(self, operation: Claim) -> None:
        who = self.instances[operation.who]
        number = self.clock.now_ms() // INTERVAL_MS - operation.back
        key = RunKey(JOBS[operation.job].name, number * INTERVAL_MS)
        self.send_claim(who, self.intend(who, key, skip=operation.skip), operation.fate)

    def _take(self, operation: Take) -> None:
        who = self.instances[operation.who]
        listed = self.store.pending([job.name for job in JOBS], 10, who.name).keys
        keys = [*listed, *self._claimed[-6:]]
        if keys:
            claim = self.intend(who, keys[operation.pick % len(keys)])
            self.send_claim(who, claim, operation.fate)

    def _late(self, operation: Late) -> None:
        who = self.instances[operation.who]
        if not who.old:
            return
        lease = who.old[-1 - operation.pick % len(who.old)]
        if operation.outcome is None:
            self.send_renewals(who, [lease], Fate.REPLY_LOST)
        else:
            self.send_settle(who, lease, Settlement(operation.outcome, "late"), Fate.REPLY_LOST)

    def _end(self, operation: End) -> None:
        who = self.instances[operation.who]
        if not who.leases:
            return
        lease = who.leases[operation.pick % len(who.leases)]
        settlement = Settlement(operation.outcome, operation.outcome.value, operation.delay_ms)
        self.send_settle(who, lease, settlement, operation.fate)

    # -- what reaches the store, and what comes back ----------------------------------------------

    def send_claim(self, who: Knowledge, claim: LeaseClaim, fate: Fate) -> None:
        """Send a claim; the instance learns the answer unless it is lost."""
        who.last = claim
        self._claimed.append(claim.key)
        if fate is Fate.REQUEST_LOST:
            return
        [reply] = self.store.claim([claim])
        if fate is Fate.ANSWERED and reply.lease is not None:
            assert reply.verdict is Verdict.GRANTED
            ref = reply.lease.ref
            self.learn(who, ref, min(reply.lease.left_ms, claim.lease_ms))

    def learn(self, who: Knowledge, ref: LeaseRef, left_ms: int) -> None:
        """Let an instance know of a lease."""
        del left_ms
        if ref not in who.leases:
            who.leases.append(ref)
        if ref not in who.old:
            who.old.append(ref)

    def forget(self, who: Knowledge, ref: LeaseRef) -> None:
        """Let an instance give a lease up."""
        if ref in who.leases:
            who.leases.remove(ref)

    def send_renewals(self, who: Knowledge, leases: Sequence[LeaseRef], fate: Fate) -> None:
        """Renew leases; the instance learns the answers unless they are lost."""
        leases = list(leases)
        replies = self.store.renew(leases, LEASE_MS)
        if fate is not Fate.ANSWERED:
            return
        for ref, reply in zip(leases, replies):
            if reply is RenewReply.LOST:
                self.forget(who, ref)
            else:
                self.learn(who, ref, LEASE_MS)

    def send_settle(
        self, who: Knowledge, lease: LeaseRef, settlement: Settlement, fate: Fate
    ) -> None:
        """Settle an attempt; its handler has ended, whatever becomes of the call."""
        self.forget(who, lease)
        if fate is not Fate.REQUEST_LOST:
            self.store.settle(lease, settlement)
