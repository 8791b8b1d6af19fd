"""The checker of histories: it names what is wrong, and accuses no correct history."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Callable, NamedTuple, Optional

import pytest

from leasecron_sync.backends import memory
from leasecron_sync.model import LeaseRef, RunKey
from leasecron_sync.testing import Checker, Entry, Terms, check, shorten
from leasecron_sync.testing.history import FAULT_KINDS, _claims, faults
from tests.unit import histories
from tests.unit.histories import (
    BEGIN_MS,
    MINUTE,
    Stage,
    claim_of_another,
    fails,
    faults_of,
    hands_over,
    terms_of,
)

SIDES = ("exact", "interval")
BOTH = SIDES
ONE_MS = BEGIN_MS + 30_000
TWO_MS = ONE_MS + MINUTE
THREE_MS = TWO_MS + MINUTE
"""Scheduled times of the plays."""

Entries = list[Entry]
Doctor = Callable[[Entries], Entries]


# -- doctors -------------------------------------------------------------------------------------

GRANT: dict[str, Any] = {"what": "claimed", "verdict": "granted"}


def places(entries: Sequence[Entry], **fields: object) -> list[int]:
    """Return where the entries with these fields stand."""
    found = [
        place
        for place, entry in enumerate(entries)
        if all(getattr(entry, name) == value for name, value in fields.items())
    ]
    assert found, f"no entry with {fields}"
    return found


def find(entries: Sequence[Entry], nth: int = 0, **fields: object) -> Entry:
    return entries[places(entries, **fields)[nth]]


def change(entries: Entries, new: dict[str, Any], nth: int = 0, **fields: object) -> Entries:
    """Give one entry other values."""
    place = places(entries, **fields)[nth]
    return [*entries[:place], entries[place]._replace(**new), *entries[place + 1 :]]


def change_all(entries: Entries, new: dict[str, Any], **fields: object) -> Entries:
    """Give all such entries other values."""
    chosen = places(entries, **fields)
    return [
        entry._replace(**new) if place in chosen else entry for place, entry in enumerate(entries)
    ]


def earlier(entries: Entries, ms: int) -> Entries:
    """Tell the same of a time before."""
    names = ("at_ms", "sent_ms", "scheduled_ms", "due_ms", "owed_from_ms", "store_ms")
    return [
        entry._replace(
            **{name: value - ms for name in names if (value := getattr(entry, name)) is not None}
        )
        for entry in entries
    ]


def drop(entries: Entries, **fields: object) -> Entries:
    """Leave such entries out."""
    chosen = places(entries, **fields)
    return [entry for place, entry in enumerate(entries) if place not in chosen]


def drop_call(entries: Entries, nth: int = 0, **fields: object) -> Entries:
    """Leave a call out: what was sent and what was answered."""
    entry = find(entries, nth, **fields)
    return drop(entries, instance=entry.instance, call=entry.call)


def later(entries: Entries, entry: Entry, **new: Any) -> Entries:  # noqa: ANN401 - fields
    """Write an entry at the end, a second after all others."""
    at_ms = max(item.at_ms for item in entries) + 1_000
    steady_ms = entry.steady_ms
    if steady_ms is not None:
        steady_ms = max(item.steady_ms or 0 for item in entries) + 1_000
    moved = entry._replace(at_ms=at_ms, sent_ms=at_ms, steady_ms=steady_ms)
    return [*entries, moved._replace(**new)]


def again(entries: Entries, new: Optional[dict[str, Any]] = None, **fields: Any) -> Entries:  # noqa: ANN401 - fields
    """Write such an entry once more at the end."""
    return later(entries, find(entries, **fields), **(new or {}))


def started_when_overtaken(entries: Entries) -> Entries:
    """The first attempt starts only after the second one was granted."""
    start = find(entries, what="started", attempt=1)
    kept = entries[: places(entries, takeover=True)[0] + 1]
    return later(drop(kept, what="started"), start)


def without_a_word(entries: Entries) -> Entries:
    """Nobody told what became of the first run."""
    for what in ("started", "ended", "told"):
        entries = drop(entries, what=what, scheduled_ms=ONE_MS)
    return entries


class Case(NamedTuple):
    """A correct history, and one change that makes it wrong."""

    kind: str
    play: Callable[[], Stage]
    doctor: Doctor
    terms: tuple[tuple[str, object], ...] = ()
    sides: tuple[str, ...] = BOTH


LOST_TERMS = (("owed", (RunKey("job", ONE_MS), RunKey("job", TWO_MS))),)
LEFT_TERMS = (("until_ms", THREE_MS + 1),)

LEASE_CASES = [
    Case(
        faults.GRANTED_TWICE,
        histories.plain,
        lambda x: again(x, {"decision_id": "other", "token": 1 << 60}, **GRANT),
    ),
    Case(  # two runs under one token
        faults.GRANTED_TWICE,
        histories.plain,
        lambda x: change_all(x, {"token": find(x, **GRANT).token}, token=find(x, 1, **GRANT).token),
    ),
    Case(  # a decision of one instance, answered to another one as well
        faults.GRANTED_TWICE,
        histories.killed,
        lambda x: again(x, {"instance": "other"}, **GRANT),
    ),
    Case(
        faults.LIVE_TWICE,
        histories.taken_over,
        lambda x: change(x, {"lease_ms": 40_000}, -1, what="renewed"),
    ),
    Case(
        faults.JOB_LIVE_TWICE,
        histories.beside,
        lambda x: change(x, {"overlap": "skip"}, 1, **GRANT),
    ),
    Case(
        faults.GRANTED_BESIDE,
        histories.failed_then_next,
        lambda x: drop(x, what="claimed", state="failed"),
        sides=("exact",),
    ),
    Case(  # without what was sent, which might have settled the one that stood in the way
        faults.GRANTED_BESIDE,
        histories.failed_then_next,
        lambda x: drop(
            drop(x, what="claimed", state="failed"), what="claiming", scheduled_ms=ONE_MS
        ),
        sides=("interval",),
    ),
    Case(
        faults.GRANTED_EARLY,
        histories.killed,
        lambda x: change(drop(x, what="started"), {"due_ms": ONE_MS + 90_000}, **GRANT),
    ),
    Case(
        faults.GRANTED_SETTLED,
        histories.retried,
        lambda x: change(x, {"state": "failed"}, what="settled", state="waiting"),
    ),
    Case(faults.GRANTED_SETTLED, histories.plain, lambda x: again(x, **GRANT)),
    Case(
        faults.GRANTED_LONGER,
        histories.asked_again,
        lambda x: change(x, {"left_ms": 20_000}, 1, **GRANT),
        sides=("exact",),
    ),
    Case(
        faults.ATTEMPT_LEFT_OUT,
        histories.retried,
        lambda x: change_all(x, {"attempt": 3}, attempt=2),
    ),
    Case(
        faults.ATTEMPT_LEFT_OUT,
        histories.plain,
        lambda x: change_all(x, {"attempt": 2}, token=find(x, **GRANT).token, attempt=1),
    ),
    Case(
        faults.TOKEN_NOT_RISING,
        histories.plain,
        lambda x: change_all(x, {"token": 7}, token=find(x, 2, **GRANT).token),
    ),
    Case(
        faults.TWO_IN_A_BATCH,
        histories.plain,
        lambda x: change_all(x, {"call": find(x, **GRANT).call}, call=find(x, 1, **GRANT).call),
    ),
    Case(faults.RENEWED_AFTER_END, histories.long_run, lambda x: again(x, what="renewed")),
    Case(faults.RENEWED_AFTER_END, histories.taken_over, lambda x: again(x, what="renewed")),
    Case(
        faults.RENEWED_UNKNOWN,
        histories.long_run,
        lambda x: change(x, {"token": 7}, what="renewed"),
    ),
    Case(
        faults.SETTLED_BY_OLD,
        histories.paused,
        lambda x: change(x, {"verdict": "accepted"}, what="settled", verdict="refused"),
    ),
    Case(
        faults.SETTLED_TWICE,
        histories.skipped,
        lambda x: change(x, {"state": "failed"}, verdict="settled", fresh=False),
    ),
    Case(
        faults.SETTLED_TWICE,
        histories.plain,
        lambda x: again(x, {"state": "failed"}, what="settled"),
    ),
    Case(  # by the store, and then by its holder
        faults.SETTLED_TWICE,
        histories.failed_then_next,
        lambda x: again(
            x, {"what": "settled", "verdict": "accepted", "state": "finished"}, what="renewed"
        ),
    ),
    Case(
        faults.SETTLED_LIVE,
        histories.failed_then_next,
        lambda x: change(x, {"lease_ms": 90_000}, -1, what="renewed"),
    ),
    Case(
        faults.SETTLED_UNKNOWN,
        histories.paused,
        lambda x: change(x, {"verdict": "accepted", "token": 7}, what="settled", verdict="refused"),
    ),
    Case(
        faults.STARTED_UNKNOWN,
        histories.killed,
        lambda x: drop(drop_call(x, **GRANT), what="renewed"),
    ),
    Case(
        faults.STARTED_WITHOUT_LEASE,
        histories.killed,
        lambda x: change(x, {"lease_ms": 300}, -1, what="renewed"),
    ),
    Case(faults.STARTED_WITHOUT_LEASE, histories.taken_over, started_when_overtaken),
    Case(
        faults.STARTED_EARLY,
        histories.taken_over,
        lambda x: change(x, {"due_ms": ONE_MS + 2 * MINUTE}, takeover=True),
    ),
    Case(faults.STARTED_TWICE, histories.killed, lambda x: again(x, what="started")),
    Case(faults.STARTED_AFTER_FINISH, histories.plain, lambda x: again(x, what="started")),
    Case(
        faults.FINISHED_UNSTARTED,
        histories.plain,
        lambda x: drop(x, what="started", scheduled_ms=TWO_MS),
    ),
    Case(faults.LOST, histories.plain, lambda x: drop(x, scheduled_ms=TWO_MS), LOST_TERMS),
    Case(
        faults.LOST,
        histories.beside,
        lambda x: drop_call(x, what="settled", scheduled_ms=ONE_MS),
        LOST_TERMS,
    ),
    Case(
        faults.LEFT_UNSETTLED,
        histories.plain,
        lambda x: drop_call(x, 2, what="settled"),
        LEFT_TERMS,
    ),
]

CLAIM_CASES = [
    Case(faults.WON_TWICE, histories.won, lambda x: again(x, {"decision_id": "other"}, **GRANT)),
    Case(faults.WON_TWICE, histories.won, lambda x: again(x, {"instance": "other"}, **GRANT)),
    Case(
        faults.GRANTED_EARLY,
        histories.won,
        lambda x: change(drop(x, what="started", scheduled_ms=ONE_MS), {"due_ms": TWO_MS}, **GRANT),
    ),
    Case(faults.STARTED_UNKNOWN, histories.won, lambda x: drop_call(x, **GRANT)),
    Case(faults.STARTED_TWICE, histories.won, lambda x: again(x, what="started")),
    Case(faults.NOT_TOLD, histories.won, without_a_word),
]
CASES = LEASE_CASES + CLAIM_CASES


def cases() -> list[Any]:
    return [
        pytest.param(case, side, id=f"{case.kind}-{case.play.__name__}-{side}")
        for case in CASES
        for side in case.sides
    ]


@pytest.mark.parametrize(("case", "side"), cases())
def test_a_doctored_history_shows_its_fault_and_no_other(case: Case, side: str) -> None:
    stage = case.play()
    terms = terms_of(side, stage, **dict(case.terms))
    assert faults_of(stage.entries(side), terms) == []
    assert faults_of(case.doctor(stage.entries(side)), terms) == [case.kind]


def test_every_kind_of_fault_has_its_doctored_history() -> None:
    assert {case.kind for case in CASES} == set(FAULT_KINDS)


def test_what_is_won_early_and_started_early_is_both() -> None:
    stage = histories.won()
    entries = change(stage.entries("exact"), {"due_ms": TWO_MS}, **GRANT)
    found = faults_of(entries, terms_of("exact", stage))
    assert found == [faults.GRANTED_EARLY, faults.STARTED_EARLY]


PLAYS = sorted({case.play for case in CASES}, key=lambda play: play.__name__)


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("play", PLAYS, ids=lambda play: play.__name__)
def test_a_history_that_begins_or_ends_anywhere_is_not_accused(
    play: Callable[[], Stage], side: str
) -> None:
    entries = play().entries(side)
    for place in range(len(entries)):
        assert faults_of(entries[place:], Terms(exact=side == "exact")) == []
        assert faults_of(entries[:place], Terms(exact=side == "exact")) == []


# -- counter-examples ----------------------------------------------------------------------------


@pytest.mark.parametrize(("case", "side"), cases())
def test_a_counter_example_is_minimal(case: Case, side: str) -> None:
    stage = case.play()
    terms = terms_of(side, stage, **dict(case.terms))
    entries = case.doctor(stage.entries(side))
    [fault] = check(entries, terms=terms).faults[:1]
    short = shorten(entries, fault, terms=terms)

    def shows(these: Sequence[Entry]) -> bool:
        return any(
            (found.kind, found.scheduled_ms, found.entries[-1:])
            == (fault.kind, fault.scheduled_ms, fault.entries[-1:])
            for found in check(these, terms=terms).faults
        )

    assert shows(short)
    assert len(short) <= 3 or case.kind == faults.NOT_TOLD  # that takes its time
    assert set(short) <= set(entries)
    for place in range(len(short)):
        assert not shows([*short[:place], *short[place + 1 :]])


def test_what_a_history_does_not_show_cannot_be_shortened() -> None:
    stage = histories.plain()
    entries = again(stage.entries("exact"), what="started")
    terms = terms_of("exact", stage)
    [fault] = check(entries, terms=terms).faults
    with pytest.raises(ValueError, match="does not show the fault"):
        shorten(stage.entries("exact"), fault, terms=terms)


def test_a_counter_example_may_begin_later_than_its_history() -> None:
    """By itself the start would be one of a run from before the history."""
    entries = drop_call(histories.killed().entries("exact"), **GRANT)
    entries = drop(entries, what="renewed")
    [fault] = check(entries, terms=Terms(exact=True)).faults
    assert shorten(entries, fault, terms=Terms(exact=True)) == (fault.entries[-1],)


def test_a_fault_that_needs_another_run_keeps_entries_of_both() -> None:
    stage = histories.beside()
    entries = change(stage.entries("interval"), {"overlap": "skip"}, 1, **GRANT)
    terms = terms_of("interval", stage)
    [fault] = check(entries, terms=terms).faults
    assert {entry.scheduled_ms for entry in shorten(entries, fault, terms=terms)} == {
        ONE_MS,
        TWO_MS,
    }


# -- what excuses --------------------------------------------------------------------------------


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("lost", ["lose_request", "lose_reply"])
@pytest.mark.parametrize("method", ["claim", "renew", "settle", "register"])
def test_lost_messages_are_no_fault(method: str, lost: str, side: str) -> None:
    stage = Stage()
    player, _other = stage.join(), stage.join()
    player.plays = [fails, hands_over, stage.takes(3_000)]
    getattr(player.backend.faults, lost)(method, 2)
    stage.advance(50_000, player, work=False)
    stage.advance(3 * MINUTE)
    terms = terms_of(side, stage, until_ms=stage.clock.now_ms() - 30_000)
    assert faults_of(stage.entries(side), terms) == []
    assert check(stage.entries(side), terms=terms).totals.runs >= 3


def test_a_repeated_grant_is_no_second_one() -> None:
    stage = histories.asked_again()
    assert len(places(stage.inside, **GRANT)) == 2
    for side in SIDES:
        assert check(stage.entries(side), terms=terms_of(side, stage)).totals.grants == 1


def unseen_attempt() -> Stage:
    """Nobody learns of the first attempt: all answers are lost, and its lease lapses."""
    stage = Stage()
    first, second = stage.join(), stage.join(start=False)
    first.backend.faults.lose_reply("claim", 1)
    stage.advance(31_000, first, work=False)
    first.manual.kill()
    stage.players.remove(first)
    second.manual.start()
    stage.advance(MINUTE, second)
    return stage


def test_a_claim_without_an_answer_may_have_been_the_attempt_that_is_missing() -> None:
    stage = unseen_attempt()
    entries, terms = stage.entries("interval"), terms_of("interval", stage)
    assert find(entries, **GRANT).attempt == 2
    assert faults_of(entries, terms) == []
    without = drop_call(entries, verdict="unknown")
    assert faults_of(without, terms) == [faults.ATTEMPT_LEFT_OUT]


def test_a_claim_that_was_never_answered_may_have_been_it_too() -> None:
    stage = unseen_attempt()
    entries = drop(stage.entries("interval"), verdict="unknown")
    assert faults_of(entries, terms_of("interval", stage)) == []


def test_a_settlement_that_was_never_answered_may_have_ended_the_lease() -> None:
    """Its holder was killed when the store had decided and nothing was written yet."""
    stage = histories.retried()
    entries, terms = stage.entries("interval"), terms_of("interval", stage)
    killed = drop(entries, what="settled", attempt=0, state="waiting")
    assert faults_of(killed, terms) == []
    not_even_sent = drop(killed, what="settling", outcome="failed")
    assert faults_of(not_even_sent, terms) == [faults.LIVE_TWICE]


def overtaken_by_the_answer(verdict: str) -> list[Entry]:
    """The answer to a settlement comes after the next attempt was granted."""
    stage = histories.retried()
    entries = stage.entries("interval")
    settled = find(entries, what="settled", state="waiting")
    entries.remove(settled)
    place = places(entries, **GRANT)[1]
    granted = entries[place]
    took_ms = granted.at_ms + 5 - settled.sent_ms
    late = settled._replace(
        at_ms=granted.at_ms + 5,
        steady_ms=(granted.steady_ms or 0) + 5,
        took_ms=took_ms,
        verdict=verdict,
    )
    entries.insert(place + 1, late)
    return entries


def test_an_answer_that_comes_after_the_next_grant_explains_it() -> None:
    terms = Terms(begin_ms=BEGIN_MS)
    assert faults_of(overtaken_by_the_answer("accepted"), terms) == []
    assert faults_of(overtaken_by_the_answer("unknown"), terms) == []
    assert faults_of(overtaken_by_the_answer("refused"), terms) == [faults.LIVE_TWICE]
    assert faults_of(overtaken_by_the_answer("no effect"), terms) == [faults.LIVE_TWICE]


def test_a_grant_whose_answer_comes_after_its_successors_is_no_fault() -> None:
    """A process is stopped in its claim, and goes on when its run was finished by another."""
    entries = histories.taken_over().entries("interval")
    first = find(entries, **GRANT)
    entries = [entry for entry in entries if entry.token != first.token]
    end_ms = max(entry.at_ms for entry in entries) + 5_000
    moved = first._replace(
        at_ms=end_ms, steady_ms=(entries[-1].steady_ms or 0) + 5_000, took_ms=end_ms - first.sent_ms
    )
    assert faults_of([*entries, moved], Terms(begin_ms=BEGIN_MS)) == []


def test_an_order_that_nobody_knows_accuses_nobody() -> None:
    """What was answered within one millisecond may have been decided in any order."""
    stage = histories.plain()
    entries = stage.entries("interval")
    finish = find(entries, what="settled")
    start = find(entries, what="started")._replace(
        at_ms=finish.at_ms, sent_ms=finish.at_ms, steady_ms=finish.steady_ms
    )
    place = places(entries, what="settled")[0]
    swapped = drop(entries, what="started", scheduled_ms=ONE_MS)
    swapped.insert(place, start)
    assert faults_of(swapped, terms_of("interval", stage)) == []


def test_clocks_may_be_a_little_apart() -> None:
    stage = histories.taken_over()
    entries = drop(stage.entries("interval"), what="claiming")
    place = places(entries, takeover=True)[0]
    lapsed_ms = find(entries, -1, what="renewed").at_ms + histories.LEASE_MS
    for sooner_ms, expected in ((200, []), (201, [faults.LIVE_TWICE])):
        at_ms = lapsed_ms - sooner_ms
        entries[place] = entries[place]._replace(at_ms=at_ms, sent_ms=at_ms)
        checker = Checker(begin_ms=BEGIN_MS)
        for entry in entries[: place + 1]:
            checker.add(entry)
        assert [fault.kind for fault in checker.end()] == expected


def test_a_run_that_was_finished_before_its_next_grant_was_answered_is_no_less_a_fault() -> None:
    """Whichever was decided first: tokens tell that the grant came later."""
    entries = change(overtaken_by_the_answer("accepted"), {"state": "finished"}, state="waiting")
    assert faults_of(entries, Terms(begin_ms=BEGIN_MS))[0] == faults.GRANTED_SETTLED


def test_a_settled_run_does_not_wait_again() -> None:
    stage = histories.failed_then_next()
    waits = {"what": "settled", "verdict": "accepted", "state": "waiting"}
    for side in SIDES:
        entries = again(stage.entries(side), waits, what="renewed")
        assert faults_of(entries, terms_of(side, stage)) == [faults.SETTLED_TWICE]


def test_a_grant_that_is_answered_when_others_were_told_of_the_end_is_over() -> None:
    """Its run does not stand in the way of the next one of its job."""
    stage = histories.failed_then_next()
    entries, terms = stage.entries("interval"), terms_of("interval", stage)
    failed = find(entries, what="claimed", state="failed")
    told = change(entries, {"fresh": False}, what="claimed", state="failed")
    first = find(told, **GRANT)
    took_ms = failed.at_ms + 5 - first.sent_ms
    late = first._replace(
        at_ms=failed.at_ms + 5, steady_ms=(failed.steady_ms or 0) + 5, took_ms=took_ms
    )
    place = places(told, what="claimed", state="failed")[0]
    moved = [*told[: place + 1], late, *told[place + 1 :]]
    moved = [x for x in moved if x is not first and x.what != "renewed"]
    assert faults_of(moved, terms) == []


def test_a_claim_that_is_sent_in_the_same_millisecond_may_have_cleared_the_way() -> None:
    stage = histories.failed_then_next()
    entries, terms = stage.entries("interval"), terms_of("interval", stage)
    claiming = find(entries, what="claiming", call=find(entries, state="failed").call)
    entries = drop(entries, call=claiming.call)
    assert faults_of(entries, terms) == [faults.GRANTED_BESIDE]
    place = places(entries, **GRANT)[1]
    entries.insert(place + 1, claiming)
    assert faults_of(entries, terms) == []  # it was never answered
    unanswered = claiming._replace(what="claimed", verdict="no effect")
    assert faults_of(later(entries, unanswered), terms) == []
    too_late = later(drop(entries, what="claiming", call=claiming.call), claiming)
    assert faults_of(too_late, terms) == [faults.GRANTED_BESIDE]


def test_a_batch_is_forgotten_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long a history is, the checker keeps what it needs."""
    monkeypatch.setattr(_claims, "MANY_BATCHES", 2)
    stage = histories.plain()
    checker = Checker(exact=True)
    for entry in stage.inside:
        checker.add(entry)
    kept = checker._lease_steps["claimed"].__self__._batches  # type: ignore[attr-defined]
    assert len(kept) == 2


