"""As much of the protocol of Redis and Valkey as it takes to start servers: no client's habits."""

from __future__ import annotations

import socket
import ssl
from pathlib import Path
from typing import Optional, Union

Reply = Union[str, int, None, list["Reply"]]

TIMEOUT_S = 5.0
"""How long a reply may take."""


class ReplyError(Exception):
    """The server refused a command."""


class Connection:
    """A connection to one server, for one command after the other."""

    def __init__(self, address: tuple[str, int], *, ca: Optional[Path] = None) -> None:
        plain = socket.create_connection(address, TIMEOUT_S)
        try:
            plain.settimeout(TIMEOUT_S)
            self._socket: socket.socket = plain
            if ca is not None:
                context = ssl.create_default_context(cafile=str(ca))
                self._socket = context.wrap_socket(plain, server_hostname=address[0])
            self._replies = self._socket.makefile("rb")
        except BaseException:
            plain.close()
            raise

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *details: object) -> None:
        self._replies.close()
        self._socket.close()

    def do(self, *words: Union[str, int]) -> Reply:
        """Send a command and return its reply.

        Raises:
            ReplyError: The server refused it.
            OSError: It did not answer in time, or not at all.
        """
        self.send(*words)
        return self._read()

    def send(self, *words: Union[str, int]) -> None:
        """Send a command, and do not wait for its reply."""
        request = b"*%d\r\n" % len(words)
        for word in words:
            encoded = str(word).encode()
            request += b"$%d\r\n%s\r\n" % (len(encoded), encoded)
        self._socket.sendall(request)

    def _read(self) -> Reply:
        line = self._replies.readline()
        if not line.endswith(b"\r\n"):
            message = "the server has closed the connection"
            raise ConnectionError(message)
        kind, rest = line[:1], line[1:-2].decode()
        if kind == b"+":
            return rest
        if kind == b"-":
            raise ReplyError(rest)
        if kind == b":":
            return int(rest)
        if rest == "-1":
            return None
        if kind == b"$":
            return self._replies.read(int(rest) + 2)[:-2].decode()
        assert kind == b"*", line
        return [self._read() for _ in range(int(rest))]


def info(connection: Connection, section: str) -> dict[str, str]:
    """Return what a server tells about itself in one section of INFO."""
    text = connection.do("INFO", section)
    assert isinstance(text, str)
    pairs = (line.partition(":") for line in text.splitlines() if ":" in line)
    return {name: value for name, _, value in pairs}
