"""How errors show what a user gave."""

from __future__ import annotations

MAX_SHOWN = 100
"""Characters of a value that an error shows; a log is not to be filled by one mistake."""


def shown(value: object) -> str:
    """Return the text of a value for an error, shortened when it is long.

    Args:
        value: What a user gave.
    """
    try:
        text = repr(value)
    except ValueError:  # Python does not write out a number of thousands of digits
        return f"a {type(value).__name__} that is too long to be shown"
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."
