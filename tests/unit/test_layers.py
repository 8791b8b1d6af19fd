"""Which module may import which, what importing the package loads, and its public names."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = "leasecron_sync"

# Layer -> layers that it may import. A layer is a module, or a package with all that is in it;
# "(package)" is leasecron_sync/__init__.py, "backends" backends/__init__.py, "backends._*" the
# helpers that backends share, "backends.*" each backend by itself.
VALUES = {"errors", "clock", "model"}
RULES = VALUES | {"schedule", "protocol", "options"}
RECORDS = VALUES | {"options"}
ENGINE = RULES | {"backends.base", "run", "events"}
EVERYTHING = ENGINE | {
    "(package)",
    "backends",
    "backends._*",
    "backends.*",
    "backends.urls",
    "engine",
    "scheduler",
}
MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "clock": set(),
    "model": {"errors", "clock"},
    "schedule": VALUES,
    "protocol": VALUES,
    "options": VALUES | {"protocol"},
    "backends.base": RULES,
    "backends._*": RULES | {"backends.base"},
    "backends.*": RULES | {"backends.base", "backends._*"},
    "backends.urls": RULES | {"backends.base", "backends._*", "backends.*"},
    "backends": {"backends.base"},
    "run": RECORDS,
    "events": RECORDS,
    "engine": ENGINE,
    "scheduler": ENGINE | {"engine", "backends.urls"},
    "(package)": ENGINE | {"backends.*", "backends.urls", "scheduler"},
    "doctor": EVERYTHING,
    "cli": EVERYTHING | {"doctor"},
    "__main__": {"cli"},
    "testing": EVERYTHING,
}
# Layers of several modules, which may import each other. Backends may not: what they share is in a
# helper.
TOGETHER = {"schedule", "protocol", "backends._*", "engine", "doctor", "cli", "testing"}

# What is not in the standard library -> the modules that import it, by how their names begin.
THIRD_PARTY = {
    "croniter": "schedule.cron",
    "tenacity": "engine.caller",
    "redis": "backends.redis",
    "psycopg2": "backends.postgres",
    "pika": "backends.rabbitmq",
    "nats": "backends.nats",
    "uwsgidecorators": "engine.host",
    "pytest": "testing.conformance",
}
# Imported by these only inside functions, so that the package can be imported without it.
LATE = {"croniter", "tenacity", "redis", "psycopg2", "pika", "nats", "uwsgidecorators"}

# Modules that use something of ``time`` that is not a clock.
NO_CLOCK = {"cli.run": "gmtime"}  # turns the time of a log record into a date


class Import(NamedTuple):
    """An import statement, or a call of ``import_module``, wherever it stands in a module."""

    module: str
    line: int
    target: str
    late: bool

    def __str__(self) -> str:
        return f"{self.module}, line {self.line}: {self.target}"


def modules() -> dict[str, str]:
    """Return the source of every module by its name without the package's."""
    found = {}
    for path in sorted((ROOT / PACKAGE).rglob("*.py")):
        parts = path.relative_to(ROOT / PACKAGE).with_suffix("").parts
        name = ".".join(part for part in parts if part != "__init__")
        found[name or "(package)"] = path.read_text(encoding="utf-8")
    return found


SOURCES = modules()


def own(target: str, known: set[str]) -> str:
    """Return the module of this package that a dotted name leads to."""
    name = target[len(PACKAGE) + 1 :]
    while name and name not in known:
        name = name.rpartition(".")[0]
    return name or "(package)"


