"""The model of ``transition`` notices planted faults."""

from __future__ import annotations

import random
from unittest import mock

import pytest

from leasecron_sync.protocol.transition import transition
from tests.model.histories import random_operation
from tests.model.watch import WatchfulPlayer
from tests.mutants import faulty_transition as faulty

HISTORIES = 60
LENGTH = 600


def survey(decide: faulty.Transition) -> None:
    """Play histories until one of them breaks a rule."""
    for seed in range(HISTORIES):
        dice = random.Random(f"mutant {seed}")
        player = WatchfulPlayer(decide)
        for _ in range(LENGTH):
            player.one(random_operation(dice))
        player.settle_everything()


FAULTS = (
    faulty.forgets_decisions,
    faulty.grants_what_is_settled,
    faulty.repeats_the_full_lease,
    faulty.allows_one_attempt_too_many,
    faulty.does_not_count_the_lost_attempt,
    faulty.ignores_what_was_pruned,
    faulty.never_shortens_a_lease,
    faulty.ignores_overlap,
    faulty.ignores_lapsed_runs,
    faulty.retries_beside_a_lapsed_run,
    faulty.leaves_stale_runs_running,
    faulty.draws_tokens_per_run,
    faulty.counts_tokens_from_one,
    faulty.renews_without_a_token,
    faulty.settles_without_a_token,
    faulty.settles_twice,
    faulty.waits_however_long,
)


PENDING_FAULTS = (
    faulty.misses_the_end_of_a_lease,
    faulty.lists_no_overlong_lease,
    faulty.lists_a_waiting_run_before_a_lapsed_one,
)

PRUNE_FAULTS = (
    faulty.abandons_live_runs,
    faulty.abandons_without_a_mark,
)


def test_true_functions_break_no_rule() -> None:
    survey(transition)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_fault_of_a_decision_is_found(fault: faulty.Transition) -> None:
    with pytest.raises(AssertionError):
        survey(fault)


@pytest.mark.parametrize("fault", PENDING_FAULTS, ids=lambda fault: fault.__name__)
def test_fault_of_pending_is_found(fault: object) -> None:
    with mock.patch("tests.model.plain.claimable", fault), pytest.raises(AssertionError):
        survey(transition)


@pytest.mark.parametrize("fault", PRUNE_FAULTS, ids=lambda fault: fault.__name__)
def test_fault_of_pruning_is_found(fault: object) -> None:
    with mock.patch("tests.model.plain.abandon", fault), pytest.raises(AssertionError):
        survey(transition)
