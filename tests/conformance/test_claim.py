"""The shipped suite over every claim backend."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Callable

import pytest

from leasecron_sync.backends.base import ClaimBackend
from leasecron_sync.backends.redis_claim import RedisClaim
from leasecron_sync.testing.clock import ManualClock
from leasecron_sync.testing.conformance import ClaimConformance
from leasecron_sync.testing.faults import FaultyClaim
from leasecron_sync.testing.memory import MemoryClaim
from tests.conformance.clocks import RunningClock
from tests.services import redis


class TestMemoryClaim(ClaimConformance):
    clock: ManualClock

    @pytest.fixture
    def backend_factory(self) -> Callable[[], ClaimBackend]:
        clock = self.clock = ManualClock()

        class OnManualClock(MemoryClaim):
            _now_ms = staticmethod(clock.now_ms)

        name = uuid.uuid4().hex
        return lambda: OnManualClock(name)

    def advance(self, ms: int) -> None:
        self.clock.advance(ms)

    def set_back(self, ms: int) -> None:
        self.clock.step(-ms)


class TestFaultyClaimWithoutFaults(TestMemoryClaim):
    """And with a mechanism that cannot keep the window that the cases would like."""

    @pytest.fixture
    def backend_factory(self) -> Callable[[], ClaimBackend]:
        clock = self.clock = ManualClock()

        class OnManualClock(MemoryClaim):
            _now_ms = staticmethod(clock.now_ms)
            max_window_ms = 30_000

        name = uuid.uuid4().hex
        return lambda: FaultyClaim(OnManualClock(name))


class TestMemoryClaimOnARunningClock(TestMemoryClaim):
    """What the cases ask for can be had from a store whose clock goes on by itself, too."""

    slack_ms = 500
    window_ms = 20_000

    @pytest.fixture
    def backend_factory(self) -> Callable[[], ClaimBackend]:
        clock = self.clock = RunningClock()

        class OnRunningClock(MemoryClaim):
            _now_ms = staticmethod(clock.now_ms)

        name = uuid.uuid4().hex
        return lambda: OnRunningClock(name)


class _RedisClaim(ClaimConformance):
    clock: ManualClock
    url: str
    strategy: str

    @pytest.fixture
    def backend_factory(self, redis_url: str) -> Callable[[], ClaimBackend]:
        clock = self.clock = ManualClock()
        self.url, strategy = redis_url, self.strategy

        class OnManualClock(RedisClaim):
            _now_ms = staticmethod(clock.now_ms)

        return lambda: OnManualClock(redis_url, strategy=strategy)

    def advance(self, ms: int) -> None:
        self.clock.advance(ms)

    def set_back(self, ms: int) -> None:
        self.clock.step(-ms)

    @contextmanager
    def locked(self) -> Iterator[None]:
        redis.execute(self.url, "CLIENT", "PAUSE", 30_000, "WRITE")
        try:
            yield
        finally:
            redis.execute(self.url, "CLIENT", "UNPAUSE")


class TestRedisClaimByScript(_RedisClaim):
    strategy = "script"


class TestRedisClaimByStreamId(_RedisClaim):
    strategy = "stream-id"
