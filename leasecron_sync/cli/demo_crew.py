"""The processes of the demo: started, listened to, killed, and never left behind."""

from __future__ import annotations

import contextlib
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Generator, Sequence
from pathlib import Path
from types import FrameType
from typing import IO, Callable, Final, NamedTuple, NoReturn, Optional

from leasecron_sync.cli.demo_facts import Note, read_note
from leasecron_sync.cli.output import Terminated, cut
from leasecron_sync.clock import SystemClock

# The path of this interpreter is handed on as it is: with -m, a module of the working directory
# could stand in for one of the standard library.
_PROGRAM: Final = (
    "import sys; n = int(sys.argv[1]) + 2; sys.path[:] = sys.argv[2:n]; "
    "from leasecron_sync.cli.demo_instance import main; main(*sys.argv[n:])"
)
_ENDING: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_ORDERLY_MS: Final = 1_500
_MAX_SAID: Final = 200


class Heard(NamedTuple):
    """Something that an instance wrote, or the end of what it writes.

    Attributes:
        instance: Its name.
        note: What it wrote; None at the end.
    """

    instance: str
    note: Optional[Note]


class _Member(NamedTuple):
    process: subprocess.Popen[bytes]
    said: Path


class Crew:
    """Three processes, or however many names there are.

    Args:
        folder: Where they share their SQLite file.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._clock = SystemClock()
        self._members: dict[str, _Member] = {}
        self._threads: list[threading.Thread] = []
        self._heard: queue.Queue[Heard] = queue.Queue(10_000)

    def start(self, names: Sequence[str], path: Path) -> None:
        """Start all of them.

        Args:
            names: Their names.
            path: The SQLite file.
        """
        for name in names:
            with _no_interruption():
                self._members[name] = self._started(name, path)
        # Not before all are there: a signal that a second thread takes is not held up.
        for name, member in self._members.items():
            thread = threading.Thread(
                target=self._listen, args=(name, member.process.stdout), daemon=True
            )
            thread.start()
            self._threads.append(thread)

    @property
    def pids(self) -> dict[str, int]:
        """Process id of each instance."""
        return {name: member.process.pid for name, member in self._members.items()}

    def hear(self, timeout_s: float) -> Optional[Heard]:
        """Return the next thing that an instance wrote; None if nothing came in time."""
        try:
            return self._heard.get(timeout=timeout_s)
        except queue.Empty:
            return None

    def tell(self, name: str, word: bytes) -> None:
        """Write a word to an instance; one that is gone shows by itself."""
        stream = self._members[name].process.stdin
        assert stream is not None
        with contextlib.suppress(OSError, ValueError):
            stream.write(word)
            stream.flush()

    def kill(self, name: str) -> None:
        """Kill an instance with SIGKILL."""
        self._members[name].process.kill()

    def last_words(self, name: str) -> str:
        """Return the last line that an instance wrote to standard error, or how it ended."""
        member = self._members[name]
        lines = member.said.read_text(encoding="utf-8", errors="replace").splitlines()
        with contextlib.suppress(subprocess.TimeoutExpired):
            member.process.wait(_ORDERLY_MS / 1000)
        return cut(lines[-1], _MAX_SAID) if lines else f"status {member.process.returncode}"

    def dismiss(self, word: bytes) -> None:
        """Let all end in order, and wait for that a little.

        Args:
            word: What tells them to.
        """
        for name in self._members:
            self.tell(name, word)
        until_ms = self._clock.steady_ms() + _ORDERLY_MS
        for member in self._members.values():
            left_ms = max(0, until_ms - self._clock.steady_ms())
            with contextlib.suppress(subprocess.TimeoutExpired):
                member.process.wait(left_ms / 1000)

    def bury(self) -> None:
        """Kill whatever is left, and wait until it is gone."""
        for member in self._members.values():
            member.process.kill()
        for member in self._members.values():
            member.process.wait()
            with contextlib.suppress(OSError):
                assert member.process.stdin is not None
                member.process.stdin.close()
        for thread in self._threads:
            thread.join(1.0)
        for member in self._members.values():
            assert member.process.stdout is not None
            member.process.stdout.close()

    def _started(self, name: str, path: Path) -> _Member:
        said = self._folder / f"{name}.log"
        command = [sys.executable, "-c", _PROGRAM, str(len(sys.path)), *sys.path, str(path)]
        with said.open("wb") as errors:
            process = subprocess.Popen(  # noqa: S603 - this interpreter and a constant program
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors
            )
        return _Member(process, said)

    def _listen(self, name: str, stream: IO[bytes]) -> None:
        for line in stream:
            note = read_note(name, line)
            if note is not None:
                self._heard.put(Heard(name, note))
        self._heard.put(Heard(name, None))


@contextlib.contextmanager
def _no_interruption() -> Generator[None, None, None]:
    """Hold signals up, so that no process is started without being known.

    The process inherits that: a Ctrl-C of the terminal ends the demo, and the demo ends it.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def signals_end_it() -> Generator[None, None, None]:
    """Raise where SIGTERM or SIGHUP arrives, as Python does for SIGINT."""

    def end(number: int, _frame: Optional[FrameType]) -> NoReturn:
        raise Terminated(number)

    with _handled((signal.SIGTERM, signal.SIGHUP), end):
        yield


@contextlib.contextmanager
def signals_wait() -> Generator[None, None, None]:
    """Ignore further signals while everything is being tidied up."""

    def ignore(_number: int, _frame: Optional[FrameType]) -> None:
        pass

    with _handled(_ENDING, ignore):
        yield


@contextlib.contextmanager
def _handled(
    numbers: Sequence[signal.Signals], handler: Callable[[int, Optional[FrameType]], object]
) -> Generator[None, None, None]:
    before = {number: signal.getsignal(number) for number in numbers}
    for number, old in before.items():
        if old not in (signal.SIG_IGN, None):  # ignored under nohup; None: not set by Python
            signal.signal(number, handler)
    try:
        yield
    finally:
        for number, old in before.items():
            if old is not None:
                signal.signal(number, old)
