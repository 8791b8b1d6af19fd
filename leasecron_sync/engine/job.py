"""A job as the engine knows it."""

from __future__ import annotations

import functools
import inspect
from dataclasses import dataclass
from typing import Any, Callable

from leasecron_sync.options import JobOptions
from leasecron_sync.schedule import Schedule, fingerprint, jitter_of


@dataclass(frozen=True)
class Job:
    """Name, schedule, handler and checked options of a job.

    Attributes:
        handler: What to call.
        wants_run: Whether it is called with the run, or with nothing.
        schedule: Rule that yields its scheduled times.
        options: Its options.
        takeover_ms: Time after its lapse in which a run of this job may be taken over.
    """

    handler: Callable[..., object]
    wants_run: bool
    schedule: Schedule
    options: JobOptions
    takeover_ms: int

    @property
    def name(self) -> str:
        """Name of the job."""
        return self.options.name

    def due_ms(self, scheduled_ms: int) -> int:
        """Return the scheduled time with its jitter."""
        jitter_ms = self.options.jitter_ms
        return scheduled_ms + (jitter_of(self.name, scheduled_ms, jitter_ms) if jitter_ms else 0)

    def fingerprint(self) -> str:
        """Return the digest of text, zone and jitter."""
        return fingerprint(self.schedule, self.options.jitter_ms)


def name_of(handler: object, name: object) -> object:
    """Return the name given, or the handler's own.

    Raises:
        ValueError: There is no name given, and the handler has none that stays the same.
    """
    if name is not None:
        return name
    own = getattr(handler, "__qualname__", None)
    if not isinstance(own, str) or "<lambda>" in own:
        message = (
            f"{handler!r} has no name of its own that is the same in every instance: give the job "
            'one with name="…"'
        )
        raise ValueError(message)
    return own


def takes_run(handler: object) -> bool:
    """Tell whether a handler is to be called with the run.

    It is when it has one positional parameter without a default, a parameter named ``run``, or
    ``*args``.

    Raises:
        TypeError: It cannot be called with the run alone or with nothing, or would not do its work
            when it is called (a coroutine function, a generator function).
    """
    if not callable(handler):
        message = f"a handler must be callable, not {handler!r}"
        raise TypeError(message)
    inner = _unwrapped(handler)
    for test, kind in (
        (inspect.iscoroutinefunction, "a coroutine function"),
        (inspect.isasyncgenfunction, "an asynchronous generator function"),
        (inspect.isgeneratorfunction, "a generator function"),
    ):
        if test(inner):
            message = (
                f"{handler!r} is {kind}: calling it would do nothing, give a plain function, for "
                "example one that calls asyncio.run()"
            )
            raise TypeError(message)
    try:
        signature = inspect.signature(handler)
    except (TypeError, ValueError):  # some built-in callables tell nothing
        return False
    parameters = list(signature.parameters.values())
    if _accepts_nothing(parameters):
        positional = (
            inspect.Parameter.POSITIONAL_ONLY,
            inspect.Parameter.POSITIONAL_OR_KEYWORD,
        )
        return any(
            parameter.kind is inspect.Parameter.VAR_POSITIONAL
            or (parameter.name == "run" and parameter.kind in positional)
            for parameter in parameters[:1]
        )
    try:
        signature.bind(None)
    except TypeError:
        message = (
            f"{handler!r} must take the run or nothing, its parameters are {signature}: use "
            "functools.partial for further arguments"
        )
        raise TypeError(message) from None
    return True


def _unwrapped(handler: Callable[..., object]) -> object:
    inner: Any = handler
    while isinstance(inner, functools.partial):
        inner = inner.func
    inner = inspect.unwrap(inner)
    if not inspect.isroutine(inner) and not inspect.isclass(inner):
        return getattr(inner, "__call__", inner)  # noqa: B004 - an object with a __call__ method
    return inner


def _accepts_nothing(parameters: list[inspect.Parameter]) -> bool:
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return all(
        parameter.default is not inspect.Parameter.empty or parameter.kind in variable
        for parameter in parameters
    )
