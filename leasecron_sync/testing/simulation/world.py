"""The driver of a history: who goes on next, and what happens meanwhile."""
# It takes the steps of schedulers, and asks what they left behind.
# pyright: reportPrivateUsage=false
# ruff: noqa: SLF001

from __future__ import annotations

import contextlib
import functools
from typing import Callable, Final, Optional

from leasecron_sync.errors import StoreError
from leasecron_sync.run import LeaseRun
from leasecron_sync.testing.history._ledger import named
from leasecron_sync.testing.simulation import forks, happenings
from leasecron_sync.testing.simulation.application import Application
from leasecron_sync.testing.simulation.dice import Dice
from leasecron_sync.testing.simulation.machine import (
    CHILD,
    HEARTBEAT,
    OLD,
    START,
    STOP,
    TIMER,
    WORK,
    Process,
    Strand,
)
from leasecron_sync.testing.simulation.plan import Plan
from leasecron_sync.testing.simulation.processes import start_process
from leasecron_sync.testing.simulation.stage import Stage
from leasecron_sync.testing.simulation.stores import Store
from leasecron_sync.testing.simulation.strands import Body, Stuck
from leasecron_sync.testing.simulation.violation import (
    LOOP_SPINS,
    STARTS_STOPPING,
    STUCK,
    Violation,
)

MAX_STEPS: Final = 25
"""Steps of one loop in one second that are a hot loop beyond what its events explain."""


class World(Stage):
    """One history under way.

    Args:
        plan: See ``Stage``, like the further ones.
        make_store: See there.
        timeline: See there.
    """

    def __init__(
        self,
        plan: Plan,
        make_store: Callable[[Callable[[], int]], Store],
        timeline: Optional[list[str]] = None,
    ) -> None:
        super().__init__(plan, make_store, timeline)
        self._application = Application(self)
        self.handler = self._application.handler
        self._order = Dice(f"order {plan.order}")
        self._next_happening = 0

    def run_until(self, end_ms: int) -> None:
        """Let everybody work until an instant.

        Raises:
            Violation: Something was not as it must be.
        """
        time, order = self.time, self._order
        while True:
            now_ms, next_ms = time.now_ms, end_ms
            ready: list[Strand] = []
            for host in self.hosts:
                if host.due_ms <= now_ms:
                    if host.process is None:
                        start_process(self, host, host.version)
                    ready += host.ready(now_ms)
                if now_ms < host.due_ms < next_ms:
                    next_ms = host.due_ms
            if ready:
                self._go_on(order.pick(ready))
            elif now_ms >= end_ms:
                return
            else:
                self._pass(next_ms)

    def _pass(self, until_ms: int) -> None:
        """Let time pass until something happens."""
        coming = self.plan.happenings if self.stormy else ()
        if self._next_happening < len(coming):
            until_ms = min(until_ms, coming[self._next_happening].at_ms)
        for at_ms, _number, _work in self.arriving:
            until_ms = min(until_ms, at_ms)
        self.time.now_ms = max(self.time.now_ms, until_ms)
        now_ms = self.time.now_ms
        if self.arriving:
            arrived = sorted(item for item in self.arriving if item[0] <= now_ms)
            self.arriving = [item for item in self.arriving if item[0] > now_ms]
            for _at_ms, _number, work in arrived:
                with contextlib.suppress(StoreError):
                    work()
        while self._next_happening < len(coming) and coming[self._next_happening].at_ms <= now_ms:
            self._next_happening += 1
            happenings.happen(self, coming[self._next_happening - 1])
            for host in self.hosts:
                host.look(now_ms)
            self.watch_everybody()
        self._raise()

    def _go_on(self, strand: Strand) -> None:
        """Let one thread go on until it halts or ends, and look at what it did."""
        process = strand.process
        if strand.kind == STOP:
            happenings.end_of_stop(self, process)
            return
        if strand.kind == START:
            happenings.start_again(self, process)
            return
        self.current, self.pid = strand, strand.pid
        if strand.body is None:
            strand.body = Body(self.crew, functools.partial(self._step, strand))
        self.watcher.disturbed = False
        try:
            strand.body.resume()
        except Stuck as error:
            raise Violation(STUCK, f"{process.name}: {error}") from error
        self.current, self.pid = None, 1
        if strand.body.ended:
            strand.body = None
            if strand.kind in (OLD, CHILD):
                process.strands.remove(strand)
        if len(process.manual.runs) != process.works:
            self._new_works(process)
        process.host.look(self.time.now_ms)
        if self.watcher.disturbed:
            self.watch_everybody()
        else:
            self.watcher.watch(process)
        self._raise()

    def _step(self, strand: Strand) -> None:
        """Do one round of what a thread does."""
        process, manual = strand.process, strand.process.manual
        if strand.kind == TIMER:
            self._count_step(process, TIMER)
            process.calls = 0
            if manual.step_timer() is None:
                process.strands.remove(strand)
                for live in manual._runtime.runs():  # one may have begun in its last step
                    live.control.stop()
        elif strand.kind == HEARTBEAT:
            self._count_step(process, HEARTBEAT)
            manual.step_heartbeat()
        elif strand.kind == WORK:
            self._work(strand)
        elif strand.kind == CHILD:
            forks.go_on_in_child(self, strand)

    def _work(self, strand: Strand) -> None:
        assert strand.run is not None
        if not strand.called:
            strand.called = True
            strand.run.call_handler()
            strand.wake_ms = self.time.now_ms
            return
        delay_ms = strand.run.settle()
        if delay_ms is None:
            process = strand.process
            process.strands.remove(strand)
            if strand.run in process.manual.runs:
                process.manual.runs.remove(strand.run)
                process.works -= 1
        else:
            strand.wake_ms = self.time.now_ms + delay_ms

    def _new_works(self, process: Process) -> None:
        """Give each granted run a thread."""
        if process.muted:
            return
        known = [strand.run for strand in process.strands if strand.kind == WORK]
        for run in process.manual.runs:
            if run not in known:
                if process.strand(STOP) is not None and isinstance(run.run, LeaseRun):
                    text = f"{process.name} starts {named(run.run._key)}"
                    self.watcher.report(Violation(STARTS_STOPPING, text))
                at_ms = self.time.now_ms + self._application.lateness_ms(run.run)
                process.works += 1
                strand = Strand(process, WORK, at_ms)
                strand.run = run
                process.strands.append(strand)

    def _count_step(self, process: Process, loop: str) -> None:
        second = self.time.now_ms // 1_000
        process.steps[loop, second] += 1
        number = process.steps[loop, second]
        if number > MAX_STEPS:
            events = sum(at_ms >= self.time.now_ms - 2_000 for at_ms, _event in process.events)
            decided = process.decided[second] + process.decided[second - 1]
            if number > MAX_STEPS + 3 * events + 2 * decided:
                self.watcher.report(Violation(LOOP_SPINS, f"{loop} of {process.name}"))

    def _raise(self) -> None:
        if self.watcher.violation is not None:
            raise self.watcher.violation

    # -- what must hold at any time --------------------------------------------------------------

    def watch_everybody(self) -> None:
        """See whether anybody trusts a lease that is not live, or will not be for long enough."""
        for host in self.hosts:
            if host.process is not None:
                self.watcher.watch(host.process)
