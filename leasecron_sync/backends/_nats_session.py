"""What an open backend in NATS has: the thread with the event loop, and a connection on it."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any, Callable, Optional, TypeVar

from leasecron_sync.backends._lanes import Deadline
from leasecron_sync.backends._nats_link import Link
from leasecron_sync.backends._nats_loop import LoopThread
from leasecron_sync.backends._nats_place import Place
from leasecron_sync.backends._nats_stream import Stream

T = TypeVar("T")

CLOSE_S = 0.5


class Session:
    """From ``open()`` to ``close()``. A connection that broke is replaced by the next call.

    Args:
        client: The module ``nats``.
        place: Where the servers are.
        namespace: The namespace.
    """

    def __init__(self, client: Any, place: Place, namespace: str) -> None:  # noqa: ANN401 - a late import
        self._client = client
        self._place = place
        self._namespace = namespace
        self._loop = LoopThread()
        self._stream: Optional[Stream] = None

    def call(
        self, ask: Callable[[Stream, Deadline], Coroutine[Any, Any, T]], deadline: Deadline
    ) -> T:
        """Ask the stream, over a connection that is there.

        Raises:
            StoreError: No answer, or a refusal.
        """

        async def asked() -> T:
            return await ask(await self._connected(deadline), deadline)

        return self._loop.call(asked, deadline.left_ms() / 1000)

    async def _connected(self, deadline: Deadline) -> Stream:
        stream = self._stream
        if stream is None or not stream.link.is_usable:
            if stream is not None:
                await stream.link.close()
            link = Link(self._client, self._place)
            self._stream = stream = Stream(link, self._namespace, self._place.replicas)
            await link.open(deadline)
        return stream

    def close(self) -> None:
        """End the connection and the thread; bounded, never raises."""
        self._loop.close(self._left, CLOSE_S)

    async def _left(self) -> None:
        if self._stream is not None:
            await self._stream.link.close()
