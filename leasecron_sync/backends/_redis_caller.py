"""What the backends in Redis have in common: where it is, and how a lane gets its link."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, Optional

from leasecron_sync.backends._lanes import Deadline, Lane
from leasecron_sync.backends._redis_link import Link
from leasecron_sync.backends._redis_place import Address, Place, place_of_client, place_of_url
from leasecron_sync.backends.base import BackendSettings
from leasecron_sync.errors import StoreUnavailable


class Caller:
    """Calls the server of one backend.

    Args:
        server: A URL or a client of redis-py.
        backend: Name of the backend's class.

    Raises:
        TypeError: ``server`` is neither.
        ValueError: The URL is wrong.

    Attributes:
        place: Where the server is.
        label: Names it in errors.
    """

    def __init__(self, server: Any, backend: str) -> None:  # noqa: ANN401 - a client is of a package imported late
        place = place_of_url(server) if isinstance(server, str) else place_of_client(server)
        if place is None:
            message = (
                f"{backend} needs a URL such as 'redis://localhost:6379/0' or a client of "
                f"redis-py, not {type(server).__name__}"
            )
            raise TypeError(message)
        self.place: Place = place
        self.label = place.label
        self._client: Any = None
        self._settings: Optional[BackendSettings] = None
        self._last: Optional[Address] = None

    def open(self, client: Any, settings: BackendSettings) -> None:  # noqa: ANN401 - a late import
        """Make ready for calls.

        Args:
            client: The module ``redis``.
            settings: Of the scheduler.
        """
        self._client, self._settings = client, settings

    def close(self) -> None:
        """Take no more calls; those that are under way drop their connections."""
        self._settings = None

    def opened(self) -> BackendSettings:
        """Return the settings.

        Raises:
            StoreUnavailable: It is closed.
        """
        if self._settings is None:
            message = f"{self.label} is closed"
            raise StoreUnavailable(message)
        return self._settings

    def deadline(self) -> Deadline:
        """Return the end of a call that begins now."""
        return Deadline(self.opened().call_timeout_ms)

    def connected(self, deadline: Deadline) -> Link:
        """Return a new connection."""
        self.opened()
        return Link(self._client, self.place, deadline, self._last)

    @contextmanager
    def linked(self, lane: Lane[Link], deadline: Deadline) -> Generator[Link, None, None]:
        """Keep a lane, and give out its connection."""
        with lane.held(deadline):
            self.opened()  # not closed while this call waited
            try:
                if lane.connection is not None and not lane.connection.is_quiet():
                    lane.drop()
                if lane.connection is None:
                    lane.connection = self.connected(deadline)
                yield lane.connection
            finally:
                link = lane.connection
                if link is not None and link.is_sound:
                    self._last = link.address
                if self._settings is None or (link is not None and not link.is_sound):
                    lane.drop()  # closed meanwhile, or suspect
