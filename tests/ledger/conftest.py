"""The fixtures of the tests of the ledger."""

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
    """Whatever a test has opened is closed behind it."""
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
    """Either store, with a clock that stands still."""
    if request.param == "memory":
        return MemoryStore(clock=clock)
    return FileStore(scratch, timeout=PATIENCE, clock=clock)


@pytest.fixture
def ledger(store: Store, scratch: Path) -> Ledger:
    return Ledger(store, checkpoint_root=scratch)
