"""Backends that fail on demand."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Callable

import pytest

from leasecron_sync.backends.base import BackendSettings, ClaimBackend, LeaseBackend
from leasecron_sync.backends.memory import MemoryLease
from leasecron_sync.errors import OutcomeUnknown, StoreUnavailable
from leasecron_sync.model import (
    JobSpan,
    JobStamp,
    LeaseClaim,
    LeaseRef,
    OnceClaim,
    OnOverlap,
    Outcome,
    RenewReply,
    RunKey,
    RunState,
    Settlement,
    Verdict,
)
from leasecron_sync.testing.clock import ManualClock
from leasecron_sync.testing.faults import FaultyClaim, FaultyLease
from leasecron_sync.testing.memory import MemoryClaim

SETTINGS = BackendSettings("space", "instance", 5_000)
SCHEDULED_MS = ManualClock().now_ms()
RUN = RunKey("job", SCHEDULED_MS)
CLAIM = LeaseClaim(
    key=RUN,
    due_ms=SCHEDULED_MS,
    holder="instance",
    decision_id="decision",
    lease_ms=10_000,
    max_attempts=3,
    on_overlap=OnOverlap.SKIP,
    max_age_ms=60_000,
    takeover_ms=100_000,
)
ONCE = OnceClaim(RUN, SCHEDULED_MS, "instance", "decision", 60_000)
FINISHED = Settlement(Outcome.FINISHED)

COMMANDS: dict[str, Callable[[LeaseBackend], object]] = {
    "probe": lambda backend: backend.probe(),
    "register": lambda backend: backend.register([JobStamp("job", "x")]),
    "claim": lambda backend: backend.claim([CLAIM]),
    "renew": lambda backend: backend.renew([LeaseRef(RUN, 1)], 10_000),
    "settle": lambda backend: backend.settle(LeaseRef(RUN, 1), FINISHED),
    "pending": lambda backend: backend.pending(["job"], 10),
    "states": lambda backend: backend.states([JobSpan("job", 0, SCHEDULED_MS)]),
    "history": lambda backend: backend.history(None, 10),
    "jobs": lambda backend: backend.jobs(10),
    "prune": lambda backend: backend.prune(0, 10),
}
LOCAL: dict[str, Callable[[LeaseBackend], object]] = {
    "open": lambda backend: backend.open(SETTINGS),
    "tend": lambda backend: backend.tend(),
    "close": lambda backend: backend.close(),
    "discard": lambda backend: backend.discard(),
}


@pytest.fixture
def sound(clock: ManualClock) -> MemoryLease:
    class OnManualClock(MemoryLease):
        _now_ms = staticmethod(clock.now_ms)

    return OnManualClock()


@pytest.fixture
def lease(sound: MemoryLease) -> Iterator[FaultyLease]:
    backend = FaultyLease(sound)
    backend.open(SETTINGS)
    yield backend
    backend.faults.clear()
    backend.close()


@pytest.fixture
def once(clock: ManualClock) -> FaultyClaim:
    class OnManualClock(MemoryClaim):
        _now_ms = staticmethod(clock.now_ms)
        max_window_ms = 70_000

    backend = FaultyClaim(OnManualClock())
    backend.open(SETTINGS)
    return backend


def test_a_wrapper_is_of_the_family_of_what_it_wraps(lease: FaultyLease, once: FaultyClaim) -> None:
    assert isinstance(lease, LeaseBackend)
    assert (lease.family, once.family) == ("lease", "claim")
    assert isinstance(once, ClaimBackend)
    assert once.max_window_ms == 70_000
    assert repr(lease) == "FaultyLease(MemoryLease())"
    assert repr(once) == "FaultyClaim(MemoryClaim())"


@pytest.mark.parametrize("name", [*COMMANDS, *LOCAL])
def test_every_call_is_passed_on_and_counted(
    lease: FaultyLease, sound: MemoryLease, name: str
) -> None:
    call = {**COMMANDS, **LOCAL}[name]
    before = lease.faults.calls(name)
    found = call(lease)
    assert lease.faults.calls(name) == before + 1
    sound.open(SETTINGS)
    if name not in ("claim", "register"):  # these change the store
        assert found == call(sound)


def test_a_claim_backend_is_passed_on_too(once: FaultyClaim) -> None:
    assert [reply.verdict for reply in once.claim([ONCE])] == [Verdict.GRANTED]
    assert once.probe().version == "memory"
    assert once.tend() is None
    once.faults.lose_reply("claim")
    with pytest.raises(OutcomeUnknown):
        once.claim([ONCE])
    once.faults.down = True
    with pytest.raises(StoreUnavailable):
        once.claim([ONCE])
    once.discard()
    once.close()


@pytest.mark.parametrize("name", COMMANDS)
def test_a_store_that_is_down_answers_nothing(lease: FaultyLease, name: str) -> None:
    lease.faults.down = True
    for _ in range(2):
        with pytest.raises(StoreUnavailable, match=name):
            COMMANDS[name](lease)
    assert lease.faults.calls(name) == 2
    lease.faults.down = False
    COMMANDS[name](lease)
    assert len(lease.history(None, 10)) == (name == "claim"), "nothing had an effect before"


@pytest.mark.parametrize("name", LOCAL)
def test_what_needs_no_store_works_while_it_is_down(lease: FaultyLease, name: str) -> None:
    lease.faults.down = True
    LOCAL[name](lease)


def test_a_lost_request_has_no_effect(lease: FaultyLease) -> None:
    lease.faults.lose_request("claim", times=2)
    for _ in range(2):
        with pytest.raises(OutcomeUnknown, match="request"):
            lease.claim([CLAIM])
        assert lease.history(None, 10) == []
    assert lease.claim([CLAIM])[0].verdict is Verdict.GRANTED


def test_a_lost_reply_hides_an_effect(lease: FaultyLease) -> None:
    lease.faults.lose_reply("claim")
    with pytest.raises(OutcomeUnknown, match="reply"):
        lease.claim([CLAIM])
    [record] = lease.history(None, 10)
    assert record.state is RunState.RUNNING
    [again] = lease.claim([CLAIM])
    assert again.lease is not None
    assert again.lease.ref.token == record.token


def test_a_request_is_lost_before_its_reply_can_be(lease: FaultyLease) -> None:
    lease.faults.lose_reply("claim")
    lease.faults.lose_request("claim")
    with pytest.raises(OutcomeUnknown, match="request"):
        lease.claim([CLAIM])
    with pytest.raises(OutcomeUnknown, match="reply"):
        lease.claim([CLAIM])


def test_only_the_named_method_fails(lease: FaultyLease) -> None:
    lease.faults.lose_request("renew")
    [reply] = lease.claim([CLAIM])
    assert reply.lease is not None
    with pytest.raises(OutcomeUnknown):
        lease.renew([reply.lease.ref], 10_000)
    assert list(lease.renew([reply.lease.ref], 10_000)) == [RenewReply.RENEWED]


def test_a_slow_call_lets_others_in_before_and_after_the_store_decides(
    lease: FaultyLease, sound: MemoryLease, clock: ManualClock
) -> None:
    seen: list[int] = []

    def look() -> None:
        clock.advance(1_000)
        seen.append(len(sound.history(None, 10)))

    lease.faults.slow("claim", before=look, after=look)
    began_ms = clock.steady_ms()
    assert lease.claim([CLAIM])[0].verdict is Verdict.GRANTED
    assert seen == [0, 1]
    assert clock.steady_ms() - began_ms == 2_000
    lease.faults.slow("claim")
    lease.claim([CLAIM])
    assert seen == [0, 1]


def test_a_slow_call_can_fail_as_well(lease: FaultyLease, clock: ManualClock) -> None:
    lease.faults.slow("claim", before=lambda: clock.advance(500), after=lambda: clock.advance(500))
    lease.faults.down = True
    began_ms = clock.steady_ms()
    with pytest.raises(StoreUnavailable):
        lease.claim([CLAIM])
    assert clock.steady_ms() - began_ms == 500


@pytest.mark.parametrize("error", [ValueError("odd"), KeyboardInterrupt(), SystemExit(3)])
def test_what_no_contract_foresees_is_raised_at_the_nth_call(
    lease: FaultyLease, error: BaseException
) -> None:
    lease.pending(["job"], 10)
    lease.faults.raise_at("pending", error, nth=2)
    lease.pending(["job"], 10)
    with pytest.raises(type(error)):
        lease.pending(["job"], 10)
    lease.pending(["job"], 10)


@pytest.mark.parametrize("name", LOCAL)
def test_what_needs_no_store_can_raise_too(lease: FaultyLease, name: str) -> None:
    lease.faults.raise_at(name, ValueError("odd"))
    with pytest.raises(ValueError, match="odd"):
        LOCAL[name](lease)


def test_a_call_that_raised_uses_up_no_other_fault(lease: FaultyLease) -> None:
    lease.faults.lose_reply("claim")
    lease.faults.raise_at("claim", ValueError("odd"))
    with pytest.raises(ValueError, match="odd"):
        lease.claim([CLAIM])
    lease.faults.down = True
    with pytest.raises(StoreUnavailable):
        lease.claim([CLAIM])
    lease.faults.down = False
    with pytest.raises(OutcomeUnknown):
        lease.claim([CLAIM])


def test_everything_works_again_when_the_faults_are_cleared(lease: FaultyLease) -> None:
    lease.faults.down = True
    lease.faults.lose_request("claim", times=9)
    lease.faults.lose_reply("renew", times=9)
    lease.faults.raise_at("settle", ValueError("odd"))
    lease.faults.slow("pending", before=lambda: pytest.fail("called"))
    lease.faults.clear()
    for call in COMMANDS.values():
        call(lease)


def test_a_misspelt_method_is_refused(lease: FaultyLease) -> None:
    faults = lease.faults
    calls: tuple[Callable[[str], object], ...] = (
        faults.calls,
        faults.lose_request,
        faults.lose_reply,
        faults.slow,
        lambda name: faults.raise_at(name, ValueError()),
    )
    for call in calls:
        with pytest.raises(ValueError, match=r"no method 'clam'.*claim"):
            call("clam")


def test_faults_can_be_switched_while_a_call_is_under_way(lease: FaultyLease) -> None:
    inside, go_on = threading.Event(), threading.Event()
    errors: list[BaseException] = []

    def hold() -> None:
        inside.set()
        assert go_on.wait(10)

    def claim() -> None:
        try:
            lease.claim([CLAIM])
        except OutcomeUnknown as error:
            errors.append(error)

    lease.faults.slow("claim", before=hold)
    thread = threading.Thread(target=claim)
    thread.start()
    assert inside.wait(10)
    lease.faults.slow("claim")
    lease.faults.lose_request("claim")  # for the next call, not for the one under way
    go_on.set()
    thread.join(10)
    assert errors == []
    with pytest.raises(OutcomeUnknown):
        lease.claim([CLAIM])


def test_each_lost_call_is_lost_once_however_many_threads_call(lease: FaultyLease) -> None:
    lost: list[int] = []

    def call() -> None:
        for _ in range(50):
            try:
                lease.pending(["job"], 10)
            except OutcomeUnknown:
                lost.append(1)

    lease.faults.lose_request("pending", times=30)
    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(lost) == 30
    assert lease.faults.calls("pending") == 200
