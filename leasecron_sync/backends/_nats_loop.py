"""An event loop in a thread of its own, for a client that needs one.

Everything that the loop needs later is made with it: at the end of the interpreter no thread can be
started, and no executor made.
"""

from __future__ import annotations

import asyncio
import logging
import os
import queue
import selectors
import socket
import threading
from collections.abc import Coroutine
from concurrent.futures import CancelledError
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import suppress
from typing import Any, Callable, Optional, TypeVar, Union
from weakref import WeakSet

from leasecron_sync.errors import OutcomeUnknown, StoreUnavailable

T = TypeVar("T")

_logger = logging.getLogger("leasecron_sync.backends.nats")

NAME = "leasecron-nats"
CLOSE_S = 0.5
SPARE_S = 0.25
"""How much longer than a call the thread that waits for it does: the call ends by itself."""

_Question = tuple["asyncio.Future[Any]", tuple[Any, ...]]


class _Resolver(threading.Thread):
    """Looks names of hosts up, which can take long, and cannot be given up."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(name=f"{NAME}-names", daemon=True)
        self._loop = loop
        self.asked: queue.SimpleQueue[Optional[_Question]] = queue.SimpleQueue()

    def run(self) -> None:
        for future, where in iter(self.asked.get, None):
            result: Any = None
            error: Optional[Exception] = None
            try:
                result = socket.getaddrinfo(*where)
            except Exception as raised:  # noqa: BLE001 - whatever it is, it is raised where it is awaited
                error = raised
            try:
                self._loop.call_soon_threadsafe(_answer, future, result, error)
            except RuntimeError:  # the loop is closed
                return


def _answer(future: asyncio.Future[Any], result: Any, error: Optional[Exception]) -> None:  # noqa: ANN401
    if future.done():
        return
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)


class Loop(asyncio.SelectorEventLoop):
    """Asks a thread for addresses, and not an executor, which is waited for at exit.

    It can end every connection that was made on it, and does nothing in a forked child, not when it
    is thrown away there either. A child shares with its parent what ``epoll`` watches, but not what
    ``poll`` does.
    """

    def __init__(self) -> None:
        super().__init__(selectors.PollSelector())
        self.resolver = _Resolver(self)
        self._pid = os.getpid()
        self._connections: WeakSet[asyncio.BaseTransport] = WeakSet()
        self.set_exception_handler(_note)

    async def getaddrinfo(  # noqa: PLR0913 - see the base class
        self,
        host: Optional[Union[str, bytes]],
        port: Optional[Union[str, bytes, int]],
        *,
        family: int = 0,
        type: int = 0,  # noqa: A002 - likewise
        proto: int = 0,
        flags: int = 0,
    ) -> list[Any]:
        future: asyncio.Future[list[Any]] = self.create_future()
        self.resolver.asked.put((future, (host, port, family, type, proto, flags)))
        return await future

    async def create_connection(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - see the base class
        made = await super().create_connection(*args, **kwargs)
        self._connections.add(made[0])
        return made

    async def start_tls(
        self,
        transport: Any,  # noqa: ANN401 - see the base class
        protocol: Any,  # noqa: ANN401 - likewise
        *args: Any,  # noqa: ANN401 - likewise
        **kwargs: Any,  # noqa: ANN401 - likewise
    ) -> Any:  # noqa: ANN401 - likewise
        ended = protocol.eof_received

        def eof_received() -> None:
            # The client's protocol was not made for TLS: it asks to be kept open, which cannot be
            # had there, and asyncio would warn of that at the end of each connection.
            ended()

        protocol.eof_received = eof_received
        return await super().start_tls(transport, protocol, *args, **kwargs)

    def end_connections(self) -> None:
        """End the connections, whatever is left to be sent; a client may have forgotten one."""
        for transport in list(self._connections):
            assert isinstance(transport, asyncio.WriteTransport)
            transport.abort()

    def is_closed(self) -> bool:
        # What is thrown away asks this before it closes what belongs to the parent.
        return super().is_closed() or os.getpid() != self._pid


def _note(_loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    # What goes wrong in the background shows as a call without an answer.
    _logger.debug("the event loop tells message=%r", context.get("message"))


class LoopThread:
    """Runs coroutines for other threads."""

    def __init__(self) -> None:
        self._loop = Loop()
        self._lock = threading.Lock()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=NAME, daemon=True)
        self._loop.resolver.start()
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
            self._loop.run_until_complete(self._ended())
        finally:
            self._loop.close()

    async def _ended(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=CLOSE_S)
        self._loop.end_connections()
        await asyncio.sleep(0)  # each is told that it is lost, and closes its socket

    def call(self, make: Callable[[], Coroutine[Any, Any, T]], timeout_s: float) -> T:
        """Run a coroutine to its end.

        Args:
            make: Makes the coroutine, which ends by itself in time.
            timeout_s: When to give it up all the same.

        Raises:
            StoreUnavailable: The loop is closed.
            OutcomeUnknown: It did not end.
        """
        with self._lock:
            if self._closed:
                message = "the connection is closed"
                raise StoreUnavailable(message)
            future = asyncio.run_coroutine_threadsafe(make(), self._loop)
        try:
            try:
                return future.result(timeout_s + SPARE_S)
            except FutureTimeoutError:
                if not future.cancel():  # it ended just now
                    return future.result(0)
        except CancelledError:
            message = "the call was given up when the connection was closed"
            raise OutcomeUnknown(message) from None
        message = "the event loop did not answer in time"
        raise OutcomeUnknown(message)

    def close(self, last: Callable[[], Coroutine[Any, Any, None]], timeout_s: float) -> None:
        """End the loop and its threads; bounded, never raises.

        Args:
            last: Made and run before that.
            timeout_s: How long it may take.
        """
        with suppress(StoreUnavailable, OutcomeUnknown):
            self.call(last, timeout_s)
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._loop.resolver.asked.put(None)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(2 * CLOSE_S)
        self._loop.resolver.join(CLOSE_S)  # it may be waiting for a name, for long
