"""``leasecron-sync exec``: what it refuses, and one host's turn against stores that misbehave.

Whole processes that are killed, stopped and signalled are in ``tests/hosts/test_exec.py``.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Optional

import pytest

from leasecron_sync.backends.base import BackendSettings
from leasecron_sync.backends.memory import MemoryLease
from leasecron_sync.cli import _exec_lease, _exec_once, _exec_watch, main
from leasecron_sync.cli._exec_child import Child
from leasecron_sync.cli._exec_lease import LeaseTurn, Terms
from leasecron_sync.cli._exec_once import execute_once
from leasecron_sync.cli._exec_turn import LOST_LEASE, TIME_OVER, Asking, Ended, Order, Stop
from leasecron_sync.cli._exec_watch import Holding, Watch
from leasecron_sync.cli.output import CommandError
from leasecron_sync.clock import SystemClock
from leasecron_sync.errors import StoreRejected, StoreUnavailable
from leasecron_sync.model import (
    ClaimReply,
    LeaseClaim,
    OnceClaim,
    OnOverlap,
    Outcome,
    RenewReply,
    RunKey,
    RunRecord,
    RunState,
    Settlement,
    Verdict,
)
from leasecron_sync.options import scheduler_options
from leasecron_sync.schedule import parse_schedule
from leasecron_sync.testing import FaultyClaim, FaultyLease, ManualClock, MemoryClaim

Output = pytest.CaptureFixture[str]

MIDDAY_MS = 1_700_049_600_000  # a whole minute
SECOND, MINUTE, DAY = 1_000, 60_000, 86_400_000
NOTE = 'echo "$LEASECRON_SYNC_SCHEDULED_TIME ${LEASECRON_SYNC_ATTEMPT:-once}" >> noted'


class HostClock(SystemClock):
    """The time of day is what the test says when it begins, and goes on by itself."""

    def __init__(self, now_ms: int) -> None:
        self._offset_ms = now_ms - self.steady_ms()

    def now_ms(self) -> int:
        return self.steady_ms() + self._offset_ms


class Scene:
    """A job that is due each minute, the store, and the folder in which its command works."""

    def __init__(self, folder: Path, *, late_ms: int = 2_000, store_ahead_ms: int = 0) -> None:
        self.folder = folder
        self.clock = HostClock(MIDDAY_MS + late_ms)
        self.stop = Stop()
        self.lease = FaultyLease(MemoryLease())
        self.claim = FaultyClaim(MemoryClaim())
        for backend in (self.lease, self.claim):
            inner = backend.inner
            assert isinstance(inner, (MemoryLease, MemoryClaim))
            inner._now_ms = lambda: self.clock.now_ms() + store_ahead_ms
            backend.open(BackendSettings("default", "this host", 1_000))

    def order(
        self, line: str = NOTE, window_ms: int = MINUTE, limit_ms: Optional[int] = None
    ) -> Order:
        schedule = parse_schedule("* * * * *", "UTC")
        return Order("job", schedule, window_ms, ["/bin/sh", "-c", line], limit_ms)

    def turn(
        self,
        order: Optional[Order] = None,
        *,
        standby: bool = False,
        lease_ms: int = 15_000,
        verbose: bool = False,
    ) -> int:
        """Take a turn under a lease; return its status."""
        options = scheduler_options({"lease_ms": lease_ms}, "lease", "MemoryLease")
        terms = Terms(options, standby, 3 if standby else 1, "this host")
        asking = Asking(self.stop, verbose=verbose, clock=self.clock)
        with self.stop.watching():
            return LeaseTurn(self.lease, order or self.order(), terms, asking).run()

    def once(self, order: Optional[Order] = None, *, verbose: bool = False) -> int:
        """Take a turn under a claim; return its status."""
        asking = Asking(self.stop, verbose=verbose, clock=self.clock)
        with self.stop.watching():
            return execute_once(self.claim, order or self.order(), asking, "this host")

    def other(self, minute: int = 0, lease_ms: int = 15_000) -> LeaseClaim:
        """Return another host's claim of the run of a minute, counted from midday."""
        key = RunKey("job", MIDDAY_MS + minute * MINUTE)
        return LeaseClaim(
            key, key.scheduled_ms, "other", f"other {minute}", lease_ms, 3, OnOverlap.ALLOW,
            10 * MINUTE, 150_000,
        )  # fmt: skip

    def left_behind(self, outcome: Outcome, minute: int = -1) -> None:
        """Have another host give a run back."""
        (reply,) = self.lease.claim([self.other(minute)])
        assert reply.lease is not None
        assert self.lease.settle(reply.lease.ref, Settlement(outcome)).accepted

    def put(self, record: RunRecord) -> None:
        """Write a record as it is."""
        inner = self.lease.inner
        assert isinstance(inner, MemoryLease)
        inner._tables().put_run(record)

    def record(self, minute: int = 0) -> Optional[RunRecord]:
        """Return the record of the run of a minute."""
        found = {record.key.scheduled_ms: record for record in self.lease.history("job", 100)}
        return found.get(MIDDAY_MS + minute * MINUTE)

    def state(self, minute: int = 0) -> Optional[RunState]:
        found = self.record(minute)
        return None if found is None else found.state

    def noted(self) -> list[str]:
        """Return minute and attempt of what the command was executed for."""
        path = self.folder / "noted"
        lines = path.read_text().splitlines() if path.exists() else []
        return [f"{line[14:16]} {line.split()[1]}" for line in lines]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("LEASECRON_SYNC_URL", raising=False)
    return tmp_path


