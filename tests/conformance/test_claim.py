"""The shipped suite over every claim backend."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Callable

import pytest

from leasecron_sync.backends.base import BackendSettings, ClaimBackend
from leasecron_sync.backends.nats import NatsClaim
from leasecron_sync.backends.rabbitmq import RabbitMQClaim
from leasecron_sync.backends.redis_claim import RedisClaim
from leasecron_sync.testing.clock import ManualClock
from leasecron_sync.testing.conformance import ClaimConformance
from leasecron_sync.testing.faults import FaultyClaim
from leasecron_sync.testing.memory import MemoryClaim
from tests.conformance.clocks import RunningClock
from tests.conformance.expiry import age
from tests.services import redis
from tests.services.proxy import Proxy
from tests.services.server import Server


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
    spaces: set[str]
    strategy: str

    @pytest.fixture
    def backend_factory(self, redis_url: str) -> Callable[[], ClaimBackend]:
        clock = self.clock = ManualClock()
        self.url, strategy = redis_url, self.strategy
        spaces = self.spaces = set()

        class OnManualClock(RedisClaim):
            _now_ms = staticmethod(clock.now_ms)

            def open(self, settings: BackendSettings) -> None:
                spaces.add(settings.namespace)
                super().open(settings)

        return lambda: OnManualClock(redis_url, strategy=strategy)

    def advance(self, ms: int) -> None:
        self.clock.advance(ms)
        age(self.url, min(self.spaces, key=len), ms)  # the others begin with that

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


class _OnRedis8(_RedisClaim):
    @pytest.fixture
    def redis_url(self, redis8_url: str) -> str:
        return redis8_url


class TestRedisClaimByIdmp(_OnRedis8):
    strategy = "idmp"


class TestRedisClaimByScriptOnRedis8(_OnRedis8):
    strategy = "script"


class TestRedisClaimByStreamIdOnRedis8(_OnRedis8):
    strategy = "stream-id"


class TestNatsClaim(ClaimConformance):
    clock: ManualClock
    through: Proxy
    own_clock = False

    @pytest.fixture
    def backend_factory(
        self, nats_server: Server, proxy: Callable[[Server], Proxy]
    ) -> Callable[[], ClaimBackend]:
        clock = self.clock = ManualClock()
        through = self.through = proxy(nats_server)

        class OnManualClock(NatsClaim):
            _now_ms = staticmethod(clock.now_ms)

        return lambda: OnManualClock(through.url_of(nats_server.url))

    def now_ms(self, backend: ClaimBackend) -> int:
        del backend  # it has no clock
        return self.clock.now_ms()

    def advance(self, ms: int) -> None:
        self.clock.advance(ms)

    def set_back(self, ms: int) -> None:
        self.clock.step(-ms)

    @contextmanager
    def locked(self) -> Iterator[None]:
        self.through.swallow()
        try:
            yield
        finally:
            self.through.forward()


class TestRabbitMQClaim(ClaimConformance):
    clock: ManualClock
    through: Proxy
    own_clock = False
    reads_back = False

    @pytest.fixture
    def backend_factory(
        self, rabbitmq_server: Server, proxy: Callable[[Server], Proxy]
    ) -> Callable[[], ClaimBackend]:
        clock = self.clock = ManualClock()
        through = self.through = proxy(rabbitmq_server)

        class OnManualClock(RabbitMQClaim):
            _now_ms = staticmethod(clock.now_ms)

        return lambda: OnManualClock(through.url_of(rabbitmq_server.url))

    def now_ms(self, backend: ClaimBackend) -> int:
        del backend  # it has no clock
        return self.clock.now_ms()

    def advance(self, ms: int) -> None:
        self.clock.advance(ms)

    def set_back(self, ms: int) -> None:
        self.clock.step(-ms)

    @contextmanager
    def locked(self) -> Iterator[None]:
        self.through.swallow()
        try:
            yield
        finally:
            self.through.forward()
