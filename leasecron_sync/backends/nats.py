"""A claim backend in NATS JetStream."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Callable, ClassVar, Optional

from leasecron_sync.backends._lanes import Deadline
from leasecron_sync.backends._nats_place import message_id, place_of_url
from leasecron_sync.backends._once import judged, late
from leasecron_sync.backends.base import BackendSettings, ClaimBackend
from leasecron_sync.clock import SystemClock
from leasecron_sync.errors import MissingDependency, OutcomeUnknown, StoreError, StoreUnavailable
from leasecron_sync.model import ClaimReply, OnceClaim, StoreInfo, Verdict

if TYPE_CHECKING:
    from leasecron_sync.backends._nats_session import Session
    from leasecron_sync.backends._nats_stream import Answer, Facts, Stream

_clock = SystemClock()

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
    _now_ms: Callable[[], int] = _clock.now_ms

    def __init__(self, url: str) -> None:
        if not isinstance(url, str):  # pyright: ignore[reportUnnecessaryIsInstance] - untyped callers
            message = (
                "NatsClaim needs a URL such as 'nats://user:password@host:4222', not "
                f"{type(url).__name__}"
            )
            raise TypeError(message)
        self._place = place_of_url(url)
        self._settings: Optional[BackendSettings] = None
        self._session: Optional[Session] = None

    def __repr__(self) -> str:
        """Show the place without user and password."""
        return f"NatsClaim({self._place.label!r})"

    def open(self, settings: BackendSettings) -> None:
        try:
            import nats
        except ImportError as error:
            message = "NatsClaim needs the package nats-py: pip install 'leasecron_sync[nats]'"
            raise MissingDependency(message) from error
        self._check_signing()
        # Late: they need asyncio, which is slow to import, and nothing else here does.
        from leasecron_sync.backends._nats_session import Session

        self.close()
        self._settings = settings
        self._session = Session(nats, self._place, settings.namespace)

    def _check_signing(self) -> None:
        if "credentials" in self._place.files and find_spec("nkeys") is None:
            message = "a file of credentials needs the package nkeys: pip install nkeys"
            raise MissingDependency(message)

    def close(self) -> None:
        self._settings = None
        session, self._session = self._session, None
        if session is not None:
            session.close()

    def discard(self) -> None:
        self._settings = None
        _abandoned.append(self._session)
        self._session = None

    def probe(self) -> StoreInfo:
        session, deadline = self._opened()

        async def probed(stream: Stream, deadline: Deadline) -> str:
            await stream.meet(0, deadline, anew=True)
            return stream.link.version

        return StoreInfo(session.call(probed, deadline))

    @property
    def replicas(self) -> int:
        """How many servers of a cluster are to keep the stream, by the URL."""
        return self._place.replicas

    def look(self, deadline: Deadline) -> Facts:
        """Look at the server and the stream without changing anything.

        Args:
            deadline: When to stop waiting.

        Raises:
            StoreError: No answer, or a refusal.
        """
        session, _ = self._opened()
        return session.call(lambda stream, deadline: stream.look(deadline), deadline)

    def claim(self, claims: Sequence[OnceClaim]) -> Sequence[ClaimReply]:
        session, deadline = self._opened()
        judged_ms, steady_ms = self._now_ms(), _clock.steady_ms()
        replies = [judged(claim, judged_ms) for claim in claims]
        asked = [claim for claim, reply in zip(claims, replies) if reply is None]
        if not asked:
            return [reply for reply in replies if reply is not None]
        window_ms = 2 * max(claim.window_ms for claim in asked)
        messages = [(message_id(claim.key), claim.decision_id.encode()) for claim in asked]

        async def claimed(stream: Stream, deadline: Deadline) -> list[Answer]:
            await stream.meet(window_ms, deadline)
            return await stream.claim(messages, deadline)

        answers = session.call(claimed, deadline)
        _check_answers(answers)
        now_ms = judged_ms + _clock.steady_ms() - steady_ms
        found = (_reply(claim, answer, now_ms) for claim, answer in zip(asked, answers))
        return [next(found) if reply is None else reply for reply in replies]

    def _opened(self) -> tuple[Session, Deadline]:
        """Return what calls need, and the end of a call that begins now."""
        session, settings = self._session, self._settings
        if session is None or settings is None:
            message = f"{self._place.label} is closed"
            raise StoreUnavailable(message)
        return session, Deadline(settings.call_timeout_ms)


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
