"""What a fault campaign will do, and when: a function of the seed alone."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final, Optional

from leasecron_sync.testing.simulation.dice import Dice

LEASE_MS: Final = 1_500
CALL_TIMEOUT_MS: Final = LEASE_MS // 3
MARGIN_MS: Final = max(50, LEASE_MS // 10)
WINDOW_MS: Final = 5_000
"""How long a run may be claimed on a claim backend."""

MOST: Final = 8
"""Instances at a time."""
FEWEST: Final = 3
FIRST: Final = 5

LEASES: Final = ("sqlite", "postgres", "redis", "valkey")
CLAIMS: Final = ("rabbitmq", "nats", "redis-script", "redis-stream-id", "redis-idmp")
STORES: Final = (*LEASES, *CLAIMS)
REDIS: Final = ("redis", "valkey", "redis-script", "redis-stream-id", "redis-idmp")
SERVERS: Final = tuple(store for store in STORES if store != "sqlite")
CLOCKED: Final = (*LEASES, "redis-script", "redis-stream-id")
"""Stores whose clock can be set."""
HOST_CLOCK: Final = ("rabbitmq", "nats")
"""Stores without a clock of their own that decides: there the hosts' clocks do."""

BEGIN_MS: Final = 1_000
"""No fault comes before this."""
LEAD_MS: Final = 2_500
AFTER_MS: Final = 700
"""How long before a scheduled time an instance is told to end at most, and how long after it its
successor begins at most, where a restart is placed on that time."""
BEFORE_MS: Final = 300
"""How long before the scheduled time a successor may begin, likewise."""

MOST_BACK_MS: Final = 6_000
MOST_AHEAD_MS: Final = MARGIN_MS * 2 // 3
"""How far the store's clock is set back in all, and how far ahead."""

DEPLOYS: Final = "deploys"
DEPLOY_SLOTS: Final = 4
DEPLOY_STEP_MS: Final = 1_000
ALL_EVERY: Final = 10
"""In every so-manieth restart all instances are away at once."""


class PlanError(ValueError):
    """A plan that cannot be made or read; told in one line."""


@dataclass(frozen=True)
class Kind:
    """A kind of fault.

    Attributes:
        name: Its name.
        group: Who does it: ``instances``, ``network`` or ``server``.
        weight: How often it is chosen among those of its group.
        lasts_ms: Between what its length is chosen.
        stores: Where it can be played.
        needs: What the machine must have for it.
        text: What it is.
    """

    name: str
    group: str
    weight: int
    lasts_ms: tuple[int, int]
    text: str
    stores: Sequence[str] = STORES
    needs: str = ""


CLOCKS: Final = "faketime"
ROOM: Final = "disk"

KINDS: Final = (
    Kind("kill", "instances", 4, (300, 3_000), "SIGKILL; another one starts after that time"),
    Kind("stop short", "instances", 3, (200, 900), "SIGSTOP, shorter than a lease"),
    Kind("stop long", "instances", 3, (2_000, 7_000), "SIGSTOP, longer than a lease"),
    Kind("deploy", "instances", 2, (0, 2_000), "SIGTERM; a successor starts after that time"),
    Kind("deploy on time", "instances", 4, (0, 0), "the same across a scheduled time"),
    Kind("one more", "instances", 1, (0, 0), "an instance is added"),
    Kind("one fewer", "instances", 1, (0, 0), "SIGTERM without a successor"),
    Kind(
        "clock step",
        "instances",
        2,
        (2_000, 8_000),
        "the wall clock of one instance is set, and set right after that time",
        [store for store in STORES if store != "sqlite"],
        CLOCKS,
    ),
    Kind("cut", "network", 2, (0, 0), "connections end", SERVERS),
    Kind("reset", "network", 2, (0, 0), "connections are reset", SERVERS),
    Kind("silence", "network", 3, (300, 6_000), "nothing arrives, nobody is told", SERVERS),
    Kind("delay", "network", 2, (1_000, 5_000), "all bytes come late", SERVERS),
    Kind("half-open", "network", 2, (500, 5_000), "nobody accepts new connections", SERVERS),
    Kind("reply lost", "network", 3, (0, 0), "a command takes effect, its reply is lost", SERVERS),
    Kind("server kill", "server", 3, (300, 4_000), "SIGKILL, and a start after that", SERVERS),
    Kind("server restart", "server", 2, (0, 2_000), "an orderly stop, and a start", SERVERS),
    Kind("server pause short", "server", 2, (150, 400), "SIGSTOP within a call time-out", SERVERS),
    Kind("server pause long", "server", 3, (1_500, 8_000), "SIGSTOP past it", SERVERS),
    Kind("read-only", "server", 2, (1_000, 6_000), "it refuses writes", ("postgres", *REDIS)),
    Kind("connections ended", "server", 2, (0, 0), "all, by an operator", ("postgres", *REDIS)),
    Kind("script flush", "server", 2, (0, 0), "it forgets the scripts", REDIS),
    Kind("memory full", "server", 2, (1_000, 6_000), "it refuses what takes memory", REDIS),
    Kind("file locked", "server", 4, (300, 6_000), "by another process", ["sqlite"]),
    Kind("disk full", "server", 3, (1_000, 5_000), "no room to write", ["sqlite"], ROOM),
    Kind(
        "store clock step",
        "server",
        2,
        (0, 0),
        "back by up to 3 s, or ahead within the trust margin",
        CLOCKED,
        CLOCKS,
    ),
)
BY_NAME: Final = {kind.name: kind for kind in KINDS}
GROUPS: Final = ("instances", "network", "server")

