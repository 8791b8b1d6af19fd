"""One connection to RabbitMQ, moved by the calls that use it: no thread, and no wait without end.

pika's blocking connection waits without an end for a broker that falls silent. Its asynchronous one
does not: the loop behind it is run here until a call has what it wants, or no time is left.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any, Callable, Optional

from leasecron_sync.backends._lanes import Deadline
from leasecron_sync.backends._rabbitmq_place import Place
from leasecron_sync.backends._rabbitmq_sockets import Sockets, reason_of
from leasecron_sync.errors import StoreError, StoreUnavailable, StoreUnsupported

EXPIRES_MS = 600_000
"""How long a gate stays after the last instance declared it. A constant of the format: a queue that
is declared with another value is refused."""

ARGUMENTS = {
    "x-queue-type": "classic",  # of a quorum queue several publishers are told that they were first
    "x-max-length": 1,
    "x-overflow": "reject-publish",
    "x-expires": EXPIRES_MS,
}

CLOSE_MS = 200
TEND_MS = 10
"""How long it is looked after between calls: what came in is read, heartbeats go out."""

MAX_CHANNELS = 10
"""How often one call opens another channel after the broker closed one."""

_ACCESS_REFUSED, _NOT_FOUND, _PRECONDITION_FAILED, _NOT_ALLOWED = 403, 404, 406, 530


class Outcome(Enum):
    """What became of one gate."""

    WON = "won"
    LOST = "lost"
    NOT_ASKED = "not asked"  # nothing was published
    UNKNOWN = "unknown"  # published, and no answer
    REFUSED = "refused"


@dataclass
class Gate:
    """A gate, and how far a call has come with it.

    Attributes:
        queue: Its name.
        body: The message to put into it.
        always: Whether to try it also where there is a message already.
        tag: Delivery tag of the message, once it is published.
        outcome: What became of it.
        reason: Why it was refused.
    """

    queue: str
    body: bytes
    always: bool = False
    tag: Optional[int] = None
    outcome: Optional[Outcome] = None
    reason: str = ""


class Link:
    """A connection that is open.

    Args:
        pika: The module.
        place: Where the broker is.
        deadline: By when it must be open.

    Raises:
        StoreError: It could not be opened.
    """

    def __init__(self, pika: Any, place: Place, deadline: Deadline) -> None:  # noqa: ANN401 - a late import
        self._pika = pika
        self._label = place.label
        loops = pika.adapters.select_connection
        self._loop = loops.IOLoop()
        self._adapter = loops.SelectorIOServicesAdapter(self._loop)
        self._sockets = Sockets(self._adapter)
        self._connection: Any = None
        self._channel: Any = None
        self._lost: Optional[BaseException] = None
        self._closed_channel: Optional[BaseException] = None
        self._is_open = False
        self._blocked = False
        self._gates: dict[int, Gate] = {}
        self._returned: set[str] = set()
        try:
            self._open(place, deadline)
        except BaseException:
            self.abort()
            raise

    # -- the loop ----------------------------------------------------------------------------------

    def _run(self, until: Callable[[], bool], deadline: Deadline) -> bool:
        """Let the connection work until something holds; tell whether it does."""
        loop = self._loop
        loop.activate_poller()
        try:
            while self._lost is None and not until():
                alarm = loop.call_later(deadline.left_ms() / 1000, _wake)
                loop.poll()
                loop.process_timeouts()
                loop.remove_timeout(alarm)
                if not deadline.left_ms():
                    break
        finally:
            loop.deactivate_poller()
        return until()

    # -- making it ---------------------------------------------------------------------------------

    def _open(self, place: Place, deadline: Deadline) -> None:
        try:
            parameters = place.parameters(self._pika)
        except OSError as error:
            message = f"{self._label}: a file for the encryption cannot be used: {error}"
            raise StoreUnavailable(message) from error
        left_s = max(1, deadline.left_ms()) / 1000
        parameters.socket_timeout = parameters.stack_timeout = left_s
        parameters.connection_attempts = 1
        self._connection = self._pika.SelectConnection(
            parameters,
            on_open_callback=self._opened,
            on_open_error_callback=self._gone,
            on_close_callback=self._gone,
            custom_ioloop=self._adapter,
        )
        self._connection.add_on_connection_blocked_callback(self._set_blocked)
        self._connection.add_on_connection_unblocked_callback(self._set_unblocked)
        if not self._run(lambda: self._is_open, deadline):
            raise self._unreachable()
        self._new_channel(deadline)

    def _opened(self, _connection: Any) -> None:  # noqa: ANN401 - pika's
        self._is_open = True

    def _gone(self, _connection: Any, error: BaseException) -> None:  # noqa: ANN401 - pika's
        self._lost = error

    def _set_blocked(self, *_arguments: object) -> None:
        self._blocked = True

    def _set_unblocked(self, *_arguments: object) -> None:
        self._blocked = False

    def _unreachable(self) -> StoreError:
        error = self._lost
        if error is None:
            return StoreUnavailable(f"{self._label} cannot be reached: no answer in time")
        kinds = self._pika.exceptions
        code = getattr(error, "reply_code", None)
        if isinstance(error, (kinds.ProbableAuthenticationError, kinds.AuthenticationError)) or (
            code == _ACCESS_REFUSED
        ):
            return StoreUnavailable(f"{self._label} refuses this user or password")
        if code in (_NOT_ALLOWED, _NOT_FOUND) or isinstance(error, kinds.ProbableAccessDeniedError):
            return StoreUnsupported(
                f"{self._label}: there is no such vhost, or this user has no access to it: make it "
                "with `rabbitmqctl add_vhost` and `rabbitmqctl set_permissions`"
            )
        return StoreUnavailable(f"{self._label} cannot be reached: {reason_of(error)}")

    def _new_channel(self, deadline: Deadline) -> None:
        """Open a channel that confirms.

        Raises:
            StoreUnavailable: There is no answer.
        """
        self._channel, self._closed_channel = None, None
        self._gates.clear()
        self._returned.clear()
        confirms: list[object] = []

        def opened(channel: Any) -> None:  # noqa: ANN401 - pika's
            channel.add_on_close_callback(self._channel_closed)
            channel.add_on_return_callback(self._message_returned)
            channel.confirm_delivery(self._confirmed, callback=confirms.append)
            self._channel = channel

        self._connection.channel(on_open_callback=opened)
        if not self._run(lambda: bool(confirms), deadline):
            raise self._unreachable()

    def _channel_closed(self, channel: Any, reason: BaseException) -> None:  # noqa: ANN401 - pika's
        if channel is self._channel:
            self._closed_channel = reason

    # -- using it ----------------------------------------------------------------------------------

    @property
    def is_usable(self) -> bool:
        """Whether nothing is known that would keep it from being used."""
        return self._lost is None and self._is_open

    @property
    def version(self) -> str:
        """Name and version of the broker."""
        properties: dict[str, Any] = self._connection.server_properties or {}
        return f"{_text(properties.get('product', 'AMQP'))} {_text(properties.get('version', ''))}"

    @property
    def heartbeat_ms(self) -> Optional[int]:
        """How often it must be looked after; None for never."""
        agreed = self._connection.params.heartbeat
        return agreed * 1000 if agreed else None

    def is_fresh(self) -> bool:
        """Read what came in; tell whether the connection is still there."""
        if self.is_usable:
            self._run(_never, Deadline(0))
        return self.is_usable

    def tend(self) -> None:
        """Read what came in, and send what is due.

        Raises:
            StoreUnavailable: The connection is gone.
        """
        self._run(_never, Deadline(TEND_MS))
        if self._lost is not None:
            raise self._unreachable()

    def decide(self, gates: Sequence[Gate], deadline: Deadline, **options: bool) -> None:
        """Put each message into its gate; the outcomes are written into the gates.

        Args:
            gates: What to decide, in turn.
            deadline: When to stop waiting.
            options: Of the declaration, other than the usual ones.
        """
        waiting = list(gates)
        for _ in range(MAX_CHANNELS):
            if not waiting or not self.is_usable or not deadline.left_ms():
                break
            if self._channel is None or self._closed_channel is not None:
                try:
                    self._new_channel(deadline)
                except StoreError:
                    break
            self._on_one_channel(waiting, deadline, {"durable": True, **options})
            waiting = [gate for gate in waiting if gate.outcome is None]
        for gate in gates:
            if gate.outcome is None:
                gate.outcome = Outcome.NOT_ASKED

    def _on_one_channel(
        self, gates: list[Gate], deadline: Deadline, options: dict[str, bool]
    ) -> None:
        """Decide gates until all are, or the channel, the connection or the time is over."""
        for gate in gates:
            if self._closed_channel is None and self.is_usable:
                answered = partial(self._declared, self._channel, gate, deadline)
                self._channel.queue_declare(
                    gate.queue, arguments=ARGUMENTS, callback=answered, **options
                )
        self._run(
            lambda: self._closed_channel is not None or all(gate.outcome for gate in gates),
            deadline,
        )
        left = [gate for gate in gates if gate.outcome is None]
        for gate in left:
            if gate.tag is not None:
                gate.outcome = Outcome.UNKNOWN
        declaring = [gate for gate in left if gate.tag is None]
        if self._closed_channel is not None and declaring:
            # Declarations go one by one: it is the first of them that was refused.
            declaring[0].outcome = Outcome.REFUSED
            declaring[0].reason = reason_of(self._closed_channel)

    def _declared(
        self,
        channel: Any,  # noqa: ANN401 - pika's
        gate: Gate,
        deadline: Deadline,
        frame: Any,  # noqa: ANN401 - pika's
    ) -> None:
        if frame.method.message_count and not gate.always:
            gate.outcome = Outcome.LOST
        elif self._blocked or not deadline.left_ms():
            gate.outcome = Outcome.NOT_ASKED
        else:
            self._publish(channel, gate)

    def _publish(self, channel: Any, gate: Gate) -> None:  # noqa: ANN401 - pika's
        properties = self._pika.BasicProperties(delivery_mode=2, message_id=gate.queue)
        # Not mandatory, a message without a queue would be confirmed as well.
        channel.basic_publish("", gate.queue, gate.body, properties, mandatory=True)
        gate.tag = len(self._gates) + 1
        self._gates[gate.tag] = gate

    def _message_returned(
        self,
        _channel: object,
        _method: object,
        properties: Any,  # noqa: ANN401 - pika's
        _body: bytes,
    ) -> None:
        self._returned.add(properties.message_id)

    def _confirmed(self, frame: Any) -> None:  # noqa: ANN401 - pika's
        method = frame.method
        last: int = method.delivery_tag
        first = 1 if method.multiple else last
        is_ack = isinstance(method, self._pika.spec.Basic.Ack)
        for tag in range(first, last + 1):
            gate = self._gates.get(tag)
            if gate is None or gate.outcome is not None:
                continue
            if gate.queue in self._returned:  # it expired in this moment: nobody has it
                gate.outcome = Outcome.NOT_ASKED
            else:
                gate.outcome = Outcome.WON if is_ack else Outcome.LOST

    def delete(self, queue: str, deadline: Deadline) -> None:
        """Delete a queue of one's own."""
        deleted: list[object] = []

        self._channel.queue_delete(queue, callback=deleted.append)
        self._run(lambda: bool(deleted) or self._closed_channel is not None, deadline)

    # -- giving it up ------------------------------------------------------------------------------

    def close(self) -> None:
        """Say goodbye, and close the connection; bounded, never raises."""
        if self.is_usable:
            with suppress(self._pika.exceptions.AMQPError):
                self._connection.close()
            self._run(_never, Deadline(CLOSE_MS))
        self.abort()

    def abort(self) -> None:
        """Close the connection without a word."""
        if self._connection is not None and self._lost is None:
            self._sockets.shut_down()
            self._run(_never, Deadline(CLOSE_MS))
        self._sockets.forget()
        self._loop.close()


def _never() -> bool:
    return False


def _wake() -> None:
    """Do nothing: that it was called ends a wait."""


def _text(value: Any) -> str:  # noqa: ANN401 - of the broker
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)
