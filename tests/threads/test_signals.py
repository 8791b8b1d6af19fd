"""Signals, in processes of their own: during start, during stop, and around run_forever()."""

from __future__ import annotations

import signal
import sqlite3
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Optional

import pytest

PRELUDE = """
import os, signal, sys, threading, time
from leasecron_sync import *
from leasecron_sync.backends import sqlite as sqlite_module
path = sys.argv[1]

def say(text):
    os.write(1, (text + "\\n").encode())

scheduler = Scheduler(SQLiteLease(path))
"""


class Program:
    """A script in a process of its own."""

    def __init__(self, script: str, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", PRELUDE + textwrap.dedent(script), *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def send(self, number: int) -> None:
        self.process.send_signal(number)

    def end(self, limit_s: float = 15) -> tuple[Optional[int], str, str]:
        """Wait for the end; status None if it did not come in time."""
        try:
            out, err = self.process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            out, err = self.process.communicate()
            return None, out, err
        return self.process.returncode, out, err

    def __enter__(self) -> Program:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "store.db"


@pytest.fixture
def locked(path: Path) -> Iterator[sqlite3.Connection]:
    """The store file while another process is in a long transaction."""
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("BEGIN IMMEDIATE")
        yield connection


FOREVER = """
entered = threading.Event()

def handler(run):
    say("entered")
    run.wait(60)

scheduler.add_job(handler, every(seconds=1), name="job")
scheduler.run_forever()
say("ended")
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_first_signal_ends_run_forever_with_status_0(path: Path, number: int) -> None:
    with Program(FOREVER, str(path)) as program:
        assert program.line() == "entered"
        program.send(number)
        status, out, err = program.end()
    assert (status, err) == (0, "")
    assert "ended" in out


STUBBORN = """
def handler():
    say("entered")
    end = time.monotonic() + 60
    while time.monotonic() < end:
        time.sleep(1)

scheduler.add_job(handler, every(seconds=1), name="job")
scheduler.run_forever()
"""


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (signal.SIGTERM, signal.SIGTERM),
        (signal.SIGINT, signal.SIGINT),
        (signal.SIGTERM, signal.SIGINT),
        (signal.SIGINT, signal.SIGTERM),
    ],
)
def test_the_second_signal_ends_run_forever_at_once(path: Path, first: int, second: int) -> None:
    with Program(STUBBORN, str(path)) as program:
        assert program.line() == "entered"
        program.send(first)
        time.sleep(0.7)
        assert program.process.poll() is None, "the first signal lets the handler end"
        program.send(second)
        status, _, err = program.end(5)
    assert status == -second
    assert err == ""


def test_a_signal_while_run_forever_starts_ends_it_with_status_0(
    path: Path, locked: sqlite3.Connection
) -> None:
    script = """
    say("starting")
    scheduler.run_forever()
    """
    with Program(script, str(path)) as program:
        assert program.line() == "starting"
        time.sleep(0.5)  # start() asks the store, and waits for the file
        program.send(signal.SIGTERM)
        status, _, err = program.end(15)
    del locked
    assert (status, err) == (0, "")


def test_a_signal_between_two_waits_of_run_forever_is_not_lost(path: Path) -> None:
    """A signal handler may interrupt its own thread while that holds the lock of an event."""
    script = """
    def tracer(frame, event, argument):
        if frame.f_code.co_filename != threading.__file__:
            return tracer
        of = frame.f_locals.get("self")
        if frame.f_code.co_name == "wait" and isinstance(of, threading.Event):
            caller = frame.f_back.f_back
            if caller.f_code.co_name == "run_forever":
                return in_wait
        return None

    def in_wait(frame, event, argument):
        if event == "line" and frame.f_locals["self"]._cond._lock.locked():
            sys.settrace(None)
            frame.f_trace = None
            os.kill(os.getpid(), signal.SIGTERM)
        return in_wait

    # If it holds no such lock while it waits, the signal comes later.
    later = threading.Timer(3, os.kill, (os.getpid(), signal.SIGTERM))
    later.daemon = True
    later.start()
    sys.settrace(tracer)
    scheduler.run_forever()
    say("ended")
    """
    with Program(script, str(path)) as program:
        status, out, _ = program.end(10)
    assert status == 0, "run_forever() hangs"
    assert "ended" in out


def test_run_forever_outside_the_main_thread_ends_by_stop(path: Path) -> None:
    script = """
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    ran = threading.Event()
    scheduler.add_job(ran.set, every(seconds=1), name="job")
    thread = threading.Thread(target=scheduler.run_forever)
    thread.start()
    assert ran.wait(5)
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before
    scheduler.stop()
    thread.join(5)
    say("ended" if not thread.is_alive() else "hangs")
    """
    with Program(script, str(path)) as program:
        status, out, err = program.end()
    assert (status, out, err) == (0, "ended\n", "")


def test_run_forever_ends_when_a_handler_stops_the_scheduler(path: Path) -> None:
    script = """
    scheduler.add_job(lambda run: scheduler.stop(), every(seconds=1), name="job")
    scheduler.run_forever()
    say("ended " + scheduler.status().state)
    """
    with Program(script, str(path)) as program:
        status, out, err = program.end()
    assert (status, out, err) == (0, "ended stopped\n", "")


def test_run_forever_restores_the_signal_handlers(path: Path) -> None:
    script = """
    mine = lambda number, frame: say("mine")
    signal.signal(signal.SIGTERM, mine)
    timer = threading.Timer(0.3, scheduler.stop)
    timer.start()
    scheduler.run_forever()
    assert signal.getsignal(signal.SIGTERM) is mine
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    say("ended")
    """
    with Program(script, str(path)) as program:
        status, out, err = program.end()
    assert (status, out, err) == (0, "ended\n", "")


def test_run_forever_works_where_a_signal_handler_was_set_by_other_code(path: Path) -> None:
    """``signal.getsignal`` knows nothing of handlers that were not set from Python."""
    script = """
    import ctypes
    libc = ctypes.CDLL(None)
    libc.signal.restype = ctypes.c_void_p
    keep = ctypes.CFUNCTYPE(None, ctypes.c_int)(lambda number: None)
    real = signal.getsignal
    signal.getsignal = lambda number: None if number == signal.SIGTERM else real(number)
    threading.Timer(0.3, scheduler.stop).start()
    scheduler.run_forever()
    say("ended")
    """
    with Program(script, str(path)) as program:
        status, out, err = program.end()
    assert (status, out, err) == (0, "ended\n", "")


def test_stop_in_a_signal_handler_during_start(path: Path) -> None:
    """At many moments of the start; in the end it is stopped, and nothing hangs."""
    script = """
    came_to = []

    def stop(number, frame):
        came_to.append(scheduler.status().state)
        scheduler.stop()

    signal.signal(signal.SIGALRM, stop)
    scheduler.add_job(lambda: None, every(seconds=1), name="job")
    scheduler.on("run_finished", lambda event: None)
    scheduler.start()
    scheduler.stop()
    for number in range(60):
        signal.setitimer(signal.ITIMER_REAL, 0.0002 + number * 0.0001)
        scheduler.start()
        end = time.monotonic() + 5
        while signal.getitimer(signal.ITIMER_REAL)[0] > 0:
            time.sleep(0.0005)
        time.sleep(0.001)
        if came_to[-1] == "stopped":  # on a busy machine, before the start had begun
            scheduler.stop()
        assert scheduler.status().state == "stopped", (number, scheduler.status())
        assert scheduler._lifecycle.stopped.is_set(), number
    left = [t.name for t in threading.enumerate() if t.name.startswith("leasecron")]
    say("ended %s %s" % (left, "starting" in came_to))
    """
    with Program(script, str(path)) as program:
        status, out, err = program.end(25)
    assert (status, out, err) == (0, "ended [] True\n", "")


def test_stop_in_a_signal_handler_at_every_line_of_start(path: Path) -> None:
    script = """
    import leasecron_sync.engine.lifecycle as lifecycle
    scheduler.add_job(lambda: None, every(seconds=1), name="job")
    scheduler.on("run_finished", lambda event: None)
    signal.signal(signal.SIGALRM, lambda number, frame: scheduler.stop())
    lines = []
    chosen = [None]

    def tracer(frame, event, argument):
        here = frame.f_code.co_filename == lifecycle.__file__
        return in_start if here and frame.f_code.co_name in ("start", "_start") else None

    def in_start(frame, event, argument):
        if event == "line":
            place = frame.f_code.co_name, frame.f_lineno
            if chosen[0] is None:
                lines.append(place)
            elif chosen[0] == place:
                chosen[0] = ()
                os.kill(os.getpid(), signal.SIGALRM)
        return in_start

    sys.settrace(tracer)
    scheduler.start()
    sys.settrace(None)
    scheduler.stop()
    bad = []
    for place in dict.fromkeys(lines):
        chosen[0] = place
        sys.settrace(tracer)
        scheduler.start()
        sys.settrace(None)
        state, event = scheduler.status().state, scheduler._lifecycle.stopped.is_set()
        # Before the start has begun there is nothing to stop; from then on it ends stopped.
        if (state == "stopped") != event:
            bad.append((place, state, event))
        scheduler.stop()
        left = [t.name for t in threading.enumerate() if t.name.startswith("leasecron")]
        if left:
            bad.append((place, left))
    say("ended %s" % bad)
    """
    with Program(script, str(path)) as program:
        status, out, err = program.end(25)
    assert (status, out, err) == (0, "ended []\n", "")


def test_stop_in_a_signal_handler_during_stop(path: Path) -> None:
    script = """
    import leasecron_sync.engine.lifecycle as lifecycle
    scheduler.add_job(lambda run: run.wait(30), every(seconds=1), name="job")
    scheduler.on("run_finished", lambda event: None)
    signal.signal(signal.SIGALRM, lambda number, frame: scheduler.stop())
    lines, chosen = [], [None]

    def tracer(frame, event, argument):
        here = frame.f_code.co_filename == lifecycle.__file__
        return in_stop if here and frame.f_code.co_name in ("stop", "_stop") else None

    def in_stop(frame, event, argument):
        if event == "line":
            place = frame.f_code.co_name, frame.f_lineno
            if chosen[0] is None:
                lines.append(place)
            elif chosen[0] == place:
                chosen[0] = ()
                os.kill(os.getpid(), signal.SIGALRM)
        return in_stop

    scheduler.start()
    sys.settrace(tracer)
    scheduler.stop()
    sys.settrace(None)
    bad = []
    for place in dict.fromkeys(lines):
        scheduler.start()
        chosen[0] = place
        sys.settrace(tracer)
        scheduler.stop()
        sys.settrace(None)
        left = [t.name for t in threading.enumerate() if t.name.startswith("leasecron")]
        if scheduler.status().state != "stopped" or left:
            bad.append((place, scheduler.status().state, left))
    say("ended %s" % bad)
    """
    with Program(script, str(path)) as program:
        status, out, err = program.end(25)
    assert (status, out, err) == (0, "ended []\n", "")


def test_stop_in_a_signal_handler_waits_for_nothing_that_status_holds(path: Path) -> None:
    """A signal handler may interrupt its own thread in any line of ``status()``.

    If that held a lock which the timer or a worker wants, these could not end before it goes on,
    and it does not before the stop has ended.
    """
    script = """
    started, ends = [], threading.Event()
    scheduler.add_job(lambda run: started.append(1), every(seconds=1), name="job")
    lines, chosen, came, odd = [], [None], [], []

    def stop(number, frame):
        began, runtime = scheduler._lifecycle.started, scheduler._lifecycle.runtime
        locks = {"timer": began.timer._lock, "runtime": runtime._changed,
                 "caller": began.context.caller._lock, "hub": scheduler._hub._lock}

        def look():
            for name, lock in locks.items():
                if lock.acquire(timeout=1):
                    lock.release()
                else:
                    odd.append((chosen[0], name))

        other = threading.Thread(target=look)  # as the timer, or a worker
        other.start()
        other.join()

    def tracer(frame, event, argument):
        place = frame.f_code.co_filename, frame.f_lineno
        if event == "line" and "leasecron_sync" in place[0]:
            if chosen[0] is None:
                lines.append(place)
            elif chosen[0] == place and not came:
                came.append(place)
                os.kill(os.getpid(), signal.SIGALRM)
        return tracer

    signal.signal(signal.SIGALRM, stop)
    scheduler.start()
    while not started:
        time.sleep(0.01)
    sys.settrace(tracer)
    scheduler.status()
    sys.settrace(None)
    for place in dict.fromkeys(lines):
        chosen[0] = place
        came.clear()
        sys.settrace(tracer)
        scheduler.status()
        sys.settrace(None)
        if odd:
            break
    scheduler.stop()
    say("%s %s" % (bool(came), odd))
    """
    with Program(script, str(path)) as program:
        status, out, err = program.end(25)
    assert (status, out, err) == (0, "True []\n", "")


def test_stop_in_a_signal_handler_while_a_handler_works(path: Path) -> None:
    script = """
    done = threading.Event()

    def handler(run):
        say("entered")
        run.wait(60)

    def note(number, frame):
        scheduler.stop(5.0)
        done.set()

    signal.signal(signal.SIGTERM, note)
    scheduler.add_job(handler, every(seconds=1), name="job")
    scheduler.start()
    while not done.is_set():
        time.sleep(0.05)
    say(scheduler.status().state)
    """
    with Program(script, str(path)) as program:
        assert program.line() == "entered"
        program.send(signal.SIGTERM)
        status, out, err = program.end()
    assert (status, out, err) == (0, "stopped\n", "")


def test_control_c_in_a_script_that_waits_ends_it_without_noise_from_the_library(
    path: Path,
) -> None:
    script = """
    def handler(run):
        say("entered")
        run.wait(60)

    scheduler.add_job(handler, every(seconds=1), name="job")
    with scheduler:
        try:
            time.sleep(60)
        except KeyboardInterrupt:
            pass
    say("ended")
    """
    with Program(script, str(path)) as program:
        assert program.line() == "entered"
        program.send(signal.SIGINT)
        status, out, err = program.end()
    assert (status, out, err) == (0, "ended\n", "")
