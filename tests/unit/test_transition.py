"""Every line and cell of the decision table, and every rule of the other commands, by example.

The names of the tests are those of ``docs/protocol.rst``: its lines, and its rules.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Optional

import pytest

from leasecron_sync.model import (
    FormerSchedule,
    JobRecord,
    JobStamp,
    Lease,
    LeaseClaim,
    LeaseRef,
    LeaseReply,
    OnOverlap,
    Outcome,
    RenewReply,
    RunKey,
    RunRecord,
    RunState,
    Settlement,
    SettleReply,
    Verdict,
)
from leasecron_sync.protocol.transition import (
    STORE_DECISION,
    Change,
    JobView,
    Renew,
    Settle,
    abandon,
    claimable,
    is_due,
    is_lapsed,
    is_live,
    is_overlong,
    register,
    transition,
)

NOW = 1_700_000_000_000
LEASE = 10_000
TAKEOVER = 100_000
MAX_AGE = 60_000
MINUTE = 60_000
KEY = RunKey("job", NOW - 3_000)
OLDER = RunKey("job", NOW - 5_000)
YOUNGER = RunKey("job", NOW - 1_000)

ALLOW, SKIP, DEFER = OnOverlap.ALLOW, OnOverlap.SKIP, OnOverlap.DEFER
GUARDED = [SKIP, DEFER]
SETTLED = [RunState.FINISHED, RunState.FAILED, RunState.SKIPPED]
FINISHED = Settlement(Outcome.FINISHED)
FAILED = Settlement(Outcome.FAILED, "it broke", 4_000)
HANDED_OVER = Settlement(Outcome.HANDED_OVER, "stopping", 4_000)
ENDINGS = [FINISHED, FAILED, HANDED_OVER]


def claim_of(key: RunKey = KEY, **options: Any) -> LeaseClaim:  # noqa: ANN401 - fields by name
    claim = LeaseClaim(
        key=key,
        due_ms=key.scheduled_ms,
        holder="asker",
        decision_id="new",
        lease_ms=LEASE,
        max_attempts=3,
        on_overlap=SKIP,
        max_age_ms=MAX_AGE,
        takeover_ms=TAKEOVER,
    )
    return replace(claim, **options)


def running(left_ms: int, key: RunKey = KEY, **fields: Any) -> RunRecord:  # noqa: ANN401 - fields by name
    """Return a record of attempt 1 whose lease ends so many milliseconds from now."""
    record = RunRecord(
        key=key,
        state=RunState.RUNNING,
        token=7,
        attempt=1,
        holder="holder",
        decision_id="old",
        until_ms=NOW + left_ms,
        lease_ms=LEASE,
        max_attempts=3,
        takeover_ms=TAKEOVER,
        claimed_ms=NOW + left_ms - LEASE,
    )
    return replace(record, **fields)


def waiting(left_ms: int, key: RunKey = KEY, **fields: Any) -> RunRecord:  # noqa: ANN401 - fields by name
    """Return a record whose first attempt failed and whose wait ends so long from now."""
    record = running(
        left_ms,
        key,
        state=RunState.WAITING,
        decision_id="",
        failures=1,
        reason="it broke",
    )
    return replace(record, **fields)


def settled(state: RunState = RunState.FINISHED, key: RunKey = KEY, **fields: Any) -> RunRecord:  # noqa: ANN401 - fields by name
    record = running(-1, key, state=state, decision_id="", settled_ms=NOW - 100)
    return replace(record, **fields)


def decide(
    record: Optional[RunRecord],
    claim: LeaseClaim,
    *others: RunRecord,
    job: Optional[JobRecord] = None,
    now_ms: int = NOW,
) -> tuple[LeaseReply, Change]:
    view = JobView(job or JobRecord(claim.key.job), others)
    change = transition(record, view, claim, now_ms)
    assert isinstance(change.reply, LeaseReply)
    if change.reply.verdict is not Verdict.GRANTED:  # CLAIM-9: no token is drawn
        assert change.job is None
    return change.reply, change


def granted(
    record: Optional[RunRecord],
    claim: LeaseClaim,
    *others: RunRecord,
    job: Optional[JobRecord] = None,
) -> tuple[Lease, RunRecord]:
    """Return the lease and the record of a claim that must be granted anew."""
    reply, change = decide(record, claim, *others, job=job)
    assert (reply.verdict, reply.state, reply.fresh) == (Verdict.GRANTED, RunState.RUNNING, True)
    assert reply.lease is not None
    written = change.runs[0]
    assert (written.key, written.state) == (claim.key, RunState.RUNNING)
    assert written.token == reply.lease.ref.token
    assert change.job is not None
    assert change.job.last_token == written.token
    return reply.lease, written


def refused(
    record: Optional[RunRecord], claim: LeaseClaim, *others: RunRecord
) -> tuple[Verdict, int, Optional[RunState]]:
    """Return the answer to a claim that must write nothing."""
    reply, change = decide(record, claim, *others)
    assert (change.runs, change.job) == ((), None)
    assert (reply.lease, reply.fresh, reply.abandoned) == (None, False, ())
    return reply.verdict, reply.wait_ms, reply.state


def ended(record: Optional[RunRecord], claim: LeaseClaim, *others: RunRecord) -> RunRecord:
    """Return the record of a claim that must settle the run."""
    reply, change = decide(record, claim, *others)
    [written] = change.runs
    assert (reply.verdict, reply.fresh, reply.lease) == (Verdict.SETTLED, True, None)
    assert (reply.state, reply.reason) == (written.state, written.reason)
    assert (written.decision_id, written.settled_ms) == (claim.decision_id, NOW)
    return written


# -- what live, lapsed, due and overlong mean -----------------------------------------------------


@pytest.mark.parametrize(("left_ms", "live"), [(LEASE, True), (1, True), (0, False), (-1, False)])
def test_clock_4_a_lease_is_live_before_its_end_and_lapsed_from_its_end_on(
    left_ms: int, *, live: bool
) -> None:
    record = running(left_ms)
    assert (is_live(record, NOW), is_lapsed(record, NOW)) == (live, not live)


@pytest.mark.parametrize("record", [waiting(5), waiting(-5), *map(settled, SETTLED)])
def test_clock_4_what_is_not_running_is_neither_live_nor_lapsed(record: RunRecord) -> None:
    assert not is_live(record, NOW)
    assert not is_lapsed(record, NOW)
    assert not is_overlong(record, NOW)


@pytest.mark.parametrize(
    ("left_ms", "due"),
    [(-1, True), (0, True), (1, False), (5 * MINUTE, False), (5 * MINUTE + 1, True)],
)
def test_claim_5_a_wait_longer_than_any_retry_delay_is_over(left_ms: int, *, due: bool) -> None:
    assert is_due(waiting(left_ms), NOW) is due


@pytest.mark.parametrize("record", [running(-5), running(5), *map(settled, SETTLED)])
def test_claim_5_only_a_waiting_run_is_due(record: RunRecord) -> None:
    assert not is_due(record, NOW)


@pytest.mark.parametrize(
    ("left_ms", "overlong"), [(LEASE, False), (2 * LEASE, False), (2 * LEASE + 1, True)]
)
def test_claim_3_more_than_twice_its_length_is_too_long_a_lease(
    left_ms: int, *, overlong: bool
) -> None:
    assert is_overlong(running(left_ms), NOW) is overlong
    assert not is_overlong(running(left_ms, lease_ms=left_ms), NOW)


# -- line 1: the record carries this decision id --------------------------------------------------


def test_line_1_running_live_is_granted_again_with_the_time_that_is_left() -> None:
    record = running(400, decision_id="new", attempt=2, failures=1)
    reply, change = decide(record, claim_of())
    assert reply == LeaseReply(
        Verdict.GRANTED,
        lease=Lease(LeaseRef(KEY, 7), attempt=2, failures=1, left_ms=400),
        state=RunState.RUNNING,
        fresh=True,
    )
    assert (change.runs, change.job) == ((), None)


def test_line_1_running_live_is_granted_again_whatever_else_is_asked() -> None:
    record = running(400, decision_id="new")
    claim = claim_of(due_ms=NOW + 1, max_age_ms=0, max_attempts=1, takeover_ms=0)
    reply, _ = decide(record, claim, running(400, YOUNGER))
    assert reply.verdict is Verdict.GRANTED


def test_line_1_the_shortening_of_line_3_comes_first_here_too() -> None:
    record = running(50 * LEASE, decision_id="new")
    reply, change = decide(record, claim_of(lease_ms=3 * LEASE))
    assert reply.lease is not None
    assert (reply.verdict, reply.lease.left_ms) == (Verdict.GRANTED, LEASE)
    assert change.runs == (replace(record, until_ms=NOW + LEASE),)


@pytest.mark.parametrize(
    ("state", "reason"),
    [
        (RunState.SKIPPED, "overlap"),
        (RunState.FAILED, "runner lost"),
        (RunState.FAILED, "abandoned"),
    ],
)
def test_line_1_settled_by_this_decision_is_settled_and_fresh(state: RunState, reason: str) -> None:
    record = settled(state, decision_id="new", reason=reason)
    reply, change = decide(record, claim_of())
    assert reply == LeaseReply(Verdict.SETTLED, state=state, reason=reason, fresh=True)
    assert change.runs == ()


def test_line_1_running_lapsed_is_judged_by_line_4_as_a_takeover() -> None:
    lease, record = granted(running(0, decision_id="new"), claim_of())
    assert (lease.attempt, lease.failures, lease.takeover) == (2, 1, True)
    assert record.token > 7


def test_line_1_running_lapsed_is_judged_by_line_4_as_runner_lost() -> None:
    record = ended(running(0, decision_id="new"), claim_of(max_attempts=1))
    assert (record.state, record.reason) == (RunState.FAILED, "runner lost")


def test_line_1_a_waiting_run_is_judged_by_line_5() -> None:
    verdict = refused(waiting(300), claim_of(decision_id=""))[0]
    assert verdict is Verdict.WAITING


# -- line 2: settled ------------------------------------------------------------------------------


@pytest.mark.parametrize("state", SETTLED)
@pytest.mark.parametrize("wish", list(OnOverlap))
def test_line_2_claim_2_a_settled_run_is_never_granted(state: RunState, wish: OnOverlap) -> None:
    record = settled(state, reason="why", decision_id="old")
    reply, change = decide(record, claim_of(on_overlap=wish, max_attempts=100))
    assert reply == LeaseReply(Verdict.SETTLED, state=state, reason="why", fresh=False)
    assert (change.runs, change.job) == ((), None)


# -- line 3: running, live ------------------------------------------------------------------------


def test_line_3_a_live_run_is_held_with_the_time_until_its_lease_ends() -> None:
    assert refused(running(400), claim_of()) == (Verdict.HELD, 400, RunState.RUNNING)


def test_line_3_twice_the_length_of_a_lease_is_left_alone() -> None:
    assert refused(running(2 * LEASE), claim_of())[1] == 2 * LEASE


def test_line_3_claim_3_a_lease_too_long_for_the_clock_is_shortened() -> None:
    record = running(2 * LEASE + 1)
    reply, change = decide(record, claim_of(lease_ms=9 * LEASE))
    assert (reply.verdict, reply.wait_ms) == (Verdict.HELD, LEASE)
    assert change.runs == (replace(record, until_ms=NOW + LEASE),)
    assert change.job is None


# -- line 4: running, lapsed ----------------------------------------------------------------------


def test_line_4a_claim_4_lapsed_for_longer_than_the_takeover_window_is_abandoned() -> None:
    record = ended(running(-TAKEOVER - 1), claim_of())
    assert (record.state, record.reason) == (RunState.FAILED, "abandoned")
    assert (record.failures, record.attempt, record.token) == (1, 1, 7)


def test_line_4a_lapsed_for_exactly_the_takeover_window_is_granted() -> None:
    lease, _ = granted(running(-TAKEOVER), claim_of())
    assert lease.takeover


def test_line_4a_the_window_is_that_of_the_claim_not_of_the_record() -> None:
    old = running(-TAKEOVER - 1, takeover_ms=10 * TAKEOVER)
    assert ended(old, claim_of()).reason == "abandoned"
    lease, record = granted(running(-TAKEOVER - 1), claim_of(takeover_ms=2 * TAKEOVER))
    assert (lease.takeover, record.takeover_ms) == (True, 2 * TAKEOVER)


def test_line_4a_comes_before_4b() -> None:
    assert ended(running(-TAKEOVER - 1), claim_of(max_attempts=1)).reason == "abandoned"


def test_line_4b_with_the_lost_attempt_the_attempts_are_used_up_is_runner_lost() -> None:
    record = ended(running(0, failures=2, attempt=5), claim_of(max_attempts=3))
    assert (record.state, record.reason) == (RunState.FAILED, "runner lost")
    assert (record.failures, record.attempt) == (3, 5)


def test_line_4b_the_attempts_are_those_of_the_claim_not_of_the_record() -> None:
    old = running(0, failures=2, attempt=3, max_attempts=3)
    lease, record = granted(old, claim_of(max_attempts=4))
    assert (lease.failures, record.max_attempts) == (3, 4)
    assert ended(running(0, max_attempts=9), claim_of(max_attempts=1)).reason == "runner lost"


def test_line_4b_comes_before_4c() -> None:
    record = ended(running(0), claim_of(max_attempts=1), running(5, YOUNGER))
    assert record.reason == "runner lost"


@pytest.mark.parametrize("wish", GUARDED)
def test_line_4c_overlap_forbidden_and_another_run_live_is_deferred_even_if_skip_is_asked(
    wish: OnOverlap,
) -> None:
    others = (running(900, YOUNGER), running(300, OLDER), running(-5, RunKey("job", 1)))
    answer = refused(running(0), claim_of(on_overlap=wish), *others)
    assert answer == (Verdict.DEFERRED, 300, RunState.RUNNING)


@pytest.mark.parametrize(
    "other", [running(-5, OLDER), waiting(-5, OLDER), waiting(5, OLDER), running(-5, YOUNGER)]
)
def test_line_4c_only_a_live_run_defers_a_takeover(other: RunRecord) -> None:
    assert granted(running(0), claim_of(), other)[0].takeover


def test_line_4c_overlap_5_allowed_overlap_asks_nothing() -> None:
    lease, record = granted(running(0), claim_of(on_overlap=ALLOW), running(900, YOUNGER))
    assert (lease.takeover, record.overlap) == (True, True)


def test_line_4d_a_takeover_is_the_next_attempt_and_the_lost_one_is_counted() -> None:
    old = running(-1, attempt=4, failures=1, hand_overs=2, reason="before")
    lease, record = granted(old, claim_of(lease_ms=500, max_attempts=5, on_overlap=DEFER))
    assert lease == Lease(LeaseRef(KEY, NOW), attempt=5, failures=2, left_ms=500, takeover=True)
    assert record == RunRecord(
        key=KEY,
        state=RunState.RUNNING,
        token=NOW,
        attempt=5,
        failures=2,
        hand_overs=2,
        holder="asker",
        decision_id="new",
        until_ms=NOW + 500,
        lease_ms=500,
        max_attempts=5,
        overlap=False,
        takeover_ms=TAKEOVER,
        claimed_ms=NOW,
        settled_ms=None,
        reason="",
    )


def test_line_4d_claim_7_the_greatest_age_is_read_only_for_a_run_without_a_record() -> None:
    assert granted(running(0), claim_of(max_age_ms=0))[0].attempt == 2
    assert granted(waiting(0), claim_of(max_age_ms=0))[0].attempt == 2


def test_line_4d_neither_due_time_nor_what_was_pruned_stop_a_takeover() -> None:
    claim = claim_of(due_ms=NOW + MINUTE)
    job = JobRecord("job", pruned_to_ms=NOW)
    assert granted(running(0), claim, job=job)[0].attempt == 2
    assert granted(waiting(0), claim, job=job)[0].attempt == 2


# -- line 5: waiting ------------------------------------------------------------------------------


@pytest.mark.parametrize("left_ms", [1, 4_000, 5 * MINUTE])
def test_line_5a_a_wait_that_is_not_over_is_told_with_its_rest(left_ms: int) -> None:
    answer = refused(waiting(left_ms), claim_of())
    assert answer == (Verdict.WAITING, left_ms, RunState.WAITING)


def test_line_5a_claim_5_a_rest_of_more_than_five_minutes_counts_as_over() -> None:
    lease, _ = granted(waiting(5 * MINUTE + 1), claim_of())
    assert (lease.attempt, lease.failures) == (2, 1)


def test_line_5b_claim_4_due_for_longer_than_the_takeover_window_is_abandoned() -> None:
    record = ended(waiting(-TAKEOVER - 1), claim_of())
    assert (record.state, record.reason, record.failures) == (RunState.FAILED, "abandoned", 1)


def test_line_5b_due_for_exactly_the_takeover_window_is_granted() -> None:
    assert granted(waiting(-TAKEOVER), claim_of())[0].attempt == 2


def test_line_5b_comes_before_5c() -> None:
    assert ended(waiting(-TAKEOVER - 1), claim_of(), running(5, YOUNGER)).reason == "abandoned"


@pytest.mark.parametrize("wish", GUARDED)
@pytest.mark.parametrize(("left_ms", "wait_ms"), [(900, 900), (0, 0), (-5, 0), (-TAKEOVER - 1, 0)])
def test_line_5c_overlap_forbidden_and_another_run_running_live_or_lapsed_is_deferred(
    wish: OnOverlap, left_ms: int, wait_ms: int
) -> None:
    for key in (OLDER, YOUNGER):
        answer = refused(waiting(-5), claim_of(on_overlap=wish), running(left_ms, key))
        assert answer == (Verdict.DEFERRED, wait_ms, RunState.WAITING)


def test_line_5c_another_waiting_run_defers_no_retry() -> None:
    assert granted(waiting(-5), claim_of(), waiting(-5, OLDER))[0].attempt == 2


def test_line_5c_overlap_5_allowed_overlap_asks_nothing() -> None:
    assert granted(waiting(0), claim_of(on_overlap=ALLOW), running(900, YOUNGER))[0].attempt == 2


def test_line_5d_attempt_3_the_next_attempt_is_granted_and_counts_nothing() -> None:
    old = waiting(0, attempt=3, failures=2, hand_overs=1)
    lease, record = granted(old, claim_of())
    assert (lease.attempt, lease.failures, lease.takeover) == (4, 2, False)
    assert (record.hand_overs, record.reason, record.settled_ms) == (1, "", None)


def test_line_5d_used_up_attempts_are_not_looked_at_again() -> None:
    """A deploy that lowers ``max_attempts`` lets the retry that was promised happen."""
    assert granted(waiting(0, failures=2), claim_of(max_attempts=1))[0].failures == 2


# -- line 6: no record ----------------------------------------------------------------------------


@pytest.mark.parametrize("early_ms", [1, 4_000, 7 * MINUTE])
def test_line_6a_clock_2_before_the_due_time_is_early_with_the_wait(early_ms: int) -> None:
    answer = refused(None, claim_of(due_ms=NOW + early_ms))
    assert answer == (Verdict.EARLY, early_ms, None)


def test_line_6a_clock_5_the_due_time_is_asked_not_the_scheduled_time() -> None:
    future = RunKey("job", NOW + MINUTE)
    assert granted(None, claim_of(future, due_ms=NOW))[0].attempt == 1


def test_line_6a_comes_before_6b_and_6c() -> None:
    claim = claim_of(due_ms=NOW + 1, max_age_ms=-9)
    assert refused(None, claim, running(5, YOUNGER))[0] is Verdict.EARLY


def test_line_6b_older_than_the_greatest_age_is_too_old() -> None:
    answer = refused(None, claim_of(due_ms=NOW - MAX_AGE - 1))
    assert answer == (Verdict.TOO_OLD, 0, None)


def test_line_6b_exactly_as_old_as_the_greatest_age_is_granted() -> None:
    assert granted(None, claim_of(due_ms=NOW - MAX_AGE))[0].attempt == 1


@pytest.mark.parametrize(
    ("pruned_to_ms", "verdict"),
    [
        (KEY.scheduled_ms - 1, Verdict.GRANTED),
        (KEY.scheduled_ms, Verdict.TOO_OLD),
        (KEY.scheduled_ms + 1, Verdict.TOO_OLD),
        (None, Verdict.GRANTED),
    ],
)
def test_line_6b_prune_2_at_or_before_what_was_pruned_is_too_old(
    pruned_to_ms: Optional[int], verdict: Verdict
) -> None:
    reply, change = decide(None, claim_of(), job=JobRecord("job", pruned_to_ms=pruned_to_ms))
    assert reply.verdict is verdict
    if change.job is not None:
        assert change.job.pruned_to_ms == pruned_to_ms


def test_line_6b_prune_2_a_run_scheduled_at_the_epoch_is_pruned_too() -> None:
    claim = claim_of(RunKey("job", 0), due_ms=NOW)
    assert decide(None, claim, job=JobRecord("job", pruned_to_ms=0))[0].verdict is Verdict.TOO_OLD


def test_line_6b_comes_before_6c() -> None:
    claim = claim_of(due_ms=NOW - MAX_AGE - 1)
    assert refused(None, claim, running(5, YOUNGER))[0] is Verdict.TOO_OLD


BLOCKERS = [
    pytest.param(running(900, YOUNGER), 900, id="live, younger"),
    pytest.param(running(900, OLDER), 900, id="live, older"),
    pytest.param(running(0, OLDER), 0, id="lapsed just now"),
    pytest.param(running(-TAKEOVER, YOUNGER), 0, id="lapsed for the takeover window"),
    pytest.param(running(900, OLDER, overlap=True), 900, id="live, granted where overlap was"),
    pytest.param(waiting(0, OLDER), 0, id="older, due"),
    pytest.param(waiting(-TAKEOVER - 1, OLDER), 0, id="older, due for long"),
    pytest.param(waiting(6 * MINUTE, OLDER), 6 * MINUTE, id="older, an overlong wait"),
]


@pytest.mark.parametrize(("other", "wait_ms"), BLOCKERS)
def test_line_6c_overlap_1_with_skip_the_run_is_recorded_as_skipped(
    other: RunRecord, wait_ms: int
) -> None:
    del wait_ms
    assert ended(None, claim_of(on_overlap=SKIP), other) == RunRecord(
        key=KEY,
        state=RunState.SKIPPED,
        holder="asker",
        decision_id="new",
        settled_ms=NOW,
        reason="overlap",
    )


@pytest.mark.parametrize(("other", "wait_ms"), BLOCKERS)
def test_line_6c_overlap_2_with_defer_it_is_deferred(other: RunRecord, wait_ms: int) -> None:
    answer = refused(None, claim_of(on_overlap=DEFER), other)
    assert answer == (Verdict.DEFERRED, wait_ms, None)


@pytest.mark.parametrize(("other", "wait_ms"), BLOCKERS)
def test_line_6c_overlap_5_allowed_overlap_asks_nothing(other: RunRecord, wait_ms: int) -> None:
    del wait_ms
    lease, record = granted(None, claim_of(on_overlap=ALLOW), other)
    assert (lease.attempt, record.overlap) == (1, True)


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(waiting(1, OLDER), id="an older wait that is not over"),
        pytest.param(waiting(5 * MINUTE, OLDER), id="the longest wait"),
        pytest.param(waiting(-5, YOUNGER), id="a younger run that is due"),
    ],
)
@pytest.mark.parametrize("wish", GUARDED)
def test_line_6c_overlap_4_what_blocks_nothing(other: RunRecord, wish: OnOverlap) -> None:
    assert granted(None, claim_of(on_overlap=wish), other)[0].attempt == 1


def test_line_6c_the_wait_is_that_until_the_first_blocker_may_lapse() -> None:
    others = (running(900, OLDER), running(300, YOUNGER), waiting(100, YOUNGER))
    assert refused(None, claim_of(on_overlap=DEFER), *others)[1] == 300


def test_line_6d_the_first_attempt_is_granted() -> None:
    claim = claim_of(lease_ms=500, max_attempts=5, on_overlap=DEFER)
    lease, record = granted(None, claim)
    assert lease == Lease(LeaseRef(KEY, NOW), attempt=1, failures=0, left_ms=500)
    assert record == RunRecord(
        key=KEY,
        state=RunState.RUNNING,
        token=NOW,
        attempt=1,
        holder="asker",
        decision_id="new",
        until_ms=NOW + 500,
        lease_ms=500,
        max_attempts=5,
        takeover_ms=TAKEOVER,
        claimed_ms=NOW,
    )


def test_line_6d_overlap_3_another_run_lapsed_for_too_long_is_abandoned_in_the_same_step() -> None:
    stale = running(-TAKEOVER - 1, OLDER, failures=1, attempt=3)
    also_stale = running(-9 * TAKEOVER, YOUNGER)
    reply, change = decide(None, claim_of(), stale, also_stale)
    assert reply.verdict is Verdict.GRANTED
    assert reply.abandoned == (OLDER, YOUNGER)
    assert not reply.unsettled
    run, first, second = change.runs
    assert run.state is RunState.RUNNING
    assert first == replace(
        stale,
        state=RunState.FAILED,
        failures=2,
        decision_id="new",
        settled_ms=NOW,
        reason="abandoned",
    )
    assert (second.key, second.state, second.reason) == (YOUNGER, RunState.FAILED, "abandoned")


@pytest.mark.parametrize(("wish", "verdict"), [(SKIP, Verdict.SETTLED), (DEFER, Verdict.DEFERRED)])
def test_line_6d_nothing_is_abandoned_by_a_claim_that_is_not_granted(
    wish: OnOverlap, verdict: Verdict
) -> None:
    others = (running(-TAKEOVER - 1, OLDER), running(5, YOUNGER))
    reply, change = decide(None, claim_of(on_overlap=wish), *others)
    assert (reply.verdict, reply.abandoned) == (verdict, ())
    assert OLDER not in [record.key for record in change.runs]


def test_line_6d_overlap_5_where_overlap_is_allowed_nothing_is_abandoned() -> None:
    reply, change = decide(None, claim_of(on_overlap=ALLOW), running(-TAKEOVER - 1, OLDER))
    assert (reply.verdict, reply.abandoned) == (Verdict.GRANTED, ())
    assert [record.key for record in change.runs] == [KEY]


def test_line_6d_a_waiting_run_is_not_abandoned_by_another_run() -> None:
    reply, change = decide(None, claim_of(), waiting(-TAKEOVER - 1, YOUNGER))
    assert (reply.verdict, reply.abandoned) == (Verdict.GRANTED, ())
    assert len(change.runs) == 1


# -- tokens ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("last_token", "token"),
    [(0, NOW), (NOW - 1, NOW), (NOW, NOW + 1), (NOW + 50, NOW + 51)],
)
@pytest.mark.parametrize("record", [None, running(0), waiting(0)], ids=["new", "lapsed", "due"])
def test_token_1_one_more_than_the_last_of_the_job_and_never_below_the_time_of_the_store(
    record: Optional[RunRecord], last_token: int, token: int
) -> None:
    job = JobRecord("job", last_token=last_token, pruned_to_ms=5, owed_from_ms=6, fingerprint="x")
    reply, change = decide(record, claim_of(), job=job)
    assert reply.lease is not None
    assert reply.lease.ref == LeaseRef(KEY, token)
    assert change.job == replace(job, last_token=token)


# -- whether the claiming instance is to ask for pending runs -------------------------------------


@pytest.mark.parametrize(
    ("record", "others", "unsettled"),
    [
        pytest.param(None, (), False, id="granted, nothing else"),
        pytest.param(running(5), (), True, id="held"),
        pytest.param(
            running(5, holder="asker"), (), True, id="held, by an old decision of its own"
        ),
        pytest.param(waiting(5), (), True, id="waiting"),
        pytest.param(settled(), (), False, id="settled, nothing else"),
        pytest.param(settled(), (running(5, OLDER),), True, id="settled, another one is held"),
        pytest.param(settled(), (running(5, OLDER, holder="asker"),), False, id="its own"),
        pytest.param(settled(), (running(0, OLDER, holder="asker"),), True, id="its own, lapsed"),
        pytest.param(settled(), (waiting(5, OLDER, holder="asker"),), True, id="it waits"),
    ],
)
def test_a_reply_tells_whether_the_job_has_a_run_that_may_have_to_be_taken_over(
    record: Optional[RunRecord], others: tuple[RunRecord, ...], *, unsettled: bool
) -> None:
    assert decide(record, claim_of(), *others)[0].unsettled is unsettled


def test_a_deferred_claim_is_an_unsettled_run() -> None:
    others = (running(5, OLDER, holder="asker"),)
    assert decide(None, claim_of(on_overlap=DEFER), *others)[0].unsettled
    assert not decide(None, claim_of(on_overlap=SKIP), *others)[0].unsettled


def test_early_and_too_old_are_no_unsettled_runs() -> None:
    for claim in (claim_of(due_ms=NOW + 5), claim_of(max_age_ms=0)):
        assert not decide(None, claim)[0].unsettled
        assert decide(None, claim, waiting(5, OLDER))[0].unsettled


# -- renew ----------------------------------------------------------------------------------------


def renew(record: Optional[RunRecord], token: int = 7, lease_ms: int = LEASE) -> Change:
    command = Renew(LeaseRef(KEY, token), lease_ms)
    change = transition(record, JobView(JobRecord("job")), command, NOW)
    assert change.job is None
    return change


@pytest.mark.parametrize("left_ms", [1, LEASE, 0, -5, -9 * TAKEOVER])
def test_renew_2_a_renewal_revives_a_lapsed_lease_that_nobody_took_over(left_ms: int) -> None:
    record = running(left_ms)
    assert renew(record) == Change(RenewReply.RENEWED, (replace(record, until_ms=NOW + LEASE),))


@pytest.mark.parametrize("token", [0, 6, 8, NOW])
def test_renew_1_an_old_token_cannot_renew(token: int) -> None:
    assert renew(running(5), token) == Change(RenewReply.LOST)


def test_renew_1_never_the_holder_is_compared() -> None:
    assert renew(running(5, holder="somebody else")).reply is RenewReply.RENEWED


@pytest.mark.parametrize("record", [None, waiting(5), waiting(-5), *map(settled, SETTLED)])
def test_renew_4_a_settled_run_cannot_be_renewed(record: Optional[RunRecord]) -> None:
    assert renew(record) == Change(RenewReply.LOST)


def test_renew_5_a_renewal_counts_from_now_also_when_that_is_earlier() -> None:
    [written] = renew(running(100 * LEASE), lease_ms=500).runs
    assert written.until_ms == NOW + 500


# -- settle ---------------------------------------------------------------------------------------


def settle(
    record: Optional[RunRecord], settlement: Settlement, token: int = 7
) -> tuple[SettleReply, Optional[RunRecord]]:
    command = Settle(LeaseRef(KEY, token), settlement)
    change = transition(record, JobView(JobRecord("job")), command, NOW)
    assert isinstance(change.reply, SettleReply)
    assert change.job is None
    return change.reply, change.runs[0] if change.runs else None


@pytest.mark.parametrize("left_ms", [5, 0, -9 * TAKEOVER])
def test_settle_2_a_lapsed_but_untaken_lease_can_settle(left_ms: int) -> None:
    record = running(left_ms)
    assert settle(record, FINISHED) == (
        SettleReply(accepted=True, state=RunState.FINISHED),
        replace(record, state=RunState.FINISHED, decision_id="", settled_ms=NOW),
    )


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("token", [0, 6, 8])
@pytest.mark.parametrize("record", [running(5), waiting(5), settled()])
def test_settle_1_an_old_token_cannot_settle(
    record: RunRecord, token: int, ending: Settlement
) -> None:
    assert settle(record, ending, token) == (SettleReply(accepted=False, state=record.state), None)


@pytest.mark.parametrize("ending", ENDINGS)
def test_settle_1_a_run_without_a_record_cannot_be_settled(ending: Settlement) -> None:
    assert settle(None, ending) == (SettleReply(accepted=False, state=None), None)


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("decision", ["some claim", STORE_DECISION])
def test_settle_3_what_others_settled_cannot_be_settled_by_the_holder(
    ending: Settlement, decision: str
) -> None:
    record = settled(RunState.FAILED, decision_id=decision)
    assert settle(record, ending) == (SettleReply(accepted=False, state=RunState.FAILED), None)


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("state", [RunState.FINISHED, RunState.FAILED])
def test_settle_4_a_repeated_settle_is_accepted_and_the_first_one_stands(
    ending: Settlement, state: RunState
) -> None:
    assert settle(settled(state), ending) == (SettleReply(accepted=True, state=state), None)


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize(("left_ms", "wait_ms"), [(900, 900), (0, 0), (-5, 0)])
def test_settle_4_a_repeat_is_told_the_wait_that_is_left(
    ending: Settlement, left_ms: int, wait_ms: int
) -> None:
    reply = SettleReply(accepted=True, state=RunState.WAITING, wait_ms=wait_ms)
    assert settle(waiting(left_ms), ending) == (reply, None)


def test_attempt_3_a_failure_waits_and_is_counted() -> None:
    record = running(5, failures=1, attempt=2)
    assert settle(record, FAILED) == (
        SettleReply(accepted=True, state=RunState.WAITING, wait_ms=4_000),
        replace(
            record,
            state=RunState.WAITING,
            failures=2,
            until_ms=NOW + 4_000,
            decision_id="",
            reason="it broke",
        ),
    )


@pytest.mark.parametrize(("failures", "max_attempts"), [(2, 3), (0, 1), (5, 3)])
def test_attempt_2_attempts_used_up_is_failed(failures: int, max_attempts: int) -> None:
    record = running(5, failures=failures, max_attempts=max_attempts)
    assert settle(record, FAILED) == (
        SettleReply(accepted=True, state=RunState.FAILED),
        replace(
            record,
            state=RunState.FAILED,
            failures=failures + 1,
            decision_id="",
            settled_ms=NOW,
            reason="it broke",
        ),
    )


@pytest.mark.parametrize("hand_overs", range(9))
def test_handover_1_a_handed_over_run_is_claimable_at_once_and_not_counted(
    hand_overs: int,
) -> None:
    record = running(5, hand_overs=hand_overs, max_attempts=1)
    assert settle(record, HANDED_OVER) == (
        SettleReply(accepted=True, state=RunState.WAITING, wait_ms=0),
        replace(
            record,
            state=RunState.WAITING,
            hand_overs=hand_overs + 1,
            until_ms=NOW,
            decision_id="",
            reason="stopping",
        ),
    )


def test_handover_1_what_does_not_count_fails_no_run() -> None:
    """Not even one whose attempts a deploy has lowered below those that were counted."""
    reply, written = settle(running(5, failures=2, max_attempts=1), HANDED_OVER)
    assert (reply.accepted, reply.state) == (True, RunState.WAITING)
    assert written is not None
    assert written.failures == 2


@pytest.mark.parametrize("hand_overs", [9, 10, 30])
def test_handover_3_from_the_tenth_hand_over_on_they_count(hand_overs: int) -> None:
    record = running(5, hand_overs=hand_overs, failures=1, max_attempts=3)
    reply, written = settle(record, HANDED_OVER)
    assert (reply.accepted, reply.state, reply.wait_ms) == (True, RunState.WAITING, 0)
    assert written is not None
    assert (written.failures, written.hand_overs) == (2, hand_overs + 1)


def test_handover_3_the_last_one_that_counts_fails_the_run() -> None:
    record = running(5, hand_overs=9, failures=2, max_attempts=3)
    reply, written = settle(record, HANDED_OVER)
    assert (reply.accepted, reply.state) == (True, RunState.FAILED)
    assert written is not None
    assert (written.failures, written.settled_ms, written.reason) == (3, NOW, "stopping")


# -- register -------------------------------------------------------------------------------------

OLD, NEW = JobStamp("job", "old"), JobStamp("job", "new")


def test_register_1_a_job_owes_nothing_from_before_it_was_first_registered() -> None:
    before = JobRecord("job", last_token=5, pruned_to_ms=6)
    after = register(before, OLD, NOW)
    assert after == replace(before, owed_from_ms=NOW, fingerprint="old")


def test_call_3_the_second_registration_brings_nothing_new() -> None:
    first = register(JobRecord("job"), OLD, NOW)
    assert register(first, OLD, NOW + MINUTE) == first


def test_register_2_a_changed_schedule_owes_nothing_from_before_the_change() -> None:
    first = register(JobRecord("job"), OLD, NOW)
    second = register(first, NEW, NOW + MINUTE)
    assert (second.owed_from_ms, second.fingerprint) == (NOW + MINUTE, "new")
    assert second.former == (FormerSchedule("old", NOW, NOW + MINUTE),)


def test_register_3_a_schedule_that_returns_within_ten_minutes_keeps_its_old_date() -> None:
    job = register(register(JobRecord("job"), OLD, NOW), NEW, NOW + MINUTE)
    back = register(job, OLD, NOW + MINUTE + 10 * MINUTE - 1)
    assert (back.owed_from_ms, back.fingerprint) == (NOW, "old")
    assert [item.fingerprint for item in back.former] == ["new"]
    again = register(back, NEW, NOW + 12 * MINUTE)
    assert again.owed_from_ms == NOW + MINUTE


def test_register_3_a_schedule_that_returns_later_is_a_new_one() -> None:
    job = register(register(JobRecord("job"), OLD, NOW), NEW, NOW + MINUTE)
    late = NOW + MINUTE + 10 * MINUTE + 1
    back = register(job, OLD, late)
    assert (back.owed_from_ms, back.fingerprint) == (late, "old")


def test_register_3_old_and_new_instances_register_in_turns_for_long() -> None:
    job = register(JobRecord("job"), OLD, NOW)
    for turn in range(1, 40):
        stamp = NEW if turn % 2 else OLD
        job = register(job, stamp, NOW + turn * MINUTE)
        assert job.owed_from_ms == (NOW + MINUTE if stamp is NEW else NOW)
        assert len(job.former) == 1


def test_register_3_the_last_eight_definitions_are_remembered() -> None:
    job = JobRecord("job")
    for number in range(12):
        job = register(job, JobStamp("job", f"{number}"), NOW + number)
    assert [item.fingerprint for item in job.former] == [f"{n}" for n in range(10, 2, -1)]
    assert register(job, JobStamp("job", "3"), NOW + MINUTE).owed_from_ms == NOW + 3
    assert register(job, JobStamp("job", "2"), NOW + MINUTE).owed_from_ms == NOW + MINUTE


def test_register_4_the_date_is_never_in_the_future() -> None:
    job = register(register(JobRecord("job"), OLD, NOW), NEW, NOW + MINUTE)
    for stamp in (OLD, NEW, JobStamp("job", "newest")):
        assert register(job, stamp, NOW - MINUTE).owed_from_ms == NOW - MINUTE


# -- pending --------------------------------------------------------------------------------------


def listed(*records: RunRecord, asker: str = "asker") -> list[RunKey]:
    return list(claimable(records, asker, NOW).keys)


def test_pending_1_lapsed_runs_and_due_waiting_runs_are_listed() -> None:
    assert listed(running(0)) == [KEY]
    assert listed(waiting(0)) == [KEY]
    assert listed(running(1)) == []
    assert listed(waiting(1)) == []
    assert listed() == []


def test_pending_2_a_lapsed_run_goes_before_a_waiting_one() -> None:
    assert listed(waiting(-5, OLDER), running(-5)) == [KEY]
    assert listed(running(-5), waiting(-5, YOUNGER)) == [KEY]


def test_pending_2_among_equals_the_oldest_is_listed() -> None:
    assert listed(running(-5), running(-9, YOUNGER), running(-1, OLDER)) == [OLDER]
    assert listed(waiting(-5), waiting(-9, YOUNGER), waiting(-1, OLDER)) == [OLDER]


def test_pending_2_runs_that_may_overlap_are_all_listed_the_oldest_first() -> None:
    records = [replace(item, overlap=True) for item in (waiting(-5), running(-5, OLDER))]
    assert listed(*records, running(5, YOUNGER)) == [OLDER, KEY]


def test_pending_3_nothing_is_listed_behind_a_live_lease_of_a_no_overlap_job() -> None:
    assert listed(waiting(-5), running(5, YOUNGER)) == []
    assert listed(running(-5), running(5, OLDER)) == []
    assert listed(waiting(-5), waiting(5, OLDER)) == [KEY]


def test_pending_4_the_next_end_of_a_lease_or_a_wait_is_named() -> None:
    def next_ms(*records: RunRecord) -> Optional[int]:
        return claimable(records, "asker", NOW).next_ms

    assert next_ms() is None
    assert next_ms(running(-5), waiting(0, OLDER)) is None
    assert next_ms(running(900), waiting(300, OLDER)) == NOW + 300
    assert next_ms(waiting(-5), running(900, YOUNGER)) == NOW + 900


def test_pending_5_an_overlong_lease_is_listed() -> None:
    assert listed(running(2 * LEASE + 1)) == [KEY]
    assert listed(running(2 * LEASE)) == []
    assert listed(running(2 * LEASE + 1), waiting(-5, OLDER)) == [KEY]


def test_pending_6_an_overlong_wait_is_listed_as_due() -> None:
    assert listed(waiting(5 * MINUTE + 1)) == [KEY]
    assert listed(waiting(5 * MINUTE)) == []


@pytest.mark.parametrize(
    ("records", "unsettled"),
    [
        ((), False),
        ((running(5),), True),
        ((running(5, holder="asker"),), False),
        ((running(0, holder="asker"),), True),
        ((waiting(5, holder="asker"),), True),
        ((running(5, holder="asker"), running(5, OLDER)), True),
    ],
)
def test_pending_tells_of_unsettled_runs_that_the_asker_does_not_hold(
    records: tuple[RunRecord, ...], *, unsettled: bool
) -> None:
    assert claimable(records, "asker", NOW).unsettled is unsettled


# -- prune ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("record", [running(-101), waiting(-101)], ids=["running", "waiting"])
def test_prune_3_pruning_abandons_what_nobody_can_claim(record: RunRecord) -> None:
    assert abandon(record, NOW - 100, NOW) == replace(
        record,
        state=RunState.FAILED,
        failures=1,
        decision_id=STORE_DECISION,
        settled_ms=NOW,
        reason="abandoned",
    )


@pytest.mark.parametrize("left_ms", [-100, -99, 0, 5, 900 * LEASE])
def test_prune_1_pruning_keeps_live_runs_and_what_lapsed_within_the_history(left_ms: int) -> None:
    assert abandon(running(left_ms), NOW - 100, NOW) is None
    assert abandon(waiting(left_ms), NOW - 100, NOW) is None


@pytest.mark.parametrize("state", SETTLED)
def test_life_2_a_settled_run_is_not_abandoned(state: RunState) -> None:
    assert abandon(settled(state), NOW + MINUTE, NOW) is None
