"""One connection to RabbitMQ, moved by the calls that use it: no thread, and no wait without end.

pika's blocking connection waits without an end for a broker that falls silent. Its asynchronous one
does not: the loop behind it is run here until a call has what it wants, or no time is left.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import Any, Callable, Optional

from leasecron_sync.backends._lanes import Deadline
from leasecron_sync.backends._rabbitmq_channel import Channel
from leasecron_sync.backends._rabbitmq_place import Place
from leasecron_sync.backends._rabbitmq_quiet import quiet
from leasecron_sync.backends._rabbitmq_sockets import Sockets
from leasecron_sync.backends._rabbitmq_words import why_unreachable
from leasecron_sync.errors import StoreError, StoreUnavailable

CLOSE_MS = 200
TEND_MS = 10
"""How long it is looked after between calls: what came in is read, heartbeats go out."""

_logger = logging.getLogger("leasecron_sync.backends.rabbitmq")


class Link:
    """A connection that is open.

    Args:
        pika: The module.
        place: Where the broker is.
        deadline: By when it must be open.

    Attributes:
        is_blocked: Whether the broker takes no messages for now.

    Raises:
        StoreError: It could not be opened.
    """

    def __init__(self, pika: Any, place: Place, deadline: Deadline) -> None:  # noqa: ANN401 - a late import
        self._pika = pika
        self._label = place.label
        with quiet():
            loops = pika.adapters.select_connection
            self._loop = loops.IOLoop()
            self._adapter = loops.SelectorIOServicesAdapter(self._loop)
            self._sockets = Sockets(self._adapter)
        self._connection: Any = None
        self._channel: Optional[Channel] = None
        self._lost: Optional[BaseException] = None
        self._is_open = self._is_over = self._is_suspect = False
        self.is_blocked = False
        try:
            with quiet():
                self._open(place, deadline)
        except BaseException:
            self.close()
            raise

    # -- the loop ----------------------------------------------------------------------------------

    def run(self, until: Callable[[], bool], deadline: Deadline) -> bool:
        """Let the connection work until something holds; tell whether it does."""
        with quiet():
            self._run(lambda: self._lost is not None or until(), deadline)
        return until()

    def _run(self, until: Callable[[], bool], deadline: Deadline) -> None:
        loop = self._loop
        loop.activate_poller()
        try:
            while not until():
                alarm = loop.call_later(deadline.left_ms() / 1000, _wake)
                loop.poll()
                loop.process_timeouts()
                loop.remove_timeout(alarm)
                if not deadline.left_ms():
                    break
        except Exception as error:  # of any kind, when the peer speaks nonsense
            _logger.debug("the connection broke", exc_info=True)
            self._lost = error
        finally:
            loop.deactivate_poller()

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
        if not self.run(lambda: self._is_open, deadline):
            raise self.why()
        self.channel(deadline)

    def _opened(self, _connection: object) -> None:
        self._is_open = True

    def _gone(self, _connection: object, error: BaseException) -> None:
        self._lost, self._is_over = error, True

    def _set_blocked(self, *_arguments: object) -> None:
        self.is_blocked = True

    def _set_unblocked(self, *_arguments: object) -> None:
        self.is_blocked = False

    # -- using it ----------------------------------------------------------------------------------

    @property
    def is_sound(self) -> bool:
        """Whether nothing is known that would keep it from being used."""
        return self._is_open and self._lost is None and not self._is_suspect

    @property
    def version(self) -> str:
        """Name and version of the broker."""
        properties: dict[str, Any] = self._connection.server_properties or {}
        return f"{_text(properties.get('product', 'AMQP'))} {_text(properties.get('version', ''))}"

    @property
    def heartbeat_ms(self) -> Optional[int]:
        """The interval of heartbeats that was agreed on; None without any."""
        agreed = self._connection.params.heartbeat
        return agreed * 1000 if agreed else None

    def channel(self, deadline: Deadline) -> Channel:
        """Return a channel that is open, a new one after the broker closed one.

        Raises:
            StoreError: There is no answer.
        """
        channel = self._channel
        if channel is None or channel.closed is not None:
            with quiet():
                channel = self._channel = Channel(self._pika, self._connection)
        if not channel.is_ready and not self.run(lambda: channel.is_ready, deadline):
            self.suspect()
            raise self.why()
        return channel

    @property
    def spare_channels(self) -> int:
        """How many more channels the connection may have, besides one for itself."""
        # Those that are being closed count until the broker has said so.
        limit: int = self._connection.params.channel_max or self._pika.channel.MAX_CHANNELS
        return max(0, limit - len(self._connection._channels) - 1)  # noqa: SLF001

    def channel_beside(self) -> Channel:
        """Return another channel, which is not ready yet; who asked for it closes it."""
        with quiet():
            return Channel(self._pika, self._connection)

    def leave_channel(self) -> None:
        """Use another channel from now on; what is under way on this one is not waited for."""
        channel, self._channel = self._channel, None
        if channel is not None:
            with quiet():
                channel.close()  # else each would stay, up to the most that a connection may have

    def is_fresh(self) -> bool:
        """Read what came in; tell whether the connection is still there."""
        if self.is_sound:
            self.run(_never, Deadline(0))
        return self.is_sound

    def tend(self) -> None:
        """Read what came in, and send what is due.

        Raises:
            StoreError: The connection is gone.
        """
        self.run(_never, Deadline(TEND_MS))
        if self._lost is not None:
            raise self.why()

    def delete(self, queue: str, deadline: Deadline) -> bool:
        """Delete a queue, if it is there; tell whether that was answered.

        Raises:
            StoreError: There is no answer.
        """
        channel, done = self.channel(deadline), list[object]()
        with quiet():
            channel.delete(queue, done.append)
        self.run(lambda: bool(done) or channel.closed is not None, deadline)
        return bool(done)

    def why(self) -> StoreError:
        """Return why there was no answer."""
        if self.is_blocked and self._lost is None:
            message = (
                f"{self._label} takes no messages just now: it is short of memory or disk "
                "(`rabbitmqctl status` tells its alarms)"
            )
            return StoreUnavailable(message)
        return why_unreachable(self._label, self._lost)

    def suspect(self, error: Optional[BaseException] = None) -> None:
        """Note that it is not to be used again.

        Args:
            error: Why, if it is known.
        """
        self._is_suspect = True
        self._lost = self._lost or error

    # -- giving it up ------------------------------------------------------------------------------

    def close(self) -> None:
        """Say goodbye where somebody listens, and close the connection; bounded, never raises."""
        with quiet():
            if self._connection is not None and not self._is_over:
                if self.is_sound or not self._is_open:
                    self._say_goodbye()
                if not self._is_over:  # pika has to notice by itself, to let go of its socket
                    self._sockets.shut_down()
                    self._run(lambda: self._is_over, Deadline(CLOSE_MS))
            self._sockets.forget()
            self._loop.close()

    def _say_goodbye(self) -> None:
        with suppress(self._pika.exceptions.AMQPError):
            self._connection.close()
            self._run(lambda: self._is_over, Deadline(CLOSE_MS))


def _never() -> bool:
    return False


def _wake() -> None:
    """Do nothing: that it was called ends a wait."""


def _text(value: Any) -> str:  # noqa: ANN401 - of the broker
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)