CLOCK_STEPS_MS: Final = (-3_600_000, -30_000, -4_000, -700, 700, 4_000, 30_000, 3_600_000)
SMALL_STEPS_MS: Final = (-3_000, -1_500, -600, 600, 1_500, 3_000)
"""Where a host's clock decides, less than the claim window; elsewhere anything will do."""

GAP_MS: Final = {"instances": (400, 1_800), "network": (2_500, 9_000), "server": (4_000, 12_000)}
"""How long nothing begins after a fault of the same group: from its begin for instances, from its
end for others, of which there is one at a time."""


@dataclass(frozen=True)
class Injection:
    """One fault.

    Attributes:
        at_ms: When it begins, in ms since the campaign did.
        kind: Name of its kind.
        slot: Number of the instance that it is about; None for the server, or the whole network.
        lasts_ms: How long it lasts.
        amount: By how much a clock is set, or bytes are late, in ms; which reply is lost.
        on_ms: The scheduled time that a restart is placed on, in ms since the campaign began.
    """

    at_ms: int
    kind: str
    slot: Optional[int] = None
    lasts_ms: int = 0
    amount: int = 0
    on_ms: Optional[int] = None

    @property
    def end_ms(self) -> int:
        """When it is over."""
        return self.at_ms + self.lasts_ms

    @property
    def whom(self) -> str:
        """Whom it is done to, for people."""
        if self.slot is not None:
            return f"instance {self.slot}"
        return "everybody" if BY_NAME[self.kind].group == "network" else "the store"

    @property
    def details(self) -> str:
        """What else there is to say, for people."""
        if self.kind in ("clock step", "store clock step"):
            return f"by {self.amount:+,} ms"
        if self.kind == "delay":
            return f"by {self.amount} ms each way"
        if self.kind == "reply lost":
            return f"of the {self.amount}. request from then on"
        if self.on_ms is not None:
            after_ms = self.end_ms - self.on_ms
            when = f"{abs(after_ms)} ms {'after' if after_ms >= 0 else 'before'} it"
            return f"{self.on_ms - self.at_ms:,} ms before a scheduled time, successor {when}"
        return ""


@dataclass(frozen=True)
class Wishes:
    """What a plan is made from.

    Attributes:
        store: Name of the store.
        seed: What everything else follows from.
        span_ms: How long faults go on.
        only: Names of kinds or groups to choose from; all when empty.
        restarts: In deploys alone, how many scheduled times have a restart placed on them.
    """

    store: str
    seed: int
    span_ms: int = 60_000
    only: tuple[str, ...] = ()
    restarts: int = 0

    @property
    def deploys(self) -> bool:
        """Whether it is about rolling deploys alone."""
        return DEPLOYS in self.only


