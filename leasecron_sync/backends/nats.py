"""A claim backend in NATS JetStream."""

from __future__ import annotations

import logging
from collections.abc import Coroutine, Sequence
from typing import TYPE_CHECKING, Any, Callable, ClassVar, Optional, TypeVar

from leasecron_sync.backends._lanes import Deadline
from leasecron_sync.backends._nats_place import message_id, place_of_url, stream_name
from leasecron_sync.backends._once import judged, late
from leasecron_sync.backends.base import BackendSettings, ClaimBackend
from leasecron_sync.clock import SystemClock
from leasecron_sync.errors import MissingDependency, OutcomeUnknown, StoreError, StoreUnavailable
from leasecron_sync.model import ClaimReply, OnceClaim, StoreInfo, Verdict

if TYPE_CHECKING:
    from leasecron_sync.backends._nats_link import Answer, Link
    from leasecron_sync.backends._nats_loop import LoopThread

T = TypeVar("T")

_clock = SystemClock()

_logger = logging.getLogger("leasecron_sync.backends.nats")

CLOSE_MS = 500

ASK_AGAIN_MS = 1_000
"""When to ask again for a claim without an answer, while others of its batch had one."""

# In a forked child the parent's loop and connection stay referenced, and unused, for ever.
_abandoned: list[object] = []


