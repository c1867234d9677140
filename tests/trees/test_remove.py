"""A tree is removed with any contents, and nothing else is; the space this frees is known in advance."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.errors import ExchangeUnavailable, IoFailure, Refused
from holdfast.fs import calls
from holdfast.trees.capture import capture
from holdfast.trees.engines import Engine
from holdfast.trees.restore import exchange
from holdfast.trees.retained_dirs import tree_bytes
from holdfast.trees.walker import remove_tree
from proof.crash import Ending, Outcome, error_points, kill_points
from proof.effort import SHARE
from tests.support.loop_mounts import LoopMount
from tests.trees.groves import grow, seen


class Removal:
    """Remove a tree of mixed entries, some of them read-only, with links to a neighbour."""

    def prepare(self, directory: Path) -> None:
        if sys.platform == "win32":
            raise NotImplementedError
        (directory / "neighbour").mkdir()
        (directory / "neighbour" / "file").write_bytes(b"stays")
        top = directory / "tree"
        for name in ("a/b/c", "a/d", "e"):
            (top / name).mkdir(parents=True)
            (top / name / "file").write_bytes(b"goes")
            (top / name / "link").symlink_to(directory / "neighbour")
        os.mkfifo(top / "e/fifo")
        (top / "a/b").chmod(0o500)
        (top / "a/d").chmod(0)

    def operate(self, directory: Path) -> object:
        return remove_tree(directory / "tree")

    def check(self, directory: Path, outcome: Outcome) -> None:
        assert (directory / "neighbour/file").read_bytes() == b"stays"
        if outcome.ending is not Ending.FAILED:
            remove_tree(directory / "tree")  # finishes the interrupted removal
            assert remove_tree(directory / "tree") is False
            assert os.listdir(directory) == ["neighbour"]


def test_a_removal_killed_at_any_call_is_finished_by_the_next() -> None:
    kill_points(Removal(), share=SHARE).require_clean(at_least=50)


def test_a_failed_removal_raises_and_leaves_the_neighbours() -> None:
    error_points(Removal(), (errno.EIO,), lasting=(), share=SHARE).require_clean(at_least=30)


def test_entries_of_every_kind_are_removed(tmp_path: Path) -> None:
    grow(tmp_path / "tree")

    assert remove_tree(tmp_path / "tree") is True
    assert os.listdir(tmp_path) == []
    assert remove_tree(tmp_path / "tree") is False


@pytest.mark.parametrize("what", ["file", "link", "dangling", "fifo"])
def test_a_path_that_is_not_a_directory_is_removed_itself(tmp_path: Path, what: str) -> None:
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept/file").touch()
    path = tmp_path / "path"
    if sys.platform == "win32":
        raise NotImplementedError
    makers: dict[str, Callable[[], object]] = {
        "file": path.touch,
        "link": lambda: path.symlink_to("kept"),
        "dangling": lambda: path.symlink_to("nowhere"),
        "fifo": lambda: os.mkfifo(path),
    }
    makers[what]()

    assert remove_tree(path) is True
    assert os.listdir(tmp_path) == ["kept"]
    assert os.listdir(tmp_path / "kept") == ["file"]


def test_a_very_deep_tree_is_removed(scratch: Path) -> None:
    here = os.open(scratch, os.O_RDONLY)
    for _ in range(5000):
        os.mkdir("d", dir_fd=here)
        below = os.open("d", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    os.close(here)

    assert remove_tree(scratch / "d")
    assert os.listdir(scratch) == []


def test_a_tree_with_a_mount_inside_is_not_removed(loop_mount: Callable[[str], LoopMount]) -> None:
    mounted = loop_mount("ext4")
    (mounted.path / "inside").write_bytes(b"")
    with pytest.raises(Refused, match="something is mounted at ext4"):
        remove_tree(mounted.path.parent)
    assert (mounted.path / "inside").exists()
    assert mounted.image.exists()


# --- Freed space ------------------------------------------------------------------------------------


def test_only_data_that_no_other_tree_has_is_freed(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "shared").write_bytes(bytes(1 << 20))
    (source / "first").write_bytes(bytes(64 << 10))
    one, two = tmp_path / "1", tmp_path / "2"
    capture(source, one, engine=Engine.LINKED, quiesced=True)
    (source / "first").unlink()
    (source / "second").write_bytes(bytes(128 << 10))
    capture(source, two, engine=Engine.LINKED, base=one, quiesced=True)
    small = 64 << 10  # the directories, the manifests and the marks

    assert 64 << 10 <= tree_bytes([one]) < (64 << 10) + small
    assert 128 << 10 <= tree_bytes([two]) < (128 << 10) + small
    both = (1 << 20) + (64 << 10) + (128 << 10)
    assert both <= tree_bytes([one, two]) < both + small


# --- Exchange ---------------------------------------------------------------------------------------


def test_two_directories_are_exchanged(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    (tmp_path / "a/one").touch()
    (tmp_path / "b/two").touch()
    try:
        exchange(tmp_path / "a", tmp_path / "b")
    except ExchangeUnavailable as error:
        pytest.skip(error.message)

    assert os.listdir(tmp_path / "a") == ["two"]
    assert os.listdir(tmp_path / "b") == ["one"]
    with pytest.raises(IoFailure):
        exchange(tmp_path / "a", tmp_path / "nothing")


def test_a_system_without_exchange_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: object, **__: object) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(calls, "rename_exchange", missing)
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    with pytest.raises(ExchangeUnavailable):
        exchange(tmp_path / "a", tmp_path / "b")


def test_the_independent_observer_finds_modes_and_links(tmp_path: Path) -> None:
    """The observer that these tests rely on sees a changed mode and a second link."""
    before = seen(grow(tmp_path / "tree"))
    (tmp_path / "tree/plain").chmod(0o600)
    os.link(tmp_path / "tree/script", tmp_path / "tree/again")
    after = seen(tmp_path / "tree")

    assert {path for path in before if before[path] != after[path]} == {b"", b"plain", b"script"}
