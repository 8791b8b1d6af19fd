"""A store and a player that look at everything, and the rules that must hold after every step."""

from __future__ import annotations

from typing import Optional

from leasecron_sync.model import (
    LeaseClaim,
    LeaseRef,
    LeaseReply,
    Outcome,
    Pruned,
    RenewReply,
    RunKey,
    RunRecord,
    RunState,
    Settlement,
    SettleReply,
    Verdict,
)
from leasecron_sync.protocol.transition import Command, Renew, Reply, Settle, is_live, transition
from leasecron_sync.testing.clock import ManualClock
from tests.model.histories import (
    JOBS,
    LEASE_MS,
    Knowledge,
    Operation,
    Player,
)
from tests.model.plain import PlainStore, Transition

STRICT = frozenset(job.name for job in JOBS if not job.overlap)
MOST_ATTEMPTS = {job.name: job.max_attempts for job in JOBS}


class WatchedStore(PlainStore):
    """Checks each command against the rules as it is executed."""

    def __init__(self, clock: ManualClock, decide: Transition) -> None:
        super().__init__(clock.now_ms, decide)
        self.clock = clock
        self.tokens: dict[str, list[int]] = {}
        self.decisions: dict[str, LeaseRef] = {}
        self.effects: set[LeaseRef] = set()
        self.ever_settled: set[RunKey] = set()

    def _execute(self, key: RunKey, command: Command) -> Reply:
        before = dict(self.runs)
        reply = super()._execute(key, command)
        record, after = before.get(key), self.runs.get(key)
        if isinstance(reply, LeaseReply):
            assert isinstance(command, LeaseClaim)
            self._check_claim(record, command, reply, after)
        elif isinstance(reply, RenewReply):
            assert isinstance(command, Renew)
            if reply is RenewReply.RENEWED:  # RENEW-1, RENEW-4
                assert record is not None
                assert record.state is RunState.RUNNING
                assert record.token == command.ref.token
                assert after is not None
                assert after.until_ms == self.clock.now_ms() + LEASE_MS  # RENEW-5
            else:
                assert after == record
        else:
            assert isinstance(command, Settle)
            self._check_settle(record, command, reply, after)
        self.check(before, claimed=isinstance(command, LeaseClaim), key=key)
        return reply

    def _check_claim(
        self,
        record: Optional[RunRecord],
        claim: LeaseClaim,
        reply: LeaseReply,
        after: Optional[RunRecord],
    ) -> None:
        now_ms, key = self.clock.now_ms(), claim.key
        if record is not None and record.state.settled:
            assert reply.verdict is Verdict.SETTLED  # CLAIM-2
        if record is not None and is_live(record, now_ms):
            granted = self.decisions.get(claim.decision_id)
            mine = granted is not None and granted.token == record.token
            assert reply.verdict is (Verdict.GRANTED if mine else Verdict.HELD)  # CLAIM-1, LIFE-3
        if reply.verdict is not Verdict.GRANTED:
            return
        lease = reply.lease
        assert lease is not None
        assert key not in self.ever_settled  # LIFE-2, PRUNE-2
        assert after is not None
        assert (after.token, after.attempt) == (lease.ref.token, lease.attempt)
        assert lease.left_ms == after.until_ms - now_ms  # CLAIM-1
        if record is not None and record.token == lease.ref.token:
            assert lease.ref == self.decisions[claim.decision_id]
            assert lease.attempt == record.attempt
            return
        self.decisions[claim.decision_id] = lease.ref
        tokens = self.tokens.setdefault(key.job, [])
        assert lease.ref.token > max(tokens, default=0)  # TOKEN-2
        assert lease.ref.token >= now_ms  # TOKEN-1
        tokens.append(lease.ref.token)
        attempts, failures, lost = 0, 0, False
        if record is not None:
            lost = record.state is RunState.RUNNING
            attempts, failures = record.attempt, record.failures + lost
        assert lease.attempt == attempts + 1  # LIFE-5
        assert (lease.failures, lease.takeover) == (failures, lost)  # ATTEMPT-1
        assert lease.failures < claim.max_attempts  # ATTEMPT-2

    def _check_settle(
        self,
        record: Optional[RunRecord],
        command: Settle,
        reply: SettleReply,
        after: Optional[RunRecord],
    ) -> None:
        if not reply.accepted:
            assert after == record
            return
        assert record is not None
        assert record.token == command.ref.token  # SETTLE-1
        assert after is not None
        assert reply.state is after.state
        if after != record:
            assert record.state is RunState.RUNNING
            assert command.ref not in self.effects  # SETTLE-4
            self.effects.add(command.ref)
        assert command.ref in self.effects  # SETTLE-3

    def prune(self, older_than_ms: int, limit: int) -> Pruned:
        before = dict(self.runs)
        result = super().prune(older_than_ms, limit)
        for key in set(before) - set(self.runs):  # PRUNE-1
            assert before[key].state.settled or key in result.abandoned
        self.ever_settled.update(result.abandoned)
        self.check(before, claimed=False, key=None)
        return result

    def check(
        self, before: dict[RunKey, RunRecord], *, claimed: bool, key: Optional[RunKey]
    ) -> None:
        """Hold what there is now against what there was."""
        running = [
            record.key.job for record in self.runs.values() if record.state is RunState.RUNNING
        ]
        for job in STRICT:
            assert running.count(job) <= 1  # LIFE-4
        for record in self.runs.values():
            old = before.get(record.key)
            if old is record:
                continue
            if old is not None:
                assert not old.state.settled  # LIFE-2
                assert record.attempt >= old.attempt
                assert record.failures >= old.failures
                assert record.hand_overs >= old.hand_overs
                assert record.token >= old.token
            if record.key != key and key is not None:  # another run of the job, line 6 (d)
                assert claimed
                assert (record.state, record.reason) == (RunState.FAILED, "abandoned")
            assert record.failures <= min(record.attempt, MOST_ATTEMPTS[record.key.job])
            assert record.state.settled is (record.settled_ms is not None)
            if record.state.settled:
                self.ever_settled.add(record.key)


