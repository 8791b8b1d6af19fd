"""Each fault planted in Redis' Lua fails the case that is named beside it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Callable, NamedTuple, Optional
from unittest import mock

import pytest

from leasecron_sync.backends import _redis_scripts
from leasecron_sync.backends._redis_scripts import keys_of, script_of
from leasecron_sync.backends.base import LeaseBackend
from leasecron_sync.backends.redis import RedisLease
from leasecron_sync.model import OnOverlap, RunState
from leasecron_sync.testing.clock import ManualClock
from leasecron_sync.testing.conformance import LeaseConformance
from leasecron_sync.testing.conformance._store import FINISHED
from tests.model.both import Both, Store, spans_in_redis
from tests.model.wild import Pruner
from tests.services.fixtures import had
from tests.services.redis import execute
from tests.services.services import Services

SKIP = OnOverlap.SKIP


class Fault(NamedTuple):
    """A text of Lua, what it is replaced by, and the case that must notice it."""

    file: str
    text: str
    instead: str
    case: str
    values: tuple[object, ...] = ()

    def planted(self, text: str) -> str:
        """Return the text of the file with the fault in it."""
        assert self.text in text
        return text.replace(self.text, self.instead)

    def __str__(self) -> str:
        return f"{self.file}: {self.case}"


FAULTS = (
    # -- claim ------------------------------------------------------------------------------------
    Fault(
        "claim",
        "if record.decision_id == c.decision_id then -- line 1",
        "if false then",
        "same_decision_is_granted_again",
    ),
    Fault(
        "claim",
        "if record.decision_id == c.decision_id then -- line 1",
        "if record.holder == c.holder then",
        "second_decision_of_the_holder_is_held_too",
    ),
    Fault(
        "claim",
        "return granted(record, left_ms, false)",
        "return granted(record, record.lease_ms, false)",
        "repeated_grant_tells_the_time_left",
    ),
    Fault(
        "common",
        "return record.state == 'running' and record.until_ms > now",
        "return record.state == 'running' and record.until_ms >= now",
        "lease_is_live_before_its_end_and_lapsed_from_its_end_on",
    ),
    Fault(
        "claim",
        "failures >= c.max_attempts",
        "failures > c.max_attempts",
        "last_lost_runner_fails_the_run",
    ),
    Fault(
        "claim",
        "record.until_ms > c.takeover_ms then\n    return failed(record, c, 'abandoned', fa",
        "record.until_ms >= c.takeover_ms then\n    return failed(record, c, 'abandoned', fa",
        "takeover_is_granted_to_the_end_of_its_window",
    ),
    Fault(
        "claim",
        "record.failures = failures\n  return grant(",
        "return grant(",
        "expired_lease_is_taken_over_with_next_attempt",
    ),
    Fault(
        "common",
        "(left <= 0 or left > MAX_RETRY_DELAY_MS)",
        "left <= 0",
        "wait_longer_than_any_retry_delay_is_over",
    ),
    Fault(
        "claim",
        "if was_pruned(job, c.ms) or",
        "if",
        "nothing_at_or_before_what_was_pruned_is_granted_anew",
    ),
    Fault(
        "claim",
        "if newest <= now then",
        "if true then",
        "what_was_pruned_ahead_of_the_clock_silences_nothing_but_itself",
    ),
    Fault(
        "claim",
        "for place = 1, #job.spans, 2 do",
        "for place = 1, 0 do",
        "what_was_pruned_ahead_of_the_clock_silences_nothing_but_itself",
    ),
    Fault("common", "> 2 * record.lease_ms", "< 0", "lease_too_long_for_the_clock_is_shortened"),
    Fault(
        "claim",
        "or other.ms < c.ms and is_due(other)",
        "",
        "older_due_run_goes_before_a_younger_one",
        (SKIP,),
    ),
    Fault(
        "claim",
        "return other.state == 'running' and not is_stale(other) or",
        "return is_live(other) or",
        "no_run_is_granted_beside_a_lapsed_one",
        (SKIP,),
    ),
    Fault(
        "claim",
        "function(other) return other.state == 'running' end",
        "is_live",
        "retry_behind_a_running_run_is_deferred",
    ),
    Fault(
        "claim",
        "set_failed(other, c.decision_id, 'abandoned', other.failures + 1)",
        "",
        "run_that_lapsed_too_long_ago_is_abandoned_by_the_next_grant",
    ),
    Fault(
        "claim",
        "math.max(job.last_token + 1, now)",
        "job.last_token + 1",
        "token_is_never_below_the_time_of_the_store",
    ),
    Fault(
        "claim",
        "math.max(job.last_token + 1, now)",
        "math.max(record.token + 1, now)",
        "token_rises_over_runs_and_attempts",
    ),
    Fault(
        "claim",
        "settled(record, record.decision_id == c.decision_id)",
        "settled(record, true)",
        "only_the_deciding_claim_is_fresh",
    ),
    Fault(
        "common",
        "if format > FORMAT then",
        "if false then",
        "one_unreadable_record_does_not_spoil_the_batch",
    ),
    # -- renew and settle -------------------------------------------------------------------------
    Fault("renew", "and record.token == tonumber(ARGV[place + 2])", "", "old_token_cannot_renew"),
    Fault(
        "renew",
        "and record.state == 'running'",
        "",
        "settled_attempt_cannot_be_renewed",
        (FINISHED,),
    ),
    Fault(
        "renew",
        "record.state == 'running'",
        "is_live(record)",
        "renewal_revives_a_lapsed_lease_that_nobody_took_over",
    ),
    Fault(
        "renew",
        "record.until_ms = now + lease_ms",
        "record.until_ms = math.max(record.until_ms, now + lease_ms)",
        "renewal_after_the_clock_was_set_back_is_shorter",
    ),
    Fault(
        "settle",
        "if record and record.token == tonumber(ARGV[place + 2]) then",
        "if record then",
        "old_token_cannot_settle",
        (FINISHED,),
    ),
    Fault(
        "settle",
        "accepted = record.decision_id == ''",
        "accepted = true",
        "what_others_settled_cannot_be_settled_by_the_holder",
        (FINISHED, "abandoned"),
    ),
    Fault(
        "settle",
        "record.hand_overs > FREE_HAND_OVERS and 1 or 0, 0",
        "1, 0",
        "hand_over_is_claimable_at_once_and_not_counted",
    ),
    Fault(
        "settle",
        "if record.state == 'running' then",
        "if not is_settled(record) then",
        "first_settlement_under_a_token_stands",
    ),
    # -- the rest ---------------------------------------------------------------------------------
    Fault(
        "pending",
        "if first and not live then",
        "if first then",
        "nothing_is_listed_behind_a_live_lease",
    ),
    Fault(
        "pending",
        "local first = lapsed or due",
        "local first = due or lapsed",
        "lapsed_run_goes_before_a_waiting_one",
    ),
    Fault(
        "pending",
        "if is_free then add(record) else due",
        "if true then add(record) else due",
        "at_most_one_run_of_a_no_overlap_job_is_listed",
    ),
    Fault("pending", "and record.holder == asker", "", "pending_names_the_next_expiry"),
    Fault(
        "states",
        "member(job, tonumber(ARGV[place + 2]))",
        "member(job, tonumber(ARGV[place + 2]) - 1)",
        "looking_back_costs_one_round_trip",
    ),
    Fault(
        "register",
        "FORMER_SCHEDULE_MS = 600000",
        "FORMER_SCHEDULE_MS = 6000000",
        "schedule_that_returns_later_is_a_new_one",
    ),
    Fault(
        "register",
        "math.abs(now - tonumber(displaced))",
        "(now - tonumber(displaced))",
        "schedule_displaced_while_the_clock_was_far_ahead_is_a_new_one",
    ),
    Fault(
        "register",
        "if not newest or newest <= now then",
        "if true then",
        "what_was_pruned_ahead_of_the_clock_silences_nothing_but_itself",
    ),
    Fault(
        "register",
        "FORMER_SCHEDULES = 8",
        "FORMER_SCHEDULES = 7",
        "last_eight_definitions_are_remembered",
    ),
    Fault(
        "register",
        "job.owed_from_ms = now\n    put_job",
        "put_job",
        "owed_since_date_is_never_in_the_future",
    ),
    Fault(
        "prune",
        "math.max(job.pruned_to_ms or newest, newest)",
        "newest",
        "what_was_pruned_is_not_forgotten_when_an_older_run_is_pruned",
    ),
    Fault(
        "prune",
        "record.decision_id = 'store'",
        "record.decision_id = ''",
        "pruning_abandons_what_nobody_can_claim",
        (RunState.RUNNING,),
    ),
    Fault(
        "prune",
        "text(before_ms), 'LIMIT', 0",
        "text(now + 1), 'LIMIT', 0",
        "prune_deletes_what_is_older_than_the_history",
    ),
)


# What is pruned is compared with the reference: no case looks at the spans themselves.
FAULTS_IN_SPANS = (
    Fault("prune", "PRUNED_SPANS = 8", "PRUNED_SPANS = 9", "more of them"),
    Fault("prune", "hole < smallest", "hole <= smallest", "of equal holes the last one is closed"),
    Fault("prune", "hole < smallest", "hole > smallest", "the first hole is closed"),
    Fault("prune", "math.floor(older_than_ms / 2)", "older_than_ms", "wider holes are closed"),
    Fault("prune", "last[2] <= math.floor", "last[2] < math.floor", "one of just that width"),
    Fault("prune", "math.max(last[2], span[2])", "span[2]", "a time inside ends a span"),
    Fault("prune", "for _, ms in ipairs(times) do", "for _, ms in ipairs({}) do", "none"),
    Fault(
        "claim", "ms <= tonumber(job.spans[place + 1])", "ms <= tonumber(job.spans[place])", "one"
    ),
    Fault(
        "register",
        "math.min(tonumber(job.spans[place + 1]), now)",
        "tonumber(job.spans[place + 1])",
        "future",
    ),
    Fault(
        "register",
        "if tonumber(job.spans[place]) <= now",
        "if tonumber(job.spans[place + 1]) <= now",
        "begun",
    ),
)


class Judge(LeaseConformance):
    """The lease suite over scripts that have a fault."""

    def __init__(self, url: str) -> None:
        clock = self.clock = ManualClock()

        class OnManualClock(RedisLease):
            _now_ms = staticmethod(clock.now_ms)

        self.connect: Callable[[], LeaseBackend] = lambda: OnManualClock(url)
        self._url = url

    def advance(self, ms: int) -> None:
        self.clock.advance(ms)

    def set_back(self, ms: int) -> None:
        self.clock.step(-ms)

    def plant_unreadable(self, namespace: str, run: object) -> None:
        del run
        runs = keys_of(namespace)[3]
        for member, packed in execute(self._url, "HGETALL", runs).items():
            if b":damaged:" in member:
                newer = packed.replace(b'["1"', b'["99"', 1)
                execute(self._url, "HSET", runs, member, newer)

    def run_case(self, case: str, *values: object) -> None:
        """Run a case; it raises if the backend fails it."""
        with self.opened(self.connect) as store:
            getattr(self, f"test_{case}")(store, *values)


@pytest.fixture(scope="module")
def url(services: Services) -> str:
    return had(services.redis).url


def _fails(judge: Judge, case: str, values: tuple[object, ...]) -> Optional[BaseException]:
    try:
        judge.run_case(case, *values)
    except (AssertionError, pytest.fail.Exception) as error:
        return error
    return None


@contextmanager
def _planted(fault: Fault) -> Iterator[None]:
    sound = _redis_scripts._text_of

    def with_the_fault(name: str) -> str:
        return fault.planted(sound(name)) if name == f"redis/{fault.file}" else sound(name)

    script_of.cache_clear()
    try:
        with mock.patch.object(_redis_scripts, "_text_of", with_the_fault):
            yield
    finally:
        script_of.cache_clear()


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_fault_in_the_lua_fails_its_case(fault: Fault, url: str) -> None:
    with _planted(fault):
        assert _fails(Judge(url), fault.case, fault.values)


def _differs(url: str) -> bool:
    """Tell whether a store answers otherwise than the reference, or keeps other spans."""

    def connect(clock: ManualClock, _store: str) -> LeaseBackend:
        backend = RedisLease(url)
        backend._now_ms = clock.now_ms
        return backend

    store = Store(connect, lambda _backend, space: spans_in_redis(url, space))
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
def test_fault_in_the_spans_of_what_was_pruned_is_found(fault: Fault, url: str) -> None:
    with _planted(fault):
        assert _differs(url)


@pytest.mark.parametrize(
    ("case", "values"), sorted({(fault.case, fault.values) for fault in FAULTS}, key=str)
)
def test_lua_without_a_fault_passes_the_case(
    case: str, values: tuple[object, ...], url: str
) -> None:
    assert _fails(Judge(url), case, values) is None
