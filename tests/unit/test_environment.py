"""Scripts that are called with an interpreter that lacks what the library needs."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

SCRIPT = """
import sys
from pathlib import Path
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from scripts._environment import use_environment
use_environment()
print("runs", *sys.argv[1:])
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "scripts" / "_environment.py", tmp_path / "scripts")
    (tmp_path / "scripts" / "script.py").write_text(SCRIPT, encoding="utf-8")
    return tmp_path


def call(checkout: Path) -> subprocess.CompletedProcess[str]:
    # Without the packages of its site it is a bare interpreter.
    command = [sys.executable, "-S", str(checkout / "scripts" / "script.py"), "an argument"]
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=env)


def test_without_an_environment_one_line_says_what_is_missing(checkout: Path) -> None:
    done = call(checkout)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert "no croniter" in line
    assert "scripts/test" in line


@pytest.mark.parametrize("name", ["test", "quickstart"])
def test_the_environment_of_the_checkout_is_used(checkout: Path, name: str) -> None:
    python = checkout / ".venv" / name / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n', encoding="utf-8")
    python.chmod(0o755)
    done = call(checkout)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "runs an argument\n"
