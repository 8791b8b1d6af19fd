"""What the cases of claim backends talk to."""

from __future__ import annotations

import uuid
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Callable, ClassVar, Optional, Union

import pytest

from leasecron_sync.backends.base import BackendSettings, ClaimBackend
from leasecron_sync.model import ClaimReply, OnceClaim, RunKey
from leasecron_sync.testing.conformance._store import Store, Suite


class ClaimSuite(Suite[ClaimBackend]):
    """What the author of a claim backend supplies, and what may be changed.

    Attributes:
        window_ms: Length of the claim windows that the cases ask for, if the mechanism can keep it.
        reads_back: False where nothing in the store tells whose decision won, so that only the
            object that asked knows its own.
    """

    window_ms: ClassVar[int] = 60_000
    reads_back: ClassVar[bool] = True

    @pytest.fixture
    def store(
        self, backend_factory: Callable[[], ClaimBackend]
    ) -> Generator[ClaimStore, None, None]:
        """The store under test; not to be overridden."""
        with self.opened(backend_factory) as store:
            yield store

    @contextmanager
    def opened(
        self, backend_factory: Callable[[], ClaimBackend]
    ) -> Generator[ClaimStore, None, None]:
        """Give out the store and close its connections afterwards."""
        store = ClaimStore(self, backend_factory)
        try:
            yield store
        finally:
            store.close()


class ClaimStore(Store[ClaimBackend]):
    """A claim store under test."""

    def __init__(self, suite: ClaimSuite, factory: Callable[[], ClaimBackend]) -> None:
        super().__init__(suite, factory)
        self._window_ms = suite.window_ms

    @property
    def window_ms(self) -> int:
        """The claim window: what the suite asks for, as far as the mechanism can keep it."""
        largest = self.observer.max_window_ms
        return self._window_ms if largest is None else min(self._window_ms, largest)

    def askers_again(self, winner: ClaimInstance) -> list[ClaimInstance]:
        """Return who may ask again for what an instance won."""
        suite = self.suite
        assert isinstance(suite, ClaimSuite)
        return [winner, winner, *([self.instance()] if suite.reads_back else [])]

    def instance(
        self, namespace: Optional[str] = None, call_timeout_ms: int = 5_000
    ) -> ClaimInstance:
        """Connect a new instance."""
        return ClaimInstance(self, self.settings(namespace, call_timeout_ms))


class ClaimInstance:
    """An instance with a connection of its own, in the words of the cases."""

    def __init__(self, store: ClaimStore, settings: BackendSettings) -> None:
        self.backend = store.backend(settings)
        self.id = settings.instance_id
        self._store = store

    def intend(
        self, run: RunKey, *, due_ms: Optional[int] = None, window_ms: Optional[int] = None
    ) -> OnceClaim:
        """Make a decision to claim a run; sent twice, it is a repeated claim."""
        return OnceClaim(
            key=run,
            due_ms=run.scheduled_ms if due_ms is None else due_ms,
            holder=self.id,
            decision_id=uuid.uuid4().hex,
            window_ms=self._store.window_ms if window_ms is None else window_ms,
        )

    def ask(self, what: Union[RunKey, OnceClaim]) -> ClaimReply:
        """Claim a run, by a new decision where only the run is named."""
        [reply] = self.ask_all([what])
        return reply

    def ask_all(self, what: Sequence[Union[RunKey, OnceClaim]]) -> Sequence[ClaimReply]:
        """Claim runs in one batch."""
        claims = [self.intend(item) if isinstance(item, RunKey) else item for item in what]
        replies = self.backend.claim(claims)
        assert len(replies) == len(claims)
        return replies
