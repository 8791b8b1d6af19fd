"""Every store call goes through here: outages, the delay until the next try, the skew."""

from __future__ import annotations

import logging
import threading
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Callable, Optional, TypeVar

from leasecron_sync.clock import Clock
from leasecron_sync.errors import OutcomeUnknown, StoreError, StoreRejected
from leasecron_sync.model import StoreInfo
from leasecron_sync.options import SKEW_WARNING_MS

T = TypeVar("T")

_logger = logging.getLogger("leasecron_sync.engine.caller")

FIRST_DELAY_MS = 100
LAST_DELAY_MS = 5_000


class Caller:
    """Calls the store and keeps account of whether it answers.

    An outage begins with the first call that fails and ends when every lane that failed has had an
    answer, so that it is told once at each end, however many threads meet it. A lane that makes
    calls of several kinds in rounds has its answer when a whole round went well: a store that
    answers a probe and refuses every claim is not back. Nor is one when a round went well in which
    nothing was claimed: what was refused, and is not part of every round, has to be answered.

    Args:
        clock: Where the time comes from.
        rounds: The lanes that make their calls in rounds.
        on_down: Called with the error when an outage begins.
        on_back: Called with its length when it ends.
        on_skew: Called once with a skew that is too large.
    """

    def __init__(
        self,
        clock: Clock,
        *,
        rounds: frozenset[str] = frozenset(),
        on_down: Callable[[StoreError], None],
        on_back: Callable[[int], None],
        on_skew: Callable[[int], None],
    ) -> None:
        self._clock = clock
        self._rounds = rounds
        self._on_down = on_down
        self._on_back = on_back
        self._on_skew = on_skew
        self._lock = threading.RLock()  # a signal handler may read the state again
        self._failing: set[str] = set()
        self._refused: set[str] = set()
        self._awaited: set[str] = set()
        self._down_since_ms: Optional[int] = None
        self._began_at_ms = 0
        self._answered_at_ms: Optional[int] = None
        self._back_at_ms: Optional[int] = None
        self._skew_ms: Optional[int] = None
        self._offset_ms = 0
        self._skew_told = False
        # In an outage nobody can tell whether a clock that was set is right before it or after it.
        self._compared: Optional[tuple[int, int]] = None

    def call(self, lane: str, function: Callable[[], T]) -> T:
        """Call the store once.

        Args:
            lane: Who calls; an outage lasts until each lane that failed has an answer.
            function: The call.

        Raises:
            StoreError: It failed; what else a backend lets escape becomes OutcomeUnknown.
        """
        try:
            result = function()
        except StoreError as error:
            self.failed(lane, error)
            raise
        except Exception as error:
            _logger.exception("the backend let a foreign error escape")
            unknown = OutcomeUnknown(f"{type(error).__name__}: {error}")
            self.failed(lane, unknown)
            raise unknown from error
        self._answered_at_ms = self._clock.now_ms()
        if lane not in self._rounds:
            self._answered(lane)
        return result

    def probe(self, lane: str, function: Callable[[], StoreInfo]) -> Optional[StoreInfo]:
        """Probe the store; None when it refuses that, which is an answer too.

        Args:
            lane: See ``call``.
            function: The call.

        Raises:
            StoreError: There was no answer.
        """

        def asked() -> Optional[StoreInfo]:
            try:
                return function()
            except StoreRejected:
                return None

        return self.call(lane, asked)

    def call_all(self, lane: str, function: Callable[[], Sequence[T]], number: int) -> Sequence[T]:
        """Call the store once with several items; there must be a reply to each.

        Args:
            lane: See ``call``.
            function: The call.
            number: How many items it has.

        Raises:
            StoreError: It failed, or the replies do not match the items.
        """

        def checked() -> Sequence[T]:
            replies = function()
            if len(replies) != number:
                message = f"the backend gave {len(replies)} replies to {number} items"
                raise OutcomeUnknown(message)
            return replies

        return self.call(lane, checked)

    @contextmanager
    def asking(self, command: str) -> Generator[None, None, None]:
        """Let an outage last until a command is answered, if the store refuses it.

        It is for what a round need not ask for: one that went well without it says nothing of it.
        Where there was no answer at all the next round tells, whatever it asks for.

        Args:
            command: What the call within asks for.
        """
        try:
            yield
        except StoreRejected:
            with self._lock:
                self._awaited.add(command)
            raise
        if command in self._awaited:
            with self._lock:
                self._awaited.discard(command)
            self._end_if_over()

    def round_ended(self, lane: str) -> None:
        """Note that every call of a round was answered."""
        self._answered(lane)

    def is_failing(self, lane: str) -> bool:
        """Tell whether a lane has had no answer since a call of it failed."""
        return lane in self._failing

    def forget(self, lane: str) -> None:
        """Do not wait for an answer of a lane that will make no more calls."""
        with self._lock:
            self._failing.discard(lane)
            self._refused.discard(lane)
            if self.is_down() and not self._failing and not self._awaited:
                self._failing |= self._rounds  # somebody has to find out when the store is back

    def is_down(self) -> bool:
        """Tell whether an outage is going on."""
        return self._down_since_ms is not None

    @property
    def down_since_ms(self) -> Optional[int]:
        """Wall clock at which the outage began; None while the store answers."""
        return self._down_since_ms

    @property
    def answered_at_ms(self) -> Optional[int]:
        """Wall clock of the newest answer; None before the first one."""
        return self._answered_at_ms

    @property
    def back_at_ms(self) -> Optional[int]:
        """Steady time at which the newest outage ended."""
        return self._back_at_ms

    @property
    def skew_ms(self) -> Optional[int]:
        """Newest difference between the store's clock and this host's; positive: it is ahead."""
        return self._skew_ms

    def compare_clocks(self, store_ms: int, sent_steady_ms: int) -> None:
        """Note the store's clock from a reply that has just come.

        The wall clock is read now and not when the call was made: it may have been set meanwhile.
        It is read before the steady one, so that a pause between them is taken for the call's.

        Args:
            store_ms: The store's reading.
            sent_steady_ms: Steady time when the call was made.
        """
        now_ms = self._clock.now_ms()
        took_ms = self._clock.steady_ms() - sent_steady_ms
        skew_ms = store_ms - (now_ms - took_ms // 2)
        # What may come from the way of the call is no skew.
        self._note_skew(skew_ms, certain=abs(skew_ms) - took_ms // 2 > SKEW_WARNING_MS)

    def note_early(self, early_ms: int) -> None:
        """Note that the store's clock is behind what ``now_ms`` took it for by this much."""
        skew_ms = self._offset_ms - early_ms
        if early_ms > SKEW_WARNING_MS:
            self._note_skew(skew_ms, certain=abs(skew_ms) > SKEW_WARNING_MS)

    def now_ms(self) -> int:
        """Return the wall clock, put right by the skew that is known: what is due is due by it.

        A clock that is set in an outage counts when it can be compared with the store's again;
        until then time goes on by the steady clock.
        """
        now_ms, compared = self._clock.now_ms(), self._compared
        if compared is not None and self._failing:
            even_ms = compared[0] + self._clock.steady_ms() - compared[1]
            if abs(now_ms - even_ms) > SKEW_WARNING_MS:
                now_ms = even_ms
        return now_ms + self._offset_ms

    def _note_skew(self, skew_ms: int, *, certain: bool) -> None:
        self._compared = self._clock.now_ms(), self._clock.steady_ms()
        self._skew_ms = skew_ms
        self._offset_ms = skew_ms if certain else 0
        if certain and not self._skew_told:
            self._skew_told = True
            self._on_skew(skew_ms)

    def failed(self, lane: str, error: StoreError) -> None:
        """Note that a call failed."""
        if isinstance(error, StoreRejected) and lane not in self._rounds:
            # The store answers, and refuses this one thing; told once, however often it is tried.
            with self._lock:
                known = lane in self._refused
                self._refused.add(lane)
            if not known:
                _logger.warning("the store refused a call what=%r error=%r", lane, str(error))
            return
        with self._lock:
            began = self._down_since_ms is None
            now_ms, steady_ms = self._clock.now_ms(), self._clock.steady_ms()
            # From the newest call to here it was looked at, also where the outage goes on because
            # of what was refused: the store answered other calls.
            if not self._failing and self._skew_ms is not None:
                self._compared = now_ms, steady_ms
            self._failing.add(lane)
            if began:
                self._down_since_ms, self._began_at_ms = now_ms, steady_ms
        if began:
            self._on_down(error)
        else:
            _logger.debug("the store still does not answer lane=%s error=%r", lane, str(error))

    def _answered(self, lane: str) -> None:
        if self._refused:
            with self._lock:
                self._refused.discard(lane)
        if self._down_since_ms is None:
            return
        with self._lock:
            self._failing.discard(lane)
        self._end_if_over()

    def _end_if_over(self) -> None:
        outage_ms: Optional[int] = None
        with self._lock:
            waits = bool(self._failing or self._awaited)
            if self.is_down() and not waits:  # else another lane has ended it
                self._down_since_ms = None
                self._back_at_ms = self._clock.steady_ms()
                outage_ms = self._back_at_ms - self._began_at_ms
        if outage_ms is not None:
            self._on_back(outage_ms)


def import_late_ones() -> None:
    """Import what is imported late, now; waits for another thread that is doing so."""
    import_module("tenacity")


class Backoff:
    """Delays between tries: exponential with jitter, as a value for the steps.

    Args:
        last_ms: Longest delay.
    """

    def __init__(self, last_ms: int = LAST_DELAY_MS) -> None:
        # Imported late: it costs a third of the whole library's import.
        from tenacity import RetryCallState, Retrying, wait_exponential, wait_random  # noqa: PLC0415

        first_s = min(FIRST_DELAY_MS, last_ms) / 1000
        # The jitter keeps instances that met one outage together from asking together.
        self._wait = wait_exponential(multiplier=first_s, max=last_ms / 1000) + wait_random(
            0, first_s
        )
        self._state = RetryCallState(Retrying(), None, (), {})
        self._state.attempt_number = 0

    @property
    def failures(self) -> int:
        """How many tries have failed in a row."""
        return self._state.attempt_number

    def next_ms(self) -> int:
        """Note a failed try and return the delay until the next one."""
        self._state.attempt_number += 1
        return max(1, round(self._wait(self._state) * 1000))

    def reset(self) -> None:
        """Note a try that succeeded."""
        self._state.attempt_number = 0
