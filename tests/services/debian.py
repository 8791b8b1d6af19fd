"""Servers from Debian's archives, unpacked below .venv/servers in this checkout.

For versions that this system's own packages are not of: they are installed nowhere, run beside
everything that is, and need no rights. Their libraries come with them, down to the C library, whose
loader starts each program. It takes apt-get and dpkg, and the network once.

python -m tests.services.debian    gets what is missing, and prints the names of what it could not
                                   get on standard output
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Optional

from tests.services.programs import IDEMPOTENT_PRODUCERS, ROOT, VARIABLES, Programs

FOLDER = ".venv/servers"

LIMIT_S = 600
"""How long a command may take, also one that fetches packages."""

RECIPE = 1
"""Raised with every change of what this file makes of a package."""

USEFUL = re.compile(r"(lib(?!perl|pam|audit|debconf)|zlib|erlang-|rabbitmq-|redis-|nats-)")
"""The packages that a server consists of; others manage users, services and logs of a system."""

KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")

DOCUMENTS = ("usr/share/doc", "usr/share/man", "usr/share/locale", "usr/share/lintian")

LOADER = b"/ld-linux"
"""Part of the name of the loader that an executable asks for, near its beginning."""


class CannotGet(Exception):
    """A server cannot be had from Debian; the text says why, in one line."""


@dataclass(frozen=True)
class Recipe:
    """How to get one server.

    Attributes:
        name: Of its folder.
        kind: What tests call it.
        package: What Debian calls it.
        suites: Where to look for it; what it needs comes from the first one.
        least: The oldest version that will do.
    """

    name: str
    kind: str
    package: str
    suites: Sequence[str]
    least: tuple[int, ...]


RECIPES = (
    Recipe("rabbitmq-4.0", "rabbitmq", "rabbitmq-server", ["trixie"], (4, 0)),
    Recipe("rabbitmq-3.10", "rabbitmq", "rabbitmq-server", ["bookworm"], (3, 10)),
    Recipe("nats-2.9", "nats", "nats-server", ["bookworm"], (2, 9)),
    # Both move: whatever they have that is new enough will do.
    Recipe("redis-8", "redis8", "redis-server", ["sid", "experimental"], IDEMPOTENT_PRODUCERS),
)


def missing_from(
    programs: Programs, environment: Mapping[str, str], root: Path = ROOT
) -> list[Recipe]:
    """Return how to get what neither this machine has nor the environment names."""
    there = {
        "rabbitmq": [f"rabbitmq-{version}" for version in programs.rabbitmq()],
        "nats": [f"nats-{version}" for version in programs.nats()],
        "redis8": ["redis-8"] if programs.redis8() else [],
    }
    return [
        recipe
        for recipe in RECIPES
        if not environment.get(VARIABLES[recipe.kind])
        and (recipe.name not in there[recipe.kind] or is_outdated(root / FOLDER / recipe.name))
    ]


def is_outdated(target: Path) -> bool:
    """Tell whether something was unpacked by another recipe, or for another place."""
    return target.exists() and stamp_of(target) != f"{RECIPE} {target}\n"


def stamp_of(target: Path) -> Optional[str]:
    """Return what stands in the stamp of an unpacked server."""
    stamp = target / "stamp"
    return stamp.read_text(encoding="utf-8") if stamp.exists() else None


class Apt:
    """apt-get with lists and caches of its own.

    Args:
        folder: For the lists and caches.
        suites: Which it looks at.
        mirror: Where they are.
    """

    def __init__(self, folder: Path, suites: Sequence[str], mirror: str) -> None:
        self._folder = folder
        self._default = suites[0]
        for name in ("lists/partial", "cache/archives/partial"):
            (folder / name).mkdir(parents=True, exist_ok=True)
        signed = f"[signed-by={KEYRING}] " if KEYRING.exists() else ""
        (folder / "status").touch()
        (folder / "sources.list").write_text(
            "".join(f"deb {signed}{mirror} {suite} main\n" for suite in suites), encoding="utf-8"
        )

    def _do(self, program: str, *arguments: str, folder: Optional[Path] = None) -> str:
        options = {
            "Dir::State": self._folder,
            "Dir::State::lists": self._folder / "lists",
            "Dir::State::status": self._folder / "status",
            "Dir::Cache": self._folder / "cache",
            # Some containers are set up to keep none, and would parse all for each question.
            "Dir::Cache::pkgcache": "pkgcache.bin",
            "Dir::Cache::srcpkgcache": "srcpkgcache.bin",
            "Dir::Etc::sourcelist": self._folder / "sources.list",
            "Dir::Etc::sourceparts": "/dev/null",
            "Dir::Etc::preferences": "/dev/null",
            "Dir::Etc::preferencesparts": "/dev/null",
            "Acquire::Languages": "none",
            "Acquire::PDiffs": "false",
            "Acquire::Retries": "1",
            # Another user could not write here.
            "APT::Sandbox::User": "root",
        }
        words = [word for name, value in options.items() for word in ("-o", f"{name}={value}")]
        return run([program, *words, *arguments], folder or self._folder)

    def update(self) -> None:
        """Fetch the lists of packages, whose signatures it checks."""
        # One that is not to be had is an error, and not a warning about an old one.
        self._do("apt-get", "-o", "APT::Update::Error-Mode=any", "update")

    def versions(self, package: str) -> dict[str, str]:
        """Return the version of a package in each suite that has it."""
        found = {}
        for line in self._do("apt-cache", "madison", package).splitlines():
            name, version, source = (part.strip() for part in line.split("|"))
            if name == package:
                found[source.split()[1].split("/")[0]] = version
        return found

    def needed(self, package: str, suite: str) -> dict[str, str]:
        """Return a package and the useful ones that it needs, and the suite of each."""
        found: dict[str, str] = {}
        new = {package: suite}
        while new:
            found.update(new)
            asked = [f"{name}/{place}" for name, place in new.items()]
            shown = self._do("apt-cache", "show", "--no-all-versions", *asked)
            new = {
                name: self._suite_of(name, suite)
                for name in useful_dependencies(shown)
                if name not in found
            }
        return found

    def _suite_of(self, name: str, suite: str) -> str:
        # What belongs together has one version; what it stands on is that of the first suite.
        return suite if name.startswith(("redis-", "rabbitmq-")) else self._default

    def download(self, packages: Mapping[str, str], folder: Path) -> None:
        """Fetch packages, whose hashes it checks against the lists."""
        asked = [f"{name}/{suite}" for name, suite in packages.items()]
        self._do("apt-get", "download", *asked, folder=folder)


def useful_dependencies(shown: str) -> list[str]:
    """Return the useful packages that some packages depend on, from what apt-cache shows."""
    found = []
    for line in shown.splitlines():
        field, _, names = line.partition(":")
        if field in ("Depends", "Pre-Depends"):
            # Of alternatives the first is what Debian means.
            firsts = (name.split("|")[0].split()[0].split(":")[0] for name in names.split(","))
            found += [name for name in firsts if USEFUL.match(name)]
    return list(dict.fromkeys(found))


def mirror() -> str:
    """Return the mirror of Debian that this system uses.

    Raises:
        CannotGet: It is none of Debian's.
    """
    told = run(["apt-get", "indextargets", "--format", "$(REPO_URI) $(RELEASE) $(COMPONENT)"])
    lines = [line.split() for line in told.splitlines()]
    places = [words[0] for words in lines if words[1:] == [_code(), "main"]]
    if not places:
        message = "apt-get knows no mirror of Debian on this system"
        raise CannotGet(message)
    return places[0]


def _code() -> str:
    release = Path("/etc/os-release")
    text = release.read_text(encoding="utf-8") if release.exists() else ""
    match = re.search(r'^VERSION_CODENAME="?([\w-]+)', text, re.MULTILINE)
    return match[1] if match and re.search(r'^ID="?debian"?$', text, re.MULTILINE) else "sid"


def get(recipe: Recipe, apt: Apt, root: Path = ROOT) -> None:
    """Get one server.

    Raises:
        CannotGet: It cannot be had.
    """
    target = root / FOLDER / recipe.name
    versions = apt.versions(recipe.package)
    good = [x for x in recipe.suites if x in versions and number(versions[x]) >= recipe.least]
    if not good:
        offered = ", ".join(f"{version} in {suite}" for suite, version in versions.items())
        message = f"Debian has no {recipe.package} that is new enough: {offered or 'none at all'}"
        raise CannotGet(message)
    say(f"getting {recipe.package} {versions[good[0]]} of Debian's {good[0]} (once)")
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f"{recipe.name}.") as work:
        packages = Path(work, "packages")
        packages.mkdir()
        apt.download(apt.needed(recipe.package, good[0]), packages)
        made = Path(work, "made")
        unpack(sorted(packages.glob("*.deb")), made / "root", target / "root")
        (made / "stamp").write_text(f"{RECIPE} {target}\n", encoding="utf-8")
        shutil.rmtree(target, ignore_errors=True)
        made.rename(target)


def number(version: str) -> tuple[int, ...]:
    """Return the first two numbers of a version of Debian's."""
    match = re.match(r"(?:\d+:)?(\d+)\.(\d+)", version)
    return tuple(int(part) for part in match.groups()) if match else ()


