"""What all servers of the tests have in common."""

from __future__ import annotations

import signal
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar, Optional, Union
from urllib.parse import urlsplit

from tests.services.ports import HOST, free_port
from tests.services.process import (
    KILL_S,
    START_S,
    STOP_S,
    Home,
    KeeperClient,
    Launcher,
    Process,
    Program,
    ServiceError,
    eventually,
    new_home,
    remove_home,
)

Setting = Union[str, int, bool]

LOG_LINES = 30
"""How much of a server's log a failure shows."""

PORT_TRIES = 3
"""On how many ports a server is tried that finds its first one taken."""


class Server:
    """A server that tests may use, and nothing more: it belongs to somebody else, or is shared.

    Attributes:
        name: What it is, for test ids and messages, for example ``postgresql-15``.
        url: How a client reaches it.
        version: Its version, as far as it is known.
        host: Where it listens.
        port: Where it listens.
    """

    def __init__(self, name: str, url: str, version: tuple[int, ...] = ()) -> None:
        parts = urlsplit(url)
        self.name = name
        self.version = version
        self.host = parts.hostname or HOST
        self.port = parts.port or 0
        self._url = url

    @property
    def url(self) -> str:
        return self._url

    def log_tail(self, lines: int = LOG_LINES) -> str:
        """Return the end of its log, as far as it can be had."""
        del lines
        return ""

    def close(self) -> None:
        """Leave it alone."""

    def __str__(self) -> str:
        return self.name


class PrivateServer(Server, ABC):
    """A server of this test session alone, which may be stopped, killed and paused.

    It keeps its port and its data over every restart, and loses both with ``close()``.
    """

    title: ClassVar[str]
    ready_words: str  # in its log when it takes clients
    taken_words: ClassVar[str] = "ddress already in use"  # in its log when its port is taken
    unprivileged: ClassVar[bool] = False  # it refuses to run as root
    stop_signals: Sequence[int] = (signal.SIGTERM,)  # for its operator, the last one the harshest
    ending: ClassVar[int] = signal.SIGKILL  # for one that nobody needs any more

    def __init__(self, keeper: KeeperClient, launcher: Launcher, program: Program) -> None:
        super().__init__(f"{program.name}-{program.version[0]}", "", program.version)
        self.host, self.port = HOST, free_port()
        self.program = program
        self.settings: dict[str, Setting] = {}
        self.environment: dict[str, str] = {}  # what a test wants its process to find there
        self._keeper = keeper
        self._launcher = launcher
        self._home: Optional[Home] = None
        self._process: Optional[Process] = None

    # -- what each kind of server knows ----------------------------------------------------------

    @property
    @abstractmethod
    def url(self) -> str: ...

    @abstractmethod
    def _prepare(self) -> None:
        """Make its data, before the first start."""

    @abstractmethod
    def _write_settings(self) -> None:
        """Write its configuration from its port and settings."""

    @abstractmethod
    def _command(self) -> Sequence[str]:
        """Return the command that starts it in the foreground."""

    def _environment(self) -> Mapping[str, str]:
        """Return what its process must find in its environment."""
        return {}

    @abstractmethod
    def answers(self) -> bool:
        """Tell whether it is ready for clients."""

    # -- what can be done to it ------------------------------------------------------------------

    @property
    def home(self) -> Home:
        """Its folder."""
        if self._home is None:
            self._home = new_home(self._keeper, self.title.lower(), unprivileged=self.unprivileged)
        return self._home

    @property
    def running(self) -> bool:
        """Whether it has a process; one that is paused has."""
        return self._process is not None and self._process.running()

    def start(self) -> None:
        """Start it, and return when it answers.

        Raises:
            ServiceError: It runs already, ended, or does not answer in time.
        """
        if self.running:
            message = f"{self} is running already"
            raise ServiceError(message)
        first = self._home is None
        for _ in range(PORT_TRIES):
            if first:
                self._prepare()
            if self._start_once():
                return
            if not first:
                break
            # Somebody took the port since it was found free.
            self.close()
            self.port = free_port()
        message = f"{self} found its port taken: {self.log_tail()}"
        raise ServiceError(message)

    def _start_once(self) -> bool:
        """Start it, and return whether it answers or its port was taken."""
        self._write_settings()
        home, size = self.home, self.home.log_size()
        process = self._launcher.launch(
            self._command(),
            home,
            ending=self.ending,
            environment={**self._environment(), **self.environment},
        )
        self._process = process

        def ready() -> bool:
            # It says so itself first: on a port that was taken somebody else may answer.
            return self.ready_words in home.log_since(size) and self.answers()

        if eventually(lambda: not process.running() or ready(), START_S):
            if process.running():
                return True
            status = process.ended()
            if self.taken_words in home.log_since(size):
                return False
            message = f"{self} ended with status {status} while it started: {self.log_tail()}"
        else:
            message = f"{self} did not answer within {START_S:.0f} s: {self.log_tail()}"
            self.kill()
        raise ServiceError(message)

    def stop(self) -> None:
        """Stop it as its operator would; one that does not end in time is killed.

        Raises:
            ServiceError: It had to be killed.
        """
        self._end(self.stop_signals)

    def _end(self, signals: Sequence[int]) -> None:
        process = self._process
        if process is None or not process.running():
            return
        process.resume()
        for number in signals:
            process.signal(number)
            if eventually(lambda: not process.running(), STOP_S / len(signals)):
                process.ended()
                return
        self.kill()
        message = f"{self} did not end within {STOP_S:.0f} s and was killed: {self.log_tail()}"
        raise ServiceError(message)

    def kill(self) -> None:
        """Kill all its processes with SIGKILL, as if its machine had lost its power."""
        process = self._process
        if process is None or not process.running():
            return
        process.kill()
        if not eventually(lambda: not process.running(), KILL_S):
            message = f"{self} did not end although it was killed"
            raise ServiceError(message)
        process.ended()

    def pause(self) -> None:
        """Have all its processes stand still (SIGSTOP): it is silent, and loses no connection."""
        self._at_work().pause()

    def resume(self) -> None:
        """Let it go on after ``pause()``."""
        self._at_work().resume()

    def restart(self) -> None:
        """Stop it and start it again, on the same port and with the same data."""
        self.stop()
        self.start()

    def _at_work(self) -> Process:
        if self._process is None or not self._process.running():
            message = f"{self} is not running: {self.log_tail()}"
            raise ServiceError(message)
        return self._process

    def log_tail(self, lines: int = LOG_LINES) -> str:
        """Return the end of its log."""
        return "" if self._home is None else self._home.log_tail(lines)

    def close(self) -> None:
        """End it and remove its data. It can be started again, empty."""
        try:
            if self.ending == signal.SIGKILL:
                self.kill()
            else:
                self._end((self.ending,))
        finally:
            self._process = None
            if self._home is not None:
                remove_home(self._keeper, self._home)
                self._home = None

    def __str__(self) -> str:
        return f"{self.title} {'.'.join(map(str, self.version))} on port {self.port}"
