"""Figures of several instances at work on one store: real processes, real threads."""

from __future__ import annotations

import random
import time
from collections import Counter
from contextlib import closing
from dataclasses import replace
from typing import Callable

from scripts._bench_crew import BenchError, Crew, Member, Start, crew_of
from scripts._bench_figures import Figure, Told, percentile
from scripts._bench_instance import Work
from scripts._bench_store import AnyStore

SHORTEST_LEAD_S = 0.5
"""Instances that are ready later than this before their runs are due may have missed some."""

FINISH_S = 55.0
"""Runs are claimed within ``catch_up_ms``, so there is nothing to wait for after that."""

TRIES = 3
FIRST_START_S = 30.0


def once_each(starts: list[Start], count: int) -> None:
    """Check that each run was executed once.

    Raises:
        BenchError: It was not.
    """
    times = Counter((start.job, start.scheduled_ms) for start in starts)
    doubled = [key for key, number in times.items() if number > 1]
    if doubled:
        message = f"{len(doubled)} runs were executed more than once, the first: {doubled[0]}"
        raise BenchError(message)
    if len(times) != count:
        message = f"{len(times)} of {count} runs were executed"
        raise BenchError(message)


def shares(starts: list[Start], instances: int) -> str:
    counts = Counter(start.instance for start in starts)
    return " + ".join(f"{counts[number]:,}" for number in range(instances))


def measure_delay(told: Told[AnyStore]) -> list[Figure]:
    """How long after its scheduled time a handler starts, with jobs every second."""
    scale = told.scale
    work = Work(told.store.url, told.namespace, scale.each_second)
    told.progress(f"{scale.seconds} s of runs")
    crew, delays, parts = _each_second(told, work)
    floor, ratio = "", None
    winners = told.store.make_winners()
    if winners is not None:
        told.progress(f"{scale.seconds} s of the floor")
        with closing(winners):
            _crew, least, _parts = _each_second(told, replace(work, raw=True))
            winners.remove()
        floor = f"p50 {percentile(least, 0.5):.1f} ms, p99 {percentile(least, 0.99):.1f} ms"
        ratio = percentile(delays, 0.99) / percentile(least, 0.99)
    runs = max(1, sum(len(end["starts"]) for end in crew.ended))
    return [
        Figure(
            f"start delay, {scale.each_second} jobs each second on {scale.instances} instances",
            f"p50 {percentile(delays, 0.5):.1f} ms, p99 {percentile(delays, 0.99):.1f} ms",
            floor,
            ratio,
            wanted="p99 under 25 ms",
            note=f"{len(delays):,} runs, slowest {max(delays):.1f} ms; shares {parts}; "
            f"{crew.total('transactions') / runs:.2f} transactions and "
            f"{crew.total('processor_s') * 1e6 / runs:,.0f} us of processor time a run; floor: as "
            "many processes, which insert what is due and start a thread for what was not there",
        )
    ]


