"""What pika's loop does for a connection before it is one, with an end to everything."""

from __future__ import annotations

import os
import socket
import threading
from contextlib import suppress
from typing import Any, Callable

from leasecron_sync.backends._rabbitmq_quiet import quiet


class Sockets:
    """Keeps a copy of each socket of a loop, to end one whose peer is silent.

    Args:
        adapter: The adapter of pika's loop; it connects by way of this object from now on.
    """

    def __init__(self, adapter: Any) -> None:  # noqa: ANN401 - pika's
        self._adapter = adapter
        self._copies: list[socket.socket] = []
        self._make: Any = adapter.create_streaming_connection
        adapter.create_streaming_connection = self._connection_of
        adapter.getaddrinfo = self._look_up

    def _connection_of(
        self,
        protocol_factory: object,
        sock: socket.socket,
        **others: object,
    ) -> Any:  # noqa: ANN401 - pika's
        # A copy: the socket itself is taken over, and replaced where it is encrypted.
        self._copies.append(socket.socket(fileno=os.dup(sock.fileno())))
        return self._make(protocol_factory, sock, **others)

    def _look_up(
        self,
        *,
        host: str,
        port: int,
        on_done: Callable[[object], None],
        **others: int,
    ) -> _LookUp:
        """Find the addresses of a host. Pika's own way would hold up the end of the interpreter."""
        look_up = _LookUp(self._adapter, on_done)
        asked = {"type": others.get("socktype", 0), "proto": others.get("proto", 0)}
        try:
            found = socket.getaddrinfo(host, port, flags=socket.AI_NUMERICHOST, **asked)
        except (OSError, UnicodeError):  # it is a name
            look_up.ask(lambda: socket.getaddrinfo(host, port, **asked))
        else:
            look_up.tell(found)
        return look_up

    def shut_down(self) -> None:
        """End the connections; pika notices when its loop runs next."""
        for copy in self._copies:
            with suppress(OSError):
                copy.shutdown(socket.SHUT_RDWR)

    def forget(self) -> None:
        """Close the copies."""
        while self._copies:
            self._copies.pop().close()


class _LookUp:
    """Asks for the addresses of a host in a thread of its own, which nobody waits for."""

    def __init__(self, adapter: Any, on_done: Callable[[object], None]) -> None:  # noqa: ANN401
        self._adapter = adapter
        self._on_done = on_done
        self._wanted = True

    def ask(self, ask: Callable[[], object]) -> None:
        def look() -> None:
            try:
                found: object = ask()
            except Exception as error:  # noqa: BLE001 - it is handed on
                found = error
            self.tell(found)

        try:
            threading.Thread(target=look, name="leasecron-lookup", daemon=True).start()
        except RuntimeError as error:  # the interpreter ends, or there are too many threads
            self.tell(error)

    def tell(self, found: object) -> None:
        with quiet():  # a loop that was closed meanwhile takes it, and does nothing
            self._adapter.add_callback_threadsafe(lambda: self._wanted and self._on_done(found))

    def cancel(self) -> bool:
        was_wanted, self._wanted = self._wanted, False
        return was_wanted
