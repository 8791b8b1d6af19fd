"""Servers from Debian's archives are whole, run where they are, and are fetched only once."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.services import debian
from tests.services.debian import (
    FOLDER,
    RECIPE,
    RECIPES,
    Apt,
    CannotGet,
    Recipe,
    get,
    missing_from,
    number,
    unpack,
    useful_dependencies,
)
from tests.services.programs import IDEMPOTENT_PRODUCERS, VARIABLES, VERSIONS, Programs

REDIS = Recipe("redis-8", "redis8", "redis-server", ["sid", "experimental"], IDEMPOTENT_PRODUCERS)

SHOWN = """\
Package: redis-tools
Pre-Depends: init-system-helpers (>= 1.54~)
Depends: adduser, libc6 (>= 2.38), libssl3t64 (>= 3.0.0), libpam0g, libjemalloc2:any
Recommends: libother

Package: rabbitmq-server
Depends: erlang-base (>= 1:26.0) | erlang-base-hipe, python3:any, libc6, socat
"""


def nothing_in(root: Path) -> Programs:
    return Programs(root=root, path="", postgres_folders=(), rabbitmq_folders="/nowhere")


class Fake(Apt):
    """Archives that offer what a test says."""

    def __init__(self, offered: dict[str, str], packages: Path) -> None:
        self.offered = offered
        self.packages = packages
        self.asked: list[str] = []

    def versions(self, package: str) -> dict[str, str]:
        assert package == "redis-server"
        return self.offered

    def needed(self, package: str, suite: str) -> dict[str, str]:
        return {package: suite}

    def download(self, packages: object, folder: Path) -> None:
        self.asked.append(str(packages))
        shutil.copytree(self.packages, folder, dirs_exist_ok=True)


@pytest.fixture
def packages(tmp_path: Path) -> Path:
    """A folder with a package, of a program with this system's libraries beside it."""
    loader = next(iter(sorted(Path("/").glob("lib/*-linux-gnu/ld-linux*.so.*"))), None)
    if loader is None or shutil.which("dpkg-deb") is None:
        pytest.skip("only on Debian and its like")
    made = tmp_path / "package"
    libraries, programs = made / "usr/lib" / loader.parent.name, made / "usr/bin"
    for folder in (libraries, programs, made / "DEBIAN", made / "usr/share/doc"):
        folder.mkdir(parents=True)
    for library in ("libc.so.6", loader.name):
        shutil.copy(loader.parent / library, libraries)
    shutil.copy("/bin/echo", programs / "echo")
    shutil.copy("/bin/echo", programs / "plain-file")
    (programs / "plain-file").chmod(0o644)
    (programs / "other-name").symlink_to("echo")
    (made / "DEBIAN/control").write_text(
        "Package: x\nVersion: 1\nArchitecture: all\nMaintainer: x <x@x>\nDescription: x\n",
        encoding="utf-8",
    )
    (tmp_path / "packages").mkdir()
    argv = ["dpkg-deb", "--build", str(made), str(tmp_path / "packages" / "x.deb")]
    subprocess.run(argv, check=True, stdout=subprocess.DEVNULL)
    return tmp_path / "packages"


def said_by(program: Path) -> str:
    return subprocess.run(
        [str(program), "two  words", "*"], check=True, stdout=subprocess.PIPE, text=True
    ).stdout


def test_unpacked_programs_run_with_the_libraries_that_came_with_them(
    packages: Path, tmp_path: Path
) -> None:
    made = tmp_path / "made"
    unpack(list(packages.glob("*.deb")), made, made)
    for name in ("echo", "other-name"):
        assert said_by(made / "usr/bin" / name) == "two  words *\n"
    assert (made / "usr/bin/plain-file").read_bytes()[:4] == b"\x7fELF"
    assert not (made / "usr/share/doc").exists()
    shutil.rmtree(made / "usr/lib")  # and with no others
    with pytest.raises(subprocess.CalledProcessError):
        said_by(made / "usr/bin/echo")


def test_what_was_unpacked_is_found_next_time_and_an_outdated_one_is_not(
    packages: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "root"
    (root / FOLDER).mkdir(parents=True)
    get(REDIS, Fake({"sid": "5:8.0.6-3", "experimental": "5:8.6.3-1"}, packages), root)
    target = root / FOLDER / "redis-8"
    assert said_by(target / "root/usr/bin/echo") == "two  words *\n"
    # It stands for a server that tells its version.
    server = target / "root/usr/bin/redis-server"
    server.write_text("#!/bin/sh\necho Redis server v=8.6.3\n", encoding="utf-8")
    server.chmod(0o755)
    assert [one.name for one in sorted((root / FOLDER).iterdir())] == ["redis-8"]

    def missing() -> list[str]:
        return [one.name for one in missing_from(nothing_in(root), {}, root)]

    assert missing() == ["rabbitmq-4.0", "rabbitmq-3.10", "nats-2.9"]
    monkeypatch.setattr(debian, "RECIPE", RECIPE + 1)
    assert "redis-8" in missing()


def test_a_server_that_the_environment_names_is_not_fetched(tmp_path: Path) -> None:
    environment = dict.fromkeys(VARIABLES.values(), "x://127.0.0.1:1")
    assert missing_from(nothing_in(tmp_path), environment, tmp_path) == []


@pytest.mark.parametrize(
    "offered", [{}, {"sid": "5:8.0.6-3", "experimental": "5:8.4.9-1"}, {"bookworm": "5:9.0-1"}]
)
def test_a_version_that_debian_does_not_offer_cannot_be_had(
    offered: dict[str, str], tmp_path: Path
) -> None:
    apt = Fake(offered, tmp_path)
    with pytest.raises(CannotGet, match="has no redis-server that is new enough"):
        get(REDIS, apt, tmp_path)
    assert apt.asked == []


def test_of_a_moving_version_the_next_newer_one_will_do(packages: Path, tmp_path: Path) -> None:
    (tmp_path / "root" / FOLDER).mkdir(parents=True)
    apt = Fake({"sid": "5:10.2.0-1", "experimental": "5:11.0-1"}, packages)
    get(REDIS, apt, tmp_path / "root")
    assert apt.asked == ["{'redis-server': 'sid'}"]


@pytest.mark.parametrize(
    ("version", "numbers"),
    [("5:8.6.3-1", (8, 6)), ("3.10.8-1.1+deb12u1", (3, 10)), ("2.9.10-1+b3", (2, 9)), ("x", ())],
)
def test_versions_of_debian_are_compared_as_numbers(version: str, numbers: tuple[int, ...]) -> None:
    assert number(version) == numbers


def test_of_what_a_package_needs_only_the_parts_of_a_server_are_taken() -> None:
    assert useful_dependencies(SHOWN) == ["libc6", "libssl3t64", "libjemalloc2", "erlang-base"]


def test_there_is_a_way_to_each_version_that_tests_want() -> None:
    from_debian = {recipe.name for recipe in RECIPES}
    wanted = {f"{name}-{version}" for name, versions in VERSIONS.items() for version in versions}
    assert wanted - from_debian == {"nats-2.15"}  # which is a wheel


def test_a_failed_command_is_told_in_one_line() -> None:
    script = "import sys; sys.stderr.write('W: w\\nE: no such thing\\nE: more'); sys.exit(100)"
    with pytest.raises(CannotGet, match=r": E: no such thing$"):
        debian.run([sys.executable, "-c", script])
    with pytest.raises(CannotGet, match="there is no /nowhere/apt-get here"):
        debian.run(["/nowhere/apt-get"])
