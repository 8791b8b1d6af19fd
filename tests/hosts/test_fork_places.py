"""Forks in every place: the parent's runs go on without a gap, the child is whole and harmless.

The scripts of all places run beside each other, since each of them mostly waits.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Callable

import pytest

from tests.hosts.scripts import run

Outcome = Callable[[str], list[Any]]

PLACES: dict[str, str] = {}
"""Name of a place, and the script that forks there; it says what is wrong, line by line."""

LIMIT_S = 45

PLACES["in a listener, whatever the child does then"] = """
scheduler = Scheduler(SQLiteLease(path))
series, children = Series(scheduler), []
threading.excepthook = lambda arguments: None  # the child's last words
ends = ["return", "sys.exit", "os._exit", "raise", "start and return", "start and sys.exit"]

def listener(event):
    if len(children) == len(ends) or os.getpid() != parent:
        return
    end = ends[len(children)]
    pid = os.fork()
    if pid == 0:
        if "start" in end:
            scheduler.start()
        if "sys.exit" in end:
            sys.exit(0)
        if end == "os._exit":
            os._exit(0)
        if end == "raise":
            raise ValueError("of the child")
        return
    children.append([end, reap(pid)])

for number in range(4):
    series.add("job %d" % number)
scheduler.on("run_finished", listener)
scheduler.on("run_finished", lambda event: parents.append(os.getpid()))
parent, parents = os.getpid(), []
scheduler.start()
eventually(lambda: len(children) == len(ends), 25)
goes_on = series.goes_on(4)
say(children=[child for child in children if child[1] != 0], goes_on=goes_on,
    foreign=sorted(set(parents) - {os.getpid()}), wrong=series.wrong())
scheduler.stop()
"""

PLACES["in a handler whose child starts the scheduler and then ends"] = """
scheduler = Scheduler(SQLiteLease(path))
series, children = Series(scheduler), []
ends = ["return", "sys.exit", "with a thread of its own"]

def handler(run):
    if len(children) == len(ends) or os.getpid() != parent:
        return
    end = ends[len(children)]
    pid = os.fork()
    if pid == 0:
        scheduler.start()
        if end == "with a thread of its own":
            # As in any program, its end is the child's end.
            threading.Thread(target=time.sleep, args=(0.3,)).start()
        if end == "sys.exit":
            sys.exit(0)
        return
    children.append([end, reap(pid)])

parent = os.getpid()
series.add("job", handler)
series.add("other")
scheduler.start()
eventually(lambda: len(children) == len(ends), 25)
goes_on = series.goes_on(2)
say(children=[child for child in children if child[1] != 0], goes_on=goes_on, wrong=series.wrong())
scheduler.stop()
"""

PLACES["in around_run, on the way in and on the way out"] = """
from contextlib import contextmanager
children = []

@contextmanager
def around(run):
    where = len(children)
    if where == 0 and fork():
        yield  # the child is still in here
        return
    yield
    if where == 1:
        fork()

def fork():
    pid = os.fork()
    if pid:
        children.append(reap(pid))
    return pid == 0

scheduler = Scheduler(SQLiteLease(path), around_run=around)
series = Series(scheduler)
series.add("job")
parent = os.getpid()
scheduler.start()
eventually(lambda: len(children) == 2)
goes_on = series.goes_on(1)
say(children=[child for child in children if child != 0], goes_on=goes_on,
    foreign=sorted({start[3] for start in series.starts()} - {parent}), wrong=series.wrong())
