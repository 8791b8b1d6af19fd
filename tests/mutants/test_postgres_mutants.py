"""Each fault planted in PostgreSQL's SQL fails the case that is named beside it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import partial
from typing import Any, Callable, NamedTuple, Optional, TypeVar
from unittest import mock

import pytest

from leasecron_sync.backends import _postgres_schema
from leasecron_sync.backends.base import LeaseBackend
from leasecron_sync.backends.postgres import PostgresLease
from leasecron_sync.model import OnOverlap, RenewReply, RunState, Verdict
from leasecron_sync.testing.clock import ManualClock
from leasecron_sync.testing.conformance import LeaseConformance
from leasecron_sync.testing.conformance._race import race
from leasecron_sync.testing.conformance._store import (
    FINISHED,
    LeaseInstance,
    LeaseStore,
)
from tests.model.both import Both, Store, spans_in_postgres
from tests.model.wild import Pruner
from tests.services.fixtures import had
from tests.services.postgres import execute
from tests.services.process import eventually
from tests.services.services import Services

SKIP = OnOverlap.SKIP

R = TypeVar("R")


class Fault(NamedTuple):
    """A text of SQL, what it is replaced by, and the case that must notice it."""

    file: str
    text: str
    instead: str
    case: str
    values: tuple[object, ...] = ()
    also: tuple[tuple[str, str], ...] = ()  # other texts, and what they are replaced by

    def planted(self, text: str) -> str:
        """Return the text of the file with the fault in it."""
        for old, new in ((self.text, self.instead), *self.also):
            assert old in text
            text = text.replace(old, new)
        return text

    def __str__(self) -> str:
        return f"{self.file}: {self.case}"


LOCK_JOBS = "WHERE x.space_id = v_space_id AND x.name = n.name FOR UPDATE"
UNLOCKED = LOCK_JOBS.replace(" FOR UPDATE", "")
READ_JOB = "WHERE x.space_id = v_space_id AND x.name = c.job LIMIT 1"
ALL_THE_LONG_WAY = ("IF cardinality(p_job) = 1 THEN", "IF false THEN")

FAULTS = (
    # -- claim ------------------------------------------------------------------------------------
    Fault(
        "claim_v1",
        "AND r.decision_id = c.decision_id THEN 'repeated'",
        "AND false THEN 'repeated'",
        "same_decision_is_granted_again",
    ),
    Fault(
        "claim_v1",
        "AND r.decision_id = c.decision_id THEN 'repeated'",
        "AND r.holder = c.holder THEN 'repeated'",
        "second_decision_of_the_holder_is_held_too",
    ),
    Fault(
        "claim_v1",
        "WHEN d.line <> 'deferred' THEN d.until_ms - v_now_ms",
        "WHEN d.line <> 'deferred' THEN d.granted_ms",
        "repeated_grant_tells_the_time_left",
    ),
    Fault(
        "claim_v1",
        "WHEN r.until_ms > v_now_ms THEN 'held'",
        "WHEN r.until_ms >= v_now_ms THEN 'held'",
        "lease_is_live_before_its_end_and_lapsed_from_its_end_on",
    ),
    Fault(
        "claim_v1",
        "WHEN r.failures + 1 >= c.max_attempts",
        "WHEN r.failures + 1 > c.max_attempts",
        "last_lost_runner_fails_the_run",
    ),
    Fault(
        "claim_v1",
        "WHEN v_now_ms - r.until_ms > c.takeover_ms THEN 'abandoned'\n                WHEN r.fail",
        "WHEN v_now_ms - r.until_ms >= c.takeover_ms THEN 'abandoned'\n                WHEN r.fail",
        "takeover_is_granted_to_the_end_of_its_window",
    ),
    Fault(
        "claim_v1",
        "coalesce(r.failures + (r.state = 'running')::integer, 0)",
        "coalesce(r.failures, 0)",
        "expired_lease_is_taken_over_with_next_attempt",
    ),
    Fault(
        "claim_v1",
        "BETWEEN 1 AND v_max_retry_delay_ms THEN 'waiting'",
        ">= 1 THEN 'waiting'",
        "wait_longer_than_any_retry_delay_is_over",
    ),
    Fault(
        "claim_v1",
        "WHEN c.scheduled_ms <= j.pruned_to_ms AND (",
        "WHEN false AND (",
        "nothing_at_or_before_what_was_pruned_is_granted_anew",
    ),
    Fault(
        "claim_v1",
        "j.pruned_to_ms <= v_now_ms OR EXISTS (",
        "true OR EXISTS (",
        "what_was_pruned_ahead_of_the_clock_silences_nothing_but_itself",
    ),
    Fault(
        "claim_v1",
        "j.pruned_to_ms <= v_now_ms OR EXISTS (",
        "j.pruned_to_ms <= v_now_ms OR false AND EXISTS (",
        "what_was_pruned_ahead_of_the_clock_silences_nothing_but_itself",
    ),
    Fault("claim_v1", "> 2 * r.lease_ms", "< 0", "lease_too_long_for_the_clock_is_shortened"),
    Fault(
        "claim_v1",
        "WHERE b.running AND NOT b.stale OR b.goes_first",
        "WHERE b.running AND NOT b.stale",
        "older_due_run_goes_before_a_younger_one",
        (SKIP,),
    ),
    Fault(
        "claim_v1",
        "WHERE b.running AND NOT b.stale OR b.goes_first",
        "WHERE b.running AND b.until_ms > v_now_ms OR b.goes_first",
        "no_run_is_granted_beside_a_lapsed_one",
        (SKIP,),
    ),
    Fault(
        "claim_v1",
        "AND o.running_until_ms IS NOT NULL THEN 'deferred'",
        "AND o.live_until_ms IS NOT NULL THEN 'deferred'",
        "retry_behind_a_running_run_is_deferred",
    ),
    Fault(
        "claim_v1",
        "IF v_beside_stale <> '{}' THEN",
        "IF false THEN",
        "run_that_lapsed_too_long_ago_is_abandoned_by_the_next_grant",
    ),
    Fault(
        "claim_v1",
        "greatest(j.last_token + 1, v_now_ms)",
        "j.last_token + 1",
        "token_is_never_below_the_time_of_the_store",
        also=(("greatest(v_job.last_token + 1, v_now_ms)", "v_job.last_token + 1"),),
    ),
    Fault(
        "claim_v1",
        "greatest(j.last_token + 1, v_now_ms)",
        "greatest(r.token + 1, v_now_ms)",
        "token_rises_over_runs_and_attempts",
    ),
    Fault(
        "claim_v1",
        "d.state, d.reason, d.decided_by = d.decision_id,",
        "d.state, d.reason, true,",
        "only_the_deciding_claim_is_fresh",
    ),
    Fault(
        "claim_v1",
        "WHEN r.format > v_format THEN",
        "WHEN false THEN",
        "one_unreadable_record_does_not_spoil_the_batch",
    ),
    Fault(
        "claim_v1",
        READ_JOB,
        "WHERE x.name = c.job ORDER BY x.id LIMIT 1",
        "namespaces_share_nothing",
    ),
    # The short way of a claim by itself.
    Fault(
        "claim_v1",
        "AND v_now_ms BETWEEN p_due_ms[1] AND",
        "AND v_now_ms <=",
        "early_claim_of_a_known_job_waits",
    ),
    Fault(
        "claim_v1",
        "AND v_now_ms BETWEEN p_due_ms[1] AND p_due_ms[1] + p_max_age_ms[1]",
        "AND v_now_ms >= p_due_ms[1]",
        "run_of_a_known_job_beyond_its_greatest_age_is_too_old",
    ),
    Fault(
        "claim_v1",
        "AND (p_scheduled_ms[1] <= v_job.pruned_to_ms) IS NOT TRUE",
        "",
        "nothing_at_or_before_what_was_pruned_is_granted_anew",
    ),
    Fault(
        "claim_v1",
        "WHERE x.unsettled_job_id = v_job.id LIMIT 1",
        "WHERE x.unsettled_job_id = v_job.id AND x.scheduled_ms = p_scheduled_ms[1] LIMIT 1",
        "on_time_overlap_is_skipped_once",
    ),
    Fault(
        "claim_v1",
        "SET last_token = v_job.last_token",
        "SET last_token = j.last_token",
        "token_rises_when_the_clock_was_set_back",
    ),
    Fault("claim_v1", "FOR UPDATE OF j;", ";", "claim_waits_for_another_run_of_its_job"),
    # The locks: none on the jobs; one that is taken by the statement that decides, whose snapshot
    # is older; none on the runs that holders renew and settle.
    Fault(
        "claim_v1",
        LOCK_JOBS,
        UNLOCKED,
        "claim_waits_for_another_run_of_its_job",
        also=(ALL_THE_LONG_WAY,),
    ),
    Fault(
        "claim_v1",
        LOCK_JOBS,
        UNLOCKED,
        "claim_waits_for_another_run_of_its_job",
        also=(
            (f"{READ_JOB}\n        ) j ON true", f"{READ_JOB} FOR UPDATE\n        ) j ON true"),
            ALL_THE_LONG_WAY,
        ),
    ),
    Fault(
        "claim_v1",
        "ORDER BY x.scheduled_ms\n    FOR UPDATE",
        "",
        "claim_waits_for_a_renewal_of_its_run",
    ),
    Fault(
        "claim_v1",
        "(n.strict OR x.",
        "(x.",
        "claim_waits_for_a_renewal_of_a_run_beside_it",
    ),
    # -- renew and settle -------------------------------------------------------------------------
    Fault("renew_v1", "r.token = l.token AND", "", "old_token_cannot_renew"),
    Fault(
        "renew_v1",
        "AND r.state = 'running'",
        "",
        "settled_attempt_cannot_be_renewed",
        (FINISHED,),
    ),
    Fault(
        "renew_v1",
        "AND x.scheduled_ms = l.scheduled_ms LIMIT 1",
        "AND x.scheduled_ms = l.scheduled_ms AND x.until_ms > v_now_ms LIMIT 1",
        "renewal_revives_a_lapsed_lease_that_nobody_took_over",
    ),
    Fault(
        "renew_v1",
        "SET until_ms = v_now_ms + p_lease_ms",
        "SET until_ms = greatest(r.until_ms, v_now_ms + p_lease_ms)",
        "renewal_after_the_clock_was_set_back_is_shorter",
    ),
    Fault(
        "settle_v1",
        "v_run.token IS DISTINCT FROM p_token[v_pos]",
        "v_run.token IS NULL",
        "old_token_cannot_settle",
        (FINISHED,),
    ),
    Fault(
        "settle_v1",
        "accepted := v_run.decision_id = ''",
        "accepted := true",
        "what_others_settled_cannot_be_settled_by_the_holder",
        (FINISHED, "abandoned"),
    ),
    Fault(
        "settle_v1",
        "v_run.hand_overs > v_free_hand_overs",
        "true",
        "hand_over_is_claimable_at_once_and_not_counted",
    ),
    Fault(
        "settle_v1",
        "ELSIF v_run.state <> 'running' THEN",
        "ELSIF v_run.settled_ms IS NOT NULL THEN",
        "first_settlement_under_a_token_stands",
    ),
    Fault("renew_v1", "FOR UPDATE", "", "renewal_waits_for_a_takeover_of_its_run"),
    Fault("settle_v1", "FOR UPDATE", "", "settlement_waits_for_a_takeover_of_its_run"),
    # -- the rest ---------------------------------------------------------------------------------
    Fault("pending_v1", "NOT k.blocked AND", "", "nothing_is_listed_behind_a_live_lease"),
    Fault(
        "pending_v1", "ORDER BY s.lapsed DESC,", "ORDER BY", "lapsed_run_goes_before_a_waiting_one"
    ),
    Fault("pending_v1", "AND k.turn = 1", "", "at_most_one_run_of_a_no_overlap_job_is_listed"),
    Fault("pending_v1", "AND r.holder = p_asker", "", "pending_names_the_next_expiry"),
    Fault(
        "states_v1",
        "BETWEEN c.from_ms AND c.to_ms",
        "BETWEEN c.from_ms AND c.to_ms - 1",
        "looking_back_costs_one_round_trip",
    ),
    Fault(
        "register_v1",
        "< v_former_schedule_ms\n            ORDER BY",
        "< 10 * v_former_schedule_ms\n            ORDER BY",
        "schedule_that_returns_later_is_a_new_one",
    ),
    Fault(
        "register_v1",
        "abs(v_now_ms - (f.value ->> 2)::bigint)",
        "(v_now_ms - (f.value ->> 2)::bigint)",
        "schedule_displaced_while_the_clock_was_far_ahead_is_a_new_one",
    ),
    Fault(
        "register_v1",
        "WHEN j.pruned_to_ms <= v_now_ms THEN",
        "WHEN true THEN",
        "what_was_pruned_ahead_of_the_clock_silences_nothing_but_itself",
    ),
    Fault(
        "register_v1",
        "LIMIT v_former_schedules - 1",
        "LIMIT v_former_schedules - 2",
        "last_eight_definitions_are_remembered",
    ),
    Fault(
        "register_v1",
        "least(s.owed_from_ms, v_now_ms)",
        "s.owed_from_ms",
        "owed_since_date_is_never_in_the_future",
    ),
    Fault(
        "prune_v1",
        "pruned_to_ms = greatest(j.pruned_to_ms, b.newest_ms)",
        "pruned_to_ms = b.newest_ms",
        "what_was_pruned_is_not_forgotten_when_an_older_run_is_pruned",
    ),
    Fault(
        "prune_v1",
        "AND r.settled_ms IS NOT NULL",
        "",
        "prune_keeps_tokens_and_live_runs",
    ),
    Fault(
        "prune_v1",
        "decision_id = 'store',",
        "decision_id = '',",
        "pruning_abandons_what_nobody_can_claim",
        (RunState.RUNNING,),
    ),
)


# What is pruned is compared with the reference: no case looks at the spans themselves.
FAULTS_IN_SPANS = (
    Fault("prune_v1", "< v_pruned_spans AS", "<= v_pruned_spans AS", "more of them"),
    Fault("prune_v1", "h.first_ms DESC", "h.first_ms", "of equal holes the last one is closed"),
    Fault("prune_v1", "h.hole_ms DESC NULLS LAST", "h.hole_ms", "the widest holes are closed"),
    Fault("prune_v1", "> p_older_than_ms / 2", "> p_older_than_ms", "wider holes are closed"),
    Fault("prune_v1", "> p_older_than_ms / 2", ">= p_older_than_ms / 2", "one of just that width"),
    Fault("prune_v1", "max(p.last_ms) OVER", "lag(p.last_ms) OVER", "a time inside ends a span"),
    Fault(
        "prune_v1", "max(n.last_ms)", "max(n.first_ms)", "spans end where their last part begins"
    ),
    Fault("prune_v1", "o.scheduled_ms FROM old o", "o.scheduled_ms FROM old o WHERE false", "none"),
    Fault("claim_v1", "BETWEEN s.first_ms AND s.last_ms", "= s.first_ms", "only where they begin"),
    Fault("register_v1", "max(least(p.last_ms, v_now_ms))", "max(p.last_ms)", "one of the future"),
    Fault(
        "register_v1",
        "WHERE p.first_ms <= v_now_ms",
        "WHERE p.last_ms <= v_now_ms",
        "not a span that has begun",
    ),
)


class Judge(LeaseConformance):
    """The lease suite over a schema whose SQL has a fault."""

    def __init__(self, url: str, schema: str) -> None:
        clock = self.clock = ManualClock()

        class OnManualClock(PostgresLease):
            _now_ms = staticmethod(clock.now_ms)

        self.connect: Callable[[], LeaseBackend] = lambda: OnManualClock(url, schema=schema)
        self._url, self._schema = url, schema

    def advance(self, ms: int) -> None:
        self.clock.advance(ms)

    def set_back(self, ms: int) -> None:
        self.clock.step(-ms)

    def plant_unreadable(self, namespace: str, run: object) -> None:
        del namespace, run
        execute(
            self._url,
            f"UPDATE {self._schema}.leasecron_run SET format = 99 WHERE job_id = ("
            f"SELECT id FROM {self._schema}.leasecron_job WHERE name = 'damaged')",
        )

    def test_early_claim_of_a_known_job_waits(self, store: LeaseStore) -> None:
        """CLOCK-2, line 6 (a)."""
        asker, run = store.instance(), store.run()
        asker.register()
        claim = asker.intend(run, due_ms=run.scheduled_ms + store.lease_ms)
        assert asker.ask(claim).verdict is Verdict.EARLY
        assert store.records() == {}

    def test_run_of_a_known_job_beyond_its_greatest_age_is_too_old(self, store: LeaseStore) -> None:
        """Line 6 (b)."""
        asker, run = store.instance(), store.run()
        asker.register()
        store.advance(store.max_age_ms + 1)
        assert asker.ask(run).verdict is Verdict.TOO_OLD
        assert store.records() == {}

    def test_claim_waits_for_another_run_of_its_job(self, store: LeaseStore) -> None:
        """LIFE-4: what it waited for is seen, though it was not committed when it began."""
        asker, other = store.instance(), store.instance()
        asker.register()
        old, young = store.run(ago_ms=1), store.run()
        with self.under_way(other) as commit:
            other.win(old)
            reply = self.after_waiting(
                commit, partial(asker.ask, asker.intend(young, on_overlap=OnOverlap.DEFER))
            )
        assert reply.verdict is Verdict.DEFERRED

    def test_claim_waits_for_a_renewal_of_its_run(self, store: LeaseStore) -> None:
        """LIFE-3, RENEW-2."""
        asker, holder, run = store.instance(), store.instance(), store.run()
        lease = holder.win(run)
        store.lapse()
        with self.under_way(holder) as commit:
            assert holder.renew(lease) is RenewReply.RENEWED
            reply = self.after_waiting(commit, partial(asker.ask, run))
        assert reply.verdict is Verdict.HELD

    def test_claim_waits_for_a_renewal_of_a_run_beside_it(self, store: LeaseStore) -> None:
        """OVERLAP-3, RENEW-2: of one that lapsed too long ago to stand in its way."""
        asker, holder, old = store.instance(), store.instance(), store.run(ago_ms=1)
        lease = holder.win(old)
        store.advance(store.lease_ms + store.takeover_ms + 1)
        claim = asker.intend(store.run(), on_overlap=OnOverlap.DEFER)
        with self.under_way(holder) as commit:
            assert holder.renew(lease) is RenewReply.RENEWED
            reply = self.after_waiting(commit, partial(asker.ask, claim))
        assert reply.verdict is Verdict.DEFERRED

    def test_renewal_waits_for_a_takeover_of_its_run(self, store: LeaseStore) -> None:
        """RENEW-1."""
        holder, standby, run = store.instance(), store.instance(), store.run()
        lease = holder.win(run)
        store.lapse()
        with self.under_way(standby) as commit:
            standby.win(run)
            reply = self.after_waiting(commit, partial(holder.renew, lease))
        assert reply is RenewReply.LOST

    def test_settlement_waits_for_a_takeover_of_its_run(self, store: LeaseStore) -> None:
        """SETTLE-1."""
        holder, standby, run = store.instance(), store.instance(), store.run()
        lease = holder.win(run)
        store.lapse()
        with self.under_way(standby) as commit:
            standby.win(run)
            reply = self.after_waiting(commit, partial(holder.finish, lease))
        assert not reply.accepted

    @contextmanager
    def under_way(self, instance: LeaseInstance) -> Iterator[Callable[[], None]]:
        """Let an instance's calls take effect only when they are committed by a call."""
        with closing(connected(self._url)) as connection:

            def ask(statement: str, values: tuple[object, ...], _deadline: object) -> list[Any]:
                cursor = connection.cursor()
                cursor.execute(statement, values)
                rows: list[Any] = cursor.fetchall()
                return rows

            backend = instance.backend
            assert isinstance(backend, PostgresLease)
            for lane in backend._lanes.all():
                lane.connection = mock.Mock(is_sound=True, ask=ask)
            yield connection.commit

    def after_waiting(self, commit: Callable[[], None], call: Callable[[], R]) -> R:
        """Commit what is under way as soon as a call waits for it; return its reply."""
        waiting = (
            "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND query LIKE %s"
        )

        def commit_then() -> None:
            like = f"%{self._schema}%"
            assert eventually(lambda: execute(self._url, waiting, like) == [(1,)], 10.0)
            commit()

        contenders: list[Callable[[], Any]] = [commit_then, call]
        reply: R = race(contenders)[1]
        return reply

    def run_case(self, case: str, *values: object) -> None:
        """Run a case; it raises if the backend fails it."""
        with self.opened(self.connect) as store:
            getattr(self, f"test_{case}")(store, *values)


