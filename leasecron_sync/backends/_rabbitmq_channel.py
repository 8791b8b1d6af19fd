"""A channel of a connection to RabbitMQ, which tells what became of each message."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from enum import Enum
from typing import Any, Callable, NamedTuple, Optional

from leasecron_sync.backends._rabbitmq_words import code_of, reason_of


class Fate(Enum):
    """What the broker did with a message."""

    TAKEN_IN = "taken in"
    REJECTED = "rejected"  # the queue is full
    RETURNED = "returned"  # there is no such queue


class Closed(NamedTuple):
    """Why the broker closed a channel, or the connection with it."""

    code: Optional[int]
    reason: str


class Channel:
    """A channel with publisher confirms.

    Args:
        pika: The module.
        connection: One of pika's, which is open.

    Attributes:
        is_ready: Whether it can be used; it can not at first.
        closed: Set when it was closed.
    """

    def __init__(self, pika: Any, connection: Any) -> None:  # noqa: ANN401 - a late import
        self._pika = pika
        self.is_ready = False
        self.closed: Optional[Closed] = None
        self._sent = 0
        self._waiting: dict[int, Callable[[Fate], None]] = {}
        self._returned: set[str] = set()
        self._declaring: deque[Callable[[int], None]] = deque()
        self._channel: Any = connection.channel(on_open_callback=self._opened)

    def _opened(self, channel: Any) -> None:  # noqa: ANN401 - pika's
        channel.add_on_close_callback(self._closed)
        channel.add_on_return_callback(self._message_returned)
        channel.add_callback(self._declared, [self._pika.spec.Queue.DeclareOk], one_shot=False)
        channel.confirm_delivery(self._confirmed, callback=self._ready)

    def _ready(self, _frame: object) -> None:
        self.is_ready = True

    def _closed(self, _channel: object, reason: BaseException) -> None:
        self.closed = Closed(code_of(reason), reason_of(reason))

    # -- what it is asked ----------------------------------------------------------------------

    def declare(
        self,
        queue: str,
        arguments: Mapping[str, object],
        counted: Callable[[int], None],
        **options: bool,
    ) -> None:
        """Make a queue unless it is there.

        Args:
            queue: Its name.
            arguments: What it is made with; another queue of that name closes the channel.
            counted: Called with the number of messages in it.
            options: Such as ``durable``.
        """
        if not self._channel.is_open:
            message = "the channel is closed"
            raise self._pika.exceptions.ChannelWrongStateError(message)
        self._declaring.append(counted)
        # queue_declare() would send the next one when the one before was answered: a round trip for
        # each. The broker answers them in their order.
        self._channel._send_method(  # noqa: SLF001
            self._pika.spec.Queue.Declare(queue=queue, arguments=dict(arguments), **options)
        )

    def _declared(self, frame: Any) -> None:  # noqa: ANN401 - pika's
        self._declaring.popleft()(frame.method.message_count)

    def delete(self, queue: str, done: Callable[[object], None]) -> None:
        """Delete a queue, if it is there."""
        self._channel.queue_delete(queue, callback=done)

    def publish(self, queue: str, body: bytes, done: Callable[[Fate], None]) -> None:
        """Put a message into a queue.

        Args:
            queue: Its name.
            body: The message, which survives a restart of the broker.
            done: Called when the broker has said what it did.
        """
        # Not mandatory, a message without a queue would be confirmed as well.
        self._send(queue, body, done, mandatory=True)

    def try_nothing(self, done: Callable[[Fate], None]) -> None:
        """Have the broker take a message and drop it.

        Args:
            done: Called when it did.
        """
        # No queue has an empty name.
        self._send("", b"", done, mandatory=False)

    def _send(
        self, queue: str, body: bytes, done: Callable[[Fate], None], *, mandatory: bool
    ) -> None:
        tag = self._sent + 1
        properties = self._pika.BasicProperties(delivery_mode=2, message_id=str(tag))
        self._channel.basic_publish("", queue, body, properties, mandatory=mandatory)
        self._sent, self._waiting[tag] = tag, done

    def close(self) -> None:
        """Have the broker close it, when it comes to that; nobody waits."""
        with suppress(self._pika.exceptions.AMQPError):
            self._channel.close()

    # -- what it is told -----------------------------------------------------------------------

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
        tags = [tag for tag in self._waiting if tag <= last] if method.multiple else [last]
        for tag in tags:
            done = self._waiting.pop(tag, None)
            returned = str(tag) in self._returned
            self._returned.discard(str(tag))
            if done is None:
                continue
            if not isinstance(method, self._pika.spec.Basic.Ack):
                done(Fate.REJECTED)
            else:  # what was returned is confirmed, too, after that
                done(Fate.RETURNED if returned else Fate.TAKEN_IN)
