"""A live overview follows what other processes do, on every store, and says so when it cannot."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from holdfast.errors import StoreUnavailable
from holdfast.repository import live
from holdfast.repository.live import LiveOverview, LiveView
from holdfast.repository.overview import Overview, look_around
from tests.cli.commands import PATIENCE, holdfast


class Watcher:
    """A live overview; `until` waits for a view without looking at the store itself."""

    def __init__(self, root: Path) -> None:
        self._told = threading.Condition()
        self.unreadable = threading.Event()

        def look() -> Overview:
            if self.unreadable.is_set():
                raise StoreUnavailable("etcd://nowhere/x", "no answer")
            return look_around(root)

        self.live = LiveOverview(look, self._tell)
        self.live.start()

    def _tell(self) -> None:
        with self._told:
            self._told.notify_all()

    def until(self, condition: Callable[[LiveView], object]) -> LiveView:
        with self._told:
            found = self._told.wait_for(lambda: self.live.view and condition(self.live.view), PATIENCE)
        assert found, self.live.view
        assert self.live.view is not None
        return self.live.view


@contextmanager
def following(root: Path) -> Iterator[Watcher]:
    watcher = Watcher(root)
    try:
        yield watcher
    finally:
        watcher.live.close()


def actors(view: LiveView) -> list[str]:
    return [] if view.situation is None else [each.actor for each in view.situation.overview.agents]


def kinds(view: LiveView) -> list[str]:
    return [] if view.situation is None else [each.kind for each in view.situation.overview.holdings]


@pytest.mark.sampled(1)
def test_leases_and_claims_of_other_processes_are_followed(tmp_path: Path, store_url: str) -> None:
    root = tmp_path / "root"
    assert holdfast("init", root, "--store", store_url).returncode == 0
    assert holdfast("issue", "init", "--repo", root).returncode == 0
    issue = holdfast("issue", "create", "Parse", "--field", "id", "--repo", root).stdout.strip()
    with following(root) as watcher:
        watcher.until(lambda view: view.situation and view.situation.issues)
        holdfast("lease", "acquire", "--repo", root, env={"HOLDFAST_ACTOR": "agent:a"})
        watcher.until(lambda view: actors(view) == ["agent:a"])
        holdfast("issue", "claim", issue, "--actor", "agent:b", "--repo", root)
        view = watcher.until(lambda view: "issue" in kinds(view))
    assert view.failure is None


def test_a_failure_is_told_and_ends_by_itself_while_what_was_read_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "_DETAILS", 0.2)  # also the time until it tries again
    root = tmp_path / "root"
    assert holdfast("init", root).returncode == 0
    with following(root) as watcher:
        watcher.until(lambda view: view.situation)
        watcher.unreadable.set()
        watcher.live.refresh()
        view = watcher.until(lambda view: view.failure)
        assert view.situation is not None
        watcher.unreadable.clear()
        watcher.until(lambda view: view.failure is None)
