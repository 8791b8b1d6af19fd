"""Runs one case of a conformance suite on a backend, outside of pytest's own collection."""

from __future__ import annotations

import uuid
from typing import Callable

from leasecron_sync.backends.base import ClaimBackend, LeaseBackend
from leasecron_sync.backends.memory import MemoryLease
from leasecron_sync.testing.clock import ManualClock
from leasecron_sync.testing.conformance import ClaimConformance, LeaseConformance
from leasecron_sync.testing.memory import MemoryClaim


class LeaseJudge(LeaseConformance):
    """The lease suite over a class derived from ``MemoryLease``."""

    def __init__(self, backend_class: type[MemoryLease]) -> None:
        clock = self.clock = ManualClock()

        class OnManualClock(backend_class):  # type: ignore[misc,valid-type]
            _now_ms = staticmethod(clock.now_ms)

        name = uuid.uuid4().hex
        self.connect: Callable[[], LeaseBackend] = lambda: OnManualClock(name)

    def advance(self, ms: int) -> None:
        self.clock.advance(ms)

    def set_back(self, ms: int) -> None:
        self.clock.step(-ms)

    def run_case(self, case: str, *values: object) -> None:
        """Run a case; it raises if the backend fails it."""
        with self.opened(self.connect) as store:
            getattr(self, f"test_{case}")(store, *values)


class ClaimJudge(ClaimConformance):
    """The claim suite over a class derived from ``MemoryClaim``."""

    def __init__(self, backend_class: type[MemoryClaim]) -> None:
        clock = self.clock = ManualClock()

        class OnManualClock(backend_class):  # type: ignore[misc,valid-type]
            _now_ms = staticmethod(clock.now_ms)

        name = uuid.uuid4().hex
        self.connect: Callable[[], ClaimBackend] = lambda: OnManualClock(name)

    def advance(self, ms: int) -> None:
        self.clock.advance(ms)

    def run_case(self, case: str, *values: object) -> None:
        """Run a case; it raises if the backend fails it."""
        with self.opened(self.connect) as store:
            getattr(self, f"test_{case}")(store, *values)
