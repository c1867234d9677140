"""The stat cache of a source: appended to while little changes, never trusted where it is damaged."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path

import pytest

from holdfast.trees.capture import capture
from holdfast.trees.engines import Engine
from holdfast.trees.results import Captured
from holdfast.trees.scan import KnownDirectory, StatCache, append_to_cache, write_cache
from holdfast.trees.verify import verify

DEVICE = 7


def known(inode: int, word: str, path: str = "") -> KnownDirectory:
    return KnownDirectory(
        os.fsencode(path or f"d{inode}"),
        inode.to_bytes(8, "little") + word.encode(),
        b"body " + word.encode(),
    )


def first_part(path: Path, count: int = 20) -> list[KnownDirectory]:
    every = [known(inode, f"first {inode}") for inode in range(1, count + 1)]
    write_cache(path, DEVICE, every)
    return every


def test_written_records_are_known(tmp_path: Path) -> None:
    every = first_part(tmp_path / "cache")
    read = StatCache.read(tmp_path / "cache", DEVICE)
    assert [read.known(inode) for inode in range(1, 21)] == every
    assert read.known(99) is None
    assert len(StatCache.read(tmp_path / "cache", DEVICE + 1)) == 0
    assert len(StatCache.read(tmp_path / "nothing", DEVICE)) == 0


def test_the_last_of_several_records_wins(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    every = first_part(cache)
    for word in ("second", "third"):
        assert append_to_cache(cache, StatCache.read(cache, DEVICE), [known(3, word), known(30, word)])
    read = StatCache.read(cache, DEVICE)

    assert read.known(3) == known(3, "third")
    assert read.known(30) == known(30, "third")
    assert read.known(4) == every[3]
    assert (len(read), len(read.parts)) == (21, 3)


def test_a_cache_changed_by_another_process_is_not_appended_to(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    first_part(cache)
    before = StatCache.read(cache, DEVICE)
    assert append_to_cache(cache, StatCache.read(cache, DEVICE), [known(1, "other")])
    content = cache.read_bytes()
    assert not append_to_cache(cache, before, [known(1, "mine")])
    assert cache.read_bytes() == content
    cache.unlink()
    assert not append_to_cache(cache, before, [known(1, "mine")])
    assert not cache.exists()


def test_the_cache_never_grows_beyond_twice_its_size(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    first_part(cache)
    size, rounds = cache.stat().st_size, 0
    while append_to_cache(cache, StatCache.read(cache, DEVICE), [known(1, "again")]):
        rounds += 1
        assert rounds < 1000
    assert rounds > 3
    assert size < cache.stat().st_size <= 2 * size


def test_a_torn_part_is_ignored_and_the_parts_before_it_are_used(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    every = first_part(cache)
    whole = cache.stat().st_size
    assert append_to_cache(cache, StatCache.read(cache, DEVICE), [known(3, "second")])
    content = cache.read_bytes()
    for length in range(len(content)):
        cache.write_bytes(content[:length])
        read = StatCache.read(cache, DEVICE)
        if length < whole:
            assert len(read) == 0, length
        else:
            assert read.known(3) == every[2], length
            assert read.parts == [whole], length
            torn = length > whole
            assert append_to_cache(cache, read, [known(5, "late")]) is not torn, length


def test_a_corrupt_part_and_all_parts_after_it_are_ignored(tmp_path: Path) -> None:
    cache, chance = tmp_path / "cache", random.Random(3)
    first_part(cache)
    sizes = [cache.stat().st_size]
    for word in ("second", "third"):
        assert append_to_cache(cache, StatCache.read(cache, DEVICE), [known(3, word)])
        sizes.append(cache.stat().st_size)
    content = cache.read_bytes()
    for _ in range(200):
        at = chance.randrange(len(content))
        wrong = bytearray(content)
        wrong[at] ^= 1 << chance.randrange(8)
        read = StatCache(bytes(wrong), DEVICE)
        assert read.parts == [size for size in sizes if size <= at], at


# --- In captures ------------------------------------------------------------------------------------


class Source:
    def __init__(self, top: Path, directories: int = 30) -> None:
        self.top, self.source, self.cache, self.count = top, top / "source", top / "cache", 0
        for number in range(directories):
            (self.source / f"d{number}").mkdir(parents=True)
            (self.source / f"d{number}/file").write_text(str(number))

    def take(self) -> tuple[Path, Captured]:
        time.sleep(0.03)
        base = self.top / str(self.count) if self.count else None
        self.count += 1
        tree = self.top / str(self.count)
        return tree, capture(self.source, tree, engine=Engine.LINKED, base=base, cache=self.cache, quiesced=True)

    def require_correct(self) -> None:
        tree, captured = self.take()
        copied = capture(self.source, self.top / f"copy-{self.count}", engine=Engine.COPY, quiesced=True)
        assert captured.payload_hash == copied.payload_hash
        assert list(verify(tree, captured.payload_hash)) == []


@pytest.fixture
def source(tmp_path: Path) -> Source:
    return Source(tmp_path)


def test_only_changed_records_are_appended(source: Source) -> None:
    source.take()
    content = source.cache.read_bytes()
    source.take()
    assert source.cache.read_bytes() == content
    (source.source / "d3/file").write_text("changed")
    source.require_correct()
    grown = source.cache.read_bytes()
    assert grown.startswith(content)
    assert 0 < len(grown) - len(content) < len(content) // 4
    source.require_correct()
    assert source.cache.read_bytes() == grown


def test_a_mostly_stale_cache_is_rewritten(source: Source) -> None:
    source.take()
    size = source.cache.stat().st_size
    for number in range(3, 30):
        (source.source / f"d{number}/file").unlink()
        (source.source / f"d{number}").rmdir()
    source.require_correct()
    assert source.cache.stat().st_size < size // 4


def test_a_capture_with_a_truncated_cache_is_correct(source: Source) -> None:
    source.take()
    chance = random.Random(5)
    for number in range(12):
        (source.source / f"d{number}/file").write_text(f"changed {number}")
        source.require_correct()
        content = source.cache.read_bytes()
        source.cache.write_bytes(content[: chance.randrange(len(content) * 3 // 4, len(content))])
        source.require_correct()