def on_several_hosts(entries: Entries) -> Entries:
    """Without a steady clock that they share; answers a second apart."""
    return [entry._replace(steady_ms=None) for entry in entries]


@pytest.mark.parametrize(
    "case",
    [case for case in CASES if "interval" in case.sides],
    ids=lambda case: f"{case.kind}-{case.play.__name__}",
)
def test_without_a_common_steady_clock_the_wall_clock_tells_the_order(case: Case) -> None:
    stage = case.play()
    terms = terms_of("interval", stage, **dict(case.terms))
    assert faults_of(on_several_hosts(stage.entries("interval")), terms) == []
    doctored = case.doctor(stage.entries("interval"))
    assert faults_of(on_several_hosts(doctored), terms) == [case.kind]


# -- the handler ---------------------------------------------------------------------------------


def entering(entries: Entries) -> Entries:
    """Let the start be written around the handler, before the last look at trust."""
    return change_all(entries, {"verdict": "around"}, what="started")


@pytest.mark.parametrize("side", SIDES)
def test_a_handler_that_was_not_called_in_time_did_not_start(side: str) -> None:
    stage = histories.killed()
    terms = terms_of(side, stage)
    entries = entering(change(stage.entries(side), {"lease_ms": 300}, -1, what="renewed"))
    start = entries[-1]
    assert faults_of(entries, terms) == []  # killed before it could say so
    ended = start._replace(what="ended", verdict="not started")
    assert faults_of(later(entries, ended), terms) == []
    assert check(later(entries, ended), terms=terms).totals.executions == 0
    ended = start._replace(what="ended", verdict="returned")
    assert faults_of(later(entries, ended), terms) == [faults.STARTED_WITHOUT_LEASE]


