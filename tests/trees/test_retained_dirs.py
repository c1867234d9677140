"""A retained tree keeps only its needed directories, unchanged; the reclaimable size is known in advance."""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.errors import Corrupt, IoFailure, Refused
from holdfast.fs import calls
from holdfast.trees.capture import capture
from holdfast.trees.engines import Engine
from holdfast.trees.retained_dirs import (
    TrashDirectory,
    is_trimmed,
    needed,
    needed_by_captures,
    reclaimable_sizes,
    tree_bytes,
    trim,
)
from holdfast.trees.shared_dirs import SharedDirectory, share_tree, write_shared_directories
from holdfast.trees.verify import verify
from holdfast.trees.walker import remove_tree
from proof.crash import Outcome, kill_points
from proof.effort import SHARE
from proof.interpose import Attempt, interposed
from tests.support.loop_mounts import LoopMount
from tests.trees.groves import seen

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="trees need directories that can be opened")

DIRECTORIES = ("", "a", "a/b", "a/b/c", "a/b/d", "a/e", "f", "f/g")
OLD = 1_500_000_000_123_456_789


def make(tree: Path) -> Path:
    """A tree with a file and a link in each of its directories, and times long past."""
    for each in DIRECTORIES:
        directory = tree / "payload" / each
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "file").write_text(f"in {each}")
        (directory / "link").symlink_to("/etc")
    for number, each in enumerate(DIRECTORIES):
        os.utime(tree / "payload" / each, ns=(OLD + number, OLD + number))
    for name in (".READY", "manifest", "homes"):
        (tree / name).write_text(name)
    return tree


def time_of(directory: str) -> int:
    return OLD + DIRECTORIES.index(directory)


def require_trimmed(retained: Path, need: set[bytes]) -> None:
    """Needed directories keep their files and times; nothing else is left."""
    assert [each.name for each in retained.iterdir()] == ["payload"]
    for each in DIRECTORIES:
        directory, inside = retained / "payload" / each, each.encode()
        if inside in need:
            assert (directory / "file").read_text() == f"in {each}"
            assert (directory / "link").is_symlink()
            assert directory.stat().st_mtime_ns == time_of(each)
        elif any(not inside or path.startswith(inside + b"/") for path in need):
            assert not (directory / "file").exists()
            assert not (directory / "link").is_symlink()
        else:
            assert not directory.exists()
    assert is_trimmed(retained, need)


def trimmed(retained: Path, need: set[bytes], bin_: Path) -> None:
    bin_.mkdir()
    trim(retained, need, TrashDirectory(bin_))
    remove_tree(bin_)


