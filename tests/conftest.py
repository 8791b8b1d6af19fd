"""Fixtures that any test may use."""

from __future__ import annotations

import uuid

import pytest

from leasecron_sync.testing.clock import ManualClock

pytest_plugins = ["tests.services.fixtures"]


@pytest.fixture
def namespace() -> str:
    """A namespace that no other test has, since stores are shared and never cleared."""
    return f"test-{uuid.uuid4().hex}"


@pytest.fixture
def clock() -> ManualClock:
    """A clock that stands still until the test moves it."""
    return ManualClock()
