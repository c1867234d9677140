"""A link in the path of a tree, there before or exchanged for a directory meanwhile, leads nobody out."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from holdfast.errors import Failure, PathEscape
from holdfast.fs import calls
from holdfast.trees.capture import capture
from holdfast.trees.engines import Engine, choose_engine, clone_directory
from holdfast.trees.manifest import PAYLOAD, Manifest, write_manifest
from holdfast.trees.repair import repair
from holdfast.trees.restore import exchange, materialise
from holdfast.trees.retained_dirs import TrashDirectory, has_all, is_trimmed, tree_bytes, trim
from holdfast.trees.scan import StatCache, append_to_cache, write_cache
from holdfast.trees.shared_dirs import Stored, read_shared_directories, share_tree
from holdfast.trees.verify import changes, compare, verify
from holdfast.trees.walker import TreeWalker, read_whole, remove_tree, synced
from proof import effort
from proof.hostile.swaps import CALLS, Swapper
from proof.interpose import Attempt, interposed

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="exchanges a directory and a link in one step")


def made(place: Path) -> Path:
    """Two trees, a source, a retained tree and an empty directory below `place/control`; returns that."""
    control = place / "control"
    for directory in ("source/sub", "snapshots", "cache", "tmp/bin", "live", "aside"):
        (control / directory).mkdir(parents=True)
    (control / "source/file").write_text("content")
    (control / "source/sub/file").write_text("content below")
    (control / "source/sub/second").hardlink_to(control / "source/sub/file")
    calls.mknod(control / "source/sub/fifo", 0o010622)
    for name in ("one", "two"):
        capture(control / "source", control / "snapshots" / name, engine=Engine.COPY, quiesced=False)
    capture(control / "source", control / "remnants", engine=Engine.COPY, quiesced=False)
    (control / "remnants/payload/sub/excess").mkdir()
    (control / "remnants/payload/sub/excess").chmod(0o555)
    write_cache(control / "cache/main", 1, [(b"", bytes(64), b"body")])
    outside(place)
    return control


def outside(place: Path) -> None:
    """A directory with the names that an operation may look for, which belongs to nobody's repository."""
    names = ("one/payload/sub/file", "two/payload/sub/file", "payload/sub/excess/file", "sub/file", "file", "main")
    for name in (*names, "bin/file", "new/file", "one/.READY", "one/manifest", "deep/file"):
        (place / "outside" / name).parent.mkdir(parents=True, exist_ok=True)
        (place / "outside" / name).write_text("mine")
    (place / "outside").chmod(0o510)


def seen(top: Path) -> dict[str, tuple[int, int, int, bytes]]:
    """Everything below a directory, with what a write, a link or a change of attributes would alter."""
    found = {}
    for path in (top, *top.rglob("*")):
        status = path.stat()
        content = b"" if path.is_dir() else path.read_bytes()
        found[str(path)] = (status.st_mode, status.st_nlink, status.st_mtime_ns, content)
    return found


class Operation(NamedTuple):
    """What is done with a directory `control`, and the directory in it for which a link is exchanged."""

    name: str
    act: Callable[[Path], object]
    swapped: str


def _captured(control: Path) -> object:
    base, tree = control / "snapshots/one", control / "tmp/new"
    return capture(
        control / "source", tree, engine=Engine.LINKED, base=base, cache=control / "cache/new", quiesced=True
    )


def _cloned(control: Path) -> None:
    clone_directory(os.fspath(control / "source"), os.fspath(control / "tmp/new"))


def _appended(control: Path) -> object:
    known = StatCache(read_whole(os.fspath(control / "cache/main")), 1)
    return append_to_cache(control / "cache/main", known, [])


def _trimmed(need: set[bytes]) -> Callable[[Path], object]:
    return lambda control: trim(control / "remnants", need, TrashDirectory(control / "tmp/bin"))


def _repaired(control: Path) -> object:
    (control / "snapshots/one/payload/file").unlink(missing_ok=True)
    trees = [control / "snapshots/one", control / "snapshots/two"]
    return repair(trees, trees, [control / "source"], control / "tmp/bin")


def _synced(directory: Path) -> None:
    with synced(directory):
        pass


OPERATIONS = [
    Operation("a tree is removed", lambda at: remove_tree(at / "snapshots/one"), "snapshots"),
    Operation("a removed tree is exchanged", lambda at: remove_tree(at / "snapshots/one"), "snapshots/one"),
    Operation("a source is captured", _captured, "source"),
    Operation("a tree is captured", _captured, "tmp"),
    Operation("a tree is captured with a cache", _captured, "cache"),
    Operation("a tree is captured upon another", _captured, "snapshots"),
    Operation("a tree is restored", lambda at: materialise(at / "snapshots/one", at / "live/new"), "live"),
    Operation("the restored tree", lambda at: materialise(at / "snapshots/one", at / "live/new"), "snapshots"),
    Operation(
        "a file is restored",
        lambda at: materialise(at / "snapshots/one", at / "live/deep", only=b"sub/file"),
        "live",
    ),
    Operation("a retained tree is trimmed", _trimmed({b""}), "remnants"),
    Operation("the payload of a retained tree is trimmed", _trimmed({b"sub"}), "remnants/payload"),
    Operation("a read-only directory of a retained tree", _trimmed({b"sub"}), "remnants/payload/sub/excess"),
    Operation("a retained tree is removed", _trimmed(set()), "tmp"),
    Operation("two directories are exchanged", lambda at: exchange(at / "aside", at / "live"), "aside"),
    Operation("a directory is exchanged", lambda at: exchange(at / "tmp/bin", at / "live"), "tmp"),
    Operation("a tree is shared", lambda at: share_tree(at / "snapshots/one", at / "tmp/new"), "tmp"),
    Operation("a cache is written", lambda at: write_cache(at / "cache/main", 1, []), "cache"),
    Operation("a cache is extended", _appended, "cache"),
    Operation("trees are repaired", _repaired, "snapshots"),
    Operation("trees are repaired in a room", _repaired, "tmp"),
]