def test_a_start_in_doubt_is_told_as_soon_as_the_handler_ends() -> None:
    stage = histories.plain()
    entries = entering(again(stage.entries("exact"), what="started"))
    checker = Checker(exact=True)
    for entry in entries:
        checker.add(entry)
    assert checker.faults == []
    checker.add(entries[-1]._replace(what="ended", verdict="raised"))
    assert [fault.kind for fault in checker.faults] == [faults.STARTED_AFTER_FINISH]


# -- clocks --------------------------------------------------------------------------------------


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("step_ms", [-600_000, -20_000, -3_000, 3_000, 14_000, 90_000])
def test_a_clock_that_is_set_makes_no_fault(step_ms: int, side: str) -> None:
    """A holder is killed, the clock is set, another instance goes on."""
    stage = Stage()
    first, second = stage.join(), stage.join()
    stage.advance(50_500, first, work=False)
    first.manual.kill()
    stage.players.remove(first)
    stage.advance(2_000)
    stage.clock.step(step_ms)
    stage.advance(12 * MINUTE, second)
    terms = terms_of(side, stage)
    assert faults_of(stage.entries(side), terms) == []
    assert len(places(stage.entries(side), **GRANT)) > 2


def test_a_lease_that_was_cut_after_a_step_back_ends_sooner() -> None:
    """Whoever asks is told how long it lasts; before that the checker believes the longer one."""
    stage = Stage()
    first, second = stage.join(), stage.join()
    stage.advance(50_500, first, work=False)
    stage.clock.step(-600_000)
    backend = second.manual._backend
    token = find(stage.inside, **GRANT).token
    lease = LeaseRef(RunKey("job", ONE_MS), token)
    checker = Checker(exact=True)
    for entry in stage.inside:
        checker.add(entry)
    assert checker.is_live(lease, stage.clock.now_ms() + 500_000)
    stage.inside.clear()
    claim_of_another(stage, backend)
    for entry in stage.inside:
        checker.add(entry)
    assert find(stage.inside, verdict="held").wait_ms == histories.LEASE_MS
    assert checker.is_live(lease, stage.clock.now_ms() + histories.LEASE_MS - 1)
    assert not checker.is_live(lease, stage.clock.now_ms() + histories.LEASE_MS)


