"""Watches a command until it has ended, and ends it when it may go on no longer."""

from __future__ import annotations

import signal
import threading
from typing import Final, NamedTuple, Optional

from leasecron_sync.backends.base import LeaseBackend
from leasecron_sync.cli._exec_child import KILL_AFTER_MS, Child
from leasecron_sync.cli._exec_turn import Asking, Order, Stop, shown
from leasecron_sync.cli.output import complain
from leasecron_sync.clock import Clock
from leasecron_sync.errors import StoreError
from leasecron_sync.model import Lease, Reason, RenewReply, RunKey
from leasecron_sync.options import SchedulerOptions

LOOK_MS: Final = 250
"""How late a signal of the store that the lease is lost may be noticed."""

GIVE_UP_MS: Final = 1_000
"""How long the rest of a process group is waited for after SIGKILL."""

GROUP_LOOK_MS: Final = 20
RETRY_BEAT_MS: Final = 1_000


class End(NamedTuple):
    """How a command has ended.

    Attributes:
        code: Its status, as a shell would tell it.
        reason: Why it was ended from here; None when it was not.
    """

    code: int
    reason: Optional[Reason]

    def tell(self, asking: Asking, order: Order, key: RunKey) -> None:
        """Say how it ended; of the time limit also where nobody asked for it.

        The status of a command that the limit has ended is not the one of this process.
        """
        if self.reason is Reason.TIME_LIMIT:
            assert order.time_limit_ms is not None
            complain(f"{shown(key)}: ended by --time-limit {order.time_limit_ms / 1000:g}")
        else:
            asking.say(f"{shown(key)}: the command ended with status {self.code}")


class Holding:
    """Keeps a lease, on a thread of its own: a call that hangs hides neither time nor the command.

    Args:
        backend: The store.
        lease: The lease.
        options: Lengths of the lease and of its parts.
        clock: The clock.
        sent_ms: Steady time at which it was asked for.

    Attributes:
        refused: Whether the store has refused to renew it.
    """

    def __init__(
        self,
        backend: LeaseBackend,
        lease: Lease,
        options: SchedulerOptions,
        clock: Clock,
        sent_ms: int,
    ) -> None:
        self._backend = backend
        self._ref = lease.ref
        self._options = options
        self._clock = clock
        # Never more than a whole lease: after a clock was set back the store may show more.
        left_ms = min(lease.left_ms, options.lease_ms)
        self._trusted_ms = sent_ms + left_ms - options.margin_ms
        # A lease may have come with little time left, after an answer that was lost.
        self._next_ms = min(
            sent_ms + options.heartbeat_ms, self._trusted_ms - options.call_timeout_ms
        )
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="leasecron-heartbeat", daemon=True)
        self.refused = False

    def __enter__(self) -> Holding:
        self._thread.start()
        return self

    def __exit__(self, *details: object) -> None:
        self._over.set()
        self._thread.join(self._options.call_timeout_ms / 1000)

    def left_ms(self) -> int:
        """Return for how long no other host can have the run; 0 or less when one may."""
        return 0 if self.refused else self._trusted_ms - self._clock.steady_ms()

    def _beat(self) -> None:
        while not self.refused:
            if self._over.wait(max(0, self._next_ms - self._clock.steady_ms()) / 1000):
                return
            self._renew()

    def _renew(self) -> None:
        """Make one call, and say when the next one is due."""
        options, sent_ms = self._options, self._clock.steady_ms()
        try:
            (reply,) = self._backend.renew([self._ref], options.lease_ms)
        except StoreError:  # trust ends by itself if that goes on
            pause_ms = min(RETRY_BEAT_MS, options.heartbeat_ms // 4)
            self._next_ms = self._clock.steady_ms() + pause_ms
            return
        self._next_ms = sent_ms + options.heartbeat_ms
        if reply is RenewReply.RENEWED:
            # Counted from before the call was sent: the store cannot have renewed it earlier.
            self._trusted_ms = sent_ms + options.lease_ms - options.margin_ms
        else:
            self.refused = True


class Watch:
    """Watches one command.

    Args:
        child: The command.
        stop: Whether somebody else has told it to end.
        clock: The clock.
        limit_ms: How long it may take; None for any time.
        holding: Its lease, where it has one.
    """

    def __init__(
        self,
        child: Child,
        stop: Stop,
        clock: Clock,
        limit_ms: Optional[int],
        holding: Optional[Holding] = None,
    ) -> None:
        self._child = child
        self._stop = stop
        self._clock = clock
        self._holding = holding
        self._limit_ms = None if limit_ms is None else clock.steady_ms() + limit_ms
        self._kill_ms: Optional[int] = None
        self._reason: Optional[Reason] = None
        self._told = False

    def until_end(self) -> End:
        """Wait for the end of the command, and of its group where it was told to end."""
        try:
            while (code := self._child.wait(self._look_ms())) is None:
                self._judge()
            # Who finished in spite of a signal has left behind what it meant to leave. Otherwise
            # the run may begin elsewhere, and nothing of it may go on here.
            if self._reason is not None or (self._stop.passed and code != 0):
                self._end_group()
        finally:
            self._stop.child = None
            self._child.release()
        return End(code, self._reason)

    def _look_ms(self) -> int:
        now_ms, looks = self._clock.steady_ms(), [LOOK_MS]
        if self._kill_ms is not None:
            looks.append(self._kill_ms - now_ms)
        elif self._limit_ms is not None:
            looks.append(self._limit_ms - now_ms)
        if self._holding is not None and self._reason is None:
            looks.append(self._holding.left_ms())
        return max(1, min(looks))

    def _judge(self) -> None:
        now_ms = self._clock.steady_ms()
        if self._reason is None and self._holding is not None and self._holding.left_ms() <= 0:
            self._begin(Reason.LEASE_LOST, now_ms)
        elif self._reason is None and self._limit_ms is not None and now_ms >= self._limit_ms:
            self._begin(Reason.TIME_LIMIT, now_ms)
        if self._kill_ms is not None and now_ms >= self._kill_ms:
            self._child.kill()
        if self._child.denied and not self._told:
            self._told = True
            complain("the command runs as another user: it cannot be sent signals from here")

    def _begin(self, reason: Reason, now_ms: int) -> None:
        self._reason, self._kill_ms = reason, now_ms + KILL_AFTER_MS
        self._child.send(signal.SIGTERM)

    def _end_group(self) -> None:
        kill_ms = self._kill_ms or self._clock.steady_ms() + KILL_AFTER_MS
        if not self._group_ends(kill_ms):
            self._child.kill()
            self._group_ends(self._clock.steady_ms() + GIVE_UP_MS)

    def _group_ends(self, until_ms: int) -> bool:
        never = threading.Event()
        while not (gone := self._child.is_gone()) and self._clock.steady_ms() < until_ms:
            self._clock.wait(never, GROUP_LOOK_MS)
        return gone
