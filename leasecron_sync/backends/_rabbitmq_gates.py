"""Who is first at a gate: a queue that has room for one message and rejects every further one."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Optional

from leasecron_sync.backends._lanes import Deadline
from leasecron_sync.backends._rabbitmq_channel import Channel, Fate
from leasecron_sync.backends._rabbitmq_link import Link
from leasecron_sync.backends._rabbitmq_quiet import quiet
from leasecron_sync.backends._rabbitmq_words import NOT_FOUND
from leasecron_sync.errors import StoreError

EXPIRES_MS = 600_000
"""How long a gate stays after the last instance declared it. A constant of the format: a queue that
is declared with another value is refused."""

ARGUMENTS = {
    "x-queue-type": "classic",  # of a quorum queue several publishers are told that they were first
    "x-max-length": 1,
    "x-overflow": "reject-publish",
    "x-expires": EXPIRES_MS,
}

MAX_CHANNELS = 10
"""How often one call opens another channel after the broker closed one."""

PUBLISH_SHARE = 4
"""Nothing is published in the last quarter of a call's time: its answer would come too late, and
nobody would ever know it."""

STUCK_MS = 1_000
"""A broker that goes on with other things and says nothing to a declaration for so long will say
nothing for long: the queue's node is down, and since 4.0 it waits a minute for it."""

MAX_APART = 32
"""How many gates are asked for on channels of their own at the same time."""

_logger = logging.getLogger("leasecron_sync.backends.rabbitmq")


class Outcome(Enum):
    """What became of one gate."""

    WON = "won"
    LOST = "lost"
    NOT_ASKED = "not asked"  # nothing of it is in the gate
    UNKNOWN = "unknown"  # published, and no answer
    REFUSED = "refused"


@dataclass
class Gate:
    """A gate, and how far a call has come with it.

    Attributes:
        queue: Its name.
        body: The message to put into it.
        always: Whether to try it also where there is a message already.
        is_declared: Whether it is there, for the message to be put into it.
        is_published: Whether the message was sent.
        is_stuck: Whether the broker said nothing to its declaration, and something to what came
            before.
        outcome: What became of it.
        reason: Why it was refused, or could not be asked.
        code: The number of that reason.
    """

    queue: str
    body: bytes
    always: bool = False
    is_declared: bool = False
    is_published: bool = False
    is_stuck: bool = False
    outcome: Optional[Outcome] = None
    reason: str = ""
    code: Optional[int] = None


def decide(
    link: Link,
    gates: Sequence[Gate],
    deadline: Deadline,
    **options: bool,
) -> None:
    """Put each message into its gate; the outcomes are written into the gates.

    Args:
        link: The connection.
        gates: What to decide, in turn.
        deadline: When to stop waiting.
        options: Of the declaration, other than the usual ones.
    """
    reserve_ms = deadline.left_ms() // PUBLISH_SHARE
    try:
        with quiet():
            options = {"durable": True, **options}
            if _declare(link, gates, deadline, reserve_ms, options):
                _publish(link, gates, deadline, reserve_ms)
    except StoreError:
        pass  # the link knows why
    except Exception as error:  # of a connection that went away under the call
        _logger.debug("the connection broke", exc_info=True)
        link.suspect(error)
    finally:
        for gate in gates:
            if gate.outcome is None:
                gate.outcome = Outcome.UNKNOWN if gate.is_published else Outcome.NOT_ASKED


def _declare(
    link: Link,
    gates: Sequence[Gate],
    deadline: Deadline,
    reserve_ms: int,
    options: dict[str, bool],
) -> bool:
    """Make all gates before anything is published; tell whether messages are taken.

    A gate that is refused closes the channel, and what was published behind it would be lost.
    """
    for _ in range(MAX_CHANNELS):
        if link.is_blocked or not deadline.left_ms():
            break
        channel = link.channel(deadline)
        waiting = [gate for gate in gates if not gate.is_declared and gate.outcome is None]
        if deadline.left_ms() < 2 * STUCK_MS + reserve_ms and any(gate.is_stuck for gate in gates):
            waiting = []  # more that do not answer would leave no time to decide the others
        if _declare_on(link, channel, waiting, deadline, options):
            return True
        left = [gate for gate in waiting if not gate.is_declared and not gate.outcome]
        blocked: bool = link.is_blocked  # by now
        if blocked or not link.is_sound or not left:
            break
        if channel.closed is not None:
            _refuse(channel, left)
            continue
        # The channel says nothing more until that one is answered; others do.
        _note_stuck(left[0])
        link.leave_channel()
        number = min(MAX_APART, link.spare_channels)
        _declare_apart(link, left[1 : number + 1], deadline, options)
    return False


def _note_stuck(gate: Gate) -> None:
    gate.is_stuck, gate.outcome = True, Outcome.NOT_ASKED
    gate.reason = "its queue does not answer: its node of the cluster may be down"


