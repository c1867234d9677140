"""The second process that makes links: of files that did not change, in directories that did.

It reads orders from its standard input until that ends, then writes the numbers of those that it could not
carry out, and a mark that this is all. An order may say that nothing more will be put into the directory, and
which time it shall have.

    order  = u32 length of source, u32 length of path, u32 length of names, u8 whether there is a time,
             s64 time in ns, source, path, names; between names is a 0
    answer = u32 number*, u32 0xffffffff
"""

from __future__ import annotations

import os
import struct

from holdfast.fs import calls
from holdfast.fs.closing import close_quietly
from holdfast.fs.trees.way import DIRECTORY, Way

TYPE_CHECKING = False  # what checkers take for true

if TYPE_CHECKING:
    from collections.abc import Iterator

ORDER = struct.Struct("<III?q")
NUMBER = struct.Struct("<I")
END = 0xFFFFFFFF

_STDIN, _STDOUT = 0, 1
_CHUNK = 1 << 16
PROGRAM = (
    "import gc, sys; gc.disable(); sys.path.insert(0, sys.argv[1]);"
    " from holdfast.fs.trees.linking import serve; serve(sys.argv[2:])"
)


class Order:
    """Names of files in the directory `source` that the directory `path` of the payload shall have too.

    With `time`, this is the last that is put into it, and that is the time that it shall have.
    """

    __slots__ = ("names", "path", "source", "time")

    def __init__(self, source: str, path: str, names: list[str], time: int | None) -> None:
        self.source, self.path, self.names, self.time = source, path, names, time

    def encoded(self) -> bytes:
        """As it is sent."""
        parts = (os.fsencode(self.source), os.fsencode(self.path), os.fsencode("\0".join(self.names)))
        return ORDER.pack(*map(len, parts), self.time is not None, self.time or 0) + b"".join(parts)


def send(descriptor: int, content: bytes) -> None:
    """Write all of it to a pipe."""
    written = calls.write(descriptor, content)
    while written < len(content):
        written += calls.write(descriptor, memoryview(content)[written:])


def serve(arguments: list[str]) -> None:
    """What the second process does; it ends early if its parent does."""
    parent, payload = arguments
    failed: list[int] = []
    with Way(payload) as target:
        for number, order in enumerate(_orders()):
            if os.getppid() != int(parent):
                return
            try:
                _carry_out(order, target)
            except OSError:
                failed.append(number)
    send(_STDOUT, b"".join(NUMBER.pack(number) for number in [*failed, END]))


def _carry_out(order: Order, target: Way) -> None:
    link, into = calls.link, target.enter(order.path)
    here = calls.open(order.source, DIRECTORY)
    try:
        for name in order.names:
            link(name, name, src_dir_fd=here, dst_dir_fd=into, follow_symlinks=False)
    finally:
        close_quietly(here)
    if order.time is not None:
        calls.utime(into, ns=(order.time, order.time))


def _orders() -> Iterator[Order]:
    """The orders on the standard input, until it ends."""
    unread = b""
    while chunk := calls.read(_STDIN, _CHUNK):
        unread, at = unread + chunk, 0
        while len(unread) >= at + ORDER.size:
            *lengths, has_time, time = ORDER.unpack_from(unread, at)
            start = at + ORDER.size
            if len(unread) < start + sum(lengths):
                break
            parts = []
            for length in lengths:
                parts.append(os.fsdecode(unread[start : start + length]))
                start += length
            source, path, names = parts
            yield Order(source, path, names.split("\0") if names else [], time if has_time else None)
            at = start
        unread = unread[at:]
