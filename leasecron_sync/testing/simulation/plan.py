"""Everything that goes wrong in one simulated history, as values that can be read and taken out.

A plan is made from a seed. The order in which instances take their steps is not part of it: that
comes from a stream of its own, so that a plan with something taken out can be played as well.
Instants are milliseconds since the history began.
"""

from __future__ import annotations

import json
import reprlib
from dataclasses import MISSING, asdict, dataclass, fields
from typing import Any, Final, Optional, cast

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
        return _plan_of(json.loads(text))
    except ValueError as error:
        message = f"this is not a plan of a simulated history: {error}"
        raise ValueError(message) from error


_PARTS: Final[dict[str, type[Any]]] = {
    "hosts": HostPlan,
    "versions": Version,
    "jobs": JobPlan,
    "happenings": Happening,
    "faults": MessageFault,
    "behaviours": Behaviour,
}
_TYPES: Final[dict[Any, tuple[str, tuple[type[Any], ...]]]] = {
    "int": ("a whole number", (int,)),
    "Optional[int]": ("a whole number or null", (int, type(None))),
    "bool": ("true or false", (bool,)),
    "str": ("text", (str,)),
}


def _plan_of(loaded: object) -> Plan:
    values = _object(loaded)
    if "format" not in values:
        message = "it has no 'format'"
        raise ValueError(message)
    version = values.pop("format")
    if version != FORMAT:
        message = f"its format is {version!r}, and this version reads {FORMAT}"
        raise ValueError(message)
    plan: Plan = _made(Plan, values)
    for name, parts in (("host", plan.hosts), ("version", plan.versions)):
        if not parts:
            message = f"it has no {name}"
            raise ValueError(message)
    return plan


def _made(kind: type[Any], loaded: object) -> Any:  # noqa: ANN401 - one of that kind
    """Return a part of a plan whose fields all are what its class says."""
    values = _object(loaded)
    known = {item.name: item for item in fields(kind)}
    for name, item in known.items():
        if item.default is MISSING and name not in values:
            message = f"a {kind.__name__} has no {name!r}"
            raise ValueError(message)
    for name, value in values.items():
        if name not in known:
            message = f"a {kind.__name__} has a field {name!r}, which this version does not know"
            raise ValueError(message)
        words, types = _TYPES.get(known[name].type, ("a list", (list,)))
        if type(value) not in types:
            message = f"{name} is {reprlib.repr(value)} and should be {words}"
            raise ValueError(message)
        if name in _PARTS:
            values[name] = tuple(_made(_PARTS[name], item) for item in value)
    return kind(**values)


def _object(loaded: object) -> dict[str, Any]:
    if not isinstance(loaded, dict):
        message = f"{reprlib.repr(loaded)} is no JSON object"
        raise ValueError(message)  # noqa: TRY004 - whoever wrote the file made the mistake
    return dict(cast("dict[str, Any]", loaded))
