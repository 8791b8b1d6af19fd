"""The checker where a store has lost what it had said: is an owed run settled, or lost?

A run is lost that was owed and has no settled record in the end. The word of a store that has lost
that record since is none. But what was settled is not called lost for want of a record alone: it
may have been pruned.
"""

from __future__ import annotations

import pytest

from leasecron_sync.backends import memory
from leasecron_sync.model import LeaseRef, RunKey
from leasecron_sync.testing import Entry, RecordingLease, RunRow, Terms, check
from leasecron_sync.testing.history import faults
from tests.unit import histories
from tests.unit.histories import (
    BEGIN_MS,
    FINISHED,
    MINUTE,
    Stage,
    claim_of_another,
    faults_of,
    terms_of,
)

ONE_MS = BEGIN_MS + 30_000
ONE = RunKey("job", ONE_MS)
"""The first run of the plays."""

both_sides = pytest.mark.parametrize("side", ["exact", "interval"])


def backend_of(stage: Stage) -> RecordingLease:
    backend = stage.players[0].manual._backend
    assert isinstance(backend, RecordingLease)
    return backend


def settled_and_told() -> Stage:
    """Three runs finish, and another instance is told that the first one did."""
    stage = histories.plain()
    stage.clock.advance(1_000)
    claim_of_another(stage, backend_of(stage), ONE_MS)
    assert (stage.inside[-1].verdict, stage.inside[-1].state) == ("settled", "finished")
    stage.clock.advance(1_000)
    return stage


def lose_all(stage: Stage, *, told: bool = True) -> None:
    """Empty the store; without being told it is as after a failover that lost the newest writes."""
    del memory._named[stage.name]
    if told:
        stage.log.emptied()
        stage.exact_log.emptied()
    for player in stage.players:
        player.manual.kill()
    stage.players.clear()
    stage.clock.advance(1_000)
    stage.join()
    stage.advance(1)  # it registers
    if not told:
        for entries in (stage.inside, stage.outside):
            entries[:] = [entry._replace(store_id="") for entry in entries]


def grant_again(stage: Stage) -> None:
    stage.clock.advance(1_000)
    claim_of_another(stage, backend_of(stage), ONE_MS)
    assert (stage.inside[-1].verdict, stage.inside[-1].attempt) == ("granted", 1)


def settle_again(stage: Stage) -> None:
    """Let whoever was granted it last execute it."""
    token = stage.inside[-1].token
    stage.clock.advance(1_000)
    for log in (stage.exact_log, stage.log):
        log.note(
            "started", instance="another", job="job", scheduled_ms=ONE_MS, token=token, attempt=1
        )
    stage.clock.advance(1_000)
    assert backend_of(stage).settle(LeaseRef(ONE, token), FINISHED).accepted


def terms(side: str, stage: Stage) -> Terms:
    return terms_of(side, stage, owed=(ONE,))


def row_of(entries: list[Entry], given: Terms) -> RunRow:
    return [row for row in check(entries, terms=given).runs if row.scheduled_ms == ONE_MS][-1]


def without_the_first_instance(entries: list[Entry]) -> list[Entry]:
    """Leave out what it wrote of the first run, as when its file is lost with its host."""
    first = next(entry.instance for entry in entries if entry.verdict == "granted")
    return [entry for entry in entries if entry.instance != first or entry.scheduled_ms != ONE_MS]


# -- a store that says that it was emptied ---------------------------------------------------------


@both_sides
def test_what_was_settled_before_the_store_was_emptied_is_not_settled_any_more(side: str) -> None:
    """Whether it is owed all the same is the caller's word; nothing is, by the library."""
    stage = settled_and_told()
    assert faults_of(stage.entries(side), terms(side, stage)) == []
    lose_all(stage)
    entries = stage.entries(side)
    assert faults_of(entries, terms_of(side, stage, until_ms=BEGIN_MS + 4 * MINUTE)) == []
    [fault] = check(entries, terms=terms(side, stage)).faults
    assert (fault.kind, fault.scheduled_ms) == (faults.LOST, ONE_MS)
    assert fault.message.endswith("the store has lost it, and it was not settled again")
    assert [entry.what for entry in fault.entries] == ["settled"]


