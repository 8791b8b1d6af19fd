"""The kinds of stores of claims that bench.py knows, and how each is driven raw."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, ClassVar, Optional
from urllib.parse import unquote

from leasecron_sync import connect_claim
from leasecron_sync.backends.base import BackendSettings, ClaimBackend
from leasecron_sync.backends.nats import NatsClaim
from leasecron_sync.backends.rabbitmq import RabbitMQClaim
from leasecron_sync.backends.redis_claim import RedisClaim
from scripts._bench_claim_raw import (
    IdempotentRaw,
    KeyRaw,
    NatsRaw,
    RabbitMQRaw,
    Raw,
    RedisRaw,
    StreamRaw,
)
from scripts._bench_store import AnyStore, Winners

if TYPE_CHECKING:
    from scripts._bench_broker import Broker

CALL_TIMEOUT_MS = 20_000
"""Batches here are larger than those of a scheduler."""


class ClaimStore(AnyStore):
    """A store of claims.

    Args:
        url: What ``connect_claim`` takes.

    Attributes:
        broker: The server itself, when it is one of these figures alone.
    """

    client: ClassVar[str]
    """The package that it is reached by."""

    most: ClassVar[int] = 1_000
    """The largest batch that is measured."""

    has_gates: ClassVar[bool] = False
    """Whether each run leaves something behind that costs the server for a while."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.broker: Optional[Broker] = None

    def facts(self) -> dict[str, str]:
        with closing(self.opened("bench-facts")) as backend:
            return {"store": backend.probe().version, "client": f"{self.client} {self._client()}"}

    def _client(self) -> str:
        return version(self.client)

    def opened(self, namespace: str, instance_id: str = "bench") -> ClaimBackend:
        """Return a new backend, ready for calls."""
        backend = connect_claim(self.url)
        backend.open(BackendSettings(namespace, instance_id, CALL_TIMEOUT_MS))
        return backend

    def make_raw(self, prefix: str) -> Optional[Raw]:
        """Return what drives it raw, if this kind has that here."""
        del prefix
        return None

    @contextmanager
    def raw(self, prefix: str) -> Iterator[Optional[Raw]]:
        """Give what drives it raw, and leave nothing of it behind."""
        raw = self.make_raw(prefix)
        if raw is None:
            yield None
            return
        with closing(raw):
            try:
                yield raw
            finally:
                raw.remove()

    def make_winners(self) -> Optional[Winners]:
        return self.make_raw("winners")


class RedisClaimStore(ClaimStore):
    """A Redis or Valkey server, by one of the strategies."""

    client = "redis"

    _raws: ClassVar[dict[str, type[RedisRaw]]] = {
        "script": KeyRaw,
        "stream-id": StreamRaw,
        "idmp": IdempotentRaw,
    }

    def facts(self) -> dict[str, str]:
        return {**super().facts(), "strategy": self._strategy()}

    def _strategy(self) -> str:
        backend = connect_claim(self.url)
        assert isinstance(backend, RedisClaim)
        return backend.strategy

    def make_raw(self, prefix: str) -> Optional[Raw]:
        scheme, _, rest = self.url.partition(":")
        if "+" in scheme:  # sentinels and clusters
            return None
        return self._raws[self._strategy()](self._plain_client(scheme, rest), prefix)

    def _plain_client(self, scheme: str, rest: str) -> Any:  # noqa: ANN401 - of a package imported late
        import redis

        place, _, query = rest.partition("?")
        parts = [part for part in query.split("&") if unquote(part.partition("=")[0]) != "strategy"]
        scheme = scheme.lower().replace("valkey", "redis")  # the client's name for it
        return redis.Redis.from_url(f"{scheme}:{place}{'?' if parts else ''}{'&'.join(parts)}")


class NatsStore(ClaimStore):
    """A NATS server with JetStream."""

    client = "nats-py"

    def make_raw(self, prefix: str) -> Optional[Raw]:
        return NatsRaw(self.url, prefix)


class RabbitMQStore(ClaimStore):
    """A RabbitMQ broker. Each claim leaves a queue for ten minutes, so there are fewer of them."""

    client = "pika"
    most = 100
    has_gates = True

    def make_raw(self, prefix: str) -> Optional[Raw]:
        return RabbitMQRaw(self.url, prefix)


KINDS: dict[type[ClaimBackend], type[ClaimStore]] = {
    RedisClaim: RedisClaimStore,
    NatsClaim: NatsStore,
    RabbitMQClaim: RabbitMQStore,
}


def claim_store_of(url: str, backend: Optional[ClaimBackend] = None) -> ClaimStore:
    """Return the store of claims that a URL names.

    Args:
        url: What ``connect_claim`` takes.
        backend: What it returns, where that is known already.

    Raises:
        ValueError: It names none.
    """
    return KINDS[type(backend or connect_claim(url))](url)
