"""Campaigns: what takes long and mostly waits, run beside each other for all tests here."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Callable, Protocol

import pytest

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