# -- the store -----------------------------------------------------------------------------------


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("told", ["entry", "id"])
def test_a_store_that_lost_its_data_may_grant_again(told: str, side: str) -> None:
    """The job begins anew; only its tokens go on rising."""
    stage = Stage()
    player = stage.join()
    stage.advance(31_000, work=False)
    [run] = player.manual.runs
    with contextlib.suppress(KeyError):
        del memory._named[stage.name]
    if told == "entry":
        stage.log.emptied()
        stage.exact_log.emptied()
    player.manual.kill()
    stage.players.clear()
    stage.join(catch_up_ms=60_000)
    stage.advance(1)  # it registers
    claim_of_another(stage, stage.players[0].manual._backend)
    run.call_handler()  # its handler goes on, and is recorded
    stage.advance(2 * MINUTE)
    entries, terms = stage.entries(side), terms_of(side, stage)
    grants = [entry for entry in entries if entry.verdict == "granted"]
    assert [entry.attempt for entry in grants[:2]] == [1, 1]
    assert grants[0].key == grants[1].key
    assert faults_of(entries, terms) == []
    unaware = change_all(entries, {"store_id": ""}, what="registered")
    unaware = [entry for entry in unaware if entry.what != "emptied"]
    assert faults.GRANTED_TWICE in faults_of(unaware, terms)
    fallen = change_all(entries, {"token": 7}, token=grants[1].token)
    assert faults.TOKEN_NOT_RISING in faults_of(fallen, terms)
    same = change_all(entries, {"token": grants[0].token}, token=grants[1].token)
    assert faults.GRANTED_TWICE in faults_of(same, terms)
    # Where the store's clock was set back as well, nothing keeps its tokens rising.
    begin = entries.index(find(entries, 1, what="registered"))
    for changed in (fallen, same):
        assert faults_of([*changed[:begin], *earlier(changed[begin:], 5 * MINUTE)], terms) == []


