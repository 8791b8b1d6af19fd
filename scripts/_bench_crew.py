"""Instances of bench.py as processes, seen from the process that measures."""

from __future__ import annotations

import json
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from scripts._bench_instance import Work

ANSWER_S = 150.0
END_S = 20.0
POLL_S = 0.25

Line = dict[str, Any]


class BenchError(Exception):
    """A measurement went wrong, or what it saw must not happen."""


class Start(NamedTuple):
    """A handler was called.

    Attributes:
        instance: Number of the instance.
        job: Its job.
        scheduled_ms: Its scheduled time.
        at_ns: Wall clock in the first line of the handler.
    """

    instance: int
    job: str
    scheduled_ms: int
    at_ns: int

    @property
    def delay_ms(self) -> float:
        """How long after its scheduled time the handler began."""
        return self.at_ns / 1e6 - self.scheduled_ms


class Member:
    """One instance."""

    def __init__(self, work: Work) -> None:
        self._lines: queue.Queue[Line] = queue.Queue()
        script = Path(__file__).with_name("_bench_instance.py")
        self._process = subprocess.Popen(
            [sys.executable, str(script), work.argument()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for this process, which ends the others
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def wait_for(self, what: str, timeout_s: float = ANSWER_S) -> Line:
        """Return the next line of a kind.

        Raises:
            BenchError: It did not come.
        """
        until_s = time.monotonic() + timeout_s
        while True:
            try:
                line = self._lines.get(timeout=max(0.0, until_s - time.monotonic()))
            except queue.Empty:
                message = f"an instance did not say {what!r} within {timeout_s:.0f} s"
                raise BenchError(message) from None
            if line["what"] == what:
                return line
            if line["what"] == "gone":
                message = f"an instance ended before it said {what!r}"
                raise BenchError(message)

    def has_said(self, what: str) -> bool:
        """Tell whether its next line, if there is one already, is of a kind; the line is taken."""
        try:
            return bool(self._lines.get_nowait()["what"] == what)
        except queue.Empty:
            return False

    def ask(self, command: str) -> None:
        """Send a line."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{command}\n".encode())
        self._process.stdin.flush()

    def kill(self) -> None:
        """End it as a crash does."""
        self._process.kill()
        self.close()

    def close(self) -> None:
        """Leave no process and no thread behind."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._process.wait(timeout=END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join()
        if self._process.stdout is not None:
            self._process.stdout.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for text in self._process.stdout:
            self._lines.put(json.loads(text))
        self._lines.put({"what": "gone"})


class Crew:
    """Several instances with the same work."""

    def __init__(self, members: Sequence[Member]) -> None:
        self.members = list(members)
        self.ready: list[Line] = []
        self.ended: list[Line] = []

    def start(self, schedule: str) -> None:
        """Give every instance its jobs, and wait until all of these are registered."""
        for member in self.members:
            member.ask(schedule)
        self.ready = [member.wait_for("ready") for member in self.members]

    def started(self) -> int:
        """Return how many handlers have been called."""
        for member in self.members:
            member.ask("count")
        return int(sum(member.wait_for("count")["starts"] for member in self.members))

    def wait_started(self, count: int, limit_s: float) -> None:
        """Wait until so many handlers have been called, or give up."""
        until_s = time.monotonic() + limit_s
        while self.started() < count and time.monotonic() < until_s:
            time.sleep(POLL_S)

    def stop(self) -> list[Start]:
        """Stop all of them; return the starts, the oldest first."""
        for member in self.members:
            member.ask("stop")
        self.ended = [member.wait_for("end") for member in self.members]
        starts = [
            Start(number, job, scheduled_ms, at_ns)
            for number, end in enumerate(self.ended)
            for job, scheduled_ms, at_ns in end["starts"]
        ]
        return sorted(starts, key=lambda start: start.at_ns)

    def total(self, name: str) -> float:
        """Add up a number that the instances told in the end."""
        return float(sum(end[name] for end in self.ended))

    def calls(self, name: str) -> int:
        """Return how often the instances called their store."""
        return int(sum(end["calls"].get(name, 0) for end in self.ended))


@contextmanager
def crew_of(count: int, work: Work) -> Iterator[Crew]:
    """Start the processes of instances; whatever happens, none is left behind."""
    members: list[Member] = []
    try:
        for _number in range(count):
            members.append(Member(work))  # noqa: PERF401 - those before a failure are known
        for member in members:
            member.wait_for("up")
        yield Crew(members)
    except BaseException:
        for member in members:
            member.kill()
        raise
    for member in members:
        member.close()
