"""The sockets behind pika's connections: to end one whose peer is silent, and for what it said."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from typing import Any


class Sockets:
    """Keeps a copy of each socket that an adapter of pika's loop connects.

    Args:
        adapter: The adapter; it tells of its sockets from now on.
    """

    def __init__(self, adapter: Any) -> None:  # noqa: ANN401 - pika's
        self._copies: list[socket.socket] = []
        make: Any = adapter.create_streaming_connection

        def noting(protocol_factory: object, sock: socket.socket, **others: object) -> Any:  # noqa: ANN401
            # A copy: the socket itself is taken over, and replaced where it is encrypted.
            self._copies.append(socket.socket(fileno=os.dup(sock.fileno())))
            return make(protocol_factory, sock, **others)

        adapter.create_streaming_connection = noting

    def shut_down(self) -> None:
        """End the connections; pika notices when its loop runs next."""
        for copy in self._copies:
            with suppress(OSError):
                copy.shutdown(socket.SHUT_RDWR)

    def forget(self) -> None:
        """Close the copies."""
        while self._copies:
            self._copies.pop().close()


def reason_of(error: Any) -> str:  # noqa: ANN401 - pika's errors nest each other in several ways
    """Return what the broker said, or what happened to the connection."""
    inner = (
        *tuple(getattr(error, "exceptions", None) or ())[-1:],
        getattr(error, "exception", None),
        *getattr(error, "args", ())[:1],
    )
    for part in inner:
        if isinstance(part, BaseException):
            return reason_of(part)
    return str(getattr(error, "reply_text", "")) or str(error) or type(error).__name__
