"""The stream that remembers who claimed what first: it is met, and asked."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Optional, Union

from leasecron_sync.backends._lanes import Deadline
from leasecron_sync.backends._nats_link import Link, NobodyAnswers
from leasecron_sync.backends._nats_place import stream_name, subject_of
from leasecron_sync.clock import SystemClock
from leasecron_sync.errors import (
    OutcomeUnknown,
    StoreError,
    StoreRejected,
    StoreUnavailable,
    StoreUnsupported,
)

USUAL_WINDOW_MS = 600_000
"""How long a stream knows an id when it is made: the claims of most schedulers need no more."""

LOOK_AGAIN_MS = 60_000
"""How long the settings of the stream are taken for granted. Another instance that widens it at the
same moment may undo that: what is older than the window before is forgotten then, which is far more
than this."""

TURNS = 8
"""How often in one call the stream is looked at, while other instances make or change it."""

IN_PROCESS_MS = 20

NOBODY_WAITS_MS = (20, 40, 80, 160, 200)
"""After which times it is published again when nobody listens: a stream is found before it listens
when it has just been made, and a leader is followed by the next one. Together they are as long as
NATS' own clients wait by default. What nobody got has no effect, so it may be repeated."""

NS = 1_000_000

_STREAM_NOT_FOUND, _IN_PROCESS, _NAME_IN_USE, _WRONG_STREAM = 10059, 10158, 10058, 10060
_NOT_ENABLED = frozenset({10039, 10076})
_NO_PEERS = 10005
_FOR_NOW = frozenset({429, 503})
"""Codes of refusals that end by themselves: too many requests, no leader."""

Answer = Union[bool, StoreError]
"""Whether a decision has the run, or why that is not known."""

_clock = SystemClock()


@dataclass(frozen=True)
class Facts:
    """What is found by a look that changes nothing.

    Attributes:
        version: Name and version of the server.
        name: Of the stream.
        window_ms: How long the stream knows an id; None where there is none.
        replicas: How many servers keep it.
        is_clustered: Whether there are more servers.
        problems: Why it cannot be used.
        is_alone: Whether the server that answers keeps streams itself, and is in no cluster.
    """

    version: str
    name: str
    window_ms: Optional[int] = None
    replicas: int = 1
    is_clustered: bool = False
    problems: tuple[str, ...] = ()
    is_alone: bool = False


