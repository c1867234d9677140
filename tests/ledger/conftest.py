"""Fixtures of the ledger tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.clock import ManualClock
from holdfast.ledger.log import Ledger
from holdfast.store.files import FileStore
from holdfast.store.memory import MemoryStore
from holdfast.store.model import Store
from tests.ledger.ledgers import PATIENCE, close_all
from tests.locks.workers import Workers


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    """Close every store that a test has opened."""
    yield
    close_all()


@pytest.fixture
def workers() -> Iterator[Workers]:
    with Workers() as started:
        yield started


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture(params=["files", "memory"])
def store(request: pytest.FixtureRequest, scratch: Path, clock: ManualClock) -> Store:
    """Each store in turn, with a manual clock."""
    if request.param == "memory":
        return MemoryStore(clock=clock)
    return FileStore(scratch, timeout=PATIENCE, clock=clock)


@pytest.fixture
def ledger(store: Store, scratch: Path) -> Ledger:
    return Ledger(store, checkpoint_root=scratch)
