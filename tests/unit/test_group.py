"""Requests of several threads in one call: who makes it, what it brings, and what goes wrong."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Callable, Optional, Union

import pytest

from leasecron_sync.backends import _group
from leasecron_sync.backends._group import Group
from leasecron_sync.clock import SystemClock
from leasecron_sync.errors import OutcomeUnknown, StoreError, StoreRejected, StoreUnavailable

LIMIT_S = 30.0
LONG_MS = 60_000
WHAT = "settling in the store"

Answers = Sequence[Union[str, StoreError]]


class Store:
    """Makes calls that last until they are let go."""

    def __init__(self) -> None:
        self.batches: list[list[str]] = []
        self.deadlines: list[int] = []
        self.begun = threading.Semaphore(0)
        self.gate = threading.Semaphore(0)
        self.error: Optional[BaseException] = None
        self.answer: Callable[[str], Union[str, StoreError]] = str.upper
        self.group: Group[str, str] = Group(self.call, SystemClock(), WHAT)

    def call(self, items: Sequence[str], deadline_ms: int) -> Answers:
        self.batches.append(list(items))
        self.deadlines.append(deadline_ms)
        self.begun.release()
        assert self.gate.acquire(timeout=LIMIT_S)
        if self.error is not None:
            raise self.error
        return [self.answer(item) for item in items]

    def wait_begun(self) -> None:
        assert self.begun.acquire(timeout=LIMIT_S)

    def wait_waiting(self, count: int) -> None:
        """Wait until so many requests wait for the next call."""
        end_ms = SystemClock().steady_ms() + LIMIT_S * 1000
        while len(self.group._waiting) != count:
            assert SystemClock().steady_ms() < end_ms
            threading.Event().wait(0.001)


@pytest.fixture
def store() -> Store:
    return Store()


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(40) as made:
        yield made


def begin(store: Store, pool: ThreadPoolExecutor, *items: str) -> list[Future[str]]:
    """Let the first request make a call, and the others wait behind it."""
    first, *others = items
    made = [pool.submit(store.group.ask, first, LONG_MS)]
    store.wait_begun()
    for number, item in enumerate(others, 1):
        made.append(pool.submit(store.group.ask, item, LONG_MS))
        store.wait_waiting(number)
    return made


def outcome(future: Future[str]) -> Union[str, type[BaseException]]:
    error = future.exception(LIMIT_S)
    return future.result() if error is None else type(error)


def test_one_request_is_one_call(store: Store) -> None:
    store.gate.release()
    assert store.group.ask("a", LONG_MS) == "A"
    store.gate.release()
    assert store.group.ask("b", LONG_MS) == "B"
    assert store.batches == [["a"], ["b"]]


def test_what_comes_during_a_call_makes_up_the_next_one(
    store: Store, pool: ThreadPoolExecutor
) -> None:
    asked = begin(store, pool, "a", "b", "c", "d")
    store.gate.release(2)
    assert [outcome(future) for future in asked] == ["A", "B", "C", "D"]
    assert store.batches == [["a"], ["b", "c", "d"]]


def test_no_thread_makes_more_than_one_call_for_its_request(
    store: Store, pool: ThreadPoolExecutor
) -> None:
    asked = begin(store, pool, "a", "b")
    store.gate.release()
    assert outcome(asked[0]) == "A"
    store.wait_begun()  # by the thread of b, while that of a has gone
    asked += [pool.submit(store.group.ask, "c", LONG_MS)]
    store.wait_waiting(1)
    store.gate.release(2)
    assert [outcome(future) for future in asked[1:]] == ["B", "C"]
    assert store.batches == [["a"], ["b"], ["c"]]


def test_a_call_has_a_limit(
    store: Store, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_group, "GROUP_LIMIT", 2)
    asked = begin(store, pool, "a", "b", "c", "d")
    store.gate.release(3)
    assert [outcome(future) for future in asked] == ["A", "B", "C", "D"]
    assert store.batches == [["a"], ["b", "c"], ["d"]]


def test_an_error_of_one_request_is_its_own(store: Store, pool: ThreadPoolExecutor) -> None:
    def answer(item: str) -> Union[str, StoreError]:
        return StoreRejected("unreadable") if item == "c" else item.upper()

    store.answer = answer
    asked = begin(store, pool, "a", "b", "c", "d")
    store.gate.release(2)
    assert [outcome(future) for future in asked] == ["A", "B", StoreRejected, "D"]


@pytest.mark.parametrize("kind", [OutcomeUnknown, StoreUnavailable, StoreRejected])
def test_an_error_of_the_call_is_raised_in_every_thread_of_it(
    kind: type[StoreError], store: Store, pool: ThreadPoolExecutor
) -> None:
    asked = begin(store, pool, "a", "b", "c")
    store.gate.release()
    assert outcome(asked[0]) == "A"
    store.wait_begun()
    store.error = kind("the disk is full")
    store.gate.release()
    errors = [future.exception(LIMIT_S) for future in asked[1:]]
    assert [type(error) for error in errors] == [kind, kind]
    assert {str(error) for error in errors} == {"the disk is full"}
    assert errors[0] is not errors[1]  # each thread adds its own traceback
    assert all(error is not None and error.__cause__ is store.error for error in errors)


@pytest.mark.parametrize("error", [ValueError("x"), KeyboardInterrupt()])
def test_a_broken_call_is_unknown_to_the_others_and_the_next_one_goes_on(
    error: BaseException, store: Store, pool: ThreadPoolExecutor
) -> None:
    asked = begin(store, pool, "a", "b", "c")
    store.gate.release()
    assert outcome(asked[0]) == "A"
    store.wait_begun()
    store.error = error
    asked += [pool.submit(store.group.ask, "d", LONG_MS)]
    store.wait_waiting(1)
    store.gate.release()
    assert [outcome(future) for future in asked[1:3]] == [type(error), OutcomeUnknown]
    store.wait_begun()
    store.error = None
    store.gate.release()
    assert outcome(asked[3]) == "D"


def test_answers_of_a_wrong_number_are_unknown(store: Store) -> None:
    group: Group[str, str] = Group(lambda _items, _deadline_ms: [], SystemClock(), WHAT)
    with pytest.raises(OutcomeUnknown, match="broken off"):
        group.ask("a", LONG_MS)
    store.gate.release()
    assert store.group.ask("a", LONG_MS) == "A"


def test_a_request_whose_time_is_over_before_its_call_had_no_effect(
    store: Store, pool: ThreadPoolExecutor
) -> None:
    asked = begin(store, pool, "a")
    assert outcome(pool.submit(store.group.ask, "b", 1)) is StoreUnavailable
    store.gate.release()
    assert outcome(asked[0]) == "A"
    store.gate.release()
    assert store.group.ask("c", LONG_MS) == "C"
    assert store.batches == [["a"], ["c"]]


def test_a_request_whose_time_is_over_during_its_call_may_have_had_one(
    store: Store, pool: ThreadPoolExecutor
) -> None:
    asked = begin(store, pool, "a", "b")
    late = pool.submit(store.group.ask, "c", 200)
    store.wait_waiting(2)
    store.gate.release()
    store.wait_begun()
    assert outcome(late) is OutcomeUnknown
    store.gate.release()
    assert [outcome(future) for future in asked] == ["A", "B"]
    assert store.batches == [["a"], ["b", "c"]]


def test_a_call_ends_before_the_first_of_its_requests_has_to(
    store: Store, pool: ThreadPoolExecutor
) -> None:
    asked = begin(store, pool, "a", "b", "c")
    deadlines = [request.deadline_ms for request in store.group._waiting]
    store.gate.release(2)
    assert [outcome(future) for future in asked] == ["A", "B", "C"]
    assert store.deadlines[1] == min(deadlines)


def test_a_thread_that_is_called_on_too_late_leaves_the_call_to_the_next(
    store: Store, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Its time is over, it has not taken notice yet, and is called on just then.
    asked = begin(store, pool, "a")
    decided, go_on = threading.Event(), threading.Event()
    is_called_on = store.group._is_called_on

    def interrupted(request: _group._Request[str, str]) -> bool:
        if request.item == "b":
            called_on = is_called_on(request)
            decided.set()
            assert go_on.wait(LIMIT_S)
            assert called_on
            raise KeyboardInterrupt
        return is_called_on(request)

    monkeypatch.setattr(store.group, "_is_called_on", interrupted)
    asked += [pool.submit(store.group.ask, "b", LONG_MS)]
    store.wait_waiting(1)
    asked += [pool.submit(store.group.ask, "c", LONG_MS)]
    store.wait_waiting(2)
    store.gate.release()
    assert decided.wait(LIMIT_S)
    go_on.set()
    store.gate.release()
    assert [outcome(future) for future in asked] == ["A", KeyboardInterrupt, "C"]
    assert store.batches == [["a"], ["c"]]
    store.gate.release()
    assert store.group.ask("d", LONG_MS) == "D"


def test_every_request_of_many_threads_is_answered_once_in_few_calls() -> None:
    seen: Counter[str] = Counter()
    calls = [0]

    def call(items: Sequence[str], _deadline_ms: int) -> Answers:
        calls[0] += 1
        seen.update(items)
        gathered.wait(0.001)  # as a commit does, it lets others come
        return [item.upper() for item in items]

    gathered = threading.Event()
    group: Group[str, str] = Group(call, SystemClock(), WHAT)
    with ThreadPoolExecutor(32) as pool:
        asked = {
            f"item {number}": pool.submit(group.ask, f"item {number}", LONG_MS)
            for number in range(1_000)
        }
        answers = {item: future.result(LIMIT_S) for item, future in asked.items()}
    assert answers == {item: item.upper() for item in asked}
    assert set(seen.values()) == {1}
    assert calls[0] < 500
    assert not group._led
    assert not group._waiting
