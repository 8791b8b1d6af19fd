"""Every test that the page 'Faults that others reported' names exists, and every line names one."""

from __future__ import annotations

import ast
import importlib
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/reported-faults.rst"
NAMED = re.compile(r"``(tests/[^`]*::[^`]*)``")
ROWS = (32, 40)
"""Of the table of what was reported, and of the table of complaints."""


@cache
def rows() -> tuple[tuple[str, ...], ...]:
    """Return the rows of each table, without its head."""
    tables = PAGE.read_text(encoding="utf-8").split(".. list-table::")[1:]
    return tuple(
        tuple(row for row in table.split("\n   * - ")[1:] if not row.startswith("Symptom\n"))
        for table in tables
    )


@cache
def functions_of(path: Path) -> frozenset[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return frozenset(node.name for node in tree.body if isinstance(node, ast.FunctionDef))


def exists(test: str) -> bool:
    """Tell whether pytest would find a test; in a class it may come from a shipped suite."""
    file, *names = test.split("::")
    path = ROOT / file
    if not path.is_file() or not names[-1].startswith("test_"):
        return False
    if len(names) == 1:
        return names[0] in functions_of(path)
    module = importlib.import_module(file[: -len(".py")].replace("/", "."))
    suite = getattr(module, names[0], None)
    return names[0].startswith("Test") and callable(getattr(suite, names[1], None))


NAMES = sorted({name for table in rows() for row in table for name in NAMED.findall(row)})


@pytest.mark.parametrize("test", NAMES)
def test_every_test_that_is_named_exists(test: str) -> None:
    assert exists(test)


def test_every_row_names_a_test() -> None:
    assert tuple(map(len, rows())) == ROWS
    assert not [row for table in rows() for row in table if not NAMED.search(row)]


def test_a_name_of_no_test_would_be_found() -> None:
    real = "tests/docs/test_reported_faults.py::test_every_row_names_a_test"
    assert exists(real)
    assert not exists(real + "_more")
    assert not exists(real.replace("docs", "doc"))
    suite = "tests/conformance/test_lease.py::TestSQLiteLease::"
    assert exists(suite + "test_odd_names_survive")
    assert not exists(suite + "test_even_names_survive")
    assert not exists(suite.replace("SQLite", "Oracle") + "test_odd_names_survive")


def test_the_command_of_the_page_finds_every_name() -> None:
    [pattern] = re.findall(r"grep -oE '(.+?)'", PAGE.read_text(encoding="utf-8"))
    assert sorted(set(re.findall(pattern, PAGE.read_text(encoding="utf-8")))) == NAMES
