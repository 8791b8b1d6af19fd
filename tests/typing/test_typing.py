"""What the type checkers accept and refuse, and that running the code agrees.

``good.py`` and ``bad.py`` are held against mypy and pyright, which report an expected error that is
missing as well. The same lines are then executed.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
import json
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, Callable, Literal, NamedTuple, Optional

import pytest

from leasecron_sync import Event, LeaseRun, MemoryLease, Run, Scheduler
from leasecron_sync.backends import Backend, urls
from leasecron_sync.clock import SystemClock
from leasecron_sync.model import LeaseRef, RunKey
from leasecron_sync.options import OPTIONS, UNSET, OptionSpec
from leasecron_sync.run import RunControl
from leasecron_sync.testing import MemoryClaim

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
GOOD, BAD = HERE / "good.py", HERE / "bad.py"

DAILY = "0 3 * * *"

# -- the checkers --------------------------------------------------------------------------------

# In every run, so that a checker that stopped reporting what is missing is found out.
STALE = """\
from __future__ import annotations

answer: int = 42  # type: ignore[assignment]
other: int = 42  # pyright: ignore[reportAssignmentType]
"""

Complaints = dict[str, list[str]]


def run_checker(*command: str, folder: Path) -> str:
    name = command[0]
    if importlib.util.find_spec(name) is None:
        pytest.fail(
            f"{name} is not installed for {sys.executable}: install the extra 'lint' there "
            "(python -m pip install --editable '.[lint,test]'), or use scripts/test"
        )
    result = subprocess.run(
        [sys.executable, "-m", *command],
        cwd=folder,
        env={**os.environ, "PYRIGHT_PYTHON_IGNORE_WARNINGS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    # 1 is for errors in the code, and the planted ones are always there.
    assert result.returncode == 1, f"{name} failed:\n{result.stdout}\n{result.stderr}"
    return result.stdout


def ask_mypy(files: list[Path], folder: Path) -> Complaints:
    """Return what mypy complains of, in these files only."""
    text = run_checker(
        "mypy",
        f"--config-file={ROOT / 'setup.cfg'}",
        f"--cache-dir={folder / 'mypy'}",
        "--follow-imports=silent",
        "--no-color-output",
        *map(str, files),
        folder=ROOT,
    )
    assert f"(checked {len(files)} source files)" in text
    found: Complaints = {}
    for line in text.splitlines():
        place = re.match(r"(?P<path>.+?\.py):(?P<rest>\d+: error: .*)", line)
        if place:
            found.setdefault(Path(place["path"]).name, []).append(place["rest"])
    return found


def ask_pyright(files: list[Path], folder: Path) -> Complaints:
    """Return what pyright complains of, in these files only."""
    # Files on the command line would make it ignore the settings, and paths must be relative.
    settings = {
        "extends": os.path.relpath(ROOT / "pyrightconfig.json", folder),
        "include": [os.path.relpath(file, folder) for file in files],
        "extraPaths": [str(ROOT)],
    }
    (folder / "pyrightconfig.json").write_text(json.dumps(settings), encoding="utf-8")
    text = run_checker("pyright", "--outputjson", f"--pythonpath={sys.executable}", folder=folder)
    report = json.loads(text)
    assert report["summary"]["filesAnalyzed"] == len(files)
    found: Complaints = {}
    for item in report["generalDiagnostics"]:
        line = item["range"]["start"]["line"] + 1
        name = Path(item["file"]).name
        found.setdefault(name, []).append(f"{line}: {item['message']} [{item.get('rule')}]")
    return found


@pytest.fixture(scope="module", params=[ask_mypy, ask_pyright], ids=["mypy", "pyright"])
def complaints(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Complaints:
    folder = tmp_path_factory.mktemp("checker").resolve()
    stale = folder / "stale.py"
    stale.write_text(STALE, encoding="utf-8")
    found: Complaints = request.param([GOOD, BAD, stale], folder)
    return found


checkers_take_their_time = pytest.mark.timeout(180)


@checkers_take_their_time
def test_good_uses_are_accepted(complaints: Complaints) -> None:
    assert complaints.get("good.py", []) == []


@checkers_take_their_time
def test_bad_uses_are_refused_as_expected(complaints: Complaints) -> None:
    assert complaints.get("bad.py", []) == []


@checkers_take_their_time
def test_an_expected_error_that_vanishes_is_reported(complaints: Complaints) -> None:
    (complaint,) = complaints["stale.py"]
    assert re.match(r"3: error: Unused|4: Unnecessary", complaint)


def test_the_package_says_that_it_has_types() -> None:
    assert (ROOT / "leasecron_sync" / "py.typed").is_file()


# -- the lines of bad.py -------------------------------------------------------------------------


class Line(NamedTuple):
    group: str
    statement: ast.stmt
    number: int
    text: str


def bad_lines() -> Iterator[Line]:
    source = BAD.read_text(encoding="utf-8")
    texts = source.splitlines()
    for group in ast.parse(source).body:
        if isinstance(group, ast.FunctionDef) and is_group(group):
            for statement in group.body:
                decorated = isinstance(statement, ast.FunctionDef)
                number = statement.lineno - 1 if decorated else statement.lineno
                yield Line(group.name, statement, number, texts[number - 1].strip())


def is_group(function: ast.FunctionDef) -> bool:
    names = {ast.unparse(decorator).partition("(")[0] for decorator in function.decorator_list}
    return bool(names & {"raises", "passes"})


BAD_LINES = list(bad_lines())


def arguments(function: Callable[..., object], folder: Path) -> dict[str, object]:
    """Make an argument for each parameter that has no default."""
    key = RunKey("typed", 1_800_000_000_000)
    control = RunControl(
        SystemClock(), trusted_until_ms=None, time_limit_ms=None, on_lost=lambda: None
    )
    makers: dict[str, Callable[[], object]] = {
        "folder": lambda: folder,
        "run": lambda: Run(key, control),
        "lease_run": lambda: LeaseRun(key, control, LeaseRef(key, 5), 1),
        "event": lambda: Event("run_lost", "instance"),
        "lease": MemoryLease,
        "claim": MemoryClaim,
        "lease_url": lambda: "memory://typed",
        "claim_url": lambda: CLAIM_URL,
        "scheduler": lambda: Scheduler(MemoryClaim()),
        "any_scheduler": lambda: Scheduler(MemoryClaim()),
        "claim_scheduler": lambda: Scheduler(MemoryClaim()),
        "lease_scheduler": lambda: Scheduler(MemoryLease()),
        "scheduler_of_url": lambda: Scheduler("memory://typed"),
    }
    return {
        parameter.name: makers[parameter.name]()
        for parameter in inspect.signature(function).parameters.values()
        if parameter.default is inspect.Parameter.empty
    }


CLAIM_URL = "claim://typed"


@pytest.fixture(autouse=True)
def a_url_for_claims(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a URL name a claim backend that needs no server."""
    connect = urls.connect

    def also_claims(url: str) -> Backend:
        return MemoryClaim() if url == CLAIM_URL else connect(url)

    monkeypatch.setattr(urls, "connect", also_claims)


