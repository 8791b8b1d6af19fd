"""What happens to hosts, processes and the store, beside messages and handlers."""
# It reaches into the scheduler to change its jobs.
# pyright: reportPrivateUsage=false
# ruff: noqa: SLF001

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Callable, Final

from leasecron_sync.testing.simulation.machine import (
    HEARTBEAT,
    OLD,
    START,
    STOP,
    TIMER,
    Host,
    Process,
    Strand,
)
from leasecron_sync.testing.simulation.plan import Happening
from leasecron_sync.testing.simulation.processes import add_job, start_scheduler
from leasecron_sync.testing.simulation.stage import Stage

GRACE_MS: Final = 4_000
"""Time that a deploy gives handlers to end."""

LONGEST_NAP_MS: Final = 12_000
"""What is left of a timer's wait at most, as long as jobs fall due every few seconds."""


def happen(stage: Stage, item: Happening) -> None:
    """Let something happen."""
    hosts = [host for host in stage.hosts if host.label == item.host] or stage.hosts
    if item.host and hosts is stage.hosts:
        return  # the host was taken out of the plan
    if item.what != "emptied":  # counted where it is done, since not every store can
        stage.counts[item.what] += 1
    stage.tell(f"== {describe(item)}")
    _KINDS[item.what](stage, hosts, item)


def describe(item: Happening) -> str:
    """Return a happening in words."""
    parts = [item.what, item.host or "everybody"]
    if item.what == "deploy":
        parts.append(f"version {item.version}")
    parts += [item.how] if item.how else []
    parts += [f"{item.ms} ms"] if item.ms else []
    return " ".join(parts)


# -- the store -------------------------------------------------------------------------------------


def _down(stage: Stage, hosts: list[Host], item: Happening) -> None:
    for host in hosts:
        host.cut_off_ms = max(host.cut_off_ms, stage.time.now_ms + item.ms)


def _reject(stage: Stage, hosts: list[Host], item: Happening) -> None:
    for host in hosts:
        host.rejected[item.how] = stage.time.now_ms + item.ms


def _emptied(stage: Stage, hosts: list[Host], item: Happening) -> None:
    _down(stage, hosts, item)
    if stage.store.empties:
        stage.later(item.then_ms, lambda: empty(stage))


def empty(stage: Stage) -> None:
    """Let the store lose its data, while nobody reaches it."""
    if not stage.stormy:
        return
    stage.counts["emptied"] += 1
    stage.tell("== the store loses its data")
    stage.store.empty()
    stage.watcher.lose_data()


def _store_step(stage: Stage, hosts: list[Host], item: Happening) -> None:
    stage.store_clock.step(item.ms)
    stage.store.stepped()
    if item.ms < 0:
        stage.watcher.rules.set_back()
        for process in (host.process for host in hosts if host.process is not None):
            process.started_ms = min(process.started_ms, stage.store.now_ms())


# -- hosts -----------------------------------------------------------------------------------------


def _host_step(stage: Stage, hosts: list[Host], item: Happening) -> None:
    del stage
    for host in hosts:
        host.clock.step(item.ms)
        process = host.process
        if process is not None and process.manual._context is not None:
            # A skew that was known before misleads until it is measured again.
            now_ms = process.manual._context.caller.now_ms()
            process.expects_ms = min(process.expects_ms, now_ms)


def _pause(stage: Stage, hosts: list[Host], item: Happening) -> None:
    for host in hosts:
        host.paused_ms = max(host.paused_ms, stage.time.now_ms + item.ms)


def _suspend(stage: Stage, hosts: list[Host], item: Happening) -> None:
    """Suspend hosts: unlike a stopped process, waits stand still too."""
    now_ms = stage.time.now_ms
    for host in hosts:
        if host.process is None or host.paused_ms > now_ms:
            continue
        host.paused_ms = now_ms + item.ms
        for strand in host.process.strands:
            if strand.wake_ms > now_ms:
                strand.wake_ms += item.ms
        manual, clock = host.process.manual, host.clock
        if clock.when(manual._timer_ms) > now_ms:
            manual._timer_ms += item.ms
            host.slept_ms = min(clock.when(manual._timer_ms), now_ms + item.ms + LONGEST_NAP_MS)
        if clock.when(manual._heartbeat_ms) > now_ms:
            manual._heartbeat_ms += item.ms


# -- processes -------------------------------------------------------------------------------------


def _kill(stage: Stage, hosts: list[Host], item: Happening) -> None:
    for host in hosts:
        if host.process is not None:
            kill(stage, host, item.then_ms)


