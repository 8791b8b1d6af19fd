"""Seeded histories: a few instances, one store, everything that may go wrong, and what must hold.

Everything happens in an order that the seed decides; a failure names its seed. More histories are
played with ``LEASECRON_SYNC_HISTORIES``, other seeds with ``LEASECRON_SYNC_FIRST_SEED``.
"""

from __future__ import annotations

import itertools
import logging
import os
import random
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Callable, NamedTuple, Optional, TypeVar, Union, cast
from unittest import mock

import pytest

from leasecron_sync import Scheduler, every
from leasecron_sync.backends.memory import MemoryLease
from leasecron_sync.engine import starting, timer, worker
from leasecron_sync.engine.caller import Caller
from leasecron_sync.engine.catch_up import CatchUp, Found
from leasecron_sync.engine.claiming import _Asking
from leasecron_sync.engine.context import Context
from leasecron_sync.engine.decide import Asker, Candidate, Pick
from leasecron_sync.engine.heartbeat import HeartbeatLoop
from leasecron_sync.engine.runtime import LiveRun
from leasecron_sync.engine.standby import Standby
from leasecron_sync.errors import HandOver, OutcomeUnknown, StoreUnavailable
from leasecron_sync.events import EVENT_NAMES, Event
from leasecron_sync.model import (
    ClaimReply,
    Lease,
    LeaseClaim,
    LeaseRef,
    LeaseReply,
    OnceClaim,
    Outcome,
    RenewReply,
    RunKey,
    RunState,
    Settlement,
    SettleReply,
    Verdict,
)
from leasecron_sync.options import SKEW_WARNING_MS
from leasecron_sync.run import LeaseRun, Run, RunControl
from leasecron_sync.schedule import Every
from leasecron_sync.testing import (
    FaultyClaim,
    FaultyLease,
    ManualClock,
    ManualRun,
    ManualScheduler,
    MemoryClaim,
    harness,
)
from leasecron_sync.testing.faults import Faults

HISTORIES = int(os.environ.get("LEASECRON_SYNC_HISTORIES", "80"))
FIRST_SEED = int(os.environ.get("LEASECRON_SYNC_FIRST_SEED", "0"))

T = TypeVar("T")
SECOND = 1_000
HOUR = 3_600_000
BEGIN_MS = 1_700_049_600_000 - 3_000
LEASE_MS = 3_000
MARGIN_MS = 300
CALL_MS = 1_000
WINDOW_MS = 20_000
STORM_MS = 70 * SECOND
CALM_MS = 40 * SECOND
EXCUSED_MS = 12 * SECOND
"""What is younger than this in the end may still be under way."""

PLANT_SEEDS = 60
"""Histories in which a planted fault must be found."""

LOCAL = frozenset({"open", "tend", "close", "discard"})
MAX_NESTED = 3
MAX_STEPS = 25
"""Steps of one timer in one second that are a hot loop beyond what its grants and ends explain."""

_numbers = itertools.count()


class Violation(AssertionError):
    """A history that must not be."""


class Gone(BaseException):
    """The process that made a call, or a handler's process, does not exist any more."""


# -- what is judged --------------------------------------------------------------------------------


@dataclass
class Grant:
    """A lease as the store gave it."""

    key: RunKey
    token: int
    attempt: int
    holder: str
    decision_id: str
    until_ms: int
    ended: bool = False
    started: bool = False


