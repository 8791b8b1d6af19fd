"""The pages that are made from the code are the ones that the code makes now."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from leasecron_sync.options import OPTIONS, OptionSpec

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "generate_docs.py"


@pytest.fixture(scope="module")
def script() -> dict[str, Any]:
    """The script's own names; loading it writes nothing."""
    path = list(sys.path)
    try:
        return runpy.run_path(str(SCRIPT))
    finally:
        sys.path[:] = path


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True, check=False
    )


def test_generated_pages_are_current() -> None:
    result = run("--check")
    assert result.returncode == 0, result.stderr


def test_a_stale_page_is_reported_and_left_alone(
    script: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(script["main"].__globals__, "ROOT", tmp_path)
    page = tmp_path / "docs" / "options.rst"
    page.parent.mkdir()
    page.write_text("stale", encoding="utf-8")

    assert script["main"](["--check"]) == 1
    assert page.read_text(encoding="utf-8") == "stale"
    assert "docs/options.rst is not current" in capsys.readouterr().err

    assert script["main"]([]) == 0
    assert script["main"](["--check"]) == 0


def test_a_missing_page_is_stale(
    script: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(script["main"].__globals__, "ROOT", tmp_path)
    assert script["main"](["--check"]) == 1
    assert not (tmp_path / "docs").exists()


@pytest.mark.parametrize("page", ["docs/options.rst"])
def test_a_page_does_not_depend_on_when_or_where_it_is_made(
    script: dict[str, Any], page: str
) -> None:
    text = script["content"](page)
    assert text == script["content"](page)
    assert str(ROOT) not in text


@pytest.mark.parametrize("spec", OPTIONS, ids=lambda spec: f"{spec.on}-{spec.name}")
def test_every_option_has_a_row(script: dict[str, Any], spec: OptionSpec) -> None:
    text = " ".join(script["content"]("docs/options.rst").split())
    meaning = " ".join(script["marked"](spec.text).split())
    assert f"* - ``{spec.name}``" in text
    assert meaning in text
    if spec.instead:
        assert script["marked"](script["sentence"](spec.instead)) in text
