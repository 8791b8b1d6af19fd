"""A connection to a server that is only looked at, how quick it answers, and its clock."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Callable, Generic, Optional, Protocol, TypeVar

from leasecron_sync.backends._lanes import Deadline
from leasecron_sync.clock import Clock, SystemClock
from leasecron_sync.doctor.finding import Examination, Finding, Findings, Level
from leasecron_sync.doctor.reach import asks_for_login, reach_advice
from leasecron_sync.errors import StoreError, StoreRejected
from leasecron_sync.options import SKEW_WARNING_MS

ROUND_TRIPS = 7
"""How often the server is asked for its time."""

SLOW_MS = 250
"""Round trip from which on it is worth a warning: each claim and each renewal is one."""

WRONG_CLOCK_MS = 10_000
"""Skew from which on a run starts at a time that is plainly not its own."""


class _Link(Protocol):
    @property
    def is_sound(self) -> bool: ...

    def close(self) -> None: ...


L = TypeVar("L", bound=_Link)


def tell_unreachable(findings: Findings, error: StoreError) -> None:
    """Tell that a store cannot be reached, and what to do.

    Args:
        findings: Where findings go.
        error: Why.
    """
    findings.problem(
        "reachable",
        str(error),
        "As long as no instance reaches its store nothing is claimed. When it is back, what is not "
        "too old by then is executed, and the rest is reported missed.",
        reach_advice(str(error)),
    )


class Visit(Generic[L]):
    """A connection that is made when it is needed, and anew after it broke.

    Args:
        connect: Makes one.
        exam: The examination.
    """

    def __init__(self, connect: Callable[[Deadline], L], exam: Examination) -> None:
        self._connect = connect
        self._exam = exam
        self._link: Optional[L] = None
        self._problem: Optional[StoreError] = None

    def link(self) -> L:
        """Return the connection.

        Raises:
            StoreError: There is none; the server is not asked again after that.
        """
        if self._link is not None and not self._link.is_sound:
            self.close()
        if self._link is None:
            if self._problem is not None:
                raise self._problem
            try:
                self._link = self._connect(self._exam.call())
            except StoreError as error:
                self._problem = error
                raise
        return self._link

    def close(self) -> None:
        """Close the connection."""
        link, self._link = self._link, None
        if link is not None:
            link.close()

    def reaches(self, ask: Callable[[], object]) -> bool:
        """Connect for the first time; tell what to do where that fails.

        Args:
            ask: Asks for something: a connection may stand without anybody at its other end.
        """
        findings = self._exam.findings
        findings.under_way = "reachable"
        try:
            self.link()
            ask()
        except StoreError as error:
            if isinstance(error, StoreRejected) and not asks_for_login(str(error)):
                return True  # it may not be asked this, and has answered
            tell_unreachable(findings, error)
            return False
        return True


def check_answers(
    exam: Examination,
    ask_ms: Callable[[], int],
    clock: Optional[Clock] = None,
) -> None:
    """Measure round trips, and how far the clocks are apart.

    Args:
        exam: The examination.
        ask_ms: Asks the store for its time, in one round trip.
        clock: Of this host.
    """
    clock = clock or SystemClock()
    took: list[int] = []
    best: Optional[tuple[int, int]] = None
    with exam.findings.checking("reachable"):
        while len(took) < ROUND_TRIPS and (not took or exam.call().left_ms() > 2 * max(took)):
            sent_ms, sent_steady_ms = clock.now_ms(), clock.steady_ms()
            store_ms = ask_ms()
            took_ms = clock.steady_ms() - sent_steady_ms
            took.append(took_ms)
            if best is None or took_ms < best[0]:
                best = took_ms, store_ms - (sent_ms + took_ms // 2)
        tell_round_trips(exam, took)
    with exam.findings.checking("clock"):
        if best is None:
            message = "the store did not tell its time"
            raise StoreRejected(message)
        tell_skew(exam, best[1], best[0])


def tell_round_trips(exam: Examination, took: Sequence[int]) -> None:
    """Tell how quick a store answers.

    Args:
        exam: The examination.
        took: How long each of some round trips took, in ms.
    """
    median, longest = sorted(took)[len(took) // 2], max(took)
    measured = {"p50_ms": median, "max_ms": longest, "round_trips": len(took)}
    found = f"answers in {_ms(median)} ({len(took)} round trips, the slowest {_ms(longest)})"
    if median < SLOW_MS:
        exam.findings.ok("reachable", found, measured)
        return
    exam.findings.add(
        Finding(
            Level.WARNING,
            "reachable",
            found,
            "Each claim and each renewal takes as long: runs start late by that, and a call that "
            f"takes more than {exam.settings.call_timeout_ms} ms counts as an outage.",
            "Look for what is slow: the way to the server, a pooler without free connections, or "
            "the server itself.",
            measured,
        )
    )


def tell_skew(exam: Examination, skew_ms: int, took_ms: int) -> None:
    """Tell how far the store's clock is ahead of this host's.

    Args:
        exam: The examination.
        skew_ms: So far; negative when it is behind.
        took_ms: The round trip that it was measured with.
    """
    measured = {"skew_ms": skew_ms}
    way = "ahead of" if skew_ms > 0 else "behind"
    found = f"the store's clock is {_long(abs(skew_ms))} {way} this host's"
    # What may come from the way of the call is no skew.
    certain_ms = abs(skew_ms) - took_ms // 2
    if certain_ms <= SKEW_WARNING_MS:
        found = f"the store's clock and this host's agree to within {abs(skew_ms) or 1} ms"
        exam.findings.ok("clock", found, measured)
        return
    exam.findings.add(
        Finding(
            Level.PROBLEM if certain_ms > WRONG_CLOCK_MS else Level.WARNING,
            "clock",
            found,
            "Runs start by the store's clock: by this host's they are "
            f"{'early' if skew_ms > 0 else 'late'} by as much. Times in this host's logs do not "
            "fit those in the history.",
            "Set both clocks by NTP (timedatectl tells whether a host does), the wrong one first.",
            measured,
        )
    )


def _ms(duration_ms: int) -> str:
    return f"{duration_ms} ms" if duration_ms else "under 1 ms"


def _long(duration_ms: int) -> str:
    return f"{duration_ms} ms" if duration_ms < WRONG_CLOCK_MS else f"{duration_ms // 1000} s"