class Judge:
    """Follows the store's answers and the handlers; knows nothing of the engine.

    Args:
        store_clock: The clock that decides.
        overlapping: Jobs whose runs may be beside each other.
    """

    def __init__(self, store_clock: ManualClock, overlapping: frozenset[str]) -> None:
        self._clock = store_clock
        self._overlapping = overlapping
        self.latest_ms = store_clock.now_ms()
        self.grants: list[Grant] = []
        self.last_token: dict[str, int] = {}
        self.by_run: dict[RunKey, list[Grant]] = {}
        self.finished: set[RunKey] = set()
        self.settled: dict[RunKey, str] = {}
        self.due_ms: dict[RunKey, int] = {}
        self.decided: dict[RunKey, str] = {}
        self.starts: Counter[tuple[RunKey, int]] = Counter()
        self.no_success: set[tuple[RunKey, int]] = set()

    def now_ms(self) -> int:
        now_ms = self._clock.now_ms()
        self.latest_ms = max(self.latest_ms, now_ms)
        return now_ms

    def live(self, grant: Grant) -> bool:
        return not grant.ended and grant.until_ms > self.now_ms()

    def claimed(self, claims: Sequence[LeaseClaim], replies: Sequence[LeaseReply]) -> None:
        alone = [item.key.job for item in claims if item.key.job not in self._overlapping]
        _must(len(alone) == len(set(alone)), "two runs of a no-overlap job in one batch")
        for claim, reply in zip(claims, replies):
            self.due_ms[claim.key] = claim.due_ms
            if reply.verdict is Verdict.GRANTED:
                assert reply.lease is not None
                self._granted(claim, reply.lease)
            elif reply.verdict is Verdict.HELD:
                for grant in self.by_run[claim.key]:
                    if grant.until_ms - self.now_ms() > 2 * LEASE_MS:
                        grant.until_ms = self.now_ms() + LEASE_MS
            elif reply.verdict is Verdict.SETTLED:
                self._store_settled(claim.key, reply)
            for key in reply.abandoned:
                self._end(key, "abandoned")

    def _store_settled(self, key: RunKey, reply: LeaseReply) -> None:
        assert reply.state is not None
        if reply.fresh:
            self._end(key, f"{reply.state.value} {reply.reason}")

    def _end(self, key: RunKey, how: str) -> None:
        _must(self.settled.setdefault(key, how) == how, f"{key} was settled twice")
        for grant in self.by_run.get(key, ()):
            grant.ended = True

    def _granted(self, claim: LeaseClaim, lease: Lease) -> None:
        key, now_ms = claim.key, self.now_ms()
        until_ms = now_ms + lease.left_ms
        known = self.find(lease.ref)
        if known is not None:
            same = (known.decision_id, known.attempt) == (claim.decision_id, lease.attempt)
            _must(same, f"{key} was granted twice under one token")
            known.until_ms = until_ms
            return
        _must(key not in self.settled, f"{key} was granted when it was settled")
        _must(now_ms >= claim.due_ms, f"{key} was granted too early")
        before = self.by_run.setdefault(key, [])
        _must(lease.attempt == len(before) + 1, f"attempt {lease.attempt} of {key} has a gap")
        for grant in self.grants:
            beside = grant.key == key or (
                grant.key.job == key.job and key.job not in self._overlapping
            )
            if beside and self.live(grant):
                message = f"{key} was granted beside {grant}"
                raise Violation(message)
        _must(lease.ref.token > self.last_token.get(key.job, 0), f"tokens of {key} do not rise")
        self.last_token[key.job] = lease.ref.token
        for grant in before:
            grant.ended = True
        made = Grant(key, lease.ref.token, lease.attempt, claim.holder, claim.decision_id, until_ms)
        before.append(made)
        self.grants.append(made)

    def find(self, ref: LeaseRef) -> Optional[Grant]:
        return next(
            (item for item in self.by_run.get(ref.key, ()) if item.token == ref.token), None
        )

    def renewed(self, refs: Sequence[LeaseRef], replies: Sequence[RenewReply]) -> None:
        for ref, reply in zip(refs, replies):
            grant = self.find(ref)
            if reply is RenewReply.RENEWED:
                assert grant is not None
                _must(not grant.ended, f"{ref} was renewed after its end")
                grant.until_ms = self.now_ms() + LEASE_MS

    def reported(self, ref: LeaseRef, settlement: Settlement, reply: SettleReply) -> None:
        grant = self.find(ref)
        if not reply.accepted:
            return
        assert grant is not None
        assert reply.state is not None
        newest = self.by_run[ref.key][-1] is grant
        _must(newest, f"{ref} was settled although another attempt was granted")
        grant.ended = True
        if settlement.outcome is not Outcome.FINISHED:
            self.no_success.add((ref.key, grant.attempt))
        if reply.state.settled:
            how = f"{reply.state.value} by its holder"
            _must(self.settled.setdefault(ref.key, how) == how, f"{ref} was settled twice")
        if reply.state is RunState.FINISHED:
            self.finished.add(ref.key)

    def once(self, claims: Sequence[OnceClaim], replies: Sequence[ClaimReply]) -> None:
        for claim, reply in zip(claims, replies):
            self.due_ms[claim.key] = claim.due_ms
            if reply.verdict is Verdict.GRANTED:
                _must(self.now_ms() >= claim.due_ms, f"{claim.key} was granted too early")
                same = self.decided.setdefault(claim.key, claim.decision_id) == claim.decision_id
                _must(same, f"{claim.key} was won twice")

    def started(self, key: RunKey, run: Run) -> None:
        self.now_ms()
        _must(key in self.due_ms, f"{key} was started without a claim")
        _must(self.latest_ms >= self.due_ms[key], f"{key} was started before its due time")
        attempt = 1
        if isinstance(run, LeaseRun):
            attempt = run.attempt
            grant = self.find(LeaseRef(key, run.token))
            _must(grant is not None, f"{key} was started without a grant")
            assert grant is not None
            _must(key not in self.finished, f"{key} was started after an accepted finish")
            _must(self.live(grant), f"{key} was started without a live lease: {grant}")
            grant.started = True
        else:
            _must(key in self.decided, f"{key} was started without a grant")
        self.starts[key, attempt] += 1
        _must(self.starts[key, attempt] == 1, f"attempt {attempt} of {key} was started twice")


def _must(holds: bool, message: str) -> None:  # noqa: FBT001 - what must hold
    if not holds:
        raise Violation(message)


