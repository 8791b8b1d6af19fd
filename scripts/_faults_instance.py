"""One instance of a fault campaign, a process of its own.

It is called with the JSON of a ``Work``, makes everything ready, and starts when a line ``go``
comes on its standard input. It ends with SIGTERM, or when its standard input ends.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # this checkout

from leasecron_sync import HandOver, LeaseRun, Run, Scheduler, every
from leasecron_sync.backends.base import ClaimBackend, LeaseBackend
from leasecron_sync.backends.urls import connect
from leasecron_sync.clock import Clock, SystemClock
from leasecron_sync.model import (
    ClaimReply,
    Lease,
    LeaseClaim,
    LeaseRef,
    LeaseReply,
    OnceClaim,
    RunState,
    Verdict,
)
from leasecron_sync.testing import HistoryLog, RecordingClaim, RecordingLease, executing

PR_SET_PDEATHSIG = 1
ATTEMPTS = 100
"""None of them is to be used up: an attempt that an outage ended counts."""

GREEDY = "greedy"
FORGETFUL = "forgetful"
PLANTED = {
    GREEDY: "instances take some runs that the store gave to others",
    FORGETFUL: "instances leave some runs out, and take them for settled",
}
"""Faults that can be planted in the instances, so that the campaign must find them."""


@dataclass(frozen=True)
class Job:
    """A job of the campaign.

    Attributes:
        name: What its handler does, too.
        every_s: How often it is due.
        overlap: On a lease backend.
        jitter_ms: How far its runs are spread.
    """

    name: str
    every_s: int
    overlap: Literal["skip", "allow"] = "skip"
    jitter_ms: int = 0


LEASE_JOBS = (
    Job("quick", 1),
    Job("beside", 1, "allow"),
    Job("long", 2),
    Job("troubled", 3),
    Job("spread", 2, "allow", jitter_ms=700),
)
CLAIM_JOBS = (Job("quick", 1), Job("other", 1), Job("spread", 2, jitter_ms=700))
DEPLOY_JOBS = (Job("quick", 1, "allow"), Job("beside", 1, "allow"))
"""Where each scheduled time must be executed, and none may be skipped."""


@dataclass(frozen=True)
class Work:
    """What an instance is told.

    Attributes:
        url: Its store.
        log: Where it writes its history.
        said: Where it writes what the library logs.
        offset_ms: The machine's wall clock is so far ahead of its steady one.
        lease_ms: Length of a lease; 0 on a claim backend.
        window_ms: Claim window; 0 on a lease backend.
        deploys: Whether the campaign is about deploys alone.
        planted: A fault that is planted in it, or nothing.
    """

    url: str
    log: str
    said: str
    offset_ms: int
    lease_ms: int = 0
    window_ms: int = 0
    deploys: bool = False
    planted: str = ""

    def argument(self) -> str:
        """Return it as a process is told it."""
        return json.dumps(asdict(self))

    @property
    def jobs(self) -> Sequence[Job]:
        """Its jobs."""
        if self.deploys:
            return DEPLOY_JOBS
        return LEASE_JOBS if self.lease_ms else CLAIM_JOBS


class TrueClock:
    """The machine's wall clock as it was at the beginning, however a process's own may be set."""

    def __init__(self, offset_ms: int) -> None:
        self._offset_ms = offset_ms
        self._system = SystemClock()

    def now_ms(self) -> int:
        """Return the wall clock."""
        return self._system.steady_ms() + self._offset_ms

    def steady_ms(self) -> int:
        """Return the steady clock."""
        return self._system.steady_ms()

    def wait(self, event: threading.Event, timeout_ms: int) -> bool:
        """Wait."""
        return self._system.wait(event, timeout_ms)


def offset_now_ms() -> int:
    """Return how far the machine's wall clock is ahead of its steady one."""
    clock = SystemClock()
    return clock.now_ms() - clock.steady_ms()


# -- handlers --------------------------------------------------------------------------------------


def lease_handler(log: HistoryLog, name: str) -> Callable[[LeaseRun], None]:
    """Return the handler of a job on a lease backend."""
    seconds = {"quick": 0.02, "beside": 0.4, "long": 1.2, "troubled": 0.1, "spread": 0.02}[name]

    def handler(run: LeaseRun) -> None:
        with executing(log, run):
            number = round(run.scheduled_time.timestamp()) // 3 % 3
            if name == "troubled" and run.attempt == 1 and number == 0:
                message = "planned"
                raise RuntimeError(message)
            if name == "troubled" and run.attempt == 1 and number == 1:
                raise HandOver
            run.wait(seconds)

    return handler


def claim_handler(log: HistoryLog) -> Callable[[Run], None]:
    """Return the handler of a job on a claim backend."""

    def handler(run: Run) -> None:
        with executing(log, run):
            run.wait(0.02)

    return handler


# -- planted faults --------------------------------------------------------------------------------


def is_chosen(scheduled_ms: int) -> bool:
    """Tell whether a planted fault is about this scheduled time."""
    return scheduled_ms // 1_000 % 5 == 0


