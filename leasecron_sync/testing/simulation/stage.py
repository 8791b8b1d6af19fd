"""What everybody in a simulated history shares."""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from typing import Callable, Optional

from leasecron_sync.run import Run
from leasecron_sync.testing.simulation.clocks import HostClock, StoreClock, Time
from leasecron_sync.testing.simulation.machine import Host, Strand
from leasecron_sync.testing.simulation.plan import HostPlan, Plan
from leasecron_sync.testing.simulation.stores import Store
from leasecron_sync.testing.simulation.strands import Crew, Stuck
from leasecron_sync.testing.simulation.watcher import Watcher


class Stage:
    """Time, the store, the hosts, and who is at work.

    Args:
        plan: What goes wrong.
        make_store: Makes the store, from its clock.
        timeline: Takes a line for everything of interest, where somebody reads it.

    Attributes:
        plan: See above.
        time: The time of the history.
        store_clock: The clock that the store is given.
        store: The store.
        watcher: Who looks on.
        counts: How often what happened.
        timeline: See above.
        hosts: The hosts.
        current: The thread that is at work.
        pid: Number of the process that it is in: another one in a forked child.
        stormy: Whether things go wrong.
        crew: Where threads come from.
        handler: What the handlers of the application do.
        arriving: What happens later on: when, in which order, and what.
    """

    def __init__(
        self,
        plan: Plan,
        make_store: Callable[[Callable[[], int]], Store],
        timeline: Optional[list[str]] = None,
    ) -> None:
        self.plan = plan
        self.time = Time()
        self.store_clock = StoreClock(self.time, plan.begin_ms)
        self.store = make_store(self.store_clock.now_ms)
        self.watcher = Watcher(plan, self.store.now_ms)
        self.counts: Counter[str] = Counter()
        self.timeline = timeline
        if timeline is not None:
            self.watcher.tell = self.tell
            self.watcher.entries = []
        self.current: Optional[Strand] = None
        self.pid = 1
        self.stormy = True
        self.crew = Crew()
        self.handler: Callable[[Run], object] = lambda _run: None
        self.arriving: list[tuple[int, int, Callable[[], object]]] = []
        self._numbers = itertools.count()
        self.hosts = [self.add_host(host) for host in plan.hosts]

    def add_host(self, plan: HostPlan) -> Host:
        """Return a host of this history."""
        clock = HostClock(self.time, plan, self.plan.begin_ms, self.sleep)
        faults = {item.number: item for item in self.plan.faults if item.host == plan.label}
        return Host(plan, clock, faults)

    def tell(self, text: str) -> None:
        """Add a line to the timeline."""
        if self.timeline is not None:
            self.timeline.append(f"{self.time.now_ms / 1000:>9.3f}  {text}")

    def later(self, ms: int, work: Callable[[], object]) -> None:
        """Let something happen later on, such as a message that reaches the store."""
        self.arriving.append((self.time.now_ms + ms, next(self._numbers), work))

    # -- called inside a thread of an instance -------------------------------------------------

    def halt(self, ms: int, event: Optional[threading.Event] = None) -> None:
        """Let a time pass in the thread that is at work, while others work.

        Args:
            ms: How long.
            event: Ends it early.
        """
        strand = self.current
        assert strand is not None
        assert strand.body is not None
        strand.wake_ms = self.time.now_ms + ms
        strand.event = event
        strand.body.halt()
        strand.event = None

    def sleep(self, event: threading.Event, ms: int) -> None:
        """Wait as a thread does that waits for an event."""
        self.halt(max(1, ms), event)

    # -- called by the driver ------------------------------------------------------------------

    def cut(self, strand: Strand) -> None:
        """End a thread where it is, since its process ends."""
        if strand.body is not None:
            before = self.current, self.pid
            self.current, self.pid = strand, strand.pid
            try:
                strand.body.cut()
            except Stuck:
                self.tell(f"a thread of {strand.process.name} cannot be ended")
            finally:
                self.current, self.pid = before
