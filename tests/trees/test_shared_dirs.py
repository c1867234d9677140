"""Directories shared between trees: recorded at their real location, found wherever it is, never blindly trusted."""

from __future__ import annotations

import os
import random
import shutil
import stat
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest

from holdfast.errors import Corrupt
from holdfast.trees.capture import capture
from holdfast.trees.engines import Engine
from holdfast.trees.manifest import HOMES, MANIFEST, PAYLOAD, READY, REMNANTS
from holdfast.trees.restore import materialise
from holdfast.trees.results import Captured
from holdfast.trees.shared_dirs import (
    SharedDirectory,
    Stored,
    located,
    read_shared_directories,
    share_tree,
    write_shared_directories,
)
from holdfast.trees.verify import verify, verify_manifest
from tests.trees.groves import Seen, seen

A_TICK = 0.05


class Trees:
    """A source and its successive captures, side by side."""

    def __init__(self, top: Path) -> None:
        self.top = top
        self.source = top / "source"
        self.place = top / "snapshots"
        self.place.mkdir()
        self.count = 0

    def write(self, path: str, content: str = "content") -> None:
        place = self.source / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(content)

    def tree(self, number: int) -> Path:
        return self.place / f"tree-{number}"

    def take(self, *, cached: bool = True) -> tuple[Path, Captured]:
        time.sleep(A_TICK)  # so that no file is too recent to trust its time
        base = self.tree(self.count) if self.count else None
        self.count += 1
        tree, cache = self.tree(self.count), self.top / "cache" if cached else None
        return tree, capture(self.source, tree, engine=Engine.LINKED, base=base, cache=cache, quiesced=True)

    def restored(self, number: int) -> dict[bytes, Seen]:
        target = self.top / f"restored-{number}-{time.monotonic_ns()}"
        materialise(self.tree(number), target)
        return seen(target)


@pytest.fixture
def trees(tmp_path: Path) -> Trees:
    made = Trees(tmp_path)
    for directory in ("a", "a/b", "a/b/c", "d"):
        for name in ("one", "two"):
            made.write(f"{directory}/{name}", f"{directory} {name}")
    made.write("top")
    return made


def own(tree: Path) -> set[str]:
    """The files in a tree's own payload."""
    payload = tree / PAYLOAD
    return {str(each.relative_to(payload)) for each in payload.rglob("*") if not each.is_dir()}


# --- Sharing ----------------------------------------------------------------------------------------


def test_only_changed_directories_are_stored_again(trees: Trees) -> None:
    trees.take()
    trees.write("a/b/one", "changed")
    second, captured = trees.take()

    assert own(second) == {"a/b/one", "a/b/two"}
    assert read_shared_directories(second) == {
        each: SharedDirectory("tree-1", each) for each in (b"", b"a", b"a/b/c", b"d")
    }
    assert os.stat(second / PAYLOAD / "a/b/two").st_ino == os.stat(trees.tree(1) / PAYLOAD / "a/b/two").st_ino
    assert list(verify(second, captured.payload_hash)) == []
    assert trees.restored(2) == seen(trees.source)


def test_directories_stored_in_a_tree_have_their_modes_and_times(trees: Trees) -> None:
    trees.take()
    trees.write("a/new", "new")
    trees.write("a/b/c/new", "new")
    (trees.source / "a").chmod(0o750)
    second, _ = trees.take()

    for directory in ("a", "a/b/c"):
        there, here = (second / PAYLOAD / directory).stat(), (trees.source / directory).stat()
        assert (there.st_mode, there.st_mtime_ns) == (here.st_mode, here.st_mtime_ns), directory


def test_a_location_names_the_tree_that_stores_the_directory(trees: Trees) -> None:
    trees.take()
    trees.write("d/one", "changed")
    trees.take()
    trees.take()
    fourth, _ = trees.take()

    shared = read_shared_directories(fourth)
    assert {path: location.tree for path, location in shared.items()} == {
        b"": "tree-1",
        b"a": "tree-1",
        b"a/b": "tree-1",
        b"a/b/c": "tree-1",
        b"d": "tree-2",
    }
    assert own(fourth) == set()


def test_directories_below_a_renamed_one_are_shared_under_their_old_paths(trees: Trees) -> None:
    trees.take()
    (trees.source / "a").rename(trees.source / "z")
    second, captured = trees.take()

    assert read_shared_directories(second)[b"z/b/c"] == SharedDirectory("tree-1", b"a/b/c")
    assert own(second) == {"top", "z/one", "z/two"}  # a rename changes the times of the renamed directory
    assert list(verify(second, captured.payload_hash)) == []
    third, _ = trees.take()
    assert read_shared_directories(third)[b"z/b/c"] == SharedDirectory("tree-1", b"a/b/c")
    assert trees.restored(3) == seen(trees.source)