@pytest.mark.sampled(6)
@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda each: each.name)
@pytest.mark.parametrize("back", [False, True], ids=["and stays", "and is swapped back"])
def test_a_link_that_takes_the_place_of_a_directory_before_any_lookup_leads_nowhere(
    operation: Operation, back: bool, tmp_path: Path
) -> None:
    step = 1 if effort.SHARE >= 1 else 5
    for number in (1, *range(2 + effort.SEED % step, 5000, step)):
        place = tmp_path / str(number)
        before, met = _swapped_before(place, operation, number, back=back)
        assert seen(place / "outside") == before, f"swapped before lookup {number}"
        if not met:
            assert number > 1  # the link was in place before at least one lookup
            return
        effort.tried["swaps before a lookup"] += 1
        remove_tree(place)


def _swapped_before(place: Path, operation: Operation, number: int, *, back: bool) -> tuple[dict[str, Any], bool]:
    control = made(place)
    decoy = place / "decoy"
    decoy.symlink_to(place / "outside")
    before = seen(place / "outside")
    swapper = Swapper(control / operation.swapped, decoy, number, back=back)
    with suppress(Failure), interposed(swapper.intercept, CALLS):
        operation.act(control)
    return before, swapper.is_hit


REFUSED: list[Callable[[Path], object]] = [
    TreeWalker,
    Stored,
    Manifest.read,
    read_shared_directories,
    lambda tree: read_whole(f"{tree}/manifest"),
    lambda tree: write_manifest(tree / "new", []),
    lambda tree: share_tree(tree, tree.parent.parent / "tmp/new"),
    lambda tree: materialise(tree, tree.parent.parent / "tmp/new"),
    lambda tree: list(compare(tree, tree)),
    lambda tree: list(changes(tree / PAYLOAD, None)),
    lambda tree: capture(tree / PAYLOAD, tree.parent.parent / "tmp/new", engine=Engine.COPY, quiesced=False),
    lambda tree: choose_engine(tree / PAYLOAD, tree),
    lambda tree: tree_bytes([tree]),
    lambda tree: has_all(tree, [b""], None),
    lambda tree: is_trimmed(tree, {b""}),
    lambda tree: trim(tree, {b""}, TrashDirectory(tree.parent.parent / "tmp/bin")),
    lambda tree: remove_tree(tree / PAYLOAD),
    lambda tree: exchange(tree / PAYLOAD, tree.parent.parent / "live"),
    lambda tree: exchange(tree.parent.parent / "live", tree / PAYLOAD),
    lambda tree: StatCache.read(tree / "cache", 1),
    lambda tree: write_cache(tree / "cache", 1, []),
    lambda tree: clone_directory(os.fspath(tree.parent.parent / "live"), os.fspath(tree / "new")),
    lambda tree: _synced(tree / PAYLOAD),
]


@pytest.mark.sampled(8)
@pytest.mark.parametrize("act", REFUSED, ids=map(str, range(len(REFUSED))))
@pytest.mark.parametrize("linked", ["snapshots", "snapshots/one"])
def test_a_tree_to_which_a_link_leads_is_refused(act: Callable[[Path], object], linked: str, tmp_path: Path) -> None:
    control = made(tmp_path)
    _link(control / linked, tmp_path)
    before = seen(tmp_path / "aside")
    tree = control / "snapshots/one"
    with pytest.raises(PathEscape, match=f"{linked} is a symbolic link"):
        act(tree)
    assert seen(tmp_path / "aside") == before


def _link(directory: Path, place: Path) -> None:
    """Move a directory out of the repository and leave a link to it: what is behind the link is sound."""
    directory.rename(place / "aside")
    directory.symlink_to(place / "aside")


def test_verifying_a_tree_that_is_a_link_reports_it_and_reads_nothing_behind_it(tmp_path: Path) -> None:
    control = made(tmp_path)
    _link(control / "snapshots/one", tmp_path)
    read: list[str] = []

    def note(attempt: Attempt) -> Any:
        read.append(str(attempt.arguments[0]))
        return attempt.perform()

    with interposed(note, ("open",)):
        found = list(verify(control / "snapshots/one"))

    assert {each.what for each in found} == {"ready", "manifest"}
    assert all("is a symbolic link" in each.detail for each in found)
    assert not read


def test_a_directory_that_a_link_replaces_keeps_its_mode(tmp_path: Path) -> None:
    """Changing a mode by name would follow a link that takes the place of the name."""
    (tmp_path / "mine").mkdir(mode=0o500)
    (tmp_path / "link").symlink_to("mine")
    here = os.open(tmp_path, os.O_RDONLY)
    try:
        with pytest.raises(OSError, match="symbolic links"):
            calls.chmod("link", 0o777, dir_fd=here)
    finally:
        os.close(here)
    assert (tmp_path / "mine").stat().st_mode & 0o777 == 0o500
