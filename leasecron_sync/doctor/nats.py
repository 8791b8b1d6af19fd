"""Checks of a NATS server and the stream of a namespace. Every request is a look."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from leasecron_sync.backends.nats import NatsClaim
from leasecron_sync.clock import SystemClock
from leasecron_sync.doctor.finding import Examination, Findings
from leasecron_sync.doctor.host import check_client
from leasecron_sync.doctor.visit import ROUND_TRIPS, tell_round_trips, tell_unreachable
from leasecron_sync.errors import StoreError, StoreRejected, StoreUnsupported

if TYPE_CHECKING:
    from leasecron_sync.backends._nats_stream import Facts

_IDLE: Final = "Nothing can be claimed: every run is missed."
_RIGHTS: Final = (
    "Let the user publish to leasecron.claim.> and to INFO.*, CREATE.*, UPDATE.* and MSG.GET.* "
    "after $JS.API.STREAM., and subscribe to _INBOX.>"
)

_clock = SystemClock()


def examine_nats(backend: NatsClaim, exam: Examination) -> None:
    """Look at a server with JetStream.

    Args:
        backend: Knows where it is, and is open.
        exam: The examination.
    """
    findings = exam.findings
    check_client(findings, "nats.aio.client")
    findings.under_way = "reachable"
    took: list[int] = []
    try:
        facts = backend.look(exam.call())  # connects, too
        while len(took) < ROUND_TRIPS and exam.call().left_ms() > 2 * max(took, default=0):
            sent_ms = _clock.steady_ms()
            facts = backend.look(exam.call())
            took.append(_clock.steady_ms() - sent_ms)
    except StoreUnsupported as error:
        findings.problem("jetstream", str(error), _IDLE, "Do what the line before says.")
        return
    except StoreRejected as error:
        findings.problem("rights", str(error), _IDLE, _RIGHTS)
        return
    except StoreError as error:
        tell_unreachable(findings, error)
        return
    if took:
        tell_round_trips(exam, took)
    findings.ok("version", facts.version)
    findings.ok("clock", "NATS has no clock that it tells: each host's own decides")
    if facts.window_ms is None:
        findings.note(
            "stream",
            f"there is no stream yet for namespace {exam.settings.namespace!r}",
            "The first start of a scheduler makes it. If schedulers have been at work, somebody "
            "deleted it, or they use another server, account or namespace.",
            "Compare the URL and --namespace with those of the application.",
        )
        if backend.replicas > 1 and facts.is_alone:
            _tell_refused_replicas(findings, backend.replicas)
        return
    _check_stream(findings, facts)
    _check_replicas(findings, facts, backend.replicas)


def _check_stream(findings: Findings, facts: Facts) -> None:
    if facts.problems:
        findings.problem(
            "stream",
            f"the stream {facts.name!r} cannot be used: {', '.join(facts.problems)}",
            "Claims would be forgotten, and runs executed twice: schedulers refuse to start on it.",
            "Stop all schedulers on it and delete it, or use another namespace.",
        )
        return
    window_ms = facts.window_ms or 0
    findings.ok(
        "stream",
        f"{facts.name} is kept in files and remembers a claim for {window_ms // 1_000} s",
        {"window_ms": window_ms},
    )


def _tell_refused_replicas(findings: Findings, wanted: int) -> None:
    findings.problem(
        "replicas",
        f"the URL asks for replicas={wanted}, and this server belongs to no cluster",
        "The server refuses such a stream: no scheduler with this URL starts. (NATS 2.9 refuses to "
        "make one, but lets one that is there be changed, and goes on keeping it alone.)",
        "Take replicas out of the URL of all instances, or make the server one of a cluster.",
    )


def _check_replicas(findings: Findings, facts: Facts, wanted: int) -> None:
    if facts.replicas < wanted and not facts.is_clustered:
        _tell_refused_replicas(findings, wanted)
    elif facts.replicas > 1 and not facts.is_clustered:
        findings.warning(
            "replicas",
            f"one server keeps the stream, whose settings say {facts.replicas}",
            "The server belongs to no cluster, whatever was asked for. When its disk is lost, or "
            "its host crashes, runs that were won are won again.",
            "Make the server one of a cluster, or take replicas out of the URL of all instances, "
            "stop them, and delete the stream: the next start makes it.",
        )
    elif facts.replicas < wanted:
        findings.warning(
            "replicas",
            f"{_servers(facts.replicas)} the stream, and the URL asks for {wanted}",
            "Until that changes, fewer servers than planned may be lost: then nothing can be "
            "claimed, or runs that were won are won again.",
            "The next start of a scheduler with this URL spreads the stream. If it is refused, the "
            f"cluster has fewer than {wanted} servers with JetStream that can take it.",
        )
    elif facts.replicas > 1:
        findings.ok("replicas", f"{_servers(facts.replicas)} the stream")
    elif facts.is_clustered:
        findings.warning(
            "replicas",
            "one server of the cluster keeps the stream",
            "When that one is down nothing can be claimed, and when its disk is lost runs that "
            "were won are won again.",
            "Add ?replicas=3 to the URL of all instances: the next start spreads the stream.",
        )
    else:
        findings.note(
            "replicas",
            "one server keeps the stream",
            "A crash of its host forgets what was not on its disk yet (NATS waits up to two "
            "minutes unless sync_interval says otherwise): runs that were won are won again.",
            "Where that is too much: a cluster and ?replicas=3, or sync_interval: always.",
        )


def _servers(number: int) -> str:
    return "one server keeps" if number == 1 else f"{number} servers keep"
