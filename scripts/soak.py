#!/usr/bin/env python3
"""Have instances work for long, and look whether anything grows.

scripts/soak.py                    3,000 runs on each store, half of which fail in their first
                                   attempt: about a minute and a half each
    --store STORE                  on this one; may be repeated. sqlite, postgres, redis, valkey
                                   (leases), rabbitmq, nats, redis-script, redis-stream-id,
                                   redis-idmp (claims, where a run that fails is not retried)
    --runs N                       so many runs (default: 3000)
    --jobs N                       so many of them each second (default: 50)
    --lists                        show each internal list, too
    --planted NAME                 plant a leak, which must be found: threads, files, connections,
                                   memory, lists, or all

Two instances are in one process and share the runs of a store of their own. After a sixth, a third,
two thirds and all of the runs it counts threads, open files, memory, Python objects, the length of
each list, dict and set of the library and the objects of each of its classes, and the server counts
the connections. What is under way at that moment is left out: of several looks the least counts.

The status is 1 when something grew from the first count to the last, which is named, or when a
thread or a connection is left after the stop; else 0. Needs Linux.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any, Final, Optional

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # this checkout

from leasecron_sync.cli.output import finish_stdout, one_line, table  # noqa: E402
from scripts._environment import use_environment  # noqa: E402
from scripts._soak_instance import PLANTED, Work  # noqa: E402
from scripts._soak_judge import (  # noqa: E402
    CONNECTIONS,
    FILES,
    MEMORY,
    THREADS,
    Sample,
    grown,
    is_class,
    left,
    points,
    rows,
)
from scripts._soak_stores import STORES, Store, StoreError, opened  # noqa: E402

NAME: Final = "soak"
GREW: Final = 1
USAGE: Final = 2
INTERRUPTED: Final = 130
LEAST_RUNS: Final = 300
MOST_RUNS: Final = 10_000_000
MOST_JOBS: Final = 500
LOOKS: Final = 5
LOOK_S: Final = 0.05
LEFT_S: Final = 5.0
"""How long a server may take to notice that a connection was closed."""
LEAKS: Final = {
    "threads": THREADS,
    "files": FILES,
    "connections": CONNECTIONS,
    "memory": MEMORY,
    "lists": "lists",
}


class UsageError(Exception):
    """The command is not what it should be; told in one line."""


class SoakError(Exception):
    """A soak cannot go on; told in one line."""


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog=NAME,
        usage="%(prog)s [--store STORE ...] [--runs N] [--jobs N] [--lists] [--planted NAME]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("--store", action="append", default=[], help=argparse.SUPPRESS)
    made.add_argument("--runs", default="3000", help=argparse.SUPPRESS)
    made.add_argument("--jobs", default="50", help=argparse.SUPPRESS)
    made.add_argument("--lists", action="store_true", help=argparse.SUPPRESS)
    made.add_argument("--planted", action="append", default=[], help=argparse.SUPPRESS)
    return made


def whole(option: str, text: str, least: int, most: int) -> int:
    value = int(text) if text.isascii() and text.isdigit() else least - 1
    if not least <= value <= most:
        message = f"{option} must be a whole number from {least:,} to {most:,}, not {text!r}"
        raise UsageError(message)
    return value


def stores_of(options: argparse.Namespace) -> list[str]:
    for name in options.store:
        if name not in STORES:
            message = f"--store {name}: no such store, use one of {', '.join(STORES)}"
            raise UsageError(message)
    return options.store or list(STORES)


def leaks_of(options: argparse.Namespace) -> tuple[str, ...]:
    names: list[str] = options.planted
    for name in names:
        if name not in (*LEAKS, "all"):
            known = ", ".join((*LEAKS, "all"))
            message = f"--planted {name}: no such leak, use one of {known}"
            raise UsageError(message)
    return tuple(PLANTED) if "all" in names else tuple(LEAKS[name] for name in names)


# -- one store -------------------------------------------------------------------------------------


class Child:
    """The process with the instances."""

    def __init__(self, work: Work) -> None:
        script = Path(__file__).with_name("_soak_instance.py")
        self._process = subprocess.Popen(
            [sys.executable, str(script), work.argument()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    @property
    def pid(self) -> int:
        """Its number."""
        return self._process.pid

    def heard(self, kind: str) -> dict[str, Any]:
        """Return what it says next.

        Raises:
            SoakError: It has ended instead.
        """
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            _, errors = self._process.communicate()
            last = errors.strip().splitlines()[-1:] or [f"status {self._process.returncode}"]
            message = f"the instances have ended: {last[0]}"
            raise SoakError(message)
        content: dict[str, Any] = json.loads(line)[kind]
        return content

    def go_on(self) -> None:
        """Let it go on."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()

    def close(self) -> None:
        """End it."""
        self._process.kill()
        self._process.communicate()


