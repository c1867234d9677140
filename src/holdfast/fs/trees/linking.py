"""Hard links to the files of another snapshot, for directories that are known to be the same there."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import Self

from holdfast.fs import calls
from holdfast.fs.trees.attributes import meta_of_entry
from holdfast.fs.trees.descent import Descent, split, unreadable, unwritable
from holdfast.fs.trees.files import Base, Files, Known, Place
from holdfast.fs.trees.intake import Taken
from holdfast.fs.trees.layout import MANIFEST, PAYLOAD, READY
from holdfast.fs.trees.linking_process import LinkingProcess, Order, link_directory
from holdfast.fs.trees.manifest import (
    Manifest,
    ManifestEntry,
    decode_entry,
    head_of,
    raw_entries,
    read_whole,
    write_all,
)
from holdfast.fs.trees.payload import Payload
from holdfast.fs.trees.placing import NewFile, place_file
from holdfast.fs.trees.scan import HEAD

NOTHING_KNOWN = Known({}, {}, {}, "")
_WORTH_A_PROCESS = 1 << 20  # bytes of the base's manifest: from some 10 000 files on
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS)


class Linker:
    """Fills directories of a payload that are the same in the base; with a second process if they are many.

    The system does most of that work, so that the next directories can be looked at meanwhile.
    """

    def __init__(self, base: Base, payload: Payload, files: Files, source: str) -> None:
        self._files, self._source = files, source
        self._base = Descent(base.payload.root)
        try:
            self._payload = payload.again()
        except BaseException:
            self._base.close()
            raise
        self._worth_a_process = base.manifest.size >= _WORTH_A_PROCESS
        self._process: LinkingProcess | None = None
        self._given: list[Taken] = []

    def link(self, taken: Taken) -> None:
        """Link all that is in a directory, now or soon."""
        assert taken.link_from is not None
        order = Order(taken.path, taken.link_from, names_in(taken.identity), head_of(taken.body))
        if self._worth_a_process:
            self._worth_a_process = False
            self._process = LinkingProcess.start(self._base, self._payload)
        if self._process is not None and self._process.try_give(order):
            self._given.append(taken)
            return
        try:
            link_directory(order, self._base, self._payload)
        except OSError:
            self._link_what_is_missing(taken, taken.link_from)

    def finish(self) -> None:
        """Wait until all is linked; raise what went wrong."""
        process, self._process = self._process, None
        if process is not None:
            for number in process.failed():
                taken = self._given[number]
                assert taken.link_from is not None
                self._link_what_is_missing(taken, taken.link_from)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.kill()
        self._payload.close()
        self._base.close()

    def _link_what_is_missing(self, taken: Taken, link_from: str) -> None:
        """Go through a directory entry by entry after a link failed: what cannot be linked is copied."""
        for raw in raw_entries(taken.body).values():
            entry = decode_entry(b"", raw)
            if not link_or_copy(self._base, link_from, self._payload, taken.path, entry):
                self._copy_again(taken, os.fsdecode(entry.name), raw)
        self._payload.finish_directory(taken.path, taken.body)

    def _copy_again(self, taken: Taken, name: str, raw: bytes) -> None:
        with Descent(self._source) as way:
            try:
                here = way.enter(taken.path)
            except OSError as error:
                raise unreadable(way.where(taken.path), error) from error
            target = self._payload.enter(taken.path)
            self._files.copy_again(Place(taken.path, here, target, NOTHING_KNOWN), name, raw)


def link_or_copy(base: Descent, base_path: str, payload: Payload, path: str, entry: ManifestEntry) -> bool:
    """Put an entry into the payload by a link, or else as a copy; False if the base does not have it.

    What is special is in the manifest alone.
    """
    name = os.fsdecode(entry.name)
    target = payload.enter(path)
    try:
        if entry.kind not in "fl" or _is_there(target, name):
            return True
        if entry.kind == "l":
            calls.symlink(os.fsdecode(entry.target), name, dir_fd=target)
            payload.attributes.finish_other(target, name, meta_of_entry(entry), entry.xattrs)
            return True
        here = base.enter(base_path)
        if not _is_like(here, name, entry):
            return False
        try:
            calls.link(name, name, src_dir_fd=here, dst_dir_fd=target, follow_symlinks=False)
        except OSError as error:
            if error.errno in _FULL:
                raise
            place_file(
                here, target, NewFile(name, name, meta_of_entry(entry), entry.xattrs), payload.attributes
            )
    except FileNotFoundError:
        return False
    except OSError as error:
        raise unwritable(payload.way.where(path, name), error) from error
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


def link_tree(tree: Path, new_tree: Path) -> None:
    """Make `new_tree` a second tree with the same content, by hard links; copies where there can be none."""
    manifest = Manifest.read(tree)
    try:
        calls.mkdir(new_tree)
        with Descent(tree / PAYLOAD) as base, Payload.make(new_tree / PAYLOAD, kept=True) as payload:
            for path in manifest.paths():  # 1. all directories
                parent, name = split(os.fsdecode(path))
                if name:
                    payload.make_directories(parent, [name])
            for path, body in manifest.records():  # 2. what is in them
                _link_entries(base, os.fsdecode(path), payload, body)
        for name in (MANIFEST, READY):  # 3. the mark last
            link_or_copy_file(tree / name, new_tree / name)
    except OSError as error:
        raise unwritable(os.fspath(new_tree), error) from error


def _link_entries(base: Descent, path: str, payload: Payload, body: bytes) -> None:
    for raw in raw_entries(body).values():
        entry = decode_entry(b"", raw)
        if not link_or_copy(base, path, payload, path, entry):
            missing = base.where(path, os.fsdecode(entry.name))
            raise unreadable(missing, FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT)))
    payload.finish_directory(path, body)


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


def names_in(identity: bytes) -> list[str]:
    """The names of all that is no directory."""
    *_, count, length, _ = HEAD.unpack_from(identity)
    return os.fsdecode(identity[HEAD.size : HEAD.size + length]).split("\0") if count else []
