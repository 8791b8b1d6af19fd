"""Everything that goes wrong in one simulated history, as values that can be read and taken out.

A plan is made from a seed. The order in which instances take their steps is not part of it: that
comes from a stream of its own, so that a plan with something taken out can be played as well.
Instants are milliseconds since the history began.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Optional

FORMAT = 1
"""Number of the form in which plans are written to files."""


@dataclass(frozen=True)
class JobPlan:
    """A job of one version of the application.

    Attributes:
        name: Its name.
        period_s: It is scheduled every so many seconds.
        jitter_ms: See the option; like all further ones.
        overlap: Whether overlap is allowed.
        catch_up_ms: See the option.
        catch_up_limit: See the option.
        max_attempts: See the option.
        retry_delay_ms: See the option.
        time_limit_ms: See the option.
    """

    name: str
    period_s: int
    jitter_ms: int = 0
    overlap: bool = False
    catch_up_ms: int = 60_000
    catch_up_limit: int = 100
    max_attempts: int = 3
    retry_delay_ms: int = 1_000
    time_limit_ms: Optional[int] = None


@dataclass(frozen=True)
class Version:
    """A version of the application, as a deploy brings it to an instance.

    Attributes:
        jobs: Its jobs.
        lease_ms: See the option; not used on claim backends.
        history_ms: See the option; not used on claim backends.
        window_ms: Claim backends: ``claim_window_ms``.
    """

    jobs: tuple[JobPlan, ...]
    lease_ms: int = 3_000
    history_ms: int = 86_400_000 * 7
    window_ms: int = 20_000

    @property
    def margin_ms(self) -> int:
        """Margin of trust that follows from the lease."""
        return max(50, self.lease_ms // 10)

    def job(self, name: str) -> Optional[JobPlan]:
        """Return the job of that name, if this version has it."""
        return next((job for job in self.jobs if job.name == name), None)


@dataclass(frozen=True)
class HostPlan:
    """A machine with one process of the application.

    Attributes:
        label: Its name in this history.
        start_ms: When the process starts.
        skew_ms: Its wall clock minus the store's, at the beginning.
        speed_ppm: How much faster its clocks run than the store's, in millionths.
        boot_ms: First reading of its steady clock.
        slots: ``max_concurrent_runs``.
    """

    label: str
    start_ms: int = 0
    skew_ms: int = 0
    speed_ppm: int = 0
    boot_ms: int = 1_000_000
    slots: int = 32


@dataclass(frozen=True)
class Happening:
    """Something that happens to an instance, to its host, or to the store.

    Attributes:
        at_ms: When.
        what: Which kind, see ``happenings``.
        host: Label of the host; empty where it is about the store.
        ms: How long it lasts, or by how much a clock steps.
        then_ms: Time until what follows, such as the next start.
        version: Number of the version that a deploy brings.
        how: Further detail, such as the command that is refused.
    """

    at_ms: int
    what: str
    host: str = ""
    ms: int = 0
    then_ms: int = 0
    version: int = 0
    how: str = ""


@dataclass(frozen=True)
class MessageFault:
    """What happens to one call of an instance.

    Attributes:
        host: Label of the host.
        number: Which of its calls, the first is 0.
        what: ``"slow"``, ``"request lost"``, ``"reply lost"``, ``"late"`` (lost, and reaches the
            store later on), ``"twice"`` (reaches it twice), ``"refused"`` or ``"rejected"``.
        before_ms: How long the request is on its way.
        after_ms: How long the reply is.
        later_ms: How much later the lost or second request reaches the store.
    """

    host: str
    number: int
    what: str
    before_ms: int = 0
    after_ms: int = 0
    later_ms: int = 0


@dataclass(frozen=True)
class Behaviour:
    """What a handler does in one attempt of one run.

    Attributes:
        job: Name of the job.
        scheduled_ms: Scheduled time of the run, since the epoch.
        attempt: Which attempt, the first is 1.
        late_ms: How long its thread does not get to work.
        length_ms: How long it works.
        look_ms: How often it looks whether it should end.
        looks: False where it looks only when it is told to stop.
        stubborn: True where it never looks.
        waits: True where it sleeps in ``run.wait`` instead of working.
        outcome: ``""`` (returns), ``"raise"``, ``"exit"`` or ``"hand over"``.
        forks: True where it forks a child that goes on with it.
    """

    job: str
    scheduled_ms: int
    attempt: int = 1
    late_ms: int = 0
    length_ms: int = 0
    look_ms: int = 500
    looks: bool = True
    stubborn: bool = False
    waits: bool = False
    outcome: str = ""
    forks: bool = False


@dataclass(frozen=True)
class Plan:
    """One history.

    Attributes:
        seed: Where it came from.
        profile: Name of the profile.
        family: ``"lease"`` or ``"claim"``.
        order: Name of the stream that decides in which order steps are taken.
        begin_ms: The store's clock at the beginning.
        storm_ms: How long things go wrong; handlers and messages behave afterwards.
        gentle: True where nothing happens that may cost an attempt.
        hosts: The hosts.
        versions: Versions of the application; all begin with the first one.
        happenings: In the order of time.
        faults: What goes wrong with calls.
        behaviours: What handlers do; those without an entry return at once.
    """

    seed: int
    profile: str
    family: str
    order: str
    begin_ms: int
    storm_ms: int
    gentle: bool
    hosts: tuple[HostPlan, ...]
    versions: tuple[Version, ...]
    happenings: tuple[Happening, ...] = ()
    faults: tuple[MessageFault, ...] = ()
    behaviours: tuple[Behaviour, ...] = ()

    @property
    def size(self) -> int:
        """How much can be taken out of it."""
        jobs = sum(len(version.jobs) for version in self.versions)
        parts = (self.hosts, self.happenings, self.faults, self.behaviours)
        return jobs + sum(len(part) for part in parts)

    def as_json(self) -> str:
        """Return it as text, for a file."""
        fields = {key: value for key, value in asdict(self).items() if value != ()}
        return json.dumps({"format": FORMAT, **fields}, indent=1)


def from_json(text: str) -> Plan:
    """Return the plan that was written to a file.

    Raises:
        ValueError: It is not one.
    """
    try:
        fields = json.loads(text)
        version = fields.pop("format")
        plan = _plan_of(fields) if version == FORMAT else None
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        message = f"this is not a plan of a simulated history: {error}"
        raise ValueError(message) from error
    if plan is None:
        message = f"a plan of a simulated history in format {version!r}, not {FORMAT}"
        raise ValueError(message)
    return plan


def _plan_of(fields: Mapping[str, Any]) -> Plan:
    def parts(name: str, kind: Any) -> tuple[Any, ...]:  # noqa: ANN401 - one of the classes above
        return tuple(kind(**item) for item in fields.get(name, ()))

    def version(item: dict[str, Any]) -> Version:
        values: dict[str, Any] = {**item, "jobs": tuple(JobPlan(**job) for job in item["jobs"])}
        return Version(**values)

    versions = tuple(version(item) for item in fields["versions"])
    made: dict[str, Any] = {
        **fields,
        "versions": versions,
        "hosts": parts("hosts", HostPlan),
        "happenings": parts("happenings", Happening),
        "faults": parts("faults", MessageFault),
        "behaviours": parts("behaviours", Behaviour),
    }
    return Plan(**made)
