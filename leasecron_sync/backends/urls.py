"""From a URL to a backend, and the same URL without its credentials."""

from __future__ import annotations

import re
from typing import Callable
from urllib.parse import parse_qsl, unquote, urlsplit

from leasecron_sync.backends._secrets import hide_credentials
from leasecron_sync.backends.base import Backend, ClaimBackend, LeaseBackend
from leasecron_sync.backends.memory import MemoryLease
from leasecron_sync.backends.nats import NatsClaim
from leasecron_sync.backends.postgres import PostgresLease
from leasecron_sync.backends.rabbitmq import RabbitMQClaim
from leasecron_sync.backends.redis import RedisLease
from leasecron_sync.backends.redis_claim import STRATEGIES, RedisClaim
from leasecron_sync.backends.sqlite import SQLiteLease

__all__ = ["connect", "connect_claim", "connect_lease", "hide_credentials"]


def connect(url: str) -> Backend:
    """Return the backend that a URL names; nothing is connected yet.

    ``sqlite:///jobs.db`` is a path relative to the working directory,
    ``sqlite:////var/lib/jobs.db`` an absolute one. ``postgresql://user@host/database`` takes the
    parameters of libpq, and ``schema`` and ``table_prefix`` as ``PostgresLease`` does.
    ``redis://host:6379/0`` (also ``rediss``, ``valkey``, ``valkeys`` and ``unix``) is a server,
    ``redis+sentinel://host:26379/service/0`` what sentinels know, ``redis+cluster://host:6379`` a
    cluster; with ``?strategy=script``, ``stream-id`` or ``idmp`` they name a claim backend.
    ``amqp://user:password@host:5672/vhost`` and ``amqps`` are RabbitMQ, ``nats://host1:4222,host2``
    and ``tls`` NATS, both for claims. ``memory://name`` is shared in the process. Characters such
    as ``%``, ``?`` and ``#`` in a path or a password are written percent-encoded.

    Args:
        url: Scheme, place, and parameters of the backend.

    Raises:
        TypeError: It is not text.
        ValueError: The scheme or a parameter is unknown, or something is missing. The text does not
            show user and password.
    """
    if not isinstance(url, str):  # pyright: ignore[reportUnnecessaryIsInstance] - untyped callers
        message = (
            f"a backend URL must be text such as 'sqlite:///jobs.db', not {type(url).__name__}"
        )
        raise TypeError(message)
    scheme, separator, _rest = url.partition("://")
    scheme = scheme.lower()
    if not separator or not re.fullmatch(r"[a-z][a-z0-9+.-]*", scheme):
        # What stands there is not shown: it may be a password.
        message = (
            "a backend URL starts with a scheme, such as 'sqlite:///jobs.db' or 'memory://tests'; "
            "for a plain path write SQLiteLease(path)"
        )
        raise ValueError(message)
    if scheme not in _MAKERS:
        message = (
            f"unknown scheme {scheme}:// in a backend URL; leases: {_schemes(_LEASES)}; claims: "
            f"{_schemes(_CLAIMS)}, and those of Redis with ?strategy="
        )
        raise ValueError(message)
    return _MAKERS[scheme](url)


def _schemes(makers: dict[str, Callable[[str], Backend]]) -> str:
    return ", ".join(f"{name}://" for name in makers)


def connect_lease(url: str) -> LeaseBackend:
    """Return the lease backend that a URL names, typed as one.

    Args:
        url: See ``connect``.

    Raises:
        ValueError: The URL is wrong, or names a claim backend.
    """
    backend = connect(url)
    if not isinstance(backend, LeaseBackend):
        message = f"{hide_credentials(url)} names {type(backend).__name__}, not a lease backend"
        raise ValueError(message)  # noqa: TRY004 - the URL is wrong, not its type
    return backend


def connect_claim(url: str) -> ClaimBackend:
    """Return the claim backend that a URL names, typed as one.

    Args:
        url: See ``connect``.

    Raises:
        ValueError: The URL is wrong, or names a lease backend.
    """
    backend = connect(url)
    if not isinstance(backend, ClaimBackend):
        message = f"{hide_credentials(url)} names {type(backend).__name__}, not a claim backend"
        raise ValueError(message)  # noqa: TRY004 - the URL is wrong, not its type
    return backend


def _no_parameters(url: str) -> None:
    parts = urlsplit(url)
    unknown = [name for name, _value in parse_qsl(parts.query, keep_blank_values=True)]
    if unknown or parts.fragment:
        names = ", ".join(sorted(unknown)) or "a fragment"
        message = (
            f"{hide_credentials(url)} takes no parameters, it has: {names}; write '?' and '#' in a "
            "path as %3F and %23"
        )
        raise ValueError(message)