@pytest.mark.parametrize("side", SIDES)
def test_runs_that_were_abandoned_on_the_side_are_settled(side: str) -> None:
    """By a claim of a younger run, and by pruning."""
    stage = Stage()
    first, second = stage.join(catch_up_ms=0), stage.join(start=False, catch_up_ms=0)
    stage.advance(31_000, first, work=False)
    first.manual.kill()
    stage.players.remove(first)
    stage.clock.advance(10 * MINUTE)
    second.manual.start()
    stage.clock.advance(20_000 - stage.clock.now_ms() % MINUTE)
    backend = second.manual._backend
    claim_of_another(stage, backend, THREE_MS + 8 * MINUTE)
    entries, terms = stage.entries(side), terms_of(side, stage, until_ms=ONE_MS + 1)
    place = places(entries, what="abandoned")[0]
    assert entries[place].key == RunKey("job", ONE_MS)
    assert find(entries, -1, **GRANT).decision_id == entries[place].decision_id
    assert faults_of(entries, terms) == []
    silent = drop(entries, what="abandoned")
    assert faults.LEFT_UNSETTLED in faults_of(silent, terms)


def test_pruning_abandons_what_nobody_can_claim() -> None:
    stage = Stage()
    first, second = stage.join(), stage.join(start=False, seconds=7)
    stage.advance(31_000, first, work=False)
    first.manual.kill()
    stage.players.remove(first)
    stage.clock.advance(8 * 24 * 60 * MINUTE)
    second.scheduler.remove_job("job")
    second.manual.start()
    second.manual._backend.prune(7 * 24 * 60 * MINUTE, 10)  # type: ignore[attr-defined]
    for side in SIDES:
        entries, terms = stage.entries(side), terms_of(side, stage, until_ms=ONE_MS + 1)
        assert find(entries, what="abandoned").decision_id == ""
        assert find(entries, -1, what="pruned").number == 1
        assert faults_of(entries, terms) == []


