"""Wall clocks of single processes that can be set while these run, by Debian's libfaketime.

The library comes with the system's package, or is unpacked once below .venv/servers in this
checkout, which takes apt-get, dpkg and the network, and no rights.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Optional

from tests.services.debian import FOLDER, CannotGet, run
from tests.services.programs import ROOT

PACKAGE = "libfaketime"
NAME = "libfaketimeMT.so.1"  # for programs with threads
SYSTEM_FOLDERS = ("/usr/lib/*/faketime", "/usr/lib/faketime", "/usr/lib64/faketime")
UNPACKED = f"{FOLDER}/faketime/usr/lib/*/faketime"


def found(root: Path = ROOT) -> Optional[Path]:
    """Return the library, if this machine has it."""
    places = [
        path
        for pattern in SYSTEM_FOLDERS
        for path in sorted(Path("/").glob(f"{pattern.lstrip('/')}/{NAME}"))
    ]
    places += sorted(root.glob(f"{UNPACKED}/{NAME}"))
    return next(iter(places), None)


def library(root: Path = ROOT) -> Path:
    """Return the library, and get it first if this machine has it not.

    Raises:
        CannotGet: It cannot be had; the text says why, in one line.
    """
    there = found(root)
    if there is not None:
        return there
    folder = root / FOLDER
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix="faketime.") as name:
            work = Path(name)
            # That of the system itself: it is loaded into the system's programs.
            run(["apt-get", "-o", "APT::Sandbox::User=root", "download", PACKAGE], work)
            [package] = work.glob("*.deb")
            run(["dpkg-deb", "--extract", str(package), str(work / "made")])
            shutil.rmtree(folder / "faketime", ignore_errors=True)
            (work / "made").rename(folder / "faketime")
    except (OSError, ValueError) as error:
        message = f"{PACKAGE} cannot be unpacked below {folder}: {error}"
        raise CannotGet(message) from error
    there = found(root)
    if there is None:
        message = f"{PACKAGE} has no {NAME}"
        raise CannotGet(message)
    return there


class FakeClock:
    """The wall clock of processes that are started with its environment; others do not see it.

    Steady clocks go on as ever.

    Args:
        library: Where the library is.
        file: Where it is written how far the clock is off; anybody may read it.
    """

    def __init__(self, library: Path, file: Path) -> None:
        self._library = library
        self._file = file
        self.offset_ms = 0
        self.set(0)

    def set(self, offset_ms: int) -> None:
        """Set the clock so far ahead of the machine's, or behind it, at once."""
        self.offset_ms = offset_ms
        new = self._file.with_name(f"{self._file.name}.new")
        new.write_text(f"{offset_ms / 1000:+.3f}\n", encoding="ascii")
        new.chmod(0o644)
        new.replace(self._file)

    def environment(self) -> Mapping[str, str]:
        """Return what a process needs in its environment to have this clock."""
        return {
            # The C library before others that bring a malloc: of those some read a clock in it.
            "LD_PRELOAD": f"{os.fspath(self._library)}:libc.so.6",
            "FAKETIME_TIMESTAMP_FILE": os.fspath(self._file),
            "FAKETIME_NO_CACHE": "1",
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
            # Waits are told how long, not until when: they need no correction.
            "FAKETIME_DONT_RESET": "1",
        }
