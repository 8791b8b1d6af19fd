"""Executes a command under a lease: renewed while it runs, taken over when its host fails."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import Final, NamedTuple, Optional

from leasecron_sync.backends.base import LeaseBackend
from leasecron_sync.cli._exec_child import Child
from leasecron_sync.cli._exec_turn import (
    CANNOT_RUN,
    LOST_LEASE,
    TIME_OVER,
    Asking,
    Order,
    shown,
)
from leasecron_sync.cli._exec_watch import End, Holding, Watch
from leasecron_sync.cli.output import CommandError, complain
from leasecron_sync.engine.worker import retry_delay_ms
from leasecron_sync.errors import StoreError
from leasecron_sync.model import (
    JobStamp,
    Lease,
    LeaseClaim,
    LeaseReply,
    OnOverlap,
    Outcome,
    Reason,
    RunKey,
    RunState,
    Settlement,
    Verdict,
)
from leasecron_sync.options import MAX_WAIT_MS, ON_TIME_MS, PRUNE_LIMIT, SchedulerOptions
from leasecron_sync.schedule import fingerprint

ASK_MS: Final = 1_000
"""How often a standby looks whether the run has become free."""

LEAST_ASK_MS: Final = 50
"""How long it waits at least, whatever the store says."""

RETRY_DELAY_MS: Final = 1_000
OLDER_LIMIT: Final = 10
"""How many runs that were left behind are looked at before the current one."""

BY_SIGNAL: Final = "ended by a signal"

_OTHERS = frozenset({Verdict.HELD, Verdict.WAITING, Verdict.DEFERRED})
"""Answers after which the run may still fall to this host."""


@dataclass(frozen=True)
class Terms:
    """How the lease is held.

    Attributes:
        options: Lengths of the lease and of its parts.
        standby: Whether to wait while another host has the run.
        max_attempts: After how many the run stays failed.
        holder: Who holds it, for people.
    """

    options: SchedulerOptions
    standby: bool
    max_attempts: int
    holder: str


class Won(NamedTuple):
    """A granted run.

    Attributes:
        lease: Its lease.
        sent_ms: Steady time at which it was asked for.
    """

    lease: Lease
    sent_ms: int


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
        self._began_ms = self._patient_until_ms = self._clock.steady_ms()
        self._takeover_ms = terms.options.takeover_ms(order.window_ms)
        self._sent_ms = 0

    def run(self) -> int:
        """Execute what this host wins; return the status of its command, or 0.

        A run that was left behind goes first; if it fails and the current one does not, its status
        counts.

        Raises:
            CommandError: The store did not answer in time, or refused the run.
        """
        stop = self._asking.stop
        own = self._order.due_run(self._clock.now_ms())
        self._patient_until_ms += own.scheduled_ms + self._order.window_ms - self._clock.now_ms()
        self._asking.meet(self._patience_ms(), self._backend)
        stamp = JobStamp(own.job, fingerprint(self._order.schedule, 0))
        self._asking.ask(self._patience_ms(), lambda: self._backend.register([stamp]))
        status: Optional[int] = None
        while not stop.asked:
            won = self._older(own)
            if won is not None:
                before_ms = self._clock.steady_ms()
                status = self._executed(won) or status
                self._patient_until_ms += self._clock.steady_ms() - before_ms
                continue
            reply = self._claimed(own)
            if reply.lease is not None:
                code = self._executed(Won(reply.lease, self._sent_ms))
                if code is not None:
                    return code or status or 0
            elif not self._may_come(own, reply):
                return status or self._status_of(own, reply)
            else:
                most_ms = MAX_WAIT_MS if reply.verdict is Verdict.EARLY else ASK_MS
                stop.wait(max(LEAST_ASK_MS, min(reply.wait_ms, most_ms)))
        return stop.status if status is None else status

    # -- claims ------------------------------------------------------------------------------------

    def _patience_ms(self) -> int:
        """Return how long the store may be silent: until the window is over, if nobody has the run.

        What the command took that went first is not counted.
        """
        left_ms = self._patient_until_ms - self._clock.steady_ms()
        return max(left_ms, self._takeover_ms) if self._terms.standby else left_ms

    def _older(self, own: RunKey) -> Optional[Won]:
        """Claim what was left behind of this job.

        A run whose host failed, and one that was handed over, goes before a later one. One that
        nobody may begin any more is settled by the claim, and stands in the way no longer.
        """
        for _number in range(OLDER_LIMIT):
            pending = self._asking.ask(
                self._patience_ms(), lambda: self._backend.pending([own.job], OLDER_LIMIT)
            )
            older = [key for key in pending.keys if key.scheduled_ms < own.scheduled_ms]
            if not older:
                return None
            reply = self._claimed(older[0])
            if reply.lease is not None:
                return Won(reply.lease, self._sent_ms)
            if not reply.fresh:  # another host was quicker
                return None
            self._status_of(older[0], reply)
        return None

    def _claimed(self, key: RunKey) -> LeaseReply:
        """Ask once for a run, until there is an answer."""
        late = self._clock.now_ms() - key.scheduled_ms > ON_TIME_MS
        claim = LeaseClaim(
            key=key,
            due_ms=key.scheduled_ms,
            holder=self._terms.holder,
            decision_id=secrets.token_hex(16),
            lease_ms=self._terms.options.lease_ms,
            max_attempts=self._terms.max_attempts,
            # Only a standby waits until the other one has ended.
            on_overlap=OnOverlap.DEFER if late and self._terms.standby else OnOverlap.SKIP,
            # The window is judged when this process begins, not after it has waited its turn.
            max_age_ms=self._order.window_ms + self._clock.steady_ms() - self._began_ms,
            takeover_ms=self._takeover_ms,
        )

        def ask() -> LeaseReply:
            self._sent_ms = self._clock.steady_ms()
            (reply,) = self._backend.claim([claim])
            return reply

        return self._asking.ask(self._patience_ms(), ask)

    def _may_come(self, own: RunKey, reply: LeaseReply) -> bool:
        """Tell whether the run may still fall to this host, and is worth waiting for."""
        if reply.verdict is Verdict.EARLY:
            self._order.check_wait(own, reply.wait_ms)
            self._asking.say(f"{shown(own)}: not due for {reply.wait_ms} ms by the store's clock")
            return True
        return self._terms.standby and reply.verdict in _OTHERS

    def _status_of(self, key: RunKey, reply: LeaseReply) -> int:
        """Tell what became of a run that this host does not execute; return a status.

        What this very claim has decided nobody else tells.

        Raises:
            CommandError: It was refused, or is too old.
        """
        if reply.verdict is Verdict.REJECTED:
            message = f"{shown(key)} was refused: {reply.reason}"
            raise CommandError(message)
        if reply.verdict is Verdict.TOO_OLD:
            raise self._order.too_old(key)
        if reply.fresh and reply.state is RunState.FAILED:
            complain(f"{shown(key)} has failed: {reply.reason}")
            return 1
        self._asking.say(f"{shown(key)}: {_text_of(reply)}")
        return 0

    # -- the command -------------------------------------------------------------------------------

    def _executed(self, won: Won) -> Optional[int]:
        """Execute the command, with a heartbeat, and report how it ended.

        Returns:
            The status; None when it was not begun, and the run is open to all hosts again.
        """
        asking, lease = self._asking, won.lease
        key = lease.ref.key
        environment = self._order.environment(key, attempt=lease.attempt, token=lease.ref.token)
        with Holding(
            self._backend, lease, self._terms.options, self._clock, won.sent_ms
        ) as holding:
            if asking.stop.asked or holding.left_ms() <= 0:
                self._hand_back(lease, BY_SIGNAL if asking.stop.asked else "granted too late")
                return asking.stop.status if asking.stop.asked else None
            asking.say(f"{shown(key)}: won, attempt {lease.attempt}")
            try:
                child = asking.stop.start(
                    lambda mask: Child(self._order.command, environment, mask)
                )
            except OSError as error:
                complain(f"{shown(key)} goes to another host, no process can be started: {error}")
                self._hand_back(lease, "no process could be started")
                return CANNOT_RUN
            limit_ms = self._order.time_limit_ms
            end = Watch(child, asking.stop, self._clock, limit_ms, holding).until_end()
            end.tell(asking, self._order, key)
            status = self._reported(lease, end, refused=holding.refused)
        self._prune()
        return status

    def _reported(self, lease: Lease, end: End, *, refused: bool) -> int:
        """Tell the store how the command ended; return the status of this process."""
        lost = f"the lease of {shown(lease.ref.key)} was lost: another host may execute it again"
        if refused:
            complain(lost)
            return LOST_LEASE
        settlement, status = self._judged(lease, end)
        try:
            reply = self._asking.tell(
                self._takeover_ms, lambda: self._backend.settle(lease.ref, settlement)
            )
        except (CommandError, StoreError) as error:
            by_limit = end.reason is Reason.TIME_LIMIT  # that has been told, with another status
            complain(str(error) if by_limit else f"{error}; it ended with status {end.code}")
            return status or LOST_LEASE
        if not reply.accepted:
            complain(lost)
            return LOST_LEASE
        if end.reason is Reason.LEASE_LOST:
            complain(
                f"the lease of {shown(lease.ref.key)} was lost for a while, so the command was "
                f"told to end; it ended with status {end.code}, and the run is {_word(reply.state)}"
            )
            return LOST_LEASE
        return status

    def _judged(self, lease: Lease, end: End) -> tuple[Settlement, int]:
        """Return what the store is told, and the status that goes with it."""
        delay_ms = retry_delay_ms(lease, RETRY_DELAY_MS)
        if end.reason is Reason.TIME_LIMIT:
            return Settlement(Outcome.FAILED, end.reason.value, delay_ms), TIME_OVER
        if end.code == 0:
            return Settlement(Outcome.FINISHED), 0
        if end.reason is not None:
            return Settlement(Outcome.FAILED, end.reason.value, delay_ms), LOST_LEASE
        if self._asking.stop.passed:
            return Settlement(Outcome.HANDED_OVER, BY_SIGNAL), end.code
        return Settlement(Outcome.FAILED, f"exit status {end.code}", delay_ms), end.code

    def _hand_back(self, lease: Lease, reason: str) -> None:
        """Leave a run that was not begun to others; if the store does not hear it, in a lease."""
        settlement = Settlement(Outcome.HANDED_OVER, reason)
        try:
            self._asking.tell(lease.left_ms, lambda: self._backend.settle(lease.ref, settlement))
        except (CommandError, StoreError) as error:
            self._asking.say(str(error))

    def _prune(self) -> None:
        """Delete a portion of what is older than the history; who executes a run does that."""
        if self._asking.stop.asked:
            return
        least_ms = self._order.window_ms + self._takeover_ms
        older_than_ms = max(self._terms.options.history_ms, least_ms)
        try:
            pruned = self._backend.prune(older_than_ms, PRUNE_LIMIT)
        except StoreError as error:  # the next run's does it
            self._asking.say(f"old records stay: {error}")
            return
        for key in pruned.abandoned:
            complain(f"{shown(key)} has failed: {Reason.ABANDONED.value}")


def _text_of(reply: LeaseReply) -> str:
    words = [reply.verdict.value.replace("_", " ")]
    if reply.state is not None:
        words.append(reply.state.value)
    if reply.reason:
        words.append(reply.reason)
    return ", ".join(words)


def _word(state: Optional[RunState]) -> str:
    return "unknown" if state is None else state.value
