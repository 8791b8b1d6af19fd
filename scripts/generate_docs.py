#!/usr/bin/env python3
"""Write the pages of docs/ that are made from the code, or check that they are current.

scripts/generate_docs.py            write them
scripts/generate_docs.py --check    change nothing; the status is 1 if one is not what it would be

The pages depend on the code alone: neither on the time nor on the machine.
"""

from __future__ import annotations

import argparse
import re
import sys
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Callable, Final, Optional

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # this checkout, not a version that is installed

from leasecron_sync.options import (  # noqa: E402 - see above
    CALL_TIMEOUT_MS,
    DAY_MS,
    MAX_NAME,
    MIN_MARGIN_MS,
    OPTIONS,
    TAKEOVER_LEASES,
    OptionSpec,
    SchedulerOptions,
    job_options,
    scheduler_options,
)

WIDTH = 80

# What an option takes that is not a number. One that is missing here stops this script.
KINDS: Final = {
    "namespace": f"text, 1 to {MAX_NAME} characters",
    "name": f"text, 1 to {MAX_NAME} characters",
    "timezone": "name of an IANA zone",
    "around_run": "a callable",
    "overlap": '"skip" or "allow"',
}
UNITS: Final = (
    (DAY_MS, "day", "days"),
    (3_600_000, "hour", "hours"),
    (60_000, "minute", "minutes"),
    (1_000, "s", "s"),
)

# -- text ----------------------------------------------------------------------------------------

NAMES = "|".join(sorted({spec.name for spec in OPTIONS if "_" in spec.name}, key=len, reverse=True))
CODE = re.compile(
    rf"""
    "[^"\s]+"                       # "skip"
    | \b[a-z_]+(?:\.[a-z_]+)*\(\)   # run.check()
    | \b(?:{NAMES})\b               # lease_ms
    | \b__\w+__(?!\w)               # __qualname__
    | \b(?:[A-Z][a-z]+){{2,}}\b     # RunTimeLimit
    """,
    re.VERBOSE,
)


def marked(text: str) -> str:
    """Return plain text as reStructuredText, with names from the code as literals."""
    parts = []
    end = 0
    for found in CODE.finditer(text):
        parts += [escaped(text[end : found.start()]), f"``{found.group()}``"]
        end = found.end()
    return "".join([*parts, escaped(text[end:])])


def escaped(text: str) -> str:
    return re.sub(r"([\\*`|_])", r"\\\1", text)


def sentence(text: str) -> str:
    return text[0].upper() + text[1:] + ("" if text.endswith(".") else ".")


def duration(value_ms: int) -> str:
    """Return milliseconds in the largest unit that leaves no rest, or nothing."""
    for unit_ms, one, many in UNITS:
        if value_ms >= unit_ms and value_ms % unit_ms == 0:
            count = value_ms // unit_ms
            return f"{count:,} {one if count == 1 else many}"
    return ""


def number(value: int, *, is_duration: bool = True) -> str:
    spoken = duration(value) if is_duration else ""
    return f"{value:,} ({spoken})" if spoken else f"{value:,}"


def default_of(spec: OptionSpec) -> str:
    if isinstance(spec.default, int):
        return number(spec.default, is_duration=spec.name.endswith("_ms"))
    if isinstance(spec.default, str):
        return f'``"{spec.default}"``'
    return f"``{spec.default}``"


def range_of(spec: OptionSpec) -> str:
    if spec.low is None or spec.high is None:
        return marked(KINDS[spec.name])
    highest = number(spec.high, is_duration=spec.name.endswith("_ms"))
    return f"{spec.low:,} to {highest}"


# -- reStructuredText ----------------------------------------------------------------------------


def title(text: str, line: str, *, above: bool = False) -> str:
    bar = line * len(text)
    return f"{bar}\n{text}\n{bar}\n" if above else f"\n{text}\n{bar}\n"


def paragraph(text: str) -> str:
    return filled(" ".join(text.split())) + "\n"


def filled(text: str, first: str = "", rest: str = "") -> str:
    return textwrap.fill(
        text,
        WIDTH,
        initial_indent=first,
        subsequent_indent=rest,
        break_long_words=False,
        break_on_hyphens=False,
    )


