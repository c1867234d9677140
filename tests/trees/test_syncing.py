"""A large tree is synced early, and the errors of that sync are not lost."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import pytest

from holdfast.errors import IoFailure
from holdfast.fs import calls
from holdfast.trees.capture import capture
from holdfast.trees.engines import Engine
from holdfast.trees.manifest import READY
from holdfast.trees.payload import EarlySync
from holdfast.trees.verify import verify
from holdfast.trees.walker import synced


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("holdfast.trees.capture._WORTH_SYNCING_EARLY", 3)
    for number in range(4):
        (tmp_path / f"source/d{number}").mkdir(parents=True)
        (tmp_path / f"source/d{number}/f").write_text("content")
    return tmp_path / "source"


def test_many_directories_are_synced_before_the_tree_is_complete(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sync, seen = calls.sync_filesystem, list[tuple[bool, bool]]()

    def noted(descriptor: int) -> None:
        sync(descriptor)
        is_other = threading.current_thread() is not threading.main_thread()
        seen.append((is_other, (tmp_path / "tree" / READY).exists()))

    monkeypatch.setattr(calls, "sync_filesystem", noted)
    captured = capture(source, tmp_path / "tree", engine=Engine.LINKED, quiesced=True)

    assert seen == [(True, False)]
    assert list(verify(tmp_path / "tree", captured.payload_hash)) == []


def test_few_directories_are_not_synced_early(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.trees.capture._WORTH_SYNCING_EARLY", 6)
    monkeypatch.setattr(calls, "sync_filesystem", lambda _: pytest.fail("it was synced"))
    capture(source, tmp_path / "tree", engine=Engine.LINKED, quiesced=True)


def test_a_disk_error_fails_the_capture(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system reports it once: a later sync would succeed."""
    told: list[int] = []

    def broken(_: int) -> None:
        if not told:
            told.append(errno.EIO)
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(calls, "sync_filesystem", broken)
    with pytest.raises(IoFailure, match="sync"):
        capture(source, tmp_path / "tree", engine=Engine.LINKED, quiesced=True)
    assert told
    assert not (tmp_path / "tree" / READY).exists()


def test_without_a_thread_the_sync_is_left_to_the_end(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        assert EarlySync.start(tmp_path) is None
        captured = capture(source, tmp_path / "tree", engine=Engine.LINKED, quiesced=True)
    assert list(verify(tmp_path / "tree", captured.payload_hash)) == []


def test_a_failed_capture_waits_for_the_early_sync(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, ended = threading.Event(), threading.Event()

    def slow(_: int) -> None:
        begun.set()
        threading.Event().wait(0.1)
        ended.set()

    def full(*_: object) -> str:
        assert begun.wait(60)
        raise IoFailure("write", "manifest", OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))

    monkeypatch.setattr(calls, "sync_filesystem", slow)
    monkeypatch.setattr("holdfast.trees.capture.write_manifest", full)
    with pytest.raises(IoFailure, match="manifest"):
        capture(source, tmp_path / "tree", engine=Engine.LINKED, quiesced=True)
    assert ended.is_set()


def test_the_synced_descriptor_is_opened_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system reports an error to every descriptor that was open before it happened."""
    opened, synced_by = list[int](), list[int]()
    open_, sync = calls.open_without_links, calls.sync_filesystem

    def opening(path: str) -> int:
        descriptor = open_(path)
        opened.append(descriptor)
        return descriptor

    def syncing(descriptor: int) -> None:
        synced_by.append(descriptor)
        sync(descriptor)

    monkeypatch.setattr(calls, "open_without_links", opening)
    monkeypatch.setattr(calls, "sync_filesystem", syncing)
    with synced(tmp_path):
        before = list(opened)
        (tmp_path / "written").write_text("content")
        assert not synced_by
    assert len(synced_by) == 1
    assert synced_by[0] in before


def test_a_failed_block_is_not_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "sync_filesystem", lambda _: pytest.fail("it was synced"))
    with pytest.raises(ZeroDivisionError), synced(tmp_path):
        raise ZeroDivisionError