def test_a_tree_that_shares_everything_has_the_same_locations(trees: Trees) -> None:
    trees.take()
    trees.write("d/one", "changed")
    second, captured = trees.take()
    share_tree(second, trees.tree(3))

    assert {location.tree for location in read_shared_directories(trees.tree(3)).values()} == {
        "tree-1",
        "tree-2",
    }
    assert list(verify(trees.tree(3), captured.payload_hash)) == []
    assert trees.restored(3) == trees.restored(2)


def test_names_of_arbitrary_bytes_are_located(trees: Trees) -> None:
    name = os.fsdecode(b"\xff\n\x01 \xe2\x82")
    trees.write(f"{name}/{name}/file")
    trees.take()
    second, captured = trees.take()

    assert list(verify(second, captured.payload_hash)) == []
    assert trees.restored(2) == seen(trees.source)
    place = located(second, read_shared_directories(second), os.fsencode(f"{name}/{name}/file"))
    assert place.read_text() == "content"


def test_every_snapshot_of_a_random_history_is_restored_exactly(trees: Trees) -> None:
    chance = random.Random(8)
    states = []
    for _ in range(25):
        trees.take(cached=chance.random() < 0.9)
        states.append(seen(trees.source))
        for _ in range(chance.randrange(4)):
            edit(trees, chance)
    for number, state in enumerate(states, 1):
        assert trees.restored(number) == state, number
        assert list(verify(trees.tree(number))) == [], number
    every = [read_shared_directories(trees.tree(number)) for number in range(1, 26)]
    for shared in every:
        for path, location in shared.items():
            there = int(location.tree.removeprefix("tree-"))
            assert location.path not in every[there - 1], (path, location)


def edit(trees: Trees, chance: random.Random) -> None:
    directories = [each for each in trees.source.rglob("*") if each.is_dir()] or [trees.source]
    place = chance.choice(directories)
    match chance.randrange(5):
        case 0:
            (place / f"new{chance.randrange(99)}").mkdir(exist_ok=True)
        case 1:
            target = chance.choice(directories)
            if place not in (target, *target.parents) and not (target / place.name).exists():
                place.rename(target / place.name)
        case 2 if chance.random() < 0.3:
            shutil.rmtree(place)
        case _:
            (place / f"file{chance.randrange(5)}").write_text(str(chance.random()))


# --- Damaged bases and lists ------------------------------------------------------------------------


@pytest.mark.parametrize("lost", ["a/b/one", "a/b"])
def test_entries_missing_from_the_base_are_captured_again(trees: Trees, lost: str) -> None:
    first, captured = trees.take()
    place = first / PAYLOAD / lost
    shutil.rmtree(place) if place.is_dir() else place.unlink()
    second, again = trees.take()

    assert again.payload_hash == captured.payload_hash
    assert list(verify(second, again.payload_hash)) == []
    assert "a/b/one" in own(second)


def test_a_directory_with_a_foreign_file_is_not_shared(trees: Trees) -> None:
    first, _ = trees.take()
    (first / PAYLOAD / "d/strange").write_text("strange")
    second, again = trees.take()

    assert list(verify(second, again.payload_hash)) == []
    assert own(second) == {"d/one", "d/two"}


