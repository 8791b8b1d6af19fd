"""The backlog keeps what may be asked for in order; a slow one looks at everything each time."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Optional, cast

from hypothesis import given, settings
from hypothesis import strategies as st

from leasecron_sync import every
from leasecron_sync.engine.agenda import Due
from leasecron_sync.engine.backlog import Backlog
from leasecron_sync.engine.decide import Asker, Candidate, Origin
from leasecron_sync.engine.expiry import Expiry, is_over
from leasecron_sync.engine.job import Job
from leasecron_sync.engine.picking import Pick, pick
from leasecron_sync.engine.runtime import LiveRun
from leasecron_sync.model import RunKey
from leasecron_sync.options import (
    EXTRA_SLOTS,
    MIN_SLICE,
    SLICE_DIVISOR,
    job_options,
    scheduler_options,
)

SCHEDULER = scheduler_options({}, "lease", "Test")
NAMES = ("skip", "allow", "few", "other", "more")
EXPIRY = {False: Expiry(None, 15_000), True: Expiry(20_000, 0, surplus=3)}


def job_of(name: str, catch_up_ms: int = 30_000) -> Job:
    options = job_options(
        {
            "name": name,
            "overlap": "allow" if name in ("allow", "more") else "skip",
            "catch_up_ms": catch_up_ms,
            "catch_up_limit": 2 if name == "few" else 100,
        },
        SCHEDULER,
        "lease",
        "Test",
    )
    schedule = every(seconds=1)
    return Job(lambda: None, wants_run=False, schedule=schedule, options=options, takeover_ms=1)


JOBS = {name: job_of(name) for name in NAMES}


@dataclass(eq=False)
class Handler:
    """As much of a live run as is looked at."""

    key: RunKey
    done: bool = False
    stale: bool = False
    caught_up: bool = False


class Plain:
    """A backlog that is slow and easy to read."""

    def __init__(self, *, in_order: bool) -> None:
        self.in_order = in_order
        self.items: dict[RunKey, Candidate] = {}

    def pick(self, asker: Asker) -> Pick:
        everything = sorted(
            (item for item in self.items.values() if asker.may_ask(item)),
            key=lambda item: (item.key.scheduled_ms if self.in_order else item.due_ms, item.key),
        )
        unsettled = [item for item in everything if item.origin is Origin.UNSETTLED]
        first = self.in_turn(unsettled, asker)
        jobs = {item.job.name for item in first if not item.job.options.overlap}
        others = [item for item in everything if item.origin is not Origin.UNSETTLED]
        rest = [item for item in self.in_turn(others, asker) if item.job.name not in jobs]
        chosen = first[: max(0, asker.free + EXTRA_SLOTS)]
        free = max(0, asker.free - len(chosen))
        size = min(free, max(MIN_SLICE, -(-len(rest) // SLICE_DIVISOR)))
        sliced = rotated(rest, asker.instance_id)[:size]
        left_out = len(first) + len(rest) - len(chosen) - len(sliced)
        starved = len(chosen) < len(first) or (bool(rest) and asker.free <= 0)
        return Pick(chosen + sliced, starved, left_out > 0 and not starved)

    def in_turn(self, candidates: Iterable[Candidate], asker: Asker) -> list[Candidate]:
        seen: set[str] = set()
        kept: list[Candidate] = []
        for item in candidates:
            overlap = item.job.options.overlap
            alone = self.in_order or not overlap or item.origin is Origin.CAUGHT_UP
            ready = item.ask_ms <= asker.steady_ms
            if alone and item.key.job in seen:
                continue
            if ready:
                kept.append(item)
            on_time = item.is_on_time(asker.now_ms, asker.steady_ms)
            if alone and (ready or self.in_order or not on_time):
                seen.add(item.key.job)
        return kept

    def next_ask_ms(self, steady_ms: int) -> Optional[int]:
        return min(
            (item.ask_ms for item in self.items.values() if item.ask_ms > steady_ms), default=None
        )

    def take_expired(self, now_ms: int, steady_ms: int) -> set[RunKey]:
        expiry = EXPIRY[self.in_order]
        gone = {key for key, item in self.items.items() if is_over(item, expiry, now_ms, steady_ms)}
        for name in NAMES:
            late = sorted(
                key
                for key, item in self.items.items()
                if key.job == name
                and key not in gone
                and item.origin is not Origin.UNSETTLED
                and not item.is_on_time(now_ms, steady_ms)
            )
            limit = expiry.surplus or JOBS[name].options.catch_up_limit
            gone.update(late[: max(0, len(late) - limit)])
        for key in gone:
            del self.items[key]
        return gone


def rotated(candidates: list[Candidate], instance_id: str) -> list[Candidate]:
    if not candidates:
        return []
    digest = hashlib.sha256(f"{instance_id} {candidates[0].key.scheduled_ms}".encode()).digest()
    start = int.from_bytes(digest[:8], "big") % len(candidates)
    return candidates[start:] + candidates[:start]


@dataclass
class World:
    """Both of them, their clocks, and the handlers of the process."""

    in_order: bool
    now_ms: int = 1_700_000_000_000
    steady_ms: int = 5_000
    handlers: list[Handler] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.quick = Backlog(EXPIRY[self.in_order], in_order=self.in_order)
        self.plain = Plain(in_order=self.in_order)

    def pairs(self) -> list[tuple[Candidate, Candidate]]:
        """Return each candidate in both, in an order of its own."""
        mine = {item.key: item for item in self.quick.filtered(lambda _item: True)}
        assert mine.keys() == self.plain.items.keys()
        assert len(self.quick) == len(mine)
        return [(mine[key], self.plain.items[key]) for key in sorted(mine)]

    def asker(self, free: int, label: str) -> Asker:
        by_job: dict[str, list[LiveRun]] = {}
        for handler in self.handlers:
            by_job.setdefault(handler.key.job, []).append(cast("LiveRun", handler))
        return Asker(label, free, self.now_ms, self.steady_ms, by_job)

    def compare(self, free: int, label: str) -> list[RunKey]:
        """Pick in both; return the runs picked."""
        asker = self.asker(free, label)
        mine, other = pick(self.quick.offers(asker), asker), self.plain.pick(asker)
        assert [item.key for item in mine.candidates] == [item.key for item in other.candidates]
        assert (mine.starved, mine.more) == (other.starved, other.more)
        assert self.quick.next_ask_ms(self.steady_ms) == self.plain.next_ask_ms(self.steady_ms)
        for one, two in self.pairs():
            assert replace(one, decision_id="") == two
        return [item.key for item in mine.candidates]


Draw = Callable[[st.SearchStrategy[int]], int]


def times(draw: Draw, world: World, most: int = 5) -> list[int]:
    """Return scheduled times around now, where the due times of the jobs lie."""
    ages = [draw(st.integers(-3, 40)) for _ in range(draw(st.integers(1, most)))]
    return [(world.now_ms // 1_000 - age) * 1_000 for age in ages]


def add(world: World, draw: Draw, origin: Optional[Origin], name: str) -> None:
    """Let something be found: by the agenda where no origin is given."""
    job, due_ms = JOBS[name], draw(st.integers(0, 3)) * 400
    for scheduled_ms in times(draw, world):
        key = RunKey(name, scheduled_ms)
        at_ms = scheduled_ms + due_ms
        if origin is None:
            world.quick.add_due([Due(job, scheduled_ms, at_ms)], world.now_ms, world.steady_ms)
            late_ms = max(0, world.now_ms - at_ms)
            made = Candidate(job, key, at_ms, Origin.ON_TIME, world.steady_ms, late_ms=late_ms)
            world.plain.items.setdefault(key, made)
        elif origin is Origin.UNSETTLED:
            world.quick.add_unsettled([key], JOBS, world.steady_ms)
            made = Candidate(job, key, job.due_ms(scheduled_ms), origin, world.steady_ms)
            known = world.plain.items.setdefault(key, made)
            if known.origin is not origin:
                known.origin, known.found_ms = origin, world.steady_ms
                known.ask_ms = world.steady_ms
        else:
            made = Candidate(job, key, at_ms, origin, world.steady_ms)
            world.quick.add_owed([made], world.now_ms, world.steady_ms)
            known = world.plain.items.setdefault(key, replace(made))
            late = not known.is_on_time(world.now_ms, world.steady_ms)
            if known.origin is Origin.ON_TIME and late:
                known.origin, known.found_ms = origin, world.steady_ms


def answer(world: World, draw: Draw, keys: Iterable[RunKey]) -> None:
    """Let the store answer to what was picked."""
    pairs = {one.key: (one, two) for one, two in world.pairs()}
    for key in keys:
        one, two = pairs[key]
        verdict = draw(st.integers(0, 5))
        one.decision_id = "asked"
        if verdict == 0:  # no answer
            one.unknown = two.unknown = True
            continue
        one.unknown = two.unknown = False
        wait_ms = draw(st.integers(1, 6_000))
        if verdict == 1:  # early
            two.due_steady_ms = due_ms = world.steady_ms + wait_ms
            two.ask_ms = world.steady_ms + min(wait_ms, 5_000)
            world.quick.ask_again(one, two.ask_ms, due_steady_ms=due_ms)
        elif verdict == 2:  # deferred
            two.ask_ms = world.steady_ms + min(wait_ms, 1_000)
            two.deferred = one.deferred = True
            world.quick.ask_again(one, two.ask_ms)
        else:
            if verdict == 3:  # granted
                caught_up = one.origin is Origin.CAUGHT_UP
                world.handlers.append(Handler(key, caught_up=caught_up))
            world.quick.discard(one)
            del world.plain.items[key]


def disturb(world: World, draw: Draw, name: str) -> None:
    """Let a job change, the clock be set back, or others' records be seen."""
    what = draw(st.integers(0, 3))
    if what == 0:
        job = None if draw(st.booleans()) else job_of(name, draw(st.integers(5, 40)) * 1_000)
        lost = {item.key for item in world.quick.replace_job(name, job)}
        mine = [item for key, item in world.plain.items.items() if key.job == name]
        assert lost == {item.key for item in mine if item.unknown and job is None}
        for item in mine:
            if item.unknown and job is not None:
                item.job = job
            else:
                del world.plain.items[item.key]
    elif what == 1:
        world.now_ms -= draw(st.integers(0, 20_000))
        gone = set(world.quick.drop_future(world.now_ms))
        future = {
            key
            for key, item in world.plain.items.items()
            if item.due_ms > world.now_ms and not item.unknown
        }
        assert gone == future
        for key in gone:
            del world.plain.items[key]
    else:
        keys = [RunKey(name, ms) for ms in times(draw, world, 20)]
        world.quick.drop_known(keys)
        for key in keys:
            known = world.plain.items.get(key)
            if known is not None and not known.unknown and known.origin is not Origin.UNSETTLED:
                del world.plain.items[key]


