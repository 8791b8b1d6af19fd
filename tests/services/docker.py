"""Servers in containers, where this machine has none.

A container does nothing but run the same program as a private process would, in the same folder, as
the same user, on the same port of 127.0.0.1 (``network_mode="host"``). So images need no entry
point of their own, and everything that tests do to a server works alike.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Optional

from tests.services.process import (
    START_S,
    Home,
    KeeperClient,
    Process,
    Program,
    ServiceError,
    ServiceMissing,
)
from tests.services.programs import KINDS, Version, version_in

IMAGES: dict[str, dict[Version, str]] = {
    "postgresql": {18: "postgres:18", 15: "postgres:15"},
    "pgbouncer": {1: "edoburu/pgbouncer:v1.24.1-p1"},
    "redis": {7: "redis:7.4"},
    "redis8": {8: "redis:8.6"},
    "valkey": {9: "valkey/valkey:9.0"},
    "rabbitmq": {"4.0": "rabbitmq:4.0", "3.10": "rabbitmq:3.10"},
    "nats": {"2.15": "nats:2.15", "2.9": "nats:2.9"},
}
"""The images by version, the newest first. This is the only place that names them."""

SAYS_VERSION = {
    "postgresql": ("postgres", "--version"),
    "pgbouncer": ("pgbouncer", "--version"),
    "redis": ("redis-server", "--version"),
    "redis8": ("redis-server", "--version"),
    "valkey": ("valkey-server", "--version"),
    # The server itself would start, whatever it is asked.
    "rabbitmq": ("sh", "-c", "echo rabbitmq $(rabbitmqctl version)"),
    "nats": ("nats-server", "--version"),
}

PULL_S = 600
"""How long a call of docker may take, also one that fetches an image."""

# The output goes to the file where that of a private process goes.
SHELL = 'exec "$0" "$@" >>log 2>&1'

REMOVE = """\
import sys, docker
client = docker.from_env()
for container in client.containers.list(all=True, filters={"name": sys.argv[1]}):
    container.remove(force=True, v=True)
client.close()
"""


class Docker:
    """The docker of this machine, connected on first use."""

    def __init__(self, keeper: KeeperClient) -> None:
        self._keeper = keeper
        self._client: Any = None

    def open(self) -> None:
        """Connect now.

        Raises:
            ServiceMissing: Docker cannot be had.
        """
        self._connected()

    def program(self, name: str, major: Optional[Version] = None) -> Program:
        """Return the program that an image has.

        Args:
            name: Of the server.
            major: Its version; the newest one if left out.

        Raises:
            ServiceMissing: Docker or an image cannot be had.
        """
        images = IMAGES[name]
        if major is not None and major not in images:
            message = f"there is no image for {name} {major}"
            raise ServiceMissing(message)
        return self._program(name, images[next(iter(images)) if major is None else major])

    def launcher(self, program: Program) -> DockerLauncher:
        """Return what starts a program of an image."""
        return DockerLauncher(self._keeper, self._connected(), program)

    def _program(self, name: str, image: str) -> Program:
        client = self._connected()
        with _explained(image), _leaving_nothing_open(client):
            said = client.containers.run(
                image,
                entrypoint=[*SAYS_VERSION[name]],
                remove=True,
                stderr=True,
            )
        kind = KINDS.get(name, name)
        version = version_in(kind, said.decode(errors="replace"))
        if version is None:
            message = f"the image {image} has no {name}: it says {said!r}"
            raise ServiceMissing(message)
        return Program(kind, version, image=image)

    def _connected(self) -> Any:  # noqa: ANN401 - docker has no types
        if self._client is None:
            import docker

            with _explained("docker"):
                # Waits for an image that is fetched, so the limit is far.
                self._client = docker.from_env(timeout=PULL_S)
                with _leaving_nothing_open(self._client):
                    self._client.ping()
        return self._client

    def close(self) -> None:
        """Close the connection."""
        if self._client is not None:
            self._client.close()


@contextlib.contextmanager
def _explained(what: str) -> Iterator[None]:
    from docker.errors import DockerException

    try:
        yield
    except (DockerException, OSError) as error:
        message = f"{what} cannot be had, which --docker asks for: {error}"
        raise ServiceMissing(message) from error


@contextlib.contextmanager
def _leaving_nothing_open(client: Any) -> Iterator[None]:  # noqa: ANN401
    # The client keeps its connections, and a test would seem to have left them open.
    try:
        yield
    finally:
        client.close()


class DockerLauncher:
    """Starts programs of one image."""

    def __init__(self, keeper: KeeperClient, client: Any, program: Program) -> None:  # noqa: ANN401
        self._keeper = keeper
        self._client = client
        self._program = program

    def launch(
        self,
        argv: Sequence[str],
        home: Home,
        *,
        ending: int = signal.SIGKILL,
        environment: Optional[Mapping[str, str]] = None,
    ) -> Process:
        del ending  # the container is removed
        name = f"leasecron-{uuid.uuid4().hex}"
        at_end = [sys.executable, "-c", REMOVE, name]
        self._keeper.ask("at_end", argv=at_end)
        stat = home.folder.stat()
        folders = {str(home.folder): {"bind": str(home.folder), "mode": "rw"}}
        # PostgreSQL wants its user to have a name.
        for file in ("/etc/passwd", "/etc/group"):
            if Path(file).exists():
                folders[file] = {"bind": file, "mode": "ro"}
        from docker.errors import DockerException

        try:
            with _leaving_nothing_open(self._client):
                container = self._client.containers.run(
                    self._program.image,
                    entrypoint=["sh", "-c", SHELL],
                    command=list(argv),
                    name=name,
                    detach=True,
                    network_mode="host",
                    user=f"{stat.st_uid}:{stat.st_gid}",
                    working_dir=str(home.folder),
                    environment={
                        "HOME": str(home.folder),
                        "LC_ALL": "C",
                        "TZ": "UTC",
                        **(environment or {}),
                    },
                    volumes=folders,
                )
        except DockerException as error:
            message = f"docker did not start {argv[0]} of {self._program.image}: {error}"
            raise ServiceError(message) from error
        return Container(self._keeper, container, at_end)


class Container:
    """A server in a container."""

    def __init__(self, keeper: KeeperClient, container: Any, at_end: list[str]) -> None:  # noqa: ANN401
        self._keeper = keeper
        self._container = container
        self._at_end = at_end
        self._removed = False

    def running(self) -> bool:
        return self._state() in ("created", "running", "paused", "restarting")

    def _state(self) -> str:
        if self._removed:
            return "removed"
        with _leaving_nothing_open(self._container.client):
            self._container.reload()
        return str(self._container.status)

    def signal(self, number: int) -> None:
        from docker.errors import APIError

        # It may have ended meanwhile.
        with _leaving_nothing_open(self._container.client), contextlib.suppress(APIError):
            self._container.kill(signal=int(number))

    def pause(self) -> None:
        if self._state() == "running":
            with _leaving_nothing_open(self._container.client):
                self._container.pause()

    def resume(self) -> None:
        if self._state() == "paused":
            with _leaving_nothing_open(self._container.client):
                self._container.unpause()

    def kill(self) -> None:
        # Some versions of docker do not kill what is paused.
        self.resume()
        self.signal(signal.SIGKILL)

    def ended(self) -> int:
        with _leaving_nothing_open(self._container.client):
            status: int = self._container.wait(timeout=START_S)["StatusCode"]
            self._container.remove(force=True, v=True)
        self._removed = True
        self._keeper.ask("not_at_end", argv=self._at_end)
        return status