@pytest.mark.parametrize("seed", range(10))
def test_needed_directories_stay_unchanged_and_nothing_else_stays(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    retained, need = make(tmp_path / "retained"), {each.encode() for each in DIRECTORIES}
    while need:
        assert is_trimmed(retained, need) is (len(need) == len(DIRECTORIES) and not (retained / "homes").exists())
        trimmed(retained, need, tmp_path / "bin")
        require_trimmed(retained, need)
        before = seen(retained)
        trimmed(retained, need, tmp_path / "bin")
        assert seen(retained) == before  # trimming is idempotent
        need = set(chance.sample(sorted(need), chance.randrange(len(need))))
    trimmed(retained, need, tmp_path / "bin")
    assert not retained.exists()
    assert Path("/etc").is_dir()


class Trimming:
    """A retained tree with needed directories that contain others."""

    need = frozenset({b"a", b"a/b/d", b""})

    def prepare(self, directory: Path) -> None:
        make(directory / "retained")
        (directory / "bin").mkdir()
        (directory / "bin2").mkdir()

    def operate(self, directory: Path) -> None:
        trim(directory / "retained", self.need, TrashDirectory(directory / "bin"))

    def check(self, directory: Path, outcome: Outcome) -> None:
        for each in self.need:
            assert (directory / "retained/payload" / each.decode() / "file").exists()
        trim(directory / "retained", self.need, TrashDirectory(directory / "bin2"))
        require_trimmed(directory / "retained", set(self.need))


def test_a_trim_killed_at_any_call_is_finished_by_the_next_with_the_original_times() -> None:
    kill_points(Trimming(), share=SHARE).require_clean(at_least=30)


def test_a_trim_on_a_full_disk_works_without_a_note(tmp_path: Path) -> None:
    retained = make(tmp_path / "retained")
    (tmp_path / "bin").mkdir()

    def full(attempt: Attempt) -> object:
        if attempt.name == "write":
            raise OSError(28, "no space left")
        return attempt.perform()

    with interposed(full):
        trim(retained, {b"a"}, TrashDirectory(tmp_path / "bin"))
    require_trimmed(retained, {b"a"})


def test_a_mount_in_a_retained_tree_is_not_touched(tmp_path: Path, loop_mount: Callable[[str], LoopMount]) -> None:
    retained = make(tmp_path / "retained")
    (tmp_path / "bin").mkdir()
    mounted, inside = loop_mount("ext4").path, retained / "payload/f/g"
    subprocess.run(["mount", "--bind", mounted, inside], check=True)
    try:
        for need in ({b"a"}, set[bytes]()):
            with pytest.raises(Refused):
                trim(retained, need, TrashDirectory(tmp_path / "bin"))
        assert (retained / "payload/f/file").exists()
    finally:
        subprocess.run(["umount", inside], check=True)


@pytest.mark.parametrize("where", ["payload", "payload/a", "payload/a/b"])
def test_a_link_in_the_place_of_a_directory_is_never_followed(tmp_path: Path, where: str) -> None:
    retained, elsewhere = make(tmp_path / "retained"), make(tmp_path / "elsewhere")
    before = seen(elsewhere)
    remove_tree(retained / where)
    (retained / where).symlink_to(elsewhere / where)
    with contextlib.suppress(IoFailure):
        trimmed(retained, {b"a/b/c"}, tmp_path / "bin")
    assert seen(elsewhere) == before


def test_a_needed_directory_that_is_lost_is_not_recreated(tmp_path: Path) -> None:
    retained = make(tmp_path / "retained")
    remove_tree(retained / "payload/a")
    trimmed(retained, {b"a/b", b"f"}, tmp_path / "bin")
    assert sorted(path.name for path in (retained / "payload").rglob("*")) == ["f", "file", "link"]
    assert is_trimmed(retained, {b"a/b", b"f"})


# --- Needed directories -----------------------------------------------------------------------------


def with_shared(tree: Path, **there: set[bytes]) -> Path:
    tree.mkdir(parents=True, exist_ok=True)
    write_shared_directories(
        tree, [(path, SharedDirectory(name, path)) for name, paths in there.items() for path in sorted(paths)]
    )
    return tree


def test_a_corrupt_list_is_reported_and_not_taken_for_an_empty_one(tmp_path: Path) -> None:
    good = with_shared(tmp_path / "good", one={b"a", b"b"}, two={b""})
    assert needed([good, tmp_path / "without"]) == {"one": {b"a", b"b"}, "two": {b""}}
    bad = with_shared(tmp_path / "bad", one={b"c"})
    (bad / "homes").chmod(0o600)
    whole = (bad / "homes").read_bytes()
    for content in (b"", whole[:-1], whole[:20], whole.replace(b"c", b"d")):
        (bad / "homes").write_bytes(content)
        with pytest.raises(Corrupt):
            needed([good, bad])


def test_a_partial_list_is_corrupt_only_in_a_complete_tree(tmp_path: Path) -> None:
    tree = with_shared(tmp_path / "tree", one={b"c"})
    assert needed_by_captures([tree]) == {"one": {b"c"}}
    whole = (tree / "homes").read_bytes()
    (tree / "homes").chmod(0o600)
    (tree / "homes").write_bytes(whole[:-1])
    assert needed_by_captures([tree]) == {}
    (tree / ".READY").touch()
    with pytest.raises(Corrupt):
        needed_by_captures([tree])

    def finished_meanwhile(attempt: Attempt) -> object:
        (tree / "homes").write_bytes(whole)
        return attempt.perform()

    with interposed(finished_meanwhile, ["stat"]):
        assert needed_by_captures([tree]) == {"one": {b"c"}}


def test_a_list_without_read_permission_is_reported(tmp_path: Path) -> None:
    tree = with_shared(tmp_path / "tree", one={b"c"})

    def refused(attempt: Attempt) -> object:
        if attempt.name == "open" and str(attempt.arguments[0]).endswith("homes"):
            raise PermissionError(13, "refused")
        return attempt.perform()

    with interposed(refused), pytest.raises(IoFailure):
        needed([tree])


# --- Reclaimable space ------------------------------------------------------------------------------


def used(*tops: Path) -> int:
    """The disk usage below these directories, counting each inode once."""
    if sys.platform == "win32":
        raise NotImplementedError
    found: dict[int, int] = {}
    for top in tops:
        for directory, _, files in os.walk(top):
            for path in [Path(directory), *(Path(directory) / name for name in files)]:
                status = path.lstat()
                found[status.st_ino] = status.st_blocks * 512
    return sum(found.values())


@pytest.mark.parametrize("seed", range(6))
def test_the_reclaimable_size_is_exact_for_each_number_of_removed_trees(tmp_path: Path, seed: int) -> None:
    """Random orders, random needs and files shared between trees; measured after each removal."""
    chance = random.Random(seed)
    snapshots, retained_trees = tmp_path / "snapshots", tmp_path / "remnants"
    retained_trees.mkdir()
    names = [f"tree{number}" for number in range(6)]
    for number, name in enumerate(names):
        tree = make(snapshots / name)
        (tree / "homes").unlink()
        for each in DIRECTORIES:
            (tree / "payload" / each / "large").write_bytes(bytes(chance.randrange(1, 40_000)))
            if number and chance.random() < 0.4:
                os.link(
                    snapshots / names[number - 1] / "payload" / each / "file",
                    tree / "payload" / each / "same",
                )
        others = {other: {each.encode() for each in chance.sample(DIRECTORIES, 2)} for other in names[:number]}
        with_shared(tree, **others)
    (snapshots / names[0]).rename(retained_trees / names[0])
    going = chance.sample(names[1:], 4)
    stay = [snapshots / name for name in names[1:] if name not in going]
    before = used(snapshots, retained_trees) - used_alone(snapshots, retained_trees)
    predicted = reclaimable_sizes([snapshots / name for name in going], needed(stay), [retained_trees / names[0]])
    assert predicted == sorted(predicted)
    for count in range(len(going) + 1):
        if count:
            (snapshots / going[count - 1]).rename(retained_trees / going[count - 1])
        need = needed(sorted(snapshots.iterdir()))
        for retained in sorted(retained_trees.iterdir()):
            trimmed(retained, need.get(retained.name, set()), tmp_path / "bin")
        after = used(snapshots, retained_trees) - used_alone(snapshots, retained_trees)
        assert before - after == predicted[count], count
    assert tree_bytes([*snapshots.iterdir(), *retained_trees.iterdir(), tmp_path / "none"]) == after


def used_alone(*directories: Path) -> int:
    if sys.platform == "win32":
        raise NotImplementedError
    return sum(each.stat().st_blocks * 512 for each in directories)


def test_a_removed_tree_with_an_invalid_list_is_still_counted(tmp_path: Path) -> None:
    tree = make(tmp_path / "tree")  # its list is invalid
    assert reclaimable_sizes([tree], {}) == [0, used(tree)]
    assert reclaimable_sizes([tree, tmp_path / "missing"], {"tree": {b"a"}})[2] < used(tree)
    assert calls.stat(tree / "homes").st_size > 0


def test_a_retained_tree_that_is_a_subvolume_is_trimmed_too(
    loop_mount: Callable[[str], LoopMount],
) -> None:
    place = loop_mount("btrfs").path
    source, bin_ = place / "source", place / "bin"
    subprocess.run(["btrfs", "subvolume", "create", str(source)], check=True, capture_output=True)
    for name in ("a", "a/b", "c"):
        (source / name).mkdir()
        (source / name / "file").write_text(name)
    (place / "snapshots").mkdir()
    first, second, third = (place / "snapshots" / name for name in ("one", "two", "three"))
    cache = place / "cache"
    time.sleep(0.05)
    capture(source, first, engine=Engine.BTRFS_SUBVOLUME, cache=cache, quiesced=True)
    share_tree(first, second)
    (source / "c" / "file").write_text("changed")
    time.sleep(0.05)
    captured = capture(source, third, engine=Engine.LINKED, base=second, cache=cache, quiesced=True)
    need = needed([third])["one"]
    assert b"a/b" in need
    assert b"c" not in need

    (place / "remnants").mkdir()
    first.rename(place / "remnants" / "one")
    bin_.mkdir()
    trim(place / "remnants" / "one", need, TrashDirectory(bin_))

    assert is_trimmed(place / "remnants" / "one", need)
    assert list(verify(third, captured.payload_hash)) == []
    assert not (place / "remnants" / "one" / "payload" / "c").exists()
