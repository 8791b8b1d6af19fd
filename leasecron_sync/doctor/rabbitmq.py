"""Checks of a RabbitMQ broker. Nothing is made in it: what is deleted is not there."""

from __future__ import annotations

from typing import Final, Optional

from leasecron_sync.backends._lanes import Deadline
from leasecron_sync.backends._rabbitmq_channel import Closed, Fate
from leasecron_sync.backends._rabbitmq_link import Link
from leasecron_sync.backends.rabbitmq import GRANT, RabbitMQClaim
from leasecron_sync.clock import SystemClock
from leasecron_sync.doctor.finding import Examination, Finding, Findings, Level
from leasecron_sync.doctor.host import check_client
from leasecron_sync.doctor.visit import ROUND_TRIPS, SLOW_MS, Visit
from leasecron_sync.errors import StoreUnavailable

_IDLE: Final = "Nothing can be claimed: every run is missed."

_clock = SystemClock()


def examine_rabbitmq(backend: RabbitMQClaim, exam: Examination) -> None:
    """Look at a broker.

    Args:
        backend: Knows where it is, and is open.
        exam: The examination.
    """
    check_client(exam.findings, "pika")
    visit: Visit[Link] = Visit(backend.connected, exam)
    looks = _Looks(exam, visit, backend.probe_queue())
    try:
        if visit.reaches(lambda: None):
            looks.all()
    finally:
        visit.close()


class _Looks:
    """The checks, one after the other on one connection."""

    def __init__(self, exam: Examination, visit: Visit[Link], queue: str) -> None:
        self._exam, self._visit, self._queue = exam, visit, queue
        self._findings: Findings = exam.findings

    def all(self) -> None:
        findings = self._findings
        with findings.checking("version"):
            findings.ok("version", self._visit.link().version)
        with findings.checking("rights"):
            self._check_rights()
        with findings.checking("alarms"):
            self._check_messages()
        with findings.checking("heartbeat"):
            self._check_heartbeat()
        findings.note(
            "policies",
            "which policies hold for queues is not told to clients",
            "One that expires messages, or queues earlier, lets runs be executed twice, and "
            "nobody notices.",
            "Look at `rabbitmqctl list_policies` and `rabbitmqctl list_operator_policies`: leave "
            "queues whose names begin with leasecron. out of message-ttl, expires and max-length.",
        )
        findings.note(
            "clock",
            "RabbitMQ tells no clock",
            "Early and too old are judged by each host's own clock: one that is ahead starts its "
            "runs too early.",
            "Set the clocks of all hosts by NTP.",
        )

    def _check_rights(self) -> None:
        """Delete a queue that is not there: that takes the right to make it."""
        took: list[int] = []
        while len(took) < ROUND_TRIPS and (not took or self._call().left_ms() > 2 * max(took)):
            sent_ms, link, deadline = _clock.steady_ms(), self._visit.link(), self._call()
            channel = link.channel(deadline)
            if not link.delete(self._queue, deadline):
                if channel.closed is None:
                    link.suspect()
                    message = "no answer in time"
                    raise StoreUnavailable(message)
                self._tell_refusal(channel.closed)
                return
            took.append(_clock.steady_ms() - sent_ms)
        self._findings.ok("rights", "may make and delete the queues of this namespace")
        self._tell_round_trips(took)

    def _check_messages(self) -> None:
        """Send a message that goes nowhere."""
        link, deadline = self._visit.link(), self._call()
        channel, taken = link.channel(deadline), list[Fate]()
        channel.try_nothing(taken.append)
        link.run(lambda: bool(taken) or channel.closed is not None, deadline)
        link.run(lambda: link.is_blocked, Deadline(min(ROUND_TRIPS, deadline.left_ms())))
        if channel.closed is not None:
            self._tell_refusal(channel.closed)
        elif link.is_blocked:
            self._findings.problem(
                "alarms",
                "the broker is short of memory or disk and takes no messages",
                "Nothing is claimed as long as that lasts: runs wait, and are missed when they are "
                "too old.",
                "`rabbitmqctl status` tells its alarms and limits.",
            )
        elif not taken:
            link.suspect()
            raise link.why()
        else:
            self._findings.ok("alarms", "takes messages")

    def _tell_refusal(self, closed: Closed) -> None:
        self._findings.problem("rights", closed.reason, _IDLE, GRANT)

    def _check_heartbeat(self) -> None:
        heartbeat_ms: Optional[int] = self._visit.link().heartbeat_ms
        if heartbeat_ms is not None:
            self._findings.ok("heartbeat", f"every {heartbeat_ms // 1000} s at most")
            return
        self._findings.warning(
            "heartbeat",
            "the broker wants no heartbeats",
            "A connection that a firewall has dropped is noticed by the next claim only, which "
            "waits for its answer in vain: those runs may be missed (unknown outcome).",
            "Set heartbeat in rabbitmq.conf (60 is its default), or in the URL: ?heartbeat=60",
        )

    def _tell_round_trips(self, took: list[int]) -> None:
        median, longest = sorted(took)[len(took) // 2], max(took)
        measured = {"p50_ms": median, "max_ms": longest, "round_trips": len(took)}
        found = f"answers in {median or 'under 1'} ms ({len(took)} round trips, "
        found += f"the slowest {longest or 'under 1'} ms)"
        if median < SLOW_MS:
            self._findings.ok("reachable", found, measured)
            return
        self._findings.add(
            Finding(
                Level.WARNING,
                "reachable",
                found,
                "Each claim takes three times as long: runs start late by that, and a call that "
                f"takes more than {self._exam.settings.call_timeout_ms} ms counts as an outage.",
                "Look for what is slow: the way to the broker, or the broker itself.",
                measured,
            )
        )

    def _call(self) -> Deadline:
        return self._exam.call()
