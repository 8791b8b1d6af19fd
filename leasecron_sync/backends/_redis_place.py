"""Where a Redis or Valkey server is: from a URL, or from a client of the user's own."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Optional
from urllib.parse import unquote

from leasecron_sync.backends._secrets import hide_credentials

SCHEMES = ("redis", "rediss", "valkey", "valkeys", "unix")
_ENCRYPTED = ("rediss", "valkeys")
GROUPS = ("sentinel", "cluster")
PORT = 6379
SENTINEL_PORT = 26379

_TEXTS = ("client_name", "username", "password")
_TLS = (
    "ssl_ca_certs",
    "ssl_ca_path",
    "ssl_certfile",
    "ssl_keyfile",
    "ssl_password",
    "ssl_cert_reqs",
    "ssl_check_hostname",
)
_OF_SENTINELS = ("sentinel_username", "sentinel_password")
# Of a client's own connections. How long to wait, when to send a command again, and how to read an
# answer are not taken over.
_KEPT = frozenset(
    {*_TEXTS, *_TLS, "host", "port", "path", "db", "credential_provider", "socket_type"}
    | {"socket_keepalive", "socket_keepalive_options", "ssl_ca_data", "ssl_min_version"}
    | {"ssl_ciphers", "ssl_include_verify_flags", "ssl_exclude_verify_flags"}
    | {"ssl_validate_ocsp", "ssl_validate_ocsp_stapled"}
)

Address = tuple[str, int]


@dataclass(frozen=True)
class Place:
    """Where a store is.

    Attributes:
        label: Names it in errors.
        addresses: Of the server, of sentinels, or of some nodes of a cluster; none for a socket in
            the file system.
        options: What redis-py's connection is made with besides.
        kind: Empty, ``"sentinel"`` or ``"cluster"``.
        service: Name under which sentinels know the primary.
        of_sentinels: Options of the connections to sentinels.
        tls: Whether connections are encrypted.
        tls_of_sentinels: Whether those to sentinels are.
    """

    label: str
    addresses: tuple[Address, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict[str, Any], repr=False)
    kind: str = ""
    service: str = ""
    of_sentinels: Mapping[str, Any] = field(default_factory=dict[str, Any], repr=False)
    tls: bool = False
    tls_of_sentinels: bool = False


def place_of_url(url: str) -> Place:
    """Read a URL.

    Raises:
        ValueError: The scheme, a parameter or a part of it is wrong. The text shows no password.
    """
    scheme, kind, rest = _scheme_of(url)
    shown = hide_credentials(url)
    before, _, query = rest.partition("?")
    user, _, where = before.rpartition("@")
    if "#" in rest or "@" in query or "/" in user:
        message = (
            f"{shown}: in a user, a password and a value write '/', '?', '#' and '@' as %2F, %3F, "
            "%23 and %40"
        )
        raise ValueError(message)
    options, of_sentinels = _parameters(query, scheme, kind, shown)
    name, has_password, password = user.partition(":")
    if name:
        options["username"] = unquote(name)
    if has_password:
        options["password"] = unquote(password)
    if scheme == "unix":
        if not where.startswith("/"):
            message = f"{shown} names no socket: write an absolute path, unix:///run/redis.sock"
            raise ValueError(message)
        return Place(shown, (), {**options, "path": unquote(where)})
    if not kind and "," in where:
        message = f"{shown}: several hosts need redis+sentinel:// or redis+cluster://"
        raise ValueError(message)
    tls = scheme in _ENCRYPTED
    if tls:
        # Old versions of redis-py take anybody's certificate otherwise.
        options.setdefault("ssl_check_hostname", options.get("ssl_cert_reqs") != "none")
        of_sentinels = {**{key: options[key] for key in options if key in _TLS}, **of_sentinels}
    hosts, service, database = _parts_of(where, kind, shown)
    if database:
        options["db"] = _database(database, shown)
    if kind == "cluster" and options.get("db", 0):
        message = f"{shown}: a cluster has database 0 only"
        raise ValueError(message)
    port = SENTINEL_PORT if kind == "sentinel" else PORT
    addresses = tuple(_address(host, port, shown) for host in hosts.split(","))
    return Place(shown, addresses, options, kind, service, of_sentinels, tls, tls)


def _scheme_of(url: str) -> tuple[str, str, str]:
    """Return the scheme, what kind of group is behind it, and the rest."""
    scheme, separator, rest = url.partition("://")
    scheme, plus, kind = scheme.lower().partition("+")
    grouped = kind in GROUPS and scheme != "unix"
    if not separator or scheme not in SCHEMES or (plus and not grouped):
        message = (
            "RedisLease needs the URL of a server, such as 'redis://localhost:6379/0', "
            "'unix:///run/redis.sock', 'redis+sentinel://host:26379/service/0' or "
            "'redis+cluster://host:6379'"
        )
        raise ValueError(message)
    return scheme, kind, rest


def _parts_of(where: str, kind: str, shown: str) -> tuple[str, str, str]:
    """Return hosts, service and database."""
    hosts, _, path = where.partition("/")
    service = ""
    if kind == "sentinel":
        service, _, path = path.partition("/")
        if not service:
            message = f"{shown} names no service: redis+sentinel://host:26379/service/0"
            raise ValueError(message)
    return hosts, unquote(service), path


def _parameters(
    query: str,
    scheme: str,
    kind: str,
    shown: str,
) -> tuple[dict[str, Any], dict[str, Any]]:
    known = [
        "db",
        *_TEXTS,
        *(_TLS if scheme in _ENCRYPTED else ()),
        *(_OF_SENTINELS if kind == "sentinel" else ()),
    ]
    options: dict[str, Any] = {}
    of_sentinels: dict[str, Any] = {}
    for part in filter(None, query.split("&")):
        name, _, text = part.partition("=")
        name, value = unquote(name), unquote(text)
        if name not in known:
            message = f"{shown} takes the parameters {', '.join(known)}, it has: {name}"
            raise ValueError(message)
        if name == "db":
            options["db"] = _database(value, shown)
        elif name == "ssl_cert_reqs" and value not in ("none", "optional", "required"):
            message = f"{shown}: ssl_cert_reqs is none, optional or required"
            raise ValueError(message)
        elif name == "ssl_check_hostname":
            if value.lower() not in ("true", "false"):
                message = f"{shown}: ssl_check_hostname is true or false"
                raise ValueError(message)
            options[name] = value.lower() == "true"
        elif name in _OF_SENTINELS:
            of_sentinels[name.partition("_")[2]] = value
        else:
            options[name] = value
    return options, of_sentinels


def _database(text: str, shown: str) -> int:
    if not re.fullmatch(r"[0-9]{1,6}", text):
        message = f"{shown}: a database is a number, as in redis://localhost/0"
        raise ValueError(message)
    return int(text)


def _address(text: str, port: int, shown: str) -> Address:
    found = re.fullmatch(r"(\[[0-9A-Fa-f:.%]+\]|[^:\[\]]*)(?::([0-9]{1,5}))?", text)
    if found is None or (found[2] and not 0 < int(found[2]) < 65536):  # noqa: PLR2004 - ports
        message = f"{shown}: a place is host, host:port or [address]:port"
        raise ValueError(message)
    return unquote(found[1].strip("[]")) or "localhost", int(found[2] or port)


def place_of_client(client: Any) -> Optional[Place]:  # noqa: ANN401 - of a late import
    """Read where a client of redis-py or valkey-py goes; None when it is no such client."""
    manager = getattr(client, "nodes_manager", None)
    if manager is not None:
        return _of_cluster(client, manager)
    pool = getattr(client, "connection_pool", None)
    given: Any = getattr(pool, "connection_kwargs", None)
    if pool is None or not hasattr(given, "keys"):
        return None
    options = _kept(given)
    tls = _is_encrypted(pool)
    sentinels = getattr(pool, "sentinel_manager", None)
    if sentinels is not None:
        service = str(pool.service_name)
        pools = [sentinel.connection_pool for sentinel in sentinels.sentinels]
        addresses = tuple(
            (str(one.connection_kwargs["host"]), int(one.connection_kwargs["port"]))
            for one in pools
        )
        of_sentinels = _bare(_kept(pools[0].connection_kwargs)) if pools else {}
        other_tls = bool(pools) and _is_encrypted(pools[0])
        label = f"the client for {_listed(addresses)}/{service}"
        kind = "sentinel"
        return Place(label, addresses, options, kind, service, of_sentinels, tls, other_tls)
    if "path" in options:
        return Place(f"the client for unix://{options['path']}", (), options)
    address = (str(options.get("host", "localhost")), int(options.get("port", PORT)))
    label = f"the client for {_listed((address,))}/{options.get('db', 0)}"
    return Place(label, (address,), _bare(options), tls=tls)


def _is_encrypted(pool: Any) -> bool:  # noqa: ANN401 - of a late import
    classes = getattr(pool.connection_class, "__mro__", ())
    return any(found.__name__ == "SSLConnection" for found in classes)


def _of_cluster(client: Any, manager: Any) -> Place:  # noqa: ANN401 - of a late import
    addresses = tuple((str(node.host), int(node.port)) for node in client.get_nodes())
    given: dict[str, Any] = dict(manager.connection_kwargs)
    tls = bool(given.get("ssl")) or any(name.startswith("ssl_") for name in given)
    label = f"the client for {_listed(addresses)}"
    return Place(label, addresses, _bare(_kept(given)), "cluster", tls=tls)


def _kept(given: Mapping[str, Any]) -> dict[str, Any]:
    return {name: given[name] for name in given if name in _KEPT and given[name] is not None}


def _bare(options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: options[name] for name in options if name not in ("host", "port")}


def _listed(addresses: tuple[Address, ...]) -> str:
    return ",".join(f"{host}:{port}" for host, port in addresses)
