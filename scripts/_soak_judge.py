"""What is measured in a soak, and whether it grows. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final

CONNECTIONS: Final = "store connections"
THREADS: Final = "threads"
FILES: Final = "open files"
MEMORY: Final = "memory (KB)"
OBJECTS: Final = "Python objects"

MAY_GROW: Final = {THREADS: 2, FILES: 2, CONNECTIONS: 2, MEMORY: 6_000, OBJECTS: 1_500}
"""What may come between the first and the last sample without being a leak. Memory: pages that an
allocator keeps, and the pages of an SQLite file that each connection caches."""

MANY: Final = 150
"""A list may be longer, or a class have more objects, by so many: heaps are cleared in steps, and
retries come together."""

SHARES: Final = (1 / 6, 1 / 3, 2 / 3, 1)
"""Of the runs, when samples are taken."""


@dataclass
class Sample:
    """What was there while nothing was under way.

    Attributes:
        runs: How many runs had come to their end.
        failed: How many attempts had failed.
        figures: The figures of the table by their names.
        lengths: Of each list, dict and set of the library, and how many objects of each class
            there are; by their names.
    """

    runs: int
    failed: int
    figures: dict[str, int] = field(default_factory=dict[str, int])
    lengths: dict[str, int] = field(default_factory=dict[str, int])

    def to_dict(self) -> dict[str, Any]:
        """Return it as what JSON knows."""
        return asdict(self)

    @property
    def entries(self) -> int:
        """Length of all lists together."""
        return sum(number for name, number in self.lengths.items() if not is_class(name))


def is_class(name: str) -> bool:
    """Tell whether a length is how many objects of a class there are."""
    return name.endswith(" objects")


def points(runs: int) -> list[int]:
    """Return after how many runs samples are taken."""
    return [round(runs * share) for share in SHARES]


def least(samples: Sequence[Sample]) -> Sample:
    """Return the least of each figure: what is under way comes and goes, a leak stays."""
    last = samples[-1]

    def lowest(all_of: Sequence[dict[str, int]]) -> dict[str, int]:
        names = set[str]().union(*all_of)
        return {name: min(one.get(name, 0) for one in all_of) for name in sorted(names)}

    return Sample(
        last.runs,
        last.failed,
        lowest([one.figures for one in samples]),
        lowest([one.lengths for one in samples]),
    )


def grown(samples: Sequence[Sample]) -> list[str]:
    """Return what grew from the first sample to the last, a sentence each.

    Args:
        samples: In their order.
    """
    first, last = samples[0], samples[-1]
    found = [
        _sentence(name, first.figures[name], last.figures[name], first, last)
        for name, may in MAY_GROW.items()
        if last.figures[name] - first.figures[name] > may
    ]
    for name, number in sorted(last.lengths.items()):
        before = first.lengths.get(name, 0)
        if number - before > MANY:
            found.append(_sentence(name, before, number, first, last))
    return found


def _sentence(name: str, before: int, after: int, first: Sample, last: Sample) -> str:
    return (
        f"{name}: {before:,} after {first.runs:,} runs, {after:,} after {last.runs:,}, "
        f"{after - before:,} more"
    )


def left(figures: dict[str, int]) -> list[str]:
    """Return what a stop left behind, a sentence each.

    Args:
        figures: Threads of the library, and connections, after the stop.
    """
    return [
        f"{name}: {number:,} left after the stop"
        for name, number in sorted(figures.items())
        if number
    ]


def rows(samples: Sequence[Sample]) -> list[list[str]]:
    """Return a table of the figures, a column for each sample."""
    table = [
        ["runs", *(f"{one.runs:,}" for one in samples)],
        ["  failed attempts", *(f"{one.failed:,}" for one in samples)],
    ]
    table += [[name, *(f"{one.figures[name]:,}" for one in samples)] for name in MAY_GROW]
    table.append(["entries of internal lists", *(f"{one.entries:,}" for one in samples)])
    return table
