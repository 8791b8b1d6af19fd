"""One instance of bench.py as a process: told what to do by one JSON argument and by lines.

It reads the schedule of its jobs, then ``count`` as often as it is asked, and ends with ``stop`` or
the end of the lines. It writes one JSON object a line: ``up`` when it can be given a schedule,
``ready`` when its jobs are registered, ``start`` for each handler that holds its run, ``count`` and
``end`` as answers.
"""

from __future__ import annotations

import json
import os
import random
import resource
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Optional, Union

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from leasecron_sync import LeaseRun, Run, Scheduler, at, connect, connect_lease, every
from leasecron_sync.backends.base import ClaimBackend
from leasecron_sync.model import JobStamp, JobStanding, StoreInfo
from leasecron_sync.options import MIN_SLICE
from leasecron_sync.schedule import ScheduleLike
from scripts._bench_store import count_calls
from scripts._bench_stores import any_store_of, store_of

READY_S = 120.0
STOP_S = 10.0

_telling = threading.Lock()


@dataclass(frozen=True)
class Work:
    """What an instance is to do.

    Attributes:
        url: Its store.
        namespace: Keeps one measurement apart from the others.
        jobs: How many jobs it has.
        hold: Whether a handler keeps its run until it is told to end; else it ends at once.
        lease_ms: Length of a lease.
        raw: Whether the smallest program that does the same is to be measured instead.
    """

    url: str
    namespace: str
    jobs: int
    hold: bool = False
    lease_ms: int = 15_000
    raw: bool = False

    def argument(self) -> str:
        """Return it as the argument of the process."""
        return json.dumps(asdict(self))


def schedule_of(text: str) -> ScheduleLike:
    """Read a cron expression, ``every N`` seconds, or ``at MS``."""
    word, _space, number = text.partition(" ")
    if word == "every":
        return every(seconds=int(number))
    if word == "at":
        return at(datetime.fromtimestamp(int(number) / 1000, timezone.utc))
    return text


class Instance(ABC):
    """A scheduler whose handlers note when they started."""

    def __init__(self, work: Work) -> None:
        self.starts: list[tuple[str, int, int]] = []
        self._work = work
        self._ready = threading.Event()
        self._processor_s = 0.0

    @property
    @abstractmethod
    def _scheduler(self) -> Scheduler[Any]: ...

    @abstractmethod
    def _calls(self) -> dict[str, int]:
        """Return how often its store was called, by method."""

    @abstractmethod
    def _transactions(self) -> int:
        """Return how many steps its store took."""

    @abstractmethod
    def _add(self, name: str, schedule: ScheduleLike) -> None:
        """Add a job."""

    def start(self, schedule: ScheduleLike) -> None:
        """Add the jobs, start, and wait until the store has met them; tell what it took."""
        work, before_kb = self._work, memory_kb()
        began_s = time.perf_counter()
        for number in range(work.jobs):
            self._add(f"job {number:05d}", schedule)
        added_s = time.perf_counter()
        self._scheduler.start()
        started_s = time.perf_counter()
        if not self._ready.wait(READY_S):
            message = f"the store was not ready within {READY_S:.0f} s"
            raise TimeoutError(message)
        tell(
            "ready",
            add_ms=(added_s - began_s) * 1000,
            start_ms=(started_s - added_s) * 1000,
            registered_ms=(time.perf_counter() - added_s) * 1000,
            memory_kb=memory_kb() - before_kb,
        )
        self._processor_s = time.process_time()

    def stop(self) -> None:
        """Stop, and tell everything."""
        processor_s = time.process_time() - self._processor_s
        self._scheduler.stop(timeout=STOP_S)
        tell(
            "end",
            starts=self.starts,
            calls=self._calls(),
            transactions=self._transactions(),
            processor_s=processor_s,
        )

    def _note(self, run: Run) -> None:
        at_ns = time.time_ns()
        self.starts.append((run.job, round(run.scheduled_time.timestamp() * 1000), at_ns))


