"""A RabbitMQ server as its operator sees it: what it takes, and how it starts again."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable, NamedTuple

from scripts._bench_crew import BenchError

if TYPE_CHECKING:
    from tests.services.rabbitmq import RabbitMQServer


class Usage(NamedTuple):
    """What a broker takes.

    Attributes:
        queues: How many queues it has.
        memory_kb: Resident memory of its process.
        told_kb: What it says itself that its queues take.
        files: How many files its process has open.
        most_files: How many it may have open.
        disk_kb: What its folder takes.
    """

    queues: int
    memory_kb: float
    told_kb: float
    files: int
    most_files: str
    disk_kb: float


class Restart(NamedTuple):
    """How long a restart took, until the broker had said goodbye, and until it answered."""

    stop_s: float
    start_s: float


class NotRestarted(BenchError):
    """A broker could be stopped, and not be started again."""


class Broker:
    """A server that was made for these figures.

    Args:
        server: The server, which runs.
    """

    def __init__(self, server: RabbitMQServer) -> None:
        self._server = server

    def empty(self) -> None:
        """Begin with a new one that has no queue.

        Raises:
            NotRestarted: It did not start.
        """
        self._server.close()
        self._do(self._server.start)

    def usage(self) -> Usage:
        """Ask it, and the system.

        Raises:
            BenchError: The system does not tell.
        """
        process = Path("/proc", _text(self._server.call("os", "getpid")))
        try:
            memory_kb = int(_told(process / "status", "VmRSS:").split()[0])
            files = len(list((process / "fd").iterdir()))
            most_files = _told(process / "limits", "Max open files").split()[0]
        except OSError as error:
            message = f"{process} cannot be read, which tells memory and files: {error.strerror}"
            raise BenchError(message) from error
        return Usage(
            queues=self._server.call("rabbit_amqqueue", "count"),
            memory_kb=memory_kb,
            told_kb=_queues_kb(self._server.call("rabbit_vm", "memory")),
            files=files,
            most_files=most_files,
            disk_kb=_size_kb(self._server.home.folder / "data"),
        )

    def restart(self) -> Restart:
        """Stop it as its operator does, and start it again.

        Raises:
            NotRestarted: It did not end or start again, or not in time.
        """
        began_s = time.perf_counter()
        self._do(self._server.stop)
        stopped_s = time.perf_counter()
        self._do(self._server.start)
        return Restart(stopped_s - began_s, time.perf_counter() - stopped_s)

    def _do(self, change: Callable[[], None]) -> None:
        from tests.services.process import ServiceError  # noqa: PLC0415 - of the tests, if wanted

        try:
            change()
        except ServiceError as error:
            raise NotRestarted(str(error).partition(": ")[0]) from error


def _text(value: Any) -> str:  # noqa: ANN401 - one of Erlang's strings, which are lists of numbers
    return value if isinstance(value, str) else bytes(value).decode()


def _told(path: Path, name: str) -> str:
    """Return what follows a name in one of the lines that the system tells of a process."""
    for line in path.read_text(encoding="ascii", errors="replace").splitlines():
        if line.startswith(name):
            return line[len(name) :]
    message = f"{path} does not tell {name}"
    raise BenchError(message)


def _queues_kb(told: Any) -> float:  # noqa: ANN401 - pairs of a name and a number of bytes
    return float({str(name): value for name, value in told}["queue_procs"]) / 1024


def _size_kb(folder: Path) -> float:
    """Return what files take on the disk; one that goes away meanwhile takes nothing."""
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.lstat().st_blocks * 512
        except OSError:
            continue
    return total / 1024
