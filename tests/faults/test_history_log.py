"""The event log under threads, processes, forks and kills: every line is whole, none is lost."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path

import pytest

from leasecron_sync.testing import HistoryLog, read_history

ROOT = Path(__file__).parents[2]
WRITER = """
import sys
from leasecron_sync.testing import HistoryLog
log = HistoryLog(sys.argv[1])
print("ready", flush=True)
sys.stdin.readline()
number = 0
while number != int(sys.argv[3]):
    number += 1
    log.note("pruned", instance=sys.argv[2], number=number, reason="x" * (number % 9_000))
"""


def writer(path: Path, name: str, number: int) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(path), name, str(number)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    return process


def go(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None
    process.stdin.write(b"\n")
    process.stdin.flush()


def counts(path: Path) -> Counter[str]:
    entries = read_history(path).entries
    for name in {entry.instance for entry in entries}:
        numbers = [entry.number for entry in entries if entry.instance == name]
        assert sorted(numbers) == list(range(1, len(numbers) + 1))
    return Counter(entry.instance for entry in entries)


def test_threads_and_processes_share_a_file(tmp_path: Path) -> None:
    path = tmp_path / "log"
    processes = [writer(path, name, 400) for name in ("a", "b", "c")]
    log = HistoryLog(path)

    def write(name: str) -> None:
        for number in range(1, 401):
            log.note("pruned", instance=name, number=number)

    threads = [threading.Thread(target=write, args=(name,)) for name in ("d", "e", "f")]
    for process in processes:
        go(process)
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for process in processes:
        process.communicate(timeout=20)
    log.close()
    assert counts(path) == dict.fromkeys("abcdef", 400)
    assert read_history(path).cut == 0


@pytest.mark.timeout(120)
def test_a_kill_costs_one_line_at_most(tmp_path: Path) -> None:
    """One writer after the other is killed; another one writes into the same file all the time."""
    path = tmp_path / "log"
    steady = writer(path, "steady", -1)
    go(steady)
    killed = 5
    for number in range(killed):
        process = writer(path, f"killed {number}", -1)
        size = path.stat().st_size
        go(process)
        while path.stat().st_size < size + 60_000:
            os.sched_yield()
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=20)
    steady.send_signal(signal.SIGKILL)
    steady.communicate(timeout=20)
    found = counts(path)
    assert found["steady"] > 10
    assert read_history(path).cut <= killed + 1


def test_parent_and_child_write_into_one_log(tmp_path: Path) -> None:
    script = """
import os, sys
from leasecron_sync.testing import HistoryLog
log = HistoryLog(sys.argv[1])
log.note("pruned", instance="parent")
calls = [log.new_call()]
pid = os.fork()
name = "child" if pid == 0 else "parent"
log.note("pruned", instance=name, call=log.new_call())
if pid == 0:
    os._exit(0)
assert os.waitpid(pid, 0)[1] == 0
log.note("pruned", instance=name, call=log.new_call())
"""
    subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "log")],
        check=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    entries = read_history(tmp_path / "log").entries
    assert Counter(entry.instance for entry in entries) == {"parent": 3, "child": 1}
    calls = [entry.call for entry in entries if entry.call]
    assert len(set(calls)) == 3
