"""A claim backend in RabbitMQ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Callable, ClassVar, Optional

from leasecron_sync.backends._lanes import Deadline, Lane, close_lane
from leasecron_sync.backends._once import judged, late
from leasecron_sync.backends._rabbitmq_gates import EXPIRES_MS, Gate, Outcome, decide
from leasecron_sync.backends._rabbitmq_link import Link
from leasecron_sync.backends._rabbitmq_place import gate_name, place_of_url
from leasecron_sync.backends._rabbitmq_quiet import filter_pika
from leasecron_sync.backends._rabbitmq_words import ACCESS_REFUSED
from leasecron_sync.backends.base import BackendSettings, ClaimBackend
from leasecron_sync.clock import SystemClock
from leasecron_sync.errors import (
    MissingDependency,
    StoreRejected,
    StoreUnavailable,
    StoreUnsupported,
)
from leasecron_sync.model import ClaimReply, OnceClaim, RunKey, StoreInfo, Verdict

_clock = SystemClock()

STUCK_MS = 15_000
"""So long nothing is asked of a gate that did not answer: each try holds up all others."""

NOT_ASKED_MS = 1_000
"""When to ask again for what could not be asked for."""

TEND_MS = 20_000
"""The connection is looked after this often, and three times in each interval of heartbeats."""

GRANT = r"rabbitmqctl set_permissions -p VHOST USER 'leasecron\..*' 'amq\.default' ''"
"""What gives a user the rights that are needed. Who that is stays out of logs."""


class RabbitMQClaim(ClaimBackend):
    """Picks one winner for each run through RabbitMQ, and can do no more.

    Nothing records that a winner stopped: a run whose winner crashed is lost. Where the answer of
    the broker is lost, nobody can find out who won: the run is reported as missed and not executed.

    For each run there is a *gate*: a durable classic queue that has room for one message and
    rejects every further one. It goes ten minutes after the last instance asked for its run, which
    bounds ``claim_window_ms`` to 300,000. Until then each gate costs the broker some tens of
    kilobytes and a file descriptor. There is no clock in it: early and too old are judged by the
    host's clock.

    Whoever consumes from a gate, purges or deletes it, or has a policy that expires its message,
    lets its run be won again.

    Args:
        url: Such as ``amqp://user:password@host:5672/vhost``, or ``amqps://`` for an encrypted
            connection. Parameters: ``heartbeat`` in seconds, and ``cacertfile``, ``certfile``,
            ``keyfile``, ``verify`` and ``server_name_indication`` with ``amqps``.

    Raises:
        TypeError: ``url`` is not text.
        ValueError: It is wrong.
    """

    name: ClassVar[str] = "rabbitmq-claim"

    max_window_ms = EXPIRES_MS // 2

    # Tests put a reading of their own here; else the host's clock is read.
    _now_ms: Callable[[], int] = _clock.now_ms

    def __init__(self, url: str) -> None:
        if not isinstance(url, str):  # pyright: ignore[reportUnnecessaryIsInstance] - untyped callers
            message = (
                "RabbitMQClaim needs a URL such as 'amqp://user:password@host:5672/vhost', not "
                f"{type(url).__name__}"
            )
            raise TypeError(message)
        self._place = place_of_url(url)
        self._label = self._place.label
        self._settings: Optional[BackendSettings] = None
        self._pika: Any = None
        # What became of this object's own decisions, and until which steady time that matters: the
        # broker does not tell them from others'.
        self._own: dict[str, tuple[Outcome, int]] = {}
        # Until which steady time each gate is left alone that did not answer.
        self._stuck: dict[str, int] = {}
        # pika's objects belong to one thread: the timer's, after the probe of the start.
        self._lane: Lane[Link] = Lane(Link.close)

    def __repr__(self) -> str:
        """Show the place without user and password."""
        return f"RabbitMQClaim({self._label!r})"

    def open(self, settings: BackendSettings) -> None:
        try:
            import pika
        except ImportError as error:
            message = "RabbitMQClaim needs the package pika: pip install 'leasecron_sync[rabbitmq]'"
            raise MissingDependency(message) from error
        filter_pika()
        self._pika, self._settings = pika, settings

    def close(self) -> None:
        self._settings = None
        close_lane(self._lane)

    def discard(self) -> None:
        self._settings = None
        self._lane.abandon()
        self._lane = Lane(Link.close)

    def probe(self) -> StoreInfo:
        queue, deadline = self.probe_queue(), self._deadline()
        gates = [Gate(queue, b"first", always=True), Gate(queue, b"second", always=True)]
        with self._lane.held(deadline):
            link = self._link(deadline)
            try:
                for gate in gates:  # the queue goes with the connection, whatever happens now
                    self._put([gate], deadline, durable=False, exclusive=True)
                if link.is_blocked or not link.is_sound or not link.delete(queue, deadline):
                    link.suspect()
            finally:
                self._drop_if_lost()
        first, second = gates
        for gate in gates:
            if gate.outcome is Outcome.REFUSED:
                message = (
                    f"{self._label} does not let this user make a queue and write to it: "
                    f"{gate.reason}: `{GRANT}` lets it"
                )
                raise StoreUnsupported(message)
            if gate.outcome not in (Outcome.WON, Outcome.LOST):
                raise link.why()
        if (first.outcome, second.outcome) != (Outcome.WON, Outcome.LOST):
            message = (
                f"{self._label}: of two messages for a queue that has room for one, "
                f"{_number(gates)} got in: a policy of the broker changes what queues do, so that "
                "nobody could be told who was first (`rabbitmqctl list_policies` and "
                "`list_operator_policies` show them)"
            )
            raise StoreUnsupported(message)
        return StoreInfo(link.version)

    def claim(self, claims: Sequence[OnceClaim]) -> Sequence[ClaimReply]:
        settings, deadline = self._opened(), self._deadline()
        judged_ms, steady_ms = self._now_ms(), _clock.steady_ms()
        replies = [judged(claim, judged_ms) for claim in claims]
        gates = {
            place: Gate(gate_name(settings.namespace, claim.key), claim.decision_id.encode())
            for place, claim in enumerate(claims)
            if replies[place] is None
        }
        for place, gate in gates.items():
            gate.outcome = self._own.get(claims[place].decision_id, (None, 0))[0]
            if gate.outcome is None and self._stuck.get(gate.queue, 0) > steady_ms:
                gate.outcome, gate.reason = Outcome.NOT_ASKED, "its queue does not answer"
        new = [gate for gate in gates.values() if gate.outcome is None]
        try:
            if new:
                self._decide(new, deadline)
        finally:
            self._remember(gates, claims)
        now_ms = judged_ms + _clock.steady_ms() - steady_ms
        for place, gate in gates.items():
            replies[place] = _reply(gate, claims[place], now_ms)
        return [reply for reply in replies if reply is not None]

    def _decide(self, gates: list[Gate], deadline: Deadline) -> None:
        """Find out who is first in each.

        Raises:
            StoreError: Nothing was published.
        """
        with self._lane.held(deadline):
            link = self._link(deadline)
            try:
                self._put(gates, deadline)
            finally:
                self._drop_if_lost()
        # What has a reason of its own does not keep others from being decided.
        if all(gate.outcome is Outcome.NOT_ASKED and not gate.reason for gate in gates):
            raise link.why()
        undecided = (Outcome.NOT_ASKED, Outcome.REFUSED)
        if gates[0].code == ACCESS_REFUSED and all(gate.outcome in undecided for gate in gates):
            message = f"{self._label}: {gates[0].reason}"
            raise StoreRejected(message)

    def _put(self, gates: list[Gate], deadline: Deadline, **options: bool) -> None:
        assert self._lane.connection is not None
        decide(self._lane.connection, gates, deadline, **options)

    def _remember(self, gates: Mapping[int, Gate], claims: Sequence[OnceClaim]) -> None:
        now_ms = _clock.steady_ms()
        for decision_id, (_outcome, until_ms) in list(self._own.items()):
            if until_ms >= now_ms:
                break
            del self._own[decision_id]
        self._stuck = {queue: ms for queue, ms in self._stuck.items() if ms > now_ms}
        for place, gate in gates.items():
            if gate.is_stuck:
                self._stuck[gate.queue] = now_ms + STUCK_MS
            if gate.outcome in (Outcome.WON, Outcome.UNKNOWN):
                until_ms = now_ms + 2 * claims[place].window_ms
                self._own[claims[place].decision_id] = (gate.outcome, until_ms)

    def tend(self) -> Optional[int]:
        """Keep the connection alive, or make it anew, so that it stands when runs fall due."""
        if self._settings is None:
            return None
        deadline = self._deadline()
        with self._lane.held(deadline):
            link = self._link(deadline)
            try:
                link.tend()
            finally:
                self._drop_if_lost()
            heartbeat_ms = link.heartbeat_ms
        return TEND_MS if heartbeat_ms is None else max(100, min(heartbeat_ms // 3, TEND_MS))

    # -- for who looks -----------------------------------------------------------------------------

    def connected(self, deadline: Deadline) -> Link:
        """Return a connection for who looks, which is not this object's.

        Raises:
            StoreError: There is none.
        """
        return Link(self._pika, self._place, deadline)

    def probe_queue(self) -> str:
        """Return the name of a queue for trials, which nobody else has."""
        settings = self._opened()
        # Named like a gate, so that whatever policy is meant for gates holds for it, too.
        return gate_name(settings.namespace, RunKey(f"probe {settings.instance_id}", 0))

    # -- the connection ----------------------------------------------------------------------------

    def _opened(self) -> BackendSettings:
        if self._settings is None:
            message = f"{self._label} is closed"
            raise StoreUnavailable(message)
        return self._settings

    def _deadline(self) -> Deadline:
        return Deadline(self._opened().call_timeout_ms)

    def _link(self, deadline: Deadline) -> Link:
        """Return the connection, a new one where there is none that can be used."""
        if self._lane.connection is not None and not self._lane.connection.is_fresh():
            self._lane.drop()
        if self._lane.connection is None:
            self._lane.connection = Link(self._pika, self._place, deadline)
        return self._lane.connection

    def _drop_if_lost(self) -> None:
        link = self._lane.connection
        if link is not None and (self._settings is None or not link.is_sound):
            self._lane.drop()


def _reply(gate: Gate, claim: OnceClaim, now_ms: int) -> ClaimReply:
    if gate.outcome is Outcome.WON:
        return ClaimReply(Verdict.TOO_OLD if late(claim, now_ms) else Verdict.GRANTED)
    if gate.outcome is Outcome.LOST:
        return ClaimReply(Verdict.TAKEN)
    if gate.outcome is Outcome.UNKNOWN:
        return ClaimReply(Verdict.UNKNOWN)
    if gate.outcome is Outcome.REFUSED:
        return ClaimReply(Verdict.REJECTED, reason=gate.reason)
    return ClaimReply(Verdict.DEFERRED, NOT_ASKED_MS)


def _number(gates: Sequence[Gate]) -> int:
    return sum(gate.outcome is Outcome.WON for gate in gates)
