"""Django: the development server and its autoreloader, commands, connections of handlers."""

from __future__ import annotations

import functools
import os
import signal
import socket
import subprocess
from pathlib import Path
from typing import Callable

import pytest

from tests.hosts.conftest import Outcome
from tests.hosts.sites import Site, python

pytest.importorskip("django", reason="django is not installed")

SETTINGS = """
SECRET_KEY = "of a test"
DEBUG = True
ALLOWED_HOSTS = ["*"]
USE_TZ = True
ROOT_URLCONF = "shop.urls"
WSGI_APPLICATION = "shop.wsgi.application"
INSTALLED_APPS = [{apps}]
DATABASES = {{
    "default": {{
        "ENGINE": "django.db.backends.sqlite3",
        "NAME": "{folder}/shop.db",
        "CONN_MAX_AGE": 600,
    }}
}}
"""
MANAGE = """
import os, sys

os.environ["DJANGO_SETTINGS_MODULE"] = "shop.settings"

from django.core.management import execute_from_command_line

execute_from_command_line(sys.argv)
"""
WSGI = """
import os

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "shop.settings")

from django.core.wsgi import get_wsgi_application

application = get_wsgi_application()
{start}
"""
START = """
from tests.hosts.site_app import scheduler

scheduler.start()
"""
APPS = """
from django.apps import AppConfig


class ShopConfig(AppConfig):
    name = "shop"

    def ready(self):
        from tests.hosts.site_app import scheduler

        scheduler.start()
"""
CONNECTIONS = """
import contextlib, sys, threading

import django
from django.conf import settings

settings.configure(
    DATABASES={
        "default": {
            "ENGINE": "django.db.backends.sqlite3",
            "NAME": sys.argv[1] + ".django",
            "CONN_MAX_AGE": 600,
        }
    },
)
django.setup()
from django.db import connection, connections

from leasecron_sync import Scheduler, SQLiteLease, every


@contextlib.contextmanager
def own_connections(run):
    try:
        yield
    finally:
        connections.close_all()


made, finished = [], threading.Semaphore(0)
scheduler = Scheduler(SQLiteLease(sys.argv[1]), around_run=own_connections)


@scheduler.job(every(seconds=1), name="query", overlap="allow")
def query(run):
    with connection.cursor() as cursor:
        cursor.execute("SELECT 1")
    made.append(connections["default"])
    assert made[-1].connection is not None


scheduler.on("run_finished", lambda event: finished.release())
scheduler.start()
for _ in range(3):
    assert finished.acquire(timeout=40)
scheduler.stop()
assert len(set(map(id, made))) == len(made)  # each run has a connection of its own
assert all(one.connection is None for one in made), made
"""


def project(site: Site, *, start_in: str) -> None:
    """Write a project whose scheduler is started in its ``wsgi.py`` or in ``ready()``."""
    shop = site.folder / "shop"
    shop.mkdir()
    apps = '"shop.apps.ShopConfig"' if start_in == "ready" else ""
    files = {
        "__init__.py": "",
        "settings.py": SETTINGS.format(folder=site.folder, apps=apps),
        "urls.py": "urlpatterns = []\n",
        "wsgi.py": WSGI.format(start=START if start_in == "wsgi" else ""),
        "apps.py": APPS,
    }
    for name, text in files.items():
        (shop / name).write_text(text)
    (site.folder / "manage.py").write_text(MANAGE)


def command(site: Site, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        python("manage.py", *arguments),
        cwd=site.folder,
        env=site.environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


def reloads(start_in: str, instances: int) -> None:
    with Site(start="hook") as site:
        project(site, start_in=start_in)
        site.start(python("manage.py", "runserver", str(free_port())), instances)
        _pid, cut = site.holder(of_a_child=True)
        site.touch(site.folder / "shop" / "settings.py")
        site.handed_over(cut)
        site.wait_settled()
        site.end_all(signal.SIGINT)
        site.judged()


CAMPAIGNS: dict[str, Callable[[], object]] = {
    "wsgi": functools.partial(reloads, "wsgi", 1),
    # The process that watches the files starts the scheduler as well.
    "ready": functools.partial(reloads, "ready", 2),
}


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("start_in", CAMPAIGNS)
def test_the_autoreloader_hands_over_and_doubles_nothing(start_in: str, outcome: Outcome) -> None:
    outcome(start_in)


@pytest.mark.timeout(90)
def test_commands_start_no_scheduler_that_wsgi_starts() -> None:
    with Site(start="hook") as site:
        project(site, start_in="wsgi")
        done = command(site, "check")
        assert done.returncode == 0, done.stderr
        assert "scheduler started" not in done.stdout + done.stderr
        assert site.entries("instance") == []


@pytest.mark.timeout(90)
def test_a_command_that_starts_a_scheduler_in_ready_ends_at_once_and_cleanly() -> None:
    with Site(start="hook") as site:
        project(site, start_in="ready")
        done = command(site, "check")
        assert done.returncode == 0, done.stderr
        assert "Traceback" not in done.stderr
        assert [x.verdict for x in site.entries("instance")] == ["began", "ended"]


@pytest.mark.timeout(90)
def test_connections_of_a_handler_are_closed_by_around_run(tmp_path: Path) -> None:
    done = subprocess.run(
        python("-W", "error", "-c", CONNECTIONS, str(tmp_path / "store.db")),
        capture_output=True,
        text=True,
        timeout=80,
        check=False,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert (done.returncode, done.stderr) == (0, "")