scheduler.stop()
"""

PLACES["while another thread has a lock"] = """
import logging
handler = logging.StreamHandler(open(os.devnull, "w"))
logging.getLogger("leasecron_sync").addHandler(handler)
scheduler = Scheduler(BACKEND)
series = Series(scheduler)
series.add("job", lambda run: run.wait(0.2))
scheduler.start()
assert series.goes_on(1)
lifecycle = scheduler._lifecycle
started = lifecycle.started
locks = {
    "of the timer": started.timer._lock,
    "of the live runs": lifecycle.runtime._changed,
    "of the account of outages": started.context.caller._lock,
    "of the listeners": lifecycle._hub._lock,
    "of the jobs": scheduler._jobs_lock,
    "of start and stop": lifecycle._lock,
    "of the log's handler": handler.lock,
    "of the memory store": getattr(scheduler.backend, "_store", scheduler)
        .__dict__.get("lock", threading.Lock()),
}
parents_id, children = scheduler.status().instance_id, []
for name, lock in locks.items():
    held, let_go = threading.Event(), threading.Event()

    def hold():
        with lock:
            held.set()
            let_go.wait(20)

    holder = threading.Thread(target=hold)
    holder.start()
    assert held.wait(5)
    pid = os.fork()
    if pid == 0:
        logging.getLogger("leasecron_sync").error("the child can log")
        scheduler.add_job(lambda: None, every(seconds=86_400), name="of the child " + name)
        ends_well(works(scheduler, parents_id))
    children.append([name, reap(pid, 5)])
    let_go.set()
    holder.join()
logging.getLogger("leasecron_sync").removeHandler(handler)
goes_on = series.goes_on(1)
say(children=[child for child in children if child[1] != 0], goes_on=goes_on, wrong=series.wrong())
scheduler.stop()
"""
PLACES["while another thread has a lock, memory"] = PLACES[
    "while another thread has a lock"
].replace("BACKEND", "MemoryLease()")
PLACES["while another thread has a lock"] = PLACES["while another thread has a lock"].replace(
    "BACKEND", "SQLiteLease(path)"
)

PLACES["inside a claim, a renewal and a settlement"] = """
backend = SQLiteLease(path)
scheduler = Scheduler(backend, lease_ms=9_000, heartbeat_ms=300)
series = Series(scheduler)
series.add("job", lambda run: run.wait(0.7))
inside, armed, real = threading.Event(), [None], backend._now_ms

def slow_clock():  # read by the store inside its transaction
    if armed[0] is not None and threading.current_thread().name.startswith(armed[0]):
        armed[0] = None
        inside.set()
        time.sleep(0.2)
    return real()

backend._now_ms = slow_clock
scheduler.start()
assert series.goes_on(1)
parents_id, children = scheduler.status().instance_id, []
for thread in ("leasecron-timer", "leasecron-heartbeat", "leasecron-run"):
    inside.clear()
    armed[0] = thread
    if not inside.wait(5):
        say(never_there=thread)
    pid = os.fork()
    if pid == 0:
        ends_well(works(scheduler, parents_id))
    children.append([thread, reap(pid)])
goes_on = series.goes_on(1)
say(children=[child for child in children if child[1] != 0], goes_on=goes_on, wrong=series.wrong())
scheduler.stop()
"""

PLACES["in several threads at once, and in the children"] = """
scheduler = Scheduler(SQLiteLease(path))
series = Series(scheduler)
for number in range(10):
    series.add("job %d" % number)
scheduler.start()
assert series.goes_on(1)
parents_id, bad = scheduler.status().instance_id, []

def forks():
    for number in range(100 if LONG else 4):
        pid = os.fork()
        if pid == 0:
            grandchild = os.fork()
            if grandchild == 0:
                os._exit(1 if shared() or scheduler.status().state != "stopped" else 0)
            wrong = shared() if number % 5 else works(scheduler, parents_id)
            status = reap(grandchild)
            ends_well(wrong + ([["grandchild", status]] if status != 0 else []))
        status = reap(pid, 20)
        if status != 0:
            bad.append(status)

