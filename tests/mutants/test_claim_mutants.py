"""Each claim backend with one planted fault fails the case of the suite that is named beside it."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Optional

import pytest

from leasecron_sync.backends.base import BackendSettings
from leasecron_sync.clock import SystemClock
from leasecron_sync.errors import StoreError
from leasecron_sync.model import ClaimReply, OnceClaim, RunKey, Verdict
from leasecron_sync.testing.memory import MemoryClaim
from tests.mutants.judge import ClaimJudge


class GrantsOnError(MemoryClaim):
    def claim(self, claims: Sequence[OnceClaim]) -> Sequence[ClaimReply]:
        try:
            return super().claim(claims)
        except StoreError:
            return [ClaimReply(Verdict.GRANTED) for _ in claims]


class ForgetsDecisions(MemoryClaim):
    def _claim_one(self, namespace: str, item: OnceClaim, now_ms: int) -> ClaimReply:
        known = (namespace, item.key) in self._store.claims
        reply = super()._claim_one(namespace, item, now_ms)
        return ClaimReply(Verdict.TAKEN) if known else reply


class KnowsTheHolderInsteadOfTheDecision(MemoryClaim):
    def _claim_one(self, namespace: str, item: OnceClaim, now_ms: int) -> ClaimReply:
        return super()._claim_one(namespace, replace(item, decision_id=item.holder), now_ms)


class CutsTheWindowByASecond(MemoryClaim):
    def _claim_one(self, namespace: str, item: OnceClaim, now_ms: int) -> ClaimReply:
        shorter = replace(item, window_ms=item.window_ms - 1_000)
        return super()._claim_one(namespace, shorter, now_ms)


class HasNoWindow(MemoryClaim):
    def _claim_one(self, namespace: str, item: OnceClaim, now_ms: int) -> ClaimReply:
        return super()._claim_one(namespace, replace(item, window_ms=10**12), now_ms)


class ForgetsAfterHalfAWindow(MemoryClaim):
    def _claim_one(self, namespace: str, item: OnceClaim, now_ms: int) -> ClaimReply:
        if now_ms - item.due_ms > item.window_ms // 2:
            self._store.claims.pop((namespace, item.key), None)
        return super()._claim_one(namespace, item, now_ms)


class ForgetsAfterOneWindow(MemoryClaim):
    def _claim_one(self, namespace: str, item: OnceClaim, now_ms: int) -> ClaimReply:
        reply = super()._claim_one(namespace, item, now_ms)
        kept = {
            key: (decision, until_ms)
            for key, (decision, until_ms) in self._store.claims.items()
            if until_ms - item.window_ms // 2 > now_ms or key == (namespace, item.key)
        }
        self._store.claims = kept
        return reply


class ForgetsWhenTheWinnerLeaves(MemoryClaim):
    def close(self) -> None:
        self._store.claims.clear()
        super().close()


class GrantsEarly(MemoryClaim):
    def _claim_one(self, namespace: str, item: OnceClaim, now_ms: int) -> ClaimReply:
        return super()._claim_one(namespace, item, max(now_ms, item.due_ms))


class TakesEarlyClaims(MemoryClaim):
    """Notes a claim that came too early, and then nobody else can have the run."""

    def _claim_one(self, namespace: str, item: OnceClaim, now_ms: int) -> ClaimReply:
        reply = super()._claim_one(namespace, item, now_ms)
        if reply.verdict is Verdict.EARLY:
            self._store.claims.setdefault((namespace, item.key), (item.decision_id, 10**15))
        return reply


class ChecksThenSets(MemoryClaim):
    def claim(self, claims: Sequence[OnceClaim]) -> Sequence[ClaimReply]:
        namespace = self._opened().namespace
        taken = [(namespace, item.key) in self._store.claims for item in claims]
        threading.Event().wait(0.01)
        for item in claims:
            self._store.claims[namespace, item.key] = (item.decision_id, 10**15)
        return [ClaimReply(Verdict.TAKEN if was else Verdict.GRANTED) for was in taken]


class ReadsTheHostClock(MemoryClaim):
    def _claim_one(self, namespace: str, item: OnceClaim, now_ms: int) -> ClaimReply:
        del now_ms
        return super()._claim_one(namespace, item, SystemClock().now_ms())


class AnswersInAnOrderOfItsOwn(MemoryClaim):
    def claim(self, claims: Sequence[OnceClaim]) -> Sequence[ClaimReply]:
        return super().claim(sorted(claims, key=lambda item: item.key))


class AnswersTheFirstHundred(MemoryClaim):
    def claim(self, claims: Sequence[OnceClaim]) -> Sequence[ClaimReply]:
        rest = [ClaimReply(Verdict.TAKEN) for _ in claims[100:]]
        return [*super().claim(claims[:100]), *rest]


class FoldsCase(MemoryClaim):
    def _claim_one(self, namespace: str, item: OnceClaim, now_ms: int) -> ClaimReply:
        key = RunKey(item.key.job.lower(), item.key.scheduled_ms)
        return super()._claim_one(namespace, replace(item, key=key), now_ms)


class JoinsNamesByAColon(MemoryClaim):
    def _claim_one(self, namespace: str, item: OnceClaim, now_ms: int) -> ClaimReply:
        key = RunKey(f"{namespace}:{item.key.job}", item.key.scheduled_ms)
        return super()._claim_one("", replace(item, key=key), now_ms)


class SharesTheNamespace(MemoryClaim):
    def open(self, settings: BackendSettings) -> None:
        super().open(replace(settings, namespace="everybody"))


class CountsInSeconds(MemoryClaim):
    """Keeps one claim for each second of a job."""

    def _claim_one(self, namespace: str, item: OnceClaim, now_ms: int) -> ClaimReply:
        key = RunKey(item.key.job, item.key.scheduled_ms // 1_000)
        return super()._claim_one(namespace, replace(item, key=key), now_ms)


FAULTS = (
    (GrantsOnError, "closed_backend_answers_nothing"),
    (ForgetsDecisions, "same_decision_is_granted_again"),
    (KnowsTheHolderInsteadOfTheDecision, "second_decision_is_taken"),
    (CutsTheWindowByASecond, "run_is_granted_to_the_end_of_its_window"),
    (HasNoWindow, "key_beyond_window_is_too_old"),
    (ForgetsAfterHalfAWindow, "claim_is_remembered_for_the_window"),
    (ForgetsAfterOneWindow, "claim_is_remembered_for_twice_its_window"),
    (ForgetsWhenTheWinnerLeaves, "claim_outlives_the_run_and_its_runner"),
    (GrantsEarly, "early_claim_waits"),
    (TakesEarlyClaims, "early_claim_waits"),
    (ChecksThenSets, "eight_threads_one_grant"),
    (ChecksThenSets, "eight_threads_with_batches_one_grant_each"),
    (ReadsTheHostClock, "store_clock_rules"),
    (AnswersInAnOrderOfItsOwn, "replies_keep_the_order"),
    (AnswersTheFirstHundred, "many_runs_are_claimed_in_one_call"),
    (FoldsCase, "odd_names_survive"),
    (JoinsNamesByAColon, "jobs_and_namespaces_are_kept_apart"),
    (SharesTheNamespace, "keys_of_other_jobs_and_namespaces_are_independent"),
    (CountsInSeconds, "rising_keys_of_a_job_are_all_granted"),
)


def _fails(backend_class: type[MemoryClaim], case: str) -> Optional[BaseException]:
    try:
        ClaimJudge(backend_class).run_case(case)
    except (AssertionError, pytest.fail.Exception) as error:
        return error
    return None


@pytest.mark.parametrize(
    ("faulty", "case"), FAULTS, ids=lambda item: getattr(item, "__name__", item)
)
def test_faulty_backend_fails_its_case(faulty: type[MemoryClaim], case: str) -> None:
    assert _fails(faulty, case)


@pytest.mark.parametrize("case", sorted({case for _, case in FAULTS}))
def test_sound_backend_passes_the_case(case: str) -> None:
    assert _fails(MemoryClaim, case) is None
