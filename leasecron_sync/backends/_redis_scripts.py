"""The scripts that decide in Redis, and the keys that they work on."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from hashlib import sha1

READERS = frozenset({"pending", "states", "history", "history_of_all", "jobs", "rights"})
"""Scripts that write nothing: also a server that is full, or takes no writes, executes them."""

FRUGAL = frozenset({"renew", "settle", "prune"})
"""Scripts that a full server executes, too: they write over what is there, or make room."""

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
    """Return the script of a file in ``_lua``, behind what those of its folder have in common.

    Args:
        name: Of the file, without its ending; with its folder, where that is not ``redis``.
    """
    # With this line the server looks whether it can write before the script begins, not in its
    # middle: nothing is rolled back.
    first = "#!lua"
    if name in READERS:
        first += " flags=no-writes"
    elif name in FRUGAL:
        first += " flags=allow-oom"
    folder = name.rpartition("/")[0]
    files = [f"{folder}/common", name]
    if not folder:
        shared = ("common",) if name in READERS else ("common", "writer")
        files = [f"redis/{file}" for file in (*shared, name)]
    text = "\n".join((first, *map(_text_of, files))).encode()
    digest = sha1(text, usedforsecurity=False).hexdigest()
    return Script(text, digest.encode())


def _text_of(name: str) -> str:
    from importlib import resources  # late: it is slow to import, and needed once

    folder = resources.files("leasecron_sync.backends") / "_lua"
    return folder.joinpath(f"{name}.lua").read_text(encoding="utf-8")


def keys_for(namespace: str, kind: str) -> tuple[str, ...]:
    """Return the keys that the scripts take, in a store of this kind of place."""
    keys = keys_of(namespace)
    shared = keys[0][: -len(_NAMES[0])] if kind == "cluster" else "leasecron:"
    return (*keys, f"{shared}store")


def keys_of(namespace: str) -> tuple[str, ...]:
    """Return the keys of a namespace, which a cluster keeps in one place."""
    tag = hash_tag(namespace)
    return tuple(f"leasecron:{tag}:{name}" for name in _NAMES)


def hash_tag(namespace: str) -> str:
    """Return what a cluster goes by when it decides where a key is kept."""
    tag = namespace
    for special in "%{}":  # the tag ends at the first "}"
        tag = tag.replace(special, f"%{ord(special):02X}")
    return f"{{{tag}}}"
