"""Arguments as PostgreSQL reads them, and rows as records."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Sequence
from itertools import accumulate
from typing import Any

from leasecron_sync.model import (
    STORE_FORMAT,
    LeaseRef,
    RunKey,
    RunRecord,
    RunState,
    Settlement,
)

Row = tuple[Any, ...]

_logger = logging.getLogger("leasecron_sync.backends.postgres")

_STATES = {state.value for state in RunState}
_UPGRADE = f"this version of leasecron_sync reads formats up to {STORE_FORMAT}: upgrade it"


def text_array(values: Collection[str]) -> str:
    """Write an array as PostgreSQL reads it: far quicker than an expression for each element."""
    joined = '","'.join(values)
    if "\\" in joined or joined.count('"') > 2 * len(values) - 2:
        quoted = (value.replace("\\", "\\\\").replace('"', '\\"') for value in values)
        joined = '","'.join(quoted)
    return f'{{"{joined}"}}' if values else "{}"


def number_array(values: Iterable[int]) -> str:
    """Write an array of numbers likewise."""
    return f"{{{','.join(map(str, values))}}}"


def lease_arrays(leases: Sequence[LeaseRef]) -> tuple[str, str, str]:
    """Write the jobs, scheduled times and tokens of leases."""
    return (
        text_array([lease.key.job for lease in leases]),
        number_array([lease.key.scheduled_ms for lease in leases]),
        number_array([lease.token for lease in leases]),
    )


def settlement_arrays(settlements: Iterable[Settlement]) -> tuple[str, str, str]:
    """Write the outcomes, reasons and delays of settlements."""
    told = [*settlements]
    return (
        text_array([settlement.outcome.value for settlement in told]),
        text_array([settlement.reason for settlement in told]),
        number_array([settlement.delay_ms for settlement in told]),
    )


class Rounds:
    """The order in which the items of a batch are decided: those of one job in turn.

    Args:
        jobs: The job of each item.

    Attributes:
        order: Positions of the items, round by round; a round has at most one item of a job.
        ends: Where the rounds end in ``order``.
        names: The jobs in key order, which is the order of code points in the store, too.
    """

    def __init__(self, jobs: Sequence[str]) -> None:
        rounds: list[list[int]] = []
        turns: dict[str, int] = {}
        for number, job in enumerate(jobs):
            turn = turns[job] = turns.get(job, -1) + 1
            if turn == len(rounds):
                rounds.append([])
            rounds[turn].append(number)
        self.order = [number for numbers in rounds for number in numbers]
        self.ends = list(accumulate(len(numbers) for numbers in rounds))
        self.names = sorted(turns)


def unreadable(job: str, why: str) -> str:
    """Say that a record is of a newer version."""
    return f"the record of job {job!r} cannot be read ({why}): {_UPGRADE}"


def readable(rows: Iterable[Row]) -> list[RunRecord]:
    """Read rows as ``history.sql`` selects them, leaving out what a newer version wrote."""
    records: list[RunRecord] = []
    for job, number, scheduled_ms, state, *rest in rows:
        if number > STORE_FORMAT or state not in _STATES:
            _logger.debug("left a record out job=%r scheduled_ms=%d", job, scheduled_ms)
        else:
            records.append(RunRecord(RunKey(job, scheduled_ms), RunState(state), *rest))
    return records
