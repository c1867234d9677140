"""Making a file like another one: its content shared or copied, and all that it has."""

from __future__ import annotations

import stat
from typing import NamedTuple

from holdfast.fs import calls
from holdfast.fs.directory import close_quietly
from holdfast.fs.trees.attributes import Attributes
from holdfast.fs.trees.content import READ, clone_file
from holdfast.fs.trees.copying import copy_file
from holdfast.fs.trees.manifest import Meta, Xattrs


class NewFile(NamedTuple):
    """A file to be made like another: what it is called there and here, and what it is given."""

    like: str
    name: str
    meta: Meta
    xattrs: Xattrs = ()


def place_file(source: int, target: int, new: NewFile, attributes: Attributes) -> tuple[int, list[str]]:
    """Make an independent file in the directory `target` with the content of one in the directory `source`.

    Returns its size as found, and what could not be given to it.
    """
    like, name, meta, xattrs = new
    reading = calls.open(like, READ, dir_fd=source)
    try:
        status = calls.fstat(reading)
        if not stat.S_ISREG(status.st_mode):
            raise IsADirectoryError(like)
        writing = attributes.create(target, name, meta.mode)
        try:
            size = status.st_size
            if not clone_file(reading, writing, size):
                size = copy_file(reading, status, writing, hashed=False).size
            lost = attributes.finish_file(writing, meta, xattrs)
        finally:
            calls.close(writing)
    finally:
        close_quietly(reading)
    return size, lost