# -- what is left --------------------------------------------------------------------------------


def owed(*scheduled_ms: int) -> dict[str, Any]:
    return {"owed": tuple(RunKey("job", ms) for ms in scheduled_ms)}


def test_owed_runs_that_nobody_heard_of_are_lost() -> None:
    stage = histories.plain()
    report = check(
        stage.inside, terms=terms_of("exact", stage, **owed(ONE_MS, ONE_MS + 1, THREE_MS))
    )
    [fault] = report.faults
    assert (fault.kind, fault.scheduled_ms, fault.entries) == (faults.LOST, ONE_MS + 1, ())
    assert report.totals.lost == 1
    assert RunKey("job", ONE_MS + 1) in {RunKey(row.job, row.scheduled_ms) for row in report.runs}


def test_what_a_lost_reply_may_have_settled_is_undecided() -> None:
    stage = histories.plain()
    entries = change(
        stage.entries("interval"), {"verdict": "unknown", "state": ""}, 2, what="settled"
    )
    checked = check(entries, terms=terms_of("interval", stage, **owed(THREE_MS)))
    assert (checked.faults, checked.totals.undecided) == ((), 1)


def test_the_stores_records_decide_what_is_settled() -> None:
    """A reply was lost; the record, read in the end, tells that it was not needed."""
    stage = histories.plain()
    records = stage.players[0].manual.history()
    entries = change(
        stage.entries("interval"), {"verdict": "unknown", "state": ""}, 2, what="settled"
    )
    stage.outside.clear()
    stage.log.records(records)
    terms = terms_of("interval", stage, **owed(ONE_MS, THREE_MS))
    assert find(stage.outside, what="read").number == 3
    assert check([*entries, *stage.outside], terms=terms).totals.undecided == 0
    assert faults_of([*entries, *stage.outside], terms) == []
    running = change(stage.outside, {"state": "running"}, what="record", scheduled_ms=THREE_MS)
    assert faults_of([*entries, *running], terms) == [faults.LOST]
    unheard = drop(stage.outside, what="record", scheduled_ms=THREE_MS)
    assert faults_of([*entries, *unheard], terms) == [faults.LOST]


