"""What the command line writes: safe text, tables, times, durations, one line per failure."""

from __future__ import annotations

import json
import os
import signal
import sys
import unicodedata
from collections.abc import Iterable, Sequence
from typing import Final, Optional

from leasecron_sync.run import moment

PROGRAM: Final = "leasecron-sync"

FAILED: Final = 1
USAGE: Final = 2
INTERRUPTED: Final = 130
BROKEN_PIPE: Final = 141

_SECOND_MS = 1_000
_MINUTE_S = 60
_HOUR_S = 3_600
_DAY_S = 86_400


class CommandError(Exception):
    """A failure that the user is told in one line.

    Args:
        message: The line.
    """

    status = FAILED

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class UsageError(CommandError):
    """The command was not given as it should be."""

    status = USAGE


class Terminated(BaseException):
    """Raised where a signal arrives that ends a command which has something to clean up.

    Args:
        number: Number of the signal.
    """

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.status = 128 + number


def say(text: str = "") -> None:
    """Write a line to standard output."""
    # None when the process was started without one.
    if sys.stdout is not None:
        sys.stdout.write(f"{text}\n")


def say_json(value: object) -> None:
    """Write a value as JSON, in ASCII: a terminal shows no control characters of a name."""
    say(json.dumps(value, indent=2))


def complain(message: str) -> None:
    """Write one line to standard error, whatever the message holds."""
    try:
        sys.stderr.write(f"{PROGRAM}: {one_line(message)}\n")
        sys.stderr.flush()
    except (AttributeError, OSError):  # there is no standard error, or nobody reads it
        pass


def finish_stdout() -> None:
    """Write out what is waiting; if nobody takes it, keep the interpreter from trying again."""
    try:
        sys.stdout.flush()
    except (AttributeError, OSError, ValueError):
        _forget_stdout()


def _forget_stdout() -> None:
    try:
        number = os.open(os.devnull, os.O_WRONLY)
        os.dup2(number, sys.stdout.fileno())
        os.close(number)
    except (AttributeError, OSError, ValueError):  # an output without a file behind it
        pass


def one_line(text: str) -> str:
    """Return a message without line ends and characters that control a terminal."""
    return "".join(letter if letter.isprintable() else _escaped(letter) for letter in text)


def shown(text: str) -> str:
    """Return a name from a store so that it stays on its line and no two names look alike.

    Control characters, line ends, marks that turn the direction of writing, and what the output
    cannot encode are escaped as in Python; the backslash itself is doubled, and blanks at an end
    are made visible by quotes.
    """
    encoding = getattr(sys.stdout, "encoding", None) or "ascii"
    safe = "".join(
        letter
        if letter != "\\" and letter.isprintable() and letter == _encodable(letter, encoding)
        else _escaped(letter)
        for letter in text
    )
    return f'"{safe}"' if safe != safe.strip() else safe


def _encodable(letter: str, encoding: str) -> str:
    return letter.encode(encoding, "replace").decode(encoding)


def _escaped(letter: str) -> str:
    return letter.encode("unicode_escape").decode("ascii")


def cut(text: str, width: int) -> str:
    """Return at most so many characters of a text, with three dots for what is left out."""
    return text if len(text) <= width else f"{text[: width - 3]}..."


def width_of(text: str) -> int:
    """Return how many columns of a terminal a text takes."""
    return sum(_columns(letter) for letter in text)


def _columns(letter: str) -> int:
    if unicodedata.combining(letter):
        return 0
    return 2 if unicodedata.east_asian_width(letter) in "WF" else 1


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return the lines of an aligned table.

    Args:
        heads: Names of the columns; one that begins with ``>`` is aligned to the right.
        rows: Cells, as many as there are names.
    """
    right = [head.startswith(">") for head in heads]
    lines = [[head.lstrip(">") for head in heads], *(list(row) for row in rows)]
    widths = [max(width_of(line[number]) for line in lines) for number in range(len(heads))]
    done: list[str] = []
    for line in lines:
        cells: list[str] = []
        for cell, width, is_right in zip(line, widths, right):
            blanks = " " * (width - width_of(cell))
            cells.append(blanks + cell if is_right else cell + blanks)
        done.append("  ".join(cells).rstrip())
    return done


def iso(instant_ms: Optional[int]) -> str:
    """Return an instant in UTC for people; a dash when there is none."""
    if instant_ms is None:
        return "-"
    timespec = "milliseconds" if instant_ms % _SECOND_MS else "seconds"
    return moment(instant_ms).replace(tzinfo=None).isoformat(timespec=timespec) + "Z"


def iso_json(instant_ms: Optional[int]) -> Optional[str]:
    """Return an instant in UTC for programs."""
    return None if instant_ms is None else moment(instant_ms).isoformat()


def human(duration_ms: Optional[int]) -> str:
    """Return a duration for people; a dash when there is none."""
    if duration_ms is None:
        return "-"
    if duration_ms < 0:
        return f"-{human(-duration_ms)}"
    # Rounded in one place, so that 59.96 s is not shown as 60.0 s.
    tenths, seconds = (duration_ms + 50) // 100, (duration_ms + 500) // _SECOND_MS
    if duration_ms < _SECOND_MS:
        text = f"{duration_ms} ms"
    elif tenths < _MINUTE_S * 10:
        text = f"{tenths // 10}.{tenths % 10} s"
    elif seconds < _HOUR_S:
        text = f"{seconds // 60} min {seconds % 60:02d} s"
    elif seconds < _DAY_S:
        text = f"{seconds // _HOUR_S} h {seconds % _HOUR_S // 60:02d} min"
    else:
        text = f"{seconds // _DAY_S} d {seconds % _DAY_S // _HOUR_S:02d} h"
    return text
