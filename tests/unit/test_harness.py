"""The scheduler without threads that tests move by hand."""

from __future__ import annotations

from typing import Any

import pytest

from leasecron_sync import MemoryLease, Scheduler, every
from leasecron_sync.errors import SchedulerStateError
from leasecron_sync.model import RunState
from leasecron_sync.testing import FaultyLease, ManualClock, ManualScheduler, MemoryClaim


def made(**given: Any) -> tuple[ManualScheduler, list[int], FaultyLease]:  # noqa: ANN401 - options of a job
    backend = FaultyLease(MemoryLease())
    scheduler = Scheduler(backend)
    calls: list[int] = []
    options: dict[str, Any] = {"name": "job", **given}
    scheduler.add_job(lambda: calls.append(1), every(seconds=60), **options)
    return ManualScheduler(scheduler, ManualClock()), calls, backend


def test_nothing_works_before_the_start() -> None:
    manual, _calls, _backend = made()
    for call in (manual.step_timer, manual.step_heartbeat, manual.stop, manual.history):
        with pytest.raises(SchedulerStateError):
            call()


def test_time_that_is_advanced_executes_what_falls_due() -> None:
    manual, calls, _backend = made()
    manual.start()
    manual.advance(10 * 60_000)
    assert len(calls) == 10
    states = {record.state for record in manual.history("job")}
    assert states == {RunState.FINISHED}
    assert len(manual.history(limit=3)) == 3
    assert manual.runs == []


def test_runs_may_be_left_for_the_test_to_execute() -> None:
    manual, calls, _backend = made()
    manual.start()
    manual.advance(60_000, work=False)
    (run,) = manual.runs
    assert (run.job, run.run.job, calls, run.settled) == ("job", "job", [], False)
    with pytest.raises(SchedulerStateError):
        run.settle()
    run.call_handler()
    assert calls == [1]
    assert manual.history()[0].state is RunState.RUNNING
    assert run.settle() is None
    assert run.settled
    assert manual.history()[0].state is RunState.FINISHED
    manual.work()
    assert manual.runs == []


def test_a_settlement_without_an_answer_stays_to_be_tried_again() -> None:
    manual, calls, backend = made()
    manual.start()
    manual.advance(60_000, work=False)
    backend.faults.lose_request("settle")
    assert manual.work() == 0
    assert len(manual.runs) == 1
    assert manual.work() == 1
    assert calls == [1]


def test_a_run_that_is_not_executed_keeps_its_lease() -> None:
    manual, _calls, _backend = made()
    manual.start()
    manual.advance(3 * 60_000, work=False)
    assert [record.state for record in manual.history()][-1] is RunState.RUNNING
    assert manual.runs[0].run.job == "job"
    manual.runs[0].run.check()


def test_what_is_killed_leaves_its_run_to_the_next_start() -> None:
    manual, calls, _backend = made()
    manual.start()
    first = manual.instance_id
    manual.advance(60_000, work=False)
    manual.kill()
    assert manual.runs == []
    with pytest.raises(SchedulerStateError):
        manual.step_timer()
    manual.start()
    assert manual.instance_id != first
    manual.advance(20_000)
    assert calls == [1]
    assert manual.history()[0].attempt == 2


def test_a_stop_tells_the_runs_to_end() -> None:
    manual, _calls, _backend = made()
    manual.start()
    manual.advance(60_000, work=False)
    manual.stop()
    assert manual.runs[0].run.stopping
    assert manual.step_timer() is None


def test_a_step_that_never_waits_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    manual, _calls, _backend = made()
    manual.start()
    assert manual._timer is not None
    monkeypatch.setattr(manual._timer, "step", lambda: 0)
    with pytest.raises(RuntimeError, match="10,000"):
        manual.advance(1)


def test_on_a_claim_backend_there_is_no_heartbeat_and_no_history() -> None:
    scheduler = Scheduler(MemoryClaim())
    calls: list[int] = []
    scheduler.add_job(lambda: calls.append(1), every(seconds=60), name="job")
    manual = ManualScheduler(scheduler, ManualClock())
    manual.start()
    manual.advance(5 * 60_000)
    assert len(calls) == 5
    assert manual.step_heartbeat() is None
    with pytest.raises(TypeError):
        manual.history()


def test_the_stores_clock_may_be_another_one() -> None:
    scheduler = Scheduler(MemoryLease())
    starts: list[int] = []
    clock, store_clock = ManualClock(1_700_000_040_000), ManualClock(1_700_000_000_000)
    scheduler.add_job(lambda: starts.append(clock.now_ms()), every(seconds=60), name="job")
    manual = ManualScheduler(scheduler, clock, store_clock=store_clock)
    manual.start()
    for _ in range(3 * 600):  # one after the other, so the skew is known to a tenth of a second
        store_clock.advance(100)
        manual.advance(100)
    assert [round(ms % 60_000 / 1_000) for ms in starts] == [40, 40, 40]


def test_a_wrapped_backend_takes_the_stores_clock_too() -> None:
    inner = MemoryLease()
    manual = ManualScheduler(Scheduler(FaultyLease(FaultyLease(inner))), ManualClock(1_000_000))
    manual.start()
    assert inner.probe().store_ms == 1_000_000


def test_the_id_of_a_start_may_be_given() -> None:
    manual = ManualScheduler(Scheduler(MemoryLease()), ManualClock(), new_id=lambda: "mine")
    manual.start()
    assert manual.instance_id == "mine"


def test_jobs_that_come_and_go_are_told_to_the_timer() -> None:
    scheduler = Scheduler(MemoryLease())
    calls: list[str] = []
    scheduler.add_job(lambda: calls.append("old"), every(seconds=60), name="old")
    manual = ManualScheduler(scheduler, ManualClock(1_700_000_050_000))
    manual.start()
    manual.advance(60_000)
    assert calls == ["old"]
    scheduler.remove_job("old")
    scheduler.add_job(lambda: calls.append("new"), every(seconds=60), name="new")
    manual.refresh()
    manual.refresh()
    manual.advance(60_000)
    assert calls == ["old", "new"]


def test_a_stop_in_two_parts_lets_the_timer_take_its_last_step() -> None:
    manual, _calls, _backend = made()
    manual.start()
    manual.advance(60_000, work=False)
    manual.begin_stop()
    assert manual.runs[0].run.stopping
    assert manual._timer_ms <= manual.clock.steady_ms()
    assert manual.step_timer() is None


def test_a_handler_that_outlives_its_stop_keeps_its_slot_over_the_next_start() -> None:
    manual, calls, _backend = made(max_attempts=5)
    manual.start()
    manual.advance(60_000, work=False)
    (old,) = manual.runs
    manual.stop()
    manual.end_stop()
    with pytest.raises(SchedulerStateError):
        manual.end_stop()
    manual.start()
    manual.advance(40_000, work=False)
    assert manual.runs == [old]
    assert old.run.stopping
    old.call_handler()
    old.settle()
    assert calls == []
    manual.runs.remove(old)
    manual.advance(40_000)
    assert calls
