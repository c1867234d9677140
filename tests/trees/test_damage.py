"""Damaged trees: not restored, not passed on to the next capture, and repaired from another place."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from holdfast.errors import Corrupt
from holdfast.trees import capture as capturing
from holdfast.trees.capture import capture
from holdfast.trees.engines import Engine
from holdfast.trees.manifest import MANIFEST, PAYLOAD
from holdfast.trees.repair import repair
from holdfast.trees.restore import materialise
from holdfast.trees.results import Captured
from holdfast.trees.verify import verify
from holdfast.trees.walker import remove_tree
from proof.crash import Outcome, kill_points
from proof.effort import SHARE
from tests.trees.groves import seen

TICK = 0.03


class Trees:
    """A source and its captures, side by side."""

    def __init__(self, top: Path) -> None:
        self.source, self.place, self.room = top / "source", top / "snapshots", top / "room"
        self.count = 0

    def make(self) -> Trees:
        for path in (self.place, self.room):
            path.mkdir(parents=True)
        self.write("changing/a", "a" * 5000)
        self.write("changing/b", "b")
        self.write("same/c", "c" * 5000)
        self.write("same/d", "d")
        (self.source / "same/link").symlink_to("c")
        return self

    def write(self, path: str, content: str) -> None:
        (self.source / path).parent.mkdir(parents=True, exist_ok=True)
        (self.source / path).write_text(content)

    def tree(self, number: int) -> Path:
        return self.place / f"tree-{number}"

    def take(self) -> tuple[Path, Captured]:
        time.sleep(TICK)  # so that the cache trusts all times
        base = self.tree(self.count) if self.count else None
        self.count += 1
        tree, cache = self.tree(self.count), self.source.parent / "cache"
        return tree, capture(self.source, tree, engine=Engine.LINKED, base=base, cache=cache, quiesced=True)

    def all(self) -> list[Path]:
        return sorted(self.place.iterdir())

    def problems(self) -> list[str]:
        return [f"{tree.name}/{each}" for tree in self.all() for each in verify(tree)]

    def repair(self, *numbers: int, directories: tuple[Path, ...] = ()) -> list[tuple[str, str]]:
        done = repair(map(self.tree, numbers), self.all(), directories, self.room)
        return sorted((os.path.relpath(each.path, self.place), os.path.basename(each.source)) for each in done)


@pytest.fixture
def trees(tmp_path: Path) -> Trees:
    return Trees(tmp_path).make()


def alter(path: Path, *, quietly: bool = True) -> None:
    """Change one byte of a stored file; `quietly`, as a decaying disk does, without a trace in its status."""
    status = path.stat()
    path.chmod(0o644)
    with path.open("r+b") as file:
        file.write(b"X")
    path.chmod(status.st_mode)
    if quietly:
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


# --- Restoring ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("only", [None, b"same", b"same/c"])
def test_a_damaged_tree_is_not_restored_and_the_error_names_the_files(
    trees: Trees, tmp_path: Path, only: bytes | None
) -> None:
    tree, _ = trees.take()
    alter(tree / PAYLOAD / "same/c")
    if only is None:
        (tree / PAYLOAD / "changing/b").unlink()
    with pytest.raises(Corrupt, match=r"same/c \(changed\)") as refused:
        materialise(tree, tmp_path / "restored", only=only)
    assert refused.value.facts["damaged"] == (["changing/b (missing)"] if only is None else []) + ["same/c (changed)"]
    assert "holdfast verify tree-1 --repair" in refused.value.hint
    assert not (tmp_path / "restored" / "same/c").exists(), "the damaged file itself is left out"


def test_a_sound_part_of_a_damaged_tree_is_restored(trees: Trees, tmp_path: Path) -> None:
    tree, _ = trees.take()
    alter(tree / PAYLOAD / "same/c")
    materialise(tree, tmp_path / "restored", only=b"changing")
    assert seen(tmp_path / "restored") == seen(trees.source / "changing")


def test_a_tree_with_a_changed_manifest_is_not_restored(trees: Trees, tmp_path: Path) -> None:
    tree, _ = trees.take()
    content = (tree / MANIFEST).read_bytes()
    (tree / MANIFEST).chmod(0o644)
    (tree / MANIFEST).write_bytes(content.replace(b"link", b"lonk"))
    with pytest.raises(Corrupt, match="another hash"):
        materialise(tree, tmp_path / "restored")


def test_a_damaged_file_that_the_filesystem_clones_is_noticed_too(
    trees: Trees, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from holdfast.trees import copy

    def clone(source: int, target: int, size: int) -> bool:
        os.write(target, os.read(source, size))
        os.lseek(source, 0, os.SEEK_SET)
        return True

    monkeypatch.setattr(copy, "clone_file", clone)
    tree, _ = trees.take()
    materialise(tree, tmp_path / "sound")
    alter(tree / PAYLOAD / "same/c")
    with pytest.raises(Corrupt, match="same/c"):
        materialise(tree, tmp_path / "restored")


# --- The next capture ---------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["same/c", "changing/a"], ids=["shared with its directory", "linked"])
def test_damage_does_not_spread_to_the_next_capture(trees: Trees, path: str) -> None:
    first, _ = trees.take()
    alter(first / PAYLOAD / path)
    trees.write("changing/b", "changed")
    second, captured = trees.take()
    assert list(verify(second, captured.payload_hash)) == []
    assert captured.damaged == (os.path.dirname(path),)
    third, captured = trees.take()
    assert (list(verify(third, captured.payload_hash)), captured.damaged) == ([], ())


def test_a_sound_base_is_shared_and_linked(trees: Trees) -> None:
    first, _ = trees.take()
    trees.write("changing/b", "changed")
    second, captured = trees.take()
    assert captured.damaged == ()
    assert not (second / PAYLOAD / "same").exists()
    assert (second / PAYLOAD / "changing/a").samefile(first / PAYLOAD / "changing/a")


def test_a_file_too_large_for_the_sample_is_judged_by_its_status(trees: Trees, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capturing, "_SAMPLED_BYTES", 100)
    first, _ = trees.take()
    alter(first / PAYLOAD / "same/c", quietly=False)
    second, captured = trees.take()
    assert captured.damaged == ("same",)
    assert list(verify(second)) == []


def test_every_directory_of_a_large_base_is_in_the_sample_sooner_or_later(
    trees: Trees, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capturing, "_SAMPLED_DIRECTORIES", 2)
    monkeypatch.setattr(capturing, "_SAMPLED_FILES", 3)
    for number in range(8):
        trees.write(f"many/{number:02d}/file", str(number))
    first, _ = trees.take()
    alter(first / PAYLOAD / "many/05/file")
    for _ in range(2000):
        _, captured = trees.take()
        if captured.damaged:
            break
        remove_tree(trees.tree(trees.count))
        trees.count -= 1
    assert captured.damaged == ("many/05",)


# --- Repair -------------------------------------------------------------------------------------------


def test_content_comes_back_from_a_directory_under_every_name_that_a_tree_has_for_it(trees: Trees) -> None:
    first, _ = trees.take()
    trees.write("changing/b", "changed")
    trees.take()  # shares `same` and links `changing/a`
    for path in ("same/c", "changing/a"):
        alter(first / PAYLOAD / path)
    assert len(trees.problems()) == 4
    times = (first / PAYLOAD / "same").stat().st_mtime_ns
    assert trees.repair(2) == []
    done = trees.repair(2, directories=(trees.source,))
    assert done == [
        ("tree-1/payload/changing/a", "a"),
        ("tree-1/payload/same/c", "c"),
        ("tree-2/payload/changing/a", "a"),
    ]
    assert trees.problems() == []
    assert (first / PAYLOAD / "same").stat().st_mtime_ns == times
    third, _ = trees.take()
    assert not (third / PAYLOAD / "same").exists(), "it is shared again"


def test_content_comes_back_from_another_tree_that_has_it_under_any_name(trees: Trees) -> None:
    first, _ = trees.take()
    (trees.source / "same/c").unlink()
    trees.write("elsewhere/renamed", "c" * 5000)
    trees.take()
    alter(first / PAYLOAD / "same/c")
    assert trees.repair(1) == [("tree-1/payload/same/c", "renamed")]
    assert trees.problems() == []


def test_lost_files_links_and_directories_come_back_and_so_do_attributes(trees: Trees) -> None:
    first, _ = trees.take()
    remove_tree(first / PAYLOAD / "same")
    (first / PAYLOAD / "changing/a").chmod(0o600)
    (first / PAYLOAD / "changing/b").unlink()
    trees.repair(1, directories=(trees.source,))
    assert trees.problems() == []


def test_lost_directories_come_back_even_if_empty_and_are_shared_again(trees: Trees) -> None:
    for path in ("above/empty", "above/full/below"):
        (trees.source / path).mkdir(parents=True)
    trees.write("above/full/below/file", "e")
    (trees.source / "above").chmod(0o777)
    first, _ = trees.take()
    before = seen(first / PAYLOAD)
    remove_tree(first / PAYLOAD / "above")
    unmasked = os.umask(0)
    try:
        trees.repair(1, directories=(trees.source,))
    finally:
        os.umask(unmasked)
    assert trees.problems() == []
    assert seen(first / PAYLOAD) == before, "with the modes and times that they had"
    second, _ = trees.take()
    assert list((second / PAYLOAD).iterdir()) == []


def test_a_repaired_directory_with_a_file_too_many_is_not_shared(trees: Trees) -> None:
    first, _ = trees.take()
    alter(first / PAYLOAD / "same/c")
    (first / PAYLOAD / "same/c~").write_text("left by an editor")
    assert trees.repair(1, directories=(trees.source,)) == [("tree-1/payload/same/c", "c")]
    trees.take()
    assert [each.partition(": ")[0] for each in trees.problems()] == ["tree-1/same/c~"]


def test_a_file_in_place_of_a_directory_is_left_as_it_is(trees: Trees) -> None:
    first, _ = trees.take()
    remove_tree(first / PAYLOAD / "same")
    (first / PAYLOAD / "same").write_text("in the way")
    alter(first / PAYLOAD / "changing/a")
    assert trees.repair(1, directories=(trees.source,)) == [("tree-1/payload/changing/a", "a")]
    assert (first / PAYLOAD / "same").read_text() == "in the way"


def test_content_that_no_place_has_is_left_as_it_is(trees: Trees) -> None:
    first, _ = trees.take()
    alter(first / PAYLOAD / "same/c")
    alter(first / PAYLOAD / "changing/a")
    trees.write("same/c", "gone")
    assert trees.repair(1, directories=(trees.source,)) == [("tree-1/payload/changing/a", "a")]
    assert [each.partition(": ")[0] for each in trees.problems()] == ["tree-1/same/c"]
    assert (first / PAYLOAD / "same/c").read_text() == "X" + "c" * 4999


def test_a_tree_whose_manifest_was_changed_is_not_repaired_by_it(trees: Trees) -> None:
    first, _ = trees.take()
    content = (first / MANIFEST).read_bytes()
    (first / MANIFEST).chmod(0o644)
    (first / MANIFEST).write_bytes(content.replace(b"link", b"lonk"))
    assert trees.repair(1, directories=(trees.source,)) == []
    assert not (first / PAYLOAD / "same/lonk").is_symlink()


def test_a_tree_whose_manifest_was_changed_is_not_touched_by_the_repair_of_another(trees: Trees) -> None:
    first, _ = trees.take()
    trees.write("same/d", "c" * 5000)
    second, _ = trees.take()
    content = (second / MANIFEST).read_bytes()
    (second / MANIFEST).chmod(0o644)
    (second / MANIFEST).write_bytes(content.replace(b"\x00a", b"\x00z"))
    alter(first / PAYLOAD / "same/c")
    before = {path: path.read_bytes() for path in second.rglob("*") if path.is_file()}
    assert trees.repair(1, directories=(trees.source,)) == [("tree-1/payload/same/c", "c")]
    assert {path: path.read_bytes() for path in second.rglob("*") if path.is_file()} == before


class Repairing:
    """The repair of two trees that link the same damaged file."""

    def prepare(self, directory: Path) -> None:
        trees = Trees(directory).make()
        first, _ = trees.take()
        trees.write("changing/b", "changed")
        trees.take()
        alter(first / PAYLOAD / "changing/a")

    def operate(self, directory: Path) -> object:
        trees = Trees(directory)
        return trees.repair(1, 2, directories=(trees.source,))

    def check(self, directory: Path, outcome: Outcome) -> None:
        trees = Trees(directory)
        for number in (1, 2):
            content = (trees.tree(number) / PAYLOAD / "changing/a").read_text()
            assert content in ("a" * 5000, "X" + "a" * 4999)
        remove_tree(trees.room)
        trees.room.mkdir()
        self.operate(directory)
        assert trees.problems() == []


@pytest.mark.long
def test_a_killed_repair_leaves_each_name_whole_and_can_be_repeated() -> None:
    kill_points(Repairing(), share=SHARE).require_clean(at_least=5)
