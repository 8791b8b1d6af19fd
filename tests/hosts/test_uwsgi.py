"""uWSGI's workers: started in the master or in themselves, recycled, killed, reloaded.

``LEASECRON_SYNC_LONG=1`` runs every way for a minute on every store.
"""

from __future__ import annotations

import functools
import importlib.util
import signal
import subprocess
import sys
import sysconfig
import time
from typing import Callable

import pytest

from tests.hosts.conftest import Outcome
from tests.hosts.sites import LONG, Site, killed, recycled, reloaded

MODULE = "tests.hosts.site_app"
WAYS = {
    "master": ["--master"],
    "lazy-apps": ["--master", "--lazy-apps"],
    "threads": ["--master", "--threads", "2"],
}
LATE_DECORATORS = """
from tests.hosts.site_app import application, scheduler

import uwsgidecorators


@uwsgidecorators.postfork
def others():
    print("the hook of others was called", flush=True)
"""

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("pyuwsgi") is None,
    reason="pyuwsgi is not installed: it has no wheel for this interpreter or system",
)


def uwsgi(*options: str) -> list[str]:
    """Return a command that runs uWSGI inside this interpreter's environment."""
    program = f"import sys, pyuwsgi; pyuwsgi.run({[*options]!r})"
    return [sys.executable, "-c", program]


def command(site: Site, *options: str, processes: int = 2) -> list[str]:
    return uwsgi(
        *("--http-socket", str(site.socket), "--module", MODULE, "--need-app"),
        *("--processes", str(processes), "--max-requests", "3", "--min-worker-lifetime", "0"),
        *("--die-on-term", "--virtualenv", sys.prefix),
        *options,
    )


def campaign(way: str, site: Site, workers: int, seconds: float = 0) -> None:
    """Disturb a site, and judge what became of its runs."""
    # At a reload uWSGI executes the interpreter itself, which knows of no virtual environment.
    site.environment["PYTHONPATH"] += f":{sysconfig.get_path('purelib')}"
    threads = [] if way == "threads" else ["--enable-threads"]
    with site:
        until = time.monotonic() + seconds
        site.start(command(site, *WAYS[way], *threads, processes=workers), workers)
        recycled(site)
        killed(site)
        reloaded(site, workers)
        while time.monotonic() < until:
            recycled(site)
        site.wait_settled()
        site.end(signal.SIGTERM)
        site.judged()
        print(f"{way}: {site.gaps()}")


def signalled_twice(rounds: int) -> None:
    """End sites by a signal to every process, as a terminal or a service manager does.

    The master passes it on, so that a worker gets two at once. uWSGI then may end it as a crash
    would, but no scheduler may be left in it that is dead in part, or take part in a hang.
    """
    for number in range(rounds):
        with Site() as site:
            lazy = ["--lazy-apps"] if number % 2 else []
            options = ["--master", *lazy, "--enable-threads", "--worker-reload-mercy", "50"]
            site.start(command(site, *options), 2)
            site.holder()
            site.end_all(signal.SIGTERM)
            assert "NO MERCY" not in site.output(), site.output()
            site.start(command(site, *options), 2)
            site.wait_settled()
            site.end(signal.SIGTERM)
            site.judged()


def quick_campaign(way: str) -> None:
    campaign(way, Site(), workers=2)


CAMPAIGNS: dict[str, Callable[[], object]] = {
    way: functools.partial(quick_campaign, way) for way in WAYS
}
CAMPAIGNS["signalled twice"] = functools.partial(signalled_twice, 20 if LONG else 2)
if importlib.util.find_spec("pyuwsgi") is None:
    CAMPAIGNS.clear()


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("way", WAYS)
def test_recycled_killed_and_reloaded_workers_lose_and_double_nothing(
    way: str, outcome: Outcome
) -> None:
    outcome(way)


@pytest.mark.slow
@pytest.mark.timeout(1_200 if LONG else 240)
def test_workers_that_are_signalled_twice_end_and_lose_nothing(
    outcome: Outcome,
) -> None:
    outcome("signalled twice")


@pytest.mark.parametrize("options", [["--master"], ["--master", "--lazy-apps"], []])
def test_threads_off_is_an_error_at_the_start(options: list[str]) -> None:
    with Site() as site:
        ended = subprocess.run(
            command(site, *options),
            cwd=site.folder,
            env=site.environment,
            capture_output=True,
            text=True,
            timeout=25,
            check=False,
        )
        assert ended.returncode != 0
        text = "SchedulerStateError: uWSGI runs without threads, so no job would ever run"
        assert text in ended.stderr
        assert site.entries("registered") == []


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_hooks_that_are_registered_after_the_start_do_not_replace_it() -> None:
    """uWSGI has one place for such a hook, and its own decorators take it when imported."""
    with Site() as site:
        (site.folder / "late.py").write_text(LATE_DECORATORS)
        options = command(site, "--master", "--enable-threads")
        options[-1] = options[-1].replace(repr(MODULE), repr("late"))
        site.environment["PYTHONPATH"] += f":{site.folder}"
        site.start(options, 2)
        assert site.output().count("the hook of others was called") == 2
        site.end(signal.SIGTERM)


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.skipif(not LONG, reason="takes a minute each; LEASECRON_SYNC_LONG=1 runs it")
@pytest.mark.parametrize("way", WAYS)
def test_a_minute_of_disturbance_loses_and_doubles_nothing(
    way: str, store: str, namespace: str
) -> None:
    campaign(way, Site(store, namespace, every_s=2, lease_ms=6_000), workers=4, seconds=60)
