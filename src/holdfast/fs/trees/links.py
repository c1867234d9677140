"""Links from a payload to the files of the base: made at once, or, if there are many, by a second process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from holdfast.fs import calls
from holdfast.fs.trees.homes import Stored
from holdfast.fs.trees.linking import Order
from holdfast.fs.trees.linking_process import LinkingProcess

_WORTH_A_PROCESS = 32  # directories that did change
_FEW = 4


class Wanted(NamedTuple):
    """Files of one directory of the payload that shall be links to the base's; their entries, by name.

    With `time`, nothing more is put into it then, and that is all that it lacks.
    """

    path: str
    base_path: str
    files: dict[str, bytes]
    time: int | None


class Links:
    """Makes links, now or soon; what could not be linked is told in the end."""

    def __init__(self, base: Stored, payload: str) -> None:
        self._base, self._payload = base, payload
        self._count = 0
        self._process: LinkingProcess | None = None
        self._given: list[Wanted] = []
        self._failed: list[Wanted] = []

    def make(self, wanted: Wanted, target: int) -> bool:
        """Link files into the open directory `target` of the payload; whether that will get its time, too."""
        self._count += 1
        if self._count == _WORTH_A_PROCESS:
            self._process = LinkingProcess.start(self._payload)
        if self._process is not None and len(wanted.files) >= _FEW:
            source = self._base.where(wanted.base_path)
            if self._process.try_give(Order(source, wanted.path, [*wanted.files], wanted.time)):
                self._given.append(wanted)
                return wanted.time is not None
        link = calls.link
        try:
            here = self._base.enter(wanted.base_path)
            for name in wanted.files:
                link(name, name, src_dir_fd=here, dst_dir_fd=target, follow_symlinks=False)
        except OSError:
            self._failed.append(wanted)
        return False

    def missing(self) -> Iterator[Wanted]:
        """Wait until all is done that can be; what is not linked, or only in part."""
        if self._process is not None:
            self._failed += [self._given[number] for number in self._process.failed()]
            self._process = None  # not before: who is interrupted meanwhile ends it
        yield from self._failed

    def close(self) -> None:
        """End what is under way."""
        if self._process is not None:
            self._process.kill()


def is_there(directory: int, name: str) -> bool:
    """Whether there is something of this name in an open directory."""
    try:
        calls.stat(name, dir_fd=directory, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True
