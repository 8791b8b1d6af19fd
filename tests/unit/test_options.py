"""Options: families, types, bounds, and relations between them."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest

from leasecron_sync.model import OnOverlap
from leasecron_sync.options import (
    DAY_MS,
    OPTIONS,
    UNSET,
    JobOptions,
    OptionSpec,
    SchedulerOptions,
    check_family,
    check_name,
    job_options,
    scheduler_options,
    trust_margin_ms,
)

FAMILIES = ("lease", "claim")
BACKENDS = {"lease": "SQLiteLease", "claim": "MemoryClaim"}
LEASE_ONLY = {
    "scheduler": {"lease_ms", "heartbeat_ms", "history_ms"},
    "job": {"overlap", "max_attempts", "retry_delay_ms", "catch_up_ms", "catch_up_limit"},
}
CLAIM_ONLY = {"scheduler": {"claim_window_ms"}, "job": set[str]()}


def for_scheduler(family: str = "lease", /, **given: object) -> SchedulerOptions:
    return scheduler_options(given, family, BACKENDS[family])


def for_job(family: str = "lease", /, **given: object) -> JobOptions:
    return job_options({"name": "job", **given}, for_scheduler(family), family, BACKENDS[family])


def check(spec: OptionSpec, family: str, value: object) -> object:
    """Give one option and return what became of it."""
    if spec.on == "scheduler":
        return getattr(for_scheduler(family, **{spec.name: value}), spec.name)
    scheduler = for_scheduler(
        family, **({"history_ms": 3_660 * DAY_MS} if family == "lease" else {})
    )
    given = {"name": "job", spec.name: value}
    return getattr(job_options(given, scheduler, family, BACKENDS[family]), spec.name)


def home(spec: OptionSpec) -> str:
    return "lease" if spec.family == "both" else spec.family


# -- the table ------------------------------------------------------------------------------------


@pytest.mark.parametrize("on", ["scheduler", "job"])
def test_the_table_names_what_each_family_alone_can_keep(on: str) -> None:
    here = [spec for spec in OPTIONS if spec.on == on]
    assert {spec.name for spec in here if spec.family == "lease"} == LEASE_ONLY[on]
    assert {spec.name for spec in here if spec.family == "claim"} == CLAIM_ONLY[on]


def test_every_row_is_explained() -> None:
    for spec in OPTIONS:
        assert spec.text.endswith("."), spec.name
        assert bool(spec.instead) is (spec.family != "both"), spec.name


ONE_FAMILY = [spec for spec in OPTIONS if spec.family != "both"]


@pytest.mark.parametrize("spec", ONE_FAMILY, ids=lambda spec: spec.name)
@pytest.mark.parametrize("value", ["the default", None, 0, "nonsense", object()], ids=str)
def test_an_option_of_the_other_family_is_a_type_error_whatever_its_value(
    spec: OptionSpec, value: object
) -> None:
    other = "claim" if spec.family == "lease" else "lease"
    given = spec.default if value == "the default" else value
    with pytest.raises(TypeError) as caught:
        check(spec, other, given)
    message = str(caught.value)
    assert message.startswith(f"{spec.name} is not an option of a {spec.on} on {BACKENDS[other]}")
    assert spec.instead in message


@pytest.mark.parametrize("spec", ONE_FAMILY, ids=lambda spec: spec.name)
def test_an_option_that_is_left_out_is_no_error(spec: OptionSpec) -> None:
    for family in FAMILIES:
        check_family(spec.on, {spec.name: UNSET}, family, BACKENDS[family])
        assert check(spec, family, UNSET) is not UNSET


@pytest.mark.parametrize("spec", ONE_FAMILY, ids=lambda spec: spec.name)
def test_the_default_spelled_out_is_accepted_by_its_own_family(spec: OptionSpec) -> None:
    assert check(spec, spec.family, spec.default) == check(spec, spec.family, UNSET)


def test_unset_is_shown_by_its_name() -> None:
    assert repr(UNSET) == "UNSET"


# -- numbers --------------------------------------------------------------------------------------

NUMBERS = [spec for spec in OPTIONS if spec.low is not None]
MAY_BE_NONE = {"heartbeat_ms", "time_limit_ms"}


@pytest.mark.parametrize("spec", NUMBERS, ids=lambda spec: spec.name)
def test_a_number_out_of_bounds_is_a_value_error_that_names_both(spec: OptionSpec) -> None:
    assert spec.low is not None
    assert spec.high is not None
    for wrong in (spec.low - 1, spec.high + 1, -(10**20)):
        with pytest.raises(ValueError, match=spec.name) as caught:
            check(spec, home(spec), wrong)
        message = str(caught.value)
        assert f"from {spec.low:,} to {spec.high:,}, not {wrong:,}" in message


@pytest.mark.parametrize("spec", NUMBERS, ids=lambda spec: spec.name)
def test_both_ends_of_the_bounds_are_accepted(spec: OptionSpec) -> None:
    assert spec.low is not None
    assert spec.high is not None
    if spec.name == "heartbeat_ms":  # see the relation below
        assert for_scheduler(heartbeat_ms=spec.low).heartbeat_ms == spec.low
        options = for_scheduler(lease_ms=spec.high, heartbeat_ms=spec.high // 2)
        assert options.heartbeat_ms == spec.high // 2
        return
    if spec.name == "history_ms":
        scheduler = for_scheduler(history_ms=spec.low, lease_ms=500)
        assert scheduler.history_ms == spec.low
        assert for_scheduler(history_ms=spec.high).history_ms == spec.high
        return
    for value in (spec.low, spec.high):
        assert check(spec, home(spec), value) == value


@pytest.mark.parametrize("spec", NUMBERS, ids=lambda spec: spec.name)
@pytest.mark.parametrize("wrong", [True, False, 5_000.0, "5000", b"5000", None, [5_000]], ids=repr)
def test_what_is_no_whole_number_is_a_type_error(spec: OptionSpec, wrong: object) -> None:
    if wrong is None and spec.name in MAY_BE_NONE:
        check(spec, home(spec), None)
        return
    with pytest.raises(TypeError, match=f"{spec.name} must be a whole number"):
        check(spec, home(spec), wrong)


# -- relations ------------------------------------------------------------------------------------


def test_defaults_of_a_scheduler() -> None:
    assert for_scheduler() == SchedulerOptions(
        namespace="default",
        timezone="UTC",
        max_concurrent_runs=32,
        around_run=None,
        claim_window_ms=60_000,
        lease_ms=15_000,
        heartbeat_ms=5_000,
        history_ms=7 * DAY_MS,
        call_timeout_ms=5_000,
    )


def test_defaults_of_a_job() -> None:
    assert for_job() == JobOptions(
        name="job",
        timezone="UTC",
        jitter_ms=0,
        time_limit_ms=None,
        overlap=False,
        max_attempts=3,
        retry_delay_ms=1_000,
        catch_up_ms=60_000,
        catch_up_limit=100,
    )


@pytest.mark.parametrize(
    ("lease_ms", "timeout_ms"),
    [(500, 166), (3_000, 1_000), (15_000, 5_000), (15_003, 5_000), (DAY_MS, 5_000)],
)
def test_call_1_a_call_may_take_a_third_of_a_lease_at_most_5_seconds(
    lease_ms: int, timeout_ms: int
) -> None:
    options = for_scheduler(lease_ms=lease_ms)
    assert options.call_timeout_ms == timeout_ms
    assert options.heartbeat_ms == lease_ms // 3


def test_call_1_on_a_claim_backend_it_is_5_seconds() -> None:
    assert for_scheduler("claim").call_timeout_ms == 5_000
    assert for_scheduler("claim", claim_window_ms=1_000).call_timeout_ms == 5_000


@pytest.mark.parametrize(
    ("lease_ms", "margin_ms"), [(500, 50), (509, 50), (1_000, 100), (15_000, 1_500)]
)
def test_trust_2_the_margin_is_a_tenth_of_a_lease_at_least_50(
    lease_ms: int, margin_ms: int
) -> None:
    assert trust_margin_ms(lease_ms) == margin_ms
    assert for_scheduler(lease_ms=lease_ms).margin_ms == margin_ms


@pytest.mark.parametrize("lease_ms", [500, 3_000, 15_000, 60_000, DAY_MS])
def test_trust_10_impossible_pairs_of_times_are_refused(lease_ms: int) -> None:
    timeout_ms = min(5_000, lease_ms // 3)
    margin_ms = max(50, lease_ms // 10)
    longest = lease_ms - margin_ms - timeout_ms - 1
    assert for_scheduler(lease_ms=lease_ms, heartbeat_ms=longest).heartbeat_ms == longest
    with pytest.raises(ValueError, match=f"heartbeat_ms={longest + 1} .*lease_ms={lease_ms}") as it:
        for_scheduler(lease_ms=lease_ms, heartbeat_ms=longest + 1)
    assert f"use at most {longest}," in str(it.value)


def test_trust_10_every_lease_has_a_heartbeat_by_default() -> None:
    for lease_ms in (500, 501, 502, 749, 14_999, 15_000, 15_001, DAY_MS):
        options = for_scheduler(lease_ms=lease_ms)
        assert options.heartbeat_ms + options.call_timeout_ms < lease_ms - options.margin_ms


def test_trust_10_says_nothing_about_a_claim_backend() -> None:
    assert for_scheduler("claim").heartbeat_ms == 5_000


@pytest.mark.parametrize(
    ("catch_up_ms", "takeover_ms"), [(0, 150_000), (150_000, 150_000), (150_001, 150_001)]
)
def test_claim_4_the_takeover_window_is_the_catch_up_or_ten_leases(
    catch_up_ms: int, takeover_ms: int
) -> None:
    assert for_scheduler(lease_ms=15_000).takeover_ms(catch_up_ms) == takeover_ms


@pytest.mark.parametrize(("catch_up_ms", "least"), [(60_000, 210_000), (DAY_MS, 2 * DAY_MS)])
def test_prune_4_a_history_shorter_than_catch_up_and_takeover_is_refused(
    catch_up_ms: int, least: int
) -> None:
    def give(history_ms: int) -> JobOptions:
        scheduler = for_scheduler(history_ms=history_ms)
        return job_options(
            {"name": "job", "catch_up_ms": catch_up_ms}, scheduler, "lease", "SQLiteLease"
        )

    assert give(least).catch_up_ms == catch_up_ms
    with pytest.raises(
        ValueError, match=f"history_ms={least - 1} .*catch_up_ms={catch_up_ms}"
    ) as it:
        give(least - 1)
    assert str(it.value).endswith(f"at least {least}")


def test_prune_4_says_nothing_about_a_claim_backend() -> None:
    assert for_job("claim").name == "job"


# -- names, zones, and the rest -------------------------------------------------------------------


@pytest.mark.parametrize("name", ["x", "x" * 200, "\U0001f989" * 200, "a b\nc", "a:b/c", "'\"\\"])
def test_a_name_may_hold_any_characters(name: str) -> None:
    assert check_name("name", name) == name
    assert for_job(name=name).name == name
    assert for_scheduler(namespace=name).namespace == name


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("", "1 to 200 characters, this one has 0"),
        ("x" * 201, "1 to 200 characters, this one has 201"),
        ("a\0b", "NUL"),
        ("\ud800", "UTF-8"),
    ],
)
def test_a_name_that_no_store_can_keep_is_refused(name: str, text: str) -> None:
    with pytest.raises(ValueError, match=f"^namespace .*{text}"):
        for_scheduler(namespace=name)
    with pytest.raises(ValueError, match=f"^name .*{text}"):
        for_job(name=name)


@pytest.mark.parametrize("name", [None, 5, b"job", ["job"]])
def test_a_name_must_be_text(name: object) -> None:
    with pytest.raises(TypeError, match="namespace must be text"):
        for_scheduler(namespace=name)
    with pytest.raises(TypeError, match="name must be text"):
        for_job(name=name)


def test_a_job_has_the_zone_of_its_scheduler_unless_it_names_one() -> None:
    scheduler = for_scheduler(timezone="Europe/Athens")
    given: dict[str, object] = {"name": "job"}
    assert job_options(given, scheduler, "lease", "X").timezone == "Europe/Athens"
    given["timezone"] = "Asia/Tokyo"
    assert job_options(given, scheduler, "lease", "X").timezone == "Asia/Tokyo"


@pytest.mark.parametrize("zone", [5, b"UTC", object()])
def test_a_zone_must_be_text(zone: object) -> None:
    with pytest.raises(TypeError, match="timezone must be the name of an IANA zone"):
        for_scheduler(timezone=zone)
    with pytest.raises(TypeError, match="timezone must be the name of an IANA zone"):
        for_job(timezone=zone)


def test_a_scheduler_needs_a_zone() -> None:
    with pytest.raises(TypeError, match="timezone"):
        for_scheduler(timezone=None)


@pytest.mark.parametrize(
    ("given", "overlap", "late"),
    [("skip", False, OnOverlap.DEFER), ("allow", True, OnOverlap.ALLOW)],
)
def test_overlap_is_skip_or_allow(given: str, late: OnOverlap, *, overlap: bool) -> None:
    options = for_job(overlap=given)
    assert (options.overlap, options.late_overlap) == (overlap, late)


@pytest.mark.parametrize("wrong", ["defer", "Skip", "", None, True, 1, ["skip"]])
def test_any_other_overlap_is_a_value_error(wrong: object) -> None:
    with pytest.raises(ValueError, match='overlap must be "skip" or "allow"'):
        for_job(overlap=wrong)


def test_nothing_can_be_held_against_another_run_on_a_claim_backend() -> None:
    assert for_job("claim").overlap


def test_around_run_must_be_callable() -> None:
    def around(_run: Any) -> nullcontext[None]:  # noqa: ANN401 - a run of either family
        return nullcontext()

    assert for_scheduler(around_run=around).around_run is around
    with pytest.raises(TypeError, match="around_run must be callable"):
        for_scheduler(around_run=nullcontext())


def test_a_number_of_thousands_of_digits_is_refused_in_one_short_line() -> None:
    """Python does not write such a number out, and raises an error of its own instead."""
    with pytest.raises(ValueError, match="lease_ms must be from 500 to ") as caught:
        scheduler_options({"lease_ms": 10**5_000}, "lease", BACKENDS["lease"])
    assert len(str(caught.value)) < 100
