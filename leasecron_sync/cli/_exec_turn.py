"""The turn of one host at a run: what stays the same while it asks, executes and reports."""

from __future__ import annotations

import os
import secrets
import select
import signal
from collections.abc import Collection, Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import FrameType
from typing import Callable, Final, Optional, TypeVar

from leasecron_sync.backends.base import Backend
from leasecron_sync.cli._exec_child import Child
from leasecron_sync.cli.output import CommandError, complain
from leasecron_sync.clock import Clock, SystemClock
from leasecron_sync.errors import OutcomeUnknown, StoreRejected, StoreUnavailable
from leasecron_sync.model import RunKey
from leasecron_sync.run import moment
from leasecron_sync.schedule import Schedule

T = TypeVar("T")

LOST_LEASE: Final = 75
"""Status when the lease of the command was lost: what it did may be done again."""

TIME_OVER: Final = 124
"""Status when the command was ended by its time limit, as that of ``timeout``."""

CANNOT_RUN: Final = 126
"""Status when no process could be started."""

SIGNALS: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

LAST_TRIES_MS: Final = 2_000
"""How long the store is told of the end of a command after a signal."""

NOBODY: Final = "nobody can be asked who executes it"


def holder_id() -> str:
    """Return who holds a run, as the history shows it: this host, and what tells calls apart."""
    host = os.uname().nodename.encode("ascii", "replace").decode("ascii")[:40]
    return f"{host}-{secrets.token_hex(4)}"


def shown(key: RunKey) -> str:
    """Return a run as it is named in lines for people."""
    return f"{key.job!r} of {moment(key.scheduled_ms).isoformat()}"


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

    def check_wait(self, key: RunKey, wait_ms: int) -> None:
        """Refuse to wait for a run that the store will not call due for long.

        Raises:
            CommandError: It is not due by then.
        """
        if wait_ms > self.window_ms:
            message = (
                f"{shown(key)} is not due for {wait_ms // 1000} s by the clock of the store: this "
                "host's clock is ahead, set it right"
            )
            raise CommandError(message)

    def too_old(self, key: RunKey) -> CommandError:
        """Return the error for a run that nobody may begin any more."""
        message = (
            f"{shown(key)} was due more than the {self.window_ms // 1000} s of --window ago by the "
            "clock of the store, and nobody has executed it: set this host's clock right, or give "
            "a longer --window"
        )
        return CommandError(message)


class Ended(CommandError):
    """A signal has ended the turn before there was anything to execute.

    Args:
        number: The signal.
        what: What it was in the middle of.
    """

    def __init__(self, number: int, what: str) -> None:
        super().__init__(f"ended by {signal.Signals(number).name}: {what}")
        self.status = 128 + number


class Stop:
    """The signals that this process was sent.

    The handler takes no lock: it may come in the middle of anything, also of its own thread's
    waiting. It writes to a pipe, and nobody reads that.

    Attributes:
        child: Who is sent them, too.
        number: The first one; 0 before it.
        passed: Whether a command was sent one.
    """

    def __init__(self) -> None:
        self.child: Optional[Child] = None
        self.number = 0
        self.passed = False
        self._pipe: Optional[tuple[int, int]] = None

    @property
    def asked(self) -> bool:
        """Tell whether one has come."""
        return self.number != 0

    @property
    def status(self) -> int:
        """Status of a process that such a signal has ended."""
        return 128 + self.number

    def wait(self, ms: int) -> None:
        """Wait, or less when a signal comes or has come."""
        if not self.asked and self._pipe is not None:
            poll = select.poll()
            poll.register(self._pipe[0], select.POLLIN)
            poll.poll(max(1, ms))

    def start(self, make: Callable[[Collection[int]], Child]) -> Child:
        """Start a command, and send it what comes meanwhile.

        Args:
            make: Starts it; is given the signals that are to be blocked in it. Until it is itself,
                all of these are.
        """
        before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        try:
            self.child = child = make(before)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        # Another thread may have taken it, so that the mask of this one did not hold it back.
        if self.number and not self.passed:
            self._pass(self.number)
        return child

    def note(self, number: int, _frame: Optional[FrameType]) -> None:
        """Pass a signal on."""
        self.number = self.number or number
        if self._pipe is not None:
            with suppress(BlockingIOError):
                os.write(self._pipe[1], b"!")
        self._pass(number)

    def _pass(self, number: int) -> None:
        if self.child is not None:
            self.passed = True
            self.child.send(number)

    @contextmanager
    def watching(self) -> Generator[None, None, None]:
        """Take the signals while the context is entered; those that were ignored stay so."""
        self._pipe = ear, bell = os.pipe()
        os.set_blocking(bell, False)
        before = {
            number: signal.signal(number, self.note)
            for number in SIGNALS
            if signal.getsignal(number) is not signal.SIG_IGN  # by nohup, for one
        }
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            self._pipe = None
            os.close(ear)
            os.close(bell)


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

    def meet(self, limit_ms: int, backend: Backend) -> None:
        """Ask a store once who it is: one that can never do what is asked is not asked again.

        Args:
            limit_ms: See ``ask``.
            backend: The store, open.

        Raises:
            StoreUnsupported: It is such a one.
            CommandError: See ``ask``.
        """
        with suppress(StoreRejected):  # it does not tell that, and may do all the rest
            self.ask(limit_ms, backend.probe)

    def ask(self, limit_ms: int, call: Callable[[], T]) -> T:
        """Call until there is an answer, and return it; a signal ends that.

        Args:
            limit_ms: How long to go on.
            call: Makes the call; to repeat it does no harm.

        Raises:
            Ended: A signal came, and the call under way brought no answer.
            CommandError: There was none in time.
        """
        return self._until(limit_ms, call, NOBODY)

    def tell(self, limit_ms: int, call: Callable[[], T]) -> T:
        """Tell how a command ended; after a signal that is tried for a short while only.

        Args:
            limit_ms: See ``ask``.
            call: See ``ask``.

        Raises:
            CommandError: There was no answer in time.
        """
        return self._until(
            limit_ms, call, "how the command ended could not be told to the store", telling=True
        )

    def _until(
        self, limit_ms: int, call: Callable[[], T], what: str, *, telling: bool = False
    ) -> T:
        from leasecron_sync.engine.caller import Backoff  # noqa: PLC0415 - slow, and seldom needed

        backoff, stopped = Backoff(), telling and self.stop.asked
        end_ms = self.clock.steady_ms() + (min(limit_ms, LAST_TRIES_MS) if stopped else limit_ms)
        while True:
            try:
                return call()
            except (StoreUnavailable, OutcomeUnknown) as error:
                delay_ms = backoff.next_ms()
                if self.stop.asked and not telling:
                    raise Ended(self.stop.number, f"{what}: {error}") from error
                if self.stop.asked and not stopped:
                    stopped = True
                    end_ms = min(end_ms, self.clock.steady_ms() + LAST_TRIES_MS)
                if self.clock.steady_ms() + delay_ms > end_ms:
                    message = f"{what}: {error}"
                    raise CommandError(message) from error
                self.say(f"asking again: {error}")
            self._pause(delay_ms, stopped=stopped)

    def _pause(self, ms: int, *, stopped: bool) -> None:
        if stopped:
            select.poll().poll(ms)  # a signal that came does not end it
        else:
            self.stop.wait(ms)