class JudgedLease(MemoryLease):
    """Tells the judge what the store decided."""

    judge: Judge

    def claim(self, claims: Sequence[LeaseClaim]) -> Sequence[LeaseReply]:
        replies = super().claim(claims)
        self.judge.claimed(claims, replies)
        return replies

    def renew(self, leases: Sequence[LeaseRef], lease_ms: int) -> Sequence[RenewReply]:
        replies = super().renew(leases, lease_ms)
        self.judge.renewed(leases, replies)
        return replies

    def settle(self, lease: LeaseRef, settlement: Settlement) -> SettleReply:
        reply = super().settle(lease, settlement)
        self.judge.reported(lease, settlement, reply)
        return reply


class JudgedClaim(MemoryClaim):
    """Tells the judge what the store decided."""

    judge: Judge

    def claim(self, claims: Sequence[OnceClaim]) -> Sequence[ClaimReply]:
        replies = super().claim(claims)
        self.judge.once(claims, replies)
        return replies


# -- what goes wrong -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Weather:
    """How likely what goes wrong is.

    Attributes:
        slow: Calls that take their time.
        lost: Calls whose request or reply is lost.
        late: Lost requests that reach the store later on.
        event_ms: Mean time between two events: outages, pauses, crashes and so on.
        events: Names of these events.
        failing: Handlers that raise or hand over.
        longest_ms: The longest handler.
    """

    slow: float = 0.0
    lost: float = 0.0
    late: float = 0.0
    event_ms: int = 0
    events: tuple[str, ...] = ()
    failing: float = 0.0
    longest_ms: int = 900


CALM = Weather()
STORM = Weather(
    slow=0.12,
    lost=0.08,
    late=0.15,
    event_ms=4_000,
    events=(
        "down",
        "down",
        "all down",
        "pause",
        "pause",
        "kill",
        "kill",
        "stop",
        "store step",
        "store back",
        "host step",
        "host step",
        "deploy",
        "no threads",
        "reject",
    ),
    failing=0.2,
    longest_ms=int(2.5 * LEASE_MS),
)
MILD = Weather(slow=0.1, lost=0.08, longest_ms=2 * LEASE_MS)
CLAIM_CRASHES = STORM
CLAIM_STORM = replace(
    STORM, events=("down", "all down", "pause", "store step", "host step", "no threads")
)


HURRICANE = replace(STORM, slow=0.4, lost=0.15, events=("down", "pause", "all down", "store step"))
"""Slow replies just before renewals fail: what tests of trust need often."""


class Body:
    """A handler's thread; it works only while the driver waits for it, so nothing is by chance."""

    def __init__(self, work: Callable[[], object]) -> None:
        self._work = work
        self._go, self._back = threading.Semaphore(0), threading.Semaphore(0)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._begun = False
        self._error: Optional[BaseException] = None
        self.cut = False
        self.ended = False
        self.next_ms = 0

    def resume(self) -> None:
        if self._begun:
            self._go.release()
        else:
            self._begun = True
            self._thread.start()
        self._back.acquire()
        if self.ended:
            self._thread.join()
        if self._error is not None and not self.cut:
            raise self._error

    def end(self) -> None:
        """Let the process of this handler end."""
        self.cut = True
        while self._begun and not self.ended:
            self.resume()

    def pause(self, until_ms: int) -> None:
        """In the handler: let time pass."""
        self.next_ms = until_ms
        self._back.release()
        self._go.acquire()
        if self.cut:
            raise Gone

    def failed(self, error: Violation) -> None:
        """In the handler: something must not have been."""
        self._error = error

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as error:  # noqa: BLE001 - told to the driver
            self._error = self._error or error
        self.ended = True
        self._back.release()


@dataclass(eq=False)
class Work:
    """A granted run on its way."""

    run: ManualRun
    next_ms: int
    body: Optional[Body] = None


class Wire(Faults):
    """The way from an instance to the store."""

    def __init__(self, world: World, host: Host) -> None:
        super().__init__()
        self._world = world
        self._host = host

    def call(self, method: str, work: Callable[[], T]) -> T:
        return work() if method in LOCAL else self._world.call(self._host, method, work)


@dataclass(eq=False)
class Host:
    """One instance on its machine."""

    label: str
    clock: ManualClock
    rng: random.Random
    scheduler: Scheduler[Any] = field(init=False)
    manual: ManualScheduler = field(init=False)
    store: Union[JudgedLease, JudgedClaim] = field(init=False)
    alive: bool = False
    stopping_ms: Optional[int] = None
    restart_ms: int = 0
    paused_ms: int = 0
    cut_off_ms: int = 0
    busy: set[str] = field(default_factory=set)
    works: list[Work] = field(default_factory=list)
    life: int = 0
    losses: int = 0
    events: list[Event] = field(default_factory=list)
    steps: Counter[int] = field(default_factory=Counter)
    deployed: int = 0


class Actor(NamedTuple):
    """Something that may happen next."""

    wait_ms: int
    act: Callable[[], None]


