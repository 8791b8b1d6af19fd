"""The stores of claims driven raw: the smallest thing that decides who is first in each of them."""

from __future__ import annotations

import asyncio
import secrets
from abc import abstractmethod
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from typing import Any, ClassVar

from leasecron_sync.backends import _nats_place, _rabbitmq_place
from scripts._bench_store import CALL_TIMEOUT_MS, Winners

KEEP_MS = 120_000
STEP = 10_000


class Raw(Winners):
    """Decides who is first, by the least that the store can do for it.

    A key is a number and a name, as in ``1764489600 job 00003``; the numbers of a name rise.

    Args:
        prefix: Keeps what it writes apart; objects with the same prefix compete.
    """

    one_text: ClassVar[str]
    """What ``put`` does for one key."""

    batch_text: ClassVar[str]
    """What it does for several."""

    def __init__(self, prefix: str) -> None:
        self._prefix = f"bench:{prefix}"
        # As long as a decision of the library; another one for each object.
        self._value = secrets.token_hex(18)

    @abstractmethod
    def put(self, keys: Sequence[str]) -> Sequence[Any]:
        """Do it for each key, at once where the client can; return the answers."""

    def put_each(self, keys: Sequence[str]) -> None:
        """Do it for one key after the other."""
        for key in keys:
            self.put([key])

    @abstractmethod
    def _is_first(self, answer: Any) -> bool: ...  # noqa: ANN401 - of a client

    def win(self, keys: Sequence[str]) -> list[str]:
        return [key for key, answer in zip(keys, self.put(keys)) if self._is_first(answer)]


class RedisRaw(Raw):
    """Commands of redis-py."""

    batch_text = "as many of these in one pipeline"

    def __init__(self, client: Any, prefix: str) -> None:  # noqa: ANN401 - of a package imported late
        super().__init__(prefix)
        self._client = client

    @abstractmethod
    def _send(self, client: Any, key: str) -> Any: ...  # noqa: ANN401 - see above

    def put(self, keys: Sequence[str]) -> Sequence[Any]:
        if len(keys) == 1:
            with suppress(_errors()):
                return [self._send(self._client, keys[0])]
            return [None]
        with self._client.pipeline(transaction=False) as pipeline:
            for key in keys:
                self._send(pipeline, key)
            answers: Sequence[Any] = pipeline.execute(raise_on_error=False)
            return answers

    def _is_first(self, answer: Any) -> bool:  # noqa: ANN401 - see above
        return bool(answer) and not isinstance(answer, Exception)

    def remove(self) -> None:
        for key in self._client.scan_iter(f"{self._prefix}:*", count=STEP):
            self._client.unlink(key)

    def close(self) -> None:
        self._client.close()


def _errors() -> type[Exception]:
    import redis

    return redis.ResponseError


class KeyRaw(RedisRaw):
    """Beside ``script``."""

    one_text = "SET NX PX in one round trip"

    def _send(self, client: Any, key: str) -> Any:  # noqa: ANN401 - see above
        return client.set(f"{self._prefix}:{key}", self._value, nx=True, px=KEEP_MS)


class StreamRaw(RedisRaw):
    """Beside ``stream-id``."""

    one_text = "XADD with an explicit id in one round trip"

    def _send(self, client: Any, key: str) -> Any:  # noqa: ANN401 - see above
        number, _, name = key.partition(" ")
        place = f"{self._prefix}:{name}"
        return client.execute_command("XADD", place, f"{number}-0", "decision", self._value)


class IdempotentRaw(RedisRaw):
    """Beside ``idmp``. The command itself tells nobody who was first: ``win`` reads that."""

    one_text = "XADD with IDMP in one round trip (which does not tell the winner yet)"

    def _send(self, client: Any, key: str) -> Any:  # noqa: ANN401 - see above
        number, _, name = key.partition(" ")
        place = f"{self._prefix}:idmp"
        return client.execute_command(
            "XADD", place, "IDMP", name, number, "*", "decision", self._value
        )

    def win(self, keys: Sequence[str]) -> list[str]:
        if not keys:
            return []
        with self._client.pipeline(transaction=False) as pipeline:
            for entry in self.put(keys):
                pipeline.xrange(f"{self._prefix}:idmp", entry, entry)
            rows = pipeline.execute()
        mine = self._value.encode()
        return [key for key, found in zip(keys, rows) if found and found[0][1][b"decision"] == mine]


