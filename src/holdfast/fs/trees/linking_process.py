"""Links of the files that did not change in directories that did, made by a second process.

Of such a file a link is all the work there is, and the system does it. A thread could not do it beside the
one that looks at the next directories: both would wait for the interpreter at every call.

The process reads orders from its standard input until that ends, then writes the numbers of those that it
could not carry out, and a mark that this is all. Whatever goes wrong, what is missing is made by who gave the
orders: so nothing depends on the process, and what the system refuses is met there. It ends with its parent.

    order  = u32 length of source, u32 length of path, u32 length of names, these three; between names is a 0
    answer = u32 number*, u32 0xffffffff
"""

from __future__ import annotations

import os
import select
import signal
import struct
import sys
from collections.abc import Iterator
from contextlib import suppress
from typing import NamedTuple

from holdfast.errors import Failure
from holdfast.fs import calls
from holdfast.fs.directory import close_quietly
from holdfast.fs.trees.descent import DIRECTORY, Descent

TYPE_CHECKING = False

if TYPE_CHECKING:
    import subprocess

_ORDER = struct.Struct("<III")
_NUMBER = struct.Struct("<I")
_END = 0xFFFFFFFF
_STDIN, _STDOUT = 0, 1
_CHUNK = 1 << 16
_PIPE = 1 << 20
_AT_ONCE = 48
_PROGRAM = (
    "import gc, sys; gc.disable(); sys.path.insert(0, sys.argv[1]);"
    " from holdfast.fs.trees.linking_process import serve; serve(sys.argv[2:])"
)


class Order(NamedTuple):
    """Names of files in the directory `source` that the directory `path` of the payload shall have too."""

    source: str
    path: str
    names: list[str]


class LinkingProcess:
    """The second process, seen from the first."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdin is not None
        self._process, self._pipe = process, process.stdin
        calls.enlarge_pipe(self._pipe.fileno(), _PIPE)
        self._given = 0
        self._unsent: list[bytes] = []

    @classmethod
    def start(cls, payload: str) -> LinkingProcess | None:
        """Start it; None where that cannot be, or where there is no second processor for it."""
        if not sys.executable or (os.cpu_count() or 1) < 2:
            return None
        import subprocess

        packages = os.path.abspath(os.path.join(os.path.dirname(__file__), *[os.pardir] * 3))
        command = [sys.executable, "-I", "-S", "-c", _PROGRAM, packages, str(os.getpid()), payload]
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                bufsize=0,
                process_group=0,  # an interruption from the terminal is for the first process to deal with
            )
        except OSError:
            return None
        return cls(process)

    def try_give(self, order: Order) -> bool:
        """Hand over an order, unless it has enough to do. Orders are numbered as they are given.

        They are sent some at a time: it is woken for each that it gets.
        """
        if len(self._unsent) >= _AT_ONCE:
            if not select.select((), (self._pipe,), (), 0)[1]:
                return False
            self._send()
        parts = (os.fsencode(order.source), os.fsencode(order.path), os.fsencode("\0".join(order.names)))
        self._unsent.append(_ORDER.pack(*map(len, parts)) + b"".join(parts))
        self._given += 1
        return True

    def _send(self) -> None:
        content = b"".join(self._unsent)
        self._unsent.clear()
        with suppress(OSError):  # it is gone: then there will be no answer to any order
            _write(self._pipe.fileno(), content)

    def failed(self) -> list[int]:
        """Wait until it is done; the numbers of the orders that are not carried out, or perhaps not."""
        self._send()
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


def _write(descriptor: int, content: bytes) -> None:
    written = calls.write(descriptor, content)
    while written < len(content):
        written += calls.write(descriptor, memoryview(content)[written:])


# --- In the second process --------------------------------------------------------------------------


def serve(arguments: list[str]) -> None:
    """What the second process does."""
    parent, payload = arguments
    if sys.platform == "linux":
        from holdfast.fs import native

        native.die_with_parent(signal.SIGKILL)
    failed: list[int] = []
    with Descent(payload) as target:
        for number, order in enumerate(_orders()):
            if os.getppid() != int(parent):
                return
            try:
                _carry_out(order, target)
            except (OSError, Failure):
                failed.append(number)
    _write(_STDOUT, b"".join(_NUMBER.pack(number) for number in [*failed, _END]))


def _carry_out(order: Order, target: Descent) -> None:
    link, into = calls.link, target.enter(order.path)
    here = calls.open(order.source, DIRECTORY)
    try:
        for name in order.names:
            link(name, name, src_dir_fd=here, dst_dir_fd=into, follow_symlinks=False)
    finally:
        close_quietly(here)


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
                parts.append(os.fsdecode(unread[start : start + length]))
                start += length
            source, path, names = parts
            yield Order(source, path, names.split("\0"))
            at = start
        unread = unread[at:]
