"""The handlers of the simulated application."""
# It names runs as the library does.
# pyright: reportPrivateUsage=false
# ruff: noqa: SLF001

from __future__ import annotations

from typing import Optional

from leasecron_sync.errors import HandOver
from leasecron_sync.model import RunKey
from leasecron_sync.run import LeaseRun, Run
from leasecron_sync.testing.simulation import forks
from leasecron_sync.testing.simulation.machine import CHILD
from leasecron_sync.testing.simulation.plan import Behaviour
from leasecron_sync.testing.simulation.stage import Stage


class Application:
    """Does in each attempt of each run what the plan says.

    Args:
        stage: The history.
    """

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._behaviours = {
            (RunKey(item.job, item.scheduled_ms), item.attempt): item
            for item in stage.plan.behaviours
        }

    def handler(self, run: Run) -> None:
        """Do what a handler does."""
        stage, strand = self._stage, self._stage.current
        assert strand is not None
        behaviour = self._behaviour(run)
        if strand.kind == CHILD:
            forks.begin_child(stage, strand)
            self._behave(run, behaviour)
            return
        stage.tell(f"{strand.process.name} executes")
        stage.watcher.started(run, strand.process)
        if behaviour is not None and behaviour.forks:
            forks.fork_in_handler(stage, strand)
        handlers = strand.process.handlers
        handlers.append(run)
        try:
            self._behave(run, behaviour)
        finally:
            handlers.remove(run)

    def lateness_ms(self, run: Run) -> int:
        """Return how long the thread of a run does not get to work."""
        behaviour = self._behaviour(run)
        return behaviour.late_ms if behaviour is not None else 0

    def _behaviour(self, run: Run) -> Optional[Behaviour]:
        attempt = run.attempt if isinstance(run, LeaseRun) else 1
        return self._behaviours.get((run._key, attempt)) if self._stage.stormy else None

    def _behave(self, run: Run, behaviour: Optional[Behaviour]) -> None:
        if behaviour is None:
            return
        stage = self._stage
        end_ms = stage.time.now_ms + behaviour.length_ms
        if behaviour.waits and behaviour.length_ms:
            run.wait(behaviour.length_ms / 1000)
        while stage.time.now_ms < end_ms:
            stage.halt(min(end_ms - stage.time.now_ms, behaviour.look_ms))
            if not behaviour.stubborn and (behaviour.looks or run.stopping):
                run.check()
        if behaviour.outcome == "hand over":
            raise HandOver
        if behaviour.outcome == "raise":
            message = "no luck"
            raise ValueError(message)
        if behaviour.outcome == "exit":
            raise SystemExit(3)