def _sqlite(url: str) -> SQLiteLease:
    _no_parameters(url)
    parts = urlsplit(url)
    if parts.netloc or len(parts.path) < 2:  # noqa: PLR2004 - "/" alone names no file
        message = (
            "a SQLite URL has three slashes and a path, sqlite:///jobs.db, or four for an absolute "
            "path, sqlite:////var/lib/jobs.db"
        )
        raise ValueError(message)
    return SQLiteLease(unquote(parts.path[1:], errors="surrogateescape"))


def _memory(url: str) -> MemoryLease:
    _no_parameters(url)
    name = unquote(url.partition("://")[2])
    if not name:
        message = "a memory URL names the store that objects of this process share: memory://tests"
        raise ValueError(message)
    return MemoryLease(name)


_OWN_OF_POSTGRES = ("schema", "table_prefix")
# Of libpq 18. The module that reads them is imported late, and a parameter that it does not know
# would be refused by the first call only.
_OF_LIBPQ = frozenset(
    re.findall(
        r"\w+",
        """
        application_name channel_binding client_encoding connect_timeout dbname
        fallback_application_name gssdelegation gssencmode gsslib host hostaddr keepalives
        keepalives_count keepalives_idle keepalives_interval krbsrvname load_balance_hosts
        max_protocol_version min_protocol_version oauth_client_id oauth_client_secret oauth_issuer
        oauth_scope options passfile password port replication require_auth requirepeer
        scram_client_key scram_server_key service servicefile ssl_max_protocol_version
        ssl_min_protocol_version sslcert sslcertmode sslcompression sslcrl sslcrldir sslkey
        sslkeylogfile sslmode sslnegotiation sslpassword sslrootcert sslsni target_session_attrs
        ssl tcp_user_timeout user
        """,
    )
)


def _postgres(url: str) -> PostgresLease:
    place, _, query = url.partition("?")
    own: dict[str, str] = {}
    others: list[str] = []
    unknown: set[str] = set()
    for part in filter(None, query.split("&")):
        name, _, value = part.partition("=")
        if unquote(name) in _OWN_OF_POSTGRES:
            own[unquote(name)] = unquote(value)
        else:
            others.append(part)
            unknown |= {unquote(name)} - _OF_LIBPQ
    if "@" in query or "#" in url or unknown:
        names = (
            ", ".join(sorted(unknown)) if unknown and "@" not in query else "a special character"
        )
        message = (
            f"{hide_credentials(url)} takes {', '.join(_OWN_OF_POSTGRES)} and the parameters of "
            f"libpq, it has: {names}; in a user, a password and a value write '?', '#' and '@' as "
            "%3F, %23 and %40"
        )
        raise ValueError(message)
    scheme, _, rest = place.partition("://")
    dsn = f"{scheme.lower()}://{rest}"
    return PostgresLease(f"{dsn}?{'&'.join(others)}" if others else dsn, **own)


def _redis(url: str) -> Backend:
    place, _, query = url.partition("?")
    parts = list(filter(None, query.split("&")))
    asked = [part for part in parts if unquote(part.partition("=")[0]) == "strategy"]
    if not asked:
        return RedisLease(url)
    others = "&".join(part for part in parts if part not in asked)
    strategy = unquote(asked[-1].partition("=")[2])
    if len(asked) > 1 or strategy not in STRATEGIES:
        message = (
            f"{hide_credentials(url)}: strategy is one of {', '.join(STRATEGIES)}; without it the "
            "URL names a lease"
        )
        raise ValueError(message)
    return RedisClaim(f"{place}?{others}" if others else place, strategy=strategy)


def _nats(url: str) -> NatsClaim:
    names = [unquote(part.partition("=")[0]) for part in url.partition("?")[2].split("&")]
    if "strategy" in names:
        message = (
            f"{hide_credentials(url)}: 'strategy' would name a lease in NATS, which is not in this "
            "version of leasecron_sync yet; without it the URL names a claim"
        )
        raise ValueError(message)
    return NatsClaim(url)


_LEASES: dict[str, Callable[[str], Backend]] = {
    "sqlite": _sqlite,
    "postgresql": _postgres,
    "postgres": _postgres,
    **{
        scheme if not group else f"{scheme}+{group}": _redis
        for group in ("", "sentinel", "cluster")
        for scheme in ("redis", "rediss", "valkey", "valkeys")
    },
    "unix": _redis,
    "memory": _memory,
}
_CLAIMS: dict[str, Callable[[str], Backend]] = {
    "amqp": RabbitMQClaim,
    "amqps": RabbitMQClaim,
    "nats": _nats,
    "tls": _nats,
}
_MAKERS = {**_LEASES, **_CLAIMS}