@cache
def imports_in(module: str, source: str) -> list[Import]:
    found: list[Import] = []
    for node, late in walk(ast.parse(source), late=False):
        targets = []
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            # Relative imports would have a level; there are none, and ruff refuses them.
            start = "." * node.level + (node.module or "")
            targets = [f"{start}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Call) and called(node) in ("import_module", "__import__"):
            argument = node.args[0] if node.args else None
            if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                targets = [argument.value]
        found.extend(Import(module, node.lineno, target, late) for target in targets)
    return found


def walk(node: ast.AST, *, late: bool) -> Iterator[tuple[Any, bool]]:
    """Yield every node, and whether it is inside a function."""
    yield node, late
    late = late or isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
    for child in ast.iter_child_nodes(node):
        yield from walk(child, late=late)


def called(call: ast.Call) -> str:
    return ast.unparse(call.func).rpartition(".")[2]


def root_of(target: str) -> str:
    return target.partition(".")[0]


def imports(sources: dict[str, str]) -> list[Import]:
    return [found for module, source in sources.items() for found in imports_in(module, source)]


def own_imports(sources: dict[str, str]) -> list[Import]:
    """Return the imports of modules of this package, each with the name of the module."""
    return [
        found._replace(target=own(found.target, set(sources)))
        for found in imports(sources)
        if root_of(found.target) == PACKAGE
    ]


def layer_of(module: str) -> str:
    if module in MAY_IMPORT:
        return module
    package, _, name = module.rpartition(".")
    if package == "backends":
        return "backends._*" if name.startswith("_") else "backends.*"
    while package and package not in MAY_IMPORT:
        package = package.rpartition(".")[0]
    assert package, f"{module} is in no layer: give it a row in MAY_IMPORT"
    return package


def forbidden(sources: dict[str, str]) -> list[str]:
    found = []
    for item in own_imports(sources):
        mine, other = layer_of(item.module), layer_of(item.target)
        together = mine == other and mine in TOGETHER
        if not together and other not in MAY_IMPORT[mine]:
            found.append(str(item))
    return found


def cycle(sources: dict[str, str]) -> list[str]:
    """Return modules that import each other in a circle, or nothing."""
    graph: TopologicalSorter[str] = TopologicalSorter(dict.fromkeys(sources, ()))
    for item in own_imports(sources):
        if item.target != item.module:
            graph.add(item.module, item.target)
    try:
        graph.prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_modules_import_only_the_layers_below_them() -> None:
    assert forbidden(SOURCES) == []


def test_no_modules_import_each_other() -> None:
    assert cycle(SOURCES) == []


def test_nothing_imports_what_is_there_for_tests() -> None:
    found = [item for item in own_imports(SOURCES) if layer_of(item.target) == "testing"]
    assert [str(item) for item in found if layer_of(item.module) != "testing"] == []


PLANTED = [
    ("backends.base", "from leasecron_sync.engine import timer"),
    ("backends.base", "if TYPE_CHECKING:\n    from leasecron_sync.run import Run"),
    ("backends.memory", "from leasecron_sync.events import Event"),
    ("backends.memory", "def f():\n    import leasecron_sync.scheduler"),
    ("backends.memory", "from leasecron_sync.backends.sqlite import SQLiteLease"),
    ("backends.sqlite", "from leasecron_sync.backends import urls"),
    ("backends._local", "from leasecron_sync.backends.memory import MemoryLease"),
    ("engine.timer", "from leasecron_sync import SQLiteLease"),
    ("engine.timer", "from leasecron_sync.backends import sqlite"),
    ("engine.timer", "from leasecron_sync.backends import LeaseBackend"),
    ("engine.timer", "def f():\n    from leasecron_sync.backends.urls import connect"),
    ("engine.timer", 'importlib.import_module("leasecron_sync.scheduler")'),
    ("events", "from leasecron_sync.run import Run"),
    ("model", "from leasecron_sync.options import OPTIONS"),
    ("options", "from leasecron_sync.schedule import every"),
    ("schedule.cron", "from leasecron_sync.options import OPTIONS"),
    ("scheduler", "from leasecron_sync.backends.sqlite import SQLiteLease"),
    ("scheduler", "from leasecron_sync.testing import MemoryClaim"),
    ("cli", "from leasecron_sync.testing import MemoryClaim"),
]


@pytest.mark.parametrize(("module", "statement"), PLANTED)
def test_a_forbidden_import_would_be_found(module: str, statement: str) -> None:
    source = SOURCES.get(module, "") + f"\n{statement}\n"
    (found,) = forbidden({**SOURCES, module: source})
    assert found.startswith(f"{module}, line ")


def test_a_circle_would_be_found() -> None:
    planted = "\n\ndef f():\n    from leasecron_sync.engine.lifecycle import Lifecycle\n"
    source = SOURCES["engine.context"] + planted
    assert {"engine.context", "engine.lifecycle"} <= set(
        cycle({**SOURCES, "engine.context": source})
    )


# -- other packages ------------------------------------------------------------------------------


@pytest.mark.skipif(sys.version_info < (3, 10), reason="Python tells its own modules from 3.10 on")
def test_each_third_party_package_is_imported_where_it_is_expected() -> None:
    standard: frozenset[str] = getattr(sys, "stdlib_module_names", frozenset())
    unexpected = []
    for item in imports(SOURCES):
        package = root_of(item.target)
        if package not in standard and package != PACKAGE:
            place = THIRD_PARTY.get(package)
            if place is None or not item.module.startswith(place):
                unexpected.append(str(item))
    assert unexpected == []


def test_what_costs_time_or_may_be_missing_is_imported_inside_functions() -> None:
    found = [item for item in imports(SOURCES) if root_of(item.target) in LATE]
    assert found
    assert [str(item) for item in found if not item.late] == []


def test_only_the_clock_imports_time() -> None:
    users = {item.module for item in imports(SOURCES) if root_of(item.target) == "time"}
    assert users <= {"clock", *NO_CLOCK}
    for module, name in NO_CLOCK.items():
        tree = ast.parse(SOURCES.get(module, ""))
        used = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
        assert {node.attr for node in used if ast.unparse(node.value) == "time"} <= {name}


def test_nothing_sleeps() -> None:
    for module, source in SOURCES.items():
        names = {ast.unparse(node) for node in ast.walk(ast.parse(source)) if is_name(node)}
        assert "time.sleep" not in names, module
    assert [str(item) for item in imports(SOURCES) if item.target == "time.sleep"] == []


def is_name(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)


# -- what importing loads ------------------------------------------------------------------------

IMPORT = """\
import sys, threading
sys.path.insert(0, sys.argv[1])
before = set(sys.modules)
import importlib
importlib.import_module(sys.argv[2])
print(threading.active_count(), *sorted(set(sys.modules) - before))
"""


@pytest.mark.parametrize("entrance", ["", ".backends", ".testing", ".testing.simulation", ".cli"])
def test_importing_loads_no_client_library_and_nothing_that_is_slow(entrance: str) -> None:
    result = subprocess.run(
        [sys.executable, "-I", "-c", IMPORT, str(ROOT), PACKAGE + entrance],
        capture_output=True,
        text=True,
        check=True,
    )
    threads, *loaded = result.stdout.split()
    assert threads == "1"
    assert PACKAGE in loaded
    unwanted = {*LATE, "pytest", "hypothesis", "docker", "dateutil", "asyncio", "multiprocessing"}
    assert unwanted & set(loaded) == set()


# -- public names --------------------------------------------------------------------------------

PUBLIC = {
    "leasecron_sync": [
        "Event",
        "EventName",
        "HandOver",
        "LeaseRun",
        "LeasecronError",
        "LiveRunStatus",
        "MemoryLease",
        "MissingDependency",
        "NatsClaim",
        "OutcomeUnknown",
        "PostgresLease",
        "RabbitMQClaim",
        "RedisClaim",
        "RedisLease",
        "Run",
        "RunInterrupt",
        "RunLost",
        "RunRecord",
        "RunState",
        "RunStopping",
        "RunTimeLimit",
        "SQLiteLease",
        "Scheduler",
        "SchedulerStateError",
        "Status",
        "StoreError",
        "StoreRejected",
        "StoreUnavailable",
        "StoreUnsupported",
        "at",
        "connect",
        "connect_claim",
        "connect_lease",
        "every",
    ],
    "leasecron_sync.backends": ["Backend", "BackendSettings", "ClaimBackend", "LeaseBackend"],
    "leasecron_sync.testing": [
        "AttemptRow",
        "Checker",
        "Entry",
        "Fault",
        "FaultyClaim",
        "FaultyLease",
        "History",
        "HistoryError",
        "HistoryLog",
        "ManualClock",
        "ManualRun",
        "ManualScheduler",
        "MemoryClaim",
        "RecordingClaim",
        "RecordingLease",
        "Report",
        "RunRow",
        "Terms",
        "Totals",
        "check",
        "executing",
        "read_history",
        "recording",
        "shorten",
    ],
    "leasecron_sync.testing.simulation": [
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
    ],
}


@pytest.mark.parametrize("entrance", PUBLIC)
def test_public_names_change_only_on_purpose(entrance: str) -> None:
    module = importlib.import_module(entrance)
    assert sorted(module.__all__) == PUBLIC[entrance]
    assert [name for name in module.__all__ if not hasattr(module, name)] == []
