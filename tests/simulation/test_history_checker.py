"""The checker of histories, over histories that a seed makes up: it accuses faults, and no others.

Each history is recorded on the store's side, where it is exact, and on the instances' side, where
replies get lost. ``LEASECRON_SYNC_LONG=1`` in the environment plays many more.
"""

from __future__ import annotations

import logging
import os
import random
from collections.abc import Iterator
from typing import Any, Callable, NamedTuple, Optional

import pytest

from leasecron_sync.backends import _local
from leasecron_sync.model import RunRecord
from leasecron_sync.protocol.transition import Change, Command, JobView, Renew, transition
from leasecron_sync.testing import ManualClock, Terms, check
from leasecron_sync.testing.history import faults
from tests.mutants import faulty_transition as faulty
from tests.unit.histories import BEGIN_MS, LEASE_MS, Player, Stage, fails, hands_over

LONG = bool(os.environ.get("LEASECRON_SYNC_LONG"))
SEEDS = 2_000 if LONG else 60
PLANT_SEEDS = 60
"""Histories in which a planted fault must be found."""

EXACT, LOSSY = Terms(exact=True), Terms()


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def play(seed: int, family: Optional[str] = None) -> Stage:
    """Three instances, and whatever may go wrong with messages, processes and clocks."""
    rng = random.Random(seed)
    family = rng.choice(("lease", "lease", "claim")) if family is None else family
    stage = Stage(family, ManualClock(BEGIN_MS, 77))
    options: dict[str, Any] = {}
    if family == "lease":
        options = {"overlap": rng.choice(("skip", "allow")), "max_attempts": rng.choice((1, 3))}
    players = [stage.join(seconds=20, **options) for _ in range(3)]
    stopped: set[int] = set()
    for _ in range(60):
        happen(stage, rng.choice(players), rng)
        place = rng.randrange(6)
        stopped ^= {place} if rng.random() < 0.3 else set()
        # One of them may stand still for a while, or its handlers may not get to work.
        for player in players:
            player.works = players.index(player) not in stopped
        at_work = [player for player in players if players.index(player) + 3 not in stopped]
        stage.advance(rng.randint(100, 9_000), *(at_work or players))
    return stage


def happen(stage: Stage, player: Player, rng: random.Random) -> None:
    faulty = player.backend.faults
    what = rng.choice(("reply", "request", "down", "kill", "step", "play", "idle", "idle"))
    method = rng.choice(("claim", "renew", "settle", "register"))
    if what == "reply":
        faulty.lose_reply(method, rng.randint(1, 3))
    elif what == "request":
        faulty.lose_request(method, rng.randint(1, 3))
    elif what == "down":
        faulty.down = not faulty.down
    elif what == "kill":
        player.manual.kill()
        player.manual.start()
    elif what == "step":  # ahead by less than the margin of trust
        stage.clock.step(rng.choice((-700_000, -2 * LEASE_MS, -8_000, -300, 300, 1_000)))
    elif what == "play" and stage.family == "lease":
        player.plays = [rng.choice((fails, hands_over, stage.takes(rng.randint(1, 20_000))))]


@pytest.mark.timeout(0 if LONG else 120)
def test_a_correct_history_is_not_accused_whatever_went_wrong() -> None:
    grants = 0
    for seed in range(SEEDS):
        stage = play(seed)
        for entries, terms in ((stage.inside, EXACT), (stage.outside, LOSSY)):
            report = check(entries, terms=terms)
            assert report.faults == (), (seed, terms.exact, report.faults[0].message)
            grants += report.totals.grants
    assert grants > 10 * SEEDS


# -- does it see it? -------------------------------------------------------------------------------


def renews_without_writing(
    record: Optional[RunRecord], job: JobView, command: Command, now_ms: int
) -> Change:
    change = transition(record, job, command, now_ms)
    return change._replace(runs=()) if isinstance(command, Renew) else change


class Plant(NamedTuple):
    """A fault of the store, and by what it is known on either side."""

    planted: Callable[..., object]
    exact: str
    lossy: str


# On the instances' side a lost reply may have settled what stands in the way.
PLANTS = [
    Plant(renews_without_writing, faults.LIVE_TWICE, faults.LIVE_TWICE),
    Plant(faulty.grants_what_is_settled, faults.GRANTED_SETTLED, faults.GRANTED_SETTLED),
    Plant(faulty.repeats_the_full_lease, faults.GRANTED_LONGER, ""),
    Plant(faulty.ignores_overlap, faults.JOB_LIVE_TWICE, faults.JOB_LIVE_TWICE),
    Plant(faulty.ignores_lapsed_runs, faults.GRANTED_BESIDE, ""),
    Plant(faulty.is_fresh_for_everybody, faults.SETTLED_TWICE, faults.SETTLED_TWICE),
    Plant(faulty.draws_tokens_per_run, faults.TOKEN_NOT_RISING, faults.TOKEN_NOT_RISING),
    Plant(faulty.renews_without_a_token, faults.RENEWED_AFTER_END, faults.RENEWED_AFTER_END),
    Plant(faulty.settles_without_a_token, faults.SETTLED_BY_OLD, faults.SETTLED_BY_OLD),
    Plant(faulty.accepts_what_others_settled, faults.SETTLED_TWICE, faults.SETTLED_TWICE),
]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.planted.__name__)
def test_a_planted_fault_is_found_on_both_sides(
    plant: Plant, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_local, "transition", plant.planted)
    wanted = {"exact": plant.exact, "lossy": plant.lossy}
    for seed in range(PLANT_SEEDS):
        stage = play(seed, "lease")
        for side, entries, terms in (
            ("exact", stage.inside, EXACT),
            ("lossy", stage.outside, LOSSY),
        ):
            found = {fault.kind for fault in check(entries, terms=terms).faults}
            if wanted.get(side, "") in ("", *found):
                wanted.pop(side, None)
        if not wanted:
            return
    pytest.fail(f"not found in {PLANT_SEEDS} histories: {wanted}")