def table(widths: Sequence[int], heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [
        ".. list-table::",
        "   :header-rows: 1",
        f"   :widths: {' '.join(map(str, widths))}",
        "",
    ]
    for row in [heads, *rows]:
        assert len(row) == len(heads)
        for index, cell in enumerate(row):
            lines.append(filled(cell, "   * - " if index == 0 else "     - ", "       "))
    return "\n".join(lines) + "\n"


# -- docs/options.rst ----------------------------------------------------------------------------


def options_page() -> Iterator[str]:
    yield ".. Made by scripts/generate_docs.py from leasecron_sync/options.py. Edits get lost.\n"
    yield title("Options", "=", above=True)
    yield paragraph(
        """All options are keyword arguments, and each is checked where it is given, not when the
        scheduler starts. A wrong type, an unknown name and an option of the other family of
        backends are a ``TypeError``; a value out of its range, and two values that cannot work
        together, are a ``ValueError`` that names the options and the values."""
    )
    yield paragraph(
        """Durations are whole milliseconds and end in ``_ms``. `Brokers and leases
        <brokers-and-leases.rst>`_ explains the two families, the `glossary <glossary.rst>`_ the
        words."""
    )
    yield ".. contents:: On this page\n   :depth: 2\n   :local:\n"
    yield title("Options of a scheduler", "=")
    yield paragraph("``Scheduler(backend, …)`` takes:")
    yield table_of("scheduler")
    yield title("Options of a job", "=")
    yield paragraph(
        "``scheduler.job(schedule, …)`` and ``scheduler.add_job(handler, schedule, …)`` take:"
    )
    yield table_of("job")
    yield from of_one_family()
    yield title("Values that must fit together", "=")
    yield from heartbeat_and_lease()
    yield from history_and_catch_up()
    yield title("Claim window and backend", "-")
    yield paragraph(
        """A claim backend may be able to remember claims for a limited time only. A
        ``claim_window_ms`` that is longer than it can keep is refused when the scheduler is made;
        the error names the longest."""
    )


def table_of(on: str) -> str:
    return table(
        (20, 15, 20, 10, 35),
        ("Option", "Default", "Values", "Backends", "What it does"),
        [
            (
                f"``{spec.name}``",
                default_of(spec),
                range_of(spec),
                spec.family,
                marked(spec.text),
            )
            for spec in OPTIONS
            if spec.on == on
        ],
    )


def of_one_family() -> Iterator[str]:
    yield title("Options of one family", "=")
    yield paragraph(
        """A claim says who won a run and nothing else, so what needs a record of the run cannot be
        kept on a claim backend. Such an option is refused there with a ``TypeError`` when the job
        or the scheduler is made, and a type checker reports the same line. The value does not
        matter: the default, spelled out, is refused too."""
    )
    for family, other in (("lease", "claim"), ("claim", "lease")):
        yield title(f"Only on {family} backends", "-")
        yield table(
            (20, 15, 65),
            ("Option", "Of", f"On a {other} backend"),
            [
                (f"``{spec.name}``", f"the {spec.on}", marked(sentence(spec.instead)))
                for spec in OPTIONS
                if spec.family == family
            ],
        )


def heartbeat_and_lease() -> Iterator[str]:
    yield title("Heartbeat and lease", "-")
    yield paragraph(
        f"""A heartbeat that takes its whole call time-out must still come before the holder stops
        trusting its lease. The call time-out is a third of ``lease_ms``, at most
        {number(CALL_TIMEOUT_MS)}. The trust margin, by which a holder stops before the store would
        let the lease lapse, is a tenth of ``lease_ms``, at least {MIN_MARGIN_MS}. So this must
        hold::"""
    )
    yield "    heartbeat_ms + call time-out < lease_ms - trust margin\n"
    rows = []
    for lease_ms in (500, 1_000, 5_000, 15_000, 60_000, 600_000):
        options = lease_options(lease_ms=lease_ms)
        assert options is not None
        longest_ms = lease_ms - options.margin_ms - options.call_timeout_ms - 1
        assert lease_options(lease_ms=lease_ms, heartbeat_ms=longest_ms) is not None
        assert lease_options(lease_ms=lease_ms, heartbeat_ms=longest_ms + 1) is None
        values = (options.call_timeout_ms, options.margin_ms, options.heartbeat_ms, longest_ms)
        rows.append([number(lease_ms), *(f"{value:,}" for value in values)])
    heads = (
        "``lease_ms``",
        "Call time-out",
        "Trust margin",
        "``heartbeat_ms`` when left out",
        "Longest ``heartbeat_ms``",
    )
    yield table((20, 20, 20, 20, 20), heads, rows)


def history_and_catch_up() -> Iterator[str]:
    yield title("History and catch-up", "-")
    yield paragraph(
        f"""Without its record a run that was executed could not be told from one that was missed.
        So records must be kept for as long as a run can be caught up, and after that for as long as
        it can be taken over. A run can be taken over for ``catch_up_ms`` after its lease lapsed, or
        for {TAKEOVER_LEASES} times ``lease_ms`` where that is longer. For every job this must
        hold::"""
    )
    yield f"    history_ms >= catch_up_ms + max(catch_up_ms, {TAKEOVER_LEASES} x lease_ms)\n"
    rows = []
    for catch_up_ms, lease_ms in (
        (60_000, 15_000),
        (3_600_000, 15_000),
        (DAY_MS, 15_000),
        (DAY_MS, 3 * 3_600_000),
        (7 * DAY_MS, 15_000),
    ):
        scheduler = lease_options(lease_ms=lease_ms)
        assert scheduler is not None
        takeover_ms = scheduler.takeover_ms(catch_up_ms)
        least_ms = catch_up_ms + takeover_ms
        assert fits(catch_up_ms, lease_ms, least_ms)
        assert not fits(catch_up_ms, lease_ms, least_ms - 1)
        rows.append([number(value) for value in (catch_up_ms, lease_ms, takeover_ms, least_ms)])
    heads = (
        "``catch_up_ms``",
        "``lease_ms``",
        "Can be taken over for",
        "Least ``history_ms``",
    )
    yield table((25, 25, 25, 25), heads, rows)
    default_ms = default("history_ms")
    longest_ms = default_ms // 2
    assert fits(longest_ms, default("lease_ms"), default_ms)
    assert not fits(longest_ms + 1, default("lease_ms"), default_ms)
    yield paragraph(
        f"""With ``history_ms`` left out, which is {duration(default_ms)}, ``catch_up_ms`` can be up
        to {number(longest_ms)}."""
    )


def default(name: str) -> int:
    (value,) = (spec.default for spec in OPTIONS if spec.name == name)
    assert isinstance(value, int)
    return value


def lease_options(**given: int) -> Optional[SchedulerOptions]:
    """Return what the library makes of the options of a scheduler, None if it refuses them."""
    try:
        return scheduler_options(given, "lease", "SQLiteLease")
    except ValueError:
        return None


def fits(catch_up_ms: int, lease_ms: int, history_ms: int) -> bool:
    """Tell whether the library accepts such a job on such a scheduler."""
    scheduler = lease_options(lease_ms=lease_ms, history_ms=history_ms)
    assert scheduler is not None
    try:
        job_options({"name": "any", "catch_up_ms": catch_up_ms}, scheduler, "lease", "SQLiteLease")
    except ValueError:
        return False
    return True


# -- command -------------------------------------------------------------------------------------

PAGES: Final[dict[str, Callable[[], Iterator[str]]]] = {"docs/options.rst": options_page}


def content(page: str) -> str:
    return "\n".join(PAGES[page]())


def main(arguments: Optional[Sequence[str]] = None) -> int:
    parser = argparse.ArgumentParser(description="Write the pages that are made from the code.")
    parser.add_argument("--check", action="store_true", help="only tell whether they are current")
    check = parser.parse_args(arguments).check
    stale = False
    for page in PAGES:
        path = ROOT / page
        wanted = content(page)
        if path.is_file() and path.read_text(encoding="utf-8") == wanted:
            continue
        stale = True
        if not check:
            path.write_text(wanted, encoding="utf-8")
            print(f"{page}: written")
        else:
            print(f"{page} is not current: run scripts/generate_docs.py", file=sys.stderr)
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