class NatsClaim(ClaimBackend):
    """Picks one winner for each run through NATS JetStream, and can do no more.

    Nothing records that a winner stopped: a run whose winner crashed is lost.

    A run is won by the first message of its id in a stream of the namespace. The stream is made
    when it is missing, kept in files, and remembers ids for ten minutes, or for twice
    ``claim_window_ms`` if that is longer. After a lost reply the first message is read back. There
    is no clock in it: early and too old are judged by the host's clock.

    A stream that is deleted or purged, and a failover that loses messages (one replica on a server
    that is gone, a power cut before a flush), let a run be won again.

    Args:
        url: Such as ``nats://user:password@host1:4222,host2:4222``, ``nats://token@host`` or, for
            an encrypted connection, ``tls://host``. Parameters: ``replicas`` (1 unless set; 3 in a
            cluster), ``credentials`` (a file), and with ``tls`` ``tls_ca``, ``tls_cert``,
            ``tls_key`` (files).

    Raises:
        TypeError: ``url`` is not text.
        ValueError: It is wrong.
    """

    name: ClassVar[str] = "nats-claim"

    # Tests put a reading of their own here; else the host's clock is read.
    _now_ms: Callable[[], int] = staticmethod(_clock.now_ms)

    def __init__(self, url: str) -> None:
        if not isinstance(url, str):  # pyright: ignore[reportUnnecessaryIsInstance] - untyped callers
            message = (
                "NatsClaim needs a URL such as 'nats://user:password@host:4222', not "
                f"{type(url).__name__}"
            )
            raise TypeError(message)
        self._place = place_of_url(url)
        self._label = self._place.label
        self._settings: Optional[BackendSettings] = None
        self._make_link: Optional[Callable[[], Link]] = None
        self._loop: Optional[LoopThread] = None
        self._link: Optional[Link] = None
        self._stream = ""

    def __repr__(self) -> str:
        """Show the place without user and password."""
        return f"NatsClaim({self._label!r})"

    def open(self, settings: BackendSettings) -> None:
        try:
            import nats
        except ImportError as error:
            message = "NatsClaim needs the package nats-py: pip install 'leasecron_sync[nats]'"
            raise MissingDependency(message) from error
        # Late: they need asyncio, which is slow to import, and nothing else here does.
        from leasecron_sync.backends._nats_link import Link
        from leasecron_sync.backends._nats_loop import LoopThread

        self._settings = settings
        self._make_link = lambda: Link(nats, self._place)
        self._stream = stream_name(settings.namespace)
        if self._loop is None:
            self._loop = LoopThread()

    def close(self) -> None:
        self._settings = None
        loop, self._loop = self._loop, None
        link, self._link = self._link, None
        if loop is None:
            return
        if link is not None:
            try:
                loop.call(link.close, CLOSE_MS / 1000)
            except StoreError as error:  # it ends with the loop
                _logger.debug("closing a connection failed error=%r", str(error))
        loop.close()

    def discard(self) -> None:
        self._settings = None
        _abandoned.append((self._loop, self._link))
        self._loop = self._link = None

    def probe(self) -> StoreInfo:
        deadline = self._deadline()
        return StoreInfo(self._called(lambda: self._probed(deadline), deadline))

    async def _probed(self, deadline: Deadline) -> str:
        link = await self._connected(deadline)
        await self._meet_stream(link, 0, deadline)
        return link.version

    def claim(self, claims: Sequence[OnceClaim]) -> Sequence[ClaimReply]:
        deadline = self._deadline()
        judged_ms, steady_ms = self._now_ms(), _clock.steady_ms()
        replies = [judged(claim, judged_ms) for claim in claims]
        open_claims = [claim for claim, reply in zip(claims, replies) if reply is None]
        if not open_claims:
            return [reply for reply in replies if reply is not None]
        answers = self._called(lambda: self._claimed(open_claims, deadline), deadline)
        _check_answers(answers)
        now_ms = judged_ms + _clock.steady_ms() - steady_ms
        found = (_reply(claim, answer, now_ms) for claim, answer in zip(open_claims, answers))
        return [next(found) if reply is None else reply for reply in replies]

    async def _claimed(self, claims: Sequence[OnceClaim], deadline: Deadline) -> list[Answer]:
        link = await self._connected(deadline)
        await self._meet_stream(link, max(claim.window_ms for claim in claims), deadline)
        messages = [(message_id(claim.key), claim.decision_id.encode()) for claim in claims]
        answers = await link.claim(self._stream, messages, deadline)
        if any(isinstance(answer, OutcomeUnknown) for answer in answers):
            await link.close()  # whatever ails it, the next call has a new one
        return answers

    async def _meet_stream(self, link: Link, window_ms: int, deadline: Deadline) -> None:
        namespace = self._opened().namespace
        description = f"claims of leasecron_sync, namespace {namespace!r}"
        try:
            await link.meet_stream(self._stream, description, 2 * window_ms, deadline)
        except OutcomeUnknown as error:  # of a look, or of what changes nothing when repeated
            await link.close()
            raise StoreUnavailable(str(error)) from error

    # -- the connection ----------------------------------------------------------------------------

    def _opened(self) -> BackendSettings:
        if self._settings is None:
            message = f"{self._label} is closed"
            raise StoreUnavailable(message)
        return self._settings

    def _deadline(self) -> Deadline:
        return Deadline(self._opened().call_timeout_ms)

    def _called(self, make: Callable[[], Coroutine[Any, Any, T]], deadline: Deadline) -> T:
        loop = self._loop
        if loop is None:
            message = f"{self._label} is closed"
            raise StoreUnavailable(message)
        return loop.call(make, deadline.left_ms() / 1000)

    async def _connected(self, deadline: Deadline) -> Link:
        """Return the connection, a new one where there is none that can be used."""
        link = self._link
        if link is None or not link.is_usable:
            if link is not None:
                await link.close()
            assert self._make_link is not None  # it is open
            self._link = link = self._make_link()
            await link.open(deadline)
        return link


def _check_answers(answers: Sequence[Answer]) -> None:
    """Raise the error of a batch in which nothing was decided.

    Raises:
        StoreError: The worst of them: what may have been won before what was not.
    """
    errors = [answer for answer in answers if isinstance(answer, StoreError)]
    if len(errors) == len(answers):
        raise next((error for error in errors if isinstance(error, OutcomeUnknown)), errors[0])


def _reply(claim: OnceClaim, answer: Answer, now_ms: int) -> ClaimReply:
    if isinstance(answer, StoreError):
        # Asked again under its decision, it is told from another one's.
        return ClaimReply(Verdict.DEFERRED, ASK_AGAIN_MS)
    if not answer:
        return ClaimReply(Verdict.TAKEN)
    return ClaimReply(Verdict.TOO_OLD if late(claim, now_ms) else Verdict.GRANTED)