threads = [threading.Thread(target=forks) for _ in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
goes_on = series.goes_on(10)
say(children=bad, goes_on=goes_on, wrong=series.wrong())
scheduler.stop()
"""

PLACES["by subprocess, posix_spawn and vfork"] = """
import subprocess
scheduler = Scheduler(SQLiteLease(path))
series = Series(scheduler)
for number in range(10):
    series.add("job %d" % number)
scheduler.start()
assert series.goes_on(1)
listing = ["sh", "-c", "ls -l /proc/self/fd"]
seen, statuses = "", []
for number in range(12):
    time.sleep(0.003 * number)
    options = [{}, {"close_fds": False}, {"preexec_fn": lambda: None},
               {"preexec_fn": lambda: None, "close_fds": False}][number % 4]
    done = subprocess.run(listing, capture_output=True, text=True, **options)
    seen += done.stdout
    statuses.append(done.returncode)
    pid = os.posix_spawn("/bin/true", ["true"], {})
    statuses.append(reap(pid))
goes_on = series.goes_on(10)
say(children=[status for status in statuses if status != 0], goes_on=goes_on,
    shared=path in seen, wrong=series.wrong())
scheduler.stop()
"""

PLACES["of a scheduler that never started, and of one that stopped"] = """
scheduler = Scheduler(SQLiteLease(path))
series = Series(scheduler)
series.add("job")
children = []

def fork():
    pid = os.fork()
    if pid == 0:
        ends_well(works(scheduler))
    children.append(reap(pid))

fork()
scheduler.start()
assert series.goes_on(1)
scheduler.stop()
fork()
scheduler.start()
goes_on = series.goes_on(1)
say(children=[child for child in children if child != 0], goes_on=goes_on, wrong=[])
scheduler.stop()
"""

PLACES["in functions that are called at the exit"] = """
import atexit
parent, children = os.getpid(), []

def fork():
    if os.getpid() != parent:
        return  # the child goes through its own exit
    try:
        pid = os.fork()
    except RuntimeError:  # from Python 3.12 on
        return
    if pid == 0:
        if shared() or scheduler.status().state != "stopped":
            os._exit(1)
        return
    children.append(reap(pid))

def judge():
    if os.getpid() == parent:
        say(children=[child for child in children if child != 0], goes_on=ran, wrong=[])

atexit.register(judge)
atexit.register(fork)
scheduler = Scheduler(SQLiteLease(path))
series = Series(scheduler)
series.add("job", lambda run: run.wait(10))
scheduler.start()
atexit.register(fork)
ran = series.goes_on(1)
"""

PLACES["and every member of the family executes runs"] = """
# With these slots nobody can execute them all.
scheduler = Scheduler(SQLiteLease(path), max_concurrent_runs=4)
series = Series(scheduler)
for number in range(12):
    series.add("job %d" % number, lambda run: run.wait(0.25))
scheduler.start()
assert series.goes_on(1)

def take_part(depth):
    pid = os.fork()
    if pid:
        return pid
    scheduler.start()
    below = take_part(depth - 1) if depth else None
    time.sleep(3.3)
    status = 0 if below is None else reap(below)
    scheduler.stop()
    if depth % 2:
        sys.exit(status)
    os._exit(status)

children = [take_part(depth) for depth in (0, 1, 1)]
statuses = [reap(pid, 20) for pid in children]
goes_on = series.goes_on(1)
members = len({start[3] for start in series.starts()})
say(children=[status for status in statuses if status != 0], goes_on=goes_on, wrong=series.wrong(),
    shared=members >= 3)
scheduler.stop()
"""

PLACES["while another process has the store's file locked"] = """
import sqlite3, subprocess
scheduler = Scheduler(SQLiteLease(path))
series = Series(scheduler)
for number in range(20):
    series.add("job %d" % number, lambda run: run.wait(0.6))
scheduler.start()
assert series.goes_on(20)
parents_id = scheduler.status().instance_id
locker = subprocess.Popen(
    [sys.executable, "-c", "if True:" + '''
        import sqlite3, sys
        connection = sqlite3.connect(sys.argv[1], isolation_level=None, timeout=10)
        connection.execute("BEGIN IMMEDIATE")
        print("locked", flush=True)
        sys.stdin.readline()
     ''', path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
assert locker.stdout.readline() == "locked\\n"
time.sleep(1.2)  # calls of every kind wait for the file
took, children = [], []
for _ in range(3):
    before = time.monotonic()
    pid = os.fork()
    if pid == 0:
        eventually(lambda: os.path.exists(path + ".free"))
        ends_well(works(scheduler, parents_id))
    took.append(time.monotonic() - before)
    children.append(pid)
    time.sleep(0.1)
locker.communicate("let go\\n")
Path(path + ".free").touch()
statuses = [reap(pid) for pid in children]
goes_on = series.goes_on(20)
say(children=[status for status in statuses if status != 0], goes_on=goes_on, wrong=series.wrong(),
    # A call waits for the file for over three seconds, and there are three lanes.
    held_up=max(took) > 2)
scheduler.stop()
"""

PLACES["of a store in memory, of which the child has a copy"] = """
scheduler = Scheduler(MemoryLease("shared by name"), lease_ms=600)
series, entered = Series(scheduler), threading.Event()

def handler(run):
    entered.set()
    run.wait(2.5)

series.add("short")
scheduler.add_job(handler, every(seconds=86_400), name="long", catch_up_ms=86_400_000)
scheduler.start()
assert series.goes_on(1)
job, backend = scheduler._jobs["long"], scheduler.backend
# Registered yesterday, as far as the store knows: it is owed now.
from dataclasses import replace
tables = backend._tables()
record = tables.job("long")
tables.put_job(replace(record, owed_from_ms=record.owed_from_ms - 86_400_000))
scheduler.stop()
scheduler.start()
assert entered.wait(5)
pid = os.fork()
if pid == 0:
    entered.clear()
    scheduler.start()
    doubled = entered.wait(1.8)  # three leases, and the parent's handler is at work
    scheduler.stop()
    ends_well(["the parent's run is executed"] if doubled else [])
status = reap(pid)
goes_on = series.goes_on(1)
say(children=[status] if status != 0 else [], goes_on=goes_on, wrong=[])
scheduler.stop()
"""

PLACES["in a handler whose child goes on asking about the run"] = """
import logging
logging.basicConfig(level=logging.WARNING)  # to standard error, where nothing may be
scheduler = Scheduler(SQLiteLease(path), lease_ms=3_000)
series, children, answers = Series(scheduler), [], os.pipe()

def handler(run):
    if children or os.getpid() != parent:
        return
    children.append(None)
    pid = os.fork()
    if pid == 0:
        try:
            run.wait(8)
            answer = b"never ended"
        except RunLost:
            answer = b"lost"
        os.write(answers[1], answer)
        os._exit(0)
    children[0] = reap(pid)
    run.check()

parent = os.getpid()
series.add("job", handler)
scheduler.start()
eventually(lambda: children and children[0] is not None, 12)
goes_on = series.goes_on(2)
say(children=[child for child in children if child != 0], goes_on=goes_on, wrong=series.wrong(),
    answer=os.read(answers[0], 20).decode())
scheduler.stop()
"""

PLACES["while another thread imports what the library imports late"] = """
import importlib.abc, importlib.machinery
importing, go_on = threading.Event(), threading.Event()

class Slow(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == "tenacity.asyncio" or name == "tenacity.retry":
            importing.set()
            go_on.wait(0.5)
        return None

sys.meta_path.insert(0, Slow())
scheduler = Scheduler(SQLiteLease(path))
series = Series(scheduler)
series.add("job")
starter = threading.Thread(target=scheduler.start)
starter.start()
assert importing.wait(5)
pid = os.fork()
if pid == 0:
    ends_well(works(scheduler))
status = reap(pid, 5)
starter.join()
goes_on = series.goes_on(1)
say(children=[status] if status != 0 else [], goes_on=goes_on, wrong=series.wrong())
scheduler.stop()
"""

PLACES["in a signal handler, in the middle of a fork or of a call"] = """
scheduler = Scheduler(SQLiteLease(path))
series, forks, bad = Series(scheduler), [0], []

def fork(*_):
    pid = os.fork()
    if pid == 0:
        # It may have come into a call of its own thread: such a child leaves the store alone.
        os._exit(0 if scheduler.status().state == "stopped" else 1)
    forks[0] += 1
    status = reap(pid)
    if status != 0:
        bad.append(status)
    signal.setitimer(signal.ITIMER_REAL, 0.003 + 0.001 * (forks[0] % 5))

for number in range(10):
    series.add("job %d" % number)
scheduler.start()
assert series.goes_on(1)
signal.signal(signal.SIGALRM, fork)
signal.setitimer(signal.ITIMER_REAL, 0.005)
end = time.monotonic() + (20 if LONG else 2)
while time.monotonic() < end:
    scheduler.history(None, 300)
    pid = os.fork()
    if pid == 0:
        signal.setitimer(signal.ITIMER_REAL, 0)
        os._exit(0)
    if reap(pid) != 0:
        bad.append("of the main program")
signal.signal(signal.SIGALRM, signal.SIG_IGN)
goes_on = series.goes_on(10)
say(children=bad, goes_on=goes_on, wrong=series.wrong(), often=forks[0] > 10)
scheduler.stop()
"""

PLACES["while a handler of the log is stuck"] = """
import logging
stuck, let_go = threading.Event(), threading.Event()

class Stuck(logging.Handler):
    def emit(self, record):
        if "claimed" in record.getMessage() and not stuck.is_set():
            stuck.set()
            let_go.wait(10)

logger = logging.getLogger("leasecron_sync")
logger.addHandler(Stuck())
logger.setLevel(logging.DEBUG)
scheduler = Scheduler(SQLiteLease(path))
series = Series(scheduler)
series.add("job")
scheduler.start()
assert stuck.wait(5)
pid = os.fork()
if pid == 0:
    ends_well(works(scheduler, scheduler.status().instance_id))
status = reap(pid, 5)
let_go.set()
goes_on = series.goes_on(1)
say(children=[status] if status != 0 else [], goes_on=goes_on, wrong=series.wrong())
scheduler.stop()
"""

PLACES["while another thread makes stores and schedulers"] = """
scheduler = Scheduler(SQLiteLease(path))
series = Series(scheduler)
series.add("job")
scheduler.start()
assert series.goes_on(1)
parents_id, stop, made, bad = scheduler.status().instance_id, threading.Event(), [0], []

def make():
    others = []
    while not stop.is_set():
        others.append(Scheduler(SQLiteLease(path)))
        made[0] += 1
        del others[:-50]

maker = threading.Thread(target=make)
maker.start()
for number in range(40):
    pid = os.fork()
    if pid == 0:
        ends_well(shared() if number % 10 else works(scheduler, parents_id))
    status = reap(pid)
    if status != 0:
        bad.append(status)
stop.set()
maker.join()
goes_on = series.goes_on(1)
say(children=bad, goes_on=goes_on and made[0] > 100, wrong=series.wrong())
scheduler.stop()
"""

SAID = {"children": [], "goes_on": True, "wrong": []}
MORE: dict[str, dict[str, Any]] = {
    "in a listener, whatever the child does then": {"foreign": []},
    "in around_run, on the way in and on the way out": {"foreign": []},
    "by subprocess, posix_spawn and vfork": {"shared": False},
    "and every member of the family executes runs": {"shared": True},
    "while another process has the store's file locked": {"held_up": False},
    "in a handler whose child goes on asking about the run": {"answer": "lost"},
    "in a signal handler, in the middle of a fork or of a call": {"often": True},
}


@pytest.fixture(scope="module")
def outcome(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Outcome]:
    """Run the scripts of the places that are asked for; give what each of them said."""
    chosen = {
        item.callspec.params["place"]
        for item in request.session.items
        if isinstance(item, pytest.Function)
        and item.path == request.path
        and hasattr(item, "callspec")
    }
    folder = tmp_path_factory.mktemp("places")
    with ThreadPoolExecutor(5) as pool:
        running: dict[str, Future[list[Any]]] = {
            place: pool.submit(run, PLACES[place], folder / f"{number}.db", LIMIT_S)
            for number, place in enumerate(PLACES)
            if place in chosen
        }
        yield lambda place: running[place].result()


@pytest.mark.timeout(120)
@pytest.mark.parametrize("place", PLACES)
def test_a_fork_harms_neither_parent_nor_child(place: str, outcome: Outcome) -> None:
    said = outcome(place)
    assert said[-1:] == [{**SAID, **MORE.get(place, {})}], said
    assert len(said) == 1, said
