"""The command line: ``leasecron-sync``, also ``python -m leasecron_sync``.

Every command returns a status. What a user can cause ends in one line on standard error and a
status that is not 0; 2 means that the command was not given as it should be.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Callable, NamedTuple, NoReturn, Optional

from leasecron_sync.cli import demo, doctor, history, jobs, run, schema
from leasecron_sync.cli import exec as exec_command
from leasecron_sync.cli import next as next_command
from leasecron_sync.cli.output import (
    BROKEN_PIPE,
    FAILED,
    INTERRUPTED,
    PROGRAM,
    CommandError,
    Terminated,
    UsageError,
    complain,
    finish_stdout,
    say,
)
from leasecron_sync.errors import LeasecronError

__all__ = ["main"]

_DESCRIPTION = """\
Runs one cron schedule in every instance of an application, each run executed by one of them.

  leasecron-sync demo                      see it at work, without any preparation
  leasecron-sync run jobs:scheduler        a worker process for the scheduler in jobs.py
  leasecron-sync exec URL --name N ...     one line in the crontab of several hosts
  leasecron-sync next jobs:scheduler       when its jobs will be due
  leasecron-sync history sqlite:///jobs.db what has run, and where
  leasecron-sync doctor sqlite:///jobs.db  whether its store is in order
"""


class _Command(NamedTuple):
    name: str
    help: str
    configure: Callable[[argparse.ArgumentParser], None]
    function: Callable[[argparse.Namespace], int]


_COMMANDS = (
    _Command(demo.NAME, demo.HELP, demo.configure, demo.command),
    _Command(run.NAME, run.HELP, run.configure, run.command),
    _Command(exec_command.NAME, exec_command.HELP, exec_command.configure, exec_command.command),
    _Command(next_command.NAME, next_command.HELP, next_command.configure, next_command.command),
    _Command(jobs.NAME, jobs.HELP, jobs.configure, jobs.command),
    _Command(history.NAME, history.HELP, history.configure, history.command),
    _Command(schema.NAME, schema.HELP, schema.configure, schema.command),
    _Command(doctor.NAME, doctor.HELP, doctor.configure, doctor.command),
)


class _Parser(argparse.ArgumentParser):
    """Tells a wrong use in one line instead of three."""

    def error(self, message: str) -> NoReturn:
        said = f"{message} (see {self.prog} --help)"
        raise UsageError(said)


class _ShowVersion(argparse.Action):
    """Looks the version up only when it is asked for."""

    def __call__(self, parser: argparse.ArgumentParser, *_others: object) -> None:
        say(f"{PROGRAM} {_version()} (Python {'.'.join(map(str, sys.version_info[:3]))})")
        parser.exit()


def main(arguments: Optional[Sequence[str]] = None) -> int:
    """Do what the command line says and return the status of the process.

    Args:
        arguments: What follows the program's name; that of this process when left out.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    _show_every_letter()
    try:
        return _run(given)
    except CommandError as error:
        complain(_without_credentials(error.message, given))
        return error.status
    except BrokenPipeError:
        finish_stdout()
        return BROKEN_PIPE
    except (LeasecronError, OSError) as error:
        finish_stdout()
        complain(_without_credentials(str(error) or type(error).__name__, given))
        return FAILED
    except KeyboardInterrupt:
        finish_stdout()
        complain("interrupted")
        return INTERRUPTED
    except Terminated as ended:
        finish_stdout()
        complain(f"ended by {ended}")
        return ended.status


def _run(given: Sequence[str]) -> int:
    given, rest = _parted(given)
    try:
        parser = _parser()
        options, unknown = parser.parse_known_args(given, argparse.Namespace(rest=rest))
        if unknown and given[:1] == [exec_command.NAME] and not rest:
            raise UsageError(exec_command.misplaced(unknown))
        if unknown:
            parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    except SystemExit as ended:  # after --help and --version
        status = ended.code if isinstance(ended.code, int) else FAILED
    else:
        function: Callable[[argparse.Namespace], int] = options.function
        status = function(options)
    if sys.stdout is not None:
        sys.stdout.flush()  # here, where a failure can still be told
    return status


def _parted(given: Sequence[str]) -> tuple[Sequence[str], Sequence[str]]:
    """Part what is for this program from the command to execute, which follows ``--``."""
    if given[:1] != [exec_command.NAME] or "--" not in given:
        return given, ()
    at = list(given).index("--")
    return given[:at], given[at + 1 :]


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog=PROGRAM,
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action=_ShowVersion, nargs=0, help="show the version and end")
    commands = parser.add_subparsers(metavar="COMMAND", required=True, dest="name")
    for command in _COMMANDS:
        one = commands.add_parser(
            command.name,
            help=command.help,
            description=f"{command.help[:1].upper()}{command.help[1:]}.",
            allow_abbrev=False,
        )
        command.configure(one)
        one.set_defaults(function=command.function)
    return parser


def _version() -> str:
    from importlib import metadata  # noqa: PLC0415 - costs more than most commands

    try:
        return metadata.version("leasecron_sync")
    except metadata.PackageNotFoundError:
        return "from source, not installed"


def _show_every_letter() -> None:
    """Let a terminal that can't show a letter show its number, instead of ending in an error."""
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="backslashreplace")


def _without_credentials(message: str, given: Sequence[str]) -> str:
    """Take out of a message what was given and may hold a password.

    argparse repeats a value that it cannot place, and that may be a URL in the wrong position.
    """
    values = [value.partition("=")[2] for value in given if value.startswith("--")]
    secrets = [*given, *values, os.environ.get("LEASECRON_SYNC_URL", "")]
    for text in sorted(secrets, key=len, reverse=True):
        scheme, separator, rest = text.partition("://")
        if (separator and ("@" in rest or "?" in rest)) or "@" in text[1:]:
            harmless = f"{scheme}://***" if separator else "***"
            # As it is, and as repr() shows it.
            for form in (text, repr(text)[1:-1]):
                message = message.replace(form, harmless)
    return message
