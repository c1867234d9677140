"""Fixtures shared by the lock tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.locks.workers import Workers


@pytest.fixture
def workers() -> Iterator[Workers]:
    """Worker processes, killed at the end of the test."""
    with Workers() as started:
        yield started
