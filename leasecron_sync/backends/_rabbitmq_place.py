"""From an AMQP URL to the parameters of a connection, and from a run to the name of its gate."""

from __future__ import annotations

from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any, Optional
from urllib.parse import quote, unquote, urlsplit

from leasecron_sync.backends._secrets import hide_credentials
from leasecron_sync.model import RunKey

PORT = 5672
TLS_PORT = 5671
MAX_HEARTBEAT_S = 65_535

_PARAMETERS = ("heartbeat", "cacertfile", "certfile", "keyfile", "verify", "server_name_indication")
_OF_TLS = frozenset(_PARAMETERS[1:])


@dataclass(frozen=True)
class Place:
    """Where a broker is.

    Attributes:
        label: Names it in errors, without user and password.
        host: Its name or address.
        port: Its port.
        vhost: Its virtual host.
        user: Who connects.
        password: The password.
        heartbeat_s: Asked for; None takes what the broker proposes.
        tls: Parameters of an encrypted connection; None for a plain one.
    """

    label: str
    host: str
    port: int
    vhost: str
    user: str
    password: str = field(repr=False)
    heartbeat_s: Optional[int]
    tls: Optional[dict[str, str]]

    def parameters(self, pika: Any) -> Any:  # noqa: ANN401 - a late import
        """Return what pika connects with.

        Args:
            pika: The module.

        Raises:
            OSError: A file for the encryption cannot be read.
        """
        return pika.ConnectionParameters(
            host=self.host,
            port=self.port,
            virtual_host=self.vhost,
            credentials=pika.PlainCredentials(self.user, self.password, erase_on_connect=False),
            heartbeat=self.heartbeat_s,
            ssl_options=None if self.tls is None else self._ssl_options(pika, self.tls),
            client_properties={"connection_name": "leasecron_sync"},
        )

    def _ssl_options(self, pika: Any, tls: dict[str, str]) -> Any:  # noqa: ANN401 - a late import
        import ssl  # late: it is slow to import, and seldom needed

        context = ssl.create_default_context(cafile=tls.get("cacertfile"))
        if tls.get("verify") == "verify_none":
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        if "certfile" in tls:
            context.load_cert_chain(tls["certfile"], tls.get("keyfile"))
        return pika.SSLOptions(context, tls.get("server_name_indication", self.host))


def place_of_url(url: str) -> Place:
    """Read a URL.

    Raises:
        ValueError: A part of it is wrong. The text shows no password.
    """
    shown = hide_credentials(url)
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        message = f"{shown}: the host or the port cannot be read; write amqp://user:password@host:5672/vhost"
        raise ValueError(message) from None
    if parts.scheme.lower() not in ("amqp", "amqps") or parts.fragment or "@" in parts.query:
        message = (
            f"{shown} is no AMQP URL: write amqp://user:password@host:5672/vhost, and '/', '?', "
            "'#' and '@' in a user, a password or a vhost as %2F, %3F, %23 and %40"
        )
        raise ValueError(message)
    if "," in parts.netloc:
        message = f"{shown}: one host is named, of a cluster any node or its balancer"
        raise ValueError(message)
    if parts.path.count("/") > 1:
        message = f"{shown}: a vhost is one part of the path; write '/' in its name as %2F"
        raise ValueError(message)
    encrypted = parts.scheme.lower() == "amqps"
    given = _parameters(parts.query, shown, encrypted=encrypted)
    heartbeat = given.pop("heartbeat", None)
    vhost = unquote(parts.path[1:]) if len(parts.path) > 1 else "/"
    return Place(
        label=shown,
        host=parts.hostname or "localhost",
        port=port or (TLS_PORT if encrypted else PORT),
        vhost=vhost,
        user=unquote(parts.username or "guest"),
        password=unquote(parts.password or "guest"),
        heartbeat_s=None if heartbeat is None else _heartbeat(heartbeat, shown),
        tls=given if encrypted else None,
    )


def _parameters(query: str, shown: str, *, encrypted: bool) -> dict[str, str]:
    given: dict[str, str] = {}
    for part in filter(None, query.split("&")):
        name, _, value = part.partition("=")
        name = unquote(name)
        if name not in _PARAMETERS or (name in _OF_TLS and not encrypted):
            known = _PARAMETERS if encrypted else tuple(p for p in _PARAMETERS if p not in _OF_TLS)
            message = f"{shown} takes the parameters {', '.join(known)}, it has: {name}"
            raise ValueError(message)
        given[name] = unquote(value)
    if given.get("verify", "verify_peer") not in ("verify_peer", "verify_none"):
        message = f"{shown}: verify is verify_peer or verify_none"
        raise ValueError(message)
    for name in ("cacertfile", "certfile", "keyfile"):
        if name in given and not Path(given[name]).is_file():
            message = f"{shown}: {name} names no file: {given[name]!r}"
            raise ValueError(message)
    return given


def _heartbeat(text: str, shown: str) -> int:
    if not text.isascii() or not text.isdigit() or not 1 <= int(text) <= MAX_HEARTBEAT_S:
        message = f"{shown}: heartbeat is a number of seconds from 1 to {MAX_HEARTBEAT_S}"
        raise ValueError(message)
    return int(text)


def gate_name(namespace: str, run: RunKey) -> str:
    """Return the name of a run's queue: readable where there is room, and of no other run.

    A name may have 255 bytes, fewer than the names of a namespace and a job may need.
    """
    names = f"{len(namespace)}:{namespace}{run.job}"
    digest = sha256(names.encode()).hexdigest()[:32]
    shown = f"{quote(namespace, safe='')[:40]}.{quote(run.job, safe='')[:100]}"
    return f"leasecron.{shown}.{digest}.{run.scheduled_ms}"
