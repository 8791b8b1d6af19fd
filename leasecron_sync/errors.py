"""Exceptions of the library, and the ones that end a handler."""

from __future__ import annotations


class LeasecronError(Exception):
    """Root of every error that the library raises to its caller."""


class StoreError(LeasecronError):
    """A call to the store did not bring an answer.

    Only subclasses of this class leave a backend.
    """


class StoreUnavailable(StoreError):
    """The call had surely no effect: no connection, or the request was never sent."""


class OutcomeUnknown(StoreError):
    """The call may or may not have taken effect: the request was sent and no answer came."""


class StoreRejected(StoreError):
    """The store answered and refused: read-only, no permission, a damaged or foreign record."""


class StoreUnsupported(StoreError):
    """The store cannot do what is asked of it: too old, wrong kind, a newer store format."""


class SchedulerStateError(LeasecronError):
    """The scheduler is in the wrong state for this call, such as started twice."""


class MissingDependency(LeasecronError, ImportError):
    """A backend needs a package that is not installed; the text names the extra."""


class RunInterrupt(BaseException):
    """Root of the exceptions that end a handler early.

    They derive from ``BaseException``, so that an ``except Exception`` around a handler's loop
    lets them through.
    """


class RunLost(RunInterrupt):
    """The lease of this run is no longer trusted: another instance may be executing it."""


class RunStopping(RunInterrupt):
    """The scheduler is stopping: the run is handed over when the handler lets this pass."""


class RunTimeLimit(RunInterrupt):
    """The run has used up its ``time_limit_ms``."""


class HandOver(RunInterrupt):
    """Raised by a handler to give its run to another instance, uncounted at first."""
