"""gunicorn's workers: recycled in the middle of a run, killed, reloaded, told to end.

``LEASECRON_SYNC_LONG=1`` runs every kind of worker for a minute on every store.
"""

from __future__ import annotations

import functools
import importlib.util
import signal
import time
from dataclasses import dataclass
from typing import Callable

import pytest

from tests.hosts.conftest import Outcome
from tests.hosts.sites import APPLICATION, LONG, Site, killed, python, recycled, reloaded

HOOKS = """
{before}

def post_worker_init(worker):
    from tests.hosts.site_app import scheduler

    scheduler.start()
"""

PATCH = """
from gevent import monkey

monkey.patch_all()
"""


@dataclass(frozen=True)
class Way:
    """A way to run gunicorn.

    Attributes:
        kind: Kind of its workers.
        preload: Whether the application is imported before the workers are forked.
        end: Signal that ends it.
    """

    kind: str
    preload: bool
    end: signal.Signals

    def __str__(self) -> str:
        """Name it, for a test."""
        return f"{self.kind}{'-preload' if self.preload else ''}-{self.end.name}"

    @property
    def needs(self) -> list[str]:
        """Packages that are missing here."""
        names = ["gunicorn", "gevent"] if self.kind == "gevent" else ["gunicorn"]
        return [name for name in names if importlib.util.find_spec(name) is None]

    def command(self, site: Site, workers: int) -> list[str]:
        """Return the command, after writing its configuration file."""
        settings = site.folder / "gunicorn.conf.py"
        patch = PATCH if self.kind == "gevent" and self.preload else ""
        settings.write_text(HOOKS.format(before=patch) if self.preload else "")
        options = ["--config", str(settings), "--worker-class", self.kind]
        options += ["--workers", str(workers), "--max-requests", "3", "--graceful-timeout", "10"]
        options += ["--threads", "2"] if self.kind == "gthread" else []
        options += ["--preload"] if self.preload else []
        options += ["--bind", f"unix:{site.socket}", APPLICATION]
        return python("-m", "gunicorn", *options)


QUICK = [
    Way("sync", preload=False, end=signal.SIGTERM),
    Way("gthread", preload=True, end=signal.SIGQUIT),
    Way("gevent", preload=False, end=signal.SIGTERM),
    Way("gevent", preload=True, end=signal.SIGTERM),
]
# gunicorn's gevent worker prints a traceback of its own for QUIT.
ALL = [
    Way("sync", preload=False, end=signal.SIGQUIT),
    *(
        Way(kind, preload=preload, end=signal.SIGTERM)
        for kind in ("sync", "gthread", "gevent")
        for preload in (False, True)
    ),
]
SLOW_TO_STOP = Way("sync", preload=False, end=signal.SIGKILL)
"""Its workers take longer to stop than ``graceful_timeout``."""


def site_for(way: Way, store: str = "", namespace: str = "default", every_s: int = 1) -> Site:
    start = "hook" if way.preload else "import"
    return Site(store, namespace, every_s=every_s, start=start)


def quick_campaign(way: Way) -> None:
    campaign(way, site_for(way), workers=2)


def campaign(way: Way, site: Site, workers: int, seconds: float = 0) -> None:
    """Disturb a site, and judge what became of its runs."""
    with site:
        until = time.monotonic() + seconds
        site.start(way.command(site, workers), workers)
        recycled(site)
        killed(site)
        reloaded(site, workers)
        while time.monotonic() < until:
            recycled(site)
        site.wait_settled()
        assert site.end(way.end) == 0, site.output()
        site.judged()
        print(f"{way}: {site.gaps()}")


def slow_to_stop() -> None:
    """Have a worker killed by its master, and its site started anew."""
    with site_for(SLOW_TO_STOP) as site:
        site.environment["SITE_IGNORES_STOP"] = "1"
        command = SLOW_TO_STOP.command(site, 1)
        hook = "def worker_exit(server, worker):\n    import time\n\n    time.sleep(60)\n"
        (site.folder / "gunicorn.conf.py").write_text(hook)
        command[command.index("--graceful-timeout") + 1] = "1"
        site.start(command, 1)
        _pid, cut = site.holder()
        assert site.end(signal.SIGTERM) == 0, site.output()
        site.start(command, 1)
        assert site.is_taken_over(site.again(cut)), site.output()
        site.wait_settled()
        site.end(signal.SIGTERM)
        site.judged()


CAMPAIGNS: dict[str, Callable[[], object]] = {
    str(way): functools.partial(quick_campaign, way) for way in QUICK if not way.needs
}
if not SLOW_TO_STOP.needs:
    CAMPAIGNS["slow to stop"] = slow_to_stop


def skip_without(way: Way) -> None:
    if way.needs:
        pytest.skip(f"{', '.join(way.needs)} is not installed")


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("way", QUICK, ids=str)
def test_recycled_killed_and_reloaded_workers_lose_and_double_nothing(
    way: Way, outcome: Outcome
) -> None:
    skip_without(way)
    outcome(str(way))


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_worker_killed_for_taking_too_long_to_stop_leaves_its_run_to_a_takeover(
    outcome: Outcome,
) -> None:
    skip_without(SLOW_TO_STOP)
    outcome("slow to stop")


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.skipif(not LONG, reason="takes a minute each; LEASECRON_SYNC_LONG=1 runs it")
@pytest.mark.parametrize("way", ALL, ids=str)
def test_a_minute_of_disturbance_loses_and_doubles_nothing(
    way: Way, store: str, namespace: str
) -> None:
    skip_without(way)
    campaign(way, site_for(way, store, namespace, every_s=2), workers=4, seconds=60)
