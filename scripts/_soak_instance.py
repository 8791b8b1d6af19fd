"""The process of a soak: two instances, and what they hold after so many runs.

It is called with the JSON of a ``Work`` and writes a line of JSON for each sample. When the last
one was taken it stops its instances, and writes what is left.
"""

from __future__ import annotations

import functools
import gc
import itertools
import json
import logging
import os
import sys
import threading
from collections import Counter, deque
from collections.abc import Mapping, Sized
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, cast
from weakref import WeakSet

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # this checkout

from leasecron_sync import LeaseRun, Run, Scheduler, every
from leasecron_sync.backends.base import Backend, BackendSettings, ClaimBackend, LeaseBackend
from leasecron_sync.backends.urls import connect
from leasecron_sync.events import Event
from scripts._faults_instance import die_with_parent
from scripts._soak_judge import FILES, MEMORY, OBJECTS, THREADS, Sample, least, points

INSTANCES: Final = 2
LOOKS: Final = 8
"""So often a sample looks: what is under way at one time is over at another."""
LOOK_S: Final = 0.07
STALLED_S: Final = 60.0
"""Without a run for so long the soak is given up."""
STOP_S: Final = 20.0
CLAIM_WINDOW_MS: Final = 2_000
"""Short: what is remembered of a run for as long as it may be claimed is flat early."""
LEASE_MS: Final = 10_000
SELDOM: Final = 25

PLANTED: Final = {
    THREADS: "a thread that does not end, for each 25th attempt",
    FILES: "a file that is not closed, for each 25th attempt",
    "store connections": "a connection that is not closed, for each 25th attempt",
    MEMORY: "100 KB that are kept, for each attempt",
    "lists": "an entry that stays in an internal list, for each attempt",
}
"""Leaks that can be planted, so that the soak must find them."""


@dataclass(frozen=True)
class Work:
    """What the process is told.

    Attributes:
        url: Its store.
        runs: How many runs there are to be.
        jobs: How many jobs are due each second.
        planted: Names of planted leaks.
    """

    url: str
    runs: int
    jobs: int
    planted: tuple[str, ...] = ()

    def argument(self) -> str:
        """Return it as a process is told it."""
        return json.dumps(asdict(self))


class Lines(logging.Handler):
    """Formats what the library logs, as any application's log does, and keeps nothing."""

    def emit(self, record: logging.LogRecord) -> None:
        """Format a record."""
        self.format(record)


class Soak:
    """The instances, and what became of their runs."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self._lock = threading.Lock()
        self._kept: list[object] = []
        self._attempts = itertools.count(1)
        self.runs = self.failed = 0
        self.ended = threading.Condition(self._lock)
        self.schedulers = [self._scheduler() for _ in range(INSTANCES)]

    def _scheduler(self) -> Scheduler[Any]:
        backend = connect(self._work.url)
        scheduler: Scheduler[Any]
        if isinstance(backend, LeaseBackend):
            scheduler = self._on_lease(backend)
        else:
            assert isinstance(backend, ClaimBackend)
            scheduler = self._on_claim(backend)
        scheduler.on("run_finished", self._count)
        scheduler.on("run_failed", self._count)
        scheduler.on("run_retried", self._count)
        return scheduler

    def _on_lease(self, backend: LeaseBackend) -> Scheduler[LeaseBackend]:
        scheduler = Scheduler(backend, lease_ms=LEASE_MS, max_concurrent_runs=self._work.jobs)
        for number in range(self._work.jobs):

            def handler(run: LeaseRun, number: int = number) -> None:
                self._work_on(run, fails=run.attempt == 1 and _is_unlucky(run, number))

            name = f"job-{number}"
            scheduler.add_job(handler, every(seconds=1), name=name, retry_delay_ms=100)
        return scheduler

    def _on_claim(self, backend: ClaimBackend) -> Scheduler[ClaimBackend]:
        scheduler = Scheduler(
            backend, max_concurrent_runs=self._work.jobs, claim_window_ms=CLAIM_WINDOW_MS
        )
        for number in range(self._work.jobs):

            def handler(run: Run, number: int = number) -> None:
                self._work_on(run, fails=_is_unlucky(run, number))

            scheduler.add_job(handler, every(seconds=1), name=f"job-{number}")
        return scheduler

    def _work_on(self, run: Run, *, fails: bool) -> None:
        self._leak()
        if fails:
            message = f"planned: {run.job} {run.scheduled_time}"
            raise RuntimeError(message)

    def _count(self, event: Event) -> None:
        with self._lock:
            self.runs += event.name != "run_retried"
            self.failed += event.name != "run_finished"
            self.ended.notify_all()

    def wait_for(self, runs: int) -> None:
        """Wait until so many runs have come to their end."""
        with self._lock:
            while self.runs < runs:
                before = self.runs
                if not self.ended.wait(STALLED_S) and self.runs == before:
                    message = f"no run has ended for {STALLED_S:.0f} s, after {before:,}"
                    raise SystemExit(message)

    # -- planted leaks ---------------------------------------------------------------------------

    def _leak(self) -> None:
        seldom = next(self._attempts) % SELDOM == 0
        for name in self._work.planted:
            if name == MEMORY:
                self._kept.append(bytearray(os.urandom(1_000) * 100))
            elif name == "lists":
                cast("Any", self.schedulers[0])._jobs.setdefault("left", []).append("left")  # noqa: SLF001
            elif seldom and name == THREADS:
                threading.Thread(target=threading.Event().wait, daemon=True).start()
            elif seldom and name == FILES:
                self._kept.append(os.open(os.devnull, os.O_RDONLY))
            elif seldom:
                backend: Backend = connect(self._work.url)
                backend.open(BackendSettings("soak", "leak", 5_000))
                backend.probe()
                self._kept.append(backend)


def _is_unlucky(run: Run, number: int) -> bool:
    return (round(run.scheduled_time.timestamp()) + number) % 2 == 0


# -- what they hold --------------------------------------------------------------------------------

CONTAINERS: Final = (list, dict, set, deque, WeakSet)
CACHED: Final = type(functools.lru_cache(len))
PACKAGE: Final = "leasecron_sync"


def sampled(soak: Soak) -> Sample:
    """Return what the process holds, the least of several looks."""
    looks: list[Sample] = []
    pause = threading.Event()
    for _ in range(LOOKS):
        pause.wait(LOOK_S)
        gc.collect()
        looks.append(_look(soak))
    return least(looks)


def _look(soak: Soak) -> Sample:
    objects = gc.get_objects()
    figures = {
        THREADS: threading.active_count(),
        FILES: sum(1 for _ in Path("/proc/self/fd").iterdir()),
        MEMORY: resident_kb(),
        OBJECTS: len(objects),
    }
    return Sample(soak.runs, soak.failed, figures, lengths_of(objects))


def resident_kb() -> int:
    """Return how much memory this process has."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") // 1024


