"""Handlers that fork: the child goes on with the handler, and with nothing else."""
# It gives the worker a copy of what a forked child has a copy of.
# pyright: reportPrivateUsage=false
# ruff: noqa: SLF001

from __future__ import annotations

import copy
import threading
from dataclasses import replace
from typing import Final

from leasecron_sync.engine.context import Context
from leasecron_sync.engine.runtime import LiveRun
from leasecron_sync.engine.worker import execute
from leasecron_sync.run import LeaseRun, Run, RunControl
from leasecron_sync.testing.history._ledger import named
from leasecron_sync.testing.simulation.machine import CHILD, NEVER_MS, Strand
from leasecron_sync.testing.simulation.stage import Stage
from leasecron_sync.testing.simulation.strands import Gone
from leasecron_sync.testing.simulation.violation import CHILD_GOES_ON, Violation

CHILD_PID: Final = 2


def fork_in_handler(stage: Stage, strand: Strand) -> None:
    """Let a handler fork: a child goes on with it as well.

    Args:
        stage: The history.
        strand: The thread that executes the handler.
    """
    assert strand.run is not None
    stage.counts["forks in handlers"] += 1
    child = Strand(strand.process, CHILD, stage.time.now_ms)
    child.run = strand.run
    strand.process.strands.append(child)
    stage.tell(f"{strand.process.name} forks in a handler")


def begin_child(stage: Stage, strand: Strand) -> None:
    """In the handler of the child: from here on this is another process."""
    strand.pid = stage.pid = CHILD_PID


def go_on_in_child(stage: Stage, strand: Strand) -> None:
    """Do in the child what the worker does around a handler that forked.

    Up to the handler the worker works under its parent's number: that is what was copied.
    """
    run = strand.run
    assert run is not None
    context, live = _copied(stage, strand, run._context, run._live)
    try:
        execute(context, live)
    except Gone:
        raise
    except BaseException:  # noqa: BLE001 - what the handler raised goes on, and ends the child
        stage.counts["children that raised"] += 1
    if live.done:
        text = f"{strand.process.name}: a forked child ended {named(live.key)}"
        stage.watcher.report(Violation(CHILD_GOES_ON, text))


def _copied(
    stage: Stage, strand: Strand, context: Context, live: LiveRun
) -> tuple[Context, LiveRun]:
    """Return copies, as the child has them."""
    copied = copy.copy(context)

    def emit(name: str, *_values: object, **_fields: object) -> None:
        if stage.pid == CHILD_PID:
            text = f"{strand.process.name}: a forked child told {name}"
            stage.watcher.report(Violation(CHILD_GOES_ON, text))

    copied.emit = emit  # type: ignore[method-assign]
    lease = live.lease
    control = RunControl(
        context.clock,
        trusted_until_ms=NEVER_MS,  # it was trusted when it was copied
        time_limit_ms=None,
        on_lost=lambda: None,
    )
    run: Run = Run(live.key, control)
    if lease is not None:
        run = LeaseRun(live.key, control, lease.ref, lease.attempt)
    return copied, replace(live, control=control, run=run, done=False, give_up=threading.Event())
