"""What must hold when the storm is over: nothing is lost, nothing is left, nobody is stuck."""
# It looks for what is left inside of schedulers.
# pyright: reportPrivateUsage=false
# ruff: noqa: SLF001

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, Optional

from leasecron_sync.backends.base import BackendSettings, LeaseBackend
from leasecron_sync.model import RunKey
from leasecron_sync.options import SKEW_WARNING_MS
from leasecron_sync.schedule import jitter_of
from leasecron_sync.testing.history._ledger import instant, named
from leasecron_sync.testing.history._runs import Standing, standing
from leasecron_sync.testing.history.faults import LEFT_UNSETTLED, LOST, NOT_TOLD
from leasecron_sync.testing.simulation.machine import Process
from leasecron_sync.testing.simulation.plan import JobPlan, Version
from leasecron_sync.testing.simulation.stage import Stage
from leasecron_sync.testing.simulation.violation import (
    ATTEMPT_LOST,
    KEEPS_TOO_MUCH,
    LOSS_NOT_LOGGED,
    NOT_REPORTED,
    NOT_RUNNING,
    RECORD_DIFFERS,
    STILL_DOWN,
    STILL_RUNNING,
    STILL_WANTED,
    TOLD_TWICE,
    UNEXPECTED_ERROR,
    Violation,
    violation_of,
)

HOUR_MS: Final = 3_600_000
MOST_KEPT: Final = 8
"""Entries of any kind that an instance may keep when there is nothing to do."""

CALL_MS: Final = 1_000
MANY: Final = 1_000_000

DATA_LOST: Final = "the store has lost its data"

UNEXPECTED: Final = (
    "a step failed",
    "the backend let a foreign error escape",
    "settling failed",
    "a listener raised",
)
"""Beginnings of log lines that tell of an error in the library."""


def leftover(stage: Stage, end_ms: int) -> Optional[Violation]:
    """Return what is not yet as it must be; None when all is well.

    Args:
        stage: The history.
        end_ms: What was due before this instant of the store must have come to its end.
    """
    return next(_leftovers(stage, end_ms), None)


def _leftovers(stage: Stage, end_ms: int) -> Iterator[Violation]:
    version = stage.plan.versions[final_version(stage)]
    if stage.plan.family == "lease":
        yield from _unsettled(stage, version, end_ms)
        yield from _lost(stage, version, end_ms)
    elif not crashed(stage):
        yield from _not_told(stage, end_ms)
    for host in stage.hosts:
        if host.process is None or host.process.stopping:
            yield Violation(NOT_RUNNING, f"{host.label} has no scheduler that runs")
        else:
            yield from _inside(stage, host.process, end_ms)


def final_version(stage: Stage) -> int:
    """Return the number of the version that the last deploy brought."""
    deployed = [item.version for item in stage.plan.happenings if item.what == "deploy"]
    return deployed[-1] if deployed and deployed[-1] < len(stage.plan.versions) else 0


def crashed(stage: Stage) -> bool:
    """Tell whether a process ended, so that it may have had no time to tell something."""
    return any(len(host.processes) > 1 for host in stage.hosts)


def _unsettled(stage: Stage, version: Version, end_ms: int) -> Iterator[Violation]:
    for run in stage.watcher.runs():
        known = version.job(run.key.job) is not None
        if known and run.began_ms < end_ms and standing(run, read=False) is Standing.UNSETTLED:
            entries = tuple(grant.entry for grant in run.grants)
            yield Violation(LEFT_UNSETTLED, named(run.key), entries)


def _lost(stage: Stage, version: Version, end_ms: int) -> Iterator[Violation]:
    for job in version.jobs:
        owed_from_ms = stage.watcher.owed_from_ms(job.name)
        if job.catch_up_ms < HOUR_MS or owed_from_ms is None:
            continue
        # A skew of less than this is not put right, nor a change of it.
        for scheduled_ms in times(job, owed_from_ms + SKEW_WARNING_MS, end_ms):
            key = RunKey(job.name, scheduled_ms)
            due_ms = scheduled_ms + jitter_of(job.name, scheduled_ms, job.jitter_ms)
            if due_ms < end_ms and stage.watcher.standing(key) is Standing.UNHEARD:
                text = f"{named(key)}, owed from {instant(owed_from_ms)} on, has no record"
                yield Violation(LOST, text)


