"""What the backends of a family cannot keep is refused at once, on each of them."""

from __future__ import annotations

from typing import Any

import pytest

from leasecron_sync import Scheduler, connect
from leasecron_sync.options import OPTIONS, OptionSpec

CLAIMS = {
    "memory": "",
    "rabbitmq": "amqp://localhost:1",
    "nats": "nats://localhost:1",
    "redis script": "redis://localhost:1?strategy=script",
    "redis stream-id": "redis://localhost:1?strategy=stream-id",
    "redis idmp": "redis://localhost:1?strategy=idmp",
}
LEASES = {
    "memory": "memory://refusals",
    "sqlite": "sqlite:///refusals.db",
    "postgres": "postgresql://localhost:1/x",
    "redis": "redis://localhost:1",
}


MAKE: Any = Scheduler
"""Without its types, which refuse the same."""


def of_family(family: str, on: str) -> list[OptionSpec]:
    return [spec for spec in OPTIONS if spec.family == family and spec.on == on]


def values_of(spec: OptionSpec) -> list[object]:
    """Return values that would be right on the other family, the default among them."""
    return [spec.default, spec.low if spec.low is not None else spec.default]


def claim_backend(url: str) -> Any:  # noqa: ANN401 - of several kinds
    from leasecron_sync.testing import MemoryClaim

    return connect(url) if url else MemoryClaim()


@pytest.fixture(autouse=True)
def nothing_is_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    def opened(*_arguments: object) -> None:
        pytest.fail("a backend was opened")

    for url in (*CLAIMS.values(), *LEASES.values()):
        monkeypatch.setattr(type(claim_backend(url)), "open", opened)


@pytest.mark.parametrize("url", CLAIMS.values(), ids=list(CLAIMS))
@pytest.mark.parametrize("spec", of_family("lease", "scheduler"), ids=lambda spec: spec.name)
def test_a_lease_option_of_a_scheduler_is_refused_on_every_claim_backend(
    spec: OptionSpec, url: str
) -> None:
    for value in values_of(spec):
        for backend in filter(None, (url, claim_backend(url))):
            options: dict[str, Any] = {spec.name: value}
            with pytest.raises(TypeError, match=f"{spec.name} is not an option of a scheduler on"):
                Scheduler(backend, **options)


@pytest.mark.parametrize("url", CLAIMS.values(), ids=list(CLAIMS))
@pytest.mark.parametrize("spec", of_family("lease", "job"), ids=lambda spec: spec.name)
def test_a_lease_option_of_a_job_is_refused_on_every_claim_backend(
    spec: OptionSpec, url: str
) -> None:
    for backend in filter(None, (url, claim_backend(url))):
        scheduler: Any = Scheduler(backend)
        for value in values_of(spec):
            options: dict[str, Any] = {"name": "job", spec.name: value}
            text = f"{spec.name} is not an option of a job on {type(scheduler.backend).__name__}"
            with pytest.raises(TypeError, match=text):
                scheduler.add_job(print, "* * * * *", **options)
            with pytest.raises(TypeError, match=text):
                scheduler.job("* * * * *", **options)
        assert not scheduler.next_runs()


@pytest.mark.parametrize("url", LEASES.values(), ids=list(LEASES))
def test_a_claim_option_is_refused_on_every_lease_backend(url: str) -> None:
    for backend in (url, connect(url)):
        with pytest.raises(TypeError, match="claim_window_ms is not an option of a scheduler on"):
            MAKE(backend, claim_window_ms=60_000)


@pytest.mark.parametrize("url", CLAIMS.values(), ids=list(CLAIMS))
def test_there_is_no_history_on_a_claim_backend(url: str) -> None:
    scheduler: Any = Scheduler(claim_backend(url))
    with pytest.raises(TypeError, match=r"history.*lease"):
        scheduler.history()


@pytest.mark.parametrize("url", ["amqp://localhost:1", "redis://localhost:1?strategy=idmp"])
def test_a_window_that_the_mechanism_cannot_keep_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match=r"claim_window_ms=300001 is longer than .* 300"):
        MAKE(connect(url), claim_window_ms=300_001)
