"""Checks of a Redis or Valkey server for claims: no key is written."""

from __future__ import annotations

from typing import Any, Final

from leasecron_sync.backends._redis_link import Link
from leasecron_sync.backends.redis_claim import IDMP_KEEP_IDS, IDMP_KEEP_S, RedisClaim
from leasecron_sync.doctor.finding import Examination, Level
from leasecron_sync.doctor.redis import examine_server
from leasecron_sync.doctor.visit import Visit
from leasecron_sync.errors import StoreRejected, StoreUnsupported

_IDLE: Final = "Nothing can be claimed: every run is missed."


def examine_redis_claim(backend: RedisClaim, exam: Examination) -> None:
    """Look at a server with claims.

    Args:
        backend: Knows where it is, and is open.
        exam: The examination.
    """
    examine_server(backend.caller, exam)
    found = exam.findings.all()
    if any(one.check == "reachable" and one.level is Level.PROBLEM for one in found):
        return
    visit: Visit[Link] = Visit(backend.caller.connected, exam)
    try:
        with exam.findings.checking("rights"):
            _check_rights(backend, exam, visit)
        if backend.strategy == "idmp":
            with exam.findings.checking("idmp"):
                _check_idmp(backend, exam, visit)
    finally:
        visit.close()


def _check_rights(backend: RedisClaim, exam: Examination, visit: Visit[Link]) -> None:
    try:
        visit.link().call("redis_claim/probe", (backend.key,), ("",), exam.call())
    except StoreUnsupported as error:
        exam.findings.problem(
            "version", str(error), _IDLE, "Use what the line before names, or another store."
        )
    except StoreRejected as error:
        exam.findings.problem(
            "rights",
            str(error),
            _IDLE,
            "ACL SETUSER ... ~leasecron:* +@read +@write +eval +evalsha +info +time, on a server "
            "that takes writes.",
        )
    else:
        exam.findings.ok("rights", "may execute the scripts")


def _check_idmp(backend: RedisClaim, exam: Examination, visit: Visit[Link]) -> None:
    findings = exam.findings
    [known] = visit.link().ask(("COMMAND", "INFO", "XCFGSET"), exam.call())
    if not known:
        findings.problem(
            "idmp",
            "this server has no idempotent ids in streams",
            "Schedulers with strategy=idmp refuse to start.",
            "Use strategy=script, which any server has, or Redis 8.6 or newer.",
        )
        return
    kind = visit.link().ask(("TYPE", backend.key), exam.call())
    if kind == b"none":
        findings.note(
            "idmp",
            f"there is no stream yet in namespace {exam.settings.namespace!r}",
            "The first start of a scheduler makes it. If schedulers have been at work, the server "
            "has lost its data, or they use another server, strategy or namespace.",
            "Compare the URL and --namespace with those of the application.",
        )
        return
    answer: list[Any] = visit.link().ask(("XINFO", "STREAM", backend.key), exam.call())
    facts = dict(zip(answer[::2], answer[1::2]))
    kept = (facts.get(b"idmp-duration"), facts.get(b"idmp-maxsize"))
    if kept == (IDMP_KEEP_S, IDMP_KEEP_IDS):
        findings.ok("idmp", f"remembers claims for {kept[0]} s, up to {kept[1]} of each job")
        return
    findings.problem(
        "idmp",
        f"the stream {backend.key} has the settings {kept[0]} s and {kept[1]} ids",
        "Claims would be forgotten, and runs executed twice: schedulers refuse to start on it.",
        "Stop all schedulers on it and delete that key, or use another namespace.",
    )
