"""What a command reads does not grow with the history: counted in the scripts themselves."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import Any, Callable, NamedTuple
from unittest import mock

import pytest

from leasecron_sync.backends import _redis_link
from leasecron_sync.backends._lanes import Deadline
from leasecron_sync.backends._redis_link import Link
from leasecron_sync.backends._redis_scripts import Script, keys_of, script_of
from leasecron_sync.backends.base import BackendSettings
from leasecron_sync.backends.redis import RedisLease
from leasecron_sync.model import (
    JobSpan,
    JobStamp,
    LeaseClaim,
    LeaseRef,
    OnOverlap,
    Outcome,
    RunKey,
    Settlement,
)
from tests.services.redis import execute
from tests.services.server import Server

NOW_MS = 1_700_000_000_000
HISTORY = 3_000
JOBS = 50
FINISHED = Settlement(Outcome.FINISHED)

# Around a script: what it asks the server for goes through here, and is counted.
BEFORE = """
local asked, read = 0, 0
local server = redis
local redis = setmetatable({call = function(...)
  local answer = server.call(...)
  asked = asked + 1
  read = read + (type(answer) == 'table' and #answer or 1)
  return answer
end}, {__index = server})
local function body()
"""
AFTER = "\nend\nlocal answer = body()\nreturn {answer, asked, read}"

# A settled record of a job, so many times at earlier scheduled times.
GROW = """
local m = redis.call('ZREVRANGEBYLEX', KEYS[3], '[5:job 7:~', '[5:job 7:', 'LIMIT', 0, 1)[1]
local record = redis.call('HGET', KEYS[1], m)
local base = tonumber(string.sub(m, -16))
for n = 1, ARGV[1] do
  local other = string.sub(m, 1, -17) .. string.format('%016.0f', base - 1000 - n)
  redis.call('HSET', KEYS[1], other, record)
  redis.call('ZADD', KEYS[2], string.format('%.0f', base - 1000 - n - 1e15), other)
  redis.call('ZADD', KEYS[3], 0, other)
end
return redis.call('ZCARD', KEYS[3])
"""


def counting(name: str) -> Script:
    """Return a script that tells besides what it cost; it is called by its text."""
    first, _, rest = script_of(name).text.decode().partition("\n")
    return Script(f"{first}{BEFORE}{rest}{AFTER}".encode(), b"0" * 40)


class Cost(NamedTuple):
    """What a command cost.

    Attributes:
        asked: How many commands its script made.
        read: How many elements those gave back.
    """

    asked: int
    read: int


class Counted(RedisLease):
    """Counts what the scripts do."""

    cost = Cost(0, 0)

    def _call(self, link: Link, script: str, values: Sequence[object], deadline: Deadline) -> Any:  # noqa: ANN401
        answer, asked, read = super()._call(link, script, values, deadline)
        self.cost = Cost(asked, read)
        return answer


class Bench:
    """A namespace, and a backend on it that counts."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._space = f"cost {uuid.uuid4().hex}"
        self._decisions = 0
        self.backend = Counted(url)
        self.backend._now_ms = lambda: NOW_MS
        self.backend.open(BackendSettings(self._space, "me", 5_000))

    def close(self) -> None:
        self.backend.close()

    def grow(self) -> None:
        """Add a long history to the job."""
        keys = dict(zip(("meta", "names", "jobs", "runs", "times"), keys_of(self._space)))
        settled = keys_of(self._space)[7]
        made = execute(self._url, "EVAL", GROW, 3, keys["runs"], settled, keys["times"], HISTORY)
        assert made > HISTORY

    def won(self, number: int) -> LeaseRef:
        self._decisions += 1
        key = RunKey("job 7", NOW_MS - number)
        claim = LeaseClaim(
            key=key,
            due_ms=key.scheduled_ms,
            holder="me",
            decision_id=f"decision {self._decisions}",
            lease_ms=15_000,
            max_attempts=3,
            on_overlap=OnOverlap.SKIP,
            max_age_ms=60_000,
            takeover_ms=150_000,
        )
        [reply] = self.backend.claim([claim])
        assert reply.lease is not None
        return reply.lease.ref

    def cost(self, command: str, number: int) -> Cost:
        """Return what a command costs beside one running run of the job."""
        backend = self.backend
        ref = self.won(number)
        calls: dict[str, Callable[[], object]] = {
            "claim": lambda: None,
            "renew": lambda: backend.renew([ref], 15_000),
            "settle": lambda: backend.settle(ref, FINISHED),
            "pending": lambda: backend.pending(["job 7"], 10),
            "register": lambda: backend.register([JobStamp("job 7", "x")]),
            "states": lambda: backend.states([JobSpan("job 7", NOW_MS - 5, NOW_MS)]),
            "history": lambda: backend.history("job 7", 3),
            "history of all": lambda: backend.history(None, 3),
            "jobs": lambda: backend.jobs(10),
            "prune nothing": lambda: backend.prune(10 * NOW_MS, 100),
        }
        calls[command]()
        cost = backend.cost
        assert backend.settle(ref, FINISHED).accepted
        return cost


@pytest.fixture
def bench(redis_server: Server) -> Iterator[Bench]:
    counted = mock.patch.object(_redis_link, "script_of", counting)
    with counted, closing(Bench(redis_server.url)) as bench:
        bench.backend.register([JobStamp(f"job {number}", "x") for number in range(JOBS)])
        yield bench


@pytest.mark.parametrize(
    "command",
    [
        *("claim", "renew", "settle", "pending", "register", "states"),
        *("history", "history of all", "jobs", "prune nothing"),
    ],
)
def test_call_7_a_command_does_not_read_the_history(bench: Bench, command: str) -> None:
    costs = [bench.cost(command, number) for number in range(4)]
    before = costs[-1]
    bench.grow()
    after = bench.cost(command, 4)
    slack = 2 if command == "states" else 0  # its span has one run more
    assert before.asked <= after.asked <= before.asked + slack
    assert before.read <= after.read <= before.read + 2 * slack
    assert 9 <= before.asked < 80
    assert before.read < 100


def test_call_7_pruning_costs_what_it_deletes(bench: Bench) -> None:
    for number in range(4):
        bench.cost("claim", number)
    bench.grow()
    bench.backend.prune(0, 10)
    before = bench.backend.cost
    assert bench.backend.prune(0, 10).deleted == 10
    assert bench.backend.cost == before
    assert before.asked < 30 + 4 * 10
    bench.backend.prune(0, 20)
    assert bench.backend.cost.asked == before.asked + 3 * 10


def test_call_7_a_batch_costs_what_its_claims_cost(bench: Bench) -> None:
    """Also where the other jobs of the store have unsettled runs."""

    def claims(first: int, count: int) -> list[LeaseClaim]:
        return [
            LeaseClaim(
                key=RunKey(f"other {number}", NOW_MS),
                due_ms=NOW_MS,
                holder="me",
                decision_id=f"batch {number}",
                lease_ms=15_000,
                max_attempts=3,
                on_overlap=OnOverlap.SKIP,
                max_age_ms=60_000,
                takeover_ms=150_000,
            )
            for number in range(first, first + count)
        ]

    backend = bench.backend
    backend.claim(claims(0, 1))
    one = backend.cost
    backend.claim(claims(1, 101))
    many = backend.cost
    backend.claim(claims(102, 1))
    assert backend.cost == one
    assert many.asked - one.asked <= 100 * one.asked
    assert many.read - one.read <= 100 * one.read