@pytest.fixture
def scene(folder: Path) -> Scene:
    return Scene(folder)


# -- what is refused -------------------------------------------------------------------------------

JOB = ("--name", "job", "--schedule", "* * * * *")
SOON = ("--name", "job", "--schedule", "* * * * * *")


@pytest.mark.parametrize(
    ("arguments", "status", "part"),
    [
        (("sqlite:///j.db", *JOB), 2, '"--"'),
        (("sqlite:///j.db", *JOB, "--"), 2, '"--"'),
        (("sqlite:///j.db", *JOB, "echo", "hi"), 2, 'echo hi: put the command behind "--"'),
        (("sqlite:///j.db", *JOB, "ls", "-l"), 2, 'ls -l: put the command behind "--"'),
        (("sqlite:///j.db", *JOB, "--windw", "9", "--", "x"), 2, "arguments: --windw 9 (see"),
        (("sqlite:///j.db", "--name", "job", "--", "true"), 2, "--schedule"),
        (("sqlite:///j.db", "--name", "job", "--schedule", "61 * * * *", "--", "x"), 2, "minute"),
        (("sqlite:///j.db", "--name", "", "--schedule", "* * * * *", "--", "x"), 2, "--name"),
        (("sqlite:///j.db", *JOB, "--timezone", "Europe/Sparta", "--", "x"), 2, "Sparta"),
        (("sqlite:///j.db", *JOB, "--window", "0", "--", "x"), 2, "--window"),
        (("sqlite:///j.db", *JOB, "--window", "2m", "--", "x"), 2, "2m"),
        (("sqlite:///j.db", *JOB, "--lease", "99999999", "--", "x"), 2, "--lease"),
        (("sqlite:///j.db", *JOB, "--max-attempts", "2", "--", "x"), 2, "--standby"),
        (("sqlite:///j.db", *JOB, "--standby", "--max-attempts", "0", "--", "x"), 2, "1 to 1,000"),
        (("memory://x", *JOB, "--", "x"), 1, "one process"),
        (("amqp://h/", *JOB, "--standby", "--", "x"), 2, "--standby"),
        (("amqp://h/", *JOB, "--standby", "--max-attempts", "0", "--", "x"), 2, "--max-attempts"),
        (("nats://h", *JOB, "--lease", "9", "--", "x"), 2, "--lease"),
        (("redis://h?strategy=script", *JOB, "--lease", "9", "--", "x"), 2, "RedisClaim"),
        (("redis://h?strategy=idmp", *JOB, "--window", "301", "--", "x"), 2, "300 s"),
        (("sqlite:///j.db", "--name", "j", "--schedule", "0 0 29 2 *", "--", "x"), 1, "--timezone"),
        (("sqlite:////no/such/folder/j.db", *JOB, "--", "true"), 1, "/no/such/folder"),
        (("redis://:s3cr3t@127.0.0.1:1", *SOON, "--window", "2", "--", "x"), 1, "127.0.0.1:1"),
        (("redis://:s3cr3t@h:port", *JOB, "--", "x"), 2, "port"),
    ],
)
def test_what_cannot_work_is_one_line(
    capfd: Output, arguments: tuple[str, ...], status: int, part: str
) -> None:
    assert main(["exec", *arguments]) == status
    out, err = capfd.readouterr()
    assert not out
    assert part in err
    assert len(err.splitlines()) == 1
    assert "s3cr3t" not in err


