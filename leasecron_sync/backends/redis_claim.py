"""A claim backend in a Redis or Valkey server, by one of three mechanisms."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Callable, ClassVar, Optional

from leasecron_sync.backends._lanes import Deadline, Lane, close_lane
from leasecron_sync.backends._redis_caller import Caller
from leasecron_sync.backends._redis_info import Server, server_of
from leasecron_sync.backends._redis_link import Link
from leasecron_sync.backends._redis_scripts import hash_tag
from leasecron_sync.backends.base import BackendSettings, ClaimBackend
from leasecron_sync.errors import MissingDependency, StoreUnsupported
from leasecron_sync.model import ClaimReply, OnceClaim, RunKey, StoreInfo, Verdict

IDMP_KEEP_S, IDMP_KEEP_IDS = 600, 10_000
"""How long the map of ``idmp`` remembers, and how many ids of a job, as its script has it: both are
constants of the store's format."""

IDMP_WINDOW_MS = IDMP_KEEP_S * 1_000 // 2


def _once_key(tag: str, run: RunKey) -> str:
    return f"leasecron:{tag}:once:{len(run.job)}:{run.job}:{run.scheduled_ms}"


def _stream_key(tag: str, run: RunKey) -> str:
    return f"leasecron:{tag}:stream:{run.job}"


def _idmp_key(tag: str, _run: RunKey) -> str:
    return f"leasecron:{tag}:idmp"


_KEYS: dict[str, Callable[[str, RunKey], str]] = {
    "script": _once_key,
    "stream-id": _stream_key,
    "idmp": _idmp_key,
}

STRATEGIES = tuple(_KEYS)
"""The mechanisms, the usual one first."""


class RedisClaim(ClaimBackend):
    """Picks one winner for each run through a Redis or Valkey server, and can do no more.

    Nothing records that a winner stopped: a run whose winner crashed is lost. ``RedisLease`` takes
    such a run over, on the same server.

    What the server forgets can be won again: see ``RedisLease`` for what makes it forget. All
    instances of a namespace need the same strategy, since none sees the claims of another.

    - ``script`` sets a key once. It remembers as long as any ``claim_window_ms`` asks for.
    - ``stream-id`` adds to a stream of the job under the scheduled time. An older run cannot be
      claimed once a newer one of its job was.
    - ``idmp`` adds to a stream under an idempotent id, and needs Redis 8.6 or newer. It remembers
      for 10 minutes, and so allows a ``claim_window_ms`` of up to 300,000.

    All of them judge early and too old by the server's clock, and tell a repeated claim from
    another one's after a lost reply.

    Args:
        server: A URL or a client, as ``RedisLease`` takes it.
        strategy: ``"script"``, ``"stream-id"`` or ``"idmp"``.

    Raises:
        TypeError: ``server`` is neither a URL nor a client.
        ValueError: The URL or the strategy is wrong.

    Attributes:
        strategy: The mechanism.
    """

    name: ClassVar[str] = "redis-claim"

    # Tests put a reading of their own here; else the server's clock is read where it decides.
    _now_ms: Optional[Callable[[], int]] = None

    def __init__(self, server: Any, *, strategy: str = "script") -> None:  # noqa: ANN401 - a client is of a package imported late
        if strategy not in STRATEGIES:
            message = f"strategy {strategy!r} is unknown: use one of {', '.join(STRATEGIES)}"
            raise ValueError(message)
        self._caller = Caller(server, "RedisClaim")
        self.strategy = strategy
        self._tag = ""
        self._lane: Lane[Link] = Lane(Link.close)
        self.max_window_ms = IDMP_WINDOW_MS if strategy == "idmp" else None

    def __repr__(self) -> str:
        """Show the place without user and password."""
        return f"RedisClaim({self._caller.label!r}, strategy={self.strategy!r})"

    def open(self, settings: BackendSettings) -> None:
        try:
            import redis
        except ImportError as error:
            message = (
                "RedisClaim needs the package redis: pip install 'leasecron_sync[redis]'; it "
                "is the one for Valkey, too"
            )
            raise MissingDependency(message) from error
        self._caller.open(redis, settings)
        self._tag = hash_tag(settings.namespace)

    def close(self) -> None:
        self._caller.close()
        close_lane(self._lane)

    def discard(self) -> None:
        self._caller.close()
        self._lane.abandon()
        self._lane = Lane(Link.close)

    def probe(self) -> StoreInfo:
        caller, deadline = self._caller, self._caller.deadline()
        keys = (self.key,)
        with caller.linked(self._lane, deadline) as link:
            server = server_of(link, caller.label, deadline)
            asked = link.address
            store_ms = self._call(link, "probe", keys, (), deadline)
            if link.address != asked:  # another node of the cluster has the keys
                server = server_of(link, caller.label, deadline)
            if self.strategy == "idmp":
                self._meet_stream(link, server, keys, deadline)
        return StoreInfo(server.version, store_ms, warnings=server.warnings)

    def _meet_stream(
        self, link: Link, server: Server, keys: Sequence[str], deadline: Deadline
    ) -> None:
        """Make the stream, where it is not there.

        Raises:
            StoreUnsupported: This server cannot have it, or it was made by somebody else.
        """
        try:
            self._call(link, self.strategy, keys, (), deadline)
        except StoreUnsupported as error:
            message = f"{error} (this is {server.version})"
            raise StoreUnsupported(message) from error

    @property
    def caller(self) -> Caller:
        """What knows where the server is, once it is open."""
        return self._caller

    @property
    def key(self) -> str:
        """A key of the namespace; of ``idmp`` the only one."""
        return _KEYS[self.strategy](self._tag, RunKey("", 0))

    def claim(self, claims: Sequence[OnceClaim]) -> Sequence[ClaimReply]:
        if not claims:
            return []
        caller, deadline = self._caller, self._caller.deadline()
        keys = [_KEYS[self.strategy](self._tag, claim.key) for claim in claims]
        values = [
            value
            for claim in claims
            for value in (*claim.key, claim.due_ms, claim.window_ms, claim.decision_id)
        ]
        with caller.linked(self._lane, deadline) as link:
            rows = self._call(link, self.strategy, keys, values, deadline)
        return [ClaimReply(Verdict(verdict.decode()), wait_ms) for verdict, wait_ms in rows]

    def _call(
        self,
        link: Link,
        script: str,
        keys: Sequence[str],
        values: Sequence[object],
        deadline: Deadline,
    ) -> Any:  # noqa: ANN401
        now = "" if self._now_ms is None else self._now_ms()
        name = f"redis_claim/{script.replace('-', '_')}"
        return link.call(name, keys, (now, *values), deadline)
