"""What may be shown of the address of a store."""

from __future__ import annotations

import re


def hide_credentials(url: str) -> str:
    """Return a URL without user, password and parameters, for logs and errors."""
    scheme, separator, rest = url.partition("://")
    if not separator:
        return "***"
    before, _, after = rest.replace("#", "?").partition("?")
    if "@" in after:
        # Either the password holds a delimiter that its user did not encode, or a parameter holds
        # an "@": nobody can tell where the place begins.
        return f"{scheme}://***"
    # At the last "@": a password may hold that, too.
    return f"{scheme}://{before.rpartition('@')[2]}"


_PLACE = ("service", "host", "hostaddr", "port", "dbname")
_PAIR = re.compile(r"\s*(\w+)\s*=\s*('(?:[^'\\]|\\.)*'|(?:[^\s'\\]|\\.)*)")


def shown_dsn(dsn: str) -> str:
    """Return what may be shown of a connection string of libpq: a URL, or keyword=value pairs."""
    if re.match(r"\s*postgres(ql)?://", dsn):
        return hide_credentials(dsn.strip())
    pairs = dict(_PAIR.findall(dsn))
    if re.sub(r"\s", "", _PAIR.sub("", dsn)):
        return "***"  # no such list
    # The name of the database may be a whole connection string of its own.
    return (
        " ".join(
            f"{name}={pairs[name]}"
            for name in _PLACE
            if name in pairs
            and re.fullmatch(r"'?[\w.,:/+@%-]*'?", pairs[name])
            and "//" not in pairs[name]
        )
        or "***"
    )
