"""The second process that makes links, seen from the first; what it does is in `linking`.

Of a file that did not change in a directory that did, a link is all the work there is, and the system does
it. A thread could not do it beside the one that looks at the next directories: both would wait for the
interpreter at every call. Whatever goes wrong, what is missing is made by who gave the orders: so nothing
depends on the process, and what the system refuses is met there. It ends with its parent.
"""

from __future__ import annotations

import os
import select
import struct
import sys

from holdfast.fs import calls
from holdfast.fs.trees.linking import END, NUMBER, PROGRAM, Order, send

TYPE_CHECKING = False

if TYPE_CHECKING:
    import subprocess

_PIPE = 1 << 20
_AT_ONCE = 48


class LinkingProcess:
    """The second process, seen from the first."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdin is not None
        self._process, self._pipe = process, process.stdin
        calls.enlarge_pipe(self._pipe.fileno(), _PIPE)
        self._given = 0
        self._broken = False
        self._unsent: list[bytes] = []

    @classmethod
    def start(cls, payload: str) -> LinkingProcess | None:
        """Start it; None where that cannot be, or where there is no second processor for it."""
        if sys.platform == "win32" or not sys.executable or (os.cpu_count() or 1) < 2:
            return None
        import subprocess

        packages = os.path.abspath(os.path.join(os.path.dirname(__file__), *[os.pardir] * 3))
        command = [sys.executable, "-I", "-S", "-c", PROGRAM, packages, str(os.getpid()), payload]
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
                send(self._pipe.fileno(), content)
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
