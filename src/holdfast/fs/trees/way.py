"""The way to the directories below one root, step by step, never through a symbolic link.

Paths inside of a tree are relative, with `/` between their parts, and as text: what a name's bytes
cannot say in the file system's encoding is kept by surrogates, as Python does everywhere.

Processes that live for some hundredths of a second begin with this module: it loads little.
"""

from __future__ import annotations

import os

from holdfast.fs import calls
from holdfast.fs.directory import Closing, close_quietly

TYPE_CHECKING = False  # what checkers take for true


NOFOLLOW: int = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)
DIRECTORY: int = os.O_RDONLY | getattr(os, "O_DIRECTORY", 0) | NOFOLLOW
_KEPT = 64
_DEEP = 4096
_CLOSED = -1


class Way(Closing):
    """Opens directories below a root; each stays open while the way leads through it.

    Each step refuses a symbolic link, whatever happens to the tree meanwhile. Only some descriptors of
    a very long way are kept, so that the depth is not limited by their number, nor by that of a path.
    """

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = os.fspath(root)
        self._names: list[str] = []
        self._path: str | None = ""
        self._open = [self._open_top(self.root)]

    @staticmethod
    def _open_top(root: str) -> int:
        return open_top(root)

    def enter(self, path: str) -> int:
        """The descriptor of the directory at `path` ("" is the root), good until the next call.

        Raises the system's own error if there is no such directory.
        """
        if path == self._path:
            return self._open[-1]
        common, rest = self._shared_with(path)
        self._leave(common)
        self._path = None  # until it is reached
        level = common
        while self._open[level] == _CLOSED:
            level -= 1
        for depth, name in enumerate([*self._names[level:], *rest], level):
            self._step(depth, name)
        self._path = path
        return self._open[-1]

    def _shared_with(self, path: str) -> tuple[int, list[str]]:
        """How many steps of the way are also the way to `path`, and the names of its other steps.

        Most ways lead on from where we are, or from one step back: so those are not taken apart.
        """
        here = self._path or ""
        if here and path.startswith(here) and path[len(here)] == "/":
            return len(self._names), path[len(here) + 1 :].split("/")
        back = here.rpartition("/")[0]
        if here and path.startswith(back) and (not back or path[len(back) : len(back) + 1] == "/"):
            rest = path[len(back) + 1 :] if back else path
            return len(self._names) - 1, rest.split("/") if rest else []
        names = path.split("/") if path else []
        common = _common(self._names, names)
        return common, names[common:]

    def _step(self, depth: int, name: str) -> None:
        found = calls.open(name, DIRECTORY, dir_fd=self._open[depth])
        if depth + 1 < len(self._open):
            self._open[depth + 1] = found
        else:
            self._open.append(found)
            self._names.append(name)
        if depth >= _KEPT and depth % (_KEPT if depth < _DEEP else _DEEP):
            close_quietly(self._open[depth])
            self._open[depth] = _CLOSED

    def _leave(self, level: int) -> None:
        for each in self._open[level + 1 :]:
            if each != _CLOSED:
                close_quietly(each)
        del self._open[level + 1 :], self._names[level:]

    def top(self) -> int:
        """The descriptor of the root, good until the way is closed."""
        return self._open[0]

    def where(self, path: str, name: str = "") -> str:
        """A path in the tree, for messages."""
        return "/".join(filter(None, (self.root, path, name)))

    def close(self) -> None:
        """Let go of all descriptors."""
        self._leave(0)
        self._path = None
        if self._open[0] != _CLOSED:
            close_quietly(self._open[0])
            self._open[0] = _CLOSED


def open_top(path: str) -> int:
    """Open a directory that a caller named; links on the way are the caller's own choice."""
    return calls.open(path, DIRECTORY & ~getattr(os, "O_NOFOLLOW", 0))


def joined(path: str, name: str) -> str:
    """The path of `name` in the directory `path` of a tree."""
    return f"{path}/{name}" if path else name


def _common(one: list[str], other: list[str]) -> int:
    count = 0
    for mine, yours in zip(one, other, strict=False):
        if mine != yours:
            break
        count += 1
    return count
