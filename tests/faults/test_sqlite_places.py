"""Where an SQLite file may lie, and what its disk may do: names, mounts, read-only, full."""

from __future__ import annotations

import os
import sqlite3
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock
from urllib.parse import quote

import pytest

from leasecron_sync.backends.base import BackendSettings
from leasecron_sync.backends.sqlite import SQLiteLease
from leasecron_sync.backends.urls import connect_lease
from leasecron_sync.errors import StoreError, StoreUnsupported
from leasecron_sync.model import Verdict
from tests.faults.edges import NOBODY, Bench

pytestmark = pytest.mark.timeout(120)  # on a busy machine; a few seconds each otherwise


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path)
    yield bench
    bench.end()


@pytest.fixture
def open_bench() -> Iterator[Bench]:
    """A bench in a folder that other users may enter, which those of pytest are not."""
    with tempfile.TemporaryDirectory(prefix="leasecron-") as name:
        Path(name).chmod(0o755)
        folder = Path(name) / "data"
        folder.mkdir()
        bench = Bench(folder)
        yield bench
        bench.end()
        folder.chmod(0o755)


@pytest.fixture
def mounts(bench: Bench) -> Bench:
    """A bench whose scripts may mount something for themselves alone."""
    script = bench.start("say(error=tried_to(private_mounts))")
    [said] = script.result()
    if said["error"]:
        pytest.skip(f"a process cannot have mounts of its own here: {said['error']}")
    return bench


# -- names ----------------------------------------------------------------------------------------

NAMES = [
    "with space.db",
    "question?mark.db",
    "hash#tag.db",
    "50%25.db",
    "a&b=c;d.db",
    "quo'te\".db",
    "line\nbreak.db",
    "back\\slash.db",
    "caf\u00e9 \u6642\u523b.db",
    "file:memory.db",
    "-dash.db",
    os.fsdecode(b"not utf-8 \xff.db"),
]


@pytest.mark.parametrize("name", NAMES)
def test_any_name_is_one_file_for_paths_bytes_and_urls(bench: Bench, name: str) -> None:
    bench.path = bench.folder / name
    by_text = bench.connect(str(bench.path))
    assert bench.claim(by_text, "job").verdict is Verdict.GRANTED
    for path in (bench.path, os.fsencode(bench.path)):
        assert bench.claim(bench.connect(path), "job").verdict is Verdict.HELD
    assert set(bench.folder.iterdir()) == {bench.beside(end) for end in ("", "-wal", "-shm")}
    assert repr(by_text) == f"SQLiteLease({str(bench.path)!r})"


