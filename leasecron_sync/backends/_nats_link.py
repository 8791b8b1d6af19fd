"""One connection to NATS, and questions that are asked over it."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from typing import Any, Optional

from leasecron_sync.backends._lanes import Deadline
from leasecron_sync.backends._nats_loop import Loop
from leasecron_sync.backends._nats_place import ENCRYPTED, Place
from leasecron_sync.errors import (
    OutcomeUnknown,
    StoreError,
    StoreRejected,
    StoreUnavailable,
)

PING_S = 20
"""How often the client asks whether the server is still there; the second time without an answer
the connection is over."""

LOOK_MS = 50
"""How often a question looks whether the connection that it was asked over is still there: some
versions of the client tell nobody."""

CLOSE_S = 0.2

_NOBODY = "503"


class NobodyAnswers(StoreUnavailable):
    """Nobody listens to a subject, so what was sent there had no effect."""


@dataclass(eq=False)
class _Question:
    """What is waited for: a message, or why there will be none."""

    subject: str
    answer: asyncio.Future[Any]


class Link:
    """A connection. Its methods are coroutines of the thread with the event loop.

    Args:
        client: The module ``nats``.
        place: Where the servers are.
    """

    def __init__(self, client: Any, place: Place) -> None:  # noqa: ANN401 - a late import
        self._client = client
        self._place = place
        self.label = place.label
        self._connection: Any = None
        self._inbox = ""
        self._questions: dict[str, _Question] = {}
        self._numbers = count(1)
        self._told = ""
        self.version = "NATS"

    # -- making it ---------------------------------------------------------------------------------

    async def open(self, deadline: Deadline) -> None:
        """Connect to one of the servers.

        Raises:
            StoreUnavailable: That was not possible in time.
            StoreRejected: No answer may be received.
        """
        servers = list(self._place.servers)
        random.shuffle(servers)  # so that instances spread over them
        problems: list[str] = []
        while servers and deadline.left_ms():
            server = servers.pop()
            # One that is silent leaves the next ones their share of the time.
            share = Deadline(deadline.left_ms() // (len(servers) + 1))
            problem = await self._tried(server, share)
            if not problem:
                self._check_deafness()
                return
            await self.close()
            problems.append(problem)
        reasons = "; ".join(dict.fromkeys(problems)) or "no time was left"
        message = f"{self.label} cannot be reached: {reasons}"
        raise StoreUnavailable(message)

    async def _tried(self, server: str, deadline: Deadline) -> str:
        """Connect to a server; return why that was not possible."""
        self._told = ""
        try:
            options = self._place.connect_options()
            self._connection = connection = self._made()
            connecting = connection.connect(
                servers=[server],
                name="leasecron_sync",
                error_cb=self._note_error,
                # What was published during an outage would be sent when it is over. A connection
                # that broke is replaced by the next call instead.
                allow_reconnect=False,
                pending_size=-1,
                max_reconnect_attempts=1,
                reconnect_time_wait=0,
                connect_timeout=max(1, deadline.left_ms()) / 1000,
                ping_interval=PING_S,
                max_outstanding_pings=2,
                **options,
            )
            await asyncio.wait_for(connecting, deadline.left_ms() / 1000)
            self._inbox = connection.new_inbox()
            await connection.subscribe(f"{self._inbox}.*", cb=self._take)
            for _ in range(2):  # the client's first ping may overtake what it sent before
                # A refusal comes before the answer.
                await connection.flush(timeout=max(1, deadline.left_ms()) / 1000)
            self.version = f"NATS {_version(connection)}"
        except asyncio.TimeoutError:
            return self._told or "no answer in time"
        except Exception as error:  # noqa: BLE001 - as many kinds as there are wrong files and odd peers
            return self._text_of(error)
        return ""

    def _made(self) -> Any:  # noqa: ANN401
        base: Any = self._client.aio.client.Client
        if self._place.scheme != ENCRYPTED:
            return base()
        errors = self._client.errors

        class Encrypted(base):  # type: ignore[misc]
            """Says who it is over an encrypted connection only, whatever the server asks for."""

            def _connect_command(self) -> Any:  # noqa: ANN401
                if not self._server_info.get("tls_required"):
                    message = "the server does not encrypt, and the URL asks for it: tls"
                    raise errors.Error(message)
                return base._connect_command(self)  # noqa: SLF001 - the one that it stands in for

        return Encrypted()

    def _text_of(self, error: Exception) -> str:
        """Return what an error says, as people would."""
        if isinstance(error, self._client.errors.NoServersError) and self._told:
            return self._told
        if not isinstance(error, (OSError, self._client.errors.Error)):
            return type(error).__name__  # who knows what its text shows
        text = str(error) or type(error).__name__
        numbers = dict.fromkeys(int(number) for number in re.findall(r"\[Errno (\d+)\]", text))
        if numbers:  # asyncio says for all of them that the call failed
            return ", ".join(os.strerror(number) for number in numbers)
        text = text.replace("nats: ", "", 1).strip("'")
        if "authorization violation" in text.lower():
            text += ": user and password, or token, are wrong"
        return text

    async def _note_error(self, error: Exception) -> None:
        """Take note of what goes wrong: the server tells of a refusal apart from any reply."""
        self._told = self._text_of(error)
        if "permissions violation" not in self._told.lower():
            return
        for question in list(self._questions.values()):
            if f'"{question.subject.lower()}"' in self._told.lower():
                self._settle(question, StoreRejected(f"{self.label}: {self._told}"))

    def _check_deafness(self) -> None:
        if "permissions violation for subscription" in self._told.lower():
            message = f"{self.label}: {self._told}: the user needs to subscribe to _INBOX.>"
            raise StoreRejected(message)

    @property
    def is_usable(self) -> bool:
        """Whether it is connected."""
        return self._connection is not None and bool(self._connection.is_connected)

    @property
    def is_alone(self) -> bool:
        """Whether the server keeps streams itself and belongs to no cluster.

        One without JetStream of its own may pass requests on to a cluster (a leaf node).
        """
        told: dict[str, Any] = self._connection._server_info  # noqa: SLF001 - the client shows no more
        return bool(told.get("jetstream")) and not told.get("cluster")

    async def close(self) -> None:
        """Close it; bounded, never raises."""
        if self._connection is None:
            return
        with suppress(Exception):
            await asyncio.wait_for(self._connection.close(), CLOSE_S)
        loop = asyncio.get_running_loop()
        assert isinstance(loop, Loop)
        loop.end_connections()

    # -- asking ------------------------------------------------------------------------------------

    async def ask(
        self,
        subject: str,
        body: bytes,
        deadline: Deadline,
        headers: Optional[dict[str, str]] = None,
    ) -> dict[str, Any]:
        """Ask once; return the answer of JetStream, which may tell of an error.

        Raises:
            NobodyAnswers: There is nobody who would.
            StoreError: There is no answer.
        """
        if not deadline.left_ms() or not self.is_usable:
            why = "the connection is gone" if deadline.left_ms() else "no time was left"
            message = f"{self.label}: {why}"
            raise StoreUnavailable(message)
        number = str(next(self._numbers))
        question = _Question(subject, asyncio.get_running_loop().create_future())
        self._questions[number] = question
        reply = f"{self._inbox}.{number}"
        try:
            await self._connection.publish(subject, body, reply=reply, headers=headers)
            found = await self._waited(question, deadline)
        except (self._client.errors.Error, OSError) as error:
            message = f"{self.label}: no answer: {self._text_of(error)}"
            raise OutcomeUnknown(message) from error
        finally:
            del self._questions[number]
        if isinstance(found, StoreError):
            raise found
        headers_found: Optional[dict[str, str]] = found.headers
        if headers_found is not None and headers_found.get("Status") == _NOBODY:
            message = f"{self.label}: nobody answers for {subject}"
            raise NobodyAnswers(message)
        return self._read(found.data)

    async def _waited(self, question: _Question, deadline: Deadline) -> Any:  # noqa: ANN401
        while not question.answer.done():
            left_ms = deadline.left_ms()
            if not left_ms or not self.is_usable:
                why = "the connection broke" if left_ms else "no answer in time"
                message = f"{self.label}: {why}"
                return OutcomeUnknown(message)
            await asyncio.wait({question.answer}, timeout=min(LOOK_MS, left_ms) / 1000)
        return question.answer.result()

    async def _take(self, message: Any) -> None:  # noqa: ANN401
        question = self._questions.get(message.subject.rpartition(".")[2])
        if question is not None:
            self._settle(question, message)

    @staticmethod
    def _settle(question: _Question, answer: Any) -> None:  # noqa: ANN401
        if not question.answer.done():
            question.answer.set_result(answer)

    def _read(self, data: bytes) -> dict[str, Any]:
        with suppress(ValueError):
            answer: Any = json.loads(data)
            if isinstance(answer, dict):
                return {**answer}
        message = f"{self.label}: somebody else than JetStream answered"
        raise OutcomeUnknown(message)


def _version(connection: Any) -> str:  # noqa: ANN401
    # Its text is for developers.
    found = re.search(r"\d[^\s>]*", str(connection.connected_server_version))
    return found[0] if found else ""
