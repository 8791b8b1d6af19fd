"""What may happen to an SQLite file under way: moved, replaced, restored, upgraded, damaged."""

from __future__ import annotations

import logging
import os
import random
import shutil
import socket
import sqlite3
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Callable

import pytest

from leasecron_sync.backends.sqlite import SQLiteLease
from leasecron_sync.errors import StoreError, StoreRejected, StoreUnavailable, StoreUnsupported
from leasecron_sync.model import (
    JobSpan,
    JobStamp,
    LeaseRef,
    Outcome,
    RunRecord,
    Settlement,
    Verdict,
)
from tests.faults.edges import Bench

pytestmark = pytest.mark.timeout(120)  # on a busy machine; a few seconds each otherwise

FINISHED = Settlement(Outcome.FINISHED)

REPLACED = "the SQLite file was deleted or replaced, what was claimed in it may run again"
LOG_GONE = "the log of the SQLite file is gone, what was claimed last may run again"
EARLIER = "the SQLite file is an earlier one, what was claimed since may run again"
OTHER = "the SQLite file holds another store, what was claimed may run again"


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path)
    yield bench
    bench.end()


@pytest.fixture
def errors(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """Return what was logged as an error since the last question."""
    caplog.set_level(logging.ERROR)

    def said() -> list[str]:
        found = [record.getMessage() for record in caplog.records]
        caplog.clear()
        return found

    return said


def said_of(bench: Bench, sentence: str) -> str:
    return f"{sentence} path={str(bench.path)!r}"


def fill(bench: Bench, backend: SQLiteLease, runs: int, jobs: int = 20) -> None:
    """Win many runs, so that the log holds pages of every table and index."""
    for number in range(runs):
        bench.claim(backend, f"job {number % jobs}", number)


# -- replaced and moved ---------------------------------------------------------------------------


def test_a_backup_put_in_place_under_way_takes_nothing_from_the_log_of_the_former_file(
    bench: Bench, errors: Callable[[], list[str]]
) -> None:
    one, other = bench.connect(), bench.connect()
    fill(bench, one, 60)
    backup = bench.backup()
    fill(bench, other, 400, jobs=40)
    former = bench.claim(one, "after the backup").lease
    assert former is not None
    backup.replace(bench.path)
    assert bench.beside("-wal").stat().st_size > 0, "nothing of the former log would do harm"
    assert bench.claim(one, "new").verdict is Verdict.GRANTED
    assert errors() == [said_of(bench, REPLACED)]
    assert bench.claim(other, "new").verdict is Verdict.HELD
    assert errors() == [said_of(bench, REPLACED)], "each instance says it once"
    assert len(one.history(None, 1_000)) == 61, "those of the backup, and the new one"
    assert not other.settle(former.ref, FINISHED).accepted
    again = bench.claim(other, "after the backup").lease
    assert again is not None
    assert again.ref.token > former.ref.token, "tokens rise over a backup too"
    bench.check()


def test_processes_whose_file_was_replaced_meet_again_in_the_new_one(bench: Bench) -> None:
    """Whoever notices first must not leave the others with another log beside the same file."""
    one = bench.connect()
    fill(bench, one, 60)
    backup = bench.backup()
    fill(bench, one, 200)
    script = """
        backend = connect()
        claim(backend, "hello")
        say(ready=True)
        backups = 0
        while hear():
            won = [n for n in range(80) if answered(backend.claim, [claim_of("raced", n)])[0].lease]
            say(won=won, logged=logged)
            logged.clear()
        backend.close()
    """
    racers = [bench.start(script) for _ in range(4)]
    for racer in racers:
        racer.listen()
    backup.replace(bench.path)
    for racer in racers:
        racer.tell("go")
    said = [racer.listen() for racer in racers]
    assert sorted(n for answer in said for n in answer["won"]) == list(range(80))
    for answer in said:
        assert answer["logged"] == [said_of(bench, REPLACED)]
    for racer in racers:
        racer.tell()
        racer.result()
    tokens = [record.token for record in one.history("raced", 1_000)]
    assert len(set(tokens)) == 80
    bench.check()


def test_a_file_moved_away_and_back_still_knows_what_was_claimed_last(
    bench: Bench, errors: Callable[[], list[str]]
) -> None:
    backend = bench.connect()
    fill(bench, backend, 60)
    assert bench.claim(backend, "last").verdict is Verdict.GRANTED
    away = bench.beside(".away")
    bench.path.rename(away)
    with pytest.raises(StoreUnavailable, match="does not exist"):
        backend.pending(["last"], 10)
    assert errors() == [said_of(bench, REPLACED)]
    assert not bench.path.exists(), "a read makes no file"
    away.rename(bench.path)
    assert bench.claim(backend, "last").verdict is Verdict.HELD
    assert errors() == []
    bench.check()


def test_a_file_claimed_in_while_another_was_away_is_replaced_by_the_one_that_comes_back(
    bench: Bench, errors: Callable[[], list[str]]
) -> None:
    backend = bench.connect()
    fill(bench, backend, 60)
    away = bench.beside(".away")
    bench.path.rename(away)
    assert bench.claim(backend, "meanwhile").verdict is Verdict.GRANTED
    away.rename(bench.path)
    assert len(backend.history(None, 100)) == 60
    assert bench.claim(backend, "meanwhile").verdict is Verdict.GRANTED
    assert errors() == 2 * [said_of(bench, REPLACED)]
    bench.check()


@pytest.mark.parametrize("left", [(), ("-wal",), ("-shm",), ("-wal", "-shm")])
def test_a_deleted_file_is_made_anew_whatever_is_left_beside_it(
    bench: Bench, errors: Callable[[], list[str]], left: tuple[str, ...]
) -> None:
    backend = bench.connect()
    fill(bench, backend, 60)
    store_id = backend.probe().store_id
    for suffix in ("", *({"-wal", "-shm"} - set(left))):
        bench.beside(suffix).unlink()
    assert bench.claim(backend, "job 0").verdict is Verdict.GRANTED
    assert errors() == [said_of(bench, REPLACED)]
    assert backend.probe().store_id != store_id
    assert len(backend.history(None, 100)) == 1
    bench.check()


def test_a_file_replaced_while_no_connection_was_open_is_noticed(
    bench: Bench, errors: Callable[[], list[str]]
) -> None:
    """A file system may give the new one the number of the old one."""
    backend = bench.connect()
    fill(bench, backend, 5)
    for lane in backend.lanes():
        with lane.lock:
            lane.drop()
    bench.path.unlink()
    bench.connect().probe()
    bench.claim(backend, "job 0")
    assert len(errors()) == 1
    assert len(backend.history(None, 10)) == 1


def test_a_symbolic_link_that_leads_elsewhere_is_noticed(
    bench: Bench, errors: Callable[[], list[str]]
) -> None:
    one, two, link = (bench.folder / name for name in ("one.db", "two.db", "link.db"))
    link.symlink_to(one)
    bench.path = link
    backend, by_name = bench.connect(), bench.connect(one)
    assert bench.claim(backend, "job").verdict is Verdict.GRANTED
    assert bench.claim(by_name, "job").verdict is Verdict.HELD, "both names lead to one log"
    link.unlink()
    link.symlink_to(two)
    assert bench.claim(backend, "job").verdict is Verdict.GRANTED
    assert errors() == [said_of(bench, REPLACED)]
    assert bench.claim(bench.connect(two), "job").verdict is Verdict.HELD
    assert bench.claim(by_name, "job").verdict is Verdict.HELD, "the former file is what it was"
    assert errors() == []


# -- the log --------------------------------------------------------------------------------------


@pytest.mark.parametrize("gone", [("-wal",), ("-shm",), ("-wal", "-shm")])
def test_instances_do_not_part_when_the_log_is_deleted_under_way(
    bench: Bench, gone: tuple[str, ...]
) -> None:
    """Who has the deleted file open and who has not would win the same runs."""
    script = """
        backend = connect()
        claim(backend, me)
        say(ready=True)
        while hear():
            won = [n for n in range(40) if answered(backend.claim, [claim_of("raced", n)])[0].lease]
            say(won=won, logged=logged)
        backend.close()
    """
    backend = bench.connect()
    fill(bench, backend, 60)
    with closing(sqlite3.connect(bench.path)) as connection:
        connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()
    racers = [bench.start(script) for _ in range(2)]
    for racer in racers:
        racer.listen()
    for suffix in gone:
        bench.beside(suffix).unlink()
    late = bench.start(script)
    late.listen()
    for racer in (*racers, late):
        racer.tell("go")
    said = [racer.listen() for racer in (*racers, late)]
    assert sorted(n for answer in said for n in answer["won"]) == list(range(40))
    for answer in said[:2]:
        assert answer["logged"] == [said_of(bench, LOG_GONE)]
    assert said[2]["logged"] == [], "it began afterwards"
    for racer in (*racers, late):
        racer.tell()
        racer.result()
    # Of all processes this one had nothing to ask meanwhile, and is the last one that closes.
    backend.close()
    bench.check()
    assert len(backend_records(bench, "raced")) == 40


def backend_records(bench: Bench, job: str) -> Sequence[RunRecord]:
    return bench.connect().history(job, 1_000)


def test_a_program_that_reads_the_file_past_sqlite_does_not_part_the_instances(
    bench: Bench, errors: Callable[[], list[str]]
) -> None:
    """Closing it ends this process's locks, and whoever leaves next takes the log away."""
    backend = bench.connect()
    assert bench.claim(backend, "job").verdict is Verdict.GRANTED
    bench.path.read_bytes()  # a backup, made inside the application
    visitor = bench.start("backend = connect(); claim(backend, 'other'); backend.close()")
    visitor.result()
    assert not bench.beside("-wal").exists(), "there would be nothing to notice"
    assert bench.claim(backend, "job").verdict is Verdict.HELD
    assert errors() == [said_of(bench, LOG_GONE)]
    assert bench.claim(bench.connect(), "job").verdict is Verdict.HELD
    bench.check()


def test_a_log_that_only_the_applications_own_connection_still_has_is_refused(
    bench: Bench,
) -> None:
    """SQLite shares it within the process, and other processes would have another one."""
    backend = bench.connect()
    bench.claim(backend, "job")
    with closing(sqlite3.connect(bench.path)) as own:
        own.execute("SELECT * FROM leasecron_meta").fetchall()
        bench.beside("-shm").unlink()
        for _ in range(2):
            with pytest.raises(StoreRejected, match="connection of its own to the file: close"):
                bench.claim(backend, "other")
    assert bench.claim(backend, "other").verdict is Verdict.GRANTED
    assert bench.claim(backend, "job").verdict is Verdict.HELD
    bench.check()


def crash(bench: Bench, runs: int) -> None:
    """Have a process win some runs and die, so that its log is left."""
    script = bench.start(
        f"""
        backend = connect()
        for number in range({runs}):
            claim(backend, f"job {{number % 40}}", 1_000 + number)
        say(done=True)
        hear()
        """
    )
    script.listen()
    script.kill()
    assert bench.beside("-wal").stat().st_size > 0


def aged(path: Path, seconds: int = 60) -> None:
    """Have a file look as if it was written a while ago."""
    then = time.time() - seconds
    os.utime(path, (then, then))


@pytest.mark.parametrize("how", ["moved", "copied over"])
def test_a_log_left_by_a_crash_does_not_spoil_a_backup_that_is_put_in_place(
    bench: Bench, how: str
) -> None:
    first = bench.connect()
    fill(bench, first, 30, jobs=5)
    backup = bench.backup()
    first.close()
    content = backup.read_bytes()
    crash(bench, 300)
    aged(bench.beside("-wal"))
    if how == "moved":
        backup.replace(bench.path)
    else:
        shutil.copyfile(backup, bench.path)
    backend = bench.connect()
    for call in (backend.probe, lambda: bench.claim(backend, "job 0")):
        with pytest.raises(StoreUnsupported, match=r"do not fit.*remove 'store.db-wal'") as caught:
            call()
        assert "\n" not in str(caught.value)
        assert repr(str(bench.path)) in str(caught.value)
    backend.close()
    assert bench.path.read_bytes() == content, "the backup is as it was"
    for suffix in ("-wal", "-shm"):  # what the message asks for
        bench.beside(suffix).unlink(missing_ok=True)
    assert bench.claim(bench.connect(), "new").verdict is Verdict.GRANTED
    bench.check()


def test_a_file_copied_together_with_the_log_of_a_crash_is_a_store(bench: Bench) -> None:
    crash(bench, 300)
    folder = bench.folder / "elsewhere"
    folder.mkdir()
    for suffix in ("", "-wal"):
        shutil.copyfile(bench.beside(suffix), folder / f"store.db{suffix}")
    aged(folder / "store.db-wal")
    backend = bench.connect(folder / "store.db")
    assert backend.probe().warnings == ()
    assert len(backend.history(None, 1_000)) == 300


# -- earlier and other contents -------------------------------------------------------------------


def test_an_earlier_state_that_was_restored_through_sqlite_is_noticed(
    bench: Bench, errors: Callable[[], list[str]]
) -> None:
    """As by the ``.restore`` of SQLite's shell: the file is the same, its contents are not."""
    backend = bench.connect()
    fill(bench, backend, 10)
    backup = bench.backup()
    lease = bench.claim(backend, "later job").lease
    assert lease is not None
    for number in (10, 11, 12):
        bench.claim(backend, "later job", number)
    with closing(sqlite3.connect(backup)) as old, closing(sqlite3.connect(bench.path)) as new:
        old.backup(new)
    # It has the number of the job that the restored file does not know.
    assert bench.claim(bench.connect(), "another job").verdict is Verdict.GRANTED
    assert bench.claim(backend, "later job", 1).verdict is Verdict.GRANTED
    assert errors() == [said_of(bench, EARLIER)]
    assert [record.key.job for record in backend.history("another job", 10)] == ["another job"]
    again = bench.claim(backend, "later job").lease
    assert again is not None
    assert again.ref.token > lease.ref.token
    assert [len(backend.history(job, 10)) for job in ("another job", "later job")] == [1, 2]
    assert errors() == []
    bench.check()


def test_another_store_that_was_restored_through_sqlite_is_noticed(
    bench: Bench, errors: Callable[[], list[str]]
) -> None:
    other = bench.connect(bench.folder / "other.db")
    fill(bench, other, 3)
    other.close()
    backend = bench.connect()
    fill(bench, backend, 10)
    path = bench.folder / "other.db"
    with closing(sqlite3.connect(path)) as old, closing(sqlite3.connect(bench.path)) as new:
        old.backup(new)
    assert bench.claim(backend, "job 9", 9).verdict is Verdict.GRANTED
    assert errors() == [said_of(bench, OTHER)]
    assert len(backend.history(None, 100)) == 4


def test_tables_that_somebody_dropped_are_made_anew_as_another_store(
    bench: Bench, errors: Callable[[], list[str]]
) -> None:
    backend = bench.connect()
    fill(bench, backend, 10)
    store_id = backend.probe().store_id
    bench.sql("DROP TABLE leasecron_run")
    with pytest.raises(StoreRejected, match="no such table"):
        bench.claim(backend, "job 0")
    assert bench.claim(backend, "job 0").verdict is Verdict.GRANTED
    assert errors() == [said_of(bench, OTHER)]
    assert backend.probe().store_id != store_id


# -- a newer version at work ----------------------------------------------------------------------


def test_an_older_version_stops_writing_as_soon_as_a_newer_one_has_changed_the_file(
    bench: Bench,
) -> None:
    backend = bench.connect()
    lease = bench.claim(backend, "held").lease
    assert lease is not None
    assert bench.claim(backend, "other").verdict is Verdict.GRANTED
    list(backend.renew([lease.ref], 60_000))
    upgrade = bench.start(
        """
        connection = sqlite3.connect(path)
        with connection:
            connection.execute("UPDATE leasecron_meta SET value = '2' WHERE name = 'format'")
            connection.execute("ALTER TABLE leasecron_run RENAME COLUMN state TO condition")
            connection.execute("DROP TABLE leasecron_space")
        connection.close()
        """
    )
    upgrade.result()
    before = bench.sql("SELECT * FROM leasecron_run")
    calls: list[Callable[[], object]] = [
        lambda: bench.claim(backend, "held", 1),
        lambda: backend.renew([lease.ref], 60_000),
        lambda: backend.settle(lease.ref, FINISHED),
        lambda: backend.pending(["held"], 10),
        lambda: backend.prune(0, 10),
        backend.probe,
        lambda: bench.connect().history(None, 10),
    ]
    for call in (*calls, *calls):
        with pytest.raises(StoreUnsupported, match=r"store format 2, this version .* reads 1"):
            call()
    assert bench.sql("SELECT * FROM leasecron_run") == before


# -- no database, and a damaged one ---------------------------------------------------------------


def make_database(path: Path) -> bytes:
    """Make a database of another application, of some pages, and return its bytes."""
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("CREATE TABLE invoice (text)")
        connection.executemany("INSERT INTO invoice VALUES (?)", [("x" * 500,)] * 100)
    return path.read_bytes()


CONTENTS: dict[str, Callable[[bytes], bytes]] = {
    "a letter": lambda _whole: b"Dear Sir or Madam, " * 500,
    "a word": lambda _whole: b"hello",
    "a database cut in half": lambda whole: whole[: len(whole) // 2],
    "a database cut within its first page": lambda whole: whole[:2_000],
    "a database cut within its header": lambda whole: whole[:60],
    "a header with another name": lambda whole: b"SQLite format 4\0" + whole[16:],
    "a header with a wrong page size": lambda whole: whole[:16] + b"\x12\x34" + whole[18:],
    "a header of a newer SQLite": lambda whole: whole[:18] + b"\x09\x09" + whole[20:],
    "a header with an unknown schema": lambda whole: whole[:44] + b"\0\0\0\x09" + whole[48:],
}


@pytest.mark.parametrize("content", CONTENTS)
def test_what_is_no_sound_database_is_refused_at_the_start_and_left_as_it_is(
    bench: Bench, content: str
) -> None:
    found = CONTENTS[content](make_database(bench.path))
    bench.path.write_bytes(found)
    backend = bench.connect()
    for _ in range(2):
        with pytest.raises(StoreUnsupported) as caught:
            backend.probe()
        text = str(caught.value)
        assert repr(str(bench.path)) in text
        assert "choose another path" in text or "stop all instances" in text
        assert "\n" not in text
    backend.close()
    assert bench.path.read_bytes() == found


@pytest.mark.parametrize("content", CONTENTS)
def test_what_is_no_sound_database_is_an_outage_under_way_and_over_when_it_is_gone(
    bench: Bench, content: str
) -> None:
    whole = make_database(bench.beside(".made"))
    backend = bench.connect()
    lease = bench.claim(backend, "job").lease
    assert lease is not None
    bench.beside(".new").write_bytes(CONTENTS[content](whole))
    bench.beside(".new").replace(bench.path)
    calls: list[Callable[[], object]] = [
        lambda: bench.claim(backend, "job"),
        lambda: backend.renew([lease.ref], 60_000),
        lambda: backend.settle(lease.ref, FINISHED),
        lambda: backend.pending(["job"], 1),
    ]
    for call in calls:
        with pytest.raises(StoreError):
            call()
    bench.path.unlink()
    assert bench.claim(backend, "job").verdict is Verdict.GRANTED
    bench.check()


def make_fifo(path: Path) -> None:
    os.mkfifo(path)


def make_socket(path: Path) -> None:
    with closing(socket.socket(socket.AF_UNIX)) as made:
        folder = os.open(path.parent, os.O_RDONLY)  # a socket's path may not be long
        try:
            made.bind(f"/proc/self/fd/{folder}/{path.name}")
        finally:
            os.close(folder)


def make_link_to_device(path: Path) -> None:
    path.symlink_to("/dev/null")


NO_FILES: dict[str, Callable[[Path], None]] = {
    "a folder": Path.mkdir,
    "a pipe": make_fifo,
    "a socket": make_socket,
    "a device": make_link_to_device,
}


@pytest.mark.parametrize("what", NO_FILES)
def test_what_is_no_file_is_refused_at_the_start_and_under_way(bench: Bench, what: str) -> None:
    """To a device everything can be written, and nothing comes back: each claim would be won."""
    NO_FILES[what](bench.path)
    backend = bench.connect()
    for call in (backend.probe, lambda: bench.claim(backend, "job")):
        with pytest.raises(StoreUnsupported, match=r"store.db' is a .*: name a file"):
            call()
    if bench.path.is_dir():
        bench.path.rmdir()
    else:
        bench.path.unlink()
    assert bench.claim(backend, "job").verdict is Verdict.GRANTED
    bench.path.unlink()
    NO_FILES[what](bench.path)
    with pytest.raises(StoreUnsupported, match="name a file"):
        bench.claim(backend, "job")


def test_an_empty_file_becomes_a_store(bench: Bench) -> None:
    bench.path.touch()
    assert bench.connect().probe().warnings == ()


def test_a_link_that_leads_to_a_new_name_makes_the_file_there(bench: Bench) -> None:
    bench.path.symlink_to(bench.folder / "real.db")
    bench.connect().probe()
    assert (bench.folder / "real.db").stat().st_size > 0


@pytest.mark.parametrize("target", ["nowhere/real.db", "store.db"])
def test_a_link_that_leads_nowhere_is_said_to_do_so(bench: Bench, target: str) -> None:
    bench.path.symlink_to(bench.folder / target)
    backend = bench.connect()
    with pytest.raises(StoreError, match=r"nowhere|too many levels|does not exist"):
        backend.probe()
    with pytest.raises(StoreError, match=r"leads nowhere|too many levels"):
        bench.claim(backend, "job")


SEEDS = range(500 if os.environ.get("LEASECRON_SYNC_LONG") else 20)
STAMPS = [JobStamp(f"job {number}", "x") for number in range(20)]


def every_command(
    bench: Bench, backend: SQLiteLease, held: Sequence[LeaseRef]
) -> list[Callable[[], object]]:
    return [
        backend.probe,
        lambda: backend.register(STAMPS),
        lambda: fill(bench, backend, 20),
        lambda: bench.claim(backend, "new job"),
        lambda: backend.renew(held, 60_000),
        lambda: [backend.settle(ref, FINISHED) for ref in held[:5]],
        lambda: backend.pending([stamp.job for stamp in STAMPS], 100),
        lambda: backend.states([JobSpan("job 1", 0, 1 << 60)]),
        lambda: backend.history(None, 1_000),
        lambda: backend.history("held", 1_000),
        lambda: backend.jobs(100),
        lambda: backend.prune(0, 100),
    ]


def errors_of(calls: Sequence[Callable[[], object]]) -> list[str]:
    """Make calls; return what the library says of those that it cannot answer."""
    said = []
    for call in calls:
        try:
            call()
        except StoreError as error:
            said.append(str(error))
    return said


@pytest.mark.timeout(600)
@pytest.mark.slow
def test_whatever_page_is_damaged_each_command_answers_or_says_what_is_wrong(bench: Bench) -> None:
    """Bytes of one page are changed at random; no command does anything but answer or refuse."""
    backend = bench.connect()
    backend.register(STAMPS)
    fill(bench, backend, 200)
    leases = [bench.claim(backend, "held", number).lease for number in range(20)]
    held = [lease.ref for lease in leases if lease is not None]
    backend.prune(0, 10)
    backend.close()
    whole = bench.path.read_bytes()
    [(size,)] = bench.sql("PRAGMA page_size")
    told = 0
    for seed in SEEDS:
        chance = random.Random(seed)
        damaged = bytearray(whole)
        first = chance.randrange(len(whole) // size) * size
        for _ in range(chance.choice((1, 8, 200))):
            damaged[first + chance.randrange(size)] = chance.randrange(256)
        for suffix in ("-wal", "-shm"):
            bench.beside(suffix).unlink(missing_ok=True)
        bench.path.write_bytes(damaged)
        backend = bench.connect()
        said = errors_of(every_command(bench, backend, held))
        backend.close()
        told += len(said)
        for text in said:
            assert repr(str(bench.path)) in text or " of job " in text, (seed, text)
            assert "\n" not in text, (seed, text)
    assert told > len(SEEDS), "nothing was damaged"


# -- killed ---------------------------------------------------------------------------------------


@pytest.mark.slow
def test_eight_processes_make_a_file_together_while_some_of_them_are_killed(bench: Bench) -> None:
    chance = random.Random(1)
    for _ in range(8 if os.environ.get("LEASECRON_SYNC_LONG") else 1):
        for suffix in ("", "-wal", "-shm"):
            bench.beside(suffix).unlink(missing_ok=True)
        racers = [
            bench.start(
                """
                say(ready=True)
                hear()
                backend = connect()
                store_id = answered(backend.probe).store_id
                reply = answered(backend.claim, [claim_of("job")])[0]
                say(store_id=store_id, won=reply.lease is not None)
                backend.close()
                """
            )
            for _ in range(8)
        ]
        for racer in racers:
            racer.listen()
        for racer in racers:
            racer.tell()
        said = []
        for racer in racers[:4]:
            threading.Event().wait(chance.random() * 0.03)
            said += racer.kill()
        for racer in racers[4:]:
            said += racer.result()
        assert len({answer["store_id"] for answer in said}) == 1
        # The winner may have been killed before it could say so.
        assert sum(answer["won"] for answer in said) <= 1
        assert len(said) >= 4
        assert bench.sql("SELECT count(*) FROM leasecron_run") == [(1,)]
        bench.check()


@pytest.mark.slow
def test_what_was_answered_is_in_the_file_however_many_are_killed_in_their_commits(
    bench: Bench,
) -> None:
    chance = random.Random(2)
    racers = [
        bench.start(
            """
            backend = connect()
            answered(backend.probe)
            say(ready=True)
            hear()
            number = 0
            while True:
                number += 1
                reply = answered(backend.claim, [claim_of("job", number)])[0]
                if reply.lease is not None:
                    say(number=number, token=reply.lease.ref.token)
            """
        )
        for _ in range(6)
    ]
    for racer in racers:
        racer.listen()
    for racer in racers:
        racer.tell()
    said = []
    for racer in racers:
        threading.Event().wait(0.1 + chance.random() * 0.1)
        said += racer.kill()
    told = {answer["number"]: answer["token"] for answer in said}
    assert len(told) == len(said) > 20, "each run was won once"
    records = {
        record.key.scheduled_ms - bench.base_ms: record.token
        for record in bench.connect().history("job", 100_000)
    }
    assert told.items() <= records.items()
    assert len(set(records.values())) == len(records)
    bench.check()
