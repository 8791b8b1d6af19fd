"""Test suites that every backend passes, for authors of backends.

They need pytest, which the extra ``leasecron_sync[test]`` brings. Derive a test class from the
suite of your family, in a file that pytest collects::

    from leasecron_sync.testing.conformance import LeaseConformance

    class TestMyLease(LeaseConformance):
        @pytest.fixture
        def backend_factory(self):
            return lambda: MyLease("my://localhost")

        def advance(self, ms):
            threading.Event().wait(ms / 1000)

        slack_ms = 500
        lease_ms = 1_000

``backend_factory`` is a callable without arguments. Each call returns a new backend that is *not*
opened, all of them for one store. The suite opens and closes them, each with an instance id of its
own and in namespaces that nobody used before: nothing in the store has to be cleared.

``advance`` sets the clock of the store forward, or really waits. What else a store can be made to
do in a test is told by overriding ``set_back``, ``plant_unreadable`` and ``locked``. A case that
needs more than a store offers is skipped; the reasons stand in pytest's report.

The names of the cases are sentences of the protocol (``docs/protocol.rst``), and their docstrings
begin with the names of its rules.
"""

from __future__ import annotations

import pytest

# Before the modules are imported, so that their assertions tell the values.
pytest.register_assert_rewrite(
    *(
        f"{__name__}.{module}"
        for module in (
            "_answers",
            "_claim",
            "_contention",
            "_decisions",
            "_life",
            "_names",
            "_overlap",
            "_reading",
            "_store",
            "_upkeep",
        )
    )
)

from leasecron_sync.testing.conformance._answers import AnswerCases  # noqa: E402 - see above
from leasecron_sync.testing.conformance._claim import ClaimConformance  # noqa: E402
from leasecron_sync.testing.conformance._contention import ContentionCases  # noqa: E402
from leasecron_sync.testing.conformance._decisions import DecisionCases  # noqa: E402
from leasecron_sync.testing.conformance._life import LifeCases  # noqa: E402
from leasecron_sync.testing.conformance._names import NameCases  # noqa: E402
from leasecron_sync.testing.conformance._overlap import OverlapCases  # noqa: E402
from leasecron_sync.testing.conformance._reading import ReadingCases  # noqa: E402
from leasecron_sync.testing.conformance._store import LeaseSuite  # noqa: E402
from leasecron_sync.testing.conformance._upkeep import UpkeepCases  # noqa: E402

__all__ = ["ClaimConformance", "LeaseConformance"]


class LeaseConformance(
    DecisionCases,
    OverlapCases,
    AnswerCases,
    LifeCases,
    ReadingCases,
    UpkeepCases,
    NameCases,
    ContentionCases,
    LeaseSuite,
):
    """What every lease backend does.

    See the module's text for what to supply: the fixture ``backend_factory`` and the method
    ``advance``, and the attributes and methods of ``LeaseSuite`` where they differ.
    """
