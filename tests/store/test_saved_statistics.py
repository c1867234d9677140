"""Every process adds its commits, conflicts and waits to the record of its machine, and metrics sum the records."""

from __future__ import annotations

import fcntl
import os
import sys
from pathlib import Path

import pytest

from holdfast.repository.init import initialise
from holdfast.repository.metrics import measure
from holdfast.repository.repository import Repository
from holdfast.store import open as stores
from holdfast.store.layout import CHECKPOINTS
from holdfast.store.model import CommitStatistics
from holdfast.store.open import configure_store, open_store, save_statistics, saved_statistics
from holdfast.testing.backend import INDEX, increment, number_of
from tests.cli.commands import holdfast
from tests.locks.workers import Line, Workers

if sys.platform == "win32":
    pytest.skip("a directory cannot be locked on Windows", allow_module_level=True)


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the counts of other tests in this process."""
    monkeypatch.setattr(stores, "_live", {})
    monkeypatch.setattr(stores, "_new", {})


@pytest.fixture
def root(tmp_path: Path, store_url: str) -> Path:
    (tmp_path / "root").mkdir()
    if not store_url.startswith("file:"):
        configure_store(tmp_path / "root", store_url)
    return tmp_path / "root"


def commit(root: Path, times: int) -> None:
    store = open_store(root)
    for _ in range(times):
        increment(store, INDEX)
    store.close()


def test_processes_add_up(root: Path) -> None:
    def work(line: Line) -> None:
        commit(root, 3)
        save_statistics()
        line.say("saved")

    with Workers() as workers:
        for _ in range(4):
            assert workers.start(work).hear() == "saved"
    assert saved_statistics(root).commits == 12


def test_a_fork_does_not_count_what_its_parent_has_counted(root: Path) -> None:
    store = open_store(root)
    increment(store, INDEX)

    def work(line: Line) -> None:
        save_statistics()
        line.say("saved")

    with Workers() as workers:
        assert workers.start(work).hear() == "saved"
    assert saved_statistics(root).commits == 0
    save_statistics()
    assert saved_statistics(root).commits == 1
    store.close()


def test_counts_of_a_store_that_is_gone_are_saved_once(root: Path) -> None:
    commit(root, 2)
    save_statistics()
    save_statistics()
    assert saved_statistics(root) == CommitStatistics(commits=2)
    assert stores._live == {}
    commit(root, 1)
    save_statistics()
    assert saved_statistics(root) == CommitStatistics(commits=3)


def test_a_process_that_only_reads_writes_nothing(root: Path) -> None:
    commit(root, 1)
    save_statistics()
    before = [(each, each.stat().st_mtime_ns) for each in sorted((root / CHECKPOINTS).rglob("*"))]
    store = open_store(root)
    assert number_of(store, INDEX) == 1
    save_statistics()
    store.close()
    assert [(each, each.stat().st_mtime_ns) for each in sorted((root / CHECKPOINTS).rglob("*"))] == before


def test_counts_wait_while_the_record_is_locked(tmp_path: Path) -> None:
    commit(tmp_path, 1)
    save_statistics()
    held = os.open(tmp_path / CHECKPOINTS, os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    commit(tmp_path, 2)
    save_statistics()
    assert saved_statistics(tmp_path).commits == 1
    os.close(held)
    save_statistics()
    assert saved_statistics(tmp_path).commits == 3


@pytest.mark.parametrize("content", [b"", b"[1,2", b"[-1,0,0,0.0]", b'["a",0,0,0.0]', b"[1]" * 5000])
def test_a_damaged_record_counts_as_empty(tmp_path: Path, content: bytes) -> None:
    commit(tmp_path, 1)
    save_statistics()
    (record,) = (tmp_path / CHECKPOINTS).iterdir()
    record.write_bytes(content)
    assert saved_statistics(tmp_path).commits == 0
    commit(tmp_path, 1)
    save_statistics()
    assert saved_statistics(tmp_path).commits == 1


def test_a_link_in_place_of_the_record_or_its_directory_is_not_followed(tmp_path: Path) -> None:
    root, other = tmp_path / "root", tmp_path / "other"
    root.mkdir()
    other.write_text("precious")
    commit(root, 1)
    save_statistics()
    (record,) = (root / CHECKPOINTS).iterdir()
    record.unlink()
    record.symlink_to(other)
    commit(root, 1)
    save_statistics()
    assert other.read_text() == "precious"
    record.unlink()
    (root / CHECKPOINTS).rmdir()
    (root / CHECKPOINTS).symlink_to(tmp_path)
    commit(root, 1)
    save_statistics()
    assert sorted(each.name for each in tmp_path.iterdir()) == ["other", "root"]


def test_metrics_sum_what_commands_and_other_machines_have_counted(tmp_path: Path) -> None:
    root = tmp_path / "repository"
    initialise(root)
    assert holdfast("issue", "init", "--repo", root).returncode == 0

    def commits() -> float:
        with Repository(root, to_examine=True) as repository:
            (found,) = (each for each in measure(repository) if each.name == "holdfast_commits_total")
        return found.samples[0].value

    before = commits()
    assert holdfast("issue", "create", "one", "--repo", root).returncode == 0
    once = commits()
    assert once > before
    assert holdfast("issue", "list", "--repo", root).returncode == 0
    assert holdfast("history", "--repo", root).returncode == 0
    assert commits() == once
    (root / CHECKPOINTS / "statistics-another").write_text("[100,0,0,0.0]")
    assert commits() == once + 100
