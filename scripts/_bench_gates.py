"""What the gates of RabbitMQ claims cost the broker, and how many runs a minute it carries."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from typing import NamedTuple, Optional

from leasecron_sync.model import Verdict
from scripts._bench_broker import Broker, NotRestarted, Restart, Usage
from scripts._bench_claim_stores import ClaimStore
from scripts._bench_claims import answered, base_ms, claim_of, each_answered
from scripts._bench_crew import BenchError
from scripts._bench_figures import Figure, Timed, Told

KEEP_MINUTES = 10
"""How long a gate stays after it was asked for last."""

FILES = (1_024, 65_536)
MEMORY_KB = 1_048_576


class Again(NamedTuple):
    """What was found when the broker had been restarted.

    Attributes:
        restart: How long that took.
        usage: What the broker takes then.
        claims_s: How long some more claims took, one a call.
    """

    restart: Restart
    usage: Usage
    claims_s: float


class Step(NamedTuple):
    """What was found with a number of gates.

    Attributes:
        gates: That number.
        usage: What the broker takes.
        made_s: How long it took to make those that came on top, by batches.
        made: How many these were.
        again: After a restart; None if it did not start again.
        why: Why it did not.
    """

    gates: int
    usage: Usage
    made_s: float
    made: int
    again: Optional[Again]
    why: str = ""


def measure_gates(told: Told[ClaimStore]) -> list[Figure]:
    """Fill a broker with gates, and look at it and restart it in between."""
    broker = told.store.broker
    if broker is None:
        note = "it restarts the broker, so it is done with one of its own: --services"
        return [Figure("gates", "not measured", note=note)]
    broker.empty()
    steps: list[Step] = []
    for count in told.scale.gates:
        told.progress(f"{count:,} gates")
        steps.append(_step(told, broker, steps, count))
        if steps[-1].again is None:
            break
    singles = told.scale.singles
    figures = [figure for step in steps for figure in _figures(steps[0], step, singles)]
    return figures + carried(steps)


def _step(told: Told[ClaimStore], broker: Broker, before: list[Step], count: int) -> Step:
    store, singles = told.store, told.scale.singles
    there = sum(step.made + singles for step in before)
    made = count - there if count else 0
    with closing(store.opened(told.namespace)) as backend:
        scheduled_ms = base_ms(backend, 0)  # and it is connected
        runs = [claim_of(f"gate of {count} {n}", scheduled_ms) for n in range(made)]
        with Timed() as making:
            for at in range(0, made, store.most):
                answered(backend, runs[at : at + store.most], Verdict.GRANTED)
    usage = broker.usage()
    if usage.queues != count:
        message = f"the broker has {usage.queues:,} queues where {count:,} gates were made"
        raise BenchError(message)
    try:
        restart = broker.restart()
    except NotRestarted as error:
        return Step(count, usage, making.seconds, made, None, str(error))
    afterwards = broker.usage()
    with closing(store.opened(told.namespace)) as backend:
        scheduled_ms = base_ms(backend, 0)
        claims = [claim_of(f"single of {count} {n}", scheduled_ms) for n in range(singles)]
        with Timed() as claimed:
            each_answered(backend, claims, Verdict.GRANTED)
    again = Again(restart, afterwards, claimed.seconds)
    return Step(count, usage, making.seconds, made, again)


def _figures(first: Step, step: Step, singles: int) -> list[Figure]:
    usage, none = step.usage, first.usage
    head, gates = f"{step.gates:,} gates", max(1, step.gates)

    def each(value: float, of_none: float) -> str:
        return f"{(value - of_none) / gates:,.1f} KB a gate" if step.gates else ""

    told = f"it says itself that its queues take {usage.told_kb / 1024:,.1f} MB"
    if step.gates:
        told += f" ({usage.told_kb / gates:,.1f} KB each)"
    found = [
        Figure(
            f"{head}: memory of the broker",
            f"{usage.memory_kb / 1024:,.0f} MB",
            note="; ".join(filter(None, (each(usage.memory_kb, none.memory_kb), told))),
        ),
        Figure(
            f"{head}: disk",
            f"{usage.disk_kb / 1024:,.1f} MB",
            note=each(usage.disk_kb, none.disk_kb),
        ),
        Figure(
            f"{head}: open files",
            f"{usage.files:,}",
            note=f"it may have {usage.most_files}",
        ),
    ]
    if step.made:
        speed = f"{step.made / step.made_s:,.0f} a second"
        found.append(Figure(f"up to {head}: claims in batches", speed))
    if step.again is None or first.again is None:
        return [*found, Figure(f"{head}: restart", "did not start again", note=step.why)]
    again, restart = step.again, step.again.restart
    return [
        *found,
        Figure(f"{head}: open files after a restart", f"{again.usage.files:,}"),
        Figure(f"{head}: memory after a restart", f"{again.usage.memory_kb / 1024:,.0f} MB"),
        Figure(
            f"{head}: restart",
            f"{sum(restart):,.1f} s",
            f"{sum(first.again.restart):,.1f} s",
            sum(restart) / sum(first.again.restart),
            note=f"{restart.stop_s:,.1f} s until it had stopped, {restart.start_s:,.1f} s until it "
            "answered; in place of a floor: without gates",
        ),
        Figure(
            f"{head}: claims after that, one a call",
            f"{singles / again.claims_s:,.0f} a second",
            f"{singles / first.again.claims_s:,.0f} a second",
            again.claims_s / first.again.claims_s,
            note="each makes a gate; in place of a floor: without gates",
        ),
    ]


def carried(steps: Sequence[Step]) -> list[Figure]:
    """Tell how many runs a minute are as many gates as there is room for, also after a restart."""
    first = steps[0]
    if first.again is None:
        return []
    last = [step for step in steps if step.again is not None][-1]
    assert last.again is not None
    gates = last.gates - first.gates
    none, most = (first.usage, first.again.usage), (last.usage, last.again.usage)
    files = max(usage.files for usage in none)
    memory_kb = max(usage.memory_kb for usage in none)

    def figure(limit: str, room: float, more: float) -> Figure:
        runs = "too few gates to tell"
        if more > 0:
            runs = f"{room / more * gates / KEEP_MINUTES:,.0f} runs a minute"
        note = f"a gate stays for {KEEP_MINUTES} minutes after it was asked for last"
        return Figure(f"a broker with {limit} carries", runs, note=note)

    more_files = max(usage.files for usage in most) - files
    more_kb = max(usage.memory_kb for usage in most) - memory_kb
    return [
        *(figure(f"{limit:,} files", limit - files, more_files) for limit in FILES),
        figure("1 GB of memory", MEMORY_KB - memory_kb, more_kb),
    ]