class Stream:
    """The stream of a namespace. Its methods are coroutines of the thread with the event loop.

    Args:
        link: The connection.
        namespace: The namespace.
        replicas: How many servers of a cluster keep it.
    """

    def __init__(self, link: Link, namespace: str, replicas: int) -> None:
        self.link = link
        self._label = link.label
        self._namespace = namespace
        self._replicas = replicas
        self._name = stream_name(namespace)
        self._known_ms = 0
        self._looked_ms = 0

    # -- its settings ------------------------------------------------------------------------------

    async def meet(self, window_ms: int, deadline: Deadline, *, anew: bool = False) -> None:
        """Make it where there is none, and let it remember long enough; never shorter.

        Args:
            window_ms: How long it must know an id.
            deadline: Of the whole.
            anew: True to look also where that was done a moment ago.

        Raises:
            StoreUnsupported: It cannot be what it must be.
            StoreUnavailable: No answer; of a look, or of what changes nothing when repeated.
            StoreRejected: The user may not.
        """
        fresh = _clock.steady_ms() - self._looked_ms < LOOK_AGAIN_MS
        if fresh and not anew and 0 < self._known_ms >= window_ms:
            return
        try:
            await self._meet(max(window_ms, 1), deadline)
        except OutcomeUnknown as error:
            await self.link.close()
            raise StoreUnavailable(str(error)) from error

    async def _meet(self, window_ms: int, deadline: Deadline) -> None:
        wanted_ms = max(window_ms, USUAL_WINDOW_MS)
        for turn in range(TURNS):
            if turn > 1:
                await asyncio.sleep(IN_PROCESS_MS / 1000)
            config = await self._found(deadline)
            if config is None:
                await self._make(wanted_ms, deadline)
                continue
            self._check(config)
            known_ms = config["duplicate_window"] // NS
            if known_ms >= window_ms and config.get("num_replicas", 1) >= self._replicas:
                self._known_ms, self._looked_ms = known_ms, _clock.steady_ms()
                return
            await self._widen(config, wanted_ms, deadline)
        message = f"{self._label}: other instances change the stream {self._name!r} just now"
        raise StoreUnavailable(message)

    async def look(self, deadline: Deadline) -> Facts:
        """Look without changing anything.

        Raises:
            StoreError: No answer, or a refusal.
        """
        answer = await self._info(deadline)
        if answer is None:
            return Facts(self.link.version, self._name, is_alone=self.link.is_alone)
        config: dict[str, Any] = answer["config"]
        cluster: Optional[dict[str, Any]] = answer.get("cluster")
        return Facts(
            self.link.version,
            self._name,
            config["duplicate_window"] // NS,
            config.get("num_replicas", 1),
            cluster is not None and bool(cluster.get("name")),
            self._problems(config),
            self.link.is_alone,
        )

    async def _found(self, deadline: Deadline) -> Optional[dict[str, Any]]:
        answer = await self._info(deadline)
        return None if answer is None else answer["config"]

    async def _info(self, deadline: Deadline) -> Optional[dict[str, Any]]:
        try:
            answer = await self._managed(f"STREAM.INFO.{self._name}", deadline)
        except NobodyAnswers as error:
            raise self._without_jetstream() from error
        if _code(answer) == _STREAM_NOT_FOUND:
            return None
        if "error" in answer:
            raise self._refused(answer)
        return answer

    async def _make(self, window_ms: int, deadline: Deadline) -> None:
        config = {
            "name": self._name,
            "description": f"claims of leasecron_sync, namespace {self._namespace!r}",
            "subjects": [subject_of(self._name)],
            "retention": "limits",
            "storage": "file",
            "discard": "old",
            "max_age": window_ms * NS,
            "duplicate_window": window_ms * NS,
            "num_replicas": self._replicas,
            "max_msgs": -1,
            "max_bytes": -1,
            "max_msg_size": -1,
            "max_consumers": -1,
        }
        answer = await self._managed(f"STREAM.CREATE.{self._name}", deadline, config)
        if "error" in answer and _code(answer) != _NAME_IN_USE:
            raise self._not_made(answer)

    async def _widen(self, config: dict[str, Any], window_ms: int, deadline: Deadline) -> None:
        longer = {
            **config,
            "duplicate_window": max(config["duplicate_window"], window_ms * NS),
            "num_replicas": max(config.get("num_replicas", 1), self._replicas),
        }
        if config.get("max_age"):  # without one messages stay for ever
            longer["max_age"] = max(config["max_age"], longer["duplicate_window"])
        answer = await self._managed(f"STREAM.UPDATE.{self._name}", deadline, longer)
        if "error" in answer:
            raise self._not_made(answer)

    def _check(self, config: dict[str, Any]) -> None:
        problems = self._problems(config)
        if problems:
            message = (
                f"{self._label}: the stream {self._name!r} cannot be used: {', '.join(problems)}; "
                "stop all schedulers on it and delete it, or use another namespace"
            )
            raise StoreUnsupported(message)

    def _problems(self, config: dict[str, Any]) -> tuple[str, ...]:
        """Return why a stream that somebody made or changed would forget claims."""
        found = (
            (config.get("storage") != "file", "it is not kept in files"),
            (config.get("persist_mode") == "async", "it confirms before it writes"),
            (config.get("subjects") != [subject_of(self._name)], "it has other subjects"),
            (config.get("retention", "limits") != "limits", "messages go when they are read"),
            (config.get("max_msgs", -1) > 0, "it has a limit of messages"),
            (config.get("max_msgs_per_subject", -1) > 0, "it has a limit of messages"),
            (config.get("max_bytes", -1) > 0, "it has a limit of bytes"),
            (config.get("max_msg_size", -1) > 0, "it has a limit of the size of messages"),
            (bool(config.get("no_ack")), "it does not confirm"),
            (bool(config.get("sealed")), "it is sealed"),
        )
        return tuple(dict.fromkeys(text for wrong, text in found if wrong))

    def _not_made(self, answer: dict[str, Any]) -> StoreError:
        if answer["error"].get("code") in _FOR_NOW or _code(answer) == _NO_PEERS:
            return StoreUnavailable(str(self._refused(answer)))
        text = answer["error"].get("description", "an error")
        return StoreUnsupported(
            f"{self._label}: the stream {self._name!r} cannot be made or changed: {text}"
        )

    # -- claims ------------------------------------------------------------------------------------

    async def claim(
        self, messages: Sequence[tuple[str, bytes]], deadline: Deadline
    ) -> list[Answer]:
        """Publish all of them at once; return the answers in their order.

        Args:
            messages: What each run is known by, and the decision.
            deadline: When to stop waiting.
        """
        answers = await asyncio.gather(*(self._claim_one(*item, deadline) for item in messages))
        if any(isinstance(answer, OutcomeUnknown) for answer in answers):
            await self.link.close()  # whatever ails it, the next call has a new one
        return list(answers)

    async def _claim_one(self, message_id: str, decision: bytes, deadline: Deadline) -> Answer:
        try:
            answer = await self._published(message_id, decision, deadline)
            if not answer.get("duplicate"):
                return True
            return await self._first(answer["seq"], deadline) == decision
        except StoreError as error:
            return error

    async def _published(
        self, message_id: str, decision: bytes, deadline: Deadline
    ) -> dict[str, Any]:
        headers = {"Nats-Msg-Id": message_id, "Nats-Expected-Stream": self._name}
        while True:
            answer = await self._heard(decision, deadline, headers)
            if _code(answer) != _IN_PROCESS:
                break
            # Somebody's message of that id is on its way to the replicas.
            await asyncio.sleep(min(IN_PROCESS_MS, deadline.left_ms()) / 1000)
        if "error" in answer:
            if _code(answer) in (_WRONG_STREAM, _STREAM_NOT_FOUND):
                self._known_ms = 0
            raise self._refused(answer)
        if answer.get("stream") != self._name or "seq" not in answer:
            message = f"{self._label}: somebody else than JetStream answered"
            raise OutcomeUnknown(message)
        return answer

    async def _heard(
        self, decision: bytes, deadline: Deadline, headers: dict[str, str]
    ) -> dict[str, Any]:
        """Publish until somebody answers, for a moment."""
        subject, waits_ms = subject_of(self._name), iter(NOBODY_WAITS_MS)
        while True:
            try:
                return await self.link.ask(subject, decision, deadline, headers)
            except NobodyAnswers:
                # The stream is gone, or new, or its leader is: the next call looks at it again.
                self._known_ms = 0
                wait_ms = next(waits_ms, None)
                if wait_ms is None or deadline.left_ms() <= wait_ms:
                    raise
            await asyncio.sleep(wait_ms / 1000)

    async def _first(self, sequence: int, deadline: Deadline) -> bytes:
        """Return the message that had the id first.

        Raises:
            OutcomeUnknown: It cannot be read, so whose it was is not known.
        """
        try:
            answer = await self._managed(
                f"STREAM.MSG.GET.{self._name}", deadline, {"seq": sequence}
            )
        except StoreError as error:
            raise OutcomeUnknown(str(error)) from error
        if "error" in answer:
            reason = str(self._refused(answer))
            message = f"{reason}: the first claim of a run cannot be read"
            raise OutcomeUnknown(message)
        return base64.b64decode(answer["message"].get("data") or b"")

    # -- JetStream ---------------------------------------------------------------------------------

    async def _managed(
        self, what: str, deadline: Deadline, body: Optional[dict[str, Any]] = None
    ) -> dict[str, Any]:
        """Ask JetStream's management."""
        text = b"" if body is None else json.dumps(body).encode()
        answer = await self.link.ask(f"$JS.API.{what}", text, deadline)
        if _code(answer) in _NOT_ENABLED:
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
        return StoreUnavailable(text) if error.get("code") in _FOR_NOW else StoreRejected(text)


def _code(answer: dict[str, Any]) -> int:
    error = answer.get("error")
    return int(error.get("err_code", 0)) if error else 0
