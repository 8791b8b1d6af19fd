"""The scripts that decide in Redis, and the keys that they work on."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from hashlib import sha1

READERS = frozenset({"pending", "states", "history", "history_of_all", "jobs"})
"""Scripts that write nothing: also a server that is full, or takes no writes, executes them."""

_NAMES = ("meta", "names", "jobs", "runs", "times", "open", "until", "settled")


@dataclass(frozen=True)
class Script:
    """A script.

    Attributes:
        text: What the server executes.
        digest: What it is called by once the server knows it.
    """

    text: bytes
    digest: bytes


@cache
def script_of(name: str) -> Script:
    """Return the script of a file in ``_lua/redis``, behind what all have in common."""
    # With this line the server looks whether it can write before the script begins, not in its
    # middle: nothing is rolled back.
    first = "#!lua flags=no-writes" if name in READERS else "#!lua"
    text = "\n".join((first, _text_of("common"), _text_of(name))).encode()
    digest = sha1(text, usedforsecurity=False).hexdigest()
    return Script(text, digest.encode())


def _text_of(name: str) -> str:
    from importlib import resources  # late: it is slow to import, and needed once

    folder = resources.files("leasecron_sync.backends") / "_lua" / "redis"
    return (folder / f"{name}.lua").read_text(encoding="utf-8")


def keys_for(namespace: str, kind: str) -> tuple[str, ...]:
    """Return the keys that the scripts take, in a store of this kind of place."""
    keys = keys_of(namespace)
    shared = keys[0][: -len(_NAMES[0])] if kind == "cluster" else "leasecron:"
    return (*keys, f"{shared}store")


def keys_of(namespace: str) -> tuple[str, ...]:
    """Return the keys of a namespace, which a cluster keeps in one place."""
    tag = namespace
    for special in "%{}":  # the tag ends at the first "}"
        tag = tag.replace(special, f"%{ord(special):02X}")
    return tuple(f"leasecron:{{{tag}}}:{name}" for name in _NAMES)
