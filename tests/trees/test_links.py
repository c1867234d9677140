"""Unchanged files in changed directories: linked, or copied where no link is possible."""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path
from typing import Any

import pytest

from holdfast.errors import ConsistencyUnavailable, IoFailure
from holdfast.fs import calls
from holdfast.trees import capture as capturing
from holdfast.trees.capture import capture
from holdfast.trees.capture_files import FileCapture, OpenDirectory
from holdfast.trees.engines import Engine
from holdfast.trees.manifest import PAYLOAD, READY
from holdfast.trees.restore import materialise
from holdfast.trees.results import Captured
from holdfast.trees.verify import verify
from tests.trees.groves import seen

DIRECTORIES, FILES = 12, 6


class Trees:
    """A source with a change in every directory since its first capture."""

    def __init__(self, top: Path) -> None:
        self.top, self.source = top, top / "source"
        for number in range(DIRECTORIES):
            (self.source / f"d{number}").mkdir(parents=True)
            for name in range(FILES):
                (self.source / f"d{number}/f{name}").write_text(f"{number} {name}")
        time.sleep(0.05)
        self.first, _ = self.take(1)
        for number in range(DIRECTORIES):
            (self.source / f"d{number}/f0").write_text("changed")
        time.sleep(0.05)

    def take(self, number: int) -> tuple[Path, Captured]:
        tree, base = self.top / f"tree-{number}", self.top / f"tree-{number - 1}"
        return tree, capture(
            self.source,
            tree,
            engine=Engine.LINKED,
            base=base if number > 1 else None,
            cache=self.top / "cache",
            quiesced=True,
        )

    def require_linked(self, tree: Path, captured: Captured) -> None:
        """Every unchanged file is the same inode in both trees."""
        assert list(verify(tree, captured.payload_hash)) == []
        for number in range(DIRECTORIES):
            for name in range(1, FILES):
                path = f"{PAYLOAD}/d{number}/f{name}"
                assert (tree / path).stat().st_ino == (self.first / path).stat().st_ino, path
            directory = tree / PAYLOAD / f"d{number}"
            assert directory.stat().st_mtime_ns == (self.source / f"d{number}").stat().st_mtime_ns


@pytest.fixture
def trees(tmp_path: Path) -> Trees:
    return Trees(tmp_path)


def test_unchanged_files_are_linked(trees: Trees) -> None:
    trees.require_linked(*trees.take(2))


def test_files_that_cannot_be_linked_are_copied(trees: Trees, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any, **__: Any) -> None:
        raise OSError(errno.EMLINK, os.strerror(errno.EMLINK))

    monkeypatch.setattr(calls, "link", refused)
    tree, captured = trees.take(2)

    assert list(verify(tree, captured.payload_hash)) == []
    materialise(tree, trees.top / "restored")
    assert seen(trees.top / "restored") == seen(trees.source)
    assert (tree / PAYLOAD / "d1/f1").stat().st_nlink == 1


def test_a_file_missing_from_the_base_is_copied_from_the_source(trees: Trees) -> None:
    (trees.first / PAYLOAD / "d3/f3").unlink()
    tree, captured = trees.take(2)
    assert list(verify(tree, captured.payload_hash)) == []


def test_a_file_missing_from_the_base_that_changes_meanwhile_fails_the_capture(
    trees: Trees, monkeypatch: pytest.MonkeyPatch
) -> None:
    (trees.first / PAYLOAD / "d3/f3").unlink()
    monkeypatch.setattr(capturing, "_SAMPLED_FILES", 0)  # the sample would find it
    copy = FileCapture._copy_again

    def later(self: FileCapture, directory: OpenDirectory, name: str, raw: bytes) -> None:
        (trees.source / "d3/f3").write_text("something else")
        copy(self, directory, name, raw)

    monkeypatch.setattr(FileCapture, "_copy_again", later)
    with pytest.raises(ConsistencyUnavailable, match="d3/f3"):
        trees.take(2)
    assert not (trees.top / "tree-2" / READY).exists()


def test_a_full_disk_fails_the_capture(trees: Trees, monkeypatch: pytest.MonkeyPatch) -> None:
    link, made = calls.link, list[object]()

    def full(*arguments: Any, **options: Any) -> None:
        if len(made) > 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        made.append(arguments)
        link(*arguments, **options)

    monkeypatch.setattr(calls, "link", full)
    with pytest.raises(IoFailure, match="No space left"):
        trees.take(2)
    assert not (trees.top / "tree-2" / READY).exists()


# --- Directory times ---------------------------------------------------------------------------------


class Nested:
    """Nested directories with a change in every one; the lower ones are created later."""

    def __init__(self, top: Path) -> None:
        self.top, self.source, self.count = top, top / "source", 0
        for one in range(4):
            for two in range(3):
                (self.source / f"d{one}/e{two}").mkdir(parents=True)
        self.directories = sorted(path for path in self.source.rglob("*") if path.is_dir())
        for each in self.directories:
            for name in range(FILES):
                (each / f"f{name}").write_text(f"{each} {name}")
        self.directories[1].chmod(0o700)  # needs more than its time set
        self.take()

    def take(self) -> Path:
        time.sleep(0.05)
        base = self.top / str(self.count) if self.count else None
        self.count += 1
        tree = self.top / str(self.count)
        options: dict[str, Any] = {"engine": Engine.LINKED, "base": base, "cache": self.top / "cache"}
        capture(self.source, tree, quiesced=True, **options)
        return tree

    def wrong(self) -> list[str]:
        """Capture a change in every directory and return those whose time differs from the source."""
        for each in self.directories:
            (each / "f0").write_text(f"changed {self.count}")
            os.utime(each, ns=(0, 10**18 + self.count))
        tree = self.take()
        return [
            str(path)
            for path in (each.relative_to(self.source) for each in self.directories)
            if (tree / PAYLOAD / path).stat().st_mtime_ns != (self.source / path).stat().st_mtime_ns
        ]


def test_directories_keep_their_times_though_subdirectories_are_created_later(tmp_path: Path) -> None:
    assert Nested(tmp_path).wrong() == []