@pytest.fixture(scope="module")
def url(services: Services) -> str:
    return had(services.postgres).url


@pytest.fixture
def schema(url: str) -> Iterator[str]:
    yield "mutant"
    execute(url, "DROP SCHEMA IF EXISTS mutant CASCADE")


def connected(url: str) -> Any:  # noqa: ANN401
    import psycopg2

    return psycopg2.connect(url)


def _fails(judge: Judge, case: str, values: tuple[object, ...]) -> Optional[BaseException]:
    try:
        judge.run_case(case, *values)
    except (AssertionError, pytest.fail.Exception) as error:
        return error
    return None


@contextmanager
def _planted(fault: Fault) -> Iterator[None]:
    sound = _postgres_schema.sql_of

    def with_the_fault(name: str) -> str:
        return fault.planted(sound(name)) if name == fault.file else sound(name)

    with mock.patch.object(_postgres_schema, "sql_of", with_the_fault):
        yield


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_fault_in_the_sql_fails_its_case(fault: Fault, url: str, schema: str) -> None:
    with _planted(fault):
        assert _fails(Judge(url, schema), fault.case, fault.values)


def _differs(url: str, schema: str) -> bool:
    """Tell whether a store answers otherwise than the reference, or keeps other spans."""

    def connect(clock: ManualClock, _store: str) -> LeaseBackend:
        backend = PostgresLease(url, schema=schema)
        backend._now_ms = clock.now_ms
        return backend

    store = Store(connect, lambda _backend, space: spans_in_postgres(url, schema, space))
    for seed in range(15):
        clock = ManualClock()
        with closing(Both(clock, store, look_every=1_000)) as both:
            pruner = Pruner(random.Random(seed), clock, both)
            try:
                for _ in range(150):
                    pruner.step()
            except AssertionError:
                return True
    return False


@pytest.mark.timeout(90)
@pytest.mark.parametrize("fault", FAULTS_IN_SPANS, ids=str)
def test_fault_in_the_spans_of_what_was_pruned_is_found(
    fault: Fault, url: str, schema: str
) -> None:
    with _planted(fault):
        assert _differs(url, schema)


@pytest.mark.parametrize(
    ("case", "values"),
    sorted({(fault.case, fault.values) for fault in FAULTS if fault.file == "claim_v1"}, key=str),
)
def test_sql_without_a_fault_passes_the_case(
    case: str, values: tuple[object, ...], url: str
) -> None:
    assert _fails(Judge(url, "no_mutant"), case, values) is None