def plant_in_lease(name: str, backend: LeaseBackend) -> None:
    """Have a lease backend lie to its instance about some runs."""
    ask = backend.claim

    def claim(claims: Sequence[LeaseClaim]) -> Sequence[LeaseReply]:
        forgotten = [name == FORGETFUL and is_chosen(one.key.scheduled_ms) for one in claims]
        asked = [one for one, skipped in zip(claims, forgotten) if not skipped]
        replies = iter(ask(asked) if asked else ())
        settled = LeaseReply(Verdict.SETTLED, state=RunState.FINISHED)
        told = [settled if skipped else next(replies) for skipped in forgotten]
        if name == GREEDY:
            told = [greedy_lease(one, reply) for one, reply in zip(claims, told)]
        return told

    vars(backend)["claim"] = claim


def greedy_lease(claim: LeaseClaim, reply: LeaseReply) -> LeaseReply:
    """Take a run that the store gave to another instance."""
    others = reply.verdict is Verdict.HELD or (
        reply.verdict is Verdict.SETTLED and reply.state is RunState.FINISHED
    )
    if not others or not is_chosen(claim.key.scheduled_ms):
        return reply
    lease = Lease(LeaseRef(claim.key, time.time_ns()), 1, 0, claim.lease_ms)
    return LeaseReply(Verdict.GRANTED, lease=lease)


def plant_in_claim(name: str, backend: ClaimBackend) -> None:
    """Have a claim backend lie to its instance about some runs."""
    ask = backend.claim

    def claim(claims: Sequence[OnceClaim]) -> Sequence[ClaimReply]:
        forgotten = [name == FORGETFUL and is_chosen(one.key.scheduled_ms) for one in claims]
        asked = [one for one, skipped in zip(claims, forgotten) if not skipped]
        replies = iter(ask(asked) if asked else ())
        told = [ClaimReply(Verdict.TAKEN) if skipped else next(replies) for skipped in forgotten]
        if name == GREEDY:
            told = [
                ClaimReply(Verdict.GRANTED)
                if reply.verdict is Verdict.TAKEN and is_chosen(one.key.scheduled_ms)
                else reply
                for one, reply in zip(claims, told)
            ]
        return told

    vars(backend)["claim"] = claim


# -- the process -----------------------------------------------------------------------------------


def scheduler_of(work: Work) -> Scheduler[Any]:
    """Return the scheduler, ready to be started."""
    clock: Clock = TrueClock(work.offset_ms)
    log = HistoryLog(work.log, clock=clock)
    backend = connect(work.url)
    scheduler: Scheduler[Any]
    if isinstance(backend, LeaseBackend):
        if work.planted:
            plant_in_lease(work.planted, backend)
        scheduler = lease_scheduler(work, RecordingLease(backend, log), log)
    else:
        assert isinstance(backend, ClaimBackend)
        if work.planted:
            plant_in_claim(work.planted, backend)
        scheduler = claim_scheduler(work, RecordingClaim(backend, log), log)
    log.listen(scheduler)
    return scheduler


def lease_scheduler(
    work: Work, backend: RecordingLease, log: HistoryLog
) -> Scheduler[RecordingLease]:
    """Return the scheduler of an instance on a lease backend."""
    scheduler = Scheduler(backend, lease_ms=work.lease_ms)
    for job in work.jobs:
        scheduler.add_job(
            lease_handler(log, job.name),
            every(seconds=job.every_s),
            name=job.name,
            overlap=job.overlap,
            jitter_ms=job.jitter_ms,
            max_attempts=ATTEMPTS,
            retry_delay_ms=100,
        )
    return scheduler


def claim_scheduler(
    work: Work, backend: RecordingClaim, log: HistoryLog
) -> Scheduler[RecordingClaim]:
    """Return the scheduler of an instance on a claim backend."""
    scheduler = Scheduler(backend, claim_window_ms=work.window_ms)
    for job in work.jobs:
        scheduler.add_job(
            claim_handler(log), every(seconds=job.every_s), name=job.name, jitter_ms=job.jitter_ms
        )
    return scheduler


def die_with_parent() -> None:
    """Leave no instance behind when the campaign is killed, not even one that stands still."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def end_with_input() -> None:
    """End as with SIGTERM when nobody is there any more."""
    # Not by sys.stdin: its lock would be held when the interpreter ends.
    while os.read(0, 64):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


def heard_go() -> bool:
    """Wait for the word."""
    heard = b""
    while not heard.endswith(b"\n"):
        more = os.read(0, 1)
        if not more:
            return False
        heard += more
    return heard == b"go\n"


def leave(*_details: object) -> None:
    """End at once: nothing has begun yet.

    Not by an exception: this may interrupt a callback, whose exceptions Python prints and forgets.
    """
    os._exit(0)


def main(argument: str) -> None:
    """Be an instance."""
    die_with_parent()
    signal.signal(signal.SIGTERM, leave)
    work = Work(**json.loads(argument))
    logging.raiseExceptions = False  # a disk may be full
    logging.basicConfig(
        filename=work.said, level=logging.WARNING, format="%(asctime)s %(name)s %(message)s"
    )
    scheduler = scheduler_of(work)
    if not heard_go():
        return
    threading.Thread(target=end_with_input, daemon=True).start()
    scheduler.run_forever()


if __name__ == "__main__":
    main(sys.argv[1])
