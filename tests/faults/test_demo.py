"""The demo as its users see it: a process that starts others, kills one, and leaves nothing."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Callable, NamedTuple, Optional

import pytest

from leasecron_sync.cli import demo_crew, main
from leasecron_sync.cli.demo_instance import LEASE_MS

ROOT = Path(__file__).parents[2]
LIMIT_S = 90
ROWS, COLUMNS = 24, 80

pytestmark = pytest.mark.timeout(LIMIT_S + 30)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Where the demo makes its temporary folder."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    return folder


@pytest.fixture
def busy() -> Iterator[None]:
    """Processes that want more than all processors."""
    command = [sys.executable, "-c", "while True: pass"]
    number = 4 * (os.cpu_count() or 1)
    processes = [subprocess.Popen(command) for _number in range(number)]
    yield
    for process in processes:
        process.kill()
    for process in processes:
        process.wait()


def start(
    place: Path, *, stdin: Optional[int] = None, stdout: int, stderr: int
) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(place)}
    environment.pop("NO_COLOR", None)
    return subprocess.Popen(
        [sys.executable, "-m", "leasecron_sync", "demo"],
        env={**environment, "TERM": "xterm", "PYTHONIOENCODING": "utf-8"},
        text=True,
        stdin=stdin,
        stdout=stdout,
        stderr=stderr,
    )


def started(place: Path) -> subprocess.Popen[str]:
    return start(place, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def lines_until(process: subprocess.Popen[str], pattern: str) -> list[str]:
    """Read until a line matches."""
    assert process.stdout is not None
    lines: list[str] = []
    for line in process.stdout:
        lines.append(line)
        if re.search(pattern, line):
            return lines
    pytest.fail(f"no {pattern!r} in {lines}")


def pids_in(lines: Sequence[str]) -> dict[str, int]:
    found = (re.fullmatch(r"(\w) is ready \(pid (\d+)\)", line.strip()) for line in lines)
    return {match[1]: int(match[2]) for match in found if match}


def is_there(pid: int) -> bool:
    """Tell whether a process lives; one that nobody has waited for yet does not."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return status.rpartition(")")[2].split()[0] not in "ZX"


def eventually(condition: Callable[[], object]) -> bool:
    end = time.monotonic() + 10
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


def nothing_is_left(place: Path, pids: Sequence[int]) -> bool:
    return not list(place.iterdir()) and not [pid for pid in pids if is_there(pid)]


# -- a whole course --------------------------------------------------------------------------------


class Course(NamedTuple):
    status: int
    out: str
    err: str


def course(place: Path) -> Course:
    with started(place) as process:
        out, err = process.communicate(timeout=LIMIT_S)
    return Course(process.returncode, out, err)


def fact(out: str, name: str) -> str:
    (found,) = re.findall(rf"^  {name} +(.+)$", out, re.MULTILINE)
    return str(found)


