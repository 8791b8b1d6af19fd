"""What a store remembers of pruned runs, for a clock that is set right after it was far ahead."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from leasecron_sync.model import (
    JobRecord,
    JobStamp,
    LeaseClaim,
    LeaseReply,
    OnOverlap,
    RunKey,
    Verdict,
)
from leasecron_sync.protocol.transition import (
    FORMER_SCHEDULE_MS,
    PRUNED_SPANS,
    JobView,
    Span,
    newest_pruned,
    register,
    transition,
    was_pruned,
    with_pruned,
)

NOW = 1_700_000_000_000
YEAR = 365 * 86_400_000
HISTORY = 600_000


def view(*spans: Span) -> JobView:
    """A job of which these spans were pruned."""
    newest_ms = max((last for _first, last in spans), default=None)
    return JobView(JobRecord("job", pruned_to_ms=newest_ms), pruned=spans)


def test_prune_2_everything_at_or_before_counts_while_the_clock_is_ahead_of_it() -> None:
    job = view((NOW - 500, NOW - 400), (NOW - 200, NOW))
    pruned = [ms for ms in range(NOW - 600, NOW + 5) if was_pruned(job, ms, NOW)]
    assert pruned == list(range(NOW - 600, NOW + 1))
    assert newest_pruned(job, NOW) == NOW
    assert not was_pruned(view(), NOW, NOW)
    assert newest_pruned(view(), NOW) is None


def test_prune_2_only_what_was_pruned_itself_counts_once_the_clock_is_behind_it() -> None:
    job = view((NOW - 500, NOW - 400), (NOW + YEAR, NOW + YEAR + 50))
    pruned = [ms for ms in range(NOW - 600, NOW + 5) if was_pruned(job, ms, NOW)]
    assert pruned == list(range(NOW - 500, NOW - 399))
    assert was_pruned(job, NOW + YEAR + 50, NOW + YEAR)
    assert not was_pruned(job, NOW + YEAR - 1, NOW + YEAR)
    assert newest_pruned(job, NOW) == NOW - 400
    assert newest_pruned(job, NOW - 450) == NOW - 450  # known up to here
    assert newest_pruned(view((NOW + 1, NOW + 2)), NOW) is None


def test_line_6b_a_job_pruned_in_a_false_future_is_granted_and_what_was_pruned_is_not() -> None:
    job = view((NOW - 500, NOW - 400), (NOW + YEAR, NOW + YEAR))
    for scheduled_ms, verdict in ((NOW, Verdict.GRANTED), (NOW - 400, Verdict.TOO_OLD)):
        claim = LeaseClaim(
            key=RunKey("job", scheduled_ms),
            due_ms=scheduled_ms,
            holder="a",
            decision_id="a-1",
            lease_ms=1_000,
            max_attempts=3,
            on_overlap=OnOverlap.SKIP,
            max_age_ms=60_000,
            takeover_ms=10_000,
        )
        reply = transition(None, job, claim, NOW).reply
        assert isinstance(reply, LeaseReply)
        assert reply.verdict is verdict


def test_what_lies_close_together_is_one_span_and_a_hole_of_years_stays() -> None:
    minutes = range(NOW, NOW + 50 * 60_000, 60_000)
    spans = with_pruned((), minutes, HISTORY)
    assert spans == ((NOW, NOW + 49 * 60_000),)
    spans = with_pruned(spans, [NOW + YEAR], HISTORY)
    assert spans[1:] == ((NOW + YEAR, NOW + YEAR),)
    half = HISTORY // 2
    spans = with_pruned(spans, [NOW + YEAR + half, NOW + YEAR + 2 * half + 1], HISTORY)
    assert spans[1:] == (
        (NOW + YEAR, NOW + YEAR + half),
        (NOW + YEAR + 2 * half + 1, NOW + YEAR + 2 * half + 1),
    )
    assert with_pruned(spans, [NOW + YEAR], HISTORY) == spans


@pytest.mark.parametrize("seed", range(30))
def test_nothing_that_was_pruned_is_forgotten_and_little_is_kept(seed: int) -> None:
    rng = random.Random(seed)
    spans: tuple[Span, ...] = ()
    pruned: set[int] = set()
    for _ in range(60):
        base_ms = NOW + rng.choice((-YEAR, 0, 0, YEAR, 10 * YEAR))
        portion = [base_ms + rng.randrange(100_000_000) for _ in range(rng.randrange(1, 6))]
        pruned.update(portion)
        spans = with_pruned(spans, portion, rng.choice((0, HISTORY, 86_400_000)))
        assert len(spans) <= PRUNED_SPANS
        assert all(first <= last for first, last in spans)
        assert all(one[1] < other[0] for one, other in zip(spans, spans[1:]))
        job = view(*spans)
        assert all(was_pruned(job, ms, NOW - 2 * YEAR) for ms in pruned)
        assert job.record.pruned_to_ms == max(pruned)
    # The holes that are left are those between the times, not those between runs.
    assert not any(was_pruned(view(*spans), NOW + 5 * YEAR + n, NOW) for n in range(5))


@pytest.mark.parametrize(
    ("ago_ms", "kept"),
    [
        (0, True),
        (FORMER_SCHEDULE_MS - 1, True),
        (FORMER_SCHEDULE_MS, False),
        (1 - FORMER_SCHEDULE_MS, True),  # the clock was set back a little since
        (-FORMER_SCHEDULE_MS, False),
        (-10 * YEAR, False),  # it was far ahead
    ],
)
def test_register_3_a_definition_displaced_under_a_wrong_clock_keeps_no_date(
    ago_ms: int, *, kept: bool
) -> None:
    job = register(JobRecord("job"), JobStamp("job", "first"), NOW - YEAR)
    job = register(job, JobStamp("job", "second"), NOW - ago_ms)
    job = replace(job, owed_from_ms=NOW - 1)
    job = register(job, JobStamp("job", "first"), NOW)
    assert job.owed_from_ms == (NOW - YEAR if kept else NOW)
