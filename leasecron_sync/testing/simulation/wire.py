"""The way from an instance to the store."""
# It asks for the id of the start that is under way.
# pyright: reportPrivateUsage=false
# ruff: noqa: SLF001

from __future__ import annotations

from typing import Callable, Final, TypeVar

from leasecron_sync.errors import OutcomeUnknown, StoreRejected, StoreUnavailable
from leasecron_sync.model import Verdict
from leasecron_sync.testing.faults import Faults
from leasecron_sync.testing.history.entry import Entry
from leasecron_sync.testing.simulation.machine import Process
from leasecron_sync.testing.simulation.plan import MessageFault
from leasecron_sync.testing.simulation.stage import Stage
from leasecron_sync.testing.simulation.violation import CHILD_CALLS, CLAIMS_BLIND, Violation

T = TypeVar("T")

LOCAL: Final = frozenset({"open", "tend", "close", "discard"})
TIMERS: Final = frozenset({"probe", "register", "claim", "pending", "states", "prune"})
"""Calls that the timer alone makes."""

DECIDED: Final = frozenset(
    {Verdict.GRANTED.value, Verdict.SETTLED.value, Verdict.TAKEN.value, Verdict.TOO_OLD.value}
)
LOSSES: Final = frozenset({"request lost", "late", "reply lost"})
"""What happens to a call that leaves it without an answer."""

ONCE: Final = frozenset({"register"})
"""What does not reach the store a second time, or late: an old schedule would stay."""


class Wire(Faults):
    """What happens to the calls of one process.

    Args:
        stage: The history.
        process: Who calls.
    """

    def __init__(self, stage: Stage, process: Process) -> None:
        super().__init__()
        self._stage = stage
        self._process = process
        self._host = process.host

    def call(self, method: str, work: Callable[[], T]) -> T:
        """Make one call, or fail instead of it.

        Args:
            method: Name of the method.
            work: Makes the call.
        """
        if method in LOCAL:
            return work()
        stage, host = self._stage, self._host
        if stage.pid != 1:
            text = f"{self._process.name}: {method}"
            stage.watcher.report(Violation(CHILD_CALLS, text))
        number = host.calls
        host.calls += 1
        stage.counts["calls"] += 1
        if method in TIMERS:
            self._process.calls += 1
        if method == "register":
            self._process.blind = False
        elif method == "claim" and self._process.blind and stage.plan.family == "lease":
            stage.watcher.report(Violation(CLAIMS_BLIND, f"{self._process.name}"))
        try:
            return self._made(method, work, number)
        except (StoreUnavailable, OutcomeUnknown):
            if method == "probe" and self._process.calls == 1:
                self._process.blind, self._process.blind_ms = True, stage.time.now_ms
            raise

    def _made(self, method: str, work: Callable[[], T], number: int) -> T:
        """Make one call, or fail instead of it."""
        stage, host = self._stage, self._host
        fault = host.faults.get(number) if stage.stormy else None
        answers: list[Entry] = []
        losses: list[int] = []
        sent_ms, sent_at_ms = stage.store.now_ms(), stage.time.now_ms
        context = self._process.manual._context  # None in a thread that outlives its scheduler

        def asked() -> T:
            rules = stage.watcher.rules
            rules.sent_ms, rules.sent_at_ms = sent_ms, sent_at_ms
            stage.watcher.answers.clear()
            result = work()
            answers.extend(stage.watcher.answers)
            losses.append(stage.watcher.losses)
            return result

        if fault is None:
            self._refuse(method)
            self._tell(method, "")
            result = asked()
            host.losses -= _lanes(method)
        else:
            result = self._faulty(method, asked, fault)
        if method == "register" and context is not None:
            self._process.heard.append((context.instance_id, losses[-1]))
        elif method == "claim":
            stage.watcher.rules.heard(answers)
            self._process.decided[stage.time.now_ms // 1_000] += sum(
                entry.verdict in DECIDED for entry in answers
            )
        return result

    def _faulty(self, method: str, work: Callable[[], T], fault: MessageFault) -> T:
        stage, what = self._stage, fault.what
        if stage.plan.gentle and what in LOSSES:
            what = self._gently(method, what)
        self._tell(method, f" ({what})")
        stage.counts[what] += 1
        self._linger(fault.before_ms)
        self._refuse(method)
        if what == "refused":
            message = f"{method}: no connection"
            raise StoreUnavailable(message)
        if what == "rejected":
            message = f"{method}: not now"
            raise StoreRejected(message)
        if what in LOSSES and what != "reply lost":
            if what == "late" and method not in ONCE:
                stage.later(fault.later_ms, work)
            self._linger(fault.after_ms)
            message = f"{method}: request lost"
            raise OutcomeUnknown(message)
        result = work()
        if what == "twice" and method not in ONCE:
            if fault.later_ms % 3 == 0:
                result = work()
            else:
                stage.later(fault.later_ms, work)
        self._linger(fault.after_ms)
        if what == "reply lost":
            message = f"{method}: reply lost"
            raise OutcomeUnknown(message)
        return result

    def _gently(self, method: str, what: str) -> str:
        """Lose no two messages in a row, of one kind or of the timer: that does cost attempts."""
        lanes = _lanes(method)
        if lanes & self._host.losses:
            self._host.losses -= lanes
            return "slow"
        self._host.losses |= lanes
        return what

    def _linger(self, ms: int) -> None:
        if ms:
            self._stage.halt(ms)

    def _refuse(self, method: str) -> None:
        now_ms, host = self._stage.time.now_ms, self._host
        if host.cut_off_ms > now_ms:
            self._tell(method, " (store down)")
            message = f"{method}: the store is down"
            raise StoreUnavailable(message)
        if host.rejected and host.rejected.get(method, 0) > now_ms:
            self._tell(method, " (refused)")
            message = f"{method}: permission denied"
            raise StoreRejected(message)

    def _tell(self, method: str, how: str) -> None:
        if self._stage.timeline is not None:
            self._stage.tell(f"{self._process.name} calls {method}{how}")


def _lanes(method: str) -> set[str]:
    return {method, "timer"} if method in TIMERS else {method}