def kill(stage: Stage, host: Host, restart_ms: int) -> None:
    """End a process as a crash does; another one starts after a while."""
    process = host.process
    assert process is not None
    stage.tell(f"{process.name} is gone")
    process.muted = True
    host.process, host.paused_ms = None, 0
    host.restart_ms = stage.time.now_ms + restart_ms
    for strand in list(process.strands):
        stage.cut(strand)
    process.strands.clear()
    process.manual.kill()
    host.look(stage.time.now_ms)


def _stop(stage: Stage, hosts: list[Host], item: Happening) -> None:
    for host in hosts:
        stop(stage, host, item, restart=item.what == "restart")


def stop(stage: Stage, host: Host, item: Happening, *, restart: bool) -> None:
    """Stop a scheduler as ``stop()`` does."""
    process = host.process
    if process is None or process.stopping or host.paused_ms > stage.time.now_ms:
        return
    process.after_stop = "restart" if restart else ""
    process.then_ms = item.then_ms
    process.manual.begin_stop()
    process.strands.append(Strand(process, STOP, stage.time.now_ms + (item.ms or GRACE_MS)))


def end_of_stop(stage: Stage, process: Process) -> None:
    """Do what follows when everything has ended, or the time for it is over."""
    stopper = process.strand(STOP)
    assert stopper is not None
    process.strands.remove(stopper)
    host = process.host
    if process.after_stop != "restart":
        kill(stage, host, process.then_ms)
        return
    process.manual.end_stop()
    process.strands = [
        strand
        for strand in process.strands
        if strand.kind not in (TIMER, HEARTBEAT) or strand.body is not None
    ]
    for strand in process.strands:
        if strand.kind in (TIMER, HEARTBEAT):  # in a call that goes on without them
            strand.kind = OLD
    process.strands.append(Strand(process, START, stage.time.now_ms + process.then_ms))


def start_again(stage: Stage, process: Process) -> None:
    """Start a scheduler in the process in which it was stopped."""
    starter = process.strand(START)
    assert starter is not None
    process.strands.remove(starter)
    if process.version != stage.plan.versions[process.host.version]:
        kill(stage, process.host, 0)  # deployed meanwhile
        return
    stage.tell(f"{process.name} starts its scheduler again")
    start_scheduler(stage, process)


def _deploy(stage: Stage, hosts: list[Host], item: Happening) -> None:
    for host in hosts:
        deploy(stage, host, item)


def deploy(stage: Stage, host: Host, item: Happening) -> None:
    """Bring a version to a host: into the process that is there, or with another one."""
    if item.version >= len(stage.plan.versions):
        return  # the version was taken out of the plan
    version, process = stage.plan.versions[item.version], host.process
    host.version = item.version
    if process is None or process.version == version:
        return
    before = process.version
    same = (before.lease_ms, before.history_ms) == (version.lease_ms, version.history_ms)
    if item.how == "restart" or not same:
        if process.stopping:
            process.after_stop = ""
        else:
            stop(stage, host, item, restart=False)
        return
    process.version = version
    scheduler = process.scheduler
    for job in before.jobs:
        if version.job(job.name) != job:
            scheduler.remove_job(job.name)
    for job in version.jobs:
        if before.job(job.name) != job:
            add_job(stage, process, job)
    if process.manual._context is not None:
        process.manual.refresh()


def _no_threads(stage: Stage, hosts: list[Host], item: Happening) -> None:
    for host in hosts:
        host.no_threads_ms = stage.time.now_ms + item.ms
        if host.process is not None:
            host.process.manual.can_start_threads = False
        stage.later(item.ms, lambda host=host: _threads_again(stage, host))  # type: ignore[misc]


def _threads_again(stage: Stage, host: Host) -> None:
    if host.process is not None and host.no_threads_ms <= stage.time.now_ms:
        host.process.manual.can_start_threads = True


def _fork(stage: Stage, hosts: list[Host], item: Happening) -> None:
    """Fork a process; the child, whose scheduler is stopped, starts it after a while."""
    for host in hosts:
        label = f"{host.label}'"
        if host.process is None or any(other.label == label for other in stage.hosts):
            continue
        child = stage.add_host(replace(host.plan, label=label))
        child.version = host.version
        child.restart_ms = stage.time.now_ms + item.then_ms
        child.clock.step(host.clock.now_ms() - child.clock.now_ms())
        child.look(stage.time.now_ms)
        stage.hosts.append(child)


_KINDS: Final[Mapping[str, Callable[[Any, list[Host], Happening], None]]] = {
    "down": _down,
    "all down": _down,
    "reject": _reject,
    "emptied": _emptied,
    "store step": _store_step,
    "store back": _store_step,
    "host step": _host_step,
    "pause": _pause,
    "suspend": _suspend,
    "kill": _kill,
    "stop": _stop,
    "restart": _stop,
    "deploy": _deploy,
    "no threads": _no_threads,
    "fork": _fork,
}
