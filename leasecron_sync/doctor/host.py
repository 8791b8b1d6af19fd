"""What this process brings along: its Python, its client library, its time zones."""

from __future__ import annotations

import platform
import re
import sys
import zoneinfo
from pathlib import Path
from typing import Final, Optional

from leasecron_sync.doctor.finding import Findings

LOWEST: Final = {
    "redis": "5.0.1",
    "psycopg2": "2.9.5",
    "pika": "1.3.1",
    "nats.aio.client": "2.12.0",
}
"""Oldest versions of the client libraries that work, by the module's name."""

_PACKAGES: Final = {"psycopg2": "psycopg2-binary", "nats.aio.client": "nats-py"}

_ZONES_BEFORE: Final = 2_023
"""Year of the oldest zone database that goes without a note."""


def check_host(findings: Findings) -> None:
    """Look at this process."""
    with findings.checking("python"):
        findings.ok("python", f"Python {platform.python_version()} on {platform.system()}")
    with findings.checking("time zones"):
        _check_zones(findings)


def check_client(findings: Findings, module: str) -> None:
    """Look at a client library that a backend has imported.

    Args:
        findings: Where findings go.
        module: Its name.
    """
    with findings.checking("client"):
        # Not imported here: only backends do that.
        found = str(getattr(sys.modules.get(module), "__version__", "")).partition(" ")[0]
        lowest, package = LOWEST[module], _PACKAGES.get(module, module)
        module = module.partition(".")[0]
        if not found:
            findings.ok("client", f"{module}, which does not tell its version")
        elif _numbers(found) < _numbers(lowest):
            findings.warning(
                "client",
                f"{module} {found} is older than {lowest}",
                "Nobody has tried this version: calls may fail or wait for too long.",
                f"pip install --upgrade {package}",
            )
        else:
            findings.ok("client", f"{module} {found}")


def _numbers(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version)[:3]]


def _check_zones(findings: Findings) -> None:
    count = len(zoneinfo.available_timezones())
    try:
        zoneinfo.ZoneInfo("Europe/Athens")
    except (OSError, ValueError, KeyError):
        findings.problem(
            "time zones",
            "this host has no time zones",
            "A job with any zone but UTC is refused where it is defined.",
            "pip install tzdata, or install tzdata of the system.",
        )
        return
    version = _zone_version()
    found = f"{count} time zones" + (f", version {version}" if version else "")
    if version and int(version[:4]) < _ZONES_BEFORE:
        findings.note(
            "time zones",
            found,
            "Countries change their summer time: here local times may be an hour off, and other "
            "hosts compute other scheduled times.",
            "Update tzdata of the system, or the package tzdata where the system has none.",
        )
    else:
        findings.ok("time zones", found)


def _zone_version() -> Optional[str]:
    """Return the version of the zones that are used, as far as it is told."""
    for folder in map(Path, zoneinfo.TZPATH):
        if (folder / "UTC").exists():  # the first folder with zones wins
            for name, pattern in (
                ("tzdata.zi", r"# version (\d{4}\w*)"),
                ("+VERSION", r"(\d{4}\w*)"),
            ):
                version = _first_match(folder / name, pattern)
                if version:
                    return version
            return None
    from importlib import metadata  # noqa: PLC0415 - slow to import

    try:
        return metadata.version("tzdata")
    except metadata.PackageNotFoundError:
        return None


def _first_match(path: Path, pattern: str) -> Optional[str]:
    try:
        with path.open(encoding="ascii", errors="replace") as file:
            found = re.match(pattern, file.readline(80))
    except OSError:
        return None
    return found[1] if found else None
