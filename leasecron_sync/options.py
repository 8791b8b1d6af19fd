"""Options: one table of them, their checks, and the frozen records they become.

Everything is checked where it is given. An option of the other backend family is a ``TypeError``,
whatever its value; a value or a relation that cannot work is a ``ValueError`` that names the
options and the values.

The module is over 400 lines long because the table is written out, a row for each option.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Callable, Final, Optional, cast

from leasecron_sync.model import OnOverlap
from leasecron_sync.protocol.transition import MAX_RETRY_DELAY_MS


class Unset:
    """Type of ``UNSET``."""

    def __repr__(self) -> str:
        """Return the name that signatures in the documents show."""
        return "UNSET"


UNSET: Final = Unset()
"""Default of every option, so that a default spelled out is noticed too."""

DAY_MS = 86_400_000

# Limits of what the engine does in one go.
MAX_NAME = 200
EXTRA_SLOTS = 4
MIN_SLICE = 12
SLICE_DIVISOR = 8
MAX_WAIT_MS = 5_000
STILL_MS = 200
"""When an answer says the same as the one before, though the time that it spoke of has passed, the
store is asked again this soon: its clock stands still, until one that was set back has come to
where it was."""

READY_MS = 60
ON_TIME_MS = 10_000
LOOK_BACK_COUNT = 1_000
PENDING_LIMIT = 100
PRUNE_LIMIT = 500
UPKEEP_MS = 60_000
EVENT_QUEUE = 10_000
MAX_REASON = 1_000
SKEW_WARNING_MS = 500
CALL_TIMEOUT_MS = 5_000
MIN_MARGIN_MS = 50
TAKEOVER_LEASES = 10
EXIT_STOP_S = 2.0


@dataclass(frozen=True)
class OptionSpec:
    """One row of the table of options.

    Attributes:
        name: Keyword argument.
        on: ``"scheduler"`` or ``"job"``.
        family: ``"lease"``, ``"claim"`` or ``"both"``: the backends that can keep it.
        default: Value when left out.
        low: Smallest value, for numbers.
        high: Largest value, for numbers.
        text: What it does, for the documents.
        instead: What to do on the other family, for the error.
    """

    name: str
    on: str
    family: str
    default: object
    text: str
    low: Optional[int] = None
    high: Optional[int] = None
    instead: str = ""


_NO_RECORD = "a claim only picks one winner and keeps no record of the run"

OPTIONS: Final = (
    OptionSpec(
        "namespace",
        "scheduler",
        "both",
        "default",
        "Keeps applications that share a store apart; 1 to 200 characters.",
    ),
    OptionSpec(
        "timezone",
        "scheduler",
        "both",
        "UTC",
        "IANA time zone of the jobs that name none.",
    ),
    OptionSpec(
        "max_concurrent_runs",
        "scheduler",
        "both",
        32,
        "Runs that this instance executes at a time; takeovers, retries and handed-over runs may "
        "use 4 more.",
        low=1,
        high=1_000,
    ),
    OptionSpec(
        "around_run",
        "scheduler",
        "both",
        None,
        "Called with each run in its worker thread; returns a context manager that is entered "
        "around the handler.",
    ),
    OptionSpec(
        "claim_window_ms",
        "scheduler",
        "claim",
        60_000,
        "How long after its scheduled time a run may still be claimed.",
        low=1_000,
        high=7 * DAY_MS,
        instead="a lease backend keeps a record of each run: use catch_up_ms on the job to say "
        "how old a run may be",
    ),
    OptionSpec(
        "lease_ms",
        "scheduler",
        "lease",
        15_000,
        "Length of a lease: how long after its last heartbeat a dead holder's run is taken over.",
        low=500,
        high=DAY_MS,
        instead=f"{_NO_RECORD}, so nothing could lapse: leave it out, or use a lease backend",
    ),
    OptionSpec(
        "heartbeat_ms",
        "scheduler",
        "lease",
        None,
        "Time between two renewals; a third of lease_ms by default.",
        low=50,
        high=DAY_MS,
        instead=f"{_NO_RECORD}, so there is nothing to renew: leave it out, or use a lease backend",
    ),
    OptionSpec(
        "history_ms",
        "scheduler",
        "lease",
        7 * DAY_MS,
        "How long records of settled runs are kept.",
        low=60_000,
        high=3_660 * DAY_MS,
        instead=f"{_NO_RECORD}, so there is no history: leave it out, or use a lease backend",
    ),
    OptionSpec(
        "name",
        "job",
        "both",
        None,
        "Name of the job; the handler's __qualname__ by default; 1 to 200 characters.",
    ),
    OptionSpec(
        "timezone",
        "job",
        "both",
        None,
        "IANA time zone of the schedule; the scheduler's by default.",
    ),
    OptionSpec(
        "jitter_ms",
        "job",
        "both",
        0,
        "Spreads the runs by up to this much, the same on every instance.",
        low=0,
        high=DAY_MS,
    ),
    OptionSpec(
        "time_limit_ms",
        "job",
        "both",
        None,
        "Past it run.check() raises RunTimeLimit and the attempt counts as failed.",
        low=1,
        high=366 * DAY_MS,
    ),
    OptionSpec(
        "overlap",
        "job",
        "lease",
        "skip",
        '"skip": a run that falls due while another of the job is in progress is skipped; '
        '"allow": it runs beside it.',
        instead="no live lease shows there that the previous run is still going, so runs may "
        "overlap: leave it out if they may, else let the handler take a lock of its own, or use a "
        "lease backend",
    ),
    OptionSpec(
        "max_attempts",
        "job",
        "lease",
        3,
        "Attempts that may end in an exception, a crash, a lost lease or the time limit.",
        low=1,
        high=1_000,
        instead=f"{_NO_RECORD}: let each run work off whatever is pending, or use a lease backend",
    ),
    OptionSpec(
        "retry_delay_ms",
        "job",
        "lease",
        1_000,
        "Wait before a retry, doubled for each counted failure, at most 5 minutes.",
        low=0,
        high=MAX_RETRY_DELAY_MS,
        instead=f"{_NO_RECORD}: retry inside the handler, or use a lease backend",
    ),
    OptionSpec(
        "catch_up_ms",
        "job",
        "lease",
        60_000,
        "How far back scheduled times are made up for after a start or a pause.",
        low=0,
        high=400 * DAY_MS,
        instead="a claim says that a run was won, not that it was finished: let each run work off "
        "whatever is pending, or use a lease backend",
    ),
    OptionSpec(
        "catch_up_limit",
        "job",
        "lease",
        100,
        "How many of the newest scheduled times of that window are made up for.",
        low=1,
        high=1_000,
        instead="nothing is caught up there: let each run work off whatever is pending, or use a "
        "lease backend",
    ),
)

_BY_PLACE: Final = {(spec.on, spec.name): spec for spec in OPTIONS}


@dataclass(frozen=True)
class JobOptions:
    """Options of a job after all checks."""

    name: str
    timezone: str
    jitter_ms: int
    time_limit_ms: Optional[int]
    overlap: bool
    max_attempts: int
    retry_delay_ms: int
    catch_up_ms: int
    catch_up_limit: int

    @property
    def late_overlap(self) -> OnOverlap:
        """What a caught-up, retried or taken-over run asks for."""
        return OnOverlap.ALLOW if self.overlap else OnOverlap.DEFER


@dataclass(frozen=True)
class SchedulerOptions:
    """Options of a scheduler after all checks."""

    namespace: str
    timezone: str
    max_concurrent_runs: int
    around_run: Optional[Callable[[Any], AbstractContextManager[object]]]
    claim_window_ms: int
    lease_ms: int
    heartbeat_ms: int
    history_ms: int
    call_timeout_ms: int

    @property
    def margin_ms(self) -> int:
        """How much earlier than the store a holder stops trusting its lease."""
        return trust_margin_ms(self.lease_ms)

    def takeover_ms(self, catch_up_ms: int) -> int:
        """Time after its lapse in which a run of such a job may be taken over."""
        return max(catch_up_ms, TAKEOVER_LEASES * self.lease_ms)


def trust_margin_ms(lease_ms: int) -> int:
    """Return how much earlier than the store a holder stops trusting a lease of this length."""
    return max(MIN_MARGIN_MS, lease_ms // 10)


def check_name(what: str, name: object) -> str:
    """Return the name when it is one that every store can keep.

    Args:
        what: Name of the option, for the error.
        name: The value given.

    Raises:
        TypeError: It is not text.
        ValueError: It is empty, too long, holds NUL, or cannot be encoded as UTF-8.
    """
    if not isinstance(name, str):
        message = f"{what} must be text, not {type(name).__name__}"
        raise TypeError(message)
    if not 1 <= len(name) <= MAX_NAME:
        message = f"{what} must have 1 to {MAX_NAME} characters, this one has {len(name)}"
        raise ValueError(message)
    if "\0" in name:
        message = f"{what} {name!r} holds a NUL character, which stores cannot keep: leave it out"
        raise ValueError(message)
    try:
        name.encode("utf-8")
    except UnicodeEncodeError:
        message = f"{what} {name!r} cannot be encoded as UTF-8: use text without lone surrogates"
        raise ValueError(message) from None
    return name


def check_family(on: str, given: Mapping[str, object], family: str, backend: str) -> None:
    """Refuse options that the backend's family cannot keep.

    Args:
        on: ``"scheduler"`` or ``"job"``.
        given: Options as given; those left out are ``UNSET``.
        family: Family of the backend, ``"lease"`` or ``"claim"``.
        backend: Name of the backend's class, for the error.

    Raises:
        TypeError: One of them belongs to the other family, whatever its value.
    """
    for name, value in given.items():
        spec = _BY_PLACE[on, name]
        if value is not UNSET and spec.family not in ("both", family):
            message = (
                f"{name} is not an option of a {on} on {backend}, a {family} backend: "
                f"{spec.instead}"
            )
            raise TypeError(message)


def _number(on: str, name: str, value: object) -> int:
    spec = _BY_PLACE[on, name]
    if isinstance(value, bool) or not isinstance(value, int):
        message = f"{name} must be a whole number, not {value!r}"
        raise TypeError(message)
    assert spec.low is not None
    assert spec.high is not None
    if not spec.low <= value <= spec.high:
        unit = " (milliseconds)" if name.endswith("_ms") else ""
        # Python does not write out numbers of thousands of digits.
        given = f"{value:,}{unit}" if abs(value) < 10**30 else "one of more than 30 digits"
        message = f"{name} must be from {spec.low:,} to {spec.high:,}, not {given}"
        raise ValueError(message)
    return value


def _value(on: str, given: Mapping[str, object], name: str) -> object:
    value = given.get(name, UNSET)
    return _BY_PLACE[on, name].default if value is UNSET else value


def scheduler_options(given: Mapping[str, object], family: str, backend: str) -> SchedulerOptions:
    """Check the options of a scheduler.

    Args:
        given: Options as given; those left out are ``UNSET``.
        family: Family of the backend, ``"lease"`` or ``"claim"``.
        backend: Name of the backend's class, for errors.

    Raises:
        TypeError: An option of the other family, or a value of the wrong type.
        ValueError: A value or a relation that cannot work.
    """
    check_family("scheduler", given, family, backend)

    def number(name: str) -> int:
        return _number("scheduler", name, _value("scheduler", given, name))

    around_run = _value("scheduler", given, "around_run")
    if around_run is not None and not callable(around_run):
        message = f"around_run must be callable with the run, not {around_run!r}"
        raise TypeError(message)
    lease_ms = number("lease_ms")
    beat = _value("scheduler", given, "heartbeat_ms")
    heartbeat_ms = lease_ms // 3 if beat is None else _number("scheduler", "heartbeat_ms", beat)
    call_timeout_ms = CALL_TIMEOUT_MS
    if family == "lease":
        call_timeout_ms = min(CALL_TIMEOUT_MS, lease_ms // 3)
        margin_ms = trust_margin_ms(lease_ms)
        if heartbeat_ms + call_timeout_ms >= lease_ms - margin_ms:
            message = (
                f"heartbeat_ms={heartbeat_ms} is too long for lease_ms={lease_ms}: a heartbeat "
                f"that takes its whole call time-out ({call_timeout_ms} ms) must still come "
                f"before the lease is distrusted ({margin_ms} ms before it lapses); use at most "
                f"{lease_ms - margin_ms - call_timeout_ms - 1}, or leave it out"
            )
            raise ValueError(message)
    return SchedulerOptions(
        namespace=check_name("namespace", _value("scheduler", given, "namespace")),
        timezone=_timezone(_value("scheduler", given, "timezone")),
        max_concurrent_runs=number("max_concurrent_runs"),
        around_run=cast("Optional[Callable[[Any], AbstractContextManager[object]]]", around_run),
        claim_window_ms=number("claim_window_ms"),
        lease_ms=lease_ms,
        heartbeat_ms=heartbeat_ms,
        history_ms=number("history_ms"),
        call_timeout_ms=call_timeout_ms,
    )


def _timezone(value: object) -> str:
    if not isinstance(value, str):
        message = (
            f"timezone must be the name of an IANA zone such as 'Europe/Athens', not {value!r}"
        )
        raise TypeError(message)
    return value


def job_options(
    given: Mapping[str, object],
    scheduler: SchedulerOptions,
    family: str,
    backend: str,
) -> JobOptions:
    """Check the options of a job.

    Args:
        given: Options as given, with the job's name settled; those left out are ``UNSET``.
        scheduler: Options of its scheduler.
        family: Family of the backend, ``"lease"`` or ``"claim"``.
        backend: Name of the backend's class, for errors.

    Raises:
        TypeError: An option of the other family, or a value of the wrong type.
        ValueError: A value or a relation that cannot work.
    """
    check_family("job", given, family, backend)

    def number(name: str) -> int:
        return _number("job", name, _value("job", given, name))

    overlap = _value("job", given, "overlap")
    if overlap not in ("skip", "allow"):
        message = f'overlap must be "skip" or "allow", not {overlap!r}'
        raise ValueError(message)
    limit = _value("job", given, "time_limit_ms")
    zone = _value("job", given, "timezone")
    catch_up_ms = number("catch_up_ms")
    takeover_ms = scheduler.takeover_ms(catch_up_ms)
    if family == "lease" and scheduler.history_ms < catch_up_ms + takeover_ms:
        message = (
            f"history_ms={scheduler.history_ms} of the scheduler is too short for "
            f"catch_up_ms={catch_up_ms}: records must be kept for catch_up_ms plus the time in "
            f"which a run may be taken over ({takeover_ms} ms, from catch_up_ms and "
            f"{TAKEOVER_LEASES} times lease_ms={scheduler.lease_ms}), so history_ms must be at "
            f"least {catch_up_ms + takeover_ms}"
        )
        raise ValueError(message)
    return JobOptions(
        name=check_name("name", given["name"]),
        timezone=scheduler.timezone if zone is None else _timezone(zone),
        jitter_ms=number("jitter_ms"),
        time_limit_ms=None if limit is None else _number("job", "time_limit_ms", limit),
        # A claim backend shows no live lease, so nothing can be held against another run there.
        overlap=overlap == "allow" or family == "claim",
        max_attempts=number("max_attempts"),
        retry_delay_ms=number("retry_delay_ms"),
        catch_up_ms=catch_up_ms,
        catch_up_limit=number("catch_up_limit"),
    )
