"""Texts that somebody might give as a cron expression, sensible and not, and counted work."""

from __future__ import annotations

import random
import sys
from types import FrameType
from typing import Any, Callable, Optional, TypeVar

T = TypeVar("T")

LONGEST = 10_000
NAMES: list[str] = [
    "jan",
    "FEB",
    "mar",
    "Dec",
    "sun",
    "MON",
    "fri",
    "Sat",
    "monday",
    "l",
    "L",
    "w",
    "W",
    "h",
]
ODD: list[str] = [
    *"*/-,#?@LWRH+._;:()[]{}!$%&=~'\"\\|<>",
    *"\x00\x01\x07\x0b\x0c\x1c\x1f\x7f\x85\xa0\xad",
    "\u0663",  # a digit, and no digit that counts here
    "\uff15",
    "\u00b2",
    "\u2003",
    "\u200b",
    "\u2028",
    "\u0130",  # its small form has two characters
    "\ud800",
    "\U0001f552",
]
BLANKS = [" ", "  ", "\t", "\n", "\r\n", " \t\r\n "]
PIECES: list[str] = [
    *(",", "*", "*/", "1-", "1,", "1-2,", "0-59,", "0-59/1,", "* ", "9", "0", "#", "1#1,", "@"),
    *("L,", "W", "mon-", "mon,", "sun#5,", "?", " ", "\t", "\n", "\x00", "\u0663", "h(", "r(1-5)"),
    *("-", "/", "a", "*,", "1/1,", "\U0001f552", "\ud800", "jan-dec/", "((((", "0 0 * * 1#1,"),
]
BOUNDS = [(0, 59), (0, 59), (0, 23), (1, 31), (1, 12), (0, 7)]


def draw_text(rng: random.Random) -> str:
    """Draw a text of up to ``LONGEST`` characters."""
    text = rng.choice(_KINDS)(rng)
    return text[:LONGEST]


def _blank(rng: random.Random) -> str:
    return rng.choice(BLANKS) if rng.random() < 0.1 else " "


def _number(rng: random.Random, low: int, high: int) -> str:
    kind = rng.random()
    if kind < 0.85:
        return str(rng.randrange(low, high + 1))
    if kind < 0.93:
        return str(rng.choice((low - 1, high + 1, 0, 99, 2**31, 2**63)))
    return rng.choice(("0" * rng.randrange(1, 60) + "1", "9" * rng.randrange(1, 120), "-1", "1.5"))


def _entry(rng: random.Random, place: int) -> str:  # noqa: PLR0911 - one for each form
    low, high = BOUNDS[place]
    kind = rng.randrange(14)
    if kind < 3:
        return "*" if kind else f"*/{_number(rng, 1, high)}"
    if kind < 6:
        return _number(rng, low, high)
    if kind < 9:
        first, last = sorted((rng.randrange(low, high + 1), rng.randrange(low, high + 1)))
        step = f"/{_number(rng, 1, high - low + 1)}" if rng.random() < 0.4 else ""
        return f"{first}-{last}{step}"
    if kind == 9:
        return f"{_number(rng, low, high)}/{_number(rng, 1, high)}"
    if kind == 10:
        return rng.choice(NAMES)
    if kind == 11 and place == 3:
        return rng.choice(("L", "25-L", f"{_number(rng, 1, 31)}W", f"W{_number(rng, 1, 31)}", "?"))
    if kind == 11 and place == 5:
        return rng.choice(
            (f"{_number(rng, 0, 7)}#{_number(rng, 1, 5)}", f"L{rng.randrange(9)}", "?")
        )
    if kind == 12:
        return f"{rng.choice(NAMES)}-{rng.choice(NAMES)}"
    return rng.choice(ODD) + _number(rng, low, high)


def _field(rng: random.Random, place: int) -> str:
    count = rng.choice((1, 1, 1, 1, 2, 3, rng.randrange(1, 80)))
    return ",".join(_entry(rng, place) for _ in range(count))