def test_runs_that_are_under_way_when_a_history_ends_are_no_fault() -> None:
    stage = histories.killed()
    for side in SIDES:
        assert faults_of(stage.entries(side), terms_of(side, stage)) == []
        assert faults_of(stage.entries(side), terms_of(side, stage, until_ms=ONE_MS)) == []
        late = terms_of(side, stage, until_ms=ONE_MS + 1)
        assert faults_of(stage.entries(side), late) == [faults.LEFT_UNSETTLED]


def test_starts_that_nobody_recorded_are_not_missed() -> None:
    stage = histories.plain()
    entries = [entry for entry in stage.inside if entry.what not in ("started", "ended")]
    assert faults_of(entries, terms_of("exact", stage)) == []


# -- claim backends ------------------------------------------------------------------------------


def test_an_instance_that_is_gone_cannot_tell_what_became_of_its_run() -> None:
    stage = histories.won()
    entries = without_a_word(stage.entries("exact"))
    winner = find(entries, **GRANT).instance
    place = places(entries, instance=winner, what="claimed")[0]
    gone = [entry for entry in entries[place + 1 :] if entry.instance != winner]
    assert faults_of([*entries[: place + 1], *gone], terms_of("exact", stage)) == []


def test_an_instance_that_stood_still_for_its_whole_window_may_still_tell() -> None:
    stage = histories.won()
    entries = without_a_word(stage.entries("interval"))
    terms = terms_of("interval", stage)
    winner = find(entries, **GRANT).instance
    assert faults_of(entries, terms) == [faults.NOT_TOLD]
    wakes = places(entries, instance=winner, scheduled_ms=THREE_MS + MINUTE)[0]
    between = [x for x in entries[:wakes] if x.instance != winner or x.scheduled_ms == ONE_MS]
    assert faults_of([*between, entries[wakes]], terms) == []


