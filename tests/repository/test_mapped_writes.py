"""A write through a mapping that leaves no trace in the times of its file is kept before anything replaces it."""

from __future__ import annotations

import mmap
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from holdfast.repository.context import Proof
from holdfast.repository.repository import Repository
from holdfast.repository.restore import RestoreOptions, restore_in_place
from holdfast.repository.snapshots import snapshot
from proof.interpose import Attempt, interposed
from tests.repository.stages import files_in, files_kept, make_repository, put_files

pytestmark = [
    pytest.mark.skipif(sys.platform == "win32", reason="directories cannot be exchanged"),
    pytest.mark.usefixtures("memory_as_memory"),
]

EARLIER = {"data": "1", "other": "text"}


class Site:
    """A worktree whose file was written to through a mapping while a snapshot was taken, and then no more."""

    def __init__(self, root: Path) -> None:
        self.repository: Repository = make_repository(root)
        self.context = self.repository.context
        self.repository.worktrees.create("dev")
        self.proof = self._lease()
        path = self.repository.path("dev")
        put_files(path, EARLIER)
        self.first = snapshot(self.context, "dev", self.proof).snapshot_id
        with (path / "data").open("r+b") as file, mmap.mmap(file.fileno(), 0) as mapping:
            mapping[:1] = b"2"
            time.sleep(0.03)  # it is not recent

            def write_before(attempt: Attempt) -> Any:
                mapping[:1] = b"%d" % (int(mapping[:1]) + 1)
                return attempt.perform()

            with interposed(write_before, ("sync_filesystem",)):  # after the file is read, too
                snapshot(self.context, "dev", self.proof)
        self.last = files_in(path)

    def _lease(self) -> Proof:
        lease = self.repository.leases.acquire("dev", self.repository.leases.request(ttl=3600.0)).lease
        return Proof(lease.lock_id, lease.fencing_token)

    def saved(self, snapshot_id: str | None) -> dict[str, str]:
        found = snapshot_id or self.context.config("dev").head_snapshot_id
        assert found is not None
        return files_kept(self.context.paths.tree(found))


@pytest.fixture(params=["memory", "disk"])
def site(request: pytest.FixtureRequest, scratch: Path, tmp_path: Path) -> Site:
    return Site((scratch if request.param == "memory" else tmp_path) / "repository")


def test_status_shows_it_and_the_next_snapshot_has_it(site: Site) -> None:
    shown = {each.path for each in site.repository.snapshots.status("dev").changes}
    assert site.saved(None) == site.last or shown == {b"data"}
    assert site.saved(snapshot(site.context, "dev", site.proof).snapshot_id) == site.last


def test_a_restore_in_place_keeps_it(site: Site) -> None:
    restored = restore_in_place(site.context, "dev", site.first, site.proof, RestoreOptions("tested"))
    assert restored.published is not None
    assert site.saved(restored.published.parent_id) == site.last
    assert (site.repository.path("dev") / "data").read_text() == EARLIER["data"]


def test_removing_the_worktree_keeps_it(site: Site) -> None:
    head = site.context.config("dev").head_snapshot_id
    removed = site.repository.remove_worktree("dev", lock_id=site.proof.lock_id)
    assert site.saved(removed.saved or head) == site.last
