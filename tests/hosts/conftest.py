"""Stores for sites, and campaigns: what takes long and mostly waits, run beside each other."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Callable, Protocol

import pytest

from tests.services.fixtures import had
from tests.services.postgres import new_database
from tests.services.services import Services

AT_ONCE = 7


class Outcome(Protocol):
    """Waits for a campaign of the test's module."""

    def __call__(self, name: str, /) -> Any:  # noqa: ANN401 - each campaign returns what it likes
        """Return what it returned, or raise what it raised."""
        ...


@pytest.fixture(scope="session")
def _campaigns(request: pytest.FixtureRequest) -> Iterator[dict[str, Future[Any]]]:
    modules = {
        item.module.__name__: item.module
        for item in request.session.items
        if isinstance(item, pytest.Function) and hasattr(item.module, "CAMPAIGNS")
    }
    with ThreadPoolExecutor(AT_ONCE) as pool:
        running: dict[str, Future[Any]] = {}
        for module in modules.values():
            campaigns: dict[str, Callable[[], object]] = module.CAMPAIGNS
            for name, campaign in campaigns.items():
                running[f"{module.__name__}: {name}"] = pool.submit(campaign)
        yield running
        pool.shutdown(cancel_futures=True)


@pytest.fixture
def outcome(request: pytest.FixtureRequest, _campaigns: dict[str, Future[Any]]) -> Outcome:
    """What became of a campaign in ``CAMPAIGNS`` of the test's module."""
    return lambda name: _campaigns[f"{request.module.__name__}: {name}"].result()


@pytest.fixture(params=["sqlite", "postgres", "redis"])
def store(request: pytest.FixtureRequest) -> Iterator[str]:
    """The URL of a store; nothing for a file in the site's own folder."""
    if request.param == "sqlite":
        yield ""
        return
    services: Services = request.getfixturevalue("services")
    if request.param == "redis":
        yield had(services.redis).url
        return
    with new_database(had(services.postgres), f"site_{uuid.uuid4().hex}") as url:
        yield url
