"""A script whose main program ends near a scheduled time; what else it does is told by options.

It takes the options of ``tests.hosts.exits.Way`` as JSON, and notes beside the store what its
handlers did. It is run by every Python that the library supports, without pytest.
"""

from __future__ import annotations

import atexit
import faulthandler
import json
import logging
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from leasecron_sync import (
    LeaseRun,
    MemoryLease,
    Scheduler,
    SchedulerStateError,
    SQLiteLease,
    connect_lease,
    every,
)
from leasecron_sync.backends.base import BackendSettings, LeaseBackend
from leasecron_sync.model import RunRecord

HANGS_S = 40
"""A program that takes longer tells where its threads are, and ends."""


@dataclass(frozen=True)
class Place:
    """Where a program has its runs.

    Attributes:
        path: The SQLite file, and what the names of other files begin with.
        url: Of a store that programs share, each in a namespace of its own; else empty.
    """

    path: str
    url: str = ""

    def backend(self) -> LeaseBackend:
        """Return a new backend."""
        return connect_lease(self.url) if self.url else SQLiteLease(self.path)

    @property
    def namespace(self) -> str:
        """Keeps programs on one store apart."""
        return self.path[-200:] if self.url else "default"

    def is_there(self) -> bool:
        """Tell whether there may be a store."""
        return bool(self.url) or Path(self.path).exists()


class Script:
    """The program.

    Args:
        place: The store, or what to call it.
        options: A way to end, and the offset of the end to a scheduled time.
    """

    def __init__(self, place: Place, options: dict[str, Any]) -> None:
        self.place, self.path, self.options = place, place.path, options
        path = place.path
        self.entered = os.open(f"{path}.entered", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self.ready = threading.Event()

    def main(self) -> None:
        options = self.options
        if options["logs"]:
            logging.basicConfig(level=logging.WARNING)
        if options["child"]:
            context = multiprocessing.get_context(options["child"])
            process = context.Process(target=child, args=(self.place, options))
            process.start()
            process.join()
            if process.exitcode:
                sys.exit(process.exitcode)
            return
        self.body()

    def body(self) -> None:
        options = self.options
        faulthandler.dump_traceback_later(HANGS_S, exit=True)
        schedulers = [self.scheduler(number) for number in range(options["schedulers"])]
        if options["exit_functions"]:
            atexit.register(self.exit_function, "before the start")
        if options["memory"]:
            atexit.register(self.report, schedulers)  # called after the scheduler's own
        with self.threads():
            for scheduler in schedulers:
                self.start(scheduler)
            if options["exit_functions"]:
                atexit.register(self.exit_function, "after the start", 0.15)
            left_s = self.left_s()
            if options["late_start"]:
                # In a thread that nobody waits for, just when the program ends.
                time.sleep(left_s)
                threading.Thread(target=self.start_late, daemon=True).start()
            elif options["leave"] == "with":
                with schedulers[0]:
                    time.sleep(left_s)
            else:
                time.sleep(left_s)
            self.note(".end", time.monotonic())
            self.leave()

    def left_s(self) -> float:
        """Return how long it is until the program shall end; it has a handler running by then."""
        if self.options["handler"] in ("waits", "asks", "ignores") and not self.options["memory"]:
            self.ready.wait(5)
        left_s = 1 - time.time() % 1 + float(self.options["offset_ms"]) / 1000
        return left_s if left_s >= 0.15 else left_s + 1

    def scheduler(self, number: int) -> Scheduler[Any]:
        options = self.options
        backend = MemoryLease(self.path) if options["memory"] else self.place.backend()
        made = Scheduler(backend, namespace=self.place.namespace, lease_ms=options["lease_ms"])
        for job in range(options["jobs"]):
            made.add_job(self.handler, every(seconds=1), name=f"job {number}.{job}")
        if options["listens"]:
            for name in ("run_claimed", "run_finished", "run_handed_over"):
                made.on(name, lambda event: event.job)
        return made

    def start(self, scheduler: Scheduler[Any]) -> None:
        if not self.options["late_start"] and self.options["leave"] != "with":
            scheduler.start()

    def start_late(self) -> None:
        with suppress(SchedulerStateError):  # no thread can be started any more
            self.scheduler(99).start()

    def handler(self, run: LeaseRun) -> None:
        line = json.dumps([run.job, run.scheduled_time.timestamp(), run.attempt, run.token])
        os.write(self.entered, (line + "\n").encode())
        self.ready.set()
        kind = self.options["handler"]
        if kind == "short":
            time.sleep(0.005)
        elif kind == "waits":
            run.wait(30)
        elif kind == "asks":
            while not run.stopping:
                time.sleep(0.01)
        elif kind == "ignores":
            threading.Event().wait(60)

    def leave(self) -> None:
        leave = self.options["leave"]
        if leave == "sys.exit":
            sys.exit(3)
        elif leave == "raise":
            message = "of the program"
            raise LookupError(message)
        elif leave == "os._exit":
            os._exit(4)

    @contextmanager
    def threads(self) -> Iterator[None]:
        """Have other threads around at the end, of the program's own."""
        if self.options["threads"]:
            threading.Thread(target=threading.Event().wait, args=(60,), daemon=True).start()
        yield
        if self.options["threads"]:
            threading.Thread(target=time.sleep, args=(0.2,)).start()

    def exit_function(self, when: str, wait_s: float = 0.0) -> None:
        time.sleep(wait_s)
        self.note(".exits", when)

    def report(self, schedulers: list[Scheduler[Any]]) -> None:
        """Note the records of a store that ends with this process."""
        backend = schedulers[0].backend
        assert isinstance(backend, MemoryLease)
        tables = backend._store.namespaces["default"]
        for record in tables.all_runs():
            self.note(".records", [record.key.job, record.state.value, record.token])

    def note(self, suffix: str, what: object) -> None:
        with Path(self.path + suffix).open("a") as file:
            file.write(json.dumps(what) + "\n")


def child(place: Place, options: dict[str, Any]) -> None:
    """Be the program, in a child of multiprocessing."""
    Script(place, options).body()


def follow(places: list[Place]) -> None:
    """Be the next process of each of these stores, until it has nothing left to execute."""
    followers = [_follower(place) for place in places]
    for follower in followers:
        follower.start()
    end = time.monotonic() + 12
    while followers and time.monotonic() < end:
        time.sleep(0.05)
        for follower in followers:
            if all(record.state.settled for record in follower.history(None, 10_000)):
                follower.stop()
        followers = [item for item in followers if item.status().state == "running"]
    for follower in followers:
        follower.stop(0)


def _follower(place: Place) -> Scheduler[LeaseBackend]:
    made = Scheduler(
        place.backend(), namespace=place.namespace, lease_ms=1_000, max_concurrent_runs=100
    )
    for job in {record.key.job for record in read(place)}:
        made.add_job(
            lambda: None,
            every(seconds=3_600),
            name=job,
            overlap="allow",
            catch_up_ms=3_600_000,  # a long campaign comes to its end much later
        )
    return made


def read(place: Place) -> Sequence[RunRecord]:
    """Return the records of a program that has ended."""
    if not place.is_there():
        return []
    backend = place.backend()
    backend.open(BackendSettings(place.namespace, "reader", 5_000))
    try:
        backend.probe()  # makes the tables of a program that was cut off before it had any
        return backend.history(None, 10_000)
    finally:
        backend.close()


if __name__ == "__main__":
    if sys.argv[1] == "--follow":
        follow([Place(path, sys.argv[2]) for path in sys.argv[3:]])
    else:
        Script(Place(sys.argv[1], sys.argv[2]), json.loads(sys.argv[3])).main()