def lengths_of(objects: list[Any]) -> dict[str, int]:
    """Return how many objects of each class of the library there are, and what they keep.

    Args:
        objects: All that there are.
    """
    found: Counter[str] = Counter()
    for item in objects:
        kind = cast("type[object]", type(item))
        module = getattr(kind, "__module__", None)
        if isinstance(module, str) and module.split(".")[0] == PACKAGE:
            name = f"{module[len(PACKAGE) + 1 :]}.{kind.__qualname__}"
            found[f"{name} objects"] += 1
            for attribute, value in list(_attributes(item).items()):
                _add(found, f"{name}.{attribute}", value)
    for module_name, module in list(sys.modules.items()):
        if module_name.split(".")[0] == PACKAGE:
            for variable, value in list(vars(module).items()):
                # Constants do not grow, and what was imported belongs to somebody else.
                if not (variable.isupper() or variable.startswith("__")):
                    _add(found, f"{module_name}.{variable}", value)
    return dict(found)


def _attributes(item: object) -> Mapping[str, Any]:
    kept = getattr(item, "__dict__", None)
    return cast("Mapping[str, Any]", kept) if isinstance(kept, dict) else {}


def _add(found: Counter[str], name: str, value: Any) -> None:  # noqa: ANN401 - anything
    if isinstance(value, CONTAINERS):
        found[name] += len(cast("Sized", value))
        if isinstance(value, dict):  # of lists, as often as not
            inner = list(cast("dict[object, object]", value).values())
            found[name] += sum(len(cast("Sized", x)) for x in inner if isinstance(x, CONTAINERS))
    elif isinstance(value, CACHED) and value.__module__.split(".")[0] == PACKAGE:
        found[name] += value.cache_info().currsize


def say(kind: str, content: Mapping[str, Any]) -> None:
    """Write a line for the one who started this process."""
    sys.stdout.write(json.dumps({kind: content}) + "\n")
    sys.stdout.flush()


def main(argument: str) -> None:
    """Be the process of a soak."""
    die_with_parent()
    told: dict[str, Any] = json.loads(argument)
    planted: list[str] = told.pop("planted")
    work = Work(**told, planted=tuple(planted))
    logging.getLogger().addHandler(Lines(logging.WARNING))
    soak = Soak(work)
    for scheduler in soak.schedulers:
        scheduler.start()
    for runs in points(work.runs):
        soak.wait_for(runs)
        say("sample", sampled(soak).to_dict())
        sys.stdin.readline()  # the connections are counted meanwhile
    for scheduler in soak.schedulers:
        scheduler.stop(timeout=STOP_S)
    names = [one.name for one in threading.enumerate() if one.name.startswith("leasecron")]
    say("stopped", {THREADS: len(names)})
    sys.stdin.readline()


if __name__ == "__main__":
    main(sys.argv[1])
