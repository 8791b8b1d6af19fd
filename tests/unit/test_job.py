"""How a job gets its name, and whether its handler takes the run."""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Iterator
from typing import Any, Callable

import pytest

from leasecron_sync.engine.job import name_of, takes_run


def plain() -> None: ...


def with_run(run: object) -> None: ...


def other_name(context: object) -> None: ...


def with_default(size: int = 3) -> None: ...


def run_by_default(run: object = None) -> None: ...


def anything(*args: object, **kwargs: object) -> None: ...


def keywords_alone(**kwargs: object) -> None: ...


def keyword_only(*, run: object = None) -> None: ...


def positional(run: object, /) -> None: ...


def two(first: object, second: object) -> None: ...


def run_and_default(run: object, size: int = 3) -> None: ...


def needs_keyword(*, size: int) -> None: ...


async def coroutine() -> None: ...


def generator() -> Iterator[int]:
    yield 1


async def async_generator() -> AsyncIterator[int]:
    yield 1


class Service:
    def method(self) -> None: ...

    def method_with_run(self, run: object) -> None: ...

    def __call__(self, run: object) -> None: ...

    @classmethod
    def made(cls) -> None: ...

    @staticmethod
    def static(run: object) -> None: ...


class AsyncService:
    async def __call__(self) -> None: ...


@functools.wraps(with_run)
def wrapper(*args: object) -> None: ...


@functools.wraps(generator)
def of_a_generator() -> None: ...


@pytest.mark.parametrize(
    ("handler", "wanted"),
    [
        (plain, False),
        (with_run, True),
        (other_name, True),
        (with_default, False),
        (run_by_default, True),
        (anything, True),
        (keywords_alone, False),
        (keyword_only, False),
        (positional, True),
        (run_and_default, True),
        (lambda: None, False),
        (lambda _run: None, True),
        (Service().method, False),
        (Service().method_with_run, True),
        (Service(), True),
        (Service.made, False),
        (Service.static, True),
        (functools.partial(two, 1), True),
        (functools.partial(two, 1, 2), False),
        (functools.partial(with_run, run=1), False),
        (wrapper, True),
        (dict, False),
    ],
)
def test_a_handler_takes_the_run_or_nothing(
    handler: Callable[..., Any],
    wanted: bool,  # noqa: FBT001 - a parameter of the test
) -> None:
    assert takes_run(handler) is wanted


@pytest.mark.parametrize("handler", [two, needs_keyword, Service.method_with_run])
def test_a_handler_that_needs_more_is_refused(handler: Callable[..., Any]) -> None:
    with pytest.raises(TypeError, match=r"functools\.partial"):
        takes_run(handler)


@pytest.mark.parametrize(
    "handler",
    [
        coroutine,
        generator,
        async_generator,
        AsyncService(),
        functools.partial(coroutine),
        of_a_generator,
        None,
        "job",
    ],
)
def test_a_handler_that_would_do_nothing_is_refused(handler: object) -> None:
    with pytest.raises(TypeError):
        takes_run(handler)


def test_a_name_that_was_given_is_the_name() -> None:
    assert name_of(lambda: None, "mine") == "mine"


@pytest.mark.parametrize(
    ("handler", "name"),
    [
        (plain, "plain"),
        (Service().method, "Service.method"),
        (Service, "Service"),
        (wrapper, "with_run"),
        (len, "len"),
    ],
)
def test_without_one_it_is_the_handlers_own(handler: object, name: str) -> None:
    assert name_of(handler, None) == name


@pytest.mark.parametrize("handler", [lambda: None, functools.partial(plain), Service(), 3])
def test_a_handler_without_a_name_of_its_own_needs_one(handler: object) -> None:
    with pytest.raises(ValueError, match="name="):
        name_of(handler, None)