class NatsRaw(Raw):
    """nats-py with an event loop that runs while it is asked."""

    one_text = "publish with Nats-Msg-Id and the wait for its confirmation, by nats-py in its loop"
    batch_text = "as many of these at once"

    def __init__(self, url: str, prefix: str) -> None:
        super().__init__(prefix)
        self._stream = self._prefix.replace(":", "-")
        self._loop = asyncio.new_event_loop()
        self._client, self._jetstream = self._run(self._connected(url))

    async def _connected(self, url: str) -> tuple[Any, Any]:
        import nats

        place = _nats_place.place_of_url(url)
        client = await nats.connect(servers=list(place.servers), **place.connect_options())
        jetstream = client.jetstream(timeout=CALL_TIMEOUT_MS / 1000)
        seconds = KEEP_MS / 1000
        await jetstream.add_stream(
            name=self._stream, subjects=[self._stream], max_age=seconds, duplicate_window=seconds
        )
        return client, jetstream

    def _run(self, work: Coroutine[Any, Any, Any]) -> Any:  # noqa: ANN401 - whatever it returns
        return self._loop.run_until_complete(work)

    async def _publish(self, key: str) -> Any:  # noqa: ANN401 - of the client
        return await self._jetstream.publish(
            self._stream, self._value.encode(), headers={"Nats-Msg-Id": key}
        )

    def put(self, keys: Sequence[str]) -> Sequence[Any]:
        async def put() -> Sequence[Any]:
            return await asyncio.gather(*map(self._publish, keys))

        answers: Sequence[Any] = self._run(put())
        return answers

    def put_each(self, keys: Sequence[str]) -> None:
        async def put() -> None:
            for key in keys:
                await self._publish(key)

        self._run(put())

    def _is_first(self, answer: Any) -> bool:  # noqa: ANN401 - of the client
        return not answer.duplicate

    def remove(self) -> None:
        self._run(self._jetstream.delete_stream(self._stream))

    def close(self) -> None:
        self._run(self._client.close())
        self._loop.close()


class RabbitMQRaw(Raw):
    """pika's blocking connection, which does one thing after the other."""

    one_text = "a queue with room for one message declared, and a message published and confirmed"
    batch_text = "as many of these, one after the other: pika's blocking connection cannot else"

    def __init__(self, url: str, prefix: str) -> None:
        import pika

        super().__init__(prefix)
        self._refused = pika.exceptions.NackError
        parameters = _rabbitmq_place.place_of_url(url).parameters(pika)
        self._connection = pika.BlockingConnection(parameters)
        self._channel = self._connection.channel()
        self._channel.confirm_delivery()
        self._persistent = pika.BasicProperties(delivery_mode=2)
        self._arguments = {
            "x-max-length": 1,
            "x-overflow": "reject-publish",
            "x-expires": KEEP_MS,
        }

    def put(self, keys: Sequence[str]) -> Sequence[Any]:
        return [self._put_one(f"{self._prefix}:{key}") for key in keys]

    def _put_one(self, queue: str) -> bool:
        self._channel.queue_declare(queue, durable=True, arguments=self._arguments)
        try:
            self._channel.basic_publish(
                "", queue, self._value.encode(), self._persistent, mandatory=True
            )
        except self._refused:
            return False
        return True

    def _is_first(self, answer: Any) -> bool:  # noqa: ANN401 - see the base class
        return bool(answer)

    def remove(self) -> None:
        """Leave it to the broker: each queue goes by itself soon."""

    def close(self) -> None:
        self._connection.close()
