"""Events: log lines, listeners, and their thread."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from datetime import datetime, timezone
from unittest import mock

import pytest

from leasecron_sync.errors import StoreRejected, StoreUnavailable
from leasecron_sync.events import EVENT_NAMES, Event, EventHub, EventName

WHEN = datetime(2024, 3, 10, 2, 30, tzinfo=timezone.utc)
LIMIT_S = 10.0


@pytest.fixture
def hub() -> Iterator[EventHub]:
    hub = EventHub()
    yield hub
    hub.stop(LIMIT_S)
    assert hub.thread is None


def event(name: EventName = "run_finished", number: int = 0) -> Event:
    return Event(name, "instance", job="job", token=number)


def collect(hub: EventHub, events: list[Event]) -> list[Event]:
    """Deliver events to a listener and return what it got."""
    got: list[Event] = []
    hub.on("run_finished", got.append)
    hub.start()
    for item in events:
        hub.emit(item)
    hub.stop(LIMIT_S)
    return got


# -- listeners ------------------------------------------------------------------------------------


def test_a_listener_gets_the_events_of_its_name_in_order(hub: EventHub) -> None:
    events = [event(number=number) for number in range(200)]
    others = [event("run_started", 1), event("store_down", 2)]
    assert collect(hub, [*others, *events, *others]) == events


def test_several_listeners_are_called_in_the_order_of_their_registration(hub: EventHub) -> None:
    got: list[str] = []
    hub.on("run_finished", lambda _event: got.append("first"))
    hub.on("run_finished", lambda _event: got.append("second"))
    hub.start()
    hub.emit(event())
    hub.stop(LIMIT_S)
    assert got == ["first", "second"]


def test_listeners_are_called_on_a_thread_of_their_own(hub: EventHub) -> None:
    names: list[str] = []
    hub.on("run_finished", lambda _event: names.append(threading.current_thread().name))
    hub.start()
    hub.emit(event())
    thread = hub.thread
    assert thread is not None
    assert thread.daemon
    hub.stop(LIMIT_S)
    assert names == ["leasecron-events"]
    assert not thread.is_alive()


def test_without_a_listener_there_is_no_thread(hub: EventHub) -> None:
    hub.start()
    hub.emit(event())
    assert hub.thread is None


def test_a_listener_that_comes_later_is_called_from_then_on(hub: EventHub) -> None:
    got: list[Event] = []
    hub.start()
    hub.emit(event(number=1))
    hub.on("run_finished", got.append)
    hub.emit(event(number=2))
    hub.stop(LIMIT_S)
    assert got == [event(number=2)]


def test_what_happens_while_it_is_stopped_is_not_delivered(hub: EventHub) -> None:
    got: list[Event] = []
    hub.on("run_finished", got.append)
    hub.emit(event(number=1))
    for number in (2, 4):
        hub.start()
        hub.emit(event(number=number))
        hub.stop(LIMIT_S)
        hub.emit(event(number=number + 1))
    assert got == [event(number=2), event(number=4)]


def test_starting_twice_makes_one_thread(hub: EventHub) -> None:
    hub.on("run_finished", lambda _event: None)
    hub.start()
    thread = hub.thread
    hub.start()
    hub.on("run_started", lambda _event: None)
    assert hub.thread is thread


@pytest.mark.parametrize("error", [ValueError("odd"), KeyboardInterrupt(), SystemExit(3)])
def test_a_listener_that_raises_is_logged_and_called_again(
    hub: EventHub, error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    got: list[Event] = []

    def raises(item: Event) -> None:
        got.append(item)
        raise error

    after: list[Event] = []
    hub.on("run_finished", raises)
    hub.on("run_finished", after.append)
    hub.start()
    with caplog.at_level(logging.ERROR):
        for number in (1, 2):
            hub.emit(event(number=number))
        hub.stop(LIMIT_S)
    assert got == after == [event(number=1), event(number=2)]
    logged = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert [record.getMessage() for record in logged] == [
        "a listener raised event=run_finished"
    ] * 2
    assert all(record.exc_info and record.exc_info[1] is error for record in logged)


def test_a_listener_may_stop_the_hub(hub: EventHub) -> None:
    stopped = threading.Event()

    def stop(_event: Event) -> None:
        hub.stop(LIMIT_S)
        stopped.set()

    hub.on("run_finished", stop)
    hub.start()
    thread = hub.thread
    assert thread is not None
    hub.emit(event())
    assert stopped.wait(LIMIT_S)
    thread.join(LIMIT_S)
    assert not thread.is_alive()


def test_an_unknown_event_is_refused_with_the_known_ones(hub: EventHub) -> None:
    with pytest.raises(ValueError, match=r"unknown event 'run_ended'.*run_finished"):
        hub.on("run_ended", print)  # type: ignore[arg-type]


def test_a_listener_must_be_callable(hub: EventHub) -> None:
    with pytest.raises(TypeError, match="callable"):
        hub.on("run_finished", "print")  # type: ignore[arg-type]


# -- a listener that is too slow ------------------------------------------------------------------


class Slow:
    """A listener that does not return before it may."""

    def __init__(self) -> None:
        self.got: list[Event] = []
        self.inside, self.may_return = threading.Event(), threading.Event()

    def __call__(self, item: Event) -> None:
        self.got.append(item)
        self.inside.set()
        assert self.may_return.wait(LIMIT_S)


@pytest.fixture
def slow() -> Iterator[Slow]:
    slow = Slow()
    yield slow
    slow.may_return.set()


def test_emitting_never_waits_and_what_is_dropped_is_counted(
    hub: EventHub, slow: Slow, caplog: pytest.LogCaptureFixture
) -> None:
    with mock.patch("leasecron_sync.events.EVENT_QUEUE", 5), caplog.at_level(logging.WARNING):
        hub.on("run_finished", slow)
        hub.start()
        hub.emit(event(number=0))
        assert slow.inside.wait(LIMIT_S)
        for number in range(1, 13):  # 5 fit
            hub.emit(event(number=number))
        dropped = [record.getMessage() for record in caplog.records if "dropped" in record.msg]
        assert dropped == [
            "listeners do not keep up, events dropped dropped=1",
            "listeners do not keep up, events dropped dropped=5",
        ]
        slow.may_return.set()
        hub.stop(LIMIT_S)
    assert [item.token for item in slow.got] == [0, 1, 2, 3, 4, 5]


def test_stopping_does_not_wait_for_ever_for_a_listener(
    hub: EventHub, slow: Slow, caplog: pytest.LogCaptureFixture
) -> None:
    hub.on("run_finished", slow)
    hub.start()
    thread = hub.thread
    assert thread is not None
    hub.emit(event())
    assert slow.inside.wait(LIMIT_S)
    with caplog.at_level(logging.WARNING):
        hub.stop(0.01)
    assert "a listener did not return in time thread='leasecron-events'" in caplog.text
    slow.may_return.set()
    thread.join(LIMIT_S)
    assert not thread.is_alive()


def test_a_thread_whose_queue_was_full_at_the_stop_ends_too(hub: EventHub, slow: Slow) -> None:
    with mock.patch("leasecron_sync.events.EVENT_QUEUE", 2):
        hub.on("run_finished", slow)
        hub.start()
        thread = hub.thread
        assert thread is not None
        hub.emit(event())
        assert slow.inside.wait(LIMIT_S)
        for number in (1, 2):
            hub.emit(event(number=number))
        waiting = hub._queue
        assert waiting is not None
        hub.stop(0.01)
    slow.may_return.set()
    thread.join(0.2)
    ended = not thread.is_alive()
    waiting.put(None)  # so that this test leaves nothing behind
    thread.join(LIMIT_S)
    assert ended


def test_a_forked_child_starts_afresh(hub: EventHub) -> None:
    hub.on("run_finished", lambda _event: None)
    hub.start()
    thread = hub.thread
    assert thread is not None
    hub._lock.acquire()  # by a thread that does not exist in the child
    waiting = hub._queue
    hub.discard()
    assert hub.thread is None
    assert collect(hub, [event(number=7)]) == [event(number=7)]
    assert waiting is not None
    waiting.put(None)
    thread.join(LIMIT_S)


def test_an_interpreter_that_ends_gives_no_thread(hub: EventHub) -> None:
    hub.on("run_finished", lambda _event: pytest.fail("called"))
    with mock.patch.object(threading.Thread, "start", side_effect=RuntimeError("too late")):
        hub.start()
    assert hub.thread is None
    hub.emit(event())


# -- log lines ------------------------------------------------------------------------------------


def logged(hub: EventHub, item: Event, caplog: pytest.LogCaptureFixture) -> tuple[int, str]:
    caplog.clear()
    with caplog.at_level(logging.DEBUG, logger="leasecron_sync"):
        hub.emit(item)
    [record] = caplog.records
    assert record.name == "leasecron_sync.events"
    return record.levelno, record.getMessage()


@pytest.mark.parametrize("name", EVENT_NAMES)
def test_every_event_has_a_sentence_and_names_its_subject(
    hub: EventHub, name: EventName, caplog: pytest.LogCaptureFixture
) -> None:
    _, line = logged(hub, Event(name, "i-1", job="a job", scheduled_time=WHEN), caplog)
    sentence, _, fields = line.partition(" job=")
    assert sentence[0].islower()
    assert "=" not in sentence
    assert fields == "'a job' scheduled_time=2024-03-10T02:30:00+00:00 instance=i-1"


@pytest.mark.parametrize(
    ("name", "level"),
    [
        ("run_claimed", logging.DEBUG),
        ("run_started", logging.DEBUG),
        ("run_finished", logging.INFO),
        ("run_skipped", logging.INFO),
        ("run_missed", logging.WARNING),
        ("run_taken_over", logging.WARNING),
        ("run_failed", logging.ERROR),
        ("run_lost", logging.ERROR),
        ("store_down", logging.ERROR),
    ],
)
def test_what_went_wrong_is_louder(
    hub: EventHub, name: EventName, level: int, caplog: pytest.LogCaptureFixture
) -> None:
    assert logged(hub, Event(name, "i-1"), caplog)[0] == level


def test_all_fields_that_are_known_are_shown(
    hub: EventHub, caplog: pytest.LogCaptureFixture
) -> None:
    item = Event(
        "run_missed",
        "i-1",
        job="job",
        scheduled_time=WHEN,
        attempt=2,
        token=17,
        reason="too old",
        count=1_000,
        first_time=WHEN,
        at_least=True,
        delay_ms=40,
    )
    assert logged(hub, item, caplog)[1] == (
        "run missed job='job' from=2024-03-10T02:30:00+00:00 "
        "scheduled_time=2024-03-10T02:30:00+00:00 attempt=2 token=17 reason='too old' "
        "count=at least 1000 ms=40 instance=i-1"
    )


def test_an_event_of_the_store_names_no_job(
    hub: EventHub, caplog: pytest.LogCaptureFixture
) -> None:
    line = logged(hub, Event("skew_found", "i-1", delay_ms=-700), caplog)[1]
    assert line == "this host's clock differs from the store's ms=-700 instance=i-1"


def test_names_and_reasons_cannot_break_a_line(
    hub: EventHub, caplog: pytest.LogCaptureFixture
) -> None:
    item = Event("run_failed", "i-1", job="a\nb", reason="two\nlines")
    assert "\n" not in logged(hub, item, caplog)[1]


def test_a_store_that_refuses_is_not_told_as_one_that_is_silent(
    hub: EventHub, caplog: pytest.LogCaptureFixture
) -> None:
    refusal = StoreRejected("permission denied for table leasecron_run")
    for error in (refusal, StoreUnavailable("no answer in time")):
        hub.emit(Event("store_down", "i-1", reason=str(error), error=error))
    refused, silent = caplog.messages
    assert refused.startswith("store refuses what is asked, nothing new is started reason='perm")
    assert silent.startswith("store does not answer, nothing new is started reason='no answer")
    assert not any(record.exc_info for record in caplog.records)


def test_the_error_of_a_handler_is_logged_with_its_traceback(
    hub: EventHub, caplog: pytest.LogCaptureFixture
) -> None:
    error = ValueError("odd")
    with caplog.at_level(logging.ERROR):
        hub.emit(Event("run_failed", "i-1", job="job", error=error))
    [record] = caplog.records
    assert record.exc_info is not None
    assert record.exc_info[1] is error