@pytest.mark.parametrize("name", [name for name in NAMES if "\udcff" not in name])
@pytest.mark.parametrize("how", ["absolute", "relative"])
def test_a_url_names_a_file_with_any_name(
    bench: Bench, name: str, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.path = bench.folder / name
    bench.claim(bench.connect(), "job")
    monkeypatch.chdir(bench.folder)
    backend = connect_lease("sqlite:///" + quote(str(bench.path) if how == "absolute" else name))
    backend.open(BackendSettings("space", "by url", 5_000))
    try:
        assert [record.key.job for record in backend.history(None, 10)] == ["job"]
    finally:
        backend.close()


def test_a_relative_path_stays_the_same_file_when_the_working_directory_changes(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(bench.folder)
    backend = bench.connect("store.db")
    elsewhere = bench.folder / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    assert bench.claim(backend, "job").verdict is Verdict.GRANTED
    for lane in backend.lanes():
        with lane.lock:
            lane.drop()
    assert bench.claim(backend, "job").verdict is Verdict.HELD
    assert list(elsewhere.iterdir()) == []
    assert bench.path.exists()
    assert repr(backend) == "SQLiteLease('store.db')"


def test_a_path_relative_to_a_directory_that_is_gone_is_refused(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = bench.folder / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.raises(ValueError, match=r"'store.db'.*give an absolute path"):
        SQLiteLease("store.db")


@pytest.mark.parametrize("length", [504, 505, 600, 5_000])
def test_a_path_longer_than_sqlite_takes_is_refused_with_both_lengths(
    bench: Bench, length: int
) -> None:
    folder = bench.folder
    while len(str(folder)) < min(length, 600) - 150:
        folder /= "d" * 50
    folder.mkdir(parents=True)
    backend = bench.connect(folder / ("x" * (length - len(str(folder)) - 1)))
    if length == 504:
        assert bench.claim(backend, "job").verdict is Verdict.GRANTED
        return
    with pytest.raises(StoreUnsupported, match=rf"is {length} bytes long.*at most 504: choose"):
        backend.probe()
    with pytest.raises(StoreError, match=r"unable to open|too long"):
        bench.claim(backend, "job")


def test_a_second_name_of_the_file_is_warned_about_at_the_start(bench: Bench) -> None:
    """SQLite names the log after the name by which the file was opened."""
    bench.connect().probe()
    other = bench.beside(".other")
    os.link(bench.path, other)
    [warning] = bench.connect().probe().warnings
    assert "has 2 names (hard links)" in warning
    assert repr(str(bench.path)) in warning
    assert "\n" not in warning
    other.unlink()
    assert bench.connect().probe().warnings == ()


# -- file systems ---------------------------------------------------------------------------------


def test_a_file_system_without_a_write_ahead_log_works_and_is_warned_about(bench: Bench) -> None:
    """SQLite's own file system without shared memory takes the place of such a disk."""
    plain = sqlite3.connect

    def without_log(path: str, **options: Any) -> sqlite3.Connection:  # noqa: ANN401 - passed on
        connection: sqlite3.Connection = plain(
            f"file:{quote(path)}?vfs=unix-dotfile", uri=True, **options
        )
        return connection

    with mock.patch("sqlite3.connect", without_log):
        one, other = bench.connect(call_timeout_ms=200), bench.connect(call_timeout_ms=200)
        [warning] = one.probe().warnings
        assert "cannot have a write-ahead log where it lies" in warning
        lease = bench.claim(one, "job").lease
        assert lease is not None
        assert bench.claim(other, "job").verdict is Verdict.HELD
        assert [x.value for x in other.renew([lease.ref], 60_000)] == ["renewed"]
        assert not bench.beside("-wal").exists()


def test_a_network_file_system_is_refused_by_name(mounts: Bench) -> None:
    """A real mount, of a kind that the kernel shows as that of sshfs."""
    script = mounts.start(
        """
        from tests.faults.small_fuse import serve_empty_folder
        private_mounts()
        folder = os.path.join(os.path.dirname(path), "remote")
        os.mkdir(folder)
        end = serve_empty_folder(folder, "sshfs")
        backend = connect(os.path.join(folder, "jobs.db"))
        say(probe=tried(backend.probe))
        os.symlink(folder, folder + "-link")
        say(probe=tried(connect(os.path.join(folder + "-link", "jobs.db")).probe))
        say(local=tried(connect().probe) is not None)
        end()
        """
    )
    first, by_link, local = script.result()
    for said in (first, by_link):
        kind, text = said["probe"]
        assert kind == "StoreUnsupported"
        assert "network file system (fuse.sshfs, mounted on" in text
        assert "remote/jobs.db'" in text
        assert "put it on a disk of this host" in text
    assert local == {"local": True}


def test_a_file_that_is_mounted_by_itself_is_refused(mounts: Bench) -> None:
    """As containers do it: the log beside it would be another one in each."""
    script = mounts.start(
        """
        private_mounts()
        folder = os.path.dirname(path)
        connect().probe()
        inside = os.path.join(folder, "inside")
        os.mkdir(inside)
        file = os.path.join(inside, "jobs.db")
        open(file, "w").close()
        mount(path, file, "none", 4096)
        say(probe=tried(connect(file).probe))
        call("umount", os.fsencode(file))
        mount(folder, inside, "none", 4096)
        say(warnings=connect(os.path.join(inside, "store.db")).probe().warnings)
        """
    )
    alone, with_folder = script.result()
    kind, text = alone["probe"]
    assert kind == "StoreUnsupported"
    assert "is mounted by itself" in text
    assert "mount its folder" in text
    assert with_folder == {"warnings": []}


# -- read-only ------------------------------------------------------------------------------------

AS_NOBODY = f"""
import os
if os.geteuid() == 0:
    os.setgroups([])
    os.setgid({NOBODY})
    os.setuid({NOBODY})
say(uid=os.geteuid())
"""


@pytest.mark.parametrize(
    "what", ["file", "folder", "unreadable file", "unreadable folder", "unreachable folder"]
)
def test_without_permission_the_store_is_refused_with_who_needs_what_until_it_is_given(
    open_bench: Bench, what: str
) -> None:
    """In a process that is not root, which permissions would not stop."""
    bench = open_bench
    bench.connect().probe()
    bench.end()
    mode = 0 if "unreadable" in what else 0o444 if what == "file" else 0o555
    place = bench.path if "file" in what else bench.folder
    open_to_all(bench)
    if what == "unreachable folder":
        place, mode = bench.folder.parent, 0o700 if os.geteuid() == 0 else 0
    place.chmod(mode)
    script = bench.start(
        AS_NOBODY
        + """
backend = connect(timeout_ms=500)
say(probe=tried(backend.probe), claim=claim(backend, "job"), states=tried(backend.states, []))
hear()
# The connection that could only read is given up by the first call that would write.
say(claims=[claim(backend, "job") for _ in range(2)])
say(probe=backend.probe().version)
backend.close()
"""
    )
    uid = script.listen()["uid"]
    assert uid != 0
    said = script.listen()
    for kind, text in (said["probe"], said["claim"]):
        assert kind == "StoreRejected"
        assert repr(str(bench.path)) in text
        assert f"user {uid} must be able to read and write the file and its folder" in text
        assert "\n" not in text
    open_to_all(bench)
    assert "granted" in script.ask()["claims"]
    assert script.result()[0]["probe"] == f"SQLite {sqlite3.sqlite_version}"
    bench.check()


def test_a_folder_that_is_closed_under_way_is_told_as_that_and_the_file_is_kept(
    open_bench: Bench,
) -> None:
    bench = open_bench
    bench.connect().probe()
    bench.end()
    open_to_all(bench)
    script = bench.start(
        AS_NOBODY
        + """
backend, other = connect(), connect()
say(claims=[claim(backend, "before"), claim(other, "other")])
hear()
say(claim=claim(backend, "job"), pending=tried(backend.pending, ["job"], 10))
other.close()
other = connect()
say(pending=tried(other.pending, ["job"], 10), logged=logged)
hear()
say(claims=[claim(backend, "before"), claim(other, "job")], logged=logged)
backend.close()
other.close()
"""
    )
    uid = script.listen()["uid"]
    assert script.listen() == {"claims": ["granted", "granted"]}
    bench.folder.chmod(0)
    first, second = script.ask(), script.listen()
    for kind, text in (first["claim"], first["pending"], second["pending"]):
        assert kind == "StoreRejected"
        assert repr(str(bench.path)) in text
        assert f"permission denied: user {uid} must be able to read and write the file" in text
    assert second["logged"] == []
    open_to_all(bench)
    assert script.ask() == {"claims": ["held", "granted"], "logged": []}
    assert script.result() == []
    bench.check()


def open_to_all(bench: Bench) -> None:
    bench.folder.parent.chmod(0o755)
    bench.folder.chmod(0o777)
    for path in bench.folder.iterdir():
        path.chmod(0o666)


def test_a_disk_that_becomes_read_only_under_way_is_an_outage_until_it_is_writable_again(
    mounts: Bench,
) -> None:
    """As the kernel makes it after an error of the disk, with files open for writing."""
    script = mounts.start(
        """
        private_mounts()
        folder = os.path.join(os.path.dirname(path), "disk")
        os.mkdir(folder)
        mount("tmpfs", folder, "tmpfs", 0, "size=4m")
        backend = connect(os.path.join(folder, "jobs.db"), timeout_ms=500)
        lease = backend.claim([claim_of("held")])[0].lease
        backend.renew([lease.ref], 60_000)
        backend.close()  # a mount with files open for writing cannot be made read-only by hand
        mount("none", folder, "tmpfs", 32 | 1)
        backend.open(BackendSettings("space", me, 500))
        say(claim=claim(backend, "job"), renew=tried(backend.renew, [lease.ref], 60_000),
            settle=tried(backend.settle, lease.ref, FINISHED))
        mount("none", folder, "tmpfs", 32)
        [renewed] = backend.renew([lease.ref], 60_000)
        say(claim=claim(backend, "job"), renew=renewed.value,
            settle=backend.settle(lease.ref, FINISHED).accepted)
        backend.close()
        """
    )
    during, after = script.result()
    for kind, text in during.values():
        assert kind in ("StoreRejected", "StoreUnavailable")
        assert "disk/jobs.db'" in text
    assert after == {"claim": "granted", "renew": "renewed", "settle": True}


# -- full -----------------------------------------------------------------------------------------

FULL = """
def full(step):
    # What a call brings when there is no room, and again when there is.
    fill()
    first = step()
    again = step()
    make_room()
    return [first, again, step()]

backend = connect(place, timeout_ms=2_000)
say(start=full(lambda: tried(lambda: backend.probe().version)))
lease = backend.claim([claim_of("held")])[0].lease
decisions = ["d%d" % n for n in range(20)]
say(claim=full(lambda: [claim(backend, "x" * 190 + str(n), n, d) for n, d in enumerate(decisions)]),
    others=[claim(backend, "x" * 190 + str(n), n) for n in range(20)])
say(renew=full(lambda: tried(lambda: [x.value for x in backend.renew([lease.ref], 60_000)])))
settlement = Settlement(Outcome.FAILED, "because " * 120, 60_000)
say(settle=full(lambda: tried(lambda: backend.settle(lease.ref, settlement).state.value)),
    records=len(backend.history(None, 100)), token=lease.ref.token)
backend.close()
with sqlite3.connect(place) as connection:
    say(sound=connection.execute("PRAGMA integrity_check").fetchall(),
        state=connection.execute("SELECT count(*) FROM leasecron_run").fetchall())
connection.close()
"""
ON_A_SMALL_DISK = """
private_mounts()
folder = os.path.join(os.path.dirname(path), "disk")
os.mkdir(folder)
mount("tmpfs", folder, "tmpfs", 0, "size=1m")
place, ballast = os.path.join(folder, "jobs.db"), os.path.join(folder, "ballast")

def fill():
    with open(ballast, "wb", 0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            pass

def make_room():
    os.unlink(ballast)
"""
WITH_A_LIMIT = """
import resource
place = path

def fill():
    # No file may grow: the log has been written up to here.
    size = max([os.path.getsize(path + end) for end in ("", "-wal") if os.path.exists(path + end)]
               or [0])
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))

def make_room():
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
"""


def judge_full(said: list[dict[str, Any]], *, advice: str, least: int) -> None:
    start, claim, renew, settle, end = said
    told: list[list[str]] = [*start["start"][:2]]
    assert start["start"][2] == f"SQLite {sqlite3.sqlite_version}"
    for answers in claim["claim"][:2]:
        told += [answer for answer in answers if not isinstance(answer, str)]
    # A claim that was answered before is answered again, and nobody else gets the run.
    assert claim["claim"][2] == ["granted"] * 20
    assert claim["others"] == ["held"] * 20
    told += [answer for answer in (*renew["renew"][:2], *settle["settle"][:2]) if len(answer) == 2]
    assert len(told) >= least, "the disk was not full"
    assert renew["renew"][2] == ["renewed"]
    assert settle["settle"][2] == "waiting"
    assert settle["records"] == 21
    assert (end["sound"], end["state"]) == ([["ok"]], [[21]])
    for kind, text in told:
        assert kind in ("StoreRejected", "StoreUnavailable", "OutcomeUnknown")
        assert "db'" in text
        assert advice in text
        assert "\n" not in text


def test_a_full_disk_wins_nobody_a_run_and_is_over_when_there_is_room(mounts: Bench) -> None:
    judge_full(
        mounts.start(ON_A_SMALL_DISK + FULL).result(), advice="free space on its disk", least=44
    )


def test_a_file_that_may_not_grow_wins_nobody_a_run_and_is_over_when_it_may(bench: Bench) -> None:
    """The limit of a process takes the place of the disk's, for who may mount nothing."""
    judge_full(bench.start(WITH_A_LIMIT + FULL).result(), advice="disk", least=6)


# -- no descriptors -------------------------------------------------------------------------------


def test_a_process_without_free_descriptors_is_told_so(bench: Bench) -> None:
    script = bench.start(
        """
        import resource
        backend = connect(timeout_ms=500)
        backend.probe()
        backend.close()
        backend.open(BackendSettings("space", me, 500))
        taken = []
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
        try:
            while True:
                taken.append(os.open(os.devnull, os.O_RDONLY))
        except OSError:
            pass
        say(claim=claim(backend, "job"))
        for number in taken:
            os.close(number)
        say(claim=claim(backend, "job"))
        """
    )
    during, after = script.result()
    assert during["claim"][0] == "StoreUnavailable"
    assert "too many open files" in during["claim"][1]
    assert after["claim"] == "granted"
