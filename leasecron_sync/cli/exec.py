"""One line in the crontab of several hosts: one of them executes the command."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Final, Optional

from leasecron_sync.backends.base import Backend, BackendSettings, ClaimBackend, LeaseBackend
from leasecron_sync.backends.memory import MemoryLease
from leasecron_sync.cli._exec_lease import LeaseTurn, Terms
from leasecron_sync.cli._exec_once import execute_once
from leasecron_sync.cli._exec_turn import Asking, Order, Stop, holder_id
from leasecron_sync.cli.output import CommandError, UsageError
from leasecron_sync.cli.store import configure_store, given_backend
from leasecron_sync.options import UNSET, SchedulerOptions, check_name, scheduler_options
from leasecron_sync.schedule import parse_schedule

NAME: Final = "exec"
HELP: Final = "execute a command on one of the hosts whose crontabs have this line"

WINDOW_S: Final = 60
MAX_S: Final = 7 * 86_400
ATTEMPTS: Final = 3

_BEHIND: Final = 'behind "--": leasecron-sync exec [URL] --name NAME ... -- COMMAND'

_LEASE_ONLY: Final = {"standby": "--standby", "max_attempts": "--max-attempts", "lease": "--lease"}


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    configure_store(parser)
    parser.add_argument("--name", metavar="NAME", required=True, help="name of the job")
    parser.add_argument(
        "--schedule", metavar="CRON", required=True, help='when it is due: "0 3 * * *"'
    )
    parser.add_argument(
        "--timezone", metavar="ZONE", default="UTC", help="IANA zone of --schedule (default: UTC)"
    )
    parser.add_argument(
        "--window",
        metavar="SECONDS",
        default=WINDOW_S,
        type=_seconds,
        help=f"how late the command may begin (default: {WINDOW_S})",
    )
    parser.add_argument(
        "--standby",
        action="store_true",
        help="wait while another host has the run, and take it over when that host fails",
    )
    parser.add_argument(
        "--max-attempts",
        metavar="N",
        type=int,
        help=f"with --standby: attempts before the run stays failed (default: {ATTEMPTS})",
    )
    parser.add_argument(
        "--time-limit", metavar="SECONDS", type=_seconds, help="end the command after this time"
    )
    parser.add_argument(
        "--lease",
        metavar="SECONDS",
        type=_seconds,
        help="how long a host that failed keeps the run (default: 15)",
    )
    parser.add_argument(
        "--verbose", action="store_true", help="say on standard error what is decided"
    )
    parser.usage = (
        "leasecron-sync exec [URL] --name NAME --schedule CRON [options] -- COMMAND [ARGUMENT ...]"
    )


def misplaced(arguments: Sequence[str]) -> str:
    """Return what to say of arguments that have no place where no command was given.

    Args:
        arguments: They.
    """
    return f"unrecognized arguments: {' '.join(arguments)}: put the command {_BEHIND}"


def command(options: argparse.Namespace) -> int:
    """Execute the command if this host wins the run; return its status."""
    if not options.rest:
        message = f"put the command {_BEHIND}"
        raise UsageError(message)
    backend = given_backend(options.url)
    settings = _settings(backend, options)
    order = _order(options)
    if isinstance(backend, ClaimBackend):
        _check_window(backend, order)
    stop, holder = Stop(), holder_id()
    asking = Asking(stop, verbose=options.verbose)
    attempts = options.max_attempts or (ATTEMPTS if options.standby else 1)
    with stop.watching():
        backend.open(BackendSettings(settings.namespace, holder, settings.call_timeout_ms))
        try:
            if isinstance(backend, ClaimBackend):
                return execute_once(backend, order, asking, holder)
            assert isinstance(backend, LeaseBackend)
            terms = Terms(settings, options.standby, attempts, holder)
            return LeaseTurn(backend, order, terms, asking).run()
        finally:
            backend.close()


def _settings(backend: Backend, options: argparse.Namespace) -> SchedulerOptions:
    """Check what goes with this kind of store.

    Raises:
        UsageError: It keeps no leases, and one is asked for; or a value cannot work.
        CommandError: No other process can see the store.
    """
    kind = type(backend).__name__
    if isinstance(backend, MemoryLease):
        message = (
            "a memory:// store lives inside one process: no other host can meet this one there"
        )
        raise CommandError(message)
    if isinstance(backend, ClaimBackend):
        values = {flag: getattr(options, name) for name, flag in _LEASE_ONLY.items()}
        given = [flag for flag, value in values.items() if value is not None and value is not False]
        if given:
            message = (
                f"{', '.join(given)}: {kind} only picks a winner and notices nothing after that; "
                "use a store that keeps leases (sqlite, postgresql, redis), or leave it out"
            )
            raise UsageError(message)
    if options.max_attempts is not None and not options.standby:
        message = "--max-attempts goes with --standby: without it nobody makes another attempt"
        raise UsageError(message)
    if options.max_attempts is not None and not 1 <= options.max_attempts <= 1_000:  # noqa: PLR2004
        message = f"--max-attempts must be from 1 to 1,000, not {options.max_attempts}"
        raise UsageError(message)
    lease_ms = UNSET if options.lease is None else options.lease * 1000
    given_options = {"namespace": options.namespace, "lease_ms": lease_ms}
    if isinstance(backend, ClaimBackend):
        del given_options["lease_ms"]
    try:
        return scheduler_options(given_options, backend.family, kind)
    except ValueError as error:
        raise UsageError(str(error)) from error


def _order(options: argparse.Namespace) -> Order:
    try:
        name = check_name("--name", options.name)
        schedule = parse_schedule(options.schedule, options.timezone)
    except ValueError as error:
        raise UsageError(str(error)) from error
    limit = options.time_limit
    return Order(
        name,
        schedule,
        options.window * 1000,
        options.rest,
        None if limit is None else limit * 1000,
    )


def _check_window(backend: ClaimBackend, order: Order) -> None:
    longest_ms = backend.max_window_ms
    if longest_ms is not None and order.window_ms > longest_ms:
        message = (
            f"--window {order.window_ms // 1000}: {type(backend).__name__} remembers a winner for "
            f"{longest_ms // 1000} s at most; give a shorter one"
        )
        raise UsageError(message)


def _seconds(text: str) -> int:
    number: Optional[int] = int(text) if text.isascii() and text.isdigit() else None
    if number is None or not 1 <= number <= MAX_S:
        message = f"must be whole seconds from 1 to {MAX_S:,}, not {text!r}"
        raise argparse.ArgumentTypeError(message)
    return number