# -- unpacking -----------------------------------------------------------------------------------


def unpack(packages: Sequence[Path], made: Path, final: Path) -> None:
    """Unpack packages and have their programs run where they will be.

    Args:
        packages: The files.
        made: The folder to unpack to.
        final: Where that folder will be.
    """
    made.mkdir(parents=True)
    for package in packages:
        run(["dpkg-deb", "--extract", str(package), str(made)])
    for folder in DOCUMENTS:
        shutil.rmtree(made / folder, ignore_errors=True)
    loader, libraries = libraries_in(made)
    start = f"{final / loader} --library-path {':'.join(str(final / one) for one in libraries)}"
    for program in list(programs_in(made)):
        own = program.with_name(f"{program.name}.elf")
        program.rename(own)
        # Some behave by the name under which they are called.
        body = f'exec {start} --argv0 "$0" {final / own.relative_to(made)} "$@"'
        write_script(program, body)
    for scripts in made.glob("usr/lib/rabbitmq/lib/*/sbin"):
        add_erlang(scripts, made, final)


def libraries_in(made: Path) -> tuple[Path, list[Path]]:
    """Return the loader of some unpacked packages and the folders of their libraries."""
    folders = [
        folder
        for pattern in ("lib/*-linux-*", "usr/lib/*-linux-*")
        for folder in sorted(made.glob(pattern))
        if any(folder.glob("*.so*"))
    ]
    loaders = [loader for folder in folders for loader in sorted(folder.glob("ld-linux*.so.*"))]
    if not loaders:
        message = "the packages have no loader"
        raise CannotGet(message)
    return loaders[0].relative_to(made), [folder.relative_to(made) for folder in folders]