@dataclass(frozen=True)
class Plan:
    """All faults of a campaign, in order.

    Attributes:
        wishes: What it was made from.
        first: How many instances there are at the beginning.
        injections: The faults.
    """

    wishes: Wishes
    first: int
    injections: tuple[Injection, ...] = field(default=())

    def without(self, needs: Iterable[str]) -> Plan:
        """Return the plan without what needs something that is not there; the rest stays."""
        missing = set(needs)
        kept = [one for one in self.injections if BY_NAME[one.kind].needs not in missing]
        return Plan(self.wishes, self.first, tuple(kept))

    def to_json(self) -> str:
        """Return it as a file holds it."""
        return json.dumps(asdict(self), indent=1) + "\n"


def from_json(text: str) -> Plan:
    """Read what ``to_json`` returned.

    Raises:
        PlanError: It is no plan.
    """
    try:
        found: dict[str, Any] = json.loads(text)
        wishes = Wishes(**{**found["wishes"], "only": tuple(found["wishes"]["only"])})
        injections = tuple(Injection(**one) for one in found["injections"])
        plan = Plan(wishes, int(found["first"]), injections)
    except (ValueError, KeyError, TypeError) as error:
        message = f"not a plan of this script: {error}"
        raise PlanError(message) from error
    strange = {one.kind for one in injections} - set(BY_NAME)
    if strange or wishes.store not in STORES:
        message = f"not a plan of this version: it names {', '.join(sorted(strange)) or 'no store'}"
        raise PlanError(message)
    return plan


def kinds_of(store: str, only: Sequence[str] = ()) -> list[Kind]:
    """Return the kinds that can be played on a store, or those of them that are asked for.

    Raises:
        PlanError: There is no such kind or group, or none of them can be played there.
    """
    there = [kind for kind in KINDS if store in kind.stores]
    names = {kind.name for kind in KINDS} | set(GROUPS)
    for name in only:
        if name not in names:
            message = f"--only {name}: no such kind, use {', '.join([DEPLOYS, *GROUPS])} or one of "
            raise PlanError(message + ", ".join(kind.name for kind in KINDS))
    found = [kind for kind in there if not only or {kind.name, kind.group} & set(only)]
    if not found:
        message = f"--only {', '.join(only)}: cannot be played on {store}"
        raise PlanError(message)
    return found


def make_plan(wishes: Wishes) -> Plan:
    """Make the plan that these wishes lead to, always the same one.

    Raises:
        PlanError: They cannot be fulfilled.
    """
    if wishes.deploys:
        if wishes.store not in LEASES:
            message = f"--only {DEPLOYS}: {wishes.store} is a claim backend, use a lease store: "
            raise PlanError(message + ", ".join(LEASES))
        return _deploys(wishes)
    kinds = kinds_of(wishes.store, wishes.only)
    planner = _Planner(wishes)
    injections: list[Injection] = []
    for group in GROUPS:
        chosen = [kind for kind in kinds if kind.group == group]
        if chosen:
            injections += planner.play(group, chosen)
    return Plan(wishes, FIRST, tuple(sorted(injections, key=_order)))


def _order(one: Injection) -> tuple[int, str, int]:
    return one.at_ms, one.kind, -1 if one.slot is None else one.slot


