"""What a Redis or Valkey server says about itself, and what follows for its promises."""

from __future__ import annotations

import re
from typing import NamedTuple

from leasecron_sync.backends._lanes import Deadline
from leasecron_sync.backends._redis_link import Link
from leasecron_sync.errors import (
    OutcomeUnknown,
    StoreRejected,
    StoreUnavailable,
    StoreUnsupported,
)

OLDEST_SERVER = 7
"""Major version from which on a script says beforehand whether it writes."""


class Server(NamedTuple):
    """A server.

    Attributes:
        version: Its name and version.
        warnings: What its settings put at risk.
    """

    version: str
    warnings: tuple[str, ...]


def server_of(link: Link, label: str, deadline: Deadline) -> Server:
    """Ask a server who it is.

    Raises:
        StoreUnsupported: It is too old.
        StoreError: No answer.
    """
    try:
        facts = _facts(link.ask(("INFO",), deadline))
    except OutcomeUnknown as error:  # of a look: there is nothing that may have been applied
        raise StoreUnavailable(str(error)) from error
    except StoreRejected:
        return Server("Redis", ("its user may not ask INFO: nothing is known of its settings",))
    is_valkey = facts.get("server_name") == "valkey"
    number = facts.get("valkey_version" if is_valkey else "redis_version", "")
    version = f"{'Valkey' if is_valkey else 'Redis'} {number}"
    major = re.match(r"\d+", facts.get("redis_version", ""))
    if major is not None and int(major[0]) < OLDEST_SERVER:
        message = (
            f"{label} is {version}: Redis {OLDEST_SERVER} or a newer one, or Valkey, is needed"
        )
        raise StoreUnsupported(message)
    return Server(version, tuple(_warnings(facts)))


def _facts(answer: bytes) -> dict[str, str]:
    lines = answer.decode(errors="replace").splitlines()
    pairs = (line.partition(":") for line in lines if ":" in line)
    return {name: value for name, _, value in pairs}


def _warnings(facts: dict[str, str]) -> list[str]:
    warnings: list[str] = []
    if facts.get("role") == "slave":
        warnings.append("this server is a replica, which takes no writes: name the primary")
    policy = facts.get("maxmemory_policy", "noeviction")
    if policy != "noeviction" and facts.get("maxmemory", "0") != "0":
        warnings.append(
            f"maxmemory-policy is {policy}: what is evicted is a forgotten lease or claim, set "
            "noeviction"
        )
    if facts.get("aof_enabled") == "0":
        warnings.append(
            "appendonly is no: after a restart of the server runs may be won again; set it to yes"
        )
    return warnings
