"""Captures: cheap when little changed, faithful when everything did, or refused."""

from __future__ import annotations

import errno
import hashlib
import mmap
import os
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from holdfast.errors import ConsistencyUnavailable, IoFailure, NotFound, NotReadable
from holdfast.fs import calls, native
from holdfast.trees import capture_directories as directories
from holdfast.trees import scan as scanning
from holdfast.trees.capture import capture
from holdfast.trees.capture_directories import CapturedDirectory, SourceWatch
from holdfast.trees.engines import Engine
from holdfast.trees.manifest import PAYLOAD, READY, read_manifest
from holdfast.trees.restore import materialise
from holdfast.trees.results import Captured
from holdfast.trees.scan import StatCache
from holdfast.trees.shared_dirs import read_shared_directories
from holdfast.trees.verify import compare, verify
from holdfast.trees.walker import remove_tree
from proof.interpose import Attempt, interposed
from tests.support.loop_mounts import LoopMount
from tests.trees.groves import grow, seen, set_xattr

FILES = {f"d{number}/f{each}": b"%d %d" % (number, each) for number in range(3) for each in range(4)}


class Snapshots:
    """A source and its snapshots."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.source = place / "source"
        self.cache = place / "cache"
        self.count = 0

    def fill(self, files: dict[str, bytes]) -> None:
        for name, content in files.items():
            path = self.source / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)

    def settle(self) -> None:
        """Let the file system clock advance, so that no file counts as recent."""
        time.sleep(0.05)

    def take(self, **options: Any) -> tuple[Path, Captured]:
        base = self.place / f"tree-{self.count}" if self.count else None
        self.count += 1
        tree = self.place / f"tree-{self.count}"
        options = {"engine": Engine.LINKED, "base": base, "cache": self.cache, "quiesced": True} | options
        return tree, capture(self.source, tree, **options)


@pytest.fixture
def snapshots(tmp_path: Path) -> Snapshots:
    made = Snapshots(tmp_path)
    made.fill(FILES)
    made.settle()
    return made


def inodes(tree: Path) -> dict[str, int]:
    return {str(path.relative_to(tree)): path.lstat().st_ino for path in tree.rglob("*") if not path.is_dir()}


def reads_during(action: Callable[[], object], source: Path) -> list[str]:
    """The files of the source that the action opens."""
    opened: list[str] = []

    def note(attempt: Attempt) -> Any:
        result = attempt.perform()
        where = os.readlink(f"/proc/self/fd/{result}") if sys.platform == "linux" else ""
        if where.startswith(f"{source}/") and os.path.isfile(where):
            opened.append(where[len(str(source)) + 1 :])
        return result

    with interposed(note, ("open",)):
        action()
    return opened


# --- Cost follows the change ------------------------------------------------------------------------


@pytest.mark.req("WT-12")
def test_a_second_capture_reads_nothing_and_stores_nothing(snapshots: Snapshots) -> None:
    first, captured = snapshots.take()
    opened = reads_during(snapshots.take, snapshots.source)
    second = snapshots.place / "tree-2"

    assert opened == []
    assert list((second / PAYLOAD).iterdir()) == []
    assert {location.tree for location in read_shared_directories(second).values()} == {first.name}
    assert (first / "manifest").stat().st_ino == (second / "manifest").stat().st_ino
    assert captured.stored_bytes == captured.bytes > 0
    assert list(verify(second, captured.payload_hash)) == []


def test_only_changed_files_are_read_and_stored(snapshots: Snapshots) -> None:
    first, _ = snapshots.take()
    (snapshots.source / "d1/f2").write_bytes(b"changed")
    (snapshots.source / "d2/f0").unlink()
    (snapshots.source / "d0/new").write_bytes(b"new")
    (snapshots.source / "d0/f1").chmod(0o600)
    snapshots.settle()
    opened = reads_during(snapshots.take, snapshots.source)
    second = snapshots.place / "tree-2"

    assert sorted(set(opened)) == ["d0/f1", "d0/new", "d1/f2"]
    fresh = {name for name, inode in inodes(second / PAYLOAD).items() if inode not in inodes(first / PAYLOAD).values()}
    assert fresh == {"d0/f1", "d0/new", "d1/f2"}
    assert [(each.path, each.what) for each in compare(first, second) if each.kind == "f"] == [
        (b"d0/f1", "modified"),
        (b"d0/new", "added"),
        (b"d1/f2", "modified"),
        (b"d2/f0", "removed"),
    ]


def test_a_renamed_directory_is_neither_read_nor_stored_again(snapshots: Snapshots) -> None:
    snapshots.take()
    (snapshots.source / "d1").rename(snapshots.source / "moved")
    snapshots.settle()
    opened = reads_during(snapshots.take, snapshots.source)

    assert opened == []
    assert list(verify(snapshots.place / "tree-2")) == []


@pytest.mark.parametrize("damage", ["missing", "cut", "garbage", "bit", "foreign"])
def test_a_damaged_cache_only_costs_time(snapshots: Snapshots, damage: str) -> None:
    _, before = snapshots.take()
    content = snapshots.cache.read_bytes()
    damaged = {
        "missing": None,
        "cut": content[:-20],
        "garbage": b"garbage",
        "bit": content[:200] + bytes([content[200] ^ 1]) + content[201:],
        "foreign": content[:24] + b"\xff" + content[25:],
    }[damage]
    snapshots.cache.unlink()
    if damaged is not None:
        snapshots.cache.write_bytes(damaged)
    _, after = snapshots.take()

    assert after.payload_hash == before.payload_hash
    assert after.stored_bytes == 0  # equal files are linked anyway
    assert reads_during(snapshots.take, snapshots.source) == []  # the cache is whole again


def test_the_snapshot_shares_nothing_with_the_source(snapshots: Snapshots) -> None:
    for engine in (Engine.COPY, Engine.LINKED, Engine.REFLINK):
        tree, _ = snapshots.take(engine=engine)
        assert not set(inodes(tree).values()) & set(inodes(snapshots.source).values())


def test_entries_missing_from_a_damaged_base_are_taken_from_the_source(snapshots: Snapshots) -> None:
    first, _ = snapshots.take()
    (first / PAYLOAD / "d1/f1").unlink()
    remove_tree(first / PAYLOAD / "d2")
    second, captured = snapshots.take()

    assert list(verify(second, captured.payload_hash)) == []


def test_files_at_the_link_limit_are_copied(snapshots: Snapshots, monkeypatch: pytest.MonkeyPatch) -> None:
    link, limit = calls.link, 3

    def limited(source: Any, target: Any, **options: Any) -> None:
        if os.stat(source, dir_fd=options.get("src_dir_fd"), follow_symlinks=False).st_nlink >= limit:
            raise OSError(errno.EMLINK, os.strerror(errno.EMLINK))
        link(source, target, **options)

    monkeypatch.setattr(calls, "link", limited)
    trees = []
    for number in range(limit + 2):
        (snapshots.source / "d0/f1").write_bytes(b"%d" % number)
        snapshots.settle()
        trees.append(snapshots.take())

    assert all(list(verify(tree, captured.payload_hash)) == [] for tree, captured in trees)
    assert len({inodes(tree / PAYLOAD)["d0/f0"] for tree, _ in trees}) == 2


def test_a_full_disk_fails_the_links_of_a_changed_directory(
    snapshots: Snapshots, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshots.take()
    (snapshots.source / "d1/f2").write_bytes(b"changed")
    snapshots.settle()
    link = calls.link
    made: list[object] = []

    def full(*arguments: Any, **options: Any) -> None:
        if len(made) > 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        made.append(arguments)
        link(*arguments, **options)

    monkeypatch.setattr(calls, "link", full)
    with pytest.raises(IoFailure, match="No space left"):
        snapshots.take()
    assert not (snapshots.place / "tree-2" / READY).exists()


# --- Recently changed files -------------------------------------------------------------------------


def racy(snapshots: Snapshots, monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Capture, change a file without changing its status, capture again; return the paths the second one missed.

    This simulates a file system with coarse timestamps: the marks of the two states are made equal.
    """
    monkeypatch.setattr(scanning, "_TICK", 60_000_000_000)  # however slow this machine is
    monkeypatch.setattr(scanning, "_COARSE_TICK", 60_000_000_000)
    target = snapshots.source / "d1/f1"
    target.write_bytes(b"old!")
    snapshots.take()
    inode = target.stat().st_ino
    frozen = scanning.mark_of(target.stat())
    target.write_bytes(b"new!")
    pack = scanning.MARK.pack

    class Frozen:
        """Packs marks with the time frozen for one file."""

        size, unpack_from, iter_unpack = (
            scanning.MARK.size,
            scanning.MARK.unpack_from,
            scanning.MARK.iter_unpack,
        )

        @staticmethod
        def pack(*fields: int) -> bytes:
            return frozen if fields[0] == inode else pack(*fields)

    monkeypatch.setattr(scanning, "MARK", Frozen)
    second, _ = snapshots.take()
    wanted = hashlib.sha256(b"new!").hexdigest()
    return [each.path for each in read_manifest(second) if each.path == b"d1/f1" and each.sha256 != wanted]


