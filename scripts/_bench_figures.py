"""Figures of single store commands, each beside the raw store's floor; time and memory of a start.

Commands and floor take turns within one measurement, so that whatever else the machine does meets
both.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Callable, Generic, NamedTuple, Optional, TypeVar

from leasecron_sync.backends.base import LeaseBackend
from leasecron_sync.model import (
    JobStamp,
    LeaseClaim,
    LeaseRef,
    OnOverlap,
    Outcome,
    RunKey,
    Settlement,
    Verdict,
)
from scripts._bench_crew import BenchError, crew_of
from scripts._bench_instance import Work
from scripts._bench_store import AnyStore, Floor, Store

S_co = TypeVar("S_co", bound=AnyStore, covariant=True)

LEASE_MS = 600_000
FINISHED = Settlement(Outcome.FINISHED)


@dataclass(frozen=True)
class Scale:
    """How much is measured."""

    rounds: int = 20
    singles: int = 50
    batch: int = 1_000
    batches: int = 10
    history: int = 1_000_000
    instances: int = 4
    each_second: int = 40
    seconds: int = 30
    together: int = 1_000
    lead_s: int = 8
    many: int = 10_000
    many_lead_s: int = 30
    many_step_s: int = 60
    trials: int = 20
    lease_ms: int = 1_000
    gates: tuple[int, ...] = (0, 1_000, 5_000, 10_000)


class Figure(NamedTuple):
    """One line of the table.

    Attributes:
        name: What was measured.
        value: The figure, with its unit.
        floor: The same of the store driven raw; empty where there is none.
        ratio: How many times as long as the floor; None where there is none.
        wanted: What the project aims at; empty where it has no aim.
        note: What a reader must know to read the figure.
    """

    name: str
    value: str
    floor: str = ""
    ratio: Optional[float] = None
    wanted: str = ""
    note: str = ""


@dataclass(frozen=True)
class Told(Generic[S_co]):
    """What a measurement is given.

    Attributes:
        store: Where it measures.
        scale: How much.
        namespace: One of its own.
        progress: Takes a line for a person who waits.
    """

    store: S_co
    scale: Scale
    namespace: str
    progress: Callable[[str], None]


def percentile(values: Iterable[float], share: float) -> float:
    """Return the smallest value that this share of all values does not exceed."""
    ordered = sorted(values)
    if not ordered:
        message = "nothing was measured"
        raise BenchError(message)
    return ordered[max(0, -(-round(share * len(ordered) * 1000) // 1000) - 1)]


class Timed:
    """Takes the time of what is done within it."""

    seconds = 0.0

    def __enter__(self) -> Timed:
        """Begin."""
        self._began_s = time.perf_counter()
        return self

    def __exit__(self, *_error: object) -> None:
        """End."""
        self.seconds += time.perf_counter() - self._began_s


def claim_of(job: str, scheduled_ms: int) -> LeaseClaim:
    return LeaseClaim(
        key=RunKey(job, scheduled_ms),
        due_ms=scheduled_ms,
        holder="bench",
        decision_id=f"bench {job} {scheduled_ms}",
        lease_ms=LEASE_MS,
        max_attempts=3,
        on_overlap=OnOverlap.SKIP,
        max_age_ms=LEASE_MS * 10,
        takeover_ms=LEASE_MS * 10,
    )


def won(backend: LeaseBackend, claims: Sequence[LeaseClaim]) -> list[LeaseRef]:
    """Claim runs that nobody else wants."""
    leases = []
    for reply in backend.claim(claims):
        if reply.verdict is not Verdict.GRANTED or reply.lease is None:
            message = f"a claim that nobody contests was answered {reply.verdict.value}"
            raise BenchError(message)
        leases.append(reply.lease.ref)
    return leases


def settle_all(backend: LeaseBackend, leases: Iterable[LeaseRef]) -> None:
    for lease in leases:
        if not backend.settle(lease, FINISHED).accepted:
            message = "the settlement of a live lease was refused"
            raise BenchError(message)


def now_ms(backend: LeaseBackend) -> int:
    """Return the store's clock; the host's where it does not tell."""
    told_ms = backend.probe().store_ms
    return time.time_ns() // 1_000_000 if told_ms is None else told_ms


class Timing(NamedTuple):
    """Times that were taken in turns with the floor's.

    Attributes:
        taken_s: Of the store.
        floor_s: Of its floor, or of what it is compared with.
        runs: How many each of them are for.
    """

    taken_s: Sequence[float]
    floor_s: Sequence[float]
    runs: int


def compared(name: str, timing: Timing, note: str, wanted: str = "") -> Figure:
    """Make a line of times; their medians speak."""
    taken_s, floor_s, count = timing
    taken, floor = statistics.median(taken_s), statistics.median(floor_s)
    value = f"{count / taken:,.0f} a second ({taken / count * 1e6:,.0f} us each)"
    if not any(floor_s):
        return Figure(name, value, note="this kind of store has no floor here")
    ratio = statistics.median(mine / raw for mine, raw in zip(taken_s, floor_s))
    return Figure(name, value, f"{count / floor:,.0f} a second", ratio, wanted, note)


def measure_singles(told: Told[Store]) -> list[Figure]:
    """Claims and settlements one by one."""
    scale, count = told.scale, told.scale.singles
    jobs = [f"single {number}" for number in range(count)]
    claims_s, settles_s, floors_s = [], [], []
    with told.store.floor() as floor, closing(told.store.opened(told.namespace)) as backend:
        backend.register([JobStamp(job, "bench") for job in jobs])
        base_ms = now_ms(backend) - scale.rounds
        for number in range(scale.rounds + 1):
            leases: list[LeaseRef] = []
            with Timed() as claimed:
                for job in jobs:
                    leases += won(backend, [claim_of(job, base_ms + number)])
            with Timed() as raw:
                for _job in jobs:
                    floor.insert(1)
            with Timed() as settled:
                settle_all(backend, leases)
            if number:  # the first round warms up
                claims_s.append(claimed.seconds)
                settles_s.append(settled.seconds)
                floors_s.append(raw.seconds)
        return [
            compared(
                "claims, one a call",
                Timing(claims_s, floors_s, count),
                f"floor: {floor.insert_text}",
                "at most 4",
            ),
            compared(
                "settlements, one a call", Timing(settles_s, floors_s, count), "the same floor"
            ),
        ]


class _Batches(NamedTuple):
    """Times of batches, and of what they are compared with."""

    claims_s: list[float]
    renewals_s: list[float]
    inserts_s: list[float]
    sets_s: list[float]
    updates_s: list[float]
    singles_s: list[float]
    made: list[int]


def measure_batches(told: Told[Store]) -> list[Figure]:
    """A batch of runs that are due together, and the renewal of their leases."""
    count = told.scale.batch
    with told.store.floor() as floor, closing(told.store.opened(told.namespace)) as backend:
        times = _batches(told, floor, backend)
        inserts = f"floor: {floor.batch_text}"
        updates = f"floor: {floor.update_text}; transactions of the store for each: " + " ".join(
            sorted({str(made) for made in times.made})
        )
        claims = f"claims, {count:,} in one call"
        figures = [
            compared(claims, Timing(times.claims_s, times.inserts_s, count), inserts, "at most 3"),
            compared(
                f"{claims}, against claims one a call",
                Timing(times.claims_s, times.singles_s, count),
                "in place of a floor: claims one a call, in the same minute",
                "at most 0.2",
            ),
            compared(
                f"renewals, {count:,} in one call",
                Timing(times.renewals_s, times.updates_s, count),
                updates,
            ),
        ]
        if floor.set_text:
            timing = Timing(times.claims_s, times.sets_s, count)
            figures.insert(
                1, compared(f"{claims}, another floor", timing, f"floor: {floor.set_text}")
            )
        return figures


def _batches(told: Told[Store], floor: Floor, backend: LeaseBackend) -> _Batches:
    scale, count = told.scale, told.scale.batch
    times = _Batches([], [], [], [], [], [], [])
    jobs = [f"batch {number}" for number in range(count)]
    single = [f"single {number}" for number in range(scale.singles)]
    backend.register([JobStamp(job, "bench") for job in jobs + single])
    transactions = told.store.count_transactions(backend)
    base_ms = now_ms(backend) - scale.batches
    for number in range(scale.batches + 1):
        claims = [claim_of(job, base_ms + number) for job in jobs]
        alone: list[LeaseRef] = []
        with Timed() as claimed:
            leases = won(backend, claims)
        with Timed() as inserted:
            floor.insert(count)
        with Timed() as by_set:
            floor.insert_set(count)
        with Timed() as singly:
            for job in single:
                alone += won(backend, [claim_of(job, base_ms + number)])
        before = transactions()
        with Timed() as renewed:
            backend.renew(leases, LEASE_MS)
        made = transactions() - before
        with Timed() as updated:
            floor.update(count)
        settle_all(backend, leases + alone)
        if number:  # the first round warms up
            times.claims_s.append(claimed.seconds)
            times.inserts_s.append(inserted.seconds)
            times.sets_s.append(by_set.seconds)
            times.singles_s.append(singly.seconds * count / scale.singles)
            times.renewals_s.append(renewed.seconds)
            times.updates_s.append(updated.seconds)
            times.made.append(made)
    return times


def measure_history(told: Told[Store]) -> list[Figure]:
    """Claims of a job with a long history against claims of a job with none."""
    scale, job = told.scale, "history"
    twin = told.store.empty_twin()
    try:
        with closing(told.store.opened(told.namespace)) as full:
            full.register([JobStamp(job, "bench")])
            settle_all(full, won(full, [claim_of(job, now_ms(full) - 1_000)]))
        told.progress(f"writing {scale.history:,} settled records")
        if not told.store.fill(told.namespace, job, scale.history):
            return [Figure("claims behind a long history", "not measured", note="no way to fill")]
        rounds_s = _full_and_empty(told, twin, job)
    finally:
        twin.close()
        told.store.empty(told.namespace)
    full_s, empty_s = zip(*rounds_s)
    ratio = statistics.median(full / empty for full, empty in rounds_s)
    count = scale.singles
    return [
        Figure(
            f"claims behind {scale.history:,} settled records of the job",
            f"{count / statistics.median(full_s):,.0f} a second",
            f"{count / statistics.median(empty_s):,.0f} a second",
            ratio,
            "at most 1.5",
            "in place of a floor: claims of a job without history",
        )
    ]


def _full_and_empty(told: Told[Store], twin: Store, job: str) -> list[tuple[float, float]]:
    scale = told.scale
    rounds_s = []
    with (
        closing(told.store.opened(told.namespace)) as full,
        closing(twin.opened(f"{told.namespace}-twin")) as empty,
    ):
        empty.register([JobStamp(job, "bench")])
        base_ms = now_ms(full) - scale.rounds * scale.singles - scale.singles
        for number in range(scale.rounds + 1):
            mine, none = Timed(), Timed()
            for index in range(scale.singles):
                scheduled_ms = base_ms + number * scale.singles + index
                for backend, timed in ((full, mine), (empty, none)):
                    with timed:
                        leases = won(backend, [claim_of(job, scheduled_ms)])
                    settle_all(backend, leases)
            if number:
                rounds_s.append((mine.seconds, none.seconds))
    return rounds_s


def measure_start(told: Told[Store]) -> list[Figure]:
    """Time and memory of an instance with many jobs."""
    work = Work(told.store.url, told.namespace, told.scale.many)
    with crew_of(1, work) as crew:
        crew.start("0 3 * * *")
        (line,) = crew.ready
        crew.stop()
    count = told.scale.many
    return [
        Figure(f"add_job() of {count:,} jobs", f"{line['add_ms']:,.0f} ms"),
        Figure(
            f"start with {count:,} jobs, until the store has registered them",
            f"{line['registered_ms']:,.0f} ms",
            note=f"start() itself returned after {line['start_ms']:,.0f} ms",
        ),
        Figure(
            f"memory of {count:,} jobs",
            f"{line['memory_kb'] / 1024:,.1f} MB",
            note=f"{line['memory_kb'] * 1024 / count:,.0f} bytes a job, the loops included",
        ),
    ]
