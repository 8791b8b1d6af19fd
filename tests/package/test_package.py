"""The package as its users get it: built, described, installed into an empty environment, run."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path
from typing import NamedTuple

import pytest
from packaging.metadata import Metadata

ROOT = Path(__file__).parents[2]

# What building needs. Nothing else of the checkout is there when the package is built, and no
# file that an earlier build left behind.
SOURCES = ("setup.cfg", "setup.py", "README.rst", "LICENSE", "leasecron_sync")

ONE_RUN = """
import sys
import threading

from leasecron_sync import Scheduler, SQLiteLease, every

ran = threading.Event()


def tick(run):
    assert run.attempt == 1
    ran.set()


with Scheduler(SQLiteLease("jobs.db")) as scheduler:
    scheduler.add_job(tick, every(seconds=1))
    assert ran.wait(20), "the job never ran"

clients = {"redis", "psycopg2", "pika", "nats"} & set(sys.modules)
assert not clients, clients
"""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


class Built(NamedTuple):
    sdist: Path
    wheel: Path


class Environment(NamedTuple):
    """A virtual environment with nothing but the wheel and what it requires."""

    folder: Path

    def run(self, program: str, *arguments: str, cwd: Path) -> str:
        command = [str(self.folder / "bin" / program), *arguments]
        done = subprocess.run(command, cwd=cwd, check=False, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        assert not done.stderr
        return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    folder = tmp_path_factory.mktemp("built")
    tree = folder / "tree"
    tree.mkdir()
    for name in SOURCES:
        if (ROOT / name).is_dir():
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, tree / name, ignore=ignored)
        else:
            shutil.copy(ROOT / name, tree / name)
    # Makes the wheel from the sdist, so a file that is missing there is missing here.
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(tree)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (sdist,) = folder.glob("*.tar.gz")
    (wheel,) = folder.glob("*.whl")
    return Built(sdist, wheel)


@pytest.fixture(scope="module")
def environment(built: Built, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    folder = tmp_path_factory.mktemp("empty")
    venv.create(folder, with_pip=True)
    # Kept beside the tests' environment when it was set up, so that no network is needed now.
    kept = Path(sys.prefix, "wheels")
    source = ["--no-index", f"--find-links={kept}"] if kept.is_dir() else []
    command = [str(folder / "bin" / "python"), "-m", "pip", "install", *source, str(built.wheel)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return Environment(folder)


def source_files(pattern: str) -> set[str]:
    return {str(path.relative_to(ROOT)) for path in (ROOT / "leasecron_sync").rglob(pattern)}


def test_wheel_holds_the_whole_package_and_nothing_else(built: Built) -> None:
    with zipfile.ZipFile(built.wheel) as wheel:
        names = set(wheel.namelist())
    packaged = {name for name in names if ".dist-info/" not in name}
    expected = {"leasecron_sync/py.typed"}
    for pattern in ("*.py", "*.lua", "*.sql"):
        expected |= source_files(pattern)
    assert packaged == expected


def test_sdist_holds_what_building_needs(built: Built) -> None:
    with tarfile.open(built.sdist) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    assert {"setup.cfg", "setup.py", "README.rst", "LICENSE"} <= names
    assert source_files("*.py") <= names
    assert not [name for name in names if name.startswith(("tests", "docs", "scripts"))]


def test_metadata_is_valid(built: Built) -> None:
    with zipfile.ZipFile(built.wheel) as wheel:
        (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = Metadata.from_email(wheel.read(name), validate=True)
    assert metadata.name == "leasecron_sync"
    assert metadata.description_content_type == "text/x-rst"
    assert metadata.description == (ROOT / "README.rst").read_text(encoding="utf-8")
    assert str(metadata.requires_python) == ">=3.9"
    assert metadata.license_files == ["LICENSE"]
    extras = {"all", "docs", "lint", "nats", "postgres", "rabbitmq", "redis", "test"}
    assert set(metadata.provides_extra or ()) == extras
    core = {r.name for r in metadata.requires_dist or () if "extra ==" not in str(r.marker)}
    assert core == {"croniter", "tenacity", "tzdata"}


def test_extra_all_brings_every_client(built: Built) -> None:
    with zipfile.ZipFile(built.wheel) as wheel:
        (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
        requires = Metadata.from_email(wheel.read(name), validate=True).requires_dist or ()
    (everything,) = (r for r in requires if str(r.marker) == 'extra == "all"')
    assert everything.extras == {"redis", "postgres", "rabbitmq", "nats"}


def test_installed_package_is_imported_from_the_wheel(
    environment: Environment, tmp_path: Path
) -> None:
    program = "import leasecron_sync; print(leasecron_sync.__file__)"
    file = environment.run("python", "-W", "error", "-c", program, cwd=tmp_path)
    assert Path(file.strip()).is_relative_to(environment.folder)


def test_a_job_runs_on_sqlite_without_any_client_library(
    environment: Environment, tmp_path: Path
) -> None:
    environment.run("python", "-W", "error", "-c", ONE_RUN, cwd=tmp_path)


@pytest.mark.parametrize("zone", ["UTC", "Europe/Athens"])
def test_zones_are_there_on_a_host_without_zone_data(
    environment: Environment, tmp_path: Path, zone: str
) -> None:
    program = f"import zoneinfo; zoneinfo.reset_tzpath(()); print(zoneinfo.ZoneInfo({zone!r}))"
    assert environment.run("python", "-c", program, cwd=tmp_path).strip() == zone


def test_command_line_is_installed(environment: Environment, tmp_path: Path) -> None:
    by_name = environment.run("leasecron-sync", "--help", cwd=tmp_path)
    as_module = environment.run("python", "-m", "leasecron_sync", "--help", cwd=tmp_path)
    assert "demo" in by_name
    assert "demo" in as_module


def test_entry_scripts_can_be_executed() -> None:
    for name in ("scripts/quickstart", "scripts/test", ".ci/run"):
        assert os.access(ROOT / name, os.X_OK), name