def test_a_recently_changed_file_is_read_again(snapshots: Snapshots, monkeypatch: pytest.MonkeyPatch) -> None:
    assert racy(snapshots, monkeypatch) == []


def test_trusting_the_times_of_a_recent_file_is_found(snapshots: Snapshots, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: marks of recent files are kept in the cache."""
    monkeypatch.setattr("holdfast.trees.capture_directories.without_recent", lambda identity, _listing, _now: identity)
    assert racy(snapshots, monkeypatch) == [b"d1/f1"]


def racy_directory(snapshots: Snapshots, monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """The same for an extended attribute of a directory."""
    target = snapshots.source / "d1"
    snapshots.settle()
    set_xattr(target, "user.colour", b"red")
    first, _ = snapshots.take()
    if not any(each.xattrs for each in read_manifest(first)):
        pytest.skip("no extended attributes here")
    own_mark, frozen = scanning.own_mark, target.stat()
    set_xattr(target, "user.colour", b"blue")

    def freeze(own: os.stat_result, *lengths: int) -> bytes:
        return own_mark(frozen if own.st_ino == frozen.st_ino else own, *lengths)

    monkeypatch.setattr(scanning, "own_mark", freeze)
    second, _ = snapshots.take()
    wanted = ((b"user.colour", b"blue"),)
    return [each.path for each in read_manifest(second) if each.path == b"d1" and each.xattrs != wanted]


def test_a_recently_changed_directory_is_read_again(snapshots: Snapshots, monkeypatch: pytest.MonkeyPatch) -> None:
    assert racy_directory(snapshots, monkeypatch) == []


def test_trusting_the_time_of_a_recent_directory_is_found(
    snapshots: Snapshots, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted: the time of a recently changed directory is kept in the cache."""
    monkeypatch.setattr("holdfast.trees.capture_directories.without_recent", lambda identity, _listing, _now: identity)
    assert racy_directory(snapshots, monkeypatch) == [b"d1"]


# --- Concurrent changes -----------------------------------------------------------------------------


def changes_at(step: int, change: Callable[[], object]) -> Callable[[int, int], None]:
    """A progress callback that makes a change once this many directories are captured."""
    seen_steps = 0

    def progress(_files: int, _bytes: int) -> None:
        nonlocal seen_steps
        seen_steps += 1
        if seen_steps == step:
            change()

    return progress


CHANGES: dict[str, Callable[[Path], object]] = {
    "content": lambda source: (source / "d0/f0").write_bytes(b"0 1"),
    "mode": lambda source: (source / "d0/f0").chmod(0o600),
    "new name": lambda source: (source / "d0/new").touch(),
    "new directory": lambda source: (source / "d0/below").mkdir(),
    "removed": lambda source: (source / "d0/f0").unlink(),
    "renamed": lambda source: (source / "d0/f0").rename(source / "d0/f9"),
    "moved up": lambda source: (source / "d0").rename(source / "e0"),
    "replaced": lambda source: os.replace(source / "d0/f1", source / "d0/f0"),
    "a link": lambda source: (source / "d0/link").symlink_to("f0"),
    "xattr": lambda source: set_xattr(source / "d0/f0", "user.a", b"b"),
}


@pytest.mark.parametrize("known", [False, True], ids=["first", "second"])
@pytest.mark.parametrize("listening", [True, False], ids=["told", "looking"])
@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.sampled(11)
def test_any_change_after_a_directory_is_captured_is_noticed(
    snapshots: Snapshots, name: str, listening: bool, known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if listening:
        monkeypatch.setattr("holdfast.trees.capture_directories._WORTH_WATCHING", 0)
        monkeypatch.setattr("holdfast.trees.capture.scan_again", lambda *_: None)
    if known:
        snapshots.take()
    with pytest.raises(ConsistencyUnavailable, match=r"changed while it was captured: (d0|e0|\.)"):
        snapshots.take(progress=changes_at(2, lambda: CHANGES[name](snapshots.source)))


def test_a_change_just_before_the_watch_forces_a_second_scan(
    snapshots: Snapshots, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No event reports it; only the time of the directory shows it."""
    monkeypatch.setattr("holdfast.trees.capture_directories._WORTH_WATCHING", 0)
    again: list[str] = []
    add = SourceWatch.add

    def change_and_add(watch: SourceWatch, directory: int, path: str) -> bool:
        if path == "d1":
            (snapshots.source / "d1/f0").unlink()
        return add(watch, directory, path)

    def noted(_source: object, captured: Iterable[CapturedDirectory], _stats: object) -> None:
        again.extend(each.path for each in captured)

    monkeypatch.setattr(SourceWatch, "add", change_and_add)
    monkeypatch.setattr("holdfast.trees.capture.scan_again", noted)
    snapshots.take()

    assert again == ["", "d0", "d1", "d2"]


def test_a_best_effort_capture_continues_when_files_vanish_and_directories_change(snapshots: Snapshots) -> None:
    def wreck() -> None:
        remove_tree(snapshots.source / "d1")
        (snapshots.source / "d2/f1").unlink()
        (snapshots.source / "d2/f2").write_bytes(b"something else altogether")

    tree, captured = snapshots.take(quiesced=False, progress=changes_at(1, wreck))

    assert list(verify(tree, captured.payload_hash)) == []
    names = {each.path for each in read_manifest(tree)}
    assert b"d2/f0" in names
    assert b"d1/f0" not in names
    materialise(tree, snapshots.place / "restored")


def test_a_directory_that_becomes_a_link_is_not_followed(snapshots: Snapshots, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_bytes(b"secret")

    def swap() -> None:
        remove_tree(snapshots.source / "d1")
        (snapshots.source / "d1").symlink_to(outside)

    tree, _ = snapshots.take(quiesced=False, progress=changes_at(1, swap))

    assert not any(b"secret" in each.path for each in read_manifest(tree))


def test_the_source_itself_may_not_vanish(snapshots: Snapshots) -> None:
    remove_tree(snapshots.source)
    with pytest.raises(NotFound):
        snapshots.take()


# --- Permissions and full disks ---------------------------------------------------------------------


def as_nobody(place: Path) -> str:
    """Capture and restore in another process as an unprivileged user, and return the outcome."""
    if sys.platform == "win32":
        raise NotImplementedError
    if os.getuid() != 0:
        pytest.skip("needs root to switch users")
    assert None not in (mmap, native)  # loaded before dropping the privileges to load them
    out = place / "out"
    out.mkdir()
    os.chown(out, 65534, 65534)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setgid(65534)
            os.setuid(65534)
            os.write(writer, _capture_and_restore(place, out).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with open(reader) as said:
        answer = said.read()
    os.waitpid(child, 0)
    return answer


def _capture_and_restore(place: Path, out: Path) -> str:
    try:
        captured = capture(place / "source", out / "tree", engine=Engine.COPY, quiesced=True)
        made = materialise(out / "tree", out / "restored")
    except Exception as error:
        return f"{getattr(error, 'code', '')} {error}"
    return f"{captured.payload_hash} {len(made.not_preserved)}"


def test_an_unreadable_file_is_named(scratch: Path) -> None:
    scratch.chmod(0o755)
    snapshots = Snapshots(scratch)
    snapshots.fill({"a/fine": b"", "a/secret": b""})
    (snapshots.source / "a/secret").chmod(0o600)

    assert as_nobody(scratch).startswith(f"{NotReadable.code} cannot read {snapshots.source}/a/secret: ")


def test_without_privileges_the_owner_is_recorded_and_its_loss_reported(scratch: Path) -> None:
    scratch.chmod(0o755)
    snapshots = Snapshots(scratch)
    snapshots.fill({"a/b": b"mine", "c": b"mine"})
    _, captured = snapshots.take(engine=Engine.COPY, cache=None)

    assert as_nobody(scratch) == f"{captured.payload_hash} 4"  # two files, two directories


def test_a_full_disk_is_a_failure_and_no_tree_is_ready(snapshots: Snapshots, monkeypatch: pytest.MonkeyPatch) -> None:
    write = calls.write

    def full(descriptor: int, content: Any) -> int:
        if b"2 2" in bytes(content):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(descriptor, content)

    monkeypatch.setattr(calls, "write", full)
    with pytest.raises(IoFailure, match="No space left"):
        snapshots.take()
    assert not (snapshots.place / "tree-1" / READY).exists()


# --- Unusual trees ----------------------------------------------------------------------------------


def test_special_files_are_reported_and_never_opened(tmp_path: Path) -> None:
    source = grow(tmp_path / "source")
    for base in (None, tmp_path / "tree-1"):
        tree = tmp_path / f"tree-{1 if base is None else 2}"
        captured = capture(source, tree, engine=Engine.LINKED, base=base, cache=tmp_path / "cache", quiesced=True)
        assert {"fifo: fifo", "socket: socket"} <= set(captured.special)
        assert captured.not_preserved == ()


def test_a_mount_point_is_not_entered(tmp_path: Path, loop_mount: Callable[[str], LoopMount]) -> None:
    mounted = loop_mount("ext4")
    (mounted.path / "inside").write_bytes(b"")
    tree = tmp_path / "tree"
    captured = capture(mounted.path.parent, tree, engine=Engine.COPY, quiesced=False)

    assert captured.not_preserved == ("ext4: another filesystem is mounted there",)
    assert {each.path: each.kind for each in read_manifest(tree)}[b"ext4"] == "m"
    assert list(verify(tree, captured.payload_hash)) == []
    restored = materialise(tree, tmp_path / "restored")
    assert (tmp_path / "restored" / "ext4").is_dir()
    assert restored.not_preserved == ("ext4: the filesystem mounted there was not captured",)


def test_a_tree_deeper_than_the_path_limit_is_captured_restored_and_removed(tmp_path: Path) -> None:
    depth, name = 700, "directory"
    (tmp_path / "source").mkdir()
    here = os.open(tmp_path / "source", os.O_RDONLY)
    for _ in range(depth):
        os.mkdir(name, dir_fd=here)
        below = os.open(name, os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    os.close(os.open("file", os.O_CREAT | os.O_WRONLY, dir_fd=here))
    os.close(here)
    first = capture(tmp_path / "source", tmp_path / "a", engine=Engine.LINKED, quiesced=True)
    materialise(tmp_path / "a", tmp_path / "restored")
    again = capture(tmp_path / "restored", tmp_path / "b", engine=Engine.LINKED, base=tmp_path / "a", quiesced=True)

    assert (first.files, first.directories) == (1, depth + 1)
    assert again.payload_hash == first.payload_hash
    assert list(verify(tmp_path / "b", first.payload_hash)) == []
    for each in ("source", "a", "b", "restored"):
        assert remove_tree(tmp_path / each)
        assert not (tmp_path / each).exists()


def test_a_moved_hard_link_is_recorded_under_its_new_name(snapshots: Snapshots) -> None:
    """A directory whose files have other names is never reused as a whole: they may have moved."""
    os.link(snapshots.source / "d0/f0", snapshots.source / "d2/twin")
    snapshots.settle()
    first, _ = snapshots.take()
    (snapshots.source / "d0").rename(snapshots.source / "z0")
    snapshots.settle()
    second, cached = snapshots.take()
    _, plain = snapshots.take(engine=Engine.COPY, base=None, cache=None)

    assert cached.payload_hash == plain.payload_hash
    links = {each.path: each.first_link for each in read_manifest(second) if each.first_link}
    assert links == {b"z0/f0": b"d2/twin"}
    assert {each.path: each.first_link for each in read_manifest(first) if each.first_link} == {b"d2/twin": b"d0/f0"}


def test_progress_counts_up(snapshots: Snapshots) -> None:
    told: list[tuple[int, int]] = []
    _, captured = snapshots.take(progress=lambda files, size: told.append((files, size)))

    assert told == sorted(told)
    assert told[-1] == (captured.files, captured.bytes)


def test_a_restored_directory_is_captured_without_reading_it(tmp_path: Path) -> None:
    source = grow(tmp_path / "source")
    first = capture(source, tmp_path / "a", engine=Engine.LINKED, quiesced=True)
    materialise(tmp_path / "a", tmp_path / "restored", cache=tmp_path / "cache")
    restored = tmp_path / "restored"
    opened = reads_during(
        lambda: capture(
            restored,
            tmp_path / "b",
            engine=Engine.LINKED,
            base=tmp_path / "a",
            cache=tmp_path / "cache",
            quiesced=True,
        ),
        restored,
    )

    assert opened == []
    assert list(verify(tmp_path / "b", first.payload_hash)) == []
    assert seen(restored) == seen(source)


def test_a_linked_payload_is_found(snapshots: Snapshots) -> None:
    """Planted: a snapshot that hard-links the source changes with it, and `verify` reports it."""
    tree, captured = snapshots.take()
    (tree / PAYLOAD / "d0/f0").unlink()
    os.link(snapshots.source / "d0/f0", tree / PAYLOAD / "d0/f0")
    (snapshots.source / "d0/f0").write_bytes(b"9 9")

    problem = next(verify(tree, captured.payload_hash))
    assert (problem.path, problem.what) == ("d0/f0", "content")


# --- Changes between scan and read ---------------------------------------------------------------------


def change_after_the_scan(
    monkeypatch: pytest.MonkeyPatch, name: str, number: int, change: Callable[[], object]
) -> None:
    """Make a change right after the directory with this file is scanned for the `number`th time."""
    scan, seen = scanning.scan_directory, list[str]()

    def scanned(descriptor: int) -> scanning.Listing:
        found = scan(descriptor)
        if name in found.names:
            seen.append(name)
            if len(seen) == number:
                change()
        return found

    monkeypatch.setattr(directories, "scan_directory", scanned)


@pytest.mark.parametrize("content", [b"longer than before", b"old"], ids=["other", "again"])
def test_a_hard_linked_file_that_changes_between_its_names_is_stored_twice(
    snapshots: Snapshots, monkeypatch: pytest.MonkeyPatch, content: bytes
) -> None:
    """The first name is already copied; the second must not become a link to it if the file has changed since."""
    snapshots.fill({"x/twice": b"old"})
    (snapshots.source / "y").mkdir()
    os.link(snapshots.source / "x/twice", snapshots.source / "y/twice")
    change_after_the_scan(monkeypatch, "twice", 2, lambda: (snapshots.source / "x/twice").write_bytes(content))
    tree, captured = snapshots.take(quiesced=False)

    assert list(verify(tree, captured.payload_hash)) == []
    assert [(tree / PAYLOAD / each / "twice").read_bytes() for each in "xy"] == [b"old", content]


def test_a_second_name_removed_before_it_is_read_leaves_nothing(
    snapshots: Snapshots, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshots.fill({"x/twice": b"old"})
    (snapshots.source / "y").mkdir()
    os.link(snapshots.source / "x/twice", snapshots.source / "y/twice")
    change_after_the_scan(monkeypatch, "twice", 2, (snapshots.source / "y/twice").unlink)
    tree, captured = snapshots.take(quiesced=False)

    assert list(verify(tree, captured.payload_hash)) == []
    assert not (tree / PAYLOAD / "y/twice").exists()


def test_the_time_of_a_file_changed_after_the_scan_is_not_trusted(
    snapshots: Snapshots, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It changed so shortly before it was read that another change may leave the same time."""
    snapshots.fill({"x/late": b"one"})
    snapshots.settle()
    change_after_the_scan(monkeypatch, "late", 1, lambda: (snapshots.source / "x/late").write_bytes(b"two"))
    snapshots.take(quiesced=False)
    known = StatCache.read(snapshots.cache, snapshots.source.stat().st_dev).known(
        (snapshots.source / "x").stat().st_ino
    )

    assert known is not None
    assert scanning.marks_by_name(known.identity) == {b"late": scanning.NO_MARK}