def test_each_bad_line_names_an_error_for_each_checker() -> None:
    expected = r".+  # type: ignore\[[\w, -]+\]  # pyright: ignore\[[\w, ]+\]"
    assert len(BAD_LINES) > 100
    assert [line.text for line in BAD_LINES if not re.fullmatch(expected, line.text)] == []


@pytest.fixture(scope="module")
def bad() -> dict[str, Any]:
    return runpy.run_path(str(BAD))


@pytest.mark.parametrize("line", BAD_LINES, ids=lambda line: f"{line.group}-{line.number}")
def test_a_bad_line_is_refused_when_it_is_executed(
    line: Line, bad: dict[str, Any], tmp_path: Path
) -> None:
    names = {**bad, **arguments(bad[line.group], tmp_path)}
    code = compile(ast.Module([line.statement], []), str(BAD), "exec")
    expected: Optional[type[Exception]] = bad["EXPECTED"][line.group]
    if expected is None:
        exec(code, names)
        return
    with pytest.raises(expected):
        exec(code, names)


def good_functions() -> list[str]:
    """Return the names of the functions below the line that opens 'what a handler is given'."""
    source = GOOD.read_text(encoding="utf-8")
    start = source.index("# -- what a handler is given")
    first = source.count("\n", 0, start)
    return [
        node.name
        for node in ast.parse(source).body
        if isinstance(node, ast.FunctionDef) and node.lineno > first
    ]


@pytest.mark.parametrize("name", good_functions())
def test_good_uses_run(name: str, tmp_path: Path) -> None:
    function = runpy.run_path(str(GOOD))[name]
    function(**arguments(function, tmp_path))