def _declare_apart(
    link: Link, gates: list[Gate], deadline: Deadline, options: dict[str, bool]
) -> None:
    """Make gates, each on a channel of its own: many without an answer take as long as one."""
    apart = [(link.channel_beside(), gate) for gate in gates]
    try:
        if not link.run(
            lambda: link.is_blocked or all(channel.is_ready for channel, _ in apart),
            deadline,
        ):
            link.suspect()
        if link.is_blocked or not link.is_sound:
            return
        for channel, gate in apart:
            channel.declare(gate.queue, ARGUMENTS, partial(_declared, gate), **options)

        silent = _wait_apart(link, apart, deadline)
        for channel, gate in apart:
            if channel.closed is not None:
                _refuse(channel, [gate])
        for gate in silent:
            _note_stuck(gate)
    finally:
        for channel, _ in apart:
            channel.close()


def _wait_apart(
    link: Link, apart: Sequence[tuple[Channel, Gate]], deadline: Deadline
) -> list[Gate]:
    """Wait until all are answered, or none for long; return those that say nothing then."""

    def waiting() -> list[Gate]:
        return [
            gate
            for channel, gate in apart
            if not gate.is_declared and gate.outcome is None and channel.closed is None
        ]

    left = waiting()
    while left and _is_at_work(link):
        seen, patience_ms = len(left), min(STUCK_MS, deadline.left_ms())
        link.run(lambda: link.is_blocked or len(waiting()) != seen, Deadline(patience_ms))  # noqa: B023
        left = waiting()
        if len(left) == seen:
            # A wait cut short, and a broker that takes nothing just now, say nothing of a gate.
            return left if patience_ms == STUCK_MS and _is_at_work(link) else []
    return []


def _is_at_work(link: Link) -> bool:
    return link.is_sound and not link.is_blocked


def _declare_on(
    link: Link,
    channel: Channel,
    gates: list[Gate],
    deadline: Deadline,
    options: dict[str, bool],
) -> bool:
    taken: list[Fate] = []
    # A broker that is short of memory tells so to who publishes, and reads nothing more. So that no
    # message for a gate stays on the way then, one goes ahead that nobody misses.
    channel.try_nothing(taken.append)
    for gate in gates:
        channel.declare(gate.queue, ARGUMENTS, partial(_declared, gate), **options)

    def done() -> bool:
        return bool(taken) and all(gate.is_declared or gate.outcome for gate in gates[-1:])

    def ended() -> bool:
        return channel.closed is not None or link.is_blocked or done()

    def answers() -> int:
        return len(taken) + sum(gate.is_declared or bool(gate.outcome) for gate in gates)

    before = -1
    while not ended() and link.is_sound and deadline.left_ms() and before != answers():
        before = seen = answers()
        # Until it says anything at all it is the broker that is slow, or silent.
        patience_ms = min(STUCK_MS, deadline.left_ms()) if taken else deadline.left_ms()
        link.run(lambda: ended() or answers() != seen, Deadline(patience_ms))  # noqa: B023
    if not ended() and not deadline.left_ms():
        link.suspect()
    return channel.closed is None and not link.is_blocked and done()


def _declared(gate: Gate, messages: int) -> None:
    if messages and not gate.always:
        gate.outcome = gate.outcome or Outcome.LOST
    else:
        gate.is_declared = True


def _refuse(channel: Channel, waiting: list[Gate]) -> None:
    """Note which declaration closed the channel: they go one by one, so it is the first."""
    if not waiting or channel.closed is None:
        return
    first = waiting[0]
    first.code, first.reason = channel.closed
    # Not found: its node of the cluster is down, and the claims in it are there when it is back.
    first.outcome = Outcome.NOT_ASKED if first.code == NOT_FOUND else Outcome.REFUSED


def _publish(link: Link, gates: Sequence[Gate], deadline: Deadline, reserve_ms: int) -> None:
    channel = link.channel(deadline)
    gates = [gate for gate in gates if gate.is_declared and gate.outcome is None]
    if deadline.left_ms() <= reserve_ms:
        return
    for gate in gates:
        gate.is_published = True  # before: an error leaves it open whether it was sent
        channel.publish(gate.queue, gate.body, partial(_answered, gate))
    link.run(
        lambda: channel.closed is not None or all(gate.outcome for gate in gates),
        deadline,
    )
    if not all(gate.outcome for gate in gates):
        link.suspect()


def _answered(gate: Gate, fate: Fate) -> None:
    if gate.outcome is not None:
        return  # too late: it was given up
    if fate is Fate.RETURNED:
        gate.outcome, gate.reason = Outcome.NOT_ASKED, "it expired in this moment"
    else:
        gate.outcome = Outcome.WON if fate is Fate.TAKEN_IN else Outcome.LOST
