"""The examples of README and documents are executed, and what they name exists.

Each document is played in a process and an empty directory of its own, its blocks in order. A
comment right above a block says what is not plain::

    .. example: file jobs.py            the block is saved under this name, and used later
    .. example: raises ValueError       the block ends with this error
    .. example: status 1                the last command of the block ends with this status
    .. example: output                  the block is what the block before wrote; numbers may vary
    .. example: exact output            the same, and nothing may vary
    .. example: needs flask gunicorn    not executed where one of these modules is missing
    .. example: not run, REASON         not executed

An example that needs a server of the reader's own takes its URL from a variable in ``SERVERS``.
Rendering and links are checked in ``tests/package/test_documents.py``.
"""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import json
import os
import re
import subprocess
import sys
import textwrap
import uuid
from collections.abc import Iterator
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
from docutils import nodes
from docutils.core import publish_doctree

import leasecron_sync
from leasecron_sync import errors
from leasecron_sync.events import _LINES, EVENT_NAMES
from leasecron_sync.model import Reason, RunState
from leasecron_sync.schedule import parse_schedule
from tests.services.fixtures import had
from tests.services.postgres import new_database
from tests.services.services import Services

ROOT = Path(__file__).parents[2]
PLAYER = Path(__file__).with_name("player.py")
DOCUMENTS = [ROOT / "README.rst", ROOT / "CHANGES.rst", *sorted(ROOT.glob("docs/*.rst"))]

# Installing needs a package index, which tests do not ask.
NOT_RUN = {"docs/tutorial.rst": 1}
LIMIT_S = 150

_BLOCK = re.compile(r"( *)\.\. code-block:: (\S+)\n((?: +:.*\n)*)\n((?:\1 +.*\n|[ \t]*\n)+)")
_COMMENT = re.compile(
    r"\.\. example: (file|raises|status|needs|output|exact output|not run,) ?(.*)\n\n *$"
)


class Block(NamedTuple):
    """A code block of a document."""

    language: str
    text: str
    line: int
    how: str
    argument: str


@cache
def blocks_of(document: Path) -> tuple[Block, ...]:
    text = document.read_text(encoding="utf-8")
    found = []
    for match in _BLOCK.finditer(text):
        comment = _COMMENT.search(text, 0, match.start(2) - len(".. code-block:: "))
        how, argument = comment.groups() if comment else ("", "")
        line = text.count("\n", 0, match.start(4)) + 1
        code = textwrap.dedent(match[4]).rstrip() + "\n"
        found.append(Block(match[2], code, line, how, argument))
    return tuple(found)


def name_of(document: Path) -> str:
    return document.relative_to(ROOT).as_posix()


WITH_EXAMPLES = [
    document
    for document in DOCUMENTS
    if any(block.language in ("python", "sh") for block in blocks_of(document))
]


def kind_of(block: Block) -> str:
    """Return what the player does with a block; nothing where the text is empty."""
    if block.how in ("file", "output", "exact output"):
        return block.how
    if block.how == "not run,":
        return ""
    if block.how == "needs" and missing_for(block):
        return ""
    return block.language if block.language in ("python", "sh") else ""


def missing_for(block: Block) -> list[str]:
    """Return the modules that a block needs and that are not installed."""
    names = block.argument.split() if block.how == "needs" else []
    return [name for name in names if importlib.util.find_spec(name) is None]


