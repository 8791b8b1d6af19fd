"""Whether this version can use the records of a store."""

from __future__ import annotations

from leasecron_sync.doctor.finding import Findings
from leasecron_sync.errors import StoreRejected
from leasecron_sync.model import STORE_FORMAT


def tell_format(findings: Findings, found: str) -> None:
    """Tell whether this version can use a store.

    Args:
        findings: Where findings go.
        found: Number of its format.

    Raises:
        StoreRejected: It has none.
    """
    if found == str(STORE_FORMAT):
        findings.ok("format", f"store format {found}, the one of this version")
        return
    if not found:
        message = "the store does not say which format it has"
        raise StoreRejected(message)
    findings.problem(
        "format",
        f"the store has format {found}, this version reads {STORE_FORMAT}",
        "This version refuses to start on it, so that it damages nothing.",
        "Install the version of leasecron_sync that the other instances have.",
    )