class World:
    """A driver of histories.

    Args:
        seed: Decides everything.
        weather: What goes wrong.
        family: ``"lease"`` or ``"claim"``.
    """

    def __init__(self, seed: int, weather: Weather, family: str = "lease") -> None:
        self.rng = random.Random(seed)
        self.weather = weather
        self._stormy = bool(weather.events)
        self.family = family
        self.now_ms = 0
        self.store_clock = ManualClock(BEGIN_MS, 77)
        self.judge = Judge(self.store_clock, frozenset({"allow"}))
        self.log: list[str] = []
        self._late: list[tuple[int, Callable[[], object]]] = []
        self._event_ms = 0
        self._stepped_ms = -HOUR
        self._depth = 0
        self._active: Optional[Body] = None
        self._name = f"world {next(_numbers)}"
        self.hosts = [self._host(label) for label in "abcd"[: self.rng.choice((2, 3, 3, 4))]]

    # -- building ------------------------------------------------------------------------------

    def _host(self, label: str) -> Host:
        rng = self.rng
        skew_ms = rng.choice((0, 0, 200, -300, 700, -900, 4_000, -6_000, 30_000, -30_000))
        clock = ManualClock(BEGIN_MS + skew_ms, 1_000_000 * rng.randint(1, 9))
        host = Host(label, clock, rng)
        backend: Union[FaultyLease, FaultyClaim]
        if self.family == "lease":
            lease = JudgedLease(self._name)
            lease.judge = self.judge
            backend = FaultyLease(lease)
            host.store = lease
            options: dict[str, Any] = {"lease_ms": LEASE_MS}
        else:
            claim = JudgedClaim(self._name)
            claim.judge = self.judge
            backend = FaultyClaim(claim)
            host.store = claim
            options = {"claim_window_ms": WINDOW_MS}
        backend.faults = Wire(self, host)
        slots = rng.choice((2, 5, 32)) if self.family == "lease" else 32
        host.scheduler = Scheduler(backend, max_concurrent_runs=slots, **options)
        host.manual = ManualScheduler(host.scheduler, clock, store_clock=self.store_clock)
        for name in EVENT_NAMES:
            host.scheduler.on(name, host.events.append)  # type: ignore[arg-type]
        self._add_jobs(host)
        return host

    def _add_jobs(self, host: Host) -> None:
        add = cast("Callable[..., object]", host.scheduler.add_job)
        if self.family == "claim":
            add(self._handler, every(seconds=5), name="skip")
            add(self._handler, every(seconds=7), name="allow", jitter_ms=4_000)
            return
        late: dict[str, Any] = {"catch_up_ms": HOUR, "catch_up_limit": 1_000}
        late["retry_delay_ms"] = 300
        add(self._handler, every(seconds=10), name="skip", **late)
        add(self._handler, every(seconds=7), name="allow", overlap="allow", jitter_ms=4_000, **late)
        add(
            self._handler,
            every(seconds=5),
            name="short",
            catch_up_ms=0,
            max_attempts=2,
            time_limit_ms=4_000,
        )
        add(self._handler, every(seconds=12), name="deploy", **late)

    def _deploy(self, host: Host) -> None:
        """Give an instance the new schedule."""
        if self.family == "claim" or host.deployed:
            return
        host.deployed = 1
        host.scheduler.remove_job("deploy")
        cast("Callable[..., object]", host.scheduler.add_job)(
            self._handler,
            every(seconds=8),
            name="deploy",
            catch_up_ms=HOUR,
            catch_up_limit=1_000,
            retry_delay_ms=300,
        )
        if host.alive and host.manual._timer is not None:
            host.manual._timer.change("deploy", host.scheduler._jobs["deploy"])

    # -- handlers ------------------------------------------------------------------------------

    def _handler(self, run: Run) -> None:
        body = self._active
        assert body is not None
        key = RunKey(run.job, round(run.scheduled_time.timestamp() * 1000))
        try:
            self.judge.started(key, run)
        except Violation as error:
            body.failed(error)
            return
        rng, weather = self.rng, self.weather
        length_ms = rng.choice((0, 50, rng.randint(0, 900), rng.randint(0, weather.longest_ms)))
        looks = rng.random() < 0.7
        end_ms = self.now_ms + length_ms
        while self.now_ms < end_ms:
            body.pause(min(end_ms, self.now_ms + rng.randint(1, 1_500)))
            if looks or run.stopping:
                run.check()
        chance = rng.random()
        if chance < weather.failing / 3:
            raise HandOver
        if chance < weather.failing:
            message = "no luck"
            raise ValueError(message)

    # -- the wire ------------------------------------------------------------------------------

    def call(self, host: Host, method: str, work: Callable[[], T]) -> T:
        rng, weather, life = self.rng, self.weather, host.life
        lost = rng.random() < weather.lost and (weather.event_ms > 0 or host.losses < 1)
        slow = rng.random() < weather.slow
        if not (lost or slow):
            host.losses = 0
            self._refuse_when_down(host, method)
            return work()
        host.losses = host.losses + 1 if lost else 0
        before_ms = rng.randint(0, 300)
        after_ms = rng.randint(0, rng.choice((100, CALL_MS - 50 - before_ms)))
        self._linger(host, life, before_ms)
        self._refuse_when_down(host, method)
        if lost and rng.random() < 0.5:
            if rng.random() < weather.late and method != "register":  # else an old schedule stays
                self._late.append((self.now_ms + rng.randint(0, 3 * CALL_MS), work))
            self._linger(host, life, rng.choice((0, after_ms, CALL_MS)))
            message = f"{method}: request lost"
            raise OutcomeUnknown(message)
        result = work()
        self._linger(host, life, after_ms)
        if lost:
            message = f"{method}: reply lost"
            raise OutcomeUnknown(message)
        return result

    def _refuse_when_down(self, host: Host, method: str) -> None:
        if host.cut_off_ms > self.now_ms:
            message = f"{method}: the store is down"
            raise StoreUnavailable(message)

    def _linger(self, host: Host, life: int, ms: int) -> None:
        """Let time pass while a call is under way; others work meanwhile."""
        if self._depth > 1 and not self._stormy:
            return  # the calls around this one would take longer than their time-out
        self._run(self.now_ms + ms)
        while host.life == life and host.alive and host.paused_ms > self.now_ms:
            self._run(host.paused_ms)
        if host.life != life:
            raise Gone

    # -- the driver ----------------------------------------------------------------------------

    def play(self) -> None:
        """Play the history: a storm, then calm; judge what is left."""
        try:
            for host in self.hosts:
                self._start(host)
                self._run(self.now_ms + self.rng.randint(0, 2_000))
            self._run(STORM_MS)
            self._calm_down()
            self._run(self.now_ms + CALM_MS)
            self._judge_the_end()
        finally:
            for host in self.hosts:
                self._end_works(host)

    def _calm_down(self) -> None:
        self.weather = replace(CALM, longest_ms=800)
        for host in self.hosts:
            host.paused_ms = host.cut_off_ms = 0
            host.manual.can_start_threads = True
            self._deploy(host)
            if host.stopping_ms is not None:
                self._kill(host)
            if not host.alive:
                self._start(host)

    def _run(self, end_ms: int) -> None:
        if self._depth >= MAX_NESTED:
            self._pass(max(0, end_ms - self.now_ms))
            return
        self._depth += 1
        try:
            while True:
                actors = [actor for host in self.hosts for actor in self._actors(host)]
                ready = [actor for actor in actors if actor.wait_ms <= 0]
                if ready:
                    self.rng.choice(ready).act()
                    continue
                if self.now_ms >= end_ms:
                    return
                waits = [actor.wait_ms for actor in actors]
                waits += [at_ms - self.now_ms for at_ms, _work in self._late]
                self._pass(max(1, min([end_ms - self.now_ms, *waits])))
        finally:
            self._depth -= 1

    def _pass(self, ms: int) -> None:
        self.now_ms += ms
        self.store_clock.advance(ms)
        for host in self.hosts:
            host.clock.advance(ms)
        self.judge.now_ms()
        arrived = [work for at_ms, work in self._late if at_ms <= self.now_ms]
        self._late = [item for item in self._late if item[0] > self.now_ms]
        for work in arrived:
            work()
        self._judge_trust()
        if self.weather.event_ms and self.now_ms >= self._event_ms:
            self._event_ms = self.now_ms + self.rng.randint(1, 2 * self.weather.event_ms)
            self._happen(self.rng.choice(self.weather.events))

    def _actors(self, host: Host) -> Iterator[Actor]:
        now_ms = self.now_ms
        if not host.alive:
            if self.weather.event_ms:
                yield Actor(host.restart_ms - now_ms, lambda: self._start(host))
            return
        if host.paused_ms > now_ms:
            yield Actor(host.paused_ms - now_ms, lambda: None)
            return
        manual, steady_ms = host.manual, host.clock.steady_ms()
        if host.stopping_ms is not None:
            over = not host.works or host.stopping_ms <= now_ms
            wait_ms = 0 if over else host.stopping_ms - now_ms
            yield Actor(wait_ms, lambda: self._kill(host))
        elif "timer" not in host.busy:
            yield Actor(manual._timer_ms - steady_ms, lambda: self._timer(host))
        if manual._heartbeat is not None and "heartbeat" not in host.busy:
            yield Actor(manual._heartbeat_ms - steady_ms, lambda: self._heartbeat(host))
        self._find_works(host)
        for item in host.works:
            if f"work {id(item)}" not in host.busy:
                yield Actor(item.next_ms - now_ms, lambda item=item: self._work(host, item))  # type: ignore[misc]

    def _find_works(self, host: Host) -> None:
        known = {id(item.run) for item in host.works}
        for run in host.manual.runs:
            if id(run) not in known:
                late_ms = self.rng.choice((0, 0, 0, 5, 300))
                if self.weather.event_ms and self.rng.random() < 0.05:
                    late_ms = self.rng.randint(0, 2 * LEASE_MS)  # its thread does not get to work
                host.works.append(Work(run, self.now_ms + late_ms))

    def _timer(self, host: Host) -> None:
        host.steps[self.now_ms // SECOND] += 1
        most = MAX_STEPS + 3 * len(host.events[-60:])
        _must(host.steps[self.now_ms // SECOND] <= most, "a timer spins")
        self._as(host, "timer", host.manual.step_timer)

    def _heartbeat(self, host: Host) -> None:
        host.steps[-1 - self.now_ms // SECOND] += 1
        _must(host.steps[-1 - self.now_ms // SECOND] <= MAX_STEPS, "a heart races")
        self._as(host, "heartbeat", host.manual.step_heartbeat)

    def _as(self, host: Host, lane: str, act: Callable[[], object]) -> None:
        """Do something in one thread of an instance."""
        busy = host.busy
        busy.add(lane)
        try:
            act()
        except Gone:
            return
        finally:
            busy.discard(lane)

    def _work(self, host: Host, item: Work) -> None:
        if item.body is None:
            item.body = Body(item.run.call_handler)
        body = item.body
        if not body.ended:
            self._active = body
            body.resume()
            item.next_ms = max(self.now_ms, body.next_ms)
            return

        def settle() -> None:
            delay_ms = item.run.settle()
            if delay_ms is None:
                host.works.remove(item)
                host.manual.runs.remove(item.run)
            else:
                item.next_ms = self.now_ms + delay_ms

        self._as(host, f"work {id(item)}", settle)

    # -- events --------------------------------------------------------------------------------

    def _happen(self, what: str) -> None:
        rng = self.rng
        host = rng.choice(self.hosts)
        self.log.append(f"{self.now_ms:>7} {what} {host.label}")
        if what in ("down", "all down"):
            until_ms = self.now_ms + rng.choice((300, 2_000, 5_000, 15_000))
            for item in self.hosts if what == "all down" else [host]:
                item.cut_off_ms = max(item.cut_off_ms, until_ms)
        elif what == "pause":
            host.paused_ms = self.now_ms + rng.choice((500, 3_000, 8_000, 15_000))
        elif what == "kill" and host.alive:
            self._kill(host)
        elif what == "stop" and self._can_stop(host):
            host.stopping_ms = self.now_ms + 4_000
            self._as(host, "timer", host.manual.stop)
        elif what == "deploy":
            self._deploy(host)
        elif what == "no threads":
            host.manual.can_start_threads = rng.random() < 0.8
        else:
            self._step_clock(what, host)

    def _can_stop(self, host: Host) -> bool:
        works = host.alive and host.stopping_ms is None and host.paused_ms <= self.now_ms
        return works and "timer" not in host.busy

    def _step_clock(self, what: str, host: Host) -> None:
        rng = self.rng
        if what == "store step" and self.now_ms - self._stepped_ms > 2 * LEASE_MS:
            self._stepped_ms = self.now_ms
            self.store_clock.step(rng.randint(-MARGIN_MS, MARGIN_MS - 50))
        elif what == "store back" and rng.random() < 0.3:
            self.store_clock.step(-rng.randint(1, 9_000))
        elif what == "host step":
            host.clock.step(rng.choice((-3, 50, -700, 3_000, -9_000, 20_000, -20_000, 300_000)))

    def _start(self, host: Host) -> None:
        if not host.alive:
            host.alive, host.stopping_ms = True, None
            host.manual.start()

    def _kill(self, host: Host) -> None:
        host.life += 1
        host.alive, host.stopping_ms, host.paused_ms = False, None, 0
        host.manual.kill()
        host.busy = set()
        self._end_works(host)
        host.restart_ms = self.now_ms + self.rng.choice((50, 1_000, 6_000, 12_000))

    def _end_works(self, host: Host) -> None:
        for item in host.works:
            if item.body is not None:
                item.body.end()
        host.works = []

    # -- what must hold ------------------------------------------------------------------------

    def _judge_trust(self) -> None:
        for host in self.hosts:
            for live in host.manual._runtime.runs():
                if live.done or live.lease is None or not live.control.trusted:
                    continue
                grant = self.judge.find(live.lease.ref)
                assert grant is not None
                if not self.judge.live(grant):
                    message = f"{host.label} trusts a lease that is not live: {grant}"
                    raise Violation(message)

    def _judge_the_end(self) -> None:
        end_ms = self.store_clock.now_ms() - EXCUSED_MS
        if self.family == "lease":
            self._judge_records(end_ms)
            if not self._stormy:
                self._judge_attempts()
        else:
            self._judge_claims(end_ms)
        for host in self.hosts:
            self._judge_host(host, end_ms)

    def _judge_records(self, end_ms: int) -> None:
        store = self.hosts[0].store
        assert isinstance(store, MemoryLease)
        records = {record.key: record for record in store.history(None, 1_000_000)}
        for key, record in records.items():
            old = key.scheduled_ms < end_ms
            _must(record.state.settled or not old, f"{record} is left unsettled")
        for job, seconds in (("skip", 10), ("allow", 7), ("deploy", 8)):
            owed_from_ms = store._tables().jobs[job].owed_from_ms
            assert owed_from_ms is not None
            # A skew of less than this is not put right, nor a change of it.
            at_ms: Optional[int] = Every(seconds).after(owed_from_ms + SKEW_WARNING_MS)
            while at_ms is not None and at_ms < end_ms:
                _must(RunKey(job, at_ms) in records, f"{job} at {at_ms - BEGIN_MS} is lost")
                at_ms = Every(seconds).after(at_ms)

    def _judge_attempts(self) -> None:
        """Where only messages are lost, an attempt ends for the handler's reasons alone."""
        for key, grants in self.judge.by_run.items():
            for grant in grants[:-1]:
                # The handlers of this job may be past their time limit.
                wanted = (key, grant.attempt) in self.judge.no_success or key.job == "short"
                _must(wanted, f"attempt {grant.attempt} of {key} was lost for nothing")

    def _judge_claims(self, end_ms: int) -> None:
        told: set[RunKey] = set()
        seconds = {"skip": 5, "allow": 7}
        for event in (event for host in self.hosts for event in host.events):
            if event.name in ("run_missed", "run_failed", "run_started", "run_claimed"):
                assert event.job is not None
                assert event.scheduled_time is not None
                last_ms = round(event.scheduled_time.timestamp() * 1000)
                first_ms = round((event.first_time or event.scheduled_time).timestamp() * 1000)
                period_ms = seconds[event.job] * SECOND
                told |= {RunKey(event.job, ms) for ms in range(first_ms, last_ms + 1, period_ms)}
        ended = any(host.life for host in self.hosts)  # with it a decision may end unknown
        for key in () if ended else self.judge.decided:
            _must(key in told or key.scheduled_ms >= end_ms, f"{key} was won and is not told of")

    def _judge_host(self, host: Host, end_ms: int) -> None:
        context, loop = host.manual._context, host.manual._timer
        assert context is not None
        assert loop is not None
        _must(context.caller.down_since_ms is None, f"{host.label} calls the store down")
        _must(not context.caller._failing, f"{host.label} has lanes that fail")
        for live in host.manual._runtime.runs():
            _must(live.key.scheduled_ms >= end_ms, f"{host.label} still has {live.key}")
        old = loop._backlog.filtered(lambda item: item.due_ms < end_ms)
        _must(not old, f"{host.label} still means to claim {[item.key for item in old]}")
        sizes = {
            "backlog": len(loop._backlog.filtered(self._is_due)),
            "handing back": len(loop._starter._handing_back),
            "lapses": len(loop._standby._lapses),
            "heap": len(loop._agenda._heap) - len(loop._jobs),
        }
        _must(max(sizes.values()) < 8, f"{host.label} keeps more than it needs: {sizes}")
        downs = [event.name for event in host.events if event.name in ("store_down", "store_back")]
        for one, two in zip(downs, downs[1:]):
            twice = one == two == "store_back" or (one == two and host.life == 0)
            _must(not twice, f"{host.label} told {one} twice")

    def _is_due(self, item: Candidate) -> bool:
        return item.due_ms <= self.store_clock.now_ms()


def play(seed: int, weather: Weather, family: str = "lease") -> World:
    state = random.getstate()
    random.seed(seed)  # delays before another try come from there
    world = World(seed, weather, family)
    try:
        with mock.patch("os.urandom", world.rng.randbytes):  # ids of instances
            world.play()
    except Exception as error:
        lines = "\n".join(world.log[-12:])
        message = f"seed {seed} ({family}): {type(error).__name__}: {error}\n{lines}"
        raise Violation(message) from error
    finally:
        random.setstate(state)
    return world


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


# -- the histories ---------------------------------------------------------------------------------


def seeds(share: float = 1.0) -> range:
    return range(FIRST_SEED, FIRST_SEED + max(1, round(HISTORIES * share)))


@pytest.mark.timeout(0)
def test_whatever_goes_wrong_nothing_is_doubled_lost_or_left() -> None:
    for seed in seeds():
        play(seed, STORM)


@pytest.mark.timeout(0)
def test_lost_and_slow_messages_alone_cost_no_attempt() -> None:
    for seed in seeds(0.25):
        play(seed, MILD)


@pytest.mark.timeout(0)
def test_a_claim_is_won_once_whatever_goes_wrong() -> None:
    for seed in seeds(0.5):
        play(seed, CLAIM_STORM, "claim")


@pytest.mark.timeout(0)
def test_a_claim_is_won_once_whoever_crashes() -> None:
    for seed in seeds(0.5):
        play(seed, CLAIM_CRASHES, "claim")


def test_a_seed_decides_everything() -> None:
    one, two = (play(FIRST_SEED, STORM) for _ in range(2))
    assert one.log == two.log
    assert [vars(grant) for grant in one.judge.grants] == [
        vars(grant) for grant in two.judge.grants
    ]


# -- does the judge see it? ------------------------------------------------------------------------


Plant = Callable[[pytest.MonkeyPatch], None]


def trust_from_the_reply_to_a_claim(patch: pytest.MonkeyPatch) -> None:
    start = starting.Starter.start

    def late(self: starting.Starter, item: Candidate, reply: LeaseReply, sent_ms: int) -> None:
        start(self, item, reply, max(sent_ms, self._context.clock.steady_ms()))

    patch.setattr(starting.Starter, "start", late)


def trust_from_the_reply_to_a_renewal(patch: pytest.MonkeyPatch) -> None:
    renew = HeartbeatLoop._renew

    def late(self: HeartbeatLoop, runs: list[LiveRun], sent_ms: int) -> int:
        before = {id(live): live.control.trusted_until_ms for live in runs}
        next_ms = renew(self, runs, sent_ms)
        for live in runs:
            if live.control.trusted_until_ms != before[id(live)]:
                took_ms = self._context.clock.steady_ms() - sent_ms
                live.control.trust_until(live.control.trusted_until_ms + took_ms)
        return next_ms

    patch.setattr(HeartbeatLoop, "_renew", late)


def no_margin(patch: pytest.MonkeyPatch) -> None:
    def renewed(self: RunControl, until_ms: int) -> None:
        self._trusted_until_ms = until_ms + MARGIN_MS + 1

    patch.setattr(RunControl, "trust_until", renewed)


def no_look_before_the_handler(patch: pytest.MonkeyPatch) -> None:
    call_handler = worker.call_handler

    def call(context: Context, live: LiveRun) -> worker.Ending:
        control = live.control
        until_ms, started = control._trusted_until_ms, control.started

        def begin() -> None:
            control._trusted_until_ms = until_ms
            started()

        control._trusted_until_ms = 1 << 60
        patch.setattr(control, "started", begin)
        return call_handler(context, live)

    patch.setattr(harness, "call_handler", call)


def a_new_decision_for_each_try(patch: pytest.MonkeyPatch) -> None:
    prepare = _Asking._prepare

    def anew(self: _Asking, candidates: Sequence[Candidate], sent_ms: int) -> None:
        for item in candidates:
            item.decision_id = ""
        prepare(self, candidates, sent_ms)

    patch.setattr(_Asking, "_prepare", anew)


def one_decision_for_all(patch: pytest.MonkeyPatch) -> None:
    def same(_self: _Asking, candidates: Sequence[Candidate], sent_ms: int) -> None:
        for item in candidates:
            item.decision_id, item.tried_ms = f"{item.key}", sent_ms

    patch.setattr(_Asking, "_prepare", same)


def looking_back_finds_nothing(patch: pytest.MonkeyPatch) -> None:
    step = CatchUp.step

    def nothing(self: CatchUp) -> Found:
        return step(self)._replace(owed=[])

    patch.setattr(CatchUp, "step", nothing)


def unsettled_runs_do_not_go_first(patch: pytest.MonkeyPatch) -> None:
    def last(candidates: Iterable[Candidate], asker: Asker) -> Pick:
        chosen = [item for item in candidates if item.ask_ms <= asker.steady_ms]
        return Pick(chosen[: max(0, asker.free)], starved=False, more=False)

    patch.setattr(timer, "pick", last)


def unsettled_runs_are_not_looked_for(patch: pytest.MonkeyPatch) -> None:
    def never(self: Standby) -> Optional[int]:
        return None if self._ask_ms is None else self._ask_ms + HOUR

    patch.setattr(Standby, "ask_ms", never)


def an_end_is_told_once(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(worker.Settling, "_failed", lambda *_arguments: None)


def a_refused_renewal_is_ignored(patch: pytest.MonkeyPatch) -> None:
    def trusting(self: RunControl) -> bool:
        return not self._lost

    patch.setattr(RunControl, "trusted", property(trusting))


def nothing_ends_an_outage(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Caller, "round_ended", lambda *_arguments: None)


@pytest.mark.timeout(0)
@pytest.mark.parametrize(
    ("plant", "weather", "family"),
    [
        (trust_from_the_reply_to_a_claim, HURRICANE, "lease"),
        (trust_from_the_reply_to_a_renewal, HURRICANE, "lease"),
        (no_margin, HURRICANE, "lease"),
        (no_look_before_the_handler, STORM, "lease"),
        (a_new_decision_for_each_try, MILD, "lease"),
        (a_new_decision_for_each_try, CLAIM_STORM, "claim"),
        (one_decision_for_all, STORM, "lease"),
        (one_decision_for_all, CLAIM_STORM, "claim"),
        (looking_back_finds_nothing, STORM, "lease"),
        (unsettled_runs_do_not_go_first, STORM, "lease"),
        (unsettled_runs_are_not_looked_for, STORM, "lease"),
        (an_end_is_told_once, MILD, "lease"),
        (a_refused_renewal_is_ignored, STORM, "lease"),
        (nothing_ends_an_outage, STORM, "lease"),
    ],
)
def test_a_planted_fault_is_found(
    plant: Plant, weather: Weather, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    for seed in range(PLANT_SEEDS):
        try:
            play(seed, weather, family)
        except Violation:
            return
    pytest.fail(f"not found in {PLANT_SEEDS} histories")
