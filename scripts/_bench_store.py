"""What bench.py needs to know of a kind of store: its floor, its transactions, a long history.

What holds for leases and claims alike is in ``AnyStore``; claims have ``ClaimStore`` in a module of
their own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Any, Callable, ClassVar, Optional

from leasecron_sync import connect_lease
from leasecron_sync.backends.base import Backend, BackendSettings, LeaseBackend
from leasecron_sync.backends.urls import hide_credentials

CALLS = ("register", "claim", "settle", "renew", "pending", "states", "prune", "probe")
CALL_TIMEOUT_MS = 5_000


class Floor:
    """The same store, driven raw: the least that a claim or a renewal could cost.

    This one does nothing, for kinds of store that have none here.
    """

    insert_text: ClassVar[str] = "none"
    batch_text: ClassVar[str] = "none"
    update_text: ClassVar[str] = "none"
    set_text: ClassVar[str] = ""
    """What ``insert_set`` does; empty where it does nothing."""

    def insert(self, count: int) -> None:
        """Write new rows unless they are there: that many operations, in one raw batch."""

    def insert_set(self, count: int) -> None:
        """Do the same by one operation, where the kind has one for many rows."""

    def update(self, count: int) -> None:
        """Change rows by their keys in one raw batch; there must be as many."""

    def close(self) -> None:
        """Leave nothing behind."""


class Winners(ABC):
    """Decides by the smallest statement who has a run; for one process, among several."""

    @abstractmethod
    def win(self, keys: Sequence[str]) -> list[str]:
        """Return which of these this process is the first to ask for, in one transaction."""

    @abstractmethod
    def remove(self) -> None:
        """Leave nothing behind in the store."""

    @abstractmethod
    def close(self) -> None:
        """Leave no connection behind."""


class AnyStore(ABC):
    """A store that instances of one or several processes share.

    Args:
        url: What ``connect`` takes.

    Attributes:
        known: Facts of it that it cannot be asked for.
    """

    between_processes: ClassVar[bool] = True
    """Whether instances in different processes can meet in it."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.known: dict[str, str] = {}

    def __str__(self) -> str:
        """Show the URL without credentials."""
        return hide_credentials(self.url)

    @abstractmethod
    def facts(self) -> dict[str, str]:
        """Return what a reader of the figures should know of it."""

    def make_winners(self) -> Optional[Winners]:
        """Return what the smallest program would decide by, if this kind has that here."""
        return None

    def close(self) -> None:  # noqa: B027 - most have made nothing
        """Remove what was made for the figures alone."""


class Store(AnyStore):
    """A store of leases.

    Args:
        url: What ``connect_lease`` takes.
    """

    def facts(self) -> dict[str, str]:
        with closing(self.opened("bench-facts")) as backend:
            return {"store": backend.probe().version}

    def opened(self, namespace: str, instance_id: str = "bench") -> LeaseBackend:
        """Return a new backend, ready for calls."""
        backend = connect_lease(self.url)
        backend.open(BackendSettings(namespace, instance_id, CALL_TIMEOUT_MS))
        return backend

    @contextmanager
    def floor(self) -> Iterator[Floor]:
        """Give its floor, and leave nothing of it behind."""
        floor = self.make_floor()
        try:
            yield floor
        finally:
            floor.close()

    def make_floor(self) -> Floor:
        """Return its floor, if its kind has one here."""
        return Floor()

    def fill(self, namespace: str, job: str, count: int) -> bool:
        """Copy a job's only settled record to as many earlier scheduled times, if it can."""
        del namespace, job, count
        return False

    def empty(self, namespace: str) -> None:
        """Remove a long history, where it takes memory and little time to do so."""

    def empty_twin(self) -> Store:
        """Return a store of the same kind in which the history of this one does not weigh.

        Another namespace of the same store, where that is enough.
        """
        return type(self)(self.url)

    def count_transactions(self, backend: LeaseBackend) -> Callable[[], int]:
        """Count from now on how often a backend makes its store take a step."""
        calls = count_calls(backend)
        return lambda: sum(calls.values())


def count_calls(backend: Backend) -> Counter[str]:
    """Count the calls of a backend from now on, by method."""
    calls: Counter[str] = Counter()

    def counted(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:  # noqa: ANN401 - whatever the method takes and returns
            calls[name] += 1  # workers settle at the same time; one lost count does not matter
            return method(*arguments)

        return call

    for name in CALLS:
        if not hasattr(backend, name):  # a claim backend has some of them only
            continue
        setattr(backend, name, counted(name, getattr(backend, name)))
    return calls
