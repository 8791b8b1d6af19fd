"""One connection to PostgreSQL on which nothing takes longer than it may.

psycopg2's ordinary connections wait without end for a server that has gone silent. Its asynchronous
ones leave the waiting to their user: here, with a deadline.
"""

from __future__ import annotations

import logging
import os
import random
import select
import socket
from collections.abc import Iterable, Mapping
from typing import Any

from leasecron_sync.backends._lanes import Deadline
from leasecron_sync.backends._postgres_errors import MISSING, translated, unreachable
from leasecron_sync.errors import OutcomeUnknown, StoreRejected, StoreUnavailable

_logger = logging.getLogger("leasecron_sync.backends.postgres")

SECRET = ("user", "password", "sslpassword")
"""Parameters whose values are shown to nobody."""

# Behind a pooler a plain SET would go to the next client. The isolation is what the decisions rely
# on, whatever the default of the database is: each statement sees what was committed before it.
_HEAD = (
    "SET TRANSACTION ISOLATION LEVEL READ COMMITTED; "
    "SET LOCAL statement_timeout = {statement_ms}; SET LOCAL lock_timeout = {lock_ms}; "
)


class _SilentError(Exception):
    """The deadline has passed."""


class Link:
    """A connection that is there.

    Args:
        client: The module ``psycopg2``.
        parameters: Of the connection, by their names in libpq.
        label: Names the store in errors.
        deadline: By when the connection must stand; looking a name up does not count.

    Raises:
        StoreUnavailable: It does not.

    Attributes:
        is_sound: False while a statement is under way, and after one whose outcome is unknown.
        misses_something: True after a statement that named a schema, table or function that is not
            there.
    """

    def __init__(
        self,
        client: Any,  # noqa: ANN401 - a late import
        parameters: Mapping[str, str],
        label: str,
        deadline: Deadline,
    ) -> None:
        self._client = client
        self._label = label
        self._connection = self._connected(list(targets(parameters)), deadline)
        self.is_sound = True
        self.misses_something = False

    def _connected(self, places: list[dict[str, str]], deadline: Deadline) -> Any:  # noqa: ANN401
        problem = StoreUnavailable(f"{self._label} cannot be reached in time")
        while places and deadline.left_ms():
            # libpq goes on to the next server, or the next address of a name, only when one
            # refuses, never when one is silent.
            places[:1] = addresses(places[0])
            share = Deadline(deadline.left_ms() // len(places))
            place = places.pop(0)
            connection = None
            try:
                connection = self._client.connect(**place, async_=True)
                self._wait(connection, share)
            except _SilentError:
                problem = StoreUnavailable(f"{self._label} cannot be reached: no answer in time")
            except self._client.Error as error:
                secrets = {place[name] for name in SECRET if name in place}
                problem = unreachable(error, self._label, secrets)
            else:
                return connection
            if connection is not None:
                connection.close()
        raise problem

    def is_quiet(self) -> bool:
        """Tell whether nothing has happened to the connection since its last answer.

        What can be read from an idle one is in most cases the end of it. One on which the server
        said anything else is given up as well: that is rare, and another one is cheap.
        """
        if self._connection.closed:
            return False
        poller = select.poll()
        poller.register(self._connection.fileno(), select.POLLIN)
        return not poller.poll(0)

    def told_pid(self) -> int:
        """Return the number that the peer gave itself at the start; a pooler makes one up."""
        return int(self._connection.get_backend_pid())

    def ask(self, statement: str, values: object, deadline: Deadline) -> list[tuple[Any, ...]]:
        """Send one string of statements, a transaction by itself; return the rows of the last one.

        Args:
            statement: With ``%s`` or ``%(name)s`` for the values.
            values: None where there are no such places.
            deadline: When to give up; the server gives up a little earlier.

        Raises:
            StoreError: The server refused, or nobody knows.
        """
        left_ms = deadline.left_ms()
        head = _HEAD.format(statement_ms=max(1, left_ms * 4 // 5), lock_ms=max(1, left_ms * 3 // 5))
        cursor = self._connection.cursor()
        try:
            text = cursor.mogrify(statement, values)
        except (ValueError, self._client.Error) as error:  # a NUL, or a surrogate by itself
            message = f"{self._label}: text that cannot be stored: {error}"
            raise StoreRejected(message) from error
        if not left_ms:
            message = f"{self._label}: no time was left"
            raise StoreUnavailable(message)
        self.is_sound = False  # until there is an answer, whatever else ends this call
        try:
            cursor.execute(head.encode() + text)
            self._wait(self._connection, deadline)
            rows: list[tuple[Any, ...]] = cursor.fetchall() if cursor.description else []
        except _SilentError:
            message = f"{self._label}: no answer in time"
            raise OutcomeUnknown(message) from None
        except self._client.Error as error:
            problem = translated(error, self._label)
            # Where something is missing, the next connection looks what it is.
            self.misses_something = error.pgcode in MISSING
            self.is_sound = not isinstance(problem, OutcomeUnknown) and not self.misses_something
            raise problem from error
        self.is_sound = True
        cursor.close()
        return rows

    def close(self) -> None:
        """Close the connection; it never raises."""
        try:
            self._connection.close()
        except self._client.Error as error:
            _logger.debug("closing a connection failed error=%r", type(error).__name__)

    def _wait(self, connection: Any, deadline: Deadline) -> None:  # noqa: ANN401
        extensions = self._client.extensions
        poller = select.poll()
        while True:
            state = connection.poll()
            if state == extensions.POLL_OK:
                return
            wanted = select.POLLIN if state == extensions.POLL_READ else select.POLLOUT
            number = connection.fileno()  # another one for the next address of a host
            poller.register(number, wanted)
            left_ms = deadline.left_ms()
            if not left_ms or not poller.poll(left_ms):
                raise _SilentError
            poller.unregister(number)


def with_environment(parameters: Mapping[str, str]) -> dict[str, str]:
    """Add which servers the environment names, as libpq would: there may be several."""
    found = dict(parameters)
    if found.get("service") or os.environ.get("PGSERVICE"):
        return found  # what it names comes first, and only libpq knows it
    for name in ("host", "hostaddr", "port"):
        value = os.environ.get(f"PG{name.upper()}")
        if value and not found.get(name):
            found[name] = value
    return found


def targets(parameters: Mapping[str, str]) -> Iterable[dict[str, str]]:
    """Return the parameters of each server, where they name several."""
    lists = {
        name: parameters[name].split(",")
        for name in ("host", "hostaddr", "port")
        if parameters.get(name)
    }
    count = max((len(lists[name]) for name in ("host", "hostaddr") if name in lists), default=1)
    if count == 1 or any(len(values) not in (1, count) for values in lists.values()):
        return [dict(parameters)]  # libpq says what is wrong with it
    places = [
        {**parameters, **{name: values[number % len(values)] for name, values in lists.items()}}
        for number in range(count)
    ]
    if parameters.get("load_balance_hosts") == "random":
        random.shuffle(places)
    return places


def addresses(place: Mapping[str, str]) -> list[dict[str, str]]:
    """Return the parameters for each address that the name of a server stands for."""
    host = place.get("host", "")
    if not host or place.get("hostaddr") or "," in host or host[0] in "/@":
        return [dict(place)]
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return [dict(place)]  # libpq says what is wrong with it
    known = dict.fromkeys(str(where[0]) for *_kind, where in found)
    return [{**place, "hostaddr": address} for address in known]
