"""What the settings and the state of a Redis or Valkey server put at risk; pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from leasecron_sync.doctor.finding import Findings

NEARLY_FULL: Final = 0.9

_REFUSED: Final = "The server refuses every write: nothing can be claimed, renewed or settled."
_AGAIN: Final = "runs that were won are won again, and are executed twice."


@dataclass(frozen=True)
class Facts:
    """What a server tells.

    Attributes:
        info: The answer to INFO.
        config: The answer to CONFIG GET; empty where it was refused.
        kind: Empty, ``"sentinel"`` or ``"cluster"``, as in a ``Place``.
        expiring: Whether the library's keys expire, as those of claims do.
    """

    info: Mapping[str, str]
    config: Mapping[str, str]
    kind: str
    expiring: bool = False

    def number(self, name: str) -> int:
        """Return a number of INFO, 0 where there is none."""
        text = self.info.get(name, "")
        return int(text) if text.isdigit() else 0


def check_settings(findings: Findings, facts: Facts) -> None:
    """Do all checks.

    Args:
        findings: Where findings go.
        facts: What the server tells.
    """
    checks = (
        ("role", _check_role),
        ("eviction", _check_eviction),
        ("persistence", _check_persistence),
        ("replicas", _check_replicas),
        ("connections", _check_connections),
    )
    for name, check in checks:
        with findings.checking(name):
            check(findings, facts)


def _check_role(findings: Findings, facts: Facts) -> None:
    role = facts.info.get("role", "")
    if role == "slave":
        findings.problem(
            "role",
            "this server is a replica",
            "It takes no writes: nothing can be claimed, renewed or settled here.",
            "Name the primary in the URL, or the sentinels that know it (redis+sentinel://).",
        )
    elif role == "master":
        findings.ok("role", "this server is a primary")


def _check_eviction(findings: Findings, facts: Facts) -> None:
    policy = facts.info.get("maxmemory_policy", "")
    limit, used = facts.number("maxmemory"), facts.number("used_memory")
    room = f" with maxmemory {_mib(limit)}" if limit else " without maxmemory"
    found = f"maxmemory-policy is {policy or 'unknown'}{room}"
    deletes = policy.startswith(("allkeys", "volatile") if facts.expiring else "allkeys")
    if deletes and limit:
        findings.problem(
            "eviction",
            found,
            "When the memory is full the server deletes keys, those of the library too, and tells "
            "nobody: runs are executed twice, or are lost.",
            "CONFIG SET maxmemory-policy noeviction, and the same in the server's configuration. "
            "If the server is a cache, use another one for leases.",
        )
        return
    if deletes:
        findings.note(
            "eviction",
            found,
            "Nothing is deleted as long as there is no maxmemory. As soon as somebody sets one, "
            "keys of the library are deleted when it is full.",
            "CONFIG SET maxmemory-policy noeviction",
        )
    elif policy.startswith("volatile"):
        findings.note(
            "eviction",
            found,
            "Only keys that expire are deleted, and leases do not.",
            "noeviction says the same, and nobody has to think about it.",
        )
    else:
        findings.ok("eviction", found)
    if limit and used >= limit * NEARLY_FULL:
        findings.warning(
            "memory",
            f"{_mib(used)} of {_mib(limit)} are used",
            "When it is full, writes are refused: nothing can be claimed, which is an outage.",
            "Raise maxmemory, or shorten history_ms of the schedulers.",
        )


def _mib(size: int) -> str:
    return f"{size / 1024 / 1024:.1f} MiB"


def _check_persistence(findings: Findings, facts: Facts) -> None:
    info, config = facts.info, facts.config
    stops = config.get("stop-writes-on-bgsave-error", "yes") == "yes"
    snapshot_failed = info.get("rdb_last_bgsave_status", "ok") != "ok"
    if info.get("aof_last_write_status", "ok") != "ok" or (snapshot_failed and stops):
        findings.problem(
            "disk",
            "the server could not write its data to its disk the last time",
            _REFUSED,
            "Look into the server's log: its disk is full or read-only, or it may not write there.",
        )
    if info.get("aof_enabled") != "1":
        _tell_no_file(findings, config)
        return
    how = config.get("appendfsync", "")
    found = f"appendonly is yes, appendfsync {how or 'unknown'}"
    if how == "always":
        findings.ok("persistence", found)
    elif how == "no":
        findings.warning(
            "persistence",
            found,
            f"A crash of the host forgets about half a minute: {_AGAIN}",
            "CONFIG SET appendfsync everysec, or always.",
        )
    else:
        findings.note(
            "persistence",
            found,
            "A crash of the server forgets nothing. A crash of the host forgets "
            f"{'about a second' if how else 'what was not on its disk yet'}: {_AGAIN}",
            "Where that is too much: CONFIG SET appendfsync always.",
        )


def _tell_no_file(findings: Findings, config: Mapping[str, str]) -> None:
    advice = (
        "CONFIG SET appendonly yes, and the same in the server's configuration: a restart before "
        "that forgets everything."
    )
    if config.get("save"):
        findings.problem(
            "persistence",
            f"appendonly is no, snapshots by save {config['save']}",
            f"A crash of the server forgets all since the last snapshot: {_AGAIN}",
            advice,
        )
    elif "save" not in config:
        findings.problem(
            "persistence",
            "appendonly is no; whether there are snapshots is unknown",
            f"A crash of the server forgets everything, or all since the last snapshot: {_AGAIN}",
            advice,
        )
    else:
        findings.problem(
            "persistence",
            "appendonly is no, and there are no snapshots",
            f"A restart of the server forgets everything: {_AGAIN} Nothing is caught up.",
            advice,
        )


def _check_replicas(findings: Findings, facts: Facts) -> None:
    if facts.info.get("role") != "master":
        return
    count = facts.number("connected_slaves")
    asked = facts.config.get("min-replicas-to-write", "")
    least = int(asked) if asked.isdigit() else 0
    good = facts.number("min_slaves_good_slaves")
    if least > good:
        findings.problem(
            "replicas",
            f"min-replicas-to-write is {least}, and {good} replicas are near enough",
            _REFUSED,
            "Bring the replicas back, or lower min-replicas-to-write.",
        )
    elif count and least:
        lag = facts.config.get("min-replicas-max-lag", "?")
        findings.ok("replicas", f"{count}, and writes need {least} that are at most {lag} s behind")
    elif count and asked:
        findings.warning(
            "replicas",
            f"{count}, and min-replicas-to-write is 0",
            "A failover forgets what the new primary had not received, without a bound when the "
            f"old one was cut off from its replicas: {_AGAIN}",
            "CONFIG SET min-replicas-to-write 1 and min-replicas-max-lag 10, and fence what the "
            "handlers write.",
        )
    elif count:
        findings.note(
            "replicas",
            f"{count}; min-replicas-to-write is unknown",
            f"A failover forgets what the new primary had not received: {_AGAIN}",
        )
    elif facts.kind == "sentinel":
        findings.warning(
            "replicas",
            "none, although sentinels watch this server",
            "When it is down there is nothing that could take its place: an outage until it is "
            "back.",
            "Look why the replica does not follow: INFO replication on it.",
        )
    else:
        findings.ok("replicas", "none")


def _check_connections(findings: Findings, facts: Facts) -> None:
    used, limit = facts.number("connected_clients"), facts.number("maxclients")
    if limit and used >= limit * NEARLY_FULL:
        findings.warning(
            "connections",
            f"{used} of {limit} are used",
            "When there is none left an instance cannot connect any more, which is an outage.",
            "Raise maxclients, or end what holds connections (CLIENT LIST).",
        )
    else:
        findings.ok("connections", f"{used}" + (f" of {limit}" if limit else ""))
