"""The suites and ``docs/protocol.rst`` name the same rules."""

from __future__ import annotations

import re
from pathlib import Path

from leasecron_sync.testing.conformance import ClaimConformance, LeaseConformance

PROTOCOL = Path(__file__).parents[2] / "docs" / "protocol.rst"

# Rules about what an instance does; no store can show whether they are kept.
OF_THE_INSTANCE = {
    *("CLOCK-6", "CALL-7", "SETTLE-6", "CLAIM-10", "OVERLAP-6", "OVERLAP-7", "PRUNE-4"),
    *("HANDOVER-2", "HANDOVER-4"),
}
GROUPS_OF_THE_INSTANCE = {"TRUST", "ORDER", "CATCHUP", "LIMIT"}

RULE = re.compile(r"\b([A-Z]{3,})-(\d+)\b")
SPAN = re.compile(r"\b([A-Z]{3,})-(\d+) to \1-(\d+)\b")


def rules() -> set[str]:
    text = PROTOCOL.read_text(encoding="utf-8")
    return {f"{group}-{number}" for group, number in re.findall(r"(?m)^([A-Z]+)-(\d+):", text)}


def cases() -> dict[str, str]:
    return {
        f"{suite.__name__}.{name}": getattr(suite, name).__doc__ or ""
        for suite in (LeaseConformance, ClaimConformance)
        for name in dir(suite)
        if name.startswith("test_")
    }


def named(docstring: str) -> set[str]:
    found = {f"{group}-{number}" for group, number in RULE.findall(docstring)}
    for group, first, last in SPAN.findall(docstring):
        found |= {f"{group}-{number}" for number in range(int(first), int(last))}
    return found


def test_every_case_says_which_rule_it_is_about() -> None:
    silent = [
        case
        for case, docstring in cases().items()
        if not named(docstring) and not re.match(r"(Line|Section) \d", docstring)
    ]
    assert silent == []


def test_no_case_names_a_rule_that_does_not_exist() -> None:
    every = {rule for docstring in cases().values() for rule in named(docstring)}
    assert every - rules() == set()


def test_every_rule_that_a_store_can_show_has_a_case() -> None:
    every = {rule for docstring in cases().values() for rule in named(docstring)}
    missing = {
        rule
        for rule in rules() - every - OF_THE_INSTANCE
        if rule.partition("-")[0] not in GROUPS_OF_THE_INSTANCE
    }
    assert missing == set()
