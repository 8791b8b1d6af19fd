"""From a NATS URL to servers and credentials, and from names to those of a stream."""

from __future__ import annotations

from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote, urlsplit

from leasecron_sync.backends._secrets import hide_credentials
from leasecron_sync.model import RunKey

PORT = 4222
ENCRYPTED = "tls"
MAX_REPLICAS = 5

_FILES = ("credentials", "tls_ca", "tls_cert", "tls_key")
_OF_TLS = frozenset(_FILES[1:])


@dataclass(frozen=True)
class Place:
    """Where the servers are.

    Attributes:
        label: Names them in errors, without user and password.
        scheme: ``"nats"`` or ``"tls"``.
        servers: A URL for each, without credentials.
        options: What the client connects with.
        files: Of credentials and encryption, by parameter.
        replicas: How many servers of a cluster keep the stream.
    """

    label: str
    scheme: str
    servers: tuple[str, ...]
    options: dict[str, str] = field(repr=False)
    files: dict[str, str]
    replicas: int

    def connect_options(self) -> dict[str, Any]:
        """Return the arguments of the client's ``connect``.

        Raises:
            OSError: A file cannot be read.
        """
        options: dict[str, Any] = dict(self.options)
        if "credentials" in self.files:
            options["user_credentials"] = self.files["credentials"]
        if self.scheme == ENCRYPTED:
            import ssl  # late: it is slow to import, and seldom needed

            context = ssl.create_default_context(cafile=self.files.get("tls_ca"))
            if "tls_cert" in self.files:
                context.load_cert_chain(self.files["tls_cert"], self.files.get("tls_key"))
            options["tls"] = context
        return options


def place_of_url(url: str) -> Place:
    """Read a URL.

    Raises:
        ValueError: A part of it is wrong. The text shows no password.
    """
    shown = hide_credentials(url)
    parts = urlsplit(url)
    scheme = parts.scheme.lower()
    user, _, hosts = parts.netloc.rpartition("@")
    special = "@" in user or "@" in parts.query or parts.fragment
    if scheme not in ("nats", ENCRYPTED) or special:
        message = (
            f"{shown} is no NATS URL: write nats://user:password@host1:4222,host2:4222, user and "
            "password once, and '/', '?', '#' and '@' in them as %2F, %3F, %23 and %40"
        )
        raise ValueError(message)
    if parts.path not in ("", "/"):
        message = f"{shown}: nothing comes after the hosts but parameters"
        raise ValueError(message)
    servers = tuple(f"{scheme}://{_server(host, shown)}" for host in hosts.split(","))
    replicas, files = _parameters(parts.query, shown, encrypted=scheme == ENCRYPTED)
    return Place(shown, scheme, servers, _credentials(user), files, replicas)


def _server(text: str, shown: str) -> str:
    try:
        parts = urlsplit(f"//{text}")
        port = parts.port or PORT
    except ValueError:
        parts, port = None, 0
    if parts is None or "@" in text:
        message = f"{shown}: a server is host, host:port or [address]:port"
        raise ValueError(message)
    host = parts.hostname or "localhost"
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _credentials(user: str) -> dict[str, str]:
    name, separator, password = user.partition(":")
    if separator:
        return {"user": unquote(name), "password": unquote(password)}
    return {"token": unquote(name)} if name else {}


def _parameters(query: str, shown: str, *, encrypted: bool) -> tuple[int, dict[str, str]]:
    replicas, files = 1, dict[str, str]()
    for part in filter(None, query.split("&")):
        name, _, value = part.partition("=")
        name, value = unquote(name), unquote(value)
        if name == "replicas":
            replicas = _replicas(value, shown)
        elif name not in _FILES or (name in _OF_TLS and not encrypted):
            known = ("replicas", *(file for file in _FILES if encrypted or file not in _OF_TLS))
            message = f"{shown} takes the parameters {', '.join(known)}, it has: {name}"
            raise ValueError(message)
        elif not Path(value).is_file():
            message = f"{shown}: {name} names no file: {value!r}"
            raise ValueError(message)
        else:
            files[name] = value
    return replicas, files


def _replicas(text: str, shown: str) -> int:
    if text not in map(str, range(1, MAX_REPLICAS + 1)):
        message = f"{shown}: replicas is a number from 1 to {MAX_REPLICAS}"
        raise ValueError(message)
    return int(text)


def stream_name(namespace: str) -> str:
    """Return the name of a namespace's stream, which may hold neither dots nor spaces."""
    return f"leasecron-{sha256(namespace.encode()).hexdigest()[:32]}"


def subject_of(stream: str) -> str:
    """Return the subject of a stream's messages."""
    return f"leasecron.claim.{stream}"


def message_id(run: RunKey) -> str:
    """Return what a run's messages are known by; a header is one line of ASCII."""
    return f"{quote(run.job, safe='')} {run.scheduled_ms}"