def check(done: Course, place: Path) -> None:
    """Hold the summary against the lines that were written on the way."""
    assert (done.status, done.err) == (0, "")
    assert "\x1b" not in done.out
    course_lines, summary = done.out.split("\nSummary\n")
    lines = course_lines.splitlines()
    pids = pids_in(lines)
    assert sorted(pids) == ["A", "B", "C"]
    assert nothing_is_left(place, list(pids.values()))

    (kill,) = (line for line in lines if "SIGKILL" in line)
    killed, pid, run = re.findall(r"^(\w) \(pid (\d+)\) is killed .* of (report \S+)", kill)[0]
    assert pids[killed] == int(pid)
    assert fact(summary, "killed") == f"{killed}, in the middle of {run}"
    after_kill = lines[lines.index(kill) + 1 :]
    assert not [line for line in after_kill if line.startswith(f"{killed} ")]
    assert f"{killed} runs {run}" in lines[: lines.index(kill)]

    # On a machine that stands still others are taken over, too, and this one twice.
    taker, attempt = re.findall(
        rf"^(\w) took {run} over as attempt (\d+)", "\n".join(after_kill), re.MULTILINE
    )[-1]
    assert int(attempt) >= 2
    assert taker != killed
    assert fact(summary, "taken over") == f"{run} by {taker}, attempt {attempt}, finished"
    assert f"{taker} finished {run}, attempt {attempt}" in after_kill

    assert fact(summary, "doubled") == "0"
    assert fact(summary, "lost") == "0"
    times, finished = map(int, re.findall(r"\d+", fact(summary, "schedule")))
    assert times == finished
    runs = {
        name: int(n) for name, n in re.findall(r"(\w) (\d+) runs?\b", fact(summary, "instances"))
    }
    assert sum(runs.values()) == finished
    # What ended while the summary was made is counted on one side only.
    told = Counter(line[0] for line in lines if re.match(r"\w finished ", line))
    assert all(abs(told[name] - runs[name]) <= 2 for name in runs)
    assert runs[killed] == told[killed]
    assert re.search(rf"{killed} \d+ runs? \(killed\)", fact(summary, "instances"))


def takeover_ms(out: str) -> float:
    number, unit = re.findall(r"^ +([\d.]+) (ms|s) after the kill", out, re.MULTILINE)[0]
    return float(number) * (1 if unit == "ms" else 1000)