@both_sides
def test_what_is_granted_again_by_an_emptied_store_has_to_be_settled_again(side: str) -> None:
    stage = settled_and_told()
    lose_all(stage)
    grant_again(stage)
    assert faults_of(stage.entries(side), terms(side, stage)) == [faults.LOST]
    assert row_of(stage.entries(side), terms(side, stage)).state == "unsettled"
    settle_again(stage)
    assert faults_of(stage.entries(side), terms(side, stage)) == []
    assert row_of(stage.entries(side), terms(side, stage)).state == "finished"


@pytest.mark.parametrize("by", ["this claim", "another"])
def test_an_answer_from_before_the_loss_that_comes_after_it_proves_nothing(by: str) -> None:
    """The claim was sent before the store was emptied, and answered by the store of before."""
    stage = settled_and_told()
    lose_all(stage)
    entries = stage.entries("interval")
    [told] = [entry for entry in entries if entry.verdict == "settled"]
    [emptied] = [entry for entry in entries if entry.what == "emptied"]
    late_ms = emptied.at_ms + 200
    assert told.steady_ms is not None
    assert emptied.steady_ms is not None
    late = told._replace(
        fresh=by == "this claim",
        state="failed",
        reason="runner lost",
        at_ms=late_ms,
        took_ms=late_ms - told.sent_ms,
        steady_ms=emptied.steady_ms + 200,
    )
    entries.remove(told)
    place = entries.index(emptied)
    entries.insert(place + 1, late)
    report = check(entries, terms=terms("interval", stage))
    assert (report.faults, report.totals.undecided) == ((), 1)
    stage.outside.clear()
    stage.log.records(backend_of(stage).history(None, 100))
    report = check([*entries, *stage.outside], terms=terms("interval", stage))
    assert [fault.kind for fault in report.faults] == [faults.LOST]
    # Sent after the loss, it is the word of the store of now.
    sent = late._replace(sent_ms=late_ms - 1, took_ms=1)
    entries[place + 1] = sent
    assert faults_of(entries, terms("interval", stage)) == []
    assert row_of(entries, terms("interval", stage)).state == "failed"


def test_a_grant_from_before_the_loss_that_comes_after_it_is_none_of_the_store_of_now() -> None:
    stage = histories.plain()
    lose_all(stage)
    grant_again(stage)
    settle_again(stage)
    entries = stage.entries("interval")
    first, _again = (x for x in entries if x.verdict == "granted" and x.key == ONE)
    [emptied] = [entry for entry in entries if entry.what == "emptied"]
    assert first.steady_ms is not None
    assert emptied.steady_ms is not None
    late_ms = emptied.at_ms + 200
    late = first._replace(
        at_ms=late_ms, took_ms=late_ms - first.sent_ms, steady_ms=emptied.steady_ms + 200
    )
    entries = [x for x in entries if x.token != first.token]
    entries.insert(entries.index(emptied) + 1, late)
    assert faults_of(entries, terms("interval", stage)) == []
    report = check(entries, terms=terms("interval", stage))
    rows = [row for row in report.runs if row.scheduled_ms == ONE_MS]
    assert [(row.state, len(row.attempts)) for row in rows] == [("", 1), ("finished", 1)]


# -- a store that lost its newest writes, and says nothing of it -----------------------------------


@both_sides
def test_a_run_that_was_settled_and_is_granted_again_has_to_be_settled_again(side: str) -> None:
    """That it was granted again is a fault by itself, since nobody said that the store lost it."""
    stage = settled_and_told()
    lose_all(stage, told=False)
    grant_again(stage)
    assert faults_of(stage.entries(side), terms(side, stage)) == [faults.GRANTED_TWICE, faults.LOST]
    assert row_of(stage.entries(side), terms(side, stage)).state == "unsettled"
    late = terms_of(side, stage, until_ms=ONE_MS + 1)
    assert faults_of(stage.entries(side), late) == [faults.GRANTED_TWICE, faults.LEFT_UNSETTLED]
    settle_again(stage)
    assert faults.LOST not in faults_of(stage.entries(side), terms(side, stage))
    assert row_of(stage.entries(side), terms(side, stage)).state == "finished"


