"""Building a tree from its manifest and from chunks, as if it had been captured here.

Directories that another tree here has are shared with it. `.READY` comes last: without it, the tree is not complete.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from holdfast.errors import Corrupt
from holdfast.fs import calls, strictjson
from holdfast.fs.directory import Directory, write_all
from holdfast.trees.chunks import CHUNK, ChunkSource, is_large, small_files
from holdfast.trees.manifest import (
    HOMES,
    MANIFEST,
    PAYLOAD,
    READY,
    Manifest,
    ManifestEntry,
    decode_entry,
    directory_of,
    mtime_of_directory,
    raw_entries,
)
from holdfast.trees.payload import Payload
from holdfast.trees.shared_dirs import SharedDirectory, Stored, write_file, write_shared_directories
from holdfast.trees.walker import NO_LINK, joined, shown, split, writing

_BATCH_FILES = 256


class _File(NamedTuple):
    directory: str
    entry: ManifestEntry


def rebuild(
    tree: Path, manifest: bytes, fields: Mapping[str, object], source: ChunkSource, *, base: Path | None
) -> None:
    """Create a tree with the content of a manifest. `fields` are those of its `.READY`. Not synced."""
    found = Manifest(manifest, where=f"the manifest of the snapshot {tree.name}")
    with writing(tree), Directory.open(tree.parent) as parent:
        parent.make(tree.name, mode=0o700, durable=False)
    with ExitStack() as stack:
        payload = stack.enter_context(Payload(tree / PAYLOAD))
        shared = {} if base is None else dict(_shared(found, stack.enter_context(Stored(base)), Manifest.read(base)))
        own = [(path, body) for path, body in found.records() if path not in shared and _is_entered(path, body)]
        source.expect(small_files(own))
        work = _Rebuild(payload, source)
        for batch in _batches(work.unwritten(own)):
            work.write(batch)
        work.link()
        for path, body in found.records():
            if not _is_entered(path, body):
                payload.make(os.fsdecode(path))  # a mount point
            elif path not in shared:
                payload.finish_directory(os.fsdecode(path), body)
            elif payload.has(os.fsdecode(path)):
                payload.finish_parent(os.fsdecode(path), body)
    with writing(tree):
        write_shared_directories(tree, shared.items())
        write_file(tree / MANIFEST, manifest)
        write_file(tree / READY, strictjson.encode({**fields, HOMES: bool(shared)}) + b"\n")


def _is_entered(path: bytes, body: bytes) -> bool:
    return directory_of(path, body).kind == "d"


def _shared(manifest: Manifest, stored: Stored, base: Manifest) -> Iterator[tuple[bytes, SharedDirectory]]:
    """The directories that the base has unchanged, except for the top, which every tree has."""
    for path, body in manifest.records():
        if path and base.body(path) == body and _is_entered(path, body):
            try:
                is_sound = stored.status(path).st_mtime_ns == mtime_of_directory(body)
            except OSError:
                continue
            if is_sound:
                yield path, stored.location(path)


def _batches(files: Iterator[_File]) -> Iterator[list[_File]]:
    batch: list[_File] = []
    size = 0
    for each in files:
        if batch and (len(batch) >= _BATCH_FILES or size + each.entry.size > CHUNK):
            yield batch
            batch, size = [], 0
        batch.append(each)
        size += each.entry.size
    if batch:
        yield batch


class _Rebuild:
    def __init__(self, payload: Payload, source: ChunkSource) -> None:
        self._payload, self._source = payload, source
        self._names: set[bytes] = set()
        self._links: list[_File] = []

    def unwritten(self, records: list[tuple[bytes, bytes]]) -> Iterator[_File]:
        """Create the directories and symbolic links, and yield the files. Special files were never stored."""
        for path, body in records:
            directory = os.fsdecode(path)
            here = self._payload.make(directory)
            for entry in (decode_entry(path, raw) for raw in raw_entries(body).values()):
                if entry.kind == "l":
                    name = os.fsdecode(entry.name)
                    with self._payload.changing(directory, name):
                        calls.symlink(os.fsdecode(entry.target), name, dir_fd=here)
                        self._payload.attributes.finish_other(here, name, entry.meta, entry.xattrs)
                elif entry.kind == "f" and entry.first_link:
                    self._links.append(_File(directory, entry))
                elif entry.kind == "f":
                    yield _File(directory, entry)
                    here = self._payload.enter(directory)  # writing the batch has entered others

    def write(self, batch: list[_File]) -> None:
        small = (entry for _, entry in batch if entry.size and not is_large(entry.size))
        found = self._source.chunks({entry.sha256 for entry in small})
        for file in batch:
            entry = file.entry
            if not is_large(entry.size):
                self._create(file, iter([found[entry.sha256]] if entry.size else []))
                continue
            pieces = self._source.pieces(entry.sha256)
            self._create(file, (self._source.chunks([each])[each] for each in pieces))

    def link(self) -> None:
        """Give files their other names, where the first one is in this tree; otherwise, copy them."""
        for file in self._links:
            name, first = os.fsdecode(file.entry.name), file.entry.first_link
            if first not in self._names or not self._linked(file.directory, name, os.fsdecode(first)):
                self.write([file])

    def _linked(self, directory: str, name: str, first: str) -> bool:
        above, first_name = split(first)
        try:
            source = self._payload.first_links().enter(above)
            calls.link(first_name, name, src_dir_fd=source, dst_dir_fd=self._payload.enter(directory))
        except OSError as error:
            if error.errno in NO_LINK:
                return False
            raise
        return True

    def _create(self, file: _File, pieces: Iterator[bytes]) -> None:
        entry, name, payload = file.entry, os.fsdecode(file.entry.name), self._payload
        digest = hashlib.sha256()
        with payload.changing(file.directory, name):
            descriptor = payload.attributes.create(payload.enter(file.directory), name, entry.mode)
            try:
                for piece in pieces:
                    digest.update(piece)
                    write_all(descriptor, piece)
                payload.attributes.finish_file(descriptor, entry.meta, entry.xattrs)
            finally:
                calls.close(descriptor)
        if digest.hexdigest() != entry.sha256:
            where = shown(joined(file.directory, name))
            raise Corrupt(f"the content store has other content for {where}", path=where)
        self._names.add(entry.path)