@pytest.mark.timing
def test_demo_shows_a_takeover_and_its_example_runs(place: Path, tmp_path: Path) -> None:
    done = course(place)
    check(done, place)
    # It is counted from the kill, the lease from the last heartbeat before.
    assert LEASE_MS / 8 < takeover_ms(done.out) < LEASE_MS + 5_000

    example = re.findall(
        r"^from leasecron_sync .*?run_forever\(\)\n", done.out, re.MULTILINE | re.DOTALL
    )[0]
    assert len(example.splitlines()) == 10
    (tmp_path / "jobs.py").write_text(example)
    with subprocess.Popen(
        [sys.executable, "-u", "-W", "error", "jobs.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        lines_until(process, r"^invoices of .* attempt 1$")
        process.terminate()
        _out, err = process.communicate(timeout=20)
    assert (process.returncode, err) == (0, "")


@pytest.mark.timing
@pytest.mark.slow
@pytest.mark.usefixtures("busy")
def test_demo_works_on_a_busy_machine(place: Path) -> None:
    check(course(place), place)


# -- an end before its end -------------------------------------------------------------------------


@pytest.fixture
def hangs_up() -> Iterator[None]:
    """Let programs be ended by SIGHUP, also where the tests run under ``nohup``."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.usefixtures("hangs_up")
@pytest.mark.parametrize(
    ("number", "status", "said"),
    [
        (signal.SIGINT, 130, "interrupted"),
        (signal.SIGTERM, 143, "ended by SIGTERM"),
        (signal.SIGHUP, 129, "ended by SIGHUP"),
    ],
)
def test_a_signal_ends_everything(
    place: Path, number: signal.Signals, status: int, said: str
) -> None:
    with started(place) as process:
        pids = pids_in(lines_until(process, "finished report"))
        process.send_signal(number)
        _out, err = process.communicate(timeout=20)
    assert process.returncode == status
    assert err == f"leasecron-sync: {said}\n"
    assert nothing_is_left(place, list(pids.values()))


def test_a_signal_right_at_the_start_ends_everything(place: Path) -> None:
    with started(place) as process:
        lines_until(process, "Three instances")
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=20)
    assert (process.returncode, out, err) == (130, "", "leasecron-sync: interrupted\n")
    assert nothing_is_left(place, [])


def test_instances_do_not_outlive_the_demo(place: Path) -> None:
    with started(place) as process:
        pids = pids_in(lines_until(process, "finished report"))
        process.kill()
        process.communicate(timeout=20)
    assert len(pids) == 3
    assert eventually(lambda: nothing_is_left(place, list(pids.values())))


def test_an_output_that_nobody_reads_ends_it_silently(place: Path) -> None:
    with started(place) as process:
        lines = lines_until(process, "C is ready|B is ready|A is ready")
        assert process.stdout is not None
        process.stdout.close()
        assert process.stderr is not None
        assert process.stderr.read() == ""
    assert process.returncode == 141
    assert nothing_is_left(place, list(pids_in(lines).values()))


def test_an_instance_that_ends_by_itself_is_told_of_in_one_line(
    place: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TMPDIR", str(place))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setattr(demo_crew, "_PROGRAM", "raise SystemExit('there\\nis no disk')")
    assert main(["demo"]) == 1
    err = capfd.readouterr().err
    assert re.fullmatch(r"leasecron-sync: instance [ABC] ended by itself: is no disk\n", err)
    assert nothing_is_left(place, [])


# -- on a terminal ---------------------------------------------------------------------------------


class Terminal:
    """As much of a terminal as the demo needs."""

    def __init__(self) -> None:
        self.lines = [""]
        self._row = self._column = 0
        self.shows_cursor = True
        self.tops: set[int] = set()

    def feed(self, text: str) -> None:
        for part in re.findall(r"\x1b\[[0-9;?]*[A-Za-z]|.", text, re.DOTALL):
            if part == "\n":
                self._row += 1
                if self._row == len(self.lines):
                    self.lines.append("")
            elif part == "\r":
                self._column = 0
            elif part[0] != "\x1b":
                line = self.lines[self._row].ljust(self._column)
                self.lines[self._row] = line[: self._column] + part + line[self._column + 1 :]
                self._column += 1
                assert self._column < COLUMNS, f"too long: {line}"
            else:
                self._control(part)

    def _control(self, part: str) -> None:
        if part[-1] == "A":
            self._row -= int(part[2:-1])
            self._column = 0
            self.tops.add(self._row)
            assert self._row >= len(self.lines) - ROWS, "it went above the first line"
        elif part[-1] == "K":
            self.lines[self._row] = self.lines[self._row][: self._column]
        elif part in ("\x1b[?25l", "\x1b[?25h"):
            self.shows_cursor = part[-1] == "h"
        else:
            assert part[-1] == "m", part


def on_a_terminal(place: Path, interrupt_at: Optional[str] = None) -> tuple[int, Terminal]:
    """Run the demo on a terminal of 80 columns and 24 lines."""
    mine, its = pty.openpty()
    fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    terminal, data = Terminal(), b""
    with start(place, stdin=its, stdout=its, stderr=its) as process:
        os.close(its)
        while True:
            readable, _, _ = select.select([mine], [], [], LIMIT_S)
            assert readable, "it hangs"
            try:
                piece = os.read(mine, 65536)
            except OSError:  # how a terminal of Linux tells that its other side was closed
                break
            data += piece
            if interrupt_at is not None and interrupt_at.encode() in data:
                process.send_signal(signal.SIGINT)
                interrupt_at = None
    os.close(mine)
    terminal.feed(data.decode())
    return process.returncode, terminal


def test_demo_redraws_a_table_on_a_terminal(place: Path) -> None:
    status, terminal = on_a_terminal(place)
    assert status == 0
    assert terminal.shows_cursor
    assert len(terminal.tops) == 1
    text = "\n".join(terminal.lines)
    assert text.count("leasecron-sync demo ") == 1
    assert text.count("KILLED") == 2  # the instance and its run
    assert text.count("attempt 2") >= 2
    assert "█ done" in text
    assert "\n  lost         0\n" in text


def test_an_interrupted_terminal_is_given_back(place: Path) -> None:
    status, terminal = on_a_terminal(place, interrupt_at="done")
    assert status == 130
    assert terminal.shows_cursor
    assert terminal.lines[-2] == "leasecron-sync: interrupted"
    assert nothing_is_left(place, [])