def _each_second(told: Told[AnyStore], work: Work) -> tuple[Crew, list[float], str]:
    scale = told.scale
    with crew_of(scale.instances, work) as crew:
        crew.start("every 1")
        # The first whole second that all of them have in their agendas, and one to warm up.
        first_ms = (time.time_ns() // 1_000_000_000 + 2) * 1000
        last_ms = first_ms + (scale.seconds - 1) * 1000
        time.sleep(max(0.0, (last_ms + 900) / 1000 - time.time()))
        starts = [start for start in crew.stop() if first_ms <= start.scheduled_ms <= last_ms]
    once_each(starts, scale.each_second * scale.seconds)
    return crew, [start.delay_ms for start in starts], shares(starts, scale.instances)


def measure_together(told: Told[AnyStore]) -> list[Figure]:
    """Runs that are due at one instant."""

    def schedule_of(due_s: int) -> str:
        return f"at {due_s * 1000}"

    scale = told.scale
    return _at_one_instant(told, scale.together, scale.lead_s, 1, schedule_of)


def measure_many(told: Told[AnyStore]) -> list[Figure]:
    """Many jobs of one minute, by a cron expression."""

    def schedule_of(due_s: int) -> str:
        when = time.gmtime(due_s)
        return f"{when.tm_sec} {when.tm_min} {when.tm_hour} * * *"

    scale = told.scale
    return _at_one_instant(told, scale.many, scale.many_lead_s, scale.many_step_s, schedule_of)


def _at_one_instant(
    told: Told[AnyStore], count: int, lead_s: int, step_s: int, schedule_of: Callable[[int], str]
) -> list[Figure]:
    """Let runs fall due at one instant, far enough ahead for all instances to be ready."""
    for number in range(TRIES):
        work = Work(told.store.url, f"{told.namespace}-{number}", count)
        with crew_of(told.scale.instances, work) as crew:
            due_s = -(-(int(time.time()) + (lead_s << number)) // step_s) * step_s
            crew.start(schedule_of(due_s))
            left_s = due_s - time.time()
            if left_s < SHORTEST_LEAD_S:
                told.progress(f"the instances needed more than {lead_s << number} s, once more")
                continue
            told.progress(f"{count:,} runs are due in {left_s:.0f} s")
            time.sleep(max(0.0, due_s - time.time()))
            crew.wait_started(count, FINISH_S)
            starts = crew.stop()
        once_each(starts, count)
        return _figures(told, crew, starts, count)
    message = f"the instances were not ready in {lead_s << (TRIES - 1)} s"
    raise BenchError(message)


def _figures(told: Told[AnyStore], crew: Crew, starts: list[Start], count: int) -> list[Figure]:
    instances = told.scale.instances
    head = f"{count:,} runs due at one instant on {instances} instances"
    lasts = [
        max((start.delay_ms for start in starts if start.instance == number), default=0.0)
        for number in range(instances)
    ]
    calls = {name: crew.calls(name) for name in ("claim", "settle", "states", "pending", "renew")}
    transactions, processor_s = crew.total("transactions"), crew.total("processor_s")
    return [
        Figure(
            f"{head}: last start",
            f"{starts[-1].delay_ms:,.0f} ms",
            note=f"first start after {starts[0].delay_ms:,.0f} ms, last starts of the instances "
            f"after {', '.join(f'{last:,.0f}' for last in lasts)} ms",
        ),
        Figure(f"{head}: shares", shares(starts, instances)),
        Figure(
            f"{head}: store transactions",
            f"{transactions:,.0f}",
            f"{count:,} runs",
            transactions / count,
            note=f"with those of the start; calls: "
            f"{', '.join(f'{name} {number:,}' for name, number in calls.items() if number)}",
        ),
        Figure(
            f"{head}: processor time",
            f"{processor_s * 1e6 / count:,.0f} us a run",
            note=f"{processor_s:,.1f} s in all instances together",
        ),
    ]


def measure_takeover(told: Told[AnyStore]) -> list[Figure]:
    """From a kill of the holder to the start of the handler elsewhere."""
    return [_passage(told, "takeover after a kill", "killed", _pass_on(told, kill=True))]


def measure_hand_over(told: Told[AnyStore]) -> list[Figure]:
    """From a stop of the holder to the start of the handler elsewhere."""
    return [_passage(told, "hand-over by stop()", "stopped", _pass_on(told, kill=False))]


def _passage(told: Told[AnyStore], name: str, done: str, taken_ms: list[float]) -> Figure:
    return Figure(
        f"{name}, lease_ms={told.scale.lease_ms:,}",
        f"p50 {percentile(taken_ms, 0.5):,.0f} ms, p99 {percentile(taken_ms, 0.99):,.0f} ms",
        note=f"{len(taken_ms)} trials, {done} at any moment between two heartbeats",
    )


def _pass_on(told: Told[AnyStore], *, kill: bool) -> list[float]:
    """Let one run wander from instance to instance; return how long each passage took."""
    scale, taken_ms = told.scale, []
    work = Work(told.store.url, told.namespace, 1, hold=True, lease_ms=scale.lease_ms)
    with crew_of(2, work) as crew:
        schedule = f"at {(time.time_ns() // 1_000_000_000 + 2) * 1000}"
        crew.start(schedule)
        holder = _first_holder(crew.members)
        for number in range(scale.trials):
            told.progress(f"trial {number + 1} of {scale.trials}")
            time.sleep(random.uniform(0.0, scale.lease_ms / 3000))
            ended, standby = crew.members[holder], crew.members[1 - holder]
            ended_ns = time.time_ns()
            if kill:
                ended.kill()
            else:
                ended.ask("stop")
            taken_ms.append((standby.wait_for("start")["at_ns"] - ended_ns) / 1e6)
            ended.close()
            crew.members[holder] = Member(work)
            crew.members[holder].wait_for("up")
            crew.members[holder].ask(schedule)
            crew.members[holder].wait_for("ready")
            holder = 1 - holder
        for member in crew.members:
            member.kill()
    return taken_ms


def _first_holder(members: list[Member]) -> int:
    """Return which instance starts the run first."""
    until_s = time.monotonic() + FIRST_START_S
    while time.monotonic() < until_s:
        for number, member in enumerate(members):
            if member.has_said("start"):
                return number
        time.sleep(0.05)
    message = "no instance started the run"
    raise BenchError(message)