def steps_of(document: Path) -> list[dict[str, object]]:
    steps: list[dict[str, object]] = []
    left_out = False
    for block in blocks_of(document):
        kind = kind_of(block)
        if block.language in ("python", "sh"):
            left_out = not kind
        if kind and not left_out:  # nor the output of a block that is not executed
            argument = block.argument if block.how != "needs" else ""
            steps.append(
                {"kind": kind, "text": block.text, "line": block.line, "argument": argument}
            )
    return steps


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    """A folder with the two programs that documents call."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, arguments in (("python", ""), ("leasecron-sync", "-m leasecron_sync ")):
        script = folder / name
        script.write_text(f'#!/bin/sh\nexec "{sys.executable}" {arguments}"$@"\n')
        script.chmod(0o755)
    return folder


@contextlib.contextmanager
def postgres(services: Services) -> Iterator[str]:
    with new_database(had(services.postgres), f"test_{uuid.uuid4().hex}") as url:
        yield url


@contextlib.contextmanager
def redis(services: Services) -> Iterator[str]:
    server = had(lambda: services.new_redis(durable=False))
    server.start()
    try:
        yield server.url
    finally:
        server.close()


@contextlib.contextmanager
def rabbitmq(services: Services) -> Iterator[str]:
    yield had(services.rabbitmq).url


@contextlib.contextmanager
def nats(services: Services) -> Iterator[str]:
    yield had(services.nats).url


SERVERS = {
    "SHOP_DATABASE": postgres,
    "SHOP_REDIS": redis,
    "SHOP_RABBITMQ": rabbitmq,
    "SHOP_NATS": nats,
}


@contextlib.contextmanager
def servers_of(document: Path, request: pytest.FixtureRequest) -> Iterator[dict[str, str]]:
    """Start what a document takes from the environment; yield the variables."""
    text = document.read_text(encoding="utf-8")
    with contextlib.ExitStack() as made:
        yield {
            variable: made.enter_context(server(request.getfixturevalue("services")))
            for variable, server in SERVERS.items()
            if f'os.environ["{variable}"]' in text
        }


@pytest.mark.slow
@pytest.mark.timeout(LIMIT_S + 10)
@pytest.mark.parametrize("document", WITH_EXAMPLES, ids=name_of)
def test_examples_do_what_the_document_says(
    document: Path, tmp_path: Path, programs: Path, request: pytest.FixtureRequest
) -> None:
    place = tmp_path / "work"
    place.mkdir()
    steps = tmp_path / "steps.json"
    steps.write_text(json.dumps([name_of(document), steps_of(document)]))
    environment = {
        **os.environ,
        "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "PYTHONUNBUFFERED": "1",
        "PYTHONWARNINGS": "error",
    }
    with servers_of(document, request) as urls:
        played = subprocess.run(
            [sys.executable, str(PLAYER), str(steps)],
            cwd=place,
            env={**environment, **urls},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
    assert played.returncode == 0, played.stdout
    missing = sorted({name for block in blocks_of(document) for name in missing_for(block)})
    if missing:
        pytest.skip(f"all but the blocks that need {', '.join(missing)} was executed")


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_no_block_escapes(document: Path) -> None:
    """What docutils takes for a block of code is what is executed here."""
    tree = publish_doctree(
        document.read_text(encoding="utf-8"),
        source_path=str(document),
        settings_overrides={"syntax_highlight": "none", "report_level": 2},
    )
    seen = [
        node.astext().rstrip() + "\n"
        for node in tree.findall(nodes.literal_block)
        if "code" in node["classes"]
    ]
    assert [block.text for block in blocks_of(document)] == seen
    comments = re.findall(r"^ *\.\. example:", document.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(comments) == sum(bool(block.how) for block in blocks_of(document))


@pytest.mark.parametrize("document", WITH_EXAMPLES, ids=name_of)
def test_python_blocks_compile(document: Path) -> None:
    for block in blocks_of(document):
        if block.language == "python":
            compile(block.text, name_of(document), "exec")


def test_blocks_that_are_not_run_are_few_and_say_why() -> None:
    counts: dict[str, int] = {}
    for document in DOCUMENTS:
        for block in blocks_of(document):
            if block.how == "not run,":
                assert len(block.argument) > 10, f"{name_of(document)}, line {block.line}"
                counts[name_of(document)] = counts.get(name_of(document), 0) + 1
    assert counts == NOT_RUN


# -- what the documents name -------------------------------------------------------------------


@cache
def literals_of(document: Path) -> tuple[str, ...]:
    """Return what stands between double backquotes, on one line each."""
    text = re.sub(r"\s+", " ", document.read_text(encoding="utf-8"))
    return tuple(re.findall(r"(?<!`)``(.+?)``(?!`)", text))


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_files_that_are_named_exist(document: Path) -> None:
    named = re.compile(r"(?:docs|leasecron_sync|scripts|tests)/[\w./-]*")
    missing = [
        literal
        for literal in literals_of(document)
        if named.fullmatch(literal) and not (ROOT / literal).exists()
    ]
    assert not missing


@cache
def texts_of_the_package() -> str:
    """Return every text in the code of the package, one after the other."""
    return "\n".join(
        re.sub(r"\s+", " ", node.value)
        for path in sorted(Path(leasecron_sync.__file__).parent.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    )


def test_lines_of_the_log_are_quoted_as_they_are() -> None:
    """A reader looks for the line that he saw, so it must stand there letter by letter."""
    quoted = [
        literal
        for literal in literals_of(ROOT / "docs/why.rst")
        if re.fullmatch(r"(?!leasecron-sync )[a-z][^=()\"_/]* [^=()\"_/]* [^=()\"_/]*", literal)
    ]
    assert len(quoted) > 15
    assert not [literal for literal in quoted if literal not in texts_of_the_package()]


def test_every_event_is_told_with_its_line() -> None:
    text = re.sub(r"\s+", " ", (ROOT / "docs/events.rst").read_text(encoding="utf-8"))
    levels = {10: "debug", 20: "info", 30: "warning", 40: "error"}
    for name in EVENT_NAMES:
        level, sentence = _LINES[name]
        assert f"* - ``{name}`` - {levels[level]} - ``{sentence}``" in text


def test_every_reason_and_state_is_explained() -> None:
    literals = set(literals_of(ROOT / "docs/why.rst"))
    assert literals >= {reason.value for reason in Reason}
    assert literals >= {state.value for state in RunState}


def test_every_error_is_explained() -> None:
    public = {
        name
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, BaseException)
    }
    assert set(literals_of(ROOT / "docs/errors.rst")) >= public
    assert public <= set(leasecron_sync.__all__)


def test_public_names_are_named_somewhere() -> None:
    text = "\n".join(document.read_text(encoding="utf-8") for document in DOCUMENTS)
    assert not [name for name in leasecron_sync.__all__ if name not in text]


def test_the_table_of_clock_changes_is_right() -> None:
    text = (ROOT / "docs/guide-schedules.rst").read_text(encoding="utf-8")
    rows = re.findall(r"\* - ``(.+?)``\n     - ((?:``\d{4}-\d\d-\d\dT[\d:+]+``\s+)+)- \w", text)
    assert len(rows) == 6
    for expression, cell in rows:
        schedule = parse_schedule(expression, "Europe/Athens")
        told = [
            round(datetime.fromisoformat(moment).timestamp() * 1000)
            for moment in re.findall(r"``(.+?)``", cell)
        ]
        found: list[int | None] = [schedule.after(told[0] - 1)]
        while len(found) < len(told):
            found.append(schedule.after(found[-1] or 0))
        assert found == told
