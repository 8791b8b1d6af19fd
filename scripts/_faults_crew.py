"""The instances of a fault campaign: started, disturbed, ended."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Optional

from scripts._faults_instance import Work, offset_now_ms
from scripts._faults_plan import MOST

STOP_S = 45.0
"""How long an instance may take to end; its ``stop()`` takes 30 s at most."""
BEGIN_S = 30.0
POLL_S = 0.05


class CampaignError(Exception):
    """The campaign itself cannot go on; told in one line."""


def eventually(condition: Callable[[], object], limit_s: float) -> bool:
    """Wait until a condition holds, within a limit."""
    end_s = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() >= end_s:
            return bool(condition())
        time.sleep(POLL_S)
    return True


@dataclass
class Disturbance:
    """What was done to a process, by the clock of the history.

    Attributes:
        kind: ``kill``, ``stop`` or ``end``.
        from_ms: When.
        to_ms: When it went on; None if it never did, or has not yet.
    """

    kind: str
    from_ms: int
    to_ms: Optional[int] = None


@dataclass
class Instance:
    """A process.

    Attributes:
        slot: Its place among the instances.
        log: Where it writes its history.
        process: The process.
        errors: Where its standard error goes.
        went_ms: When it was told to start, by the clock of the history.
        disturbed: What was done to it.
        killed: Whether its end was violent, on purpose.
        writer: Who writes its history for it, where its own files are limited.
    """

    slot: int
    log: Path
    process: subprocess.Popen[bytes]
    errors: Path
    went_ms: Optional[int] = None
    disturbed: list[Disturbance] = field(default_factory=list[Disturbance])
    killed: bool = False
    writer: Optional[subprocess.Popen[bytes]] = None

    @property
    def running(self) -> bool:
        """Whether it has not ended."""
        return self.process.poll() is None

    def trouble(self) -> str:
        """Return what is wrong with how it ended, or what it said; nothing if all is well."""
        said = self.errors.read_text(encoding="utf-8", errors="replace").strip()
        if said:
            return f"instance {self.slot} wrote on standard error: {said[-2_000:]}"
        status = self.process.poll()
        if status is not None and status != 0 and not self.killed:
            return f"instance {self.slot} ended with status {status}"
        return ""


class Crew:
    """All instances, by their slots.

    Args:
        folder: For what they write.
        work: What they are told, but for the store and the files.
        url_of: Returns the URL of the store for a slot.
        environment_of: Returns what a slot's process finds in its environment besides.
    """

    def __init__(
        self,
        folder: Path,
        work: Work,
        url_of: Callable[[int], str],
        environment_of: Callable[[int], Mapping[str, str]],
    ) -> None:
        self._folder = folder
        self._work = work
        self._url_of = url_of
        self._environment_of = environment_of
        self.all: list[Instance] = []
        self.piped = False
        """Whether their histories are written by others, so that their files can be limited."""
        self._up: dict[int, Instance] = {}
        self._next: dict[int, Instance] = {}

    def now_ms(self) -> int:
        """Return the clock of the history."""
        return time.time_ns() // 1_000_000

    @property
    def up(self) -> list[Instance]:
        """The instances that should be at work."""
        return list(self._up.values())

    def logs(self) -> list[Path]:
        """Return their histories so far."""
        return [one.log for one in self.all if one.log.exists()]

    # -- what is done to them --------------------------------------------------------------------

    def prepare(self, slot: int) -> None:
        """Make the successor of an instance ready, which waits for its word."""
        if slot in self._next:
            return
        name = f"instance-{slot}-{len(self.all)}"
        log, errors = self._folder / f"{name}.jsonl", self._folder / f"{name}.err"
        work = replace(
            self._work,
            url=self._url_of(slot),
            log=str(log),
            said=str(self._folder / f"{name}.said"),
        )
        instance = self._piped(slot, work, errors) if self.piped else None
        instance = instance or Instance(slot, log, self._launch(slot, work, errors), errors)
        self.all.append(instance)
        self._next[slot] = instance

    def _launch(
        self, slot: int, work: Work, errors: Path, pass_fds: Sequence[int] = ()
    ) -> subprocess.Popen[bytes]:
        script = Path(__file__).with_name("_faults_instance.py")
        with errors.open("wb") as output:
            return subprocess.Popen(
                [sys.executable, str(script), work.argument()],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                env={**os.environ, **self._environment_of(slot)},
                pass_fds=pass_fds,
                start_new_session=True,  # Ctrl-C is for the campaign, which ends them
            )

    def _piped(self, slot: int, work: Work, errors: Path) -> Instance:
        """Start one whose history goes through a pipe to somebody who writes it."""
        log = Path(work.log)
        reads, writes = os.pipe()
        try:
            with log.open("ab") as file:
                writer = subprocess.Popen(["cat"], stdin=reads, stdout=file, start_new_session=True)
            through = replace(work, log=f"/dev/fd/{writes}")
            process = self._launch(slot, through, errors, (writes,))
        finally:
            os.close(reads)
            os.close(writes)
        return Instance(slot, log, process, errors, writer=writer)

    def limit_files(self, size: Optional[int]) -> None:
        """Let no file of those at work grow beyond a size, or take that back."""
        for instance in self._up.values():
            with contextlib.suppress(ProcessLookupError):  # it ended by itself
                limits = resource.prlimit(instance.process.pid, resource.RLIMIT_FSIZE)
                soft = limits[1] if size is None else size
                resource.prlimit(instance.process.pid, resource.RLIMIT_FSIZE, (soft, limits[1]))

    def go(self, slot: int) -> None:
        """Let the successor start, whether it is ready or not yet."""
        if slot in self._up:
            message = f"instance {slot} is there already"
            raise CampaignError(message)
        self.prepare(slot)
        instance = self._next.pop(slot)
        assert instance.process.stdin is not None
        instance.went_ms = self.now_ms()
        with contextlib.suppress(BrokenPipeError):  # it has ended, which is looked at later
            instance.process.stdin.write(b"go\n")
            instance.process.stdin.flush()
        self._up[slot] = instance

    def kill(self, slot: int) -> None:
        """End one as a crash would."""
        instance = self._up.pop(slot)
        if instance.running:
            self._disturb(instance, "kill")
            instance.killed = True
            instance.process.kill()

    def terminate(self, slot: int) -> None:
        """Ask one to end."""
        instance = self._up.pop(slot)
        self._disturb(instance, "end")
        # One that has not come as far as to catch signals dies of it.
        instance.killed = instance.killed or not instance.log.exists()
        instance.process.send_signal(signal.SIGTERM)

    def pause(self, slot: int) -> None:
        """Have one stand still."""
        instance = self._up[slot]
        self._disturb(instance, "stop")
        instance.process.send_signal(signal.SIGSTOP)

    def resume(self, slot: int) -> None:
        """Let it go on."""
        instance = self._up[slot]
        instance.process.send_signal(signal.SIGCONT)
        instance.disturbed[-1].to_ms = self.now_ms()

    def _disturb(self, instance: Instance, kind: str) -> None:
        if not instance.running:
            return  # it ended by itself, which is told at the end
        instance.disturbed.append(Disturbance(kind, self.now_ms()))

    # -- begin and end -----------------------------------------------------------------------------

    def start(self, count: int) -> None:
        """Start the first ones, and return when all of them have.

        Raises:
            CampaignError: One of them does not.
        """
        for slot in range(count):
            self.prepare(slot)
        for slot in range(count):
            self.go(slot)

        def begun() -> bool:
            return all(one.log.exists() and one.log.stat().st_size for one in self._up.values())

        if not eventually(begun, BEGIN_S):
            troubles = [one.trouble() for one in self.all]
            message = next((text for text in troubles if text), "the instances do not start")
            raise CampaignError(message)

    def heal(self, fewest: int) -> None:
        """Let everybody go on, and have at least so many at work."""
        for slot, instance in self._up.items():
            last = instance.disturbed[-1] if instance.disturbed else None
            if last is not None and last.kind == "stop" and last.to_ms is None:
                self.resume(slot)
        for slot in range(MOST):
            if len(self._up) < fewest and slot not in self._up:
                self.go(slot)

    def stop(self) -> list[str]:
        """Ask all to end, wait for it, and return what is wrong with how they did."""
        for instance in self._next.values():
            instance.killed = True  # it never began
            instance.process.kill()
        self._next.clear()
        for slot in list(self._up):
            self.terminate(slot)
        troubles: list[str] = []
        for instance in self.all:
            if not eventually(lambda one=instance: not one.running, STOP_S):  # type: ignore[misc]
                troubles.append(f"instance {instance.slot} did not end within {STOP_S:.0f} s")
                instance.killed = True
                instance.process.kill()
                instance.process.wait()
            if instance.writer is not None:
                instance.writer.wait(STOP_S)
            trouble = instance.trouble()
            if trouble:
                troubles.append(trouble)
        return troubles

    def close(self) -> None:
        """Leave no process behind."""
        for instance in self.all:
            if instance.running:
                instance.process.kill()
            instance.process.wait()
            if instance.process.stdin is not None:
                with contextlib.suppress(BrokenPipeError):
                    instance.process.stdin.close()
            if instance.writer is not None:
                instance.writer.wait(STOP_S)


def new_work(*, lease_ms: int, window_ms: int, deploys: bool, planted: str) -> Work:
    """Return what all instances are told."""
    return Work("", "", "", offset_now_ms(), lease_ms, window_ms, deploys, planted)
