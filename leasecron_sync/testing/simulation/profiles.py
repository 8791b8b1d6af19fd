"""What may go wrong, and how often: the profiles from which plans are drawn."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Final


@dataclass(frozen=True)
class Profile:
    """How likely what goes wrong is; shares are in thousandths.

    Attributes:
        name: What it is called on the command line.
        family: ``"lease"`` or ``"claim"``.
        text: What it is about, in a line.
        slow: Share of calls that take their time.
        lost: Share of calls whose request or reply is lost.
        late: Share of lost requests that reach the store later on.
        twice: Share of calls whose request reaches the store twice.
        refused: Share of calls that fail or are refused by themselves.
        every_ms: Mean time between two happenings; 0 for none.
        happenings: Kinds of happenings, each with its weight.
        failing: Share of attempts that raise or hand over.
        longest: The longest handler, in leases.
        busy: Share of attempts that take time at all.
        leases_ms: Lengths of leases, one is drawn.
        pruned: True where the history is as short as it may be, so that pruning matters.
        slots: Values of ``max_concurrent_runs``, one is drawn for each host.
        length: Factor of the length.
        jobs: How many jobs at most.
        gentle: True where nothing happens that may cost an attempt.
        weight: Its share of a campaign over all profiles.
    """

    name: str
    family: str
    text: str
    slow: int = 120
    lost: int = 80
    late: int = 200
    twice: int = 20
    refused: int = 5
    every_ms: int = 3_000
    happenings: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    failing: int = 200
    longest: float = 2.5
    busy: int = 650
    leases_ms: tuple[int, ...] = (3_000,)
    pruned: bool = False
    slots: tuple[int, ...] = (2, 5, 32)
    length: float = 1.0
    jobs: int = 4
    gentle: bool = False
    weight: int = 2


_EVERYTHING: Final = MappingProxyType(
    {
        "down": 4,
        "all down": 2,
        "reject": 2,
        "emptied": 1,
        "pause": 4,
        "suspend": 2,
        "kill": 4,
        "stop": 2,
        "restart": 1,
        "fork": 1,
        "store step": 2,
        "store back": 1,
        "host step": 4,
        "deploy": 2,
        "no threads": 1,
    }
)

STORM: Final = Profile(
    "storm", "lease", "everything that can happen, mixed", happenings=_EVERYTHING, weight=3
)
MILD: Final = Profile(
    "mild",
    "lease",
    "slow and lost messages alone: no attempt may be lost",
    slow=100,
    refused=0,
    every_ms=0,
    failing=0,
    longest=2.0,
    gentle=True,
)
HURRICANE: Final = Profile(
    "hurricane",
    "lease",
    "slow replies just before renewals fail: trust",
    slow=400,
    lost=150,
    happenings=MappingProxyType({"down": 2, "pause": 1, "all down": 1, "store step": 1}),
)
CRASHES: Final = Profile(
    "crashes",
    "lease",
    "processes that are killed, stopped, suspended and forked: takeover and hand-over",
    every_ms=2_000,
    happenings=MappingProxyType(
        {"kill": 6, "stop": 3, "restart": 3, "pause": 3, "suspend": 3, "fork": 2, "no threads": 1}
    ),
    failing=300,
)
OUTAGES: Final = Profile(
    "outages",
    "lease",
    "a store that is away, refuses commands, or loses its data: catch-up",
    every_ms=4_000,
    happenings=MappingProxyType(
        {"down": 3, "all down": 6, "reject": 3, "emptied": 2, "kill": 2, "suspend": 1}
    ),
    length=1.5,
)
CLOCKS: Final = Profile(
    "clocks",
    "lease",
    "clocks that are set, of the hosts and of the store",
    every_ms=2_500,
    happenings=MappingProxyType(
        {"store step": 3, "store back": 3, "host step": 8, "kill": 1, "suspend": 1, "stop": 1}
    ),
)
DEPLOYS: Final = Profile(
    "deploys",
    "lease",
    "rolling deploys that change schedules, options and the set of jobs",
    every_ms=2_500,
    happenings=MappingProxyType({"deploy": 10, "kill": 1, "pause": 1, "down": 1, "stop": 1}),
    leases_ms=(2_000, 3_000, 4_500),
)
CROWD: Final = Profile(
    "crowd",
    "lease",
    "more due runs than slots",
    happenings=MappingProxyType({"pause": 2, "kill": 2, "all down": 2, "no threads": 2}),
    slots=(1, 1, 2, 3),
    jobs=8,
    busy=900,
    longest=4.0,
    failing=300,
    weight=1,
)
PRUNING: Final = Profile(
    "pruning",
    "lease",
    "a history so short that records are deleted all the time",
    slow=50,
    lost=30,
    every_ms=10_000,
    happenings=MappingProxyType({"pause": 6, "suspend": 2, "kill": 2, "all down": 1, "down": 1}),
    leases_ms=(600,),
    pruned=True,
    length=8.0,
    longest=4.0,
    jobs=3,
    weight=1,
)
CLAIM_STORM: Final = Profile(
    "claim-storm",
    "claim",
    "everything but crashes, on a claim backend: each won run is told of",
    happenings=MappingProxyType(
        {
            "down": 2,
            "all down": 2,
            "reject": 1,
            "pause": 2,
            "suspend": 1,
            "store step": 1,
            "host step": 2,
            "no threads": 1,
        }
    ),
    slots=(32,),
)
CLAIM_CRASHES: Final = replace(
    CLAIM_STORM,
    name="claim-crashes",
    text="everything, on a claim backend",
    happenings=_EVERYTHING,
    slots=(2, 5, 32),
)

PROFILES: Final = MappingProxyType(
    {
        profile.name: profile
        for profile in (
            STORM,
            MILD,
            HURRICANE,
            CRASHES,
            OUTAGES,
            CLOCKS,
            DEPLOYS,
            CROWD,
            PRUNING,
            CLAIM_STORM,
            CLAIM_CRASHES,
        )
    }
)
"""All profiles by name."""
