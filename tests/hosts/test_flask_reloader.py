"""The reloader of Flask's development server: two processes, both of which start the scheduler."""

from __future__ import annotations

import importlib.util
import signal
from typing import Callable

import pytest

from tests.hosts.conftest import Outcome
from tests.hosts.sites import Site, python

APP = """
import json

from flask import Flask

from tests.hosts.site_app import application, scheduler

app = Flask("site")
app.wsgi_app = application
"""


def reloads() -> None:
    with Site() as site:
        module = site.folder / "app.py"
        module.write_text(APP)
        host = f"unix://{site.socket}"
        options = ["--app", "app", "run", "--debug", "--host", host]
        site.start(python("-m", "flask", *options), 2)
        assert site.ask()["problems"] == []
        for _ in range(2):
            _pid, cut = site.holder(of_a_child=True)
            site.touch(module)
            site.handed_over(cut)
        site.wait_settled()
        site.end_all(signal.SIGINT)
        site.judged()


CAMPAIGNS: dict[str, Callable[[], object]] = {}
if importlib.util.find_spec("flask") is not None:
    CAMPAIGNS["reloads"] = reloads


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_both_processes_of_the_reloader_start_and_a_reload_hands_over(outcome: Outcome) -> None:
    pytest.importorskip("flask")
    outcome("reloads")