def handle(world: World, draw: Draw) -> None:
    """Let something happen to a handler."""
    if world.handlers:
        handler = world.handlers[draw(st.integers(0, len(world.handlers) - 1))]
        what = draw(st.integers(0, 2))
        if what == 0:
            handler.stale = True
        handler.done = handler.done or what == 1
        if what == 2:
            world.handlers.remove(handler)


@settings(max_examples=150, deadline=None)
@given(data=st.data(), in_order=st.booleans())
def test_what_is_kept_in_order_is_what_a_look_at_everything_finds(
    data: st.DataObject, *, in_order: bool
) -> None:
    world = World(in_order)
    for _step in range(data.draw(st.integers(1, 40))):
        draw = data.draw
        name = draw(st.sampled_from(NAMES))
        what = draw(st.sampled_from(("due", "owed", "unsettled", "time", "handle", "other")))
        if what in ("due", "owed", "unsettled"):
            origins = {"due": None, "owed": Origin.CAUGHT_UP, "unsettled": Origin.UNSETTLED}
            add(world, draw, origins[what], name)
        elif what == "time":
            passed_ms = draw(st.integers(0, 4_000))
            world.steady_ms += passed_ms
            world.now_ms += passed_ms + draw(st.integers(-1, 1))
        elif what == "handle":
            handle(world, draw)
        else:
            disturb(world, draw, name)
        expired = {item.key for item in world.quick.take_expired(world.now_ms, world.steady_ms)}
        assert expired == world.plain.take_expired(world.now_ms, world.steady_ms)
        answer(world, draw, world.compare(draw(st.integers(-5, 12)), draw(st.sampled_from("ab"))))