def programs_in(made: Path) -> Iterator[Path]:
    """Find the files that ask for a loader of the system."""
    for folder, _folders, names in os.walk(made):
        for name in names:
            path = Path(folder, name)
            if path.is_symlink() or ".so" in name or not os.access(path, os.X_OK):
                continue
            with path.open("rb") as file:
                head = file.read(4096)
            if head.startswith(b"\x7fELF") and LOADER in head:
                yield path


def add_erlang(scripts: Path, made: Path, final: Path) -> None:
    """Have RabbitMQ's scripts, and Erlang itself, find Erlang here instead of in /usr/lib."""
    machine = made / "usr/lib/erlang"
    programs = next(machine.glob("erts-*")) / "bin"
    root, beside = (final / path.relative_to(made) for path in (machine, programs))
    start = (
        f'export ROOTDIR={root} BINDIR={beside} EMU=beam PROGNAME=erl\nexec {beside}/erlexec "$@"'
    )
    # Brokers that become a cluster start further machines, by the script in Erlang's folder.
    for folder in (scripts, machine / "bin", programs):
        (folder / "erl").unlink(missing_ok=True)
        write_script(folder / "erl", start)
    write_script(scripts / "epmd", f'exec {beside}/epmd "$@"')


def write_script(path: Path, body: str) -> None:
    """Write a program for the shell."""
    path.write_text(f"#!/bin/sh\n{body}\n", encoding="utf-8")
    path.chmod(0o755)


# -- what is asked for ---------------------------------------------------------------------------


def run(argv: Sequence[str], folder: Optional[Path] = None) -> str:
    """Run a command and return what it prints.

    Raises:
        CannotGet: It failed.
    """
    try:
        done = subprocess.run(
            argv,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            env={**os.environ, "LC_ALL": "C"},
            cwd=folder,
            timeout=LIMIT_S,
            check=False,
        )
    except FileNotFoundError:
        message = f"there is no {argv[0]} here"
        raise CannotGet(message) from None
    except subprocess.TimeoutExpired:
        message = f"{argv[0]} did not end within {LIMIT_S} s"
        raise CannotGet(message) from None
    if done.returncode != 0:
        complaints = [x for x in done.stderr.decode(errors="replace").splitlines() if x[:2] == "E:"]
        reason = complaints[0] if complaints else f"status {done.returncode}"
        message = f"{argv[0]} {argv[-1]}: {reason}"
        raise CannotGet(message)
    return done.stdout.decode(errors="replace")


def say(text: str) -> None:
    sys.stderr.write(f"test: {text}\n")


def main(environment: Mapping[str, str] = os.environ) -> int:
    """Get what is missing, and print the names of what could not be had."""
    recipes = missing_from(Programs(), environment)
    if not recipes:
        return 0
    left = [recipe.name for recipe in recipes]
    folder = ROOT / FOLDER
    try:
        folder.mkdir(parents=True, exist_ok=True)
        place = mirror()
        with tempfile.TemporaryDirectory(dir=folder, prefix="apt.") as work:
            # Recipes of the same suites have the lists in common.
            known: dict[tuple[str, ...], Apt] = {}
            for recipe in recipes:
                suites = tuple(recipe.suites)
                try:
                    if suites not in known:
                        known[suites] = Apt(Path(work, suites[0]), suites, place)
                        known[suites].update()
                    get(recipe, known[suites])
                    left.remove(recipe.name)
                except CannotGet as reason:
                    say(f"{recipe.name} cannot be had from Debian's archives: {reason}")
    except (CannotGet, OSError) as reason:
        say(f"nothing can be had from Debian's archives: {reason}")
    sys.stdout.write(" ".join(left))
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main())
