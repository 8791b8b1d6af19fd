"""Clocks of single processes that are set while these run."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.services.debian import CannotGet
from tests.services.faketime import FakeClock, library
from tests.services.fixtures import had
from tests.services.process import eventually
from tests.services.services import Services

PROGRAM = """
import sys, time
for _ in sys.stdin:
    print(time.time(), time.clock_gettime(time.CLOCK_BOOTTIME), time.monotonic(), flush=True)
"""
NEAR_S = 5.0
STEPS_MS = (0, 3_600_000, -700, -86_400_000, 0)


@pytest.fixture
def clock(request: pytest.FixtureRequest, tmp_path: Path) -> FakeClock:
    if request.config.getoption("--without-services"):
        pytest.skip("left out with --without-services")
    try:
        return FakeClock(library(), tmp_path / "clock")
    except CannotGet as reason:
        pytest.skip(f"libfaketime cannot be had: {reason}")


@pytest.fixture
def process(clock: FakeClock) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **clock.environment()},
    ) as process:
        yield process
        assert process.stdin is not None
        process.stdin.close()


def test_the_wall_clock_of_a_process_is_set_while_it_runs_and_no_other_clock(
    clock: FakeClock, process: subprocess.Popen[str]
) -> None:
    assert process.stdin is not None
    assert process.stdout is not None
    for offset_ms in STEPS_MS:
        clock.set(offset_ms)
        process.stdin.write("\n")
        process.stdin.flush()
        wall_s, boot_s, monotonic_s = map(float, process.stdout.readline().split())
        assert abs(wall_s - time.time() - offset_ms / 1_000) < NEAR_S
        if offset_ms:
            assert abs(wall_s - time.time()) > abs(offset_ms) / 2_000
        assert abs(boot_s - time.clock_gettime(time.CLOCK_BOOTTIME)) < NEAR_S
        assert abs(monotonic_s - time.monotonic()) < NEAR_S


@pytest.mark.parametrize("kind", ["redis", "valkey"])
def test_the_clock_of_a_server_is_set_while_it_runs(
    clock: FakeClock, services: Services, kind: str
) -> None:
    server = had(services.new_valkey if kind == "valkey" else services.new_redis)
    server.environment.update(clock.environment())
    try:
        server.start()
        for offset_ms in STEPS_MS:
            clock.set(offset_ms)

            def is_set(offset_s: float = offset_ms / 1_000) -> bool:
                reply = server.do("TIME")
                assert isinstance(reply, list)
                return abs(int(str(reply[0])) - time.time() - offset_s) < NEAR_S

            assert eventually(is_set, NEAR_S), "it reads the clock once for several commands"
    finally:
        server.close()