class LeaseInstance(Instance):
    """One with leases; it is ready when all of its jobs are registered."""

    def __init__(self, work: Work) -> None:
        super().__init__(work)
        backend = connect_lease(work.url)
        self._made = store_of(work.url).count_transactions(backend)
        self._counted = count_calls(backend)
        self._names: set[str] = set()
        self._register = backend.register
        backend.register = self._noted_register  # type: ignore[method-assign]
        self._leases = Scheduler(backend, namespace=work.namespace, lease_ms=work.lease_ms)

    @property
    def _scheduler(self) -> Scheduler[Any]:
        return self._leases

    def _calls(self) -> dict[str, int]:
        return dict(self._counted)

    def _transactions(self) -> int:
        return self._made()

    def _add(self, name: str, schedule: ScheduleLike) -> None:
        handler = self._hold if self._work.hold else self._note
        self._leases.add_job(handler, schedule, name=name, max_attempts=1_000, retry_delay_ms=0)

    def _noted_register(self, jobs: Sequence[JobStamp]) -> Sequence[JobStanding]:
        answers = self._register(jobs)
        self._names.update(stamp.job for stamp in jobs)
        if len(self._names) == self._work.jobs:
            self._ready.set()
        return answers

    def _hold(self, run: LeaseRun) -> None:
        tell("start", at_ns=time.time_ns(), attempt=run.attempt)
        while True:
            run.wait(60)


class ClaimInstance(Instance):
    """One with claims; it is ready when it has met its store, since nothing is registered."""

    def __init__(self, work: Work, backend: ClaimBackend) -> None:
        super().__init__(work)
        self._counted = count_calls(backend)
        self._probe = backend.probe
        backend.probe = self._noted_probe  # type: ignore[method-assign]
        self._claims = Scheduler(backend, namespace=work.namespace)

    @property
    def _scheduler(self) -> Scheduler[Any]:
        return self._claims

    def _calls(self) -> dict[str, int]:
        return dict(self._counted)

    def _transactions(self) -> int:
        return self._counted["claim"]

    def _add(self, name: str, schedule: ScheduleLike) -> None:
        self._claims.add_job(self._note, schedule, name=name)

    def _noted_probe(self) -> StoreInfo:
        found = self._probe()
        self._ready.set()
        return found


class RawInstance:
    """The smallest program that does the same, with jobs of each second.

    At each second it asks the store for a few runs after the other, and starts a thread for each
    that it is the first to ask for. Nobody takes anything over, nothing is settled.
    """

    def __init__(self, work: Work) -> None:
        self.starts: list[tuple[str, int, int]] = []
        self._work = work
        winners = any_store_of(work.url).make_winners()
        assert winners is not None
        self._winners = winners
        self._jobs = [f"job {number:05d}" for number in range(work.jobs)]
        first = random.randrange(work.jobs)
        self._order = self._jobs[first:] + self._jobs[:first]
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def start(self, _schedule: ScheduleLike) -> None:
        """Go to work, with every second from here on."""
        self._winners.win([])
        self._thread.start()
        tell("ready")

    def stop(self) -> None:
        """Stop, and tell everything."""
        self._ended.set()
        self._thread.join()
        self._winners.close()
        tell("end", starts=self.starts, calls={}, transactions=0, processor_s=0.0)

    def _run(self) -> None:
        while True:
            second = int(time.time()) + 1
            if self._ended.wait(second - time.time()):
                return
            for first in range(0, len(self._order), MIN_SLICE):
                keys = [f"{second} {job}" for job in self._order[first : first + MIN_SLICE]]
                for key in self._winners.win(keys):
                    threading.Thread(target=self._note, args=(key, second * 1000)).start()

    def _note(self, key: str, scheduled_ms: int) -> None:
        at_ns = time.time_ns()
        self.starts.append((key.partition(" ")[2], scheduled_ms, at_ns))


def memory_kb() -> int:
    """Return the resident memory of this process; its peak where nothing else is known."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return pages * os.sysconf("SC_PAGE_SIZE") // 1024


def tell(what: str, **fields: Any) -> None:  # noqa: ANN401 - whatever JSON can hold
    line = (json.dumps({"what": what, **fields}) + "\n").encode()
    with _telling:  # handlers tell from their threads
        sys.stdout.buffer.write(line)
        sys.stdout.buffer.flush()


def instance_of(work: Work) -> Union[Instance, RawInstance]:
    if work.raw:
        return RawInstance(work)
    backend = connect(work.url)
    return (
        ClaimInstance(work, backend) if isinstance(backend, ClaimBackend) else LeaseInstance(work)
    )


def main(arguments: Optional[Sequence[str]] = None) -> int:
    (argument,) = sys.argv[1:] if arguments is None else arguments
    work = Work(**json.loads(argument))
    instance = instance_of(work)
    tell("up")
    schedule = sys.stdin.readline().strip()
    if not schedule:  # the parent has ended
        return 0
    instance.start(schedule_of(schedule))
    for line in sys.stdin:
        if line.strip() != "count":
            break
        tell("count", starts=len(instance.starts))
    instance.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
