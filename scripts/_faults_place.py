"""What every store of a fault campaign is: a place that can be disturbed, with clocks to be set."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Optional

from leasecron_sync.backends.base import LeaseBackend
from scripts._faults_plan import CLOCKS, Injection
from tests.services.debian import CannotGet
from tests.services.faketime import FakeClock, library


class Place(ABC):
    """Where the instances keep their leases or claims.

    Args:
        folder: For its files; others may look into it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.missing: dict[str, str] = {}
        """What this machine has not, of ``Kind.needs``, and why."""
        self.limit_files: Optional[Callable[[Optional[int]], None]] = None
        """Lets no file of the instances grow beyond a size, for a place that wants that."""
        self.wants_limits = False
        self.clocks: dict[int, FakeClock] = {}
        self.store_clock: Optional[FakeClock] = None
        self._library: Optional[Path] = None

    def want_clocks(self) -> None:
        """Have clocks that can be set, before anything starts."""
        try:
            self._library = library()
        except CannotGet as error:
            self.missing[CLOCKS] = str(error)

    def _new_clock(self, name: str) -> Optional[FakeClock]:
        if self._library is None:
            return None
        return FakeClock(self._library, self.folder / f"clock-{name}")

    @abstractmethod
    def start(self) -> None:
        """Start it.

        Raises:
            CampaignError: It cannot be had.
        """

    @abstractmethod
    def url_of(self, slot: int) -> str:
        """Return how an instance reaches it."""

    @abstractmethod
    def connect(self) -> LeaseBackend:
        """Return a backend that nothing stands in front of, to read the records by."""

    @abstractmethod
    def environment_of(self, slot: int) -> Mapping[str, str]:
        """Return what an instance finds in its environment."""

    @abstractmethod
    def begin(self, one: Injection) -> None:
        """Begin a fault of the store or the network."""

    @abstractmethod
    def end(self, one: Injection) -> None:
        """End it."""

    @abstractmethod
    def heal(self) -> None:
        """End everything that may still be wrong."""

    @abstractmethod
    def close(self) -> None:
        """Leave nothing behind."""

    def set_store_clock(self, one: Injection) -> None:
        """Move the store's clock for good."""
        if self.store_clock is not None:
            self.store_clock.set(self.store_clock.offset_ms + one.amount)

    def set_clock(self, one: Injection, *, right: bool) -> None:
        """Set the clock of one instance, or set it right."""
        assert one.slot is not None
        if one.slot in self.clocks:
            self.clocks[one.slot].set(0 if right else one.amount)
