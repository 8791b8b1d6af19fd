"""Histories of many instances on one store, in which everything goes wrong that a seed decides.

Several schedulers, the engine as it is shipped, work on one store in one process and under
simulated clocks; a driver takes their steps in an order that the seed decides. Messages get lost,
come late or twice, stores and processes fail, clocks are set, versions are deployed. What the
store decides and what handlers do is judged by the checker of ``leasecron_sync.testing.history``
and by rules that only a simulation can hold::

    plan = make_plan(17, PROFILES["storm"])
    result = play(plan, load("memory")[plan.family], verbose=True)
    assert result.violation is None

``load`` tells what the store of another backend must offer; ``scripts/simulate.py`` in the
project's checkout plays many histories and shortens those that fail.
"""

from __future__ import annotations

from leasecron_sync.testing.simulation.campaign import profiles_for, shortened
from leasecron_sync.testing.simulation.plan import Plan, from_json
from leasecron_sync.testing.simulation.planner import make_plan
from leasecron_sync.testing.simulation.play import Result, play
from leasecron_sync.testing.simulation.profiles import PROFILES, Profile
from leasecron_sync.testing.simulation.stores import load
from leasecron_sync.testing.simulation.violation import Violation

__all__ = [
    "PROFILES",
    "Plan",
    "Profile",
    "Result",
    "Violation",
    "from_json",
    "load",
    "make_plan",
    "play",
    "profiles_for",
    "shortened",
]
