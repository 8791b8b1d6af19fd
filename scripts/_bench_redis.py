"""Redis and Valkey as bench.py drives them raw."""

from __future__ import annotations

import secrets
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import Any, Callable, Optional

from leasecron_sync.backends._redis_scripts import keys_of
from leasecron_sync.backends.base import LeaseBackend
from leasecron_sync.backends.redis import RedisLease
from scripts._bench_store import Floor, Store, Winners

KEEP_MS = 600_000
STEP = 10_000
SAVE_S = 120.0
POLL_S = 0.1

COPY = """
local name, model = ARGV[1], redis.call('HGET', KEYS[1], ARGV[2])
for ms = tonumber(ARGV[3]), tonumber(ARGV[4]) do
  local member = string.format('%d:%s:%016.0f', #name, name, 1e15 + ms)
  redis.call('HSET', KEYS[1], member, model)
  redis.call('ZADD', KEYS[2], 0, member)
  redis.call('ZADD', KEYS[3], ms, member)
end
"""
"""Copies the record of a run to earlier scheduled times, as common.lua would write them."""


class RedisFloor(Floor):
    """Keys that expire, by a client of redis-py."""

    insert_text = "SET NX PX in one round trip"
    batch_text = "as many of these in one pipeline"
    update_text = "as many SET XX PX in one pipeline"

    def __init__(self, client: Any) -> None:  # noqa: ANN401 - of a package imported late
        self._client = client
        self._prefix = f"bench:{secrets.token_hex(4)}:"
        self._next = self._updates = 0
        self._value = "x" * 100

    def insert(self, count: int) -> None:
        first, self._next = self._next, self._next + count
        if count == 1:
            self._client.set(f"{self._prefix}{first}", self._value, nx=True, px=KEEP_MS)
            return
        with self._client.pipeline(transaction=False) as pipeline:
            for number in range(first, self._next):
                pipeline.set(f"{self._prefix}{number}", self._value, nx=True, px=KEEP_MS)
            pipeline.execute()

    def update(self, count: int) -> None:
        self._updates += 1
        value = f"{self._updates:0{len(self._value)}}"
        with self._client.pipeline(transaction=False) as pipeline:
            for number in range(count):
                pipeline.set(f"{self._prefix}{number}", value, xx=True, px=KEEP_MS)
            pipeline.execute()

    def close(self) -> None:
        for first in range(0, self._next, STEP):
            last = min(first + STEP, self._next)
            self._client.unlink(*(f"{self._prefix}{number}" for number in range(first, last)))
        self._client.close()


class RedisWinners(Winners):
    """Keys that expire, by a client of redis-py."""

    def __init__(self, client: Any) -> None:  # noqa: ANN401 - see above
        self._client = client

    def win(self, keys: Sequence[str]) -> list[str]:
        with self._client.pipeline(transaction=False) as pipeline:
            for key in keys:
                pipeline.set(f"bench:winners:{key}", "", nx=True, px=KEEP_MS)
            return [key for key, won in zip(keys, pipeline.execute()) if won]

    def remove(self) -> None:
        for key in self._client.scan_iter("bench:winners:*", count=STEP):
            self._client.unlink(key)

    def close(self) -> None:
        self._client.close()


class RedisStore(Store):
    """A Redis or Valkey server."""

    def facts(self) -> dict[str, str]:
        with closing(self._client()) as client:
            persistence: dict[str, Any] = client.info("persistence")
            saves = " ".join(_setting(client, "save")) or "none"
            found = {
                "append-only file": "on" if persistence["aof_enabled"] else "off",
                "snapshots": saves,
            }
            if persistence["aof_enabled"]:
                found["appendfsync"] = " ".join(_setting(client, "appendfsync"))
        return {**super().facts(), **found}

    def make_floor(self) -> Floor:
        return RedisFloor(self._client())

    def make_winners(self) -> Optional[Winners]:
        return RedisWinners(self._client())

    def fill(self, namespace: str, job: str, count: int) -> bool:
        _meta, _names, _jobs, runs, times, _open, _until, settled = keys_of(namespace)
        with closing(self._client()) as client:
            copy = client.register_script(COPY)
            (model,) = client.zrange(settled, 0, 0)
            for first in range(1, count + 1, STEP):
                last = min(first + STEP - 1, count)
                copy(keys=(runs, times, settled), args=(job, model, first, last))
            _saved(client)
        return True

    def empty(self, namespace: str) -> None:
        with closing(self._client()) as client:
            client.unlink(*keys_of(namespace))

    def count_transactions(self, backend: LeaseBackend) -> Callable[[], int]:
        assert isinstance(backend, RedisLease)
        made: Counter[None] = Counter()
        step = backend._call  # noqa: SLF001 - the one place where a script is called

        def counted(*arguments: Any, **options: Any) -> Any:  # noqa: ANN401 - see above
            made[None] += 1
            return step(*arguments, **options)

        backend._call = counted  # type: ignore[method-assign]  # noqa: SLF001
        return lambda: made[None]

    def _client(self) -> Any:  # noqa: ANN401 - see above
        import redis

        scheme, rest = self.url.split(":", 1)
        scheme = scheme.lower().replace("valkey", "redis")  # the client's name for it
        return redis.Redis.from_url(f"{scheme}:{rest}")


def _setting(client: Any, name: str) -> Iterator[str]:  # noqa: ANN401 - see above
    import redis

    try:
        yield client.config_get(name)[name]
    except redis.ResponseError:  # kept from this user
        yield "unknown"


def _saved(client: Any) -> None:  # noqa: ANN401 - see above
    """Have the snapshot made now that the server would make in the middle of the measurement."""
    if "".join(_setting(client, "save")) in ("", "unknown"):
        return
    until_s = time.monotonic() + SAVE_S
    begun = False
    while time.monotonic() < until_s:
        if not client.info("persistence")["rdb_bgsave_in_progress"]:
            if begun:
                return
            client.bgsave()
            begun = True
        time.sleep(POLL_S)
