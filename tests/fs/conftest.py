"""What the tests of the file system share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.locks.workers import Workers


@pytest.fixture
def workers() -> Iterator[Workers]:
    """Other processes, which end with the test."""
    with Workers() as started:
        yield started
