"""Fixtures shared by the file system tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.locks.workers import Workers


@pytest.fixture
def workers() -> Iterator[Workers]:
    """Worker processes that end with the test."""
    with Workers() as started:
        yield started
