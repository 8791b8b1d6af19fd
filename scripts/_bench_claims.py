"""Figures of claims, each beside the raw store's floor; commands and floor take turns."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from contextlib import closing
from typing import NamedTuple, Optional

from leasecron_sync.backends.base import ClaimBackend
from leasecron_sync.model import OnceClaim, RunKey, Verdict
from scripts._bench_claim_raw import Raw
from scripts._bench_claim_stores import ClaimStore
from scripts._bench_crew import BenchError
from scripts._bench_figures import Figure, Timed, Timing, Told, compared

WINDOW_MS = 300_000
"""The longest that every mechanism can keep, so that no claim of a long measurement is too old."""


def claim_of(job: str, scheduled_ms: int) -> OnceClaim:
    return OnceClaim(
        key=RunKey(job, scheduled_ms),
        due_ms=scheduled_ms,
        holder="bench",
        decision_id=uuid.uuid4().hex,
        window_ms=WINDOW_MS,
    )


def answered(backend: ClaimBackend, claims: Sequence[OnceClaim], wanted: Verdict) -> None:
    """Claim runs, and see that all get the answer that they must."""
    for reply in backend.claim(claims):
        if reply.verdict is not wanted:
            message = f"a claim was answered {reply.verdict.value}, not {wanted.value}"
            raise BenchError(message)


def each_answered(backend: ClaimBackend, claims: Sequence[OnceClaim], wanted: Verdict) -> None:
    for claim in claims:
        answered(backend, [claim], wanted)


def base_ms(backend: ClaimBackend, rounds: int) -> int:
    """Return a time that lies so many milliseconds ago, by the clock that judges claims."""
    store_ms = backend.probe().store_ms
    now_ms = time.time_ns() // 1_000_000 if store_ms is None else store_ms
    return now_ms - rounds - 1


def put_each(raw: Optional[Raw], keys: Sequence[str]) -> None:
    if raw is not None:
        raw.put_each(keys)


def put(raw: Optional[Raw], keys: Sequence[str]) -> None:
    if raw is not None:
        raw.put(keys)


def measure_singles(told: Told[ClaimStore]) -> list[Figure]:
    """Claims one by one."""
    scale, count = told.scale, told.scale.singles
    claims_s, floors_s = [], []
    with (
        told.store.raw(told.namespace) as raw,
        closing(told.store.opened(told.namespace)) as backend,
    ):
        first_ms = base_ms(backend, scale.rounds)
        for number in range(scale.rounds + 1):
            claims = [claim_of(f"single {index}", first_ms + number) for index in range(count)]
            keys = [f"{number + 1} single {index}" for index in range(count)]
            with Timed() as claimed:
                each_answered(backend, claims, Verdict.GRANTED)
            with Timed() as floor:
                put_each(raw, keys)
            if number:  # the first round warms up
                claims_s.append(claimed.seconds)
                floors_s.append(floor.seconds if raw else 0.0)
        note = f"floor: {raw.one_text}" if raw else ""
        timing = Timing(claims_s, floors_s, count)
        return [compared("claims, one a call", timing, note, "at most 4")]


class _Batches(NamedTuple):
    """Times of batches, and of what they are compared with."""

    claims_s: list[float]
    floors_s: list[float]
    singles_s: list[float]


def measure_batches(told: Told[ClaimStore]) -> list[Figure]:
    """A batch of runs that are due together."""
    count = min(told.scale.batch, told.store.most)
    with told.store.raw(told.namespace) as raw:
        times = _batches(told, raw, count)
        name = f"claims, {count:,} in one call"
        note = f"floor: {raw.one_text}; {raw.batch_text}" if raw else ""
        return [
            compared(name, Timing(times.claims_s, times.floors_s, count), note, "at most 3"),
            compared(
                f"{name}, against claims one a call",
                Timing(times.claims_s, times.singles_s, count),
                "in place of a floor: claims one a call, in the same minute",
                "under 1",
            ),
        ]


def _batches(told: Told[ClaimStore], raw: Optional[Raw], count: int) -> _Batches:
    scale, times = told.scale, _Batches([], [], [])
    with closing(told.store.opened(told.namespace)) as backend:
        first_ms = base_ms(backend, scale.batches)
        for number in range(scale.batches + 1):
            scheduled_ms = first_ms + number
            claims = [claim_of(f"batch {index}", scheduled_ms) for index in range(count)]
            singles = [claim_of(f"single {i}", scheduled_ms) for i in range(scale.singles)]
            with Timed() as claimed:
                answered(backend, claims, Verdict.GRANTED)
            with Timed() as floor:
                put(raw, [f"{number + 1} batch {index}" for index in range(count)])
            with Timed() as singly:
                each_answered(backend, singles, Verdict.GRANTED)
            if number:  # the first round warms up
                times.claims_s.append(claimed.seconds)
                times.floors_s.append(floor.seconds if raw else 0.0)
                times.singles_s.append(singly.seconds * count / scale.singles)
    return times


def measure_lost(told: Told[ClaimStore]) -> list[Figure]:
    """Claims of runs that somebody else has, beside claims that are won."""
    scale = told.scale
    batch = min(scale.batch, told.store.most)
    found = []
    for count, rounds, step in (
        (scale.singles, scale.rounds, each_answered),
        (batch, scale.batches, answered),
    ):
        won_s, lost_s = [], []
        name = "one a call" if step is each_answered else f"{count:,} in one call"
        with (
            closing(told.store.opened(told.namespace, "first")) as first,
            closing(told.store.opened(told.namespace, "second")) as second,
        ):
            first_ms = base_ms(first, rounds)
            for number in range(rounds + 1):
                runs = [(f"lost {name} {index}", first_ms + number) for index in range(count)]
                with Timed() as won:
                    step(first, [claim_of(*run) for run in runs], Verdict.GRANTED)
                with Timed() as lost:
                    step(second, [claim_of(*run) for run in runs], Verdict.TAKEN)
                if number:  # the first round warms up
                    won_s.append(won.seconds)
                    lost_s.append(lost.seconds)
        note = "of runs that another instance has; in place of a floor: claims that are won"
        timing = Timing(lost_s, won_s, count)
        found.append(compared(f"lost claims, {name}", timing, note, "at most 2"))
    return found
