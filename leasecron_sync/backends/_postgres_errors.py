"""What PostgreSQL's errors mean, told without anybody's name or password."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any

from leasecron_sync.errors import (
    OutcomeUnknown,
    StoreError,
    StoreRejected,
    StoreUnavailable,
)

# By code, or by class of codes. After an error whose severity is ERROR the whole transaction was
# undone, so none of these has had an effect.
_TRY_AGAIN = {
    "40": "",  # serialization failure, deadlock
    "53": "",  # too many connections, out of memory
    "55P03": "a lock was held for too long",
    "57014": "it took too long",
    # Missing schema, table and function: the next call makes them, and is told of another store.
    "3F000": "",
    "42P01": "",
    "42883": "",
}
_REJECTED_FOR = {
    "25006": "this server takes no writes: it is a replica, or set to be read-only",
    "42501": "the user needs USAGE on the schema, SELECT, INSERT, UPDATE and DELETE on the tables, "
    "and EXECUTE on the functions",
    "53100": "",  # disk full: nothing is gained by asking at once
}
MISSING = frozenset({"3F000", "42P01", "42883"})
"""Codes of what is not there: schema, table, function."""


def translated(error: Any, label: str) -> StoreError:  # noqa: ANN401 - of a late import
    """Translate what came back after a statement was sent.

    Args:
        error: A ``psycopg2.Error``.
        label: Names the store.
    """
    code = error.pgcode or ""
    if not code or error.diag.severity_nonlocalized != "ERROR" or code.startswith("08"):
        # The connection broke, or the server ended the session: before the commit, or after it.
        return OutcomeUnknown(f"{label}: the connection broke: {_lines(error)[0]}")
    text = f"{label}: {error.diag.message_primary or code}"
    if code in _REJECTED_FOR:
        advice = _REJECTED_FOR[code]
        return StoreRejected(f"{text}: {advice}" if advice else text)
    for known in (code, code[:2]):
        if known in _TRY_AGAIN:
            advice = _TRY_AGAIN[known]
            return StoreUnavailable(f"{text}: {advice}" if advice else text)
    return StoreRejected(text)


def unreachable(error: Exception, label: str, secrets: Collection[str]) -> StoreUnavailable:
    """Translate why there is no connection.

    Args:
        error: Of the client library.
        label: Names the store.
        secrets: Names and passwords that must not be shown.
    """
    text = _lines(error)[-1]  # of the last address that was tried
    # In any language; a name that only libpq knows, from its environment, is quoted in English.
    text = re.sub(r'\b(user|role) "[^"]*"', r'\1 "***"', text)
    for secret in filter(None, secrets):
        text = re.sub(rf"(?<!\w){re.escape(secret)}(?!\w)", "***", text)
    return StoreUnavailable(f"{label} cannot be reached: {text}")


def _lines(error: Exception) -> list[str]:
    """Return the lines of a message without those in which libpq guesses what the reason may be."""
    lines = str(error).splitlines()
    return [line.strip() for line in lines if line.strip() and line[0] != "\t"] or [
        type(error).__name__
    ]
