"""Plays the plan of a fault campaign on real processes and a real store, and has it judged."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, NamedTuple, Optional

from leasecron_sync.backends.base import BackendSettings
from leasecron_sync.errors import StoreError
from leasecron_sync.model import RunRecord
from leasecron_sync.testing import HistoryLog
from leasecron_sync.testing.history.entry import TOLD, read_history
from scripts._faults_crew import CampaignError, Crew, eventually, new_work
from scripts._faults_instance import Job, TrueClock
from scripts._faults_place import Place
from scripts._faults_plan import (
    BY_NAME,
    CLOCKS,
    FEWEST,
    LEASE_MS,
    LEASES,
    WINDOW_MS,
    Injection,
    Plan,
)
from scripts._faults_servers import place_of
from scripts._faults_times import Happened
from scripts._faults_verdict import Finding, Judge, Scene, now_ms, owed_runs
from tests.services.process import ServiceError

PREPARE_MS: Final = 2_500
"""How long before its turn a successor's process is started."""
REGISTER_S: Final = 30.0
SETTLE_S: Final = 60.0
TAIL_MS: Final = 3_000
"""How long instances on a claim backend go on after the last window."""
LOOK_S: Final = 0.5
CALL_MS: Final = 10_000
MOST_RECORDS: Final = 1_000_000
SUCCEEDED: Final = ("kill", "deploy", "deploy on time")
SHUTTING_S: Final = 60.0

Say = Callable[[str], None]


class Act(NamedTuple):
    """Something to do at a time of the plan."""

    at_ms: int
    order: int
    what: str
    one: Injection


def acts_of(injections: Sequence[Injection]) -> dict[str, list[Act]]:
    """Return what is to be done, by who does it, in order."""
    found: dict[str, list[Act]] = {"instances": [], "network": [], "server": []}
    for number, one in enumerate(injections):
        lane = found[BY_NAME[one.kind].group]
        if one.kind in SUCCEEDED:
            lane.append(Act(max(0, one.end_ms - PREPARE_MS), 3 * number, "prepare", one))
        lane.append(Act(one.at_ms, 3 * number + 1, "begin", one))
        if one.lasts_ms or one.kind in SUCCEEDED or one.kind == "server restart":
            lane.append(Act(one.end_ms, 3 * number + 2, "end", one))
    for lane in found.values():
        lane.sort(key=lambda act: (act.at_ms, act.order))
    return found


