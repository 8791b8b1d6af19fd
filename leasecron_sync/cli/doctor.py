"""Whether a store can keep what the library promises."""

from __future__ import annotations

import argparse
import textwrap
from collections import Counter
from collections.abc import Sequence
from typing import Final

from leasecron_sync.cli.output import FAILED, UsageError, one_line, say, say_json
from leasecron_sync.cli.store import configure_store, given_backend, reader_settings
from leasecron_sync.doctor.examine import examine
from leasecron_sync.doctor.finding import Finding, Level

NAME: Final = "doctor"
HELP: Final = "check that a store is reachable, and that its settings lose and double no runs"

_WIDTH: Final = 90
_SERIOUS: Final = (Level.PROBLEM, Level.WARNING)


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    configure_store(parser)
    parser.add_argument("--json", action="store_true", help="write JSON")


def command(options: argparse.Namespace) -> int:
    """Show what was found; the status is 1 if there is a problem."""
    settings = reader_settings(options.namespace)
    backend = given_backend(options.url)
    try:
        found = examine(backend, settings)
    except ValueError as error:
        raise UsageError(str(error)) from error
    if options.json:
        say_json([_as_json(finding) for finding in found])
    else:
        say(f"{backend!r}, namespace {options.namespace!r}")
        say()
        for finding in found:
            _show(finding, max(len(one.check) for one in found))
        say()
        say(_summary(found))
    return FAILED if any(finding.level is Level.PROBLEM for finding in found) else 0


def _show(finding: Finding, width: int) -> None:
    head = f"{finding.level.value:7}  {finding.check:{width}}  "
    margin = " " * len(head)
    for text in (finding.found, finding.effect, finding.advice and f"-> {finding.advice}"):
        if text:
            indented = f"{margin}   " if text.startswith("->") else margin
            lines = textwrap.wrap(
                one_line(text), _WIDTH, initial_indent=head, subsequent_indent=indented,
                break_long_words=False, break_on_hyphens=False,
            )  # fmt: skip
            for line in lines:
                say(line)
            head = margin


def _summary(found: Sequence[Finding]) -> str:
    counts = Counter(finding.level for finding in found)
    parts = [
        f"{counts[level]} {level.value}{'' if counts[level] == 1 else 's'}"
        for level in _SERIOUS
        if counts[level]
    ]
    return f"{', '.join(parts)}." if parts else "Nothing is wrong."


def _as_json(finding: Finding) -> dict[str, object]:
    return {
        "level": finding.level.value,
        "check": finding.check,
        "found": finding.found,
        "effect": finding.effect,
        "advice": finding.advice,
        "measured": dict(finding.measured),
    }
