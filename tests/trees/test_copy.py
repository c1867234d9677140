"""Copies of large files: the hash matches the bytes written, however they are split."""

from __future__ import annotations

import hashlib
import os
import random
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.fs import calls
from holdfast.trees import copy
from holdfast.trees.copy import copy_file, hash_file
from proof.effort import rounds
from tests.trees.test_random_trees import place

CHUNK, BLOCK = 16, 64


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Treat every file as large, and hash in a thread."""
    make_small(monkeypatch)


def make_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copy, "_SMALL", 0)
    monkeypatch.setattr(copy, "_CHUNK", CHUNK)
    monkeypatch.setattr(copy, "_BLOCK", BLOCK)
    monkeypatch.setattr(copy, "_BLOCKS", 2)
    monkeypatch.setattr(copy, "_WORTH_A_THREAD", 0)
    monkeypatch.setattr(copy, "_WORTH_STARTING", 100)


def copied(source: Path, target: Path) -> bytes:
    """Copy a file and return the bytes written; the reported hash and size must match them."""
    reading = os.open(source, os.O_RDONLY)
    writing = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    try:
        content = copy_file(reading, os.fstat(reading), writing)
        os.lseek(reading, 0, os.SEEK_SET)
        hashed = hash_file(reading, os.fstat(reading).st_size)
    finally:
        os.close(reading)
        os.close(writing)
    written = target.read_bytes()
    assert content.digest == hashlib.sha256(written).digest()
    assert (content.size, content.digest) == (len(written), hashed.digest)
    return written


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("size", [0, 1, CHUNK, CHUNK + 1, BLOCK - 1, BLOCK, BLOCK + 1, 10 * BLOCK + 3])
def test_a_file_of_any_size_is_copied_and_hashed(tmp_path: Path, size: int) -> None:
    (tmp_path / "source").write_bytes(random.Random(size).randbytes(size))
    assert copied(tmp_path / "source", tmp_path / "target") == (tmp_path / "source").read_bytes()


def test_a_really_large_file_is_copied_and_hashed(tmp_path: Path) -> None:
    size = copy._WORTH_A_THREAD + copy._BLOCK + 5
    (tmp_path / "source").write_bytes(random.Random(1).randbytes(size))
    assert copied(tmp_path / "source", tmp_path / "target") == (tmp_path / "source").read_bytes()


@given(seed=st.integers(0, 1 << 30), size=st.integers(0, 700))
@settings(max_examples=rounds(60, least=5), deadline=None)
def test_short_reads_of_any_size_are_handled(seed: int, size: int) -> None:
    chance, read = random.Random(seed), calls.read_into

    def little(descriptor: int, buffer: memoryview) -> int:
        return read(descriptor, buffer[: chance.randint(1, CHUNK)])

    with pytest.MonkeyPatch.context() as monkeypatch, place() as here:
        make_small(monkeypatch)
        monkeypatch.setattr(calls, "read_into", little)
        (here / "file").write_bytes(chance.randbytes(size))
        assert copied(here / "file", here / "target") == (here / "file").read_bytes()


@given(places=st.lists(st.tuples(st.integers(0, 40), st.integers(1, 9000)), max_size=4), end=st.integers(0, 3))
@settings(max_examples=rounds(40, least=5), deadline=None)
@pytest.mark.long
def test_holes_are_hashed_as_zeros(places: list[tuple[int, int]], end: int) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch, place() as here:
        make_small(monkeypatch)
        with (here / "file").open("wb") as file:
            for start, length in places:
                file.seek(start * 4096)
                file.write(random.Random(start).randbytes(length))
            file.truncate(max(os.fstat(file.fileno()).st_size, 50 * 4096 + end))
        assert copied(here / "file", here / "target") == (here / "file").read_bytes()


@pytest.mark.usefixtures("small")
def test_a_buffer_that_is_reused_too_soon_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: the next bytes are read into a buffer that the other thread has yet to hash."""

    class Slow:
        def __init__(self) -> None:
            self._digest = hashlib.sha256()

        def update(self, piece: memoryview) -> None:
            time.sleep(0.005)
            self._digest.update(piece)

        def digest(self) -> bytes:
            return self._digest.digest()

    def keep(self: Any) -> None:
        if self._filled:
            self._pieces.put((self._block[: self._filled], None))
            self._filled = 0

    def begin(self: Any) -> None:
        make(self)
        self._digest = Slow()

    make = copy._HashingThread.__init__
    (tmp_path / "source").write_bytes(random.Random(2).randbytes(5 * BLOCK))
    monkeypatch.setattr(copy._HashingThread, "__init__", begin)
    assert copied(tmp_path / "source", tmp_path / "target") == (tmp_path / "source").read_bytes()
    monkeypatch.setattr(copy._HashingThread, "_hand_over", keep)
    with pytest.raises(AssertionError):
        copied(tmp_path / "source", tmp_path / "target")


# --- Stale status --------------------------------------------------------------------------------------


def copied_as(status: os.stat_result, source: Path, target: Path) -> bytes:
    """Copy a file with a possibly stale status; the reported hash must match the bytes written."""
    reading = os.open(source, os.O_RDONLY)
    writing = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    try:
        content = copy_file(reading, status, writing)
    finally:
        os.close(reading)
        os.close(writing)
    written = target.read_bytes()
    assert (content.size, content.digest) == (len(written), hashlib.sha256(written).digest())
    return written


@pytest.mark.parametrize("beyond", [0, 1, 1 << 20])
def test_a_growing_sparse_file_has_the_hash_of_the_bytes_written(tmp_path: Path, beyond: int) -> None:
    with (tmp_path / "source").open("wb") as file:
        file.truncate(3 << 20)
    before = (tmp_path / "source").stat()
    with (tmp_path / "source").open("r+b") as file:
        file.seek((3 << 20) + beyond)
        file.write(b"more" * 5000)
    written = copied_as(before, tmp_path / "source", tmp_path / "target")
    assert written[: 3 << 20] == bytes(3 << 20)


@pytest.mark.parametrize("size", [1, 2999, 3000, 3001])
def test_a_small_file_is_read_to_its_end_despite_short_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    (tmp_path / "source").write_bytes(random.Random(3).randbytes(3000))
    (tmp_path / "before").write_bytes(bytes(size))  # it was shorter, or longer
    read = calls.read
    monkeypatch.setattr(calls, "read", lambda descriptor, count: read(descriptor, min(count, 1000)))
    written = copied_as((tmp_path / "before").stat(), tmp_path / "source", tmp_path / "target")
    assert written == (tmp_path / "source").read_bytes()


@pytest.mark.usefixtures("small")
def test_without_a_thread_the_file_is_hashed_by_the_caller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(copy._HashingThread, "start", refuse)
    (tmp_path / "source").write_bytes(bytes(range(200)))
    assert copied(tmp_path / "source", tmp_path / "target") == bytes(range(200))
