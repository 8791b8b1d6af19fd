"""Executes a command under a claim: one host is the winner, and nobody notices when it fails."""

from __future__ import annotations

import secrets
from typing import Final

from leasecron_sync.backends.base import ClaimBackend
from leasecron_sync.cli._exec_child import Child
from leasecron_sync.cli._exec_turn import TIME_OVER, Asking, Ending, Order
from leasecron_sync.cli.output import CommandError
from leasecron_sync.model import OnceClaim, RunKey, Verdict
from leasecron_sync.run import moment

TIME_LIMIT: Final = "time limit"
LOOK_MS: Final = 500


def execute_once(backend: ClaimBackend, order: Order, asking: Asking) -> int:
    """Claim the latest run, and execute the command if it is won; return its status.

    Raises:
        CommandError: It is not known who won, or the store did not answer in time.
    """
    key = order.due_run(asking.clock.now_ms())
    claim = OnceClaim(
        key, key.scheduled_ms, secrets.token_hex(6), secrets.token_hex(16), order.window_ms
    )
    end_ms = key.scheduled_ms + order.window_ms
    while not asking.stop.asked.is_set():
        (reply,) = asking.until(end_ms, lambda: backend.claim([claim]), "nobody can be asked")
        if reply.verdict is Verdict.GRANTED:
            return _executed(order, key, asking)
        if reply.verdict is Verdict.UNKNOWN:
            message = f"nobody knows who won {key.job!r} of {_shown(key)}: it is not executed here"
            raise CommandError(message)
        if reply.verdict is Verdict.REJECTED:
            message = f"{key.job!r} of {_shown(key)} was refused: {reply.reason}"
            raise CommandError(message)
        if reply.verdict not in (Verdict.EARLY, Verdict.DEFERRED):
            asking.say(f"{key.job!r} of {_shown(key)}: {reply.verdict.value.replace('_', ' ')}")
            return 0
        asking.wait(min(max(1, reply.wait_ms), 1_000))
    return asking.stop.status


def _executed(order: Order, key: RunKey, asking: Asking) -> int:
    clock, stop, ending = asking.clock, asking.stop, Ending()
    child = stop.start(lambda: Child(order.command, order.environment(key)))
    began_ms, code = clock.steady_ms(), None
    while code is None:
        code = child.wait(LOOK_MS)
        late = order.is_over_after(clock.steady_ms() - began_ms)
        if code is None and late:
            ending.begin(child, TIME_LIMIT, clock.steady_ms())
        ending.step(child, clock.steady_ms())
    return TIME_OVER if ending.reason else code


def _shown(key: RunKey) -> str:
    return moment(key.scheduled_ms).isoformat()
