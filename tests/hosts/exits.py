"""Programs that end near a scheduled time: the ways to do so, the loop, and the verdict."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Optional

from leasecron_sync.model import RunKey, RunState
from tests.hosts.exit_script import HANGS_S, Place, read
from tests.hosts.scripts import ROOT

SCRIPT = Path(__file__).with_name("exit_script.py")
LIMIT_S = 2.0
"""How long the exit may take, by the documents."""


@dataclass(frozen=True)
class Way:
    """A way for a program to end; what is not said is the plain one.

    Attributes:
        handler: What a handler does: ``returns``, ``short`` (5 ms), ``waits`` (gives up when the
            run should end), ``asks`` (returns then), ``ignores`` (that it should).
        jobs: How many jobs are due at that instant.
        leave: How the program ends: ``return``, ``with``, ``sys.exit``, ``raise``, ``os._exit``.
        memory: True for a store that ends with the process.
        listens: True with listeners.
        logs: True when warnings go to standard error.
        threads: True with threads of the program's own around.
        exit_functions: True with functions of its own that are called at the exit.
        late_start: True when the scheduler starts as the program ends.
        schedulers: How many of them, each with its jobs.
        child: Where it all happens in a child of multiprocessing: its start method.
        lease_ms: Length of a lease.
        warns: What may stand on standard error.
    """

    handler: str = "returns"
    jobs: int = 3
    leave: str = "return"
    memory: bool = False
    listens: bool = False
    logs: bool = True
    threads: bool = False
    exit_functions: bool = False
    late_start: bool = False
    schedulers: int = 1
    child: str = ""
    lease_ms: int = 15_000
    warns: str = ""


IGNORED = r"WARNING:leasecron_sync\.engine\.runtime:a handler did not end in time, .*"

WAYS = {
    "a handler that returns at once": Way(),
    "a handler of 5 ms": Way("short", listens=True),
    "a handler that waits, and gives up": Way("waits", listens=True),
    "a handler that asks, and returns": Way("asks"),
    "a handler that ignores it": Way("ignores", lease_ms=1_000, warns=IGNORED),
    "twenty runs at once": Way("short", jobs=20),
    "twenty handlers that wait": Way("waits", jobs=20),
    "the end of a with block": Way("short", leave="with"),
    "threads of its own": Way("short", threads=True),
    "functions of its own at the exit": Way("short", exit_functions=True),
    "sys.exit": Way("waits", leave="sys.exit"),
    "an exception": Way("short", leave="raise"),
    "os._exit": Way("waits", leave="os._exit", lease_ms=1_000),
    "a start that comes too late": Way("short", late_start=True),
    "three schedulers": Way("waits", schedulers=3),
    "no log": Way("short", logs=False),
    "memory": Way("short", memory=True),
    "memory, handlers that wait": Way("waits", memory=True, jobs=20),
    "a child by fork": Way("short", child="fork"),
    "a child by spawn": Way("short", child="spawn"),
    "a child by forkserver": Way("waits", child="forkserver"),
}
STATUS = {"sys.exit": 3, "raise": 1, "os._exit": 4}
# 3.12.0 and 3.12.1 start no thread once the main thread has ended, whatever others go on.
NO_THREADS = r"ERROR:leasecron_sync\.engine\.start(ing|ed):.*thread.*"
NO_THREAD_VERSIONS = ("3.12.0", "3.12.1")
TRACEBACK = r"Traceback \(most recent call last\):\n(  .*\n)+LookupError: of the program\n"


@dataclass
class Ended:
    """A program that has ended.

    Attributes:
        offset_ms: How long after a scheduled time its main program ended.
        place: Its store.
        wrong: What is wrong with it.
        took_s: How long the exit took; None where that is not known.
    """

    offset_ms: int
    place: Place
    wrong: list[str] = field(default_factory=list)
    took_s: Optional[float] = None


@dataclass
class Figures:
    """What came of the programs of one way.

    Attributes:
        programs: How many there were.
        wrong: What is wrong with them.
        slowest_s: The longest exit.
        handed_back: How many runs the next process found and executed.
    """

    programs: int
    wrong: list[str]
    slowest_s: float
    handed_back: int


def offset_ms(number: int, count: int, share: float = 0.0) -> int:
    """Spread the ends evenly from 50 ms before a scheduled time to 50 ms after it.

    Args:
        number: Of the program.
        count: How many there are.
        share: Part of a step by which these are shifted, so that several ways fill the gaps.
    """
    return round(-50 + 100 * (number + share) / max(1, count - 1 + (share > 0)))


def run_all(
    ways: dict[str, tuple[Way, int]],
    *,
    python: str,
    folder: Path,
    url: str = "",
    at_once: int = 6,
) -> dict[str, Figures]:
    """Run programs, several at once, and then their successors.

    Args:
        ways: Ways to end, by name, and how many programs end so.
        python: Interpreter.
        folder: Where their stores are made.
        url: Of a store for all of them; else each has an SQLite file.
        at_once: How many of them run at once.
    """
    with ThreadPoolExecutor(at_once) as pool:
        running = {
            name: [
                pool.submit(
                    end_one,
                    way,
                    offset_ms(number, count, rank / len(ways)),
                    python,
                    Place(str(folder / f"{rank}-{number}.db"), url),
                )
                for number in range(count)
            ]
            for rank, (name, (way, count)) in enumerate(ways.items())
        }
        ended = {name: [future.result() for future in running[name]] for name in ways}
        stores = [item.place for name in ways if not ways[name][0].memory for item in ended[name]]
        left = {place: unsettled(place) for place in stores}
        batches = [stores[first : first + 12] for first in range(0, len(stores), 12)]
        list(pool.map(lambda batch: follow(python, batch), batches))
    return {name: judge(ways[name][0], ended[name], left) for name in ways}


def end_one(way: Way, offset_ms: int, python: str, place: Place) -> Ended:
    """Run one program to its end, and look at how it ended."""
    ended, path = Ended(offset_ms, place), place.path
    options = json.dumps({**asdict(way), "offset_ms": offset_ms})
    process = subprocess.Popen(
        [python, str(SCRIPT), path, place.url, options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    try:
        out, err = process.communicate(timeout=HANGS_S + 10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        ended.wrong.append("it did not end")
        return ended
    at_end = time.monotonic()
    noted = lines(path, ".end")
    if noted:
        ended.took_s = at_end - noted[0]
    else:
        ended.wrong.append("it never came to its end")
    status = STATUS.get(way.leave, 0)
    if process.returncode != status:
        ended.wrong.append(f"status {process.returncode}")
    rest, tracebacks = re.subn(TRACEBACK, "", err)
    if tracebacks != (way.leave == "raise"):
        ended.wrong.append(f"{tracebacks} tracebacks")
    expected = [way.warns] if way.warns else []
    if way.threads and version(python) in NO_THREAD_VERSIONS:
        expected.append(NO_THREADS)
    rest = "".join(
        line
        for line in rest.splitlines(keepends=True)
        if not any(re.fullmatch(text, line.rstrip()) for text in expected)
    )
    if out or rest:
        ended.wrong.append(f"output {out!r} {rest!r}")
    ended.wrong += wrong_records(way, place)
    if way.exit_functions and lines(path, ".exits") != ["after the start", "before the start"]:
        ended.wrong.append(f"functions at the exit: {lines(path, '.exits')}")
    return ended


def wrong_records(way: Way, place: Place) -> list[str]:
    """Tell what is wrong with the records that a program left."""
    wrong = []
    entered = {(job, token) for job, _, _, token in lines(place.path, ".entered")}
    for job, state, token in records(way, place):
        if state == "running" and (way.handler != "ignores" and way.leave != "os._exit"):
            began = "began" if (job, token) in entered else "never began"
            wrong.append(f"a run of {job} is left running, its handler {began}")
        elif state == "running" and (job, token) not in entered and way.leave != "os._exit":
            wrong.append(f"a run of {job} is left running, its handler never began")
        elif state == "finished" and (job, token) not in entered:
            wrong.append(f"a run of {job} is finished, its handler never began")
        elif state == "failed":
            wrong.append(f"a run of {job} is failed")
    return wrong


def records(way: Way, place: Place) -> list[Any]:
    """Return job, state and token of each record."""
    if way.memory:
        return lines(place.path, ".records")
    return [(item.key.job, item.state.value, item.token) for item in read(place)]


def follow(python: str, places: Sequence[Place]) -> None:
    """Run the next process of several stores to its end."""
    there = [place.path for place in places if place.is_there()]
    subprocess.run(
        [python, str(SCRIPT), "--follow", places[0].url, *there],
        check=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )


def judge(way: Way, ended: Sequence[Ended], left: dict[Place, set[RunKey]]) -> Figures:
    """Add what the next process found, and sum up."""
    wrong, handed_back = [], 0
    for item in ended:
        found = set() if way.memory else left[item.place]
        handed_back += len(found)
        item.wrong += [
            f"{record.key} was left, and is {record.state.value} after the next process"
            for record in read(item.place)
            if record.key in found and record.state is not RunState.FINISHED
        ]
        name = Path(item.place.path).name
        wrong += [f"{name} ({item.offset_ms:+d} ms): {text}" for text in item.wrong]
    took = [item.took_s for item in ended if item.took_s is not None]
    return Figures(len(ended), wrong, max(took, default=0.0), handed_back)


def unsettled(place: Place) -> set[RunKey]:
    """Return the runs that a program left for others."""
    return {record.key for record in read(place) if not record.state.settled}


def lines(path: str, suffix: str) -> list[Any]:
    """Return what a program noted."""
    file = Path(f"{path}{suffix}")
    if not file.exists():
        return []
    return [json.loads(line) for line in file.read_text().splitlines()]


def usable(python: str) -> bool:
    """Tell whether an interpreter has what the library needs."""
    found = subprocess.run(
        [python, "-c", "import croniter, tenacity, zoneinfo; zoneinfo.ZoneInfo('UTC')"],
        check=False,
        capture_output=True,
    )
    return found.returncode == 0


@cache
def version(python: str) -> str:
    """Return the version of an interpreter, 3.x.y."""
    found = subprocess.run(
        [python, "-c", "import platform; print(platform.python_version())"],
        check=True,
        capture_output=True,
        text=True,
    )
    return found.stdout.strip()


@cache
def pythons() -> dict[str, str]:
    """Return the interpreters at hand that have what the library needs, by version 3.x."""
    candidates = [sys.executable, *os.environ.get("LEASECRON_SYNC_PYTHONS", "").split(":")]
    candidates += sorted(str(path) for path in ROOT.glob(".venv/test-*/bin/python"))
    found: dict[str, str] = {}
    for candidate in candidates:
        if candidate and Path(candidate).exists() and usable(candidate):
            found.setdefault(version(candidate).rpartition(".")[0], candidate)
    return found
