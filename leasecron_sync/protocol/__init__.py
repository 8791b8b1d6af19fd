"""The protocol: what every command to a store means. Pure: no input or output, no clock."""

from __future__ import annotations
