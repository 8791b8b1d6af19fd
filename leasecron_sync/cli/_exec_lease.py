"""Executes a command under a lease: renewed while it runs, taken over when its host fails."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import Final, Optional

from leasecron_sync.backends.base import LeaseBackend
from leasecron_sync.cli._exec_child import Child
from leasecron_sync.cli._exec_turn import LOST_LEASE, TIME_OVER, Asking, Ending, Order
from leasecron_sync.cli.output import CommandError, complain
from leasecron_sync.errors import StoreError
from leasecron_sync.model import (
    JobStamp,
    Lease,
    LeaseClaim,
    LeaseReply,
    OnOverlap,
    Outcome,
    Reason,
    RenewReply,
    RunKey,
    Settlement,
    Verdict,
)
from leasecron_sync.options import ON_TIME_MS, SchedulerOptions
from leasecron_sync.run import moment
from leasecron_sync.schedule import fingerprint

ASK_MS: Final = 1_000
"""How often a standby looks whether the run has become free."""

RETRY_DELAY_MS: Final = 1_000
RETRY_BEAT_MS: Final = 1_000
LOOK_MS: Final = 500
NOT_ASKED: Final = "nobody can be asked who executes it"
PENDING_LIMIT: Final = 10

_OTHERS = frozenset({Verdict.HELD, Verdict.WAITING, Verdict.DEFERRED})
"""Answers after which the run may still fall to this host."""


@dataclass(frozen=True)
class Terms:
    """How the lease is held.

    Attributes:
        options: Lengths of the lease and of its parts.
        standby: Whether to wait while another host has the run.
        max_attempts: After how many the run stays failed.
    """

    options: SchedulerOptions
    standby: bool
    max_attempts: int


class LeaseTurn:
    """The turn of one host.

    Args:
        backend: The store, open.
        order: What is to be executed.
        terms: How the lease is held.
        asking: Asks the store.
    """

    def __init__(self, backend: LeaseBackend, order: Order, terms: Terms, asking: Asking) -> None:
        self._backend = backend
        self._order = order
        self._terms = terms
        self._asking = asking
        self._clock = asking.clock
        self._holder = secrets.token_hex(6)
        self._takeover_ms = terms.options.takeover_ms(order.window_ms)

    def run(self) -> int:
        """Execute what this host wins; return the status of the last command, or 0.

        Raises:
            CommandError: The store did not answer in time, or refused the run.
        """
        stop, standby = self._asking.stop, self._terms.standby
        own = self._order.due_run(self._clock.now_ms())
        end_ms = own.scheduled_ms + self._order.window_ms
        if standby:
            end_ms += self._takeover_ms
        stamp = JobStamp(own.job, fingerprint(self._order.schedule, 0))
        self._asking.until(end_ms, lambda: self._backend.register([stamp]), NOT_ASKED)
        status = 0
        while not stop.asked.is_set():
            if (won := self._older(own, end_ms)) is not None:
                status = self._executed(*won)
                continue
            reply, sent_ms = self._claimed(own, end_ms)
            if reply.lease is not None:
                return self._executed(reply.lease, sent_ms)
            if reply.verdict is Verdict.REJECTED:
                message = f"{own.job!r} of {_shown(own)} was refused: {reply.reason}"
                raise CommandError(message)
            later = reply.verdict is Verdict.EARLY or (standby and reply.verdict in _OTHERS)
            if not later:
                self._asking.say(f"{own.job!r} of {_shown(own)}: {_text_of(reply)}")
                return status
            self._asking.wait(min(max(1, reply.wait_ms), ASK_MS))
        return stop.status

    # -- claims ------------------------------------------------------------------------------------

    def _older(self, own: RunKey, end_ms: int) -> Optional[tuple[Lease, int]]:
        """Claim what was left behind of this job; return a lease and when it was asked for.

        A run whose host failed, and one that was handed over, goes before a later one.
        """
        pending = self._asking.until(
            end_ms, lambda: self._backend.pending([own.job], PENDING_LIMIT), NOT_ASKED
        )
        for key in pending.keys:
            if key.job == own.job and key.scheduled_ms < own.scheduled_ms:
                reply, sent_ms = self._claimed(key, end_ms)
                if reply.lease is not None:
                    return reply.lease, sent_ms
        return None

    def _claimed(self, key: RunKey, end_ms: int) -> tuple[LeaseReply, int]:
        """Ask once for a run, until there is an answer; return also when that was asked."""
        age_ms = self._clock.now_ms() - key.scheduled_ms
        claim = LeaseClaim(
            key=key,
            due_ms=key.scheduled_ms,
            holder=self._holder,
            decision_id=secrets.token_hex(16),
            lease_ms=self._terms.options.lease_ms,
            max_attempts=self._terms.max_attempts,
            on_overlap=OnOverlap.SKIP if age_ms <= ON_TIME_MS else OnOverlap.DEFER,
            max_age_ms=self._order.window_ms,
            takeover_ms=self._takeover_ms,
        )
        sent_ms = 0

        def ask() -> LeaseReply:
            nonlocal sent_ms
            sent_ms = self._clock.steady_ms()
            (reply,) = self._backend.claim([claim])
            return reply

        return self._asking.until(end_ms, ask, NOT_ASKED), sent_ms

    # -- the command -------------------------------------------------------------------------------

    def _executed(self, lease: Lease, sent_ms: int) -> int:
        """Execute the command, with a heartbeat, and report how it ended."""
        asking, key = self._asking, lease.ref.key
        holding = Holding(self._backend, lease, self._terms.options, sent_ms)
        asking.say(f"{key.job!r} of {_shown(key)}: won, attempt {lease.attempt}")
        environment = self._order.environment(key, attempt=lease.attempt, token=lease.ref.token)
        child = asking.stop.start(lambda: Child(self._order.command, environment))
        ending, code = Ending(), None
        began_ms = self._clock.steady_ms()
        while code is None:
            code = child.wait(min(LOOK_MS, holding.beat_ms - self._clock.steady_ms()))
            steady_ms = self._clock.steady_ms()
            if code is None:
                holding.step(steady_ms)
                if holding.is_lost(self._clock.steady_ms()):
                    ending.begin(child, Reason.LEASE_LOST.value, self._clock.steady_ms())
                elif self._order.is_over_after(steady_ms - began_ms):
                    ending.begin(child, Reason.TIME_LIMIT.value, steady_ms)
                ending.step(child, self._clock.steady_ms())
        asking.stop.child = None
        return self._reported(lease, holding, ending, code)

    def _reported(self, lease: Lease, holding: Holding, ending: Ending, code: int) -> int:
        """Tell the store how the command ended; return the status of this process."""
        if ending.reason == Reason.TIME_LIMIT.value:
            outcome, reason, status = Outcome.FAILED, ending.reason, TIME_OVER
        elif code == 0:
            outcome, reason, status = Outcome.FINISHED, "", 0
        elif self._asking.stop.asked.is_set():
            outcome, reason, status = Outcome.HANDED_OVER, "ended by a signal", code
        else:
            outcome, reason, status = Outcome.FAILED, f"exit status {code}", code
        lost = f"the lease of {lease.ref.key.job!r} was lost: another host may execute it again"
        if holding.refused:
            complain(lost)
            return LOST_LEASE
        settlement = Settlement(outcome, reason, RETRY_DELAY_MS)
        end_ms = self._clock.now_ms() + self._takeover_ms
        try:
            reply = self._asking.until(
                end_ms,
                lambda: self._backend.settle(lease.ref, settlement),
                "how the command ended could not be told to the store",
            )
        except (CommandError, StoreError) as error:
            complain(f"{error}; status {code}")
            return status or LOST_LEASE
        if not reply.accepted or ending.reason == Reason.LEASE_LOST.value:
            complain(lost)
            return LOST_LEASE
        return status


class Holding:
    """Keeps a lease.

    Args:
        backend: The store.
        lease: The lease.
        options: Lengths of the lease and of its parts.
        sent_ms: Steady time at which it was asked for.

    Attributes:
        beat_ms: Steady time of the next heartbeat.
        refused: Whether the store has refused one.
    """

    def __init__(
        self, backend: LeaseBackend, lease: Lease, options: SchedulerOptions, sent_ms: int
    ) -> None:
        self._backend = backend
        self._ref = lease.ref
        self._options = options
        self._trusted_ms = sent_ms + lease.left_ms - options.margin_ms
        self.beat_ms = sent_ms + options.heartbeat_ms
        self.refused = False

    def step(self, steady_ms: int) -> None:
        """Send a heartbeat if it is time."""
        if steady_ms < self.beat_ms or self.refused:
            return
        lease_ms = self._options.lease_ms
        try:
            (reply,) = self._backend.renew([self._ref], lease_ms)
        except StoreError:  # trust ends by itself if that goes on
            self.beat_ms = steady_ms + min(RETRY_BEAT_MS, self._options.heartbeat_ms)
            return
        self.beat_ms = steady_ms + self._options.heartbeat_ms
        if reply is RenewReply.RENEWED:
            self._trusted_ms = steady_ms + lease_ms - self._options.margin_ms
        else:
            self.refused = True

    def is_lost(self, steady_ms: int) -> bool:
        """Tell whether another host may have the run, or have it soon."""
        return self.refused or steady_ms >= self._trusted_ms


def _text_of(reply: LeaseReply) -> str:
    words = [reply.verdict.value.replace("_", " ")]
    if reply.state is not None:
        words.append(reply.state.value)
    if reply.reason:
        words.append(reply.reason)
    return ", ".join(words)


def _shown(key: RunKey) -> str:
    return moment(key.scheduled_ms).isoformat()
