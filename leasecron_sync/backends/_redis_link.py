"""One connection to Redis or Valkey on which nothing is sent twice unseen.

redis-py's clients send a command again when its reply was lost, and say nothing. Its connections do
not: one is made here, with the deadline of the call on each step.
"""

from __future__ import annotations

import logging
import re
import select
import socket
from collections.abc import Mapping, Sequence
from typing import Any, Optional

from leasecron_sync.backends._lanes import Deadline
from leasecron_sync.backends._redis_errors import translated, unreachable
from leasecron_sync.backends._redis_place import Address, Place
from leasecron_sync.backends._redis_scripts import script_of
from leasecron_sync.errors import OutcomeUnknown, StoreError, StoreRejected, StoreUnavailable

_logger = logging.getLogger("leasecron_sync.backends.redis")

MAX_REDIRECTS = 5
"""How often nodes of a cluster may send one call on."""


class Link:
    """A connection that is there.

    Args:
        client: The module ``redis``.
        place: Where the store is.
        deadline: By when the connection must stand.
        last: Where it was last, which a cluster is asked at first.

    Raises:
        StoreUnavailable: It does not.

    Attributes:
        address: Where it goes; None for a socket in the file system.
        is_sound: False while a command is under way, and after one whose outcome is unknown.
    """

    def __init__(
        self,
        client: Any,  # noqa: ANN401 - a late import
        place: Place,
        deadline: Deadline,
        last: Optional[Address] = None,
    ) -> None:
        self._client = client
        self._place = place
        self._label = place.label
        self.address: Optional[Address] = None
        self._connection = self._found(deadline, last)
        self.is_sound = True

    # -- making it -------------------------------------------------------------------------------

    def _found(self, deadline: Deadline, last: Optional[Address]) -> Any:  # noqa: ANN401
        place = self._place
        if not place.addresses:
            return self._connected(None, place.options, deadline, tls=False)
        addresses = list(place.addresses)
        if place.kind == "cluster" and last is not None:
            addresses = [last, *(address for address in addresses if address != last)]
        problem: StoreError = StoreUnavailable(f"{self._label} cannot be reached in time")
        while addresses and deadline.left_ms():
            # One that is silent leaves the next ones their share of the time.
            share = Deadline(deadline.left_ms() // len(addresses))
            address = addresses.pop(0)
            try:
                if place.kind == "sentinel":
                    return self._by_sentinel(address, share, deadline, 1 + len(addresses))
                return self._connected(address, place.options, share, tls=place.tls)
            except StoreError as error:
                problem = error
        raise problem

    def _primary(self, sentinel: Address, deadline: Deadline) -> Address:
        """Ask a sentinel where the primary is."""
        place = self._place
        connection = self._connected(
            sentinel, place.of_sentinels, deadline, tls=place.tls_of_sentinels
        )
        try:
            words = ("SENTINEL", "GET-MASTER-ADDR-BY-NAME", place.service)
            found = self._exchanged(connection, words, deadline)
        except self._client.RedisError as error:
            raise unreachable(self._client, error, self._label) from error
        finally:
            self._end(connection)
        if not found:
            message = f"{self._label}: sentinel {sentinel[0]}:{sentinel[1]} knows no such service"
            raise StoreUnavailable(message)
        return found[0].decode(), int(found[1])

    def _by_sentinel(
        self, sentinel: Address, share: Deadline, deadline: Deadline, ways: int
    ) -> Any:  # noqa: ANN401
        """Connect to the primary that a sentinel names; it is one of so many ways to find it."""
        address = self._primary(sentinel, share)
        share = Deadline(deadline.left_ms() // ways)
        place = self._place
        connection = self._connected(address, place.options, share, tls=place.tls)
        self._check_role(connection, share)
        return connection

    def _check_role(self, connection: Any, deadline: Deadline) -> None:  # noqa: ANN401
        """Refuse a replica: a sentinel that is cut off from the others names the old primary."""
        try:
            role = self._exchanged(connection, ("ROLE",), deadline)[0]
        except self._client.ResponseError:
            return  # its user may not ask that; the first command that writes will tell
        except (self._client.RedisError, OSError) as error:
            self._end(connection)
            raise unreachable(self._client, error, self._label) from error
        if role != b"master":
            self._end(connection)
            message = f"{self._label}: the server that a sentinel names is a replica"
            raise StoreUnavailable(message)

    def _connected(
        self,
        address: Optional[Address],
        options: Mapping[str, Any],
        deadline: Deadline,
        *,
        tls: bool,
    ) -> Any:  # noqa: ANN401
        client = self._client
        given = dict(options)
        # The handshake is made here, so that it keeps to the deadline as a whole.
        words = self._handshake(given)
        if address is None:
            made, ways = client.UnixDomainSocketConnection, 1
        else:
            given["host"], given["port"] = address
            made, ways = client.SSLConnection if tls else client.Connection, self._ways(address)
        left_s = max(1, deadline.left_ms()) / 1000
        given.update(
            socket_timeout=left_s,
            socket_connect_timeout=left_s / ways,
            retry=client.retry.Retry(client.backoff.NoBackoff(), 0),
            redis_connect_func=_begin,
            protocol=2,
        )
        connection = made(**given)
        try:
            connection.connect()
            for command in words:
                self._exchanged(connection, command, deadline)
        except (client.RedisError, OSError) as error:
            self._end(connection)
            raise unreachable(client, error, self._label) from error
        except BaseException:
            self._end(connection)
            raise
        self.address = address
        return connection

    def _ways(self, address: Address) -> int:
        """Return how many addresses a name stands for: they are tried one after the other."""
        try:
            return len(socket.getaddrinfo(*address, type=socket.SOCK_STREAM)) or 1
        except (OSError, UnicodeError) as error:
            raise unreachable(self._client, error, self._label) from error

    def _handshake(self, options: dict[str, Any]) -> list[tuple[object, ...]]:
        """Take the options out that are told by commands; return the commands."""
        words: list[tuple[object, ...]] = []
        provider = options.pop("credential_provider", None)
        username, password = options.pop("username", None), options.pop("password", None)
        if provider is not None:
            words.append(("AUTH", *self._credentials(provider)))
        elif password is not None or username is not None:
            named = () if username is None else (username,)
            words.append(("AUTH", *named, password or ""))
        client_name = options.pop("client_name", None)
        if client_name:
            words.append(("CLIENT", "SETNAME", client_name))
        database = options.pop("db", 0)
        if database:
            words.append(("SELECT", database))
        return words

    def _credentials(self, provider: Any) -> Sequence[object]:  # noqa: ANN401 - the user's own
        try:
            return tuple(provider.get_credentials())
        except Exception as error:
            # Not its text: who knows what that shows.
            message = f"{self._label}: the credential provider raised {type(error).__name__}"
            raise StoreUnavailable(message) from error

    # -- using it --------------------------------------------------------------------------------

    def is_quiet(self) -> bool:
        """Tell whether nothing has happened to the connection since its last answer.

        What can be read from an idle one is in most cases the end of it.
        """
        opened = self._connection._sock  # noqa: SLF001 - nothing else tells without waiting
        if opened is None:
            return False
        poller = select.poll()
        poller.register(opened.fileno(), select.POLLIN)
        return not poller.poll(0)

    def call(
        self, name: str, keys: Sequence[str], values: Sequence[object], deadline: Deadline
    ) -> Any:  # noqa: ANN401
        """Execute a script; return what it returns.

        A server that does not know the script, or a node that has not the keys, has executed
        nothing: it is told the script, or another node is asked, in this call.

        Raises:
            StoreError: The server refused, or nobody knows.
        """
        script = script_of(name)
        rest = (len(keys), *keys, *values)
        try:
            return self.ask(("EVALSHA", script.digest, *rest), deadline)
        except StoreUnavailable as error:
            if not isinstance(error.__cause__, self._client.exceptions.NoScriptError):
                raise
        return self.ask(("EVAL", script.text, *rest), deadline)

    def ask(self, words: Sequence[object], deadline: Deadline) -> Any:  # noqa: ANN401
        """Send one command; return the answer.

        Raises:
            StoreError: The server refused, or nobody knows.
        """
        asking = False
        for _ in range(MAX_REDIRECTS):
            try:
                return self._asked(words, deadline, asking=asking)
            except StoreUnavailable as error:
                to = _redirect(self._client.exceptions, error.__cause__)
                if to is None or self._place.kind != "cluster":
                    raise
                asking, host, port = to
                # A node that does not know its own name leaves it out.
                self._move((host or (self.address or ("",))[0], port), deadline)
        message = f"{self._label}: its nodes do not agree on who has the keys"
        raise StoreUnavailable(message)

    def _move(self, address: Address, deadline: Deadline) -> None:
        self.is_sound = False
        before, self._connection = (
            self._connection,
            self._connected(address, self._place.options, deadline, tls=self._place.tls),
        )
        self._end(before)
        self.is_sound = True

    def _asked(self, words: Sequence[object], deadline: Deadline, *, asking: bool) -> Any:  # noqa: ANN401
        kinds = self._client.exceptions
        if not deadline.left_ms():
            message = f"{self._label}: no time was left"
            raise StoreUnavailable(message)
        self.is_sound = False  # until there is an answer, whatever else ends this call
        try:
            if asking:
                self._exchanged(self._connection, ("ASKING",), deadline)
            answer = self._exchanged(self._connection, words, deadline)
        except UnicodeEncodeError as error:  # a surrogate by itself
            self.is_sound = True  # nothing was sent
            message = f"{self._label}: text that cannot be stored: {error.reason}"
            raise StoreRejected(message) from None
        except self._client.RedisError as error:
            if isinstance(error, kinds.NoScriptError) or _redirect(kinds, error):
                self.is_sound = True
                message = f"{self._label}: {str(error) or type(error).__name__}"
                raise StoreUnavailable(message) from error
            problem = translated(self._client, error, self._label)
            if isinstance(error, kinds.ReadOnlyError) and self._place.kind:
                # It was the primary until just now: the next connection finds the new one.
                problem = StoreUnavailable(f"{self._label}: this server is no longer the primary")
            self.is_sound = not isinstance(
                error, (kinds.ConnectionError, kinds.TimeoutError, kinds.ReadOnlyError)
            )
            raise problem from error
        except OSError as error:
            message = f"{self._label}: the connection broke: {type(error).__name__}"
            raise OutcomeUnknown(message) from error
        self.is_sound = True
        return answer

    def _exchanged(self, connection: Any, words: Sequence[object], deadline: Deadline) -> Any:  # noqa: ANN401
        packed = connection.pack_command(*words)
        _limit(connection, deadline)
        connection.send_packed_command(packed, check_health=False)
        return connection.read_response(disable_decoding=True)

    def close(self) -> None:
        """Close the connection; it never raises."""
        self._end(self._connection)

    def _end(self, connection: Any) -> None:  # noqa: ANN401
        try:
            connection.disconnect()
        except (self._client.RedisError, OSError) as error:
            _logger.debug("closing a connection failed error=%r", type(error).__name__)


class _Timed:
    """A socket each of whose steps ends at the deadline of the call that it is part of.

    redis-py gives each of them the same time again, so that a peer that sends a byte now and then,
    or takes a few, would never let a call end.
    """

    deadline: Optional[Deadline] = None

    def __init__(self, opened: Any) -> None:  # noqa: ANN401 - of ``socket`` or ``ssl``
        self._opened = opened

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        return getattr(self._opened, name)

    def sendall(self, data: Any) -> None:  # noqa: ANN401 - as of a socket
        self._limit()
        self._opened.sendall(data)

    def recv(self, size: int) -> bytes:
        self._limit()
        received: bytes = self._opened.recv(size)
        return received

    def recv_into(self, buffer: Any) -> int:  # noqa: ANN401 - as of a socket
        self._limit()
        count: int = self._opened.recv_into(buffer)
        return count

    def _limit(self) -> None:
        if self.deadline is not None:
            left_ms = self.deadline.left_ms()
            if not left_ms:
                message = "no answer in time"
                raise socket.timeout(message)
            self._opened.settimeout(left_ms / 1000)


def _begin(connection: Any) -> None:  # noqa: ANN401 - of a late import
    """Begin to read from a connection; stands in for redis-py's own handshake."""
    connection._sock = _Timed(connection._sock)  # noqa: SLF001 - the parser reads from it
    connection._parser.on_connect(connection)  # noqa: SLF001 - as its own handshake does


def _redirect(
    kinds: Any,  # noqa: ANN401 - of a late import
    error: Any,  # noqa: ANN401 - of a late import
) -> Optional[tuple[bool, str, int]]:
    """Return whether it is for this once, and where to; None when a node sends nobody on.

    In old versions of redis-py only its own cluster clients make exceptions of this.
    """
    if isinstance(error, kinds.AskError):
        return not isinstance(error, kinds.MovedError), error.host, int(error.port)
    found = re.match(r"(MOVED|ASK) \d+ (.*):(\d+)$", str(error))
    return None if found is None else (found[1] == "ASK", found[2], int(found[3]))


def _limit(connection: Any, deadline: Deadline) -> None:  # noqa: ANN401 - of a late import
    opened = connection._sock  # noqa: SLF001 - a time-out of one command has no other place
    if opened is not None:
        opened.deadline = deadline
        opened.settimeout(max(1, deadline.left_ms()) / 1000)