# -- every option of the table, whatever its value -------------------------------------------------


OF_ONE_FAMILY = [
    pytest.param(spec, id=f"{spec.on}-{spec.name}") for spec in OPTIONS if spec.family != "both"
]


def values(spec: OptionSpec) -> list[object]:
    """Return the default, other good values, and values that are wrong on any backend."""
    return [spec.default, spec.low, spec.high, "skip", "allow", None, -1, 0.5, object()]


@pytest.mark.parametrize("spec", OF_ONE_FAMILY)
def test_an_option_of_the_other_family_is_a_type_error_whatever_its_value(spec: OptionSpec) -> None:
    # Untyped, as for whoever uses no checker.
    make: Any = Scheduler
    backend: Any = MemoryClaim if spec.family == "lease" else MemoryLease
    scheduler: Any = make(backend())
    for value in values(spec):
        given = {spec.name: value}
        calls: list[Callable[[], object]] = [partial(make, backend(), **given)]
        if spec.on == "job":
            calls = [
                partial(scheduler.job, DAILY, **given),
                partial(scheduler.add_job, print, DAILY, name="added", **given),
            ]
        for call in calls:
            with pytest.raises(TypeError) as caught:
                call()
            message = str(caught.value)
            assert spec.name in message
            assert backend.__name__ in message
            assert spec.instead
            assert spec.instead in message


def keywords_in(group: str) -> set[tuple[str, str]]:
    """Return method and keyword of each call in a group of bad.py."""
    found: set[tuple[str, str]] = set()
    for line in BAD_LINES:
        if line.group == group and isinstance(line.statement, ast.Expr):
            call = line.statement.value
            if isinstance(call, ast.Call) and len(call.keywords) == 1:
                name = ast.unparse(call.func).rpartition(".")[2]
                found.add((name, str(call.keywords[0].arg)))
    return found


@pytest.mark.parametrize("spec", OF_ONE_FAMILY)
def test_the_checkers_are_asked_about_every_option_of_one_family(spec: OptionSpec) -> None:
    if spec.on == "job":
        groups = ["lease_options_of_a_job", "lease_options_of_a_job_on_any_claim"]
        methods = ["job", "add_job"]
    else:
        groups = [f"{spec.family}_options_of_a_scheduler"]
        methods = ["Scheduler"]
    for group in groups:
        for method in methods:
            assert (method, spec.name) in keywords_in(group)


# -- signatures ----------------------------------------------------------------------------------

Place = Literal["scheduler", "job"]


def table(on: Place, *families: str) -> set[str]:
    return {spec.name for spec in OPTIONS if spec.on == on and spec.family in families}


def overloads(method: str) -> list[set[str]]:
    """Return the keyword-only parameters of each overload."""
    source = Path(inspect.getfile(Scheduler)).read_text(encoding="utf-8")
    (scheduler,) = (
        node
        for node in ast.parse(source).body
        if isinstance(node, ast.ClassDef) and node.name == "Scheduler"
    )
    return [
        {argument.arg for argument in node.args.kwonlyargs}
        for node in scheduler.body
        if isinstance(node, ast.FunctionDef)
        and node.name == method
        and any(ast.unparse(decorator) == "overload" for decorator in node.decorator_list)
    ]


def test_the_overloads_of_a_scheduler_take_the_options_of_the_table() -> None:
    common = table("scheduler", "both")
    assert overloads("__init__") == [
        common | table("scheduler", "claim"),
        common | table("scheduler", "lease"),
        common,  # a URL
        common,  # a backend of either family
    ]


@pytest.mark.parametrize("method", ["job", "add_job"])
def test_the_overloads_of_a_job_take_the_options_of_the_table(method: str) -> None:
    common = table("job", "both")
    assert overloads(method) == [common | table("job", "lease"), common]


@pytest.mark.parametrize("method", ["__init__", "job", "add_job"])
def test_every_option_is_unset_until_it_is_given(method: str) -> None:
    signature = inspect.signature(getattr(Scheduler, method))
    options = {
        parameter.name: parameter.default
        for parameter in signature.parameters.values()
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY
    }
    on: Place = "scheduler" if method == "__init__" else "job"
    assert set(options) == table(on, "both", "lease", "claim")
    assert all(default is UNSET for default in options.values())