@both_sides
def test_what_somebody_was_told_to_be_settled_is_not_granted_any_more(side: str) -> None:
    """Nobody else knows of its end: without this the history would be one without a fault."""
    stage = settled_and_told()
    lose_all(stage, told=False)
    grant_again(stage)
    entries, given = without_the_first_instance(stage.entries(side)), terms(side, stage)
    report = check(entries, terms=given)
    assert [fault.kind for fault in report.faults] == [faults.GRANTED_SETTLED, faults.LOST]
    assert [entry.verdict for entry in report.faults[0].entries] == ["settled", "granted"]
    assert row_of(entries, given).state == "unsettled"
    settle_again(stage)
    entries = without_the_first_instance(stage.entries(side))
    assert faults_of(entries, given) == [faults.GRANTED_SETTLED]
    assert row_of(entries, given).state == "finished"


def test_a_grant_that_may_be_older_than_what_was_told_is_no_fault() -> None:
    """Its answer was long on its way: it is the grant whose end somebody was told of."""
    stage = settled_and_told()
    lose_all(stage, told=False)
    grant_again(stage)
    entries = without_the_first_instance(stage.entries("interval"))
    [told] = [entry for entry in entries if entry.verdict == "settled"]
    [grant] = [x for x in entries if x.verdict == "granted" and x.scheduled_ms == ONE_MS]
    sent_ms = told.sent_ms - 500
    late = grant._replace(sent_ms=sent_ms, took_ms=grant.at_ms - sent_ms)
    entries[entries.index(grant)] = late
    assert faults_of(entries, terms("interval", stage)) == []
    assert row_of(entries, terms("interval", stage)).state == "finished"


# -- the records that are read in the end ----------------------------------------------------------


def read_in_the_end(stage: Stage, side: str, after_ms: int, state: str = "") -> list[Entry]:
    """Return a history with the records of its end; the first one's has another state, or none."""
    stage.clock.advance(after_ms)
    before = stage.entries(side)
    records = stage.players[0].manual.history()
    stage.outside.clear()
    stage.log.records([record for record in records if state or record.key != ONE])
    changed = [
        x._replace(state=state) if (x.what, x.scheduled_ms) == ("record", ONE_MS) else x
        for x in stage.outside
    ]
    return [*before, *changed]


@both_sides
@pytest.mark.parametrize("state", ["running", "waiting"])
def test_a_record_of_the_end_that_is_not_settled_outdoes_what_was_told_before(
    state: str, side: str
) -> None:
    """A failover kept the grant and lost the end, and nobody has taken the run over."""
    stage = settled_and_told()
    given = terms(side, stage)
    entries = read_in_the_end(stage, side, MINUTE, state)
    assert faults_of(entries, given) == [faults.LOST]
    assert row_of(entries, given).state == "unsettled"


@both_sides
def test_a_record_that_may_have_been_read_before_the_end_outdoes_nothing(side: str) -> None:
    stage = settled_and_told()
    settled = [x for x in stage.inside if x.what == "settled"][-1]
    last = settled.key
    given = terms_of(side, stage, owed=(last,))
    stage.clock.advance(1)
    before = stage.entries(side)
    stage.outside.clear()
    stage.clock.step(settled.at_ms + 9_000 - stage.clock.now_ms())
    stage.log.records(stage.players[0].manual.history())
    read = [
        x._replace(state="running") if x.what == "record" and x.key == last else x
        for x in stage.outside
    ]
    assert faults_of([*before, *read], given) == []


@both_sides
def test_a_settled_run_without_a_record_in_the_end_is_settled(side: str) -> None:
    """Records are pruned; nothing tells one that was from one that the store has lost."""
    stage = settled_and_told()
    given = terms(side, stage)
    entries = read_in_the_end(stage, side, MINUTE)
    assert ("record", ONE_MS) not in {(entry.what, entry.scheduled_ms) for entry in entries}
    assert faults_of(entries, given) == []
    assert row_of(entries, given).state == "finished"
    unheard = [entry for entry in entries if entry.scheduled_ms != ONE_MS]
    assert faults_of(unheard, given) == [faults.LOST]