def _grammatical(rng: random.Random) -> str:
    """Return five or six fields, most of them well formed."""
    first = rng.choice((0, 1, 1, 1))
    blank = _blank(rng)
    return blank.join(_field(rng, place) for place in range(first, 6))


def _plain(rng: random.Random) -> str:
    """Return an expression of which little is unusual."""
    fields = ["*"] * 6
    for place in rng.sample(range(6), rng.randrange(1, 4)):
        fields[place] = _entry(rng, place)
    return " ".join(fields[rng.choice((0, 1)) :])


def _impossible_day(rng: random.Random) -> str:
    day = rng.choice(("30", "31", "29", "29-31", "*/29", "31W", "L", "?", "*/31"))
    week = rng.choice(("*", "?", "*/7", "1#5", "L3", "*/6", "mon-sun#5", "6"))
    return f"0 0 {day} {rng.choice(('2', 'feb', '4,6', '2-4/2', '*/12', '12/3'))} {week}"


def _mutated(rng: random.Random) -> str:
    """Return a well-formed text in which something was deleted, doubled or put in."""
    text = list(_plain(rng) if rng.random() < 0.7 else _grammatical(rng))
    for _ in range(rng.randrange(1, 5)):
        place = rng.randrange(len(text) + 1)
        kind = rng.randrange(4)
        if kind == 0:
            del text[place : place + rng.randrange(1, 4)]
        elif kind == 1:
            text.insert(place, rng.choice(ODD))
        elif kind == 2:
            text[place:place] = text[place : place + rng.randrange(1, 9)] * rng.randrange(1, 9)
        else:
            text.insert(place, rng.choice("0123456789*/-,#LW "))
    return "".join(text)


def _repeated(rng: random.Random) -> str:
    """Return a piece again and again, as long as a text may be or a little shorter."""
    piece = rng.choice(PIECES)
    size = rng.choice((254, 255, 256, 1_000, LONGEST - 10, LONGEST))
    text = piece * (size // len(piece) + 1)
    fields = ["0", "0", "1", "1", "*"]
    fields[rng.randrange(5)] = text[: rng.choice((40, 240, size))]
    return rng.choice((text[:size], " ".join(fields)))


def _blanks(rng: random.Random) -> str:
    fields = _plain(rng).split(" ")
    gaps = [rng.choice(BLANKS) * rng.choice((1, 5, 300, 2_000)) for _ in range(len(fields) + 1)]
    return "".join(gap + field for gap, field in zip(gaps, fields)) + gaps[-1]


def _noise(rng: random.Random) -> str:
    """Return characters of any kind."""
    size = rng.choice((0, 1, 2, 5, 20, 100, 254, 300, LONGEST))
    top = rng.choice((0x80, 0x100, 0x3000, 0x110000))
    return "".join(chr(rng.randrange(top)) for _ in range(size))


def _odd(rng: random.Random) -> str:
    pieces = [*ODD, *NAMES, *BLANKS, *"0123456789*/-,#", "@daily", "@"]
    return "".join(rng.choice(pieces) for _ in range(rng.choice((1, 3, 8, 30, 200))))


def _alias(rng: random.Random) -> str:
    name = rng.choice(("hourly", "DAILY", "weekly", "monthly", "yearly", "annually", "midnight"))
    return rng.choice(("", " ", "\t")) + "@" + rng.choice((name, name[:-1], "reboot", "every 5m"))


_KINDS: list[Callable[[random.Random], str]] = [
    _plain, _plain, _plain, _grammatical, _grammatical, _impossible_day, _mutated, _mutated,
    _repeated, _blanks, _noise, _odd, _alias,
]  # fmt: skip


class Counted:
    """Counts the lines of Python that a call executes: work that no machine makes faster."""

    def __init__(self) -> None:
        self.lines = 0

    def __call__(self, function: Callable[[], T]) -> T:
        self.lines = 0

        def within(_frame: FrameType, event: str, _argument: object) -> Any:  # noqa: ANN401
            if event == "line":
                self.lines += 1
            return within

        before: Optional[Any] = sys.gettrace()
        sys.settrace(within)
        try:
            return function()
        finally:
            sys.settrace(before)
