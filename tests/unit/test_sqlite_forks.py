"""Calls and forks of one thread, which a signal handler may put into each other."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from leasecron_sync import SQLiteLease
from leasecron_sync.backends import _sqlite_forks, _sqlite_lanes
from leasecron_sync.backends._sqlite_files import Files, Names, identity
from leasecron_sync.backends._sqlite_forks import (
    GaveWay,
    Lock,
    begin_fork,
    end_fork,
    forget_forks,
    fork_waits,
    giving_way,
)
from leasecron_sync.backends._sqlite_lanes import Lane
from leasecron_sync.backends.base import BackendSettings


def test_a_thread_does_not_wait_for_itself() -> None:
    lock = Lock()
    with lock:
        assert lock.acquire(timeout=60) is False
        assert lock.waiting == set()
    assert lock.acquire(timeout=60)
    lock.release()
    assert lock.holder is None


def test_what_was_noted_for_a_fork_is_given_back_after_it_and_not_after_one_inside_of_it() -> None:
    outer, lock = begin_fork(), Lock()
    assert lock.acquire()
    outer.locks.append(lock)
    inner = begin_fork()
    end_fork()
    assert inner.over.is_set()
    assert not outer.over.is_set()
    assert fork_waits()
    assert lock.holder is not None
    end_fork()
    assert outer.over.is_set()
    assert not fork_waits()
    assert lock.holder is None


def test_the_end_of_a_fork_that_nobody_noted_is_nothing() -> None:
    end_fork()
    assert not fork_waits()


def test_a_child_knows_of_no_fork() -> None:
    begin_fork()
    forget_forks()
    assert not fork_waits()


def test_a_step_that_gave_way_is_done_anew() -> None:
    tries: list[int] = []

    @giving_way
    def step(_store: object, _lane: object, _work: object, deadline_ms: int, *, begin: str) -> str:
        tries.append(deadline_ms)
        if len(tries) < 3:
            raise GaveWay
        return begin

    assert step(None, None, None, 7, begin="x") == "x"
    assert tries == [7, 7, 7]


@pytest.fixture
def backend(tmp_path: Path) -> SQLiteLease:
    made = SQLiteLease(tmp_path / "jobs.db")
    made.open(BackendSettings("default", "me", 5_000))
    made.probe()
    return made


def test_a_fork_finds_no_connection_open_and_the_next_call_works(backend: SQLiteLease) -> None:
    assert any(lane.connection is not None for lane in backend.lanes())
    _sqlite_lanes._before_fork()
    try:
        assert all(lane.connection is None for lane in backend.lanes())
        assert all(lane.lock.holder is not None for lane in backend.lanes())
    finally:
        end_fork()
    assert backend.history(None, 1) == []
    backend.close()


def test_a_fork_inside_of_a_call_of_its_thread_does_not_wait_and_leaves_the_connection(
    backend: SQLiteLease,
) -> None:
    """As a signal handler may do it. The child is kept from the file."""
    lane = backend.lanes()[0]
    with lane.lock:
        _sqlite_lanes._before_fork()
        end_fork()
        assert lane.connection is not None
        assert lane.lock.holder is not None
    assert backend.history(None, 1) == []
    backend.close()


def test_a_fork_inside_of_another_one_takes_nothing_from_it(backend: SQLiteLease) -> None:
    _sqlite_lanes._before_fork()
    _sqlite_lanes._before_fork()
    end_fork()
    assert all(lane.lock.holder is not None for lane in backend.lanes())
    end_fork()
    assert all(lane.lock.holder is None for lane in backend.lanes())
    assert backend.history(None, 1) == []
    backend.close()


def test_a_call_that_waits_for_a_locked_file_gives_way_to_a_fork(
    backend: SQLiteLease, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sqlite3
    from contextlib import closing

    tries: list[bool] = []
    path = os.fspath(backend._path)
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")

        def over(_deadline_ms: int) -> None:
            """Be what the call waits for, once it has let go of its lane."""
            tries.append(any(lane.lock.holder is not None for lane in backend.lanes()))
            other.execute("ROLLBACK")
            end_fork()

        monkeypatch.setattr(_sqlite_forks, "let_forks_pass", over)
        begin_fork()
        backend.register([])
    assert tries == [False]
    backend.close()


def test_a_lane_that_a_fork_drops_while_another_thread_looks_at_it_is_not_outdated(
    tmp_path: Path,
) -> None:
    """The look has no lock: the names may be gone between two readings."""

    class Dropped(Lane):
        """Has names once."""

        readings = 0

        def __getattribute__(self, name: str) -> Any:  # noqa: ANN401 - whatever it has
            if name == "names":
                self.readings += 1
                return Names(str(tmp_path / "jobs.db")) if self.readings == 1 else None
            return super().__getattribute__(name)

    (tmp_path / "jobs.db").touch()
    lane = Dropped()
    lane.files = Files(identity(tmp_path / "jobs.db"))
    assert not lane.is_outdated()
    assert lane.readings == 1
