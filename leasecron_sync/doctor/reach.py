"""What to do about a store that cannot be reached, by the reason."""

from __future__ import annotations

import re
from typing import Final

# The first one that fits the text, in lower case. Servers may speak another language; then the last
# one is what is left.
_ADVICE: Final = {
    r"refused": (
        "Nobody listens there. Look whether the server runs, and whether host and port in the "
        "URL are its own. It may also listen on another address only: its settings tell."
    ),
    r"in time|timed? ?out": (
        "Something takes what is sent and never answers: a firewall that drops it, a server "
        "that hangs or stands still, or a wrong address. Try the server's own client (psql, "
        "redis-cli and the like) from this host."
    ),
    r"translate host name|name or service|name resolution|nodename|not known": (
        "The host's name cannot be looked up: correct it in the URL, or look at this host's DNS."
    ),
    r"pg_hba": (
        "The server lets nobody in from this host with this user and database: add a line to "
        "its pg_hba.conf and reload it."
    ),
    r"unsupported startup parameter": (
        "The pooler refuses a parameter of the URL: take it out (options is the usual one), "
        "or name it in pgbouncer's ignore_startup_parameters."
    ),
    r"without any password|no password is set": (
        "The server asks for no password: leave it out of the URL, or set one on the server."
    ),
    r"wrong.version.number|record.layer": (
        "What answers on this port does not speak TLS: name the server's port for TLS, or write "
        "the scheme without encryption (redis, amqp, nats)."
    ),
    r"password|authenticat|wrongpass|noauth|asks for a user|no such user|role .*not exist": (
        "User and password are not those of the server: correct them in the URL, where special "
        "characters are written percent-encoded, %40 for @; PostgreSQL also looks into ~/.pgpass."
    ),
    r"database .*not exist": ("Create the database, or correct its name in the URL."),
    r"no such vhost": (
        "Make the vhost and let the user in, as it says, or correct its name in the URL: it is the "
        "path, %2F for the one that is called /."
    ),
    r"too many|max number of clients|connection slots|no more connections": (
        "The server has no connection left: raise its limit, or end what holds them. An "
        "instance needs three."
    ),
    r"ssl|tls|certificate": (
        "Encryption does not work out: look whether the server speaks it (rediss://, "
        "sslmode), and whether this host trusts its certificate."
    ),
    r"starting up|loading|shutting down": ("The server is starting or stopping: wait and retry."),
    r"read-only|read-write": (
        "No server of the URL takes writes: name the primary, or wait for the failover to end."
    ),
    r"no such service": (
        "The name after the sentinels in the URL is not one that they watch: SENTINEL MASTERS "
        "lists those."
    ),
    r"no such file": (
        "There is no socket at that path: look whether the server runs and where its socket is."
    ),
    r"permission denied": (
        "The user of this process may not open the server's socket: add it to the group that may."
    ),
    r"no route|unreachable": (
        "There is no way to that network from this host: look at addresses, routes and VPN."
    ),
}
_OTHERWISE: Final = (
    "Look whether the server runs, whether the URL is right, and into the server's log."
)


def asks_for_login(reason: str) -> bool:
    """Tell whether a server wants to know first who asks.

    Args:
        reason: What the backend said.
    """
    return "asks for a user or password" in reason


def reach_advice(reason: str) -> str:
    """Return what to do.

    Args:
        reason: What the backend said.
    """
    text = reason.lower()
    return next(
        (advice for pattern, advice in _ADVICE.items() if re.search(pattern, text)), _OTHERWISE
    )
