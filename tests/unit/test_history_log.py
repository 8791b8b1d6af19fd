"""The event log: entries and their lines, who writes them, and how they are read back."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Callable

import pytest

from leasecron_sync import Event, MemoryLease, Scheduler, every
from leasecron_sync.backends.base import BackendSettings, ClaimBackend, LeaseBackend
from leasecron_sync.errors import (
    HandOver,
    OutcomeUnknown,
    RunStopping,
    StoreRejected,
    StoreUnavailable,
    StoreUnsupported,
)
from leasecron_sync.events import EVENT_NAMES
from leasecron_sync.model import JobSpan, JobStamp, OnceClaim, RunKey
from leasecron_sync.run import Run
from leasecron_sync.testing import (
    Entry,
    FaultyClaim,
    FaultyLease,
    HistoryError,
    HistoryLog,
    ManualClock,
    ManualScheduler,
    MemoryClaim,
    RecordingClaim,
    RecordingLease,
    check,
    executing,
    read_history,
    recording,
)
from leasecron_sync.testing.history.entry import KINDS, merged
from leasecron_sync.testing.history.log import host_name
from leasecron_sync.testing.history.text import described, timeline
from tests.unit import histories
from tests.unit.histories import BEGIN_MS, Stage

ODD = 'tick \u2028 \ud800 \0 "{"v":1}" 日本'


def entry(at_ms: int = 5, **fields: Any) -> Entry:  # noqa: ANN401 - fields of ``Entry``
    return Entry(fields.pop("what", "pruned"), at_ms, fields.pop("sent_ms", at_ms), **fields)


def started(at_ms: int, **fields: Any) -> Entry:  # noqa: ANN401 - fields of ``Entry``
    return entry(at_ms, what="started", job="job", scheduled_ms=1, **fields)


def nowhere(_entry: Entry) -> None:
    """Take an entry."""


def write(path: Path, *lines: str) -> Path:
    path.write_text("".join(lines), encoding="utf-8")
    return path


# -- lines -----------------------------------------------------------------------------------------


def test_an_entry_is_the_same_when_it_is_read_back() -> None:
    kinds = {"fresh": True, "takeover": True}
    values: dict[str, Any] = {
        name: kinds.get(name, 7 if name.endswith("_ms") or default in (0, 1) else ODD)
        for name, default in {"what": "", "at_ms": 0, **Entry._field_defaults}.items()
    }
    full = Entry(**{**values, "sent_ms": 3, "what": "claimed"})
    for one in (full, entry(), started(-3), entry(job=ODD, reason=ODD * 100)):
        line = one.to_line()
        assert line.isascii()
        assert "\n" not in line
        assert Entry.from_line(line) == one
    assert json.loads(entry().to_line()) == {"v": 1, "what": "pruned", "at_ms": 5, "sent_ms": 5}


OF_RUN = '{"v":1,"at_ms":5,"sent_ms":5,"job":"x","scheduled_ms":1,'


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "no JSON object"),
        ("[1]", "no JSON object"),
        ("{}", "format of the entry is None"),
        ('{"v":2,"what":"pruned","at_ms":5,"sent_ms":5}', "is 2, and this version reads 1"),
        ('{"v":1,"what":"pruned","at_ms":5}', "without sent_ms"),
        ('{"v":1,"at_ms":5,"sent_ms":5}', "without what"),
        ('{"v":1,"what":"lunch","at_ms":5,"sent_ms":5}', "what is 'lunch'"),
        ('{"v":1,"what":"pruned","at_ms":"5","sent_ms":5}', "at_ms is '5'.*whole number"),
        ('{"v":1,"what":"pruned","at_ms":true,"sent_ms":5}', "at_ms is True"),
        ('{"v":1,"what":"pruned","at_ms":null,"sent_ms":5}', "at_ms is None"),
        ('{"v":1,"what":"pruned","at_ms":5,"sent_ms":5,"job":7}', "job is 7.*text"),
        ('{"v":1,"what":"pruned","at_ms":5,"sent_ms":5,"fresh":1}', "fresh is 1.*true or false"),
        ('{"v":1,"what":"pruned","at_ms":5,"sent_ms":5,"size":1}', "no field 'size'"),
        ('{"v":1,"what":"started","at_ms":5,"sent_ms":5,"job":"x"}', "without scheduled_ms"),
        ('{"v":1,"what":"started","at_ms":5,"sent_ms":5,"scheduled_ms":1}', "without job"),
        (OF_RUN + '"what":"claimed","verdict":"granted"}', "without token"),
        (OF_RUN + '"what":"claimed","verdict":"granted","window_ms":0}', "without token"),
        (OF_RUN + '"what":"renewed","verdict":"unknown"}', "without token"),
        (OF_RUN + '"what":"settling","token":0}', "without token"),
        (OF_RUN + '"what":"settled","verdict":"refused"}', "without token"),
    ],
)
def test_what_is_no_entry_is_refused_and_told(line: str, message: str) -> None:
    with pytest.raises(HistoryError, match=message):
        Entry.from_line(line)


@pytest.mark.parametrize(
    "rest",
    [
        '"what":"claimed","verdict":"granted","window_ms":1}',
        '"what":"claimed","verdict":"held"}',
        '"what":"claimed","verdict":"unknown"}',
        '"what":"started"}',
    ],
)
def test_what_may_be_no_lease_needs_no_token(rest: str) -> None:
    assert Entry.from_line(OF_RUN + rest).token == 0


def test_only_entries_of_runs_have_a_key() -> None:
    assert started(5).key == RunKey("job", 1)
    with pytest.raises(ValueError, match="about no run"):
        _ = entry().key


# -- files -----------------------------------------------------------------------------------------


def test_entries_are_read_back_from_a_file(tmp_path: Path) -> None:
    log = HistoryLog(tmp_path / "log")
    for at_ms in range(3):
        log.write(entry(at_ms))
    log.close()
    HistoryLog(tmp_path / "log").write(entry(3))  # it is appended to
    found = read_history(tmp_path / "log")
    assert found.entries == tuple(entry(at_ms) for at_ms in range(4))
    assert (found.cut, found.exact) == (0, True)


def test_an_empty_file_is_an_empty_history(tmp_path: Path) -> None:
    found = read_history(write(tmp_path / "log"), write(tmp_path / "blank", "\n\n"))
    assert (found.entries, found.cut) == ((), 0)
    assert check(found.entries).faults == ()
    assert read_history().entries == ()


def test_a_last_line_that_ends_in_its_middle_is_counted(tmp_path: Path) -> None:
    line = started(5).to_line()
    for length in range(1, len(line)):
        path = write(tmp_path / "log", started(4).to_line(), "\n", line[:length])
        found = read_history(path)
        assert (found.entries, found.cut) == ((started(4),), 1)
    whole = read_history(write(tmp_path / "log", line))  # only the end of the line is missing
    assert (whole.entries, whole.cut) == ((started(5),), 0)


def test_what_a_killed_process_left_may_stand_before_the_line_of_another(tmp_path: Path) -> None:
    line, next_line = entry(5, job=ODD).to_line(), entry(6, job=ODD).to_line()
    for length in range(1, len(line)):
        found = read_history(write(tmp_path / "log", line[:length], next_line, "\n"))
        assert (found.entries, found.cut) == ((entry(6, job=ODD),), 1)
    twice = read_history(write(tmp_path / "log", line[:9], line[:7], next_line))
    assert (len(twice.entries), twice.cut) == (1, 2)


@pytest.mark.parametrize(
    "line",
    ["lunch", '{"at_ms":5}', started(5).to_line()[:20], started(5).to_line() + "}", '{"v":3}'],
)
def test_a_line_in_the_middle_that_is_none_is_an_error(line: str, tmp_path: Path) -> None:
    path = write(tmp_path / "log", entry().to_line(), "\n", line, "\n", entry().to_line(), "\n")
    with pytest.raises(HistoryError, match=r"/log, line 2: "):
        read_history(path)


def test_a_file_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_history(tmp_path / "none")
    with pytest.raises(OSError, match="none"):
        HistoryLog(tmp_path / "none" / "log")


def test_entries_of_several_logs_are_brought_in_order_by_the_steady_clock() -> None:
    """The wall clock was set back between the second and the third."""
    one = [started(10, steady_ms=100), started(4, steady_ms=300), started(3, steady_ms=200)]
    two = [started(8, steady_ms=150), started(5, steady_ms=300)]
    found = merged([one, two])
    assert [x.steady_ms for x in found.entries] == [100, 150, 200, 300, 300]
    assert found.entries[-1] is two[1]  # equal ones stay as they were
    assert not found.exact


def test_logs_of_several_hosts_are_brought_in_order_by_the_wall_clock() -> None:
    one = [entry(1, what="instance", host="a", steady_ms=900), started(30, steady_ms=950)]
    two = [entry(2, what="instance", host="b", steady_ms=100), started(20, steady_ms=150)]
    found = merged([one, two])
    assert [x.at_ms for x in found.entries] == [1, 2, 20, 30]
    assert {x.steady_ms for x in found.entries} == {None}
    assert not found.exact


def test_one_exact_log_keeps_its_order_whatever_the_clock_said() -> None:
    entries = [started(10), started(4), started(7)]
    found = merged([entries, []])
    assert found.exact
    assert list(found.entries) == entries
    mixed = merged([entries, [started(5)]])
    assert not mixed.exact
    assert [x.at_ms for x in mixed.entries] == [4, 5, 7, 10]


# -- the log ---------------------------------------------------------------------------------------


def test_what_cannot_be_written_is_raised(tmp_path: Path) -> None:
    log = HistoryLog(tmp_path / "log")
    log.close()
    log.close()
    with pytest.raises(ValueError, match="is closed"):
        log.write(entry())
    sink = HistoryLog(nowhere)
    sink.close()
    with pytest.raises(ValueError, match="is closed"):
        sink.write(entry())
    full = HistoryLog("/dev/full")
    with pytest.raises(OSError, match="space"):
        full.write(entry())
    full.close()
    assert "/dev/full" in repr(full)


def test_a_backend_whose_log_is_full_counts_as_one_that_did_not_answer() -> None:
    """Nothing is executed that is not recorded."""
    log = HistoryLog("/dev/full", clock=ManualClock(BEGIN_MS))
    scheduler = Scheduler(RecordingLease(MemoryLease(), log))
    calls: list[int] = []
    scheduler.add_job(lambda: calls.append(1), every(seconds=60), name="job")
    manual = ManualScheduler(scheduler, ManualClock(BEGIN_MS))
    with pytest.raises(OSError, match="space"):
        manual.start()
    log.close()
    assert calls == []


def test_the_time_of_a_call_is_known_although_the_wall_clock_is_set_meanwhile() -> None:
    for step_ms in (-5_000, 0, 5_000):
        clock = ManualClock(BEGIN_MS, 100)
        log = HistoryLog(nowhere, clock=clock)
        sent = log.moment()
        clock.advance(30)
        clock.step(step_ms)
        clock.advance(10)
        found = log.entry("pruned", sent)
        assert (found.steady_ms, found.took_ms) == (140, 40)
        before, after = BEGIN_MS, BEGIN_MS + 40
        assert found.sent_ms == min(before, before + step_ms)
        assert found.at_ms == max(after, after + step_ms)


def test_an_exact_log_knows_one_instant() -> None:
    clock = ManualClock(BEGIN_MS)
    log = HistoryLog(nowhere, clock=clock, exact=True)
    sent = log.moment()
    clock.advance(30)
    assert log.entry("pruned", sent) == Entry("pruned", BEGIN_MS + 30, BEGIN_MS + 30)


def test_a_child_process_is_not_held_up_by_a_lock_of_its_parent() -> None:
    found: list[Entry] = []
    log = HistoryLog(found.append)
    log._lock.acquire()
    log._pid = -1  # as it is after a fork
    log.write(entry())
    assert found == [entry()]


# -- recorders -------------------------------------------------------------------------------------


def recorded(stage: Stage) -> list[tuple[str, str]]:
    return [(x.what, x.verdict) for x in stage.outside if x.what not in ("told", "registered")]


def test_a_run_is_written_from_its_claim_to_its_end() -> None:
    stage = histories.retried()
    assert recorded(stage)[:8] == [
        ("instance", "began"),
        ("claiming", ""),
        ("claimed", "granted"),
        ("started", ""),
        ("ended", "raised"),
        ("settling", ""),
        ("settled", "accepted"),
        ("pruned", ""),
    ]
    claimed = next(x for x in stage.outside if x.what == "claimed")
    claiming = next(x for x in stage.outside if x.what == "claiming")
    assert claimed.call == claiming.call > 0
    assert (claimed.attempt, claimed.left_ms, claimed.lease_ms) == (1, 15_000, 15_000)
    assert (claimed.state, claimed.fresh, claimed.overlap) == ("running", True, "skip")
    assert claimed.token == claimed.due_ms == claimed.scheduled_ms
    settled = [x for x in stage.outside if x.what == "settled"]
    assert [(x.state, x.outcome) for x in settled] == [
        ("waiting", "failed"),
        ("finished", "finished"),
        ("finished", "finished"),
    ]
    assert settled[0].reason == "ValueError: no luck"
    assert settled[0].wait_ms >= 1_000
    instances = {x.instance for x in stage.outside}
    assert instances == {stage.players[0].id}


def test_an_exact_log_has_no_entries_from_before_a_call() -> None:
    stage = histories.retried()
    assert {"claiming", "settling"}.isdisjoint(x.what for x in stage.inside)
    assert {x.steady_ms for x in stage.inside} == {None}
    kept = [x for x in stage.outside if x.what not in ("claiming", "settling")]
    assert [x.what for x in stage.inside] == [x.what for x in kept]


@pytest.mark.parametrize(
    ("error", "verdict"),
    [
        (StoreUnavailable("down"), "no effect"),
        (StoreRejected("no"), "no effect"),
        (StoreUnsupported("old"), "no effect"),
        (OutcomeUnknown("lost"), "unknown"),
        (KeyError("a bug"), "unknown"),
        (KeyboardInterrupt(), "unknown"),
    ],
)
@pytest.mark.parametrize("method", ["claim", "renew", "settle"])
def test_a_call_without_an_answer_is_written_and_goes_on(
    method: str, error: BaseException, verdict: str
) -> None:
    stage = Stage()
    player = stage.join()
    stage.advance(31_000, work=False)
    stage.outside.clear()
    player.backend.faults.raise_at(method, error)
    backend = player.manual._backend
    assert isinstance(backend, RecordingLease)
    lease = player.manual.runs[0]._live.lease
    assert lease is not None
    calls: dict[str, Callable[[], object]] = {
        "claim": lambda: histories.claim_of_another(stage, backend),
        "renew": lambda: backend.renew([lease.ref, lease.ref], 15_000),
        "settle": lambda: backend.settle(lease.ref, histories.FINISHED),
    }
    with pytest.raises(type(error)):
        calls[method]()
    what = {"claim": "claimed", "renew": "renewed", "settle": "settled"}[method]
    number = 2 if method == "renew" else 1
    found = [x for x in stage.outside if x.what == what]
    assert [x.verdict for x in found] == [verdict] * number
    assert found[0].key == RunKey("job", BEGIN_MS + 30_000)


class Short(MemoryClaim):
    """Answers fewer claims than it was asked."""

    def claim(self, claims: Sequence[OnceClaim]) -> Any:  # noqa: ANN401 - as the base
        return super().claim(claims)[:1]


def test_claims_that_were_left_without_an_answer_are_unknown() -> None:
    found: list[Entry] = []
    backend = RecordingClaim(Short(), HistoryLog(found.append))
    backend.open(BackendSettings("default", "me", 5_000))
    claims = [OnceClaim(RunKey("job", ms), ms, "me", f"me-{ms}", 1 << 50) for ms in (1, 2)]
    assert len(backend.claim(claims)) == 1
    assert [x.verdict for x in found if x.what == "claimed"] == ["granted", "unknown"]
    assert {x.window_ms for x in found if x.what == "claimed"} == {1 << 50}


def test_a_recorder_passes_on_what_it_does_not_write() -> None:
    found: list[Entry] = []
    inner = MemoryLease()
    backend = RecordingLease(FaultyLease(inner), HistoryLog(found.append))
    assert isinstance(backend.inner, FaultyLease)
    backend.close()  # nothing to tell of an instance that never began
    assert found == []
    backend.open(BackendSettings("default", "me", 5_000))
    assert backend.probe().version == "memory"
    assert backend.tend() is None
    [standing] = backend.register([JobStamp("job", "print")])
    assert found[-1].store_id == standing.store_id
    assert found[-1].owed_from_ms == standing.owed_from_ms
    number = len(found)
    assert backend.pending(["job"], 5).keys == ()
    assert backend.states([JobSpan("job", 0, 5)]) == [{}]
    assert backend.history(None, 5) == []
    assert [job.job for job in backend.jobs(5)] == ["job"]
    assert len(found) == number
    backend.discard()
    backend.close()
    assert len(found) == number  # in a forked child it was another instance
    assert repr(backend) == "RecordingLease(FaultyLease(MemoryLease()))"
    once = RecordingClaim(FaultyClaim(MemoryClaim()), HistoryLog(found.append))
    assert (once.max_window_ms, once.family, backend.family) == (None, "claim", "lease")
    assert isinstance(once, ClaimBackend)
    assert isinstance(backend, LeaseBackend)


def test_an_instance_is_written_when_it_begins_and_ends() -> None:
    stage = Stage()
    player = stage.join()
    name = player.id
    player.manual.stop()
    player.manual._backend.close()
    told = [(x.verdict, x.instance) for x in stage.outside if x.what == "instance"]
    assert told == [("began", name), ("ended", name)]
    assert stage.outside[0].host
    assert not stage.inside[0].host  # what is exact depends on no host


def test_a_host_without_a_number_of_its_start_has_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_arguments: object, **_more: object) -> str:
        raise FileNotFoundError

    monkeypatch.setattr(Path, "read_text", missing)
    assert host_name() == platform.node()


# -- handlers and events ---------------------------------------------------------------------------


def played(handler: Callable[[Run], object]) -> list[Entry]:
    """Return what ``recording`` writes around a handler."""
    found: list[Entry] = []
    clock = ManualClock(BEGIN_MS)
    log = HistoryLog(found.append, clock=clock)
    scheduler = Scheduler(MemoryLease(), around_run=recording(log))
    scheduler.add_job(handler, every(seconds=60), name="job")
    manual = ManualScheduler(scheduler, clock)
    manual.start()
    manual.advance(31_000)
    return found


def raises(error: BaseException) -> Callable[[Run], object]:
    def handler(_run: Run) -> None:
        raise error

    return handler


@pytest.mark.parametrize(
    ("handler", "verdict", "reason"),
    [
        (lambda _run: None, "returned", ""),
        (raises(ValueError("no")), "raised", "ValueError"),
        (raises(SystemExit(3)), "raised", "SystemExit"),
        (raises(HandOver()), "interrupted", "HandOver"),
        (raises(RunStopping()), "interrupted", "RunStopping"),
    ],
)
def test_handlers_are_written_with_their_end(
    handler: Callable[[Run], object], verdict: str, reason: str
) -> None:
    start, end = played(handler)[:2]
    assert (start.what, start.verdict, start.attempt) == ("started", "around", 1)
    assert (end.what, end.verdict, end.reason) == ("ended", verdict, reason)
    assert start.key == end.key == RunKey("job", BEGIN_MS + 30_000)
    assert start.token == end.token == BEGIN_MS + 30_000


def test_a_handler_that_is_not_called_is_written_so() -> None:
    stage = Stage()
    player = stage.join()
    scheduler = Scheduler(MemoryLease(stage.name), around_run=recording(stage.log))
    scheduler.add_job(lambda: None, every(seconds=60), name="job")
    manual = ManualScheduler(scheduler, stage.clock)
    manual.start()
    stage.players.remove(player)
    manual.advance(31_000, work=False)
    stage.clock.advance(20_000)
    manual.work()
    written = [(x.what, x.verdict) for x in stage.outside if x.what in ("started", "ended")]
    assert written == [("started", "around"), ("ended", "not started")]


def test_a_child_that_a_handler_forks_writes_no_end(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[Entry] = []
    log = HistoryLog(found.append)
    run = _run()
    with executing(log, run, instance="me"):
        monkeypatch.setattr(os, "getpid", lambda: -1)
    monkeypatch.undo()

    def forks() -> None:
        with executing(log, run):
            monkeypatch.setattr(os, "getpid", lambda: -1)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        forks()
    assert [x.what for x in found] == ["started", "started"]
    assert found[0].instance == "me"


def _run() -> Run:
    runs: list[Run] = []
    scheduler = Scheduler(MemoryClaim())
    scheduler.add_job(runs.append, every(seconds=60), name="job")
    manual = ManualScheduler(scheduler, ManualClock(BEGIN_MS))
    manual.start()
    manual.advance(31_000)
    return runs[0]


def test_a_run_without_a_token_is_written_without() -> None:
    found: list[Entry] = []
    with executing(HistoryLog(found.append), _run()):
        pass
    assert [(x.what, x.token, x.attempt) for x in found] == [("started", 0, 0), ("ended", 0, 0)]


def test_every_event_is_written() -> None:
    found: list[Entry] = []
    log = HistoryLog(found.append)
    scheduler = Scheduler(MemoryLease())
    log.listen(scheduler)
    moments = [datetime(2026, 1, day, tzinfo=timezone.utc) for day in (1, 2)]
    for name in EVENT_NAMES:
        event: Any = Event(name, "me")  # type: ignore[arg-type]
        scheduler._hub._call_listeners(event)
    missed = Event(
        "run_missed",
        "me",
        job="job",
        scheduled_time=moments[1],
        first_time=moments[0],
        count=9,
        reason="too old",
    )
    log.told(missed)
    assert [x.event for x in found] == [*EVENT_NAMES, "run_missed"]
    last = found[-1]
    assert (last.instance, last.job, last.number, last.reason) == ("me", "job", 9, "too old")
    assert last.first_ms == round(moments[0].timestamp() * 1000)
    assert last.scheduled_ms == round(moments[1].timestamp() * 1000)


# -- words -----------------------------------------------------------------------------------------


def test_every_entry_can_be_told_in_words() -> None:
    told: set[str] = set()
    for play in (histories.plain, histories.long_run, histories.paused, histories.won):
        stage = play()
        stage.log.emptied()
        if stage.family == "lease":
            stage.log.records(stage.players[0].manual.history())
        rows = timeline(stage.outside)
        assert len(rows) == len(stage.outside)
        assert rows[0].ms == "0"
        for one, row in zip(stage.outside, rows):
            told.add(one.what)
            assert row.what == described(one) != one.what
    assert told == set(KINDS) - {"abandoned"}
    assert "abandoned" in described(started(5)._replace(what="abandoned"))
    assert timeline([]) == []
    [row] = timeline([started(9, sent_ms=4)])
    assert row.ms == "0 to 5"


def test_the_words_of_an_answer_name_what_matters() -> None:
    answer = started(5, attempt=2)._replace(what="claimed", verdict="settled", state="failed")
    fresh = answer._replace(reason="runner lost", fresh=True)
    assert described(fresh) == "claim: settled, failed, runner lost, decided by this claim"
    held = answer._replace(verdict="held", state="running", wait_ms=1_500)
    assert described(held) == "claim: held, running, ask again in 1,500 ms"
    assert described(answer._replace(verdict="too_old", state="")) == "claim: too old"


def test_a_report_counts_what_happened() -> None:
    stage = histories.paused()
    report = check(stage.outside)
    totals = dataclasses.asdict(report.totals)
    assert {name: number for name, number in totals.items() if number} == {
        "entries": len(stage.outside),
        "instances": 2,
        "runs": 1,
        "grants": 2,
        "executions": 2,
        "executed_again": 1,
        "takeovers": 1,
        "fenced": 1,
        "finished": 1,
    }
    [row] = report.runs
    assert (row.job, row.scheduled_ms, row.state) == ("job", BEGIN_MS + 30_000, "finished")
    assert [(x.attempt, x.started, x.takeover, x.ending) for x in row.attempts] == [
        (1, True, False, "taken over"),
        (2, True, True, "finished"),
    ]
    assert row.executions == 2


def test_a_report_tells_how_attempts_ended() -> None:
    endings: dict[Callable[[], Stage], list[str]] = {
        histories.retried: ["failed", "finished"],
        histories.taken_over: ["taken over", "finished"],
        histories.killed: [""],
        histories.failed_then_next: ["runner lost"],
        histories.won: [""],
    }
    for play, expected in endings.items():
        row = check(play().outside).runs[0]
        assert [attempt.ending for attempt in row.attempts] == expected
    states = [row.state for row in check(histories.skipped().outside).runs]
    assert states == ["finished", "skipped"]
    assert check(histories.killed().outside).totals.unsettled == 1
    assert check(histories.won().outside).runs[0].state == "won"
