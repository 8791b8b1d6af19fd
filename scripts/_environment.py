"""Finds what the library needs, for scripts that are called with whatever ``python3`` is."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NEEDED = ("croniter", "tenacity")
MADE_BY = {"test": "scripts/test", "quickstart": "scripts/quickstart"}
"""Environments below ``.venv`` of the checkout, and what makes them."""


def use_environment() -> None:
    """Go on in an environment of this checkout when this interpreter lacks what is needed.

    Without one, end with one line that says what is missing, and status 2.
    """
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if not missing:
        return
    for name in MADE_BY:
        python = ROOT / ".venv" / name / "bin" / "python"
        if python.exists() and Path(sys.prefix) != python.parents[1]:
            os.execv(python, [str(python), *sys.argv])  # noqa: S606 - this very program
    sys.stderr.write(
        f"{Path(sys.argv[0]).name}: {sys.executable} has no {' and no '.join(missing)}: call "
        f"{' or '.join(MADE_BY.values())} once, which set up what is needed below .venv\n"
    )
    sys.exit(2)
