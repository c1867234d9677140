"""A second tree with the content of another one, without a second copy of it."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from holdfast.errors import Failure
from holdfast.fs import calls, strictjson
from holdfast.fs.directory import write_all
from holdfast.fs.trees.descent import unwritable
from holdfast.fs.trees.homes import Stored, write_homes
from holdfast.fs.trees.layout import HOMES, MANIFEST, PAYLOAD, READY
from holdfast.fs.trees.manifest import (
    Manifest,
    directory_of,
    read_whole,
)

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
        link_or_copy_file(tree / MANIFEST, new_tree / MANIFEST)
        _mark(tree, new_tree)  # last
    except OSError as error:
        raise unwritable(os.fspath(new_tree), error) from error


def _mark(tree: Path, new_tree: Path) -> None:
    """The mark of completeness, which says that there is a list of homes. A damaged one stays what it is."""
    where = os.fspath(tree / READY)
    try:
        said = strictjson.decode(read_whole(where), source=where)
    except Failure:
        said = None
    if isinstance(said, dict):
        _write(new_tree / READY, strictjson.encode({**said, HOMES: True}) + b"\n")
    else:
        link_or_copy_file(tree / READY, new_tree / READY)


def link_or_copy_file(source: Path, target: Path) -> None:
    """Give a file of a tree a second name in another one, or else copy it."""
    try:
        calls.link(source, target, follow_symlinks=False)
    except OSError as error:
        if error.errno in _FULL or isinstance(error, FileNotFoundError | FileExistsError):
            raise
        _write(target, read_whole(os.fspath(source)))


def _write(target: Path, content: bytes) -> None:
    descriptor = calls.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o444)
    try:
        write_all(descriptor, content)
    finally:
        calls.close(descriptor)
