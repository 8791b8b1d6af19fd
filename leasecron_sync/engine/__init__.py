"""The engine: steps that do one round of work, and the threads around them. Private."""

from __future__ import annotations
