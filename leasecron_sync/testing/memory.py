"""A claim backend in the memory of one process, for users' own tests."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Callable, ClassVar, Optional

from leasecron_sync.backends.base import BackendSettings, ClaimBackend
from leasecron_sync.clock import SystemClock
from leasecron_sync.errors import StoreUnavailable
from leasecron_sync.model import ClaimReply, OnceClaim, RunKey, StoreInfo, Verdict


class _ClaimStore:
    def __init__(self) -> None:
        self.lock = threading.Lock()
        # Namespace and run -> decision that won, and until when it is remembered.
        self.claims: dict[tuple[str, RunKey], tuple[str, int]] = {}
        self.swept_ms = 0


_NAMED: dict[str, _ClaimStore] = {}
_SWEEP_MS = 60_000


class MemoryClaim(ClaimBackend):
    """Picks one winner per run among the instances of this process, for tests.

    Like every claim backend it keeps no record: a run whose winner crashed is lost.

    Args:
        name: Store to share with other objects of that name; a private one when left out.
    """

    name: ClassVar[str] = "memory-claim"

    # Tests put a reading of their own here; everything else uses the host's clock.
    _now_ms: Callable[[], int] = SystemClock().now_ms

    def __init__(self, name: Optional[str] = None) -> None:
        self._label = name
        self._store = _ClaimStore() if name is None else _NAMED.setdefault(name, _ClaimStore())
        self._settings: Optional[BackendSettings] = None

    def __repr__(self) -> str:
        """Show the name of the shared store."""
        return "MemoryClaim()" if self._label is None else f"MemoryClaim({self._label!r})"

    def open(self, settings: BackendSettings) -> None:
        self._settings = settings

    def close(self) -> None:
        self._settings = None

    def discard(self) -> None:
        # The lock may have been held by a thread that does not exist in this process.
        self._store.lock = threading.Lock()
        self._settings = None

    def probe(self) -> StoreInfo:
        self._opened()
        return StoreInfo("memory", store_ms=self._now_ms())

    def claim(self, claims: Sequence[OnceClaim]) -> Sequence[ClaimReply]:
        settings = self._opened()
        with self._store.lock:
            now_ms = self._now_ms()
            self._sweep(now_ms)
            return [self._claim_one(settings.namespace, item, now_ms) for item in claims]

    def _claim_one(self, namespace: str, item: OnceClaim, now_ms: int) -> ClaimReply:
        if now_ms < item.due_ms:
            return ClaimReply(Verdict.EARLY, item.due_ms - now_ms)
        winner = self._store.claims.get((namespace, item.key))
        if winner is not None:
            mine = winner[0] == item.decision_id
            return ClaimReply(Verdict.GRANTED if mine else Verdict.TAKEN)
        if now_ms - item.due_ms > item.window_ms:
            return ClaimReply(Verdict.TOO_OLD)
        until_ms = item.due_ms + 2 * item.window_ms
        self._store.claims[namespace, item.key] = (item.decision_id, until_ms)
        return ClaimReply(Verdict.GRANTED)

    def _sweep(self, now_ms: int) -> None:
        store = self._store
        if abs(now_ms - store.swept_ms) < _SWEEP_MS:
            return
        store.swept_ms = now_ms
        store.claims = {key: claim for key, claim in store.claims.items() if claim[1] >= now_ms}

    def _opened(self) -> BackendSettings:
        if self._settings is None:
            message = "the memory store is closed"
            raise StoreUnavailable(message)
        return self._settings
