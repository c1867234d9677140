"""Hard links to the files of another snapshot, for directories that are known to be the same there."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterable
from pathlib import Path

from holdfast.fs import calls
from holdfast.fs.trees.attributes import Attributes, meta_of_entry, place_file
from holdfast.fs.trees.descent import Descent, joined, split, unreadable, unwritable
from holdfast.fs.trees.intake import Intake, Taken
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
from holdfast.fs.trees.scan import HEAD

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS)


def link_unchanged(taken: Iterable[Taken], intake: Intake) -> None:
    """Fill the directories of the payload that were left for linking."""
    assert intake.payload is not None
    assert intake.attributes is not None
    with Descent(intake.payload.root) as payload:
        for each in taken:
            if each.link_from is not None and intake.base is not None:
                _link_directory(intake.base.payload, payload, each, intake)
            elif not each.identity:  # a mount point
                _finish(payload, each.path, each.body, intake.attributes)


def _link_directory(base: Descent, payload: Descent, taken: Taken, intake: Intake) -> None:
    """Link all that is in a directory of the base, and complete the directory."""
    assert intake.attributes is not None
    assert taken.link_from is not None
    link = calls.link
    try:
        target = payload.enter(taken.path)
        here = base.enter(taken.link_from)
        for name in names_in(taken.identity):
            link(name, name, src_dir_fd=here, dst_dir_fd=target, follow_symlinks=False)
    except OSError:
        _link_what_is_missing(base, payload, taken, intake)
    _finish(payload, taken.path, taken.body, intake.attributes)


def _link_what_is_missing(base: Descent, payload: Descent, taken: Taken, intake: Intake) -> None:
    """Go through a directory entry by entry after a link failed: what cannot be linked is copied."""
    assert intake.attributes is not None
    assert taken.link_from is not None
    for raw in raw_entries(taken.body).values():
        entry = decode_entry(b"", raw)
        if not link_or_copy(base, taken.link_from, payload, taken.path, entry, intake.attributes):
            intake.copy_again(payload.enter(taken.path), taken.path, os.fsdecode(entry.name), raw)


def link_or_copy(
    base: Descent, base_path: str, payload: Descent, path: str, entry: ManifestEntry, attributes: Attributes
) -> bool:
    """Put an entry into the payload by a link, or else as a copy; False if the base does not have it."""
    name = os.fsdecode(entry.name)
    try:
        target = payload.enter(path)
        if entry.kind not in "fl" or _is_there(target, name):
            return True
        if entry.kind == "l":
            calls.symlink(os.fsdecode(entry.target), name, dir_fd=target)
            attributes.finish_other(target, name, meta_of_entry(entry), entry.xattrs)
            return True
        here = base.enter(base_path)
        if not _is_like(here, name, entry):
            return False
        try:
            calls.link(name, name, src_dir_fd=here, dst_dir_fd=target, follow_symlinks=False)
        except OSError as error:
            if error.errno in _FULL:
                raise
            place_file(here, entry, target, name, attributes)
    except FileNotFoundError:
        return False
    except OSError as error:
        raise unwritable(payload.where(path, name), error) from error
    return True


def _is_there(directory: int, name: str) -> bool:
    try:
        calls.stat(name, dir_fd=directory, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True


def _is_like(directory: int, name: str, entry: ManifestEntry) -> bool:
    status = calls.stat(name, dir_fd=directory, follow_symlinks=False)
    return stat.S_ISREG(status.st_mode) and status.st_size == entry.size


def _finish(payload: Descent, path: str, body: bytes, attributes: Attributes) -> None:
    entry = directory_of(b"", body)
    try:
        attributes.finish_directory(payload.enter(path), meta_of_entry(entry), entry.xattrs)
    except OSError as error:
        raise unwritable(payload.where(path), error) from error


def link_tree(tree: Path, new_tree: Path) -> None:
    """Make `new_tree` a second tree with the same content, by hard links; copies where there can be none."""
    manifest = Manifest.read(tree)
    try:
        calls.mkdir(new_tree)
        calls.mkdir(new_tree / PAYLOAD)
        with Descent(tree / PAYLOAD) as base, Descent(new_tree / PAYLOAD) as payload:
            for path in manifest.paths():  # 1. all directories
                parent, name = split(os.fsdecode(path))
                if name:
                    calls.mkdir(name, dir_fd=payload.enter(parent))
            _link_all(manifest, base, payload)  # 2. all files, and nothing more is put into a directory
        for name in (MANIFEST, READY):  # 3. the mark last
            _link_or_copy_file(tree / name, new_tree / name)
    except OSError as error:
        raise unwritable(os.fspath(new_tree), error) from error


def _link_all(manifest: Manifest, base: Descent, payload: Descent) -> None:
    attributes = Attributes(calls.fstat(payload.enter("")), kept=True)
    for encoded, body in manifest.records():
        path = os.fsdecode(encoded)
        for raw in raw_entries(body).values():
            entry = decode_entry(b"", raw)
            if not link_or_copy(base, path, payload, path, entry, attributes):
                missing = base.where(joined(path, os.fsdecode(entry.name)))
                raise unreadable(missing, FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT)))
        _finish(payload, path, body, attributes)


def _link_or_copy_file(source: Path, target: Path) -> None:
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


def names_in(identity: bytes) -> list[str]:
    """The names of all that is no directory."""
    *_, count, length, _ = HEAD.unpack_from(identity)
    return os.fsdecode(identity[HEAD.size : HEAD.size + length]).split("\0") if count else []