def soaked(store: Store, work: Work) -> tuple[list[Sample], list[str]]:
    """Return the samples, and what grew or was left."""
    with contextlib.closing(Child(work)) as child:
        samples: list[Sample] = []
        for number in points(work.runs):
            progress(f"{store.title}: {samples[-1].runs if samples else 0:,} of {work.runs:,} runs")
            sample = Sample(**child.heard("sample"))
            sample.figures[CONNECTIONS] = least_connections(store, child.pid)
            samples.append(sample)
            child.go_on()
            assert sample.runs >= number
        rest = child.heard("stopped")
        rest[CONNECTIONS] = connections_left(store, child.pid)
        child.go_on()
    progress("")
    return samples, grown(samples) + ([] if work.planted else left(rest))


def least_connections(store: Store, pid: int) -> int:
    counts: list[int] = []
    for _ in range(LOOKS):
        counts.append(store.connections(pid))
        time.sleep(LOOK_S)
    return min(counts)


def connections_left(store: Store, pid: int) -> int:
    end_s = time.monotonic() + LEFT_S
    while (count := store.connections(pid)) and time.monotonic() < end_s:
        time.sleep(LOOK_S)
    return count


# -- what is shown ---------------------------------------------------------------------------------


def progress(text: str) -> None:
    """Show how far it is: on a terminal in one line, else a line for each step."""
    if sys.stderr is None:
        return
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\x1b[K{text[:110]}")
    elif text:
        sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def show(name: str, store: Store, samples: list[Sample], wrong: list[str], *, lists: bool) -> None:
    heads = ["FIGURE", *(f">{one.runs:,}" for one in samples)]
    print(f"{name} ({store.title})\n")
    shown = [[row[0], *row[1:]] for row in rows(samples)[1:]]
    if lists:
        names = sorted({key for one in samples for key in one.lengths if not is_class(key)})
        numbers = {key: [one.lengths.get(key, 0) for one in samples] for key in names}
        shown += [[f"  {key}", *map(str, numbers[key])] for key in names if any(numbers[key])]
    for line in table(heads, shown):
        print(line)
    print()
    for text in wrong:
        print(f"GROWS  {one_line(text)}")
    print("Nothing grows, nothing is left.\n" if not wrong else "", flush=True)


# -- from begin to end -----------------------------------------------------------------------------


def soak(options: argparse.Namespace) -> int:
    names, planted = stores_of(options), leaks_of(options)
    runs = whole("--runs", options.runs, LEAST_RUNS, MOST_RUNS)
    jobs = whole("--jobs", options.jobs, 1, MOST_JOBS)
    status = 0
    for name in names:
        progress(f"{name}: starts")
        with opened(name) as store:
            samples, wrong = soaked(store, Work(store.url, runs, jobs, planted))
            show(name, store, samples, wrong, lists=options.lists)
        if wrong:
            status = GREW
    return status


def interrupt(_number: int, _frame: Optional[FrameType]) -> None:
    raise KeyboardInterrupt


def main(arguments: Optional[Sequence[str]] = None) -> int:
    options = parser().parse_args(arguments)
    before = {x: signal.signal(x, interrupt) for x in (signal.SIGINT, signal.SIGTERM)}
    status = USAGE
    try:
        status = soak(options)
        finish_stdout()
    except (UsageError, StoreError, SoakError) as error:
        progress("")
        sys.stderr.write(f"{NAME}: {one_line(str(error))}\n")
    except KeyboardInterrupt:
        progress("")
        sys.stderr.write(f"{NAME}: ended by Ctrl-C\n")
        status = INTERRUPTED
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return status


if __name__ == "__main__":
    use_environment()
    sys.exit(main())
