"""Scripts that the tests of this folder run in processes of their own."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

LONG = bool(os.environ.get("LEASECRON_SYNC_LONG"))
ROOT = Path(__file__).parents[2]

PRELUDE = """
import json, os, signal, sys, threading, time, warnings
from pathlib import Path
# From Python 3.12 on: forking a process that has threads is what these tests are about.
warnings.filterwarnings("ignore", message=".*multi-threaded.*fork", category=DeprecationWarning)
from leasecron_sync import *
path = sys.argv[1]
LONG = bool(os.environ.get("LEASECRON_SYNC_LONG"))
generation = 0

def born():
    # A child that goes on where its parent forked could fork without end.
    global generation
    generation += 1
    if generation > 3:
        os._exit(70)

os.register_at_fork(after_in_child=born)

def say(**what):
    os.write(1, (json.dumps(what) + "\\n").encode())

def reap(pid, limit_s=10):
    # Status of a child; "hangs" if it did not end in time.
    end = time.monotonic() + limit_s
    while time.monotonic() < end:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return os.WEXITSTATUS(status) if os.WIFEXITED(status) else -os.WTERMSIG(status)
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return "hangs"

def eventually(condition, limit_s=10):
    end = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True

class Series:
    # The runs of a scheduler's jobs, each second one, and what is wrong with them in the end.
    # Whoever executes one notes it in a file, so that a whole family of processes is seen.
    ODD = ("run_failed", "run_retried", "run_lost", "run_taken_over", "run_missed",
           "run_handed_over", "store_down")

    def __init__(self, scheduler):
        self.scheduler, self.odd, self.here = scheduler, [], 0
        self.whole = not isinstance(scheduler.backend, MemoryLease)  # one store for the family
        self.log = os.open(path + ".log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        for name in self.ODD:
            scheduler.on(name, lambda event: self.odd.append([event.name, event.reason]))

    def add(self, name, handler=None):
        def noted(run):
            second = round(run.scheduled_time.timestamp())
            line = json.dumps([run.job, second, run.attempt, os.getpid()]) + "\\n"
            os.write(self.log, line.encode())
            self.here += 1
            if handler is not None:
                handler(run)
        self.scheduler.add_job(noted, every(seconds=1), name=name, overlap="allow")

    def goes_on(self, runs=1, limit_s=10):
        before = self.here
        return eventually(lambda: self.here >= before + runs, limit_s)

    def starts(self):
        return [tuple(json.loads(line)) for line in open(path + ".log")]

    def wrong(self):
        # What a child handed over at its end may take a moment to be executed.
        eventually(lambda: not self.wrong_now(), 6)
        return self.wrong_now()

    def wrong_now(self):
        # Nothing may be missing between the first and the newest record, nor be executed twice.
        # Another member of the family may hand a run over when it stops; nothing else may happen.
        wrong, seconds, starts = [["event", *odd] for odd in self.odd], {}, {}
        records = self.scheduler.history(None, 10_000)
        for job, second, attempt, pid in self.starts():
            if self.whole or pid == os.getpid():
                starts.setdefault((job, second), []).append((attempt, pid))
        for record in records:
            job, second = record.key.job, round(record.key.scheduled_ms / 1000)
            seconds.setdefault(job, set()).add(second)
            began = sorted(starts.get((job, second), []))
            attempts = [attempt for attempt, _ in began]
            if record.state.value == "finished" and attempts[-1:] != [record.attempt]:
                wrong.append(["finished", job, second, record.attempt, began])
            elif record.state.value not in ("finished", "running"):
                wrong.append([record.state.value, job, second, record.attempt, began])
            if len(set(attempts)) < len(attempts) or os.getpid() in [pid for _, pid in began[:-1]]:
                wrong.append(["executed twice", job, second, began])
        for job, found in seconds.items():
            missing = set(range(min(found), max(found))) - found
            wrong += [["missing", job, second] for second in sorted(missing)]
        return wrong[:20] or ([] if seconds else ["nothing ran"])

def shared():
    # What of the store a child has inherited: descriptors of its file, and sockets.
    found = []
    for name in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else []:
        try:
            target = os.readlink("/proc/self/fd/" + name)
        except OSError:
            continue
        if target.startswith((path + "-", "socket:")) or target == path:
            found.append(target)
    return found

def works(scheduler, parents_id=None):
    # What is wrong with a scheduler in a forked child.
    wrong = []
    if scheduler.status().state != "stopped":
        wrong.append("state " + scheduler.status().state)
    wrong += shared()
    scheduler.stop()
    scheduler.start()
    status = scheduler.status()
    if not status.threads or not all(status.threads.values()):
        wrong.append("threads %s" % status.threads)
    if status.instance_id in (None, parents_id):
        wrong.append("instance %s" % status.instance_id)
    if status.store_down_since is not None:
        wrong.append("the store is down")
    scheduler.stop()
    return wrong

def ends_well(wrong):
    # The end of a child for which nothing else is of interest.
    if wrong:
        say(child=wrong)
    os._exit(1 if wrong else 0)
"""


def run(script: str, path: Path, limit_s: float = 25) -> list[Any]:
    """Run a script that must end well and write nothing on standard error; return what it said."""
    process = subprocess.Popen(
        [sys.executable, "-c", PRELUDE + textwrap.dedent(script), str(path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=limit_s)
    finally:
        # Nobody of its family may outlive it, whatever went wrong.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert not err, f"{out}{err}"
    assert process.returncode == 0
    return [json.loads(line) for line in out.splitlines()]
