"""Linking whole directories in a second process, while the first one looks at the next directories.

Of a file that did not change a link is all the work there is, and the system does it. A thread cannot do it
beside the one that looks: both would wait for the interpreter at every call, for longer than the calls take.

The process reads orders from its standard input until that ends, then writes the numbers of the directories
that it could not fill, and a mark that this is all. Whatever goes wrong, those are filled again by who gave
the orders, entry by entry: so nothing depends on the process, and what the system refuses is met there.
It ends after the directory it is at when the process that started it is gone.

    order  = u32 length of path, u32 length of link_from, u32 length of names, u32 length of head, these four
    answer = u32 number*, u32 0xffffffff
"""

from __future__ import annotations

import os
import select
import struct
import sys
from collections.abc import Iterator
from typing import NamedTuple

from holdfast.errors import Failure
from holdfast.fs import calls
from holdfast.fs.trees.descent import Descent
from holdfast.fs.trees.manifest import write_all
from holdfast.fs.trees.payload import Payload

TYPE_CHECKING = False

if TYPE_CHECKING:
    import subprocess

_ORDER = struct.Struct("<IIII")
_NUMBER = struct.Struct("<I")
_END = 0xFFFFFFFF
_STATUS_FIELDS = 10
_STDIN, _STDOUT = 0, 1
_CHUNK = 1 << 16
_PROGRAM = (
    "import sys; sys.path.insert(0, sys.argv[1]);"
    " from holdfast.fs.trees.linking_process import serve; serve(sys.argv[2:])"
)


class Order(NamedTuple):
    """A directory of the payload to fill with links to all the names in `link_from`, a directory of the base.

    `head` is how the body of its record begins, with what the directory itself is to be given.
    """

    path: str
    link_from: str
    names: list[str]
    head: bytes


def link_directory(order: Order, base: Descent, payload: Payload) -> None:
    """Fill a directory that is empty but for directories, and complete it."""
    link, names = calls.link, order.names
    target = payload.enter(order.path)
    here = base.enter(order.link_from)
    for name in names:
        link(name, name, src_dir_fd=here, dst_dir_fd=target, follow_symlinks=False)
    payload.finish_directory(order.path, order.head)


class LinkingProcess:
    """The second process, seen from the first."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self._given = 0

    @classmethod
    def start(cls, base: Descent, payload: Payload) -> LinkingProcess | None:
        """Start it; None where that cannot be, or where there is no second processor for it."""
        if not sys.executable or (os.cpu_count() or 1) < 2:
            return None
        import subprocess

        packages = os.path.abspath(os.path.join(os.path.dirname(__file__), *[os.pardir] * 3))
        status = ",".join(str(int(field)) for field in tuple(payload.made_as)[:_STATUS_FIELDS])
        command = [sys.executable, "-I", "-S", "-c", _PROGRAM, packages, str(os.getpid())]
        try:
            process = subprocess.Popen(
                [*command, base.root, payload.way.root, status],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                process_group=0,  # an interruption from the terminal is for the first process to deal with
            )
        except OSError:
            return None
        return cls(process)

    def try_give(self, order: Order) -> bool:
        """Hand over an order, unless it has enough to do. Orders are numbered as they are given."""
        pipe = self._process.stdin
        assert pipe is not None
        if not select.select((), (pipe,), (), 0)[1]:
            return False
        parts = (os.fsencode(order.path), os.fsencode(order.link_from), _joined(order.names), order.head)
        try:
            write_all(pipe.fileno(), _ORDER.pack(*map(len, parts)) + b"".join(parts))
        except OSError:  # it is gone: then there will be no answer to any order
            return False
        self._given += 1
        return True

    def failed(self) -> list[int]:
        """Wait until it is done; the numbers of the directories that are not filled."""
        try:
            answer, _ = self._process.communicate()
            *numbers, (end,) = _NUMBER.iter_unpack(answer)
        except (OSError, ValueError, struct.error):
            end = 0
        if end != _END:  # it did not come to its end
            return list(range(self._given))
        return [number for (number,) in numbers]

    def kill(self) -> None:
        """End it, wherever it is."""
        self._process.kill()
        try:
            self._process.communicate()
        except (OSError, ValueError):
            self._process.wait()


# --- In the second process --------------------------------------------------------------------------


def serve(arguments: list[str]) -> None:
    """What the second process does."""
    parent, base, payload, status = arguments
    made_as = os.stat_result([int(field) for field in status.split(",")])
    failed: list[int] = []
    with Descent(base) as source, Payload(Descent(payload), made_as, kept=True) as target:
        for number, order in enumerate(_orders()):
            if os.getppid() != int(parent):
                return
            try:
                link_directory(order, source, target)
            except (OSError, Failure):
                failed.append(number)
    write_all(_STDOUT, b"".join(_NUMBER.pack(number) for number in [*failed, _END]))


def _orders() -> Iterator[Order]:
    """The orders on the standard input, until it ends."""
    unread = b""
    while chunk := calls.read(_STDIN, _CHUNK):
        unread, at = unread + chunk, 0
        while len(unread) >= at + _ORDER.size:
            lengths = _ORDER.unpack_from(unread, at)
            start = at + _ORDER.size
            if len(unread) < start + sum(lengths):
                break
            parts = []
            for length in lengths:
                parts.append(unread[start : start + length])
                start += length
            path, link_from, names, head = parts
            yield Order(os.fsdecode(path), os.fsdecode(link_from), _split(names), head)
            at = start
        unread = unread[at:]


def _joined(names: list[str]) -> bytes:
    return os.fsencode("\0".join(names))


def _split(names: bytes) -> list[str]:
    return os.fsdecode(names).split("\0") if names else []
