"""The turn of one host at a run: what stays the same while it asks, executes and reports."""

from __future__ import annotations

import signal
import threading
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Callable, Final, Optional, TypeVar

from leasecron_sync.cli._exec_child import KILL_AFTER_MS, Child
from leasecron_sync.cli.output import CommandError, complain
from leasecron_sync.clock import Clock, SystemClock
from leasecron_sync.errors import OutcomeUnknown, StoreUnavailable
from leasecron_sync.model import RunKey
from leasecron_sync.run import moment
from leasecron_sync.schedule import Schedule

T = TypeVar("T")

LOST_LEASE: Final = 75
"""Status when the lease of the command was lost: what it did may be done again."""

TIME_OVER: Final = 124
"""Status when the command was ended by its time limit, as that of ``timeout``."""

SIGNALS: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@dataclass(frozen=True)
class Order:
    """What is to be executed, and when.

    Attributes:
        name: Name of the job.
        schedule: When it is due.
        window_ms: How late it may begin.
        command: Program and arguments.
        time_limit_ms: How long it may take; None for any time.
    """

    name: str
    schedule: Schedule
    window_ms: int
    command: Sequence[str]
    time_limit_ms: Optional[int]

    def due_run(self, now_ms: int) -> RunKey:
        """Return the latest run that is due.

        Raises:
            CommandError: There is none in the window.
        """
        scheduled_ms = self.schedule.before(now_ms + 1)
        if scheduled_ms is None or now_ms - scheduled_ms > self.window_ms:
            last = "never" if scheduled_ms is None else f"at {moment(scheduled_ms).isoformat()}"
            message = (
                f"{self.name!r} was due {last} for the last time, which is more than the "
                f"{self.window_ms // 1000} s of --window ago: give --schedule and --timezone the "
                "times at which this command is called"
            )
            raise CommandError(message)
        return RunKey(self.name, scheduled_ms)

    def environment(self, key: RunKey, **more: object) -> dict[str, str]:
        """Return what the command is told of its run."""
        told = {"job": key.job, "scheduled_time": moment(key.scheduled_ms).isoformat(), **more}
        return {f"LEASECRON_SYNC_{name.upper()}": str(value) for name, value in told.items()}

    def is_over_after(self, took_ms: int) -> bool:
        """Tell whether the command may take no longer."""
        return self.time_limit_ms is not None and took_ms >= self.time_limit_ms


@dataclass
class Stop:
    """The signals that this process was sent.

    Attributes:
        asked: Set by the first one.
        child: Who is sent them, too.
        count: How many have come.
    """

    asked: threading.Event = field(default_factory=threading.Event)
    child: Optional[Child] = None
    number: int = 0
    count: int = 0

    @property
    def status(self) -> int:
        """Status of a process that such a signal has ended."""
        return 128 + self.number

    def start(self, make: Callable[[], Child]) -> Child:
        """Start a command; it is sent a signal that came meanwhile."""
        self.child = child = make()
        if self.number:
            child.send(self.number)
        return child

    def note(self, number: int, _frame: Optional[FrameType]) -> None:
        """Pass a signal on."""
        self.number = self.number or number
        self.count += 1
        self.asked.set()
        if self.child is not None:
            self.child.send(number)

    @contextmanager
    def watching(self) -> Generator[None, None, None]:
        """Take the signals while the context is entered."""
        before = {number: signal.signal(number, self.note) for number in SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


@dataclass
class Ending:
    """How a command is being ended, if it is.

    Attributes:
        reason: Why; empty while it is not.
        kill_ms: Steady time at which it is killed.
    """

    reason: str = ""
    kill_ms: Optional[int] = None

    def begin(self, child: Child, reason: str, steady_ms: int) -> None:
        """Send SIGTERM, once."""
        if self.kill_ms is None:
            self.reason, self.kill_ms = reason, steady_ms + KILL_AFTER_MS
            child.send(signal.SIGTERM)

    def step(self, child: Child, steady_ms: int) -> None:
        """Kill it when its time is over."""
        if self.kill_ms is not None and steady_ms >= self.kill_ms:
            child.kill()


class Asking:
    """Asks a store until it answers, or no time is left.

    Args:
        stop: Ends it.
        verbose: Whether to say what happens.
        clock: The clock.
    """

    def __init__(self, stop: Stop, *, verbose: bool, clock: Optional[Clock] = None) -> None:
        self.stop = stop
        self.clock = clock or SystemClock()
        self._verbose = verbose

    def say(self, text: str) -> None:
        """Say on standard error what was decided, if that is wanted."""
        if self._verbose:
            complain(text)

    def wait(self, ms: int) -> None:
        """Wait, or less when a signal comes."""
        self.stop.asked.wait(max(1, ms) / 1000)

    def until(self, end_ms: int, call: Callable[[], T], what: str) -> T:
        """Call until there is an answer, and return it.

        Args:
            end_ms: Wall clock after which nothing is tried again.
            call: Makes the call; to repeat it does no harm.
            what: What could not be done then.

        Raises:
            CommandError: There was none in time, or a signal came.
        """
        from leasecron_sync.engine.caller import Backoff  # noqa: PLC0415 - slow, and seldom needed

        backoff = Backoff()
        while True:
            try:
                return call()
            except (StoreUnavailable, OutcomeUnknown) as error:
                delay_ms = backoff.next_ms()
                if self.stop.asked.is_set() or self.clock.now_ms() + delay_ms > end_ms:
                    message = f"{what}: {error}"
                    raise CommandError(message) from error
                self.say(f"asking again: {error}")
            self.wait(delay_ms)
