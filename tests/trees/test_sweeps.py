"""Captures and restores, killed or failed at every file system call: complete or absent."""

from __future__ import annotations

import errno
import time
from pathlib import Path

from holdfast.errors import Failure
from holdfast.trees.capture import capture
from holdfast.trees.engines import Engine
from holdfast.trees.manifest import READY
from holdfast.trees.restore import materialise
from holdfast.trees.shared_dirs import share_tree
from holdfast.trees.verify import changes, verify
from holdfast.trees.walker import remove_tree
from proof.crash import Ending, Outcome, error_points, kill_points
from proof.effort import SHARE
from tests.trees.groves import seen


class Capturing:
    """A second capture, with a base and a cache, of a partly changed source."""

    def prepare(self, directory: Path) -> None:
        source = directory / "source"
        for name in ("same/a", "changed/a", "changed/b"):
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes(name.encode())
        (source / "link").symlink_to("same")
        time.sleep(0.03)
        capture(source, directory / "1", engine=Engine.LINKED, cache=directory / "cache", quiesced=True)
        (source / "changed/a").write_bytes(b"new")
        (source / "changed/c").write_bytes(b"")

    def operate(self, directory: Path) -> object:
        source, tree, base = directory / "source", directory / "2", directory / "1"
        return capture(source, tree, engine=Engine.LINKED, base=base, cache=directory / "cache", quiesced=True)

    def check(self, directory: Path, outcome: Outcome) -> None:
        assert list(verify(directory / "1")) == []
        if outcome.ending is Ending.FAILED:
            assert isinstance(outcome.error, Failure), outcome.error
        ready = (directory / "2" / READY).exists()
        assert ready or outcome.ending is not Ending.SUCCEEDED
        if ready and (directory / "2" / READY).stat().st_size:  # the last write may be torn
            assert [each for each in verify(directory / "2") if each.what != "ready"] == []
        remove_tree(directory / "2")
        self.operate(directory)
        assert list(changes(directory / "source", directory / "2")) == []


def test_a_killed_capture_leaves_the_base_and_the_cache_usable() -> None:
    kill_points(Capturing(), share=SHARE).require_clean(at_least=60)


def test_an_error_at_any_call_of_a_capture_is_a_failure() -> None:
    error_points(Capturing(), (errno.EIO,), lasting=(errno.ENOSPC,), share=SHARE).require_clean(at_least=60)


class Restoring:
    """Restore a tree to a directory, and share it as a second tree."""

    def prepare(self, directory: Path) -> None:
        source = directory / "source"
        (source / "a").mkdir(parents=True)
        (source / "a/file").write_bytes(b"content")
        (source / "a/same").hardlink_to(source / "a/file")
        (source / "link").symlink_to("a")
        capture(source, directory / "1", engine=Engine.LINKED, quiesced=True)

    def operate(self, directory: Path) -> object:
        materialise(directory / "1", directory / "new", cache=directory / "cache")
        share_tree(directory / "1", directory / "2")
        return None

    def check(self, directory: Path, outcome: Outcome) -> None:
        assert list(verify(directory / "1")) == []
        if outcome.ending is Ending.FAILED:
            assert isinstance(outcome.error, Failure), outcome.error
        else:
            assert seen(directory / "new") == seen(directory / "source")
            assert list(verify(directory / "2")) == []


def test_an_error_at_any_call_of_a_restore_is_a_failure() -> None:
    error_points(Restoring(), (errno.EIO,), lasting=(errno.ENOSPC,), share=SHARE).require_clean(at_least=40)