def times(job: JobPlan, from_ms: int, to_ms: int) -> range:
    """Return a job's scheduled times from one instant to before another."""
    period_ms = job.period_s * 1_000
    return range(-(-from_ms // period_ms) * period_ms, to_ms, period_ms)


def _not_told(stage: Stage, end_ms: int) -> Iterator[Violation]:
    told: set[RunKey] = set()
    jobs = [job for version in stage.plan.versions for job in version.jobs]
    # What may have been won without an answer is forgotten with its job.
    kept = {
        job.name for job in jobs if all(version.job(job.name) for version in stage.plan.versions)
    }
    for process in (process for host in stage.hosts for process in host.processes):
        for _at_ms, event in process.events:
            if event.name in ("run_missed", "run_failed", "run_started", "run_claimed"):
                assert event.job is not None
                assert event.scheduled_time is not None
                last_ms = round(event.scheduled_time.timestamp() * 1000)
                first_ms = round((event.first_time or event.scheduled_time).timestamp() * 1000)
                for job in jobs:
                    if job.name == event.job:
                        span = times(job, first_ms, last_ms + 1)
                        told |= {RunKey(job.name, ms) for ms in span}
    for won in stage.watcher.checker.once_runs():
        entry = won.win.entry if won.win is not None else None
        if entry is None or won.forgotten or won.key in told or won.key.job not in kept:
            continue
        if (entry.due_ms or 0) < end_ms:
            yield Violation(NOT_TOLD, named(won.key), (entry,))


def _inside(stage: Stage, process: Process, end_ms: int) -> Iterator[Violation]:
    manual, name = process.manual, process.name
    context, loop = manual._context, manual._timer
    assert context is not None
    assert loop is not None
    if context.caller.down_since_ms is not None:
        yield Violation(STILL_DOWN, f"{name} calls the store down")
    if context.caller._failing:
        yield Violation(STILL_DOWN, f"{name} has lanes that fail")
    for live in manual._runtime.runs():
        if live.key.scheduled_ms + live.job.options.jitter_ms < end_ms:
            yield Violation(STILL_RUNNING, f"{name} still has {named(live.key)}")
    wanted = list(loop._backlog._items.values())
    old = [named(item.key) for item in wanted if item.due_ms < end_ms]
    if old:
        yield Violation(STILL_WANTED, f"{name} has {', '.join(old)}")
    now_ms = stage.store.now_ms()
    sizes = {
        "backlog": len([item for item in wanted if item.due_ms <= now_ms]),
        "handing back": len(loop._starter._handing_back),
        "lapses": len(loop._standby._lapses),
        "heap": len(loop._agenda._heap) - len(loop._jobs),
    }
    if max(sizes.values()) >= MOST_KEPT:
        yield Violation(KEEPS_TOO_MUCH, f"{name} keeps {sizes}")


def at_the_end(stage: Stage, end_ms: int) -> Iterator[Violation]:
    """Yield what was wrong of a history in which all has come to its end.

    Args:
        stage: The history.
        end_ms: See ``leftover``.
    """
    yield from told_wrong(stage)
    if stage.plan.family == "lease":
        yield from records_differ(stage)
        yield from missed_untold(stage, end_ms)
    if stage.plan.gentle:
        yield from attempts_lost(stage)
    for fault in stage.watcher.checker.end():
        yield violation_of(fault)


def told_wrong(stage: Stage) -> Iterator[Violation]:
    """Yield what processes told or logged and should not have."""
    for process in (process for host in stage.hosts for process in host.processes):
        last: dict[str, str] = {}
        for _at_ms, event in process.events:
            if event.name in ("store_down", "store_back"):
                if last.get(event.instance_id, "store_back") == event.name:
                    yield Violation(TOLD_TWICE, f"{process.name} told {event.name} again")
                last[event.instance_id] = event.name
        for _at_ms, text in process.errors:
            if text.startswith(UNEXPECTED):
                yield Violation(UNEXPECTED_ERROR, f"{process.name}: {text}")
        yield from _losses_logged(process)


def _losses_logged(process: Process) -> Iterator[Violation]:
    """A loss of data is logged by whoever sees another store than before, and by nobody else."""
    logged = sum(text.startswith(DATA_LOST) for _at_ms, text in process.errors)
    seen: dict[str, int] = {}
    expected = 0
    for instance, losses in process.heard:
        expected += seen.get(instance, losses) != losses
        seen[instance] = losses
    if logged != expected:
        text = f"{process.name} saw {expected} losses of data, and logged {logged}"
        yield Violation(LOSS_NOT_LOGGED, text)


def records_differ(stage: Stage) -> Iterator[Violation]:
    """Yield runs of which the store has another record than what it answered."""
    backend = stage.store.connect()
    if not isinstance(backend, LeaseBackend):
        return
    backend.open(BackendSettings("default", "reader", CALL_MS))
    try:
        records = {record.key: record for record in backend.history(None, MANY)}
    finally:
        backend.close()
    before_ms = stage.store.now_ms() - min(item.history_ms for item in stage.plan.versions)
    for run in stage.watcher.runs():
        record = records.get(run.key)
        state = run.settled.state if run.settled is not None else ""
        if record is None and (not (state or run.grants) or run.key.scheduled_ms < before_ms):
            continue  # there was none, or it was pruned
        if record is None or (state and record.state.value != state):
            found = "no record" if record is None else record.state.value
            text = f"{named(run.key)} was {state or 'granted'}, and the store has {found}"
            yield Violation(RECORD_DIFFERS, text)


def missed_untold(stage: Stage, end_ms: int) -> Iterator[Violation]:
    """Yield scheduled times without a record of which nobody told, though nobody crashed."""
    first, *others = stage.plan.versions
    if crashed(stage) or stage.watcher.losses or others:
        return
    told: dict[str, list[tuple[int, int]]] = {}
    for process in (process for host in stage.hosts for process in host.processes):
        for _at_ms, event in process.events:
            if event.name == "run_missed" and event.scheduled_time is not None:
                last_ms = round(event.scheduled_time.timestamp() * 1000)
                first_ms = round((event.first_time or event.scheduled_time).timestamp() * 1000)
                told.setdefault(event.job or "", []).append((first_ms, last_ms))
    for job in first.jobs:
        owed_from_ms = stage.watcher.owed_from_ms(job.name) or end_ms
        for ms in times(job, owed_from_ms + SKEW_WARNING_MS, end_ms - job.jitter_ms):
            key = RunKey(job.name, ms)
            heard = stage.watcher.standing(key) is not Standing.UNHEARD
            if not heard and not any(a <= ms <= b for a, b in told.get(job.name, ())):
                yield Violation(NOT_REPORTED, named(key))


def attempts_lost(stage: Stage) -> Iterator[Violation]:
    """Yield attempts that ended for no reason of their handlers, where nothing may cost one."""
    limited = {job.name for job in stage.plan.versions[0].jobs if job.time_limit_ms is not None}
    for run in stage.watcher.runs():
        for grant in run.grants[:-1]:
            if grant.accepted is None and run.key.job not in limited:
                yield Violation(ATTEMPT_LOST, f"attempt {grant.attempt} of {named(run.key)}")
