"""Names for authors of backends."""

from __future__ import annotations

from leasecron_sync.backends.base import (
    Backend,
    BackendSettings,
    ClaimBackend,
    LeaseBackend,
)

__all__ = ["Backend", "BackendSettings", "ClaimBackend", "LeaseBackend"]