class Campaign:
    """One campaign.

    Args:
        plan: What is to be done.
        folder: For all that is written; others may look into it.
        planted: A fault that is planted in the instances, or nothing.
        say: Is told how far it is.
    """

    def __init__(self, plan: Plan, folder: Path, planted: str, say: Say) -> None:
        self.plan = plan
        self.missing: dict[str, str] = {}
        self.happened: list[Happened] = []
        self.interrupted = False
        self._folder = folder
        self._say = say
        self._lease = plan.wishes.store in LEASES
        self._work = new_work(
            lease_ms=LEASE_MS if self._lease else 0,
            window_ms=0 if self._lease else WINDOW_MS,
            deploys=plan.wishes.deploys,
            planted=planted,
        )
        self._place: Place = place_of(plan.wishes.store, folder)
        self._crew = Crew(folder, self._work, self._place.url_of, self._place.environment_of)
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._errors: list[BaseException] = []
        self._log = HistoryLog(folder / "faults.jsonl", clock=TrueClock(self._work.offset_ms))
        self.begin_ms = self.until_ms = 0

    @property
    def jobs(self) -> Sequence[Job]:
        """The jobs of its instances."""
        return self._work.jobs

    @property
    def crew(self) -> Crew:
        """Its instances."""
        return self._crew

    # -- from begin to end -------------------------------------------------------------------------

    def open(self) -> None:
        """Start the store, and leave out of the plan what this machine cannot do.

        Raises:
            CampaignError: The store cannot be had.
        """
        if any(BY_NAME[one.kind].needs == CLOCKS for one in self.plan.injections):
            self._place.want_clocks()
        self._place.start()
        if self._place.wants_limits:
            self._crew.piped = True
            self._place.limit_files = self._crew.limit_files
        self.missing = {
            need: why
            for need, why in self._place.missing.items()
            if any(BY_NAME[one.kind].needs == need for one in self.plan.injections)
        }
        self.plan = self.plan.without(self.missing)

    def play(self) -> Finding:
        """Play it and return the verdict. ``interrupt`` ends it early.

        Raises:
            CampaignError: It cannot go on.
        """
        self._say("starting the instances")
        self._crew.start(self.plan.first)
        self._wait_registered()
        # Scheduled times are whole seconds, and so is the begin of the plan.
        self.begin_ms = -(-(now_ms() + 500) // 1_000) * 1_000
        self._play_lanes()
        self.until_ms = min(self.begin_ms + self._span_ms(), now_ms())
        self._say("all faults are over, what is owed is brought to its end")
        self._heal()
        self._wait_settled()
        self._say("the instances are told to end")
        troubles = self._crew.stop()
        records = self._records() if self._lease else []
        self._say("judging")
        return self._judged(records, troubles)

    def interrupt(self) -> None:
        """End the faults now; what there is is judged."""
        self.interrupted = True
        self._stopping.set()

    def close(self) -> None:
        """Leave no process, file or mount behind, whatever happened."""
        with contextlib.ExitStack() as closed:
            closed.callback(self._log.close)
            closed.callback(self._place.close)
            closed.callback(self._crew.close)
            self._stopping.set()

    def _span_ms(self) -> int:
        ends = [one.end_ms for one in self.plan.injections]
        if self.plan.wishes.deploys:
            return max(ends, default=0) + 1_000
        return self.plan.wishes.span_ms

    def _wait_registered(self) -> None:
        """Wait until all have looked at the store, so that they know what comes."""
        word = '"registered"' if self._lease else '"claimed"'

        def registered() -> bool:
            return all(
                one.log.exists() and word in one.log.read_text(errors="replace")
                for one in self._crew.up
            )

        if not eventually(registered, REGISTER_S):
            troubles = [one.trouble() for one in self._crew.all]
            message = next((text for text in troubles if text), "the store is not reached")
            raise CampaignError(message)

    # -- the plan ----------------------------------------------------------------------------------

    def _play_lanes(self) -> None:
        lanes = acts_of(self.plan.injections)
        threads = [
            threading.Thread(target=self._play_lane, args=(lanes[name],), name=name, daemon=True)
            for name in ("network", "server")
        ]
        for thread in threads:
            thread.start()
        # Here, since a process that dies with its parent dies with the thread that made it.
        self._play_lane(lanes["instances"])
        while not self._stopping.is_set() and now_ms() < self.begin_ms + self._span_ms():
            self._stopping.wait(LOOK_S)
        for thread in threads:
            thread.join(SHUTTING_S)
        if self._errors:
            raise self._errors[0]

    def _play_lane(self, acts: Sequence[Act]) -> None:
        for act in acts:
            left_ms = self.begin_ms + act.at_ms - now_ms()
            if self._stopping.wait(max(0.0, left_ms / 1_000)):
                return
            try:
                self._do(act)
            except (CampaignError, ServiceError, StoreError, OSError) as error:
                text = f"{act.one.kind} of {act.one.whom}: {error}"
                self._fail(CampaignError(text))
            except BaseException as error:  # noqa: BLE001 - ``_play_lanes`` raises it
                self._fail(error)

    def _fail(self, error: BaseException) -> None:
        self._errors.append(error)
        self._stopping.set()

    def _do(self, act: Act) -> None:
        one = act.one
        if act.what == "prepare":
            assert one.slot is not None
            self._crew.prepare(one.slot)
            return
        by_crew = BY_NAME[one.kind].group == "instances"
        if act.what == "begin":
            self._note(one, "fault_begins")
            began_ms = now_ms()
            if by_crew:
                self._begin(one)
            else:
                self._place.begin(one)
            with self._lock:
                ends_ms = max(now_ms(), began_ms + one.lasts_ms)
                self.happened.append(Happened(one.kind, began_ms, ends_ms, one.slot, one.amount))
        else:
            if by_crew:
                self._end(one)
            else:
                self._place.end(one)
            self._note(one, "fault_ends")
            self._is_over(one)

    def _is_over(self, one: Injection) -> None:
        """Ends may be later than planned, such as that of a server that takes its time."""
        with self._lock:
            for number in reversed(range(len(self.happened))):
                found = self.happened[number]
                if (found.kind, found.slot) == (one.kind, one.slot):
                    self.happened[number] = found._replace(to_ms=max(found.to_ms, now_ms()))
                    return

    def _note(self, one: Injection, event: str) -> None:
        text = " ".join(part for part in (f"{one.kind}, {one.whom}", one.details) if part)
        self._log.note(TOLD, event=event, reason=text)
        if event == "fault_begins":
            at_s = (now_ms() - self.begin_ms) / 1_000
            self._say(f"{at_s:7.1f} s of {self._span_ms() / 1_000:.0f}: {text}")

    def _begin(self, one: Injection) -> None:
        slot, crew = one.slot, self._crew
        assert slot is not None
        if one.kind == "kill":
            crew.kill(slot)
        elif one.kind in ("deploy", "deploy on time", "one fewer"):
            crew.terminate(slot)
        elif one.kind.startswith("stop"):
            crew.pause(slot)
        elif one.kind == "one more":
            crew.go(slot)
        else:
            assert one.kind == "clock step"
            self._place.set_clock(one, right=False)

    def _end(self, one: Injection) -> None:
        assert one.slot is not None
        if one.kind in SUCCEEDED:
            self._crew.go(one.slot)
        elif one.kind.startswith("stop"):
            self._crew.resume(one.slot)
        else:
            self._place.set_clock(one, right=True)

    # -- the end -----------------------------------------------------------------------------------

    def _heal(self) -> None:
        for slot, clock in self._place.clocks.items():
            del slot
            clock.set(0)
        try:
            self._place.heal()
        except ServiceError as error:
            raise CampaignError(str(error)) from error
        self._crew.heal(FEWEST)

    def _wait_settled(self) -> None:
        """Wait until all that was owed is settled; what is left then is judged as it is."""
        if not self._lease:
            end_ms = self.until_ms + WINDOW_MS + TAIL_MS
            time.sleep(max(0.0, (end_ms - now_ms()) / 1_000))
            return
        owed = set(owed_runs(self.jobs, self.begin_ms, self.until_ms))

        def settled() -> bool:
            try:
                records = self._records()
            except StoreError:
                return False
            return owed <= {record.key for record in records if record.state.settled}

        end_s = time.monotonic() + SETTLE_S
        while not settled() and time.monotonic() < end_s:
            time.sleep(LOOK_S)

    def _records(self) -> list[RunRecord]:
        backend = self._place.connect()
        backend.open(BackendSettings("default", "campaign", CALL_MS))
        try:
            found: list[RunRecord] = []
            for job in self.jobs:
                found += backend.history(job.name, MOST_RECORDS)
            return found
        finally:
            backend.close()

    def _judged(self, records: Sequence[RunRecord], troubles: Sequence[str]) -> Finding:
        if self._lease:
            self._log.records(records)
        scene = Scene(
            self.plan,
            self.jobs,
            self._crew.all,
            self.happened,
            self.begin_ms,
            self.until_ms,
            records,
            troubles,
        )
        own = read_history(self._folder / "faults.jsonl").entries
        judge = Judge(scene, [own])
        return judge.find(lease=self._lease)

    def restarts_without_anybody(self) -> Optional[tuple[int, int]]:
        """Of deploys alone: how many scheduled times had a restart, and of these nobody there."""
        times = {
            one.on_ms
            for one in self.plan.injections
            if one.on_ms is not None and self.begin_ms + one.on_ms <= self.until_ms
        }
        if not times:
            return None
        alone = 0
        for on_ms in times:
            at_ms = self.begin_ms + on_ms
            alone += not any(
                one.went_ms is not None
                and one.went_ms <= at_ms
                and all(end.from_ms > at_ms for end in one.disturbed if end.kind != "stop")
                for one in self._crew.all
            )
        return len(times), alone
