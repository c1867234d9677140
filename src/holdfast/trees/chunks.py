"""The chunks of a tree: its manifest and its files in pieces that are identified by their SHA-256.

A small file is one chunk, whose hash is in the manifest. A chunk list names the pieces of the manifest and of large
files. The manifest is cut between records, where the paths say so: an unchanged part of it is the same chunk again.
"""

from __future__ import annotations

import hashlib
import os
import struct
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Protocol

import msgspec

from holdfast.errors import Corrupt
from holdfast.fs import calls
from holdfast.fs.directory import opened
from holdfast.store.content import ChunkHash
from holdfast.store.model import StructCodec
from holdfast.trees.manifest import (
    END,
    MAGIC,
    RECORD,
    Manifest,
    digest_of,
    plain_file,
    raw_entries,
    size_of,
)
from holdfast.trees.payload import READ
from holdfast.trees.shared_dirs import Stored
from holdfast.trees.walker import shown

CHUNK = 4 << 20
_CUT_EVERY = 64  # directories, on average
_LONGEST_LIST = 64 << 20


class ChunkList(msgspec.Struct, frozen=True, kw_only=True):
    """The chunks of the segments of a manifest, and of each file that is larger than a chunk, by its hash."""

    schema_version: int = 1
    manifest: tuple[tuple[ChunkHash, ...], ...]
    large: dict[ChunkHash, tuple[ChunkHash, ...]] = {}


CHUNK_LIST: StructCodec[ChunkList] = StructCodec(ChunkList, pretty=False, limit=_LONGEST_LIST)


class ChunkSource(Protocol):
    """Provides chunks, each compared with its hash. Raises `Corrupt` if one is missing or altered."""

    def expect(self, hashes: Collection[str]) -> None:
        """Announce the chunks that will be needed."""

    def chunks(self, hashes: Collection[str]) -> Mapping[str, bytes]: ...

    def pieces(self, file: str) -> Sequence[str]:
        """The chunks of a large file."""


def hash_of(chunk: bytes) -> str:
    return hashlib.sha256(chunk).hexdigest()


def pieces_of(content: bytes) -> Iterator[bytes]:
    return (content[at : at + CHUNK] for at in range(0, len(content), CHUNK))


def segments(manifest: Manifest) -> Iterator[bytes]:
    """The bytes of a manifest, cut between records."""
    parts = [MAGIC]
    for path, body in manifest.records():
        parts += (RECORD.pack(len(path), len(body)), path, body)
        if zlib.crc32(path) % _CUT_EVERY == 0:
            yield b"".join(parts)
            parts = []
    yield b"".join([*parts, RECORD.pack(END, len(manifest))])


def files_in(segment: bytes) -> Iterator[tuple[str, int]]:
    """The hash and the size of every file that a segment lists."""
    at = len(MAGIC) if segment.startswith(MAGIC) else 0
    try:
        while at < len(segment):
            length, size = RECORD.unpack_from(segment, at)
            if length == END:
                return
            start = at + RECORD.size + length
            at = start + size
            for raw in raw_entries(segment[start:at]).values():
                if raw[:1] == b"f":
                    yield digest_of(raw).hex(), size_of(raw)
    except struct.error as error:
        raise Corrupt(f"a chunk of a manifest is broken: {error}") from None


def small_files(records: Iterable[tuple[bytes, bytes]]) -> set[str]:
    """The hashes of the small files in these records of a manifest."""
    raws = (raw for _, body in records for raw in raw_entries(body).values())
    return {digest_of(raw).hex() for raw in raws if raw[:1] == b"f" and 0 < size_of(raw) <= CHUNK}


def is_large(size: int) -> bool:
    return size > CHUNK


class StoredFile:
    """A file of a tree, to be read in chunks."""

    __slots__ = ("digest", "directory", "name", "size")

    def __init__(self, directory: bytes, raw: bytes) -> None:
        self.directory, (self.name, _, self.size) = directory, plain_file(raw)
        self.digest = digest_of(raw).hex()

    def read(self, stored: Stored) -> Iterator[bytes]:
        """The content in chunks; raises `Corrupt` at its end if it is not what was captured."""
        digest, left = hashlib.sha256(), self.size
        where = shown(os.fsdecode(self.directory + b"/" + self.name if self.directory else self.name))
        try:
            with opened(os.fsdecode(self.name), READ, dir_fd=stored.enter(os.fsdecode(self.directory))) as reading:
                while left > 0:
                    piece = _read_full(reading, min(CHUNK, left))
                    digest.update(piece)
                    left -= len(piece)
                    if len(piece) < CHUNK and left > 0:
                        break
                    yield piece
        except OSError as error:
            raise Corrupt(f"{where} in the snapshot {stored.tree.name} cannot be read: {error.strerror}") from error
        if left or digest.hexdigest() != self.digest:
            hint = f"Repair it: 'holdfast verify {stored.tree.name} --repair'."
            raise Corrupt(f"{where} in the snapshot {stored.tree.name} is damaged", hint=hint, path=where)


def _read_full(reading: int, size: int) -> bytes:
    parts = []
    while size and (part := calls.read(reading, size)):
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def stored_files(manifest: Manifest) -> Iterator[StoredFile]:
    """Every file with content, one for each hash."""
    seen = set()
    for path, body in manifest.records():
        for raw in raw_entries(body).values():
            if raw[:1] == b"f" and size_of(raw) and (digest := digest_of(raw)) not in seen:
                seen.add(digest)
                yield StoredFile(path, raw)
