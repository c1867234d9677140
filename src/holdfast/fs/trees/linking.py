"""A second tree, or a plain directory, with the content of a snapshot's tree, without a second copy of it."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from holdfast.errors import Corrupt
from holdfast.fs import calls
from holdfast.fs.trees.attributes import meta_of_entry
from holdfast.fs.trees.descent import shown, unwritable
from holdfast.fs.trees.homes import Stored, write_homes
from holdfast.fs.trees.layout import MANIFEST, PAYLOAD, READY
from holdfast.fs.trees.manifest import (
    Manifest,
    ManifestEntry,
    decode_entry,
    directory_of,
    raw_entries,
    read_whole,
    write_all,
)
from holdfast.fs.trees.payload import Payload
from holdfast.fs.trees.placing import NewFile, place_file

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS)


def share_tree(tree: Path, new_tree: Path) -> None:
    """Make `new_tree`, which will stand beside `tree`, one with the same content: it notes where that is."""
    manifest = Manifest.read(tree)
    try:
        calls.mkdir(new_tree)
        calls.mkdir(new_tree / PAYLOAD)
        with Stored(tree) as stored:
            entered = (path for path, body in manifest.records() if directory_of(path, body).kind != "m")
            write_homes(new_tree, ((path, stored.home(path)) for path in entered))
        for name in (MANIFEST, READY):  # the mark last
            link_or_copy_file(tree / name, new_tree / name)
    except OSError as error:
        raise unwritable(os.fspath(new_tree), error) from error


def link_files(tree: Path, destination: Path) -> None:
    """Make `destination` a plain directory of all that is in the tree, to look at: its files are the tree's.

    By hard links; copies where there can be none. What is special is in the manifest alone.
    """
    manifest = Manifest.read(tree)
    with Stored(tree) as stored, Payload.begin(destination, kept=True) as payload:
        for path, body in manifest.records():
            if directory_of(path, body).kind != "m":
                _link_entries(stored, os.fsdecode(path), payload, body)
        for path, body in manifest.records():
            payload.finish_directory(os.fsdecode(path), body)


def _link_entries(stored: Stored, path: str, payload: Payload, body: bytes) -> None:
    into = payload.make(path)
    entries = [decode_entry(b"", raw) for raw in raw_entries(body).values()]
    for entry in entries:
        if entry.kind in "fl":
            with payload.changing(path, os.fsdecode(entry.name)):
                try:
                    _link_entry(stored, path, payload, into, entry)
                except FileNotFoundError:
                    where = stored.where(path, os.fsdecode(entry.name))
                    raise Corrupt(f"{shown(where)} is missing in the snapshot", path=shown(where)) from None


def _link_entry(stored: Stored, path: str, payload: Payload, into: int, entry: ManifestEntry) -> None:
    name = os.fsdecode(entry.name)
    if entry.kind == "l":
        calls.symlink(os.fsdecode(entry.target), name, dir_fd=into)
        payload.attributes.finish_other(into, name, meta_of_entry(entry), entry.xattrs)
        return
    here = stored.enter(path)
    try:
        calls.link(name, name, src_dir_fd=here, dst_dir_fd=into, follow_symlinks=False)
    except OSError as error:
        if error.errno in _FULL or isinstance(error, FileNotFoundError):
            raise
        place_file(here, into, NewFile(name, name, meta_of_entry(entry), entry.xattrs), payload.attributes)


def link_or_copy_file(source: Path, target: Path) -> None:
    """Give a file of a tree a second name in another one, or else copy it."""
    try:
        calls.link(source, target, follow_symlinks=False)
    except OSError as error:
        if error.errno in _FULL or isinstance(error, FileNotFoundError | FileExistsError):
            raise
        content = read_whole(os.fspath(source))
        descriptor = calls.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o444)
        try:
            write_all(descriptor, content)
        finally:
            calls.close(descriptor)