def test_a_command_that_does_not_follow_two_dashes_is_sent_there_where_the_url_is_left_out(
    capfd: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first word of the command then passes for the URL."""
    monkeypatch.setenv("LEASECRON_SYNC_URL", "sqlite:///j.db")
    assert main(["exec", *JOB, "echo", "hi"]) == 2
    out, err = capfd.readouterr()
    assert not out
    assert err == (
        'leasecron-sync: unrecognized arguments: hi: put the command behind "--": '
        "leasecron-sync exec [URL] --name NAME ... -- COMMAND\n"
    )


def test_arguments_of_the_command_are_its_own(capfd: Output) -> None:
    line = ("exec", "sqlite:///j.db", *JOB, "--", "printf", "%s|", "--name", "--", "-x", "a b é")
    assert main(line) == 0
    assert capfd.readouterr() == ("--name|--|-x|a b é|", "")


@pytest.mark.parametrize("name", ["ß\n\t$(x) 'q\"", "n" * 200, "../..", "名前"])
def test_a_name_may_be_any_text(capfd: Output, name: str) -> None:
    line = ("exec", "sqlite:///j.db", "--name", name, "--schedule", "* * * * *", "--")
    assert main([*line, "printenv", "LEASECRON_SYNC_JOB"]) == 0
    assert capfd.readouterr() == (f"{name}\n", "")
    assert main([*line, "false"]) == 0  # it was executed


@pytest.mark.parametrize(
    ("late_ms", "minute"), [(0, 0), (59_999, 0), (60_000, 1), (-1, -1)], ids=str
)
def test_the_run_is_the_latest_that_is_not_after_now(
    scene: Scene, late_ms: int, minute: int
) -> None:
    assert scene.order().due_run(MIDDAY_MS + late_ms).scheduled_ms == MIDDAY_MS + minute * MINUTE


def test_a_call_later_than_the_window_names_the_schedule(scene: Scene) -> None:
    order = scene.order(window_ms=10_000)
    assert order.due_run(MIDDAY_MS + 10_000)
    with pytest.raises(CommandError, match=r"10 s of --window ago: give --schedule and --timezone"):
        order.due_run(MIDDAY_MS + 10_001)


# -- who executes ----------------------------------------------------------------------------------


def test_the_second_host_leaves_without_a_word(scene: Scene, capfd: Output) -> None:
    assert [scene.turn(), scene.turn()] == [0, 0]
    assert scene.noted() == ["00 1"]
    assert capfd.readouterr() == ("", "")


def test_verbose_says_what_was_decided(scene: Scene, capfd: Output) -> None:
    scene.turn(verbose=True)
    scene.turn(verbose=True)
    lines = capfd.readouterr().err.splitlines()
    assert [line.rpartition("+00:00: ")[2] for line in lines] == [
        "won, attempt 1",
        "the command ended with status 0",
        "settled, finished",
    ]


def test_a_store_whose_clock_is_behind_is_waited_for(folder: Path) -> None:
    scene = Scene(folder, late_ms=100, store_ahead_ms=-500)
    assert scene.turn() == 0
    assert scene.once() == 0
    assert scene.noted() == ["00 1", "00 once"]
    assert scene.lease.faults.calls("claim") > 1


def test_a_host_far_ahead_of_the_store_is_told_so(folder: Path) -> None:
    scene = Scene(folder, store_ahead_ms=-120_000)
    for take in (scene.turn, scene.once):
        with pytest.raises(CommandError, match="this host's clock is ahead"):
            take()
    assert scene.noted() == []


def test_a_run_that_nobody_may_begin_any_more_is_no_silent_loss(folder: Path) -> None:
    scene = Scene(folder, store_ahead_ms=120_000)
    for take in (scene.turn, scene.once):
        with pytest.raises(CommandError, match="nobody has executed it"):
            take()


def test_a_host_far_behind_is_silent_when_another_one_has_executed_the_run(folder: Path) -> None:
    scene = Scene(folder, store_ahead_ms=120_000)
    (reply,) = scene.lease.claim([scene.other()])
    assert reply.lease is not None
    scene.lease.settle(reply.lease.ref, Settlement(Outcome.FINISHED))
    assert scene.turn() == 0


@pytest.mark.parametrize("late_ms", [2_000, 30_000])
def test_a_run_that_meets_another_one_is_skipped_and_leaves_a_record(
    folder: Path, late_ms: int
) -> None:
    scene = Scene(folder, late_ms=late_ms)
    scene.lease.claim([scene.other(-1)])
    assert scene.turn() == 0
    assert scene.state() is RunState.SKIPPED
    assert scene.noted() == []


def test_a_standby_that_is_late_waits_for_the_other_run(folder: Path) -> None:
    scene = Scene(folder, late_ms=30_000)
    (reply,) = scene.lease.claim([scene.other(-1)])
    lease = reply.lease
    assert lease is not None

    def end_it() -> None:
        if scene.lease.faults.calls("claim") == 4:
            scene.lease.settle(lease.ref, Settlement(Outcome.FINISHED))

    scene.lease.faults.slow("claim", end_it)
    # Its window is over long before that.
    assert scene.turn(scene.order(window_ms=30_500), standby=True) == 0
    assert scene.noted() == ["00 1"]


def test_a_standby_takes_a_lapsed_run_over(scene: Scene) -> None:
    scene.lease.claim([scene.other(lease_ms=700)])
    assert scene.turn(standby=True) == 0
    assert scene.noted() == ["00 2"]


def test_a_standby_repeats_what_has_failed_elsewhere(scene: Scene) -> None:
    (reply,) = scene.lease.claim([scene.other()])
    assert reply.lease is not None
    scene.lease.settle(reply.lease.ref, Settlement(Outcome.FAILED, "exit status 3", 300))
    assert scene.turn(standby=True) == 0
    assert scene.noted() == ["00 2"]


# -- what was left behind --------------------------------------------------------------------------


def test_a_run_that_was_handed_over_goes_first(scene: Scene) -> None:
    scene.left_behind(Outcome.HANDED_OVER)
    assert scene.turn() == 0
    assert scene.noted() == ["59 2", "00 1"]
    assert [scene.state(-1), scene.state()] == [RunState.FINISHED] * 2


def test_the_current_run_does_not_grow_too_old_behind_an_older_one(scene: Scene) -> None:
    scene.left_behind(Outcome.HANDED_OVER)
    assert scene.turn(scene.order(f"{NOTE}; sleep 0.7", window_ms=2_300)) == 0
    assert scene.noted() == ["59 2", "00 1"]


def test_a_store_that_fails_once_after_an_older_run_costs_nothing(scene: Scene) -> None:
    scene.left_behind(Outcome.HANDED_OVER)
    scene.lease.faults.raise_at("pending", StoreUnavailable("gone"), nth=2)
    assert scene.turn(scene.order(f"{NOTE}; sleep 0.7", window_ms=2_500)) == 0
    assert scene.noted() == ["59 2", "00 1"]


def test_the_status_of_an_older_run_that_fails_is_not_lost(scene: Scene) -> None:
    scene.left_behind(Outcome.HANDED_OVER)
    assert scene.turn(scene.order(f'{NOTE}; test "$LEASECRON_SYNC_ATTEMPT" = 1 || exit 3')) == 3
    assert [scene.state(-1), scene.state()] == [RunState.FAILED, RunState.FINISHED]


def test_a_host_that_died_is_reported_and_does_not_block(scene: Scene, capfd: Output) -> None:
    scene.lease.claim([scene.other(-1)])
    found = scene.record(-1)
    assert found is not None
    scene.put(replace(found, until_ms=MIDDAY_MS))
    assert scene.turn() == 0
    assert "has failed: runner lost" in capfd.readouterr().err
    assert scene.noted() == ["00 1"]
    assert scene.state(-1) is RunState.FAILED


def test_the_current_run_of_a_host_that_died_is_a_failure(scene: Scene, capfd: Output) -> None:
    scene.lease.claim([scene.other()])
    found = scene.record()
    assert found is not None
    scene.put(replace(found, until_ms=MIDDAY_MS + 1))
    assert scene.turn() == 1
    assert "has failed: runner lost" in capfd.readouterr().err
    assert scene.turn() == 0  # told once
    assert capfd.readouterr().err == ""


def test_runs_that_nobody_wanted_in_time_do_not_block(scene: Scene, capfd: Output) -> None:
    for minute in (-4, -3, -2):
        scene.left_behind(Outcome.HANDED_OVER, minute)
        found = scene.record(minute)
        assert found is not None
        scene.put(replace(found, until_ms=MIDDAY_MS + minute * MINUTE))
    assert scene.turn() == 0
    assert capfd.readouterr().err.count("has failed: abandoned") == 2
    # Of the newest one the takeover window is not over.
    assert scene.noted() == ["58 2", "00 1"]
    assert scene.state() is RunState.FINISHED


def test_an_older_run_that_another_host_takes_first_is_left_to_it(scene: Scene) -> None:
    scene.left_behind(Outcome.HANDED_OVER)
    taken = iter([True])

    def take() -> None:
        if next(taken, False):
            inner = scene.lease.inner
            assert isinstance(inner, MemoryLease)
            inner.claim([replace(scene.other(-1), decision_id="quicker")])

    scene.lease.faults.slow("claim", take)
    assert scene.turn() == 0
    assert scene.noted() == []
    assert scene.state() is RunState.SKIPPED


def test_old_records_are_deleted_by_who_executes_a_run(scene: Scene) -> None:
    old = RunKey("job", MIDDAY_MS - 8 * DAY)
    scene.put(RunRecord(old, RunState.FINISHED, settled_ms=old.scheduled_ms))
    assert scene.turn() == 0
    assert [record.key.scheduled_ms for record in scene.lease.history(None, 10)] == [MIDDAY_MS]


# -- a store that misbehaves -----------------------------------------------------------------------


@pytest.mark.parametrize("method", ["register", "pending", "claim", "settle"])
def test_a_lost_reply_is_asked_for_again(scene: Scene, method: str) -> None:
    scene.lease.faults.lose_reply(method)
    assert scene.turn() == 0
    assert scene.noted() == ["00 1"]
    assert scene.state() is RunState.FINISHED


def test_a_store_that_is_down_for_the_window_is_an_error(scene: Scene) -> None:
    scene.lease.faults.down = True
    scene.claim.faults.down = True
    with pytest.raises(CommandError, match="nobody can be asked who executes it"):
        scene.turn(scene.order(window_ms=2_200))
    with pytest.raises(CommandError, match="nobody can be asked who executes it"):
        scene.once(scene.order(window_ms=2_600))


def test_a_heartbeat_that_hangs_hides_neither_the_end_of_trust_nor_the_command(
    scene: Scene,
) -> None:
    let_go = threading.Event()
    scene.lease.faults.slow("renew", let_go.wait)
    line = f"trap '{NOTE}; exit 9' TERM; while :; do sleep 0.1; done"
    assert scene.turn(scene.order(line), lease_ms=1_500) == LOST_LEASE
    let_go.set()
    assert scene.noted() == ["00 1"]
    found = scene.record()
    assert found is not None
    assert (found.state, found.reason) == (RunState.FAILED, "lease lost")


def test_a_command_that_ends_while_a_heartbeat_hangs_has_finished(scene: Scene) -> None:
    let_go, hung = threading.Event(), threading.Event()

    def hang() -> None:
        hung.set()
        let_go.wait()

    scene.lease.faults.slow("renew", hang)
    assert scene.turn(scene.order("sleep 1.2"), lease_ms=3_000) == 0
    let_go.set()
    assert hung.is_set()
    assert scene.state() is RunState.FINISHED


def test_renewals_keep_the_lease_of_a_long_command(scene: Scene) -> None:
    assert scene.turn(scene.order("sleep 1.5"), lease_ms=600) == 0
    assert scene.lease.faults.calls("renew") >= 3


def test_trust_counts_from_before_a_slow_renewal_was_sent(scene: Scene) -> None:
    clock = ManualClock()
    options = scheduler_options({"lease_ms": 6_000}, "lease", "MemoryLease")
    (reply,) = scene.lease.claim([scene.other()])
    assert reply.lease is not None
    holding = Holding(scene.lease, reply.lease, options, clock, clock.steady_ms())
    assert holding.left_ms() == 6_000 - options.margin_ms
    clock.advance(2_000)
    scene.lease.faults.slow("renew", after=lambda: clock.advance(1_500))
    holding._renew()
    assert holding.left_ms() == 6_000 - options.margin_ms - 1_500
    # The store may show more than a whole lease after its clock was set back.
    long = replace(reply.lease, left_ms=60_000)
    assert Holding(scene.lease, long, options, clock, clock.steady_ms()).left_ms() < 6_000


def test_a_lease_that_the_store_refuses_ends_the_command(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, capfd: Output
) -> None:
    monkeypatch.setattr(scene.lease.inner, "renew", lambda *_: [RenewReply.LOST])
    assert scene.turn(scene.order("sleep 30"), lease_ms=600) == LOST_LEASE
    assert "another host may execute it again" in capfd.readouterr().err
    assert scene.lease.faults.calls("settle") == 0


def test_the_finish_of_a_lapsed_lease_that_nobody_took_is_accepted(
    scene: Scene, capfd: Output
) -> None:
    scene.lease.faults.slow("renew", lambda: setattr(scene.lease.faults, "down", True))
    line = "trap '' TERM; sleep 2"
    stopper = threading.Timer(2.2, scene.lease.faults.clear)
    stopper.start()
    assert scene.turn(scene.order(line), lease_ms=1_500) == LOST_LEASE
    stopper.join()
    assert "it ended with status 0, and the run is finished" in capfd.readouterr().err
    assert scene.state() is RunState.FINISHED


def test_a_command_that_ignores_the_end_of_its_lease_is_killed(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_exec_watch, "KILL_AFTER_MS", 300)
    monkeypatch.setattr(scene.lease.inner, "renew", lambda *_: [RenewReply.LOST])
    line = f"trap '' TERM; (sleep 1.5; {NOTE}) & sleep 30"
    assert scene.turn(scene.order(line), lease_ms=1_500) == LOST_LEASE
    threading.Event().wait(1)
    assert scene.noted() == []  # neither does what it has started go on


def test_a_lease_that_came_too_late_is_not_used(scene: Scene) -> None:
    inner, late, first = scene.lease.inner, threading.Event(), iter([True])
    assert isinstance(inner, MemoryLease)

    def answer_late() -> None:
        if next(first, False):
            late.wait(0.8)
            (taken,) = inner.claim([replace(scene.other(), decision_id="taken over")])
            assert taken.lease is not None

    scene.lease.faults.slow("claim", after=answer_late)
    assert scene.turn(lease_ms=600) == 0
    assert scene.noted() == []


def test_who_cannot_start_a_process_gives_the_run_back(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, capfd: Output
) -> None:
    def fail(*_: object) -> Child:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(_exec_lease, "Child", fail)
    monkeypatch.setattr(_exec_once, "Child", fail)
    assert scene.turn() == 126
    assert scene.state() is RunState.WAITING
    assert scene.once() == 126
    assert capfd.readouterr().err.count("Resource temporarily unavailable") == 2


# -- signals ---------------------------------------------------------------------------------------


def test_a_signal_between_claim_and_start_hands_the_run_back(scene: Scene) -> None:
    scene.lease.faults.slow("claim", after=lambda: os.kill(os.getpid(), signal.SIGTERM))
    assert scene.turn() == 143
    assert scene.noted() == []
    found = scene.record()
    assert found is not None
    assert (found.state, found.failures) == (RunState.WAITING, 0)


def test_a_signal_between_claim_and_start_is_told_where_nobody_takes_over(scene: Scene) -> None:
    scene.claim.faults.slow("claim", after=lambda: os.kill(os.getpid(), signal.SIGHUP))
    with pytest.raises(Ended, match=r"SIGHUP.*nobody else will") as told:
        scene.once()
    assert told.value.status == 129


def test_a_signal_ends_the_asking_of_a_store_that_is_down(scene: Scene) -> None:
    scene.lease.faults.down = True
    scene.lease.faults.slow("probe", lambda: os.kill(os.getpid(), signal.SIGINT))
    with pytest.raises(Ended, match="SIGINT") as told:
        scene.turn()
    assert told.value.status == 130
    assert scene.lease.faults.calls("probe") == 1


def test_a_signal_ends_the_telling_of_a_store_that_is_down(scene: Scene, capfd: Output) -> None:
    def go_down() -> None:
        scene.lease.faults.down = True
        os.kill(os.getpid(), signal.SIGTERM)

    scene.lease.faults.lose_request("settle")
    scene.lease.faults.slow("settle", go_down)
    assert scene.turn(scene.order("exit 3")) == 3
    assert "could not be told to the store" in capfd.readouterr().err


def test_a_signal_that_comes_while_the_process_is_made_reaches_it() -> None:
    stop = Stop()

    def make(_mask: object) -> Child:
        os.kill(os.getpid(), signal.SIGINT)
        return Child(["sleep", "30"], {}, [])

    with stop.watching():
        child = stop.start(make)
        assert Watch(child, stop, SystemClock(), None).until_end().code == 130


def test_signals_that_were_ignored_stay_so() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        stop = Stop()
        with stop.watching():
            os.kill(os.getpid(), signal.SIGHUP)
            assert not stop.asked
            line = "kill -HUP $$; exit 7"  # as under nohup
            child = stop.start(lambda mask: Child(["/bin/sh", "-c", line], {}, mask))
            assert Watch(child, stop, SystemClock(), None).until_end().code == 7
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_waiting_survives_signals_at_any_moment() -> None:
    over = threading.Event()

    def send() -> None:
        while not over.wait(0):
            os.kill(os.getpid(), signal.SIGHUP)

    before = signal.signal(signal.SIGHUP, lambda *_: None)
    sender = threading.Thread(target=send)
    sender.start()
    try:
        for _number in range(100):
            stop = Stop()
            with stop.watching():
                stop.wait(DAY)
            assert stop.status == 129
    finally:
        over.set()
        sender.join()
        signal.signal(signal.SIGHUP, before)


# -- the command -----------------------------------------------------------------------------------


def ended(*command: str, limit_ms: Optional[int] = None) -> tuple[int, Optional[str]]:
    """Execute a command; return its status, and why it was ended."""
    stop = Stop()
    child = stop.start(lambda mask: Child(command, {}, mask))
    end = Watch(child, stop, SystemClock(), limit_ms).until_end()
    return end.code, None if end.reason is None else end.reason.value


@pytest.mark.parametrize(
    ("command", "status"),
    [
        (("true",), 0),
        (("sh", "-c", "exit 3"), 3),
        (("sh", "-c", "exit 255"), 255),
        (("sh", "-c", "kill -9 $$"), 137),
        (("sh", "-c", "kill -TERM $$"), 143),
        (("no-such-program",), 127),
        (("./no/such/program",), 127),
        (("",), 127),
        (("/",), 126),
        (("/etc/passwd",), 126),
        (("sh", "-c", "yes | head -n 1 > /dev/null"), 0),
    ],
)
def test_the_status_is_that_of_a_shell(command: tuple[str, ...], status: int) -> None:
    assert ended(*command) == (status, None)


def test_what_cannot_be_run_is_one_line(capfd: Output) -> None:
    ended("no-such-\nprogram\udcff")
    _out, err = capfd.readouterr()
    assert (
        err
        == "leasecron-sync: 'no-such-\\nprogram\\udcff' cannot be run: No such file or directory\n"
    )


def test_a_script_without_a_first_line_is_executed_as_by_a_shell(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: Output
) -> None:
    (folder / "job").write_text('echo "$1"; exit 5\n')
    (folder / "job").chmod(0o755)
    assert ended("./job", "a b") == (5, None)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    assert ended("job", "c") == (5, None)
    assert capfd.readouterr().out == "a b\nc\n"


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_command_inherits_no_signal_that_is_ignored_or_blocked(capfd: Output) -> None:
    ended("grep", "-E", "Sig(Ign|Blk)", "/proc/self/status")
    out = capfd.readouterr().out
    with Path("/proc/self/status").open() as status:
        own = [line for line in status if line.startswith(("SigIgn", "SigBlk"))]
    # Of what this process ignores, Python itself has added these two.
    added = 1 << (signal.SIGPIPE - 1) | 1 << (signal.SIGXFSZ - 1)
    wanted = [f"{line[:8]}{int(line[8:], 16) & ~added:016x}" for line in own]
    assert sorted(out.splitlines()) == sorted(wanted)


def test_a_time_limit_ends_the_command_and_all_that_it_started(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = "(trap '' TERM; sleep 2; echo > late) & sleep 30"
    monkeypatch.setattr(_exec_watch, "KILL_AFTER_MS", 200)
    assert ended("sh", "-c", line, limit_ms=500) == (143, "time limit")
    threading.Event().wait(1.5)
    assert not (folder / "late").exists()


@pytest.mark.parametrize("verbose", [False, True])
@pytest.mark.parametrize("line", ["sleep 30", "trap 'exit 0' TERM; sleep 30 & wait"])
def test_a_time_limit_that_ends_a_command_is_told_in_one_line_and_with_no_other_status(
    scene: Scene, capfd: Output, line: str, *, verbose: bool
) -> None:
    order = scene.order(line, limit_ms=1_000)
    for turn in (scene.turn, scene.once):
        assert turn(order, verbose=verbose) == TIME_OVER
        out, err = capfd.readouterr()
        *before, last = err.splitlines()
        assert not out
        assert len(before) == verbose
        assert all(": won" in line for line in before)
        assert last.startswith("leasecron-sync: 'job' of 2023-11-15T12:00:00+00:00: ")
        assert last.endswith(": ended by --time-limit 1")
    assert scene.state() is RunState.FAILED


def test_a_store_that_is_not_told_of_a_time_limit_adds_no_other_status(
    scene: Scene, capfd: Output
) -> None:
    scene.lease.faults.raise_at("settle", StoreRejected("it is read-only"))
    assert scene.turn(scene.order("sleep 30", limit_ms=1_000)) == TIME_OVER
    err = capfd.readouterr().err
    assert "ended by --time-limit 1" in err
    assert err.endswith("leasecron-sync: it is read-only\n")
    assert "143" not in err


def test_who_gives_way_is_over_when_all_that_it_started_is(folder: Path) -> None:
    """Else the next host would begin while the end of a pipe is still at work."""
    stop = Stop()
    tidy = "trap 'sleep 0.5; echo > tidied; exit' TERM; echo > ready; while :; do sleep 0.1; done"
    line = f"({tidy}) & wait"
    with stop.watching():
        child = stop.start(lambda mask: Child(["sh", "-c", line], {}, mask))
        while not (folder / "ready").exists():
            assert child.wait(10) is None
        os.kill(os.getpid(), signal.SIGTERM)
        assert Watch(child, stop, SystemClock(), None).until_end().code == 143
    assert (folder / "tidied").exists()


def test_what_a_command_leaves_running_goes_on(folder: Path) -> None:
    assert ended("sh", "-c", "(sleep 0.3; echo > later) >/dev/null 2>&1 &") == (0, None)
    never = threading.Event()
    while not (folder / "later").exists():
        never.wait(0.01)


# -- claim backends --------------------------------------------------------------------------------


def test_one_claim_wins(scene: Scene, capfd: Output) -> None:
    line = "echo won; printenv LEASECRON_SYNC_TOKEN; exit 4"
    assert [scene.once(scene.order(line)), scene.once(scene.order(line))] == [4, 0]
    assert capfd.readouterr() == ("won\n", "")


def test_a_time_limit_holds_under_a_claim_too(scene: Scene) -> None:
    assert scene.once(scene.order("sleep 30", limit_ms=100)) == TIME_OVER


@pytest.mark.parametrize(
    ("reply", "part"),
    [
        (ClaimReply(Verdict.UNKNOWN), "nobody knows who won"),
        (ClaimReply(Verdict.REJECTED, reason="too long"), "was refused: too long"),
        (ClaimReply(Verdict.TOO_OLD), "nobody has executed it"),
    ],
)
def test_a_claim_that_nobody_decided_is_an_error(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, reply: ClaimReply, part: str
) -> None:
    monkeypatch.setattr(scene.claim.inner, "claim", lambda _: [reply])
    with pytest.raises(CommandError, match=part):
        scene.once()
    assert scene.noted() == []


def test_a_claim_is_repeated_as_the_same_decision(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    real = scene.claim.inner
    assert isinstance(real, MemoryClaim)
    claim = real.claim

    def noted(claims: list[OnceClaim]) -> object:
        asked.extend(item.decision_id for item in claims)
        return claim(claims)

    monkeypatch.setattr(real, "claim", noted)
    scene.claim.faults.lose_reply("claim")
    assert scene.once(scene.order("exit 4")) == 4
    assert len(asked) == 2
    assert len(set(asked)) == 1
