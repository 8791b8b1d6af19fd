"""Commands that no instance would send, at instants at which limits are met."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Protocol

from leasecron_sync.model import (
    JobSpan,
    JobStamp,
    LeaseClaim,
    LeaseRef,
    OnOverlap,
    Outcome,
    RunKey,
    Settlement,
)
from leasecron_sync.testing.clock import ManualClock
from tests.model.histories import Commands

JOBS = ("a", "b", "c")
TIMES = 6
STEP_MS = 100
HALF_MS = STEP_MS // 2
HOLDERS = ("ann", "bob")  # instances of the histories


class Reader(Commands, Protocol):
    """What is compared besides commands."""

    def settle_all(self, asked: Sequence[tuple[LeaseRef, Settlement]]) -> None: ...
    def compare_states(self, spans: Sequence[JobSpan]) -> None: ...
    def compare_pruned(self, jobs: Sequence[str]) -> None: ...


class Wild:
    """Makes up commands.

    Args:
        dice: Decides everything.
        clock: The store's.
        store: What gets the commands.
    """

    def __init__(self, dice: random.Random, clock: ManualClock, store: Reader) -> None:
        self._dice = dice
        self._clock = clock
        self._store = store
        self._began_ms = clock.now_ms() // STEP_MS * STEP_MS
        self._refs: list[LeaseRef] = []
        self._claims: list[LeaseClaim] = []
        self._decisions = 0

    def step(self) -> None:
        """Send one command, or let time pass."""
        steps = (self._claim, self._renew, self._settle, self._pass, self._rest)
        [step] = self._dice.choices(steps, (9, 3, 4, 6, 5))
        step()

    def _key(self) -> RunKey:
        number = self._dice.randrange(TIMES) - 1
        return RunKey(self._dice.choice(JOBS), self._base_ms() + number * STEP_MS)

    def _base_ms(self) -> int:
        # The window of times moves on slowly, so that some runs are met again and again.
        passed_ms = self._clock.now_ms() - self._began_ms
        return self._began_ms + max(0, passed_ms // (5 * STEP_MS)) * STEP_MS

    def _new_claim(self) -> LeaseClaim:
        dice, key = self._dice, self._key()
        self._decisions += 1
        wishes = list(OnOverlap)
        if key.job == JOBS[0]:  # on this one they agree
            wishes.remove(OnOverlap.ALLOW)
        return LeaseClaim(
            key=key,
            due_ms=key.scheduled_ms + dice.choice([0, 0, HALF_MS, STEP_MS]),
            holder=dice.choice(HOLDERS),
            decision_id=f"decision {self._decisions}",
            lease_ms=dice.choice([HALF_MS, STEP_MS, 2 * STEP_MS]),
            max_attempts=dice.choice([1, 2, 4, 9]),
            on_overlap=dice.choice(wishes),
            max_age_ms=dice.choice([0, STEP_MS, 50 * STEP_MS]),
            takeover_ms=dice.choice([0, STEP_MS, 3 * STEP_MS, *[50 * STEP_MS] * 3]),
        )

    def _claim(self) -> None:
        claims = [
            self._dice.choice(self._claims[-8:])
            if self._claims and self._dice.random() < 0.2
            else self._new_claim()
            for _ in range(self._dice.choice([1, 1, 2, 3, 6]))
        ]
        self._claims += claims
        for reply in self._store.claim(claims):
            if reply.lease is not None:
                self._refs.append(reply.lease.ref)

    def _ref(self) -> LeaseRef:
        dice = self._dice
        if not self._refs or dice.random() < 0.1:
            return LeaseRef(self._key(), dice.choice([0, 1, self._clock.now_ms()]))
        ref = dice.choice(self._refs[-6:])
        return ref if dice.random() < 0.8 else LeaseRef(ref.key, ref.token - 1)

    def _renew(self) -> None:
        refs = [self._ref() for _ in range(self._dice.choice([1, 2, 5]))]
        self._store.renew(refs, self._dice.choice([HALF_MS, STEP_MS, 3 * STEP_MS]))

    def _settle(self) -> None:
        dice = self._dice
        asked: list[tuple[LeaseRef, Settlement]] = []
        for _ in range(dice.choice([1, 1, 4])):
            outcome = dice.choice(list(Outcome))
            delay_ms = dice.choice([0, 0, HALF_MS, STEP_MS, 300_000, 300_001])
            ending = Settlement(outcome, dice.choice(["", "it"]), delay_ms)
            asked.append((self._ref(), ending))
        if len(asked) == 1:
            self._store.settle(*asked[0])
        else:
            self._store.settle_all(asked)

    def _pass(self) -> None:
        dice = self._dice
        if dice.random() < 0.1:
            self._clock.step(-dice.choice([1, STEP_MS, 5 * STEP_MS, 400_000]))
            return
        # All times are multiples of half a step, so most limits are met to the millisecond.
        to_grid_ms = -self._clock.now_ms() % HALF_MS
        self._clock.advance(dice.choice([1, to_grid_ms or 1, *[to_grid_ms + HALF_MS] * 6, 300]))

    def _rest(self) -> None:
        dice, now_ms = self._dice, self._clock.now_ms()
        jobs = dice.sample([*JOBS, "never seen"], dice.randrange(1, 5))
        self._store.pending(jobs, dice.choice([1, 3, 100]), dice.choice(HOLDERS))
        if dice.random() < 0.3:
            self._store.prune(dice.choice([0, STEP_MS, 30 * STEP_MS]), 10_000)
        if dice.random() < 0.5:
            stamps = [JobStamp(dice.choice(JOBS), f"version {dice.randrange(12)}") for _ in jobs]
            self._store.register(stamps)
        span_ms = dice.choice([0, STEP_MS, 10 * STEP_MS])
        self._store.compare_states([JobSpan(job, now_ms - span_ms, now_ms) for job in jobs])


class Pruner:
    """Prunes what lies here and there, under a clock that jumps far ahead and back.

    Args:
        dice: Decides everything.
        clock: The store's.
        store: What gets the commands.
    """

    def __init__(self, dice: random.Random, clock: ManualClock, store: Reader) -> None:
        self._dice = dice
        self._clock = clock
        self._store = store
        self._began_ms = clock.now_ms()
        self._decisions = 0
        self._running: list[LeaseRef] = []

    def step(self) -> None:
        """Claim and settle some runs, prune, or move the clock; compare what was pruned."""
        steps = (self._settle_some, self._prune, self._jump)
        [step] = self._dice.choices(steps, (5, 2, 2))
        step()
        self._store.register([JobStamp(job, "version 0") for job in JOBS])
        self._store.compare_pruned(JOBS)

    def _settle_some(self) -> None:
        number = self._dice.choice([1, 4, 9, 30])
        replies = self._store.claim([self._claim() for _ in range(number)])
        self._running += [reply.lease.ref for reply in replies if reply.lease is not None]
        # Some go on, and are pruned when what lies around them is a span.
        self._dice.shuffle(self._running)
        ended = self._running[self._dice.choice([0, 0, 4]) :]
        self._running = [lease for lease in self._running if lease not in ended]
        self._store.settle_all([(lease, Settlement(Outcome.FINISHED)) for lease in ended])

    def _claim(self) -> LeaseClaim:
        """Claim a run as if it were due, also if it lies ahead of the clock."""
        self._decisions += 1
        scheduled_ms = self._began_ms + self._dice.randrange(80) * STEP_MS
        return LeaseClaim(
            key=RunKey(self._dice.choice(JOBS), scheduled_ms),
            due_ms=self._began_ms - 1_000 * STEP_MS,
            holder=HOLDERS[0],
            decision_id=f"decision {self._decisions}",
            lease_ms=1_000 * STEP_MS,
            max_attempts=1,
            on_overlap=OnOverlap.ALLOW,
            max_age_ms=10_000 * STEP_MS,
            takeover_ms=10_000 * STEP_MS,
        )

    def _prune(self) -> None:
        self._store.prune(self._dice.choice([0, 1, 2 * STEP_MS, 2 * STEP_MS, 5 * STEP_MS]), 10_000)

    def _jump(self) -> None:
        to_ms = self._began_ms + self._dice.choice([-50, 0, 20, 40, 60, 90, 100]) * STEP_MS
        self._clock.step(to_ms - self._clock.now_ms())
