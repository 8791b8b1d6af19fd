"""What RabbitMQ and pika say of an error, in words that may be shown."""

from __future__ import annotations

import re
from typing import Any, Optional

from leasecron_sync.errors import StoreError, StoreUnavailable, StoreUnsupported

ACCESS_REFUSED, NOT_FOUND, PRECONDITION_FAILED, NOT_ALLOWED = 403, 404, 406, 530


def reason_of(error: Any) -> str:  # noqa: ANN401 - pika's errors nest each other in several ways
    """Return what the broker said, without the user, or what happened to the connection."""
    inner = (
        *tuple(getattr(error, "exceptions", None) or ())[-1:],
        getattr(error, "exception", None),
        *getattr(error, "args", ())[:1],
    )
    for part in inner:
        if isinstance(part, BaseException):
            return reason_of(part)
    text = str(getattr(error, "reply_text", "")) or str(error) or type(error).__name__
    return re.sub(r"user '[^']*'", "this user", text)


def code_of(error: Any) -> Optional[int]:  # noqa: ANN401 - pika's
    """Return the number that the broker gave as its reason; None if it gave none."""
    code = getattr(error, "reply_code", None)
    if isinstance(code, int):
        return code
    # While a connection is made pika puts the text of what it met into another error, and guesses:
    # one that was cut would pass for a wrong password.
    found = re.search(r"ConnectionClosedByBroker: \((\d{3})\)", str(error))
    return int(found[1]) if found else None


def why_unreachable(label: str, error: Optional[BaseException]) -> StoreError:
    """Return the error that tells why there is no connection.

    Args:
        label: Names the broker.
        error: What happened to it; None when there was no answer.
    """
    if error is None:
        return StoreUnavailable(f"{label} cannot be reached: no answer in time")
    code, reason = code_of(error), reason_of(error)
    if code == ACCESS_REFUSED:
        return StoreUnavailable(f"{label} refuses this user or password")
    # The same code is used where a limit of connections is reached, which passes.
    if code in (NOT_ALLOWED, NOT_FOUND) and "limit" not in reason:
        return StoreUnsupported(
            f"{label}: there is no such vhost, or this user has no access to it: make it "
            "with `rabbitmqctl add_vhost` and `rabbitmqctl set_permissions`"
        )
    return StoreUnavailable(f"{label} cannot be reached: {reason}")
