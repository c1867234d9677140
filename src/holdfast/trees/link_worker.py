"""The second process that makes links: of files that did not change, in directories that did.

It reads orders from its standard input until that ends, then writes the numbers of those that it could not
carry out, how many it got, and a mark that this is all; if the last order is torn, nothing. An order may say
that nothing more will be put into the directory, and which time it shall have.

    order  = u32 length of source, u32 length of path, u32 length of names, u8 whether there is a time,
             s64 time in ns, source, path, names; between names is a 0
    answer = u32 number*, u32 count of orders, u32 0xffffffff
"""

from __future__ import annotations

import os
import select
import struct

from holdfast.fs import calls
from holdfast.fs.directory import close_quietly, write_all
from holdfast.trees.scan import DIRECTORY, Walker
from holdfast.trees.worker_process import program_of, start

TYPE_CHECKING = False  # what checkers take for true; importing `typing` costs time

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Iterator


ORDER = struct.Struct("<III?q")
NUMBER = struct.Struct("<I")
END = 0xFFFFFFFF

_STDIN, _STDOUT = 0, 1
_CHUNK = 1 << 16
_PATIENCE = 1.0
_BETWEEN_LOOKS = 256


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


def serve(arguments: list[str]) -> None:
    """What the second process does; it ends early if its parent does."""
    parent, payload = int(arguments[0]), arguments[1]
    try:
        with Walker(payload) as target:
            numbers = _carry_out_all(target, parent)
    except _NobodyAsksError:
        return
    write_all(_STDOUT, b"".join(NUMBER.pack(number) for number in [*numbers, END]))


class _NobodyAsksError(Exception):
    """There is nobody who could use an answer."""


def _carry_out_all(target: Walker, parent: int) -> list[int]:
    """The numbers of the orders that failed, and how many there were."""
    failed: list[int] = []
    count = 0
    for order in _orders(parent):
        try:
            _carry_out(order, target, parent)
        except OSError:
            failed.append(count)
        count += 1
    return [*failed, count]


def _carry_out(order: Order, target: Walker, parent: int) -> None:
    link, into = calls.link, target.enter(order.path)
    here = calls.open(order.source, DIRECTORY)
    try:
        for number, name in enumerate(order.names):
            if number % _BETWEEN_LOOKS == 0:
                _end_with(parent)
            link(name, name, src_dir_fd=here, dst_dir_fd=into, follow_symlinks=False)
    finally:
        close_quietly(here)
    if order.time is not None:
        calls.utime(into, ns=(order.time, order.time))


def _end_with(parent: int) -> None:
    """Go no further if there is nobody any more for whom."""
    if os.getppid() != parent:
        raise _NobodyAsksError


def _orders(parent: int) -> Iterator[Order]:
    """The orders on the standard input, until it ends."""
    unread = b""
    while True:
        while not select.select((_STDIN,), (), (), _PATIENCE)[0]:  # a copy of our parent may keep it open
            _end_with(parent)
        chunk = calls.read(_STDIN, _CHUNK)
        if not chunk:
            break
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
    if unread:  # who gave it does not know how far it came
        raise _NobodyAsksError


PROGRAM = program_of("holdfast.trees.link_worker")
_AT_ONCE = 48


class LinkWorker:
    """The second process, seen from the first."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdin is not None
        self._process, self._pipe = process, process.stdin
        self._given = 0
        self._broken = False
        self._unsent: list[bytes] = []

    @classmethod
    def start(cls, payload: str) -> LinkWorker | None:
        """Start it; None where that cannot be, or where there is no second processor for it."""
        process = start(PROGRAM, [payload], is_told=True)
        return None if process is None else cls(process)

    def try_give(self, order: Order) -> bool:
        """Hand over an order, unless it has enough to do. Orders are numbered as they are given.

        They are sent some at a time: it is woken for each that it gets.
        """
        if len(self._unsent) >= _AT_ONCE:
            if not self._has_room():
                return False
            self._send()
        self._unsent.append(order.encoded())
        self._given += 1
        return True

    def _has_room(self) -> bool:
        try:
            return bool(select.select((), (self._pipe,), (), 0)[1])
        except ValueError:  # there are more open files than this call knows
            return False

    def _send(self) -> None:
        content = b"".join(self._unsent)
        self._unsent.clear()
        try:
            if not self._broken:
                write_all(self._pipe.fileno(), content)
        except OSError:  # it is gone, or some orders are: nobody knows which
            self._broken = True

    def failed(self) -> list[int]:
        """Wait until it is done; the numbers of the orders that are not carried out, or perhaps not."""
        self._send()
        try:
            answer, _ = self._process.communicate()
            *numbers, (count,), (end,) = NUMBER.iter_unpack(answer)
        except (OSError, ValueError, struct.error):
            end = count = 0
        if self._broken or end != END or count != self._given:  # it did not come to its end
            return list(range(self._given))
        return [number for (number,) in numbers]

    def kill(self) -> None:
        """End it, wherever it is."""
        self._process.kill()
        try:
            self._process.communicate()
        except (OSError, ValueError):
            self._process.wait()
