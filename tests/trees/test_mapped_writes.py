"""Writes that no event reports: through a mapping, through a name outside, or by asynchronous I/O.

A snapshot has them or is refused, and none stays invisible: what a snapshot lacks, the next comparison shows.
"""

from __future__ import annotations

import ctypes
import hashlib
import mmap
import os
import platform
import random
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from holdfast.errors import ConsistencyUnavailable
from holdfast.fs import calls
from holdfast.fs.mounts import filesystem_kind
from holdfast.trees import engines
from holdfast.trees.capture import capture_best
from holdfast.trees.engines import Engine, times_tell
from holdfast.trees.manifest import PAYLOAD, read_manifest
from holdfast.trees.restore import materialise
from holdfast.trees.shared_dirs import read_shared_directories
from holdfast.trees.verify import changes, verify
from holdfast.trees.walker import remove_tree, synced
from proof.effort import rounds
from proof.interpose import Attempt, interposed
from tests.support.loop_mounts import LoopMount
from tests.trees.test_capture import Snapshots, reads_during

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="needs Linux: its mappings, mounts and events"),
    pytest.mark.usefixtures("memory_as_memory"),
]

SIZE = 5 << 18  # it is read in several pieces


@contextmanager
def mapped(path: Path) -> Iterator[mmap.mmap]:
    """A file in a shared mapping, as `numpy.memmap` has it."""
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as mapping:
        yield mapping


def write_through(mapping: mmap.mmap, value: int) -> None:
    """Change the first and the last page."""
    mapping[0] = mapping[-1] = value


# --- While a file is read ------------------------------------------------------------------------------


def submit(path: Path, content: bytes) -> None:
    """Write to a file with io_submit, which reports no event."""
    if platform.machine() != "x86_64":
        pytest.skip("the numbers of the calls are those of x86_64")
    libc, context, event = ctypes.CDLL(None, use_errno=True), ctypes.c_uint64(), ctypes.create_string_buffer(32)
    buffer = ctypes.create_string_buffer(content, len(content))
    with path.open("r+b") as file:
        block = struct.pack(
            "<QIiHhIQQqQII", 0, 0, 0, 1, 0, file.fileno(), ctypes.addressof(buffer), len(content), *[0] * 4
        )
        blocks = (ctypes.c_char_p * 1)(block)
        assert libc.syscall(206, 1, ctypes.byref(context)) == 0
        assert libc.syscall(209, context, ctypes.c_long(1), blocks) == 1
        assert libc.syscall(208, context, ctypes.c_long(1), ctypes.c_long(1), event, None) == 1
        assert libc.syscall(207, context) == 0


def write_to_the_mapping(source: Path) -> None:
    with mapped(source / "data") as mapping:
        write_through(mapping, 7)


def write_to_the_name_outside(source: Path) -> None:
    with (source.parent / "outside").open("r+b") as file:
        file.write(b"\7" * SIZE)


