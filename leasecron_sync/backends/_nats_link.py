"""One connection to NATS, and what is asked over it: the stream of the claims, and the claims."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Optional, Union

from leasecron_sync.backends._lanes import Deadline
from leasecron_sync.backends._nats_place import Place, subject_of
from leasecron_sync.errors import (
    OutcomeUnknown,
    StoreError,
    StoreRejected,
    StoreUnavailable,
    StoreUnsupported,
)

USUAL_WINDOW_MS = 600_000
"""How long a stream knows an id when it is made: the claims of most schedulers need no more."""

PING_S = 20
"""How often the client asks whether the server is still there; the second time without an answer
the connection is over."""

IN_PROCESS_MS = 20
NS = 1_000_000

_STREAM_NOT_FOUND, _IN_PROCESS, _SUBJECTS_OVERLAP, _NAME_IN_USE = 10059, 10158, 10065, 10058
_NOT_ENABLED = frozenset({10039, 10076})
_WRONG_STREAM = 10060


Answer = Union[bool, StoreError]
"""Whether a decision has the run, or why that is not known."""


class Link:
    """A connection that is open. Its methods are coroutines of the thread with the event loop.

    Args:
        client: The module ``nats``.
        place: Where the servers are.
    """

    def __init__(self, client: Any, place: Place) -> None:  # noqa: ANN401 - a late import
        self._errors = client.errors
        self._place = place
        self._label = place.label
        self._connection: Any = client.aio.client.Client()
        self._refusal = ""
        self._known_window_ms = 0
        self.version = "NATS"

    # -- making it ---------------------------------------------------------------------------------

    async def open(self, deadline: Deadline) -> None:
        """Connect.

        Raises:
            StoreUnavailable: That was not possible in time.
        """
        try:
            options = self._place.connect_options()
        except OSError as error:
            message = f"{self._label}: a file of the URL cannot be used: {error}"
            raise StoreUnavailable(message) from error
        connecting = self._connection.connect(
            servers=list(self._place.servers),
            name="leasecron_sync",
            error_cb=self._note_error,
            # What was published during an outage would be sent when it is over. A connection that
            # broke is replaced by the next call instead.
            allow_reconnect=False,
            max_reconnect_attempts=1,
            reconnect_time_wait=0,
            connect_timeout=max(1, deadline.left_ms()) / 1000,
            ping_interval=PING_S,
            max_outstanding_pings=2,
            **options,
        )
        try:
            await asyncio.wait_for(connecting, deadline.left_ms() / 1000)
        except asyncio.TimeoutError as error:
            await self.close()
            message = f"{self._label} cannot be reached: no answer in time"
            raise StoreUnavailable(message) from error
        except (self._errors.Error, OSError, ValueError) as error:
            await self.close()
            text = self._refusal or str(error) or type(error).__name__
            message = f"{self._label} cannot be reached: {text}"
            raise StoreUnavailable(message) from error
        self.version = f"NATS {self._connection.connected_server_version}"

    async def _note_error(self, error: Exception) -> None:
        """Take note of what the server refuses: it says so apart from any reply."""
        text = str(error)
        if "ermissions" in text or "uthorization" in text:
            self._refusal = text.removeprefix("nats: ") if hasattr(str, "removeprefix") else text

    @property
    def is_usable(self) -> bool:
        """Whether it is connected."""
        return bool(self._connection.is_connected)

    async def close(self) -> None:
        """Close it; bounded, never raises."""
        with suppress(asyncio.TimeoutError, self._errors.Error, OSError):
            await asyncio.wait_for(self._connection.close(), 0.2)

    # -- asking ------------------------------------------------------------------------------------

    async def _asked(
        self,
        subject: str,
        body: bytes,
        deadline: Deadline,
        headers: Optional[dict[str, str]] = None,
    ) -> dict[str, Any]:
        """Ask once; return the answer, which may tell of an error.

        Raises:
            StoreError: There is none.
        """
        left_s = deadline.left_ms() / 1000
        if not left_s or not self.is_usable:
            message = f"{self._label}: {'the connection is gone' if left_s else 'no time was left'}"
            raise StoreUnavailable(message)
        try:
            reply = await self._connection.request(subject, body, timeout=left_s, headers=headers)
        except self._errors.NoRespondersError as error:
            message = f"{self._label}: nobody answers for {subject}"
            raise StoreUnavailable(message) from error
        except (self._errors.Error, asyncio.TimeoutError, OSError) as error:
            if self._refusal:
                refusal, self._refusal = self._refusal, ""
                message = f"{self._label}: {refusal}"
                raise StoreRejected(message) from error
            message = f"{self._label}: no answer: {str(error) or type(error).__name__}"
            raise OutcomeUnknown(message) from error
        answer: dict[str, Any] = json.loads(reply.data)
        return answer

    async def _managed(
        self, what: str, deadline: Deadline, body: Optional[dict[str, Any]] = None
    ) -> dict[str, Any]:
        """Ask JetStream's management."""
        text = b"" if body is None else json.dumps(body).encode()
        answer = await self._asked(f"$JS.API.{what}", text, deadline)
        code = _code(answer)
        if code in _NOT_ENABLED:
            raise self._without_jetstream()
        return answer

    def _without_jetstream(self) -> StoreUnsupported:
        return StoreUnsupported(
            f"{self._label}: JetStream is not enabled: start the server with -js, or set it up for "
            "this account"
        )

    def _refused(self, answer: dict[str, Any]) -> StoreError:
        error = answer["error"]
        text = f"{self._label}: {error.get('description', 'an error')} ({_code(answer)})"
        return StoreUnavailable(text) if error.get("code") == 503 else StoreRejected(text)  # noqa: PLR2004

    # -- the stream --------------------------------------------------------------------------------

    async def meet_stream(
        self, stream: str, description: str, window_ms: int, deadline: Deadline
    ) -> None:
        """Make the stream where there is none, and let it remember long enough.

        Args:
            stream: Its name.
            description: For people.
            window_ms: How long it must know an id.
            deadline: Of the whole.

        Raises:
            StoreUnsupported: It cannot be what it must be.
            StoreError: No answer.
        """
        wanted_ms = max(window_ms, USUAL_WINDOW_MS)
        if 0 < self._known_window_ms >= window_ms:
            return
        found = await self._found(stream, deadline)
        if found is None:
            answer = await self._managed(
                f"STREAM.CREATE.{stream}", deadline, self._config(stream, description, wanted_ms)
            )
            if "error" in answer and _code(answer) != _NAME_IN_USE:
                raise self._no_stream(answer, stream)
            found = await self._found(stream, deadline)
        for _ in range(2):
            if found is None:
                message = f"{self._label}: the stream {stream!r} is gone again"
                raise StoreUnavailable(message)
            self._check(found, stream)
            known_ms = found["duplicate_window"] // NS
            if known_ms >= max(window_ms, 1) and self._is_replicated(found):
                self._known_window_ms = known_ms
                return
            longer = {
                **found,
                "duplicate_window": max(found["duplicate_window"], wanted_ms * NS),
                "num_replicas": max(found.get("num_replicas", 1), self._place.replicas),
            }
            longer["max_age"] = max(found["max_age"], longer["duplicate_window"])
            answer = await self._managed(f"STREAM.UPDATE.{stream}", deadline, longer)
            if "error" in answer:
                raise self._no_stream(answer, stream)
            # Another instance may have changed it at the same time, and to less.
            found = await self._found(stream, deadline)
        message = f"{self._label}: another instance changes the stream {stream!r} just now"
        raise StoreUnavailable(message)

    def _is_replicated(self, config: dict[str, Any]) -> bool:
        replicas: int = config.get("num_replicas", 1)
        return replicas >= self._place.replicas

    async def _found(self, stream: str, deadline: Deadline) -> Optional[dict[str, Any]]:
        try:
            answer = await self._managed(f"STREAM.INFO.{stream}", deadline)
        except StoreUnavailable as error:
            if isinstance(error.__cause__, self._errors.NoRespondersError):
                raise self._without_jetstream() from error
            raise
        if _code(answer) == _STREAM_NOT_FOUND:
            return None
        if "error" in answer:
            raise self._refused(answer)
        config: dict[str, Any] = answer["config"]
        return config

    def _config(self, stream: str, description: str, window_ms: int) -> dict[str, Any]:
        return {
            "name": stream,
            "description": description,
            "subjects": [subject_of(stream)],
            "retention": "limits",
            "storage": "file",
            "discard": "old",
            "max_age": window_ms * NS,
            "duplicate_window": window_ms * NS,
            "num_replicas": self._place.replicas,
            "max_msgs": -1,
            "max_bytes": -1,
            "max_msg_size": -1,
            "max_consumers": -1,
        }

    def _check(self, config: dict[str, Any], stream: str) -> None:
        """Refuse a stream that somebody made or changed so that claims would be forgotten."""
        problems = [
            text
            for wrong, text in (
                (config.get("storage") != "file", "it is not kept in files"),
                (config.get("subjects") != [subject_of(stream)], "it has other subjects"),
                (config.get("retention", "limits") != "limits", "messages go when they are read"),
                (config.get("max_msgs", -1) > 0, "it has a limit of messages"),
                (config.get("max_bytes", -1) > 0, "it has a limit of bytes"),
                (bool(config.get("no_ack")), "it does not confirm"),
                (bool(config.get("sealed")), "it is sealed"),
            )
            if wrong
        ]
        if problems:
            message = (
                f"{self._label}: the stream {stream!r} cannot be used: {', '.join(problems)}; stop "
                "all schedulers on it and delete it, or use another namespace"
            )
            raise StoreUnsupported(message)

    def _no_stream(self, answer: dict[str, Any], stream: str) -> StoreError:
        error = answer["error"]
        if error.get("code") == 503:  # noqa: PLR2004 - the cluster has no leader just now
            return self._refused(answer)
        text = error.get("description", "an error")
        return StoreUnsupported(
            f"{self._label}: the stream {stream!r} cannot be made or changed: {text}"
        )

    # -- claims ------------------------------------------------------------------------------------

    async def claim(
        self, stream: str, messages: Sequence[tuple[str, bytes]], deadline: Deadline
    ) -> list[Answer]:
        """Publish all of them at once; return the answers in their order.

        Args:
            stream: Its name.
            messages: What each run is known by, and the decision.
            deadline: When to stop waiting.
        """
        return list(
            await asyncio.gather(*(self._claim_one(stream, *item, deadline) for item in messages))
        )

    async def _claim_one(
        self, stream: str, message_id: str, decision: bytes, deadline: Deadline
    ) -> Answer:
        headers = {"Nats-Msg-Id": message_id, "Nats-Expected-Stream": stream}
        try:
            while True:
                answer = await self._asked(subject_of(stream), decision, deadline, headers)
                if _code(answer) != _IN_PROCESS:
                    break
                # Somebody else's message of that id is on its way to the replicas.
                await asyncio.sleep(min(IN_PROCESS_MS, deadline.left_ms()) / 1000)
            if "error" in answer:
                if _code(answer) in (_WRONG_STREAM, _STREAM_NOT_FOUND):
                    self._known_window_ms = 0
                return self._refused(answer)
            if not answer.get("duplicate"):
                return True
            return await self._first(stream, answer["seq"], deadline) == decision
        except StoreError as error:
            if isinstance(error.__cause__, self._errors.NoRespondersError):
                self._known_window_ms = 0  # the stream is gone, or its leader
            return error

    async def _first(self, stream: str, sequence: int, deadline: Deadline) -> bytes:
        """Return the message that had the id first.

        Raises:
            OutcomeUnknown: It cannot be read, so whose it was is not known.
        """
        try:
            answer = await self._managed(f"STREAM.MSG.GET.{stream}", deadline, {"seq": sequence})
        except StoreError as error:
            raise OutcomeUnknown(str(error)) from error
        if "error" in answer:
            message = f"{self._label}: the first claim of a run cannot be read: {answer['error']}"
            raise OutcomeUnknown(message)
        return base64.b64decode(answer["message"].get("data") or b"")


def _code(answer: dict[str, Any]) -> int:
    error = answer.get("error")
    return int(error.get("err_code", 0)) if error else 0
