"""Requests of many threads in few steps of the store.

Where each thread makes a call of its own, as many calls wait for one lane as threads have something
to say, and each costs a commit or a round trip. Here the requests that come while a call is under
way wait together, and the next call takes them all. There is no thread for it and no waiting for
others that might come: whoever finds the lane free makes the call, with all that wait, and leaves
the lane to the one who then waits longest.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from copy import copy
from enum import Enum
from typing import Callable, Generic, TypeVar, Union

from leasecron_sync.clock import Clock
from leasecron_sync.errors import OutcomeUnknown, StoreError, StoreUnavailable

Q = TypeVar("Q")
A = TypeVar("A")

GROUP_LIMIT = 100
"""Requests in one call, so that none holds the store up for long."""


class _Place(Enum):
    """Where a request is."""

    WAITS = "waits"
    LEADS = "leads"  # its thread makes the next call
    CALLED = "called"  # its call is under way
    OVER = "over"  # answered, or given up


class _Request(Generic[Q, A]):
    """One thread's request.

    Attributes:
        item: What is asked for.
        deadline_ms: Steady time at which its thread must have an answer.
        place: Where it is; changed under the group's lock.
        moved: Set when its thread has something to do.
        answer: What the store said, once it is over.
    """

    def __init__(self, item: Q, deadline_ms: int) -> None:
        self.item = item
        self.deadline_ms = deadline_ms
        self.place = _Place.WAITS
        self.moved = threading.Event()
        self.answer: Union[A, StoreError, None] = None


class Group(Generic[Q, A]):
    """Makes the calls of several threads together.

    Atomicity: each request takes effect by itself, in the call it was part of.

    Errors: what the call raises is raised in each of its threads. A thread whose deadline comes
    before its call began had no effect (``StoreUnavailable``); one whose deadline comes during the
    call, or whose call was broken off, may have had one (``OutcomeUnknown``).

    Args:
        call: Makes one call with several requests, before a steady time; returns an answer to each,
            or the error of that request alone.
        clock: What deadlines are measured by.
        what: What a request asks of whom, for errors.
    """

    def __init__(
        self,
        call: Callable[[Sequence[Q], int], Sequence[Union[A, StoreError]]],
        clock: Clock,
        what: str,
    ) -> None:
        self._call = call
        self._clock = clock
        self._what = what
        self._lock = threading.Lock()
        self._waiting: list[_Request[Q, A]] = []
        self._led = False

    def ask(self, item: Q, timeout_ms: int) -> A:
        """Make a request; return the answer to it.

        Args:
            item: What is asked for.
            timeout_ms: Longest time until there is an answer, or an error.

        Raises:
            StoreError: See the class.
        """
        request: _Request[Q, A] = _Request(item, self._clock.steady_ms() + timeout_ms)
        try:
            if self._joins(request) or self._is_called_on(request):
                self._lead(request)
        finally:
            self._leave(request)
        answer = request.answer
        if isinstance(answer, StoreError):
            raise answer
        assert answer is not None
        return answer

    def _joins(self, request: _Request[Q, A]) -> bool:
        """Begin to wait; tell whether nobody makes calls, so that this thread has to."""
        with self._lock:
            self._waiting.append(request)
            if self._led:
                return False
            self._led = True
            request.place = _Place.LEADS
            return True

    def _is_called_on(self, request: _Request[Q, A]) -> bool:
        """Wait for an answer; tell whether this thread has to make the next call instead."""
        left_ms = max(0, request.deadline_ms - self._clock.steady_ms())
        self._clock.wait(request.moved, left_ms)
        with self._lock:
            if request.place is _Place.WAITS:
                self._drop(request)  # in this step: nobody calls it any more
                message = f"{self._what}: others were still waited for when the time was over"
                request.answer = StoreUnavailable(message)
            elif request.place is _Place.CALLED:
                message = f"{self._what}: there was no answer when the time was over"
                request.answer = OutcomeUnknown(message)
            return request.place is _Place.LEADS

    def _lead(self, request: _Request[Q, A]) -> None:
        """Make one call with what waits; this thread's own request has waited longest."""
        batch: Sequence[_Request[Q, A]] = ()
        answers: Sequence[Union[A, StoreError]] = ()
        error: StoreError = OutcomeUnknown(f"{self._what}: the call was broken off")
        try:
            with self._lock:
                batch = self._waiting[:GROUP_LIMIT]
                del self._waiting[:GROUP_LIMIT]
                for item in batch:
                    item.place = _Place.CALLED
            answers = self._call([item.item for item in batch], request.deadline_ms)
        except StoreError as raised:
            error = raised
        finally:
            # Who goes on with the lane is woken first.
            self._pass_on()
            self._answer(batch, answers, error)

    def _answer(
        self,
        batch: Sequence[_Request[Q, A]],
        answers: Sequence[Union[A, StoreError]],
        error: StoreError,
    ) -> None:
        complete = len(answers) == len(batch)
        with self._lock:
            for number, request in enumerate(batch):
                if request.place is _Place.CALLED:  # else its thread has gone
                    request.place = _Place.OVER
                    # A copy for each: threads that raise one error spoil its traceback.
                    request.answer = answers[number] if complete else _copy(error)
        for request in batch:
            request.moved.set()

    def _pass_on(self) -> None:
        with self._lock:
            self._led = bool(self._waiting)
            if self._led:
                self._waiting[0].place = _Place.LEADS
                self._waiting[0].moved.set()

    def _leave(self, request: _Request[Q, A]) -> None:
        """End a request, whatever its thread was interrupted in."""
        with self._lock:
            leads = request.place is _Place.LEADS
            self._drop(request)
        if leads:
            self._pass_on()

    def _drop(self, request: _Request[Q, A]) -> None:
        request.place = _Place.OVER
        if request in self._waiting:
            self._waiting.remove(request)


def _copy(error: StoreError) -> StoreError:
    made = copy(error)
    made.__cause__ = error.__cause__ or error
    return made
