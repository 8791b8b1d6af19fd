"""The clock that tests move by hand."""

from __future__ import annotations

import threading

import pytest

from leasecron_sync.clock import Clock
from leasecron_sync.testing.clock import ManualClock


def test_it_stands_still_until_it_is_moved() -> None:
    clock: Clock = ManualClock(now_ms=1_000, steady_ms=50)
    assert [(clock.now_ms(), clock.steady_ms()) for _ in range(3)] == [(1_000, 50)] * 3


def test_time_passes_on_both_clocks() -> None:
    clock = ManualClock(now_ms=1_000, steady_ms=50)
    clock.advance(7)
    assert (clock.now_ms(), clock.steady_ms()) == (1_007, 57)


@pytest.mark.parametrize("ms", [5, -5])
def test_a_step_is_one_of_the_wall_clock_alone(ms: int) -> None:
    clock = ManualClock(now_ms=1_000, steady_ms=50)
    clock.step(ms)
    assert (clock.now_ms(), clock.steady_ms()) == (1_000 + ms, 50)


def test_the_steady_clock_does_not_go_back() -> None:
    clock = ManualClock(now_ms=1_000, steady_ms=50)
    with pytest.raises(ValueError, match=r"step\(\)"):
        clock.advance(-1)
    assert (clock.now_ms(), clock.steady_ms()) == (1_000, 50)


def test_waiting_lets_the_time_out_pass() -> None:
    clock, event = ManualClock(now_ms=1_000, steady_ms=50), threading.Event()
    assert not clock.wait(event, 30)
    assert (clock.now_ms(), clock.steady_ms()) == (1_030, 80)
    assert not clock.wait(event, -3)
    assert clock.steady_ms() == 80


def test_waiting_for_what_has_happened_takes_no_time() -> None:
    clock, event = ManualClock(now_ms=1_000, steady_ms=50), threading.Event()
    event.set()
    assert clock.wait(event, 30)
    assert (clock.now_ms(), clock.steady_ms()) == (1_000, 50)


def test_its_readings_are_far_apart_and_far_from_the_real_ones() -> None:
    clock = ManualClock()
    assert clock.now_ms() > 1_000 * clock.steady_ms() // 10
    assert repr(clock) == f"ManualClock(now_ms={clock.now_ms()}, steady_ms={clock.steady_ms()})"


def test_threads_lose_no_time_to_each_other() -> None:
    clock = ManualClock(now_ms=0, steady_ms=0)

    def advance() -> None:
        for _ in range(2_000):
            clock.advance(1)

    threads = [threading.Thread(target=advance) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (clock.now_ms(), clock.steady_ms()) == (8_000, 8_000)