def test_a_corrupt_list_invalidates_the_base_and_the_tree(trees: Trees) -> None:
    trees.take()
    second, _ = trees.take()
    content = bytearray((second / HOMES).read_bytes())
    content[len(content) // 2] ^= 1
    (second / HOMES).chmod(0o600)
    (second / HOMES).write_bytes(content)

    assert [each.what for each in verify(second)] == ["homes"]
    assert [each.what for each in verify_manifest(second)] == ["homes"]
    with pytest.raises(Corrupt, match="cut off, or was changed"):
        materialise(second, trees.top / "restored")
    third, captured = trees.take()
    assert read_shared_directories(third) == {}
    assert list(verify(third, captured.payload_hash)) == []


def test_every_truncation_of_a_list_is_noticed(trees: Trees) -> None:
    trees.take()
    second, _ = trees.take()
    content = (second / HOMES).read_bytes()
    (second / HOMES).chmod(0o600)
    for length in range(len(content)):
        (second / HOMES).write_bytes(content[:length])
        with pytest.raises(Corrupt):
            read_shared_directories(second)


@pytest.mark.parametrize("name", ["../other", "a/b", "", "."])
def test_a_list_cannot_point_elsewhere(trees: Trees, name: str) -> None:
    tree, _ = trees.take()
    write_shared_directories(tree, [(b"a", SharedDirectory(name, b"a"))])
    with pytest.raises(Corrupt, match="an invalid name"):
        read_shared_directories(tree)


# --- Locating other trees ---------------------------------------------------------------------------


def test_the_rest_of_a_removed_tree_is_found_among_the_retained_directories(trees: Trees) -> None:
    first, _ = trees.take()
    second, captured = trees.take()
    (trees.top / REMNANTS).mkdir()
    first.rename(trees.top / REMNANTS / first.name)

    assert list(verify(second, captured.payload_hash)) == []
    assert list(verify_manifest(second, captured.payload_hash)) == []
    assert trees.restored(2) == seen(trees.source)
    third, _ = trees.take()
    assert own(third) == set()


def test_a_missing_tree_is_reported(trees: Trees) -> None:
    first, _ = trees.take()
    second, captured = trees.take()
    shutil.rmtree(first)

    assert {each.what for each in verify(second, captured.payload_hash)} == {"missing"}
    assert [each.what for each in verify_manifest(second)] == ["missing"]
    assert "the tree tree-1" in str(next(verify_manifest(second)))
    with pytest.raises(Corrupt):
        materialise(second, trees.top / "restored")
    third, again = trees.take()
    assert list(verify(third, again.payload_hash)) == []  # captured again


@pytest.mark.long
def test_more_trees_than_stay_open_are_all_reachable(trees: Trees) -> None:
    for number in range(40):
        trees.write(f"n{number:02}/file", str(number))
        trees.take()
    last = trees.tree(trees.count)

    assert len({location.tree for location in read_shared_directories(last).values()}) > 30
    before = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    with Stored(last) as stored:
        for number in [*range(39), *range(39)]:
            with os.scandir(stored.enter(f"n{number:02}")) as listed:
                assert [each.name for each in listed] == ["file"]
        if before:
            assert len(os.listdir("/proc/self/fd")) - before < 100
    assert list(verify(last)) == []


def test_the_manifest_is_the_same_whether_directories_are_shared_or_not(trees: Trees) -> None:
    first, _ = trees.take()
    second, _ = trees.take()
    assert (first / MANIFEST).stat().st_ino == (second / MANIFEST).stat().st_ino
    capture(trees.source, trees.top / "copy", engine=Engine.COPY, quiesced=True)
    assert (trees.top / "copy" / MANIFEST).read_bytes() == (second / MANIFEST).read_bytes()


@pytest.mark.skipif(sys.platform == "win32", reason="needs POSIX modes")
def test_a_private_directory_stays_private_where_it_only_leads_to_others(trees: Trees) -> None:
    """Its own files are stored elsewhere, but it gives access to the changes below it."""
    trees.write("private/file", "1")
    trees.write("private/below/file", "1")
    for path in (trees.source / "private", trees.source):
        path.chmod(0o700)
    trees.take()
    trees.write("private/below/file", "2")
    tree, _ = trees.take()
    assert {b"", b"private"} <= read_shared_directories(tree).keys()
    assert b"private/below" not in read_shared_directories(tree)
    for path in (tree / PAYLOAD, tree / PAYLOAD / "private"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert list(verify(tree)) == []


def test_a_directory_that_only_leads_to_others_is_never_shared(trees: Trees) -> None:
    """Not even from a tree that appears to store all directories itself."""
    trees.write("above/file", "1")
    trees.write("above/below/file", "1")
    trees.take()
    trees.write("above/below/file", "2")
    damaged, _ = trees.take()
    assert b"above" in read_shared_directories(damaged)
    (damaged / HOMES).unlink()
    with pytest.raises(Corrupt, match="homes is gone"):
        read_shared_directories(damaged)
    mark = damaged / READY
    mark.chmod(0o600)
    mark.write_text(mark.read_text().replace('"homes":true', '"homes":false'))
    tree, _ = trees.take()
    assert read_shared_directories(tree) == {b"above/below": SharedDirectory(damaged.name, b"above/below")}
    assert list(verify(tree)) == []


def test_the_recipe_in_the_protocol_finds_every_file_without_our_code(trees: Trees) -> None:
    page = (Path(__file__).parents[2] / "docs/protocols/snapshot-trees.md").read_text(encoding="utf-8")
    recipe = page[page.index("    import os\n") :].split("\n\nA directory that is not among them")[0]
    program: dict[str, Any] = {}
    exec(textwrap.dedent(recipe), program)
    if sys.platform == "linux":
        trees.write(os.fsdecode(b"no text \xff/file"), "2")
    trees.take()
    trees.write("d/one", "changed")
    trees.take()
    (trees.source / "a").rename(trees.source / "z")
    third, _ = trees.take()
    (trees.top / REMNANTS).mkdir()
    trees.tree(1).rename(trees.top / REMNANTS / "tree-1")

    found = program["homes"](third)
    for path in [each for each in trees.source.rglob("*") if each.is_file()]:
        directory, name = str(path.parent.relative_to(trees.source)), path.name
        place = found.get("" if directory == "." else directory, third / PAYLOAD / directory)
        assert (place / name).read_bytes() == path.read_bytes(), path


def test_a_tree_with_a_damaged_mark_is_shared_as_it_is(trees: Trees) -> None:
    first, _ = trees.take()
    (first / READY).chmod(0o600)
    (first / READY).write_text("{")
    share_tree(first, trees.place / "another")
    assert (trees.place / "another" / READY).read_text() == "{"
    assert {each.what for each in verify(trees.place / "another")} == {"ready"}
