"""One run: its handler, its time limit, its retries, and what is told to the store."""

from __future__ import annotations

import pytest

from leasecron_sync.errors import RunTimeLimit
from leasecron_sync.model import RunState
from leasecron_sync.run import LeaseRun
from tests.fleet import MIDDAY_MS, MINUTE, SECOND, Fleet


@pytest.mark.parametrize("method", ["claim", "settle", "renew", "pending", "register", "states"])
@pytest.mark.parametrize("loss", ["lose_request", "lose_reply"])
def test_a_lost_message_costs_no_run_and_repeats_none(method: str, loss: str) -> None:
    fleet = Fleet()
    instances = [fleet.add(label) for label in "ab"]
    for item in instances:
        item.job("job", "*/5 * * * *", lambda _run: fleet.advance(20 * SECOND))
        item.start()
    fleet.advance(3 * MINUTE)
    for item in instances:
        getattr(item.backend.faults, loss)(method, 3)
    fleet.advance(17 * MINUTE)
    assert sorted(fleet.started()) == [MIDDAY_MS + number * 5 * MINUTE for number in range(4)]
    assert set(fleet.states("job").values()) == {RunState.FINISHED}
    assert not fleet.missed()


def test_past_its_limit_a_run_is_taken_over_by_another_instance() -> None:
    fleet = Fleet()
    seen: set[type[BaseException]] = set()

    def work(run: LeaseRun) -> None:
        for _ in range(60 if run.attempt == 1 else 0):
            fleet.advance(SECOND)
            try:
                run.check()
            except BaseException as error:  # noqa: BLE001 - a handler that ignores its end
                seen.add(type(error))

    for label in "ab":
        item = fleet.add(label)
        item.job("job", "0 * * * *", work, time_limit_ms=10_000)
        item.start()
    fleet.advance(3 * MINUTE)
    one, two = fleet.starts
    assert RunTimeLimit in seen
    assert one.instance != two.instance
    assert two.at_ms - one.at_ms <= 26 * SECOND


def test_retries_wait_twice_as_long_each_time_until_the_attempts_are_used_up() -> None:
    fleet = Fleet()
    only = fleet.add("a")

    def fail(_run: LeaseRun) -> None:
        message = "no luck"
        raise ValueError(message)

    only.job("job", "0 12 * * *", fail, max_attempts=6)
    only.start()
    fleet.advance(3 * MINUTE)
    times = [start.at_ms for start in fleet.starts]
    assert len(times) == 6
    for number, (one, two) in enumerate(zip(times, times[1:])):
        wait_ms = SECOND * 2**number
        assert wait_ms <= two - one <= wait_ms * 1.25 + 1_100
    assert fleet.states("job") == {MIDDAY_MS: RunState.FAILED}


@pytest.mark.parametrize("raised", [SystemExit, GeneratorExit, ValueError])
def test_an_error_whose_text_cannot_be_had_fails_its_attempt_as_any_other(
    raised: type[BaseException],
) -> None:
    fleet = Fleet()
    only = fleet.add("a")

    class Wordless(Exception):
        def __str__(self) -> str:
            raise raised

    def fail(_run: LeaseRun) -> None:
        raise Wordless

    only.job("job", "0 12 * * *", fail, max_attempts=2)
    only.start()
    fleet.advance(MINUTE)
    assert [start.attempt for start in fleet.starts] == [1, 2]
    (record,) = fleet.records().values()
    assert (record.state, record.reason) == (RunState.FAILED, "Wordless")
    assert [event.reason for event in only.named("run_failed")] == ["Wordless"]
    assert only.manual._runtime.taken() == 0