class WatchfulPlayer(Player):
    """Knows until when each holder trusts its leases, by a clock that never jumps."""

    def __init__(self, decide: Transition = transition) -> None:
        clock = ManualClock()
        self.watched = WatchedStore(clock, decide)
        super().__init__(self.watched, clock)
        self._trusted_until: dict[LeaseRef, int] = {}

    def one(self, operation: Operation) -> None:
        super().one(operation)
        self._check_trust()

    def learn(self, who: Knowledge, ref: LeaseRef, left_ms: int) -> None:
        super().learn(who, ref, left_ms)
        self._trusted_until[ref] = self.clock.steady_ms() + left_ms

    def _check_trust(self) -> None:
        """No two holders trust a lease of one run, or of one job that forbids overlap."""
        now_ms = self.clock.steady_ms()
        trusted = [
            ref for who in self.instances for ref in who.leases if self._trusted_until[ref] > now_ms
        ]
        runs = [ref.key for ref in trusted]
        assert len(runs) == len(set(runs))  # LIFE-3
        jobs = [key.job for key in runs if key.job in STRICT]
        assert len(jobs) == len(set(jobs))

    def settle_everything(self) -> None:
        """Let one instance ask what is pending, as often as it is told to, and finish that.

        Nobody else does anything any more. Everything unsettled must come to its end.
        """
        survivor = Knowledge("survivor")
        jobs = [job.name for job in JOBS]
        for _ in range(1_000):
            pending = self.store.pending(jobs, 100, survivor.name)
            unsettled = [job for job in jobs if self.watched.unsettled(job)]
            assert pending.unsettled is bool(unsettled)
            if not unsettled:
                return
            for key in pending.keys:
                [reply] = self.store.claim([self.intend(survivor, key)])
                if reply.lease is not None:
                    done = self.store.settle(reply.lease.ref, Settlement(Outcome.FINISHED))
                    assert done.accepted
            if not pending.keys:
                assert pending.next_in_ms is not None  # PENDING-4: when to ask again
                assert pending.next_in_ms <= 300_000  # nothing waits for longer, CLAIM-5
                self.clock.advance(pending.next_in_ms)
        message = f"unsettled in the end: {self.watched.runs}"
        raise AssertionError(message)
