"""What a Redis server does to instances that claim there, and what comes of it.

No run is won twice, whatever happens, and none is lost: the decision that won is read back after a
reply that did not come. ``LEASECRON_SYNC_LONG=1`` in the environment plays it with every mechanism,
longer and with more jobs, and on older servers, too.
"""

from __future__ import annotations

from pathlib import Path
from typing import Callable

import pytest

from leasecron_sync.backends.redis_claim import STRATEGIES, RedisClaim
from tests.faults.once_crew import OnceCrew, pause
from tests.faults.processes import LONG
from tests.services.fixtures import Own
from tests.services.redis import RedisServer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240 if LONG else 60)]

STOP_S = 7.0 if LONG else 1.5


@pytest.mark.parametrize("strategy", STRATEGIES if LONG else ["stream-id"])
def test_a_server_that_is_killed_restarted_and_stands_still_doubles_and_loses_nothing(
    strategy: str, own: Own, tmp_path: Path
) -> None:
    _endures(own.redis8, strategy, tmp_path)


@pytest.mark.skipif(not LONG, reason="only with LEASECRON_SYNC_LONG=1")
@pytest.mark.parametrize("kind", ["redis", "valkey"])
@pytest.mark.parametrize("strategy", ["script", "stream-id"])
def test_an_older_server_that_is_killed_restarted_and_stands_still(
    strategy: str, kind: str, own: Own, tmp_path: Path
) -> None:
    _endures(getattr(own, kind), strategy, tmp_path)


def _endures(make: Callable[[], RedisServer], strategy: str, folder: Path) -> None:
    server = make()  # what it answered is in its file
    crew = OnceCrew(folder, lambda: RedisClaim(server.url, strategy=strategy))
    try:
        crew.start()
        server.kill()
        crew.wait_told("store_down")
        server.start()
        crew.wait_told("store_back")
        crew.work()
        for _ in range(2 if LONG else 0):
            server.restart()
            crew.work()
        server.pause()
        try:
            pause(STOP_S)
        finally:
            server.resume()
        crew.work()
        assert crew.judged() == []
    finally:
        crew.stop()
    assert crew.told("run_missed") == []
