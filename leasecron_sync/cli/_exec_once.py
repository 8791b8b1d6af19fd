"""Executes a command under a claim: one host is the winner, and nobody notices when it fails."""

from __future__ import annotations

import secrets

from leasecron_sync.backends.base import ClaimBackend
from leasecron_sync.cli._exec_child import Child
from leasecron_sync.cli._exec_turn import CANNOT_RUN, TIME_OVER, Asking, Ended, Order, shown
from leasecron_sync.cli._exec_watch import Watch
from leasecron_sync.cli.output import CommandError, complain
from leasecron_sync.model import ClaimReply, OnceClaim, RunKey, Verdict
from leasecron_sync.options import MAX_WAIT_MS


def execute_once(backend: ClaimBackend, order: Order, asking: Asking, holder: str) -> int:
    """Claim the latest run, and execute the command if it is won; return its status.

    Raises:
        CommandError: It is not known who won, or the store did not answer in time.
    """
    clock, stop = asking.clock, asking.stop
    key = order.due_run(clock.now_ms())
    claim = OnceClaim(key, key.scheduled_ms, holder, secrets.token_hex(16), order.window_ms)

    def claimed() -> ClaimReply:
        (reply,) = backend.claim([claim])
        return reply

    def left_ms() -> int:
        return key.scheduled_ms + order.window_ms - clock.now_ms()

    asking.meet(left_ms(), backend)
    while not stop.asked:
        reply = asking.ask(left_ms(), claimed)
        if reply.verdict is Verdict.GRANTED:
            return _executed(order, key, asking)
        if reply.verdict is Verdict.UNKNOWN:
            message = f"nobody knows who won {shown(key)}: it is not executed here"
            raise CommandError(message)
        if reply.verdict is Verdict.REJECTED:
            message = f"{shown(key)} was refused: {reply.reason}"
            raise CommandError(message)
        if reply.verdict is Verdict.TOO_OLD:
            raise order.too_old(key)
        if reply.verdict is Verdict.TAKEN:
            asking.say(f"{shown(key)}: taken")
            return 0
        if reply.verdict is Verdict.EARLY:
            order.check_wait(key, reply.wait_ms)
        asking.say(f"{shown(key)}: {reply.verdict.value}, asking again in {reply.wait_ms} ms")
        stop.wait(min(reply.wait_ms, MAX_WAIT_MS))
    return stop.status


def _executed(order: Order, key: RunKey, asking: Asking) -> int:
    stop, clock = asking.stop, asking.clock
    if stop.asked:
        raise Ended(stop.number, f"{shown(key)} was won, is not executed, and nobody else will")
    asking.say(f"{shown(key)}: won")
    try:
        child = stop.start(lambda mask: Child(order.command, order.environment(key), mask))
    except OSError as error:
        complain(f"{shown(key)} was won, and no process can be started: {error}")
        return CANNOT_RUN
    end = Watch(child, stop, clock, order.time_limit_ms).until_end()
    end.tell(asking, order, key)
    return end.code if end.reason is None else TIME_OVER