def test_a_span_of_missed_runs_tells_of_each_of_them() -> None:
    stage = histories.won()
    entries = without_a_word(stage.entries("exact"))
    told = find(entries, what="told")._replace(
        event="run_missed", scheduled_ms=TWO_MS, first_ms=ONE_MS, number=2, reason="too old"
    )
    before, after = (check(x, terms=terms_of("exact", stage)) for x in (entries, [*entries, told]))
    assert before.faults
    assert after.faults == ()
    assert after.totals.missed["too old"] == before.totals.missed["too old"] + 2


def test_on_a_claim_backend_a_handler_may_not_be_called_either() -> None:
    stage = histories.won()
    entries, terms = stage.entries("exact"), terms_of("exact", stage)
    executions = check(entries, terms=terms).totals.executions
    place = places(entries, what="started")[0]
    start = entries[place]._replace(verdict="around")
    ended = start._replace(what="ended", verdict="not started")
    entries[place:place] = [start, ended]
    assert faults_of(entries, terms) == []
    assert check(entries, terms=terms).totals.executions == executions > 0


def test_a_forgotten_claim_may_be_won_and_started_again() -> None:
    stage = histories.won()
    entries = stage.entries("exact")
    stage.exact_log.emptied()
    entries.append(stage.inside[-1])
    entries = again(entries, {"decision_id": "other"}, **GRANT)
    entries = again(entries, what="started")
    assert faults_of(entries, terms_of("exact", stage)) == []
    assert faults_of(again(entries, what="started"), terms_of("exact", stage)) == [
        faults.STARTED_TWICE
    ]


# -- online --------------------------------------------------------------------------------------


ONLINE = [
    case
    for case in CASES
    if "exact" in case.sides
    and case.kind not in (*faults.ABSENCES, faults.FINISHED_UNSTARTED)  # the end shows those
]


@pytest.mark.parametrize("case", ONLINE, ids=lambda case: f"{case.kind}-{case.play.__name__}")
def test_an_exact_history_is_accused_at_the_very_entry(case: Case) -> None:
    stage = case.play()
    checker = Checker(exact=True, begin_ms=BEGIN_MS)
    for entry in case.doctor(stage.entries("exact")):
        checker.add(entry)
        if checker.faults:
            assert checker.faults[0].entries[-1] is entry
            return
    pytest.fail("not found before the end")


def test_the_trust_of_a_holder_can_be_held_against_the_history() -> None:
    stage = histories.taken_over()
    checker = Checker(exact=True)
    first, second = (find(stage.inside, nth, **GRANT) for nth in (0, 1))
    assert not checker.is_live(LeaseRef(first.key, first.token), first.at_ms)
    for entry in stage.inside:
        if entry is second:
            assert checker.is_live(LeaseRef(first.key, first.token), BEGIN_MS + 64_999)
            assert not checker.is_live(LeaseRef(first.key, first.token), BEGIN_MS + 65_000)
        checker.add(entry)
    assert not checker.is_live(LeaseRef(first.key, first.token), first.at_ms)
    assert not checker.is_live(LeaseRef(RunKey("job", 7), second.token), second.at_ms)


def test_every_kind_of_fault_is_explained_in_the_documents() -> None:
    text = (Path(__file__).parents[2] / "docs/checking-histories.rst").read_text(encoding="utf-8")
    assert not [kind for kind in FAULT_KINDS if f"``{kind}``" not in text]
