"""Checks of a Redis or Valkey server. Every command is a look; no key is written."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from typing import Any, Final, Protocol

from leasecron_sync.backends._lanes import Deadline
from leasecron_sync.backends._redis_info import OLDEST_SERVER
from leasecron_sync.backends._redis_link import Link
from leasecron_sync.backends._redis_place import Place
from leasecron_sync.backends._redis_scripts import script_of
from leasecron_sync.backends.redis import RedisLease
from leasecron_sync.doctor.finding import Examination, Findings
from leasecron_sync.doctor.host import check_client
from leasecron_sync.doctor.redis_settings import Facts, check_settings
from leasecron_sync.doctor.store_format import tell_format
from leasecron_sync.doctor.visit import Visit, check_answers
from leasecron_sync.errors import StoreError, StoreRejected, StoreUnavailable, StoreUnsupported

_CONFIG: Final = (
    *("appendfsync", "save", "min-replicas-to-write", "min-replicas-max-lag"),
    "stop-writes-on-bgsave-error",
)
_IDLE: Final = "Nothing can be claimed, renewed or settled."
_RULE: Final = (
    "ACL SETUSER ... ~leasecron:* +@read +@write +eval +evalsha +info +time, as the page on stores "
    "has it."
)


class RedisServer(Protocol):
    """What knows where a Redis or Valkey server is: a backend, or a part of one."""

    @property
    def place(self) -> Place:
        """Where the store is."""
        ...

    def connected(self, deadline: Deadline) -> Link:
        """Return a connection for who looks."""
        ...


def examine_redis(backend: RedisLease, exam: Examination) -> None:
    """Look at a server with leases.

    Args:
        backend: Knows where it is.
        exam: The examination.
    """
    examine_server(backend, exam, backend.keys)


def examine_server(server: RedisServer, exam: Examination, keys: tuple[str, ...] = ()) -> None:
    """Look at a server.

    Args:
        server: Knows where it is.
        exam: The examination.
        keys: Those of leases in a namespace; without them it is for claims, which expire.
    """
    check_client(exam.findings, "redis")
    visit: Visit[Link] = Visit(server.connected, exam)
    looks = _Looks(server.place, exam, visit, keys)
    try:
        if visit.reaches(looks.now_ms):
            looks.all()
    finally:
        visit.close()


class _Looks:
    """The checks, one after the other on one connection."""

    def __init__(
        self, place: Place, exam: Examination, visit: Visit[Link], keys: tuple[str, ...]
    ) -> None:
        self._place, self._keys = place, keys
        self._exam = exam
        self._findings: Findings = exam.findings
        self._visit = visit

    def all(self) -> None:
        findings = self._findings
        if self._place.kind == "cluster" and self._keys:
            with findings.checking("cluster"):
                self._ask("TYPE", self._keys[0])  # leads to the node that has the keys
        check_answers(self._exam, self.now_ms)
        if self._keys:
            with findings.checking("rights"):
                self._check_rights()
        with findings.checking("version"):
            self._check_server()
        if self._place.kind == "sentinel":
            with findings.checking("sentinel"):
                self._check_sentinels()

    def _ask(self, *words: object) -> Any:  # noqa: ANN401 - of any command
        return self._visit.link().ask(words, self._exam.call())

    def now_ms(self) -> int:
        """Return the server's time."""
        seconds, micros = self._ask("TIME")
        return int(seconds) * 1_000 + int(micros) // 1_000

    # -- the user and the keys -------------------------------------------------------------------

    def _check_rights(self) -> None:
        values = ("", "", script_of("claim").digest, *commands())
        findings = self._findings
        try:
            form, asked, refused = self._visit.link().call(
                "rights", self._keys, values, self._exam.call()
            )
        except StoreUnsupported as error:
            findings.problem(
                "format",
                str(error),
                "This version refuses to start on it, so that it damages nothing.",
                "Use what the line before names.",
            )
            return
        except (StoreRejected, StoreUnavailable) as error:
            self._tell_refusal(error)
            return
        if refused:
            names = ", ".join(one.decode(errors="replace") for one in refused)
            findings.problem("rights", f"this user may not: {names}", _IDLE, _RULE)
        elif asked:
            findings.ok("rights", "may execute the scripts, and read and write their keys")
        else:
            findings.note(
                "rights",
                "may execute scripts; the server does not tell which commands in them",
                "A command that is refused shows at the first start only.",
            )
        self._tell_format(form.decode(errors="replace"))

    def _tell_refusal(self, error: StoreError) -> None:
        findings, text = self._findings, str(error)
        if "permission" in text or "can't run this command" in text:
            findings.problem("rights", text, _IDLE, _RULE)
        elif "MOVED" in text:
            findings.problem(
                "cluster",
                "this server is a node of a cluster, and another one has the keys",
                _IDLE,
                f"Write redis+cluster:// instead of redis:// in the URL ({self._place.label}).",
            )
        elif "a key belongs to something else" in text:
            findings.problem(
                "format",
                text,
                f"{_IDLE} Nothing is overwritten.",
                "Look who uses keys that begin with leasecron:, or use another database or "
                "namespace.",
            )
        else:
            raise error

    def _tell_format(self, found: str) -> None:
        if found:
            tell_format(self._findings, found)
            return
        self._findings.note(
            "format",
            f"there is no store yet in namespace {self._exam.settings.namespace!r}",
            "The first start of a scheduler makes it. If schedulers have been at work, the server "
            "has lost its data, or they use another server, database or namespace.",
            "Compare the URL and --namespace with those of the application.",
        )

    # -- the server ------------------------------------------------------------------------------

    def _check_server(self) -> None:
        try:
            info = pairs_of(self._ask("INFO"))
        except StoreRejected:
            self._findings.warning(
                "version",
                "this user may not ask INFO",
                "Nobody knows which version this is, and whether its settings lose runs.",
                "ACL SETUSER ... +info, and call this command again.",
            )
            return
        self._check_version(info)
        facts = Facts(info, self._config(), self._place.kind, expiring=not self._keys)
        check_settings(self._findings, facts)
        if info.get("cluster_enabled") == "1":
            with self._findings.checking("cluster"):
                self._check_cluster()

    def _config(self) -> dict[str, str]:
        """Return settings; nothing where the user may not ask for them."""
        try:
            answer = self._ask("CONFIG", "GET", *_CONFIG)
        except StoreRejected:
            self._findings.note(
                "settings",
                "this user may not ask CONFIG GET",
                "Nobody knows what appendfsync, save and min-replicas-to-write are.",
                "Call this command as an administrator, or look into the server's configuration.",
            )
            return {}
        words: list[str] = [one.decode(errors="replace") for one in answer]
        return dict(zip(words[::2], words[1::2]))

    def _check_version(self, info: Mapping[str, str]) -> None:
        is_valkey = info.get("server_name") == "valkey"
        number = info.get("valkey_version" if is_valkey else "redis_version", "")
        version = f"{'Valkey' if is_valkey else 'Redis'} {number}"
        major = re.match(r"\d+", info.get("redis_version", ""))
        if major is not None and int(major[0]) < OLDEST_SERVER:
            self._findings.problem(
                "version",
                version,
                "Schedulers refuse to start: it lacks what the scripts need.",
                f"Update it to Redis {OLDEST_SERVER} or newer, or to Valkey.",
            )
        else:
            self._findings.ok("version", version)

    def _check_cluster(self) -> None:
        state = pairs_of(self._ask("CLUSTER", "INFO"))
        if self._place.kind != "cluster":
            self._findings.problem(
                "cluster",
                "this server is a node of a cluster, and the URL names it as a single server",
                "As soon as the keys move to another node nothing can be claimed.",
                f"Write redis+cluster:// instead of redis:// in the URL ({self._place.label}).",
            )
        elif state.get("cluster_state") != "ok":
            self._findings.problem(
                "cluster",
                f"the state of the cluster is {state.get('cluster_state', 'unknown')}",
                _IDLE,
                "CLUSTER INFO and CLUSTER NODES tell which slots or nodes are missing.",
            )
        else:
            nodes = state.get("cluster_size", "?")
            self._findings.ok("cluster", f"its state is ok, {nodes} primaries")

    def _check_sentinels(self) -> None:
        place = self._place
        address = self._visit.link().address
        where = "" if address is None else f" is {address[0]}:{address[1]}"
        if len(place.addresses) > 1:
            self._findings.ok("sentinel", f"the primary of {place.service!r}{where}")
            return
        self._findings.note(
            "sentinel",
            f"the primary of {place.service!r}{where}, and the URL names one sentinel only",
            "When that one is down an instance cannot find the primary any more.",
            "Name all sentinels in the URL, separated by commas.",
        )


@cache
def commands() -> tuple[str, ...]:
    """Return the commands that the scripts call."""
    from importlib import resources  # noqa: PLC0415 - slow to import

    folder = resources.files("leasecron_sync.backends") / "_lua" / "redis"
    texts = [path.read_text("utf-8") for path in folder.iterdir() if path.name.endswith(".lua")]
    return tuple(sorted(set(re.findall(r"redis\.call\(\s*'(\w+)'", "\n".join(texts)))))


def pairs_of(answer: bytes) -> dict[str, str]:
    """Read an answer with one ``name:value`` on each line."""
    lines = answer.decode(errors="replace").splitlines()
    found = (line.partition(":") for line in lines if ":" in line)
    return {name: value for name, _, value in found}
