"""Ports of 127.0.0.1 for servers."""

from __future__ import annotations

import random
import socket
from pathlib import Path

HOST = "127.0.0.1"
FIRST = 20_000
LAST = 30_000
TRIES = 200

_given: set[int] = set()
_random = random.SystemRandom()


def free_port() -> int:
    """Return a port that nobody uses and that this process has not given away before.

    It is below the range from which the system takes the ports of clients: a server that is stopped
    for a while must find its port free, and a client that connects to it in that time could get
    that very port, and be connected with itself.
    """
    last = min(LAST, _first_client_port() - 1)
    assert last > FIRST, f"clients may have any port from {last + 1} on: there is none for servers"
    for _ in range(TRIES):
        port = _random.randint(FIRST, last)
        if port not in _given and _is_free(port):
            _given.add(port)
            return port
    message = f"no free port was found between {FIRST} and {last} in {TRIES} tries"
    raise RuntimeError(message)


def _is_free(port: int) -> bool:
    with socket.socket() as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do
        try:
            trial.bind((HOST, port))
            trial.listen()
        except OSError:
            return False
    return True


def _first_client_port() -> int:
    path = Path("/proc/sys/net/ipv4/ip_local_port_range")
    return int(path.read_text().split()[0]) if path.exists() else 49_152