WAYS: dict[str, Callable[[Path], None]] = {
    "mapping": write_to_the_mapping,
    "name outside": write_to_the_name_outside,
    "io_submit": lambda source: submit(source / "data", b"\7" * SIZE),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("where", ["disk", "memory"])
def test_a_file_written_while_it_is_read_is_not_published_as_quiesced(
    where: str, way: str, tmp_path: Path, scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshots = Snapshots(tmp_path if where == "disk" else scratch)
    snapshots.fill({"data": bytes(SIZE)})
    os.link(snapshots.source / "data", snapshots.place / "outside")
    snapshots.settle()
    monkeypatch.setattr("holdfast.trees.capture_directories._WORTH_WATCHING", 0)
    read, pieces = calls.read_into, list[int]()

    def write_after_the_first_piece(descriptor: int, buffer: memoryview) -> int:
        pieces.append(read(descriptor, buffer))
        if len(pieces) == 1:
            WAYS[way](snapshots.source)
        return pieces[-1]

    monkeypatch.setattr(calls, "read_into", write_after_the_first_piece)
    with pytest.raises(ConsistencyUnavailable, match="data"):
        snapshots.take()
    assert len(pieces) > 2


@pytest.mark.parametrize(("most", "cleaned"), [(3, "ccc"), (2, "ccs"), (None, "s")])
def test_pages_are_cleaned_before_a_file_is_read_and_only_then(
    most: int | None, cleaned: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files that are not read were cleaned by an earlier capture."""
    snapshots = Snapshots(tmp_path)
    snapshots.fill({f"d{number}/file": b"%d" % number for number in range(3)})
    snapshots.settle()
    monkeypatch.setattr("holdfast.trees.capture.times_tell", lambda *_: True)
    monkeypatch.setattr("holdfast.trees.capture.cleans_each_file", lambda _: most is not None)
    monkeypatch.setattr("holdfast.trees.capture._MOST_CLEANED", most)
    letters = {"start_writing": "c", "sync_filesystem": "s", "read": "r"}
    made: list[str] = []

    def note(attempt: Attempt) -> Any:
        made.append(letters[attempt.name])
        return attempt.perform()

    with interposed(note, tuple(letters)):
        snapshots.take()
        first, made[:] = "".join(made), []
        snapshots.take()

    assert first.endswith("".join(f"{each}r" for each in f"{cleaned:3}").replace(" ", ""))
    assert set(made) <= {"r"}


# --- 200 rounds ----------------------------------------------------------------------------------------


class Rounds:
    """Rounds of a program that writes through a mapping at any call of a capture."""

    base: Path | None = None
    engine: Engine | None = None

    def __init__(self, place: Path) -> None:
        self.place, self.source = place, place / "source"
        self.data = self.source / "data"
        self.cache, self.count = place / "cache", 0
        self.chance = random.Random(5)
        self.calls, self.value = 200, 0
        self.torn: list[int] = []
        self.lost: list[int] = []
        self.shown = 0
        for number in range(3):
            (self.source / f"d{number}").mkdir(parents=True)
            (self.source / f"d{number}" / "file").write_text(str(number))
        self.data.write_bytes(bytes(SIZE))

    def play(self) -> None:
        with mapped(self.data) as mapping:
            sum(mapping[:: mmap.PAGESIZE])  # the pages are mapped by reading
            for _ in range(self.chance.choice((0, 1, 1))):
                self._write(mapping)
            time.sleep(0.03)  # the file is not recent
            last = self.chance.randrange(1, 9)  # before the closing sync
            at = self.chance.choice((self.chance.randrange(self.calls), self.calls - last))
            self._capture(at, lambda: self._write(mapping))
            for _ in range(self.chance.choice((0, 0, 1))):
                self._write(mapping)
        if self.base is not None and self._captured(self.base) != self._current():
            self.shown += 1
            if not any(each.path == b"data" for each in changes(self.source, self.base, cache=self.cache)):
                self.lost.append(self.count)
        self._capture(-1, int)
        assert self.base is not None
        if self._captured(self.base) != self._current():
            self.lost.append(self.count)

    def _write(self, mapping: mmap.mmap) -> None:
        self.value = self.value % 250 + 1
        write_through(mapping, self.value)

    def _capture(self, at: int, change: Callable[[], object]) -> None:
        self.count += 1
        tree, made, quiesced = self.place / f"tree-{self.count}", 0, self.chance.random() < 0.7

        def changing(attempt: Attempt) -> Any:
            nonlocal made
            made += 1
            if made == at:
                change()
            return attempt.perform()

        try:
            with interposed(changing, (*calls.CHANGING, *calls.READING)), synced(self.place):
                options: dict[str, Any] = {"base": self.base, "cache": self.cache, "quiesced": quiesced}
                capture_best(self.source, tree, beside=self.place, wanted=self.engine, **options)
        except ConsistencyUnavailable:
            remove_tree(tree)
            return
        self.calls = made
        assert list(verify(tree)) == []
        if quiesced:
            content = self._stored(tree)
            if content[0] != content[-1]:
                self.torn.append(self.count)
        if self.base is not None and self.count % 20 == 0:
            remove_tree(self.base)  # the next one shares nothing
        self.base = tree

    def _stored(self, tree: Path) -> bytes:
        shared = read_shared_directories(tree).get(b"")
        return ((tree if shared is None else self.place / shared.tree) / PAYLOAD / "data").read_bytes()

    def _captured(self, tree: Path) -> str:
        return next(each.sha256 for each in read_manifest(tree) if each.path == b"data")

    def _current(self) -> str:
        return hashlib.sha256(self.data.read_bytes()).hexdigest()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", ["tmpfs", "ext4", "xfs", "btrfs", "subvolume"])
def test_no_write_through_a_mapping_is_lost(
    kind: str, scratch: Path, loop_mount: Callable[[str], LoopMount], monkeypatch: pytest.MonkeyPatch
) -> None:
    place = scratch if kind == "tmpfs" else loop_mount("btrfs" if kind == "subvolume" else kind).path
    if kind == "tmpfs" and filesystem_kind(place) != "tmpfs":
        pytest.skip("no tmpfs here")
    if kind == "subvolume":
        subprocess.run(["btrfs", "subvolume", "create", str(place / "source")], check=True, capture_output=True)
    trial = Rounds(place)
    for number in range(rounds(200, least=5)):
        monkeypatch.setattr("holdfast.trees.capture_directories._WORTH_WATCHING", number % 2 * 3000)
        trial.engine = None if number % 4 > 1 else Engine.LINKED  # the best one, or the one that copies
        trial.play()

    assert (trial.lost, trial.torn) == ([], [])
    assert trial.shown


# --- File systems whose times do not tell ---------------------------------------------------------------


@contextmanager
def overlay(place: Path, upper: Path) -> Iterator[Path]:
    """A file system that stores its files in another one."""
    if sys.platform == "win32" or os.getuid() != 0:
        pytest.skip("needs root to mount an overlay")
    lower, merged = place / "lower", place / "merged"
    for each in (lower, merged, upper / "upper", upper / "work"):
        each.mkdir()
    options = f"lowerdir={lower},upperdir={upper}/upper,workdir={upper}/work"
    done = subprocess.run(["mount", "-t", "overlay", "-o", options, "overlay", merged], capture_output=True, text=True)
    if done.returncode != 0:
        pytest.skip(f"cannot mount an overlay here: {done.stderr}")
    try:
        yield merged
    finally:
        subprocess.run(["umount", "--lazy", merged], check=False, capture_output=True)


def test_what_the_times_of_a_file_system_tell_is_tried(
    scratch: Path, tmp_path: Path, loop_mount: Callable[[str], LoopMount], monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = loop_mount("ext4").path
    assert times_tell(disk, disk)
    monkeypatch.setattr(engines, "_TIMED", frozenset())  # believe no name
    assert times_tell(disk, disk)
    assert not times_tell(disk, tmp_path)  # cannot be tried there
    (tmp_path / "disk").mkdir()
    with overlay(tmp_path / "disk", disk) as merged:
        assert times_tell(merged, merged)
    if filesystem_kind(scratch) == "tmpfs":
        assert not times_tell(scratch, scratch)
        (tmp_path / "memory").mkdir()
        with overlay(tmp_path / "memory", scratch) as merged:
            assert not times_tell(merged, merged)
    assert not [each for each in (*disk.iterdir(), *scratch.iterdir()) if "probe" in each.name]


@pytest.fixture
def in_memory(scratch: Path) -> Snapshots:
    if filesystem_kind(scratch) != "tmpfs":
        pytest.skip("no tmpfs here")
    made = Snapshots(scratch)
    made.fill({f"d{number}/file": b"%d" % number for number in range(3)})
    made.settle()
    return made


def test_in_memory_unchanged_directories_are_read_and_shared(in_memory: Snapshots) -> None:
    in_memory.take()
    (in_memory.source / "d1/file").write_bytes(b"changed")
    read = reads_during(in_memory.take, in_memory.source)
    second = in_memory.place / "tree-2"

    assert set(read) == {"d0/file", "d1/file", "d2/file"}
    assert set(read_shared_directories(second)) == {b"d0", b"d2", b""}
    assert [str(each.relative_to(second / PAYLOAD)) for each in (second / PAYLOAD).rglob("*")] == ["d1", "d1/file"]
    assert list(verify(second)) == []
    assert not in_memory.cache.exists()


def test_a_directory_restored_into_memory_is_compared_by_content(in_memory: Snapshots) -> None:
    tree, _ = in_memory.take()
    restored = in_memory.place / "restored"
    materialise(tree, restored, cache=in_memory.cache)
    with mapped(restored / "d1/file") as mapping:
        mapping[:]
        mapping[0] = 7
    found = changes(restored, tree, cache=in_memory.cache)

    assert [each.path for each in found if each.kind == "f"] == [b"d1/file"]


def test_a_cache_of_an_earlier_version_is_not_trusted(tmp_path: Path) -> None:
    """It may consider files unchanged that were written to through a mapping."""
    snapshots = Snapshots(tmp_path)
    snapshots.fill({"d/file": b"content"})
    snapshots.settle()
    snapshots.take()
    content = snapshots.cache.read_bytes()
    snapshots.cache.write_bytes(content.replace(b"stat cache 3", b"stat cache 2", 1))

    assert reads_during(snapshots.take, snapshots.source) == ["d/file"]
