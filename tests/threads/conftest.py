from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.threads.leftovers import nothing_left


@pytest.fixture(autouse=True)
def _nothing_left() -> Iterator[None]:
    with nothing_left():
        yield
