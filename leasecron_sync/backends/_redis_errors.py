"""What the errors of Redis mean, told without anybody's name or password."""

from __future__ import annotations

import re
from typing import Any

from leasecron_sync.errors import (
    OutcomeUnknown,
    StoreError,
    StoreRejected,
    StoreUnavailable,
    StoreUnsupported,
)
from leasecron_sync.model import STORE_FORMAT

# Refusals that end by themselves. The scripts declare whether they write, so the server looks
# before it begins one: nothing was executed.
_TRY_AGAIN = ("BUSY", "TRYAGAIN", "CLUSTERDOWN", "MASTERDOWN", "LOADING", "NOREPLICAS")

_FOR_NOW = {
    "LEASECRON_LOST": "it has lost its data",
    # A server lets its operator do so only before the first write.
    "Script killed by user": "its operator ended the script before it wrote anything",
}

# Of a command within a script: as Redis says it, and Valkey.
_NO_RIGHT = ("executing the script can't", "ACL failure in script")


def translated(client: Any, error: Any, label: str) -> StoreError:  # noqa: ANN401 - of a late import
    """Translate what came back after a command was sent.

    Args:
        client: The module ``redis``.
        error: A ``redis.RedisError``.
        label: Names the store.
    """
    text = _without_user(str(error))
    kinds = client.exceptions
    if isinstance(error, (kinds.ConnectionError, kinds.TimeoutError)):
        return _broken(kinds, error, text, label)
    if isinstance(error, kinds.ReadOnlyError):
        return StoreRejected(
            f"{label}: this server takes no writes, it is a replica: name the primary"
        )
    if isinstance(error, kinds.NoPermissionError) or any(words in text for words in _NO_RIGHT):
        return StoreRejected(
            f"{label}: {text}: the user needs EVAL, EVALSHA and the commands of the scripts on the "
            "keys leasecron:*"
        )
    again = (kinds.ClusterDownError, kinds.TryAgainError)
    if isinstance(error, again) or text.startswith(_TRY_AGAIN):
        return StoreUnavailable(f"{label}: {text}")
    for words, why in _FOR_NOW.items():
        if words in text:
            return StoreUnavailable(f"{label}: {why}")
    return _refused(text, label)


def _broken(kinds: Any, error: Exception, text: str, label: str) -> StoreError:  # noqa: ANN401
    if isinstance(error, kinds.BusyLoadingError):
        return StoreUnavailable(f"{label} is loading its data")
    if isinstance(error, (kinds.AuthenticationError, kinds.AuthorizationError)):
        return StoreRejected(f"{label} asks for a user or password: {text}")
    if "max number of clients" in text:
        return StoreUnavailable(f"{label} has too many connections: {text}")
    return OutcomeUnknown(f"{label}: the connection broke: {text}")


def _refused(text: str, label: str) -> StoreError:
    if "LEASECRON_FORMAT" in text:
        found = text.rpartition(" ")[2]
        return StoreUnsupported(
            f"{label} has store format {found}, this version of leasecron_sync reads "
            f"{STORE_FORMAT}: use a version that knows it"
        )
    if "LEASECRON_TYPE" in text:
        return StoreRejected(f"{label}: a key belongs to something else: {text.partition(' ')[2]}")
    if "LEASECRON_IDMP" in text:
        return StoreUnsupported(
            f"{label}: the strategy 'idmp' needs Redis 8.6 or newer: use 'script', which any has"
        )
    if "LEASECRON_SETTINGS" in text:
        return StoreUnsupported(
            f"{label}: a stream has other settings than this version of leasecron_sync gives it: "
            f"{text.partition(' ')[2]}; stop all schedulers on it and delete that key"
        )
    if "compiling script" in text:
        return StoreUnsupported(f"{label} is older than Redis 7: a newer one, or Valkey, is needed")
    # Of a script that broke off half-way nothing is rolled back.
    kind = OutcomeUnknown if "on @user_script:" in text else StoreRejected
    return kind(f"{label}: {text}")


def unreachable(client: Any, error: Exception, label: str) -> StoreError:  # noqa: ANN401 - a late import
    """Translate why there is no connection."""
    kinds = client.exceptions
    text = _without_user(str(error)) or type(error).__name__
    if isinstance(error, kinds.TimeoutError):
        text = "no answer in time"
    return StoreUnavailable(f"{label} cannot be reached: {text}")


def _without_user(text: str) -> str:
    return re.sub(r"\b([Uu]ser) (?!is\b|or\b|needs\b|has\b|executing\b)\S+", r"\1 ***", text)
