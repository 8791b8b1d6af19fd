"""Cases in which eight instances want the same thing at the same moment."""

from __future__ import annotations

from functools import partial
from typing import Callable

from leasecron_sync.clock import SystemClock
from leasecron_sync.errors import StoreError, StoreUnavailable
from leasecron_sync.model import (
    JobStanding,
    LeaseReply,
    RenewReply,
    RunKey,
    RunState,
    SettleReply,
    Verdict,
)
from leasecron_sync.testing.conformance._race import race
from leasecron_sync.testing.conformance._store import (
    ALLOW,
    DEFER,
    SKIP,
    LeaseInstance,
    LeaseStore,
)

ROUNDS = 8
SILENCE_LIMIT_MS = 3_000  # for a time-out of 100; less than the defaults of client libraries


class ContentionCases:
    """Every change is one step, on connections of their own too."""

    def test_eight_threads_one_grant(self, store: LeaseStore) -> None:
        """LIFE-1, LIFE-3: the first claim, and each takeover."""
        instances = [store.instance() for _ in range(8)]
        for number in range(ROUNDS):
            run = store.run(f"job {number}")
            instances[0].register(run.job)  # so that they meet at the run, not where jobs are made
            for attempt in (1, 2):
                replies = race([partial(instance.ask, run) for instance in instances])
                granted = [reply.lease for reply in replies if reply.lease is not None]
                assert [lease.attempt for lease in granted] == [attempt]
                verdicts = sorted(reply.verdict.value for reply in replies)
                assert verdicts == ["granted", *["held"] * 7]
                store.lapse()

    def test_six_contenders_for_six_runs_of_one_job_never_get_two(self, store: LeaseStore) -> None:
        """LIFE-1, LIFE-4: where overlap is forbidden, skipped or deferred alike."""
        instances = [store.instance() for _ in range(6)]
        for number in range(ROUNDS):
            job = f"job {number}"
            runs = [store.run(job, ago_ms=age) for age in range(6)]
            wish = (SKIP, DEFER)[number % 2]
            instances[0].register(job)
            replies = race(
                [
                    partial(instance.ask, instance.intend(run, on_overlap=wish))
                    for instance, run in zip(instances, runs)
                ]
            )
            refused = Verdict.SETTLED if wish is SKIP else Verdict.DEFERRED
            verdicts = sorted(reply.verdict.value for reply in replies)
            assert verdicts == sorted([Verdict.GRANTED.value, *[refused.value] * 5])
            states = [record.state for record in store.observer.history(job, 10)]
            assert states.count(RunState.RUNNING) == 1

    def test_eight_threads_draw_eight_tokens(self, store: LeaseStore) -> None:
        """TOKEN-1, TOKEN-2: of one job, for runs that may overlap."""
        instances = [store.instance() for _ in range(8)]
        for number in range(ROUNDS):
            runs = [store.run(f"job {number}", ago_ms=age) for age in range(8)]
            instances[0].register(f"job {number}")
            leases = race(
                [
                    partial(instance.win, instance.intend(run, on_overlap=ALLOW))
                    for instance, run in zip(instances, runs)
                ]
            )
            assert len({lease.ref.token for lease in leases}) == 8
            last = instances[0].intend(store.run(f"job {number}", ago_ms=8), on_overlap=ALLOW)
            newest = max(lease.ref.token for lease in leases)
            assert instances[0].win(last).ref.token > newest

    def test_same_decision_on_eight_connections_is_one_grant(self, store: LeaseStore) -> None:
        """CALL-3: one intention, repeated before the first reply came."""
        instances = [store.instance() for _ in range(8)]
        for number in range(ROUNDS):
            claim = instances[0].intend(store.run(f"job {number}"))
            instances[0].register(claim.key.job)
            leases = race([partial(instance.win, claim) for instance in instances])
            assert len({lease.ref for lease in leases}) == 1
            assert {lease.attempt for lease in leases} == {1}

    def test_finish_or_takeover_but_never_both(self, store: LeaseStore) -> None:
        """LIFE-1, SETTLE-1, SETTLE-2: of a lapsed lease."""
        holder, standby = store.instance(), store.instance()
        for number in range(ROUNDS):
            run = store.run(f"job {number}")
            lease = holder.win(run)
            store.lapse()
            contenders: list[Callable[[], object]] = [
                partial(holder.finish, lease),
                partial(standby.ask, run),
            ]
            settled, claimed = race(contenders)
            assert isinstance(settled, SettleReply)
            assert isinstance(claimed, LeaseReply)
            taken = claimed.verdict is Verdict.GRANTED
            assert settled.accepted is not taken
            assert store.record(run).state is (RunState.RUNNING if taken else RunState.FINISHED)

    def test_renewal_or_takeover_but_never_both(self, store: LeaseStore) -> None:
        """LIFE-1, RENEW-1, RENEW-2: of a lapsed lease."""
        holder, standby = store.instance(), store.instance()
        for number in range(ROUNDS):
            run = store.run(f"job {number}")
            lease = holder.win(run)
            store.lapse()
            contenders: list[Callable[[], object]] = [
                partial(holder.renew, lease),
                partial(standby.ask, run),
            ]
            renewed, claimed = race(contenders)
            assert isinstance(claimed, LeaseReply)
            taken = claimed.verdict is Verdict.GRANTED
            assert (renewed is RenewReply.LOST) is taken
            assert claimed.verdict in (Verdict.GRANTED, Verdict.HELD)

    def test_two_different_settlements_one_effect(self, store: LeaseStore) -> None:
        """LIFE-1, CALL-3: whichever comes first stands."""
        instances = [store.instance() for _ in range(4)]
        for number in range(ROUNDS):
            run = store.run(f"job {number}")
            lease = instances[0].win(run)
            replies = race(
                [
                    partial(instances[0].finish, lease),
                    partial(instances[1].fail, lease),
                    partial(instances[2].hand_over, lease),
                    partial(instances[3].fail, lease),
                ]
            )
            record = store.record(run)
            assert {reply.state for reply in replies} == {record.state}
            assert all(reply.accepted for reply in replies)
            assert record.failures + record.hand_overs <= 1

    def test_eight_threads_register_one_job_once(self, store: LeaseStore) -> None:
        """REGISTER-1, REGISTER-5."""
        instances = [store.instance() for _ in range(8)]
        for number in range(ROUNDS):
            register = [partial(_register, instance, f"job {number}") for instance in instances]
            standings = race(register)
            assert len({standing.owed_from_ms for standing in standings}) == 1
            assert len({standing.store_id for standing in standings}) == 1

    def test_batches_in_any_order_are_all_answered(self, store: LeaseStore) -> None:
        """LIFE-1, LIFE-3: records are locked in one order, whatever order the batch has."""
        instances = [store.instance() for _ in range(8)]
        now_ms = store.now_ms()
        runs = [RunKey(f"job {number}", now_ms) for number in range(12)]
        orders = [runs[turn:] + runs[:turn] for turn in range(4)]
        orders += [order[::-1] for order in orders]
        replies = race(
            [partial(instance.ask_all, list(order)) for instance, order in zip(instances, orders)]
        )
        granted = [
            reply.lease.ref.key for batch in replies for reply in batch if reply.lease is not None
        ]
        assert sorted(granted) == sorted(runs)

    def test_call_on_a_silent_store_ends_within_its_time_out(self, store: LeaseStore) -> None:
        """CALL-1, CALL-2: it raises, and a refused one has had no effect."""
        holder = store.instance()
        asker = store.instance(call_timeout_ms=100)
        lease = holder.win(store.run("held"))
        claim = asker.intend(store.run())
        calls: dict[str, Callable[[], object]] = {
            "claim": partial(asker.ask, claim),
            "renew": partial(asker.renew, lease),
            "settle": partial(asker.finish, lease),
            "register": asker.register,
            "prune": partial(asker.backend.prune, 0, 100),
        }
        errors = {}
        with store.suite.locked():
            for name, call in calls.items():
                [(error, took_ms)] = race([partial(_error_of, call)])  # race() has a limit
                assert isinstance(error, StoreError), name
                assert took_ms < SILENCE_LIMIT_MS, name
                errors[name] = error
        if isinstance(errors["settle"], StoreUnavailable):
            assert store.state(lease.ref.key) == (RunState.RUNNING, "")
        if isinstance(errors["claim"], StoreUnavailable):
            assert claim.key not in store.records()
        assert asker.win(claim).attempt == 1


def _register(instance: LeaseInstance, job: str) -> JobStanding:
    return instance.register(job)


def _error_of(call: Callable[[], object]) -> tuple[object, int]:
    clock = SystemClock()
    began_ms = clock.steady_ms()
    try:
        result = call()
    except Exception as error:  # noqa: BLE001 - the case looks at what it is
        result = error
    return result, clock.steady_ms() - began_ms
