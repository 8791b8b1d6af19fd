"""Fixtures that any test may use."""

from __future__ import annotations

import signal
import uuid

import pytest

from leasecron_sync.testing.clock import ManualClock

pytest_plugins = ["tests.services.fixtures"]

# Where the tests run in the background of a shell these are ignored, and so they would be in every
# program that a test starts.
for _number in (signal.SIGINT, signal.SIGHUP):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(
            _number, signal.default_int_handler if _number == signal.SIGINT else signal.SIG_DFL
        )


@pytest.fixture
def namespace() -> str:
    """A namespace that no other test has, since stores are shared and never cleared."""
    return f"test-{uuid.uuid4().hex}"


@pytest.fixture
def clock() -> ManualClock:
    """A clock that stands still until the test moves it."""
    return ManualClock()
