"""The SQLite file of a fault campaign, and what is done to it."""

from __future__ import annotations

import contextlib
import resource
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final, Optional

from leasecron_sync import SQLiteLease
from leasecron_sync.backends.base import LeaseBackend
from scripts._faults_crew import CampaignError
from scripts._faults_place import Place
from scripts._faults_plan import ROOM, Injection

DISK_BYTES: Final = 64 * 1024**2
CHUNK: Final = 64 * 1024
LIMIT_BYTES: Final = 16 * 1024
"""Less than the log needs for a few commits."""
COMMAND_S: Final = 20.0

LOCK = """
import sqlite3, sys
connection = sqlite3.connect(sys.argv[1], isolation_level=None, timeout=20)
connection.execute("BEGIN EXCLUSIVE")
sys.stdin.read()
connection.execute("ROLLBACK")
"""
SHRINK = """
import sqlite3, sys
connection = sqlite3.connect(sys.argv[1], isolation_level=None, timeout=2)
connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
"""


class SQLitePlace(Place):
    """A file, on a small disk of its own where that can be had."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._disk = folder / "disk"
        self._mounted = False
        self._locker: Optional[subprocess.Popen[bytes]] = None

    @property
    def path(self) -> Path:
        """The file."""
        return self._disk / "store.db"

    def start(self) -> None:
        """Mount the disk; where one may not, the size of files is limited instead."""
        self.store_clock = self._new_clock("store")
        self._disk.mkdir()
        argv = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "faults", str(self._disk)]
        with contextlib.suppress(OSError):  # there is no such command
            done = subprocess.run(argv, capture_output=True, timeout=COMMAND_S, check=False)
            self._mounted = done.returncode == 0
        self.wants_limits = not self._mounted and hasattr(resource, "prlimit")
        if not self._mounted and not self.wants_limits:
            self.missing[ROOM] = "no small disk can be mounted, and no process limited"

    def url_of(self, slot: int) -> str:
        del slot
        return f"sqlite:///{self.path}"

    def connect(self) -> LeaseBackend:
        return SQLiteLease(self.path)

    def environment_of(self, slot: int) -> Mapping[str, str]:
        del slot  # all of them are on one host
        return {} if self.store_clock is None else self.store_clock.environment()

    def begin(self, one: Injection) -> None:
        if one.kind == "file locked":
            self._locker = self._run(LOCK)
        elif one.kind == "disk full":
            # Else there is room left in the log, which is written from its begin again.
            self._run(SHRINK).wait(COMMAND_S)
            if self.limit_files is None:
                self._fill()
            else:
                self.limit_files(LIMIT_BYTES)
        elif one.kind == "store clock step":
            self.set_store_clock(one)
        else:
            message = f"{one.kind} is nothing for an SQLite file"
            raise CampaignError(message)

    def _run(self, script: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-c", script, str(self.path)],
            stdin=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def _fill(self) -> None:
        """Leave no room, whatever is given back meanwhile."""
        with contextlib.suppress(OSError), self._ballast.open("ab", buffering=0) as file:
            while True:
                file.write(bytes(CHUNK))
        with contextlib.suppress(OSError), self._ballast.open("ab", buffering=0) as file:
            while True:
                file.write(bytes(512))

    @property
    def _ballast(self) -> Path:
        return self._disk / "ballast"

    def end(self, one: Injection) -> None:
        if one.kind == "file locked":
            self._unlock()
        elif one.kind == "disk full":
            self._give_room()

    def _give_room(self) -> None:
        self._ballast.unlink(missing_ok=True)
        if self.limit_files is not None:
            self.limit_files(None)

    def _unlock(self) -> None:
        locker, self._locker = self._locker, None
        if locker is not None:
            locker.communicate(timeout=COMMAND_S)

    def heal(self) -> None:
        self._unlock()
        self._give_room()

    def close(self) -> None:
        if self._locker is not None:
            self._locker.kill()
            self._locker.communicate()
        if self._mounted:
            # Also while somebody is in it: what is left of it goes with the last one.
            subprocess.run(["umount", "--lazy", str(self._disk)], timeout=COMMAND_S, check=False)
