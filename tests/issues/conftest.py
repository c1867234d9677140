"""Trackers on the stores that need no server: memory and files."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.clock import ManualClock
from holdfast.issues.tracker import Tracker
from holdfast.store.files import FileStore
from holdfast.store.memory import MemoryStore
from holdfast.store.model import Store
from tests.issues.trackers import tracker_on


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture(params=["memory", "files"])
def store(request: pytest.FixtureRequest, scratch: Path, clock: ManualClock) -> Store:
    return MemoryStore(clock=clock) if request.param == "memory" else FileStore(scratch, clock=clock)


@pytest.fixture
def tracker(store: Store, clock: ManualClock) -> Tracker:
    tracker = tracker_on(store, clock=clock)
    assert tracker.initialise()
    return tracker