def _deploys(wishes: Wishes) -> Plan:
    """One restart on each second, of one instance after the other; now and then all at once."""
    dice = Dice(f"deploys {wishes.seed}")
    injections: list[Injection] = []
    on_ms = BEGIN_MS + LEAD_MS // DEPLOY_STEP_MS * DEPLOY_STEP_MS + DEPLOY_STEP_MS
    free_ms = [0] * DEPLOY_SLOTS
    for number in range(wishes.restarts):
        everybody = number % ALL_EVERY == ALL_EVERY - 1
        if everybody:  # after those that are on their way are back
            on_ms = max(on_ms, -(-(max(free_ms) + LEAD_MS) // DEPLOY_STEP_MS) * DEPLOY_STEP_MS)
        for slot in range(DEPLOY_SLOTS) if everybody else [number % DEPLOY_SLOTS]:
            at_ms = max(on_ms - dice.between(0, LEAD_MS), free_ms[slot])
            # All of them are away at the scheduled time itself.
            after_ms = dice.between(0 if everybody else -BEFORE_MS, AFTER_MS)
            end_ms = max(at_ms, on_ms + after_ms)
            injections.append(Injection(at_ms, "deploy on time", slot, end_ms - at_ms, on_ms=on_ms))
            free_ms[slot] = end_ms + BEFORE_MS
        on_ms += DEPLOY_STEP_MS * (2 if everybody else 1)
    return Plan(wishes, DEPLOY_SLOTS, tuple(sorted(injections, key=_order)))


class _Planner:
    """Draws faults; each group has dice of its own."""

    def __init__(self, wishes: Wishes) -> None:
        self._wishes = wishes
        self._dice = Dice("")
        self._up = [slot < FIRST for slot in range(MOST)]
        self._free_ms = [0] * MOST
        self._offset_ms = 0

    def play(self, group: str, kinds: Sequence[Kind]) -> list[Injection]:
        """Return the faults of one group."""
        self._dice = Dice(f"{group} {self._wishes.seed}")
        weighted = [kind for kind in kinds for _ in range(kind.weight)]
        # Each kind once before any comes again: short campaigns meet as many as they can.
        fresh = list(kinds)
        found: list[Injection] = []
        low_ms, high_ms = GAP_MS[group]
        at_ms = BEGIN_MS + self._dice.between(0, low_ms)
        while at_ms < self._wishes.span_ms:
            kind = fresh.pop(self._dice.below(len(fresh))) if fresh else self._dice.pick(weighted)
            one = self._one(kind, at_ms)
            if one is not None and one.end_ms <= self._wishes.span_ms:
                found.append(one)
            busy_ms = at_ms if one is None or group == "instances" else one.end_ms
            at_ms = busy_ms + self._dice.between(low_ms, high_ms)
        return found

    def _one(self, kind: Kind, at_ms: int) -> Optional[Injection]:
        lasts_ms = self._dice.between(*kind.lasts_ms)
        if kind.group == "instances":
            return self._of_instance(kind, at_ms, lasts_ms)
        if kind.group == "network":
            # Half of them meet one instance alone, so that others go on meanwhile.
            slot = None if self._dice.chance(500) else self._dice.below(FIRST)
            amount = 0
            if kind.name == "delay":
                amount = self._dice.between(20, CALL_TIMEOUT_MS * 3 // 4)
            elif kind.name == "reply lost":
                amount = self._dice.between(1, 8)
            return Injection(at_ms, kind.name, slot, lasts_ms, amount)
        amount = self._store_step() if kind.name == "store clock step" else 0
        return Injection(at_ms, kind.name, None, lasts_ms, amount)

    def _store_step(self) -> int:
        """A leap ahead is within the margin, also seen from the begin; else nothing is promised."""
        ahead_ms = self._dice.between(20, MOST_AHEAD_MS)
        step_ms = -self._dice.between(300, 3_000) if self._dice.chance(500) else ahead_ms
        if self._offset_ms + step_ms < -MOST_BACK_MS:
            step_ms = ahead_ms
        elif self._offset_ms + step_ms > MOST_AHEAD_MS:
            step_ms = -self._dice.between(300, 3_000)
        self._offset_ms += step_ms
        return step_ms

    def _of_instance(self, kind: Kind, at_ms: int, lasts_ms: int) -> Optional[Injection]:
        on_ms = None
        if kind.name == "deploy on time":
            on_ms = -(-(at_ms + LEAD_MS) // 1_000) * 1_000
            at_ms = on_ms - self._dice.between(0, LEAD_MS)
            lasts_ms = max(0, on_ms + self._dice.between(-BEFORE_MS, AFTER_MS) - at_ms)
        slot = self._slot(at_ms, up=kind.name != "one more")
        if slot is None or (kind.name == "one fewer" and sum(self._up) <= FEWEST):
            return None
        amount = 0
        if kind.name == "clock step":
            few = self._wishes.store in HOST_CLOCK
            amount = self._dice.pick(SMALL_STEPS_MS if few else CLOCK_STEPS_MS)
        if kind.name in ("one more", "one fewer"):
            self._up[slot] = kind.name == "one more"
        # Its successor has some time to come to itself.
        self._free_ms[slot] = at_ms + lasts_ms + 1_500
        return Injection(at_ms, kind.name, slot, lasts_ms, amount, on_ms)

    def _slot(self, at_ms: int, *, up: bool) -> Optional[int]:
        """Return an instance that is there and in peace, or a place where none is."""
        free = [
            slot for slot in range(MOST) if self._up[slot] is up and self._free_ms[slot] <= at_ms
        ]
        return self._dice.pick(free) if free else None
