"""Programs that end just as runs come due, in every way and on every Python that is here.

An ordinary build runs two programs of each way, and one of some ways on every other interpreter
that has the library's dependencies: those of ``scripts/test``, below ``.venv``, and those named in
``LEASECRON_SYNC_PYTHONS`` (paths joined by colons). With ``LEASECRON_SYNC_LONG=1`` it is a hundred
of the plain ways and twenty of every other one, on each of them.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Callable

import pytest

from tests.hosts.exits import LIMIT_S, WAYS, Figures, pythons, run_all
from tests.hosts.scripts import LONG, ROOT
from tests.services.fixtures import Own

THIS = f"3.{sys.version_info[1]}"
VERSIONS = sorted({THIS, "3.9", "3.11", "3.12", "3.13"}, key=lambda text: int(text[2:]))
EVERYWHERE = {
    "a handler that waits, and gives up",
    "twenty runs at once",
    "threads of its own",
    "functions of its own at the exit",
    "three schedulers",
    "a child by fork",
    "a child by spawn",
}
PLAIN = {
    "a handler that returns at once",
    "a handler of 5 ms",
    "a handler that waits, and gives up",
}
CASES = [
    (version, way)
    for version in VERSIONS
    for way in WAYS
    if LONG or version == THIS or way in EVERYWHERE
]

FiguresOf = Callable[[str, str], Figures]


@pytest.fixture(scope="module")
def figures(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> FiguresOf:
    """Run what is asked for of one interpreter together, at the first of its tests."""
    asked = [
        (str(item.callspec.params["version"]), str(item.callspec.params["way"]))
        for item in request.session.items
        if isinstance(item, pytest.Function)
        and item.path == request.path
        and hasattr(item, "callspec")
        and "way" in item.callspec.params
    ]
    done: dict[str, dict[str, Figures]] = {}

    def count(version: str, way: str) -> int:
        if LONG:
            return 100 if way in PLAIN else 20
        return 2 if version == THIS else 1

    def of(version: str, way: str) -> Figures:
        if version not in done:
            done[version] = run_all(
                {
                    name: (WAYS[name], count(version, name))
                    for asked_version, name in asked
                    if asked_version == version
                },
                python=pythons()[version],
                folder=tmp_path_factory.mktemp(f"exits-{version}"),
            )
        return done[version][way]

    return of


@pytest.mark.slow
@pytest.mark.timeout(7_200 if LONG else 300)
@pytest.mark.parametrize(("version", "way"), CASES)
def test_a_program_that_ends_as_runs_come_due_ends_quietly_and_leaves_nothing_claimed(
    version: str, way: str, figures: FiguresOf
) -> None:
    if version not in pythons():
        pytest.skip(f"no CPython {version} that has croniter and tenacity is here")
    found = figures(version, way)
    if LONG:
        sys.stderr.write(
            f"\n{version} {way}: {found.programs} programs, {len(found.wrong)} wrong, "
            f"{found.handed_back} runs handed back, slowest exit {found.slowest_s:.2f} s "
        )
    assert found.wrong == []


ON_SERVERS = [*PLAIN, "a handler that ignores it", "twenty runs at once", "three schedulers"]


@pytest.mark.slow
@pytest.mark.timeout(3_600 if LONG else 120)
@pytest.mark.parametrize("kind", ["postgres", "redis", *(["valkey"] if LONG else [])])
def test_a_program_that_ends_as_runs_come_due_leaves_nothing_claimed_on_a_server(
    kind: str, own: Own, tmp_path: Path
) -> None:
    names = ON_SERVERS if LONG else ["a handler that waits, and gives up"]
    counts = {name: 100 if name in PLAIN else 20 for name in names} if LONG else {names[0]: 3}
    found = run_all(
        {name: (WAYS[name], count) for name, count in counts.items()},
        python=sys.executable,
        folder=tmp_path,
        url=getattr(own, kind)().url,  # one that is set up safely: no warning may be written
    )
    for name, figures in found.items():
        if LONG:
            sys.stderr.write(
                f"\n{kind} {name}: {figures.programs} programs, {len(figures.wrong)} wrong, "
                f"{figures.handed_back} handed back, slowest exit {figures.slowest_s:.2f} s "
            )
        assert figures.wrong == [], name
        assert figures.programs == counts[name]


@pytest.mark.timing
@pytest.mark.slow
@pytest.mark.timeout(120)
def test_schedulers_whose_handlers_ignore_the_exit_share_one_limit(tmp_path: Path) -> None:
    """Three of them take as long as one."""
    from dataclasses import replace

    stubborn = WAYS["a handler that ignores it"]
    ways = {"one": (stubborn, 1), "three": (replace(stubborn, schedulers=3), 1)}
    found = run_all(ways, python=sys.executable, folder=tmp_path)
    assert [item.wrong for item in found.values()] == [[], []]
    assert found["three"].slowest_s < found["one"].slowest_s + LIMIT_S


EMBEDDED = """
import _thread, sys, time
assert "threading" not in sys.modules

def first(starts):
    global scheduler, ran, main
    import threading
    from leasecron_sync import MemoryLease, Scheduler, every
    main, ran = threading.main_thread(), []
    scheduler = Scheduler(MemoryLease())
    scheduler.add_job(lambda: ran.append(1), every(seconds=1), name="job")
    if starts:
        scheduler.start()
    done.release()

def until(condition):
    end = time.monotonic() + 10
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    return bool(condition())

done = _thread.allocate_lock()
done.acquire()
_thread.start_new_thread(first, (sys.argv[1] == "starts it",))
done.acquire()
if sys.version_info < (3, 13):  # later ones know their main thread whoever imports what
    assert until(lambda: not main.is_alive())
if sys.argv[1] != "starts it":
    scheduler.start()
goes_on = until(lambda: len(ran) >= 2)
print(goes_on, scheduler.status().state)
scheduler.stop()
"""


@pytest.mark.slow
@pytest.mark.parametrize("thread", ["starts it", "only imports it"])
def test_the_end_of_a_thread_that_python_takes_for_its_main_one_ends_no_scheduler(
    thread: str,
) -> None:
    """Where Python is embedded: the thread that first imports ``threading``, for one."""
    process = subprocess.run(
        # Without site: what is installed may import `threading` from the real main thread.
        [sys.executable, "-S", "-c", EMBEDDED, thread],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)])},
        capture_output=True,
        text=True,
        timeout=25,
        check=False,
    )
    assert (process.returncode, process.stdout, process.stderr) == (0, "True running\n", "")
